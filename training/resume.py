"""Resuming from a checkpoint: which one, what it must hold, whether it fits this run, what has changed since.

`resume` continues a run: weights, optimizer, random streams, step. `init_from` starts a new run with the weights of
another.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from data import DataConfig
from data.dataset import digest, locate
from model import GPT, GPTConfig
from training.bad_steps import SPIKE_WINDOW, NumberCheck
from training.checkpoint import FILES, META, STATE, Checkpoint, best_of, newest_complete, open_checkpoint
from training.comparison import as_typed, flat, settings_of
from training.lock import by_time, sweep_of
from training.optimizer import OptimConfig, Optimizer, lr_factor
from training.random_states import random_states, restore_random_states

# keys of the model group that say how the network is computed or regularised, not what its weights mean
MAY_CHANGE = ("attention", "loss", "activation_checkpointing", "dropout", "attention_dropout", "fp8")
# keys that `init_from` may change too: the weights can learn other distances between tokens
MAY_BE_LEARNED = ("window", "rope_base")
# keys of the data group that do not change the text and its split
NOT_OF_THE_TEXT = ("seq_len", "shift_windows", "document_mask", "cache_dir", "num_workers")
# keys that split the text: another split of the same text would evaluate on what was trained on
SPLITS_THE_TEXT = ("split", "validation_split", "validation_fraction")
# key that identifies the text (the first that is set) -> what names a new one; the embedded text has neither
NAMES_THE_TEXT = {"files": "files=OTHER_PATH", "local_dir": "local_dir=OTHER_PATH", "name": "revision=NEW"}
# keys that a validation loss depends on
OF_THE_EVALUATION = ("data.seq_len", "data.document_mask", "train.eval_windows")

# what resuming needs from a checkpoint. The position in the data and in the schedule is a function of the step
NEEDED_META = {
    "seconds": (int, float),
    "metric_lines": int,
    "settings": {"model": {}, "data": {}, "optim": {}, "train": {"batch_tokens": int, "steps": int}},
    "left_open": {},
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


def find(
    resume: str | None, run_dir: Path, report: Callable[[str], None] = print, *, verify: tuple[str, ...] = FILES
) -> Checkpoint | None:
    """The checkpoint to resume, or None for a new run.

    resume: a path, or "auto": the newest whole checkpoint of `run_dir`, if there is one.
    verify: which of its files are read and compared with their checksums.

    ValueError where the checkpoint cannot be used; with "auto" where none of several can.
    """
    if resume == "auto":
        folder, passed_over = run_dir / "checkpoints", []

        def note(line: str) -> None:
            passed_over.append(line)
            report(line)

        found = newest_complete(folder, note, verify=verify)
        if passed_over and not found:  # a new run would delete them
            reason = passed_over[0].removeprefix("passed over: ")
            raise ValueError(f"run {run_dir} has no whole checkpoint ({reason}); move {folder} away to begin anew")
        return found
    return open_checkpoint(resume, verify=verify) if resume else None


def earlier_settings(resume: str, run_dir: Path) -> dict[str, Any]:
    """The settings of the run that `resume` names, flat; what they left open (auto) is open again.

    They come from the checkpoint, or from `run_dir` for a run that was killed before its first one; {} without either.
    """
    checkpoint = find(resume, run_dir, lambda line: None, verify=(META,))
    if checkpoint:
        return settings_as_asked(checkpoint)
    written, description = run_dir / "config.yaml", run_dir / "run.json"
    if not (written.exists() and description.exists()):
        return {}
    try:
        return settings_of(run_dir) | json.loads(description.read_text())["left_open"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{written} or {description.name} is damaged; remove the folder to start anew") from error


def settings_as_asked(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's settings, flat, as they were before `resolve` made its choices for that machine."""
    _require_a_runs(checkpoint)
    return flat(checkpoint.meta["settings"]) | dict(checkpoint.meta["left_open"])


