"""What a call costs on a device: time over many runs with a cold L2 cache, memory; and the parts of a training step."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any, TypeVar

import torch

from kernels.device import l2_bytes
from training.step_messages import Mark

_WARMUP = 3  # the first call may compile, the second may still allocate
_ON_A_CPU = 3  # runs
_AHEAD = 2  # the GPU is kept busy for this many times the host's time for one call
_REPLAYS = 7  # of a graph with a call, and of one without; the median of their differences counts
T = TypeVar("T")


@dataclass(frozen=True)
class Milliseconds:
    """Quantiles of the runs of one call."""

    p50: float
    p99: float
    runs: int


def measure(
    call: Callable[[], object],
    device: torch.device,
    budget_ms: float = 100.0,
    runs: int = 50,
    *,
    with_host: bool = True,
) -> Milliseconds:
    """Time call() on `device`: on a GPU at most `runs` times (5 at least), for about budget_ms.

    On a GPU, twice the L2 cache's size is overwritten before each run, outside the measured span. Without the host it
    is overwritten so often that the host has queued the whole call before the GPU begins it; with the host, the time
    includes what the GPU waits for a slow host. A CPU runs it three times.
    """
    if device.type == "cuda":
        cold = torch.empty(2 * l2_bytes(device.index or 0), dtype=torch.int8, device=device)
        for _ in range(_WARMUP):
            call()
        (first,) = spans(call, device, 1, cold.zero_)
        fills = 1 if with_host else math.ceil(_AHEAD * host_seconds(call) / spans(cold.zero_, device, 1)[0])

        def before() -> None:
            for _ in range(fills):
                cold.zero_()

        times = spans(call, device, max(5, min(runs, int(budget_ms / max(1e3 * first, 1e-3)))), before)
    else:
        times = spans(call, device, _ON_A_CPU)
    times = [1e3 * seconds for seconds in times]
    return Milliseconds(statistics.median(times), p99(times), len(times))


def host_seconds(call: Callable[[], object], calls: int = 1) -> float:
    """Seconds that the host takes to queue a call on an idle GPU: the mean of `calls`, none of which is waited for."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def spans(
    call: Callable[[], object], device: torch.device, runs: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Seconds of each of `runs` calls; `before` runs ahead of each and is not counted."""
    marks = []
    for _ in range(runs):
        before()
        begin = Mark(device)
        call()
        marks.append((begin, Mark(device)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [begin.seconds_to(end) for begin, end in marks]


def turns(calls: Sequence[T], rounds: int) -> Iterator[list[T]]:
    """The order of `calls` in each round. It changes, because a GPU's clock is higher after a call that left it cool.

    In n rounds of n calls, or 2n rounds where n is odd, each call has each place equally often and follows each other
    call equally often (Williams 1949).
    """
    n = len(calls)
    zigzag = [place // 2 if place % 2 == 0 else n - 1 - place // 2 for place in range(n)]
    for number in range(rounds):
        moved, backwards = divmod(number, 2) if n % 2 else (number, False)
        order = [calls[(place + moved) % n] for place in zigzag]
        yield order[::-1] if backwards else order


def p99(times: Iterable[float]) -> float:
    """The 99th percentile by nearest rank: the least of the times that at least 99 % do not exceed."""
    times = sorted(times)
    return times[-(-99 * len(times) // 100) - 1]


def token_throughput(
    call: Callable[[], object],
    count: int,
    device: torch.device,
    budget_ms: float,
    runs: int = 50,
    *,
    with_host: bool = True,
) -> dict[str, float | None]:
    """Figures of `call`, which computes `count` tokens, after a first call for what is built once."""
    call()
    peak, times = peak_gib(call, device), measure(call, device, budget_ms, runs, with_host=with_host)
    rate = 1e3 * count / times.p50
    return {"ms": times.p50, "p99_ms": times.p99, "tokens_per_second": rate, "peak_gib": peak}


def laps(call: Callable[[], object], device: torch.device, warmup: int, runs: int) -> list[float]:
    """Seconds of each of `runs` calls, without a wait between them, after `warmup` calls that do not count."""
    marks = [Mark(device)]
    for _ in range(warmup + runs):
        call()
        marks.append(Mark(device))
    marks[-1].wait()
    return [begin.seconds_to(end) for begin, end in pairwise(marks)][warmup:]


class GraphClock:
    """Microseconds of the device for a call inside a CUDA graph with a cold L2 cache, as in a loop of generation.

    It is the time of a graph of reads and calls in turn, less that of a graph of the reads alone. One is replayed right
    after the other, because a GPU's clock moves.
    """

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            self.cold = torch.ones(l2_bytes(device.index or 0) // 2, device=device)  # twice the cache
            self.sum = torch.empty((), device=device)

    def __call__(self, call: Callable[[], object], fewest: int = 3) -> Callable[[], float]:
        """Capture `call` at least `fewest` times; return a function for its microseconds. A CPU has no graph."""
        if self.device.type != "cuda":
            return lambda: 1e3 * measure(call, self.device).p50
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.flush()
                call()
        torch.cuda.current_stream().wait_stream(side)
        (seconds,) = spans(call, self.device, 1)
        runs = max(fewest, min(20, int(4e-3 / max(seconds, 1e-6))))
        both, alone = Graph((self.flush, call), runs), Graph((self.flush,), runs)

        def microseconds() -> float:
            turn = cycle((both, alone))
            seconds = laps(lambda: next(turn).graph.replay(), self.device, 2, 2 * _REPLAYS)
            return 1e6 * statistics.median(b - a for b, a in zip(seconds[::2], seconds[1::2], strict=True)) / runs

        return microseconds

    def flush(self) -> None:
        """Flush L2 by reading: written lines would still be on their way to memory."""
        torch.sum(self.cold, 0, out=self.sum)


class Graph:
    """A captured graph of the parts in turn, `runs` times. It keeps the parts: a replay reads their tensors."""

    def __init__(self, parts: tuple[Callable[[], object], ...], runs: int):
        self.parts, self.graph = parts, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(runs):
                for part in parts:
                    part()


def peak_gib(call: Callable[[], object], device: torch.device) -> float | None:
    """The peak memory of call() in GiB, beyond what is held before it; None where PyTorch does not count it."""
    if device.type != "cuda":
        call()
        return None
    free(device)  # cycles left by a call that ran out of memory could otherwise be freed after `held` was read
    held = torch.cuda.memory_allocated(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - held) / 2**30


@contextmanager
def failures_as_rows(row: dict[str, Any], *also: type[Exception]) -> Iterator[None]:
    """Store a failure that is itself a result as the row's `error`: out of memory, and the first line of an exception
    of the types `also`."""
    try:
        yield
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    except also as error:
        row["error"] = str(error).partition("\n")[0]


def free(device: torch.device) -> None:
    """Free what the call before still holds, for the next one, and reset the peak of memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


class Parts:
    """The times of the named parts of one step, which `training_step` enters as `region`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Mark, Mark]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = Mark(self._device)
        yield
        self._marks.append((name, begin, Mark(self._device)))

    def seconds(self) -> dict[str, float]:
        """Seconds by name, summed over all micro-batches."""
        total: dict[str, float] = {}
        for name, begin, end in self._marks:
            total[name] = total.get(name, 0.0) + begin.seconds_to(end)
        return total
