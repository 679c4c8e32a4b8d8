"""Run a step that went wrong again: `python -m scripts.replay dump=runs/.../bad_steps/step_000123`.

The step's forward and backward pass on its own weights, batch and random state, with each attention, in the run's
dtype and in float32. Naive attention in float32 is the reference. For each other run the program prints the first layer
and tensor that are not finite, and the first that differ from the reference by more than ROOM times the error of a
disguised naive attention in the same dtype (scripts/variants.py: noise that a correct kernel makes). Nothing is updated
and nothing written. The last line is one JSON object.

Without a GPU, flash runs in Triton's interpreter: slow, so `attention='[naive,tiled,sdpa]'` leaves it out.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.program import program
from model import ATTENTION, GPT, GPTConfig, attend_with, resolve_model
from scripts.bench.report import refuse_unknown
from scripts.parity_verdict import ROOM
from scripts.variants import nulls
from training.bad_steps import FirstBad, in_words
from training.checkpoint import META, STATE, Checkpoint, open_checkpoint
from training.comparison import as_typed
from training.hardware import Hardware, HardwareConfig, choose_hardware, set_up
from training.hooks import Place, watched
from training.optimizer import OptimConfig, Optimizer
from training.random_states import restore_random_states
from training.step import training_step
from training.trained import refuse_other_keys

EXAMPLE = "give a folder such as runs/.../bad_steps/step_000123"
# what a dump's description must have beyond that of every checkpoint
NEEDED = {
    "first": {"how": str}, "what": str, "dtype": str, "device": str, "vocab_size": int,
    "settings": {"model": {}, "optim": {}, "data": {"seq_len": int, "document_mask": bool},
                 "train": {"micro_batch": int | None}},
}  # fmt: skip


@dataclass
class ReplaySettings:
    dump: str = ""  # the folder of a bad step, runs/.../bad_steps/step_000123
    attention: list[str] = field(default_factory=lambda: list(ATTENTION))  # which: flash, naive, tiled, sdpa
    hardware: HardwareConfig = field(default_factory=HardwareConfig)  # the device; the dtypes are the step's

    def __post_init__(self) -> None:
        refuse_unknown("", self, attention=ATTENTION)
        if not self.attention:
            raise ValueError("attention=[] runs nothing; name one, as attention=[flash], or leave it out for all")
        for key, value, default in (("dtype", self.hardware.dtype, "auto"), ("compile", self.hardware.compile, None)):
            if value not in (default, False):
                raise ValueError(
                    f"hardware.{key}={as_typed(value)}: a step is run again in float32 and in its own dtype, not "
                    "compiled; leave it out"
                )


@dataclass
class Rerun:
    """One rerun of the step. As a `See` (training/hooks.py) it records the tensors of the micro-batch that was bad.

    Attributes:
        values: place -> tensor on the CPU; kept only without a reference.
        errors: place -> relative error to the reference; inf where one of the two has a finite value and the other not.
    """

    dtype: torch.dtype
    micro_batch: int = 0
    scale: float = 1.0  # of the loss, in float16
    reference: "Rerun | None" = None
    values: dict[Place, Tensor] = field(default_factory=dict)
    errors: dict[Place, float] = field(default_factory=dict)
    first_bad: FirstBad = field(default_factory=FirstBad)
    loss: float = math.nan
    grad_norm: float = math.nan

    def __call__(self, module: str, tensor: str, value: Tensor) -> None:
        now, place = self.first_bad.micro_batch(tensor), (module, tensor)
        self.first_bad(module, tensor, value)
        # a weight's gradient is a sum over micro-batches, and comes after the tensors that it is made of
        if now != self.micro_batch or tensor == "dweight":
            return
        value = value.float().cpu() / (self.scale if tensor.startswith("d") else 1.0)
        if self.reference is None:
            self.values[place] = value
        elif place in self.reference.values:
            self.errors[place] = relative_error(value, self.reference.values[place])


def relative_error(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| where both are finite; inf where only one is."""
    finite = reference.isfinite()
    if not torch.equal(finite, value.isfinite()):
        return math.inf
    a, b = (x[finite].double() for x in (value, reference))
    difference, size = float((a - b).norm()), float(b.norm())
    return difference / size if size else (math.inf if difference else 0.0)


def first_parting(rerun: Rerun, null: Rerun, reference: Rerun) -> dict | None:
    """Return the first place where `rerun` is further from the reference than ROOM times the noise so far, or None.

    Nothing is compared after the first tensor of the reference that is not finite: all later ones are lost.
    """
    noise = torch.finfo(rerun.dtype).eps
    for place, value in reference.values.items():
        here = null.errors.get(place, 0.0)
        noise = max(noise, here if math.isfinite(here) else 0.0)
        error = rerun.errors.get(place, math.inf)
        if error > ROOM * noise:
            return {"module": place[0], "tensor": place[1], "relative_error": repr(error), "noise": noise}
        if not value.isfinite().all():
            return None
    return None


def open_dump(path: str) -> Checkpoint:
    """A bad step's folder; ValueError where it is none."""
    if not path:
        raise ValueError(f"dump= is not given; {EXAMPLE}")
    dump = open_checkpoint(path)
    if "first" not in dump.meta:
        raise ValueError(f"checkpoint {path} is no bad step's; {EXAMPLE}")
    dump.require(NEEDED, dump.meta, META)
    for group, config in (("model", GPTConfig), ("optim", OptimConfig)):
        refuse_other_keys(dump, group, config)
    if (name := dump.meta["settings"]["model"].get("name")) is not None:
        raise ValueError(
            f"dump={path} is of {name}, a model of transformers, in which no attention can be put in place of another; "
            "give a step of a GPT of ours"
        )
    return dump


