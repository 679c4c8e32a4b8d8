"""Ctrl-C asks the loop to stop after the step it is in; a second Ctrl-C stops at once."""

import signal
from types import FrameType


class StopRequest:
    """Use with `with`; the loop reads `requested` between steps. Outside the main thread nothing is installed."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "StopRequest":
        try:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        except ValueError:  # not the main thread: Python allows no handlers there
            self._previous = None
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
