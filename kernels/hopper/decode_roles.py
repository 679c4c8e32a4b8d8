"""What the warps of a Hopper program over a cache do: the producer, which takes items and loads their tiles, and the
consumer, which computes them. The whole is in decode.py.

Barriers (mbarriers; a stage s of the ring of tiles, a place i of the ring of items):
    k_full[s], v_full[s]   tiles have arrived          empty[s]        the consumer's products with both are done
    item_full[i]           an item is described        item_empty[i]   the consumer has read all of its tiles
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..portable.record import record
from ..portable.scores import Scoring, logits_of
from ..portable.split import ROWS_BLOCK, Batch, Item, extent, gathered, row_of, store_row, totals
from ..portable.tiles import LOG2_E, Mask, mask_scores
from . import tma
from .tma import slot

ITEMS = gl.constexpr(2)  # that the producer describes ahead
FIELDS = gl.constexpr(12)
PATCHED = gl.constexpr(32)  # keys that are written over together
HALF = gl.constexpr(64)  # columns of a TMA box: what one swizzle of shared memory takes


@record
class Rings:
    """What the roles hand to one another in shared memory, as in the table above."""

    k: gl.shared_memory_descriptor  # (STAGES * halves, BLOCK_K, 64), as TMA writes them
    v: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    items: gl.shared_memory_descriptor  # (ITEMS * FIELDS, 1) int32
    item_full: gl.shared_memory_descriptor
    item_empty: gl.shared_memory_descriptor


@record
class Cache:
    """Where a row's keys lie, for stores by pointer."""

    strides: tuple  # (row or page, head, slot), elements
    new_strides: tuple  # (row, head, token)
    block_table: gl.tensor  # read only where PAGE
    table_row: gl.tensor
    num_pages: gl.tensor


@record
class Build:
    """The kernel's constants, as its parameters name them."""

    HEAD_DIM: gl.constexpr
    BLOCK_D: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_K: gl.constexpr
    SPAN: gl.constexpr
    PAGE: gl.constexpr
    STAGES: gl.constexpr
    APPEND: gl.constexpr


