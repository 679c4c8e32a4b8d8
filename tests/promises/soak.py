"""Nothing grows in a long run: `python -m tests.promises.soak` takes 20,000 tiny steps and often does all else.

Looks at the process between two steps, `soak.samples` times, when no checkpoint is being written: resident memory, open
files, threads, on CUDA the memory of tensors and of PyTorch's allocator; and times every step with all that follows it.
What is seen before `soak.warm_up` of the run is not judged: caches fill, the first checkpoint takes its host copy.

- Memory: the growth from the first sample to the last by the Theil-Sen line (the median of the slopes of all pairs,
  which a few odd samples cannot move), at most `soak.max_growth_mib`.
- Open files and threads: the fewest in the last third of the samples, at most that of the first.
- Step time: the median of the last third of the steps, at most `soak.max_slowdown` times that of the first.

Writes soak.json with every sample. Exit code 1 where something grew. Needs Linux's /proc. Takes the configuration of
train.py as well.
"""

import itertools
import json
import os
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from conf.program import program
from conf.schema import Settings
from train import train
from training.hardware import set_up
from training.provenance import provenance
from training.step import Step
from training.watchdog import wait_for_saves

FAILED = 1  # exit code
# twenty thousand steps of almost no work, with everything that a loop does beside them done often
TINY = (
    "model.num_layers=1", "model.num_heads=1", "model.n_embd=16", "model.dropout=0.1", "logger.wandb=disabled",
    "hardware.num_threads=1",  # tensors this small are not worth a second one
    "data.seq_len=16", "optim.warmup_steps=5", "train.steps=20000", "train.batch_tokens=64", "train.log_every=50",
    "train.eval_every=200", "train.eval_windows=4", "train.save_every=500", "train.sample_every=1000",
    "train.sample_tokens=8",
)  # fmt: skip
FEWEST_SAMPLES = 9  # three in each third


@dataclass
class SoakConfig:
    samples: int = 200  # looks at the process after the warm-up
    warm_up: float = 0.2  # part of the steps that is not judged
    max_growth_mib: float = 4.0  # of memory; a batch of ours kept at each of 16,000 steps would be 16 MiB
    max_slowdown: float | None = 1.25  # last third of the steps to the first; null: shown, not judged

    def __post_init__(self) -> None:
        if self.samples < FEWEST_SAMPLES:
            raise ValueError(f"soak.samples={self.samples} must be at least {FEWEST_SAMPLES}")
        if not 0 <= self.warm_up < 1:
            raise ValueError(f"soak.warm_up={self.warm_up} must lie in [0, 1)")
        if not self.max_growth_mib > 0:
            raise ValueError(f"soak.max_growth_mib={self.max_growth_mib} must be more than 0")
        if self.max_slowdown is not None and not self.max_slowdown >= 1:
            raise ValueError(f"soak.max_slowdown={self.max_slowdown} must be at least 1, or null")


