"""Speed of attention over a cache: `python -m scripts.bench.decode` times ours beside PyTorch's kernels in one process.

A row is a call: microseconds of the device inside a CUDA graph with a cold L2 cache (a graph of reads and calls less a
graph of the reads alone), TB/s of K and V, and the goal: 5 microseconds plus the time of the bytes at 0.9 times the
bandwidth of a kernel that only reads, which is measured first in the same run. `bench.family` chooses among

    context   batch x context x heads, beside SDPA's FlashAttention-2 and cuDNN
    group     query heads that share a KV head, 1 to 16
    queries   tokens of a row, 1 to 16
    pages     contiguous, and pages of 256, 64 and 16 tokens in random order
    ragged    rows of 1k to 64k tokens beside as many tokens in rows of one length
    bits      16 bits, int8 and e4m3, with a scale a head and a scale a token
    growing   one captured graph while its cache grows from 1k to 128k keys a row, and a picture; not by default

The last line is one JSON object; it lists the cells past the goal. On a CPU with TRITON_INTERPRET=1 this is a
smoke test: its figures mean nothing there.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from conf.program import program
from kernels import flash_attention_with_kvcache, kvcache_workspace
from kernels.device import num_sms
from model.cache import EIGHT_BIT_DTYPES
from scripts.bench.calls import SDPA, refusal, sdpa
from scripts.bench.clock import GraphClock, failures_as_rows
from scripts.bench.report import Columns, Report, Row, refuse_out_of_range, refuse_unknown, set_up_gpu, table
from training.curves import picture
from training.hardware import HardwareConfig

FAMILIES = ("context", "group", "queries", "pages", "ragged", "bits", "growing")
HEADS = (  # groups of 1, 2, 4, 8 and 16
    *("8/8/128", "16/8/128", "32/8/128", "64/8/128", "64/4/128"),
    *("12/12/64", "16/8/64", "32/8/64", "32/4/64", "64/4/64"),
)
CACHES = {"bf16": torch.bfloat16} | EIGHT_BIT_DTYPES
FLOOR_US, OF_BANDWIDTH = 5.0, 0.90  # the goal
# beyond 64 MiB, a growing cache must keep 0.9 of its best share of the bandwidth so far
GROWING_FROM_MIB, GROWING_KEEPS = 64, 0.90
SMOKE = "bench.family=[context] bench.batch=[2] bench.context=[64] bench.heads=[2/1/16] bench.largest_gib=1e-3"


@dataclass
class BenchConfig:
    family: list[str] = field(default_factory=lambda: [*FAMILIES[:-1]])  # what is varied; the program's page lists them
    attention: list[str] = field(default_factory=lambda: ["flash", *SDPA])  # of the family context
    batch: list[int] = field(default_factory=lambda: [1, 4, 16, 64])  # of the family context: rows
    context: list[int] = field(default_factory=lambda: [1024, 4096, 8192, 32768, 131072])  # and keys of a row
    heads: list[str] = field(default_factory=lambda: [*HEADS])  # Hq/Hkv/D
    largest_gib: float = 36.0  # of K and V; larger cells are left out

    def __post_init__(self) -> None:
        refuse_unknown("bench.", self, family=FAMILIES, attention=("flash", *SDPA))
        refuse_out_of_range("bench.", self, "batch", "context")
        for heads in self.heads:
            if not re.fullmatch(r"[1-9]\d*/[1-9]\d*/[1-9]\d*", heads):
                raise ValueError(f"bench.heads={heads} is no Hq/Hkv/D; write three numbers, as 32/8/128")
            queries, keys, _ = map(int, heads.split("/"))
            if queries % keys:
                raise ValueError(f"bench.heads={heads} has {queries} query heads for {keys} KV heads; use a multiple")


@dataclass
class BenchSettings:
    bench: BenchConfig = field(default_factory=BenchConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)  # queries are in bfloat16

    def __post_init__(self) -> None:
        if self.hardware.dtype not in ("auto", "bfloat16"):
            raise ValueError(f"hardware.dtype={self.hardware.dtype}: queries are in bfloat16 here; leave it out")


@dataclass(frozen=True)
class Cell:
    """One call."""

    family: str
    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    queries: int = 1
    page: int = 0
    cache: str = "bf16"
    scale: str = "head"  # of 8 bits: head | token
    # keys that a row has room for: each call appends one, and calls that differ in lengths alone share a graph
    capacity: int = 0
    attention: str = "flash"

    @property
    def kv_bytes(self) -> int:
        per_key = 2 * self.num_kv_heads * (self.head_dim * CACHES[self.cache].itemsize)
        if self.cache != "bf16" and self.scale == "token":
            per_key += 2 * self.num_kv_heads * 4
        return sum(self.lengths) * per_key

    @property
    def held_bytes(self) -> int:
        return len(self.lengths) * max(self.capacity, *self.lengths) * 2 * self.num_kv_heads * self.head_dim * 2

    @property
    def row(self) -> Row:
        mean = sum(self.lengths) // len(self.lengths)
        row = asdict(self) | {"batch": len(self.lengths), "context": mean, "kv_mib": self.kv_bytes / 2**20}
        order = (self.lengths[0] > self.lengths[-1]) - (self.lengths[0] < self.lengths[-1])
        return row | {"lengths": ("uniform", "falling", "rising")[order]}


def cells(bench: BenchConfig) -> Iterator[Cell]:
    base = Cell("", (8192,) * 16, 32, 8, 128)
    for family in bench.family:
        one = replace(base, family=family)
        if family == "context":
            for heads, context, batch, name in product(bench.heads, bench.context, bench.batch, bench.attention):
                yield Cell(family, (context,) * batch, *map(int, heads.split("/")), attention=name)
            for batch, name in product((1, 64), bench.attention):  # the 124M model of scripts.bench.generation
                yield Cell(family, (512,) * batch, 12, 12, 64, attention=name)
        elif family == "group":
            yield from (replace(one, num_heads=8 * group) for group in (1, 2, 4, 8, 16))
        elif family == "queries":
            for lengths, queries in product((one.lengths, (8192,)), (1, 2, 4, 8, 16)):
                yield replace(one, lengths=lengths, queries=queries)
        elif family == "pages":
            for lengths, page in product(((1024,), (8192,) * 16), (0, 256, 64, 16)):
                yield replace(one, lengths=lengths, page=page)
        elif family == "ragged":
            lengths = (65536, 32768, 16384, 16384, 8192, 8192, 4096, 4096, 4096, *(2048,) * 3, *(1024,) * 4)
            mean = sum(lengths) // len(lengths)
            yield from (replace(one, lengths=x) for x in ((mean,) * len(lengths), lengths, lengths[::-1]))
        elif family == "bits":
            for cache, scale in (("bf16", "head"), *product(("int8", "e4m3"), ("head", "token"))):
                yield replace(one, lengths=(16384,) * 16, cache=cache, scale=scale)
        elif family == "growing":
            lengths = *(length for k in range(10, 17) for length in (2**k, 3 * 2 ** (k - 1))), 2**17
            for batch, page, length in product((1, 16), (0, 64), lengths):
                yield replace(one, lengths=(length,) * batch, page=page, capacity=lengths[-1])


@program("tool", BenchSettings, run_dir="runs/bench_decode")
def main(settings: BenchSettings, run_dir: Path) -> None:
    hardware = set_up_gpu("attention over a cache", replace(settings.hardware, dtype="bfloat16"), SMOKE)
    bench = settings.bench
    report = Report("decode", run_dir, hardware.description)
    known = list(cells(bench))
    chosen = [cell for cell in known if cell.held_bytes <= bench.largest_gib * 2**30]
    if not known:
        raise ValueError(f"bench.family={bench.family} of bench.attention={bench.attention} is no call; name some")
    if not chosen:
        least = min(cell.held_bytes for cell in known) / 2**30
        raise ValueError(
            f"bench.largest_gib={bench.largest_gib} leaves out every call; the smallest needs {least:.2g} GiB"
        )
    machine = Machine(hardware.device, max(cell.held_bytes for cell in chosen) // 4)
    bandwidth = machine.read_bandwidth()
    report.more = {"read_bytes_per_second": bandwidth}
    for cell in chosen:
        row = cell.row
        with failures_as_rows(row, *refusal(cell.attention)):
            row["us"] = machine.microseconds(cell)
            row["tb_per_s"] = cell.kv_bytes / row["us"] / 1e6
            row["of_read"] = row["tb_per_s"] * 1e12 / bandwidth
            row["goal_us"] = FLOOR_US + 1e6 * cell.kv_bytes / (OF_BANDWIDTH * bandwidth)
            row["of_goal"] = row["us"] / row["goal_us"]
        report.add(row)
    timed = [row for row in report.rows if "us" in row]
    ours = [row for row in timed if row["attention"] == "flash" and row["family"] == "context"]
    past = {NAMES["call"].format_map(row): round(row["of_goal"], 2) for row in ours if row["of_goal"] > 1.0}
    said = [f"A kernel that only reads: {bandwidth / 1e12:.2f} TB/s."]
    last = {"read_tb_per_s": bandwidth / 1e12, "cells": len(ours), "past_the_goal": past}
    if growing := [row for row in timed if row["family"] == "growing"]:
        least = least_kept(growing)
        passes = least >= GROWING_KEEPS
        last["growing"] = {"passes": passes, "least_of_best": least}
        said.append(
            f"Growing: {'PASS' if passes else 'FAIL'}. Past {GROWING_FROM_MIB} MiB of K and V the share of the "
            f"bandwidth is never below {least:.2f} of its best so far; {GROWING_KEEPS} is asked."
        )
        draw_growing(growing, run_dir / "decode_growing.png", said[-1].replace(" of its best", "\nof its best"))
    report.finish(table(report.rows, NAMES, FIGURES, "attention over a cache", "\n\n".join(said)), last=last)


def by_line(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of growing caches by the label of their line in the picture, in order of size."""
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["kv_mib"]):
        pages = f"pages of {row['page']}" if row["page"] else "contiguous"
        lines.setdefault(f"B {row['batch']}, {pages}", []).append(row)
    return lines


