"""One process for each run's folder: two would mix their metrics and delete each other's checkpoints."""

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "lock"
HOLDER = b"process "  # how its one line begins
SWEEP = "multirun.yaml"  # what Hydra writes beside the folders of a sweep's runs, before the first begins
DATED = re.compile(r"\d{4}-\d\d-\d\d_")  # the name of a run's folder
TRIES = 10  # attempts to take the lock, a hundredth of a second apart


def sweep_of(run: Path) -> Path | None:
    """The folder of the sweep that the run belongs to; None if it belongs to none."""
    return run.parent if (run.parent / SWEEP).is_file() else None


def by_time(run: Path) -> tuple[bool, list[str | int]]:
    """Sort key of runs, or sweeps: the time in the folder's name and the number after it, 10 after 9. A folder without
    a time was renamed by the user, so it comes first."""
    dated = bool(DATED.match(run.name))
    return dated, [int(part) for part in re.findall("[0-9]+", run.name)] if dated else [run.name]


class InUse(ValueError):
    """Another process holds the folder."""


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir`, which is created if it is missing, for this process alone.

    The lock is flock(2) on `run_dir/lock`, which the system releases when the process ends in any way: a file left
    behind by kill -9 blocks nothing. Where flock is not supported (some network file systems), a line says so and
    nothing is locked. A folder that was created here is removed again if nothing was written in it.

    Raises:
        InUse: another process holds it; one line with its id.
        ValueError: the folder has a file `lock` of something else.
    """
    existed = run_dir.exists()
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / NAME
    descriptor = _take(path)
    try:
        yield
    finally:
        # unlinked before it is released: a process that has it open by then sees that and tries again
        with suppress(OSError):  # the disk may be gone by now
            path.unlink()
        os.close(descriptor)
        if not existed:
            with suppress(OSError):  # something was written
                run_dir.rmdir()


def holder(run_dir: Path) -> str:
    """The holder of `run_dir`, "process 12 on node1"; empty if there is none, or flock is not supported."""
    try:
        descriptor = os.open(run_dir / NAME, os.O_RDONLY)
    except OSError:  # no file, no holder
        return ""
    try:
        _lock(descriptor, shared=True)
    except BlockingIOError:
        return _written_in(descriptor)
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return ""


def _take(path: Path) -> int:
    """An open file that holds the lock."""
    tries = 0
    while True:
        # not inherited by programs that this process starts: they must not hold it longer than we do
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor)
        except BlockingIOError as error:
            other = _written_in(descriptor)
            os.close(descriptor)
            if (tries := tries + 1) < TRIES:  # `holder` takes it for a moment to look
                time.sleep(0.01)
                continue
            raise InUse(
                f"run folder {path.parent} is in use by {other}; wait for its end, stop it, or give another "
                "hydra.run.dir"
            ) from error
        except OSError as error:
            print(f"lock       none: {path.parent} cannot be locked ({error}); start no second process in it")
            return descriptor
        try:
            current = os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            current = False
        if current:
            if not HOLDER.startswith(os.pread(descriptor, len(HOLDER), 0)):  # kill -9 may leave a part of a line
                os.close(descriptor)
                raise ValueError(f"{path} is no lock of a run; give another hydra.run.dir, or move it away")
            os.ftruncate(descriptor, 0)
            job = f", SLURM job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}{job}\n".encode(), 0)
            return descriptor
        os.close(descriptor)  # the lock of a file that its last holder has just removed


def _written_in(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "a process that just began"


def _lock(descriptor: int, *, shared: bool = False) -> None:
    """Take the lock; BlockingIOError where another process has it, any other OSError where flock is not supported."""
    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
