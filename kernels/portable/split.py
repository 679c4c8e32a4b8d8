"""How the keys of a batch are cut into items of work, made on the device from the lengths, and the results folded."""

import triton
import triton.language as tl

from .record import record

# batch rows whose lengths are looked at together: each warp has them all, so that their sums need no barrier
ROWS_BLOCK = tl.constexpr(32)
IN_FLIGHT = tl.constexpr(4)  # partial results that are loaded together


@record
class Batch:
    """What decides which keys the rows of a batch have."""

    seqlens: tl.tensor  # (B,) int32: keys in the cache before the call; negative: the row is absent
    leftpad: tl.tensor  # (B,) int32: the slots before a row's first key; read only where PADDED
    num_rows: tl.tensor
    num_q: tl.tensor
    capacity: tl.tensor  # slots of a row
    window_left: tl.tensor
    BLOCK_K: tl.constexpr
    SPAN: tl.constexpr
    APPEND: tl.constexpr
    PADDED: tl.constexpr


@record
class Parts:
    """Partial results in memory: slots of (rows, BLOCK_D) sums, and of their maxima and denominators."""

    sums: tl.tensor
    maxima: tl.tensor  # (slots, 2, BLOCK_M)
    rows: tl.tensor  # of a slot
    BLOCK_M: tl.constexpr
    BLOCK_D: tl.constexpr


@triton.jit
def extent(rows, batch):
    """Of batch rows, one or many: (keys, first tile that a query sees, tiles, slots before the first key, whether the
    row does not fit). A row without keys has one tile, so that somebody writes its result; a row past the last none."""
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
def _counts(first, batch):
    """(tiles, spans) of ROWS_BLOCK rows."""
    _, _, tiles, _, _ = extent(first + tl.arange(0, ROWS_BLOCK), batch)
    return tiles, tl.cdiv(tiles, batch.SPAN)


@triton.jit
def totals(batch):
    """(tiles, spans) of the batch."""
    tiles, spans = 0, 0
    for first in range(0, batch.num_rows, ROWS_BLOCK):
        tiles_here, spans_here = _counts(first, batch)
        tiles += tl.sum(tiles_here, 0)
        spans += tl.sum(spans_here, 0)
    return tiles, spans


@triton.jit
def row_of(unit, by_tile, batch):
    """Which row the unit lies in, a tile or a span: (row, tiles of the rows before it, spans of the rows before it)."""
    first, tiles_before, spans_before = 0, 0, 0
    tiles, spans = _counts(first, batch)
    all_tiles, all_spans = tl.sum(tiles, 0), tl.sum(spans, 0)
    while tl.where(by_tile, tiles_before + all_tiles, spans_before + all_spans) <= unit:
        tiles_before += all_tiles
        spans_before += all_spans
        first += ROWS_BLOCK
        tiles, spans = _counts(first, batch)
        all_tiles, all_spans = tl.sum(tiles, 0), tl.sum(spans, 0)
    ends = tl.cumsum(tl.where(by_tile, tiles, spans), 0)
    passed = ends <= unit - tl.where(by_tile, tiles_before, spans_before)
    row = first + tl.sum(passed.to(tl.int32), 0)
    tiles_before += tl.sum(tl.where(passed, tiles, 0), 0)
    spans_before += tl.sum(tl.where(passed, spans, 0), 0)
    return row, tiles_before, spans_before


@triton.jit
def fold(acc, maximum, total, part_acc, part_maximum, part_total):
    """Both sums under the larger maximum. Folding in nothing, (0, -inf, 0), changes no bit."""
    larger = tl.maximum(maximum, part_maximum)
    base = tl.where(larger == -float("inf"), 0.0, larger)
    weight, part_weight = tl.exp2(maximum - base), tl.exp2(part_maximum - base)
    acc = acc * weight[:, None] + part_acc * part_weight[:, None]
    return acc, larger, total * weight + part_total * part_weight


@triton.jit
def put(slot, acc, maximum, total, parts):
    rows, columns = tl.arange(0, parts.BLOCK_M), tl.arange(0, parts.BLOCK_D)
    sums = parts.sums + slot.to(tl.int64) * (parts.rows * parts.BLOCK_D)
    tl.store(sums + rows[:, None] * parts.BLOCK_D + columns[None, :], acc, mask=(rows < parts.rows)[:, None])
    maxima = parts.maxima + slot.to(tl.int64) * (2 * parts.BLOCK_M) + rows
    tl.store(maxima, maximum)
    tl.store(maxima + parts.BLOCK_M, total)


@triton.jit
def folded(slot, step, count, parts):
    """The fold of `count` parts from memory, in their order; `step` slots lie from one to the next."""
    acc = tl.zeros([parts.BLOCK_M, parts.BLOCK_D], tl.float32)
    maximum = tl.full([parts.BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([parts.BLOCK_M], tl.float32)
    rows, columns = tl.arange(0, parts.BLOCK_M), tl.arange(0, parts.BLOCK_D)
    for first in range(0, count, IN_FLIGHT):
        for place in tl.static_range(IN_FLIGHT):
            known = first + place < count
            at = (slot + (first + place) * step).to(tl.int64)
            # past the first-level cache, which knows nothing of what other multiprocessors have written
            sums = parts.sums + at * (parts.rows * parts.BLOCK_D) + rows[:, None] * parts.BLOCK_D + columns[None, :]
            part = tl.load(sums, mask=(rows < parts.rows)[:, None] & known, other=0.0, cache_modifier=".cg")
            maxima = parts.maxima + at * (2 * parts.BLOCK_M) + rows
            part_maximum = tl.load(maxima, mask=known, other=-float("inf"), cache_modifier=".cg")
            part_total = tl.load(maxima + parts.BLOCK_M, mask=known, other=0.0, cache_modifier=".cg")
            acc, maximum, total = fold(acc, maximum, total, part, part_maximum, part_total)
    tl.debug_barrier()  # from here on the slots may be written again
    return acc, maximum, total


@triton.jit
def last_of(turn, count):
    """Whether this program is the last of `count` to come here; what the others have stored before is then visible.
    The last one leaves the turn as it was before the first, 0."""
    tl.debug_barrier()  # the stores of all threads come before the one that releases them
    last = tl.atomic_add(turn, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(turn, 0)
    return last
