"""The tables of `.github/evidence/README.md`, made from the files beside it; no figure there is typed.

`PAGE` lists the tables: the files each is made from, and what it shows of their rows. A part that was not measured has
no table.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.bench.report import Columns, Row, Table, cell, origin_line, pivot, table

HEAD = """# Evidence

What this project measured of itself: speed, memory and errors of its attention, and the training it does. Programs
wrote every figure into the files of this folder, and `python -m scripts.evidence` made these tables of them; none is
typed. With each table stand the machine, the versions that its program recorded, the commit and the command that
measured it."""
PEERS = {
    "flash4": "FlashAttention-4", "flash4_deterministic": "FlashAttention-4, deterministic", "sdpa_cudnn": "cuDNN",
    "sdpa_flash": "PyTorch's FlashAttention-2", "flex": "FlexAttention", "naive": "naive",
}  # fmt: skip
Reports = dict[str, dict[str, Any]]  # an experiment's own name -> what its program wrote


@dataclass(frozen=True)
class Part:
    """One table."""

    title: str
    files: str  # below the folder of evidence; `*` stands for several experiments
    table: Callable[[Reports], Table]


# --- reading


def reports(folder: Path, files: str) -> Reports:
    found = {}
    for path in sorted(folder.glob(files)):
        try:
            found[path.parent.name] = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); make it again") from error
    return found


def rows_of(found: Reports) -> list[Row]:
    return [{"experiment": name} | row for name, report in found.items() for row in report["rows"]]


def stated(form: str, report: dict[str, Any]) -> str:
    """`form` with the report's facts; empty where the report lacks one."""
    try:
        return form.format_map(report)
    except KeyError:
        return ""


def printed(program: str) -> Callable[[Reports], Table]:
    """The rows as scripts.bench.<program> prints them, with the experiment's name where there are several, and its
    TITLE and CAPTION, which may name facts of the report."""

    def made(found: Reports) -> Table:
        columns = import_module(f"scripts.bench.{program}")
        run = {"run": "{experiment}"} if len(found) > 1 else {}
        report = next(iter(found.values()))
        title, caption = (stated(getattr(columns, name, ""), report) for name in ("TITLE", "CAPTION"))
        return table(rows_of(found), run | columns.NAMES, columns.FIGURES, title, caption)

    return made


def raced(found: Reports) -> Table:
    """Seconds until a loss, with the loss of each run."""
    bench = import_module("scripts.bench.time_to_loss")
    rows = [row | {"target": found[row["experiment"]]["target"]} for row in rows_of(found)]
    names = {"run": "{experiment}", "loss": "{target:.4f}"} | bench.NAMES
    caption = bench.caption("nanoGPT (in the run nanochat, as nanochat)")
    return table(rows, names, bench.FIGURES, caption=caption)


# --- attention

SHAPE: Columns = {"D, mask, N": "{head_dim}, {mask}, {seq_len:,}"}


def ratios(rows: list[Row]) -> dict[tuple[str, str], list[float]]:
    """(pass, peer) -> the peer's times over ours, wherever both have one; each row gets its own as `ratio`."""
    ours = {(*shape_of(row), row["pass"]): row["ms"] for row in rows if row["attention"] == "flash" and row.get("ms")}
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        time = ours.get((*shape_of(row), row["pass"]))
        if row["attention"] in PEERS and time and row.get("ms"):
            row["ratio"] = row["ms"] / time
            found.setdefault((row["pass"], row["attention"]), []).append(row["ratio"])
    return found


def shape_of(row: Row) -> tuple:
    return row["head_dim"], row["mask"], row["seq_len"]


