"""Whether a training step fits into the device's memory: known before it runs, with what would make it fit."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from model import GPT, GPTConfig, resolve_attention
from model.free_memory import free_bytes
from training.hardware import Hardware
from training.optimizer import OptimConfig
from training.tracker import step_peaks

GIB = 2**30
MARGIN = 1.1  # a forecast for a GPU is right within 10 %
HEAP = 1.5  # a CPU run's resident memory grows by 1.25 to 1.52 times the forecast: fragments, libraries' buffers
REMEDIES = ("attention", "loss", "activation_checkpointing")  # fields of the model that a remedy may change


_PEAKS: dict[str, dict[str, Counter]] = {}  # step -> its peaks: programs plan the same step repeatedly


class DoesNotFit(ValueError):
    """There is too little memory, and nothing else is wrong."""


@dataclass(frozen=True)
class Plan:
    """A training step and the memory available for it."""

    model: GPTConfig  # attention and loss name the implementations that will run
    optim: OptimConfig
    hardware: Hardware
    vocab_size: int
    seq_len: int  # tokens
    sequences: int  # sequences of a step that this process computes
    micro_batch: int  # sequences of one forward and backward
    features: tuple[str, ...] = ("causal",)  # of attention, named as in kernels/support.py
    free: int | None = None  # bytes; None where PyTorch cannot tell

    @cached_property
    def peaks(self) -> dict[str, Counter]:
        """What is alive at the peak of forward, backward and optimizer: bytes by (kind, module).

        For a model of transformers only what is alive between steps is known.
        """
        if self.model.name is not None:
            return {"optimizer": Counter({("weights, gradients and moments", ""): 16 * held_parameters(self.model)})}
        shape = self.vocab_size, self.seq_len, self.sequences, self.micro_batch
        world = self.hardware.world
        step = repr((self.model, self.optim, self.hardware, world.size, world.shards, *shape))
        if step not in _PEAKS:
            _PEAKS[step] = step_peaks(self.model, self.optim, self.hardware, *shape)
        return _PEAKS[step]

    @property
    def fullest(self) -> str:
        """The part of the step with the highest peak."""
        return max(self.peaks, key=lambda part: self.peaks[part].total())

    @property
    def peak(self) -> int:
        """The forecast, in bytes."""
        return self.peaks[self.fullest].total()

    def kinds(self, part: str) -> dict[str, int]:
        """Bytes by kind at the peak of a part of the step."""
        found = Counter()
        for (kind, _), size in self.peaks[part].items():
            found[kind] += size
        return dict(found)

    @property
    def on_cpu(self) -> bool:
        return self.hardware.device.type == "cpu"

    @property
    def margin(self) -> float:
        """The factor by which a run may really exceed the forecast."""
        return HEAP if self.on_cpu else MARGIN

    @property
    def larger(self) -> str:
        return "more memory" if self.on_cpu else "a larger GPU"

    @property
    def least(self) -> int:
        """Bytes of weights, gradients and one moment, float32, which every run of a GPT of ours keeps."""
        if self.model.name is not None:
            return 0
        made, world = replace(self.model, attention="naive"), self.hardware.world
        parameters = GPT(made, self.vocab_size, self.seq_len, device="meta").num_parameters()
        return 12 * parameters // (world.size if world.shards else 1)

    def with_model(self, **changes: str) -> "Plan":
        return replace(self, model=replace(self.model, **changes))

    def largest_fitting(self, limit: float) -> "Plan | None":
        """The plan with the most sequences at a time, up to micro_batch, that needs at most `limit` bytes."""
        if self.peak <= limit:
            return self
        lower = [n for n in range(1, math.isqrt(self.sequences) + 1) if self.sequences % n == 0]
        divisors = sorted({*lower, *(self.sequences // n for n in lower)})
        fewer = [replace(self, micro_batch=n) for n in divisors if n < self.micro_batch]
        # smaller micro-batches need less memory, but more of them need more sums of gradients
        sums = "sums of gradients", ""
        most = bisect_right(fewer, limit, key=lambda plan: plan.peak - plan.peaks["backward"][sums])
        return next((plan for plan in reversed(fewer[:most]) if plan.peak <= limit), None)

    def remedies(self, limit: float) -> list["Plan"]:
        """Plans that need at most `limit` bytes, which is less than this one needs; the fastest first.

        Single changes; where none is enough, all of them together. Empty if even that is too much, or if what a change
        saves is unknown.
        """
        if self.model.name is not None:
            return []
        device, dtype = self.hardware.device, self.hardware.dtype
        attention, _ = resolve_attention("auto", device, dtype, self.model.head_dim, self.features)
        faster = {"loss": "chunked"} if self.model.loss == "plain" else {}
        if self.model.attention in ("naive", "tiled") and attention in ("flash", "sdpa"):
            faster = {"attention": attention} | faster
        plans = [self.with_model(**{key: value}) for key, value in faster.items()]
        plans.append(self.largest_fitting(limit))
        plans += [self.with_model(activation_checkpointing=mode) for mode in ("pointwise", "selective", "full")]
        if fitting := [plan for plan in plans if plan and plan.peak <= limit]:
            return fitting
        together = self.with_model(**faster, activation_checkpointing="full").largest_fitting(limit)
        return [together] if together else []

    def checked(self, *, auto: bool = False) -> "Plan":
        """The plan itself, or with `auto` one whose micro_batch fits; DoesNotFit where there is none."""
        if self.free is None:
            return self
        free = f"{self.free / GIB:.2f} GiB are free on {self.hardware.device}"
        free += ", limits of control groups included" if self.on_cpu else ""
        if (least := self.least) > self.free:  # checked first: tracking a step of so large a model takes minutes
            raise DoesNotFit(
                f"weights, gradients and moments of model.num_layers={self.model.num_layers} and "
                f"model.n_embd={self.model.n_embd} need {least / GIB:.2f} GiB and {free}; "
                f"use a smaller model or {self.larger}"
            )
        limit = self.free / self.margin
        if auto and (fitting := self.largest_fitting(limit)):
            return fitting
        # on a CPU no run needs less than its forecast, and the system kills one that needs too much without a message
        if not auto and self.peak <= self.free * (1 if self.on_cpu else MARGIN):
            return self
        smallest = replace(self, micro_batch=1) if auto else self
        # more sequences at a time may need less: sums of gradients are not held
        advising = smallest if smallest.remedies(limit) else self
        raise DoesNotFit(
            f"train.micro_batch={'auto' if auto else self.micro_batch} needs {smallest.peak / GIB:.2f} GiB "
            f"{'with a single sequence ' if auto else ''}and {free}; "
            f"{advising.advice(limit)}"
        )

    def advice(self, limit: float) -> str:
        """The remedies as overrides, each with its forecast."""
        found = []
        for plan in self.remedies(limit):
            overrides = [(f"model.{key}", getattr(self.model, key), getattr(plan.model, key)) for key in REMEDIES]
            overrides.append(("train.micro_batch", self.micro_batch, plan.micro_batch))
            words = " ".join(f"{key}={new}" for key, old, new in overrides if new != old)
            found.append(f"{words} ({plan.peak / GIB:.2f} GiB)")
        if not found:
            fewer = "a shorter data.seq_len"
            if self.model.name is not None:
                fewer = "train.micro_batch or data.seq_len, model.activation_checkpointing=full"
            return f"use a smaller model, {fewer} or {self.larger}"
        return f"what fits: {', '.join(found)}"

    def beside(self, held: float) -> str:
        """The line after the first steps: the measured peak, in GiB, and the forecast."""
        return f"{held:.2f} GiB at most in two steps; forecast {self.peak / GIB:.2f} GiB"

    def __str__(self) -> str:
        """The run's line: the forecast with its kinds of 10 MiB and more, and what is free."""
        kinds = [f"{kind} {size / GIB:.2f}" for kind, size in self.kinds(self.fullest).items() if size >= 10 * 2**20]
        said = f"forecast {self.peak / GIB:.2f} GiB, fullest in the {self.fullest}"
        said += f": {', '.join(kinds)}" if kinds else ""
        if self.free is None:
            return said
        said += f"; {self.free / GIB:.2f} GiB free"
        limit = self.free / self.margin
        return said if self.peak <= limit else f"{said}, which may not be enough; {self.advice(limit)}"


