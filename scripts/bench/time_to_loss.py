"""How long until a held-out loss? `python -m scripts.bench.time_to_loss` trains ours and others and prints a table.

    python -m scripts.bench.time_to_loss data.files=input.txt                          the CPU recipe, on a CPU
    python -m scripts.bench.time_to_loss experiment=speedrun data.files=input.txt bench.target=1.4698 \\
        nanogpt.steps=5000 nanogpt.batch_tokens=16384 bench.every=50                   the GPU recipe, on a GPU

All train on the same text and tokens and are judged on the same held-out windows by the same code; runs take turns,
seed by seed. Ours is the run that `train.py` would be. nanoGPT is its own model.py and recipe
(scripts/bench/opponents.py) at its own learning rate, the first of `nanogpt.lr`, and at the best of them;
`bench.opponents=[nanogpt,nanochat]` adds nanochat, and ratios are to the first one named; `bench.opponents=[]` trains
ours alone. A run of theirs ends at the target, or where it overfits. Their code is not stored here: `git clone
https://github.com/karpathy/nanoGPT .cache/nanoGPT`, and nanochat likewise.
`'bench.changes=["model.qk_norm=true"]'` adds rows of ours with a key changed, not one that changes those windows.

Seconds are those of training steps alone, without evaluation and saving. The first step, which compiles, counts as one
of the steps after it. Between two evaluations the loss is interpolated linearly. A ratio of times is a ratio of tokens
times one of tokens a second. The run's folder gets time_to_loss.json, .md and .png. The last line is one JSON object.
"""

import contextlib
import math
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from conf.arguments import key_of
from conf.program import changed, program
from conf.schema import Settings
from scripts.bench.opponents import OPPONENTS, NanochatConfig, NanoGPTConfig, Opponent, train_opponent
from scripts.bench.report import OTHER_COLOURS, Columns, Report, Row, refuse_out_of_range, refuse_unknown, table
from scripts.variants import refuse_to_resume, train_aside
from training.curves import picture, read_run
from training.evaluate import EvaluationSet, evaluate
from training.resume import held_out
from training.run import Run, resolve

INSTEAD = {"train.seed": "bench.seeds", "train.eval_every": "bench.every"}  # a run's key -> the benchmark's
OVERFITS = 0.02  # nats above the least held-out loss of a run, five evaluations in a row: it will not fall again
Curve = list[tuple[int, float, float]]  # tokens, training seconds, held-out loss in nats a token


@dataclass
class TimeToLossConfig:
    target: float | None = 1.8857  # held-out, in nats a token; null: what the first opponent reaches at its own rate
    every: int = 25  # steps of ours between two evaluations; an opponent's are as many tokens apart
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])  # of weights, batches and dropout
    changes: list[str] = field(default_factory=list)  # KEY=VALUE: for each, a row of ours with that key changed
    opponents: list[str] = field(default_factory=lambda: ["nanogpt"])  # nanogpt | nanochat; []: ours alone

    def __post_init__(self) -> None:
        refuse_out_of_range("bench.", self, "every")
        refuse_unknown("bench.", self, opponents=OPPONENTS)
        if unset := [change for change in self.changes if "=" not in change]:
            raise ValueError(f"bench.changes={unset[0]} has no value; write KEY=VALUE")
        refuse_unknown("bench.", self, changes=self.changes)  # one of them twice
        if self.target is not None and not self.target > 0:
            raise ValueError(f"bench.target={self.target} must be above 0 nats")
        if self.target is None and not self.opponents:
            raise ValueError("bench.target=null is an opponent's loss; use bench.opponents=[nanogpt], or a number")
        if not self.seeds:
            raise ValueError("bench.seeds=[] trains nothing; name one, or three for a spread")
        if len({*self.seeds}) < len(self.seeds) or any(not 0 <= seed < 1 << 64 for seed in self.seeds):
            raise ValueError(f"bench.seeds={self.seeds} must be different, from 0 to 2^64 - 1; use [0,1,2]")


@dataclass
class TimeToLossSettings(Settings):
    bench: TimeToLossConfig = field(default_factory=TimeToLossConfig)
    nanogpt: NanoGPTConfig = field(default_factory=NanoGPTConfig)
    nanochat: NanochatConfig = field(default_factory=NanochatConfig)


