"""Does flash attention change the training? `python -m scripts.parity` trains one GPT with each attention and judges.

Each backend trains from the same weights with the same batches and seed, beside two kinds of noise: *null* runs of the
baseline, which are equal in exact arithmetic and round differently, and *seed* runs, the baseline with the batches in
another order. A backend passes when
  - its loss curve is no further from the baseline's than null runs are, over the first ten steps and over all of them
    (tolerance limits, scripts/parity_verdict.py),
  - its final validation loss lies among those of the baseline, its null runs and its seed runs (the same limits),
  - one call on each layer's own q, k, v and dO, before and after training, agrees with naive attention in float32 about
    as well as nulls do, in the run's precision and in float32, also where scores overflow without a running maximum.
The run's folder gets parity.json, parity.png and parity.md, and a folder for each run; wandb gets one group of runs.
`parity.repeats=20` repeats everything for twenty seeds and counts how often each backend passes.
The exit code is the verdict: 0 when all pass, 1 otherwise. The last line is one JSON object.

Without a GPU, flash runs in Triton's interpreter, on a tiny model.
"""

import math
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from conf.program import program
from conf.schema import Settings
from data import TokenBatches
from kernels import naive_attention
from kernels.device import HAS_TRITON
from model import ATTENTION, GPT, attend_with
from scripts.bench.report import Columns, Report, colour, refuse_out_of_range, refuse_unknown, table
from scripts.parity_verdict import EARLY, Recorded, compare, fault, final_losses, judge, limits_of, noise, stress
from scripts.variants import MUTANTS, Attention, nulls, refuse_to_resume, train_once
from training.checkpoint import open_checkpoint
from training.curves import picture
from training.hardware import set_up
from training.run import resolve

FAILED = 1  # exit code


@dataclass
class ParityConfig:
    attention: list[str] = field(default_factory=lambda: ["tiled", "sdpa", "flash"])  # compared with naive
    mutants: list[str] = field(default_factory=list)  # wrong on purpose: names in scripts/variants.py
    nulls: int = 8  # runs of the baseline that differ by rounding alone, 4 to 20
    seeds: int = 4  # runs of the baseline with the batches in another order, at least 2
    repeats: int = 1  # of everything, with seeds train.seed, train.seed + 1, ...: how often does a right backend pass?

    def __post_init__(self) -> None:
        refuse_unknown("parity.", self, attention=ATTENTION, mutants=MUTANTS)
        if not self.attention:
            raise ValueError("parity.attention=[] judges nothing; name one, as parity.attention=[flash]")
        if not 4 <= self.nulls <= 20:
            raise ValueError(f"parity.nulls={self.nulls} must be 4 to 20: the tolerance factors end there")
        refuse_out_of_range("parity.", self, "repeats")
        if self.seeds < 2:
            raise ValueError(f"parity.seeds={self.seeds} must be at least 2: a spread needs two")


@dataclass
class ParitySettings(Settings):
    parity: ParityConfig = field(default_factory=ParityConfig)


@program("config", ParitySettings, experiment="parity", run_dir="runs/parity")
def main(settings: ParitySettings, run_dir: Path) -> None:
    refuse_to_resume(settings)
    if HAS_TRITON and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, which is later
        if "flash" in settings.parity.attention:
            print("no GPU: flash runs in Triton's interpreter, which is right and very slow")
    repeats = settings.parity.repeats
    if not (run_parity(settings, run_dir)["passes"] if repeats == 1 else repeat(settings, run_dir, repeats)):
        sys.exit(FAILED)


