"""Training speed of a GPT: `python -m scripts.bench.training` times whole optimizer steps and prints a table.

One row for each context length, attention and activation checkpointing, at a constant number of tokens a step: the
step of `train.py` itself (compiled and as CUDA graphs where the run would be), on random tokens; beside it the
parts of a step without graphs. Out of memory is a row. `bench.saving=true` adds what a save in the background costs the
loop (scripts/bench/saving.py). The run's folder gets bench_training.json and, where there is more than one context
length, a chart of tokens a second and of peak memory. The last line is one JSON object.

`sdpa_flash` and `sdpa_cudnn` are PyTorch's scaled_dot_product_attention held to one of its kernels.
"""

import statistics
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from conf.program import program
from conf.schema import Settings
from model import ATTENTION, GPTConfig, resolve_model
from model.recompute import MODES
from scripts.bench.calls import SDPA, held_to, refusal
from scripts.bench.clock import Parts, failures_as_rows, free, laps
from scripts.bench.report import Columns, Panel, Report, Row, draw_lengths, refuse_out_of_range, refuse_unknown, table
from scripts.bench.saving import save_cost
from training.graph import BEFORE_REPLAY
from training.hardware import Hardware, set_up
from training.memory import DoesNotFit
from training.optimizer import Optimizer
from training.run import Run, resolve
from training.shard import parallelize
from training.speed import mfu, model_flops, peak_flops
from training.step import training_step
from training.stepper import Stepper


@dataclass
class BenchConfig:
    attention: list[str] = field(default_factory=list)  # model.attention's | sdpa_flash | sdpa_cudnn; empty: the run's
    seq_len: list[int] = field(default_factory=list)  # context lengths, in tokens; empty: the run's
    checkpointing: list[str] = field(default_factory=list)  # of activations: modes to compare; empty: the model's own
    micro_batch_tokens: int | None = None  # of one forward and backward, at least a sequence; null: train.micro_batch
    vocab_size: int = 50257  # GPT-2's
    warmup_steps: int = 5  # not timed; the first compiles, and where graphs are on the second captures
    steps: int = 20  # timed one by one; the median is reported
    saving: bool = False  # measure what a save costs the loop, too

    def __post_init__(self) -> None:
        attention = ("auto", *ATTENTION, *SDPA)
        refuse_unknown("bench.", self, attention=attention, checkpointing=MODES)
        refuse_out_of_range("bench.", self, "steps", "warmup_steps", "vocab_size", "seq_len", "micro_batch_tokens")


@dataclass
class BenchSettings(Settings):
    bench: BenchConfig = field(default_factory=BenchConfig)

    def __post_init__(self) -> None:
        if self.bench.seq_len and self.data.seq_len not in self.bench.seq_len:  # no row uses it: it must not be refused
            self.data = replace(self.data, seq_len=self.bench.seq_len[0])
        super().__post_init__()


@program(
    "config",
    BenchSettings,
    run_dir="runs/bench_training",
    overrides=("model=gpt2_124m", "data.seq_len=1024", "train.batch_tokens=65536"),
)
def main(settings: BenchSettings, run_dir: Path) -> None:
    hardware, bench = set_up(settings.hardware, trains=True), settings.bench
    report = Report("bench_training", run_dir, hardware.description)
    rows = [  # impossible rows are refused here, before anything is trained
        (attention, one_row(settings, *chosen, attention, hardware))
        for *chosen, attention in product(
            bench.seq_len or [settings.data.seq_len],
            bench.checkpointing or [settings.model.activation_checkpointing],
            bench.attention or [settings.model.attention],
        )
    ]
    for attention, chosen in rows:
        report.add(measure(attention, chosen, hardware, run_dir))
    if len(bench.seq_len) > 1:
        memory = Panel("peak memory, GiB", "peak_memory_gib", may_be_log=True)
        panels = [Panel("tokens a second", "tokens_per_second"), memory]
        title = f"training step, {hardware.description}"
        draw_lengths(run_dir / "bench_training.png", report.rows, panels, "{attention}, {activation_checkpointing}, "
                     "{loss} loss".format_map, title)  # fmt: skip
    caption = "a save: what a save costs the loop; for 2 % of its time, one every so many steps" if bench.saving else ""
    report.finish(table(report.rows, NAMES, FIGURES, "training step, median", caption))


NAMES: Columns = {
    "attention": "{attention}",
    "recompute": "{activation_checkpointing}",
    "loss": "{loss}",
    "context": "{seq_len:,}",
}
FIGURES: Columns = {
    "tokens/s": "{tokens_per_second:,}", "ms a step": "{step_ms:.2f}", "MFU of bf16": "{mfu:.1%}",
    "GiB": "{peak_memory_gib:.1f}", "CUDA graphs": "{graphs}",
    "ms without graphs: forward": "{forward_ms:.1f}", "backward": "{backward_ms:.1f}",
    "optimizer": "{optimizer_ms:.1f}",
    "checkpoint, MB": "{checkpoint_mb:,.0f}", "a save, ms": "{save_ms:.0f}", "least": "{save_ms_least:.0f}",
    "most": "{save_ms_most:.0f}", "steps a save for 2 %": "{save_every_at_promise}",
}  # fmt: skip


