"""The public function: checks meaning, casts under autocast, then calls the operator; imports no Triton."""

import torch
from torch import Tensor

from kernels import ops
from kernels.device import capability, interpreting
from kernels.inputs import autocast_inputs, check_inputs

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_HEAD_DIM = 16  # the smallest inner dimension of a tensor-core product
_MAX_HEAD_DIM = 256  # beyond it the accumulators of one tile no longer fit the register file


def unsupported_reason(device: torch.device | str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why `flash_attention` cannot run here, in one sentence with the remedy; None when it can."""
    device = torch.device(device)
    if head_dim < _MIN_HEAD_DIM or head_dim > _MAX_HEAD_DIM:
        return (
            f"head_dim {head_dim} is not supported by flash attention "
            f"({_MIN_HEAD_DIM} to {_MAX_HEAD_DIM}); use attention=sdpa"
        )
    if dtype not in _DTYPES:
        return f"dtype {dtype} is not supported by flash attention (float32, bfloat16, float16); use attention=naive"
    if device.type == "cuda":
        major, minor = capability(torch.cuda.current_device() if device.index is None else device.index)
        if major < 8:
            return (
                f"compute capability {major}.{minor} is not supported by flash attention (8.0 or newer); "
                "use attention=sdpa"
            )
        return None
    if device.type != "cpu":
        return f"device type {device.type} is not supported by flash attention (cuda); use attention=sdpa"
    if not interpreting():
        return (
            "flash attention needs an NVIDIA GPU; use attention=sdpa, "
            "or set TRITON_INTERPRET=1 before the start to test it on a CPU"
        )
    return None


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention `softmax(scale * q k^T) v` in tiles: nothing of size Nq x Nk is ever in memory.

    Args:
        q: (B, Hq, Nq, D), float32, bfloat16 or float16, D from 16 to 256. Any strides; a last dimension that
            is not contiguous costs a copy. Under autocast all three are cast as PyTorch's own attention casts
            them.
        k, v: (B, Hkv, Nk, D), q's dtype and device; Hq is a multiple of Hkv and query head h reads head
            `h // (Hq // Hkv)`.
        causal: query i sees key j when `j <= i + Nk - Nq` (aligned bottom-right). A row that sees no key
            gives 0, LSE -inf and zero gradients.
        scale: factor on the scores; 1/sqrt(D) by default.
        return_lse: also return the log of the softmax denominator.

    Returns:
        O (B, Hq, Nq, D) in q's dtype, stored as (B, Nq, Hq, D) so that merging the heads costs no copy. With
        `return_lse`, also LSE (B, Hq, Nq), float32, natural logarithm. Both are differentiable; the backward
        is deterministic.

    Raises:
        ValueError: before any launch, naming the argument, its value and what is allowed.

    Source: FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.
    """
    q, k, v = autocast_inputs(q, k, v)
    scale = check_inputs(q, k, v, scale)
    reason = unsupported_reason(q.device, q.dtype, q.shape[3])
    if reason is not None:
        raise ValueError(reason)
    if scale <= 0.0:  # the kernels scale the row maximum instead of every score, which needs a positive scale
        q, scale = (-q, -scale) if scale < 0.0 else (q * 0.0, 1.0)
    o, lse = ops.flash_fwd(q, k, v, causal, scale)
    return (o, lse) if return_lse else o