def repeat(settings: ParitySettings, run_dir: Path, repeats: int) -> bool:
    """Whether each backend passes in at least 95 % of the repeats, and no mutant in any; the counts are written."""
    passed = dict.fromkeys((*settings.parity.attention, *settings.parity.mutants), 0)
    for number in range(repeats):
        one = replace(settings, train=replace(settings.train, seed=settings.train.seed + number))
        for name, verdict in run_parity(one, run_dir / f"seed_{one.train.seed}")["verdicts"].items():
            passed[name] += verdict["passes"]
    rows = [{"attention": name, "passed": count, "repeats": repeats} for name, count in passed.items()]
    report = Report("repeats", run_dir, set_up(settings.hardware).description)
    report.more = {"repeats": repeats, "passed": passed}
    report.finish(table(rows, {"attention": "{attention}"}, {"passed": "{passed} of {repeats}"}))
    true = [passed[name] for name in settings.parity.attention]
    return min(true) >= 0.95 * repeats and not any(passed[name] for name in settings.parity.mutants)


def run_parity(settings: ParitySettings, run_dir: Path) -> dict:
    """Train, judge, write what was found into `run_dir`, and return it."""
    if settings.model.name is not None:
        raise ValueError(
            f"model.name={settings.model.name} has layers of its own, in which no attention can be put in place of "
            "another; leave it out"
        )
    model = settings.model
    beyond = {
        "model.window": (model.window, None), "model.mask": (model.mask, None), "model.qk_gain": (model.qk_gain, 1.0),
        "data.document_mask": (settings.data.document_mask, False),
    }  # fmt: skip
    for key, (value, judged) in beyond.items():
        if value != judged:
            raise ValueError(f"{key}={value} is not judged: calls are compared as plain causal attention; leave it out")
    if settings.model.attention_dropout and settings.parity.mutants:
        raise ValueError("parity.mutants know no dropout; use model.attention_dropout=0 with them")
    settings = with_one_micro_batch(settings, run_dir)
    head_dim, device = settings.model.head_dim, set_up(settings.hardware).device
    disguises = nulls(settings.parity.nulls, settings.data.seq_len, head_dim, device)
    plan = plan_runs(settings, run_dir, disguises)
    runs, curves = {}, {}  # name -> a run's entry in the report, and its losses
    for number, (name, (changed, attend)) in enumerate(plan.items(), 1):
        print(f"[{number}/{len(plan)}] {name}", end=" ", flush=True)
        runs[name] = train_once(changed, run_dir / folder_of(name), attend)
        curves[name] = runs[name].pop("losses")
        print(f"validation loss {runs[name]['val_loss']:.6f}, {runs[name]['seconds']:.1f} s", flush=True)
        judged = name in (*settings.parity.attention, *settings.parity.mutants)
        if not judged and not all(map(math.isfinite, (*curves[name], runs[name]["val_loss"]))):
            raise ValueError(
                f"the baseline's own run ({name}) has a loss that is not finite, so nothing can be compared with it; "
                "lower optim.lr, or use hardware.dtype=float32"
            )

    baseline = curves["naive"]
    allowed, band = noise([losses for name, losses in curves.items() if name.startswith("null")], baseline)
    final = final_losses([run["val_loss"] for n, run in runs.items() if n.startswith(("naive", "null", "seed"))])
    places, dropout = record_both(settings, run_dir), settings.model.attention_dropout
    options = {"dropout_p": dropout, "dropout_seed": 0} if dropout else {}
    torch.set_float32_matmul_precision("highest")  # TF32 would hide what float32 can show; a run sets its own
    rounded = [naive_attention, *disguises.values()]
    limits = {}
    for place, recorded in places.items():
        rows = [compare(f, recorded, options) for f in rounded]
        limits[place] = limits_of(rows, [stress(f, recorded, options) for f in rounded])
    verdicts = {}
    for name in (*settings.parity.attention, *settings.parity.mutants):
        attend = MUTANTS[name][0] if name in MUTANTS else ATTENTION[name]
        verdict = judge(curves[name], baseline, allowed, band)
        verdict["val_loss"] = runs[name]["val_loss"]
        verdict["ends_near"] = abs(verdict["val_loss"] - final["center"]) <= final["limit"]
        verdict["rows"] = {place: compare(attend, recorded, options) for place, recorded in places.items()}
        found = {
            place: fault(verdict["rows"][place], stress(attend, recorded, options), limits[place])
            for place, recorded in places.items()
        }
        verdict["fault"] = next((f"{place}: {what}" for place, what in found.items() if what), None)
        verdict["passes"] = verdict["passes"] and verdict["ends_near"] and verdict["fault"] is None
        verdicts[name] = verdict

    found = {
        "passes": all(verdict["passes"] for verdict in verdicts.values()),
        "noise": allowed,
        "final": final,
        "limits": limits,
        "verdicts": verdicts,
        "runs": runs,
    }
    hardware = set_up(settings.hardware).description
    draw(found, curves, band, run_dir / "parity.png", hardware)
    write(found, run_dir, hardware)
    return found


