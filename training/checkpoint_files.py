"""The files of a checkpoint: a full disk raises OSError, a damaged file a ValueError of one line."""

import io
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from data.shards import file_sha256, flush

STATE = "state.pt"
DEEPEST = 16  # a description is nested four deep
# required keys of a mapping, each with the type, or the form, of its value; numbers are counts, times and losses
Form = Mapping[str, Any]


def write_weights(weights: dict[str, torch.Tensor], path: Path, *, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; OSError where the disk is full."""
    path.touch()
    mode = path.stat().st_mode  # the mode of this user's files; the library creates its file with 0600
    try:
        save_file({name: value.contiguous() for name, value in weights.items()}, path, metadata)
    except SafetensorError as error:  # how that library reports a full disk
        raise OSError(f"{path}: {error}") from error
    path.chmod(mode)


def free_folder(path: str) -> Path:
    """`path`, resolved, if nothing or an empty folder is there; ValueError otherwise."""
    if not path:
        raise ValueError("folder= is not given; name a new folder, such as folder=mine")
    folder = Path(path).resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"folder={path} exists and is not an empty folder; give another, nothing is overwritten")
    return folder


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder to fill, renamed to `folder` at the end; if that fails, OSError, and nothing is left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        temporary.mkdir()
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            flush(path)
        temporary.rename(folder)  # replaces an empty folder; OSError if one was filled meanwhile
        flush(folder.parent)
    except (OSError, SafetensorError) as error:  # shutil's message lists every file, and safetensors words its own
        if (number := re.search(r"(?:Errno|os error) (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _File(io.FileIO):
    """A file that remembers why a write failed: torch.save only says that it did."""

    error: OSError | None = None

    def write(self, content) -> int:
        view = memoryview(content).cast("B")
        done = 0
        try:
            while done < len(view):  # a nearly full disk writes a part, and the rest raises the error
                done += super().write(view[done:])
        except OSError as error:
            self.error = error
            raise
        return done


def write_state(state: Any, path: Path) -> None:
    """Write tensors and plain values; OSError where the disk is full."""
    with _File(path, "w") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if file.error is None:
                raise
            raise OSError(file.error.errno, file.error.strerror, str(path)) from error


def write_json(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def without_nan(found: Any) -> Any:
    """`found` with None in place of each number that is not finite, which JSON lacks: a reader sees there was none."""
    if isinstance(found, Mapping):
        return {key: without_nan(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [without_nan(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The mapping in the file `name` of a checkpoint; ValueError where it is damaged."""
    try:
        value = json.loads((folder / name).read_text())
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair can be read but not written
    except (ValueError, RecursionError):  # not JSON, or not even text
        value = None
    if not isinstance(value, dict) or _is_deep(value):
        raise ValueError(f"checkpoint {folder}: {name} is damaged; use another checkpoint")
    return value


def _is_deep(value: Any) -> bool:
    """Whether `value` is nested deeper than anything this program writes; other values are safe to recurse into."""
    level = [value]
    for _ in range(DEEPEST):
        level = [list(outer.values()) if isinstance(outer, dict) else outer for outer in level]
        level = [inner for outer in level if isinstance(outer, list) for inner in outer]
    return bool(level)


def require(folder: Path, form: Form, values: Any, file: str, place: str = "") -> None:
    """Raise ValueError for the first key of `form` that `values`, from `file` of the checkpoint `folder`, lacks or has
    in another type; `place` is where in the file they are."""
    for key, expected in form.items():
        name = f"{place}{key}"
        if not isinstance(values, Mapping) or key not in values:
            raise ValueError(f"checkpoint {folder}: {file} has no {name}; use another checkpoint")
        value, nested, kind = values[key], isinstance(expected, Mapping), f"a {type(values[key]).__name__}"
        wrong = not isinstance(value, Mapping if nested else expected)
        wrong |= isinstance(value, bool) and expected is not bool
        # only the best loss may be infinite, before there was one
        number = not wrong and isinstance(value, int | float)
        if number and not (0 <= value < 2**63 or (value == math.inf and file == STATE)):
            wrong, kind = True, "a number past 2^63" if abs(value) >= 2**63 else f"{value}"
        if wrong:
            raise ValueError(f"checkpoint {folder}: {file} has {kind} as its {name}; use another checkpoint")
        if nested:
            require(folder, expected, value, file, f"{name}.")


def fingerprint(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256, as a manifest has them."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def use_its_commit(meta: dict[str, Any]) -> str:
    """The remedy for a checkpoint of another version."""
    provenance = meta.get("provenance")
    commit = provenance.get("commit") if isinstance(provenance, Mapping) else None
    return f"use the commit that wrote it ({commit})"
