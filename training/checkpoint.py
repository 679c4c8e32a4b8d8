"""Checkpoints: a folder that is either whole or not there.

    <run>/checkpoints/step_000600/
        model.safetensors    the weights
        state.pt             optimiser and random-number states (read with weights_only=True: no code is run)
        checkpoint.json      step, resolved settings, tokenizer, attention, metrics, versions; written last
    <run>/checkpoints/last, best    links to two of them

A checkpoint is written under a temporary name, flushed to disk and renamed.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

FORMAT = 1
MAY_CHANGE = (
    "attention",
    "activation_checkpointing",
    "checkpoint_every",
    "dropout",
    "attention_dropout",
)  # not the weights' meaning
WEIGHTS, STATE, META = "model.safetensors", "state.pt", "checkpoint.json"


@dataclass
class Checkpoint:
    """A checkpoint that was opened: its description is read, its tensors are not yet."""

    path: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.meta["step"]

    def refuse_unless_same(self, model_settings: dict[str, Any], vocab_size: int, steps: int) -> None:
        """ValueError where the run's model cannot take these weights, naming the first key that differs."""
        if self.step >= steps:
            raise ValueError(f"resume={self.path} has done {self.step} steps of train.steps={steps}; raise train.steps")
        if vocab_size != self.meta["vocab_size"]:
            raise ValueError(
                f"resume={self.path} was trained with a vocabulary of {self.meta['vocab_size']} tokens, this run has "
                f"{vocab_size}; use the same tokenizer and data"
            )
        for key, now in model_settings.items():
            then = self.meta["settings"]["model"].get(key)
            if key not in MAY_CHANGE and now != then:
                raise ValueError(
                    f"resume={self.path} was trained with model.{key}={then}, this run has {now}; use {then}"
                )

    def load_weights(self, model: nn.Module) -> None:
        device = next(model.parameters()).device
        weights = load_file(self.path / WEIGHTS, device=str(device))
        result = model.load_state_dict(weights, strict=False)
        # tied embeddings are stored once
        missing = [key for key in result.missing_keys if key not in _tied_names(model)]
        if missing or result.unexpected_keys:
            wrong = (missing + result.unexpected_keys)[0]
            raise ValueError(f"checkpoint {self.path} does not fit the model: tensor {wrong}; check the model group")

    def load_state(self) -> dict[str, Any]:
        return torch.load(self.path / STATE, map_location="cpu", weights_only=True)


def save(folder: Path, model: nn.Module, state: dict[str, Any], meta: dict[str, Any], *, best: bool) -> Path:
    """Write `folder/step_NNNNNN`, point `last` (and `best`) at it, return its path.

    state: what torch.save takes without pickling code: tensors, numbers, strings, lists, dicts.
    meta: JSON; must hold "step".
    """
    final = folder / f"step_{meta['step']:06d}"
    temporary = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        tied = _tied_names(model)
        weights = {k: v.detach().contiguous() for k, v in model.state_dict().items() if k not in tied}
        save_file(weights, temporary / WEIGHTS)
        torch.save(state, temporary / STATE)
        (temporary / META).write_text(json.dumps({"format": FORMAT, **meta}, indent=2) + "\n")
        for file in (WEIGHTS, STATE, META):
            _flush(temporary / file)
        if final.exists():  # the same step saved again, after a resume
            shutil.rmtree(final)
        temporary.rename(final)
        _flush(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _point(folder / "last", final)
    if best:
        _point(folder / "best", final)
    return final


def prune(folder: Path, *, save_every: int) -> None:
    """Delete every checkpoint that is not the last, the best or a multiple of `save_every` (0: no multiples)."""
    kept = {(folder / name).resolve().name for name in ("last", "best")}
    for path in folder.glob("step_*"):
        step = int(path.name.removeprefix("step_"))
        if path.name not in kept and not (save_every and step % save_every == 0):
            shutil.rmtree(path)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder; ValueError says in one line what is wrong with it."""
    path = Path(path)
    if not path.exists():
        raise ValueError(
            f"checkpoint {path} does not exist; give a folder such as runs/<experiment>/<time>/checkpoints/last"
        )
    if (path / "checkpoints" / "last").exists():  # a run's folder was given
        path = path / "checkpoints" / "last"
    for file in (META, WEIGHTS, STATE):
        if not (path / file).is_file():
            raise ValueError(f"checkpoint {path} has no {file}; give a folder that holds {META}, {WEIGHTS}, {STATE}")
    try:
        meta = json.loads((path / META).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"checkpoint {path}: {META} is damaged ({error.msg}); use an older checkpoint") from error
    if meta.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path} has format {meta.get('format')}, this version reads {FORMAT}")
    return Checkpoint(path.resolve(), meta)


def newest_checkpoint(runs: Path) -> Path:
    """The `last` checkpoint written most recently under `runs`."""
    found = sorted(runs.glob("**/checkpoints/last/" + META), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ValueError(f"no checkpoint under {runs}/; train first (python train.py) or give checkpoint=PATH")
    return found[-1].parent


def random_states() -> dict[str, torch.Tensor]:
    """The states of the random streams that training draws from (dropout)."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _tied_names(model: nn.Module) -> set[str]:
    """Names of parameters that share another one's memory."""
    first_name: dict[int, str] = {}
    tied = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first_name.setdefault(id(parameter), name) != name:
            tied.add(name)
    return tied


def _point(link: Path, target: Path) -> None:
    """Make `link` point at `target` in one step."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, link)


def _flush(path: Path) -> None:
    """Ask the file system to put a file or folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
