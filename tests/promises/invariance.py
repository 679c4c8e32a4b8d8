"""What watches a run does not change it: `python -m tests.promises.invariance`, a matrix of digests.

One run with everything that can be off switched off, then one run for each thing that can be on: evaluation, samples,
logging, profiling, saving, recomputed activations, other threads that tokenize. After each step its batch, every
random stream, the loss, the weights and the optimizer's state are hashed; all must have the bits of the first run at
every step. Two last runs show that the comparison sees: their evaluation draws a random number.

Writes invariance.md (the table), invariance.json (every digest) and each run's folder. Exit code 1 where a run
differs, or where a planted draw is not seen. Takes the configuration of train.py, but for what it switches itself.
"""

import contextlib
import copy
import hashlib
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import train as trainer
from conf.program import program
from conf.schema import Settings
from model.recompute import MODES
from scripts.bench.report import origin_line
from training import stepper
from training.hardware import set_up
from training.profile import STEPS_NEEDED
from training.provenance import provenance
from training.random_states import random_states
from training.step import Step

FAILED = 1  # exit code
BASELINE = "nothing"
# a tiny GPT that draws random numbers wherever it can: what is watched must not move them
TINY = (
    "model.num_layers=2", "model.num_heads=2", "model.n_embd=32", "model.dropout=0.1", "model.attention_dropout=0.1",
    "hardware.compile=false",  # recomputed activations have the bits of kept ones where the same kernels run twice
    "hardware.num_threads=1",  # tensors this small are not worth a second one
    "data.seq_len=32", "optim.warmup_steps=5", "train.steps=50", "train.batch_tokens=256", "train.micro_batch=4",
    "train.eval_windows=8",
)  # fmt: skip
Digests = list[dict[str, str]]  # one a step: part -> digest

# the first run: nothing that a run can do without
QUIET = {
    "train.eval_every": 0, "train.sample_every": 0, "train.sample_tokens": 0, "train.save_every": 0,
    "model.activation_checkpointing": "none", "data.num_workers": 1, "logger.wandb": "disabled", "profile": False,
    "resume": None,
}  # fmt: skip
EVALUATES = {"train.eval_every": 3}
# intervals that do not divide each other, so that what is done after a step varies
TOGGLES: dict[str, dict[str, Any]] = {
    "evaluation": EVALUATES,
    "samples": {"train.sample_every": 7, "train.sample_tokens": 8},
    "logging": {"train.log_every": 1},
    "wandb": {"train.log_every": 4, "logger.wandb": "offline"},
    "profiling": {"profile": True},
    "saving": {"train.save_every": 2, "train.keep_last": 1, "train.keep_every": 10},
    **{f"recompute {mode}": {"model.activation_checkpointing": mode} for mode in MODES if mode != "none"},
    "threads that tokenize": {"data.num_workers": 4},
}
TOGGLES["everything"] = {key: value for toggle in TOGGLES.values() for key, value in toggle.items()}


@dataclass
class InvarianceConfig:
    only: list[str] = field(default_factory=list)  # rows of the matrix; empty: all

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in TOGGLES:
                raise ValueError(f"invariance.only={name} is unknown; use some of {', '.join(TOGGLES)}")


