"""Activation checkpointing: keep a block's input, drop the rest, compute it again in backward.

The code says "recompute", because here the word "checkpoint" means files. Source: arXiv:1604.06174.
"""

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MODES = ("none", "full", "every_n")


def is_recomputed(mode: str, every: int, layer: int) -> bool:
    """Whether block `layer` (from 0) is recomputed: all of them (full), or each `every`-th from the first."""
    return mode == "full" or (mode == "every_n" and layer % every == 0)


def recompute(block: nn.Module, *inputs: Any) -> Tensor:
    """Run `block(*inputs)` and save only its inputs for backward.

    The random state is kept and put back, so dropout draws the same mask the second time: the gradients are
    those of the plain call, bit for bit where the operators are deterministic.
    """
    return checkpoint(block, *inputs, use_reentrant=False)