def with_one_micro_batch(settings: ParitySettings, run_dir: Path) -> ParitySettings:
    """`settings` with the largest micro-batch that fits with every attention; all runs use it.

    Raises:
        ValueError: an attention cannot run. It is raised before anything is trained.
    """
    found = []
    for name in ("naive", *settings.parity.attention):
        one = replace(settings, model=replace(settings.model, attention=name))
        found.append(resolve(one, run_dir / folder_of(name)).micro_batch)
    return replace(settings, train=replace(settings.train, micro_batch=min(found)))


def plan_runs(
    settings: ParitySettings, run_dir: Path, disguises: dict[str, Attention]
) -> dict[str, tuple[ParitySettings, Attention | None]]:
    """name -> the run's settings, and what is called in place of its attention."""
    config, seed = settings.parity, settings.train.window_seed
    mutants = {name: MUTANTS[name][0] for name in config.mutants}
    orders = {f"seed {number}": seed + number for number in range(1, config.seeds + 1)}
    group = settings.logger.group or f"parity {run_dir.name}"
    plan = {}
    for name in ("naive", *disguises, *orders, *config.attention, *mutants):
        model = replace(settings.model, attention=name if name in config.attention else "naive")
        train = replace(settings.train, data_seed=orders.get(name, seed))
        logger = replace(settings.logger, group=group, tags=[*settings.logger.tags, "parity", name])
        plan[name] = replace(settings, model=model, train=train, logger=logger), (disguises | mutants).get(name)
    return plan


def folder_of(name: str) -> str:
    return name.partition(":")[0].replace(" ", "_")


def record_both(settings: ParitySettings, run_dir: Path) -> dict[str, Recorded]:
    """Each layer's q, k, v and dO on the first batch: with the initial weights, and with the baseline's last.

    A run in 16 bits has each place twice, also in float32: that shows what 16 bits round away, a scale 1 % too large.
    """
    # without recomputation each layer is called once
    model = replace(settings.model, attention="naive", activation_checkpointing="none")
    run = resolve(replace(settings, model=model), run_dir / "naive")
    hardware = run.hardware
    batches = TokenBatches(run.dataset.train, run.seq_len, run.micro_batch, settings.train.window_seed)
    inputs, targets = (x.to(hardware.device) for x in batches.batch(0))
    kept: Recorded = []

    def recorder(q, k, v, **options):
        o = naive_attention(q, k, v, causal=True, dropout_p=options["dropout_p"])
        place = len(kept)
        kept.append((q.detach(), k.detach(), v.detach(), o.detach()))
        o.register_hook(lambda do: kept.__setitem__(place, (*kept[place][:3], do.detach())))
        return o

    places = {}
    for place in ("before training", "after training"):
        torch.manual_seed(settings.train.seed)
        model = GPT(run.model, run.vocab_size, run.seq_len, device=hardware.device)
        if place == "after training":
            open_checkpoint(str(run_dir / "naive" / "checkpoints" / "last")).load_weights(model)
        with attend_with(model, lambda layer, named: recorder), hardware.autocast():
            loss = model(inputs, targets) / targets.numel()
        loss.backward()
        places[place] = list(kept)
        if hardware.dtype != torch.float32:
            places[f"{place}, called in float32"] = [tuple(x.float() for x in layer) for layer in kept]
        kept.clear()
    return places


