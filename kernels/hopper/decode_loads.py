"""The loading warps of the Hopper kernel over a cache, and the rings that they fill: the producer draws items and
issues the copies of their tiles, and the fetcher loads their queries. The overview is in decode.py, the other roles are
in decode_consumer.py and decode_folds.py.

Barriers (mbarriers; a stage s of the ring of tiles, a place i of the ring of items):
    k_full[s], v_full[s]   tiles have arrived          empty[s]        the consumer's products with both are done
    item_full[i]           an item is described        item_empty[i]   all roles have read its description
    q_full[i]              its queries have arrived    stored[i]       its result is in global memory
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..portable.cached import factor_of, magnitude, rounded
from ..portable.record import record
from ..portable.split import ROWS_BLOCK, Batch, cut, extent, row_of
from . import tma
from .tma import slot

HALF = gl.constexpr(64)  # columns of a TMA box: the width of one swizzle of shared memory
SHIFT = gl.constexpr(16)  # keys: the size of the smallest page
BOX = gl.constexpr(8)  # queries: the rows of one swizzle pattern of shared memory
STARTED = gl.constexpr(9)  # the hardware barrier on which all THREADS wait until the mbarriers are initialized
THREADS = gl.constexpr(320)


@record
class Rings:
    """The rings in shared memory through which the roles pass data, with the barriers of the table above."""

    k: gl.shared_memory_descriptor  # (STAGES * halves * pieces, PIECE, 64), as TMA writes them
    v: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor  # (STAGES * 2, BLOCK_K) fp32, of k and of v; read only with one per token
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    items: gl.shared_memory_descriptor  # (ITEMS * FIELDS, 1) int32
    item_full: gl.shared_memory_descriptor
    item_empty: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor  # (ITEMS, BLOCK_M, BLOCK_D); for WORDS (ITEMS * 2, BLOCK_M, 64): even, odd columns
    q_units: gl.shared_memory_descriptor  # (ITEMS, BLOCK_M) fp32, of `_in_half`; read only for WORDS
    q_boxes: gl.shared_memory_descriptor  # the same, as (ITEMS * halves * BLOCK_M / 8, 8, 64)
    q_unit_boxes: gl.shared_memory_descriptor  # (ITEMS * BLOCK_M / 8, 8)
    q_full: gl.shared_memory_descriptor
    stored: gl.shared_memory_descriptor


@record
class Cache:
    """Pointers to the cache and to the new tokens to append, and their strides."""

    k: gl.tensor
    v: gl.tensor
    k_new: gl.tensor  # None without APPEND, as is v_new
    v_new: gl.tensor
    k_scale: gl.tensor  # fp32 (Hkv,) or one per slot and head; None without scales
    v_scale: gl.tensor
    strides: tuple  # (row or page, head, slot), elements
    scale_strides: tuple
    new_strides: tuple  # (row, head, token), units of UNIT elements
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
    QUAD: gl.constexpr  # SPAN: there are no quads
    SPAN: gl.constexpr
    GROUPS: gl.constexpr
    PAGE: gl.constexpr
    STAGES: gl.constexpr
    ITEMS: gl.constexpr  # places of the ring of items
    APPEND: gl.constexpr
    QUERIES_AS_ROWS: gl.constexpr  # queries are the rows of products, in place of keys
    COLUMNS: gl.constexpr  # of a tile: BLOCK_D, or half as many words of two where the cache has 8 bits
    WORDS: gl.constexpr  # the cache has 8 bits
    INT8: gl.constexpr  # int8, not e4m3
    SCALES: gl.constexpr  # 0: none, 1: per head, 2: per token and head
    UNIT: gl.constexpr


@gluon.constexpr_function
def stored_dtype(build):
    """Return the dtype of an 8-bit cache."""
    return gl.int8 if build.INT8 else gl.float8e4nv


@gluon.constexpr_function
def in_flight(build):
    """How many parts of a row are loaded together. Two quads where the fewer lines still fill all threads."""
    return 8 if build.BLOCK_D == 128 and build.QUAD < build.SPAN else 4


@gluon.constexpr_function
def lines_of(build):
    """How many lines of a result are folded at once: more lines mean more code."""
    return min(build.BLOCK_M, 4096 // build.BLOCK_D // in_flight(build))


@gluon.constexpr_function
def shares_folds(build):
    """Whether programs share the folds of a batch so small that each has one item at most."""
    return build.BLOCK_D == 128 and build.BLOCK_M > 8


@gluon.constexpr_function
def fields_of(build):
    """How many numbers describe an item."""
    return 12 if shares_folds(build) else 11


@gluon.jit
def _write_field(rings, place, FIELD: gl.constexpr, value, build):
    """Write a field of an item's description. Called by the producer's one warp."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rings.items.index(place * fields_of(build) + FIELD).store(gl.full([1], value, gl.int32, one))