def least_kept(rows: list[Row]) -> float:
    """The smallest ratio of a share of the bandwidth to the best so far on its line, beyond GROWING_FROM_MIB."""
    least = 1.0
    for line in by_line(rows).values():
        best = 0.0
        for row in line:
            if row["kv_mib"] > GROWING_FROM_MIB:
                best = max(best, row["of_read"])
                least = min(least, row["of_read"] / best)
    return least


def draw_growing(rows: list[Row], path: Path, title: str) -> None:
    with picture(path, size=(8, 4.5), title=title) as (axes,):
        for name, line in by_line(rows).items():
            axes.plot(*zip(*((row["kv_mib"], row["of_read"]) for row in line), strict=True), marker="o", label=name)
        axes.axvline(GROWING_FROM_MIB, color="grey", linestyle=":", label=f"{GROWING_FROM_MIB} MiB")
        axes.set(xscale="log", xlabel="K and V read, MiB", ylabel="of a kernel that only reads", ylim=(0, None))


NAMES: Columns = {
    "family": "{family}",
    "call": "B{batch} H{num_heads}/{num_kv_heads} N{context} {lengths} D{head_dim} Nq{queries}",
    "cache": "{cache} {scale} page {page}",
    "attention": "{attention}",
}
FIGURES: Columns = {
    "K and V, MiB": "{kv_mib:.0f}", "us": "{us:.1f}", "TB/s": "{tb_per_s:.2f}", "goal, us": "{goal_us:.1f}",
    "us / goal": "{of_goal:.2f}", "of reading": "{of_read:.2f}",
}  # fmt: skip