def _require_a_runs(checkpoint: Checkpoint) -> None:
    """Raise ValueError unless the checkpoint is a run's, with what resuming needs; the dump of a bad step is not."""
    if "first" in checkpoint.meta:
        raise ValueError(
            f"{checkpoint.path} is the dump of a bad step, for scripts.replay (dump=...), and no checkpoint to train "
            f"from; use one of {checkpoint.path.parents[1] / 'checkpoints'}"
        )
    checkpoint.require(NEEDED_META, checkpoint.meta, META)


def refuse_unless_same(
    checkpoint: Checkpoint, settings: Mapping[str, Any], tokenizer: Mapping[str, str], vocab_size: int
) -> None:
    """Raise ValueError if `checkpoint` cannot be resumed, with the first key that differs, its value then and now.

    settings: the run's, resolved. tokenizer: its `tokenizer_state`.
    """
    _require_a_runs(checkpoint)
    before, here = checkpoint.meta["settings"], f"resume={checkpoint.path}"
    began = settings["init_from"]
    if began and began != before.get("init_from"):
        raise ValueError(f"{here} has weights of its own, init_from={began} would replace them; leave one out")
    _refuse_another_tokenizer(here, checkpoint, tokenizer, vocab_size)
    _refuse_another_model(here, checkpoint, settings, MAY_CHANGE)
    anew = f", or begin a run of its own with init_from={checkpoint.path}"
    # the step times batch_tokens is the run's position in the text, and the number of tokens that it has seen
    for group, key, otherwise in (("optim", "name", ""), ("train", "batch_tokens", anew)):
        old, new = before[group].get(key), settings[group][key]
        if old != new:
            raise _was_another(here, f"{group}.{key}", old, new, otherwise)


def refuse_unless_it_fits(
    checkpoint: Checkpoint, settings: Mapping[str, Any], tokenizer: Mapping[str, str], vocab_size: int
) -> None:
    """Raise ValueError if a run cannot start with the weights of `checkpoint`; arguments of `refuse_unless_same`."""
    _require_a_runs(checkpoint)
    here = f"init_from={checkpoint.path}"
    _refuse_another_tokenizer(here, checkpoint, tokenizer, vocab_size)
    _refuse_another_model(here, checkpoint, settings, (*MAY_CHANGE, *MAY_BE_LEARNED))


def refuse_another_text(checkpoint: Checkpoint, settings: Mapping[str, Any], fingerprint: str) -> None:
    """Raise ValueError if the text has changed and no key of the data group says so, or if other rows are held out."""
    then, before, now = checkpoint.meta["data_fingerprint"], checkpoint.meta["settings"]["data"], settings["data"]
    changed = [key for key in now if key not in NOT_OF_THE_TEXT and before.get(key, now[key]) != now[key]]
    splitting = [key for key in SPLITS_THE_TEXT if key in changed]
    named = {*changed} - {*SPLITS_THE_TEXT, "streaming"}
    if splitting and named and not _is_the_same_text(then, before, settings):
        splitting = []  # another text, which may be split in any way
    if splitting and (key := _held_out_anew(before, now, splitting)):
        raise _was_another(
            f"resume={checkpoint.path}", f"data.{key}", before[key], now[key],
            f", as what is held out now may have been trained on, or begin one with init_from={checkpoint.path}",
        )  # fmt: skip
    if not changed and then != fingerprint:
        key = next((key for key in NAMES_THE_TEXT if now.get(key)), "source")
        another = f", name the new one (data.{NAMES_THE_TEXT[key]})" if key in NAMES_THE_TEXT else ""
        raise ValueError(
            f"resume={checkpoint.path} was trained on another text: data.{key}={now[key]} has changed since "
            f"({then[:12]}, now {fingerprint[:12]}); put it back{another}, or begin a run of its own with "
            f"init_from={checkpoint.path}"
        )


