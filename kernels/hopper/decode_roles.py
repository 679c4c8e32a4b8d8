"""The warps of a Hopper program over a cache that compute: the consumer, which has an item's tiles, and the collector,
which folds results of items into those of rows. The whole is in decode.py, their barriers in decode_loads.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..portable.scores import Scoring, logits_of
from ..portable.split import Item, Parts, collected, handed, is_whole, store_row
from ..portable.tiles import LOG2_E, Mask, mask_scores
from .decode_loads import ITEMS, SHIFT, awaited, shifted, started, told
from .tma import slot

NEVER = gl.constexpr(2**30)  # a key that no query sees
# spans of a row whose tiles are all folded at once: more would wait for memory one after the other
FLAT = gl.constexpr(2)
IN_FLIGHT = gl.constexpr(4)  # partial results that are loaded together


@gluon.jit
def _cleared(tile, start, keys, build, PADDED: gl.constexpr):
    """Zeros over what a tile holds behind a row's last key; `start` is the tile's first."""
    BLOCK_D: gl.constexpr = build.BLOCK_D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    zeros = gl.zeros([SHIFT, BLOCK_D], tile.dtype, layout)
    for piece in gl.static_range(0 if PADDED else build.BLOCK_K // SHIFT - 1, build.BLOCK_K // SHIFT):
        part = tile.slice(piece * SHIFT, SHIFT, 0)
        key = start + piece * SHIFT + gl.arange(0, SHIFT, layout=gl.SliceLayout(1, layout))
        part.store(gl.where((key < keys)[:, None], part.load(layout), zeros))


@gluon.jit
def _fold_columns(acc, maximum, total, part, part_maximum, part_total):
    """`fold` of kernels/portable/split.py, of sums that have queries as columns."""
    larger = gl.maximum(maximum, part_maximum)
    base = gl.where(larger == -float("inf"), 0.0, larger)
    weight, part_weight = gl.exp2(maximum - base), gl.exp2(part_maximum - base)
    acc = acc * weight[None, :] + part * part_weight[None, :]
    return acc, larger, total * weight + part_total * part_weight


@gluon.jit
def _parts(sums, maxima, slot_rows, workspace, coarse_from, build):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // build.BLOCK_D, build.BLOCK_D // 4], [4, 1], [1, 0])
    lines = gl.arange(0, build.BLOCK_M, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, build.BLOCK_D, layout=gl.SliceLayout(0, layout))
    return Parts(
        sums, maxima, slot_rows, workspace, coarse_from, lines, columns, build.BLOCK_M, build.BLOCK_D, build.SPAN,
        build.GROUPS, FLAT, IN_FLIGHT,
    )  # fmt: skip


@gluon.jit
def _item_told(rings, place, row, width):
    kv_head, flags, item = told(rings, place, 1), told(rings, place, 6), told(rings, place, 7)
    tiles, span = told(rings, place, 8), told(rings, place, 9)
    tiles_before, spans_before = told(rings, place, 10), told(rings, place, 11)
    return Item(item, flags > 1, row, kv_head, width, tiles, span, tiles_before, spans_before)


@gluon.jit
def _store(acc, maximum, total, o, lse, sinks, item, group, num_q, num_heads, parts, build):
    query = parts.lines // group
    head = item.inner * group + parts.lines - query * group
    store_row(
        acc, maximum, total, o, lse, sinks, None, item.row, query, head, num_q, num_heads, parts, build.HEAD_DIM
    )  # fmt: skip


@gluon.jit
def consumer(
    o, lse, num_heads, num_q, group, width, window, scale_log2, switches, sums, maxima, slot_rows, workspace,
    coarse_from, rings, p_tile, k_tiles, v_tiles, build, PADDED: gl.constexpr, CAUSAL: gl.constexpr,
    LOCAL: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = build.BLOCK_M
    BLOCK_K: gl.constexpr = build.BLOCK_K
    BLOCK_D: gl.constexpr = build.BLOCK_D
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_row: gl.constexpr = gl.SliceLayout(0, acc_layout)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BLOCK_D, BLOCK_D // 4], [4, 1], [1, 0])
    started((rings.k_full, rings.v_full, rings.empty), build.STAGES)
    parts = _parts(sums, maxima, slot_rows, workspace, coarse_from, build)
    step, turn = 0, 0
    place, phase_of_item, row = awaited(rings, turn)
    while row >= 0:
        begin, end = told(rings, place, 2), told(rings, place, 3)
        keys = told(rings, place, 4)
        item = _item_told(rings, place, row, width)
        kv_head = item.inner
        packed = gl.arange(0, BLOCK_M, layout=of_row)
        query = packed // group
        slope = 0.0
        if switches.alibi_slopes is not None:
            of_head = row * num_heads + kv_head * group + (packed - query * group)
            slope = (gl.load(switches.alibi_slopes + of_head, mask=query < num_q, other=0.0) * LOG2_E)[None, :]
        mask = Mask(num_q, keys, window, CAUSAL, LOCAL)
        scoring = Scoring(mask, scale_log2, slope, switches, 0, 0, 0, "ieee")
        acc = gl.zeros([BLOCK_D, BLOCK_M], gl.float32, acc_layout)
        maximum = gl.full([BLOCK_M], -float("inf"), gl.float32, of_row)
        total = gl.zeros([BLOCK_M], gl.float32, of_row)
        q_tile = rings.q.index(place)
        mbarrier.wait(rings.q_full.index(place), phase_of_item)
        for tile in range(begin, end):
            stage, phase = slot(step, build.STAGES)
            start = tile * BLOCK_K - shifted(tile, keys, build, PADDED)
            k_tile, v_tile = k_tiles.index(stage), v_tiles.index(stage)
            mbarrier.wait(rings.k_full.index(stage), phase)
            nothing = gl.zeros([BLOCK_K, BLOCK_M], gl.float32, acc_layout)
            scores = warpgroup_mma(k_tile, q_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            key = start + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, acc_layout))
            key = gl.where(key < tile * BLOCK_K, NEVER, key)  # another tile has it
            logits, factor, _ = logits_of(scores, query[None, :], key[:, None], scoring)
            logits = mask_scores(logits, query[None, :], key[:, None], mask)
            part_maximum = gl.max(logits, 0) * factor
            base = gl.where(part_maximum == -float("inf"), 0.0, part_maximum)
            probs = gl.exp2(logits * factor - base[None, :])
            p_tile.store(gl.permute(probs.to(q_tile.dtype), (1, 0)))
            mbarrier.wait(rings.v_full.index(stage), phase)
            if start + BLOCK_K > keys:  # of keys that are none the scores are masked, but 0 * NaN is NaN
                _cleared(v_tile, start, keys, build, PADDED)
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
        if told(rings, place, 6) % 2 > 0:  # of the last tile's page too
            gl.store(workspace, 1)
            total = total + float("nan")
        acc = gl.convert_layout(gl.permute(acc, (1, 0)), out_layout)
        maximum = gl.convert_layout(maximum, gl.SliceLayout(1, out_layout))
        total = gl.convert_layout(total, gl.SliceLayout(1, out_layout))
        if handed(acc, maximum, total, item, parts):
            _store(acc, maximum, total, o, lse, switches.sinks, item, group, num_q, num_heads, parts, build)
        gl.thread_barrier()  # the stores of all threads come before the word of them
        mbarrier.arrive(rings.stored.index(place), count=1)
        turn += 1
        place, phase_of_item, row = awaited(rings, turn)


@gluon.jit
def collector(
    o, lse, sinks, num_heads, num_q, group, width, sums, maxima, slot_rows, workspace, coarse_from, rings, build
):
    started((rings.item_full, rings.item_empty, rings.q_full, rings.stored), ITEMS)
    parts = _parts(sums, maxima, slot_rows, workspace, coarse_from, build)
    turn = 0
    place, phase, row = awaited(rings, turn)
    while row >= 0:
        item = _item_told(rings, place, row, width)
        mbarrier.wait(rings.stored.index(place), phase)
        mbarrier.arrive(rings.item_empty.index(place), count=1)
        if is_whole(item, parts) == 0:
            done, acc, maximum, total = collected(item, parts)
            if done:
                _store(acc, maximum, total, o, lse, sinks, item, group, num_q, num_heads, parts, build)
        turn += 1
        place, phase, row = awaited(rings, turn)