@dataclass
class InvarianceSettings(Settings):
    invariance: InvarianceConfig = field(default_factory=InvarianceConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.steps < STEPS_NEEDED:
            raise ValueError(f"train.steps={self.train.steps} must be at least {STEPS_NEEDED}, as one run is profiled")


@program("config", InvarianceSettings, run_dir="runs/invariance", overrides=TINY)
def main(settings: InvarianceSettings, run_dir: Path) -> None:
    report = compare(settings, run_dir)
    (run_dir / "invariance.json").write_text(json.dumps(report, indent=1) + "\n")
    (run_dir / "invariance.md").write_text(page(report))
    show(report, Console(highlight=False))
    rows = {name: row["verdict"] for name, row in report["rows"].items()}
    print(json.dumps({"passes": report["passes"], "rows": rows, "folder": str(run_dir)}))
    if not report["passes"]:
        sys.exit(FAILED)


def compare(settings: InvarianceSettings, run_dir: Path) -> dict[str, Any]:
    """The matrix: name -> what was switched, the verdict, its digests; and whether all is as it should be."""
    quiet = QUIET | {"train.log_every": settings.train.steps}
    chosen = {name: toggle for name, toggle in TOGGLES.items() if name in (settings.invariance.only or TOGGLES)}
    baseline = run(settings, run_dir / BASELINE, quiet)
    rows = {BASELINE: {"switched": {}, "verdict": "the run to compare with", "as_expected": True, "steps": baseline}}
    for name, toggle in chosen.items():
        steps = run(settings, run_dir / name.replace(" ", "_"), quiet | toggle)
        found = first_difference(steps, baseline)
        verdict = found or f"the same bits at all {len(steps)} steps"
        rows[name] = {"switched": toggle, "verdict": verdict, "as_expected": found is None, "steps": steps}
    for name, draw in PLANTED.items():
        with mock.patch.object(stepper, "evaluate", drawing(draw)):
            steps = run(settings, run_dir / name.replace(" ", "_"), quiet | EVALUATES)
        found = first_difference(steps, baseline)
        rows[name] = {
            "switched": EVALUATES,
            "verdict": f"seen: {found}" if found else "NOT SEEN",
            "as_expected": found is not None,
            "steps": steps,
        }
    for row in rows.values():
        row["digest"] = digest(row["steps"])
    return {
        "passes": all(row["as_expected"] for row in rows.values()),
        "hardware": set_up(settings.hardware).description,
        "provenance": provenance(),
        "rows": rows,
    }


def run(settings: InvarianceSettings, folder: Path, changes: dict[str, Any]) -> Digests:
    """Train with `changes` in a folder of its own and return the digests of every step."""
    settings = copy.deepcopy(settings)
    # a cache that another number of threads filled would be read, not made
    settings.data.cache_dir = str(folder.parent / f"cache_{changes['data.num_workers']}")
    for key, value in changes.items():
        *group, name = key.split(".")
        setattr(getattr(settings, group[0]) if group else settings, name, value)
    folder.mkdir(parents=True)
    digests: Digests = []
    with (folder / "console.txt").open("w") as text, contextlib.redirect_stdout(text):
        trainer.train(settings, folder, on_step=lambda step: digests.append(digests_of(step)))
    return digests


def digests_of(step: Step) -> dict[str, str]:
    """Of what the step began with, of the random streams as it left them, and of what it made."""
    found = {"batch": digest(step.batch)}
    for name, state in random_states(step.loss.device).items():  # repr: exact for numbers, and fast
        found[f"random stream {name}"] = digest(state if isinstance(state, torch.Tensor) else repr(state))
    made = {"loss": step.loss, "gradient norm": step.grad_norm, "weights": step.optimizer.parameters}
    made["optimizer"] = step.optimizer.state_dict()
    return found | {part: digest(value) for part, value in made.items()}


def digest(value: Any) -> str:
    """The first 12 hex digits of the SHA-256 of nested containers and tensors, by their bits."""
    sha = hashlib.sha256()
    _feed(sha.update, value)
    return sha.hexdigest()[:12]


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        for key, item in value.items():
            update(f"{key}:".encode())
            _feed(update, item)
    elif isinstance(value, list | tuple):
        update(f"{len(value)}[".encode())
        for item in value:
            _feed(update, item)
    else:
        update(f"{value!r},".encode())


def first_difference(steps: Digests, baseline: Digests) -> str | None:
    """The first step that is another one, and what is other in it, in the order in which a step reads and writes."""
    for number, (ours, theirs) in enumerate(zip(steps, baseline, strict=False), start=1):
        if parts := [part for part in theirs if ours[part] != theirs[part]]:
            return f"differs from step {number} on: {', '.join(parts)}"
    if len(steps) != len(baseline):
        return f"{len(steps)} steps in place of {len(baseline)}"
    return None


def drawing(draw: Callable[[], Any]) -> Callable[..., dict[str, float]]:
    """evaluate() with a mistake: it draws a number from a stream that training draws from, or a resumed run keeps."""
    real = stepper.evaluate

    def evaluate(model, windows, micro_batch, hardware, end_of_text=None):
        draw()
        return real(model, windows, micro_batch, hardware, end_of_text)

    return evaluate


# the CPU's stream on a GPU too: each step begins the GPU's anew from it (training/random_states.py)
PLANTED = {"planted torch.rand": lambda: torch.rand(1), "planted random.random": random.random}


def page(report: dict[str, Any]) -> str:
    """The matrix as Markdown, and below it the digests of the first run, which all others have."""
    lines = [
        f"# What watches a run does not change it: {'pass' if report['passes'] else 'FAIL'}",
        "",
        origin_line(report),
        "",
        "| switched on | setting | all digests of all steps | verdict |",
        "|---|---|---|---|",
    ]
    for name, row in report["rows"].items():
        setting = "what each row switches" if name == "everything" else _setting(row["switched"])
        lines.append(f"| {name} | {setting} | {row['digest']} | {row['verdict']} |")
    steps = report["rows"][BASELINE]["steps"]
    lines += ["", f"| step | {' | '.join(steps[0])} |", "|---" * (1 + len(steps[0])) + "|"]
    lines += [f"| {number} | {' | '.join(step.values())} |" for number, step in enumerate(steps, start=1)]
    return "\n".join(lines) + "\n"


def _setting(switched: dict[str, Any]) -> str:
    return " ".join(f"`{key}={value}`" for key, value in switched.items())


def show(report: dict[str, Any], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("switched on", "digest", "verdict"):
        table.add_column(column, overflow="fold")
    for name, row in report["rows"].items():
        table.add_row(name, row["digest"], row["verdict"])
    console.print(table)


if __name__ == "__main__":
    main()