def beside_peers(found: Reports) -> Table:
    rows = rows_of(found)
    means = [
        f"{which} {statistics.geometric_mean(r):.3f}x {PEERS[peer]} ({sum(x < 1 for x in r)} of {len(r)} below 1)"
        for (which, peer), r in ratios(rows).items()
    ]
    shown, order = [], ["flash", *PEERS]
    for row in rows:
        error = row.get("error")
        if row["attention"] not in order or (error and error != "out of memory"):  # a call that the peer refuses
            continue
        figure = "" if error else cell("{tflops:.0f} ({ratio:.2f}x)" if "ratio" in row else "{tflops:.0f}", row)
        shown.append(row | {"name": PEERS.get(row["attention"], "flash"), "figure": figure})
    shown.sort(key=lambda row: (row["pass"] != "forward", order.index(row["attention"])))
    tokens, hidden = rows[0]["batch"] * rows[0]["seq_len"], rows[0]["num_heads"] * rows[0]["head_dim"]
    title = (
        f"TFLOP/s by head_dim D and N, of {tokens:,} tokens, or one longer sequence, and {hidden:,} columns a call; in "
        "parentheses a peer's time over ours, so above 1 ours is faster:"
    )
    caption = f"Geometric means of these ratios: {'; '.join(means)}. The host's time in Python is not in them."
    return pivot(shown, SHAPE, "{pass}: {name}", "{figure}", title, caption)


def memory(found: Reports) -> Table:
    names = {"pass": "{pass}", "N": "{seq_len:,}"}
    return pivot(rows_of(found), names, "{attention}", "{peak_extra_mib:,.0f}", "MiB beyond the inputs:")


CALL: Columns = {"heads, D, keys": "{num_heads}/{num_kv_heads}, {head_dim}, {context:,}"}


def over_a_cache(found: Reports) -> Table:
    rows = [row for row in rows_of(found) if row.get("us")]
    within = sum(row["of_goal"] <= 1.0 for row in rows)
    title = "Microseconds of one query a row; in parentheses over 5 us and the bytes at 90 % of reading's bandwidth:"
    caption = f"{within} of {len(rows)} calls take at most 5 us and the time of those bytes."
    return pivot(rows, CALL, "B {batch}", "{us:.1f} ({of_goal:.2f})", title, caption)


def over_a_cache_beside_peers(found: Reports) -> Table:
    rows = [row for row in rows_of(found) if row.get("us")]
    for row in rows:
        row["name"] = PEERS.get(row["attention"], "flash")
    calls: dict[tuple, dict[str, float]] = {}  # call -> attention -> microseconds
    for row in rows:
        calls.setdefault((cell("".join(CALL.values()), row), row["batch"]), {})[row["attention"]] = row["us"]
    both = [(us["flash"], [us[name] for name in us.keys() & PEERS]) for us in calls.values() if "flash" in us]
    ahead = [min(peers) / ours for ours, peers in both if peers]
    caption = ""
    if ahead:
        caption = f"Flash is {min(ahead):.2f} to {max(ahead):.2f} times as fast as the faster of its peers."
    names = CALL | {"B": "{batch}"}
    return pivot(rows, names, "{name}", "{us:.1f}", "Microseconds of one query a row:", caption)


def growing(found: Reports) -> Table:
    title = "Share of the bandwidth of a kernel that only reads; a column is one captured graph:"
    names, across = {"keys a row": "{context:,}"}, "B {batch}, page {page}"
    return pivot(rows_of(found), names, across, "{of_read:.2f} ({kv_mib:,.0f} MiB)", title)


def error_budget(found: Reports) -> Table:
    worst: dict[tuple, Row] = {}
    for row in rows_of(found):
        line = worst.setdefault((row["case"], row["dtype"]), {"case": row["case"], "dtype": row["dtype"]})
        for tensor, ratio in row["ratio"].items():
            line[tensor] = max(line.get(tensor, 0.0), ratio)
    title = (
        "Largest error against float64 over that of the plain formula in the same precision, the worst over "
        "head_dims; the criterion is 2, above an error of 1e-5. (dQ of repeated maxima is held to another, "
        "[kernels/](../../kernels/README.md#how-a-kernel-is-checked): the plain formula rounds less there.) All rows: "
        "[error_budget.md](attention/error_budget/error_budget.md)."
    )
    figures = {x: f"{{{x}:.2f}}" for x in ("o", "dq", "dk", "dv")}
    return table(worst.values(), {"case": "{case}", "dtype": "{dtype}"}, figures, title)


