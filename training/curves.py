"""The curves of a run, read from its folder alone, and their picture `loss.png`.

In every picture each run has a colour; a thin pale line is its training loss, a strong one with dots its validation
loss. A run may be under way or killed when it is read: half a last line is left out.
"""

import gc
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SHARE_OF_TIME = 0.02  # largest share of a run's time that drawing may take
_FEW_POINTS = 10  # fewer points are marked as dots on their line
# matplotlib's first import logs about fonts, and about a home that cannot be written to, among the steps' lines
logging.getLogger("matplotlib").setLevel(logging.ERROR)


def read_run(folder: Path) -> dict[str, Any]:
    """A run's "records", each with "step", "tokens" and "seconds", and its "summary", {} while it has none.

    "seconds" are all that were spent on the run, "training_seconds" those of its steps (`_add_training_seconds`).

    Raises:
        ValueError: there is no run, it has no record yet, or its files are damaged.
    """
    metrics, summary = folder / "metrics.jsonl", folder / "summary.json"
    if not metrics.is_file():
        found = "is a file" if folder.is_file() else "has no metrics.jsonl"
        raise ValueError(f"{folder} {found}; give the folder of a run (runs/<experiment>/<time>)")
    *lines, _ = metrics.read_bytes().split(b"\n")
    if not lines:
        raise ValueError(f"{metrics} has no line yet; wait for the run's first step, or leave {folder} out")
    try:
        records = [json.loads(line) for line in lines]
        found = json.loads(summary.read_text()) if summary.is_file() else {}
        tokens_a_step = next((r["tokens"] / r["step"] for r in records if "tokens" in r), 0)
        seconds = 0.0
        for record in records:  # records of an evaluation alone have no time of their own
            seconds = record.setdefault("seconds", seconds)
            record.setdefault("tokens", record["step"] * tokens_a_step)
        places = [record[key] for record in records for key in ("step", "tokens", "seconds")]
        places += [found.get(key, 0) for key in ("steps", "seconds")]
        values = [value for record in records for value in record.values() if value is not None]
        if wrong := [value for value in places + values if not isinstance(value, int | float)]:
            raise TypeError(f"{wrong[0]!r} is no number")
        _add_training_seconds(records)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{metrics} or {summary.name} is damaged ({error}); leave {folder} out") from error
    return {"folder": folder, "records": records, "summary": found}


def _add_training_seconds(records: list[dict[str, Any]]) -> None:
    """Give each record the time of the steps up to it, without what is between them (training/speed.py): start-up,
    compilation, evaluation, saving.

    Steps without a rate, such as a process's first one, which compiles, count at the rate of those after them. A run
    without any rate has no such time.
    """
    rates = [record.get("tokens_per_second") for record in records]
    rate = next(filter(None, reversed(rates)), None)
    if rate is None:
        return
    for place in reversed(range(len(records))):
        rate = rates[place] = rates[place] or rate
    seconds, tokens = 0.0, 0
    for record, rate in zip(records, rates, strict=True):
        seconds += (record["tokens"] - tokens) / rate
        tokens = record["tokens"]
        record["training_seconds"] = seconds


def curve(run: dict[str, Any], key: str, measure: str = "step") -> tuple[list[float], list[float]]:
    """(how far, value) of one metric, against "step", "tokens", "seconds" or "training_seconds"."""
    known = [record for record in run["records"] if record.get(key) is not None and measure in record]
    points = [(record[measure], record[key]) for record in known]
    return [point[0] for point in points], [point[1] for point in points]