@program("config", TimeToLossSettings, experiment="shakespeare", run_dir="runs/bench_time_to_loss")
def main(settings: TimeToLossSettings, run_dir: Path) -> None:
    refuse_to_resume(settings)
    bench = settings.bench
    if unread := [key for key in map(key_of, (*sys.argv[1:], *bench.changes)) if key in INSTEAD]:
        raise ValueError(f"{unread[0]} has no effect here; use {INSTEAD[unread[0]]}")
    quiet = {"eval_every": bench.every, "log_every": bench.every, "sample_tokens": 0, "save_every": 0}
    settings = replace(settings, train=replace(settings.train, **quiet))
    ours = {"ours": settings} | {f"ours, {change}": changed(settings, change) for change in bench.changes}
    # impossible runs are refused here, before anything is trained
    chosen, *others = [resolve(one, run_dir) for one in ours.values()]
    for change, other in zip(bench.changes, others, strict=True):
        if held_out(other.description) != held_out(chosen.description):
            raise ValueError(f"bench.changes={change} changes what is held out: its loss would be of other windows")
    report = Report("time_to_loss", run_dir, chosen.hardware.description)
    opponents: list[Opponent] = [getattr(settings, name) for name in bench.opponents]
    for opponent in opponents:
        opponent.rows(settings.data.seq_len)
        report.more[f"{opponent.NAME}_sha256"] = opponent.sha256
    curves, kept = {}, report.more.setdefault("curves", [])

    def keep(name: str, seed: int, curve: Curve) -> None:
        say(name, seed, curve, bench.target)
        curves[name, seed] = curve
        kept.append({"name": name, "seed": seed, "tokens_seconds_loss": curve})
        report.keep()

    for seed in bench.seeds:
        for name, one in ours.items():
            keep(name, seed, curve_of_ours(one, run_dir / folder_of(name) / f"seed_{seed}", seed))
        for opponent in opponents:
            for lr in opponent.lr:
                keep(at(opponent, lr), seed, curve_of_opponent(settings, chosen, opponent, lr, seed))
    peer = opponents[0].NAME if opponents else ""
    target = bench.target or reached(curves, at(opponents[0], opponents[0].lr[0]))
    report.rows = rows_of(curves, target, peer)
    report.more["target"] = target
    draw(run_dir / "time_to_loss.png", curves, target, chosen.hardware.description)
    title = f"training seconds until {target:.4f} nats a token, held out ({len(bench.seeds)} seeds: mean and sd)"
    shown = table(report.rows, NAMES, FIGURES, title, caption(peer) if peer else "")
    report.finish(shown, expects_figures=False)  # that no run reaches the target is a result


def caption(peer: str) -> str:
    """What the columns of ratios mean."""
    return f"times as fast as {peer} at its own learning rate, and at its best; each is by tokens x by rate"


def at(opponent: Opponent, lr: float) -> str:
    return f"{opponent.NAME}, lr {lr:g}"


