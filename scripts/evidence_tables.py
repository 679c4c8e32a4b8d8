"""The tables of `.github/evidence/README.md`, made from the files beside it; no figure there is typed.

`page(folder)` reads what `scripts.evidence` kept, and says of each table on what machine, with what versions, at which
commit and by which command its figures were measured. What was not measured has no table.
"""

import ast
import csv
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.bench.report import Columns, Row, markdown

HEAD = """# Evidence

Every figure here was written by `python -m scripts.evidence` from the files in this folder; none is typed. Above each
table stand the machine, the versions, the commit and the command that made it.
"""
PEERS = {"sdpa_cudnn": "cuDNN", "sdpa_flash": "FlashAttention-2", "flex": "FlexAttention", "naive": "naive"}
Section = Iterator[str]  # paragraphs


def page(folder: Path) -> str:
    """The whole page, as Markdown."""
    parts = [HEAD.strip()]
    for title, section in SECTIONS.items():
        if paragraphs := list(section(folder)):
            parts += [f"## {title}", *paragraphs]
    return "\n\n".join(parts) + "\n"


def headline(folder: Path) -> str:
    """The figures of the README's first screen, one a line; '' where they were not measured."""
    lines = []
    if rows := read_csv(folder / "attention" / "peers" / "attention.csv"):
        means = {which: geometric_mean(rows, which, "sdpa_cudnn") for which in ("forward", "backward")}
        if all(means.values()):
            lines.append(
                "- **Attention** at {forward:.2f} times cuDNN's speed forward and {backward:.2f} times backward "
                "(geometric means, {gpu})".format(**means, gpu=rows[0]["gpu"])
            )
    if report := read_json(folder / "training" / "compiled" / "bench_training.json"):
        by_name = {(row["attention"], row["seq_len"]): row for row in report["rows"] if "error" not in row}
        if ours := by_name.get(("flash", 1024)):
            lines.append(
                f"- **GPT-2 124M** trains at {ours['tokens_per_second']:,} tokens/s, {ours['mfu'] or 0:.1%} MFU, in "
                f"{ours['peak_memory_gib'] or 0:.1f} GiB (1,024 tokens a sequence, 65,536 a step)"
            )
    verdicts = [report["verdicts"]["flash"] for _, report in parities(folder) if "flash" in report["verdicts"]]
    if verdicts:
        passed = sum(verdict["passes"] for verdict in verdicts)
        lines.append(f"- **The same training**: flash passes {passed} of {len(verdicts)} parity runs against naive")
    return "\n".join(lines)


def inserted(text: str, name: str, content: str) -> str:
    """`text` with `content` between the comments `<!-- name -->` and `<!-- /name -->`; as it is without them."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    return f"{before}{begin}\n{content}\n{end}{after}" if found and closed else text


# --- reading


def read_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def read_csv(path: Path) -> list[Row]:
    """Rows with their numbers as numbers, and `versions` as a dictionary."""
    if not path.is_file():
        return []
    with path.open() as file:
        rows = [{key: _value(text) for key, text in row.items()} for row in csv.DictReader(file)]
    for row in rows:
        row.setdefault("attention", row.get("implementation"))
        row["versions"] = ast.literal_eval(row["versions"])
    return rows


def _value(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def origin(report: dict[str, Any]) -> str:
    """Machine, versions, commit, command: one line."""
    source = report.get("provenance") or report
    versions = ", ".join(f"{name} {source['versions'].get(name)}" for name in ("torch", "triton"))
    driver = f", driver {source['driver']}" if source.get("driver") else ""
    machine = report.get("hardware") or report.get("machine")
    return f"{machine}; {versions}{driver}; commit {source['commit']}; `{source['command']}`"


# --- attention


def cells(rows: list[Row], which: str) -> dict[tuple, dict[str, Row]]:
    """(head_dim, mask, seq_len) -> attention -> row of that pass, where it has figures."""
    found: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row["pass"] == which and not row.get("error"):
            found.setdefault((row["head_dim"], row["mask"], row["seq_len"]), {})[row["attention"]] = row
    return found


def geometric_mean(rows: list[Row], which: str, peer: str) -> float | None:
    """Of the peer's time over ours, over all cells that have both; None where there is none."""
    ratios = [c[peer]["ms"] / c["flash"]["ms"] for c in cells(rows, which).values() if {peer, "flash"} <= c.keys()]
    return statistics.geometric_mean(ratios) if ratios else None


