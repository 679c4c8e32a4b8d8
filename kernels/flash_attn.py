"""Two functions with FlashAttention's names, argument names and layout, for code that was written for it.

`scripts.export_kernels` exports them as the public functions of a kernel for Hugging Face's `kernels`.
"""

from torch import Tensor

from .api import flash_attention, flash_attention_varlen
from .call import check_tensor


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = True,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """`flash_attention` of q (B, Nq, Hq, D), k and v (B, Nk, Hkv, D); returns (B, Nq, Hq, D). s_aux are the sinks. The
    backward is deterministic whatever `deterministic` says. With return_attn_probs it also returns LSE (B, Hq, Nq), and
    None for the probabilities, which are never stored. Errors speak of `flash_attention`'s names and layout."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        check_tensor(name, x, "batch, tokens, heads, head_dim")
    o, lse = flash_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        causal=causal, scale=softmax_scale, window=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=s_aux,
        dropout_p=dropout_p, return_lse=True,
    )  # fmt: skip
    o = o.transpose(1, 2)
    return (o, lse, None) if return_attn_probs else o


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = True,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """`flash_attention_varlen` of (tokens, H, D) tensors; returns (tokens, Hq, D) and, as above, LSE (Hq, tokens)."""
    o, lse = flash_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        causal=causal, scale=softmax_scale, window=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=s_aux,
        dropout_p=dropout_p, return_lse=True,
    )  # fmt: skip
    return (o, lse, None) if return_attn_probs else o
