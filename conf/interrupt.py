"""What ends a program during its imports, where Python would show a traceback: Ctrl-C, a full disk, a package that is
missing or damaged.

PyTorch takes seconds to import. Programs call `before_imports` before that, train.py `before_a_run`; conf/program.py,
which handles a KeyboardInterrupt, calls `raise_again`.
"""

from __future__ import annotations  # macOS's Python 3.9 parses this file before the check below refuses it

import os
import signal
import sys
import traceback
from textwrap import shorten
from types import FrameType, TracebackType

OLDEST = (3, 11)
# not found if Python is started without this folder on its path
_OURS = ("__main__", "conf", "data", "kernels", "model", "scripts", "train", "training")


def before_imports() -> None:
    """What every program does first. Exit with one line on Windows, if Python is too old or, later, if an import of a
    package that is not ours fails."""
    leave_quietly()
    if sys.platform == "win32":
        _exit("this runs on Linux and macOS; on Windows use WSL (`wsl --install`), and begin anew there")
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:2]))
        _exit(f"{sys.executable} is Python {found}, older than 3.11; begin with `uv run`, or use 3.13")
    sys.excepthook = _explain_import


def before_a_run() -> None:
    """`before_imports`, and what SLURM and the other processes of a run need as early as that."""
    before_imports()
    # SLURM's signal of a time limit waits for StopRequest, which handles it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    if os.environ.keys() & {"WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}:
        # when one process dies, the others say so in one line, which PyTorch's traces would bury
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def leave_quietly() -> None:
    """Exit with 130 at SIGINT; if it is ignored, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Undo what was set up for the imports."""
    if sys.excepthook is _explain_import:
        sys.excepthook = sys.__excepthook__
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)  # an exception may be caught by what is being imported


def _explain_import(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    bodies = [f.f_globals["__name__"] for f, _ in traceback.walk_tb(trace) if f.f_code.co_name == "<module>"]
    importing = next((name for body in bodies if (name := body.partition(".")[0]) not in _OURS), None)
    package = (getattr(error, "name", None) or "").partition(".")[0]
    missing = package if kind is ModuleNotFoundError and package not in (*_OURS, importing) else ""
    line = None
    if missing in sys.stdlib_module_names:  # such as _ctypes or _lzma, if Python was built without their libraries
        line = f"{sys.executable} was built without {missing}; use another Python, as `uv run --managed-python` does"
    elif missing:
        line = f"{missing} is not installed for {sys.executable}; begin with `uv run`, or run `pip install .` first"
    elif isinstance(error, FileNotFoundError) and "temporary directory" in str(error):  # PyTorch needs one
        line = f"{error.strerror}; make room there, or give TMPDIR a folder that can be written"
    elif importing and package not in _OURS and isinstance(error, Exception):  # such as a missing CUDA library
        reason = shorten("".join(traceback.format_exception_only(error)), 200)
        line = f"{importing} cannot be loaded ({reason}); where it is damaged, `uv sync --reinstall` mends it"
    if line is None or os.environ.get("HYDRA_FULL_ERROR") == "1":
        sys.__excepthook__(kind, error, trace)
    if line:
        _exit(line)


def _exit(message: str) -> None:
    """Print one line and exit with 2, as conf/mistakes.py does, which imports packages itself."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(2)  # an exception in a hook would be shown beside the first
