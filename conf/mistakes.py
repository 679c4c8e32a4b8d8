"""A user's mistake in one line: the key, its value, the remedy.

Hydra, OmegaConf and the operating system each have their own messages; `explain` translates them.
"""

import difflib
import json
import os
import re
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, ValidationError
from omegaconf.errors import ConfigKeyError, GrammarParseError, OmegaConfBaseException
from yaml import YAMLError

from conf.keys import GROUPS, Key
from training.lock import NAME as LOCK

EXIT_USER_ERROR = 2
# Hydra's messages -> ours
_HYDRAS = {
    r"Ambiguous value for argument '(.*?)'": "{} is several values; use -m for one run each, or one value",
    r"Sweep parameters '(.*?)' requires": "{} is several values; use -m for one run each, or one value",
    r"Error merging override (.*)": "{} has the wrong type; write a value as `--cfg job` shows it",
    r"Additional config directory '(.*?)' not found": "--config-dir={} is not a folder; name one",
    r"(\w+)(?:\. To override| appears more than once)": "+{0} adds a group, and {0} is there; write {0}=NAME",
    r"Error resolving interpolation '(.*?)'": "{} refers to a group that is not chosen; choose each as group=NAME",
    r"Config group override must be a .* Got (\w+)": "a group takes a file's name, not {}; leave it out, or use ~GROUP",
}
_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def fail(message: str, *, prints: bool = True) -> int:
    """Print one line on stderr, unless another process does, and return the exit code of a user's mistake."""
    line = f"error: {' '.join(message.split())}"
    if prints:
        print(line, file=sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun's, which it repeats below its own traceback
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))
    return EXIT_USER_ERROR


