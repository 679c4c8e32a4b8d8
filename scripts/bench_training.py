"""Training speed of a GPT: `python -m scripts.bench_training` times whole optimizer steps and prints a table.

One row for each context length, attention backend, activation checkpointing and loss, at a constant number of tokens a
step: the step of `train.py` itself (forward, backward, clipping and optimizer, timed apart too; compiled where the run
would be), on random tokens. Out of memory is a row. The run's folder gets `bench_training.json` and, where there is
more than one context length, a chart of tokens a second and of peak memory. The last line is one JSON object.

`sdpa_flash` and `sdpa_cudnn` are PyTorch's scaled_dot_product_attention held to one of its kernels.
"""

import gc
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from conf.program import program
from conf.schema import Settings
from model import GPT, GPTConfig, resolve_attention
from model.config import LOSSES, resolve_loss
from model.recompute import MODES
from train import training_step
from training.hardware import Hardware, set_up
from training.log import provenance
from training.optimizer import Optimizer
from training.speed import mfu, model_flops, peak_flops

SDPA_KERNELS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass
class BenchConfig:
    attention: list[str] = field(
        default_factory=lambda: ["auto"]
    )  # flash | naive | tiled | sdpa | sdpa_flash | sdpa_cudnn
    seq_len: list[int] = field(default_factory=lambda: [1024])  # context lengths, in tokens
    checkpointing: list[str] = field(default_factory=list)  # of activations: modes to compare; empty: the model's own
    loss: list[str] = field(default_factory=list)  # plain | chunked, to compare; empty: the model's own
    micro_batch_tokens: int | None = None  # of one forward and backward, at least a sequence; null: the whole step
    vocab_size: int = 50257  # GPT-2's
    warmup_steps: int = 5  # not timed; the first compiles
    steps: int = 20  # timed one by one; the median is reported

    def __post_init__(self) -> None:
        for mode in self.checkpointing:
            if mode not in MODES:
                raise ValueError(f"bench.checkpointing={mode} is unknown; use one of {', '.join(MODES)}")
        for loss in self.loss:
            if loss not in LOSSES:
                raise ValueError(f"bench.loss={loss} is unknown; use one of {', '.join(LOSSES)}")
        for key in ("steps", "warmup_steps", "vocab_size", "seq_len", "micro_batch_tokens"):
            value = getattr(self, key)
            if value is not None and any(number < 1 for number in (value if isinstance(value, list) else [value])):
                raise ValueError(f"bench.{key}={value} must be at least 1")


@dataclass
class BenchSettings(Settings):
    bench: BenchConfig = field(default_factory=BenchConfig)


@program("bench_training", BenchSettings)
def main(settings: BenchSettings, run_dir: Path) -> None:
    hardware = set_up(settings.hardware)
    console = Console(highlight=False)
    console.print(f"{hardware.description}; {settings.train.batch_tokens:,} tokens a step", markup=False)
    rows = [
        measure(settings, attention, seq_len, mode, loss, hardware)
        for seq_len in settings.bench.seq_len
        for attention in settings.bench.attention
        for mode in settings.bench.checkpointing or [settings.model.activation_checkpointing]
        for loss in settings.bench.loss or [settings.model.loss]
    ]
    console.print(table(rows))
    report = {"hardware": hardware.description, "provenance": provenance(), "rows": rows}
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "bench_training.json").write_text(json.dumps(report, indent=2) + "\n")
    if len(settings.bench.seq_len) > 1:
        draw(report, run_dir / "bench_training.png")
    print(json.dumps(report))


