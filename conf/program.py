"""How every program of this project starts: Hydra composes, dataclasses check, one line explains what is wrong.

`@program("config", Settings)` turns a function of `(settings, run_dir)` into a command line. A user's mistake (a
typo, a wrong type, an impossible value, a missing file) ends with one line on stderr and exit code 2. What is raised
after the run has begun to write leaves its traceback in the run's folder; HYDRA_FULL_ERROR=1 shows any.

Text is text: the value of a key that holds text arrives as typed, without the quotes around all of it if it has any;
only under -m, where a comma separates the values of a sweep, one with a comma is read by Hydra's grammar.
"""

import argparse
import getpass
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.main import get_args_parser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from conf.console import protect_console
from conf.folders import MADE, SWEEP, folder_of_run, keep_traceback, listing, newest_run, remove_if_empty
from conf.keys import Key, help_page, known_keys
from conf.mistakes import EXIT_USER_ERROR, explain, fail, no_value, of_the_system
from training.lock import InUse, holder

if TYPE_CHECKING:
    from training.parallel import World

NOW = "${now:%Y-%m-%d_%H-%M-%S}"
SEVERAL = f"hydra.sweep.dir='runs/several/{NOW}'"  # where the folders of a sweep's runs would not be in one
SIGNALLED = 128  # exit codes above it are 128 + a signal
NEWER = (3, 14)  # this Python reads help texts that are being added, and one of Hydra 1.3's is no text (hydra #3121)

S = TypeVar("S")


class ConfigError(ValueError):
    """A configuration that cannot be used: one line, the key, the value, the remedy."""


