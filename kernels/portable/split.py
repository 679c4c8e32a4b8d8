"""How the keys of a batch are cut into work items, on the device and from the lengths, and how the results are folded.

A span is SPAN tiles, added one after the other; or, where QUAD is less than SPAN, QUAD quads of QUAD tiles each. A work
item is a tile, a quad or a span: the largest of which a batch has enough. The additions are the same in registers and
from memory. Both the portable and the Hopper kernel use this file. The caller passes the index tensors, because it
knows their layout over its threads.
"""

import triton
import triton.language as tl

from .record import record
from .tiles import LN_2, LOG2_E

# batch rows whose lengths are read at a time: each warp holds all of them, so that their sums need no barrier
ROWS_BLOCK = tl.constexpr(32)


@record
class Batch:
    """What decides which keys the rows of a batch have."""

    seqlens: tl.tensor  # (B,) int32: keys in the cache before the call; negative: the row is absent
    leftpad: tl.tensor  # (B,) int32: the slots before a row's first key; read only where PADDED
    num_rows: tl.tensor
    num_q: tl.tensor
    capacity: tl.tensor  # slots of a row
    window_left: tl.tensor
    lanes: tl.tensor  # 0 .. ROWS_BLOCK - 1
    BLOCK_K: tl.constexpr
    QUAD: tl.constexpr
    SPAN: tl.constexpr
    APPEND: tl.constexpr
    PADDED: tl.constexpr


@record
class Item:
    """A program's work item: a tile, a quad or a span of a row and KV head."""

    number: tl.tensor  # index among all items, and the slot of its result
    size: tl.tensor  # tiles of an item: 1, QUAD or SPAN
    row: tl.tensor
    inner: tl.tensor  # KV head and block of query rows, as one index
    width: tl.tensor  # the number of values of `inner`
    tiles: tl.tensor  # of the row
    place: tl.tensor  # index among the row's items for `inner`
    spans_before: tl.tensor  # spans of the rows before this one


@record
class Parts:
    """Partial results in memory: slots of (rows, BLOCK_D) sums, and of their maxima and denominators."""

    sums: tl.tensor
    maxima: tl.tensor  # (slots, 2, BLOCK_M)
    rows: tl.tensor  # of a slot
    workspace: tl.tensor  # of the launch
    min_span_items: tl.tensor  # how many spans have arrival counters of their own, and slots for their parts
    lines: tl.tensor  # 0 .. BLOCK_M - 1
    columns: tl.tensor  # 0 .. BLOCK_D - 1
    BLOCK_M: tl.constexpr
    BLOCK_D: tl.constexpr
    QUAD: tl.constexpr
    SPAN: tl.constexpr
    GROUPS: tl.constexpr
    FLAT: tl.constexpr  # fold a row's parts in one level, if there are at most SPAN of them and they are not spans
    IN_FLIGHT: tl.constexpr  # partial results that are loaded together


@triton.jit
def extent(rows, batch):
    """Return for one or many batch rows: (keys, first tile that a query sees, tiles, slots before the first key,
    whether the length or padding is invalid). A row without keys has one tile, so that a program writes its result.
    A row past the last one has none."""
    known = rows < batch.num_rows
    length = tl.load(batch.seqlens + rows, mask=known, other=-1)
    pad = length * 0
    if batch.PADDED:
        pad = tl.load(batch.leftpad + rows, mask=known, other=0)
    added = batch.num_q if batch.APPEND else 0
    unfit = (length >= 0) & ((length > batch.capacity - added) | (pad < 0) | (pad > length))
    keys = tl.where((length < 0) | unfit, 0, length + added - pad)
    first = tl.maximum(keys - batch.num_q - batch.window_left, 0) // batch.BLOCK_K
    tiles = tl.maximum(tl.cdiv(keys, batch.BLOCK_K) - first, 1)
    return keys, first, tl.where(known, tiles, 0), pad, unfit


@triton.jit
def _tiles(first, batch):
    """Return the tiles of each of ROWS_BLOCK rows."""
    _, _, tiles, _, _ = extent(first + batch.lanes, batch)
    return tiles