@gluon.jit
def read_field(rings, place, FIELD: gl.constexpr, build, WARPS: gl.constexpr = 4):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(rings.items.index(place * fields_of(build) + FIELD).load(one), 0)


@gluon.jit
def started(mine, COUNT: gl.constexpr, WARPS: gl.constexpr = 4):
    """Initialize a role's rings of COUNT mbarriers each, and wait until all roles have initialized theirs."""
    for i in gl.static_range(COUNT):
        for ring in gl.static_range(len(mine)):
            mbarrier.init(mine[ring].index(i), count=1)
    if len(mine) > 0:
        fence_async_shared()
    tma.named_barrier("bar.sync", STARTED, THREADS, WARPS)


@gluon.jit
def awaited(rings, turn, build, WARPS: gl.constexpr = 4):
    """Wait for the description of the turn's item: (its place in the ring, the phase of its barriers, its row)."""
    place, phase = slot(turn, build.ITEMS)
    mbarrier.wait(rings.item_full.index(place), phase)
    return place, phase, read_field(rings, place, 0, build, WARPS)


@gluon.jit
def shifted(tile, keys, build, PADDED: gl.constexpr):
    """How many keys before a tile's first one its copy begins: as many as the tile has slots past the row's last key,
    in whole SHIFTs.

    The keys before lie outside the page, where TMA reads nothing, or have just been read. Slots past the last key would
    be read from memory. Left padding is neither, so there the copy is not shifted.
    """
    behind = gl.maximum((tile + 1) * build.BLOCK_K - keys, 0)
    return gl.where(PADDED, 0, behind // SHIFT * SHIFT)


@gluon.jit
def _known(page, cache):
    """Whether the pool has this page. TMA reads any other page as zeros."""
    return (page >= 0) & (page < cache.num_pages)


@gluon.jit
def _narrowed(values, scale, kv_head, at, keep, build):
    """Round new tokens to 8 bits. With one scale per token, store the scales at the offsets `at`."""
    values = values.to(gl.float32)
    if build.SCALES == 1:
        return rounded(values, gl.load(scale + kv_head), stored_dtype(build))
    else:
        factor = factor_of(gl.max(magnitude(values), 1), stored_dtype(build))
        gl.store(scale + at, factor, mask=keep)
        return rounded(values, factor[:, None], stored_dtype(build))


@gluon.jit
def _append(begin, end, first_new, row, kv_head, pad, cache, build):
    """Write the new tokens among the keys begin .. end to their slots, where TMA then reads them."""
    BLOCK_D: gl.constexpr = build.BLOCK_D
    TOKENS: gl.constexpr = 256 // BLOCK_D
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [TOKENS, BLOCK_D // 8], [1, 1], [1, 0])
    columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    base = row.to(gl.int64) * cache.new_strides[0] + kv_head.to(gl.int64) * cache.new_strides[1]
    token_stride = cache.new_strides[2] * build.UNIT
    for first in range(gl.maximum(begin, first_new), end, TOKENS):
        key = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
        known = key < end
        keep = known[:, None] & (columns < build.HEAD_DIM)[None, :]
        tokens = (base * build.UNIT + (key - first_new) * token_stride)[:, None] + columns[None, :]
        new_k = gl.load(cache.k_new + tokens, mask=keep, other=0.0)
        new_v = gl.load(cache.v_new + tokens, mask=keep, other=0.0)
        slots = pad + key
        line = key.to(gl.int64) * 0 + row
        if build.PAGE > 0:
            pages = cache.block_table + row.to(gl.int64) * cache.table_row
            line = gl.load(pages + slots // build.PAGE, mask=key < end, other=0)
            known = known & _known(line, cache)
            keep = keep & _known(line, cache)[:, None]
            line, slots = line.to(gl.int64), slots % build.PAGE
        there = kv_head.to(gl.int64) * cache.strides[1] + line * cache.strides[0]
        there += slots.to(gl.int64) * cache.strides[2]
        if build.WORDS:
            at = line * cache.scale_strides[0] + kv_head * cache.scale_strides[1] + slots * cache.scale_strides[2]
            new_k = _narrowed(new_k, cache.k_scale, kv_head, at, known, build)
            new_v = _narrowed(new_v, cache.v_scale, kv_head, at, known, build)
        gl.store(cache.k + there[:, None] + columns[None, :], new_k, mask=keep)
        gl.store(cache.v + there[:, None] + columns[None, :], new_v, mask=keep)
    tma.fence_async_global()


@gluon.jit
def _place_of(piece, tile, start, keys, row, pad, pages, build):
    """Return where a piece of a tile's copy begins, the keys from `piece` on: (row or page, slot)."""
    line, at = row, pad + start + piece
    if build.PAGE >= build.BLOCK_K:
        line = gl.load(pages + tile * build.BLOCK_K // build.PAGE, mask=tile * build.BLOCK_K < keys, other=0)
        at = tile * build.BLOCK_K % build.PAGE - (tile * build.BLOCK_K - start) + piece
    elif build.PAGE > 0:
        first = start + piece
        inside = (first >= tile * build.BLOCK_K) & (first < keys)
        first = gl.maximum(first, 0)
        line = gl.load(pages + first // build.PAGE, mask=inside, other=0)
        at = gl.where(inside, first % build.PAGE, build.PAGE)  # outside of it TMA reads nothing
    return line, at


@gluon.jit
def _scales_at(tile, start, keys, row, kv_head, pad, pages, cache, build):
    """Return the offset of the scale of each key of a tile, which may be anywhere, and whether the key exists."""
    key = start + gl.arange(0, build.BLOCK_K, layout=gl.BlockedLayout([1], [32], [1], [0]))
    inside = (key >= tile * build.BLOCK_K) & (key < keys)
    slots = pad + key
    line = key.to(gl.int64) * 0 + row
    if build.PAGE > 0:
        line = gl.load(pages + slots // build.PAGE, mask=inside, other=0)
        inside = inside & _known(line, cache)
        line, slots = line.to(gl.int64), slots % build.PAGE
    at = line * cache.scale_strides[0] + kv_head * cache.scale_strides[1] + slots * cache.scale_strides[2]
    return at, inside


@gluon.jit
def producer(
    k_desc, v_desc, seqlens, leftpad, num_rows, num_q, capacity, window_left, workspace, min_span_items, width, cache,
    rings, build, PADDED: gl.constexpr,
):  # fmt: skip
    BLOCK_K: gl.constexpr = build.BLOCK_K
    PAGE: gl.constexpr = build.PAGE
    HALVES: gl.constexpr = build.COLUMNS // HALF
    PIECE: gl.constexpr = k_desc.block_type.shape[2]
    PIECES: gl.constexpr = BLOCK_K // PIECE
    lanes = gl.arange(0, ROWS_BLOCK, layout=gl.BlockedLayout([1], [32], [1], [0]))
    if build.APPEND:  # the other roles see an item's description only after this
        tma.wait_for_previous()
    batch = Batch(
        seqlens, leftpad, num_rows, num_q, capacity, window_left, lanes, BLOCK_K, build.QUAD, build.SPAN, build.APPEND,
        PADDED,
    )  # fmt: skip
    size, num_items = cut(width, min_span_items, batch)
    started((), 0, 1)  # the other roles have initialized their barriers meanwhile
    programs = gl.num_programs(0)
    step, turn = 0, 0
    item = gl.program_id(0)
    while item < num_items:
        following = item + programs
        if num_items > programs:  # drawn early, so that no role waits for the ticket
            drawn = gl.atomic_add(workspace + 1, 1, sem="relaxed")
            if drawn == num_items - 1:  # the last ticket: one per item past the first ones, and one more per program
                gl.store(workspace + 1, 0)
            following = programs + drawn
        unit = item // width
        kv_head = item - unit * width
        row, place_in_row, spans_before = row_of(unit, size, batch)
        keys, first_tile, tiles, pad, unfit = extent(row, batch)
        begin = first_tile + place_in_row * size
        end = gl.minimum(begin + size, first_tile + tiles)
        fault = gl.where(unfit, 1, 0)
        pages = cache.block_table + row.to(gl.int64) * cache.table_row
        place, phase_of_item = slot(turn, build.ITEMS)
        for tile in range(begin, end):
            start = tile * BLOCK_K - shifted(tile, keys, build, PADDED)
            if build.APPEND:  # before the wait for a stage, which is the longer one
                first_new = gl.maximum(keys - num_q, 0)  # an absent row has no keys
                end_key = gl.minimum(start + BLOCK_K, keys)
                if end_key > first_new:
                    _append(start, end_key, first_new, row, kv_head, pad, cache, build)
            if build.SCALES == 2:
                at_scale, scaled = _scales_at(tile, start, keys, row, kv_head, pad, pages, cache, build)
            places = ()
            for piece in gl.static_range(PIECES):
                place_of_piece = _place_of(piece * PIECE, tile, start, keys, row, pad, pages, build)
                places = places + (place_of_piece,)  # noqa: RUF005 (Triton's tuples)
            if tile == begin:  # before the item's first copy, or its queries would queue behind it
                mbarrier.wait(rings.item_empty.index(place), phase_of_item ^ 1)
                single = gl.where(num_items <= programs, 1, 0)  # a field only where folds are shared
                fields = row, kv_head, begin, end, keys, fault, item, size, tiles, place_in_row, spans_before, single
                for field in gl.static_range(fields_of(build)):
                    _write_field(rings, place, field, fields[field], build)
                mbarrier.arrive(rings.item_full.index(place), count=1)
            stage, phase = slot(step, build.STAGES)
            mbarrier.wait(rings.empty.index(stage), phase ^ 1)
            k_full, v_full = rings.k_full.index(stage), rings.v_full.index(stage)
            if build.SCALES == 2:
                tma.gather(cache.k_scale + at_scale, scaled, rings.scales.index(stage * 2))
                tma.gather(cache.v_scale + at_scale, scaled, rings.scales.index(stage * 2 + 1))
                tma.arrive_when_gathered(k_full)  # zeros where there is no key
            mbarrier.expect(k_full, BLOCK_K * build.COLUMNS * 2)
            for piece in gl.static_range(PIECES):
                line, at = places[piece]
                if PAGE > 0:
                    fault = fault | gl.where(_known(line, cache), 0, 1)
                for half in gl.static_range(HALVES):
                    box = (stage * HALVES + half) * PIECES + piece
                    tma.load(k_desc, [line, kv_head, at, half * HALF], k_full, _as_box(rings.k.index(box), k_desc))
            for piece in gl.static_range(PIECES):
                line, at = places[piece]
                for half in gl.static_range(HALVES):
                    box = (stage * HALVES + half) * PIECES + piece
                    tma.load(v_desc, [line, kv_head, at, half * HALF], v_full, _as_box(rings.v.index(box), v_desc))
            if PAGE > 0:
                _write_field(rings, place, 5, fault, build)
            mbarrier.expect(v_full, BLOCK_K * build.COLUMNS * 2)  # last, so that v_full publishes the fault too
            step += 1
        item = following
        turn += 1
    place, phase = slot(turn, build.ITEMS)
    mbarrier.wait(rings.item_empty.index(place), phase ^ 1)
    _write_field(rings, place, 0, -1, build)
    mbarrier.arrive(rings.item_full.index(place), count=1)


@gluon.jit
def _as_box(part, descriptor):
    return part._reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)


@gluon.jit
def _in_half(queries):
    """Return queries (rows, D) in float16, and the unit of each row: a power of two, so that its largest number lies
    between 2^14 and 2^15. Exact, but for numbers below 2^-29 of their row's largest."""
    largest = gl.max(gl.abs(queries), 1)
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) & 0x7F800000, 15 << 23)  # no power leaves float32
    per_unit = ((253 << 23) - (exponent - (15 << 23))).to(gl.float32, bitcast=True)
    unit = (exponent - (14 << 23)).to(gl.float32, bitcast=True)
    return (queries * per_unit[:, None]).to(gl.float16), unit


@gluon.jit
def fetcher(q, q_strides, group, num_q, rings, build):
    """One warp loads the queries of each item's KV head into shared memory, in boxes of 8 rows by 64 columns. Rows past
    the last query hold stale data or zeros; they only affect their own sums, which are never stored."""
    READ: gl.constexpr = build.BLOCK_D if build.WORDS else HALF  # columns loaded at a time
    layout: gl.constexpr = gl.BlockedLayout([1, READ // 8], [4, 8], [1, 1], [1, 0])
    lines = gl.arange(0, BOX, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, READ, layout=gl.SliceLayout(0, layout))
    HALVES: gl.constexpr = build.BLOCK_D // HALF
    boxes = gl.cdiv(group * num_q, BOX)
    started((), 0, 1)
    turn = 0
    place, _, row = awaited(rings, turn, build, 1)
    while row >= 0:
        first_head = read_field(rings, place, 1, build, 1) * group
        of_row = q + row.to(gl.int64) * q_strides[0]
        for box in range(boxes):
            packed = box * BOX + lines
            query = packed // group
            rows = of_row + (first_head + packed - query * group) * q_strides[1] + query * q_strides[2]
            first = place * HALVES * (build.BLOCK_M // BOX) + box
            if build.WORDS:
                keep = (query < num_q)[:, None] & (columns < build.HEAD_DIM)[None, :]
                values, unit = _in_half(gl.load(rows[:, None] + columns[None, :], mask=keep, other=0.0).to(gl.float32))
                rings.q_unit_boxes.index(place * (build.BLOCK_M // BOX) + box).store(unit)
                even, odd = gl.split(gl.reshape(values, [BOX, HALF, 2]))
                rings.q_boxes.index(first).store(even)
                rings.q_boxes.index(first + build.BLOCK_M // BOX).store(odd)
            else:
                for half in gl.static_range(HALVES):
                    column = half * HALF + columns
                    keep = (query < num_q)[:, None] & (column < build.HEAD_DIM)[None, :]
                    to = rings.q_boxes.index(first + half * (build.BLOCK_M // BOX))
                    tma.gather(rows[:, None] + column[None, :], keep, to)
        tma.wait_for_gathers()
        mbarrier.arrive(rings.q_full.index(place), count=1)
        turn += 1
        place, _, row = awaited(rings, turn, build, 1)