def program(
    config: str,
    schema: type[S],
    *,
    experiment: str | None = None,
    run_dir: str | None = None,
    overrides: tuple[str, ...] = (),
    positional: str | None = None,
    after_sweep: Callable[[list[Path]], None] | None = None,
    world: "Callable[[], World] | None" = None,
) -> Callable[[Callable[[S, Path], Any]], Callable[[], None]]:
    """Decorate `main(settings, run_dir)`: `settings` is a checked `schema`, `run_dir` the folder of this run.

    Args:
        config: "config" for a program with a training run's settings, "tool" for one that trains nothing.
        experiment, overrides: arguments that hold where the command line says nothing about their keys.
        run_dir: a folder of the date and time below it is made for each run; ".": nothing is written.
        positional: the key, a list, of arguments that are not key=value.
        after_sweep: called with the folders of a sweep's runs when all are done.
        world: finds the processes that run `main` together, where there can be several. The first one's settings and
            folder are those of all, and only it prints; what another one fails of is in rank_N.log in that folder.

    `--help` prints the docstring of the program's module and all keys, those that `schema` itself adds first.
    """
    defaults = [*overrides, *([f"experiment={experiment}"] if experiment else [])]
    if run_dir == ".":
        defaults.append("hydra.run.dir=.")
    elif run_dir:
        dated = f"'{run_dir}/{NOW}'"
        defaults += [f"hydra.run.dir={dated}", f"hydra.sweep.dir={dated}"]

    def decorate(main: Callable[[S, Path], Any]) -> Callable[[], None]:
        @wraps(main)
        def command_line() -> None:
            show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, in place of printing its own report
            protect_console(prints_only=config == "tool" or run_dir == ".")
            name_user()
            if sys.version_info >= NEWER:
                sys.exit(fail(f"Python {sys.version_info[0]}.{sys.version_info[1]} is newer than Hydra 1.3; use 3.13"))
            typed, exit_codes, folders, refused, process = sys.argv, [], [], [], os.getpid()
            flags, values, wants_help = _arguments(typed[1:], defaults, positional, known_keys(schema))
            register(schema)
            try:
                processes = world() if world else None
            except ValueError as error:
                sys.exit(fail(str(error)))
            if processes and processes.size == 1:
                processes = None
            is_first = processes is None or processes.is_first
            if not is_first:
                sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
                scratch = tempfile.TemporaryDirectory(prefix="rank_")  # the first one's folder is told when it is made
                values += [f"hydra.{mode}.dir={scratch.name}" for mode in ("run", "sweep")]

            @wraps(main)
            def task(cfg: DictConfig) -> None:
                folder = Path(os.path.relpath(HydraConfig.get().runtime.output_dir))
                if processes:
                    folder = Path(processes.told(str(folder)))
                found = listing(folder)
                folders.append(folder)
                sys.argv = typed  # for the provenance of what the program writes
                run = folder  # or what train.py would go on with, where nothing is written
                if run_dir == "." and folder == Path() and cfg.get("resume") == "auto":
                    run = newest_run(cfg.name, HydraConfig.get().runtime.choices.experiment) or folder
                try:
                    if is_first:
                        composed = cfg
                        if "resume" in cfg:
                            from conf.resumed import with_earlier_settings  # it needs PyTorch, and tools may not

                            given = OmegaConf.to_container(HydraConfig.get().overrides.task)  # as typed, not resolved
                            given = [override for override in given if override not in defaults]
                            cfg = with_earlier_settings(cfg, given, run, set(known_keys(schema)))
                        _refuse_missing_in_files(resumes=cfg is not composed)
                        settings = settings_from(cfg, schema)
                    if processes:  # those of the first one, which are right
                        cfg = OmegaConf.create(processes.told(OmegaConf.to_container(cfg)))
                        settings = settings_from(cfg, schema)
                    main(settings, run)
                    if is_first:
                        remove_if_empty(folder)
                except (ValueError, OSError) as error:
                    message = of_the_system(error, folder) if isinstance(error, OSError) else str(error)
                    # the run had begun; in a folder that is another process's, it had not. In "." anybody may write
                    has_begun = folder != Path() and not isinstance(error, InUse) and listing(folder) != found
                    has_begun = has_begun and not holder(folder)
                    if is_first and not remove_if_empty(folder) and has_begun:
                        message += keep_traceback(folder / "error.log")
                    if processes:
                        _end_all(processes, folder, message, EXIT_USER_ERROR)
                    if show_traceback or os.getpid() != process:  # in a launcher's job; its end is read in `process`
                        raise ConfigError(message) from error
                    exit_codes.append(fail(message))  # the other runs of a sweep go on
                    given = OmegaConf.to_container(HydraConfig.get().overrides.task)  # as typed
                    parsed = OverridesParser.create().parse_overrides(values)
                    swept = {override.key_or_group for override in parsed if override.is_sweep_override()}
                    varied = [override for override in given if key_of(override) in swept]
                    refused.append(f"no run of {' '.join(varied) or 'this'}: {message}")
                except SystemExit as stopped:
                    if not isinstance(stopped.code, int) or stopped.code > SIGNALLED:  # whoever sends it means them all
                        if processes:
                            processes.close()
                        raise
                    exit_codes.append(stopped.code)
                except KeyboardInterrupt:  # before there was anything to save
                    if is_first:
                        remove_if_empty(folder)
                    if processes:
                        _end_all(processes, folder, "interrupted by SIGINT", 128 + signal.SIGINT)
                    raise
                except BaseException as error:
                    if processes and is_first:
                        traceback.print_exc()
                    if processes:
                        _end_all(processes, folder, f"{type(error).__name__}: {error}", 1)
                    raise

            try:
                if wants_help:
                    return print(help_page(main.__globals__["__doc__"], config, schema, values))
                sys.argv = [typed[0], *flags, *values]
                hydra.main(version_base="1.3", config_path="pkg://conf", config_name=config)(task)()
                if after_sweep and is_first and len(folders) > 1:
                    after_sweep(folders)
                    print(*refused, sep="\n", end="\n" if refused else "", file=sys.stderr)
                if processes:
                    processes.close()
            except KeyboardInterrupt:  # before there was anything to save
                sys.exit(128 + signal.SIGINT)
            # `task` explains its own errors, so a ValueError or OSError here is about arguments or the run's folder
            except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
                if show_traceback:
                    raise
                sys.exit(fail(explain(error, known_keys(schema))))
            finally:
                sys.argv = typed
                for sweep in MADE | {folder.parent for folder in folders} if is_first else ():
                    if list(listing(sweep)) == [SWEEP]:
                        (sweep / SWEEP).unlink()
                        remove_if_empty(sweep)
            if exit_codes:
                sys.exit(max(exit_codes))

        command_line.front = (config, schema, defaults)  # type: ignore[attr-defined]
        return command_line

    return decorate


