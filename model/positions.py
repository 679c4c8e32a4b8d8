"""Where a token stands: in its context, in its document, and as the angles by which rotary positions turn queries and
keys."""

import torch
from torch import Tensor

from model.cache import Cache
from model.config import GPTConfig


def check_input(
    tokens: Tensor,
    targets: Tensor | None,
    cu_seqlens: Tensor | None,
    kv_cache: Cache | None,
    config: GPTConfig,
    seq_len: int,
) -> None:
    """Raise ValueError where a GPT's `forward` cannot accept these arguments. Ids are not read from the device."""
    if not _is_of(tokens, 2, torch.int64, torch.int32) or tokens.numel() == 0:
        raise ValueError(f"tokens are {_found(tokens)}; give ids as an int64 tensor of at least one token, (B, N)")
    if targets is not None and (not isinstance(targets, Tensor) or targets.shape != tokens.shape):
        raise ValueError(f"targets are {_found(targets)}; expected the tokens' shape, {tuple(tokens.shape)}")
    if cu_seqlens is not None and (not _is_of(cu_seqlens, 1, torch.int32) or len(cu_seqlens) < 2):
        raise ValueError(f"cu_seqlens are {_found(cu_seqlens)}; expected int32 (documents + 1,), at least one document")
    if kv_cache is None:
        if tokens.size(1) > seq_len:
            raise ValueError(
                f"a context of {tokens.size(1)} tokens is longer than the model's seq_len={seq_len}; shorten it"
            )
        return
    if targets is not None or cu_seqlens is not None:
        raise ValueError("kv_cache goes with tokens alone; leave targets and cu_seqlens out")
    cache = getattr(kv_cache, "cache", kv_cache)  # of `Prompts`: the one they are read into
    layers, _, heads, _, head_dim = cache.keys.shape
    fits = (layers, heads, head_dim) == (config.num_layers, config.kv_heads, config.head_dim)
    if not fits or cache.max_tokens > seq_len:
        raise ValueError(
            f"the KV cache has {layers} layers of {heads} heads of width {head_dim} and rows of {cache.max_tokens} "
            f"tokens; the model has {config.num_layers} of {config.kv_heads} of {config.head_dim} and "
            f"seq_len={seq_len}: make one by its make_cache"
        )


def _is_of(x: object, dims: int, *dtypes: torch.dtype) -> bool:
    return isinstance(x, Tensor) and x.dim() == dims and x.dtype in dtypes


def _found(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def rope_tables(seq_len: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of position x frequency, each (seq_len, 1, D) fp32.

    Source: RoFormer, arXiv:2104.09864, with the pairs half a head apart.
    """
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)  # (D/2,)
    # in float64: at position 32,768 an fp32 angle is already off by 1e-3
    angle = torch.arange(seq_len, dtype=torch.float64, device="cpu")[:, None, None] * frequency  # (seq_len, 1, D/2)
    cos, sin = angle.cos().float(), angle.sin().float()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def positions_in(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Each token's position in its document, (num_tokens,) int64, from (documents + 1,) starts."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, tokens.to(cu_seqlens.dtype), right=True) - 1
    return tokens - cu_seqlens[document]
