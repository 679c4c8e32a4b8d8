"""Pieces that the forward and the backward kernels share, so that a gradient cannot drift from its function.

Here are the order of tiles, loads and stores, which tiles a tile visits, and the mask.
BLOCK_Q counts queries, BLOCK_K keys. Pieces with strides take them as (batch, head, token), in elements; the
last one is 1.
"""

import math

import triton
import triton.language as tl

from ..launch import PACKED_ORIGIN
from .record import record

LN_2 = tl.constexpr(math.log(2.0))
LOG2_E = tl.constexpr(1.0 / math.log(2.0))
# The coordinate that is the end of every document in a packed TMA descriptor.
ORIGIN = tl.constexpr(PACKED_ORIGIN)
# The backward's row scratch (LSE, delta) is padded to a multiple of every BLOCK_Q, for each document by itself, so
# that the main loops load it unmasked. Document d's rows start at (cu_seqlens[d] // ROW_PADDING + d) *
# ROW_PADDING, for the reason in `document_of`.
ROW_PADDING = tl.constexpr(128)
# Sizes that may be 1, or a multiple of 16, in one call and not in the next, which would compile again.
NOT_SPECIALIZED = (
    "num_heads", "num_kv_heads", "num_batch_kv_heads", "q_tokens", "num_q", "q_tokens_padded", "num_q_padded",
    "k_tokens", "num_k", "num_tokens", "other_tokens", "num_docs", "heads_per_section", "window_left", "window_right",
)  # fmt: skip


@record
class Mask:
    """Which keys a query sees. The diagonal is aligned bottom-right: query i stands at key i + num_k - num_q."""

    num_q: tl.tensor  # of the document, where documents are packed
    num_k: tl.tensor
    window: tuple  # (left, right); an unbounded side is larger than any distance; read only where LOCAL
    CAUSAL: tl.constexpr
    LOCAL: tl.constexpr  # the window in place of CAUSAL


@record
class Rows:
    """The rows of one head, or of one document of it, that are read or written in tiles of (BLOCK, BLOCK_D)."""

    base: tl.tensor  # from `rows_of`
    strides: tuple
    batch: tl.tensor
    head: tl.tensor
    num_tokens: tl.tensor
    HEAD_DIM: tl.constexpr
    BLOCK_D: tl.constexpr
    BLOCK: tl.constexpr
    TMA: tl.constexpr


@triton.jit
def section_tile(ordinal, num_tiles, num_heads, heads_per_section, LAST_TILE_FIRST: tl.constexpr):
    """The `ordinal`-th tile to be worked on, as (tile, batch * head).

    Heads come in sections whose K and V stay in L2 together; inside a section the tile is the slow axis, so that all
    heads' longest tiles start first and the tail is short.
    """
    section = ordinal // (num_tiles * heads_per_section)
    first_head = section * heads_per_section
    rest = ordinal - first_head * num_tiles
    heads_here = tl.minimum(heads_per_section, num_heads - first_head)
    tile = rest // heads_here
    head = first_head + rest - tile * heads_here
    if LAST_TILE_FIRST:
        tile = num_tiles - 1 - tile
    return tile, head


@triton.jit
def owned_tile(
    num_tokens, cu_seqlens, num_docs, num_heads, heads_per_section, BLOCK: tl.constexpr, LAST_TILE_FIRST: tl.constexpr
):  # fmt: skip
    """What this program owns, as (document, tile inside it, batch * head).

    Without documents, cu_seqlens being None, the document is 0. With them it is -1 where no tile is left, and a
    document's last tile comes first. The grid is one-dimensional: its y and z axes end at 65,535.
    """
    if cu_seqlens is not None:
        num_tiles = num_tokens // BLOCK + num_docs
        ordinal, batch_head = section_tile(tl.program_id(0), num_tiles, num_heads, heads_per_section, False)
        document, tile = longest_first(ordinal, cu_seqlens, num_docs, BLOCK)
        return document, tile, batch_head
    else:
        num_tiles = tl.cdiv(num_tokens, BLOCK)
        tile, batch_head = section_tile(tl.program_id(0), num_tiles, num_heads, heads_per_section, LAST_TILE_FIRST)
        return 0, tile, batch_head


