"""Losses and gradients that are not finite: detect the step, name the tensor, dump the step, follow the policy.

stop      the run ends with the state before the step saved; exit code EXIT_BAD_NUMBERS
skip      the step is not taken and the run continues with the next batch; if the weights themselves are not finite,
          which no batch repairs, as stop
rollback  weights and moments go back to the newest good checkpoint; steps, schedule and data continue, so the batches
          since that checkpoint are skipped. Chowdhery et al. 2022 (PaLM, section 5.1) got past their loss spikes this
          way: the same state with other batches.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data import Batch, Prefetcher
from model import GPT
from training import checkpoint as checkpoints
from training.hardware import Hardware
from training.hooks import watched
from training.optimizer import NoOpOptimizer, Optimizer
from training.parallel import ALONE
from training.random_states import random_states, restore_random_states
from training.saver import Saver
from training.shard import full_model, full_on_host
from training.stop import StopRequest, folder_value, shell_command

POLICIES = ("stop", "skip", "rollback")
EXIT_BAD_NUMBERS = 65  # sysexits.h: the data are not what they should be
MOST_IN_A_ROW = 10  # bad steps in a row that a run continues after; one more, and the cause is not the batch
MOST_DUMPS = 5  # of one run: each is as large as a checkpoint, and the first ones show the cause
DUMPS = "bad_steps"  # folder of the dumps, in the run's
SPIKE_WINDOW = 64  # losses that the next one is compared with
SPIKE_LEAST = 16  # fewer losses say little about their spread
SPIKE_DEVIATIONS = 6.0  # one in 1e9 samples of normal noise is further out; a diverging run gets there in a few steps

ComputeStep = Callable[[Callable[..., Tensor], Batch, NoOpOptimizer, Hardware], Any]  # Stepper.compute_step
NOT_COMPILED = " (run again module by module, not compiled)"
OTHER_MASKS = " (run again module by module, with other dropout masks than compiled)"
BY_ONE_PROCESS = " (run again by one process, with other roundings and dropout masks)"


def steps_late(device: torch.device) -> int:
    """One on a GPU: while the host waits for step n's numbers, step n + 1 is queued. A CPU has them at once."""
    return 1 if device.type == "cuda" else 0


@dataclass
class BadStep:
    """A step as it was: its number from 1, its loss and gradient norm, and the random states around it."""

    step: int
    loss: float
    grad_norm: float
    before: dict[str, Any]
    after: dict[str, Any]


class NumberCheck:
    """Checks every step's loss and gradient norm one step late, so that a GPU never waits for the host.

    The optimizer takes no step once one was not finite (`Optimizer.step`), so checking late changes no number: the loop
    goes back to the bad step, and what it does then depends on that step alone. A loss more than SPIKE_DEVIATIONS
    standard deviations above the mean of the SPIKE_WINDOW steps before it (a spike) is reported.

    Attributes:
        spikes: number of spikes so far, those before a resume included.
        bad_steps: number of bad steps that the run continued after, counted likewise.
        in_a_row: bad steps since the last good one.
    """

    def __init__(
        self, optimizer: Optimizer, hardware: Hardware, say: Callable[[str], None], state: dict[str, Any] | None = None
    ) -> None:
        """state: a `state_dict` to continue from."""
        self.spikes = self.bad_steps = self.in_a_row = 0
        self._optimizer, self._device, self._say, self._world = optimizer, hardware.device, say, hardware.world
        self._late = steps_late(hardware.device)
        # a step; its (held, loss, norm) and what other processes sent, in host memory; the event of that copy
        self._pending: deque[tuple[BadStep, Tensor, torch.cuda.Event | None]] = deque()
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._before = random_states(self._device)
        if state:
            self.spikes, self.bad_steps, self.in_a_row = (state[key] for key in ("spikes", "bad_steps", "in_a_row"))
            self._losses.extend(state["losses"])

    def bad_step(self, step: int, loss: Tensor, grad_norm: Tensor, *, wait: bool) -> BadStep | None:
        """Record `step` (from 1), check the steps whose numbers are due, with `wait` all of them; return the first that
        was not finite, or None.

        Wherever the state of the run is used (saved, evaluated, logged), pass `wait`. If a step is returned, model and
        optimizer are as they were before it, and stay so until `go_on`.
        """
        numbers = torch.stack([self._optimizer.held.float(), loss.float(), grad_norm.float()])
        if self._world.size > 1:
            numbers = torch.cat([numbers, self._world.messages.tail])
        copied = None
        if numbers.is_cuda:
            numbers = torch.empty(len(numbers), pin_memory=True).copy_(numbers, non_blocking=True)
            copied = torch.cuda.current_stream(self._device).record_event()
        after = random_states(self._device)
        self._pending.append((BadStep(step, math.nan, math.nan, self._before, after), numbers, copied))
        self._before = after
        while len(self._pending) > (0 if wait else self._late):
            oldest, numbers, copied = self._pending.popleft()
            if copied is not None:
                copied.synchronize()
            held, oldest.loss, oldest.grad_norm, *tail = numbers.tolist()
            for line in self._world.messages.read(oldest.step, tail):
                self._say(line)
            if held:
                self._pending.clear()
                return oldest
            self.in_a_row = 0
            self._compare(oldest.step, oldest.loss)
        return None

    def go_on(self) -> None:
        """Let the optimizer step again; the random states must be those that the next step begins with."""
        self.bad_steps += 1
        self.in_a_row += 1
        self._optimizer.release()
        self._before = random_states(self._device)

    def _compare(self, step: int, loss: float) -> None:
        """Report a spike. It enters the window too: a jump to a new level is two spikes, not fifty."""
        if len(self._losses) >= SPIKE_LEAST:
            count = len(self._losses)
            mean = math.fsum(self._losses) / count
            # statistics.stdev, which computes in fractions, takes longer than the rest of the host's work for a step
            deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in self._losses) / (count - 1))
            if loss > mean + SPIKE_DEVIATIONS * deviation:
                self.spikes += 1
                far = (loss - mean) / deviation if deviation else math.inf
                self._say(
                    f"spike      step {step}: loss {loss:.4f} is {far:.1f} standard deviations above {mean:.4f}, the "
                    f"mean of the {count} steps before"
                )
        self._losses.append(loss)

    def state_dict(self) -> dict[str, Any]:
        counts = {"spikes": self.spikes, "bad_steps": self.bad_steps, "in_a_row": self.in_a_row}
        return counts | {"losses": list(self._losses)}


