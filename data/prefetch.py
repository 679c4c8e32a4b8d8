"""Batches ahead of the step that needs them: on CUDA a thread reads and copies while the GPU works."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, Self

import torch

from data.batches import TokenBatches, document_starts

# one batch in use, two ready: reading a batch takes a hundredth of a step, so more would only hold memory
BATCHES_AHEAD = 2

# inputs and targets, (sequences, seq_len) each, and the first tokens of documents that must not see each other, if any
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class Prefetcher:
    """Iterates over (inputs, targets, starts), from `start_step` on, without end: inputs and targets on `device`.

    `starts` are the `document_starts` of the inputs, on the CPU; None unless `end_of_text` is given.

    On CUDA a thread prepares the next batches in pinned memory and copies them on a stream of its own; elsewhere a
    batch is made when `next` is called. It draws no random number, so it changes no result. An exception in the thread
    is raised by `next`. Use it as a context manager, or call `close`: no thread stays behind.
    """

    def __init__(
        self, batches: TokenBatches, start_step: int, device: torch.device | str, *, end_of_text: int | None = None
    ) -> None:
        self._batches, self._device = batches, torch.device(device)
        self._end_of_text = end_of_text
        self._ahead = None
        if self._device.type == "cuda":
            # PyTorch reuses the same 32 streams, and a copy on a stream on which a graph is being captured would become
            # part of that graph; streams of high priority are different ones
            self._stream = torch.cuda.Stream(self._device, priority=-1)
        self.seek(start_step)

    def seek(self, step: int) -> None:
        """Continue with the batch of `step`, whatever came before."""
        self.close()
        self._step = step
        if self._device.type == "cuda":
            self._ahead = LookaheadThread(self._copy, step)

    def whole(self, step: int) -> Batch:
        """The batch of `step` with the rows of all ranks; the iteration does not change."""
        inputs, targets = self._batches.whole().batch(step)
        return inputs.to(self._device), targets.to(self._device), self._starts(inputs)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._ahead is None:
            inputs, targets = self._batches.batch(self._step)
            self._step += 1
            return inputs.to(self._device), targets.to(self._device), self._starts(inputs)
        inputs, targets, starts, copied = self._ahead.take()
        now = torch.cuda.current_stream(self._device)
        now.wait_event(copied)
        # the allocator must not give this memory to the copying stream while the step still reads it
        inputs.record_stream(now)
        targets.record_stream(now)
        return inputs, targets, starts

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _starts(self, inputs: torch.Tensor) -> torch.Tensor | None:
        return None if self._end_of_text is None else document_starts(inputs, self._end_of_text)

    def _copy(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.cuda.Event]:
        inputs, targets = self._batches.batch(step)
        starts = self._starts(inputs)
        with torch.cuda.stream(self._stream):  # this thread's current device is the stream's, for pinning too
            inputs = inputs.pin_memory().to(self._device, non_blocking=True)
            targets = targets.pin_memory().to(self._device, non_blocking=True)
            return inputs, targets, starts, self._stream.record_event()


class LookaheadThread:
    """A thread that calls make(start), make(start + 1), ... and keeps a few results ready, in order."""

    def __init__(self, make: Callable[[int], Any], start: int) -> None:
        self._make, self._steps = make, count(start)
        self._pool = ThreadPoolExecutor(1, "prefetch")
        self._results = deque(self._pool.submit(make, next(self._steps)) for _ in range(BATCHES_AHEAD))

    def take(self) -> Any:
        """The next result; raises what `make` raised, at this call and every later one."""
        result = self._results[0].result()  # one that raises stays the first
        self._results.popleft()
        self._results.append(self._pool.submit(self._make, next(self._steps)))
        return result

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
