"""Where a token stands: in its document, and as the angles by which rotary positions turn queries and keys."""

import torch
from torch import Tensor


def rope_tables(seq_len: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of position x frequency, each (seq_len, 1, D) fp32.

    Source: RoFormer, arXiv:2104.09864, with the pairs half a head apart.
    """
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # (D/2,)
    # in float64: at position 32,768 an fp32 angle is already off by 1e-3
    angle = torch.arange(seq_len, dtype=torch.float64)[:, None, None] * frequency  # (seq_len, 1, D/2)
    cos, sin = angle.cos().float(), angle.sin().float()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def positions_in(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Each token's position in its document, (num_tokens,) int64, from (documents + 1,) starts."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, tokens.to(cu_seqlens.dtype), right=True) - 1
    return tokens - cu_seqlens[document]