# --- training


def parity(found: Reports) -> Table:
    rows = [
        {"run": run, "attention": name, "verdict": "pass" if verdict["passes"] else "FAIL", "noise": report["noise"]}
        | {key: verdict[key] for key in ("distances", "first_outside", "val_loss")}
        | {"fault": verdict["fault"] and verdict["fault"].partition(" (")[0]}
        for run, report in found.items()
        for name, verdict in report["verdicts"].items()
    ]
    figures = {
        "verdict": "{verdict}",
        "nats apart, first steps (noise)": "{distances[early]:.1e} ({noise[early][limit]:.1e})",
        "all steps (noise)": "{distances[whole]:.1e} ({noise[whole][limit]:.1e})",
        "noise left at step": "{first_outside}",
        "validation loss": "{val_loss:.4f}",
        "wrong result": "{fault}",
    }
    title = (
        "Flash, tiled and sdpa must pass; in the run `mutants`, those that are wrong on purpose must fail. Beside the "
        "losses each layer's results are compared with float32's, before the training and after it:"
    )
    return table(rows, {"run": "{run}", "attention": "{attention}"}, figures, title)


def repeats(found: Reports) -> Table:
    rows = [report | {"attention": name, "n": n} for report in found.values() for name, n in report["passed"].items()]
    return table(rows, {"attention": "{attention}"}, {"passed": "{n} of {repeats}"})


def training(found: Reports) -> Table:
    """The rows of scripts.bench.training, and what its forecast refused."""
    shown = printed("training")(found)
    sizes = [row["micro_batch"] * row["seq_len"] for row in rows_of(found) if row.get("micro_batch")]
    if sizes and (refused := sum("why" in row for row in rows_of(found))):
        shown.caption = (
            f"Micro-batches of {min(sizes):,} tokens, or of one sequence. {refused} of the rows out of memory are the "
            "forecast's refusals, in which no step was tried; with a smaller micro-batch some would fit."
        )
    return shown


def profile(found: Reports) -> Table:
    rows = [{"run": run} | group for run, report in found.items() for group in report["groups"]]
    rows += [{"run": run, "name": "a step", "ms": report["step_ms"], "share": 1.0} for run, report in found.items()]
    return pivot(rows, {"part of the step": "{name}"}, "{run}, ms", "{ms:.2f} ({share:.0%})")


def of_cells(
    *cells: str, names: Columns, figures: Columns, having: str = "cell", caption: str = ""
) -> Callable[[Reports], Table]:
    """Make a table of the rows of these cells of scripts.bench.parallel that have a figure `having`."""
    return lambda found: table(
        [row for row in rows_of(found) if row["cell"] in cells and having in row], names, figures, caption=caption
    )


