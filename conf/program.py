"""How every program starts: Hydra composes, dataclasses check, one line explains a mistake.

`@program("config", Settings)` turns a function of `(settings, run_dir)` into a command line. A user's mistake (a
typo, a wrong type, an impossible value, a missing file) ends with one line on stderr and exit code 2. An error after
the run has begun to write leaves its traceback in the run's folder; HYDRA_FULL_ERROR=1 prints any, above the line.
"""

import getpass
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from conf import arguments
from conf.arguments import NOW, key_of, literal
from conf.console import protect_console
from conf.folders import (
    folder_of_run,
    folder_of_sweep,
    keep_traceback,
    listing,
    remove_empty_sweeps,
    remove_if_empty,
    remove_logs_of_others,
    resumed_run,
)
from conf.interrupt import raise_again
from conf.keys import files_of, help_page, known_keys, package_of
from conf.mistakes import EXIT_USER_ERROR, explain, fail, no_value, of_the_system, refuse_several
from training.lock import InUse, holder

if TYPE_CHECKING:
    from training.parallel import World

SIGNALLED = 128  # exit codes above it are 128 + a signal
NEWER = (3, 14)  # its argparse checks help texts at once, and one of Hydra 1.3's is not a string (hydra #3121)

S = TypeVar("S")


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
    alone: bool = True,
) -> Callable[[Callable[[S, Path], Any]], Callable[[], None]]:
    """Decorate `main(settings, run_dir)`: `settings` is a checked `schema`, `run_dir` the folder of this run.

    Args:
        config: "config" for a program with a training run's settings, "tool" for one that trains nothing.
        experiment, overrides: default arguments, for keys that the command line does not set.
        run_dir: each run gets a folder below it, named by date and time; ".": nothing is written.
        positional: the key, of a list, that collects the arguments that are not key=value.
        after_sweep: called with the folders of a sweep's runs when all are done.
        world: finds the processes that run `main` together, where there can be several. All use the first
            one's settings and folder, and only it prints; another one's error is in rank_N.log in that folder.
        alone: refuse several processes if there is no `world`: they would write the same files.

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
            os.environ.pop("MPLBACKEND", None)  # set by a notebook, for its `!python`; our pictures are files
            if sys.version_info >= NEWER:
                sys.exit(fail(f"Python {sys.version_info[0]}.{sys.version_info[1]} is newer than Hydra 1.3; use 3.13"))
            if alone and world is None:
                refuse_several(Path(sys.argv[0]).name)
            typed = sys.argv
            register(schema)
            how = {"writes": run_dir != ".", "show_traceback": show_traceback, "processes": _processes(world)}
            runs = _Runs(main, schema, defaults, typed, **how)
            if not runs.is_first:
                sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")

            @wraps(main)  # Hydra reads its module
            def task(cfg: DictConfig) -> None:
                runs.run_one(cfg)

            try:
                raise_again()
                flags, runs.values, wants_help = arguments.read(typed[1:], defaults, positional, known_keys(schema))
                if wants_help:
                    return print(help_page(sys.modules[main.__module__].__doc__, config, schema, runs.values))
                if not runs.is_first:
                    scratch = tempfile.TemporaryDirectory(prefix="rank_")  # until the first has made the run's
                    runs.values += [f"hydra.{mode}.dir={scratch.name}" for mode in ("run", "sweep")]
                if (launcher := "hydra/launcher=submitit_slurm") in runs.values and not shutil.which("srun"):
                    raise ValueError(f"{launcher} needs SLURM's srun, which is not here; use a machine of the cluster")
                sys.argv = [typed[0], *runs.values, *flags]  # flags last: --info would read a value as its own
                hydra.main(version_base="1.3", config_path="pkg://conf", config_name=config)(task)()
                if after_sweep and runs.is_first and len(runs.folders) > 1:
                    after_sweep(runs.folders)
                    print(*runs.refused, sep="\n", end="\n" if runs.refused else "", file=sys.stderr)
                if runs.processes:
                    runs.processes.close()
            except KeyboardInterrupt:  # before there was anything to save
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would be shown in a traceback
                sys.exit(128 + signal.SIGINT)
            # a run explains its own errors, so a ValueError or OSError here is about arguments or the run's folder
            except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
                runs.refuse_all(error, explain(error, known_keys(schema)))
            except (AttributeError, AssertionError, RuntimeError) as error:
                if runs.folders or not any("hydra" in argument for argument in typed[1:]):
                    raise
                # Hydra's, before any run, where it cannot use its own keys
                runs.refuse_all(
                    error, f"Hydra cannot use hydra.* as given ({str(error) or type(error).__name__}); leave them out"
                )
            finally:
                sys.argv = typed
                if runs.is_first:
                    remove_empty_sweeps({folder.parent for folder in runs.folders})
            if runs.exit_codes:
                sys.exit(max(runs.exit_codes))

        command_line.front = (config, schema, defaults)  # type: ignore[attr-defined]  # for tests
        return command_line

    return decorate


def _processes(world: "Callable[[], World] | None") -> "World | None":
    """The processes that run together, None where this one is alone; exits where the environment is wrong."""
    try:
        processes = world() if world else None
    except ValueError as error:
        sys.exit(fail(str(error)))
    return processes if processes and processes.size > 1 else None


@dataclass
class _Runs(Generic[S]):
    """The runs that a command line starts: one, or those of a sweep, in this process alone or with others.

    Attributes:
        typed: the command line; values: its key=value arguments with `defaults`, those of the program.
        writes: whether each run has a folder of its own.
        processes: those that run together; None: this one alone.
        folders, exit_codes, refused: of the runs so far; codes only of those that ended badly, lines of those refused.
        pid: this process's; a launcher of Hydra's, as submitit, runs each job in another.
    """

    main: Callable[[S, Path], Any]
    schema: type[S]
    defaults: list[str]
    typed: list[str]
    writes: bool
    show_traceback: bool
    processes: "World | None"
    values: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    pid: int = field(default_factory=os.getpid)

    @property
    def is_first(self) -> bool:
        return self.processes is None or self.processes.is_first

    def run_one(self, cfg: DictConfig) -> None:
        """One run with Hydra's `cfg`. If it is refused or stops, the other runs of a sweep still start.

        With several processes a refusal ends all: the others may wait in a collective for the one that refused.
        """
        folder = Path(HydraConfig.get().runtime.output_dir)
        if not (below := os.path.relpath(folder)).startswith(os.pardir):  # else it outlives the current folder
            folder = Path(below)
        if self.processes:
            folder = Path(self.processes.broadcast(str(folder)))
        before = listing(folder)
        self.folders.append(folder)
        sys.argv = self.typed  # for the provenance of what the program writes
        try:
            settings, run = self._settings(cfg, folder)
            self.main(settings, run)
            if self.is_first:
                remove_if_empty(folder)
        except (ValueError, OSError) as error:
            self._refuse(error, folder, before)
        except SystemExit as stopped:
            if not isinstance(stopped.code, int) or stopped.code > SIGNALLED:  # a signal is meant for all runs
                if self.processes:
                    self.processes.close()
                raise
            if stopped.code and os.getpid() != self.pid:
                raise ValueError(f"the run in {folder} ended with exit code {stopped.code}") from stopped
            self.exit_codes.append(stopped.code)
        except KeyboardInterrupt:  # before there was anything to save
            if self.is_first:
                remove_if_empty(folder)
            self.end_all(folder, "interrupted by SIGINT", 128 + signal.SIGINT)
            raise
        except BaseException as error:
            if self.processes and self.is_first:
                traceback.print_exc()
            self.end_all(folder, f"{type(error).__name__}: {error}", 1)
            raise

    def _settings(self, cfg: DictConfig, folder: Path) -> tuple[S, Path]:
        """(settings, folder) for `main`, checked; the same in all processes."""
        run = folder  # or the one that train.py would resume, for a program that writes nothing
        if not self.writes and folder == Path() and cfg.get("resume"):
            run = resumed_run(cfg.resume, cfg.name, HydraConfig.get().runtime.choices.experiment) or folder
        if self.is_first:
            composed = cfg
            if "resume" in cfg:
                from conf.resumed import with_earlier_settings  # it needs PyTorch, which a tool may do without

                given = [override for override in _as_given() if override not in self.defaults]
                cfg = with_earlier_settings(cfg, given, run, set(known_keys(self.schema)))
            _refuse_missing_in_files(cfg, composed, self.schema)
            settings = settings_from(cfg, self.schema)
        if self.processes:  # all use the first one's, which are checked
            resolved = OmegaConf.to_container(cfg, resolve=True) if self.is_first else None  # with its ${oc.env:...}
            cfg = OmegaConf.create(literal(self.processes.broadcast(resolved)))
            settings = settings_from(cfg, self.schema)
        return settings, run

    def _refuse(self, error: ValueError | OSError, folder: Path, before: dict) -> None:
        """End a run with one line of error; `before`: the listing of its folder before it began."""
        self.show(error)
        message = of_the_system(error, folder) if isinstance(error, OSError) else str(error)
        if self.processes and self.is_first:
            remove_logs_of_others(folder, before)
        # whether the run had begun; in a folder that another process holds, it had not. In "." other programs may write
        has_begun = folder != Path() and not isinstance(error, InUse) and listing(folder) != before
        has_begun = has_begun and not holder(folder)
        if self.is_first and not remove_if_empty(folder) and has_begun:
            message += keep_traceback(folder / "error.log")
        self.end_all(folder, message, EXIT_USER_ERROR)
        if os.getpid() != self.pid:  # in a launcher's job, whose end the process `pid` reads
            raise ValueError(message) from error
        self.exit_codes.append(fail(message))
        parsed = OverridesParser.create().parse_overrides(self.values)
        swept = {override.key_or_group for override in parsed if override.is_sweep_override()}
        varied = [override for override in _as_given() if key_of(override) in swept]
        self.refused.append(f"no run of {' '.join(varied) or 'this'}: {message}")

    def show(self, error: Exception) -> None:
        """Print the traceback of an error that one line will explain, if HYDRA_FULL_ERROR=1."""
        if self.show_traceback and self.is_first:
            traceback.print_exception(error)

    def refuse_all(self, error: Exception, message: str) -> NoReturn:
        """End before any run: a mistake in the command line."""
        self.show(error)
        self.end_all(None, message, EXIT_USER_ERROR)
        sys.exit(fail(message))

    def end_all(self, folder: Path | None, message: str, code: int) -> None:
        """With several processes, tell the others why they must end, and end this one; with one process, do nothing.

        The first one prints the message, its own or another's. folder: of the run, if it has begun.
        """
        if self.processes is None:
            return
        fail(message, prints=self.is_first)
        if folder and not self.is_first:
            message += keep_traceback(folder / f"rank_{self.processes.rank}.log")
        self.processes.fail(message, code)
        sys.exit(code)


def is_sweep_run() -> bool:
    """Whether this run is one of a sweep, so that others may follow it."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def _as_given() -> list[str]:
    """The arguments of this run as they were typed, not resolved."""
    return OmegaConf.to_container(HydraConfig.get().overrides.task)


