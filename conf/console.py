"""A console that cannot be written to (full disk, `| head`, closed terminal, ASCII) does not end a program."""

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


class Output:
    """A text stream that ignores failures to write: the text is lost, and the next write is tried again.

    Characters that its encoding lacks are written as \\u65e5.

    report: called with the first failure.
    """

    def __init__(self, stream: TextIO, report: Callable[[OSError], None] = lambda error: None) -> None:
        self._stream, self._report = stream, report
        self._failed = False
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, call: Callable[..., object], *arguments: str) -> None:
        try:
            call(*arguments)
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._report(error)


def protect_console(*, prints_only: bool) -> None:
    """Wrap `sys.stdout` and `sys.stderr` in an Output each, once, until the interpreter ends.

    The first failure of stdout is reported on stderr, but not a closed pipe (`| head`) if the program `prints_only`.
    """

    def report(error: OSError) -> None:
        if not (prints_only and isinstance(error, BrokenPipeError)):
            print(f"the console cannot be written ({error.strerror}); the program goes on without it", file=sys.stderr)

    if not os.environ.get("COLUMNS", "80").strip("0"):  # 0, no terminal's width: Rich would print nothing
        del os.environ["COLUMNS"]
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before the start; a file must not get its descriptor's number
            stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        if not isinstance(stream, Output):
            setattr(sys, name, Output(stream, report) if name == "stdout" else Output(stream))