VERDICT: Columns = {
    "verdict": "{verdict}",
    "distance, first steps": "{distances[early]:.2e}",
    "all steps": "{distances[whole]:.2e}",
    "leaves the band": "{leaves}",
    "validation loss": "{val_loss:.5f}{outside}",
}


def write(found: dict, run_dir: Path, hardware: str) -> None:
    """Write the report: each attention's verdict, where it parts from naive if it does, and how large the noise is."""
    rows = [
        {
            "attention": name,
            "verdict": "pass" if verdict["passes"] else "FAIL",
            "outside": "" if verdict["ends_near"] else " (outside)",
            "leaves": "never" if verdict["first_outside"] is None else f"at step {verdict['first_outside']}",
        }
        | verdict
        for name, verdict in found["verdicts"].items()
    ]
    allowed, final = found["noise"], found["final"]
    early, whole = allowed["early"], allowed["whole"]
    said = [
        f"{'PASS' if found['passes'] else 'FAIL'}. {allowed['runs']} null runs are {early['typical']:.2e} nats from "
        f"naive over the first steps, at most {EARLY}, and {whole['typical']:.2e} over all (geometric means).",
        f"Up to {early['limit']:.2e} and {whole['limit']:.2e} is noise: limits that cover {allowed['content']:.0%} of "
        f"such runs with {allowed['confidence']:.0%} confidence (mean + {allowed['k']} sd of the logarithms). No "
        "smaller difference could have been seen.",
        f"By the same limits, {final['runs']} runs of naive, nulls and seeds among them, put a right attention's final "
        f"validation loss within {final['limit']:.5f} nats of {final['center']:.5f}.",
        *(f"{row['attention']} parts from naive {row['fault']}." for row in rows if row["fault"]),
    ]
    shown = table(rows, {"attention": "{attention}"}, VERDICT, "distance from naive, nats", "\n\n".join(said))
    Report("parity", run_dir, hardware, more=found).finish(shown, last={"passes": found["passes"]})


def draw(report: dict, curves: dict[str, list[float]], band: list[float], path: Path, hardware: str) -> None:
    """Draw the loss curves in one panel; below, their distances to the baseline over the band of noise."""
    baseline = curves["naive"]
    apart = {name: [max(abs(a - b), 1e-8) for a, b in zip(c, baseline, strict=True)] for name, c in curves.items()}
    steps = range(1, len(baseline) + 1)
    title = f"loss parity: {'pass' if report['passes'] else 'FAIL'} ({hardware})"
    with picture(path, 2, 1, size=(8, 6.5), title=title, sharex=True) as (upper, lower):
        for name, losses in curves.items():
            if name.startswith("seed"):
                upper.plot(steps, losses, color="0.8", linewidth=1)
            if name.startswith("null"):
                lower.plot(steps, apart[name], color="0.75", linewidth=0.7)
        upper.plot([], [], color="0.8", label="naive, other order of the batches")
        lower.plot([], [], color="0.75", label="naive, other rounding (nulls)")
        upper.plot(steps, baseline, color=colour("naive", 0), linewidth=2.5, label="naive")
        lower.fill_between(steps, 1e-8, band, color="0.93", label="band of noise")
        for number, name in enumerate(report["verdicts"]):
            style = {"color": colour(name, number), "linewidth": 1.2, "label": name}
            upper.plot(steps, curves[name], linestyle=(2 * number, (4, 4)), **style)
            lower.plot(steps, apart[name], **style)
        lower.set(yscale="log", xlabel="step", ylabel="|loss - naive's|, nats")
        lower.set_ylim(1e-8, 10)  # the band may be wider than any loss
        upper.set_ylabel("training loss, nats a token")


if __name__ == "__main__":
    main()