def name_user() -> None:
    """Give the user a name in a container that has only a number: PyTorch names a folder by it, or fails."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # the second since Python 3.13
        os.environ["LOGNAME"] = str(os.getuid())


def register(schema: type) -> None:
    """Register with Hydra what the YAML files refer to: the config `schema` and the resolvers `run_dir`, `sweep_dir`,
    `optim_for`, `tokenizer_for` and `unless`.

    `schema` holds every field with its default, so that `--cfg job` lists all keys and all can be overridden. It is
    stored without its types: `settings_from` checks those, after composition, where one place can explain a mistake.
    """
    ConfigStore.instance().store("schema", OmegaConf.create(OmegaConf.to_container(_typed(schema))))
    # cached: they create a folder, and a launcher's jobs, processes of their own, receive what was found here
    OmegaConf.register_new_resolver("run_dir", folder_of_run, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("sweep_dir", folder_of_sweep, replace=True, use_cache=True)
    # Muon handles only the matrices of a GPT of ours
    OmegaConf.register_new_resolver(
        "optim_for", lambda model: "adamw" if model == "huggingface" else "muon", replace=True
    )
    OmegaConf.register_new_resolver("tokenizer_for", lambda model, ours: model or ours, replace=True)
    OmegaConf.register_new_resolver("unless", lambda other, value: None if other else value, replace=True)


@cache
def _typed(schema: type) -> DictConfig:
    return OmegaConf.structured(schema)


def settings_from(cfg: DictConfig, schema: type[S]) -> S:
    """Merge `cfg` strictly into the dataclasses of `schema` and return them; raise ValueError with one line."""
    keys = known_keys(schema)
    for key in _missing(OmegaConf.to_container(cfg)):
        raise ValueError(no_value(key))
    for name in cfg:
        # OmegaConf would not say which key it means
        if name in keys and is_dataclass(keys[name].type) and not OmegaConf.is_dict(cfg[name]):
            raise ValueError(f"{name}={cfg[name]} is no value: {name} holds keys of its own; write {name}.KEY=VALUE")
    try:
        for key in (name for name, known in keys.items() if known.type in (bool, bool | None)):
            if isinstance(value := OmegaConf.select(cfg, key), int) and value not in (0, 1):  # OmegaConf reads true
                raise ValueError(f"{key}={value} has the wrong type: expected true or false")
        merged = OmegaConf.merge(_typed(schema), cfg)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except (OmegaConfBaseException, ValueError) as error:
        raise ValueError(explain(error, keys, cfg)) from error


def changed(settings: S, change: str) -> S:
    """`settings` with KEY=VALUE, read as on a command line; ValueError where no run has such a key or value."""
    cfg = OmegaConf.create(literal(asdict(settings)))
    cfg.merge_with_dotlist([change])
    return settings_from(cfg, type(settings))


def _refuse_missing_in_files(cfg: DictConfig, composed: DictConfig, schema: type) -> None:
    """Raise ValueError for a ??? in a chosen file, unless the command line has its key: composing drops missing values.
    The experiment, which comes after the groups, may give a value for theirs.

    cfg: `composed`, or the settings of a resumed run, which may have the value; only the files of groups that were
        typed are then checked, except an experiment's.
    """
    choices, typed, resumed = HydraConfig.get().runtime.choices, set(map(key_of, _as_given())), cfg is not composed
    for group in (group for group in choices if not resumed or group in typed - {"experiment"}):
        name = choices[group]
        found = files_of(group, name)
        if len(found) > 1:
            raise ValueError(f"{group}={name} is {found[0]}, and {found[1]} would be ignored; give yours another name")
        if not found:
            continue
        (file,) = found
        for key in _missing(OmegaConf.to_container(OmegaConf.load(file)), package_of(file, group)):
            dropped = None if resumed else OmegaConf.select(_typed(schema), key)  # what is left where nothing was given
            given = group != "experiment" and OmegaConf.select(cfg, key) != dropped
            if key not in typed and not given:
                raise ValueError(no_value(key, f"{group}={name}"))


def _missing(values: Any, key: str = "") -> Iterator[str]:
    """The dotted keys below `key` whose value is ???; nothing is resolved."""
    if values == "???":
        yield key
    elif isinstance(values, list):
        yield from (found for index, value in enumerate(values) for found in _missing(value, f"{key}[{index}]"))
    elif isinstance(values, dict):
        prefix = f"{key}." if key else ""
        yield from (found for name, value in values.items() for found in _missing(value, f"{prefix}{name}"))
