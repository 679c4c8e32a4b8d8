"""Speed of block masks: `python -m scripts.bench.masks` times ours beside FlexAttention's in one process.

A row is a mask of `scripts.bench.mask_table`, a head_dim and a pass: milliseconds of both with a cold L2 cache, the
medians of rounds in which they take turns, and FlexAttention's time over ours; on forward rows also how long each takes
to build its mask. Two more masks, `all full` and `all partial`, show what a block costs. They are timed beside the same
call without a mask: on the portable kernels ("dense"), and on the kernels that are chosen for it ("dense, chosen").
Both columns are the time without a mask over the time with it.

The last line is one JSON object. On a CPU with TRITON_INTERPRET=1, where FlexAttention is left out, it is a smoke test.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from conf.program import program
from kernels import block_mask, flash_attention
from kernels.call import Options
from kernels.portable.backward import launch_flash_bwd
from kernels.portable.forward import launch_flash_fwd
from scripts.bench.calls import PASSES, one_pass, refuse_uneven_heads, tensors
from scripts.bench.clock import measure, turns
from scripts.bench.mask_table import masks
from scripts.bench.report import Columns, Report, Row, refuse_out_of_range, refuse_unknown, set_up_gpu, table
from training.hardware import HardwareConfig

BLOCKS = {"all full": lambda b, h, q, k: k >= 0, "all partial": lambda b, h, q, k: (q + k) % 64 > 0}
KNOWN = (*masks(1), *BLOCKS)
BUILDS = 20  # timed builds of a mask
SMOKE = "bench.mask=[causal] bench.seq_len=128 bench.head_dim=[16] bench.hidden=16 bench.rounds=1"


@dataclass
class BenchConfig:
    mask: list[str] = field(default_factory=lambda: list(KNOWN))  # of mask_table.py | all full | all partial
    seq_len: int = 16384  # tokens of queries and of keys
    head_dim: list[int] = field(default_factory=lambda: [64, 128])  # 16 to 256
    hidden: int = 2048  # heads times head_dim
    passes: list[str] = field(default_factory=lambda: list(PASSES))  # forward | backward
    rounds: int = 3  # in which all take turns
    budget_ms: float = 60.0  # of one call in one round

    def __post_init__(self) -> None:
        refuse_unknown("bench.", self, mask=KNOWN, passes=PASSES)
        refuse_out_of_range("bench.", self, "seq_len", "head_dim", "hidden", "rounds", "budget_ms")
        refuse_uneven_heads(self)


@dataclass
class BenchSettings:
    bench: BenchConfig = field(default_factory=BenchConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)


@program("tool", BenchSettings, run_dir="runs/bench_masks")
def main(settings: BenchSettings, run_dir: Path) -> None:
    hardware = set_up_gpu("attention under a block mask", settings.hardware, SMOKE)
    bench = settings.bench
    report = Report("masks", run_dir, hardware.description)
    for name, head_dim in product(bench.mask, bench.head_dim):
        report.add(*rows_of(name, head_dim, bench, hardware.device, hardware.dtype))
    report.finish(table(report.rows, NAMES, FIGURES, f"block masks, {bench.seq_len:,} tokens", CAPTION))


CAPTION = (
    "ratio: FlexAttention's time over ours. dense: the portable kernels' time without a mask over ours; chosen: the "
    "time of the kernels that such a call takes. Building is in milliseconds. FlexAttention is compiled, with its "
    "default options; its create_block_mask is not."
)
NAMES: Columns = {"mask": "{mask}", "D": "{head_dim}", "pass": "{pass}"}
FIGURES: Columns = {
    "blocks": "{visited}",
    "partial": "{partial}",
    "ms": "{ms:.3f}",
    "Flex": "{flex_ms:.3f}",
    "ratio": "{ratio:.2f}",
    "us a block": "{block_us:.3f}",
    "dense": "{of_dense:.2f}",
    "dense, chosen": "{of_chosen:.2f}",
    "build": "{build_ms:.2f}",
    "Flex builds": "{flex_build_ms:.2f}",
}


def rows_of(name: str, head_dim: int, bench: BenchConfig, device: torch.device, dtype: torch.dtype) -> list[Row]:
    """A row for each pass of one mask."""
    tokens, on_cuda = bench.seq_len, device.type == "cuda"
    mod = (masks(tokens, device) | BLOCKS)[name]
    sizes = None, None, tokens, tokens
    mask = block_mask(mod, *sizes, device)
    facts = {"mask": name, "head_dim": head_dim, "seq_len": tokens} | mask.counts()
    built = {"build_ms": build_ms(partial(block_mask, mod, *sizes, device), device)}
    heads = bench.hidden // head_dim
    inputs = tensors(1, tokens, heads, heads, head_dim, device, dtype)
    calls: dict[str, Callable] = {"ms": partial(flash_attention, block_mask=mask)}
    if on_cuda:
        theirs = create_block_mask(mod, *sizes, device=device)
        built["flex_build_ms"] = build_ms(partial(create_block_mask, mod, *sizes, device=device), device)
        calls["flex_ms"] = partial(torch.compile(flex_attention, dynamic=False), block_mask=theirs)
    if name in BLOCKS:
        calls["chosen_ms"] = flash_attention
    rows = []
    for which in bench.passes:
        ready = {key: one_pass(call, which, *inputs) for key, call in calls.items()}
        if name in BLOCKS:
            ready["dense_ms"] = portable(which, *inputs)
        rounds = [
            {key: measure(ready[key], device, bench.budget_ms, with_host=False).p50 for key in order}
            for order in turns([*ready], bench.rounds)
        ]
        row = facts | {"pass": which} | {key: statistics.median(one[key] for one in rounds) for key in ready}
        row["block_us"] = 1e3 * row["ms"] / (facts["visited"] * heads)
        row |= {f"of_{key}": row[f"{key}_ms"] / row["ms"] for key in ("dense", "chosen") if name in BLOCKS}
        rows.append(row | ({"ratio": row["flex_ms"] / row["ms"]} if on_cuda else {}) | built)
        built = {}
    torch.compiler.reset()  # each mask compiles anew and would reach the limit on recompilations
    return rows


def portable(which: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Callable[[], object]:
    """One pass of the portable kernels without a mask."""
    options = Options(False, q.shape[3] ** -0.5)
    if which == "forward":
        return partial(launch_flash_fwd, q, k, v, options)
    o, lse = launch_flash_fwd(q, k, v, options)
    return partial(launch_flash_bwd, do, None, q, k, v, o, lse, options)


def build_ms(build: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds of a build of the mask, after a first build that is not counted."""
    spent = []
    for _ in range(BUILDS + 1):
        began = time.perf_counter()
        build()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent.append(1e3 * (time.perf_counter() - began))
    return statistics.median(spent[1:])


if __name__ == "__main__":
    main()
