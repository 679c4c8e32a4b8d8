"""What a program of the Hopper backward owns, which query tiles see its keys, and in which order dQ is added up.

An item is BLOCK_K keys of one KV head with all query tiles that see them. A program draws its items from a counter, one
after another: the next one when it is done with the loads of the one before.

dQ is summed in fp32 in global memory, in a fixed order, so that its bits are the same in every run. Each query tile has
a counter, its turn: an item adds its share when all items that precede it have added theirs. Without a mask those are
the items of smaller keys. With one, and in documents, they are those of larger keys that the query tile sees: an item
begins at its diagonal and goes through the queries, so the item that precedes it is two steps ahead by itself and no
item waits. But then the longest items are the last, and when they end, most SMs have long been idle. So the last
section of a causal call has the reverse order: smaller keys first, queries from the last one on. There the SMs become
free one after the other, and again no item waits.

Either way an item waits only for items before it, which were drawn by running programs, and the first of the unfinished
items is always being worked on. So no deadlock is possible, however few of the programs run at a time.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..portable.record import record
from ..portable.tiles import ROW_PADDING, Mask, end_query, first_query, section_tile
from ..portable.visits import first_line
from .masked import Masked
from .tma import slot

ROWS = 64  # of a query tile, and of a turn
BLOCK_Q = gl.constexpr(ROWS)
BLOCK_K = gl.constexpr(128)  # keys of an item
KEYS = gl.constexpr(64)  # of a consumer


@record
class Item:
    """An item of packed documents."""

    tile: gl.tensor  # of keys, inside the document
    kv_head: gl.tensor
    q_row0: gl.tensor  # the document's first packed query
    k_row0: gl.tensor
    padded_row0: gl.tensor  # its first row of LSE, delta and dQ's sum: see ROW_PADDING
    number: gl.tensor  # the document's


@record
class Sizes:
    """The sizes and options of a call, which every role reads."""

    num_heads: gl.tensor  # Hq
    num_kv_heads: gl.tensor  # Hkv
    num_batch_kv_heads: gl.tensor  # B * Hkv
    num_q: gl.tensor  # of an item's document, where documents are packed: see `sizes_of`
    num_k: gl.tensor
    heads_per_section: gl.tensor  # KV heads
    window: tuple  # (left, right), or None
    document_tiles: gl.tensor  # pointer to the list of key tiles of `_document_tiles_kernel`, or None
    item: Item  # None where nothing is packed, and before `sizes_of`
    masked: Masked  # or None
    alibi_slopes: gl.tensor  # pointer to (B or documents, Hq) fp32, or None
    HEAD_DIM: gl.constexpr  # of the tiles
    STAGES: gl.constexpr  # of the ring of query tiles
    K_STAGES: gl.constexpr
    CAUSAL: gl.constexpr


@gluon.jit
def sizes_of(item, sizes):
    """Return the sizes that hold for an item: with packed documents those of its document."""
    if sizes.document_tiles is None:
        return sizes
    else:
        num_tiles = gl.load(sizes.document_tiles)
        number, kv_head = section_tile(item, num_tiles, sizes.num_kv_heads, sizes.heads_per_section, False)
        row = sizes.document_tiles + (1 + number) * 8
        tile, k_row0, num_k = gl.load(row), gl.load(row + 1), gl.load(row + 2)
        q_row0, num_q, document = gl.load(row + 3), gl.load(row + 4), gl.load(row + 5)
        padded_row0 = (q_row0 // ROW_PADDING + document) * ROW_PADDING
        return Sizes(
            sizes.num_heads, sizes.num_kv_heads, sizes.num_batch_kv_heads, num_q, num_k, sizes.heads_per_section,
            sizes.window, sizes.document_tiles, Item(tile, kv_head, q_row0, k_row0, padded_row0, document),
            sizes.masked, sizes.alibi_slopes, sizes.HEAD_DIM, sizes.STAGES, sizes.K_STAGES, sizes.CAUSAL,
        )  # fmt: skip


@gluon.jit
def first_rows(sizes):
    """The first row of an item's document, as (query, key, row of LSE); zeros where nothing is packed."""
    if sizes.item is not None:
        return sizes.item.q_row0, sizes.item.k_row0, sizes.item.padded_row0
    else:
        return 0, 0, 0


@gluon.jit
def end_of_items(sizes):
    """The end of the items' numbers."""
    if sizes.document_tiles is not None:
        return gl.load(sizes.document_tiles) * sizes.num_kv_heads
    else:
        return (sizes.num_k + BLOCK_K - 1) // BLOCK_K * sizes.num_batch_kv_heads


@gluon.jit
def draw_item(done, draws):
    """Draw the next item and publish its number to all roles. Called by the producer after loading `done` items."""
    counter, drawn_items, item_full, item_empty = draws
    item = gl.atomic_add(counter, 1, sem="relaxed")
    place, use = slot(done, 2)
    mbarrier.wait(item_empty.index(place), use ^ 1)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    drawn_items.index(place).store(gl.full([1], item, gl.int32, one))
    mbarrier.arrive(item_full.index(place), count=1)
    return item


@gluon.jit
def next_item(done, draws, WARPS: gl.constexpr):
    """Wait, in another role, for the item that the producer has drawn. Returns what `draw_item` returned there."""
    _counter, drawn_items, item_full, item_empty = draws
    place, use = slot(done, 2)
    mbarrier.wait(item_full.index(place), use)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    item = gl.max(drawn_items.index(place).load(one), 0)
    mbarrier.arrive(item_empty.index(place), count=1)
    return item


