"""The statistics of `scripts.parity`: distances between loss curves, how large noise is, where attentions part.

A run's distance to the baseline is T, the mean over steps of log10 |loss - baseline's loss|. Rounding differences grow
from step to step, in every run alike, so T is compared with the T of the null runs, which differ from the baseline by
rounding alone. A backend passes when its T is at most mean + k sd of theirs: k is the one-sided normal tolerance
factor, which covers 99 % of all such runs with 95 % confidence. It is tested twice: over the first EARLY steps, where
rounding has not grown yet and a small mistake stands out, and over the whole run. The final validation loss is held to
the same factor around all runs of the baseline: itself, null runs and seeds.
"""

import math
import statistics
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from kernels import naive_attention
from scripts.selftest import OUTPUTS, gradients

EARLY = 10  # steps
SPANS = {"early": EARLY, "whole": None}  # name -> how many steps
# number of runs -> k for 99 % content and 95 % confidence (noncentral t quantile over sqrt(n); Odeh and Owen 1980)
TOLERANCE = {
    4: 7.042, 5: 5.741, 6: 5.062, 7: 4.642, 8: 4.354, 9: 4.143, 10: 3.981, 11: 3.852, 12: 3.747, 13: 3.659, 14: 3.585,
    15: 3.520, 16: 3.464, 17: 3.414, 18: 3.370, 19: 3.331, 20: 3.295,
}  # fmt: skip
QUANTITIES = ("O", "dV", "dQ", "dK")  # in the order in which an error spreads
STRESS_SCORE = 120.0  # beyond 88.7 exp overflows float32: only a running maximum survives
# in one call a correct kernel may have this many times the nulls' error: room for other roundings, not other formulas
ROOM = 10.0


def resolution(loss: float) -> float:
    """The spacing of float32 numbers at `loss` (4.8e-7 between 4 and 8): the least by which two losses can differ."""
    return 2.0 ** (math.frexp(loss)[1] - 24)


def log_distances(losses: list[float], baseline: list[float]) -> list[float]:
    """log10 of the distance at each step, at least a loss's resolution: null runs can be equal to the last bit. A loss
    that is not finite is infinitely far."""
    return [
        math.log10(max(abs(a - b), resolution(b))) if math.isfinite(a) else math.inf
        for a, b in zip(losses, baseline, strict=True)
    ]


def noise(nulls: list[list[float]], baseline: list[float]) -> tuple[dict, list[float]]:
    """What the null runs allow: the limits on T, early and over all steps, and the band of distances step by step.

    The band is for the largest distance so far: two curves cross now and then, and their distance at one step says
    little. No limit is below twice the spacing of float32 numbers. The null runs' distances are cut off at one spacing,
    so all may be equal and have no spread, but a loss and the baseline's are each rounded.
    """
    k = TOLERANCE[len(nulls)]
    curves = [log_distances(losses, baseline) for losses in nulls]
    least = [math.log10(2 * resolution(loss)) for loss in baseline]
    columns = zip(*(accumulate(curve, max) for curve in (*curves, least)), strict=True)
    band = [10 ** max(statistics.fmean(column) + k * statistics.stdev(column), own) for *column, own in columns]
    allowed = {"runs": len(nulls), "k": k, "content": 0.99, "confidence": 0.95}
    for span, steps in SPANS.items():
        means = [statistics.fmean(curve[:steps]) for curve in curves]
        center, spread = statistics.fmean(means), statistics.stdev(means)
        limit = max(center + k * spread, statistics.fmean(least[:steps]))
        allowed[span] = {"typical": 10**center, "limit": 10**limit}
    return allowed, band


def final_losses(baseline_runs: list[float]) -> dict[str, float]:
    """Where a right attention's final validation loss lies, from those of the baseline, its null runs and its seeds:
    mean +- k sd. The largest distance among a few seeds would not do: with two seeds, a third is further out in one
    case of three."""
    k = TOLERANCE[min(len(baseline_runs), max(TOLERANCE))]
    center, spread = statistics.fmean(baseline_runs), statistics.stdev(baseline_runs)
    return {"runs": len(baseline_runs), "k": k, "center": center, "limit": max(k * spread, resolution(center))}