@triton.jit
def _parts_in(tiles, size, QUAD: tl.constexpr, SPAN: tl.constexpr):
    """Return how many items of `size` tiles, 1, QUAD or SPAN, these tiles make."""
    return tl.where(size == SPAN, tl.cdiv(tiles, SPAN), tl.where(size == QUAD, tl.cdiv(tiles, QUAD), tiles))


@triton.jit
def cut(width, min_span_items, batch):
    """Cut the batch into the largest items of which there are enough. Returns (tiles of an item, number of items).

    `min_span_items` spans are enough, or half as many quads: the fewer parts a row has, the sooner they are folded."""
    tiles, quads, spans = 0, 0, 0
    for first in range(0, batch.num_rows, ROWS_BLOCK):
        here = _tiles(first, batch)
        tiles += tl.sum(here, 0)
        quads += tl.sum(tl.cdiv(here, batch.QUAD), 0)
        spans += tl.sum(tl.cdiv(here, batch.SPAN), 0)
    size, units = 1, tiles
    if batch.QUAD < batch.SPAN:
        by_quad = quads * width * 2 >= min_span_items
        size, units = tl.where(by_quad, batch.QUAD, 1), tl.where(by_quad, quads, tiles)
    by_span = spans * width >= min_span_items
    return tl.where(by_span, batch.SPAN, size), tl.where(by_span, spans, units) * width


@triton.jit
def row_of(unit, size, batch):
    """Find the row of the unit-th item of one KV head. Returns (row, the item's index in it, spans of earlier rows)."""
    first, units_before, spans_before = 0, 0, 0
    tiles = _tiles(first, batch)
    units, spans = _parts_in(tiles, size, batch.QUAD, batch.SPAN), tl.cdiv(tiles, batch.SPAN)
    all_units = tl.sum(units, 0)
    while units_before + all_units <= unit:
        units_before += all_units
        spans_before += tl.sum(spans, 0)
        first += ROWS_BLOCK
        tiles = _tiles(first, batch)
        units, spans = _parts_in(tiles, size, batch.QUAD, batch.SPAN), tl.cdiv(tiles, batch.SPAN)
        all_units = tl.sum(units, 0)
    passed = tl.cumsum(units, 0) <= unit - units_before
    row = first + tl.sum(passed.to(tl.int32), 0)
    units_before += tl.sum(tl.where(passed, units, 0), 0)
    spans_before += tl.sum(tl.where(passed, spans, 0), 0)
    return row, unit - units_before, spans_before


@triton.jit
def fold(acc, maximum, total, part_acc, part_maximum, part_total, AXIS: tl.constexpr = 1):
    """Combine two partial results under the larger maximum. Folding in the empty one, (0, -inf, 0), changes no bit.

    AXIS: of D in the sums; the other one is that of queries.
    """
    larger = tl.maximum(maximum, part_maximum)
    base = tl.where(larger == -float("inf"), 0.0, larger)
    weight, part_weight = tl.exp2(maximum - base), tl.exp2(part_maximum - base)
    acc = acc * tl.expand_dims(weight, AXIS) + part_acc * tl.expand_dims(part_weight, AXIS)
    return acc, larger, total * weight + part_total * part_weight


@triton.jit
def nothing(parts):
    """Return the empty partial result, with which a fold begins: (sums, maxima, denominators)."""
    acc = (parts.lines[:, None] * 0 + parts.columns[None, :] * 0).to(tl.float32)
    zeros = (parts.lines * 0).to(tl.float32)
    return acc, zeros - float("inf"), zeros


@triton.jit
def put(slot, acc, maximum, total, parts):
    sums = parts.sums + slot.to(tl.int64) * (parts.rows * parts.BLOCK_D)
    real = (parts.lines < parts.rows)[:, None]
    tl.store(sums + parts.lines[:, None] * parts.BLOCK_D + parts.columns[None, :], acc, mask=real)
    maxima = parts.maxima + slot.to(tl.int64) * (2 * parts.BLOCK_M) + parts.lines
    tl.store(maxima, maximum)
    tl.store(maxima + parts.BLOCK_M, total)


