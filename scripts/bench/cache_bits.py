"""A cache of keys and values in 16 and in 8 bits: `python -m scripts.bench.cache_bits` prints what each costs.

A row is a dtype of the cache; 8 bits have a scale for each token and head, which is written as tokens are appended:

    memory    what the cache of `bench.batch` rows of `bench.context` tokens holds, by the allocator's count on a GPU
    latency   of one more token a row over that cache, in pages: median and 99th percentile of replays of one CUDA graph
    error     of that call's O against float64, relative, on normal random numbers
    loss      held out, of a small GPT that reads the text token by token through its cache, and how much more that is
              than the loss of the same weights without a cache

The GPT is trained here as `python train.py` would with the same arguments, or loaded by `init_from=CHECKPOINT`. The
run's folder gets cache_bits.json and a picture. The last line is one JSON object.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.program import program
from conf.schema import Settings
from data import fixed_windows
from kernels import naive_attention
from model import GPT, GPTConfig, KVCache, PagedKVCache
from model.attention import flash
from model.cache import EIGHT_BIT_DTYPES
from scripts.bench.clock import Graph, Milliseconds, measure
from scripts.bench.report import Columns, Report, Row, refuse_out_of_range, set_up_gpu, table
from scripts.variants import exit_if_stopped
from train import train
from training.checkpoint import open_checkpoint
from training.curves import picture
from training.hardware import Hardware
from training.run import resolve

SMOKE = (
    "model.num_layers=1 data.seq_len=16 train.steps=2 train.batch_tokens=32 train.eval_windows=2 train.sample_tokens=0 "
    "bench.batch=1 bench.context=20 bench.num_heads=2 bench.num_kv_heads=1 bench.head_dim=16 bench.page=16"
)
REPLAYS = 300  # of the captured call


@dataclass
class BenchConfig:
    batch: int = 16  # rows of the cache
    context: int = 16384  # tokens of each
    num_heads: int = 32  # of queries
    num_kv_heads: int = 8  # of keys and values
    head_dim: int = 128  # width of a head
    page: int = 64  # tokens

    def __post_init__(self) -> None:
        sizes = "batch", "context", "num_heads", "num_kv_heads", "head_dim", "page"
        refuse_out_of_range("bench.", self, *sizes)
        # the cache would refuse these too, but after a whole run
        if self.context < 2:
            raise ValueError(f"bench.context={self.context} must be at least 2: a token is appended to those before it")
        if self.num_heads % self.num_kv_heads:
            heads = f"bench.num_heads={self.num_heads} is no multiple of bench.num_kv_heads={self.num_kv_heads}"
            raise ValueError(f"{heads}; use one")
        if self.head_dim % 2 or not 16 <= self.head_dim <= 256:
            raise ValueError(f"bench.head_dim={self.head_dim} must be even, from 16 to 256")
        if self.page < 16 or self.page & self.page - 1:
            raise ValueError(f"bench.page={self.page} must be a power of two from 16 on")


@dataclass
class BenchSettings(Settings):
    bench: BenchConfig = field(default_factory=BenchConfig)


@program(
    "config", BenchSettings, experiment="quickstart", run_dir="runs/cache_bits", overrides=("logger.wandb=disabled",)
)
def main(settings: BenchSettings, run_dir: Path) -> None:
    hardware = set_up_gpu("a cache in 8 bits", replace(settings.hardware, compile=None), SMOKE)
    report = Report("cache_bits", run_dir, hardware.description)
    dtypes = {str(hardware.dtype).removeprefix("torch."): hardware.dtype} | EIGHT_BIT_DTYPES
    if settings.init_from is None:
        exit_if_stopped(train(settings, run_dir / "trained"))
    path = settings.init_from or str(run_dir / "trained" / "checkpoints" / "last")
    uncached, losses = held_out(settings, path, dtypes)
    for name, dtype in dtypes.items():
        loss = {"val_loss": losses[name], "more_loss": losses[name] - uncached}
        report.add({"cache": name} | one_more_token(settings.bench, dtype, hardware) | loss)
    report.more = {"loss_without_cache": uncached}
    title = "cache of {batch} rows of {context:,} tokens, {num_heads}/{num_kv_heads} heads of {head_dim}".format_map(
        vars(settings.bench)
    )
    draw(report.rows, run_dir / "cache_bits.png", f"{title}\n{hardware.description}")
    caption = f"Held-out loss without a cache: {uncached:.5f} nats a token."
    report.finish(table(report.rows, NAMES, FIGURES, title, caption))


NAMES: Columns = {"cache": "{cache}"}
FIGURES: Columns = {
    "MiB": "{mib:,.0f}", "p50, us": "{p50_us:.1f}", "p99, us": "{p99_us:.1f}", "error of O": "{relative_error:.2e}",
    "held-out loss": "{val_loss:.5f}", "more than without": "{more_loss:+.1e}",
}  # fmt: skip


@torch.no_grad()
def one_more_token(bench: BenchConfig, dtype: torch.dtype, hardware: Hardware) -> Row:
    """Memory, latency and error of a call that appends the last token of a full cache in `dtype`."""
    device = hardware.device
    make = {"dtype": hardware.dtype, "device": device, "generator": torch.Generator(device).manual_seed(0)}
    k, v = (torch.randn(bench.batch, bench.num_kv_heads, bench.context, bench.head_dim, **make) for _ in range(2))
    q = torch.randn(bench.batch, bench.num_heads, 1, bench.head_dim, **make)
    one_layer = GPTConfig(1, bench.num_heads, bench.num_kv_heads, bench.num_heads * bench.head_dim)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    cache = PagedKVCache(one_layer, bench.batch, bench.context, None, bench.page, device, dtype)
    if device.type == "cuda":
        size = torch.cuda.memory_allocated(device) - held
    else:
        size = sum(x.nbytes for x in (cache.keys, cache.values, *cache.scales))
    rows = in_use(cache)
    cache.extend(rows, bench.context - 1)
    read = cache.prompts(rows)
    read.positions(1, bench.batch * (bench.context - 1))
    cache.store(0, read.places, *(end_to_end(x[:, :, :-1])[0] for x in (k, v)))
    read.advance(bench.context - 1)
    cache.extend(rows, 1)
    call = partial(cache.attend, 0, *(end_to_end(x[:, :, -1:]) for x in (q, k, v)), flash)
    o = call()[0].transpose(0, 1)[:, :, None]  # (B, Hq, 1, D)
    right = torch.cat([naive_attention(*(x[row, None].double() for x in (q, k, v))) for row in rows])
    times = latency(call, device)
    return {
        "mib": size / 2**20,
        "p50_us": 1e3 * times.p50,
        "p99_us": 1e3 * times.p99,
        "relative_error": ((o - right).norm() / right.norm()).item(),
    }


def in_use(cache: KVCache) -> list[int]:
    """Allocate all rows of a new cache and return them; they are empty."""
    rows = list(range(len(cache.reserved)))
    for row in rows:
        cache.allocate(row)
    return rows


def end_to_end(x: Tensor) -> Tensor:
    """(B, H, N, D) -> (1, H, B * N, D), the layout that a cache expects."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def latency(call: partial, device: torch.device) -> Milliseconds:
    """Time of each replay of a graph of one call; on a CPU, of the call. The cache is far larger than L2."""
    if device.type != "cuda":
        return measure(call, device)
    call()
    return measure(Graph((call,), 1).graph.replay, device, budget_ms=1e6, runs=REPLAYS)