SHARED_STEP = of_cells(
    "replicate", "shard", "context", "context, ring", "context, shard",
    names={"what is shared": "{cell}", "GPUs": "{processes}", "context": "{seq_len:,}"},
    figures={"tokens/s": "{tokens_per_second:,}", "of one GPU": "{speedup:.3f}",
             "of the slowest": "{speedup_of_slowest:.3f}", "ms a step": "{step_ms:.1f}",
             "each GPU alone, ms": "{alone}", "GiB a GPU": "{peak_memory_gib:.2f}", "the same bits twice": "{twice}"},
    caption="The rows of `context` are eager, with full activation checkpointing, and one GPU has half the tokens of"
    " `context, shard`; the others are as said below.",
)  # fmt: skip
SHARED_SUM = of_cells(
    "replicate",
    having="sum_ms",
    names={"GPUs": "{processes}"},
    figures={"elements": "{elements:,}", "ms a step": "{step_ms:.2f}", "slowest GPU alone": "{slowest_ms:.2f}",
             "each before the sum": "{computing}",
             "ordered sum": "{sum_ms:.2f} ({sum_share:.1%})",
             "NCCL's all-reduce": "{all_reduce_ms:.2f} ({all_reduce_share:.1%})", "rest": "{rest_ms:.2f}"},
)  # fmt: skip
SHARED_BITS = of_cells(
    "hashes",
    names={"optimizer": "{optimizer}", "GPUs": "{processes}"},
    figures={"steps": "{steps}", "SHA-256 of weights and moments": "{sha256}", "equal": "{equal}"},
)
BENCH, STEP = "bench_training.json", training
PAGE = (
    Part("Attention beside its peers", "attention/peers/attention.json", beside_peers),
    Part("Attention beside more peers", "attention/speed/attention.json", beside_peers),
    Part("Attention under any mask beside FlexAttention", "masks/masks.json", printed("masks")),
    Part("Attention's memory", "attention/long/attention.json", memory),
    Part("Attention over a cache", "decode/context/decode.json", over_a_cache),
    Part("Attention over a cache beside its peers", "decode/peers/decode.json", over_a_cache_beside_peers),
    Part(
        "Attention over a cache: groups, queries, pages, ragged rows, 8 bits",
        "decode/variants/decode.json",
        printed("decode"),
    ),
    Part("Attention over a cache that grows", "decode/growing/decode.json", growing),
    Part("A cache in 8 bits", "decode/bits/cache_bits.json", printed("cache_bits")),
    Part("Generation beside transformers", "generation/bench_generation.json", printed("generation")),
    Part("Our attention in a model of transformers", "huggingface/bench_huggingface.json", printed("huggingface")),
    Part("DNABERT-2's network", "mosaicbert/bench_mosaicbert.json", printed("mosaicbert")),
    Part("Attention's error", "attention/error_budget/error_budget.json", error_budget),
    Part("The training step of GPT-2 124M, compiled", f"training/compiled/{BENCH}", STEP),
    Part("The training step, eager, by length and activation checkpointing", f"training/grid/{BENCH}", STEP),
    Part("The training step, compiled, by activation checkpointing", f"training/checkpointing/{BENCH}", STEP),
    Part("The training step of 10.7 million parameters, compiled", f"training/small_*/{BENCH}", STEP),
    Part("The training step of 1.3 billion parameters, compiled", f"training/large_*/{BENCH}", STEP),
    Part(
        "Training seconds until a held-out loss, beside nanoGPT and nanochat",
        "time_to_loss/*/time_to_loss.json",
        raced,
    ),
    Part("What a save costs the training", f"training/saving/{BENCH}", STEP),
    Part("The training step on several GPUs", "parallel/s*/bench_parallel.json", SHARED_STEP),
    Part("The sum of gradients over GPUs", "parallel/step/bench_parallel.json", SHARED_SUM),
    Part("The same weights from one GPU and from several", "parallel/step/bench_parallel.json", SHARED_BITS),
    Part("Attention whose rows GPUs share", "parallel/context/bench_context.json", printed("context")),
    Part("Output head and loss", "training/loss/bench_loss.json", printed("loss")),
    Part("The same training with each attention", "parity/*/parity.json", parity),
    Part("How often right attentions pass, with other seeds", "parity/repeats/repeats.json", repeats),
    Part("Where a step's time goes", "profile/*/profile.json", profile),
)


# --- writing


def page(folder: Path) -> str:
    """The whole page, as Markdown."""
    parts = [HEAD]
    for part in PAGE:
        if found := reports(folder, part.files):
            origins = [origin_line(report) for report in found.values()]
            parts += [f"## {part.title}", *origins[: len(origins) == 1], part.table(found).markdown()]
            if len(origins) > 1:
                parts.append("\n".join(f"- {name}: {line}" for name, line in zip(found, origins, strict=True)))
    return "\n\n".join(parts) + "\n"