@triton.jit
def part_in(slot, known, parts):
    """Load a part, bypassing the L1 cache, which may not hold what other multiprocessors have written. Returns the
    empty partial result where `known` is false."""
    lines = parts.lines
    sums = parts.sums + slot * (parts.rows * parts.BLOCK_D)
    sums += lines[:, None] * parts.BLOCK_D + parts.columns[None, :]
    part = tl.load(sums, mask=(lines < parts.rows)[:, None] & known, other=0.0, cache_modifier=".cg")
    maxima = parts.maxima + slot * (2 * parts.BLOCK_M) + lines
    maximum = tl.load(maxima, mask=known, other=-float("inf"), cache_modifier=".cg")
    total = tl.load(maxima + parts.BLOCK_M, mask=known, other=0.0, cache_modifier=".cg")
    return part, maximum, total


@triton.jit
def fold_parts(slot, step, count, parts):
    """Fold `count` parts from memory, in their order; each lies `step` slots after the one before."""
    acc, maximum, total = nothing(parts)
    for first in range(0, count, parts.IN_FLIGHT):
        for place in tl.static_range(parts.IN_FLIGHT):
            known = first + place < count
            at = (slot + (first + place) * step).to(tl.int64)
            part, part_maximum, part_total = part_in(at, known, parts)
            acc, maximum, total = fold(acc, maximum, total, part, part_maximum, part_total)
    tl.debug_barrier()  # from here on the slots may be written again
    return acc, maximum, total


