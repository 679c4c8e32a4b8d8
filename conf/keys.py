"""The keys of a program: every field of its dataclasses, with the comment beside it, and the `--help` made of them."""

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

# group -> its files: what NAME can be in group=NAME
GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
    for folder in sorted(Path(__file__).parent.iterdir())
    if folder.is_dir() and not folder.name.startswith("_")
}


def known_keys(schema: type) -> dict[str, type]:
    """Every dotted key of a dataclass of dataclasses, with its type."""
    keys: dict[str, type] = {}
    hints = get_type_hints(schema)
    for field in fields(schema):
        hint = hints[field.name]
        keys[field.name] = hint
        if is_dataclass(hint):
            keys |= {f"{field.name}.{key}": nested for key, nested in known_keys(hint).items()}
    return keys


def comments(schema: type) -> dict[str, str]:
    """The comment at the end of each field's line, by dotted key."""
    found = {}
    for owner in reversed([cls for cls in schema.__mro__ if is_dataclass(cls)]):
        lines = re.findall(r"^    (\w+): [^#\n]*#[ ]?(.*)$", inspect.getsource(owner), flags=re.M)
        found |= dict(lines)
    hints = get_type_hints(schema)
    for name in (field.name for field in fields(schema) if is_dataclass(hints[field.name])):
        found |= {f"{name}.{key}": text for key, text in comments(hints[name]).items()}
    return found


def help_page(docstring: str | None, config: str, schema: type, overrides: list[str]) -> str:
    """The program's docstring, the groups, and every key as it stands: those that `schema` itself adds first."""
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose(config, overrides=overrides)
    hints, said = known_keys(schema), comments(schema)
    own = schema.__annotations__
    lines = []
    for key in sorted(hints, key=lambda key: key.partition(".")[0] not in own):
        if not is_dataclass(hints[key]):
            shown = f"{key}={_typed(OmegaConf.select(cfg, key))}"
            lines.append(f"  {shown:<46} {said.get(key, '')}".rstrip())
    page = [(docstring or "").strip(), ""]
    if config == "config":
        page += ["== What can be chosen (group=name) ==", *(f"  {g}: {', '.join(n)}" for g, n in GROUPS.items()), ""]
    return "\n".join([*page, "== The configuration as it stands (key=value changes it) ==", *lines])


def _typed(value: Any) -> str:
    """A value as the command line takes it."""
    if OmegaConf.is_list(value):
        return "[" + ",".join(map(_typed, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
