"""`metrics.jsonl`: one JSON object a line, each step once, whole lines only, whatever happens to disk or run."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """Opened for appending. Lines that a full disk refuses are kept in memory and written when there is room again.

    Args:
        path: the file.
        first_step: steps already done; lines past it (written after the checkpoint that is resumed) are dropped.
        resumes: whether the run goes on; only then may the file exist.
        say: told once when writing fails and once when it works again.

    Raises:
        ValueError: the file exists and the run is a new one, or it is damaged.
    """

    def __init__(self, path: Path, first_step: int, *, resumes: bool, say: Callable[[str], None]) -> None:
        if path.exists() and not resumes:
            raise ValueError(
                f"run folder {path.parent} already holds a run; give another hydra.run.dir, or resume=auto"
            )
        self.path, self._say = path, say
        self._waiting: list[str] = []
        self._failed = False
        if path.exists():
            lines = _lines_until(path, first_step)
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(line + "\n" for line in lines))
            temporary.replace(path)
        self._file = path.open("ab", buffering=0)

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        # JSON has no inf and NaN: they are written as null, a reader of the file sees that there was no number
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in values.items()}
        self._waiting.append(json.dumps({"step": step, **finite}) + "\n")
        self._write()

    def read(self) -> list[dict[str, Any]]:
        """The records in the file: each has "step"; None stands for what was not finite."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def close(self) -> None:
        if self._failed:
            self._write()
        if self._waiting:
            self._say(f"not written: the last {len(self._waiting)} lines of {self.path}")
        self._file.close()

    def _write(self) -> None:
        end = os.fstat(self._file.fileno()).st_size
        content = memoryview("".join(self._waiting).encode())
        try:
            while content:
                content = content[self._file.write(content) :]
        except OSError as error:
            self._file.truncate(end)  # no half lines
            if not self._failed:
                self._say(f"not written: {self.path}: {error}; its lines wait in memory, the run goes on; free space")
            self._failed = True
            return
        self._waiting.clear()
        if self._failed:
            self._say(f"written again: {self.path}")
        self._failed = False


def _lines_until(path: Path, step: int) -> list[str]:
    """Its lines up to `step`. A last line without an end was being written when the machine stopped: it is dropped."""
    *lines, _ = path.read_bytes().split(b"\n")
    try:
        return [line.decode() for line in lines if json.loads(line)["step"] <= step]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); move it away to resume without the earlier metrics") from error
