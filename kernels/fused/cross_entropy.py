"""Cross-entropy of a vocabulary's logits: one read of them forward, one read and one write backward.

At 65,536 tokens the logits of GPT-2's vocabulary are 6.6 GB, the largest tensor of a training step: the loss should
cost what moving them costs, and no more. An odd vocabulary size (50,257) must not prevent vector loads either.

This file is the contract (torch only); the kernels load when a CUDA tensor, or the interpreter, needs them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import OPERATORS
from ..support import refuse_forward_mode


def cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Negative log-likelihood of `targets` in nats, summed over the rows that count: an fp32 scalar.

    Args:
        logits: (T, columns), any float dtype, contiguous rows. Columns from `vocab_size` on are padding: they get
            no probability and a zero gradient.
        targets: (T,) int64 below `vocab_size`; a negative one does not count. On CUDA a larger id makes the loss NaN.

    Triton on CUDA, PyTorch's own elsewhere; computed in fp32, the gradient is returned in the logits' dtype.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; expected (tokens, columns)")
    check_targets(targets, logits, vocab_size, logits.shape[1])
    check_float("logits", logits)
    if logits.is_cuda:
        refuse_forward_mode("cross_entropy on CUDA", "torch.nn.functional.cross_entropy", logits)
        return cross_entropy_fwd(logits, targets, vocab_size)[0].sum()
    return F.cross_entropy(logits[:, :vocab_size].float(), targets.clamp(min=-1), ignore_index=-1, reduction="sum")


def check_targets(targets: Tensor, rows: Tensor, vocab_size: int, columns: int) -> None:
    """Raises ValueError unless each row has a target and the vocabulary fits into the columns."""
    if targets.shape != rows.shape[:1]:
        raise ValueError(f"targets has shape {tuple(targets.shape)}; expected ({len(rows)},), one of each row")
    if targets.dtype != torch.int64:
        raise ValueError(f"targets has dtype {targets.dtype}; expected torch.int64")
    if targets.device != rows.device:
        raise ValueError(f"targets is on {targets.device} but the rows are on {rows.device}; move them to one device")
    if not is_whole(vocab_size) or not 1 <= vocab_size <= columns:  # a kernel would read beyond the row
        raise ValueError(f"vocab_size is {vocab_size}; it must be from 1 to the {columns} columns of the logits")


def is_whole(number: object) -> bool:
    """Whether it is an integer, also one that torch.compile keeps open."""
    return isinstance(number, int | torch.SymInt) or hasattr(number, "__index__")


def check_float(name: str, x: Tensor) -> None:
    """Raises ValueError for integers and booleans."""
    if not x.is_floating_point():
        raise ValueError(f"{name} has dtype {x.dtype}; expected a float dtype")


@torch.library.custom_op(f"{OPERATORS}::cross_entropy_fwd", mutates_args=())
def cross_entropy_fwd(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp of each row, (T,) fp32, in nats."""
    from .cross_entropy_kernels import launch_cross_entropy_fwd

    return launch_cross_entropy_fwd(logits, targets, vocab_size)


@cross_entropy_fwd.register_fake
def _(logits, targets, vocab_size):
    return logits.new_empty(logits.shape[:1], dtype=torch.float32), logits.new_empty(
        logits.shape[:1], dtype=torch.float32
    )


@torch.library.custom_op(f"{OPERATORS}::cross_entropy_bwd", mutates_args=())
def cross_entropy_bwd(dloss: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, vocab_size: int) -> Tensor:
    """Gradient of the logits, (T, columns) in their dtype; `dloss` (T,) fp32 is the gradient of each row's loss."""
    from .cross_entropy_kernels import launch_cross_entropy_bwd

    return launch_cross_entropy_bwd(dloss, logits, targets, lse, vocab_size)


@cross_entropy_bwd.register_fake
def _(dloss, logits, targets, lse, vocab_size):
    return logits.new_empty(logits.shape)


def _setup_context(ctx, inputs, output):
    logits, targets, ctx.vocab_size = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(logits, targets, lse)


def _backward(ctx, dloss: Tensor, _dlse: Tensor | None):
    logits, targets, lse = ctx.saved_tensors
    return cross_entropy_bwd(dloss, logits, targets, lse, ctx.vocab_size), None, None


cross_entropy_fwd.register_autograd(_backward, setup_context=_setup_context)