def one_row(
    settings: BenchSettings, seq_len: int, checkpointing: str, attention: str, hardware: Hardware
) -> BenchSettings:
    """`settings` of one row, with the attention and the loss that will run in place of `auto`."""
    sequences, rest = divmod(settings.train.batch_tokens, seq_len)
    if rest:
        raise ValueError(
            f"bench.seq_len={seq_len} does not divide train.batch_tokens={settings.train.batch_tokens}; use another"
        )
    name = "sdpa" if attention in SDPA else attention
    model = replace(settings.model, attention=name, activation_checkpointing=checkpointing)
    model, *_ = resolve_model(model, hardware.device, hardware.dtype)
    refuse_other_vocabulary(model, settings.bench.vocab_size)
    number = settings.train.micro_batch
    if settings.bench.micro_batch_tokens:
        number = max(1, settings.bench.micro_batch_tokens // seq_len)
    if isinstance(number, int):
        number = min(number, sequences)
    data, train = replace(settings.data, seq_len=seq_len), replace(settings.train, micro_batch=number)
    return replace(settings, model=model, data=data, train=train)


def refuse_other_vocabulary(model: GPTConfig, vocab_size: int) -> None:
    """Raise ValueError where a model of transformers has fewer tokens than are drawn."""
    if model.name is None:
        return
    from model.huggingface_model import their_config

    if vocab_size > (most := their_config(model).vocab_size):
        raise ValueError(f"bench.vocab_size={vocab_size} is more than the {most} of {model.name}; use {most} or less")


def measure(attention: str, settings: BenchSettings, hardware: Hardware, run_dir: Path) -> Row:
    """Time the training step of one configuration; `error` in place of figures where it ran out of memory."""
    config = settings.model
    row = {
        "attention": attention if attention in SDPA else config.attention,
        "seq_len": settings.data.seq_len,
        "activation_checkpointing": config.activation_checkpointing,
        "loss": config.loss,
        "batch_tokens": settings.train.batch_tokens,
    }
    try:
        chosen = resolve(settings, vocab_size=settings.bench.vocab_size, hardware=hardware)
    except DoesNotFit as error:
        return row | {"micro_batch": None, "error": "out of memory", "why": str(error)}
    row |= {"micro_batch": chosen.micro_batch, "graphs": chosen.graphs}
    with failures_as_rows(row, *refusal(attention)), held_to(attention):
        row |= figures(settings, chosen, run_dir)
    torch.compiler.reset()
    free(hardware.device)
    return row


def figures(settings: BenchSettings, chosen: Run, run_dir: Path) -> Row:
    """Speed and memory of the step; times in ms, memory in GiB."""
    bench, seq_len, hardware = settings.bench, settings.data.seq_len, chosen.hardware
    torch.manual_seed(settings.train.seed)
    model = chosen.build_model()
    forward = parallelize(model, hardware)
    optimizer = Optimizer(model, settings.optim, hardware.dtype)
    shape = settings.sequences_per_step, seq_len + 1
    tokens = torch.randint(bench.vocab_size, shape, device=hardware.device)
    batch = tokens[:, :-1], tokens[:, 1:], None
    parts: list[Parts] = []

    def watched_step() -> None:
        parts.append(Parts(hardware.device))
        how = {"region": parts[-1], "dropout": chosen.model.draws}
        training_step(forward, optimizer, batch, chosen.micro_batch, hardware, **how)

    seconds = laps(watched_step, hardware.device, bench.warmup_steps, bench.steps)
    by_step = [part.seconds() for part in parts[bench.warmup_steps :]]
    step = partial(Stepper(chosen, model, forward, optimizer).step, batch)
    if chosen.graphs:
        seconds = laps(step, hardware.device, max(bench.warmup_steps, BEFORE_REPLAY), bench.steps)
    rate = settings.train.batch_tokens / statistics.median(seconds)
    row = {
        "tokens_per_second": round(rate),
        "step_ms": round(1e3 * statistics.median(seconds), 2),
        **{f"{name}_ms": round(1e3 * statistics.median(s[name] for s in by_step), 2) for name in by_step[0]},
        "mfu": mfu(model_flops(model)["causal"], rate, peak_flops(hardware.device, hardware.dtype)),
        "peak_memory_gib": hardware.peak_memory_gib(),
    }
    if bench.saving:
        row |= save_cost(step, model, optimizer, hardware, run_dir / "checkpoints")
    return row


if __name__ == "__main__":
    main()