@gluon.jit
def owned(item, sizes):
    """(key tile, batch, KV head, whether its queries are walked from the last one on) of an item. Items go through
    sections of heads that share L2 and, in each, tile by tile."""
    if sizes.item is not None:
        return sizes.item.tile, 0, sizes.item.kv_head, False
    else:
        num_tiles = (sizes.num_k + BLOCK_K - 1) // BLOCK_K
        tile, batch_kv_head = section_tile(item, num_tiles, sizes.num_batch_kv_heads, sizes.heads_per_section, False)
        batch = batch_kv_head // sizes.num_kv_heads
        kv_head = batch_kv_head - batch * sizes.num_kv_heads
        if sizes.window is not None or sizes.masked is not None:
            return num_tiles - 1 - tile, batch, kv_head, False
        elif sizes.CAUSAL:
            last_section = (sizes.num_batch_kv_heads - 1) // sizes.heads_per_section
            from_last = batch_kv_head // sizes.heads_per_section == last_section
            return gl.where(from_last, tile, num_tiles - 1 - tile), batch, kv_head, from_last
        else:
            return tile, batch, kv_head, False


@gluon.jit
def query_tiles(tile, batch, kv_head, sizes):
    """Query tiles that see a key of this tile, as positions (first, end): their numbers or, with a block mask, twice
    the places in its visits, because each visit is two query tiles."""
    end = (sizes.num_q + BLOCK_Q - 1) // BLOCK_Q
    if sizes.masked is not None:
        head = kv_head * (sizes.num_heads // sizes.num_kv_heads)  # the others of its group have the same mask
        masked = sizes.masked
        line = first_line(
            masked.starts, batch, head, sizes.num_heads, sizes.num_q, sizes.num_k, masked.OF_BATCH, masked.OF_HEAD
        )
        entry = line + ((sizes.num_q + 127) // 128 + tile) * 4
        return gl.load(entry) * 2, gl.load(entry + 2) * 2
    elif sizes.CAUSAL or sizes.window is not None:
        mask = Mask(sizes.num_q, sizes.num_k, sizes.window, sizes.CAUSAL, sizes.window is not None)
        position = tile * BLOCK_K - (sizes.num_k - sizes.num_q)
        first = gl.minimum(first_query(position, mask) // BLOCK_Q, end)
        end = (end_query(position + BLOCK_K - 1, mask) + BLOCK_Q - 1) // BLOCK_Q
        return first, gl.maximum(first, end)
    else:
        return 0, end


@gluon.jit
def visit_at(position, first, end, sizes):
    """Load a block mask's entry for a position among first .. end, which wraps around once at end, as (block and order,
    pattern); zeros without a block mask.

    Loaded a step ahead: under the adds to dQ a load takes thousands of cycles.
    """
    if sizes.masked is not None:
        place = gl.where(first < end, gl.where(position < end, position, position - end + first) // 2, 0)
        visit = sizes.masked.visits + place * 4
        return gl.load(visit + 2), gl.load(visit + 3)
    else:
        return 0, 0


@gluon.jit
def query_tile_at(position, visit, sizes):
    """The number of the query tile at a position. `visit` is the first value that `visit_at` returned for it."""
    if sizes.masked is not None:
        return (visit & 65535) * 2 + position % 2
    else:
        return position


@gluon.jit
def unmasked_from(key, first, end, sizes):
    """The first of the query tiles first .. end that a consumer with keys key .. key + KEYS needs no mask for.

    Under a window or a block mask there is none: each step decides by itself.
    """
    if sizes.window is not None or sizes.masked is not None:
        return end
    elif sizes.CAUSAL:
        mask = Mask(sizes.num_q, sizes.num_k, None, True, False)
        position = key + KEYS - 1 - (sizes.num_k - sizes.num_q)
        all_seen = (first_query(position, mask) + BLOCK_Q - 1) // BLOCK_Q
        return gl.minimum(gl.maximum(all_seen, first), end)
    else:
        return gl.where(key + KEYS > sizes.num_k, end, first)


@gluon.jit
def walked(step, first, end, from_last):
    """The position, among first .. end, of a head's step."""
    return gl.where(from_last, end - 1 - step, first + step)


@gluon.jit
def adds_before(query_tile, visit, tile, from_last, sizes):
    """How many items add to a query tile's dQ before that of this key tile."""
    last = (sizes.num_k + BLOCK_K - 1) // BLOCK_K - 1
    if sizes.masked is not None:
        return visit >> 16
    elif sizes.window is not None:
        _left, right = sizes.window
        last_seen = (query_tile * BLOCK_Q + BLOCK_Q - 1 + sizes.num_k - sizes.num_q + right) // BLOCK_K
        return gl.minimum(last_seen, last) - tile
    elif sizes.CAUSAL:
        last_seen = (query_tile * BLOCK_Q + BLOCK_Q - 1 + sizes.num_k - sizes.num_q) // BLOCK_K
        return gl.where(from_last, tile, gl.minimum(last_seen, last) - tile)
    elif sizes.item is not None:
        return last - tile
    else:
        return tile


@triton.jit
def num_adds(query_tile, num_q, num_k, window_left, window_right):
    """How many items add to a query tile of a call without a block mask: one more than `adds_before` for the last of
    them. An unbounded side is a distance that no pair of tokens has. window_right is 0 in a causal call."""
    first_seen = tl.maximum(query_tile * BLOCK_Q + num_k - num_q - window_left, 0) // BLOCK_K
    end_seen = tl.minimum(tl.maximum((query_tile + 1) * BLOCK_Q + num_k - num_q + window_right, 0), num_k)
    return tl.where(query_tile * BLOCK_Q < num_q, tl.maximum(tl.cdiv(end_seen, BLOCK_K) - first_seen, 0), 0)
