"""The keys of a program: every field of its dataclasses, with the comment beside it, and the `--help` made of them."""

import inspect
import re
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

# group -> its files: what NAME can be in group=NAME
GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
    for folder in sorted(Path(__file__).parent.iterdir())
    if folder.is_dir() and not folder.name.startswith("_")
}

# what every program's --help ends with
TYPED = (
    "  key=value            text arrives as typed, without the quotes around all of it if it has any",
    "  -m key=a,b           one run for each value; there a comma separates values",
    "  --cfg job            print the configuration of a new run, and end",
)


def files_of(group: str, choice: object) -> list[Path]:
    """The files that `group`=`choice` may be: ours and those of --config-dir."""
    sources = HydraConfig.get().runtime.config_sources
    folders = (Path(__file__).parent, *(Path(source.path) for source in sources if source.schema == "file"))
    places = (folder / group / f"{choice}.yaml" for folder in folders)
    return list({file.resolve(): file for file in places if file.is_file()}.values())


def package_of(file: Path, group: str) -> str:
    """The key below which the values of a group's file are; empty for the top."""
    first_line = file.read_text(encoding="utf-8").partition("\n")[0]
    return "" if "@package _global_" in first_line else group


@dataclass(frozen=True)
class Key:
    """A field of a dataclass."""

    type: Any
    comment: str = ""  # at the end of the field's line

    @property
    def is_text(self) -> bool:
        """Whether its values are or may be text: `Any` stands for text or a list of texts."""
        return self.type in (str, str | None, Any)


def is_folder_name(name: str) -> bool:
    """Whether `name` is a valid folder name on any system."""
    return bool(re.fullmatch(r"\w[\w .+=-]*", name))


@cache  # it reads source
def known_keys(schema: type) -> dict[str, Key]:
    """Every dotted key of a dataclass of dataclasses."""
    comments = {}
    for owner in reversed([cls for cls in schema.__mro__ if is_dataclass(cls)]):
        comments |= re.findall(r"^    (\w+): [^#\n]*(?:\(\n[^#\n]*)?#[ ]?(.*)$", inspect.getsource(owner), flags=re.M)
    keys: dict[str, Key] = {}
    for name, hint in get_type_hints(schema).items():
        keys[name] = Key(hint, comments.get(name, ""))
        if is_dataclass(hint):
            keys |= {f"{name}.{key}": nested for key, nested in known_keys(hint).items()}
    return keys


def help_page(docstring: str | None, config: str, schema: type, overrides: list[str]) -> str:
    """The program's docstring, the groups, and every key with its value, those that `schema` itself adds first."""
    from training.comparison import as_typed  # with NumPy, which only this page would wait for

    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose(config, overrides=overrides)
    keys, own = known_keys(schema), schema.__annotations__
    lines = []
    for name in sorted(keys, key=lambda name: name.partition(".")[0] not in own):
        if not is_dataclass(keys[name].type):
            shown = f"{name}={as_typed(OmegaConf.select(cfg, name))}"
            lines.append(f"  {shown:<46} {keys[name].comment}".rstrip())
    page = [(docstring or "").strip(), ""]
    if config == "config":
        page += ["== What can be chosen (group=name) ==", *(f"  {g}: {', '.join(n)}" for g, n in GROUPS.items()), ""]
    page += ["== The configuration as it stands (key=value changes it) ==", *lines, ""]
    return "\n".join([*page, "== What is typed ==", *TYPED])
