"""Activation checkpointing: keep a block's input, drop the rest, compute it again in backward.

The code says "recompute", because here the word "checkpoint" means files. Source: arXiv:1604.06174.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

MODES = ("none", "pointwise", "full", "every_n", "selective")


def is_recomputed(mode: str, every: int, layer: int) -> bool:
    """Whether block `layer` (from 0) is recomputed: all of them (full, selective), or each `every`-th.

    With "pointwise" none is: there the MLP recomputes what follows its first product, and stops before its second.
    """
    return mode in ("full", "selective") or (mode == "every_n" and layer % every == 0)


def recompute(block: nn.Module, *inputs: Any, keep_attention: bool = False) -> Tensor:
    """Run `block(*inputs)` and save only its inputs for backward; with `keep_attention` attention's outputs too.

    The random state is kept and put back, so dropout draws the same mask the second time: the gradients are
    those of the plain call, bit for bit where the operators are deterministic.
    """
    policy = {"context_fn": _keeping_attention} if keep_attention else {}
    return checkpoint(block, *inputs, use_reentrant=False, **policy)


def _keeping_attention():
    """The outputs of attention (O and LSE) are small, and cost most to compute again: N^2 where the rest costs N."""
    attention = [
        torch.ops.flashgpt.flash_fwd.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]
    return create_selective_checkpoint_contexts(attention)