def name_user() -> None:
    """Give the user a name where a container knows only a number: PyTorch names a folder by it, or fails."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # the second since Python 3.13
        os.environ["LOGNAME"] = str(os.getuid())


def register(schema: type) -> None:
    """Tell Hydra what the YAML files refer to: the config `schema` and the resolvers `run_dir`, `optim_for` and
    `tokenizer_for`.

    `schema` holds every field with its default, so that `--cfg job` lists all keys and all can be overridden. It is
    stored without its types: `settings_from` checks those, after composition, where one place can explain a mistake.
    """
    ConfigStore.instance().store("schema", _defaults(schema))
    OmegaConf.register_new_resolver("run_dir", folder_of_run, replace=True)
    OmegaConf.register_new_resolver("optim_for", _optim_for, replace=True)
    OmegaConf.register_new_resolver("tokenizer_for", lambda model, ours: model or ours, replace=True)


@cache
def _defaults(schema: type) -> DictConfig:
    return OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(schema)))


@cache
def _typed(schema: type) -> DictConfig:
    return OmegaConf.structured(schema)


def settings_from(cfg: DictConfig, schema: type[S]) -> S:
    """Merge `cfg` strictly into the dataclasses of `schema` and return them; raise ConfigError with one line."""
    keys = known_keys(schema)
    for key in _missing(OmegaConf.to_container(cfg)):
        raise ConfigError(no_value(key))
    for name in cfg:
        # OmegaConf would not say which key it means
        if name in keys and is_dataclass(keys[name].type) and not OmegaConf.is_dict(cfg[name]):
            raise ConfigError(f"{name}={cfg[name]} is no value: {name} holds keys of its own; write {name}.KEY=VALUE")
    try:
        merged = OmegaConf.merge(_typed(schema), cfg)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(explain(error, keys, cfg)) from error


def _arguments(
    typed: list[str], defaults: list[str], positional: str | None, keys: dict[str, Key]
) -> tuple[list[str], list[str], bool]:
    """(flags, key=value arguments with the program's defaults, is it --help?); a wrong flag ends in one line."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        sys.exit(fail(f"{message}; values are written key=value, --help lists all"))

    parser.error = refuse  # type: ignore[method-assign]
    found: argparse.Namespace = parser.parse_intermixed_args(typed)
    flags, values = [a for a in typed if a not in found.overrides], list(found.overrides)
    if found.hydra_help:  # Hydra's own page is of no configuration, and has no group for an argument to choose from
        return flags, [], False
    if empty := {"hydra.run.dir=", "hydra.sweep.dir="}.intersection(values):  # of a shell's variable that is not set
        refuse(f"{empty.pop()} names no folder; write . for this one")
    if positional and (bare := [value for value in values if _is_positional(value)]):
        if named := [value for value in values if value.startswith(f"{positional}=")]:  # a folder may be called so
            refuse(f"{named[0]} and {bare[0]} are given both ways; leave {positional}= out")
        listed = ",".join(map(_quoted, bare))
        values = [value for value in values if value not in bare] + [f"{positional}=[{listed}]"]
    values = [_as_typed(value, keys, sweeps=found.multirun) for value in values]
    if found.multirun and any(re.match(r"(experiment|name)=.*[,(]", value) for value in values):
        defaults = [SEVERAL, *defaults]
    said = set(map(key_of, values))
    return flags, [*values, *(value for value in defaults if key_of(value) not in said)], found.help


def key_of(override: str) -> str:
    """The key or group that an argument sets, adds or deletes."""
    return override.lstrip("+~").partition("=")[0]


def _is_positional(value: str) -> bool:
    """Whether an argument is no key=value: a path, whose folders may have a = in their names."""
    key, equals, _ = value.partition("=")
    if equals:
        return "/" in key and not key.startswith("hydra/")  # hydra/launcher=NAME is a choice of Hydra's
    return not value.startswith("~")


def _as_typed(argument: str, keys: dict[str, Key], *, sweeps: bool) -> str:
    """A key=value argument whose value, if its key holds text, no grammar changes: neither Hydra's nor OmegaConf's."""
    key, equals, value = argument.partition("=")
    known = keys.get(key.lstrip("+"))
    if not equals or known is None or not known.is_text or (sweeps and "," in value):
        return argument
    if value.startswith("[") and known.type is Any:  # of a key that also takes a list
        return argument
    if value == "null" and known.type is not str:
        return argument
    if re.fullmatch(r"""'(\\.|[^'\\])*'|"(\\.|[^"\\])*\"""", value, flags=re.S):  # quoted for Hydra already
        return argument
    return f"{key}={_quoted(value)}"


def _quoted(value: str) -> str:
    """`value` between quotes as Hydra's grammar and OmegaConf's interpolations leave it unchanged.

    A backslash is doubled only where it would otherwise be read as an escape: before a quote, `${`, or the end.
    """
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    value = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + found[2].replace("'", r"\'"), value)
    return f"'{value}'"


