"""Attention of a few new queries over a cache of keys and values, for Hopper (sm_90a), in Gluon.

Work items, their partial results and the fold of these are as in the portable kernel (kernels/portable/decode.py,
split.py), with quads between tiles and spans: a row's bits depend on its own keys alone. What differs is how an item is
computed, by four roles that synchronize through mbarriers. The producer warp draws items, publishes their descriptions
and issues TMA copies of key/value tiles, running ahead into the next items while stages are free; the fetcher warp
loads the items' queries (decode_loads.py). The consumer warpgroup computes an item and stores its partial result in
global memory (decode_consumer.py). The collector warpgroup folds the partial results (decode_folds.py). So neither
memory nor tensor cores idle at the end of an item. Where results have many lines and each program has at most one item,
the last programs to arrive at a row fold some lines each.

Up to 32 queries that share a KV head, up to 16 at head_dim 64, are the columns of both products, because wgmma needs 64
rows, and P passes through shared memory. Up to 64 are the rows:

    S^T (keys, queries) = K Q^T        O^T (D, queries) = V^T P^T        or        S = Q K^T        O = P V

An 8-bit cache is loaded as words of two columns. The consumer widens them in registers, where tensor cores read their
left operand, and computes separate products for the even and the odd columns of keys, queries and values. Keys become
float16, which takes fewer instructions than bfloat16, and so do the queries, each in a unit of its own (`_in_half`):

    S^T = K_even Q_even^T + K_odd Q_odd^T        O_even^T = V_even^T P^T        O_odd^T = V_odd^T P^T

New tokens: the producer writes those of a tile to the cache before it issues the tile's copy. The copy of a row's last
tile begins some keys early, so that few slots past the last key are copied (`shifted`). The consumer overwrites those
with zeros, because 0 * NaN is NaN. In 8 bits they stay: all values are finite, as e4m3's NaN reads as 480. TMA reads a
page that is not in the pool as zeros; the producer sets the item's fault field, and the consumer then returns NaN.
"""

from functools import partial
from types import SimpleNamespace

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..call import Options
from ..decode import Call, decode_key
from ..launch import Launch, Plan, plan_of, run, sizes_described
from ..portable.decode import NOT_SPECIALIZED_OVER_A_CACHE, decode_launches, given_tensors, repeated_decode
from ..portable.tuning import DecodeTile, decode_rows
from ..replay import Repeated
from . import tma
from .decode_consumer import consumer
from .decode_folds import collector
from .decode_loads import BOX, HALF, SHIFT, Build, Cache, Rings, fetcher, fields_of, producer, shares_folds


@gluon.constexpr_function
def _registers(build):
    """Registers per thread of collector, producer, fetcher. The consumer has the rest: 240, or 104 at BLOCK_D 64."""
    if build.BLOCK_D == 64:
        return [80, 56, 56]
    return [168, 96, 96] if build.QUERIES_AS_ROWS and build.APPEND else [160, 104, 104]


