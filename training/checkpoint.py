"""Checkpoints on disk: a folder that is either whole or not there.

    <run>/checkpoints/step_000600/
        model.safetensors    the weights
        state.pt             optimizer and random-number states (read with weights_only=True: no code is run)
        checkpoint.json      step, numbers of this save and of the best one in the folder, its loss, settings, versions
        manifest.json        size and SHA-256 of the three above; written last
    <run>/checkpoints/last, best    links to two of them
    <run>/checkpoints/went_back.json    where the run went back to an earlier one: which saves are of the branch it left

A checkpoint is written under a hidden name, flushed to disk and renamed, so a process that dies at any moment leaves
hidden leftovers and whole checkpoints, nothing else. The manifest detects later damage. A visible folder is never
emptied in place: it is renamed to a hidden name first. Files with other names are never touched.

Saves are counted, and the newest checkpoint has the highest count: a clock may be set back, and a run that went back to
step 10 may still have its old step 20, which is not its newest.
"""

import json
import math
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from data.shards import flush
from training.checkpoint_files import (
    STATE,
    Form,
    fingerprint,
    read_json,
    require,
    use_its_commit,
    write_json,
    write_state,
    write_weights,
)
from training.shard import local_shard, shard_of

FORMAT = 2
WEIGHTS, META, MANIFEST = "model.safetensors", "checkpoint.json", "manifest.json"
FILES = (META, WEIGHTS, STATE)  # what the manifest vouches for
LINKS = ("last", "best")
WENT_BACK = "went_back.json"
VISIBLE = re.compile(r"step_[0-9]{6,}")
LEFTOVER = re.compile(r"\.(step_[0-9]{6,}|last|best)(\.removed|\.replaced)?\.[0-9]+")  # as `_hidden` makes them
# what torch.load raises for a file that is not an archive of torch.save
_STRANGE = (RuntimeError, EOFError, LookupError, TypeError, ValueError, AssertionError, AttributeError, struct.error)


@dataclass
class Checkpoint:
    """An opened checkpoint: its files match the manifest, its description is read, its tensors are not."""

    path: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.meta["step"]

    def is_in(self, folder: Path) -> bool:
        """Whether it is one of those in `folder`, a run's own."""
        return self.path.parent == folder.resolve()

    def load_weights(self, model: nn.Module) -> None:
        """Copy the weights into `model`, on its device; ValueError names a tensor that does not fit."""
        device = next(model.parameters()).device
        try:
            weights = load_file(self.path / WEIGHTS, device=str(device))
        except FileNotFoundError as error:
            raise ValueError(
                f"checkpoint {self.path} is gone: its run keeps the newest (train.keep_last); use "
                f"{self.path.parent / 'last'}"
            ) from error
        except SafetensorError as error:
            raise ValueError(
                f"checkpoint {self.path}: {WEIGHTS} cannot be read ({error}); use another checkpoint"
            ) from error
        own = weights_of(model)  # tied embeddings are stored once
        if wrong := sorted(own.keys() ^ weights.keys()):
            raise ValueError(f"checkpoint {self.path} does not fit the model: tensor {wrong[0]}; check the model group")
        for name, expected in own.items():
            found = weights[name]
            if (found.shape, found.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    f"checkpoint {self.path}: tensor {name} is {tuple(found.shape)} in {found.dtype}, the model's is "
                    f"{tuple(expected.shape)} in {expected.dtype}; check the model group"
                )
        for name, place in own.items():
            local_shard(place).copy_(shard_of(weights[name], place))

    def load_state(self) -> dict[str, Any]:
        """The `state` given to `write`, on the CPU; ValueError where the file holds code in place of values."""
        try:
            return torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"checkpoint {self.path}: {STATE} holds more than tensors and plain values, so it was not written by "
                "this program and is not read; use a checkpoint of your own"
            ) from error
        except _STRANGE as error:
            reason = repr(error).partition("\\n")[0]
            raise ValueError(
                f"checkpoint {self.path}: {STATE} cannot be read ({reason}); use another checkpoint"
            ) from error

    @property
    def theirs(self) -> dict[str, Any] | None:
        """`GPTConfig.theirs` of the run's model; None for a GPT of ours, and in checkpoints older than this field."""
        if self.meta.get("theirs") is not None:
            self.require({"theirs": {}}, self.meta, META)
        return self.meta.get("theirs")

    def require(self, form: Form, values: Any, file: str) -> None:
        """Raise ValueError for the first key of `form` that `values`, from `file`, lacks or has in another type."""
        require(self.path, form, values, file)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors by name, tied ones once; they share the model's memory and its sharding."""
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    return {name: value.detach() for name, value in model.state_dict().items() if name not in tied}


