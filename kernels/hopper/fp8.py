"""Attention on 8-bit inputs, for inference: the public functions, their definition and the operator. Imports no Triton.

`quantize_per_head` brings a tensor to e4m3 with one scale a head; `flash_attention_fp8` takes three such tensors. It
has no gradient and no fallback: where the kernel does not run it raises.
"""

import math

import torch
from torch import Tensor

from ..call import Options, check_call, check_tensor
from ..reference import visible_pairs
from ..support import why_not_fp8

E4M3_MAX = 448.0
FP8_P_SCALE = 256.0  # P is at most this before it is rounded: e4m3 ends at 448
_SMALLEST_SCALE = 2.0**-60  # so that the product of two scales, and its reciprocal, stay in fp32's range


def quantize_per_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x (B, H, N, D) of any float dtype to e4m3, each head of each batch entry with a scale of its own.

    Returns:
        x_fp8 (B, H, N, D) float8_e4m3fn in x's memory order, and scale (B, H) float32, so that x is about
        `x_fp8 * scale[:, :, None, None]`: the head's largest magnitude over 448, at least 2^-60 (a head of zeros).
        A head that holds NaN or an infinity has such a scale, and attention with it gives NaN.

    Raises ValueError where x has not four dimensions or is no float tensor.
    """
    if x.dim() != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected 4 dimensions (batch, heads, tokens, head_dim)")
    if not x.dtype.is_floating_point or x.dtype.itemsize == 1:
        raise ValueError(f"x has dtype {x.dtype}; expected float64, float32, bfloat16 or float16")
    largest = x.detach().abs().amax((2, 3)).float() if x.numel() else x.new_zeros(x.shape[:2], dtype=torch.float32)
    scale = (largest / E4M3_MAX).clamp(min=_SMALLEST_SCALE)
    return (x.detach() / scale[:, :, None, None]).to(torch.float8_e4m3fn), scale


def flash_attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of `q * q_scale`, `k * k_scale`, `v * v_scale` with 8-bit products. Inference only, sm_90 only.

    Args:
        q: (B, Hq, Nq, D) float8_e4m3fn, D 64 or 128, strides that are multiples of 16, the last one 1.
        k, v: (B, Hkv, Nk, D), Hq a multiple of Hkv.
        q_scale: float32, positive, of a shape that broadcasts to (B, Hq): one for each head, or one number for all.
        k_scale, v_scale: the same for (B, Hkv).
        causal, scale, return_lse: as in `flash_attention`; scale must be positive.

    Returns:
        O (B, Hq, Nq, D) bfloat16, stored as (B, Nq, Hq, D); with `return_lse`, also LSE (B, Hq, Nq), float32. V is
        transposed anew in each call, which costs 2 bytes of traffic for each of its elements.

    Raises:
        ValueError: before any launch, naming the argument, its value and what is allowed; also where an input asks for
            a gradient, and on every device but Hopper.

    Numerics: softmax and row sums in fp32; P in [0, 256] rounded to e4m3. `naive_attention_fp8` is the definition.
    Source: FlashAttention-3, arXiv:2407.08608, section 3.3.
    """
    q, k, v, scales, options = check_fp8_call(q, k, v, q_scale, k_scale, v_scale, causal, scale)
    reason = why_not_fp8(q, k, v)
    if reason is not None:
        raise ValueError(reason)
    o, lse = flash_fwd_fp8(q, k, v, *scales, options.causal, options.scale)
    return (o, lse) if return_lse else o


