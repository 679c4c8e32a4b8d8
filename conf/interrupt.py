"""Ctrl-C before a program's `main`: it ends the process in silence, where Python shows a traceback of imports.

PyTorch takes seconds to import. Programs call `leave_quietly` before that; conf/program.py, which handles a
KeyboardInterrupt, calls `raise_again`.
"""

import os
import signal
from types import FrameType


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
