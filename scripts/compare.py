"""Finished runs over each other: `python -m scripts.compare RUN [RUN ...] [--out FILE.png]`.

Reads each run's `metrics.jsonl` and `summary.json`, prints a table and draws the training and held-out loss against
the tokens seen. The last line is one JSON object.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # the backend is chosen first: there may be no screen
from matplotlib.ticker import EngFormatter


def read_run(folder: Path) -> dict:
    """A run's records and summary; ValueError where the folder holds no finished run."""
    metrics, summary = folder / "metrics.jsonl", folder / "summary.json"
    for file in (metrics, summary):
        if not file.is_file():
            raise ValueError(
                f"{folder} has no {file.name}; give the folder of a finished run (runs/<experiment>/<time>)"
            )
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "name": "/".join(folder.resolve().parts[-2:]),
        "records": records,
        "summary": json.loads(summary.read_text()),
    }


def curve(run: dict, key: str) -> tuple[list[int], list[float]]:
    """(tokens, values) of one metric."""
    tokens_a_step = run["summary"]["tokens"] / run["summary"]["steps"]
    points = [(r["step"] * tokens_a_step, r[key]) for r in run["records"] if r.get(key) is not None]
    return [p[0] for p in points], [p[1] for p in points]


def draw(runs: list[dict], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, run in enumerate(runs):
        colour = f"C{number}"
        label = "" if len(runs) == 1 else f"{run['name']}: "
        axes.plot(*curve(run, "loss"), color=colour, alpha=0.45, linewidth=1, label=f"{label}training")
        axes.plot(*curve(run, "val_loss"), color=colour, marker="o", markersize=4, label=f"{label}held out")
    if len(runs) == 1:
        unigram = runs[0]["summary"]["unigram_val_loss"]
        axes.axhline(unigram, color="grey", linestyle=":", label=f"unigram model of the same text ({unigram:.2f})")
        axes.set_title(runs[0]["name"])
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("loss, nats a token")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.compare", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--out", type=Path, default=Path("runs/compare.png"), help="picture to write")
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(folder) for folder in options.runs]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    draw(runs, options.out)

    table = Table()
    table.add_column("run", overflow="fold")
    for column in ("tokens", "s", "tok/s", "val loss", "ppl", "GiB"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = []
    for run in runs:
        summary = run["summary"]
        rates = sorted(curve(run, "tokens_per_second")[1])
        memory = curve(run, "peak_memory_gib")[1]
        row = {
            "run": run["name"],
            "steps": summary["steps"],
            "tokens": summary["tokens"],
            "seconds": round(summary["seconds"], 1),
            "tokens_per_second": round(rates[len(rates) // 2]) if rates else None,
            "val_loss": summary["val_loss"],
            "val_perplexity": summary["val_perplexity"],
            "val_bits_per_byte": summary["val_bits_per_byte"],
            "peak_memory_gib": max(memory) if memory else None,
        }
        rows.append(row)
        forms = {
            "run": "{}",
            "tokens": "{:,}",
            "seconds": "{:,.1f}",
            "tokens_per_second": "{:,}",
            "val_loss": "{:.4f}",
            "val_perplexity": "{:.2f}",
            "peak_memory_gib": "{:.1f}",
        }
        table.add_row(*("-" if row[key] is None else form.format(row[key]) for key, form in forms.items()))
    Console(highlight=False).print(table)
    print(json.dumps({"picture": str(options.out), "runs": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
