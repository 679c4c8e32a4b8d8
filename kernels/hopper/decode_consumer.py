"""The consumer warpgroup of the Hopper kernel over a cache, which computes the attention of an item's tiles. The
overview is in decode.py, the barriers are in decode_loads.py.
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
from ..portable.split import fold, store_part_unless_whole
from ..portable.tiles import LOG2_E, Mask, mask_scores
from ..portable.widen import widened
from .decode_folds import lines_layout, parts_of, read_item, store_item
from .decode_loads import SHIFT, awaited, read_field, shifted, started, stored_dtype
from .tma import slot

NEVER = gl.constexpr(2**30)  # a key that no query sees


@gluon.jit
def _cleared(tile, start, keys, build, PADDED: gl.constexpr):
    """Overwrite with zeros what a tile holds past the row's last key; `start` is the tile's first key."""
    BLOCK_D: gl.constexpr = build.BLOCK_D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    zeros = gl.zeros([SHIFT, BLOCK_D], tile.dtype, layout)
    for piece in gl.static_range(0 if PADDED else build.BLOCK_K // SHIFT - 1, build.BLOCK_K // SHIFT):
        part = tile.slice(piece * SHIFT, SHIFT, 0)
        key = start + piece * SHIFT + gl.arange(0, SHIFT, layout=gl.SliceLayout(1, layout))
        part.store(gl.where((key < keys)[:, None], part.load(layout), zeros))


@gluon.constexpr_function
def _scores_layout(build):
    columns = build.BLOCK_K if build.QUERIES_AS_ROWS else build.BLOCK_M
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _sums_layout(build):
    columns = build.BLOCK_D if build.QUERIES_AS_ROWS else build.BLOCK_M
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _warps_layout(build):
    """Layout of (4 warps, queries): queries lie as in the scores, and each thread holds the values of all 4 warps."""
    registers = [[0, 1], *([0, columns] for columns in (8, 16) if columns < build.BLOCK_M), [1, 0], [2, 0]]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [4, build.BLOCK_M])


@gluon.jit
def _over_keys(x, shared, build, LARGEST: gl.constexpr):
    """Return the maximum or sum of each column of scores: within a warp by shuffles, across warps by one barrier."""
    x = gl.reshape(x, [build.BLOCK_K // 64, 4, 16, build.BLOCK_M])
    shared.store(gl.max(gl.max(x, 0), 1) if LARGEST else gl.sum(gl.sum(x, 0), 1))
    x = shared.load(_warps_layout(build))
    x = gl.max(x, 0) if LARGEST else gl.sum(x, 0)
    return gl.convert_layout(x, gl.SliceLayout(0, _scores_layout(build)))


@gluon.jit
def _softmax(scores, tile, start, query, scoring, warp_partials, build, KEYS: gl.constexpr):
    """Return (exp2(logits - maxima), not yet divided by their sum; maxima) of one tile, whose keys are axis KEYS.

    warp_partials: (2, 4, BLOCK_M) fp32 in shared memory, where KEYS is 0, else None."""
    BLOCK_K: gl.constexpr = build.BLOCK_K
    mask = scoring.mask
    key = start + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1 - KEYS, _scores_layout(build)))
    key = gl.expand_dims(key, 1 - KEYS)
    logits, factor, _ = logits_of(scores, query, key, scoring)
    edge = (start + BLOCK_K + mask.num_q > mask.num_k + 1) | (start < tile * BLOCK_K)
    if mask.LOCAL or not build.QUERIES_AS_ROWS or edge:  # elsewhere each query sees each key
        key = gl.where(key < tile * BLOCK_K, NEVER, key)  # it belongs to the tile before
        logits = mask_scores(logits, query, key, mask)
    if KEYS == 1:
        maximum = gl.max(logits, 1) * factor
    else:
        maximum = _over_keys(logits, warp_partials.index(0), build, True) * factor
    base = gl.where(maximum == -float("inf"), 0.0, maximum)
    return gl.exp2(logits * factor - gl.expand_dims(base, KEYS)), maximum


@gluon.jit
def _by_rows(q_tile, k_tile, v_tile, tile, start, query, scoring, v_full, phase, build, PADDED: gl.constexpr):
    """Attend to one tile with queries as rows. Returns (its sum of P V, maxima, sums of P)."""
    sums_layout: gl.constexpr = _sums_layout(build)
    of_row: gl.constexpr = gl.SliceLayout(1, sums_layout)
    num_keys = scoring.mask.num_k
    nothing = gl.zeros([build.BLOCK_M, build.BLOCK_K], gl.float32, _scores_layout(build))
    scores = warpgroup_mma(q_tile, k_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    probs, maximum = _softmax(scores, tile, start, query, scoring, None, build, 1)
    rounded = gl.convert_layout(probs.to(q_tile.dtype), gl.DotOperandLayout(0, sums_layout, 2))
    mbarrier.wait(v_full, phase)
    if start + build.BLOCK_K > num_keys:  # past the last key scores are masked, but 0 * NaN is NaN
        _cleared(v_tile, start, num_keys, build, PADDED)
        fence_async_shared()
    nothing = gl.zeros([build.BLOCK_M, build.BLOCK_D], gl.float32, sums_layout)
    part = warpgroup_mma(rounded, v_tile, nothing, use_acc=False, is_async=True)
    maximum, total = gl.convert_layout(maximum, of_row), gl.convert_layout(gl.sum(probs, 1), of_row)
    return warpgroup_mma_wait(0, deps=(part,)), maximum, total


@gluon.jit
def _by_columns(
    q_tile, k_tile, v_tile, p_tile, warp_partials, tile, start, query, scoring, v_full, phase, build,
    PADDED: gl.constexpr,
):  # fmt: skip
    """`_by_rows` with queries as columns, so that few queries fill wgmma. P passes through shared memory."""
    num_keys = scoring.mask.num_k
    nothing = gl.zeros([build.BLOCK_K, build.BLOCK_M], gl.float32, _scores_layout(build))
    scores = warpgroup_mma(k_tile, q_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    probs, maximum = _softmax(scores, tile, start, query, scoring, warp_partials, build, 0)
    p_tile.store(gl.permute(probs.to(q_tile.dtype), (1, 0)))
    mbarrier.wait(v_full, phase)
    if start + build.BLOCK_K > num_keys:  # as above
        _cleared(v_tile, start, num_keys, build, PADDED)
    fence_async_shared()
    nothing = gl.zeros([build.BLOCK_D, build.BLOCK_M], gl.float32, _sums_layout(build))
    part = warpgroup_mma(v_tile.permute([1, 0]), p_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    total = _over_keys(probs, warp_partials.index(1), build, False)
    return warpgroup_mma_wait(0, deps=(part,)), maximum, total


@gluon.jit
def _by_words(
    q_even, q_odd, k_tile, v_tile, p_tile, warp_partials, of_q, scales, stage, tile, start, query, scoring, v_full,
    phase, build,
):  # fmt: skip
    """`_by_columns` for an 8-bit cache: the warps widen each word into two columns in registers, of keys in float16,
    which takes fewest instructions. Returns (the sum of P V of the even columns, of the odd ones, maxima, sums of P).

    of_q: (1, BLOCK_M), the unit of each query's numbers, with SCALES 1 times the scale of all keys."""
    scores_layout: gl.constexpr = _scores_layout(build)
    of_key: gl.constexpr = gl.SliceLayout(1, scores_layout)
    sums_layout: gl.constexpr = _sums_layout(build)
    dtype: gl.constexpr = p_tile.dtype
    of_v = 1.0
    if build.SCALES == 2:  # read before the keys are widened, which takes longer than shared memory does
        of_q = of_q * scales.index(stage * 2).load(of_key)[:, None]
        of_v = scales.index(stage * 2 + 1).load(of_key)[:, None]
    words = k_tile.load(gl.DotOperandLayout(0, scores_layout, 2))
    even, odd = widened(words, gl.float16, stored_dtype(build), True)  # a key past the last one is masked, NaN or not
    nothing = gl.zeros([build.BLOCK_K, build.BLOCK_M], gl.float32, scores_layout)
    scores = warpgroup_mma(even, q_even.permute([1, 0]), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma(odd, q_odd.permute([1, 0]), scores, is_async=True)
    mbarrier.wait(v_full, phase)
    words = v_tile.permute([1, 0]).load(gl.DotOperandLayout(0, sums_layout, 2))
    even, odd = widened(words, dtype, stored_dtype(build))
    scores = warpgroup_mma_wait(0, deps=(scores,))
    probs, maximum = _softmax(scores * of_q, tile, start, query, scoring, warp_partials, build, 0)
    p_tile.store(gl.permute((probs * of_v).to(dtype), (1, 0)))
    fence_async_shared()
    nothing = gl.zeros([build.COLUMNS, build.BLOCK_M], gl.float32, sums_layout)
    part = warpgroup_mma(even, p_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    part_odd = warpgroup_mma(odd, p_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    total = _over_keys(probs, warp_partials.index(1), build, False)
    part, part_odd = warpgroup_mma_wait(0, deps=(part, part_odd))
    return part, part_odd, maximum, total


@gluon.jit
def _no_keys(build):
    """Return the initial (sums, maxima, denominators)."""
    layout: gl.constexpr = _sums_layout(build)
    shape: gl.constexpr = [build.BLOCK_M, build.BLOCK_D] if build.QUERIES_AS_ROWS else [build.COLUMNS, build.BLOCK_M]
    of_row: gl.constexpr = gl.SliceLayout(1 if build.QUERIES_AS_ROWS else 0, layout)
    acc = gl.zeros(shape, gl.float32, layout)
    zeros = gl.zeros([build.BLOCK_M], gl.float32, of_row)
    return acc, zeros - float("inf"), zeros


@gluon.jit
def _attended(
    begin, end, step, place, keys, of_q, query, scoring, tiles, rings, build, PADDED: gl.constexpr
):  # fmt: skip
    """Attend to the tiles begin .. end of an item, added one after the other. Returns (the ring's next step, sums,
    those of odd columns where WORDS, maxima, denominators)."""
    KEYS: gl.constexpr = 1 if build.QUERIES_AS_ROWS else 0  # as in `consumer`
    k_tiles, v_tiles, p_tile, warp_partials = tiles
    q_tile = rings.q.index(place * 2 if build.WORDS else place)
    acc, maximum, total = _no_keys(build)
    odd = acc
    for tile in range(begin, end):
        stage, phase = slot(step, build.STAGES)
        start = tile * build.BLOCK_K - shifted(tile, keys, build, PADDED)
        k_tile, v_tile = k_tiles.index(stage), v_tiles.index(stage)
        mbarrier.wait(rings.k_full.index(stage), phase)
        v_full = rings.v_full.index(stage)
        if build.WORDS:
            part, part_odd, part_maximum, part_total = _by_words(
                q_tile, rings.q.index(place * 2 + 1), k_tile, v_tile, p_tile, warp_partials, of_q, rings.scales, stage,
                tile, start, query, scoring, v_full, phase, build,
            )  # fmt: skip
        elif build.QUERIES_AS_ROWS:
            part, part_maximum, part_total = _by_rows(
                q_tile, k_tile, v_tile, tile, start, query, scoring, v_full, phase, build, PADDED
            )  # fmt: skip
        else:
            part, part_maximum, part_total = _by_columns(
                q_tile, k_tile, v_tile, p_tile, warp_partials, tile, start, query, scoring, v_full, phase, build, PADDED
            )  # fmt: skip
        mbarrier.arrive(rings.empty.index(stage), count=1)
        if build.WORDS:
            odd, _, _ = fold(odd, maximum, total, part_odd, part_maximum, part_total, KEYS)
        acc, maximum, total = fold(acc, maximum, total, part, part_maximum, part_total, KEYS)
        step += 1
    return step, acc, odd, maximum, total


@gluon.jit
def consumer(
    o, lse, num_heads, num_q, group, width, window, scale_log2, switches, k_scale, v_scale, sums, maxima, slot_rows,
    workspace, min_span_items, rings, p_tile, warp_partials, item_sums, k_tiles, v_tiles, build, PADDED: gl.constexpr,
    CAUSAL: gl.constexpr, LOCAL: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = build.BLOCK_M
    BLOCK_D: gl.constexpr = build.BLOCK_D
    QUERIES_AS_ROWS: gl.constexpr = build.QUERIES_AS_ROWS
    KEYS: gl.constexpr = 1 if QUERIES_AS_ROWS else 0  # the axis of keys in scores, and of columns in sums
    acc_layout: gl.constexpr = _sums_layout(build)
    out_layout: gl.constexpr = acc_layout if QUERIES_AS_ROWS else lines_layout(build)
    started((rings.k_full, rings.v_full, rings.empty), build.STAGES)
    parts = parts_of(sums, maxima, slot_rows, workspace, min_span_items, build, BLOCK_M, out_layout)
    output = o, lse, switches.sinks, v_scale, num_heads, num_q, group
    step, turn = 0, 0
    place, phase_of_item, row = awaited(rings, turn, build)
    while row >= 0:
        begin, end = read_field(rings, place, 2, build), read_field(rings, place, 3, build)
        keys = read_field(rings, place, 4, build)
        item = read_item(rings, place, row, width, build)
        kv_head = item.inner
        packed = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(KEYS, _scores_layout(build)))
        query = packed // group
        slope = 0.0
        if switches.alibi_slopes is not None:
            of_head = row * num_heads + kv_head * group + (packed - query * group)
            slopes = gl.load(switches.alibi_slopes + of_head, mask=query < num_q, other=0.0) * LOG2_E
            slope = gl.expand_dims(slopes, KEYS)
        query = gl.expand_dims(query, KEYS)
        mask = Mask(num_q, keys, window, CAUSAL, LOCAL)
        scoring = Scoring(mask, scale_log2, slope, switches, 0, 0, "ieee")
        tiles = k_tiles, v_tiles, p_tile, warp_partials
        mbarrier.wait(rings.q_full.index(place), phase_of_item)
        of_q = 1.0
        if build.WORDS:
            of_q = rings.q_units.index(place).load(gl.SliceLayout(0, _scores_layout(build)))[None, :]
            if build.SCALES == 1:
                of_q *= gl.load(k_scale + kv_head)
        if build.QUAD == build.SPAN:
            step, acc, odd, maximum, total = _attended(
                begin, end, step, place, keys, of_q, query, scoring, tiles, rings, build, PADDED
            )  # fmt: skip
        else:
            acc, maximum, total = _no_keys(build)
            odd = acc
            for first in range(begin, end, build.QUAD):
                last = gl.minimum(first + build.QUAD, end)
                step, part, part_odd, part_maximum, part_total = _attended(
                    first, last, step, place, keys, of_q, query, scoring, tiles, rings, build, PADDED
                )  # fmt: skip
                if build.WORDS:
                    odd, _, _ = fold(odd, maximum, total, part_odd, part_maximum, part_total, KEYS)
                if QUERIES_AS_ROWS:  # sums of two levels do not fit into registers
                    if first > begin:
                        part, part_maximum, part_total = fold(
                            item_sums.load(acc_layout), maximum, total, part, part_maximum, part_total, KEYS
                        )
                    if last < end:
                        item_sums.store(part)
                    acc, maximum, total = part, part_maximum, part_total
                else:
                    acc, maximum, total = fold(acc, maximum, total, part, part_maximum, part_total, KEYS)
        if read_field(rings, place, 5, build) > 0:  # it covers the last tile's page too
            gl.store(workspace, 1)
            total = total + float("nan")
        if not QUERIES_AS_ROWS:
            acc = gl.permute(acc, (1, 0))
            if build.WORDS:
                acc = gl.reshape(gl.join(acc, gl.permute(odd, (1, 0))), [BLOCK_M, BLOCK_D])
            acc = gl.convert_layout(acc, out_layout)
            maximum = gl.convert_layout(maximum, gl.SliceLayout(1, out_layout))
            total = gl.convert_layout(total, gl.SliceLayout(1, out_layout))
        if store_part_unless_whole(acc, maximum, total, item, parts):
            store_item(acc, maximum, total, item, output, parts, build)
        gl.thread_barrier()  # all threads' stores precede the arrival that publishes them
        mbarrier.arrive(rings.stored.index(place), count=1)
        turn += 1
        place, phase_of_item, row = awaited(rings, turn, build)