class FirstBad:
    """A `See` (training/hooks.py) that keeps the first tensor which is not finite.

    Attributes:
        found: {"module", "tensor", "how", "micro_batch"}, None while all were finite.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] | None = None
        self._losses = 0

    def __call__(self, module: str, tensor: str, value: Tensor) -> None:
        if self.found is None and len(bad := (~value.isfinite()).nonzero()):
            place = tuple(bad[0].tolist())
            how = f"{len(bad):,} of {value.numel():,} values are not finite, the first {value[place].item()} at {place}"
            self.found = {"module": module, "tensor": tensor, "how": how, "micro_batch": self.micro_batch(tensor)}
        self._losses += tensor == "loss"

    def micro_batch(self, tensor: str) -> int:
        """The micro-batch that the next tensor, of this name, is of: its gradients come after its loss."""
        return self._losses - tensor.startswith("d")

    def weights(self, model: nn.Module) -> None:
        """Check the weights that the step begins with."""
        for name, parameter in model.named_parameters():
            module, _, tensor = name.rpartition(".")
            self(module, tensor, parameter.detach())


@dataclass
class BadSteps:
    """The policy and what it works on. `description` goes into each dump: settings, tokenizer, versions."""

    policy: str
    run_dir: Path
    model: GPT
    optimizer: Optimizer
    hardware: Hardware
    check: NumberCheck
    saver: Saver
    description: dict[str, Any]
    say: Callable[[str], None]
    resumed: checkpoints.Checkpoint | None  # what the run resumed from, perhaps in another folder

    def handle(self, bad: BadStep, batches: Prefetcher, compute_step: ComputeStep, stop: StopRequest) -> bool:
        """Handle the step `bad`; return whether the run continues with the next of `batches`.

        If not, everything is as it was before that step, and `stop` is requested.
        """
        batches.seek(bad.step)
        what = "gradient" if math.isfinite(bad.loss) else "loss"
        with self.hardware.world.communicating():
            model, moments = full_model(self.model), full_on_host(self.optimizer.state_dict())
        seen = FirstBad()
        if self.hardware.world.is_first:  # one process computes the whole step, with the same bits
            self.hardware.world.suspend_timeout()
            batch, alone = batches.whole(bad.step - 1), replace(self.hardware, world=ALONE)
            no_op = NoOpOptimizer(model, self.optimizer.loss_scale)
            seen.weights(model)  # the step before may have made them non-finite
            first = seen.found or self._diagnose(bad, model, lambda forward: compute_step(forward, batch, no_op, alone))
            self.say(f"bad step   {bad.step}: its {what} is not finite; first in {in_words(first)}")
            self._dump(bad, batch, model, moments, {"what": what, "first": first})
        lost = self.hardware.world.broadcast(seen.found is not None)
        goes_on, action = self._follow(bad.step, lost)
        self.say(f"on_nonfinite={self.policy}: {action}")
        restore_random_states(bad.after if goes_on else bad.before, self.hardware.device)
        if goes_on:
            self.check.go_on()
        else:
            # the checkpoint is of the step before, so a resumed run computes that step again
            purpose = ("to meet it again, once its cause is mended",)
            if lost:
                slower = f"optim.lr={self.description['settings']['optim']['lr'] / 10:g}"
                purpose = "to go on from weights that are finite, and more slowly", slower
            elif self.policy == "stop":
                purpose = "to go on without its batch", "train.on_nonfinite=skip"
            stop.request(f"a step that was not finite, step {bad.step}", EXIT_BAD_NUMBERS, *purpose)
            self.saver.ends_for_bad_numbers = True
        return goes_on

    def _follow(self, step: int, lost: bool) -> tuple[bool, str]:
        """Carry out the policy; return whether the run continues, and what was done. lost: weights are not finite."""
        if self.policy == "stop":
            return False, "the run stops before it"
        if self.check.in_a_row >= MOST_IN_A_ROW:
            return False, f"the run stops; more than {MOST_IN_A_ROW} bad steps in a row are not the batch's doing"
        if self.policy == "skip":
            if lost:
                return False, "the run stops; no other batch mends weights that are not finite"
            return True, "the step is not taken; the run goes on with the next batch"
        good = self.hardware.world.broadcast(self.hardware.world.on_first(self._newest_good)(step))
        if good is None:
            return False, f"the run stops; {self.saver.folder} has no good checkpoint: set or lower train.save_every"
        found = checkpoints.open_checkpoint(good, verify=())
        found.load_weights(self.model)
        self.optimizer.load_state_dict(found.load_state())
        return True, f"back to the weights of {found.path}; the run goes on with the next batch"

    def _newest_good(self, step: int) -> str | None:
        """The path of the newest whole checkpoint before `step`; none holds weights that are not finite."""
        self.saver.wait()
        found = checkpoints.newest_complete(self.saver.folder, self.say, step - 1) or self.resumed
        return str(found.path) if found and found.path.exists() else None

    def _diagnose(self, bad: BadStep, model: GPT, again: Callable[[Callable[..., Tensor]], Any]) -> dict[str, Any]:
        """The first module and tensor that are not finite, as `FirstBad.found`; only {"how"} where unknown.

        One process runs the step again, module by module. Where the run is compiled or context-parallel, so that
        roundings or dropout masks differ, the message says so.
        """
        seen = FirstBad()
        restore_random_states(bad.before, self.hardware.device)
        try:
            with watched(model, seen):
                again(model)
        except torch.OutOfMemoryError:  # eager mode needs more than compiled; a diagnosis must not end the run
            return {"how": "a place unknown: memory did not suffice to run the step again module by module"}
        finally:
            model.zero_grad()
        draws, otherwise = model.config.draws, ""
        if self.hardware.world.context > 1:
            otherwise = BY_ONE_PROCESS
        elif self.hardware.compile:
            otherwise = OTHER_MASKS if draws else NOT_COMPILED
        if seen.found:
            seen.found["how"] += otherwise if draws else ""
            return seen.found
        why = otherwise or "; is the hardware sound?"
        return {"how": f"a place unknown: the step was finite when run again{why}"}

    def _dump(self, bad: BadStep, batch: Batch, model: GPT, moments: dict[str, Any], found: dict[str, Any]) -> None:
        """Write what reproduces the step, as a checkpoint; if that fails, print a line and continue."""
        folder = self.run_dir / DUMPS
        if len(list(folder.glob("step_*"))) >= MOST_DUMPS:
            self.say(f"not saved: what reproduces step {bad.step}: {folder} holds {MOST_DUMPS} already; move them away")
            return
        meta = {
            "step": bad.step,
            "loss": repr(bad.loss),  # as text: JSON has no NaN
            "grad_norm": repr(bad.grad_norm),
            **found,
            "device": self.hardware.device.type,
            "dtype": str(self.hardware.dtype).removeprefix("torch."),
            "compiled": self.hardware.compile,
        }
        state = moments | {"random": bad.before, "batch": batch}
        try:
            checkpoints.prepare(folder)
            path = checkpoints.write_step(folder, checkpoints.weights_of(model), state, meta | self.description)
        except OSError as error:
            self.say(f"not saved: what reproduces step {bad.step}: {error}; free space or make the folder writable")
        else:
            again = shell_command("python", "-m", "scripts.replay", f"dump={folder_value(path)}")
            replay = f"; {again} runs the step again with each attention"  # which only a GPT of ours supports
            self.say(f"saved      {path}{'' if model.config.name else replay}")


def in_words(first: dict[str, Any]) -> str:
    """'module: tensor, how' of what `FirstBad` found, as far as it is known."""
    return f"{first['module']}: {first['tensor']}, {first['how']}" if "module" in first else first["how"]
