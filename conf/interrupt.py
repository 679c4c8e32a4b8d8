"""What ends a program before its `main`, where Python shows a traceback of imports: Ctrl-C, and a full disk.

PyTorch takes seconds to import. Programs call `leave_quietly` and `need_temporary_files` before that; conf/program.py,
which handles a KeyboardInterrupt, calls `raise_again`.
"""

import os
import signal
import sys
import tempfile
from types import FrameType


def need_temporary_files() -> None:
    """Exit with one line where none can be made, which `import torch` would fail of: on a full or read-only disk."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        from conf.mistakes import fail

        sys.exit(fail(f"{error.strerror}; make room there, or give TMPDIR a folder that can be written"))


def leave_quietly() -> None:
    """Exit with 130 at SIGINT; where it is ignored, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Undo `leave_quietly`."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)  # an exception may be caught by what is being imported