def _is_the_same_text(then: str, before: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether the text, wherever it lies now, would have the fingerprint `then` if it were read and split as before."""
    now = settings["data"]
    as_before = {key: now[key] if key in NAMES_THE_TEXT else before.get(key, now[key]) for key in now}
    try:
        _, identity, _ = locate(DataConfig(**as_before), settings["tokenizer"])
    except ValueError:  # it cannot even be read so
        return False
    return digest(identity) == then


def _held_out_anew(before: Mapping[str, Any], now: Mapping[str, Any], splitting: list[str]) -> str | None:
    """The first of the changed keys, `splitting`, that holds out other or more rows; None if there is none."""
    holding_out = {*SPLITS_THE_TEXT}
    if now.get("validation_split"):  # it shares no rows with `split`, whatever that is
        holding_out = {"validation_split"}
    elif now["validation_fraction"] <= before.get("validation_fraction", 0.0):  # a part of what was held out: its end
        holding_out = {"split", "validation_split"}
    return next((key for key in splitting if key in holding_out), None)


def _refuse_another_tokenizer(here: str, checkpoint: Checkpoint, tokenizer: Mapping[str, str], vocab_size: int) -> None:
    then, key = checkpoint.meta["tokenizer"], here.partition("=")[0]
    if tokenizer["alphabet"] and then.get("alphabet") == tokenizer["alphabet"]:
        then = then | {"name": tokenizer["name"]}  # a folder may have been moved: only its contents count
    if then["name"] != tokenizer["name"]:
        raise ValueError(
            f"{here} was trained with tokenizer={then['name']}, this run has {tokenizer['name']}; "
            f"use tokenizer={then['name']}, or leave {key} out"
        )
    if then != tokenizer or checkpoint.meta["vocab_size"] != vocab_size:
        otherwise = f"leave {key} out"
        if key == "init_from" and then["name"] == "characters":  # an export keeps its characters
            otherwise = "train its export on (scripts.export_hf, then model=huggingface model.name=FOLDER)"
        raise ValueError(
            f"{here} was trained with tokenizer={then['name']} of {checkpoint.meta['vocab_size']} tokens, this run's "
            f"has {vocab_size} or other ones; use the data it was trained on, or {otherwise}"
        )


def _refuse_another_model(
    here: str, checkpoint: Checkpoint, settings: Mapping[str, Any], may_change: tuple[str, ...]
) -> None:
    before, then, now = checkpoint.meta["settings"]["model"], checkpoint.theirs, settings.get("theirs")
    moved = then is not None and then == now  # a folder of transformers may have been moved: only its contents count
    for key, new in sorted(settings["model"].items(), key=lambda item: item[0] != "name"):  # the rest follows from it
        old = before.get(key, getattr(GPTConfig, key, None))  # an older checkpoint lacks newer keys
        if old != new and key not in may_change and not (moved and key == "name"):
            raise _was_another(here, f"model.{key}", old, new)
    if then and now and not moved:
        key = min(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
        raise ValueError(
            f"{here} was trained with {key}={then.get(key)} of {settings['model']['name']}, whose config.json says "
            f"{now.get(key)} now; put it back"
        )


def newest_sweep(run: Path) -> Path | None:
    """The newest other sweep with checkpoints under the run's name; None if there is none, or its own has others'."""
    if (own := sweep_of(run)) and any(path.parent != run for path in own.glob("*/checkpoints")):
        return None
    of_name = (sweep_of(run) or run).parent
    sweeps = {sweep for path in of_name.glob("*/*/checkpoints") if (sweep := sweep_of(path.parent))}
    return max(sweeps - {run.parent}, key=by_time, default=None)


def _was_another(here: str, key: str, old: Any, new: Any, otherwise: str = "") -> ValueError:
    old, new = as_typed(old), as_typed(new)
    return ValueError(f"{here} was trained with {key}={old}, this run has {new}; use {old}{otherwise}")


def state_of(optimizer: Optimizer, check: NumberCheck, best_loss: float, device: torch.device) -> dict[str, Any]:
    """What a checkpoint holds besides weights and description, for `restore`; the tensors are not copies."""
    rest = {"number_check": check.state_dict(), "random": random_states(device), "best_loss": best_loss}
    return optimizer.state_dict() | rest


def restore(
    checkpoint: Checkpoint | None,
    model: GPT,
    optimizer: Optimizer,
    device: torch.device,
    description: Mapping[str, Any],
    run_dir: Path,
) -> tuple[dict[str, Any], float]:
    """Load `checkpoint` into model, optimizer and random streams. Return its whole state and the best validation loss
    that counts in the run of this `description`, which is the best checkpoint's: inf where it was measured on another
    text or other windows, or `run_dir` does not have its weights; for a new run, without a checkpoint, ({}, inf).

    ValueError names what the checkpoint lacks, or what does not fit.
    """
    if checkpoint is None:
        return {}, math.inf
    checkpoint.load_weights(model)
    state = checkpoint.load_state()
    checkpoint.require(NEEDED_STATE, state, STATE)
    try:
        losses = state["number_check"]["losses"]
        if len(losses) > SPIKE_WINDOW or not all(type(loss) is float and math.isfinite(loss) for loss in losses):
            raise ValueError(f"number_check.losses is not a list of at most {SPIKE_WINDOW} numbers")
        optimizer.load_state_dict(state)
        restore_random_states(state["random"], device)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, LookupError, RuntimeError) as error:  # as PyTorch, NumPy and Python raise it
        raise ValueError(f"checkpoint {checkpoint.path}: {STATE} does not fit ({error}); use another") from error
    own = checkpoint.is_in(run_dir / "checkpoints")
    kept = own and ("best_save" not in checkpoint.meta or best_of(checkpoint))
    counts = kept and held_out(checkpoint.meta) == held_out(description)
    if "best_loss" in checkpoint.meta:  # the state's may be of a checkpoint that could not be written
        checkpoint.require({"best_loss": (int, float)}, checkpoint.meta, META)
    return state, checkpoint.meta.get("best_loss", state["best_loss"]) if counts else math.inf


def _order(settings: Mapping[str, Any]) -> tuple:
    """The values in flat settings that determine the order of the windows."""
    seed = "train.seed" if settings.get("train.data_seed") is None else "train.data_seed"
    return tuple(map(settings.get, ("data.seq_len", "data.shift_windows", seed)))


def _lr_factor(settings: Mapping[str, Any], step: int) -> float | None:
    """`lr_factor` of `step` under a run's settings; past the run's end, that of its last step. None if the settings of
    an earlier version define none."""
    known, steps = {field.name for field in fields(OptimConfig)}, settings["train"]["steps"]
    try:
        config = OptimConfig(**{key: value for key, value in settings["optim"].items() if key in known})
    except (TypeError, ValueError):
        return None
    return lr_factor(min(step, steps - 1), steps, config)


def held_out(description: Mapping[str, Any]) -> list:
    """What the windows of an evaluation follow from: losses of others are not compared."""
    return [description["data_fingerprint"], *map(flat(description["settings"]).get, OF_THE_EVALUATION)]


def print_changes(checkpoint: Checkpoint, description: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Print where the run resumes and what has changed since: 'optim.lr 0.0006 -> 0.0003', one line a key.

    description: what this run's checkpoints will record about it, with its provenance.
    """
    say(f"resumed    from {checkpoint.path} after {checkpoint.step} steps")
    commits = [of["provenance"]["commit"] or "unknown" for of in (checkpoint.meta, description)]
    if commits[0] != commits[1]:
        say(f"changed    the commit {commits[0]} -> {commits[1]}")
    before, now = flat(checkpoint.meta["settings"]), flat(description["settings"])
    for key in sorted(before | now):
        if before.get(key) != now.get(key) and key != "resume":
            say(f"changed    {key} {as_typed(before.get(key))} -> {as_typed(now.get(key))}")
    factors = [_lr_factor(of["settings"], checkpoint.step) for of in (checkpoint.meta, description)]
    goes_on = checkpoint.step < description["settings"]["train"]["steps"]
    if goes_on and None not in factors and len(rates := dict.fromkeys(f"{factor:.3g}" for factor in factors)) > 1:
        say(f"changed    the next step's learning rate, {' -> '.join(rates)} of optim.lr")
    if before.get("train.seed") != now.get("train.seed"):
        say("unchanged  the weights and dropout's random numbers, which go on as they were")
    if _order(before) != _order(now):
        say("changed    the order of the windows, which begins anew: in this epoch some come twice and some never")
    texts = [of["data_fingerprint"] for of in (checkpoint.meta, description)]
    if texts[0] != texts[1]:
        say(f"changed    the text itself {texts[0][:12]} -> {texts[1][:12]}")
