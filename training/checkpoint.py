"""Checkpoints on disk: a folder that is either whole or not there.

    <run>/checkpoints/step_000600/
        model.safetensors    the weights
        state.pt             optimizer and random-number states (read with weights_only=True: no code is run)
        checkpoint.json      step, data position, resolved settings, tokenizer, git commit, versions
        manifest.json        size and SHA-256 of the three above; written last
    <run>/checkpoints/last, best    links to two of them

A checkpoint is written under a hidden name, flushed to disk and renamed, so a process that dies at any moment leaves
hidden leftovers and whole checkpoints, nothing else. What a disk damaged later, the manifest finds out. A visible
folder is never emptied in place: it is renamed to a hidden name first.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

FORMAT = 2  # 2: the manifest
WEIGHTS, STATE, META, MANIFEST = "model.safetensors", "state.pt", "checkpoint.json", "manifest.json"
FILES = (META, WEIGHTS, STATE)  # what the manifest vouches for
Form = Mapping[str, Any]  # keys that a mapping must have; each names a type, or the form of what it holds


@dataclass
class Checkpoint:
    """A checkpoint that was opened: whole by its manifest, its description read, its tensors not yet."""

    path: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.meta["step"]

    def load_weights(self, model: nn.Module) -> None:
        """Copy the weights into `model`, on its device; ValueError names a tensor that does not fit."""
        device = next(model.parameters()).device
        try:
            weights = load_file(self.path / WEIGHTS, device=str(device))
        except SafetensorError as error:
            raise ValueError(
                f"checkpoint {self.path}: {WEIGHTS} cannot be read ({error}); use another checkpoint"
            ) from error
        for name, expected in model.state_dict().items():
            found = weights.get(name, expected)
            if (found.shape, found.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    f"checkpoint {self.path}: tensor {name} is {tuple(found.shape)} in {found.dtype}, the model's is "
                    f"{tuple(expected.shape)} in {expected.dtype}; check the model group"
                )
        result = model.load_state_dict(weights, strict=False)
        # tied embeddings are stored once
        missing = [key for key in result.missing_keys if key not in _tied_names(model)]
        if missing or result.unexpected_keys:
            wrong = (missing + result.unexpected_keys)[0]
            raise ValueError(f"checkpoint {self.path} does not fit the model: tensor {wrong}; check the model group")

    def load_state(self) -> dict[str, Any]:
        """What `write` was given as state, on the CPU; ValueError where the file holds code in place of values."""
        try:
            return torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"checkpoint {self.path}: {STATE} holds more than tensors and plain values, so it was not written by "
                "this program and is not read; use a checkpoint of your own"
            ) from error
        except (RuntimeError, EOFError, LookupError, TypeError, ValueError) as error:  # no archive, or a strange one
            reason = repr(error).partition("\\n")[0]
            raise ValueError(
                f"checkpoint {self.path}: {STATE} cannot be read ({reason}); use another checkpoint"
            ) from error

    def refuse_without(self, form: Form, values: Any, file: str, place: str = "") -> None:
        """ValueError for the first key of `form` that `values`, read from `file`, lacks or holds in another type."""
        for key, expected in form.items():
            name = f"{place}{key}"
            if not isinstance(values, Mapping) or key not in values:
                raise ValueError(f"checkpoint {self.path}: {file} has no {name}; use another checkpoint")
            nested = isinstance(expected, Mapping)
            if not isinstance(values[key], Mapping if nested else expected):
                kind = type(values[key]).__name__
                raise ValueError(f"checkpoint {self.path}: {file} has a {kind} as its {name}; use another checkpoint")
            if nested:
                self.refuse_without(expected, values[key], file, f"{name}.")


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors by name, tied ones once; they share the model's memory."""
    tied = _tied_names(model)
    return {name: value.detach() for name, value in model.state_dict().items() if name not in tied}