def held_out(settings: BenchSettings, path: str, dtypes: dict[str, torch.dtype]) -> tuple[float, dict[str, float]]:
    """Validation loss, in nats a token, of a checkpoint's GPT: without a cache, and for each dtype of the cache."""
    run = resolve(replace(settings, resume=None))  # the weights come from `path`, whatever `resume` names
    model = GPT(run.model, run.vocab_size, run.seq_len, device=run.hardware.device)
    open_checkpoint(path).load_weights(model)
    model = model.for_inference(run.hardware.dtype)
    windows = fixed_windows(run.dataset.validation, run.seq_len, settings.train.eval_windows)
    inputs, targets = (x.to(run.hardware.device) for x in windows)
    loss = partial(mean_loss, model, inputs, targets, run.micro_batch)
    page = settings.bench.page
    return loss(None), {name: loss(partial(model.make_cache, page=page, dtype=x)) for name, x in dtypes.items()}


@torch.no_grad()
def mean_loss(
    model: GPT, inputs: Tensor, targets: Tensor, at_once: int, make_cache: Callable[[int], KVCache] | None
) -> float:
    """Mean loss over all targets, `at_once` sequences at a time: in one call, or token by token through a cache."""
    total = 0.0
    for tokens, wanted in zip(inputs.split(at_once), targets.split(at_once), strict=True):
        if make_cache is None:
            logits = model(tokens)
        else:
            cache, steps = make_cache(len(tokens)), []
            rows = in_use(cache)
            for token in tokens.split(1, dim=1):
                cache.extend(rows, 1)
                steps.append(model(token, kv_cache=cache))
            logits = torch.cat(steps, dim=1)
        total += F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum").item()
    return total / targets.numel()


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
