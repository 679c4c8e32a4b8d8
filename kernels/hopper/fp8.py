"""Attention on 8-bit inputs, for inference: the public functions and the operator. Imports no Triton.

`quantize_per_head` brings a tensor to e4m3 with one scale a head; `flash_attention_fp8` takes three such tensors. It
has no gradient and no fallback: where the kernel does not run it raises.
"""

import torch
from torch import Tensor

from ..inputs import check_fp8_call
from ..options import Options
from .when import hopper_fp8_unsupported_reason

E4M3_MAX = 448.0
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
    reason = hopper_fp8_unsupported_reason(q, k, v)
    if reason is not None:
        raise ValueError(reason)
    o, lse = flash_fwd_fp8(q, k, v, *scales, options.causal, options.scale)
    return (o, lse) if return_lse else o


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