def measure(
    settings: BenchSettings, attention: str, seq_len: int, checkpointing: str, loss: str, hardware: Hardware
) -> dict:
    """Time the training step of one configuration; `error` in place of figures where it ran out of memory."""
    sequences, rest = divmod(settings.train.batch_tokens, seq_len)
    if rest:
        raise ValueError(f"bench.seq_len={seq_len} does not divide train.batch_tokens={settings.train.batch_tokens}")
    config = replace(
        settings.model,
        attention="sdpa" if attention in SDPA_KERNELS else attention,
        activation_checkpointing=checkpointing,
        loss=resolve_loss(loss, hardware.device.type)[0],
    )
    config.attention, _ = resolve_attention(config.attention, hardware.device, hardware.dtype, config.head_dim)
    row = {
        "attention": attention if attention in SDPA_KERNELS else config.attention,
        "seq_len": seq_len,
        "activation_checkpointing": config.activation_checkpointing,
        "loss": config.loss,
        "batch_tokens": settings.train.batch_tokens,
        "micro_batch": micro_batch_of(settings, seq_len, sequences),
    }
    try:
        with held_to(attention):
            seconds, parts, peak, model = timed_steps(settings, config, seq_len, sequences, hardware)
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    else:
        rate = settings.train.batch_tokens / statistics.median(seconds)
        flops = model_flops(model)
        chip_peak = peak_flops(hardware.device, hardware.dtype)
        row |= {
            "tokens_per_second": round(rate),
            "step_ms": round(1e3 * statistics.median(seconds), 2),
            "step_ms_fastest": round(1e3 * min(seconds), 2),
            "step_ms_slowest": round(1e3 * max(seconds), 2),
            **{f"{name}_ms": round(1e3 * statistics.median(times), 2) for name, times in parts.items()},
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


def micro_batch_of(settings: BenchSettings, seq_len: int, sequences: int) -> int:
    """Sequences of one forward and backward."""
    if settings.bench.micro_batch_tokens:
        return min(max(1, settings.bench.micro_batch_tokens // seq_len), sequences)
    return min(settings.train.micro_batch or sequences, sequences)


def timed_steps(
    settings: BenchSettings, config: GPTConfig, seq_len: int, sequences: int, hardware: Hardware
) -> tuple[list[float], dict[str, list[float]], float | None, GPT]:
    """Seconds of each timed step, seconds of its parts by name, peak memory in GiB, and the model."""
    torch.manual_seed(settings.train.seed)
    model = GPT(config, settings.bench.vocab_size, seq_len, device=hardware.device, dtype=hardware.dtype)
    optimizer = Optimizer(model, settings.optim, hardware.dtype)
    forward = torch.compile(model, dynamic=False) if hardware.compile else model
    tokens = torch.randint(settings.bench.vocab_size, (sequences, seq_len + 1), device=hardware.device)
    micro_batch = micro_batch_of(settings, seq_len, sequences)
    marks, parts = [Mark(hardware)], []
    for _ in range(settings.bench.warmup_steps + settings.bench.steps):
        parts.append(Parts(hardware))
        training_step(forward, optimizer, tokens[:, :-1], tokens[:, 1:], micro_batch, hardware, region=parts[-1])
        marks.append(Mark(hardware))
    hardware.synchronize()
    seconds = [begin.seconds_to(end) for begin, end in pairwise(marks)][settings.bench.warmup_steps :]
    by_step = [part.seconds() for part in parts[settings.bench.warmup_steps :]]
    by_name = {name: [step[name] for step in by_step] for name in by_step[0]}
    return seconds, by_name, hardware.peak_memory_gib(), model


class Parts:
    """How long the named parts of one step take: what `training_step` calls as `region`."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._marks: list[tuple[str, Mark, Mark]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = Mark(self._hardware)
        yield
        self._marks.append((name, begin, Mark(self._hardware)))

    def seconds(self) -> dict[str, float]:
        """By name, over all micro-batches; call it when the device is done."""
        total: dict[str, float] = {}
        for name, begin, end in self._marks:
            total[name] = total.get(name, 0.0) + begin.seconds_to(end)
        return total


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
    """What fits 80 columns; the JSON has all."""
    result = Table(
        title="training step, median (ms: forward + backward + optimizer)", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in ("attention", "recompute", "loss", "context", "tokens/s", "ms", "MFU", "GiB"):
        left = column in ("attention", "recompute", "loss")
        result.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        names = row["attention"], row["activation_checkpointing"], row["loss"]
        if "error" in row:
            result.add_row(*names, f"{row['seq_len']:,}", "OOM")
            continue
        result.add_row(
            *names,
            f"{row['seq_len']:,}",
            f"{row['tokens_per_second']:,}",
            "{step_ms:.0f} ({forward_ms:.0f}+{backward_ms:.0f}+{optimizer_ms:.0f})".format(**row),
            f"{row['mfu']:.1%}" if row["mfu"] is not None else "-",
            f"{row['peak_memory_gib']:.1f}" if row["peak_memory_gib"] is not None else "-",
        )
    return result


def draw(report: dict, path: Path) -> None:
    """Tokens a second and peak memory against the context length; a cross where memory ran out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    rows = report["rows"]
    lengths = sorted({row["seq_len"] for row in rows})
    curves: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        curves.setdefault((row["attention"], f"{row['activation_checkpointing']}, {row['loss']} loss"), []).append(row)
    styles = dict(zip(dict.fromkeys(mode for _, mode in curves), ("-", "--", ":", "-."), strict=False))
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(name for name, _ in curves))}
    wanted = {"tokens_per_second": "tokens a second", "peak_memory_gib": "peak memory, GiB"}
    wanted = {key: title for key, title in wanted.items() if any(row.get(key) for row in rows)}  # no memory on a CPU
    figure, panels = plt.subplots(1, len(wanted), figsize=(5.5 * len(wanted), 4.4), layout="constrained", squeeze=False)
    for axes, (key, title) in zip(panels[0], wanted.items(), strict=True):
        for (name, mode), part in curves.items():
            done = [row for row in part if row.get(key)]
            kind = {"color": colours[name], "linestyle": styles[mode]}
            label = f"{name}, checkpointing {mode}"
            axes.plot(
                [r["seq_len"] for r in done], [r[key] for r in done], marker="o", markersize=4, label=label, **kind
            )
            failed = [row["seq_len"] for row in part if "error" in row]
            if failed and done:
                axes.scatter(failed[:1], [done[-1][key]], marker="x", color=colours[name], s=50)
                place = {"xytext": (4, 6), "textcoords": "offset points", "fontsize": 7}
                axes.annotate("out of memory", (failed[0], done[-1][key]), **place)
        axes.set(xscale="log", yscale="log", xlabel="context, tokens")
        axes.set_title(title, fontsize=10)
        axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else n for n in lengths], fontsize=8)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(y=0.12)
        low, high = axes.get_ylim()
        if high < 4 * low:  # on a log axis of its own choice a difference of 1 % would fill the panel
            axes.set_ylim(low / 2, high * 2)
        axes.grid(alpha=0.25, which="both")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(f"training step, {report['hardware']}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
