"""Pieces that the forward and the backward kernels share, so that a gradient cannot drift from its function.

Here are the order of tiles, loads and stores, the dot product, and the step from scores to masked scores.
BLOCK_Q counts queries, BLOCK_K keys. Pieces with strides take them as (batch, head, token), in elements; the
last one is 1.
"""

import math

import triton
import triton.language as tl

LN_2 = tl.constexpr(math.log(2.0))
LOG2_E = tl.constexpr(1.0 / math.log(2.0))


@triton.jit
def program_tile(num_tiles, num_heads, heads_per_section, LAST_TILE_FIRST: tl.constexpr):
    """Which tile of which (batch * head) this program owns, as (tile, head).

    The grid is one-dimensional: its y and z axes end at 65,535. Heads come in sections whose K and V stay in
    L2 together; inside a section the tile is the slow axis, so that all heads' longest tiles start first and
    the tail is short.
    """
    program = tl.program_id(0)
    section = program // (num_tiles * heads_per_section)
    first_head = section * heads_per_section
    rest = program - first_head * num_tiles
    heads_here = tl.minimum(heads_per_section, num_heads - first_head)
    tile = rest // heads_here
    head = first_head + rest - tile * heads_here
    if LAST_TILE_FIRST:
        tile = num_tiles - 1 - tile
    return tile, head


@triton.jit
def head_base(tensor, strides, batch, head, TMA: tl.constexpr):
    """Where a head starts: a pointer, with 64-bit arithmetic; a TMA descriptor addresses heads itself."""
    if TMA:
        return tensor
    else:
        return tensor + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def load_tile(
    base,
    strides,
    batch,
    head,
    start,
    num_tokens,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    RAGGED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load rows start .. start + BLOCK of one head as (BLOCK, BLOCK_D); what lies outside the tensor reads as
    0.

    RAGGED says that rows may lie past num_tokens. A 0 matters even where the score is masked: 0 * NaN is NaN.
    """
    if TMA:
        return base.load([batch, head, start, 0]).reshape([BLOCK, BLOCK_D])
    else:
        rows = tl.arange(0, BLOCK)
        cols = tl.arange(0, BLOCK_D)
        # the tile's first row in 64 bits, what is inside the tile in 32: cheap, and right beyond 2^31
        # elements
        pointers = base + tl.cast(start, tl.int64) * strides[2] + (rows[:, None] * strides[2] + cols[None, :])
        if RAGGED and HEAD_DIM != BLOCK_D:
            keep = (start + rows < num_tokens)[:, None] & (cols < HEAD_DIM)[None, :]
            return tl.load(pointers, mask=keep, other=0.0)
        elif RAGGED:
            return tl.load(pointers, mask=(start + rows < num_tokens)[:, None], other=0.0)
        elif HEAD_DIM != BLOCK_D:
            return tl.load(pointers, mask=(cols < HEAD_DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def store_tile(
    tensor,
    strides,
    batch,
    head,
    start,
    num_tokens,
    tile,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store (BLOCK, BLOCK_D) in the tensor's dtype, but no row past num_tokens and no padded column."""
    rows = tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_D)
    base = tensor + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    pointers = base + tl.cast(start, tl.int64) * strides[2] + (rows[:, None] * strides[2] + cols[None, :])
    keep = (start + rows < num_tokens)[:, None] & (cols < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(tensor.dtype.element_ty), mask=keep)


@triton.jit
def mask_scores(scores, rows, cols, num_q, num_k, CAUSAL: tl.constexpr):
    """Hide keys with -inf. rows and cols are global query and key indices that broadcast against scores.

    Causal is aligned bottom-right: j <= i + num_k - num_q. It also hides keys past num_k from every real row.
    """
    if CAUSAL:
        return tl.where(cols <= rows + (num_k - num_q), scores, -float("inf"))
    else:
        return tl.where(cols < num_k, scores, -float("inf"))


@triton.jit
def visible_keys(q_start, num_q, num_k, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Bounds of a query tile's key loop: (end of the tiles that all rows see whole, end of the keys)."""
    if CAUSAL:
        seen_by_first = tl.minimum(tl.maximum(q_start + 1 + num_k - num_q, 0), num_k)
        end = tl.minimum(tl.maximum(q_start + BLOCK_Q + num_k - num_q, 0), num_k)
    else:
        seen_by_first = num_k
        end = num_k
    return seen_by_first // BLOCK_K * BLOCK_K, end


@triton.jit
def seeing_queries(k_start, num_q, num_k, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Bounds of a key tile's query loop: (first tile that sees any key, first tile whose rows see them all).

    Both are multiples of BLOCK_Q; queries from the second bound to num_q need no mask.
    """
    if CAUSAL:
        first = tl.maximum(k_start - (num_k - num_q), 0) // BLOCK_Q * BLOCK_Q
        full = tl.cdiv(tl.maximum(k_start + BLOCK_K - 1 - (num_k - num_q), 0), BLOCK_Q) * BLOCK_Q
        return first, tl.maximum(first, full)
    else:
        return 0, 0
