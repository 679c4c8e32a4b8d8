"""A cache of keys and values in 16 and in 8 bits: `python -m scripts.bench.cache_bits` prints what each costs.

A row is a dtype of the cache; 8 bits have a scale for each token and head, which is written as tokens are appended:

    memory    what the cache of `bench.batch` rows of `bench.context` tokens holds, by the allocator where it counts
    latency   of one more token a row over that cache, in pages: median and 99th percentile of replays of one CUDA graph
    error     of that call's O against float64, relative, on normal random numbers
    loss      held out, of a small GPT whose attention reads its cache token by token, less the loss without a cache

The GPT is trained here as `python train.py` would with the same arguments, or loaded by `init_from=CHECKPOINT`. The
run's folder gets cache_bits.json and a picture. The last line is one JSON object.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from conf.program import program
from conf.schema import Settings
from data import fixed_windows
from kernels import flash_attention_with_kvcache, kvcache_workspace, naive_attention
from model import GPT, attend_with
from scripts.bench.clock import Milliseconds, measure
from scripts.bench.report import Columns, Report, Row, refuse_below_one, table
from train import train
from training.checkpoint import open_checkpoint
from training.curves import picture
from training.evaluate import EvaluationSet, evaluate
from training.hardware import Hardware, set_up
from training.run import resolve

EIGHT_BITS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
AT_ONCE = 16  # tokens of a row that one call can append


@dataclass
class BenchConfig:
    batch: int = 16  # rows of the cache
    context: int = 16384  # tokens of each
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page: int = 64  # tokens
    replays: int = 300

    def __post_init__(self) -> None:
        sizes = "batch", "context", "num_heads", "num_kv_heads", "head_dim", "page", "replays"
        refuse_below_one("bench.", self, *sizes)


@dataclass
class BenchSettings(Settings):
    bench: BenchConfig = field(default_factory=BenchConfig)


@program(
    "config", BenchSettings, experiment="quickstart", run_dir="runs/cache_bits", overrides=("logger.wandb=disabled",)
)
def main(settings: BenchSettings, run_dir: Path) -> None:
    hardware = set_up(settings.hardware)
    report = Report("cache_bits", run_dir, hardware.description)
    dtypes = {str(hardware.dtype).removeprefix("torch."): hardware.dtype} | EIGHT_BITS
    if settings.init_from is None:
        train(settings, run_dir / "trained")
    path = settings.init_from or str(run_dir / "trained" / "checkpoints" / "last")
    uncached, losses = held_out(settings, path, dtypes)
    for name, dtype in dtypes.items():
        loss = {"val_loss": losses[name], "more_loss": losses[name] - uncached}
        report.rows.append({"cache": name} | one_more_token(settings.bench, dtype, hardware) | loss)
    report.more = {"loss_without_cache": uncached}
    title = "cache of {batch} rows of {context:,} tokens, {num_heads}/{num_kv_heads} heads of {head_dim}".format_map(
        vars(settings.bench)
    )
    draw(report.rows, run_dir / "cache_bits.png", f"{title}\n{hardware.description}")
    caption = f"Held-out loss without a cache: {uncached:.5f} nats a token."
    report.finish(table(report.rows, {"cache": "{cache}"}, FIGURES, title, caption))


FIGURES: Columns = {
    "MiB": "{mib:,.0f}", "p50, us": "{p50_us:.1f}", "p99, us": "{p99_us:.1f}", "error of O": "{relative_error:.2e}",
    "held-out loss": "{val_loss:.5f}", "more than without": "{more_loss:+.1e}",
}  # fmt: skip


class Pages:
    """A layer's cache in pages that lie in random order, with rows of one length.

    Args:
        like: (B, Hkv, any, D), of keys.
        num_tokens: room for each row.
        dtype: of what is stored.
    """

    def __init__(self, like: Tensor, num_tokens: int, dtype: torch.dtype, page: int, num_heads: int):
        (batch, num_kv_heads, _, head_dim), device = like.shape, like.device
        pages = math.ceil(num_tokens / page)
        self.keys, self.values = (
            torch.zeros(batch * pages, num_kv_heads, page, head_dim, dtype=dtype, device=device) for _ in range(2)
        )
        self.named = {}
        if dtype in EIGHT_BITS.values():
            scales = (torch.ones(self.keys.shape[:3], device=device) for _ in range(2))
            self.named = dict(zip(("k_scale", "v_scale"), scales, strict=True))
        self.named["block_table"] = torch.randperm(batch * pages, device=device).reshape(batch, pages).int()
        self.named["cache_seqlens"] = self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.named["workspace"] = kvcache_workspace(batch, num_heads, device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        """Append up to 16 tokens, without counting them, and attend over all: (B, Hq, N, D)."""
        return flash_attention_with_kvcache(q, self.keys, self.values, k, v, **self.named, **options)

    def read(self, q: Tensor, k: Tensor, v: Tensor, at_once: int = 1, **options) -> Tensor:
        """Append N tokens, `at_once` in a call, each of which attends to those before it: (B, Hq, N, D)."""
        parts = []
        for part in zip(*(x.split(at_once, dim=2) for x in (q, k, v)), strict=True):
            parts.append(self.attend(*part, **options))
            self.lengths += part[0].size(2)
        return torch.cat(parts, dim=2)


@torch.no_grad()
def one_more_token(bench: BenchConfig, dtype: torch.dtype, hardware: Hardware) -> Row:
    """Memory, latency and error of a call that appends the last token of a full cache in `dtype`."""
    device = hardware.device
    make = {"dtype": hardware.dtype, "device": device, "generator": torch.Generator(device).manual_seed(0)}
    k, v = (torch.randn(bench.batch, bench.num_kv_heads, bench.context, bench.head_dim, **make) for _ in range(2))
    q = torch.randn(bench.batch, bench.num_heads, 1, bench.head_dim, **make)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    pages = Pages(k, bench.context, dtype, bench.page, bench.num_heads)
    if device.type == "cuda":
        size = torch.cuda.memory_allocated(device) - held
    else:
        size = sum(x.nbytes for x in (pages.keys, pages.values, *pages.named.values()))
    before, last = ([x[:, :, part] for x in (k, v)] for part in (slice(-1), slice(-1, None)))
    for part in zip(*(x.split(AT_ONCE, dim=2) for x in before), strict=True):
        pages.attend(q.expand(-1, -1, part[0].size(2), -1), *part)
        pages.lengths += part[0].size(2)
    o = pages.attend(q, *last)
    right = torch.cat([naive_attention(*(x[row, None].double() for x in (q, k, v))) for row in range(bench.batch)])
    times = latency(partial(pages.attend, q, *last), device, bench.replays)
    return {
        "mib": size / 2**20,
        "p50_us": 1e3 * times.p50,
        "p99_us": 1e3 * times.p99,
        "relative_error": ((o - right).norm() / right.norm()).item(),
    }


def latency(call: partial, device: torch.device, replays: int) -> Milliseconds:
    """Of a graph of one call, replay by replay; on a CPU of the call. The cache is far larger than L2."""
    if device.type != "cuda":
        return measure(call, device)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return measure(graph.replay, device, budget_ms=1e6, runs=replays)


def held_out(settings: BenchSettings, path: str, dtypes: dict[str, torch.dtype]) -> tuple[float, dict[str, float]]:
    """Validation loss in nats a token of the GPT of a checkpoint: without a cache, and by the cache's dtype."""
    run = resolve(settings)
    model = GPT(run.model, run.vocab_size, run.seq_len, device=run.hardware.device)
    open_checkpoint(path).load_weights(model)
    windows = fixed_windows(run.dataset.validation, run.seq_len, settings.train.eval_windows)
    evaluation = EvaluationSet.of(windows, run.dataset.tokenizer)

    def by_tokens(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], **_) -> Tensor:
        """Attention of a layer, which is all that looks at other tokens: what follows sees what a step would."""
        return Pages(k, k.size(2), dtype, settings.bench.page, q.size(1)).read(q, k, v, window=window)

    losses = {}
    for name, dtype in dtypes.items():
        attend = partial(by_tokens, dtype)
        with attend_with(model, lambda layer, named, attend=attend: attend):
            losses[name] = evaluate(model, evaluation, run.micro_batch, run.hardware)["val_loss"]
    return evaluate(model, evaluation, run.micro_batch, run.hardware)["val_loss"], losses


def draw(rows: list[Row], path: Path, title: str) -> None:
    names = [row["cache"] for row in rows]
    panels = {"memory, MiB": "mib", "latency, us: p50, p99": "p50_us", "error of O": "relative_error",
              "held-out loss more than without a cache, nats": "more_loss"}  # fmt: skip
    with picture(path, 1, len(panels), size=(14, 3.8), title=title) as all_axes:
        for axes, (heading, key) in zip(all_axes, panels.items(), strict=True):
            axes.bar(names, [row[key] for row in rows], color=["C0", "C1", "C2"])
            if key == "p50_us":
                axes.plot(names, [row["p99_us"] for row in rows], "k_", markersize=30)
            axes.set_title(heading, fontsize=9)


if __name__ == "__main__":
    main()
