"""The flash algorithm in plain PyTorch, forward and hand-written backward, readable beside the Triton source.

It has the kernels' rounding points and their order of options: soft-cap, ALiBi, mask.
"""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .block_masks import HIDDEN, block_table
from .call import Options, check_call
from .documents import call_packed
from .mask_visits import BLOCK
from .reference import alibi_bias, by_documents, kept_pairs, visible_pairs
from .support import refuse_forward_mode, refuse_second_derivative, refuse_torch_func


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    block_q: int = 128,
    block_k: int = 128,
    **options,
) -> Tensor | tuple[Tensor, Tensor]:
    """Flash attention in plain PyTorch: online softmax over tiles of block_q queries and block_k keys.

    Shapes, dtypes, options and errors as in `flash_attention`, but any device, float64, and any head_dim. Accumulates
    in float32 (float64 for float64 inputs); P and dS are rounded to the input dtype before they are multiplied, as in
    the kernels. Saves Q, K, V, O and LSE for the backward, which recomputes P. Packed documents come one after the
    other, in a Python loop.

    Source: FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.
    """
    o, lse = by_documents("tiled", _tiled(block_q, block_k), *check_call(q, k, v, **options))
    return (o, lse) if return_lse else o


def tiled_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tiled_attention` of packed documents: shapes, options and errors as in `flash_attention_varlen`."""
    return call_packed(tiled_attention, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)


def _tiled(block_q: int, block_k: int):
    """The core as a function of (q, k, v, options, first_row)."""
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if not isinstance(block, int) or block < 1:
            raise ValueError(f"{name} is {block}; it must be an integer of at least 1")

    def attention(q, k, v, options, first_row=0):
        refuse_torch_func("tiled_attention", "naive_attention")
        refuse_forward_mode("tiled_attention", "naive_attention", q, k, v)
        if torch.jit.is_tracing():  # it ends in an error of the tracer's own
            raise RuntimeError("tiled_attention is not for torch.jit.trace: use naive_attention")
        # the loops are unrolled over these numbers, which a compiler must know before it traces the Function
        tiles = list(visible_tiles(q.shape[2], k.shape[2], options, block_q, block_k))
        k, v = k.view_as(k), v.view_as(v)  # given one tensor twice, a compiled Function loses a gradient (torch 2.11)
        return _TiledAttention.apply(q, k, v, options.sinks, options._replace(sinks=None), tiles, first_row)

    return attention


def visible_tiles(
    num_q: int, num_k: int, options: Options, block_q: int, block_k: int
) -> Iterator[tuple[slice, slice]]:
    """(query slice, key slice) of each pair of tiles where some query may see some key; queries are the outer loop."""
    if options.masked:  # tiles of any size: those that touch a block which is visible in some batch entry and head
        table = block_table(options.mask_starts, options.mask_visits, num_q, num_k)
        shown = (table != HIDDEN).any(0).any(0).cpu()
        for q_start, k_start in itertools.product(range(0, num_q, block_q), range(0, num_k, block_k)):
            q_end, k_end = min(q_start + block_q, num_q), min(k_start + block_k, num_k)
            if shown[q_start // BLOCK : -(-q_end // BLOCK), k_start // BLOCK : -(-k_end // BLOCK)].any():
                yield slice(q_start, q_end), slice(k_start, k_end)
        return
    ahead = 0 if options.causal else options.window_right
    for q_start in range(0, num_q, block_q):
        q_end = min(q_start + block_q, num_q)
        k_limit = num_k if ahead < 0 else min(num_k, q_end + num_k - num_q + ahead)
        k_first = 0 if options.window_left < 0 else max(0, q_start + num_k - num_q - options.window_left)
        for k_start in range(k_first // block_k * block_k, k_limit, block_k):
            yield slice(q_start, q_end), slice(k_start, min(k_start + block_k, num_k))


class _Tile:
    """One tile's scores and what else the backward needs of the tile, (B, Hkv, G, rows, cols) each."""

    def __init__(self, q_tile: Tensor, k_tile: Tensor, rows: slice, cols: slice, sizes, options: Options, first_row):
        num_q, num_k = sizes
        self.shape = (*q_tile.shape[:3], rows.stop - rows.start, cols.stop - cols.start)
        self.options, self.first_row = options, first_row
        self.rows = torch.arange(rows.start, rows.stop, device=q_tile.device)[:, None]
        self.cols = torch.arange(cols.start, cols.stop, device=q_tile.device)[None, :]
        scores = (q_tile @ k_tile.transpose(-1, -2)) * options.scale
        self.cap_gradient = None
        if options.softcap:
            tanh = torch.tanh(scores / options.softcap)
            scores, self.cap_gradient = options.softcap * tanh, 1.0 - tanh.square()
        if options.alibi_slopes is not None:
            bias = alibi_bias(self.rows, self.cols, num_q, num_k, options.alibi_slopes)
            scores = scores + bias.reshape(self.shape).to(scores.dtype)
        visible = visible_pairs(self.rows, self.cols, num_q, num_k, options)
        if visible is not None and visible.dim() == 4:
            batch, kv_heads, group, *tile = self.shape
            visible = visible.expand(batch, kv_heads * group, *tile).reshape(self.shape)
        self.scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)

    def kept(self) -> Tensor:
        """The dropout mask."""
        batch, kv_heads, group, _, _ = self.shape
        kept = kept_pairs(self.rows, self.cols, batch, kv_heads * group, self.options, self.first_row)
        return kept.reshape(self.shape)


# The backward reads these again. They are saved so that PyTorch raises where one was written to in between.
_READ_AGAIN = ("alibi_slopes", "dropout_seed", "mask_starts", "mask_visits", "mask_bits")


class _TiledAttention(torch.autograd.Function):
    """Forward and backward of flash attention; the derivation stands beside each line."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, options, tiles, first_row):
        wide = torch.promote_types(q.dtype, torch.float32)
        batch, heads, num_q, head_dim = q.shape
        kv_heads, num_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
        # (B, Hkv, G, Nq, D) against (B, Hkv, 1, Nk, D): broadcasting is grouped-query attention
        grouped_q = q.reshape(batch, kv_heads, heads // kv_heads, num_q, head_dim)
        acc = torch.zeros(*grouped_q.shape[:-1], head_dim_v, dtype=wide, device=q.device)
        if sinks is None:
            running_max = torch.full(grouped_q.shape[:-1], -math.inf, dtype=wide, device=q.device)
            running_sum = torch.zeros(grouped_q.shape[:-1], dtype=wide, device=q.device)
        else:  # a key without a value: it is in the maximum and in the sum from the start
            running_max = sinks.to(wide).reshape(1, kv_heads, -1, 1).expand(grouped_q.shape[:-1]).clone()
            running_sum = torch.ones(grouped_q.shape[:-1], dtype=wide, device=q.device)
        with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):  # no autocast on meta
            for rows, cols in tiles:
                q_tile = grouped_q[..., rows, :].to(wide)
                k_tile, v_tile = (x[:, :, None, cols].to(wide) for x in (k, v))
                tile = _Tile(q_tile, k_tile, rows, cols, (num_q, num_k), options, first_row)
                old_max = running_max[..., rows]
                new_max = torch.maximum(old_max, tile.scores.amax(-1))
                # a row that has seen no key keeps -inf, and -inf - -inf would be NaN: subtract 0 there
                base = new_max.masked_fill(new_max == -math.inf, 0.0)
                probs = torch.exp(tile.scores - base[..., None])
                rescale = torch.exp(old_max - base)
                running_sum[..., rows] = running_sum[..., rows] * rescale + probs.sum(-1)
                if options.dropout_p:  # after the sum: dropout acts on normalised probabilities
                    probs = probs * tile.kept()
                product = probs.to(q.dtype).to(wide) @ v_tile
                acc[..., rows, :] = acc[..., rows, :] * rescale[..., None] + product
                running_max[..., rows] = new_max
        empty = running_sum == 0
        o = acc / (running_sum.masked_fill(empty, 1.0)[..., None] * (1.0 - options.dropout_p))
        lse = running_max + torch.log(running_sum)  # -inf + log 0 = -inf on empty rows
        o = o.to(q.dtype).reshape(batch, heads, num_q, head_dim_v)
        lse = lse.reshape(batch, heads, num_q)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, o, lse, *(getattr(options, name) for name in _READ_AGAIN))
        ctx.options, ctx.tiles, ctx.first_row = options, tiles, first_row
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        refuse_second_derivative("tiled_attention", "naive_attention")
        q, k, v, sinks, o, lse, *tensors = ctx.saved_tensors
        options = ctx.options._replace(**dict(zip(_READ_AGAIN, tensors, strict=True)))
        wide = torch.promote_types(q.dtype, torch.float32)
        batch, heads, num_q, _ = q.shape
        kv_heads, num_k = k.shape[1], k.shape[2]
        grouped = (batch, kv_heads, heads // kv_heads, num_q)
        do = torch.zeros_like(o) if do is None else do
        # dS = P * (dP - rowsum(P * dP)) and rowsum(P * dP) = rowsum(dO * O); dLSE/dS = P, so dLSE joins it
        delta = (do.to(wide) * o.to(wide)).sum(-1)
        delta = delta if dlse is None else delta - dlse
        # exp(S - inf) = 0: rows without a visible key need no special case, except for a dLSE that is not finite
        hidden = lse == -math.inf
        lse, delta = lse.masked_fill(hidden, math.inf), delta.masked_fill(hidden, 0.0)
        dsinks = None
        if sinks is not None:  # the sink's value is 0, and so is its dP
            dsinks = -(torch.exp(sinks.to(wide)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
        delta, lse = delta.reshape(grouped), lse.reshape(grouped)
        grouped_q, grouped_do = (x.reshape(*grouped, x.shape[3]) for x in (q, do))
        dq = torch.zeros(grouped_q.shape, dtype=wide, device=q.device)
        dk, dv = (torch.zeros(x.shape, dtype=wide, device=q.device) for x in (k, v))
        keep_scale = 1.0 / (1.0 - options.dropout_p)
        with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):  # no autocast on meta
            for rows, cols in ctx.tiles:
                q_tile, do_tile = (x[..., rows, :].to(wide) for x in (grouped_q, grouped_do))
                k_tile, v_tile = (x[:, :, None, cols].to(wide) for x in (k, v))
                tile = _Tile(q_tile, k_tile, rows, cols, (num_q, num_k), options, ctx.first_row)
                probs = torch.exp(tile.scores - lse[..., rows, None])
                dprobs = do_tile @ v_tile.transpose(-1, -2)
                dropped = probs
                if options.dropout_p:
                    kept = tile.kept()
                    dropped, dprobs = probs * kept, dprobs * kept * keep_scale
                dscores = probs * (dprobs - delta[..., rows, None])
                if tile.cap_gradient is not None:
                    dscores = dscores * tile.cap_gradient
                dscores = dscores.to(q.dtype).to(wide)
                dropped = dropped.to(q.dtype).to(wide)
                dv[:, :, cols] += (dropped.transpose(-1, -2) @ do_tile).sum(2)  # over the group's query heads
                dk[:, :, cols] += (dscores.transpose(-1, -2) @ q_tile).sum(2)
                dq[..., rows, :] += dscores @ k_tile
        dq = (dq * options.scale).to(q.dtype).reshape(q.shape)
        dk, dv = (dk * options.scale).to(k.dtype), (dv * keep_scale).to(v.dtype)
        return dq, dk, dv, dsinks, None, None, None
