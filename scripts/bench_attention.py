"""Speed of attention: `python -m scripts.bench_attention` times ours beside PyTorch's kernels in one process.

One row for each implementation, shape and pass: p50 and p99 of many runs with a cold L2 cache, TFLOP/s (forward
4 B H Nq Nk D, backward 2.5 times that, halved when causal, whatever an implementation really computes), GB/s of the
tensors that must be touched, and the peak of memory beyond the inputs. Out of memory is a row.

The run's folder gets `attention.csv`, with machine, driver and versions, and charts of speed and memory against N
drawn from it. `bench.goals=true` also measures a window, packed documents and Python's share, and prints what the
kernels promise beside what was measured. The last line is one JSON object. On a CPU with TRITON_INTERPRET=1 this is a
smoke test: its figures mean nothing there.
"""

import csv
import gc
import json
import statistics
import subprocess
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from conf.program import program
from kernels import flash_attention, flash_attention_varlen, naive_attention
from kernels.measure import measure, python_us
from training.hardware import HardwareConfig, set_up
from training.provenance import provenance

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SDPA = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
IMPLEMENTATIONS = ("flash", "naive", *SDPA, "flex")


@dataclass
class BenchConfig:
    implementations: list[str] = field(default_factory=lambda: list(IMPLEMENTATIONS))
    seq_len: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072])
    head_dim: list[int] = field(default_factory=lambda: [64, 128])
    mask: list[str] = field(default_factory=lambda: ["causal", "full"])
    group: list[int] = field(default_factory=lambda: [1])  # query heads that share a KV head
    dtype: list[str] = field(default_factory=lambda: ["bfloat16"])  # bfloat16 | float16 | float32
    passes: list[str] = field(default_factory=lambda: ["forward", "backward"])
    tiles: list[str] = field(default_factory=list)  # more rows of ours, forward: BLOCK_Q,BLOCK_K,WARPS,STAGES[,tma]
    tokens: int = 16384  # of one call: the batch is tokens / seq_len, at least 1
    hidden: int = 2048  # query heads times head_dim
    budget_ms: float = 100.0  # time spent on the runs of one row
    goals: bool = False  # measure the goals' own cells too, and print the list

    def __post_init__(self) -> None:
        known = {"implementations": IMPLEMENTATIONS, "mask": ("causal", "full"), "dtype": DTYPES,
                 "passes": ("forward", "backward")}  # fmt: skip
        for name, allowed in known.items():
            for value in getattr(self, name):
                if value not in allowed:
                    raise ValueError(f"bench.{name}={value} is not one of {', '.join(allowed)}")
        for head_dim, group in product(self.head_dim, self.group):
            if self.hidden % (head_dim * group):
                raise ValueError(f"bench.hidden={self.hidden} is no multiple of head_dim {head_dim} x group {group}")


@dataclass
class BenchSettings:
    bench: BenchConfig = field(default_factory=BenchConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)


@dataclass(frozen=True)
class Cell:
    """One shape."""

    dtype: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seq_len: int
    head_dim: int
    mask: str

    def flops(self, which: str) -> float:
        pairs = self.batch * self.num_heads * self.seq_len**2 * (0.5 if self.mask == "causal" else 1.0)
        return 4 * pairs * self.head_dim * (1.0 if which == "forward" else 2.5)

    def touched_bytes(self, which: str) -> int:
        """Q, K, V and O once; the backward also reads dO and writes three gradients."""
        q = self.batch * self.num_heads * self.seq_len * self.head_dim * DTYPES[self.dtype].itemsize
        kv = q * self.num_kv_heads // self.num_heads
        return 2 * q + 2 * kv if which == "forward" else 4 * q + 4 * kv