@triton.jit
def document_of(tile, cu_seqlens, num_docs, BLOCK: tl.constexpr):
    """Which document a tile of the packed rows lies in: (document, the tile's number inside it).

    Document d owns the tiles from cu_seqlens[d] // BLOCK + d to the next document's first. That is never too
    few, wastes at most two per document, and needs no table of tiles: the document is the last whose first tile
    is not past this one. Counted 128 documents at a time, because a bisection is a chain of loads that each
    wait for the one before.
    """
    count = 0
    for first in range(0, num_docs, 128):
        documents = first + tl.arange(0, 128)
        starts = tl.load(cu_seqlens + documents, mask=documents < num_docs, other=0) // BLOCK + documents
        count += tl.sum(((starts <= tile) & (documents < num_docs)).to(tl.int32), 0)
    document = count - 1
    return document, tile - (tl.load(cu_seqlens + document) // BLOCK + document)


@triton.jit
def tile_counts(documents, cu_seqlens, num_docs, BLOCK: tl.constexpr):
    """How many tiles each of these documents has, 0 past the last."""
    starts = tl.load(cu_seqlens + documents, mask=documents < num_docs, other=0)
    ends = tl.load(cu_seqlens + documents + 1, mask=documents < num_docs, other=0)
    return (ends - starts + BLOCK - 1) // BLOCK


@triton.jit
def longest_first(ordinal, cu_seqlens, num_docs, BLOCK: tl.constexpr):
    """The program's tile of the packed rows: (document, level), document -1 where no tile is left.

    A document's tiles have levels 0, 1, ... Tiles go by falling level, so that the work of a causal tile, which grows
    with it, falls too, whatever the order of the documents: a long document that started last would keep a few
    multiprocessors busy while the rest wait. Documents are looked at 128 at a time; the level is found by bisection.
    """
    lanes = tl.arange(0, 128)
    first = 0
    tiles = tile_counts(first + lanes, cu_seqlens, num_docs, BLOCK)
    total = tl.sum(tiles, 0)
    while (ordinal >= total) & (first + 128 < num_docs):
        ordinal -= total
        first += 128
        tiles = tile_counts(first + lanes, cu_seqlens, num_docs, BLOCK)
        total = tl.sum(tiles, 0)
    # tiles at level `level` or above are more than ordinal, those at `above` or above are not
    level = 0
    above = tl.max(tiles, 0)
    while above - level > 1:
        middle = (level + above) // 2
        if tl.sum(tl.maximum(tiles - middle, 0), 0) > ordinal:
            level = middle
        else:
            above = middle
    rank = ordinal - tl.sum(tl.maximum(tiles - (level + 1), 0), 0)  # among the documents that reach the level
    reaches = (tiles > level).to(tl.int32)
    chosen = (reaches == 1) & (tl.cumsum(reaches, 0) == rank + 1)
    document = tl.sum(tl.where(chosen, first + lanes, 0), 0)
    return tl.where(ordinal < total, document, -1), level


@triton.jit
def document_rows(document, cu_seqlens, num_tokens):
    """(first packed row, length) of a document; without documents (0, num_tokens)."""
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + document)
        return start, tl.load(cu_seqlens + document + 1) - start
    else:
        return 0, num_tokens


@triton.jit
def head_base(tensor, strides, batch, head, first_row):
    """Pointer to a head's row `first_row`, with 64-bit arithmetic."""
    base = tensor + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    return base + tl.cast(first_row, tl.int64) * strides[2]


