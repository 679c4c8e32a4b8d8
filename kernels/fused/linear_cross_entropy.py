"""The output head and its loss in one: the logits of all tokens are never alive together.

At 65,536 tokens the logits of GPT-2's vocabulary and their gradient are 12.3 of the 34.5 GiB that a training step of
the 124M model takes. Here a few thousand tokens at a time have logits, and the gradient overwrites these: both matrix
products that need it (dh and dW) run at once, and backward only multiplies them by the incoming scalar. Nothing is
computed twice. Idea: Liger Kernel, arXiv:2410.10989, section 3.2.
"""

import torch
from torch import Tensor

from ..call import autocast_dtype
from ..device import OPERATORS
from ..flops import register_flop_formulas
from ..support import refuse_forward_mode, refuse_second_derivative, refuse_torch_func
from .cross_entropy import check_float, check_targets, cross_entropy_fwd, is_whole

# Adding a chunk's share to weight's fp32 gradient moves 8 bytes an entry, so longer chunks are faster; and on a GPU of
# 132 multiprocessors 5,632 rows are one whole wave of dh's tiles. Measured for 65,536 tokens of GPT-2's vocabulary (one
# H200, torch 2.11.0, commit 3dd22e9, scripts.bench.loss), ms and GiB: 29.8 and 0.7 in chunks of 2,048, 28.0 and 0.8 of
# 4,096, 27.6 and 0.9 of 5,632, 28.1 and 1.2 of 8,192, 27.6 and 1.9 of 16,384; 26.1 and 12.4 with all logits at once.
CHUNK_TOKENS = 5632
CHUNK_LOGITS = 2**25  # 64 MiB in 16 bit: with a vocabulary of characters one chunk, and a sixth of the launches


def linear_cross_entropy(
    h: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk_tokens: int | None = None
) -> Tensor:
    """`cross_entropy(h @ weight.T, targets, vocab_size)`: nats, summed over the rows that count, an fp32 scalar.

    Args:
        h: (T, C), any float dtype.
        weight: (columns, C); rows from `vocab_size` on are padding: no probability, a zero gradient.
        targets: (T,) int64 below `vocab_size`; a negative one does not count. On CUDA a larger id makes the loss NaN.
        chunk_tokens: how many tokens have logits at a time, at least 1; None: 5,632, or as many as have 2^25 logits.

    The products run in the autocast dtype, or h's without autocast or in float64; loss and the sum over chunks that is
    weight's gradient are fp32. Gradients are returned in the inputs' dtypes, and only a first derivative exists.
    """
    if h.dim() != 2 or weight.dim() != 2 or h.shape[1] != weight.shape[1]:
        shapes = f"h has shape {tuple(h.shape)} and weight {tuple(weight.shape)}"
        raise ValueError(f"{shapes}; expected (tokens, channels) and (columns, channels)")
    if weight.device != h.device:
        raise ValueError(f"weight is on {weight.device} but h is on {h.device}; move them to one device")
    check_targets(targets, h, vocab_size, len(weight))
    check_float("h", h)
    check_float("weight", weight)
    refuse_forward_mode("linear_cross_entropy", "cross_entropy of the logits", h, weight)
    refuse_torch_func("linear_cross_entropy", "cross_entropy of the logits", maps=True)
    if chunk_tokens is None:
        chunk_tokens = max(CHUNK_TOKENS, CHUNK_LOGITS // len(weight))
    elif not is_whole(chunk_tokens) or chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be an integer of at least 1, or None")
    register_flop_formulas()
    # evaluation needs no gradient, which leaves out two of the three products
    h = h.to(autocast_dtype(h))
    return linear_cross_entropy_fwd(h, weight, targets, vocab_size, chunk_tokens, torch.is_grad_enabled())[0]


@torch.library.custom_op(f"{OPERATORS}::linear_cross_entropy_fwd", mutates_args=())
def linear_cross_entropy_fwd(
    h: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk_tokens: int, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and its gradients: dh (T, C) in h's dtype and dweight (columns, C) fp32; both (0,) if not wanted."""
    table = weight.to(h.dtype)
    loss = h.new_zeros((), dtype=torch.float32)
    dh = torch.empty_like(h) if with_gradient else h.new_empty(0)
    dweight = h.new_zeros(weight.shape if with_gradient else 0, dtype=torch.float32)
    memory = h.new_empty(min(chunk_tokens, len(h)), len(table))  # for every chunk's logits
    for start in range(0, len(h), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        logits = torch.mm(h[part], table.T, out=memory[: len(h) - start])
        loss += _loss_and_gradient(logits, targets[part], vocab_size, with_gradient)
        if with_gradient:
            torch.mm(logits, table, out=dh[part])
            _add_product(dweight, logits, h[part])
    return loss, dh, dweight


@linear_cross_entropy_fwd.register_fake
def _(h, weight, targets, vocab_size, chunk_tokens, with_gradient):
    dh = torch.empty_like(h) if with_gradient else h.new_empty(0)
    dweight = h.new_empty(weight.shape if with_gradient else 0, dtype=torch.float32)
    return h.new_empty((), dtype=torch.float32), dh, dweight


def _loss_and_gradient(logits: Tensor, targets: Tensor, vocab_size: int, with_gradient: bool) -> Tensor:
    """The summed loss of some rows. With `with_gradient` their gradient overwrites the logits."""
    if logits.is_cuda:
        from .cross_entropy_kernels import launch_cross_entropy_in_place

        if with_gradient:
            return launch_cross_entropy_in_place(logits, targets, vocab_size).sum()
        return cross_entropy_fwd(logits, targets, vocab_size)[0].sum()
    counts = targets >= 0
    index = targets.where(counts, 0)[:, None]
    scores = logits[:, :vocab_size].float()
    log_p = scores.log_softmax(dim=-1)
    loss = -log_p.gather(1, index).squeeze(1).where(counts, 0.0).sum()
    if with_gradient:
        dlogits = log_p.exp_().scatter_add_(1, index, log_p.new_full(index.shape, -1.0)) * counts[:, None]
        logits[:, :vocab_size] = dlogits
        logits[:, vocab_size:] = 0.0
    return loss


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a^T b, with the sum in fp32 whatever a and b are."""
    if a.dtype == total.dtype:
        total.addmm_(a.T, b)
    elif a.is_cuda:
        torch.addmm(total, a.T, b, out_dtype=total.dtype, out=total)
    else:
        total += a.T @ b


def _setup_context(ctx, inputs, output):
    _, dh, dweight = output
    ctx.mark_non_differentiable(dh, dweight)
    ctx.save_for_backward(dh, dweight)
    ctx.weight_dtype = inputs[1].dtype


def _backward(ctx, dloss: Tensor, _dh: None, _dweight: None):
    refuse_second_derivative("linear_cross_entropy", "torch.nn.functional.cross_entropy")
    dh, dweight = ctx.saved_tensors
    return (dh * dloss).to(dh.dtype), (dweight * dloss).to(ctx.weight_dtype), None, None, None, None


linear_cross_entropy_fwd.register_autograd(_backward, setup_context=_setup_context)
