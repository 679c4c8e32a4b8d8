"""Runs compared with each other: their names, their picture and their table.

A run may be finished, under way or killed; the runs of a sweep are named by the settings that differ between them.
"""

import math
from collections.abc import Mapping, MutableSequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from training.curves import curve, draw_losses, picture, read_run
from training.lock import holder, sweep_of

# key of a record -> label of its axis. Not wall time: a sweep's first run starts up and compiles for all that follow
MEASURES = {"step": "steps", "tokens": "tokens", "training_seconds": "seconds of training steps"}
_NOT_COMPARED = ("logger", "resume", "profile")  # settings that change nothing of what is trained


def runs_below(folder: Path) -> list[Path]:
    """`folder` itself if it is a run's; if it is a sweep's, or of one name, the folders of its runs in their order."""
    for pattern in ("metrics.jsonl", "*/metrics.jsonl", "*/*/metrics.jsonl"):
        runs = [file.parent for file in folder.glob(pattern)]
        if runs:
            of_sweeps = [file.parent for file in folder.glob(f"*/{pattern}")]  # sweeps' runs, beside single ones
            runs += [run for run in of_sweeps if sweep_of(run)]
            shown = list(filter(_has_a_line, runs)) or runs
            for run in sorted({*runs} - {*shown}):
                print(f"left out: {run} has no line of metrics yet")
            return sorted(shown, key=lambda run: (run.parent, len(run.name), run.name))
    return [folder]


