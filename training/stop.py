"""Stopping a run: a signal or a time limit ends it after the current step, with everything saved.

Exit codes: 130 after SIGINT (Ctrl-C), 143 after SIGTERM, 138 after SIGUSR1 (scripts/train.sbatch makes SLURM send it),
129 after SIGHUP (a closed terminal), as a shell counts them: 128 + the signal; 75 (sysexits.h: try again later) after
`train.max_hours`; 65 after numbers that were not finite (training/bad_steps.py). In each case `resume_command`
resumes the run. (2 is a user's mistake, conf/program.py, or memory that ran out, training/memory.py: something has to
be changed first.) A second signal takes its default action and ends the process at once. A second SIGHUP or SIGUSR1
is ignored: a closed terminal sends two SIGHUPs, the shell's and the kernel's, and SLURM also sends SIGUSR1 to a program
that wraps the run and may pass it on. Among several processes, a repeat of the same signal is ignored: torchrun
passes on what a terminal has already sent to all. A SIGHUP (nohup) or SIGINT (a script's &) ignored before still is.
"""

import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from training.parallel import ALONE, World
from training.watchdog import SHOW_CURSOR

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
EXIT_TIME_LIMIT = 75
STDERR = 2  # the file descriptor: a signal handler may interrupt a write through sys.stderr
REASONS = (EXIT_TIME_LIMIT, *(128 + number for number in SIGNALS))  # exit codes; processes vote by their index

TRAIN = Path(__file__).resolve().parent.parent / "train.py"


def unless_ignored(numbers: Iterable[int]) -> list[int]:
    """The signals to handle: a SIGHUP that nohup ignores and a SIGINT that a script's `&` ignores stay ignored."""
    ignored = {n for n in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) is signal.SIG_IGN}
    return [number for number in numbers if number not in ignored]


def resume_command(run_dir: Path, *overrides: str) -> str:
    """The command that resumes `run_dir` with `overrides` (key=value), for this shell and folder."""
    here = current_folder()
    program = str(TRAIN.relative_to(here) if TRAIN.is_relative_to(here) else TRAIN)
    arguments = program, f"resume={folder_value(run_dir)}", *overrides
    if (processes := os.environ.get("LOCAL_WORLD_SIZE", "1")) != "1":  # torchrun's; srun sets none
        return shell_command("torchrun", "--nproc-per-node", processes, *arguments)
    return shell_command("python", *arguments)


def current_folder() -> Path:
    """The current folder; if it was removed meanwhile, os.devnull, below which there is nothing."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path(os.devnull)


def folder_value(path: Path) -> str:
    """`path` quoted as Hydra's grammar needs it in key=value."""
    folder = str(path) if "/" in str(path) else f"./{path}"  # never a number, null or auto
    if not re.fullmatch(r"[\w./-]+", folder, flags=re.ASCII):  # other characters may have a meaning for Hydra
        folder = re.sub(r"(\\*)\$\{", r"\1\1\\${", folder)
        folder = '"' + re.sub(r'(\\*)("|$)', lambda end: end[1] * 2 + end[2].replace('"', r"\""), folder) + '"'
    return folder


def shell_command(program: str, *arguments: str) -> str:
    """The command that runs `program` (python, torchrun, wandb) of this installation, for this shell and folder."""
    if "UV" in os.environ and current_folder() == TRAIN.parent:  # `uv run` in the checkout
        command = ["uv", "run", program]
    else:
        own = sys.executable if program == "python" else str(Path(sys.executable).with_name(program))
        command = [program] if shutil.which(program) == own else [own]
    return shlex.join([*command, *arguments])


class StopRequest:
    """Use with `with`; the loop calls `poll` after each step. Outside the main thread no handler is installed.

    `max_hours` (None: no limit) count from `began`, a time.perf_counter().

    Each of several processes sends its request with its next step, and all stop after the same later one.

    Attributes:
        reason: why the run should stop ("SIGTERM", "train.max_hours=2"), None while it should not.
        exit_code: the process's exit code; 0 while there is no reason to stop.
        purpose: what the resume command is for, in words ("to go on").
        overrides: key=value arguments that the resume command needs.
    """

    def __init__(self, max_hours: float | None = None, began: float = 0.0, world: World = ALONE) -> None:
        self.reason: str | None = None
        self.exit_code = 0
        self.purpose, self.overrides = "to go on", ()
        self._max_hours, self._began, self._world = max_hours, began, world
        self._previous: dict[int, object] = {}
        self._report = sys.unraisablehook

    def poll(self) -> bool:
        """Whether to stop after this step; of several processes each asks once a step, and all hear the same."""
        limit = self._max_hours
        if self.reason is None and limit is not None and time.perf_counter() - self._began >= limit * 3600:
            self.reason, self.exit_code = f"train.max_hours={limit:g}", EXIT_TIME_LIMIT
        if self._world.size == 1 or self.exit_code not in (0, *REASONS):
            return self.reason is not None
        if self.reason is not None:
            self._world.messages.vote(REASONS.index(self.exit_code))
        if (verdict := self._world.messages.verdict) is None:
            return False
        self.exit_code = REASONS[verdict]
        by_limit = self.exit_code == EXIT_TIME_LIMIT
        self.reason = f"train.max_hours={limit:g}" if by_limit else signal.Signals(self.exit_code - 128).name
        return True

    @property
    def signal(self) -> int:
        """The exit code of a signal, or 0. In a run's last step it changes nothing, but no other run may follow."""
        return self.exit_code if self.exit_code > 128 else 0

    def request(self, reason: str, exit_code: int, purpose: str, *overrides: str) -> None:
        """Request a stop from within the run."""
        self.reason, self.exit_code, self.purpose, self.overrides = reason, exit_code, purpose, overrides

    def __enter__(self) -> "StopRequest":
        try:
            for number in unless_ignored(SIGNALS):
                self._previous[number] = signal.signal(number, self._on_signal)
        except ValueError:  # not the main thread: Python allows no handlers there
            return self
        sys.unraisablehook = self._report_but_races
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # train.py blocks SIGUSR1 before its slow imports
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if sys.unraisablehook == self._report_but_races:
            sys.unraisablehook = self._report

    def _report_but_races(self, unraisable: Any) -> None:
        """A second signal at the same moment (systemd's SIGTERM and SIGHUP) finds its handler gone: Python says so."""
        if "ignored due to race condition" not in str(unraisable.exc_value):
            self._report(unraisable)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason, self.exit_code = signal.Signals(number).name, 128 + number
        # the default action needs no Python to run: it ends a process that is deep in a compiler or a stuck disk
        if number == signal.SIGTERM and self._world.watchdog:  # what torchrun sends to the others when one has died
            self._world.watchdog.suspect("SIGTERM")
        # torchrun passes on what the terminal has sent to all of us already
        twice = (signal.SIGHUP, signal.SIGUSR1, *((number,) if self._world.size > 1 else ()))
        for other in self._previous:
            signal.signal(other, signal.SIG_IGN if other in twice else signal.SIG_DFL)
        with suppress(OSError):  # a closed terminal cannot be written to
            if self._world.is_first:
                again = "" if number in twice else "; a second one ends it at once, unsaved"
                os.write(STDERR, f"\n{self.reason}: the run ends after this step, saved{again}\n".encode())
            # the progress bar hid the cursor, and may not get to show it again
            if sys.stdout is not None and sys.stdout.isatty():
                os.write(sys.stdout.fileno(), SHOW_CURSOR.encode())