@gluon.jit(do_not_specialize=NOT_SPECIALIZED_OVER_A_CACHE)
def hopper_decode_kernel(
    # descriptors of boxes (1, 1, PIECE, 128 bytes) of consecutive slots
    k_desc,  # (B, Hkv, S, D), or pages (P, Hkv, PAGE, D), q's dtype, int8 or e4m3
    v_desc,
    # inputs, as in `flash_decode_kernel`
    q,  # (B, Hq, Nq, D) bf16 | fp16
    k_cache,
    v_cache,
    k_new,  # (B, Hkv, Nq, D), or None
    v_new,
    k_scale,  # fp32 (Hkv,), or (B, Hkv, S) as the cache, or None
    v_scale,
    seqlens,  # (B,) int32
    leftpad,  # (B,) int32 or None
    block_table,  # (B, pages of a row) int32 or None
    # outputs
    o,  # (B, Nq, Hq, D), contiguous
    lse,  # (B, Hq, Nq) fp32, contiguous, natural logarithm
    # scratch memory of the launch
    sums,  # (slots, slot_rows, BLOCK_D) fp32
    maxima,  # (slots, 2, BLOCK_M) fp32
    workspace,  # int32: fault, ticket, arrival counters of spans, of rows; all but the fault are 0 before and after
    # layout, in units of UNIT elements (of CACHE_UNIT those of the cache); the last stride is 1
    q_batch, q_head, q_token,
    cache_row, cache_head, cache_slot,
    new_batch, new_head, new_token,
    scale_row, scale_head, scale_slot,  # elements
    table_row,
    # sizes
    num_rows,  # B
    num_heads,  # Hq
    num_kv_heads,  # Hkv
    num_q,  # Nq
    capacity,  # S, or PAGE times the width of the block table
    num_pages,
    slot_rows,  # min(BLOCK_M, Nq * Hq // Hkv)
    min_span_items,  # from this many spans on an item is a span; fewer spans have at most SPAN times as many parts
    window_left,  # NEVER without a window
    window_right,  # read only where LOCAL
    scale_log2,  # scale * log2(e), positive
    switches,  # Switches: what is None is compiled away
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,  # of the tiles: 64 or 128, no less than HEAD_DIM
    BLOCK_M: gl.constexpr,  # at least the queries times the heads of a group
    BLOCK_K: gl.constexpr,
    QUAD: gl.constexpr,
    SPAN: gl.constexpr,
    GROUPS: gl.constexpr,
    PAGE: gl.constexpr,  # 0: contiguous
    SCALES: gl.constexpr,  # 0: none, 1: per head, 2: per token and head
    STAGES: gl.constexpr,
    UNIT: gl.constexpr,
    CACHE_UNIT: gl.constexpr,
    WORDS: gl.constexpr,  # the cache has 8 bits
    APPEND: gl.constexpr,
    CAUSAL: gl.constexpr,
    LOCAL: gl.constexpr,  # a window (left, right) in place of CAUSAL
):  # fmt: skip
    """`flash_decode_kernel` on Hopper: the same items, the same numerics, other tiles."""
    QUERIES_AS_ROWS: gl.constexpr = BLOCK_M == 64
    ITEMS: gl.constexpr = 2 if QUERIES_AS_ROWS else 3  # whose queries fit into shared memory
    is_padded: gl.constexpr = leftpad is not None
    pads = leftpad if is_padded else seqlens
    dtype: gl.constexpr = q.dtype.element_ty
    tile_dtype: gl.constexpr = gl.int16 if WORDS else dtype
    COLUMNS: gl.constexpr = BLOCK_D // 2 if WORDS else BLOCK_D
    PIECE: gl.constexpr = k_desc.block_type.shape[2]
    build = Build(
        HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_K, QUAD, SPAN, GROUPS, PAGE, STAGES, ITEMS, APPEND, QUERIES_AS_ROWS, COLUMNS,
        WORDS, k_cache.dtype.element_ty == gl.int8, SCALES, UNIT,
    )  # fmt: skip
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, COLUMNS], tile_dtype)
    piece_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PIECE, HALF], tile_dtype)
    q_dtype: gl.constexpr = gl.float16 if WORDS else dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, COLUMNS], q_dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], dtype)
    k_tiles = gl.allocate_shared_memory(tile_dtype, [STAGES, BLOCK_K, COLUMNS], tile_layout)
    v_tiles = gl.allocate_shared_memory(tile_dtype, [STAGES, BLOCK_K, COLUMNS], tile_layout)
    q_shape: gl.constexpr = [ITEMS * (BLOCK_D // COLUMNS), BLOCK_M, COLUMNS]
    q_tiles = gl.allocate_shared_memory(q_dtype, q_shape, q_layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    p_tile, warp_partials = q_tiles, q_tiles  # placeholders: with queries as rows P stays in registers
    if not QUERIES_AS_ROWS:  # P, and the maxima and sums of the consumer's warps
        p_tile = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_K], p_layout)
        by_warp: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
        warp_partials = gl.allocate_shared_memory(gl.float32, [2, 4, BLOCK_M], by_warp)
    item_sums = q_tiles  # a placeholder
    if QUERIES_AS_ROWS and QUAD < SPAN:  # an item's sums, while those of a quad are added up in registers
        by_rows: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
        item_sums = gl.allocate_shared_memory(gl.float32, [BLOCK_M, BLOCK_D], by_rows)
    items = gl.allocate_shared_memory(gl.int32, [ITEMS * fields_of(build), 1], plain)
    scales, q_units, q_unit_boxes = items, items, items  # placeholders
    if WORDS:
        q_unit_boxes = gl.allocate_shared_memory(gl.float32, [ITEMS * (BLOCK_M // BOX), BOX], plain)
        q_units = q_unit_boxes._reinterpret(gl.float32, [ITEMS, BLOCK_M], plain)
    if SCALES == 2:
        scales = gl.allocate_shared_memory(gl.float32, [STAGES * 2, BLOCK_K], plain)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    item_full = gl.allocate_shared_memory(gl.int64, [ITEMS, 1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [ITEMS, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [ITEMS, 1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [ITEMS, 1], mbarrier.MBarrierLayout())
    pieces: gl.constexpr = [STAGES * (COLUMNS // HALF) * (BLOCK_K // PIECE), PIECE, HALF]
    k_pieces = k_tiles._reinterpret(tile_dtype, pieces, piece_layout)
    v_pieces = v_tiles._reinterpret(tile_dtype, pieces, piece_layout)
    boxes: gl.constexpr = [ITEMS * (BLOCK_D // HALF) * (BLOCK_M // BOX), BOX, HALF]
    box_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOX, HALF], q_dtype)
    q_boxes = q_tiles._reinterpret(q_dtype, boxes, box_layout)
    rings = Rings(
        k_pieces, v_pieces, scales, k_full, v_full, empty, items, item_full, item_empty, q_tiles, q_units, q_boxes,
        q_unit_boxes, q_full, stored,
    )  # fmt: skip
    strides = (cache_row * CACHE_UNIT, cache_head * CACHE_UNIT, cache_slot * CACHE_UNIT)
    new_strides = (new_batch, new_head, new_token)
    table = block_table if PAGE > 0 else seqlens
    scale_strides = (scale_row, scale_head, scale_slot)
    cache = Cache(
        k_cache, v_cache, k_new, v_new, k_scale, v_scale, strides, scale_strides, new_strides, table, table_row,
        num_pages,
    )  # fmt: skip
    group = num_heads // num_kv_heads
    gl.warp_specialize(
        [
            (consumer, (
                o, lse, num_heads, num_q, group, num_kv_heads, (window_left, window_right), scale_log2, switches,
                k_scale, v_scale, sums, maxima, slot_rows, workspace, min_span_items, rings, p_tile, warp_partials,
                item_sums, k_tiles, v_tiles, build, is_padded, CAUSAL, LOCAL,
            )),
            (collector, (
                o, lse, switches.sinks, v_scale, num_heads, num_q, group, num_kv_heads, sums, maxima, slot_rows,
                workspace, min_span_items, rings, build,
            )),
            (producer, (
                k_desc, v_desc, seqlens, pads, num_rows, num_q, capacity, window_left, workspace, min_span_items,
                num_kv_heads, cache, rings, build, is_padded,
            )),
            (fetcher, (q, (q_batch * UNIT, q_head * UNIT, q_token * UNIT), group, num_q, rings, build)),
        ],
        [4, 1, 1], _registers(build),
    )  # fmt: skip


def tile_for(call: Call) -> DecodeTile:
    """Return the tile for a call, by head_dim, the bits of the cache, and how many queries share a KV head.

    At head_dim 128: two stages of 64 KB, or four of 32 KB at 8 bits. With more bytes in flight, memory is read more
    slowly and the collector waits longer. At 64: three stages for each of two programs, or six of half a tile where the
    scores of more rows need the registers. max_registers is a thread's share at launch, which the roles then divide
    anew. The fixed cost of an item is that of two tiles, so spans are long. Results of many rows are large, and those
    of narrow heads are large for their keys: then fewer calls are cut into quads, and none where both are."""
    rows, _ = decode_rows(call.q.shape, call.k_cache.shape[1])
    wide = call.q.shape[3] > 64
    as_rows = rows > (32 if wide else 16)  # at 64 there are no registers for more columns
    block_k = 64 if as_rows and not wide else 128
    stages = (2 if wide else 384 // block_k) * (2 if call.k_cache.itemsize == 1 else 1)
    return DecodeTile(
        block_k, span=16, num_warps=4, num_stages=stages, per_sm=1 if wide else 2, max_registers=168 if wide else 80,
        least_rows=64 if as_rows else 8, few=0.1 if as_rows and not wide else 0.5 if wide and rows <= 8 else 0.4,
        quad=None if as_rows and not wide else 4,
    )  # fmt: skip


def launch_hopper_decode(
    call: Call, options: Options, tile: DecodeTile | None = None, plan: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """`launch_flash_decode` for a call that `takes_hopper_kvcache` accepts."""
    plan = plan or plan_of(decode_key(call, options, ("hopper", tile)))
    tile, tensors, cache = given_tensors(call, options, tile or tile_for(call))
    run(plan, tensors, partial(_launches, options, tile, cache), **cache, **_described(call))
    return tensors["o"], tensors["lse"]


def repeated_hopper_decode(call: Call, options: Options, plan: Plan) -> Repeated | None:
    """`repeated_decode` for a call that this module has launched."""
    return repeated_decode(call, options, plan, tile_for(call), **_described(call))


def _described(call: Call) -> dict[str, tuple]:
    """Return the descriptors' shape and strides, which differ between the launches for a cache and a longer one."""
    of_cache = sizes_described(call.k_cache)
    return {"k_desc": of_cache, "v_desc": of_cache}


def _launches(options: Options, tile: DecodeTile, cache: dict[str, int], **given: Tensor | None) -> list[Launch]:
    (portable,) = decode_launches(options, tile, cache, **given)
    page = portable.constants["PAGE"]
    words = given["k_cache"].itemsize == 1
    columns = HALF.value * (2 if words else 1)
    # where two boxes hold a key's columns: the shorter the boxes, the closer together memory is read
    piece = SHIFT.value if given["q"].shape[3] > columns or 0 < page < tile.block_k else tile.block_k
    descriptors = (tma.descriptor(given[name], piece, columns) for name in ("k_cache", "v_cache"))
    constants = portable.constants | {"STAGES": tile.num_stages, "WORDS": words}
    constants = {name: constants[name] for name in hopper_decode_kernel.arg_names if name in constants}
    how = {name: value for name, value in tile.how.items() if name != "num_stages"}
    how["launch_cooperative_grid"] = shares_folds(SimpleNamespace(**constants))  # programs then wait for one another
    how["launch_pdl"] = constants["APPEND"]  # the kernel before makes the new tokens: start while it ends
    return [Launch(hopper_decode_kernel, portable.grid, (*descriptors, *portable.arguments), constants, how)]
