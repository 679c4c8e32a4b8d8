"""The collector warpgroup of the Hopper kernel over a cache, which folds the results of items into those of rows, and
what it shares with the consumer, which stores them. The overview is in decode.py, the barriers are in decode_loads.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..portable.split import (
    Item,
    Parts,
    fold,
    fold_by_quads,
    is_flat,
    is_whole,
    last_of,
    level_of,
    lines_from,
    nothing,
    put,
    quad_from,
    store_row,
)
from . import tma
from .decode_loads import awaited, in_flight, lines_of, read_field, shares_folds, started


@gluon.constexpr_function
def lines_layout(build):
    return gl.BlockedLayout([1, 4], [128 // build.BLOCK_D, build.BLOCK_D // 4], [4, 1], [1, 0])


@gluon.jit
def parts_of(sums, maxima, slot_rows, workspace, min_span_items, build, LINES: gl.constexpr, layout: gl.constexpr):
    lines = gl.arange(0, LINES, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, build.BLOCK_D, layout=gl.SliceLayout(0, layout))
    return Parts(
        sums, maxima, slot_rows, workspace, min_span_items, lines, columns, build.BLOCK_M, build.BLOCK_D, build.QUAD,
        build.SPAN, build.GROUPS, True, in_flight(build),
    )  # fmt: skip


@gluon.jit
def read_item(rings, place, row, width, build):
    kv_head, item = read_field(rings, place, 1, build), read_field(rings, place, 6, build)
    size = read_field(rings, place, 7, build)
    tiles, place_in_row = read_field(rings, place, 8, build), read_field(rings, place, 9, build)
    spans_before = read_field(rings, place, 10, build)
    return Item(item, size, row, kv_head, width, tiles, place_in_row, spans_before)


@gluon.jit
def store_item(acc, maximum, total, item, output, parts, build):
    """Store O and LSE of an item that has its row's result. output: o, lse, sinks, v_scale, num_heads, num_q, group."""
    o, lse, sinks, v_scale, num_heads, num_q, group = output
    of_head = v_scale + item.inner if build.SCALES == 1 else None
    query = parts.lines // group
    head = item.inner * group + parts.lines - query * group
    store_row(
        acc, maximum, total, o, lse, sinks, of_head, item.row, query, head, num_q, num_heads, parts, build.HEAD_DIM
    )  # fmt: skip


@gluon.jit
def _fold_by_quads_beside(first, step, count, few, here, there):
    """`fold_by_quads` of the lines `here`. Where the parts are few, at most one quad, also that of as many lines
    `there`, so that two quads are in flight in both cases."""
    acc, maximum, total = nothing(here)
    other, other_maximum, other_total = nothing(here)
    ahead = (1 - few) * here.QUAD
    for begin in range(0, count, 2 * here.QUAD):
        part, part_maximum, part_total = quad_from(begin, first, step, count, here)
        other, other_maximum, other_total = quad_from(begin + ahead, first, step, count, there)
        acc, maximum, total = fold(acc, maximum, total, part, part_maximum, part_total)
        if few == 0:
            acc, maximum, total = fold(acc, maximum, total, other, other_maximum, other_total)
    gl.thread_barrier()  # from here on the slots may be written again
    return acc, maximum, total, other, other_maximum, other_total


@gluon.jit
def _hand_on(level, to, acc, maximum, total, item, output, parts, build):
    """Store a level's result: in the next level's slot or, after the last level, in O and LSE."""
    if level < 2:
        put(to, acc, maximum, total, parts)
    else:
        store_item(acc, maximum, total, item, output, parts, build)


@gluon.jit
def _fold(level, slots, share, shares, item, output, parts, build):
    """Fold a share of the lines of a level's parts from memory. Stores the result as `_hand_on` does."""
    first, step, count, to = slots
    LINES: gl.constexpr = lines_of(build)
    if in_flight(build) > build.QUAD and build.BLOCK_M > 16:
        few = gl.where(count <= build.QUAD, 1, 0)
        at_once = LINES * (1 + few)
        for line in range(share * at_once, parts.rows, shares * at_once):
            here, there = lines_from(line, parts), lines_from(line + few * LINES, parts)
            acc, maximum, total, other, other_maximum, other_total = _fold_by_quads_beside(
                first, step, count, few, here, there
            )
            for half in range(1 + few):
                if half == 1:
                    acc, maximum, total = other, other_maximum, other_total
                now = lines_from(line + half * LINES, parts)
                _hand_on(level, to, acc, maximum, total, item, output, now, build)
    else:
        for line in range(share * LINES, parts.rows, shares * LINES):
            here = lines_from(line, parts)
            acc, maximum, total = fold_by_quads(first, step, count, here)
            _hand_on(level, to, acc, maximum, total, item, output, here, build)


@gluon.jit
def _fold_together(level, slots, shares, turn, item, output, parts, build):
    """Fold a level by the last `shares` programs to arrive, some lines each. Returns whether this program goes on to
    the next level: the last to finish.

    The earlier of them wait for the later ones. This cannot deadlock: with several shares each program has at most one
    item, and the launch is cooperative, so that all programs run.
    """
    count = slots[2]
    again = gl.where((level < 2) & (shares > 1), shares, 0)  # programs that arrive once more, if a level follows
    gl.thread_barrier()  # all threads' stores precede the atomic add that releases them
    share = gl.atomic_add(turn, 1, sem="acq_rel") - (count - shares)
    last = share >= 0
    if last:
        if share + again == shares - 1:  # no arrival follows: reset to 0
            gl.atomic_add(turn, -count, sem="release")
        if shares > 1:
            tma.wait_count(turn, count)
        _fold(level, slots, share, shares, item, output, parts, build)
        if again > 0:
            gl.thread_barrier()
            last = gl.atomic_add(turn, 1, sem="acq_rel") == count + shares - 1
            if last:
                gl.store(turn, 0)
    return last


@gluon.jit
def collector(
    o, lse, sinks, v_scale, num_heads, num_q, group, width, sums, maxima, slot_rows, workspace, min_span_items, rings,
    build,
):  # fmt: skip
    started((rings.item_full, rings.item_empty, rings.q_full, rings.stored), build.ITEMS)
    parts = parts_of(sums, maxima, slot_rows, workspace, min_span_items, build, lines_of(build), lines_layout(build))
    output = o, lse, sinks, v_scale, num_heads, num_q, group
    turn = 0
    place, phase, row = awaited(rings, turn, build)
    while row >= 0:
        item = read_item(rings, place, row, width, build)
        most = 1
        if shares_folds(build):
            most = gl.where(read_field(rings, place, 11, build) > 0, gl.cdiv(parts.rows, lines_of(build)), 1)
        mbarrier.wait(rings.stored.index(place), phase)
        mbarrier.arrive(rings.item_empty.index(place), count=1)
        if is_whole(item, parts) == 0:
            last = True
            for level in range(gl.where(is_flat(item, parts), 2, 0), 3):
                at, count, first, step, to = level_of(level, item, parts)
                slots = first, step, count, to
                if last & (count > 1):
                    if shares_folds(build):
                        shares = gl.minimum(most, count)
                        last = _fold_together(level, slots, shares, workspace + at, item, output, parts, build)
                    else:
                        last = last_of(workspace + at, count)
                        if last:
                            _fold(level, slots, 0, 1, item, output, parts, build)
        turn += 1
        place, phase, row = awaited(rings, turn, build)
