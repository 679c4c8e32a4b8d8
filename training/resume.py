"""Going on from a checkpoint: which one, what it must hold, whether this run can take it, what has changed since."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from model import GPT
from training.checkpoint import META, STATE, Checkpoint, newest_complete, open_checkpoint
from training.numbers import SPIKE_WINDOW, NumberCheck
from training.optimizer import Optimizer
from training.random_states import random_states, restore_random_states

# keys of the model group that say how the network is computed or regularised, not what its weights mean
MAY_CHANGE = ("attention", "loss", "activation_checkpointing", "dropout", "attention_dropout")

# what a run cannot go on without. The place in the data and in the schedule is the step: both are functions of it
NEEDED_META = {
    "step": int,
    "seconds": (int, float),
    "settings": {"model": {}, "optim": {}},
    "tokenizer": {"name": str},
    "vocab_size": int,
    "data_fingerprint": str,
    "provenance": {"commit": (str, type(None))},
}
NEEDED_STATE = {
    "optimizer": list,
    "random": {"python": tuple, "numpy": tuple, "cpu": torch.Tensor},
    "number_check": {"spikes": int, "bad_steps": int, "in_a_row": int, "losses": list},
    "best_loss": (int, float),
}


def find(resume: str | None, run_dir: Path, report: Callable[[str], None] = print) -> Checkpoint | None:
    """The checkpoint to go on from, or None for a run that starts at its beginning.

    resume: a path, or "auto": the newest whole checkpoint of `run_dir`, if there is one.
    """
    if resume == "auto":
        return newest_complete(run_dir / "checkpoints", report)
    return open_checkpoint(resume) if resume else None


def refuse_unless_same(
    checkpoint: Checkpoint, settings: Mapping[str, Any], tokenizer: Mapping[str, str], vocab_size: int
) -> None:
    """ValueError where the run cannot go on from `checkpoint`, naming the first key that differs, then and now.

    settings: the run's, resolved. tokenizer: its `tokenizer_state`.
    """
    checkpoint.refuse_without(NEEDED_META, checkpoint.meta, META)
    before, steps = checkpoint.meta["settings"], settings["train"]["steps"]
    here = f"resume={checkpoint.path}"
    if checkpoint.step >= steps:
        raise ValueError(f"{here} has done {checkpoint.step} steps of train.steps={steps}; raise train.steps")
    then = checkpoint.meta["tokenizer"]
    if then["name"] != tokenizer["name"]:
        raise ValueError(
            f"{here} was trained with tokenizer={then['name']}, this run has {tokenizer['name']}; "
            f"use tokenizer={then['name']}"
        )
    if then != tokenizer or checkpoint.meta["vocab_size"] != vocab_size:
        raise ValueError(
            f"{here} was trained with tokenizer={then['name']} of {checkpoint.meta['vocab_size']} tokens, this run's "
            f"has {vocab_size} or other ones; use the data it was trained on"
        )
    fixed = [("model", key) for key in settings["model"] if key not in MAY_CHANGE] + [("optim", "name")]
    for group, key in fixed:
        old, new = before[group].get(key), settings[group][key]
        if old != new:
            raise ValueError(f"{here} was trained with {group}.{key}={old}, this run has {new}; use {old}")


def state_of(optimizer: Optimizer, check: NumberCheck, best_loss: float, device: torch.device) -> dict[str, Any]:
    """What a checkpoint holds beside weights and description, and `restore` reads; its tensors are not copies."""
    rest = {"number_check": check.state_dict(), "random": random_states(device), "best_loss": best_loss}
    return optimizer.state_dict() | rest


def restore(checkpoint: Checkpoint, model: GPT, optimizer: Optimizer, device: torch.device) -> dict[str, Any]:
    """Give model, optimizer and random streams what `checkpoint` holds; the whole state, for whoever needs the rest.

    ValueError names what the checkpoint lacks, or what does not fit.
    """
    checkpoint.load_weights(model)
    state = checkpoint.load_state()
    checkpoint.refuse_without(NEEDED_STATE, state, STATE)
    try:
        _refuse_other_losses(state["number_check"]["losses"])
        optimizer.load_state_dict(state)
        restore_random_states(state["random"], device)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, LookupError, RuntimeError) as error:  # as PyTorch, NumPy and Python say it
        raise ValueError(f"checkpoint {checkpoint.path}: {STATE} does not fit ({error}); use another") from error
    return state


def _refuse_other_losses(losses: list[Any]) -> None:
    """ValueError where these are not the losses that `NumberCheck` compares the next one with."""
    if len(losses) > SPIKE_WINDOW or not all(type(loss) is float and math.isfinite(loss) for loss in losses):
        raise ValueError(f"number_check.losses is not a list of at most {SPIKE_WINDOW} numbers")


def print_changes(checkpoint: Checkpoint, description: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Say where the run goes on and what is not as it was then: 'optim.lr 0.0006 -> 0.0003', one line a key.

    description: what checkpoints of this run will say of it, with its provenance.
    """
    say(f"resumed    from {checkpoint.path} after {checkpoint.step} steps")
    commits = [of["provenance"]["commit"] or "unknown" for of in (checkpoint.meta, description)]
    if commits[0] != commits[1]:
        say(f"changed    the commit {commits[0]} -> {commits[1]}")
    before, now = _flat(checkpoint.meta["settings"]), _flat(description["settings"])
    for key in sorted(before | now):
        if before.get(key) != now.get(key) and key != "resume":
            say(f"changed    {key} {before.get(key)} -> {now.get(key)}")
    texts = [of["data_fingerprint"] for of in (checkpoint.meta, description)]
    if texts[0] != texts[1]:
        say(f"changed    the text itself {texts[0][:12]} -> {texts[1][:12]}")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
