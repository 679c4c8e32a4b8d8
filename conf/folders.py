"""The folder of a run: its path, its contents, and its removal after a refused run."""

import os
import re
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path

from conf.keys import is_folder_name
from training.lock import NAME as LOCK
from training.lock import SWEEP, by_time, sweep_of

LOG_OF_ANOTHER = re.compile(r"rank_\d+\.log")  # logs of the other processes, which write them if they fail
MADE: set[Path] = set()  # created by this process, before anything was checked


def folder_of_run(resume: str | None, name: str | None, experiment: str, time: str) -> str:
    """A new folder for a new run, the old one for a run that is resumed."""
    return str(resumed_run(resume, name, experiment) or _own(f"{_runs(name, experiment)}/{time}"))


def folder_of_sweep(resume: str | None, name: str | None, experiment: str, time: str) -> str:
    """A new folder for a sweep; if no name was typed, under the name of the run that it resumes."""
    if not name and resume != "auto" and (run := resumed_run(resume, None, experiment)):
        name = (sweep_of(run) or run).parent.name
    return _own(f"{_runs(name, experiment)}/{time}")


def resumed_run(resume: str | None, name: str | None, experiment: str) -> Path | None:
    """The folder of the run that `resume` names, with `auto` the newest of that name; None if it names none."""
    if resume == "auto":
        return newest_run(name, experiment)
    if resume:
        # .../<run>/checkpoints/<name>  ->  .../<run>
        checkpoint = Path(os.path.abspath(str(resume)))  # not yet checked: it may be a number
        run = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint
        if (run / "checkpoints").is_dir() and checkpoint.is_dir() and (not name or str(name) in _names(run)):
            return run
    return None


def newest_run(name: str | None, experiment: str) -> Path | None:
    """The folder that resume=auto means; None if there is no run of that name. A run that was killed before its first
    checkpoint begins anew."""
    earlier = [path.parent for path in Path(_runs(name, experiment)).glob("*/checkpoints")]
    return max(earlier, key=by_time, default=None)


def _names(run: Path) -> list[str]:
    """A run's names: its parent folder's and, as a sweep's run is one level deeper, the one's above; not `runs`."""
    above = run.parent.parent.name
    return [run.parent.name, *([] if above == "runs" else [above])]


def _runs(name: str | None, experiment: str) -> str:
    # not yet checked: a name that is refused later makes no folder elsewhere
    return f"runs/{name if name and is_folder_name(str(name)) else experiment}"


@cache  # called more than once
def _own(folder: str) -> str:
    """Create `folder`, with a number appended if another run began in the same second, and return its path."""
    own, number = folder, 1
    while True:
        try:
            os.makedirs(own)
            MADE.add(Path(own))
            return own
        except FileExistsError:
            number += 1
            own = f"{folder}_{number}"
        except OSError:  # Hydra will fail too, and conf/mistakes.py explains that
            return folder


def listing(folder: Path) -> dict[str, int]:
    """The names in `folder` except the lock file, with their modification times in ns."""
    changed = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # another process's, renamed or removed meanwhile
            changed[path.name] = path.lstat().st_mtime_ns
    changed.pop(LOCK, None)
    return changed


def keep_traceback(log: Path) -> str:
    """Append the traceback to `log` and return a note of that for the message; '' where it cannot be written."""
    try:
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:  # a file name may not be valid text
            file.write(traceback.format_exc())
    except OSError:
        return ""
    return f" [traceback: {log}]"


def remove_logs_of_others(folder: Path, before: dict[str, int]) -> None:
    """Remove other processes' logs, of the same mistake, if nothing else has changed since the listing `before`."""
    now = listing(folder)
    logs = {name for name in now.keys() - before.keys() if LOG_OF_ANOTHER.fullmatch(name)}
    if {name: changed for name, changed in now.items() if name not in logs} == before:
        for name in logs:
            (folder / name).unlink(missing_ok=True)


def remove_empty_sweeps(folders: set[Path]) -> None:
    """Remove those of `folders`, and of the ones this process made, that are sweeps with only Hydra's own file."""
    for sweep in MADE | folders:
        if list(listing(sweep)) == [SWEEP]:
            (sweep / SWEEP).unlink()
            remove_if_empty(sweep)


def remove_if_empty(folder: Path) -> bool:
    """Remove `folder` if it is empty; return whether it is gone.

    Hydra creates the run's folder before anything is checked; a refused run leaves none behind.
    """
    if folder != Path() and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        name, runs = folder.parent, folder.parent.parent
        if runs.name == "runs" and not any(name.iterdir()):  # nor a name without runs, nor runs/ without a name
            name.rmdir()
            if not any(runs.iterdir()):
                with suppress(OSError):  # a link, or a mount point
                    runs.rmdir()
        return True
    return not folder.exists()
