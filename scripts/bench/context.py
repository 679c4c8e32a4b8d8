"""Speed of context parallelism: `python -m scripts.bench.context gpus=2` times attention whose rows several GPUs share.

It starts one process a GPU itself. One row for each length and way: p50 of forward and backward together, how many
times as fast as `flash_attention` on one GPU with all tokens, the peak of memory beyond the inputs, and whether O and
all gradients have the bits of one GPU. Causal, batch 1.

The last line is one JSON object. On a CPU with TRITON_INTERPRET=1 it is a smoke test over gloo: its figures
mean nothing.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from conf.program import program
from model.attention import AttentionFunction, flash
from model.context import METHODS, part_of
from scripts.bench.calls import tensors
from scripts.bench.clock import peak_gib, spans
from scripts.bench.processes import Host, on_each_gpu
from scripts.bench.report import (
    Columns,
    Report,
    Row,
    not_compiled,
    refuse_out_of_range,
    refuse_unknown,
    refuse_without_gpu,
    table,
)
from training.hardware import HardwareConfig
from training.speed import attention_flops

SMOKE = "seq_len=[64] num_heads=2 num_kv_heads=2 head_dim=16 runs=1"


@dataclass
class ContextBenchSettings:
    gpus: int = 2  # processes, one a GPU
    seq_len: list[int] = field(default_factory=lambda: [131072, 262144])  # tokens of the shared row
    methods: list[str] = field(default_factory=lambda: list(METHODS))  # heads | gather | ring
    num_heads: int = 12  # of q
    num_kv_heads: int = 12  # of k and v
    head_dim: int = 64  # elements
    runs: int = 7  # of each, after two that are not counted
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        refuse_unknown("", self, methods=METHODS)
        refuse_out_of_range("", self, "gpus", "seq_len", "num_heads", "num_kv_heads", "head_dim", "runs")
        pieces = self.gpus if self.methods == ["heads"] else 2 * self.gpus
        for seq_len in self.seq_len:
            if seq_len % pieces:
                nearest = max(1, round(seq_len / pieces)) * pieces
                raise ValueError(f"seq_len={seq_len} cannot be cut into {pieces} equal pieces; use seq_len={nearest}")


@program("tool", ContextBenchSettings, run_dir="runs/bench_context")
def main(settings: ContextBenchSettings, run_dir: Path) -> None:
    needs = f"NVIDIA GPUs (gpus={settings.gpus})"
    refuse_without_gpu("attention whose rows GPUs share", settings.hardware, SMOKE, needs=needs)
    if 0 < (found := torch.cuda.device_count()) < settings.gpus:
        raise ValueError(f"gpus={settings.gpus} but there are {found} GPUs; use gpus={found}")
    settings = replace(settings, hardware=not_compiled(settings.hardware))
    hardware, rows = on_each_gpu([settings.gpus], work, settings)
    more = {"heads": [settings.num_heads, settings.num_kv_heads, settings.head_dim]}
    report = Report("bench_context", run_dir, f"{settings.gpus} x {hardware}", rows, more)
    report.finish(table(rows, NAMES, FIGURES, TITLE.format_map(more), CAPTION))


TITLE = "attention, forward and backward, causal, {heads[0]} heads of {heads[2]}"
CAPTION = "bits: O, dQ, dK and dV are one GPU's"
NAMES: Columns = {"tokens": "{seq_len:,}", "way": "{way}", "GPUs": "{gpus}"}
FIGURES: Columns = {
    "forward ms": "{forward_ms:.2f}",
    "both ms": "{ms:.2f}",
    "x one GPU": "{speedup:.3f}",
    "TFLOP/s a GPU": "{tflops:.0f}",
    "GiB beyond inputs": "{extra_gib:.2f}",
    "bits": "{bits}",
}


def work(host: Host, settings: ContextBenchSettings) -> tuple[str, list[Row]]:
    """Run all cases in one process; return its hardware in words, and the rows."""
    rank, hardware, device = host.world.rank, host.hardware, host.hardware.device
    rows: list[Row] = []
    for seq_len in settings.seq_len:
        heads = settings.num_heads, settings.num_kv_heads
        whole = tensors(1, seq_len, *heads, settings.head_dim, device, hardware.dtype)
        alone, exact = measured(flash, *whole, settings.runs, host)
        rows.append({"way": "one", "gpus": 1} | facts(settings, seq_len, 1, alone))
        for method in settings.methods:
            parts = [part_of(x, rank, settings.gpus, method, dim=2) for x in whole]
            row = {"way": method, "gpus": settings.gpus}
            try:
                way = partial(METHODS[method], flash, group=dist.group.WORLD)
                shared, results = measured(way, *parts, settings.runs, host)
                row |= facts(settings, seq_len, settings.gpus, shared) | {"speedup": alone["ms"] / shared["ms"]}
                own = [part_of(x, rank, settings.gpus, method, dim=2) for x in exact]
                row["bits"] = all(host.world.all_gather(all(map(torch.equal, results, own))))
            except ValueError as error:
                row |= {"seq_len": seq_len, "error": str(error)}
            rows.append(row)
    return hardware.description, rows


def measured(
    attend: AttentionFunction, q: Tensor, k: Tensor, v: Tensor, do: Tensor, runs: int, host: Host
) -> tuple[Row, list[Tensor]]:
    """Milliseconds of forward and of both passes, of the slowest process, and GiB; and O, dQ, dK, dV."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def both() -> list[Tensor]:
        o = attend(*inputs, causal=True)
        return [o.detach(), *torch.autograd.grad(o, inputs, do)]

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs, causal=True)

    times = {"forward_ms": median_ms(forward, runs, host), "ms": median_ms(both, runs, host)}
    return times | {"extra_gib": peak_gib(both, host.hardware.device)}, both()


def median_ms(call: Callable[[], object], runs: int, host: Host) -> float:
    """Median ms of a run. All processes make the same runs and begin each together; its time is the slowest one's."""
    found = host.world.all_gather(spans(call, host.hardware.device, runs + 2, before=dist.barrier)[2:])
    return 1e3 * statistics.median(map(max, zip(*found, strict=True)))


def facts(settings: ContextBenchSettings, seq_len: int, gpus: int, times: Row) -> Row:
    pairs = settings.num_heads * seq_len * (seq_len + 1) / 2
    flops = 3.5 * attention_flops(pairs, settings.head_dim)  # backward has five products, forward two
    return times | {"seq_len": seq_len, "tflops": flops / times["ms"] / 1e9 / gpus}


if __name__ == "__main__":
    main()