@dataclass
class SoakSettings(Settings):
    soak: SoakConfig = field(default_factory=SoakConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        judged = self.train.steps - round(self.soak.warm_up * self.train.steps)
        if judged < self.soak.samples:
            raise ValueError(
                f"soak.samples={self.soak.samples} is more than the {judged} steps after the warm-up; "
                "raise train.steps or lower it"
            )


@dataclass
class Watched:
    """Called after each step; what was seen: samples after the warm-up, and how long each turn of the loop took."""

    warm_up: int = 0  # steps that are not judged
    every: int = 1  # steps between two samples
    steps: list[int] = field(default_factory=list)
    samples: list[dict[str, int]] = field(default_factory=list)
    seconds: array = field(default_factory=lambda: array("d"))  # 8 bytes a step: a list of floats would itself grow
    before: float | None = None  # the clock after the step before

    @classmethod
    def of(cls, settings: SoakSettings) -> "Watched":
        warm_up = round(settings.soak.warm_up * settings.train.steps)
        return cls(warm_up, (settings.train.steps - warm_up) // settings.soak.samples)

    def __call__(self, step: Step) -> None:
        now = time.perf_counter()
        if self.before is not None and step.number > self.warm_up:
            self.seconds.append(now - self.before)
        if step.number > self.warm_up and (step.number - self.warm_up) % self.every == 0:
            wait_for_saves()  # a slow disk's file and thread would count as left behind
            self.steps.append(step.number)
            self.samples.append(look(step.loss.device))
        self.before = time.perf_counter()


@program("config", SoakSettings, run_dir="runs/soak", overrides=TINY)
def main(settings: SoakSettings, run_dir: Path) -> None:
    console = Console(highlight=False)
    seen = Watched.of(settings)
    train(settings, run_dir / "run", on_step=seen)
    rows = judge(seen, settings)
    report = {
        "passes": all(row["passes"] for row in rows),
        "steps": settings.train.steps,
        "rows": rows,
        "hardware": set_up(settings.hardware).description,
        "provenance": provenance(),
    }
    samples = [{"step": step} | sample for step, sample in zip(seen.steps, seen.samples, strict=True)]
    (run_dir / "soak.json").write_text(json.dumps(report | {"samples": samples}, indent=1) + "\n")
    console.print(table(rows))
    print(json.dumps({"passes": report["passes"], "rows": rows, "folder": str(run_dir)}))
    if not report["passes"]:
        sys.exit(FAILED)


def look(device: torch.device) -> dict[str, int]:
    """What the process holds now: bytes, files, threads."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    sample = {
        "host memory": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
    if device.type == "cuda":
        sample["tensors on the GPU"] = torch.cuda.memory_allocated(device)
        sample["reserved on the GPU"] = torch.cuda.memory_reserved(device)
    return sample


def judge(seen: Watched, settings: SoakSettings) -> list[dict[str, Any]]:
    """A row for each thing that was watched: at first, at last, by how much it grew, and whether it may."""
    config, rows = settings.soak, []
    for name in seen.samples[0]:
        values = np.array([sample[name] for sample in seen.samples], dtype=np.float64)
        if name in ("open files", "threads"):
            before, after = of_thirds(np.min, values)
            grew, limit, unit, scale = after - before, 0.0, "", 1
        else:
            before, after = of_thirds(np.median, values)
            grew = theil_sen(np.array(seen.steps), values) * (seen.steps[-1] - seen.steps[0])
            limit, unit, scale = config.max_growth_mib, "MiB", 2**20
        rows.append(_row(name, unit, before / scale, after / scale, grew / scale, limit))
    before, after = of_thirds(np.median, np.array(seen.seconds) * 1e3)
    limit = float("inf") if config.max_slowdown is None else (config.max_slowdown - 1) * before
    rows.append(_row("step time", "ms", before, after, after - before, limit))
    return rows


def _row(name: str, unit: str, before: float, after: float, grew: float, limit: float) -> dict[str, Any]:
    numbers = {"first_third": before, "last_third": after, "grew": grew, "limit": limit}
    rounded = {key: round(value, 4) if np.isfinite(value) else None for key, value in numbers.items()}
    return {"name": name, "unit": unit, **rounded, "passes": bool(grew <= limit)}


def of_thirds(statistic: Callable[[np.ndarray], float], values: np.ndarray) -> tuple[float, float]:
    """Of the first and of the last third."""
    third = len(values) // 3
    return float(statistic(values[:third])), float(statistic(values[-third:]))


def theil_sen(x: np.ndarray, y: np.ndarray) -> float:
    """The median slope over all pairs of points."""
    pairs = itertools.combinations(range(len(x)), 2)
    return float(np.median([(y[j] - y[i]) / (x[j] - x[i]) for i, j in pairs]))


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(box=box.SIMPLE_HEAD)
    for column in ("", "first third", "last third", "grew by", "at most", "verdict"):
        result.add_column(column, justify="left" if column in ("", "verdict") else "right")
    for row in rows:
        numbers = [f"{row[key]:,.3f} {row['unit']}" for key in ("first_third", "last_third", "grew")]
        limit = "not judged" if row["limit"] is None else f"{row['limit']:,.3f} {row['unit']}"
        result.add_row(row["name"], *numbers, limit, "as it was" if row["passes"] else "GROWS")
    return result


if __name__ == "__main__":
    main()