@triton.jit
def read_kernel(x, out, num_elements, BLOCK: tl.constexpr):
    """Each program reads every num_programs-th block and stores the sum of what it has read."""
    total = tl.zeros([BLOCK], tl.float32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < num_elements:
        total += tl.load(x + start + tl.arange(0, BLOCK), eviction_policy="evict_first")
        start += tl.num_programs(0) * BLOCK
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


class Machine:
    """Memory for keys and values, which all cells share, and the clock."""

    def __init__(self, device: torch.device, elements: int):
        self.device, self.timed = device, GraphClock(device)
        make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
        elements += elements % 2 + 64 * 1024  # even: `read_bandwidth` reads two at a time
        self.keys, self.values = (torch.randn(elements, dtype=torch.bfloat16, **make) for _ in range(2))
        self.growing: tuple[Cell, Tensor, Callable[[], float]] | None = None  # its longest cell, lengths and clock
        self.eight: dict[str, tuple[Tensor, Tensor]] = {}

    def read_bandwidth(self) -> float:
        """Bytes a second of a kernel that only reads, the best of some grids."""
        words = self.keys.view(torch.float32)[: 2**29]
        programs = [num_sms(self.device.index or 0) * k for k in (4, 8, 16)] if self.device.type == "cuda" else [4]
        out = torch.empty(max(programs), device=self.device)
        size = words.numel() // 4096 * 4096
        reads = [partial(read_kernel[(p,)], words, out, size, BLOCK=4096, num_warps=8) for p in programs]
        times = [self.timed(read)() for read in reads]
        return 4 * size / min(times) * 1e6

    def microseconds(self, cell: Cell) -> float:
        if not cell.capacity:
            return self.timed(self.call(cell))()
        longest = replace(cell, lengths=(cell.capacity,) * len(cell.lengths))
        if self.growing is None or self.growing[0] != longest:
            lengths = torch.tensor(longest.lengths, dtype=torch.int32, device=self.device) - 1
            self.growing = longest, lengths, self.timed(self.call(longest, lengths), fewest=10)
        _, lengths, replay = self.growing
        lengths.fill_(cell.lengths[0] - 1)
        return replay()

    def call(self, cell: Cell, lengths: Tensor | None = None) -> Callable[[], object]:
        """The call of a cell, which appends a token where it has a capacity. lengths: (B,) int32; None: the cell's."""
        batch, longest = len(cell.lengths), max(cell.capacity, *cell.lengths)
        q = torch.randn(batch, cell.num_heads, cell.queries, cell.head_dim, device=self.device, dtype=torch.bfloat16)
        pages = math.ceil(longest / cell.page) if cell.page else 1
        tokens = cell.page or longest
        shape = (batch * pages, cell.num_kv_heads, tokens, cell.head_dim)
        stored = (self.keys, self.values) if cell.cache == "bf16" else self.in_eight_bits(cell.cache)
        k_cache, v_cache = (x[: math.prod(shape)].view(shape) for x in stored)
        if cell.attention != "flash":
            shares = cell.num_heads != cell.num_kv_heads
            return partial(sdpa, cell.attention, q, k_cache, v_cache, enable_gqa=shares)
        if lengths is None:
            lengths = torch.tensor(cell.lengths, dtype=torch.int32, device=self.device)
        named = {
            "cache_seqlens": lengths,
            "workspace": kvcache_workspace(batch, cell.num_heads, self.device),
        }
        if cell.page:
            named["block_table"] = torch.randperm(batch * pages, device=self.device).reshape(batch, pages).int()
        if cell.cache != "bf16":
            scales = (cell.num_kv_heads,) if cell.scale == "head" else shape[:3]
            named |= {name: torch.full(scales, 0.02, device=self.device) for name in ("k_scale", "v_scale")}
        if cell.capacity:
            named |= {name: torch.randn_like(q[:, : cell.num_kv_heads]) for name in ("k", "v")}
        return lambda: flash_attention_with_kvcache(q, k_cache, v_cache, **named)

    def in_eight_bits(self, cache: str) -> tuple[Tensor, Tensor]:
        if cache not in self.eight:
            self.eight.clear()
            self.eight[cache] = tuple((x * 40).to(CACHES[cache]) for x in (self.keys, self.values))
        return self.eight[cache]


if __name__ == "__main__":
    main()