def headline(folder: Path) -> str:
    """The figures of the README's first screen, each in one line with where it comes from."""
    lines = []
    if found := reports(folder, "attention/peers/attention.json"):
        beside = ratios(rows_of(found))
        means = {key: f"{statistics.geometric_mean(r):.2f}" for key, r in beside.items()}
        spread = {key: f"({min(r):.2f} to {max(r):.2f})" for key, r in beside.items()}
        shown = [p for p in ("sdpa_cudnn", "flash4") if {("forward", p), ("backward", p)} <= beside.keys()]
        speeds = [
            f"{means['forward', peer]} times {PEERS[peer]}'s speed forward {spread['forward', peer]} and "
            f"{means['backward', peer]} times backward {spread['backward', peer]}"
            for peer in shown
        ]
        if shown:
            counts = {len(beside[which, peer]) for which in ("forward", "backward") for peer in shown}
            shapes = " to ".join(map(str, dict.fromkeys((min(counts), max(counts)))))
            lines.append(
                f"- **Attention**: {', '.join(speeds)}, geometric means over {shapes} shapes ({_brief(found)})"
            )
    if found := reports(folder, "parallel/step/bench_parallel.json"):
        steps = [row for row in rows_of(found) if row["cell"] == "replicate"]
        one = "{tokens_per_second:,} tokens/s in {peak_memory_gib:.1f} GiB on one GPU"
        several = "{tokens_per_second:,} on {processes}"
        speeds = ", ".join(cell(one if row["processes"] == 1 else several, row) for row in steps)
        step = cell("{batch_tokens:,} tokens a GPU and step in sequences of {seq_len:,}", steps[0])
        equal = [row["equal"] for row in rows_of(found) if row["cell"] == "hashes"]
        bits = "; one batch gives the same bits on all of them" if equal and all(equal) else ""
        soon = ""
        race = reports(folder, "time_to_loss/shakespeare/time_to_loss.json")
        if ours := next((row for row in rows_of(race) if row["name"] == "ours" and "times_best" in row), None):
            (target,) = {report["target"] for report in race.values()}
            form = "; to a loss of {target} on Shakespeare {times:.1f} times as soon as nanoGPT, {times_best:.1f} with"
            soon, found = (
                cell(f"{form} its learning rate tuned and its schedule kept", ours | {"target": target}),
                found | race,
            )
        lines.append(f"- **Training**: GPT-2 124M at {speeds} ({step}{bits}){soon} ({_brief(found)})")
    if found := reports(folder, "generation/bench_generation.json"):
        speed = {
            (row["model"], row["batch"]): row["tokens_per_second"]
            for row in rows_of(found)
            if row["choice"] == "greedy"
        }
        versions = sorted({report["transformers"] for report in found.values() if "transformers" in report})
        names = {"gpt": "ours", "transformers_static": " ".join(("transformers", *versions, "with its static cache"))}
        drawn = [
            f"{speed[model, 1]:,.0f} alone and {speed[model, 64]:,.0f} in a batch of 64 ({name})"
            for model, name in names.items()
            if {(model, 1), (model, 64)} <= speed.keys()
        ]
        lines.append(f"- **Generation**: tokens/s of GPT-2 124M in bf16: {', '.join(drawn)} ({_brief(found)})")
    found = reports(folder, "parity/*/parity.json")
    judged = {name: found[name] for name in found if name != "mutants" and "flash" in found[name]["verdicts"]}
    if judged:
        passed = sum(report["verdicts"]["flash"]["passes"] for report in judged.values())
        lines.append(
            f"- **The same training**: flash is as near to naive attention as rounding alone in {passed} of "
            f"{len(judged)} parity runs ({_brief(judged)})"
        )
    return "\n".join(lines)


def _brief(found: Reports) -> str:
    """GPU, torch and commits."""
    sources = [report["provenance"] for report in found.values()]
    words = {
        "": [str(source["gpu"]) for source in sources],
        "torch ": [source["versions"]["torch"] for source in sources],
        "commit ": [str(source["commit"])[:7] for source in sources],
    }
    return ", ".join(name + " and ".join(dict.fromkeys(word)) for name, word in words.items())


def inserted(text: str, name: str, content: str) -> str:
    """`text` with `content` between the comments `<!-- name -->` and `<!-- /name -->`; unchanged without them."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    return f"{before}{begin}\n{content}\n{end}{after}" if found and closed else text
