"""The definition of correct: attention in plain PyTorch with its scores in memory, on any device, in any
precision.

It is what eager GPT code writes, and what people compare losses with. PyTorch's autograd differentiates it.
"""

import math
from functools import partial

import torch
from torch import Tensor

from .block_masks import pairs_of
from .call import Options, check_call
from .documents import call_packed, check_documents
from .philox import keep_mask
from .support import features_of, why_not


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with the (Nq, Nk) scores in memory: `O = softmax(scale * Q K^T) V`, `LSE = logsumexp(scale *
    Q K^T)`. Packed documents are computed one after the other, in a Python loop.

    Shapes, dtypes, options and errors as in `flash_attention`, but any device, float64, and any head_dim. Products run
    in the input dtype, the softmax in float32 (float64 for float64 inputs).
    """
    o, lse = by_documents("naive", partial(_naive, return_lse), *check_call(q, k, v, **options))
    return (o, lse) if return_lse else o


def naive_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options,
) -> Tensor | tuple[Tensor, Tensor]:
    """`naive_attention` of packed documents: shapes, options and errors as in `flash_attention_varlen`."""
    return call_packed(naive_attention, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)


def by_documents(
    name: str, attention, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor | None]:
    """O and LSE by attention(q, k, v, options, first_row), called once, or once per document. LSE is None where
    attention returns None.

    ValueError where `name`, a row of kernels/support.py, does not support these options together.
    """
    features = features_of(options, q.shape[1], k.shape[1], q.shape[3], v.shape[3])
    if reason := why_not(name, q.dtype, features):
        raise ValueError(reason)
    if not options.packed:
        return attention(q, k, v, options)
    check_documents(options, q.shape[2], k.shape[2])
    q_starts, k_starts = options.cu_seqlens_q.tolist(), options.cu_seqlens_k.tolist()
    outputs, lses = [], []
    for i in range(len(q_starts) - 1):
        rows, cols = slice(q_starts[i], q_starts[i + 1]), slice(k_starts[i], k_starts[i + 1])
        one = options
        if options.alibi_slopes is not None:
            one = options._replace(alibi_slopes=options.alibi_slopes[i : i + 1])
        o, lse = attention(q[:, :, rows], k[:, :, cols], v[:, :, cols], one, rows.start)
        outputs.append(o)
        lses.append(lse)
    return torch.cat(outputs, dim=2), None if lses[0] is None else torch.cat(lses, dim=2)


def visible_pairs(rows: Tensor, cols: Tensor, num_q: int, num_k: int, options: Options) -> Tensor | None:
    """Which query sees which key, as booleans of rows against cols; None where all see all.

    Aligned bottom-right: query i stands at key i + num_k - num_q. A block mask counts both from 0, and its booleans
    have two more dimensions in front, batch and heads, of size 1 where the mask does not depend on them.
    """
    if options.masked:
        return pairs_of(options.mask_starts, options.mask_visits, options.mask_bits, rows, cols, num_q, num_k)
    distance = cols - (rows + (num_k - num_q))
    if options.causal:
        return distance <= 0
    if not options.local:
        return None
    visible = torch.ones_like(distance, dtype=torch.bool)
    if options.window_left >= 0:
        visible &= distance >= -options.window_left
    if options.window_right >= 0:
        visible &= distance <= options.window_right
    return visible


def alibi_bias(rows: Tensor, cols: Tensor, num_q: int, num_k: int, slopes: Tensor) -> Tensor:
    """-slope * |i + num_k - num_q - j| for slopes (B, Hq): (B, Hq, rows, cols).

    Source: Press et al., arXiv:2108.12409, in flash-attention's two-sided form.
    """
    distance = (rows + (num_k - num_q) - cols).abs()
    return -slopes[:, :, None, None] * distance


def kept_pairs(rows: Tensor, cols: Tensor, batch: int, heads: int, options: Options, first_row: int) -> Tensor:
    """The dropout mask (batch, heads, rows, cols); first_row is the document's first row in the whole tensor."""
    numbers = torch.arange(batch * heads, device=rows.device).reshape(batch, heads, 1, 1)
    return keep_mask(options.dropout_seed, options.dropout_p, numbers, rows, cols, first_row)


def _naive(
    return_lse: bool, q: Tensor, k: Tensor, v: Tensor, options: Options, first_row: int = 0
) -> tuple[Tensor, Tensor | None]:
    batch, heads, num_q, _ = q.shape
    num_k = k.shape[2]
    group = heads // k.shape[1]
    if group != 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    rows = torch.arange(num_q, device=q.device)[:, None]
    cols = torch.arange(num_k, device=q.device)[None, :]
    scores = (q @ k.transpose(-1, -2)) * options.scale
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi_slopes is not None:
        scores = scores + alibi_bias(rows, cols, num_q, num_k, options.alibi_slopes)
    visible = visible_pairs(rows, cols, num_q, num_k, options)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if options.sinks is not None:  # one more column, a score per head
        column = options.sinks[None, :, None, None].expand(batch, heads, num_q, 1).to(scores.dtype)
        scores = torch.cat([scores, column], dim=-1)
        empty = (scores == -math.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(empty, 0.0)  # a row without any key and with a sink of -inf has a gradient of 0
    probs = torch.softmax(scores, dim=-1)[..., :num_k]
    if visible is not None and (num_q > num_k or options.masked):
        # rows may see no key: their softmax is 0/0, and its gradient must not escape
        probs = probs.masked_fill(~visible, 0.0)
    probs = probs.to(q.dtype)
    if options.dropout_p:
        kept = kept_pairs(rows, cols, batch, heads, options, first_row)
        probs = probs * kept / (1.0 - options.dropout_p)
    o = probs @ v
    if not return_lse:
        return o, None
    lse = torch.logsumexp(scores, dim=-1)
    lse = lse.masked_fill(lse == math.inf, math.nan)  # a score of +inf gives NaN, as in O and with a running max
    return o, lse if options.sinks is None else lse.masked_fill(empty.squeeze(-1), -math.inf)
