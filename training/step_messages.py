"""What the processes of a run exchange at each step: a few numbers that are summed along with the gradients."""

import statistics
import sys
import time
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from training.parallel import World

NUM_VOTES = 8  # room for the reasons to stop that a process can vote for, training/stop.py
SLOW, SLOW_STEPS = 1.1, 50  # a process this many times slower than the others for so many steps is named


class StepMessages:
    """Numbers that are packed on the device before a step's sum, and read on the host up to a step later.

    tail: the last step's sums of loss, votes and `unsaved`, then each rank's ms and check; on the device.
    unsaved: the last step whose checkpoint this process could not write.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self.clock = StepClock()
        self.tail: Tensor | None = None
        self.unsaved = self._said_unsaved = 0
        self._votes, self._heard = set[int](), set[int]()
        self._slow_for, self._named = [0] * world.size, set[int]()
        self._check: Tensor | float = 0.0

    def vote(self, index: int) -> None:
        """Ask all processes to stop, for reason number `index`; they learn of it with the next step's sum."""
        self._votes.add(index)

    @property
    def verdict(self) -> int | None:
        """The reason for which some process asked to stop, the same in all; None while there is none."""
        return min(self._heard, default=None)

    def check_weights(self, weights: list[Tensor]) -> None:
        """Send a norm of the weights, which must be the same in all processes."""
        self._check = torch.stack(torch._foreach_norm(weights)).sum()

    def parts_of(self, tail: Any) -> list[Any]:
        """The pieces of `tail`, or of its list: loss, votes, `unsaved`, then ms and checks of each rank."""
        sizes = (1, NUM_VOTES, 1, self._world.size, self._world.size)
        return [tail[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def pack(self, loss: Tensor) -> Tensor:
        """`tail` with this process's numbers, to be summed over all processes in place."""
        self.tail = torch.zeros(2 + NUM_VOTES + 2 * self._world.size, device=loss.device)
        own_loss, votes, unsaved, times, checks = self.parts_of(self.tail)
        own_loss[0], checks[self._world.rank] = loss, self._check
        for index in self._votes:
            votes[index].fill_(1)
        unsaved.fill_(self.unsaved)
        times[self._world.rank].fill_(self.clock.end())
        return self.tail

    def read(self, step: int, tail: list[float]) -> list[str]:
        """Process the summed `tail` of `step`, copied to the host; returns lines to print.

        Raises:
            ValueError: a process's weights are not the first one's.
        """
        world = self._world
        world.step = step
        if world.size == 1:
            return []
        _, votes, (unsaved,), times, checks = self.parts_of(tail)
        self._heard |= {index for index, asked in enumerate(votes) if asked}
        if unsaved != self._said_unsaved and not world.is_first:  # the first process has printed it, with the reason
            place = f"{world.describe(0)} cannot write it; {world.describe(world.rank)} goes on"
            print(f"not saved: step {int(unsaved)}: {place}", file=sys.stderr, flush=True)
        self._said_unsaved = unsaved
        for rank, check in enumerate(checks):
            if check != checks[0] and check == check and checks[0] == checks[0]:
                raise ValueError(
                    f"{world.describe(rank)}, step {step}: its weights are not those of rank 0 (their norms are "
                    f"{check!r} and {checks[0]!r}); is its hardware sound? Go on from a checkpoint before it"
                )
        lines = []
        for rank, time_ms in enumerate(times):
            others = statistics.median(times[:rank] + times[rank + 1 :])
            self._slow_for[rank] = self._slow_for[rank] + 1 if time_ms > SLOW * others > 0 else 0
            if self._slow_for[rank] >= SLOW_STEPS and rank not in self._named:
                self._named.add(rank)
                lines.append(
                    f"slow       {world.describe(rank)} has taken more than {SLOW:g} times as long as the others for "
                    f"{SLOW_STEPS} steps, at step {step} {time_ms:,.1f} ms and they {others:,.1f}"
                )
        return lines


class Mark:
    """A moment in the device's stream of work. As in a run, the host does not wait between steps."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.time = time.perf_counter()
        if self.event:
            self.event.record()

    def wait(self) -> None:
        """Wait until the device has reached this moment."""
        if self.event:
            self.event.synchronize()

    def reached(self) -> bool:
        return self.event is None or self.event.query()

    def seconds_to(self, later: "Mark") -> float:
        """Seconds between two moments, both of which the device has reached."""
        return self.event.elapsed_time(later.event) / 1e3 if self.event else later.time - self.time


class StepClock:
    """How long this process computes before it waits for the others, in ms; on CUDA, of the last finished step."""

    def __init__(self) -> None:
        self.last_ms = 0.0
        self._spans: deque[tuple[Mark, Mark]] = deque()  # not over when last queried
        self.begin(torch.device("cpu"))

    def begin(self, device: torch.device) -> None:
        self._device, self._began = device, Mark(device)

    def end(self) -> float:
        self._spans.append((self._began, Mark(self._device)))
        while self._spans and self._spans[0][1].reached():
            began, ended = self._spans.popleft()
            self.last_ms = 1e3 * began.seconds_to(ended)
        return self.last_ms