@gluon.jit
def _tell(rings, place, FIELD: gl.constexpr, value):
    """By the producer's one warp."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rings.items.index(place * FIELDS + FIELD).store(gl.full([1], value, gl.int32, one))


@gluon.jit
def _told(rings, place, FIELD: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(rings.items.index(place * FIELDS + FIELD).load(one), 0)


@gluon.jit
def _bad_pages(begin, end, pad, pages, num_pages, lanes, PAGE: gl.constexpr):
    """1 where a page of the keys begin .. end is none of the pool's."""
    bad = begin * 0
    end_page = gl.where(begin < end, (pad + end + PAGE - 1) // PAGE, 0)  # a row without a key has no page
    for number in range((pad + begin) // PAGE, end_page, ROWS_BLOCK):
        page = gl.load(pages + number + lanes, mask=number + lanes < end_page, other=0)
        bad = gl.maximum(bad, gl.max(((page < 0) | (page >= num_pages)).to(gl.int32), 0))
    return bad


@gluon.jit
def producer(
    k_desc, v_desc, seqlens, leftpad, num_rows, num_q, capacity, window_left, workspace, coarse_from, width, cache,
    rings, build, PADDED: gl.constexpr,
):  # fmt: skip
    BLOCK_K: gl.constexpr = build.BLOCK_K
    SPAN: gl.constexpr = build.SPAN
    PAGE: gl.constexpr = build.PAGE
    HALVES: gl.constexpr = build.BLOCK_D // HALF
    PIECE: gl.constexpr = k_desc.block_type.shape[2]  # keys that lie together: of a page, or a tile
    lanes = gl.arange(0, ROWS_BLOCK, layout=gl.BlockedLayout([1], [32], [1], [0]))
    batch = Batch(seqlens, leftpad, num_rows, num_q, capacity, window_left, lanes, BLOCK_K, SPAN, build.APPEND, PADDED)
    num_tiles, num_spans = totals(batch)
    by_tile = num_spans * width < coarse_from
    num_items = gl.where(by_tile, num_tiles, num_spans) * width
    programs = gl.num_programs(0)
    step, turn = 0, 0
    item = gl.program_id(0)
    while item < num_items:
        following = item + programs
        if num_items > programs:  # drawn early, so that nobody waits for the ticket
            drawn = gl.atomic_add(workspace + 1, 1, sem="relaxed")
            if drawn == num_items - 1:  # the last: one for each item past the first ones, one a program for none
                gl.store(workspace + 1, 0)
            following = programs + drawn
        unit = item // width
        kv_head = item - unit * width
        row, tiles_before, spans_before = row_of(unit, by_tile, batch)
        keys, first_tile, tiles, pad, unfit = extent(row, batch)
        place_in_row = unit - gl.where(by_tile, tiles_before, spans_before)
        span = gl.where(by_tile, place_in_row // SPAN, place_in_row)
        begin = first_tile + gl.where(by_tile, place_in_row, span * SPAN)
        end = begin + gl.where(by_tile, 1, gl.minimum(tiles - span * SPAN, SPAN))
        fault = gl.where(unfit, 1, 0)
        pages = cache.block_table + row.to(gl.int64) * cache.table_row
        if PAGE > 0:
            end_key = gl.minimum(end * BLOCK_K, keys)
            fault = gl.maximum(fault, _bad_pages(begin * BLOCK_K, end_key, pad, pages, cache.num_pages, lanes, PAGE))
        if fault > 0:
            end = begin
        place, phase = slot(turn, ITEMS)
        mbarrier.wait(rings.item_empty.index(place), phase ^ 1)
        _tell(rings, place, 0, row)
        _tell(rings, place, 1, kv_head)
        _tell(rings, place, 2, begin)
        _tell(rings, place, 3, end)
        _tell(rings, place, 4, keys)
        _tell(rings, place, 5, pad)
        _tell(rings, place, 6, gl.where(by_tile, 2, 0) + fault)
        _tell(rings, place, 7, item)
        _tell(rings, place, 8, tiles)
        _tell(rings, place, 9, span)
        _tell(rings, place, 10, tiles_before)
        _tell(rings, place, 11, spans_before)
        mbarrier.arrive(rings.item_full.index(place), count=1)
        for tile in range(begin, end):
            stage, phase = slot(step, build.STAGES)
            mbarrier.wait(rings.empty.index(stage), phase ^ 1)
            k_full, v_full = rings.k_full.index(stage), rings.v_full.index(stage)
            mbarrier.expect(k_full, BLOCK_K * build.BLOCK_D * 2)
            mbarrier.expect(v_full, BLOCK_K * build.BLOCK_D * 2)
            for piece in gl.static_range(BLOCK_K // PIECE):
                line = row
                at = pad + tile * BLOCK_K + piece * PIECE
                if PAGE > 0:
                    line = gl.load(pages + at // PAGE, mask=tile * BLOCK_K + piece * PIECE < keys, other=0)
                    at = at % PAGE
                for half in gl.static_range(HALVES):
                    coordinates = [line, kv_head, at, half * HALF]
                    k_part = rings.k.index(stage * HALVES + half).slice(piece * PIECE, PIECE, 0)
                    v_part = rings.v.index(stage * HALVES + half).slice(piece * PIECE, PIECE, 0)
                    tma.load(k_desc, coordinates, k_full, _as_box(k_part, k_desc))
                    tma.load(v_desc, coordinates, v_full, _as_box(v_part, v_desc))
            step += 1
        item = following
        turn += 1
    place, phase = slot(turn, ITEMS)
    mbarrier.wait(rings.item_empty.index(place), phase ^ 1)
    _tell(rings, place, 0, -1)
    mbarrier.arrive(rings.item_full.index(place), count=1)


@gluon.jit
def _as_box(part, descriptor):
    return part._reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)


@gluon.jit
def _patch(tile, new, pointer, start, first_new, keys, pad, row, kv_head, cache, build):
    """Over the keys of a tile from `first_new` on: the new tokens, which are appended to the cache too; zeros behind
    the last. `start` is the tile's first key; without APPEND `first_new` is `keys`."""
    BLOCK_D: gl.constexpr = build.BLOCK_D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    for piece in gl.static_range(build.BLOCK_K // PATCHED):
        if start + (piece + 1) * PATCHED > first_new:
            part = tile.slice(piece * PATCHED, PATCHED, 0)
            key = start + piece * PATCHED + gl.arange(0, PATCHED, layout=gl.SliceLayout(1, layout))
            old = part.load(layout)
            if build.APPEND:
                inside = (key >= first_new) & (key < keys)
                keep = inside[:, None] & (columns < build.HEAD_DIM)[None, :]
                base = new + row.to(gl.int64) * cache.new_strides[0] + kv_head.to(gl.int64) * cache.new_strides[1]
                tokens = base + (key - first_new) * cache.new_strides[2]
                values = gl.load(tokens[:, None] + columns[None, :], mask=keep, other=0.0)
                slots = pad + key
                line = key.to(gl.int64) * 0 + row
                if build.PAGE > 0:
                    pages = cache.block_table + row.to(gl.int64) * cache.table_row
                    line = gl.load(pages + slots // build.PAGE, mask=inside, other=0).to(gl.int64)
                    slots = slots % build.PAGE
                there = pointer + kv_head.to(gl.int64) * cache.strides[1] + line * cache.strides[0]
                there += slots.to(gl.int64) * cache.strides[2]
                gl.store(there[:, None] + columns[None, :], values, mask=keep)
            else:
                values = gl.zeros([PATCHED, BLOCK_D], tile.dtype, layout)
            part.store(gl.where((key < first_new)[:, None], old, values))


@gluon.jit
def _load_queries(q, q_strides, row, kv_head, group, num_q, q_tile, build):
    """The queries and heads of a KV head, BLOCK_M with zeros for those that do not exist."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // build.BLOCK_D, build.BLOCK_D // 8], [4, 1], [1, 0])
    packed = gl.arange(0, build.BLOCK_M, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, build.BLOCK_D, layout=gl.SliceLayout(0, layout))
    query = packed // group
    head = kv_head * group + packed - query * group
    rows = q + row.to(gl.int64) * q_strides[0] + head * q_strides[1] + query * q_strides[2]
    keep = (query < num_q)[:, None] & (columns < build.HEAD_DIM)[None, :]
    q_tile.store(gl.load(rows[:, None] + columns[None, :], mask=keep, other=0.0))
    fence_async_shared()


@gluon.jit
def _fold_columns(acc, maximum, total, part, part_maximum, part_total):
    """`fold` of kernels/portable/split.py, of sums that have queries as columns."""
    larger = gl.maximum(maximum, part_maximum)
    base = gl.where(larger == -float("inf"), 0.0, larger)
    weight, part_weight = gl.exp2(maximum - base), gl.exp2(part_maximum - base)
    acc = acc * weight[None, :] + part * part_weight[None, :]
    return acc, larger, total * weight + part_total * part_weight


@gluon.jit
def consumer(
    q, q_strides, k_cache, v_cache, k_new, v_new, o, lse, num_heads, num_q, group, width, window, scale_log2, switches,
    cache, rings, parts, q_tile, p_tile, k_tiles, v_tiles, build, CAUSAL: gl.constexpr, LOCAL: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = build.BLOCK_M
    BLOCK_K: gl.constexpr = build.BLOCK_K
    BLOCK_D: gl.constexpr = build.BLOCK_D
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_row: gl.constexpr = gl.SliceLayout(0, acc_layout)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BLOCK_D, BLOCK_D // 4], [4, 1], [1, 0])
    step, turn, place = 0, 0, 0
    mbarrier.wait(rings.item_full.index(0), 0)
    row = _told(rings, 0, 0)
    while row >= 0:
        kv_head, begin, end = _told(rings, place, 1), _told(rings, place, 2), _told(rings, place, 3)
        keys, pad, flags = _told(rings, place, 4), _told(rings, place, 5), _told(rings, place, 6)
        item, tiles, span = _told(rings, place, 7), _told(rings, place, 8), _told(rings, place, 9)
        tiles_before, spans_before = _told(rings, place, 10), _told(rings, place, 11)
        _load_queries(q, q_strides, row, kv_head, group, num_q, q_tile, build)
        packed = gl.arange(0, BLOCK_M, layout=of_row)
        query = packed // group
        slope = 0.0
        if switches.alibi_slopes is not None:
            of_head = row * num_heads + kv_head * group + (packed - query * group)
            slope = (gl.load(switches.alibi_slopes + of_head, mask=query < num_q, other=0.0) * LOG2_E)[None, :]
        mask = Mask(num_q, keys, window, CAUSAL, LOCAL)
        scoring = Scoring(mask, scale_log2, slope, switches, 0, 0, 0, "ieee")
        first_new = keys - num_q if build.APPEND else keys
        acc = gl.zeros([BLOCK_D, BLOCK_M], gl.float32, acc_layout)
        maximum = gl.full([BLOCK_M], -float("inf"), gl.float32, of_row)
        total = gl.zeros([BLOCK_M], gl.float32, of_row)
        for tile in range(begin, end):
            stage, phase = slot(step, build.STAGES)
            start = tile * BLOCK_K
            k_tile, v_tile = k_tiles.index(stage), v_tiles.index(stage)
            mbarrier.wait(rings.k_full.index(stage), phase)
            if build.APPEND:  # noqa: SIM102  # known at compile time; what is no key is masked
                if start + BLOCK_K > first_new:
                    _patch(k_tile, k_new, k_cache, start, first_new, keys, pad, row, kv_head, cache, build)
                    fence_async_shared()
            nothing = gl.zeros([BLOCK_K, BLOCK_M], gl.float32, acc_layout)
            scores = warpgroup_mma(k_tile, q_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            key = start + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, acc_layout))
            logits, factor, _ = logits_of(scores, query[None, :], key[:, None], scoring)
            logits = mask_scores(logits, query[None, :], key[:, None], mask)
            part_maximum = gl.max(logits, 0) * factor
            base = gl.where(part_maximum == -float("inf"), 0.0, part_maximum)
            probs = gl.exp2(logits * factor - base[None, :])
            p_tile.store(gl.permute(probs.to(q_tile.dtype), (1, 0)))
            mbarrier.wait(rings.v_full.index(stage), phase)
            if start + BLOCK_K > first_new:
                _patch(v_tile, v_new, v_cache, start, first_new, keys, pad, row, kv_head, cache, build)
            fence_async_shared()
            nothing = gl.zeros([BLOCK_D, BLOCK_M], gl.float32, acc_layout)
            part = warpgroup_mma(
                v_tile.permute([1, 0]), p_tile.permute([1, 0]), nothing, use_acc=False, is_async=True
            )  # fmt: skip
            part_total = gl.sum(probs, 0)
            part = warpgroup_mma_wait(0, deps=(part,))
            mbarrier.arrive(rings.empty.index(stage), count=1)
            acc, maximum, total = _fold_columns(acc, maximum, total, part, part_maximum, part_total)
            step += 1
        mbarrier.arrive(rings.item_empty.index(place), count=1)
        if flags % 2 > 0:  # a fault
            gl.store(parts.workspace, 1)
            total = total + float("nan")
        acc = gl.convert_layout(gl.permute(acc, (1, 0)), out_layout)
        maximum = gl.convert_layout(maximum, gl.SliceLayout(1, out_layout))
        total = gl.convert_layout(total, gl.SliceLayout(1, out_layout))
        taken = Item(item, flags > 1, row, kv_head, width, tiles, span, tiles_before, spans_before)
        done, acc, maximum, total = gathered(acc, maximum, total, taken, parts)
        if done:
            query_out = parts.lines // group
            head = kv_head * group + parts.lines - query_out * group
            store_row(
                acc, maximum, total, o, lse, switches.sinks, None, row, query_out, head, num_q, num_heads, parts,
                build.HEAD_DIM,
            )  # fmt: skip
        turn += 1
        place, phase_of_item = slot(turn, ITEMS)
        mbarrier.wait(rings.item_full.index(place), phase_of_item)
        row = _told(rings, place, 0)
