"""Training speed of a GPT: `python -m scripts.bench_training` times whole optimiser steps and prints a table.

One row for each attention backend and context length, at a constant number of tokens a step: the step of `train.py`
itself (forward, backward, clipping, optimiser; compiled where the run would be), on random tokens. Out of memory is a
row. The last line is one JSON object; the same rows are in `bench_training.json` in the run's folder.

`sdpa_flash` and `sdpa_cudnn` are PyTorch's scaled_dot_product_attention held to one of its kernels.
"""

import gc
import json
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from conf.program import program
from conf.schema import Settings
from model import GPT, resolve_attention
from train import training_step
from training.flops import flops_per_token, mfu, peak_flops
from training.hardware import Hardware, set_up
from training.optim import Optimiser
from training.provenance import provenance

SDPA_KERNELS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass
class BenchConfig:
    attention: list[str] = field(
        default_factory=lambda: ["auto"]
    )  # flash | naive | tiled | sdpa | sdpa_flash | sdpa_cudnn
    seq_len: list[int] = field(default_factory=lambda: [1024])  # context lengths, in tokens
    vocab_size: int = 50257  # GPT-2's
    warmup_steps: int = 5  # not timed; the first compiles
    steps: int = 20  # timed one by one; the median is reported

    def __post_init__(self) -> None:
        if min([self.steps, self.warmup_steps, self.vocab_size, *self.seq_len]) < 1:
            raise ValueError("bench.steps, bench.warmup_steps, bench.vocab_size and bench.seq_len must be at least 1")


@dataclass
class BenchSettings(Settings):
    bench: BenchConfig = field(default_factory=BenchConfig)


@program("bench_training", BenchSettings)
def main(settings: BenchSettings, run_dir: Path) -> None:
    hardware = set_up(settings.hardware)
    console = Console(highlight=False)
    console.print(f"{hardware.description}; {settings.train.batch_tokens:,} tokens a step", markup=False)
    rows = [
        measure(settings, attention, seq_len, hardware)
        for seq_len in settings.bench.seq_len
        for attention in settings.bench.attention
    ]
    console.print(table(rows))
    report = {"hardware": hardware.description, "provenance": provenance(), "rows": rows}
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "bench_training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def measure(settings: BenchSettings, attention: str, seq_len: int, hardware: Hardware) -> dict:
    """Time the training step of one configuration; `error` in place of figures where it ran out of memory."""
    sequences, rest = divmod(settings.train.batch_tokens, seq_len)
    if rest:
        raise ValueError(f"bench.seq_len={seq_len} does not divide train.batch_tokens={settings.train.batch_tokens}")
    config = replace(settings.model, attention="sdpa" if attention in SDPA_KERNELS else attention)
    config.attention, _ = resolve_attention(config.attention, hardware.device, hardware.dtype, config.head_dim)
    row = {
        "attention": attention if attention in SDPA_KERNELS else config.attention,
        "seq_len": seq_len,
        "activation_checkpointing": config.activation_checkpointing,
    }
    try:
        with held_to(attention):
            seconds, peak, model = timed_steps(settings, config, seq_len, sequences, hardware)
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    else:
        rate = settings.train.batch_tokens / statistics.median(seconds)
        flops = flops_per_token(
            matmul_parameters=model.num_matmul_parameters(),
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            seq_len=seq_len,
            window=config.window,
        )
        chip_peak = peak_flops(hardware.device, hardware.dtype)
        row |= {
            "tokens_per_second": round(rate),
            "step_ms": round(1e3 * statistics.median(seconds), 2),
            "step_ms_fastest": round(1e3 * min(seconds), 2),
            "step_ms_slowest": round(1e3 * max(seconds), 2),
            "mfu": mfu(flops["causal"], rate, chip_peak),
            "mfu_full": mfu(flops["full"], rate, chip_peak),
            "peak_memory_gib": peak,
        }
        del model
    # what the next row needs must not be held by this one
    torch.compiler.reset()
    gc.collect()
    if hardware.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(hardware.device)
    return row


def timed_steps(settings, config, seq_len, sequences, hardware) -> tuple[list[float], float | None, GPT]:
    torch.manual_seed(settings.train.seed)
    model = GPT(config, settings.bench.vocab_size, seq_len, device=hardware.device, dtype=hardware.dtype)
    optimiser = Optimiser(model, settings.optim)
    forward = torch.compile(model, dynamic=False) if hardware.compile else model
    tokens = torch.randint(settings.bench.vocab_size, (sequences, seq_len + 1), device=hardware.device)
    micro_batch = min(settings.train.micro_batch or sequences, sequences)
    marks = [Mark(hardware)]
    for _ in range(settings.bench.warmup_steps + settings.bench.steps):
        training_step(forward, optimiser, tokens[:, :-1], tokens[:, 1:], micro_batch, hardware)
        marks.append(Mark(hardware))
    hardware.synchronize()
    seconds = [begin.seconds_to(end) for begin, end in pairwise(marks)]
    return seconds[settings.bench.warmup_steps :], hardware.peak_memory_gib(), model


class Mark:
    """A moment in the device's stream of work. As in a run, the host does not wait between steps."""

    def __init__(self, hardware: Hardware) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if hardware.device.type == "cuda" else None
        self.time = time.perf_counter()
        if self.event:
            self.event.record()

    def seconds_to(self, later: "Mark") -> float:
        return self.event.elapsed_time(later.event) / 1e3 if self.event else later.time - self.time


def held_to(attention: str) -> AbstractContextManager:
    """Hold PyTorch's attention to one kernel, where the row's name asks for it."""
    return sdpa_kernel(SDPA_KERNELS[attention]) if attention in SDPA_KERNELS else nullcontext()


def table(rows: list[dict]) -> Table:
    result = Table(title="training step, median")
    for column in ("attention", "context", "tokens/s", "ms", "range", "MFU (full)", "GiB"):
        result.add_column(column, justify="left" if column == "attention" else "right", no_wrap=True)
    for row in rows:
        if "error" in row:
            result.add_row(row["attention"], f"{row['seq_len']:,}", row["error"])
            continue
        result.add_row(
            row["attention"],
            f"{row['seq_len']:,}",
            f"{row['tokens_per_second']:,}",
            f"{row['step_ms']:.1f}",
            f"{row['step_ms_fastest']:.1f} - {row['step_ms_slowest']:.1f}",
            f"{row['mfu']:.1%} ({row['mfu_full']:.1%})" if row["mfu"] is not None else "peak unknown",
            f"{row['peak_memory_gib']:.1f}" if row["peak_memory_gib"] is not None else "-",
        )
    return result


if __name__ == "__main__":
    main()
