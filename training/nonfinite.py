"""What a run does about a step whose loss or gradient is not finite: name the place, keep the step, follow the policy.

stop      the run ends with the state before the step saved; exit code EXIT_BAD_NUMBERS
skip      the step is not taken and the run goes on with the next batch
rollback  weights and moments go back to the newest good checkpoint; steps, schedule and data go on. So the batches
          since that checkpoint are not learnt from and not seen again, as Chowdhery et al. 2022 (PaLM, section 5.1)
          got past their spikes: the same state with other batches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from data import Batch, Prefetcher
from model import GPT
from training import capsule
from training.checkpoint import WEIGHTS, newest_complete
from training.guard import NumberGuard, Seen
from training.hardware import Hardware
from training.optimizer import Optimizer
from training.random_states import restore_random_states
from training.saver import Saver
from training.stop import StopRequest
from training.tape import FirstBad, gradients_watched, watched, watched_compiled

POLICIES = ("stop", "skip", "rollback")
EXIT_BAD_NUMBERS = 65  # sysexits.h: the data are not what they should be
MOST_IN_A_ROW = 10  # bad steps that a policy goes on after; with one more it is not the batch
MOST_CAPSULES = 5  # of one run: each is as large as a checkpoint, and the first ones tell what there is to tell

Take = Callable[[Callable[..., torch.Tensor], Batch], Any]  # computes a step with the given network
Again = Callable[[nn.Module], Any]  # runs the bad step once more; nothing is updated


@dataclass
class NonFinite:
    """The policy and what it works on. `description` goes into each capsule: settings, tokenizer, versions."""

    policy: str
    run_dir: Path
    model: GPT
    forward: nn.Module  # the model, or what was compiled from it
    optimizer: Optimizer
    hardware: Hardware
    guard: NumberGuard
    saver: Saver
    description: dict[str, Any]
    say: Callable[[str], None]

    def handle(self, bad: Seen, batches: Prefetcher, take: Take, stop: StopRequest) -> bool:
        """Whether the run goes on, after the step `bad`, with the next of `batches`.

        If not, everything is as it was before that step, and `stop` has the reason.
        """
        batches.seek(bad.step - 1)
        batch = next(batches)
        again = lambda forward: take(forward, batch)  # noqa: E731
        what = "gradient" if math.isfinite(bad.loss) else "loss"
        first = self._diagnose(bad, again)
        where = f"{first['module']}: {first['tensor']}, {first['how']}" if "module" in first else first["how"]
        self.say(f"bad step   {bad.step}: its {what} is not finite; first in {where}")
        self._keep(bad, batch, {"what": what, "first": first})
        goes_on, action = self._follow(bad.step)
        self.say(f"on_nonfinite={self.policy}: {action}")
        restore_random_states(bad.after if goes_on else bad.before, self.hardware.device)
        if goes_on:
            self.guard.go_on()
        else:
            stop.because(f"a step that was not finite, step {bad.step}", EXIT_BAD_NUMBERS)
        return goes_on

    def _follow(self, step: int) -> tuple[bool, str]:
        """Whether the run goes on, and what is done, in words."""
        if self.policy == "stop":
            return False, "the run stops before it; train.on_nonfinite=skip resume=auto goes on with the next batch"
        if self.guard.in_a_row >= MOST_IN_A_ROW:
            return False, f"the run stops; more than {MOST_IN_A_ROW} bad steps in a row are not the batch's doing"
        if self.policy == "skip":
            return True, "the step is not taken; the run goes on with the next batch"
        self.saver.wait()
        last = step - 1
        while found := newest_complete(self.saver.folder, self.say, last):
            if all(value.isfinite().all() for value in load_file(found.path / WEIGHTS).values()):
                found.load_weights(self.model)
                self.optimizer.restore(found.load_state())
                return True, f"back to the weights of {found.path}; the run goes on with the next batch"
            self.say(f"passed over: checkpoint {found.path}: its weights are not finite")
            last = found.step - 1
        return False, f"the run stops; {self.saver.folder} has no good checkpoint yet: lower train.save_every"

    def _diagnose(self, bad: Seen, again: Again) -> dict[str, Any]:
        """The first module and tensor that are not finite, as `FirstBad.found`; only {"how"} where that is not known.

        The step is run again module by module. A compiled model draws other dropout masks than that: then it is first
        run compiled, in a way that tells of its tensors (`watched_compiled`), though of gradients only the weights'.
        """
        seen = FirstBad()
        seen.weights(self.model)
        compiled = self.forward is not self.model
        masks_differ = compiled and self.model.config.dropout + self.model.config.attention_dropout > 0
        # each compiles for up to a minute, and the first bad steps tell what there is to tell
        exact = [self._run_compiled] if compiled and self.guard.bad_steps < MOST_CAPSULES else []
        ways = [*exact, self._run_by_module] if masks_differ else [self._run_by_module, *exact]
        try:
            for way in ways:
                if seen.found is None:
                    seen = FirstBad()  # which counts micro-batches
                    restore_random_states(bad.before, self.hardware.device)
                    way(seen, again)
                    if seen.found and masks_differ and way == self._run_by_module:
                        seen.found["how"] += " (run module by module, with other dropout masks than compiled)"
        except torch.OutOfMemoryError:  # eager takes more than compiled; the run is not to die of a diagnosis
            return {"how": "a place unknown: memory did not suffice to run the step again module by module"}
        finally:
            for part in self.optimizer.parts:
                part.zero_grad(set_to_none=True)
        return seen.found or {"how": "a place unknown: the step was finite when run again; is the hardware sound?"}

    def _run_by_module(self, seen: FirstBad, again: Again) -> None:
        with watched(self.model, seen):
            again(self.model)

    def _run_compiled(self, seen: FirstBad, again: Again) -> None:
        """The run's own numbers. A micro-batch's gradients all come at once: the first is the one nearest the loss."""
        from torch._dynamo.exc import TorchDynamoException  # seconds to import, so only where something was compiled

        gradients: dict[str, tuple[torch.Tensor, int]] = {}  # module -> values not finite, of how many
        modules = [name.rpartition(".")[0] for name, _ in self.model.named_parameters()]

        def look() -> None:
            for module in reversed(modules):
                if module in gradients:
                    bad, size = gradients.pop(module)
                    seen.counted(module, "dweight", int(bad), size)

        def looking(*arguments, **options) -> torch.Tensor:
            look()  # before the next micro-batch's are added to them
            return forward(*arguments, **options)

        def keep(module: str, _tensor: str, gradient: torch.Tensor) -> None:
            gradients[module] = (~gradient.isfinite()).sum(), gradient.numel()  # now: clipping changes it

        try:
            with watched_compiled(self.model, seen.counted) as forward, gradients_watched(self.model, keep):
                again(looking)
        except TorchDynamoException:  # with activation checkpointing; module by module it is, and that is said
            return
        look()

    def _keep(self, bad: Seen, batch: Batch, found: dict[str, Any]) -> None:
        """Write the capsule; where that cannot be, say so and go on without."""
        chosen = {"device": self.hardware.device.type, "dtype": str(self.hardware.dtype).removeprefix("torch.")}
        chosen["compiled"] = self.hardware.compile
        # as text: JSON knows no NaN
        meta = {"step": bad.step, "loss": repr(bad.loss), "grad_norm": repr(bad.grad_norm), **found, **chosen}
        folder = self.run_dir / "capsules"
        if len(list(folder.glob("step_*"))) >= MOST_CAPSULES:
            self.say(
                f"not saved: what reproduces step {bad.step}: {folder} holds {MOST_CAPSULES} already; move them away"
            )
            return
        try:
            path = capsule.write(folder, self.model, self.optimizer, batch, bad.before, meta | self.description)
        except OSError as error:
            self.say(f"not saved: what reproduces step {bad.step}: {error}; free space or make the folder writable")
        else:
            self.say(f"saved      {path}; python -m scripts.replay {path} runs the step again with each attention")