def _refuse_missing_in_files(*, resumes: bool) -> None:
    """ConfigError for a ??? in a chosen file, unless the command line has its key: composing drops what is missing.

    resumes: the run has settings of its own, and takes only files whose groups were typed, an experiment's not.
    """
    hydra_config = HydraConfig.get()
    overrides = OmegaConf.to_container(hydra_config.overrides.task)  # as typed: they may refer to what is not there
    typed = {override.lstrip("+").partition("=")[0] for override in overrides}
    folders = [Path(source.path) for source in hydra_config.runtime.config_sources if source.schema == "file"]
    for folder in [Path(__file__).parent, *folders]:
        for group, name in hydra_config.runtime.choices.items():
            if resumes and (group not in typed or group == "experiment"):
                continue
            if (file := folder / group / f"{name}.yaml").is_file():
                first_line = file.read_text(encoding="utf-8").partition("\n")[0]
                package = "" if "@package _global_" in first_line else group
                for key in _missing(OmegaConf.to_container(OmegaConf.load(file)), package):
                    if key not in typed:
                        raise ConfigError(no_value(key, f"{group}={name}"))


def _missing(values: Any, key: str = "") -> Iterator[str]:
    """The dotted keys below `key` whose value is ???; nothing is resolved."""
    if values == "???":
        yield key
    elif isinstance(values, list):
        yield from (found for index, value in enumerate(values) for found in _missing(value, f"{key}[{index}]"))
    elif isinstance(values, dict):
        prefix = f"{key}." if key else ""
        yield from (found for name, value in values.items() for found in _missing(value, f"{prefix}{name}"))


def _optim_for(model: str) -> str:
    """The optimizer that suits a choice of `model`: Muon knows the matrices of a GPT of ours alone."""
    return "adamw" if model == "huggingface" else "muon"


def _end_all(processes: "World", folder: Path, message: str, code: int) -> NoReturn:
    """End this one of several processes, and let the others know why they must, too."""
    if processes.is_first:
        fail(message)
    else:
        message += keep_traceback(folder / f"rank_{processes.rank}.log")
    processes.fail(message, code)
    sys.exit(code)
