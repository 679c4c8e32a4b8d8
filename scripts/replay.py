"""Run a step that went wrong again: `python -m scripts.replay runs/.../capsules/step_000123`.

The step's forward and backward pass on its own weights, batch and random state, with each attention, in the run's
dtype and in float32. Naive attention in float32 is the reference; for each other run it prints the first layer and
tensor that are not finite, and the first at which it parts from the reference: that are further from it than ROOM times
the error of a disguised naive attention in the same dtype (scripts/variants.py: noise that a correct kernel makes).
Nothing is updated and nothing written. The last line is one JSON object.

Without a GPU, flash runs in Triton's interpreter: slow, so `--attention naive,tiled,sdpa` leaves it out.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from rich.console import Console
from torch import Tensor

from conf.program import fail
from model import ATTENTION, GPT, GPTConfig, attend_with, resolve_model
from scripts.parity_verdict import ROOM
from scripts.variants import nulls
from training.capsule import Capsule, open_capsule
from training.hardware import Hardware, HardwareConfig, set_up
from training.optimizer import OptimConfig, Optimizer
from training.random_states import restore_random_states
from training.step import training_step
from training.tape import FirstBad, Place, watched

NULL = "naive, disguised"  # the yardstick's name


@dataclass
class Tape:
    """A `See` of one micro-batch of the step: its tensors, or their errors beside those of `reference`.

    Attributes:
        values: place -> tensor on the CPU; kept only without a reference.
        errors: place -> relative error; inf where other values are finite than in the reference's tensor.
    """

    micro_batch: int
    scale: float = 1.0  # of the loss, in float16
    reference: "Tape | None" = None
    values: dict[Place, Tensor] = field(default_factory=dict)
    errors: dict[Place, float] = field(default_factory=dict)
    first_bad: FirstBad = field(default_factory=FirstBad)
    losses: int = 0

    def __call__(self, module: str, tensor: str, value: Tensor) -> None:
        self.first_bad(module, tensor, value)
        backward = tensor.startswith("d")
        now, place = self.losses - backward, (module, tensor)
        self.losses += tensor == "loss"
        # a weight's gradient is a sum over micro-batches, and comes after the tensors that it is made of
        if now != self.micro_batch or tensor == "dweight":
            return
        value = value.float().cpu() / (self.scale if backward else 1.0)
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


@dataclass
class Ran:
    """A run of the step."""

    attention: str
    dtype: str
    loss: float
    grad_norm: float
    tape: Tape


def first_parting(ran: Ran, null: Ran, reference: Ran) -> dict | None:
    """The first place where `ran` is further from the reference than noise, which grows along the way; or None.

    Nothing is compared after the reference's own first tensor that is not finite: from there on all are lost.
    """
    epsilon = torch.finfo(getattr(torch, ran.dtype)).eps
    noise = epsilon
    for place, value in reference.tape.values.items():
        here = null.tape.errors.get(place, 0.0)
        noise = max(noise, here if math.isfinite(here) else 0.0)
        error = ran.tape.errors.get(place, math.inf)
        if error > ROOM * noise:
            return {"module": place[0], "tensor": place[1], "relative_error": repr(error), "noise": noise}
        if not value.isfinite().all():
            return None
    return None


def run_step(
    capsule: Capsule, attention: str, hardware: Hardware, function: Callable[..., Tensor] | None, reference: Ran | None
) -> Ran:
    """The step with one attention; `function` stands in for it where given.

    Raises:
        ValueError: that attention cannot run this model here.
    """
    settings = capsule.meta["settings"]
    # recomputing gives the same bits, and shows each tensor twice
    config = GPTConfig(**settings["model"] | {"attention": attention, "activation_checkpointing": "none"})
    document_mask = settings["data"]["document_mask"]
    config, *_ = resolve_model(config, hardware.device, hardware.dtype, document_mask=document_mask)
    model = GPT(config, capsule.meta["vocab_size"], settings["data"]["seq_len"], device=hardware.device)
    capsule.load_weights(model)
    optimizer = Optimizer(model, OptimConfig(**settings["optim"]), hardware.dtype)
    capsule.load_optimizer(optimizer)
    optimizer.held.fill_(True)  # the step is computed and not taken
    scale = optimizer.loss_scale.scale.item() if optimizer.loss_scale else 1.0
    tape = Tape(capsule.meta["first"].get("micro_batch", 0), scale, reference and reference.tape)
    tape.first_bad.weights(model)
    inputs, targets, starts = capsule.batch
    inputs, targets = inputs.to(hardware.device), targets.to(hardware.device)
    micro_batch = settings["train"]["micro_batch"] or len(inputs)
    restore_random_states(capsule.random, hardware.device)
    with attend_with(model, lambda layer, named: function or named), watched(model, tape):
        loss, norm = training_step(model, optimizer, inputs, targets, micro_batch, hardware, starts)
    return Ran(attention, str(hardware.dtype).removeprefix("torch."), loss.item(), norm.item(), tape)


def replay(capsule: Capsule, device: str, attentions: list[str]) -> list[dict]:
    """Run the step with each attention in each dtype; a row of the table for each."""
    disguise = next(iter(nulls(1, capsule.meta["settings"]["data"]["seq_len"]).values()))
    reference, rows = None, []
    for dtype in dict.fromkeys(("float32", capsule.meta["dtype"])):
        hardware = set_up(HardwareConfig(device=device, dtype=dtype, tf32=False, compile=False))
        reference = reference or run_step(capsule, "naive", hardware, None, None)
        null = run_step(capsule, "naive", hardware, disguise, reference)
        for attention in attentions:
            row: dict = {"attention": attention, "dtype": dtype}
            rows.append(row)
            try:
                ran = run_step(capsule, attention, hardware, None, reference)
            except ValueError as error:
                row["refused"] = str(error)
                continue
            row |= {"loss": repr(ran.loss), "grad_norm": repr(ran.grad_norm)}
            row |= {"first_bad": ran.tape.first_bad.found, "parts": first_parting(ran, null, reference)}
    return rows


def show(capsule: Capsule, rows: list[dict], device: str) -> None:
    meta, console = capsule.meta, Console(highlight=False)
    say = lambda text: console.print(text, markup=False, soft_wrap=True)  # noqa: E731
    first = meta["first"]
    where = f"{first['module']}: {first['tensor']}, {first['how']}" if "module" in first else first["how"]
    run = f"attention={meta['settings']['model']['attention']} in {meta['dtype']} on {meta['device']}"
    say(f"step {meta['step']} of a run with {run}: its {meta['what']} was not finite; first in {where}")
    if meta["settings"]["model"]["dropout"] or meta["settings"]["model"]["attention_dropout"]:
        if meta["device"] != device:
            say(f"dropout's masks are not the run's: {device} draws other numbers than {meta['device']}")
        elif meta.get("compiled"):
            say("dropout's masks are not the run's: compiled, it drew other numbers than here, module by module")
    for row in rows:
        head = f"{row['attention']:<6} {row['dtype']:<9} "
        if "refused" in row:
            say(head + f"cannot run here: {row['refused']}")
            continue
        bad, parts = row["first_bad"], row["parts"]
        numbers = f"loss {float(row['loss']):.6g}, gradient norm {float(row['grad_norm']):.6g}"
        state = f"not finite from {bad['module']}: {bad['tensor']} on" if bad else "finite"
        far = "never parts from naive in float32"
        if parts:
            by = f"by {float(parts['relative_error']):.2g}, where noise is {parts['noise']:.2g}"
            far = f"parts from naive in float32 at {parts['module']}: {parts['tensor']}, {by}"
        say(head + f"{numbers}: {state}; {far}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.replay", description=__doc__.split("\n\n")[0])
    parser.add_argument("capsule", help="a folder that a run wrote, runs/.../capsules/step_000123")
    parser.add_argument("--attention", default=",".join(ATTENTION), help="which, with commas between; default: all")
    parser.add_argument("--device", default="auto", help="auto | cpu | cuda | cuda:N")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, which is later
    attentions = options.attention.split(",")
    try:
        for name in attentions:
            if name not in ATTENTION:
                raise ValueError(f"--attention={name} is not one of {', '.join(ATTENTION)}")
        capsule = open_capsule(options.capsule)
        device = set_up(HardwareConfig(device=options.device)).device.type
        rows = replay(capsule, options.device, attentions)
    except ValueError as error:
        return fail(str(error))
    show(capsule, rows, device)
    print(json.dumps({"capsule": str(capsule.path), "step": capsule.meta["step"], "runs": rows}, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
