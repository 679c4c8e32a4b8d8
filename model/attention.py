"""Attention by name: the one place where the model chooses who computes softmax(q k^T) v.

Every function takes q (B, Hq, Nq, D), k and v (B, Hkv, Nk, D), where Hq is a multiple of Hkv, and returns
(B, Hq, Nq, D) in q's dtype. The causal mask is aligned bottom-right: query i sees key j when
j <= i + Nk - Nq, so the last query always sees every key. `scale` defaults to 1 / sqrt(D).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

AttentionFunction = Callable[..., Tensor]


def flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Our Triton kernels: nothing of size Nq x Nk in memory, forward or backward."""
    from kernels import flash_attention

    return flash_attention(q, k, v, causal=causal, scale=scale)


def naive(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """The formula, with its Nq x Nk matrix in memory: the baseline."""
    from kernels import naive_attention

    return naive_attention(q, k, v, causal=causal, scale=scale)


def tiled(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, **block_sizes: int
) -> Tensor:
    """Online softmax in plain PyTorch; `block_q` and `block_k` set the tile, kernels/ its default."""
    from kernels import tiled_attention

    return tiled_attention(q, k, v, causal=causal, scale=scale, **block_sizes)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """PyTorch's scaled_dot_product_attention, which picks its own kernel."""
    num_queries, num_keys = q.size(2), k.size(2)
    mask = None
    if causal and num_queries != num_keys:
        # is_causal aligns the mask top-left; ours is bottom-right, so unequal lengths need it spelled out.
        # One query (a cached step) sees every key and keeps the fast path without a mask.
        if num_queries > 1:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
            mask = mask.tril(num_keys - num_queries)
        causal = False
    grouped = q.size(1) != k.size(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


ATTENTION: dict[str, AttentionFunction] = {"flash": flash, "naive": naive, "tiled": tiled, "sdpa": sdpa}


def resolve_attention(name: str, device: torch.device | str, dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """Turn a configured name into the name of a backend that will run, and say why.

    Args:
        name: "auto" or a key of ATTENTION.
        device: where attention will run.
        dtype: of q, k and v, that is the autocast type where autocast is on.
        head_dim: D, in elements.

    Returns:
        (resolved name, reason): a key of ATTENTION and one sentence for the first lines of the run.

    Raises:
        ValueError: unknown name, or a backend asked for by name that cannot run here. Only "auto" may choose.
    """
    device = torch.device(device)
    if name in ("naive", "tiled", "sdpa"):
        return name, "asked for by name"
    if name == "auto" and device.type != "cuda":
        return "sdpa", f"auto: the device is {device.type}, flash is for CUDA"
    if name not in ("auto", "flash"):
        raise ValueError(f"model.attention={name} is unknown; use one of auto, {', '.join(ATTENTION)}")

    from kernels import unsupported_reason

    obstacle = unsupported_reason(device, dtype, head_dim)
    if obstacle is None:
        return "flash", "asked for by name" if name == "flash" else "auto: the device is cuda"
    if name == "flash":
        raise ValueError(f"model.attention=flash cannot run: {obstacle}")
    return "sdpa", f"auto: flash cannot run: {obstacle}"
