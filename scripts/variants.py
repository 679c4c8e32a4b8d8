"""Attention functions that are the naive one in disguise (nulls), or wrong on purpose (mutants); a run with one.

Nulls are equal to naive attention in exact arithmetic and round differently: the noise that a correct implementation is
allowed. Mutants have the mistakes that people make in flash attention. Neither is in the model's registry: `train_once`
passes one to the run.
"""

import contextlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.schema import Settings
from kernels import naive_attention
from model.attention import tiled
from train import train
from training.stop import REASONS

Attention = Callable[..., Tensor]


def train_once(settings: Settings, folder: Path, attend: Attention | None = None) -> dict[str, Any]:
    """One training run in a folder of its own, logged at every step.

    attend: called in place of the attention that `settings` names.

    Returns the losses (NaN for the steps that were not run), the validation loss, and the run's seconds. A loss that
    was not finite is NaN.
    """
    summary = train_aside(replace(settings, train=replace(settings.train, log_every=1)), folder, attend)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [record["loss"] for record in records if "loss" in record]
    found += [None] * (settings.train.steps - len(found))
    *losses, val_loss = (math.nan if loss is None else loss for loss in (*found, summary.get("val_loss")))
    return {"losses": losses, "val_loss": val_loss, "seconds": summary["seconds"]}


def refuse_to_resume(settings: Settings) -> None:
    """Raise ValueError for `resume`. A program of several runs calls this before the first."""
    if settings.resume:
        raise ValueError(f"resume={settings.resume} goes on with one run, and these are several; leave it out")


def train_aside(settings: Settings, folder: Path, attend: Attention | None = None) -> dict[str, Any]:
    """Call `train` in a folder of its own, with its output in console.txt there, and return the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "console.txt").open("w") as text, contextlib.redirect_stdout(text):
        summary = train(settings, folder, attend=attend)
    exit_if_stopped(summary)
    return summary


def exit_if_stopped(summary: dict[str, Any]) -> None:
    """Exit if a signal or a time limit stopped the run: signals mean the whole program; part of a run is no figure."""
    code = summary["exit_code"] or summary["signal"]
    if code in REASONS:
        reason = summary["stopped"] or "a signal"
        print(f"ended by {reason}: without all of its runs there is no figure", file=sys.stderr)
        sys.exit(code)


# ---- nulls


def disguised(seed: int, block_k: int, head_dim: int, device: torch.device) -> Attention:
    """Naive attention with q and k in one random orthonormal basis, (q R)(k R)^T = q k^T, v in a second, keys in tiles.

    Every product and sum rounds differently, and the change of basis rounds once more: noise of every kind that a
    correct kernel makes, and somewhat more of it.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    normal = torch.randn(2, head_dim, head_dim, dtype=torch.float64, device="cpu", generator=generator)
    # computed here, because inside a call it would break a compiler's graph
    basis, values = (torch.linalg.qr(x)[0].to(device=device, dtype=torch.float32) for x in normal)

    def attend(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        turned = ((x.float() @ basis).to(q.dtype) for x in (q, k))
        # packed documents have lengths of their own
        tiles = {} if options.get("documents") else {"block_q": q.shape[2], "block_k": block_k}
        o = tiled(*turned, (v.float() @ values).to(v.dtype), **tiles, **options)
        return (o.float() @ values.T).to(q.dtype)

    return attend


def nulls(count: int, seq_len: int, head_dim: int, device: torch.device) -> dict[str, Attention]:
    """Return `count` nulls by name, each with its own basis and with the keys in two or three tiles."""
    found: dict[str, Attention] = {}
    for number in range(count):
        block_k = -(-seq_len // (2 + number % 2))
        found[f"null {number}: tiles of {block_k} keys"] = disguised(number, block_k, head_dim, device)
    return found


# ---- mutants


def online_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    running_max: bool = True,
    rescale: bool = True,
    global_indices: bool = True,
    off_by_one: bool = False,
    sums_in_bfloat16: bool = False,
    **options,
) -> Tensor:
    """Causal online softmax over tiles of keys in the inputs' precision, with a switch for each mistake.

    A tile is a quarter of the keys, so that a Python loop over tiles stays short.
    """
    num_q, num_k, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
    block = max(16, num_k // 4)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    tiles = []
    for q_start in range(0, num_q, block):
        q_tile = q[:, :, q_start : q_start + block]
        maximum = q_tile.new_full(q_tile.shape[:-1], -math.inf if running_max else 0.0)
        total, acc = torch.zeros_like(maximum), torch.zeros_like(q_tile)
        visible = min(num_k, q_start + block + num_k - num_q + int(off_by_one))
        for k_start in range(0, visible, block):
            k_tile, v_tile = (x[:, :, k_start : k_start + block] for x in (k, v))
            rows = torch.arange(q_tile.shape[2], device=q.device)[:, None]
            cols = torch.arange(k_tile.shape[2], device=q.device)[None, :]
            if global_indices:
                rows, cols = rows + q_start + num_k - num_q, cols + k_start
            scores = (q_tile @ k_tile.mT * scale).masked_fill(cols > rows + int(off_by_one), -math.inf)
            new_maximum = torch.maximum(maximum, scores.detach().amax(-1)) if running_max else maximum
            base = new_maximum.masked_fill(new_maximum == -math.inf, 0.0)
            probs = torch.exp(scores - base[..., None])
            correction = torch.exp(maximum - base) if rescale else torch.ones_like(base)
            total = total * correction + probs.sum(-1)
            if sums_in_bfloat16:
                total = total.bfloat16().to(q.dtype)
            acc = acc * correction[..., None] + probs @ v_tile
            maximum = new_maximum
        tiles.append(acc / total[..., None])
    return torch.cat(tiles, 2)


def _lost_block(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """Naive attention whose dK leaves out the last quarter of the queries."""
    first = 3 * q.shape[2] // 4
    seen = naive_attention(*(x[:, :, :first] for x in (q, k, v)), causal=True)
    return torch.cat([seen, naive_attention(q[:, :, first:], k.detach(), v, causal=True)], 2)


def _swapped(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """(B, H, N, D) written as if it were (B, N, H, D)."""
    o = naive_attention(q, k, v, causal=True)
    return o.transpose(1, 2).reshape(o.shape)


# name -> (function, the quantity where a comparison must find it)
MUTANTS: dict[str, tuple[Attention, str]] = {
    "no running maximum": (lambda *x, **o: online_softmax(*x, running_max=False), "O"),
    "no rescaling": (lambda *x, **o: online_softmax(*x, rescale=False), "O"),
    "mask off by one": (lambda *x, **o: online_softmax(*x, off_by_one=True), "O"),
    "tile-local mask": (lambda *x, **o: online_softmax(*x, global_indices=False), "O"),
    "scale x 1.01": (lambda q, k, v, **o: naive_attention(q, k, v, causal=True, scale=1.01 * q.shape[3] ** -0.5), "O"),
    "dK without one block": (_lost_block, "dK"),
    "heads and tokens swapped": (_swapped, "O"),
    "sums in bfloat16": (lambda *x, **o: online_softmax(*x, sums_in_bfloat16=True), "O"),
}
