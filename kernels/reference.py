"""The definition of correct: attention in plain PyTorch, materialised and tiled, on any device and in any
precision.

`naive_attention` is what eager GPT code writes, and what people compare losses with. `tiled_attention` is the
flash algorithm, forward and hand-written backward, with the kernels' rounding points, readable beside the
Triton source.
"""

import math

import torch
from torch import Tensor

from kernels.inputs import autocast_inputs, check_inputs


def _visible(num_q: int, num_k: int, q_start: int, q_len: int, k_start: int, k_len: int, device) -> Tensor:
    """(q_len, k_len) booleans: query i sees key j when j <= i + num_k - num_q (causal, bottom-right)."""
    rows = torch.arange(q_start, q_start + q_len, device=device)[:, None]
    cols = torch.arange(k_start, k_start + k_len, device=device)[None, :]
    return cols <= rows + (num_k - num_q)


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with the (Nq, Nk) scores in memory: `O = softmax(scale * Q K^T) V`, `LSE = logsumexp(scale *
    Q K^T)`.

    Shapes, dtypes and errors as in `kernels.flash_attention`, but any device, float64, and any head_dim.
    Products run in the input dtype, the softmax in float32 (float64 for float64 inputs). PyTorch's autograd
    differentiates it.
    """
    q, k, v = autocast_inputs(q, k, v)
    scale = check_inputs(q, k, v, scale)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    num_q, num_k = q.shape[2], k.shape[2]
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if causal:
        hidden = ~_visible(num_q, num_k, 0, num_q, 0, num_k, q.device)
        scores = scores.masked_fill(hidden, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    if causal and num_q > num_k:  # the first rows see no key: their softmax is 0/0, and its gradient must not escape
        probs = probs.masked_fill(hidden, 0.0)
    o = probs.to(q.dtype) @ v
    if not return_lse:
        return o
    return o, torch.logsumexp(scores, dim=-1)


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    block_q: int = 128,
    block_k: int = 128,
) -> Tensor | tuple[Tensor, Tensor]:
    """Flash attention in plain PyTorch: online softmax over tiles of block_q queries and block_k keys.

    Shapes, dtypes and errors as in `kernels.flash_attention`, but any device, float64, and any head_dim.
    Accumulates in float32 (float64 for float64 inputs); P and dS are rounded to the input dtype before they
    are multiplied, as in the kernels. Saves Q, K, V, O and LSE for the backward, which recomputes P.

    Source: FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.
    """
    q, k, v = autocast_inputs(q, k, v)
    scale = check_inputs(q, k, v, scale)
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block < 1:
            raise ValueError(f"{name} is {block}; it must be at least 1")
    o, lse = _TiledAttention.apply(q, k, v, causal, scale, block_q, block_k)
    return (o, lse) if return_lse else o


def _tiles(num_q: int, num_k: int, causal: bool, block_q: int, block_k: int):
    """Yield (query slice, key slice) for every pair of tiles in which some query sees some key."""
    for q_start in range(0, num_q, block_q):
        q_end = min(q_start + block_q, num_q)
        k_limit = min(num_k, q_end + num_k - num_q) if causal else num_k
        for k_start in range(0, k_limit, block_k):
            yield slice(q_start, q_end), slice(k_start, min(k_start + block_k, num_k))


def _tile_scores(q_tile: Tensor, k_tile: Tensor, rows: slice, cols: slice, causal, scale, num_q, num_k) -> Tensor:
    """scale * Q K^T of one tile, -inf where the mask hides the key. (B, Hkv, G, rows, cols)."""
    scores = (q_tile @ k_tile.transpose(-1, -2)) * scale
    if not causal:
        return scores
    q_len, k_len = rows.stop - rows.start, cols.stop - cols.start
    visible = _visible(num_q, num_k, rows.start, q_len, cols.start, k_len, scores.device)
    return scores.masked_fill(~visible, -math.inf)


class _TiledAttention(torch.autograd.Function):
    """Forward and backward of flash attention; the derivation stands beside each line."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale, block_q, block_k):
        wide = torch.promote_types(q.dtype, torch.float32)
        batch, heads, num_q, head_dim = q.shape
        kv_heads, num_k = k.shape[1], k.shape[2]
        # (B, Hkv, G, Nq, D) against (B, Hkv, 1, Nk, D): broadcasting is grouped-query attention
        grouped_q = q.reshape(batch, kv_heads, heads // kv_heads, num_q, head_dim)
        acc = torch.zeros(grouped_q.shape, dtype=wide, device=q.device)
        running_max = torch.full(grouped_q.shape[:-1], -math.inf, dtype=wide, device=q.device)
        running_sum = torch.zeros(grouped_q.shape[:-1], dtype=wide, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            for rows, cols in _tiles(num_q, num_k, causal, block_q, block_k):
                q_tile = grouped_q[..., rows, :].to(wide)
                k_tile, v_tile = (x[:, :, None, cols].to(wide) for x in (k, v))
                scores = _tile_scores(q_tile, k_tile, rows, cols, causal, scale, num_q, num_k)
                old_max = running_max[..., rows]
                new_max = torch.maximum(old_max, scores.amax(-1))
                # a row that has seen no key keeps -inf, and -inf - -inf would be NaN: subtract 0 there
                base = new_max.masked_fill(new_max == -math.inf, 0.0)
                probs = torch.exp(scores - base[..., None])
                rescale = torch.exp(old_max - base)
                running_sum[..., rows] = running_sum[..., rows] * rescale + probs.sum(-1)
                product = probs.to(q.dtype).to(wide) @ v_tile
                acc[..., rows, :] = acc[..., rows, :] * rescale[..., None] + product
                running_max[..., rows] = new_max
        empty = running_sum == 0
        o = acc / running_sum.masked_fill(empty, 1.0)[..., None]
        lse = running_max + torch.log(running_sum)  # -inf + log 0 = -inf on empty rows
        o = o.to(q.dtype).reshape(q.shape)
        lse = lse.reshape(batch, heads, num_q)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal, ctx.scale, ctx.block_q, ctx.block_k = causal, scale, block_q, block_k
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dlse):
        q, k, v, o, lse = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        batch, heads, num_q, head_dim = q.shape
        kv_heads, num_k = k.shape[1], k.shape[2]
        grouped = (batch, kv_heads, heads // kv_heads, num_q, head_dim)
        do = torch.zeros_like(o) if do is None else do
        # dS = P * (dP - rowsum(P * dP)) and rowsum(P * dP) = rowsum(dO * O); dLSE/dS = P, so dLSE joins it
        delta = (do.to(wide) * o.to(wide)).sum(-1)
        delta = delta if dlse is None else delta - dlse
        delta = delta.reshape(grouped[:-1])
        # exp(S - inf) = 0: rows without a visible key need no case of their own
        lse = lse.masked_fill(lse == -math.inf, math.inf).reshape(grouped[:-1])
        grouped_q, grouped_do = q.reshape(grouped), do.reshape(grouped)
        dq = torch.zeros(grouped, dtype=wide, device=q.device)
        dk, dv = (torch.zeros(k.shape, dtype=wide, device=q.device) for _ in range(2))
        with torch.autocast(q.device.type, enabled=False):
            for rows, cols in _tiles(num_q, num_k, ctx.causal, ctx.block_q, ctx.block_k):
                q_tile, do_tile = (x[..., rows, :].to(wide) for x in (grouped_q, grouped_do))
                k_tile, v_tile = (x[:, :, None, cols].to(wide) for x in (k, v))
                scores = _tile_scores(q_tile, k_tile, rows, cols, ctx.causal, ctx.scale, num_q, num_k)
                probs = torch.exp(scores - lse[..., rows, None])
                dprobs = do_tile @ v_tile.transpose(-1, -2)
                dscores = (probs * (dprobs - delta[..., rows, None])).to(q.dtype).to(wide)
                probs = probs.to(q.dtype).to(wide)
                dv[:, :, cols] += (probs.transpose(-1, -2) @ do_tile).sum(2)  # over the group's query heads
                dk[:, :, cols] += (dscores.transpose(-1, -2) @ q_tile).sum(2)
                dq[..., rows, :] += dscores @ k_tile
        dq = (dq * ctx.scale).to(q.dtype).reshape(q.shape)
        return dq, (dk * ctx.scale).to(k.dtype), dv.to(v.dtype), None, None, None, None