def folder_of(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def curve_of_ours(settings: TimeToLossSettings, folder: Path, seed: int) -> Curve:
    """Train ours, with its output in console.txt of its folder."""
    train_aside(replace(settings, train=replace(settings.train, seed=seed)), folder)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # hundreds of megabytes a run, not needed any more
    # the first step, which compiles, has no rate
    records = [r for r in read_run(folder)["records"] if "val_loss" in r and "tokens_per_second" in r]
    curve = [(record["tokens"], record["training_seconds"], record["val_loss"]) for record in records]
    if not curve:
        raise ValueError(
            f"the run in {folder} ended before an evaluation after its first step; raise train.steps, or lower "
            "bench.every or optim.lr"
        )
    return curve


def curve_of_opponent(settings: TimeToLossSettings, chosen: Run, config: Opponent, lr: float, seed: int) -> Curve:
    """Train an opponent until it reaches the target or overfits, at most to the end of its schedule."""
    torch.compiler.reset()
    hardware, dataset = chosen.hardware, chosen.dataset
    held_out = EvaluationSet.of(dataset, chosen.seq_len, settings.train.eval_windows)
    every = max(2, round(settings.bench.every * settings.train.batch_tokens / config.batch_tokens))
    curve: Curve = []
    since, from_step, seconds = 0.0, 0, 0.0
    with contextlib.redirect_stdout(None), contextlib.closing(train_opponent(config, lr, chosen, seed)) as training:
        for step, network in enumerate(training, 1):
            if step > 1 and step % every and step < config.steps:
                continue
            hardware.synchronize()
            if step > 1:  # the first step compiles: it is counted like those after it
                steps = step - (0 if from_step == 1 else from_step)
                seconds += (time.perf_counter() - since) / (step - from_step) * steps
                loss = evaluate(network, held_out, config.rows(chosen.seq_len), hardware)["val_loss"]
                curve.append((step * config.batch_tokens, seconds, loss))
                losses = [loss for *_, loss in curve]
                if losses[-1] <= (settings.bench.target or 0.0) or min(losses[-5:]) > min(losses) + OVERFITS:
                    break
                hardware.synchronize()
            since, from_step = time.perf_counter(), step
    return curve


def crossing(curve: Curve, target: float) -> tuple[float, float] | None:
    """(tokens, seconds) where the loss first reaches `target`; None where it never does."""
    before = (0.0, 0.0, math.inf)
    for point in curve:
        if point[2] <= target:
            share = 1.0 if before[2] == math.inf else (before[2] - target) / (before[2] - point[2])
            return tuple(a + share * (b - a) for a, b in zip(before[:2], point[:2], strict=True))
        before = point
    return None


def reached(curves: dict[tuple[str, int], Curve], contender: str) -> float:
    """The loss that `contender` reaches with every seed."""
    return max(min(loss for *_, loss in curve) for (name, _), curve in curves.items() if name == contender)


def say(name: str, seed: int, curve: Curve, target: float | None) -> None:
    found = crossing(curve, target or 0.0)
    shown = f"{found[1]:.2f} s, {found[0]:,.0f} tokens; " if found else ""
    print(f"{name}, seed {seed}: {shown}least {min(loss for *_, loss in curve):.4f}", flush=True)


NAMES: Columns = {"who": "{name}"}
FIGURES: Columns = {
    "seconds": "{seconds:.2f}",
    "sd": "{seconds_sd:.2f}",
    "tokens": "{tokens:,.0f}",
    "sd ": "{tokens_sd:,.0f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "least loss": "{least_loss:.4f}",
    "sd  ": "{least_loss_sd:.4f}",
    "times": "{times:.2f}",
    "by tokens": "{fewer_tokens:.2f}",
    "by rate": "{rate:.2f}",
    "times best": "{times_best:.2f}",
    "by tokens ": "{fewer_tokens_best:.2f}",
    "by rate ": "{rate_best:.2f}",
}


def rows_of(curves: dict[tuple[str, int], Curve], target: float, peer: str) -> list[Row]:
    """A row for each name: means over its seeds, and how many times as fast as `peer` it is, unless `peer` is empty."""
    rows = []
    for name in dict.fromkeys(name for name, _ in curves):
        own = [curve for (its_name, _), curve in curves.items() if its_name == name]
        rows.append({"name": name, "seeds": len(own), **figures(own, target)})
    its = [row for row in rows if peer and row["name"].startswith(peer)]
    best = min((row for row in its if "seconds" in row), key=lambda row: row["seconds"], default={})
    for row in rows:
        if "seconds" in row and row not in its:
            for other, which in ((its[0] if its else {}, ""), (best, "_best")):
                if "seconds" in other:
                    row[f"fewer_tokens{which}"] = other["tokens"] / row["tokens"]
                    row[f"rate{which}"] = row["tokens_per_second"] / other["tokens_per_second"]
                    row[f"times{which}"] = other["seconds"] / row["seconds"]
    return rows


def figures(curves: list[Curve], target: float) -> Row:
    """Figures over one contender's seeds; where one never reaches the target, `error` says so in place of times."""
    least = [min(loss for *_, loss in curve) for curve in curves]
    row = {"least_loss": statistics.mean(least), "least_losses": least}
    row["tokens_per_second"] = sum(c[-1][0] for c in curves) / sum(c[-1][1] for c in curves)
    found = [crossing(curve, target) for curve in curves]
    if None in found:
        return row | {"error": f"{found.count(None)} of {len(found)} never; least {row['least_loss']:.4f}"}
    tokens, seconds = (list(values) for values in zip(*found, strict=True))
    row |= {"tokens": statistics.mean(tokens), "seconds": statistics.mean(seconds), "all_seconds": seconds}
    row["tokens_per_second"] = row["tokens"] / row["seconds"]
    if len(curves) > 1:
        row |= {"seconds_sd": statistics.stdev(seconds), "tokens_sd": statistics.stdev(tokens)}
        row["least_loss_sd"] = statistics.stdev(least)
    return row


def draw(path: Path, curves: dict[tuple[str, int], Curve], target: float, hardware: str) -> None:
    """Held-out loss against training seconds and tokens: a colour, or its dashes, for each contender; a line a seed."""
    names = list(dict.fromkeys(name for name, _ in curves))
    with picture(path, 1, 2, size=(10, 4.2), title=f"time to a loss, {hardware}", sharey=True) as panels:
        for axes, place, axis in zip(panels, (1, 0), ("training seconds", "tokens"), strict=True):
            for (name, _), curve in curves.items():
                turn, colour = divmod(names.index(name), len(OTHER_COLOURS))
                style = {"color": OTHER_COLOURS[colour], "linestyle": ("-", "--")[turn % 2], "linewidth": 1.2}
                axes.plot([p[place] for p in curve], [p[2] for p in curve], label=name, **style)
            axes.axhline(target, color="0.5", linestyle=":", label=f"{target:.4f}")
            axes.set(xlabel=axis, xlim=(0, None))
        top = max(statistics.median(loss for *_, loss in curve) for curve in curves.values())
        panels[0].set(ylabel="held-out loss, nats a token", ylim=(None, top + 0.3))


if __name__ == "__main__":
    main()