def prepare(folder: Path) -> None:
    """Make `folder` for a run's checkpoints and clear what a killed process left half written in it.

    ValueError where `last` or `best` is a folder of other things.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in list(folder.iterdir()):
        if not (named := LEFTOVER.fullmatch(leftover.name)):
            continue
        unfinished_link = named[1] in LINKS and leftover.is_symlink() and leftover.exists()
        if (unfinished_link or named[2] == ".replaced") and not os.path.lexists(folder / named[1]):
            leftover.rename(folder / named[1])
        else:
            _delete(leftover)
    for name in LINKS:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            _link_again(folder / name)


def write(folder: Path, weights: dict[str, torch.Tensor], state: Any, meta: dict[str, Any], *, best: bool) -> Path:
    """`write_step`, then point `last` (and `best`) at it. Its meta also gets "best_save", the best save's number."""
    own = _last_save(folder) + 1
    best = best or _named_by(folder / "best") == f"step_{meta['step']:06d}"  # the same step again
    numbers = {"save": own, "best_save": own if best else _save_number(folder / "best")}
    written = write_step(folder, weights, state, numbers | meta)
    for link in LINKS if best else LINKS[:1]:
        _hidden_link(folder / link, written).replace(folder / link)
    return written


def write_step(folder: Path, weights: dict[str, torch.Tensor], state: Any, meta: dict[str, Any]) -> Path:
    """Write `folder/step_NNNNNN` and return its path.

    weights: tensors that share no memory, on any device.
    state: what torch.save stores without pickling code: tensors, numbers, strings, lists, tuples, dicts.
    meta: JSON; must hold "step".

    Raises:
        OSError: the disk is full, the folder is gone or may not be written; earlier checkpoints are as they were.
    """
    final = folder / f"step_{meta['step']:06d}"
    temporary, replaced = _hidden(final), _hidden(final, ".replaced")
    _delete(replaced)
    # not `parents=True`: a folder that vanished (an unmounted disk) must not come back somewhere else in silence
    temporary.mkdir()
    try:
        write_weights(weights, temporary / WEIGHTS)
        write_state(state, temporary / STATE)
        meta = {"format": FORMAT, **meta, "save": meta.get("save") or _last_save(folder) + 1}
        write_json(meta, temporary / META)
        write_json({name: fingerprint(temporary / name) for name in FILES}, temporary / MANIFEST)
        for path in (*(temporary / name for name in (*FILES, MANIFEST)), temporary):
            flush(path)
        if os.path.lexists(final):  # the same step again: kept until the new one has its name, as it may be the newest
            final.rename(replaced)
        temporary.rename(final)
        flush(folder)
        _delete(replaced)
    finally:
        if os.path.lexists(replaced) and not os.path.lexists(final):
            replaced.rename(final)
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def go_back(folder: Path, checkpoint: Checkpoint) -> None:
    """Record that a run goes on from its own `checkpoint`: later saves are of a branch that it leaves, and `last` and
    `best` become what they were at that save, or no `best` where that is gone."""
    if not checkpoint.is_in(folder):
        return
    here, last = checkpoint.meta["save"], _last_save(folder)
    to, since = _left_behind(folder)
    # going on from the last save leaves nothing, unless that save is of a branch that was left before
    if here < last or to < here <= since:
        (folder / WENT_BACK).write_text(json.dumps({"to": here, "from": last}))  # ignored if a crash cuts it short
        flush(folder / WENT_BACK)
    best = best_of(checkpoint)
    if best is None and "best_save" in checkpoint.meta:
        (folder / "best").unlink(missing_ok=True)
    for link, target in (("last", checkpoint.path), ("best", best)):
        if target is not None:
            _hidden_link(folder / link, target).replace(folder / link)
    flush(folder)


def best_of(checkpoint: Checkpoint) -> Path | None:
    """The best checkpoint beside this one when this one was saved; None where it is gone."""
    beside, number = _saves(checkpoint.path.parent), checkpoint.meta.get("best_save")
    return next((path for path, save in beside.items() if save == number), None)


