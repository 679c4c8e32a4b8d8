"""How long a device takes: for a call, over many runs with a cold L2 cache; and for the parts of a training step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kernels.device import l2_bytes
from training.hardware import Hardware

_WARMUP = 3  # the first call may compile, the second may still allocate


@dataclass(frozen=True)
class Milliseconds:
    """Quantiles of the runs of one call."""

    p50: float
    p99: float
    runs: int


def measure(call: Callable[[], object], device: torch.device, budget_ms: float = 100.0, runs: int = 50) -> Milliseconds:
    """Time call() on `device`, at most `runs` times (5 at least) and about budget_ms in total.

    On a GPU, twice the L2 cache is overwritten before each run, outside the measured span. On a CPU the clock is
    read around three runs.
    """
    if device.type != "cuda":
        spans = []
        for _ in range(3):
            started = time.perf_counter()
            call()
            spans.append(1e3 * (time.perf_counter() - started))
        return _quantiles(spans)
    for _ in range(_WARMUP):
        call()
    first = _span(call)
    torch.cuda.synchronize(device)
    count = max(5, min(runs, int(budget_ms / max(first[0].elapsed_time(first[1]), 1e-3))))
    flush = torch.empty(2 * l2_bytes(device.index or 0), dtype=torch.int8, device=device)
    events = []
    for _ in range(count):
        flush.zero_()
        events.append(_span(call))
    torch.cuda.synchronize(device)
    return _quantiles([start.elapsed_time(end) for start, end in events])


def python_us(call: Callable[[], object], device: torch.device, runs: int = 200) -> float:
    """Python's share of a call in microseconds: calls are queued faster than a small problem's kernels end."""
    for _ in range(20):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(runs):
        call()
    spent = time.perf_counter() - started
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e6 * spent / runs


def _span(call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    return start, end


def _quantiles(spans: list[float]) -> Milliseconds:
    spans = sorted(spans)
    return Milliseconds(spans[len(spans) // 2], spans[min(len(spans) - 1, int(0.99 * len(spans)))], len(spans))


class Parts:
    """How long the named parts of one step take: what `training_step` calls as `region`."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._marks: list[tuple[str, Mark, Mark]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = Mark(self._hardware)
        yield
        self._marks.append((name, begin, Mark(self._hardware)))

    def seconds(self) -> dict[str, float]:
        """By name, over all micro-batches; call it when the device is done."""
        total: dict[str, float] = {}
        for name, begin, end in self._marks:
            total[name] = total.get(name, 0.0) + begin.seconds_to(end)
        return total


class Mark:
    """A moment in the device's stream of work. As in a run, the host does not wait between steps."""

    def __init__(self, hardware: Hardware) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if hardware.device.type == "cuda" else None
        self.time = time.perf_counter()
        if self.event:
            self.event.record()

    def seconds_to(self, later: "Mark") -> float:
        return self.event.elapsed_time(later.event) / 1e3 if self.event else later.time - self.time