@triton.jit
def last_of(turn, count):
    """Return whether this program is the last of `count` to arrive. Everything the others stored before arriving is
    then visible to it. The last one resets the counter `turn` to 0."""
    tl.debug_barrier()  # all threads' stores precede the atomic add that releases them
    last = tl.atomic_add(turn, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(turn, 0)
    return last


@triton.jit
def _parts_of_row(item, parts):
    return _parts_in(item.tiles, item.size, parts.QUAD, parts.SPAN)


@triton.jit
def _parts_of_span(item, span, parts):
    return _parts_in(tl.minimum(item.tiles - span * parts.SPAN, parts.SPAN), item.size, parts.QUAD, parts.SPAN)


@triton.jit
def _span_of(item, parts):
    """Return the index of the row's span that holds the item."""
    return item.place * item.size // parts.SPAN


@triton.jit
def is_whole(item, parts):
    """Whether an item is all of its row."""
    return _parts_of_row(item, parts) == 1


@triton.jit
def is_flat(item, parts):
    """Whether all parts of a row are folded in one level: as quads of quads, the order that spans would give too."""
    return (item.size < parts.SPAN) & (_parts_of_row(item, parts) <= parts.SPAN)


@triton.jit
def store_part_unless_whole(acc, maximum, total, item, parts):
    """Return `is_whole`; where it is false, store the item's result for `fold_by_quads` to read."""
    whole = is_whole(item, parts)
    if whole == 0:
        span = _span_of(item, parts)
        own = is_flat(item, parts) | (_parts_of_span(item, span, parts) > 1)
        of_span = parts.min_span_items * parts.SPAN + (item.spans_before + span) * item.width + item.inner
        put(tl.where(own, item.number, of_span), acc, maximum, total, parts)
    return whole


@triton.jit
def level_of(level, item, parts):
    """Describe a level's fold for an item that is not all of its row: the parts of a span (0), the spans of a group
    (1), the groups or all parts of the row (2). Returns (offset of the level's arrival counter in the workspace,
    number of parts, slot of the first, slots from one to the next, slot of the result)."""
    width, inner = item.width, item.inner
    turn = 2 + parts.min_span_items + (item.row * width + inner) * (parts.GROUPS + 1)
    first, step, count, to = item.number - item.place * width, width, _parts_of_row(item, parts), 0
    if not (parts.FLAT and is_flat(item, parts)):
        spans, span = tl.cdiv(item.tiles, parts.SPAN), _span_of(item, parts)
        spans_of_group = tl.cdiv(spans, parts.GROUPS)
        group = span // spans_of_group
        first_span = parts.min_span_items * parts.SPAN + item.spans_before * width + inner
        if level == 0:
            first += span * (parts.SPAN // item.size) * width
            count = _parts_of_span(item, span, parts)
            turn = 2 + (item.spans_before + span) * width + inner
            to = first_span + span * width
        elif level == 1:
            first = first_span + group * spans_of_group * width
            count = tl.minimum(spans - group * spans_of_group, spans_of_group)
            turn += 1 + group
            to = first
        else:
            first, step = first_span, spans_of_group * width
            count = tl.cdiv(spans, spans_of_group)
    return turn, count, first, step, to


@triton.jit
def quad_from(begin, first, step, count, parts):
    """Fold QUAD of `count` parts from memory, from the begin-th on. Parts from `count` on are empty."""
    acc, maximum, total = nothing(parts)
    for place in tl.static_range(parts.QUAD):
        number = begin + place
        part, part_maximum, part_total = part_in((first + number * step).to(tl.int64), number < count, parts)
        acc, maximum, total = fold(acc, maximum, total, part, part_maximum, part_total)
    return acc, maximum, total


@triton.jit
def fold_by_quads(first, step, count, parts):
    """Fold `count` parts from memory: QUAD of them at a time into one, then those, as tiles are folded."""
    QUADS: tl.constexpr = parts.IN_FLIGHT // parts.QUAD
    acc, maximum, total = nothing(parts)
    if QUADS > 1:
        for begin in range(0, count, parts.IN_FLIGHT):
            for quad in tl.static_range(QUADS):
                part, part_maximum, part_total = quad_from(begin + quad * parts.QUAD, first, step, count, parts)
                acc, maximum, total = fold(acc, maximum, total, part, part_maximum, part_total)
        tl.debug_barrier()  # from here on the slots may be written again
    else:
        for begin in range(0, count, parts.QUAD):
            here = tl.minimum(count - begin, parts.QUAD)
            part, part_maximum, part_total = fold_parts(first + begin * step, step, here, parts)
            acc, maximum, total = fold(acc, maximum, total, part, part_maximum, part_total)
    return acc, maximum, total


@triton.jit
def lines_from(first, parts):
    """Return the same `Parts` from line `first` of their slots on."""
    return Parts(
        parts.sums, parts.maxima, parts.rows, parts.workspace, parts.min_span_items, parts.lines + first, parts.columns,
        parts.BLOCK_M, parts.BLOCK_D, parts.QUAD, parts.SPAN, parts.GROUPS, parts.FLAT, parts.IN_FLIGHT,
    )  # fmt: skip


@triton.jit
def fold_row(acc, maximum, total, item, parts):
    """Fold an item's result with those of its row. At each level the last program to arrive folds. Returns (whether
    this program arrived last and has the row's result, the row's sums, maxima, denominators)."""
    done, own = item.row >= 0, item.number
    for level in tl.static_range(3):
        turn, count, first, step, to = level_of(level, item, parts)
        if done & (count > 1):
            put(own, acc, maximum, total, parts)
            done = last_of(parts.workspace + turn, count)
            if done:
                acc, maximum, total = fold_parts(first, step, count, parts)
        own = to
    return done, acc, maximum, total


@triton.jit
def store_row(
    acc, maximum, total, o, lse, sinks, v_scale, row, query, head, num_q, num_heads, parts, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Store O and LSE of a row's queries and heads (BLOCK_M,), with sinks and a scale of V where they are not None."""
    real = query < num_q
    if sinks is not None:  # a sink is a key without a value
        sink = tl.load(sinks + head) * LOG2_E
        value, _, zeros = nothing(parts)
        acc, maximum, total = fold(acc, maximum, total, value, sink, zeros + 1.0)
    if v_scale is not None:
        acc *= tl.load(v_scale)
    denominator = tl.where(total == 0.0, 1.0, total)
    acc = acc * (1.0 / denominator)[:, None]
    o_rows = o + ((row.to(tl.int64) * num_q + query) * num_heads + head) * HEAD_DIM
    keep = real[:, None] & (parts.columns < HEAD_DIM)[None, :]
    tl.store(o_rows[:, None] + parts.columns[None, :], acc.to(o.dtype.element_ty), mask=keep)
    lse_rows = lse + (row.to(tl.int64) * num_heads + head) * num_q + query
    tl.store(lse_rows, (maximum + tl.log2(denominator)) * LN_2, mask=real)
