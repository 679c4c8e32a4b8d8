"""The support matrix: which feature works in which implementation, pass and dtype.

The one source of the refusals at run time, of the tests' parametrisation and of the README's table.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from .options import Options

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Feature:
    """One line of the matrix."""

    name: str  # as in messages and in tests
    meaning: str  # for the README


FEATURES = {
    f.name: f
    for f in (
        Feature("full", "every query sees every key, Nq and Nk of any length"),
        Feature("causal", "aligned bottom-right where Nq and Nk differ"),
        Feature("gqa", "grouped and multi-query heads: Hq a multiple of Hkv"),
        Feature("head_dim_v", "V's head_dim differs from Q's"),
        Feature("lse", "log-sum-exp output, differentiable"),
        Feature("window", "sliding window (left, right), cost N x window"),
        Feature("softcap", "scores capped by softcap * tanh(score / softcap)"),
        Feature("alibi_slopes", "ALiBi bias, slopes (H,) or (B, H), constants"),
        Feature("sinks", "attention sinks (H,) with their gradient"),
        Feature("dropout", "counter-based: the seed alone decides the mask, in every implementation"),
        Feature("varlen", "packed documents that do not see each other"),
    )
}

_ALL = frozenset(FEATURES)
_ALL_DTYPES = frozenset(DTYPES)


@dataclass(frozen=True)
class Implementation:
    """What one implementation can do: every feature named here, in every dtype named here, both passes, but
    for the exceptions."""

    name: str
    features: frozenset[str]
    dtypes: frozenset[torch.dtype]
    instead: str  # the remedy that its refusals name
    exceptions: frozenset[tuple[str, Pass, torch.dtype]] = frozenset()

    def supports(self, feature: str, which: Pass, dtype: torch.dtype) -> bool:
        """One cell of the matrix."""
        return feature in self.features and dtype in self.dtypes and (feature, which, dtype) not in self.exceptions


IMPLEMENTATIONS = {
    i.name: i
    for i in (
        Implementation("naive", _ALL, _ALL_DTYPES, instead="attention=tiled"),
        Implementation("tiled", _ALL, _ALL_DTYPES, instead="attention=naive"),
        Implementation("flash", _ALL, _ALL_DTYPES - {torch.float64}, instead="attention=naive"),
        # PyTorch's own, as the model calls it; its dropout draws from a stream of its own
        Implementation(
            "sdpa",
            frozenset({"full", "causal", "gqa", "head_dim_v"}),
            _ALL_DTYPES,
            instead="attention=flash or attention=naive",
        ),
    )
}


_HALVES = frozenset({torch.float16, torch.bfloat16})
_FORWARD_ONLY = ("window", "softcap", "varlen")  # the portable backward takes their O and LSE

# The kernels behind "flash" that are chosen where they can be (and, in the backward, where they are the faster ones).
# For which head_dims: kernels/hopper/when.py.
KERNELS = {
    "hopper": Implementation(
        "hopper",
        frozenset({"full", "causal", "gqa", "lse", *_FORWARD_ONLY}),
        _HALVES,
        instead="the portable kernels",
        exceptions=frozenset((feature, "backward", dtype) for feature in _FORWARD_ONLY for dtype in _HALVES),
    )
}


def features_of(options: Options, num_heads: int, num_kv_heads: int, head_dim: int, head_dim_v: int) -> list[str]:
    """The features that a checked call uses, in the matrix's order."""
    used = {
        "full": not options.causal and not options.local,
        "causal": options.causal,
        "gqa": num_heads != num_kv_heads,
        "head_dim_v": head_dim != head_dim_v,
        "lse": False,  # every implementation here computes it; only the caller knows whether it is returned
        "window": options.local,
        "softcap": options.softcap > 0.0,
        "alibi_slopes": options.alibi_slopes is not None,
        "sinks": options.sinks is not None,
        "dropout": options.dropout_p > 0.0,
        "varlen": options.packed,
    }
    return [name for name in FEATURES if used[name]]


def refusal(implementation: str, features: Iterable[str], dtype: torch.dtype, backward: bool = True) -> str | None:
    """Why an implementation cannot run these features together in this dtype: one sentence with the remedy, or
    None.

    "window with dropout in float32 is not supported by NAME; use attention=OTHER"
    """
    chosen = IMPLEMENTATIONS.get(implementation) or KERNELS[implementation]
    if not (chosen.exceptions and backward) and dtype in chosen.dtypes and chosen.features.issuperset(features):
        return None  # what most calls hear
    passes = PASSES if backward else PASSES[:1]
    missing = [f for f in features if not all(chosen.supports(f, which, dtype) for which in passes)]
    if not missing:
        return None
    short = str(dtype).removeprefix("torch.")
    return f"{' with '.join(missing)} in {short} is not supported by {implementation}; use {chosen.instead}"


def table() -> str:
    """The matrix as a Markdown table, for the README: a cell names the dtypes that work forward and backward, for
    the Hopper kernels those that work forward."""
    names = [*IMPLEMENTATIONS, *KERNELS]
    lines = ["| feature | " + " | ".join(names) + " | meaning |", "|---" * (len(names) + 2) + "|"]
    for feature in FEATURES.values():
        cells = [_cell(i, feature.name) for i in (*IMPLEMENTATIONS.values(), *KERNELS.values())]
        lines.append(f"| {feature.name} | " + " | ".join(cells) + f" | {feature.meaning} |")
    return "\n".join(lines)


def _cell(implementation: Implementation, feature: str) -> str:
    short = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
    passes = PASSES[:1] if implementation.name in KERNELS else PASSES
    working = [short[d] for d in DTYPES if all(implementation.supports(feature, which, d) for which in passes)]
    return " ".join(working) or "no"
