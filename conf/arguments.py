"""A program's command line, translated for Hydra.

The value of a key that holds text arrives as typed, without quotes around all of it; only under -m, where a comma
separates the values of a sweep, a value with a comma is parsed by Hydra's grammar.
"""

import argparse
import re
from typing import Any, NoReturn

from hydra.main import get_args_parser

from conf.keys import Key

NOW = "${now:%Y-%m-%d_%H-%M-%S}"
SEVERAL = f"hydra.sweep.dir='runs/several/{NOW}'"  # for runs that would otherwise have no folder in common


def read(
    typed: list[str], defaults: list[str], positional: str | None, keys: dict[str, Key]
) -> tuple[list[str], list[str], bool]:
    """(flags, key=value arguments with the program's defaults, is it --help?); ValueError for a wrong flag."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{message}; values are written key=value, --help lists all")

    parser.error = refuse  # type: ignore[method-assign]
    found: argparse.Namespace = parser.parse_intermixed_args(typed)
    flags, values = [a for a in typed if a not in found.overrides], list(found.overrides)
    if found.hydra_help:  # Hydra's own page has no configuration, and so no group from which an argument could choose
        return flags, [], False
    if empty := {"hydra.run.dir=", "hydra.sweep.dir="}.intersection(values):  # from a shell variable that is not set
        refuse(f"{empty.pop()} names no folder; write . for this one")
    for value in values:
        # data.* expands it, and a prompt may begin with it
        if re.match(r"""(?!data\.|prompt=|train\.sample_prompt=)[\w.+]+=["']*~([\w-]*/|["']?$)""", value):
            refuse(f"{value} begins with ~, which only a shell expands; write $HOME")
        if re.match(r"\+*hydra\.job\.chdir=(?!false|null)", value, re.IGNORECASE):
            refuse(f"{value} would change what each path means; leave it out")
    if positional and (bare := [value for value in values if _is_positional(value)]):
        if named := [value for value in values if value.startswith(f"{positional}=")]:
            refuse(f"{named[0]} and {bare[0]} are given both ways; leave {positional}= out")
        listed = ",".join(map(_quoted, bare))
        values = [value for value in values if value not in bare] + [f"{positional}=[{listed}]"]
    values = [_as_typed(value, keys, sweeps=found.multirun) for value in values]
    if found.multirun and any(re.match(r"(experiment|name|resume)=.*[,(]", value) for value in values):
        defaults = [SEVERAL, *defaults]
    said = set(map(key_of, values))
    return flags, [*values, *(value for value in defaults if key_of(value) not in said)], found.help


def key_of(override: str) -> str:
    """The key or group that an argument sets, adds or deletes."""
    return override.lstrip("+~").partition("=")[0]


def _is_positional(value: str) -> bool:
    """Whether an argument is not a key=value but a path, whose folders may have a = in their names."""
    key, equals, _ = value.partition("=")
    if equals:
        return "/" in key and not key.startswith("hydra/")  # hydra/launcher=NAME chooses from a group of Hydra's
    return not value.startswith("~")


def _as_typed(argument: str, keys: dict[str, Key], *, sweeps: bool) -> str:
    """A key=value argument, quoted so that neither Hydra's nor OmegaConf's grammar changes the text of a text key."""
    key, equals, value = argument.partition("=")
    known = keys.get(key.lstrip("+"))
    if not equals or known is None or not known.is_text or (sweeps and "," in value):
        return argument
    if value.startswith("[") and known.type is Any:  # the key also accepts a list
        return argument
    if value == "null" and known.type is not str:
        return argument
    if re.fullmatch(r"""'(\\.|[^'\\])*'|"(\\.|[^"\\])*\"""", value, flags=re.S):  # quoted for Hydra already
        return argument
    return f"{key}={_quoted(value)}"


def literal(value: Any) -> Any:
    """Escape a value for OmegaConf, which then leaves it as it is: `${` is text, backslashes before it are doubled."""
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _quoted(value: str) -> str:
    """`value` in quotes, so that Hydra's grammar and OmegaConf's interpolation leave it unchanged.

    A backslash is doubled only where it would be read as an escape: before a quote or `${`, and at the end.
    """
    value = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + found[2].replace("'", r"\'"), literal(value))
    return f"'{value}'"