@triton.jit
def rows_of(
    tensor, strides, batch, head, first_row, num_tokens,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The `Rows` of a head. A TMA descriptor addresses heads itself, and carries the first row with it.

    first_row is a document's first packed row, 0 for dense tensors.
    """
    if TMA:
        return Rows((tensor, first_row), strides, batch, head, num_tokens, HEAD_DIM, BLOCK_D, BLOCK, True)
    else:
        base = head_base(tensor, strides, batch, head, first_row)
        return Rows(base, strides, batch, head, num_tokens, HEAD_DIM, BLOCK_D, BLOCK, False)


@triton.jit
def load_tile(tensor, start, RAGGED: tl.constexpr):
    """Load the `Rows` start .. start + BLOCK as (BLOCK, BLOCK_D); what lies outside the tensor reads as 0.

    RAGGED says that rows may lie past num_tokens. A 0 matters even where the score is masked: 0 * NaN is NaN.
    """
    if tensor.TMA:
        descriptor, first_row = tensor.base
        if len(descriptor.shape) == 5:
            # see `packed_descriptor` in kernels/launch.py: rows past the document's last are out of bounds
            last = first_row + tensor.num_tokens
            tile = descriptor.load([ORIGIN, last, tensor.head, ORIGIN - tensor.num_tokens + start, 0])
        else:
            tile = descriptor.load([tensor.batch, tensor.head, start, 0])
        return tile.reshape([tensor.BLOCK, tensor.BLOCK_D])
    else:
        rows = tl.arange(0, tensor.BLOCK)
        cols = tl.arange(0, tensor.BLOCK_D)
        stride = tensor.strides[2]
        # the tile's first row in 64 bits, offsets inside the tile in 32: cheap, and right beyond 2^31
        # elements, because `kernel_inputs` copies tensors whose tokens are far apart
        pointers = tensor.base + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + cols[None, :])
        if RAGGED and tensor.HEAD_DIM != tensor.BLOCK_D:
            keep = (start + rows < tensor.num_tokens)[:, None] & (cols < tensor.HEAD_DIM)[None, :]
            return tl.load(pointers, mask=keep, other=0.0)
        elif RAGGED:
            return tl.load(pointers, mask=(start + rows < tensor.num_tokens)[:, None], other=0.0)
        elif tensor.HEAD_DIM != tensor.BLOCK_D:
            return tl.load(pointers, mask=(cols < tensor.HEAD_DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def store_tile(tensor, start, tile):
    """Store (BLOCK, BLOCK_D) to the `Rows` from `start` on, in their dtype, but no row past num_tokens and no padded
    column."""
    rows = tl.arange(0, tensor.BLOCK)
    cols = tl.arange(0, tensor.BLOCK_D)
    stride = tensor.strides[2]
    pointers = tensor.base + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + cols[None, :])
    keep = (start + rows < tensor.num_tokens)[:, None] & (cols < tensor.HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(tensor.base.dtype.element_ty), mask=keep)


@triton.jit
def mask_scores(scores, rows, cols, mask):
    """Hide keys with -inf. rows and cols are query and key indices that broadcast against scores.

    CAUSAL also hides keys past num_k from every real row.
    """
    if mask.LOCAL:
        diagonal = rows + (mask.num_k - mask.num_q)
        left, right = mask.window
        visible = (cols >= diagonal - left) & (cols <= diagonal + right) & (cols < mask.num_k)
        return tl.where(visible, scores, -float("inf"))
    elif mask.CAUSAL:
        return tl.where(cols <= rows + (mask.num_k - mask.num_q), scores, -float("inf"))
    else:
        return tl.where(cols < mask.num_k, scores, -float("inf"))


@triton.jit
def first_window_key(position, mask):
    """The first key in the window of the query at key `position`, which is query + num_k - num_q."""
    return tl.maximum(position - mask.window[0], 0)


@triton.jit
def end_window_key(position, mask):
    """The end of the keys in the window of the query at key `position`."""
    return tl.minimum(tl.maximum(position + mask.window[1] + 1, 0), mask.num_k)


@triton.jit
def end_key(end_query, mask):
    """The end of the keys that the queries before `end_query` see, without a window."""
    if mask.CAUSAL:
        return tl.minimum(tl.maximum(end_query + mask.num_k - mask.num_q, 0), mask.num_k)
    else:
        return mask.num_k


@triton.jit
def first_query(position, mask):
    """The first query that sees the key at query `position`, which is key - (num_k - num_q)."""
    if mask.LOCAL:
        return tl.maximum(position - mask.window[1], 0)
    elif mask.CAUSAL:
        return tl.maximum(position, 0)
    else:
        return 0


@triton.jit
def end_query(position, mask):
    """The end of the queries that see the key at query `position`."""
    if mask.LOCAL:
        return tl.minimum(tl.maximum(position + mask.window[0] + 1, 0), mask.num_q)
    else:
        return mask.num_q


@triton.jit
def visible_keys(q_start, mask, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Bounds of a query tile's key loops: (full_start, full_end, masked_start, masked_end), see `masked_tile`.

    Every row sees the keys from full_start to full_end, which need no mask. Only tiles that some row sees are
    visited, so that a window costs N * window.
    """
    if mask.LOCAL:
        first = q_start + mask.num_k - mask.num_q  # in keys: where the tile's first query stands
        last = first + BLOCK_Q - 1
        start = first_window_key(first, mask) // BLOCK_K * BLOCK_K
        end = end_window_key(last, mask)
        full_start = tl.cdiv(first_window_key(last, mask), BLOCK_K) * BLOCK_K
        full_end = end_window_key(first, mask) // BLOCK_K * BLOCK_K
        full_end = tl.maximum(full_start, full_end)
        return full_start, full_end, start, end - (full_end - full_start)
    else:
        seen_by_first = end_key(q_start + 1, mask)
        end = end_key(q_start + BLOCK_Q, mask)
        full_end = seen_by_first // BLOCK_K * BLOCK_K
        return 0, full_end, full_end, end


@triton.jit
def seeing_queries(k_start, mask, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Bounds of a key tile's query loops: (full_start, full_end, masked_start, masked_end), see `masked_tile`.

    Starts are multiples of BLOCK_Q. Rows past num_q need no mask: their LSE is +inf.
    """
    if mask.LOCAL:
        first = k_start - (mask.num_k - mask.num_q)  # the query that stands at the tile's first key
        last = first + BLOCK_K - 1
        start = first_query(first, mask) // BLOCK_Q * BLOCK_Q
        end = end_query(last, mask)
        full_start = tl.cdiv(first_query(last, mask), BLOCK_Q) * BLOCK_Q
        full_end = end_query(first, mask) // BLOCK_Q * BLOCK_Q
        full_end = tl.maximum(full_start, full_end)
        return full_start, full_end, start, end - (full_end - full_start)
    elif mask.CAUSAL:
        start = first_query(k_start - (mask.num_k - mask.num_q), mask) // BLOCK_Q * BLOCK_Q
        all_seen = first_query(k_start + BLOCK_K - 1 - (mask.num_k - mask.num_q), mask)
        full_start = tl.maximum(start, tl.cdiv(all_seen, BLOCK_Q) * BLOCK_Q)
        return full_start, mask.num_q, start, tl.minimum(full_start, mask.num_q)
    else:
        return 0, mask.num_q, 0, 0


@triton.jit
def masked_tile(position, full_start, full_end, LOCAL: tl.constexpr):
    """The tile that a masked loop visits at `position`.

    A window has masked tiles on both sides of the full ones. One loop visits both: from full_start on it skips
    the full tiles.
    """
    if LOCAL:
        return position + tl.where(position >= full_start, full_end - full_start, 0)
    else:
        return position
