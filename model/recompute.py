"""Activation checkpointing: keep a block's input, drop the rest, compute it again in backward.

The code says "recompute", as a "checkpoint" here is a folder of files. Source: arXiv:1604.06174.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

MODES = ("none", "pointwise", "full", "selective")

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default}  # the second in 8 bits
ATTENTION_OPERATORS = {
    torch.ops.flashgpt.flash_fwd.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def recompute(block: Callable[..., Tensor], *inputs: Any, keep: tuple[tuple[int, int], ...] | None = None) -> Tensor:
    """Run `block(*inputs)` and save only its inputs for backward.

    With `keep` (which may be empty) also what attention returned, and the products with these (inputs, outputs).

    The random state is restored, so that dropout draws the same mask the second time: the gradients are those of the
    plain call, bit for bit where the operators are deterministic. Without autograd it is the plain call.
    """
    if not torch.is_grad_enabled():
        return block(*inputs)
    if keep is not None:
        policy = partial(_policy, keep)
    elif torch.compiler.is_compiling():  # without a policy the compiler would keep what our autograd functions make
        policy = _keep_nothing
    else:
        return checkpoint(block, *inputs, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)


def _keep_nothing(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _policy(products: tuple[tuple[int, int], ...], ctx: Any, operator: Any, *args: Any, **kwargs: Any):
    """Save attention, and products whose right-hand matrix has one of these shapes; compute the rest again."""
    is_product = operator in PRODUCTS and tuple(args[1].shape) in products
    kept = is_product or operator in ATTENTION_OPERATORS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
