"""Finished runs over each other: `python -m scripts.compare RUN [RUN ...] [out=FILE.png]`.

Reads each run's `metrics.jsonl` and `summary.json`; wandb's files are not needed. The picture has the training and the
held-out loss against steps, tokens and wall time; the table has the loss where all runs have come equally far by each
of the three, and how each ended. The last line is one JSON object.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from conf.program import program
from scripts.bench.report import cell, picture, pivot

MEASURES = {
    "step": "steps",
    "tokens": "tokens",
    "seconds": "seconds of wall time",
}  # key of a record -> name of an axis


@dataclass
class CompareSettings:
    runs: list[str] = field(default_factory=list)  # folders of finished runs; `runs=` may be left out
    out: str = "runs/compare.png"  # picture to write

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs=[] names none; give the folders of finished runs (runs/<experiment>/<time>)")


def read_run(folder: Path) -> dict:
    """A run's records and summary; ValueError where the folder holds no finished run."""
    metrics, summary = folder / "metrics.jsonl", folder / "summary.json"
    for file in (metrics, summary):
        if not file.is_file():
            raise ValueError(
                f"{folder} has no {file.name}; give the folder of a finished run (runs/<experiment>/<time>)"
            )
    try:
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        tokens_a_step, seconds = json.loads(summary.read_text())["tokens"] / records[-1]["step"], 0.0
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{metrics} or {summary.name} is damaged ({error}); leave {folder} out") from error
    for record in records:  # records of an evaluation alone have no clock of their own
        seconds = record.setdefault("seconds", seconds)
        record.setdefault("tokens", record["step"] * tokens_a_step)
    return {
        "name": "/".join(folder.resolve().parts[-2:]),
        "records": records,
        "summary": json.loads(summary.read_text()),
    }


def curve(run: dict, key: str, measure: str = "tokens") -> tuple[list[float], list[float]]:
    """(how far, value) of one metric, against "step", "tokens" or "seconds"."""
    points = [(r[measure], r[key]) for r in run["records"] if r.get(key) is not None]
    return [p[0] for p in points], [p[1] for p in points]


def loss_at(run: dict, measure: str, place: float) -> float | None:
    """The training loss of the last record that is no further than `place`; None where the first is further."""
    far, losses = curve(run, "loss", measure)
    return next((loss for x, loss in zip(far[::-1], losses[::-1], strict=True) if x <= place), None)


def common_places(runs: list[dict]) -> dict[str, float]:
    """For each measure, how far all runs have come."""
    return {measure: min(max(curve(run, "loss", measure)[0]) for run in runs) for measure in MEASURES}


def draw(runs: list[dict], path: Path) -> None:
    from matplotlib.ticker import EngFormatter

    with picture(path, 1, len(MEASURES), size=(13, 4.2), sharey=True) as panels:
        for axes, (measure, name) in zip(panels, MEASURES.items(), strict=True):
            for number, run in enumerate(runs):
                colour, label = f"C{number}", "" if len(runs) == 1 else f"{run['name']}: "
                axes.plot(*curve(run, "loss", measure), color=colour, alpha=0.45, linewidth=1, label=f"{label}training")
                held_out = {"marker": "o", "markersize": 4, "label": f"{label}held out"}
                axes.plot(*curve(run, "val_loss", measure), color=colour, **held_out)
            if len(runs) == 1:
                unigram = runs[0]["summary"]["unigram_val_loss"]
                line = {"linestyle": ":", "label": f"unigram model of the same text ({unigram:.2f})"}
                axes.axhline(unigram, color="grey", **line)
            axes.set_xlabel(name)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        panels[0].set_ylabel("loss, nats a token")


@program("tool", CompareSettings, positional="runs")
def main(settings: CompareSettings, run_dir: Path) -> None:
    runs = [read_run(Path(folder)) for folder in settings.runs]
    try:
        draw(runs, Path(settings.out))
    except OSError as error:
        raise ValueError(f"out={settings.out} cannot be written ({error.strerror}); name another") from error

    places = common_places(runs)
    rows = []
    for run in runs:
        summary = run["summary"]
        rates = sorted(curve(run, "tokens_per_second")[1])
        memory = curve(run, "peak_memory_gib")[1]
        rows.append(
            {
                "run": run["name"],
                "steps": summary["steps"],
                "tokens": summary["tokens"],
                "seconds": round(summary["seconds"], 1),
                "tokens_per_second": round(rates[len(rates) // 2]) if rates else None,
                "val_loss": summary.get("val_loss"),
                "val_perplexity": summary.get("val_perplexity"),
                "val_bits_per_byte": summary.get("val_bits_per_byte"),
                "peak_memory_gib": max(memory) if memory else None,
            }
            | {f"loss_at_equal_{measure}": loss_at(run, measure, place) for measure, place in places.items()}
        )
    lines = {
        "tokens": "{tokens:,}",
        "seconds in all": "{seconds:,.1f}",
        "tokens a second": "{tokens_per_second:,}",
        "peak memory, GiB": "{peak_memory_gib:.1f}",
        "held-out loss": "{val_loss:.4f}",
        "perplexity": "{val_perplexity:.2f}",
        f"training loss at step {places['step']:,}": "{loss_at_equal_step:.4f}",
        f"training loss after {places['tokens']:,.0f} tokens": "{loss_at_equal_tokens:.4f}",
        f"training loss after {places['seconds']:,.1f} s": "{loss_at_equal_seconds:.4f}",
    }
    cells = [
        {"run": row["run"], "what": what, "shown": cell(form, row)} for what, form in lines.items() for row in rows
    ]
    Console(highlight=False).print(pivot(cells, {"": "{what}"}, "{run}", "{shown}").console())
    print(json.dumps({"picture": settings.out, "equal": places, "runs": rows}))


if __name__ == "__main__":
    main()
