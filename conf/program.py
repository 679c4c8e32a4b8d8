"""How every program of this project starts: Hydra composes, dataclasses check, one line explains what is wrong.

`@program("config", Settings)` turns a function of `(settings, run_dir)` into a command line. A user's mistake (a
typo, a wrong type, an impossible value, a missing file) ends with one line on stderr and exit code 2. The traceback
of anything raised after the configuration was accepted is kept in the run's folder, and HYDRA_FULL_ERROR=1 shows it.
"""

import difflib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, ValidationError
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

EXIT_USER_ERROR = 2
GROUPS = sorted(p.name for p in Path(__file__).parent.iterdir() if p.is_dir() and not p.name.startswith("_"))

S = TypeVar("S")


class ConfigError(ValueError):
    """A configuration that cannot be used: one line, the key, the value, the remedy."""


def program(config_name: str, schema: type[S]) -> Callable[[Callable[[S, Path], Any]], Callable[[], None]]:
    """Decorate `main(settings, run_dir)`; `settings` is a checked `schema`, `run_dir` the folder of this run."""

    def decorate(main: Callable[[S, Path], Any]) -> Callable[[], None]:
        refusals: list[ConfigError] = []  # kept, not raised: Hydra would print lines of its own about them

        @wraps(main)
        def task(cfg: DictConfig) -> None:
            run_dir = Path(os.path.relpath(HydraConfig.get().runtime.output_dir))
            try:
                main(settings_from(cfg, schema), run_dir)
            except (ValueError, OSError) as error:
                message = str(error)
                if not _remove_if_empty(run_dir):  # the run had begun
                    with suppress(OSError):  # the disk may be what is wrong
                        (run_dir / "error.log").write_text(traceback.format_exc())
                        message += f" [traceback: {run_dir}/error.log]"
                refusal = ConfigError(message)
                refusal.__cause__ = error
                refusals.append(refusal)

        @wraps(main)
        def command_line() -> None:
            show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, in place of printing its own report
            sys.argv[1:] = sorted(sys.argv[1:], key=lambda a: a not in ("-m", "--multirun"))  # argparse wants it first
            register(schema)
            try:
                hydra.main(version_base="1.3", config_path="pkg://conf", config_name=config_name)(task)()
                if refusals:
                    raise refusals.pop()
            except KeyboardInterrupt:  # before there was anything to save
                sys.exit(128 + signal.SIGINT)
            except (ConfigError, HydraException, OmegaConfBaseException) as error:
                if show_traceback:
                    raise
                sys.exit(fail(explain(error, known_keys(schema))))

        return command_line

    return decorate


def fail(message: str) -> int:
    """Print one line on stderr and return the exit code of a user's mistake."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USER_ERROR


def register(schema: type) -> None:
    """Tell Hydra what the YAML files refer to: the config `schema` and the resolver `run_dir`.

    `schema` holds every field with its default, so that `--cfg job` lists all keys and all can be overridden. It is
    stored without its types: `settings_from` checks those, after composition, where one place can explain a mistake.
    """
    defaults = OmegaConf.to_container(OmegaConf.structured(schema))
    ConfigStore.instance().store("schema", OmegaConf.create(defaults))

    def run_dir(resume: str | None, experiment: str, time: str) -> str:
        """A new folder for a new run, the old one for a run that is resumed; `auto` is the experiment's newest."""
        if resume == "auto":
            earlier = sorted(path.parent for path in Path("runs", experiment).glob("*/checkpoints"))
            return str(earlier[-1]) if earlier else f"runs/{experiment}/{time}"
        if resume:
            # .../<run>/checkpoints/<name>  ->  .../<run>
            checkpoint = Path(os.path.abspath(resume))
            if checkpoint.parent.name == "checkpoints" and checkpoint.is_dir():
                return str(checkpoint.parent.parent)
            if (checkpoint / "checkpoints").is_dir():
                return str(checkpoint)
        return f"runs/{experiment}/{time}"

    OmegaConf.register_new_resolver("run_dir", run_dir, replace=True)


def settings_from(cfg: DictConfig, schema: type[S]) -> S:
    """Merge `cfg` strictly into the dataclasses of `schema` and return them; raise ConfigError with one line."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), cfg)
        OmegaConf.resolve(merged)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except ConfigError:
        raise
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(explain(error, known_keys(schema))) from error


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


def explain(error: Exception, keys: dict[str, type]) -> str:
    """One line for whatever Hydra, OmegaConf or a dataclass had to say: key, value, remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        options = ", ".join(error.options)
        return f"{group}={choice} does not exist; {_nearest(choice, error.options)}choose one of {options}"
    if isinstance(error, OverrideParseException):
        return f"cannot read the argument '{error.override}': write key=value (quote lists and spaces)"
    if isinstance(error, ConfigKeyError):
        return _unknown_key(str(error.full_key), keys)
    if isinstance(error, ValidationError):
        expected = keys.get(str(error.full_key))
        value = re.search(r"Value '(.*?)'", str(error), flags=re.S)
        value_text = value.group(1) if value else "the value"
        return f"{error.full_key}={value_text} has the wrong type: expected {_type_name(expected)}"
    if isinstance(error, HydraException):
        unknown = re.search(r"Could not (?:override|append to config\.?[^']*) ?'([^']+)'", str(error))
        if unknown:
            return _unknown_key(unknown.group(1).split("=")[0], keys)
    return str(error).strip().split("\n")[0]


def _unknown_key(key: str, keys: Iterable[str]) -> str:
    key = key.split("@")[0].lstrip("+~")
    candidates = [*keys, *GROUPS]
    return f"{key} is not a known key; {_nearest(key, candidates)}`--cfg job` lists all"


def _nearest(word: str, candidates: Iterable[str]) -> str:
    """'did you mean …? ', comparing whole keys first and last parts after (a right name in a wrong group)."""
    candidates = list(candidates)
    whole = difflib.get_close_matches(word, candidates, n=1, cutoff=0.75)
    last = difflib.get_close_matches(word.rpartition(".")[2], [c.rpartition(".")[2] for c in candidates], n=1)
    if not whole and last:
        whole = [c for c in candidates if c.rpartition(".")[2] == last[0]][:1]
    return f"did you mean {whole[0]}? " if whole else ""


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    parts = [a for a in get_args(hint) if a is not type(None)]
    if parts and type(None) in get_args(hint):
        return f"{_type_name(parts[0])} or null"
    return names.get(hint, "another kind of value" if hint is None else getattr(hint, "__name__", str(hint)))


def _remove_if_empty(folder: Path) -> bool:
    """Hydra makes the run's folder before anything is checked; a refused run leaves none behind."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        return True
    return not folder.exists()