def _left_behind(folder: Path) -> tuple[int, int]:
    """(a, b): saves after a, up to b, are of a branch that the run has left; (0, 0) where there is none."""
    try:
        found = json.loads((folder / WENT_BACK).read_text())
        return int(found["to"]), int(found["from"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0, 0


def prune(folder: Path, *, keep_last: int, keep_every: int) -> None:
    """Delete all but the newest `keep_last`, the best, and steps that are multiples of `keep_every` (0: none)."""
    newest_first = list(_saves(folder))
    kept = {path.name for path in newest_first[:keep_last]}
    kept |= {_named_by(folder / name) for name in LINKS}
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
            raise ValueError(f"run {path} has no whole checkpoint; give another run or checkpoint, or train it anew")
        return newest
    if found := sorted(path.glob("*/checkpoints")) or sorted(path.glob("*/*/checkpoints")):
        raise ValueError(f"{path} is a folder of runs; give one of them, such as {found[-1].parent}")
    if path.name in LINKS and path.is_symlink():  # of a run under way it may point to another one meanwhile
        path = path.parent / os.readlink(path)
    path = Path(os.path.abspath(path))
    folder = path.parent.resolve() / path.name  # a step that was moved and linked is still its run's
    for file in (*FILES, MANIFEST):
        if not (folder / file).is_file():
            is_part = (path.parent / "checkpoints").is_dir()
            remedy = f"give the run, {path.parent}" if is_part else f"give a folder of {', '.join(FILES)}, {MANIFEST}"
            raise ValueError(f"checkpoint {path} has no {file}; {remedy}")
    meta = read_json(folder, META)
    if meta.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {meta.get('format')}, this version reads {FORMAT}; {use_its_commit(meta)}"
        )
    manifest = read_json(folder, MANIFEST)
    for file in verify:
        expected, found = manifest.get(file), fingerprint(folder / file)
        if found != expected:
            raise ValueError(
                f"checkpoint {path}: {file} is damaged ({found['bytes']:,} bytes; size or SHA-256 is not the "
                "manifest's); use another checkpoint"
            )
    checkpoint = Checkpoint(folder, meta)
    checkpoint.require({"step": int, "save": int}, meta, META)
    return checkpoint


def newest_complete(
    folder: Path,
    report: Callable[[str], None] = print,
    last_step: int | None = None,
    *,
    verify: tuple[str, ...] = FILES,
) -> Checkpoint | None:
    """The whole checkpoint of `folder` that was saved last; None if there is none.

    `report` is called for each damaged one that is passed over. Those after `last_step` do not count; those of a
    branch that the run has left count only if there is no other.
    """
    for path in _saves(folder):
        if last_step is not None and _step(path) > last_step:
            continue
        try:
            found = open_checkpoint(path, verify=verify)
        except (ValueError, OSError) as error:
            report(f"passed over: {error}")
            continue
        if last_step is None or found.step <= last_step:  # a folder's name may have been changed
            return found
    return None


def _saves(folder: Path) -> dict[Path, float]:
    """Visible checkpoints with their saves' numbers, the last save first, those of a branch that the run has left at
    the end; an unreadable one's number is infinite, so that it is reported."""
    found = [path for path in folder.glob("step_*") if VISIBLE.fullmatch(path.name) and path.is_dir()]
    # left by a kill while a step was saved again: `prepare`, which runs later, restores its name
    for path in folder.glob(".step_*.replaced.*"):
        if (named := LEFTOVER.fullmatch(path.name)) and path.is_dir() and not os.path.lexists(folder / named[1]):
            found.append(path)
    to, since = _left_behind(folder)
    saves = {path: math.inf if (save := _save_number(path)) is None else save for path in found}
    newest_first = sorted(
        saves, key=lambda path: (not to < saves[path] <= since, saves[path], _step(path)), reverse=True
    )
    return {path: saves[path] for path in newest_first}


def _save_number(path: Path) -> int | None:
    """The number of a checkpoint's save; None if it cannot be read."""
    try:
        save = read_json(path, META).get("save")
    except (OSError, ValueError):
        save = None
    return save if type(save) is int else None


def _last_save(folder: Path) -> int:
    """The highest save number in `folder`; 0 if there is none."""
    return max((save for save in _saves(folder).values() if save < math.inf), default=0)


def _named_by(link: Path) -> str:
    """The name of the checkpoint that `link` points to, which may be a link itself; empty if there is no link."""
    return Path(os.readlink(link)).name if link.is_symlink() else ""


def _step(path: Path) -> int:
    return int(re.search("[0-9]+", path.name)[0])


def _hidden_link(link: Path, target: Path) -> Path:
    """Make a link to `target` under a hidden name and return it; the caller only renames it to `link`."""
    temporary = _hidden(link)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    return temporary


def _link_again(copy: Path) -> None:
    """Make `last` or `best` a link again where a copy of the run (`cp -rL`) has made it a folder."""
    try:
        checkpoint = copy.with_name(f"step_{open_checkpoint(copy).step:06d}")
        if any(file.name not in (*FILES, MANIFEST) for file in copy.iterdir()):
            raise ValueError("it holds other files")
        if twin := os.path.lexists(checkpoint):
            open_checkpoint(checkpoint)
            if (checkpoint / MANIFEST).read_bytes() != (copy / MANIFEST).read_bytes():
                raise ValueError(f"{checkpoint.name} is another one")
    except ValueError as error:
        raise ValueError(f"{copy} is a folder and no copy of a checkpoint ({error}); move it away") from error
    link = _hidden_link(copy, checkpoint)  # made first, so that a start after kill -9 can do the rest
    if twin:
        _remove(copy)
    else:
        copy.rename(checkpoint)
    link.replace(copy)


def _hidden(path: Path, mark: str = "") -> Path:
    return path.with_name(f".{path.name}{mark}.{os.getpid()}")


def _remove(path: Path) -> None:
    """Delete a checkpoint, or a link to one elsewhere, so that half of it is never visible."""
    hidden = _hidden(path, ".removed")
    _delete(hidden)
    path.rename(hidden)
    _delete(hidden)


def _delete(path: Path) -> None:
    """Delete a folder, or a link to one, if it exists."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
