"""The speed of a run: tokens a second, FLOPs of a GPT, and their share of the chip's peak (MFU).

A matrix product with a weight of P entries costs 2P FLOPs a token forward and 4P backward. Attention's two products
cost 4 * num_heads * head_dim FLOPs for each (query, key) pair forward and 2.5x that backward in FlashAttention's own
count (the scores are computed again); MFU counts the 2x that the mathematics needs, as PaLM does, for every backend
alike. Two conventions for the pairs of a causal mask are in use and differ by 2x in the attention term:
`causal` counts the pairs that are visible, (N + 1) / 2 a token; `full` counts all N (PaLM, appendix B; nanoGPT).
Neither accounts for what model.mask hides, or shows beyond a window, or for what documents hide.
"""

import time
import timeit

import torch

from kernels.device import gpu_named
from model import GPT
from training.hardware import DTYPES, Hardware
from training.optimizer import OptimConfig, flops_of_muon

SLOW_STEP_SECONDS = 10.0
FEW_FLOPS = 1e11  # a step of this many is not slow on any CPU


class Speed:
    """Measures a run's steps of `batch_tokens` over all processes, without evaluation, samples, saving, compilation.

    began: the run's start on time.perf_counter, set back by the time that its earlier processes took.
    """

    def __init__(self, model: GPT, hardware: Hardware, batch_tokens: int, step: int, began: float) -> None:
        self._hardware, self._batch_tokens, self._began = hardware, batch_tokens, began
        self._flops, peak = model_flops(model), peak_flops(hardware.device, hardware.dtype)
        self._peak = peak and peak * hardware.world.size
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin to measure after `step` steps."""
        self._hardware.synchronize()
        self._since, self._from_step = time.perf_counter(), step

    def progress(self, step: int) -> dict[str, float]:
        """How far the run is after `step` steps: tokens, and the seconds of all that it did, including those of
        earlier processes."""
        return {"tokens": step * self._batch_tokens, "seconds": time.perf_counter() - self._began}

    def lap(self, step: int) -> dict[str, float | None]:
        """The speed of the steps since `restart` or the last lap, if there are any, and the peak of memory, for
        `RunLog.metrics`."""
        steps, since = step - self._from_step, self._since
        self.restart(step)
        held = {"peak_memory_gib": self._hardware.peak_memory_gib()}
        if not steps:
            return held
        rate = self._batch_tokens * steps / (self._since - since)
        causal, full = (mfu(self._flops[pairs], rate, self._peak) for pairs in ("causal", "full"))
        return {"tokens_per_second": rate, "mfu": causal, "mfu_full": full} | held


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense FLOP/s of the chip's tensor cores in bfloat16; None for other formats, for chips that are not known, and
    before Ampere, which has no bf16."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    gpu = gpu_named(torch.cuda.get_device_name(device))
    return None if gpu is None or gpu.arch < 80 else gpu.dense_flops


def attention_flops(pairs: float, head_dim: int) -> float:
    """Forward FLOPs of attention's two products over (query, key) pairs, counted over heads and batch."""
    return 4 * pairs * head_dim


def model_flops(model: GPT) -> dict[str, float]:
    """Forward and backward FLOPs a token of `model` at its full context, under both conventions.

    Entries of all weights that multiply activations count (the output projection included, tied or not; the embedding
    look-up not). Document masks are not subtracted: with them the true figure is lower, and so is the MFU.
    """
    config, seq_len = model.config, model.seq_len
    dense = 6 * model.num_matmul_parameters()
    pair = 3 * attention_flops(config.num_layers * config.num_heads, config.head_dim)
    seen = seq_len if config.window is None else min(config.window, seq_len)
    visible = seen - seen * (seen - 1) / (2 * seq_len)  # the mean of min(i, seen) over i = 1 .. seq_len
    return {"causal": dense + pair * visible, "full": dense + pair * seen}


def mfu(flops_a_token: float, tokens_per_second: float, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation in [0, 1]; None where the chip's dense peak is not known."""
    return None if peak_flops is None else flops_a_token * tokens_per_second / peak_flops


def measured_rate(dtype: torch.dtype) -> float:
    """FLOP/s of this CPU in a matrix product of 512 x 512, the best of three after the first."""
    x = torch.ones(512, 512, dtype=dtype)
    return 2 * 512**3 / min(timeit.repeat(lambda: x @ x, repeat=4, number=1))


def measured_forward(model: GPT, hardware: Hardware) -> float:
    """Seconds of a forward over one sequence, as in training; the random stream is restored.

    It is measured, as naive attention and its dropout take longer than their FLOPs suggest.
    """
    tokens = torch.zeros(1, model.seq_len, dtype=torch.int64)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), hardware.autocast():
        return min(timeit.repeat(lambda: model(tokens, tokens), repeat=2, number=1))


def slow_on_a_cpu(model: GPT, optim: OptimConfig, hardware: Hardware, *, batch_tokens: int, steps: int) -> str | None:
    """How long steps take on a CPU, and what would be faster, in a line; None where they are not slow.

    An estimate: the measured time of a sequence's forward, twice that for its backward, and Newton-Schulz's FLOPs at
    the measured rate of large matrix products. Each process of `hardware.world` computes its share of batch_tokens.
    `optim` has its muon_dtype resolved.
    """
    share = batch_tokens // hardware.world.size
    flops, of_muon = model_flops(model)["causal"] * share, flops_of_muon(model, optim)
    if flops + of_muon < FEW_FLOPS:
        return None
    in_model = 3 * share / model.seq_len * measured_forward(model, hardware)
    in_muon = of_muon / measured_rate(DTYPES[optim.muon_dtype]) if of_muon else 0.0
    seconds = in_model + in_muon
    if seconds < SLOW_STEP_SECONDS:
        return None
    share = f", {in_muon / seconds:.0%} of it in Muon's Newton-Schulz iteration" if of_muon else ""
    remedy = "optim=adamw, " if in_muon > in_model else ""
    return (
        f"about {seconds:,.0f} s a step on this CPU{share}, {seconds * steps / 3600:,.1f} h for train.steps={steps}; "
        f"use {remedy}model=tiny, a smaller train.batch_tokens, or a GPU"
    )
