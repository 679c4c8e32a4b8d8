"""Speed of attention: `python -m scripts.bench.attention` times ours beside PyTorch's kernels in one process.

One row for each implementation, shape and pass: p50 and p99 of many runs with a cold L2 cache on a GPU that never waits
for the host, TFLOP/s (forward 4 B H Nq Nk D, backward 2.5 times that, halved when causal, whatever an implementation
really computes), and the peak of memory beyond the inputs. The implementations take turns in rounds, each in another
order, because a GPU's clock falls while it works; p50 is the median of the rounds' p50, p99 the largest of their p99.
Out of memory is a row.

`bench.attention=[flash,flash4,flash4_deterministic]` times FlashAttention-4 where the package flash-attn-4 is
installed; its backward adds dQ in any order unless it is deterministic. Ours always is.
`bench.mask` also accepts `window`, of 1,024 tokens, and `packed`: four documents of different lengths in each sequence,
causal. A row of less than 1 ms also has the host's time in Python, which is not part of its time. The run's folder gets
attention.json and charts of speed and memory against N.

The last line is one JSON object. On a CPU with TRITON_INTERPRET=1 this is a smoke test: its figures mean nothing there.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from conf.program import program
from kernels import (
    flash_attention,
    flash_attention_varlen,
    naive_attention,
    naive_attention_varlen,
)
from scripts.bench.calls import PASSES, SDPA, one_pass, refusal, refuse_uneven_heads, sdpa, tensors
from scripts.bench.clock import Milliseconds, failures_as_rows, free, host_seconds, measure, peak_gib, turns
from scripts.bench.report import (
    Columns,
    Panel,
    Report,
    Row,
    draw_lengths,
    refuse_out_of_range,
    refuse_unknown,
    set_up_gpu,
    table,
)
from scripts.evidence_tables import PEERS
from training.hardware import DTYPES, HardwareConfig
from training.speed import attention_flops

ATTENTION = ("flash", "naive", *SDPA, "flex")
FLASH4 = {"flash4": False, "flash4_deterministic": True}
BACKWARD_ONLY = ("flash4_deterministic",)
MASKS = ("causal", "full", "window", "packed")
WINDOW = 1024  # tokens that a query sees, itself included
CALLS = 100  # over which the time in Python is averaged
SMOKE = "bench.attention=[flash,naive] bench.seq_len=[64] bench.head_dim=[16] bench.hidden=32 bench.tokens=64"
LABELS = {"flash": "flash (ours)", **PEERS}


@dataclass
class BenchConfig:
    attention: list[str] = field(default_factory=lambda: [*ATTENTION])  # and flash4, flash4_deterministic
    seq_len: list[int] = field(default_factory=lambda: [2**k for k in range(9, 18)])  # tokens of queries and of keys
    head_dim: list[int] = field(default_factory=lambda: [64, 128])  # 16 to 256
    mask: list[str] = field(default_factory=lambda: ["causal", "full"])  # causal | full | window | packed
    passes: list[str] = field(default_factory=lambda: list(PASSES))  # forward | backward
    tokens: int = 16384  # of one call: the batch is tokens / seq_len, at least 1
    hidden: int = 2048  # query heads times head_dim
    rounds: int = 3  # in which all take turns
    budget_ms: float = 100.0  # time spent on the runs of one row, over all rounds

    def __post_init__(self) -> None:
        refuse_unknown("bench.", self, attention=(*ATTENTION, *FLASH4), mask=MASKS, passes=PASSES)
        refuse_out_of_range("bench.", self, "seq_len", "head_dim", "tokens", "hidden", "rounds", "budget_ms")
        refuse_uneven_heads(self)


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
    seq_len: int
    head_dim: int
    mask: str

    def flops(self, which: str) -> float:
        n, seen = self.seq_len, min(self.seq_len, WINDOW)
        pairs = {
            "causal": n**2 / 2,
            "full": n**2,
            "window": n * seen - seen**2 / 2,
            "packed": sum(length**2 / 2 for length in self.documents),
        }[self.mask]
        flops = attention_flops(self.batch * self.num_heads * pairs, self.head_dim)
        return flops * (1.0 if which == "forward" else 2.5)

    @property
    def documents(self) -> list[int]:
        """Lengths of the documents packed into one sequence."""
        half, quarter, eighth = (self.seq_len // part for part in (2, 4, 8))
        return [half, quarter, eighth, self.seq_len - half - quarter - eighth]


@program("tool", BenchSettings, run_dir="runs/bench_attention")
def main(settings: BenchSettings, run_dir: Path) -> None:
    hardware = set_up_gpu("attention", settings.hardware, SMOKE)
    bench = settings.bench
    report = Report("attention", run_dir, hardware.description)
    dtype = str(hardware.dtype).removeprefix("torch.")
    for head_dim, mask, seq_len in product(bench.head_dim, bench.mask, bench.seq_len):
        cell = Cell(dtype, max(1, bench.tokens // seq_len), bench.hidden // head_dim, seq_len, head_dim, mask)
        report.add(*run_cell(cell, bench, hardware.device))
    draw(report)
    report.finish(table(report.rows, NAMES, FIGURES, "attention"))


NAMES: Columns = {
    "shape": "{dtype} B{batch} H{num_heads} N{seq_len} D{head_dim} {mask}",
    "pass": "{pass}",
    "attention": "{attention}",
}
FIGURES: Columns = {
    "ms p50": "{ms:.3f}",
    "p99": "{ms_p99:.3f}",
    "TFLOP/s": "{tflops:.1f}",
    "peak MiB": "{peak_extra_mib:.0f}",
    "Python, us": "{python_us:.0f}",
}


def draw(report: Report) -> None:
    """Speed of both passes, and memory, against N: a picture for each head_dim and mask."""
    pictures: dict[tuple, list[Row]] = {}
    for row in report.rows:
        pictures.setdefault((row["mask"], row["head_dim"], row["dtype"]), []).append(row)
    for (mask, head_dim, dtype), rows in pictures.items():
        passes = list(dict.fromkeys(row["pass"] for row in rows))
        panels = [Panel(f"{p}, TFLOP/s", "tflops", lambda row, p=p: row["pass"] == p) for p in passes]
        memory = f"memory beyond the inputs, {passes[-1]}, MiB"
        panels.append(Panel(memory, "peak_extra_mib", lambda row, p=passes[-1]: row["pass"] == p, may_be_log=True))
        title = f"attention, {mask}, D = {head_dim}, {dtype}, {report.hardware.split(',')[0]}"
        path = report.folder / f"attention_{mask}_{head_dim}_{dtype}.png"
        draw_lengths(path, rows, panels, lambda row: LABELS.get(row["attention"], row["attention"]), title)


def run_cell(cell: Cell, bench: BenchConfig, device: torch.device) -> list[Row]:
    """A row for each implementation and pass; those of one pass take turns."""
    rows = []
    for which in bench.passes:
        ready: list[tuple[Row, Callable[[], object], list[Milliseconds]]] = []
        for name in bench.attention:
            if which == "forward" and name in BACKWARD_ONLY:
                continue
            row = {"attention": name, "pass": which, **asdict(cell)}
            with failures_as_rows(row, NotImplementedError, *refusal(name)):
                call, facts = prepared(name, cell, which, device)
                row |= facts
                ready.append((row, call, []))
            rows.append(row)
        for order in turns(ready, bench.rounds):
            for row, call, rounds in order:
                with failures_as_rows(row, *refusal(row["attention"])):
                    rounds.append(measure(call, device, bench.budget_ms / bench.rounds, with_host=False))
        for row, call, rounds in ready:
            if "error" in row:
                continue
            ms = statistics.median(times.p50 for times in rounds)
            row |= {"ms": ms, "ms_p99": max(times.p99 for times in rounds), "runs": sum(times.runs for times in rounds)}
            row["tflops"] = cell.flops(which) / ms / 1e9
            if device.type == "cuda" and ms < 1.0:
                row["python_us"] = python_us(call)
        ready.clear()
        free(device)
    if "flex" in bench.attention:
        torch.compiler.reset()  # each shape compiles anew and would reach the limit on recompilations
    return rows


def prepared(name: str, cell: Cell, which: str, device: torch.device) -> tuple[Callable[[], object], Row]:
    """One pass as a call without arguments, and its peak of memory."""
    heads = cell.num_heads, cell.num_heads
    inputs = tensors(cell.batch, cell.seq_len, *heads, cell.head_dim, device, DTYPES[cell.dtype])
    begin = partial(one_pass, implementation(name, cell, device), which, *inputs)
    peak = peak_gib(lambda: begin()(), device)
    return begin(), {"peak_extra_mib": None if peak is None else 1024 * peak}


def implementation(name: str, cell: Cell, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """name -> f(q, k, v). Raises NotImplementedError where it does not support the mask or is not installed."""
    causal = cell.mask != "full"
    if cell.mask == "packed" and name in ("flash", "naive"):
        varlen = {"flash": flash_attention_varlen, "naive": naive_attention_varlen}[name]
        starts = torch.tensor([0, *cell.documents * cell.batch]).cumsum(0).to(device, torch.int32)
        longest = max(cell.documents)

        def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            tokens = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            o = varlen(*tokens, starts, starts, longest, longest, causal=True)
            return o.unflatten(0, (cell.batch, cell.seq_len)).transpose(1, 2)

        return packed
    if name in ("flash", "naive"):
        window = (WINDOW - 1, 0) if cell.mask == "window" else (-1, -1)
        return partial({"flash": flash_attention, "naive": naive_attention}[name], causal=causal, window=window)
    if name == "flex" and cell.mask != "packed":
        rule = (lambda b, h, i, j: (i >= j) & (i - j < WINDOW)) if cell.mask == "window" else lambda b, h, i, j: i >= j
        n = cell.seq_len
        mask = create_block_mask(rule, None, None, n, n, device=device.type) if causal else None
        return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)
    if name in FLASH4 and cell.mask != "packed":
        try:
            flash4 = import_module("flash_attn.cute").flash_attn_func
        except ImportError as error:
            raise NotImplementedError("flash-attn-4 is not installed") from error
        options = {"window_size": (WINDOW - 1, 0)} if cell.mask == "window" else {"causal": causal}
        options["deterministic"] = FLASH4[name]
        return lambda *qkv: flash4(*(x.transpose(1, 2) for x in qkv), **options)[0].transpose(1, 2)
    if cell.mask in ("window", "packed"):
        raise NotImplementedError(f"{name} is not measured with {cell.mask}")
    return partial(sdpa, name, is_causal=causal)


def python_us(call: Callable[[], object]) -> float:
    """The host's time in Python for a call on a GPU, in microseconds: calls are queued and none is waited for."""
    call()
    torch.cuda.synchronize()
    seconds = host_seconds(call, CALLS)
    torch.cuda.synchronize()
    return 1e6 * seconds


if __name__ == "__main__":
    main()