def _has_a_line(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        return False
    with metrics.open("rb") as file:
        return file.readline().endswith(b"\n")


def state(run: dict[str, Any]) -> str:
    """running | finished | stopped by ... | its end not saved | killed."""
    summary = run["summary"]
    if holder(run["folder"]):
        return "running"
    if summary.get("steps", 0) < run["records"][-1]["step"]:  # none, or that of an earlier stop
        return "killed"
    if summary.get("unsaved"):
        return "its end not saved"
    return f"stopped by {summary['stopped']}" if summary.get("stopped") else "finished"


def labels(folders: list[Path]) -> list[str]:
    """A name for each run: the settings in which they differ, `optim.lr=1e-3`; else its folder.

    Where the runs of a sweep differ in more than three settings, only as many are named as distinguish them.
    """
    by_folder = ["/".join(folder.resolve().parts[-2:]) for folder in folders]
    if len(folders) == 1 or not all((folder / "config.yaml").is_file() for folder in folders):
        return by_folder
    settings = [settings_of(folder) for folder in folders]
    keys = list(dict.fromkeys(key for each in settings for key in each if key.split(".")[0] not in _NOT_COMPARED))
    keys = [key for key in keys if len({_shown(each.get(key)) for each in settings}) > 1]
    if len(keys) > 3 and len({folder.resolve().parent for folder in folders}) == 1:
        keys = _distinguishing(keys, settings)
    named = [", ".join(f"{key}={_shown(each.get(key))}" for key in keys) for each in settings]
    return named if 0 < len(keys) <= 3 and len(set(named)) == len(named) else by_folder


def _distinguishing(keys: list[str], settings: list[dict[str, Any]]) -> list[str]:
    """The `keys`, in their order, that distinguish runs which the keys before them do not."""
    chosen: list[str] = []
    for key in keys:
        apart = [len({tuple(_shown(s.get(k)) for k in some) for s in settings}) for some in (chosen, [*chosen, key])]
        if apart[1] > apart[0]:
            chosen.append(key)
    return chosen


def settings_of(folder: Path) -> dict[str, Any]:
    """What a run's config.yaml says, flat; ValueError where it is damaged."""
    file = folder / "config.yaml"
    try:
        return flat(yaml.safe_load(file.read_text()))
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is damaged; delete it, and the run is named by its folder alone") from error


def forked_from(folder: Path) -> str | None:
    """The checkpoint that the run in `folder` went on from, as `resume` named it; None once it has one of its own."""
    if not (folder / "config.yaml").exists() or any(folder.glob("checkpoints/step_*")):
        return None
    origin = settings_of(folder).get("resume")
    return None if origin == "auto" else origin


def flat(settings: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        values |= flat(value, f"{group}{key}.") if isinstance(value, Mapping) else {f"{group}{key}": value}
    return values


def _shown(value: Any) -> str:
    """A value as typed, with no more digits than tell runs apart."""
    return as_typed(float(f"{value:.6e}") if isinstance(value, float) else value)


def as_typed(value: Any) -> str:
    """A value as one would type it: 1e-3 in place of 0.001."""
    if isinstance(value, MutableSequence):
        return f"[{','.join(map(as_typed, value))}]"
    if not isinstance(value, float) or not math.isfinite(value):
        return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    mantissa, exponent = f"{Decimal(repr(value)):e}".split("e")
    scientific = f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    return min(repr(value).removesuffix(".0"), scientific, key=len)


def draw_runs(runs: list[dict[str, Any]], names: list[str], path: Path) -> None:
    """Draw the losses of all runs against steps, tokens and the time of their steps."""
    from matplotlib.ticker import EngFormatter

    with picture(path, 1, len(MEASURES), size=(13, 4.2), sharey=True) as panels:
        for axes, (measure, axis) in zip(panels, MEASURES.items(), strict=True):
            for number, (run, name) in enumerate(zip(runs, names, strict=True)):
                draw_losses(axes, run, measure, f"C{number}", "" if len(runs) == 1 else name)
            axes.set_xlabel(axis)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        panels[0].set_ylabel("loss, nats per token")
        if len(runs) > 1:
            panels[0].plot([], [], color="0.3", alpha=0.5, linewidth=1, label="training")
            panels[0].plot([], [], color="0.3", marker="o", markersize=4, label="validation")


def compare(folders: list[Path], path: Path) -> dict[str, Any]:
    """Draw all runs into one picture at `path`, print a table of them, return what it shows.

    Raises:
        ValueError: a folder holds no run (`read_run`), or a damaged one; `path` cannot be written.
    """
    runs, names = [read_run(folder) for folder in folders], labels(folders)
    described = [folder for folder in folders if (folder / "config.yaml").is_file()]
    tokenizers = {settings_of(folder).get("tokenizer") for folder in described}
    try:
        draw_runs(runs, names, path)
    except OSError as error:
        raise ValueError(f"out={path} cannot be written ({error.strerror}); name another") from error
    except ValueError as error:  # matplotlib's, about the suffix
        raise ValueError(f"out={path} cannot be drawn ({error}); use {path.with_suffix('.png')}") from error
    far = {measure: [max(curve(run, "loss", measure)[0], default=None) for run in runs] for measure in MEASURES}
    places = {measure: min((one for one in far[measure] if one is not None), default=0) for measure in MEASURES}
    rows = [_row(run, name, places) for run, name in zip(runs, names, strict=True)]
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = {
        ("run", "run"): "{}",
        ("state", "state"): "{}",
        ("steps", "steps"): "{:,}",
        ("tokens", "tokens"): "{:,.0f}",
        ("seconds\nin all", "seconds"): "{:,.1f}",
        ("tok/s", "tokens_per_second"): "{:,}",
        ("GiB", "peak_memory_gib"): "{:.1f}",
        ("validation\nloss", "val_loss"): "{:.4f}",
        ("bits\nper byte", "val_bits_per_byte"): "{:.3f}",
        (f"training loss\nat step {places['step']:,}", "loss_at_equal_step"): "{:.4f}",
        (f"\n{places['tokens']:,.0f} tokens", "loss_at_equal_tokens"): "{:.4f}",
        (f"\n{places['training_seconds']:,.1f} s of steps", "loss_at_equal_training_seconds"): "{:.4f}",
    }
    columns = {column: form for column, form in columns.items() if any(row[column[1]] is not None for row in rows)}
    for heading, key in columns:
        shown.add_column(heading, justify="left" if key in ("run", "state") else "right", no_wrap=True)
    for row in rows:
        cells = ((row[key], form) for (_, key), form in columns.items())
        shown.add_row(*("-" if value is None else form.format(value) for value, form in cells))
    console = Console(highlight=False, markup=False, emoji=False)
    # figures are never cut: a terminal wraps what does not fit
    console.width = max(console.width, console.measure(shown, options=console.options.update(width=10_000)).maximum)
    console.print(shown)
    if len(tokenizers) > 1:
        console.print("the runs have different tokenizers: a token of one is not one of another; compare bits per byte")
    console.print(f"the curves over each other are in {path}", soft_wrap=True)
    return {"picture": str(path), "equal": places, "runs": rows}


def show_sweep(folders: list[Path]) -> None:
    """At a sweep's end, print the table of its runs and where their picture is, or why there is none."""
    if runs := list(filter(_has_a_line, folders)):
        try:
            compare(runs, runs[0].parent / "compare.png")
        except ValueError as error:  # the runs are complete all the same
            print(f"not compared: {error} (python -m scripts.compare {runs[0].parent} out=FILE)")


def _row(run: dict[str, Any], name: str, places: dict[str, float]) -> dict[str, Any]:
    """A line of the table; a figure that is not known is None."""
    last, rates = run["records"][-1], sorted(curve(run, "tokens_per_second")[1])
    newest = {key: curve(run, key)[1] for key in ("val_loss", "val_perplexity", "val_bits_per_byte")}
    row = {
        "run": name,
        "state": state(run),
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": round(run["summary"].get("seconds", last["seconds"]), 1),
        "tokens_per_second": round(rates[len(rates) // 2]) if rates else None,
        "peak_memory_gib": max(curve(run, "peak_memory_gib")[1], default=None),
    }
    row |= {key: values[-1] if values else None for key, values in newest.items()}
    return row | {f"loss_at_equal_{measure}": loss_at(run, measure, place) for measure, place in places.items()}


def loss_at(run: dict[str, Any], measure: str, place: float) -> float | None:
    """The training loss at `place`, interpolated linearly between records; None before the first one."""
    far, losses = curve(run, "loss", measure)
    return float(np.interp(place, far, losses)) if far and place >= far[0] else None
