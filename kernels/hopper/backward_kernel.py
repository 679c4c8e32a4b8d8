"""The main kernel of the Hopper backward, in Gluon: dK and dV in registers, dQ added up in global memory.

Roles. Two consumer warpgroups own 64 keys each and hold their dK and dV in registers; one producer warp streams the
query tiles of all query heads of the group past them; two warps keep the turns in which dQ is added to global memory.
Scores are transposed, so that P^T, and at head_dim 64 dS^T, are left operands from registers. dQ = dS K needs the dS of
both consumers. Which role computes it, and when, differs between the two head_dims:

    64     a warpgroup of its own, from shared memory, a step or two behind. K and V stay in the consumers' registers
           (read from shared memory, S^T and dP^T alone would fill its bandwidth), no consumer waits for the other
           one, and the next item's K and V are loaded while this one runs. A consumer's step:

               tensor cores   S^T = K Q^T | dP^T = V dO^T | dV += P^T dO | dK += dS^T Q
               other units                  exp2: P^T       dS^T -> shared

    128    registers are full, so each consumer computes half of dQ's columns itself, a step late: the dS of both is
           there long before, and the adds run under other products. dK is a step late as well, from shared memory:

               tensor cores   S^T | dQ of the step before | dK of the step before | dP^T | dV
               other units          exp2: P^T               dQ added                      dS^T -> shared

Barriers (mbarriers; [s] is a stage of a ring):
    k_full[s], v_full    an item's keys, values are there      k_empty[s], v_empty   ... are read (128: dK, dV stored)
    full[s]              a step's Q, dO, LSE, delta are there  empty[s]              both consumers are done with them
    ds_full[s]           both halves of dS are there           ds_empty[s]           dQ is computed from them (64)
    item_full[s]         the next item's number is there       item_empty[s]        all roles have read it
    turn_ready[w]        a share of dQ may be added; keeper w waits for the add on hardware barrier ADDED + w
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..portable.tiles import NOT_SPECIALIZED
from . import tma
from .backward_roles import (
    CONSUMERS,
    KEEPERS,
    S_LAYOUT,
    add_in_turn,
    producer,
    query_gradient,
    turn_keeper,
    wait_for_turn,
)
from .backward_schedule import (
    BLOCK_K,
    BLOCK_Q,
    KEYS,
    Sizes,
    end_of_items,
    first_rows,
    next_item,
    owned,
    query_tiles,
    sizes_of,
    unmasked_from,
)
from .backward_step import (
    awaited_pattern,
    gradient_step_64,
    gradient_step_128,
    late_products,
    slope_of,
    steps_of_item,
)
from .masked import heads_together, masked_by
from .pipeline import store_rows
from .tma import slot


@gluon.jit
def _consumer(
    dq_ptr, turns, outputs, tiles, barriers, draws, call, scale, scale_log2, softcap, CONSUMER: gl.constexpr
):  # fmt: skip
    HEAD_DIM: gl.constexpr = call.HEAD_DIM
    dk_desc, dv_desc = outputs
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, out_smem = tiles
    k_full, k_empty, v_full, v_empty, full, empty, ds_full, ds_empty = barriers
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    streamed = (q_smem, do_smem, lse_smem, delta_smem)
    ring = (full, empty, ds_full, ds_empty)
    # full blocks have a step body of their own: a branch inside the step costs them a tenth (NOTES.md). A soft-cap
    # needs the branch. With head_dim 64 a step returns the next one's pattern: reading it first takes 2 % of a step
    BY_PATTERN: gl.constexpr = call.masked is not None and softcap is None
    step, done, end_item = 0, 0, end_of_items(call)
    item = next_item(done, draws, 4)
    while item < end_item:
        sizes = sizes_of(item, call)
        _q_row0, k_row0, _padded_row0 = first_rows(sizes)
        tile, batch, kv_head, from_last = owned(item, sizes)
        key = tile * BLOCK_K + KEYS * CONSUMER
        first, end = query_tiles(tile, batch, kv_head, sizes)
        unmasked = unmasked_from(key, first, end, sizes)
        slope = slope_of(0, batch, kv_head, sizes, scale_log2, softcap)
        scoring = (scale_log2, softcap, slope)  # of the first head; under a block mask, without ALiBi, of all
        k_stage, k_phase = slot(done, call.K_STAGES)
        mbarrier.wait(k_full.index(k_stage), k_phase)
        if HEAD_DIM == 64:
            k = k_smem.index(k_stage).slice(KEYS * CONSUMER, KEYS, 0).load(gl.DotOperandLayout(0, S_LAYOUT, 2))
            mbarrier.wait(v_full, done & 1)
            v = v_smem.index(0).slice(KEYS * CONSUMER, KEYS, 0).load(gl.DotOperandLayout(0, S_LAYOUT, 2))
            mbarrier.arrive(v_empty, count=1)
        else:
            mbarrier.wait(v_full, done & 1)
        dk = gl.zeros([KEYS, HEAD_DIM], gl.float32, dk_layout)
        dv = gl.zeros([KEYS, HEAD_DIM], gl.float32, dk_layout)
        if HEAD_DIM == 64:
            operands = (k, v, streamed, ds_smem, ring)
            if BY_PATTERN:
                pattern = 0
                if first < end:
                    pattern = awaited_pattern(full, step, sizes)
                for _ in range(sizes.num_heads // sizes.num_kv_heads):
                    for query_tile in range(first, end):
                        at = step + query_tile - first
                        if pattern == 0:
                            dk, dv, pattern = gradient_step_64(
                                *operands, at, key, query_tile, sizes, scoring, dk, dv, False, CONSUMER
                            )
                        else:
                            dk, dv, pattern = gradient_step_64(
                                *operands, at, key, query_tile, sizes, scoring, dk, dv, True, CONSUMER
                            )
                    step += end - first
            else:
                dk, dv, step = steps_of_item(
                    operands, step, 0, key, (first, unmasked, end), from_last, batch, kv_head, sizes, scoring, dk, dv,
                    CONSUMER,
                )  # fmt: skip
        elif first < end:
            operands = (k_smem, v_smem, streamed, ds_smem, dq_ptr, turns, ring)
            query_tile = gl.where(from_last, end - 1, first)
            dk, dv = gradient_step_128(*operands, step, key, query_tile, sizes, scoring, dk, dv, True, True, CONSUMER)
            if BY_PATTERN:
                begun = first + 1
                for _ in range(sizes.num_heads // sizes.num_kv_heads):
                    for query_tile in range(begun, end):
                        at = step + query_tile - first
                        if awaited_pattern(full, at, sizes) == 0:
                            dk, dv = gradient_step_128(
                                *operands, at, key, query_tile, sizes, scoring, dk, dv, False, False, CONSUMER
                            )
                        else:
                            dk, dv = gradient_step_128(
                                *operands, at, key, query_tile, sizes, scoring, dk, dv, False, True, CONSUMER
                            )
                    begun = first
                    step += end - first
            else:
                dk, dv, step = steps_of_item(
                    operands, step, 1, key, (first, unmasked, end), from_last, batch, kv_head, sizes, scoring, dk, dv,
                    CONSUMER,
                )  # fmt: skip
            # the next item replaces K, so the last step's share cannot wait for that item's first step
            dq, dk = late_products(k_smem.index(0), q_smem, ds_smem, ds_full, step - 1, dk, sizes, CONSUMER)
            turn = wait_for_turn(turns, step - 1)
            dq = warpgroup_mma_wait(1, deps=(dq,))
            add_in_turn(dq, dq_ptr, turn, step - 1, CONSUMER, HEAD_DIM)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            last_stage, _phase = slot(step - 1, sizes.STAGES)
            mbarrier.arrive(empty.index(last_stage), count=1)
        if HEAD_DIM == 64:
            mbarrier.arrive(k_empty.index(k_stage), count=1)
            tma.store_wait(0)  # the stores of the item before have read these tiles
            dk_tile = out_smem.index(CONSUMER)
            dv_tile = out_smem.index(CONSUMERS + CONSUMER)
        else:
            # both consumers are done with K and V: dK and dV are stored through their tiles
            tma.named_barrier("bar.sync", 10, 256)
            dk_tile = k_smem.index(0).slice(KEYS * CONSUMER, KEYS, 0)
            dv_tile = v_smem.index(0).slice(KEYS * CONSUMER, KEYS, 0)
        dk_tile.store((dk * scale).to(k_smem.dtype))
        dv_tile.store(dv.to(k_smem.dtype))
        fence_async_shared()
        if HEAD_DIM == 64:
            store_rows(dk_desc, batch, kv_head, key, k_row0, sizes.num_k, dk_tile)
            store_rows(dv_desc, batch, kv_head, key, k_row0, sizes.num_k, dv_tile)
        else:
            # at this width half of a tile's rows are not a TMA tile by themselves: one consumer stores for both
            tma.named_barrier("bar.sync", 10, 256)
            if CONSUMER == 0:
                store_rows(dk_desc, batch, kv_head, key, k_row0, sizes.num_k, k_smem)
                store_rows(dv_desc, batch, kv_head, key, k_row0, sizes.num_k, v_smem)
                tma.store_wait(0)
                mbarrier.arrive(k_empty.index(k_stage), count=1)
                mbarrier.arrive(v_empty, count=1)
        done += 1
        item = next_item(done, draws, 4)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def hopper_bwd_kernel(
    q_desc,  # (B, Hq, Nq, D) bf16 | fp16, tiles of 64 rows; packed documents have B = 1, as in the next five
    k_desc,  # (B, Hkv, Nk, D), tiles of 128 rows
    v_desc,  # (B, Hkv, Nk, D), tiles of 128 rows
    do_desc,  # (B, Hq, Nq, D), tiles of 64 rows
    lse_desc,  # (B * Hq, num_q_padded) fp32, base 2, +inf where a row sees nothing
    delta_desc,  # (B * Hq, num_q_padded) fp32
    dq_ptr,  # (B * Hq * num_q_padded * HEAD_DIM,) fp32: dQ / scale in the order of `in_register_order`
    dk_desc,  # (B, Hkv, Nk, D), tiles of HEAD_DIM rows
    dv_desc,  # (B, Hkv, Nk, D), tiles of HEAD_DIM rows
    turns_ptr,  # (B * Hq * num_q_padded / 64 + 1,) int32, zeros: items that have added to a query tile; items drawn
    num_heads,  # Hq
    num_kv_heads,  # Hkv
    num_batch_kv_heads,  # B * Hkv
    num_q,
    num_q_padded,
    num_k,
    heads_per_section,
    scale,
    scale_log2,
    softcap,  # None without a soft-cap
    window_left,  # None without a window
    window_right,
    alibi_slopes,  # (B or documents, Hq) fp32, or None
    document_tiles,  # of `_document_tiles_kernel`, of keys, or None
    mask_starts,  # of a BlockMask, or None
    mask_visits,
    mask_bits,
    HEAD_DIM: gl.constexpr,  # of the tiles, 64 or 128: D is at most this
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK_OF_BATCH: gl.constexpr,  # dimensions of the block mask
    MASK_OF_HEAD: gl.constexpr,
):
    if window_left is not None:
        window = (window_left, window_right)
    else:
        window: gl.constexpr = None
    if mask_starts is not None:
        masked = masked_by(mask_starts, mask_visits, mask_bits, MASK_OF_BATCH, MASK_OF_HEAD, STAGES, 2)
    else:
        masked: gl.constexpr = None
    K_STAGES: gl.constexpr = 128 // HEAD_DIM
    dtype: gl.constexpr = q_desc.dtype
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, HEAD_DIM], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_Q, HEAD_DIM], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], dtype)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    k_smem = gl.allocate_shared_memory(dtype, [K_STAGES, BLOCK_K, HEAD_DIM], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, BLOCK_K, HEAD_DIM], k_layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, HEAD_DIM], q_layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, HEAD_DIM], q_layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], row_layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], row_layout)
    ds_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_K, BLOCK_Q], ds_layout)
    announced = gl.allocate_shared_memory(gl.int32, [KEEPERS, 1], row_layout)
    if HEAD_DIM == 64:
        out_smem = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, KEYS, HEAD_DIM], k_layout)
    else:
        out_smem = k_smem
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], bar_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], bar_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    turn_ready = gl.allocate_shared_memory(gl.int64, [KEEPERS, 1], bar_layout)
    drawn_items = gl.allocate_shared_memory(gl.int32, [2, 1], row_layout)
    item_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    item_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS + 1 if HEAD_DIM == 64 else 1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=CONSUMERS if HEAD_DIM == 64 else 1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    for place in gl.static_range(2):
        mbarrier.init(ds_full.index(place), count=CONSUMERS)
        mbarrier.init(ds_empty.index(place), count=1)
        mbarrier.init(turn_ready.index(place), count=1)
        mbarrier.init(item_full.index(place), count=1)
        mbarrier.init(item_empty.index(place), count=5 if HEAD_DIM == 64 else 4)  # roles beside the producer
    fence_async_shared()
    tma.wait_for_previous()
    tma.let_next_begin()  # it reads turns, which are 0 now

    loaded = (k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem)
    tiles = (k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, out_smem)
    loads = (k_full, k_empty, v_full, v_empty, full, empty)
    barriers = (k_full, k_empty, v_full, v_empty, full, empty, ds_full, ds_empty)
    dq_tiles, dq_barriers = (k_smem, ds_smem), (k_full, k_empty, ds_full, ds_empty)
    section = heads_together(masked, heads_per_section, num_batch_kv_heads, num_q, num_k)
    no_item: gl.constexpr = None
    sizes = Sizes(
        num_heads, num_kv_heads, num_batch_kv_heads, num_q, num_k, section, window, document_tiles, no_item, masked,
        alibi_slopes, HEAD_DIM, STAGES, K_STAGES, CAUSAL,
    )  # fmt: skip
    counter = turns_ptr + num_batch_kv_heads * (num_heads // num_kv_heads) * (num_q_padded // BLOCK_Q)
    draws = (counter, drawn_items, item_full, item_empty)
    inputs = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc)
    turns, outputs = (announced, turn_ready), (dk_desc, dv_desc)
    if HEAD_DIM == 64:
        gl.warp_specialize(
            [
                (_consumer, (dq_ptr, turns, outputs, tiles, barriers, draws, sizes, scale, scale_log2, softcap, 0)),
                (_consumer, (dq_ptr, turns, outputs, tiles, barriers, draws, sizes, scale, scale_log2, softcap, 1)),
                (query_gradient, (dq_ptr, turns, dq_tiles, dq_barriers, draws, sizes)),
                (producer, (inputs, loaded, loads, draws, sizes)),
                (turn_keeper, (turns_ptr, turns, draws, sizes, num_q_padded, 0)),
                (turn_keeper, (turns_ptr, turns, draws, sizes, num_q_padded, 1)),
            ],
            [4, 4, 1, 1, 1], [208, 72, 24, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (dq_ptr, turns, outputs, tiles, barriers, draws, sizes, scale, scale_log2, softcap, 0)),
                (_consumer, (dq_ptr, turns, outputs, tiles, barriers, draws, sizes, scale, scale_log2, softcap, 1)),
                (producer, (inputs, loaded, loads, draws, sizes)),
                (turn_keeper, (turns_ptr, turns, draws, sizes, num_q_padded, 0)),
                (turn_keeper, (turns_ptr, turns, draws, sizes, num_q_padded, 1)),
            ],
            [4, 1, 1, 1], [240, 24, 24, 24],
        )  # fmt: skip