def attention_peers(folder: Path) -> Section:
    for name in ("peers", "speed"):
        if not (rows := read_csv(folder / "attention" / name / "attention.csv")):
            continue
        yield origin(rows[0])
        peers = [peer for peer in PEERS if any(row["attention"] == peer for row in rows)]
        passes = list(dict.fromkeys(row["pass"] for row in rows))
        yield "TFLOP/s; in parentheses the time of a peer over ours, so above 1 ours is faster:"
        shapes = [{"shape": shape} for shape in dict.fromkeys(s for which in passes for s in cells(rows, which))]
        figures: Columns = {}
        for which in passes:
            found = cells(rows, which)
            figures[f"{which}: flash"] = lambda row, found=found: _speed(found, row, "flash")
            for peer in peers:
                heading = f"{which}: {PEERS[peer]}"
                figures[heading] = lambda row, found=found, peer=peer: _beside(found, row, peer)
        yield markdown(shapes, {"D, mask, N": lambda row: "{}, {}, {:,}".format(*row["shape"])}, figures)
        means = [{"pass": which, "peer": peer, "mean": geometric_mean(rows, which, peer)} for which in passes
                 for peer in peers]  # fmt: skip
        yield "Geometric means over these cells: " + "; ".join(
            f"{m['pass']} {m['mean']:.3f}x {PEERS[m['peer']]}" for m in means if m["mean"]
        )


def _speed(found: dict, row: Row, name: str) -> str:
    here = found.get(row["shape"], {})
    return f"{here[name]['tflops']:.0f}" if name in here else "-"


def _beside(found: dict, row: Row, peer: str) -> str:
    """'512 (1.14x)': the peer's speed, and its time over ours."""
    here = found.get(row["shape"], {})
    ratio = f" ({here[peer]['ms'] / here['flash']['ms']:.2f}x)" if {peer, "flash"} <= here.keys() else ""
    return _speed(found, row, peer) + ratio


def attention_memory(folder: Path) -> Section:
    rows = read_csv(folder / "attention" / "long" / "attention.csv")
    if not rows:
        return
    yield origin(rows[0])
    yield "MiB beyond the inputs, forward and backward:"
    names = list(dict.fromkeys(row["attention"] for row in rows))
    table: dict[tuple, Row] = {}
    for row in rows:
        line = table.setdefault((row["pass"], row["seq_len"]), {"pass": row["pass"], "seq_len": row["seq_len"]})
        line[row["attention"]] = row.get("error") or f"{row['peak_extra_mib'] or 0:,.0f}"
    shape: Columns = {"pass": lambda row: row["pass"], "N": lambda row: f"{row['seq_len']:,}"}
    yield markdown(table.values(), shape, {name: lambda row, name=name: row.get(name, "-") for name in names})


def attention_eight_bits(folder: Path) -> Section:
    rows = read_csv(folder / "attention" / "fp8" / "attention.csv")
    if not rows:
        return
    yield origin(rows[0])
    names: Columns = {"D, mask, N": lambda r: f"{r['head_dim']}, {r['mask']}, {r['seq_len']:,}"}
    names["attention"] = lambda r: r["attention"]
    figures: Columns = {"TFLOP/s": lambda r: f"{r['tflops']:.0f}", "error of O": lambda r: f"{r['relative_error']:.2%}"}
    yield markdown([row for row in rows if row["pass"] == "forward"], names, figures)


def error_budget(folder: Path) -> Section:
    report = read_json(folder / "attention" / "error_budget" / "error_budget.json")
    if not report:
        return
    yield origin(report)
    yield (
        "Largest error against float64 over that of the plain formula in the same precision, the worst over head_dims; "
        "the criterion is 2. All rows: [error_budget.md](attention/error_budget/error_budget.md)."
    )
    worst: dict[tuple, Row] = {}
    for row in report["rows"]:
        line = worst.setdefault((row["case"], row["dtype"]), {"case": row["case"], "dtype": row["dtype"]})
        for tensor, ratio in row["ratio"].items():
            line[tensor] = max(line.get(tensor, 0.0), ratio)
    names: Columns = {key: lambda row, key=key: row[key] for key in ("case", "dtype")}
    yield markdown(worst.values(), names, {x: lambda row, x=x: f"{row[x]:.2f}" for x in ("o", "dq", "dk", "dv")})


# --- training


