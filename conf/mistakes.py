"""What a user did wrong, in one line: the key, its value, the remedy.

Hydra, OmegaConf and the operating system each have words of their own for it; `explain` turns them into ours.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, ValidationError
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

GROUPS = sorted(p.name for p in Path(__file__).parent.iterdir() if p.is_dir() and not p.name.startswith("_"))


# what Hydra says -> what we say
_HYDRAS = {
    r"Ambiguous value for argument '(.*?)'": "{} is several values; use -m for one run each, or one value",
    r"Additional config directory '(.*?)' not found": "--config-dir={} is not a folder; name one",
    r"Config group override must be a .* Got (\w+)": "a group takes the name of a file, not {}; write model=tiny, say",
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


def explain(error: Exception, keys: dict[str, type], cfg: DictConfig | None = None) -> str:
    """One line for whatever Hydra, OmegaConf, the system or a dataclass had to say.

    keys: `known_keys` of the schema. cfg: what was composed, where it got so far; a wrong value is read from it.
    """
    text = str(error).strip().split("\n")[0]
    if isinstance(error, OmegaConfBaseException):
        return _of_omegaconf(error, keys, cfg)
    if isinstance(error, MissingConfigException):  # an OSError too
        return _missing_file(error)
    if isinstance(error, OSError):  # nothing but the run's folder is written before the program itself begins
        return f"hydra.run.dir={error.filename} cannot be made ({error.strerror}); name another folder"
    if isinstance(error, YAMLError):
        mark = getattr(error, "problem_mark", None)
        place = f"{mark.name} line {mark.line + 1}" if mark else "a configuration file"
        return f"{place} is not YAML ({getattr(error, 'problem', None) or text}); correct it"
    if isinstance(error, UnicodeDecodeError):
        return f"a configuration file is not UTF-8 ({error.reason} at byte {error.start}); convert it with iconv"
    if isinstance(error, OverrideParseException):
        return f"cannot read the argument '{error.override}': write key=value (quote lists, spaces and accents)"
    for pattern, words in _HYDRAS.items():
        if found := re.search(pattern, str(error)):
            return words.format(*found.groups())
    if unknown := re.search(r"Could not (?:override|append to config\.?[^']*) ?'([^']+)'", str(error)):
        return _unknown_key(unknown.group(1).split("=")[0], keys)
    return text


def of_the_system(error: OSError) -> str:
    """One line for a file or folder that cannot be used."""
    if error.filename is None:
        return f"{error.strerror or error}; free what is short and run again"
    return f"{error.filename} cannot be used ({error.strerror}); check that path, or name another"


def _of_omegaconf(error: OmegaConfBaseException, keys: dict[str, type], cfg: DictConfig | None) -> str:
    key, text = str(error.full_key or ""), str(error).strip().split("\n")[0]
    if isinstance(error, ConfigKeyError):
        return _unknown_key(key, keys)
    if isinstance(error, ValidationError):
        value = re.search(r"Value '(.*?)'", str(error), flags=re.S)
        shown = value.group(1) if value else _plain(OmegaConf.select(cfg, key) if cfg is not None and key else None)
        return f"{key}={shown} has the wrong type: expected {_type_name(keys.get(key))}"
    if "nterpolation" in text:
        return f"{key or _unresolved(cfg, keys)} refers to what cannot be had ({text}); write the value itself"
    return text


def _unresolved(cfg: DictConfig | None, keys: Iterable[str]) -> str:
    """The first key whose ${...} cannot be resolved."""
    for key in keys if cfg is not None else ():
        try:
            OmegaConf.select(cfg, key)
        except OmegaConfBaseException:
            return key
    return "a value"


def _missing_file(error: MissingConfigException) -> str:
    if error.missing_cfg_file and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        options = ", ".join(error.options)
        return f"{group}={choice} does not exist; {_nearest(choice, error.options)}choose one of {options}"
    return f"the configuration {error.missing_cfg_file} does not exist; leave --config-name and --config-path out"


def _unknown_key(key: str, keys: Iterable[str]) -> str:
    bare, _, package = key.lstrip("+~").partition("@")
    if bare == "experiment":  # its keys have become keys of a group that does not exist
        return "the experiment's file does not begin with `# @package _global_`; add that line"
    if package:
        return f"{key} names a package, which is not used here; write {bare}=NAME"
    return f"{bare} is not a known key; {_nearest(bare, [*keys, *GROUPS])}`--cfg job` lists all"


def _nearest(word: str, candidates: Iterable[str]) -> str:
    """'did you mean …? ', comparing whole keys first and last parts after (a right name in a wrong group)."""
    candidates = list(candidates)
    whole = difflib.get_close_matches(word, candidates, n=1, cutoff=0.75)
    last = difflib.get_close_matches(word.rpartition(".")[2], [c.rpartition(".")[2] for c in candidates], n=1)
    if not whole and last:
        whole = [c for c in candidates if c.rpartition(".")[2] == last[0]][:1]
    return f"did you mean {whole[0]}? " if whole else ""


def _plain(value: Any) -> str:
    return "null" if value is None else str(value)


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if get_origin(hint) is list:
        return "a list, as [a,b]"
    parts = [a for a in get_args(hint) if a is not type(None)]
    if parts and type(None) in get_args(hint):
        return f"{_type_name(parts[0])} or null"
    return names.get(hint, "another kind of value" if hint is None else getattr(hint, "__name__", str(hint)))