def refuse_several(name: str) -> None:
    """Exit where torchrun or srun started this program more than once; the first process says so.

    An environment with half of what they set comes from elsewhere, as in a cluster's pod, and is ignored.
    """
    if not os.environ.keys() & {"WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}:
        return
    from training.rendezvous import ranks  # it needs PyTorch, which a tool may do without

    try:
        rank, size, _ = ranks()
    except ValueError:
        return
    if rank > 0:
        sys.exit()  # with code 0: torchrun stops all when one fails, and the first has not yet printed why
    if size > 1:
        sys.exit(fail(f"{name} is one process, and {size} were started; start it without torchrun or srun"))


def explain(error: Exception, keys: dict[str, Key], cfg: DictConfig | None = None) -> str:
    """One line for an error of Hydra, OmegaConf, the operating system or a dataclass.

    keys: `known_keys` of the schema. cfg: the composed configuration, if it got so far; a wrong value is read from it.
    """
    text = str(error).strip().split("\n")[0]
    if not text and isinstance(error.__cause__, OmegaConfBaseException):  # Hydra's wrapper has no message of its own
        error = error.__cause__
    match error:
        case OmegaConfBaseException():
            return _of_omegaconf(error, keys, cfg)
        case MissingConfigException():  # an OSError too
            return _missing_file(error)
        case OSError():  # nothing but the run's folder is written before the program itself begins
            key = "hydra.sweep.dir" if {"-m", "--multirun"} & set(sys.argv) else "hydra.run.dir"
            is_broken = os.path.islink(error.filename or "") and not os.path.exists(error.filename)
            why = "a link to nothing" if is_broken else error.strerror
            return f"{key}={error.filename} cannot be made ({why}); name another folder, as {key}=FOLDER"
        case YAMLError():
            mark = getattr(error, "problem_mark", None)
            place = f"{mark.name} line {mark.line + 1}" if mark else "a configuration file"
            return f"{place} is not YAML ({getattr(error, 'problem', None) or text}); correct it"
        case UnicodeDecodeError():
            return f"a configuration file is not UTF-8 ({error.reason} at byte {error.start}); convert it with iconv"
        case OverrideParseException():
            key = next((key for key in ("checkpoint", "resume") if key in keys), None)
            how = f"key=value, as {key}=PATH" if key and os.path.isdir(error.override) else "key=value"
            return f"cannot read the argument '{error.override}': write {how} (quote lists, spaces and accents)"
    for pattern, words in _HYDRAS.items():
        if found := re.search(pattern, str(error)):
            return words.format(*found.groups()).replace("--cfg job", f"--cfg {_part_of(found.group(1))}")
    unknown = re.search(r"Could not (?:override|(?:append to|delete from) config\.?[^']*) ?'([^']+)'", str(error))
    if unknown:
        key = unknown.group(1).split("=")[0]
        if text.startswith("Could not delete") and key in keys:
            return f"~{key} deletes nothing: {key} is null already; drop it, or for a resumed run: {key}=null"
        if text.startswith("Could not append") and key in keys:
            return f"+{key} adds a key, and {key} is there; write {key}=VALUE"
        if key in keys:  # a mapping that accepts any keys
            return f"{key} has no such keys yet; write +{key}={{KEY:VALUE}}"
        return _unknown_key(key, keys)
    return str(error) if isinstance(error, ValueError) else text  # a dataclass's: its value may have several lines


def no_value(key: str, choice: str | None = None) -> str:
    """One line for ???, OmegaConf's mark of a missing value; a merge would silently leave the default there.

    choice: group=NAME of the file that has the ???, if it was not typed.
    """
    if choice:
        return f"{key}=??? stands for a value that is missing in {choice}; give one, as {key}=VALUE"
    return f"{key}=??? stands for a value that is missing; give one, or leave the key out"


def of_the_system(error: OSError, folder: Path) -> str:
    """One line for a file or folder that cannot be used, by a run in `folder`."""
    if error.errno is None:  # raised by us, in our words
        return str(error)
    if error.filename is None:
        return f"{error.strerror or error} (the run's folder is {folder}); free what is short and run again"
    if Path(error.filename) == folder / LOCK:  # a file that no user names
        return (
            f"{folder} cannot be written to ({error.strerror}); resume a copy of it, or begin with init_from={folder}"
        )
    return f"{error.filename2 or error.filename} cannot be used ({error.strerror}); check that path, or name another"


def _of_omegaconf(error: OmegaConfBaseException, keys: dict[str, Key], cfg: DictConfig | None) -> str:
    key, text = str(error.full_key or ""), str(error).strip().split("\n")[0]
    if isinstance(error, ConfigKeyError):
        return _unknown_key(key, keys)
    if isinstance(error, ValidationError):
        found = re.search(r"Value '(.*?)'(?: of type '\w+')? (?:is|could)\b", str(error), flags=re.S)
        value = found.group(1) if found else OmegaConf.select(cfg, key) if cfg is not None and key else None
        expected = _type_name(keys[key].type) if key in keys else "another kind of value"
        remedy = f"; write {int(float(value))}" if re.fullmatch(r"\d+\.0", str(value)) and "whole" in expected else ""
        return f"{key}={'null' if value is None else value} has the wrong type: expected {expected}{remedy}"
    if missing := re.search(r"Missing mandatory value: (\S+)", text):
        return no_value(missing.group(1))
    if "choices.experiment' not found" in text:  # which names the run's folder
        return "a run has one experiment; write experiment=NAME, or leave experiment out"
    if "nterpolation" in text or isinstance(error, GrammarParseError):
        return f"{key or 'a value'} refers to what cannot be had ({text}); write the value itself"
    return text


def _missing_file(error: MissingConfigException) -> str:
    if error.missing_cfg_file and error.options is not None:
        group, choice = re.fullmatch("((?:hydra/)?[^/]*)/(.*)", str(error.missing_cfg_file), flags=re.S).groups()
        one_of = f"{_nearest(choice, error.options)}choose one of {', '.join(error.options)}"
        if group == "data" and Path(choice).is_file():
            return f"data={choice} is a file; write data=text data.files={choice}, or {one_of}"
        return f"{group}={choice} does not exist; {one_of}"
    return f"the configuration {error.missing_cfg_file} does not exist; leave --config-name and --config-path out"


def _unknown_key(key: str, keys: Iterable[str]) -> str:
    bare, _, package = key.lstrip("+~").partition("@")
    if bare == "experiment":  # its keys have become keys of a group that does not exist
        return "the experiment's file does not begin with `# @package _global_`; add that line"
    if package:
        return f"{key} names a package, which is not used here; write {bare}=NAME"
    return f"{bare} is not a known key; {_nearest(bare, [*keys, *GROUPS])}`--cfg {_part_of(bare)}` lists all"


def _part_of(key: str) -> str:
    """What `--cfg` prints the key with: the run's configuration, or Hydra's own."""
    return "hydra" if key.lstrip("+~").startswith("hydra") else "job"


def _nearest(word: str, candidates: Iterable[str]) -> str:
    """'did you mean …? ', or nothing: by the whole key, or by its last part (a right name without its group)."""
    last = {candidate.rpartition(".")[2]: candidate for candidate in candidates}
    whole = difflib.get_close_matches(word, last.values(), n=1, cutoff=0.75)
    names = difflib.get_close_matches(word.rpartition(".")[2], last, n=1)
    return "".join(f"did you mean {near}? " for near in whole or map(last.get, names))


def _type_name(hint: Any) -> str:
    if get_origin(hint) is list:
        return "a list, as [a,b]"
    names = [_TYPES.get(part, str(part)) for part in get_args(hint) or (hint,)]
    return " or ".join(names)