@contextmanager
def picture(
    path: Path,
    rows: int = 1,
    columns: int = 1,
    *,
    size: tuple[float, float],
    title: str = "",
    margins: dict[str, float] | None = None,
    **shared: Any,
) -> Iterator[list[Any]]:
    """Yields rows x columns axes of matplotlib; then adds grid and one legend for all, and writes `path` in one piece.

    margins: of the axes, with the legend inside the first of them; None: matplotlib computes the layout, which takes
        twice as long.
    """
    from matplotlib.figure import Figure  # takes half a second; pyplot, which handles screens, is not needed

    figure = Figure(figsize=size, layout=None if margins else "constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **shared)
    yield list(panels.flat)
    labelled: dict[str, Any] = {}  # label -> handle, once for all panels
    for axes in panels.flat:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        handles, names = axes.get_legend_handles_labels()
        labelled = dict(zip(names, handles, strict=True)) | labelled
    style = {"frameon": False, "fontsize": 8}
    if margins:
        figure.subplots_adjust(**margins)
        panels.flat[0].legend(labelled.values(), labelled.keys(), loc="upper right", **style)
    else:
        columns = min(4, max(1, int(size[0] / 2.3)))  # inches that a long name takes
        figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=columns, **style)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(unfinished, format=path.suffix[1:] or "png", dpi=130)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def draw_run(run: dict[str, Any], path: Path) -> None:
    """Draw losses, learning rate and gradient norm of one run."""
    margins = {"left": 0.05, "right": 0.99, "bottom": 0.12, "top": 0.9, "wspace": 0.22}
    with picture(path, 1, 3, size=(13, 4.2), margins=margins, width_ratios=[2, 1, 1]) as (losses, rate, norm):
        draw_losses(losses, run, "step", "C0")
        losses.set_title("loss, nats per token", fontsize=10)
        for axes, key, name in (
            (rate, "lr", "learning rate (optim.lr)"),
            (norm, "grad_norm", "gradient norm, before clipping"),
        ):
            _thin_line(axes, curve(run, key), color="C0")
            axes.set_title(name, fontsize=10)
            axes.set_ylim(0, None)
            axes.ticklabel_format(axis="y", scilimits=(-2, 4))
        for axes in (losses, rate, norm):
            axes.set_xlabel("steps")


def draw_losses(axes: Any, run: dict[str, Any], measure: str, colour: str, name: str = "") -> None:
    """name: the run's, where there are several; without it the two lines are named, and the unigram model is drawn."""
    training, validation = ("_", name) if name else ("training", "validation")
    _thin_line(axes, curve(run, "loss", measure), color=colour, alpha=0.5, label=training)
    axes.plot(*curve(run, "val_loss", measure), color=colour, marker="o", markersize=4, label=validation)
    if not name and (unigram := run["summary"].get("unigram_val_loss")):
        label = f"unigram model of the same text ({unigram:.2f})"
        axes.axhline(unigram, color="grey", linestyle=":", label=label)


def _thin_line(axes: Any, points: tuple[list[float], list[float]], **style: Any) -> None:
    """Draw a thin line, with dots where points are few: a single point makes no line."""
    axes.plot(*points, linewidth=1, marker="." if len(points[0]) < _FEW_POINTS else None, **style)


class LossPicture:
    """A run's `loss.png`, drawn from its `metrics.jsonl`; a failure is reported once and does not stop the run."""

    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        self.path, self._say, self._failed = run_dir / "loss.png", say, False
        self.drawn = False  # whether the last try succeeded
        self._next = 0.0  # when it may be drawn again, on perf_counter; 0: never drawn yet

    def draw(self, *, last: bool = False) -> None:
        """Draw it, unless too little time has passed since it was last drawn; with `last` in any case."""
        if not last and time.perf_counter() < self._next:
            return
        began, self.drawn = time.perf_counter(), False
        try:
            import matplotlib.figure  # noqa: F401  which fails where it finds no folder to write to

            began = time.perf_counter()  # the first import does not count as time for drawing
            if self._next and not last:
                gc.collect()  # the last figure is a cycle, of megabytes but few objects, and Python counts objects
            draw_run(read_run(self.path.parent), self.path)
            self.drawn = True
        except (OSError, ValueError) as error:
            if not self._failed:
                self._say(f"not drawn: {self.path}: {error}; the run goes on")
            self._failed = True
        self._next = time.perf_counter() + (time.perf_counter() - began) / _SHARE_OF_TIME