def run_again(
    dump: Checkpoint,
    state: dict[str, Any],
    attention: str,
    hardware: Hardware,
    reference: Rerun | None = None,
    disguise: Callable[..., Tensor] | None = None,
) -> Rerun:
    """The step with one attention, or with `disguise` in its place. state: the dump's.

    Raises:
        ValueError: that attention cannot run this model here.
    """
    settings = dump.meta["settings"]
    # recomputation gives the same bits and would show each tensor twice
    config = GPTConfig(**settings["model"] | {"attention": attention, "activation_checkpointing": "none"})
    document_mask = settings["data"]["document_mask"]
    config, *_ = resolve_model(config, hardware.device, hardware.dtype, document_mask=document_mask)
    model = GPT(config, dump.meta["vocab_size"], settings["data"]["seq_len"], device=hardware.device)
    dump.load_weights(model)
    optimizer = Optimizer(model, OptimConfig(**settings["optim"]), hardware.dtype)
    optimizer.load_state_dict(state)
    optimizer.held.fill_(True)  # the step is computed and not taken
    scale = optimizer.loss_scale.scale.item() if optimizer.loss_scale else 1.0
    rerun = Rerun(hardware.dtype, dump.meta["first"].get("micro_batch", 0), scale, reference)
    rerun.first_bad.weights(model)
    inputs, targets, starts = state["batch"]
    batch = inputs.to(hardware.device), targets.to(hardware.device), starts
    micro_batch = settings["train"]["micro_batch"] or len(inputs)
    restore_random_states(state["random"], hardware.device)
    with attend_with(model, lambda _, attend: disguise or attend), watched(model, rerun):
        loss, norm = training_step(model, optimizer, batch, micro_batch, hardware, dropout=config.draws)
    rerun.loss, rerun.grad_norm = loss.item(), norm.item()
    return rerun


def compare(dump: Checkpoint, settings: ReplaySettings) -> list[dict]:
    """Run the step with each attention in each dtype; a row of the table for each."""
    config, seq_len = GPTConfig(**dump.meta["settings"]["model"]), dump.meta["settings"]["data"]["seq_len"]
    (disguise,) = nulls(1, seq_len, config.head_dim, choose_hardware(settings.hardware).device).values()
    state = dump.load_state()
    dump.require({"batch": tuple, "random": {}, "optimizer": list}, state, STATE)
    reference, rows = None, []
    for dtype in dict.fromkeys(("float32", dump.meta["dtype"])):
        hardware = set_up(replace(settings.hardware, dtype=dtype, tf32=False, compile=False))
        reference = reference or run_again(dump, state, "naive", hardware)
        null = run_again(dump, state, "naive", hardware, reference, disguise)
        for attention in settings.attention:
            row: dict = {"attention": attention, "dtype": dtype}
            rows.append(row)
            try:
                rerun = run_again(dump, state, attention, hardware, reference)
            except ValueError as error:
                row["refused"] = str(error)
                continue
            row |= {"loss": repr(rerun.loss), "grad_norm": repr(rerun.grad_norm)}
            row |= {"first_bad": rerun.first_bad.found, "parts": first_parting(rerun, null, reference)}
    return rows


def show(dump: Checkpoint, rows: list[dict], device: str) -> None:
    meta = dump.meta
    run = f"attention={meta['settings']['model']['attention']} in {meta['dtype']} on {meta['device']}"
    where = in_words(meta["first"])
    print(f"step {meta['step']} of a run with {run}: its {meta['what']} was not finite; first in {where}")
    if meta["settings"]["model"]["dropout"] or meta["settings"]["model"]["attention_dropout"]:
        if meta["device"] != device:
            print(f"dropout's masks are not the run's: {device} draws other numbers than {meta['device']}")
        elif meta["settings"].get("parallel", {}).get("context", 1) > 1:
            print("dropout's masks are not the run's: each process drew those of its part of a row, here one draws all")
        elif meta.get("compiled"):
            print("dropout's masks are not the run's: compiled, it drew other numbers than here, module by module")
    for row in rows:
        head = f"{row['attention']:<6} {row['dtype']:<9} "
        if "refused" in row:
            print(head + f"cannot run here: {row['refused']}")
            continue
        bad, parts = row["first_bad"], row["parts"]
        numbers = f"loss {float(row['loss']):.6g}, gradient norm {float(row['grad_norm']):.6g}"
        state = f"not finite from {bad['module']}: {bad['tensor']} on" if bad else "finite"
        far = "never parts from naive in float32"
        if parts:
            by = f"by {float(parts['relative_error']):.2g}, where noise is {parts['noise']:.2g}"
            far = f"parts from naive in float32 at {parts['module']}: {parts['tensor']}, {by}"
        print(head + f"{numbers}: {state}; {far}")


@program("tool", ReplaySettings)
def main(settings: ReplaySettings, run_dir: Path) -> None:
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, which is later
    dump = open_dump(settings.dump)
    with np.errstate(all="ignore"):  # Triton's interpreter would warn of each number that is not finite
        rows = compare(dump, settings)
    show(dump, rows, choose_hardware(settings.hardware).device.type)
    print(json.dumps({"dump": str(dump.path), "step": dump.step, "runs": rows}, allow_nan=False))


if __name__ == "__main__":
    main()