def prepare(folder: Path) -> None:
    """Make `folder` for a run's checkpoints and clear what a killed process left half written in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".*"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def write(folder: Path, weights: dict[str, torch.Tensor], state: Any, meta: dict[str, Any], *, best: bool) -> Path:
    """As `write_step`; then point `last` (and `best`) at it."""
    written = write_step(folder, weights, state, meta)
    for link in ("last", "best") if best else ("last",):
        temporary = _hidden(folder / link)
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(written.name)
        os.replace(temporary, folder / link)
    return written


def write_step(folder: Path, weights: dict[str, torch.Tensor], state: Any, meta: dict[str, Any]) -> Path:
    """Write `folder/step_NNNNNN` and return its path.

    weights: tensors that share no memory, on any device.
    state: what torch.save takes without pickling code: tensors, numbers, strings, lists, tuples, dicts.
    meta: JSON; must hold "step".

    Raises:
        OSError: the disk is full, the folder is gone or may not be written; earlier checkpoints are as they were.
    """
    final = folder / f"step_{meta['step']:06d}"
    temporary = _hidden(final)
    # not `parents=True`: a folder that vanished (an unmounted disk) must not come back somewhere else in silence
    temporary.mkdir()
    try:
        _write_weights(weights, temporary / WEIGHTS)
        _write_state(state, temporary / STATE)
        meta = {"format": FORMAT, "written": datetime.now(UTC).isoformat(timespec="microseconds"), **meta}
        _write_json(meta, temporary / META)
        _write_json({name: _fingerprint(temporary / name) for name in FILES}, temporary / MANIFEST)
        for path in (*(temporary / name for name in (*FILES, MANIFEST)), temporary):
            _flush(path)
        if final.exists():  # the same step again, after a resume from an earlier one, which is still there
            _remove(final)
        temporary.rename(final)
        _flush(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def prune(folder: Path, *, keep_last: int, keep_every: int) -> None:
    """Delete all but the newest `keep_last`, the best, and steps that are multiples of `keep_every` (0: none)."""
    newest_first = _by_age(folder)
    kept = {path.name for path in newest_first[:keep_last]}
    kept |= {(folder / name).resolve().name for name in ("last", "best")}
    for path in newest_first:
        if path.name not in kept and not (keep_every and _step(path) % keep_every == 0):
            _remove(path)


def open_checkpoint(path: str | Path, *, verify: tuple[str, ...] = FILES) -> Checkpoint:
    """Open a checkpoint, or the newest whole one of a run's folder; ValueError says in one line what is wrong.

    verify: the files that are compared with their checksums.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(
            f"checkpoint {path} does not exist; give a folder such as runs/<experiment>/<time>/checkpoints/last"
        )
    if (path / "checkpoints").is_dir():  # a run's folder was given
        newest = newest_complete(path / "checkpoints", verify=verify)
        if newest is None:
            raise ValueError(f"run {path} has no whole checkpoint; give another run or checkpoint")
        return newest
    for file in (*FILES, MANIFEST):
        if not (path / file).is_file():
            raise ValueError(
                f"checkpoint {path} has no {file}; give a folder that holds {', '.join(FILES)}, {MANIFEST}"
            )
    meta = _read_json(path, META)
    if meta.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path} has format {meta.get('format')}, this version reads {FORMAT}")
    manifest = _read_json(path, MANIFEST)
    for file in verify:
        expected, found = manifest.get(file), _fingerprint(path / file)
        if found != expected:
            raise ValueError(
                f"checkpoint {path}: {file} is damaged ({found['bytes']:,} bytes; size or SHA-256 is not the "
                "manifest's); use another checkpoint"
            )
    checkpoint = Checkpoint(path.resolve(), meta)
    checkpoint.refuse_without({"step": int}, meta, META)
    return checkpoint


def newest_complete(
    folder: Path,
    report: Callable[[str], None] = print,
    last_step: int | None = None,
    *,
    verify: tuple[str, ...] = FILES,
) -> Checkpoint | None:
    """The checkpoint of `folder` that was written last and is whole; None where there is none.

    `report` is told of every one that was passed over because it is damaged. Those after `last_step` do not count.
    """
    for path in _by_age(folder):
        if last_step is not None and _step(path) > last_step:
            continue
        try:
            return open_checkpoint(path, verify=verify)
        except (ValueError, OSError) as error:
            report(f"passed over: {error}")
    return None


def newest_checkpoint(runs: Path) -> Path:
    """The `last` checkpoint written most recently under `runs`."""
    found = sorted(runs.glob("**/checkpoints/last/" + META), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ValueError(f"no checkpoint under {runs}/; train first (python train.py) or give checkpoint=PATH")
    return found[-1].parent


def _by_age(folder: Path) -> list[Path]:
    """Visible checkpoints, the one written last first; what cannot be read counts as newest, so that it is reported.

    By the time of writing and not by step: a run that went on from step 10 may still have the step 20 that it left.
    """

    def written(path: Path) -> tuple[str, int]:
        try:
            return str(json.loads((path / META).read_text())["written"]), _step(path)
        except (OSError, ValueError, KeyError, TypeError):
            return "unknown", _step(path)  # sorts after every date

    found = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    return sorted(found, key=written, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _tied_names(model: nn.Module) -> set[str]:
    """Names of parameters that share another one's memory."""
    first_name: dict[int, str] = {}
    tied = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first_name.setdefault(id(parameter), name) != name:
            tied.add(name)
    return tied


def _write_weights(weights: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file({name: value.contiguous() for name, value in weights.items()}, path)
    except SafetensorError as error:  # how that library reports a full disk
        raise OSError(f"{path}: {error}") from error


class _File(io.FileIO):
    """A file that remembers why a write failed: torch.save only says that it did."""

    error: OSError | None = None

    def write(self, content) -> int:
        view = memoryview(content).cast("B")
        done = 0
        try:
            while done < len(view):  # a disk that is nearly full takes a part, and the error comes with the rest
                done += super().write(view[done:])
        except OSError as error:
            self.error = error
            raise
        return done


def _write_state(state: Any, path: Path) -> None:
    with _File(path, "w") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if file.error is None:
                raise
            raise OSError(file.error.errno, file.error.strerror, str(path)) from error


def _write_json(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((folder / name).read_text())
    except ValueError:  # not JSON, or not even text
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"checkpoint {folder}: {name} is damaged; use another checkpoint")
    return value


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _hidden(path: Path, mark: str = "") -> Path:
    return path.with_name(f".{path.name}{mark}.{os.getpid()}")


def _remove(path: Path) -> None:
    """Delete a folder so that nobody ever sees half of it."""
    hidden = _hidden(path, ".removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def _flush(path: Path) -> None:
    """Ask the file system to put a file or folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