def judge(losses: list[float], baseline: list[float], allowed: dict, band: list[float]) -> dict:
    """Whether a curve is as near to the baseline as noise is, and the first step at which it leaves the band.

    Distances are geometric means over steps, in nats.
    """
    curve = log_distances(losses, baseline)
    distances = {}
    for span, steps in SPANS.items():
        part = curve[:steps]
        distances[span] = 10 ** statistics.fmean(part) if all(map(math.isfinite, part)) else math.inf
    outside = [step for step, (d, edge) in enumerate(zip(curve, band, strict=True), 1) if 10**d > edge]
    passes = all(distances[span] <= allowed[span]["limit"] for span in SPANS)
    return {"distances": distances, "passes": passes, "first_outside": min(outside, default=None)}


Recorded = list[tuple[Tensor, Tensor, Tensor, Tensor]]  # q, k, v and dO of each layer


def compare(attend: Callable[..., Tensor], recorded: Recorded, options: dict) -> list[dict]:
    """`attend` on each layer's q, k, v and dO beside naive attention in float32: a row for each quantity."""
    rows = []
    for layer, (q, k, v, do) in enumerate(recorded):
        ours = gradients(attend, (q, k, v, do), causal=True, **options)
        exact = gradients(naive_attention, [x.float() for x in (q, k, v, do)], causal=True, **options)
        for name, a, b in zip(OUTPUTS, ours, exact, strict=True):
            a, b = a.double().flatten(), b.double().flatten()
            size = float(b.norm())
            rows.append(
                {
                    "layer": layer,
                    "quantity": name,
                    "relative_error": float((a - b).norm()) / max(size, 1e-300),
                    "size": float(a.norm()) / max(size, 1e-300),
                    "cosine": float(a @ b) / max(size * float(a.norm()), 1e-300),
                }
            )
    return rows


def stress(attend: Callable[..., Tensor], recorded: Recorded, options: dict) -> float:
    """Relative error of O where the first layer's scores reach STRESS_SCORE; inf where it is not finite."""
    q, k, v, _ = recorded[0]
    group = q.shape[1] // k.shape[1]
    scores = (q.float() @ k.float().repeat_interleave(group, 1).mT).abs().amax() * q.shape[-1] ** -0.5
    q = (q.float() * (STRESS_SCORE / scores)).to(q.dtype)
    with torch.no_grad():
        ours = attend(q, k, v, causal=True, **options)
        exact = naive_attention(q.float(), k.float(), v.float(), causal=True, **options)
    error = float((ours.double() - exact.double()).norm() / exact.double().norm())
    return error if math.isfinite(error) else math.inf


def fault(rows: list[dict], stressed: float, limits: dict[str, float]) -> str | None:
    """The first quantity beyond its limit, as one sentence; None where all are within."""
    for quantity in QUANTITIES:
        for row in rows:
            error = row["relative_error"]
            if row["quantity"] == quantity and not error <= limits[quantity]:
                return (
                    f"{quantity} of layer {row['layer']}: relative error {error:.2g} (at most {limits[quantity]:.2g}), "
                    f"size {row['size']:.4f}, cosine {row['cosine']:.6f} of naive's in float32"
                )
    if not stressed <= limits["stress"]:
        return f"O where scores reach {STRESS_SCORE:.0f}: relative error {stressed:.2g}; is there a running maximum?"
    return None


def limits_of(null_rows: list[list[dict]], null_stress: list[float]) -> dict[str, float]:
    """ROOM times the largest error of the nulls and of the baseline, by quantity."""
    limits = {
        name: ROOM * max(row["relative_error"] for rows in null_rows for row in rows if row["quantity"] == name)
        for name in QUANTITIES
    }
    return limits | {"stress": ROOM * max(null_stress)}
