"""Three classic mistakes of flash attention, made on purpose: `python -m scripts.break_it`.

For each: what to expect, then what happens, in one call (in fp16 and fp32) and in a short training run beside the right
algorithm. No running maximum: scores overflow the exponential. No rescaling: finite, and wrong. A causal mask from
tile-local indices: right in the first tile, wrong from the second on. The run's folder gets break_it.png and
break_it.json; the last line is one JSON object.
"""

import json
import math
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from conf.program import program
from conf.schema import Settings
from kernels import naive_attention
from scripts.bench.report import colour
from scripts.variants import MUTANTS, Attention, online_softmax, train_once
from training.curves import picture

SCORES = 200.0  # largest score of the single calls: enough to overflow fp32's exponential
SEQ_LEN = 64  # tokens of the single calls
BLOCK = SEQ_LEN // 4  # keys and queries of a tile, as `online_softmax` chooses them
EXPECTED = {  # of a mutant in scripts/variants.py
    "no running maximum": "exp(score) without subtracting the row's maximum: above scores of 11.1 fp16 overflows to "
    "inf and O is NaN, above 88.7 fp32 too. With small scores nothing is wrong, and training begins as if all were "
    "well.",
    "no rescaling": "The maximum moves but the sums of earlier tiles are not rescaled: every number is finite and "
    "every row whose maximum rises after its first tile is wrong.",
    "tile-local mask": "Indices inside the tile in place of indices in the sequence: the first tile of queries is "
    "right, and from the second on the tiles left of the diagonal hide half of what they must show.",
}


@program("config", Settings, experiment="parity", run_dir="runs/break_it")
def main(settings: Settings, run_dir: Path) -> None:
    console = Console(highlight=False)
    calls, runs = [], {"right": train_with(settings, run_dir / "right", online_softmax)}
    for name, expected in EXPECTED.items():
        attend = MUTANTS[name][0]
        console.print(f"\n{name}", style="bold")
        console.print(f"expected: {expected}", markup=False)
        for dtype in (torch.float16, torch.float32):
            calls.append({"mistake": name} | one_call(attend, dtype))
            console.print(f"one call, {calls[-1]['dtype']}: {calls[-1]['happened']}", markup=False)
        runs[name] = train_with(settings, run_dir / name.replace(" ", "_"), attend)
        console.print(f"training: {story(runs[name], runs['right'])}", markup=False)
    report = {"calls": calls, "runs": runs}
    (run_dir / "break_it.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(runs, run_dir / "break_it.png")
    print(json.dumps({"folder": str(run_dir), "calls": calls}))


def train_with(settings: Settings, folder: Path, attend: Attention) -> dict:
    """A short run; a loss is None from the step on before which it stopped."""
    run = train_once(settings, folder, attend=attend)
    losses = [loss if math.isfinite(loss) else None for loss in run["losses"]]
    return {"losses": losses, "val_loss": run["val_loss"] if None not in losses else None}


def one_call(attend: Attention, dtype: torch.dtype) -> dict:
    """One call whose scores reach SCORES; where and how the mistake shows."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, SEQ_LEN, 16, generator=generator) for _ in range(3))
    largest = (q @ k.mT).abs().amax() / 4
    q, k, v = ((x * s).to(dtype) for x, s in ((q, SCORES / largest), (k, 1.0), (v, 1.0)))
    exact = naive_attention(q.double(), k.double(), v.double(), causal=True)
    wrong = attend(q, k, v)
    bad_rows = ~torch.isfinite(wrong).all(-1)[0, 0]
    errors = (wrong.double() - exact).abs().amax(-1)[0, 0]
    row = {"dtype": str(dtype).removeprefix("torch."), "rows_not_finite": int(bad_rows.sum())}
    if bad_rows.any():
        first = int(bad_rows.nonzero()[0])
        query, tile, value = first_overflow(q, k)
        row["happened"] = (
            f"{int(bad_rows.sum())} of {SEQ_LEN} rows are not finite, the first is query {first}; the first "
            f"exponential to overflow is exp({value:.1f}), query {query} in key tile {tile}"
        )
    else:
        off = (errors > 1e-2).nonzero().flatten().tolist()
        row["largest_error"] = float(errors.max())
        first = f", the first is query {off[0]} (tile {off[0] // BLOCK})" if off else ""
        row["happened"] = (
            f"finite, the largest error is {row['largest_error']:.2g}; {len(off)} of {SEQ_LEN} rows are off by"
            f" more than 0.01{first}"
        )
    return row


def first_overflow(q: Tensor, k: Tensor) -> tuple[int, int, float]:
    """(query, key tile, score) of the first exponential beyond the dtype's range, in the order of the loops."""
    scores = (q @ k.mT)[0, 0] * q.shape[-1] ** -0.5
    for q_start in range(0, q.shape[2], BLOCK):
        for tile in range(q_start // BLOCK + 1):
            part = scores[q_start : q_start + BLOCK, tile * BLOCK : (tile + 1) * BLOCK]
            over = torch.isinf(torch.exp(part)).nonzero()
            if len(over):
                row, col = over[0].tolist()
                return q_start + row, tile, float(part[row, col])
    return -1, -1, math.nan


def story(wrong: dict, right: dict) -> str:
    """What became of the run, in one sentence."""
    if None in wrong["losses"]:
        return f"the loss is not finite from step {wrong['losses'].index(None) + 1} on"
    distance = max(abs(a - b) for a, b in zip(wrong["losses"], right["losses"], strict=True))
    return (
        f"validation loss {wrong['val_loss']:.4f} beside {right['val_loss']:.4f}; the curves part by at most"
        f" {distance:.2g} nats. A loss that falls proves nothing."
    )


def draw(runs: dict[str, dict], path: Path) -> None:
    right = runs["right"]["losses"]
    with picture(path, 2, 1, size=(8, 5.6), sharex=True) as (upper, lower):
        for number, (name, run) in enumerate(runs.items()):
            losses = [math.nan if loss is None else loss for loss in run["losses"]]
            shade = colour("naive" if name == "right" else name, number)
            steps, style = range(1, len(losses) + 1), {"color": shade, "label": name}
            upper.plot(steps, losses, linewidth=2.5 if name == "right" else 1.2, **style)
            if name != "right":
                lower.plot(steps, [max(abs(a - b), 1e-8) for a, b in zip(losses, right, strict=True)], **style)
        upper.set_ylabel("training loss, nats a token")
        lower.set(yscale="log", ylabel="|loss - the right one's|", xlabel="step")


if __name__ == "__main__":
    main()