@program("bench_attention", BenchSettings)
def main(settings: BenchSettings, run_dir: Path) -> None:
    hardware = set_up(settings.hardware)
    bench, device = settings.bench, hardware.device
    machine = {"machine": hardware.description, "driver": driver(device), **provenance()}
    rows = []
    for dtype, group, head_dim, mask, seq_len in product(
        bench.dtype, bench.group, bench.head_dim, bench.mask, bench.seq_len
    ):
        heads = bench.hidden // head_dim
        cell = Cell(dtype, max(1, bench.tokens // seq_len), heads, heads // group, seq_len, head_dim, mask)
        names = [*bench.implementations, *(f"flash {tile}" for tile in bench.tiles)]
        for name in names:
            rows += run_cell(name, cell, bench, device)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_csv(run_dir / "attention.csv", rows, machine)
    charts(run_dir / "attention.csv", run_dir)
    console = Console(highlight=False, width=140)
    console.print(machine["machine"], markup=False)
    console.print(table(rows))
    goals = check_goals(rows, bench, device) if bench.goals else []
    for goal in goals:
        console.print(f"{'met   ' if goal['met'] else 'MISSED'} {goal['goal']}: {goal['measured']}", markup=False)
    report = {"provenance": machine, "rows": rows, "goals": goals}
    (run_dir / "attention.json").write_text(json.dumps(report, indent=2, default=str) + "\n")
    print(json.dumps({"machine": machine["machine"], "rows": len(rows), "goals": goals, "folder": str(run_dir)}))


def run_cell(name: str, cell: Cell, bench: BenchConfig, device: torch.device) -> list[dict]:
    """A row for each pass; a failure that is a fact (out of memory, no such kernel) is a row too."""
    rows = []
    for which in bench.passes if not name.startswith("flash ") else ["forward"]:
        row = {"implementation": name, "pass": which, **asdict(cell)}
        try:
            row |= time_cell(name, cell, which, bench.budget_ms, device)
        except torch.OutOfMemoryError:
            row["error"] = "out of memory"
        except RuntimeError as error:  # PyTorch's answer where a named SDPA kernel does not take the call
            if name not in SDPA:
                raise
            row["error"] = str(error).split("\n")[0][:80]
        rows.append(row)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if name == "flex":
        torch.compiler.reset()  # a shape compiles anew; the limit on recompilations is for accidents
    return rows


def time_cell(name: str, cell: Cell, which: str, budget_ms: float, device: torch.device) -> dict:
    q, k, v, do = tensors(cell, device)
    attention = implementation(name, cell, device)
    held_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if which == "forward":
        with torch.no_grad():
            attention(q, k, v)
            peak = torch.cuda.max_memory_allocated(device) - held_bytes if device.type == "cuda" else None
            times = measure(lambda: attention(q, k, v), device, budget_ms)
    else:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        o = attention(q, k, v)
        torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        peak = torch.cuda.max_memory_allocated(device) - held_bytes if device.type == "cuda" else None
        times = measure(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), device, budget_ms)
    return {
        "ms": times.p50,
        "ms_p99": times.p99,
        "runs": times.runs,
        "tflops": cell.flops(which) / times.p50 / 1e9,
        "gb_per_s": cell.touched_bytes(which) / times.p50 / 1e6,
        "peak_extra_mib": None if peak is None else peak / 2**20,
    }


def tensors(cell: Cell, device: torch.device) -> list[torch.Tensor]:
    """q, k, v and dO as a model has them: (B, N, H, D) in memory, seen as (B, H, N, D)."""
    generator = torch.Generator(device).manual_seed(0)
    heads = (cell.num_heads, cell.num_kv_heads, cell.num_kv_heads, cell.num_heads)
    shapes = [(cell.batch, cell.seq_len, h, cell.head_dim) for h in heads]
    kind = {"generator": generator, "device": device, "dtype": DTYPES[cell.dtype]}
    return [torch.randn(shape, **kind).transpose(1, 2) for shape in shapes]


def implementation(name: str, cell: Cell, device: torch.device):
    """name -> f(q, k, v)."""
    causal, grouped = cell.mask == "causal", cell.num_heads != cell.num_kv_heads
    if name == "flash":
        return lambda q, k, v: flash_attention(q, k, v, causal=causal)
    if name.startswith("flash "):
        from kernels.call import Options
        from kernels.portable.forward import launch_flash_fwd
        from kernels.portable.tuning import Tile

        sizes = name.removeprefix("flash ").split(",")
        tile = Tile(*map(int, sizes[:4]), tma=sizes[4:] == ["tma"])
        options = Options(causal, cell.head_dim**-0.5)
        return lambda q, k, v: launch_flash_fwd(q, k, v, options, tile)[0]
    if name == "naive":
        return lambda q, k, v: naive_attention(q, k, v, causal=causal)
    if name == "flex":
        n = cell.seq_len
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=device.type) if causal else None
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)

    def sdpa(q, k, v):
        with sdpa_kernel(SDPA[name]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return sdpa


def check_goals(rows: list[dict], bench: BenchConfig, device: torch.device) -> list[dict]:
    """The promised figures beside the measured ones; goals whose cells were not measured are left out."""
    goals = []

    def add(goal: str, measured: float, met: bool, unit: str = "x") -> None:
        goals.append({"goal": goal, "measured": f"{measured:.3g}{unit}", "met": met})

    def ratios(other: str, which: str) -> list[float]:
        """Time of another implementation over ours, cell by cell."""
        found = {}
        for row in rows:
            if row["pass"] == which and "error" not in row and 1024 <= row["seq_len"] <= 32768:
                found.setdefault((row["seq_len"], row["head_dim"], row["mask"]), {})[row["implementation"]] = row["ms"]
        return [cell[other] / cell["flash"] for cell in found.values() if {other, "flash"} <= cell.keys()]

    for which in bench.passes:
        if speedups := ratios("flex", which):
            mean = statistics.geometric_mean(speedups)
            add(f"{which}: slowest cell at least 1.0x FlexAttention", min(speedups), min(speedups) >= 1.0)
            add(f"{which}: geometric mean at least 1.15x FlexAttention", mean, mean >= 1.15)
        if speedups := ratios("sdpa_cudnn", which):
            add(f"{which}: slowest cell at least 1.0x cuDNN", min(speedups), min(speedups) >= 1.0)
        if speedups := ratios("sdpa_flash", which):
            mean, wanted = statistics.geometric_mean(speedups), {"forward": 1.3, "backward": 1.2}[which]
            add(f"{which}: geometric mean at least {wanted}x FlashAttention-2", mean, mean >= wanted)
    at_8192 = {
        r["implementation"]: r
        for r in rows
        if (r["seq_len"], r["pass"], r["mask"]) == (8192, "forward", "causal") and "error" not in r
    }
    if {"flash", "naive"} <= at_8192.keys():
        speedup = at_8192["naive"]["ms"] / at_8192["flash"]["ms"]
        add("forward at least 5x naive at N = 8,192", speedup, speedup >= 5.0)
        share = 100 * at_8192["flash"]["peak_extra_mib"] / at_8192["naive"]["peak_extra_mib"]
        add("extra memory at most 2 % of naive's at N = 8,192", share, share <= 2.0, unit=" %")
    if device.type != "cuda":
        return goals
    for which, speedup in window_speedup(device).items():
        add(f"{which}: window of 1,024 at N = 65,536 at least 15x full causal", speedup, speedup >= 15.0)
    for which, share in varlen_share(device).items():
        add(f"{which}: 16 packed documents at most 1.1x their pairs' dense time, same kernels", share, share <= 1.1)
    q, k, v, _ = tensors(Cell("bfloat16", 1, 4, 4, 128, 64, "causal"), device)
    overhead = python_us(lambda: flash_attention(q, k, v, causal=True), device)
    add("Python's share of a call under 40 us at N = 128", overhead, overhead < 40.0, unit=" us")
    return goals


def pass_times(attention, inputs: list[torch.Tensor], do: torch.Tensor, device: torch.device) -> dict[str, float]:
    """Milliseconds of forward and backward."""
    with torch.no_grad():
        forward = measure(lambda: attention(*inputs), device).p50
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = attention(*leaves)
    backward = measure(lambda: torch.autograd.grad(o, leaves, do, retain_graph=True), device).p50
    return {"forward": forward, "backward": backward}


def window_speedup(device: torch.device) -> dict[str, float]:
    *inputs, do = tensors(Cell("bfloat16", 1, 16, 16, 65536, 128, "causal"), device)
    full = pass_times(lambda q, k, v: flash_attention(q, k, v, causal=True), inputs, do, device)
    local = pass_times(lambda q, k, v: flash_attention(q, k, v, causal=True, window=(1023, 0)), inputs, do, device)
    return {which: full[which] / local[which] for which in full}


def varlen_share(device: torch.device) -> dict[str, float]:
    """Time of 16 unequal documents packed into 16,384 tokens over that of the same documents, each a dense batch.

    By the same kernels: on Hopper its own in the forward, and in the backward the portable ones.
    """
    from kernels.call import Options
    from kernels.portable.backward import launch_flash_bwd
    from kernels.portable.forward import launch_flash_fwd

    options = Options(causal=True, scale=128**-0.5)
    lengths = [3712, 2560, 1984, 1600, 1312, 1056, 896, 736, 608, 512, 416, 352, 256, 192, 128, 64]
    assert sum(lengths) == 16384
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    *inputs, do = (x[0].transpose(0, 1) for x in tensors(Cell("bfloat16", 1, 16, 16, 16384, 128, "causal"), device))
    longest = max(lengths)
    packed = pass_times(
        lambda q, k, v: flash_attention_varlen(q, k, v, starts, starts, longest, longest, causal=True),
        inputs, do, device,
    )  # fmt: skip
    dense = {"forward": 0.0, "backward": 0.0}
    for length in lengths:
        batch = 16384 // length  # a full GPU: one document alone would leave most of it idle
        *inputs, do = tensors(Cell("bfloat16", batch, 16, 16, length, 128, "causal"), device)
        forward = partial(flash_attention, *inputs, causal=True)
        backward = partial(launch_flash_bwd, do, None, *inputs, *launch_flash_fwd(*inputs, options), options)
        for which, call in (("forward", forward), ("backward", backward)):
            dense[which] += measure(call, device).p50 / batch
    return {which: packed[which] / dense[which] for which in dense}


def driver(device: torch.device) -> str:
    """NVIDIA's driver version; "none" without a GPU."""
    if device.type != "cuda":
        return "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.check_output(query, text=True).split("\n")[0]


def write_csv(path: Path, rows: list[dict], machine: dict) -> None:
    names = dict.fromkeys(name for row in rows for name in row) | dict.fromkeys(machine)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(names), restval="")
        writer.writeheader()
        writer.writerows(row | machine for row in rows)