def training(folder: Path) -> Section:
    for name in ("compiled", "grid", "checkpointing", "saving"):
        if not (report := read_json(folder / "training" / name / "bench_training.json")):
            continue
        yield f"### {name}"
        yield origin(report)
        names: Columns = {
            "attention": lambda r: r["attention"],
            "recompute": lambda r: r["activation_checkpointing"],
            "loss": lambda r: r["loss"],
        }
        figures: Columns = {
            "context": lambda r: f"{r['seq_len']:,}",
            "tokens/s": lambda r: f"{r['tokens_per_second']:,}",
            "ms a step": lambda r: f"{r['step_ms']:.1f}",
            "MFU": lambda r: "-" if r["mfu"] is None else f"{r['mfu']:.1%}",
            "GiB": lambda r: "-" if r["peak_memory_gib"] is None else f"{r['peak_memory_gib']:.1f}",
        }
        if any("save_ms" in row for row in report["rows"]):
            figures["ms a save"] = lambda r: f"{r['save_ms']:.0f}"
            figures["2 % of the time: every"] = lambda r: f"{r['save_every_at_promise']} steps"
        yield markdown([_named_context(row) for row in report["rows"]], names, figures)


def _named_context(row: Row) -> Row:
    """A row without figures keeps its context length in sight."""
    return row | {"error": f"{row['seq_len']:,}: {row['error']}"} if row.get("error") else row


def loss(folder: Path) -> Section:
    report = read_json(folder / "training" / "loss" / "bench_loss.json")
    if not report:
        return
    yield origin(report)
    figures: Columns = {
        "ms": lambda r: f"{r['ms']:.1f}",
        "GiB beyond inputs": lambda r: "-" if r["extra_gib"] is None else f"{r['extra_gib']:.2f}",
        "dh error": lambda r: f"{r['dh_error']:.1e}",
        "dweight error": lambda r: f"{r['dweight_error']:.1e}",
    }
    yield markdown(report["rows"], {"head and loss": lambda r: r["name"]}, figures)


def parities(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(name, report) of every parity run but that of the mutants."""
    paths = sorted((folder / "parity").glob("*/parity.json"))
    return [(path.parent.name, json.loads(path.read_text())) for path in paths if path.parent.name != "mutants"]


def parity(folder: Path) -> Section:
    rows, origins = [], []
    mutants = read_json(folder / "parity" / "mutants" / "parity.json")
    for name, report in [*parities(folder), *([("mutants", mutants)] if mutants else [])]:
        origins.append(f"- {name}: {origin(report)}")
        rows += [{"run": name, "attention": a, "noise": report["noise"]} | v for a, v in report["verdicts"].items()]
    if not rows:
        return
    names: Columns = {"run": lambda r: r["run"], "attention": lambda r: r["attention"]}
    figures: Columns = {
        "verdict": lambda r: "pass" if r["passes"] else "FAIL",
        "nats apart, first steps (noise)": lambda r: _distance(r, "early"),
        "all steps (noise)": lambda r: _distance(r, "whole"),
        "held-out loss": lambda r: f"{r['val_loss']:.4f}",
    }
    yield markdown(rows, names, figures)
    if repeats := read_json(folder / "parity" / "repeats" / "repeats.json"):
        counts = ", ".join(f"{name} {count}" for name, count in repeats["passed"].items())
        yield f"Of {repeats['repeats']} repeats with other seeds passed: {counts}. {origin(repeats)}"
    yield "\n".join(origins)


def _distance(row: Row, span: str) -> str:
    return f"{row['distances'][span]:.1e} ({row['noise'][span]['limit']:.1e})"


def profile(folder: Path) -> Section:
    reports = {name: read_json(folder / "profile" / name / "profile.json") for name in ("naive", "flash")}
    reports = {name: report for name, report in reports.items() if report}
    if not reports:
        return
    for name, report in reports.items():
        yield f"{name}: {report['step_ms']:.1f} ms a step. {origin(report)}"
    groups: dict[str, Row] = {}
    for name, report in reports.items():
        for group in report["groups"]:
            groups.setdefault(group["name"], {"name": group["name"]})[name] = (
                f"{group['ms']:.2f} ({group['share']:.0%})"
            )
    columns: Columns = {f"{name}, ms": lambda row, name=name: row.get(name, "-") for name in reports}
    yield markdown(groups.values(), {"part of the step": lambda row: row["name"]}, columns)


SECTIONS: dict[str, Callable[[Path], Section]] = {
    "Attention beside its peers": attention_peers,
    "Attention's memory": attention_memory,
    "Attention in 8 bits": attention_eight_bits,
    "Attention's error": error_budget,
    "The training step": training,
    "Output head and loss": loss,
    "The same training with each attention": parity,
    "Where a step's time goes": profile,
}
