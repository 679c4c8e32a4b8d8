"""Watches every step's loss and gradient norm a step late, so that a GPU never waits for the host to have looked.

The optimizer takes no step once one was not finite (`Optimizer.step`), so looking late costs time and no number: the
loop goes back to the bad step, and what it does then depends on that step alone.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.hardware import Hardware
from training.optimizer import Optimizer
from training.random_states import random_states

SPIKE_WINDOW = 64  # losses that the next one is compared with
SPIKE_LEAST = 16  # fewer say little about their spread
SPIKE_DEVIATIONS = 6.0  # of normal noise one in 1e9 is further out; a diverging run is within a few steps


def steps_late(device: torch.device) -> int:
    """One on a GPU: while the host waits for step n's numbers, step n + 1 is queued. A CPU has them at once."""
    return 1 if device.type == "cuda" else 0


@dataclass
class Seen:
    """A step as it was: its number from 1, its loss and gradient norm (read), and the random states around it."""

    step: int
    loss: float
    grad_norm: float
    before: dict[str, Any]
    after: dict[str, Any]


@dataclass
class _Pending:
    step: int
    numbers: Tensor  # held, loss, norm: in host memory, perhaps not yet there
    copied: torch.cuda.Event | None
    before: dict[str, Any]
    after: dict[str, Any]


class NumberGuard:
    """Call `look` after each step; it returns the step to go back to, when there is one.

    say: told of a loss that jumps (a spike): more than SPIKE_DEVIATIONS standard deviations above the mean of the
    SPIKE_WINDOW steps before it.

    Attributes:
        spikes: how many there were, over all lives of the run.
        bad_steps: how many the run went on after, likewise.
        in_a_row: those since the last good step.
    """

    def __init__(self, optimizer: Optimizer, hardware: Hardware, say: Callable[[str], None]) -> None:
        self.spikes = self.bad_steps = self.in_a_row = 0
        self._optimizer, self._device, self._say = optimizer, hardware.device, say
        self._late = steps_late(hardware.device)
        self._pending: deque[_Pending] = deque()
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._before = random_states(self._device)

    def look(self, step: int, loss: Tensor, grad_norm: Tensor, *, wait: bool) -> Seen | None:
        """Take note of `step` (from 1), and look at those whose numbers are due; with `wait` at all of them.

        Wherever the state of the run is used (saved, evaluated, reported), ask with `wait`. A returned step is the
        first that was not finite: model and optimizer are as they were before it, and stay so until `go_on`.
        """
        numbers = torch.stack([self._optimizer.held.float(), loss.float(), grad_norm.float()])
        copied = None
        if numbers.is_cuda:
            numbers = torch.empty(3, pin_memory=True).copy_(numbers, non_blocking=True)
            copied = torch.cuda.current_stream(self._device).record_event()
        after = random_states(self._device)
        self._pending.append(_Pending(step, numbers, copied, self._before, after))
        self._before = after
        while len(self._pending) > (0 if wait else self._late):
            oldest = self._pending.popleft()
            if oldest.copied is not None:
                oldest.copied.synchronize()
            held, loss_value, norm_value = oldest.numbers.tolist()
            if held:
                self._pending.clear()
                return Seen(oldest.step, loss_value, norm_value, oldest.before, oldest.after)
            self.in_a_row = 0
            self._compare(oldest.step, loss_value)
        return None

    def go_on(self) -> None:
        """Let the optimizer step again; the random states are by now those that the next step begins with."""
        self.bad_steps += 1
        self.in_a_row += 1
        self._optimizer.release()
        self._before = random_states(self._device)

    def _compare(self, step: int, loss: float) -> None:
        """Say so if `loss` is a spike. It then counts as any other: a jump to a new level is two spikes, not fifty."""
        if len(self._losses) >= SPIKE_LEAST:
            count = len(self._losses)
            mean = math.fsum(self._losses) / count
            # not statistics.stdev: its fractions would take longer than all else that the host does for a step
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.spikes, self.bad_steps, self.in_a_row = (state[key] for key in ("spikes", "bad_steps", "in_a_row"))
        self._losses.extend(state["losses"])
