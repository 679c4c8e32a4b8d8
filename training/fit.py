"""Whether a step fits into the device's memory: said before anything is allocated, with what would make it fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from model import resolve_attention
from training.memory import GIB, Forecast, Work, forecast

MARGIN = 1.1  # a forecast is right within 10 %


@dataclass(frozen=True)
class Plan:
    """A step's work and the memory there is for it; `free` is in bytes, None where PyTorch does not count it."""

    work: Work
    free: int | None
    device: torch.device
    features: tuple[str, ...] = ()  # of attention, in the words of kernels/support.py

    @property
    def forecast(self) -> Forecast:
        return forecast(self.work)

    @property
    def sequences(self) -> int:
        """Of a whole step."""
        return self.work.micro_batch * self.work.micro_batches

    def with_micro_batch(self, sequences: int) -> "Plan":
        work = replace(self.work, micro_batch=sequences, micro_batches=self.sequences // sequences)
        return replace(self, work=work)

    def with_model(self, **changes: str) -> "Plan":
        return replace(self, work=replace(self.work, model=replace(self.work.model, **changes)))

    def largest_micro_batch(self, limit: float) -> int | None:
        """The most sequences at a time whose forecast is within `limit` bytes; they divide the step."""
        divisors = (n for n in range(self.work.micro_batch, 0, -1) if self.sequences % n == 0)
        return next((n for n in divisors if self.with_micro_batch(n).forecast.peak <= limit), None)

    def remedies(self, limit: float) -> list[tuple[str, int]]:
        """Overrides whose forecast is within `limit` bytes, and that forecast: those that cost least time first.

        Single changes; where none is enough, all of them together. Empty where even that is too much.
        """
        best, model = self, self.work.model
        found: list[tuple[list[str], Plan]] = []
        attention, _ = resolve_attention("auto", self.device, self.work.dtype, model.head_dim, self.features)
        if model.attention in ("naive", "tiled") and attention in ("flash", "sdpa"):
            best = best.with_model(attention=attention)
            found.append(([f"model.attention={attention}"], best))
        if model.loss == "plain":
            best = best.with_model(loss="chunked")
            found.append((["model.loss=chunked"], self.with_model(loss="chunked")))
        free_of_cost = [override for overrides, _ in found for override in overrides]
        if (number := self.largest_micro_batch(limit)) and number < self.work.micro_batch:
            found.append(([f"train.micro_batch={number}"], self.with_micro_batch(number)))
        for mode in ("pointwise", "selective", "full"):
            change = {"activation_checkpointing": mode}
            found.append(([f"model.activation_checkpointing={mode}"], self.with_model(**change)))
        fitting = [(o, p.forecast.peak) for o, p in found if p.forecast.peak <= min(limit, self.forecast.peak - 1)]
        if not fitting:
            best = best.with_model(activation_checkpointing="full")
            overrides = [*free_of_cost, "model.activation_checkpointing=full"]
            if number := best.largest_micro_batch(limit):
                best = best.with_micro_batch(number)
                fitting = [([*overrides, f"train.micro_batch={number}"], best.forecast.peak)]
        return [(" ".join(overrides), peak) for overrides, peak in fitting]

    def advice(self, limit: float) -> str:
        remedies = ", ".join(f"{override} ({peak / GIB:.2f} GiB)" for override, peak in self.remedies(limit))
        return f"what fits: {remedies}" if remedies else "use a smaller model, a shorter data.seq_len or a larger GPU"

    def beside(self, held: float) -> str:
        """The line after the first steps: what was held at most, in GiB, and the forecast."""
        return f"{held:.2f} GiB at most in two steps; forecast {self.forecast.peak / GIB:.2f} GiB"

    def __str__(self) -> str:
        """The run's line: the forecast, and what is free."""
        said = f"forecast {self.forecast}"
        if self.free is None:
            return said
        said += f"; {self.free / GIB:.2f} GiB free"
        tight = self.forecast.peak > self.free / MARGIN
        return f"{said}, which may not be enough; {self.advice(self.free / MARGIN)}" if tight else said


def fit(
    work: Work, device: torch.device, *, auto: bool = False, features: tuple[str, ...] = (), free: int | None = None
) -> Plan:
    """What a run will do about memory.

    Args:
        work: the step; with `auto` its micro_batch is the most that may be chosen, the whole step.
        device: where it will run.
        features: what attention must be able to do, in the words of kernels/support.py.
        free: bytes; None asks the device.

    Raises:
        ValueError: the forecast is more than 10 % above what is free, or no micro-batch fits, with the cheapest
            changes that fit.
    """
    made = Plan(work, free_bytes(device) if free is None else free, device, features)
    if made.free is None:
        return made
    limit = made.free / MARGIN
    if auto and (number := made.largest_micro_batch(limit)):
        return made.with_micro_batch(number)
    peak = made.forecast.peak
    if auto or peak > made.free * MARGIN:
        made = made.with_micro_batch(1) if auto else made
        raise ValueError(
            f"train.micro_batch={'auto' if auto else work.micro_batch} needs {made.forecast.peak / GIB:.2f} GiB "
            f"{'with a single sequence ' if auto else ''}and {made.free / GIB:.2f} GiB are free on {device}; "
            f"{made.advice(limit)}"
        )
    return made


@contextmanager
def explained(made: Plan) -> Iterator[None]:
    """Turn running out of memory, the device's or the machine's, into a ValueError with forecast and remedies."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not ran_out(error):
            raise
        peak = made.forecast.peak
        limit = min(peak if made.free is None else made.free, peak) / MARGIN
        free = "" if made.free is None else f" and {made.free / GIB:.2f} GiB free at the start"
        raise ValueError(
            f"{made.device} is out of memory, with train.micro_batch={made.work.micro_batch}, a forecast of "
            f"{peak / GIB:.2f} GiB{free}; {made.advice(limit)}"
        ) from error


def ran_out(error: MemoryError | RuntimeError) -> bool:
    """Whether memory was short: PyTorch's allocator for a CPU has no error of its own, only its words."""
    out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return out_of_memory or ("DefaultCPUAllocator: " in str(error) and "memory" in str(error))


def free_bytes(device: torch.device) -> int | None:
    """Bytes that this process could still allocate on `device`; None on a CPU."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # in the allocator's own pool
    return torch.cuda.mem_get_info(device)[0] + unused
