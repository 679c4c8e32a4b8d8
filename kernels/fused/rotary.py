"""Rotary positions, and the cut of one fused projection into q, k and v, in one pass over memory.

A pair (x_i, x_{i + D/2}) of a query or key turns by its token's angle, after a norm of its head where there is one;
values are copied. Source: RoFormer, arXiv:2104.09864. The gradient turns back by the same angle, so backward is the
same kernel with the sine negated. A compiler that joins three gradients computes all three cases for every element;
here a program knows which head it has.

This file is the contract (torch only); the kernel loads when a CUDA tensor, or the interpreter, needs it.
"""

import torch
from torch import Tensor

from ..device import OPERATORS
from ..ops import mark_written, needs_dispatcher
from ..support import refuse_forward_mode
from .rms_norm import rms_norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + D/2}) of x (B, N, H, D) by its token's angle, in fp32; returned in x's dtype.

    cos, sin: (N, 1, D) fp32, the sine negative in its first half.
    """
    # a roll swaps the halves: a compiler turns it into indexing, where a cat costs a stored fp32 copy
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin).to(x.dtype)


def rotate_and_split(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, norm_eps: float | None = None, *, overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut qkv into q, k and v, with q and k turned to their positions.

    Args:
        qkv: (B, N, Hq + 2 Hkv, D), any float dtype, D even; query heads first, then keys, then values.
        cos, sin: (N, 1, D) fp32 of each token's position, the sine negative in its first half. No gradient.
        num_heads: Hq.
        norm_eps: of an RMS norm, without a gain, of each head of q and k before it is turned; None: no norm.
        overwrite: qkv is not read afterwards. On CUDA q and k are then turned in place, unless a gradient or a tracer
            needs their old values, qkv's last dimension has a stride, or heads share memory.

    Raises:
        ValueError: cos and sin are not of N tokens, or of another shape.

    Returns:
        q (B, Hq, N, D), k and v (B, Hkv, N, D) in qkv's dtype, stored as (B, N, H, D), or views of qkv.

    Triton on CUDA, PyTorch's own operators elsewhere.
    """
    if qkv.dim() != 4:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}; expected (B, N, Hq + 2 Hkv, D)")
    if not cos.shape[0] == sin.shape[0] == qkv.shape[1]:  # not `len`, which torch.export takes for a fixed number
        raise ValueError(f"cos and sin have {len(cos)} and {len(sin)} positions but qkv has {qkv.shape[1]} tokens")
    wanted = 1, qkv.shape[3]
    if cos.shape[1:] != wanted or sin.shape[1:] != wanted or qkv.shape[3] % 2:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; expected (N, 1, D), and an even D: qkv has "
            f"{qkv.shape[3]}"
        )
    if not 0 < num_heads < qkv.shape[2] or (qkv.shape[2] - num_heads) % 2:
        raise ValueError(f"num_heads is {num_heads} and qkv has {qkv.shape[2]} heads; what is left must be k's and v's")
    if qkv.is_cuda:
        refuse_forward_mode("rotate_and_split on CUDA", "rotate", qkv)
        wants_gradient = torch.is_grad_enabled() and qkv.requires_grad
        if wants_gradient or needs_dispatcher(qkv, cos, sin):
            return rotary_fwd(qkv, cos, sin, num_heads, norm_eps)[:3]
        if overwrite:
            return _rotary_in_place(qkv, cos, sin, num_heads, norm_eps)
        return _rotary_fwd(qkv, cos, sin, num_heads, norm_eps)[:3]
    kv_heads = (qkv.shape[2] - num_heads) // 2
    qk, v = qkv.split([num_heads + kv_heads, kv_heads], dim=2)
    if norm_eps is not None:
        qk = rms_norm(qk, norm_eps).to(qkv.dtype)
    q, k = rotate(qk, cos, sin).split([num_heads, kv_heads], dim=2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _rotary_in_place(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, norm_eps: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    shared = any(size > 1 and not stride for size, stride in zip(qkv.shape, qkv.stride(), strict=True))
    if qkv.stride(-1) != 1 or shared:  # the kernel would write beside the numbers, or turn them several times
        return _rotary_fwd(qkv, cos, sin, num_heads, norm_eps)[:3]
    from .rotary_kernel import launch_rotary

    kv_heads = (qkv.shape[2] - num_heads) // 2
    q, k, v = qkv.transpose(1, 2).split([num_heads, kv_heads, kv_heads], 1)
    scale = None if norm_eps is None else qkv.new_empty(*qkv.shape[:2], num_heads + kv_heads, dtype=torch.float32)
    launch_rotary(qkv, q, k, v, cos, sin, scale, norm_eps, in_place=True)
    mark_written(qkv)
    return q, k, v


def _empty_split(qkv: Tensor, num_heads: int, norm_eps: float | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, tokens, heads, head_dim = qkv.shape
    kv_heads = (heads - num_heads) // 2
    q, k, v = (qkv.new_empty(batch, tokens, h, head_dim).transpose(1, 2) for h in (num_heads, kv_heads, kv_heads))
    normed = 0 if norm_eps is None else num_heads + kv_heads
    return q, k, v, qkv.new_empty(batch, tokens, normed, dtype=torch.float32)


def _rotary_fwd(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, norm_eps: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v as `rotate_and_split` describes them, and the norm's factor of each head: (B, N, Hq + Hkv) fp32."""
    from .rotary_kernel import launch_rotary

    q, k, v, scale = _empty_split(qkv, num_heads, norm_eps)
    launch_rotary(qkv, q, k, v, cos, sin, scale, norm_eps)
    return q, k, v, scale


rotary_fwd = torch.library.custom_op(f"{OPERATORS}::rotary_fwd", _rotary_fwd, mutates_args=())


@rotary_fwd.register_fake
def _(qkv, cos, sin, num_heads, norm_eps=None):
    return _empty_split(qkv, num_heads, norm_eps)


@torch.library.custom_op(f"{OPERATORS}::rotary_bwd", mutates_args=())
def rotary_bwd(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q: Tensor | None = None,
    k: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """The gradient of qkv, (B, N, Hq + 2 Hkv, D), contiguous; q, k and scale are the forward's where it had a norm.

    A rotation keeps lengths and angles, so the norm's gradient scale (dx - y mean(dx y)) is computed on turned heads.
    """
    from .rotary_kernel import launch_rotary

    dqkv = _empty_packed(dq, dk)
    launch_rotary(dqkv, dq, dk, dv, cos, sin, scale, turned=(q, k), inverse=True)
    return dqkv


@rotary_bwd.register_fake
def _(dq, dk, dv, cos, sin, q=None, k=None, scale=None):
    return _empty_packed(dq, dk)


def _empty_packed(q: Tensor, k: Tensor) -> Tensor:
    batch, num_heads, tokens, head_dim = q.shape
    return q.new_empty(batch, tokens, num_heads + 2 * k.shape[1], head_dim)


def _setup_context(ctx, inputs, output):
    _, cos, sin, _, norm_eps = inputs
    q, k, _, scale = output
    ctx.mark_non_differentiable(scale)
    ctx.save_for_backward(cos, sin, *(() if norm_eps is None else (q, k, scale)))


def _backward(ctx, dq, dk, dv, _dscale):
    return rotary_bwd(dq, dk, dv, *ctx.saved_tensors), None, None, None, None


rotary_fwd.register_autograd(_backward, setup_context=_setup_context)