def plan(settings: Any, model: GPTConfig, hardware: Hardware, vocab_size: int, sequences: int) -> Plan:
    """The memory plan of a run; with train.micro_batch=auto, the largest micro-batch that fits.

    `model` has resolved names; `sequences` are those of a step that this process computes.

    Raises:
        DoesNotFit: the forecast is above what is free (on a GPU more than 10 % above it), or no micro-batch fits,
            with the cheapest changes that fit.
    """
    asked, seq_len = settings.train.micro_batch, settings.data.seq_len // hardware.world.context
    micro_batch = sequences if asked in (None, "auto") else asked
    features = model.attention_features(settings.data.document_mask)
    free, world = free_bytes(hardware.device), hardware.world
    if free and hardware.device.type == "cpu":
        free //= world.hosts.count(world.hosts[world.rank])  # the processes that share this host's memory
    shape = vocab_size, seq_len, sequences, micro_batch
    optim, _ = settings.optim.resolved(hardware.device)
    forecast = Plan(model, optim, hardware, *shape, features, free)
    return forecast.checked(auto=asked == "auto")


def held_parameters(config: GPTConfig) -> int:
    from model.huggingface_model import num_parameters

    return num_parameters(config)


@contextmanager
def advice_when_out_of_memory(forecast: Plan) -> Iterator[None]:
    """Turn running out of memory, the device's or the machine's, into a ValueError with forecast and remedies."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # PyTorch's CPU allocator has no error class of its own, only its message
        out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not out_of_memory and "DefaultCPUAllocator: " not in str(error):
            raise
        limit = min(forecast.peak if forecast.free is None else forecast.free, forecast.peak) / forecast.margin
        free = "" if forecast.free is None else f" and {forecast.free / GIB:.2f} GiB free at the start"
        raise ValueError(
            f"{forecast.hardware.device} is out of memory, with train.micro_batch={forecast.micro_batch}, a forecast "
            f"of {forecast.peak / GIB:.2f} GiB{free}; {forecast.advice(limit)}"
        ) from error