def table(rows: list[dict]) -> Table:
    result = Table(title="attention")
    for column in ("shape", "pass", "implementation", "ms p50", "p99", "TFLOP/s", "GB/s", "peak MiB"):
        result.add_column(column, justify="left" if column in ("shape", "pass", "implementation") else "right")
    for r in rows:
        shape = f"{r['dtype']} B{r['batch']} H{r['num_heads']}/{r['num_kv_heads']} N{r['seq_len']} D{r['head_dim']} "
        cells = [shape + r["mask"], r["pass"], r["implementation"]]
        if "error" in r:
            result.add_row(*cells, r["error"])
            continue
        peak = "-" if r["peak_extra_mib"] is None else f"{r['peak_extra_mib']:.0f}"
        figures = (f"{r['ms']:.3f}", f"{r['ms_p99']:.3f}", f"{r['tflops']:.1f}", f"{r['gb_per_s']:.0f}", peak)
        result.add_row(*cells, *figures)
    return result


LABELS = {
    "flash": "flash (ours)", "sdpa_flash": "FlashAttention-2", "sdpa_cudnn": "cuDNN", "flex": "FlexAttention",
    "sdpa_efficient": "memory-efficient",
}  # fmt: skip


def charts(source: Path, folder: Path) -> None:
    """Speed of both passes, and memory, against N from the CSV: a picture for each dtype, head_dim and mask."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    with source.open() as file:
        rows = list(csv.DictReader(file))
    pictures: dict[tuple, list[dict]] = {}
    for row in rows:
        pictures.setdefault((row["dtype"], row["head_dim"], row["mask"]), []).append(row)
    for (dtype, head_dim, mask), part in pictures.items():
        panels = [(which, "tflops", f"{which}, TFLOP/s") for which in dict.fromkeys(row["pass"] for row in part)]
        panels.append((part[-1]["pass"], "peak_extra_mib", f"memory beyond the inputs, {part[-1]['pass']}, MiB"))
        figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.9), layout="constrained")
        lengths = sorted({int(row["seq_len"]) for row in part})
        for number, name in enumerate(dict.fromkeys(row["implementation"] for row in part)):
            for axis, (which, column, _) in zip(axes, panels, strict=True):
                _curve(axis, [r for r in part if (r["implementation"], r["pass"]) == (name, which)], column, number)
        for axis, (_, column, title) in zip(axes, panels, strict=True):
            is_wide = column != "tflops" and axis.dataLim.y1 > 10 * axis.dataLim.y0
            axis.set(xscale="log", xlabel="N, tokens", **({"yscale": "log"} if is_wide else {"ylim": (0, None)}))
            axis.set_title(title, fontsize=10)
            axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else n for n in lengths], fontsize=8)
            axis.xaxis.set_minor_locator(NullLocator())
            axis.margins(x=0.1, y=0.12)
            axis.grid(alpha=0.25)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
        figure.suptitle(f"attention, {mask}, D = {head_dim}, {dtype}, {rows[0]['machine'].split(',')[0]}", fontsize=11)
        figure.savefig(folder / f"attention_{mask}_{head_dim}_{dtype}.png", dpi=120)
        plt.close(figure)


def _curve(axis, rows: list[dict], column: str, number: int) -> None:
    """One implementation in one panel; a cross where it ran out of memory."""
    points = [(int(row["seq_len"]), float(row[column])) for row in rows if not row.get("error") and row[column]]
    if not points:
        return
    name = rows[0]["implementation"]
    axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=f"C{number}", label=LABELS.get(name, name))
    failed = [int(row["seq_len"]) for row in rows if row.get("error") == "out of memory"]
    if failed:
        axis.scatter(failed, [points[-1][1]] * len(failed), marker="x", color=f"C{number}", s=40)
        place = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 8}
        axis.annotate("out of memory", (failed[len(failed) // 2], points[-1][1]), **place)


if __name__ == "__main__":
    main()