def naive_attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """What FP8 attention means: products of e4m3 numbers summed in fp32, and `256 exp(S - max S)` rounded to e4m3
    before it meets V. The row sum, and so LSE, is that of the unrounded P.

    Arguments, result and errors as of `flash_attention_fp8`, but any device and any head_dim. The kernel rounds
    P against the largest score so far, not the row's: equal in distribution, not in bits.
    """
    q, k, v, scales, options = check_fp8_call(q, k, v, q_scale, k_scale, v_scale, causal, scale)
    q_scale, k_scale, v_scale = (x[:, :, None, None] for x in scales)
    group = q.shape[1] // k.shape[1]
    q, k, v = q.float(), (k.float() * k_scale).repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = (q * q_scale) @ k.transpose(-1, -2) * options.scale
    rows = torch.arange(q.shape[2], device=q.device)[:, None]
    visible = visible_pairs(rows, torch.arange(k.shape[2], device=q.device), q.shape[2], k.shape[2], options)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    largest = scores.amax(-1, keepdim=True)
    probs = FP8_P_SCALE * torch.exp(scores - largest.masked_fill(largest == -math.inf, 0.0))
    row_sum = probs.sum(-1, keepdim=True)
    rounded = probs.to(torch.float8_e4m3fn).float()
    o = rounded @ v / row_sum.masked_fill(row_sum == 0.0, 1.0) * v_scale.repeat_interleave(group, 1)
    return (o.bfloat16(), torch.logsumexp(scores, -1)) if return_lse else o.bfloat16()


def check_fp8_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor], Options]:
    """Check a call on e4m3 tensors; return q, k, v, the scales as contiguous (B, Hq), (B, Hkv), (B, Hkv), options.

    Raises ValueError, naming the argument, its value and what is allowed.
    """
    named = {"q": q, "k": k, "v": v, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    for name, tensor in named.items():
        check_tensor(name, tensor)
        wanted = torch.float32 if name.endswith("scale") else torch.float8_e4m3fn
        if tensor.dtype != wanted:
            raise ValueError(f"{name} has dtype {tensor.dtype}; expected {wanted}, as quantize_per_head returns it")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} asks for a gradient, and FP8 attention has none; use torch.no_grad()")
    with torch.autocast(q.device.type, enabled=False):  # it would turn e4m3 into bfloat16
        q, k, v, options = check_call(q, k, v, causal=causal, scale=scale)
    if v.shape[3] != q.shape[3]:
        raise ValueError(f"v has head_dim {v.shape[3]} but q has {q.shape[3]}; they must be equal in FP8 attention")
    if options.scale <= 0.0:
        raise ValueError(f"scale is {options.scale}; it must be positive in FP8 attention")
    scales = []
    for name, factor, tensor in (("q_scale", q_scale, q), ("k_scale", k_scale, k), ("v_scale", v_scale, v)):
        heads = tensor.shape[:2]
        if factor.dim() > 2 or any(
            a not in (1, b) for a, b in zip(reversed(factor.shape), reversed(heads), strict=False)
        ):
            raise ValueError(f"{name} has shape {tuple(factor.shape)}; expected {tuple(heads)}, or one that broadcasts")
        if factor.device != q.device:
            raise ValueError(f"{name} is on {factor.device} but q is on {q.device}; move them to one device")
        scales.append(factor.expand(heads).contiguous())
    return q, k, v, tuple(scales), options


_LIBRARY = torch.library.Library("flashgpt", "FRAGMENT")
_LIBRARY.define(
    "flash_fwd_fp8(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, bool causal, "
    "float scale) -> (Tensor o, Tensor lse)"
)
flash_fwd_fp8 = torch.ops.flashgpt.flash_fwd_fp8.default


def _run(q, k, v, q_scale, k_scale, v_scale, causal, scale):
    from .fp8_kernel import launch_hopper_fp8

    return launch_hopper_fp8(q, k, v, q_scale, k_scale, v_scale, Options(causal, scale))


@torch.library.register_fake("flashgpt::flash_fwd_fp8", lib=_LIBRARY)
def _(q, k, v, q_scale, k_scale, v_scale, causal, scale):
    batch, heads, tokens, head_dim = q.shape
    o = q.new_empty((batch, tokens, heads, head_dim), dtype=torch.bfloat16).transpose(1, 2)
    return o, q.new_empty((batch, heads, tokens), dtype=torch.float32)


_LIBRARY.impl("flash_fwd_fp8", _run, "CompositeExplicitAutograd")
