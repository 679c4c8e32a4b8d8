"""The Hopper backward's roles beside its consumers: loads, the order of adding to dQ, and dQ itself for head_dim 64.

The role that computes an item's share of dQ adds it from registers, with no copy through shared memory, when it is the
item's turn. The order of the turns is in `backward_schedule.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from . import tma
from .backward_schedule import (
    BLOCK_K,
    BLOCK_Q,
    adds_before,
    draw_item,
    end_of_items,
    first_rows,
    next_item,
    owned,
    query_tile_at,
    query_tiles,
    sizes_of,
    visit_at,
    walked,
)
from .masked import announce_patterns
from .pipeline import load_rows
from .tma import slot

CONSUMERS = gl.constexpr(2)
KEEPERS = gl.constexpr(2)  # warps that keep the turns
ADDED = gl.constexpr(11)  # the first keeper's named barrier; the second one's is the next
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of (64, 64) tiles: S^T, dP^T, dQ


@gluon.jit
def producer(descriptors, tiles, barriers, draws, call):
    """Loads K and V of each item, and Q, dO, LSE and delta of each step."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = descriptors
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem = tiles
    k_full, k_empty, v_full, v_empty, full, empty = barriers
    group_size = call.num_heads // call.num_kv_heads
    k_bytes: gl.constexpr = BLOCK_K * call.HEAD_DIM * 2
    step_bytes: gl.constexpr = 2 * (BLOCK_Q * call.HEAD_DIM * 2 + BLOCK_Q * 4)
    step, done, end_item = 0, 0, end_of_items(call)
    item = draw_item(done, draws)
    while item < end_item:
        sizes = sizes_of(item, call)
        q_row0, k_row0, padded_row0 = first_rows(sizes)
        tile, batch, kv_head, from_last = owned(item, sizes)
        k_stage, k_phase = slot(done, call.K_STAGES)
        mbarrier.wait(k_empty.index(k_stage), k_phase ^ 1)
        mbarrier.expect(k_full.index(k_stage), k_bytes)
        load_rows(
            k_desc, batch, kv_head, tile * BLOCK_K, k_row0, sizes.num_k, k_full.index(k_stage), k_smem.index(k_stage)
        )
        mbarrier.wait(v_empty, (done & 1) ^ 1)
        mbarrier.expect(v_full, k_bytes)
        load_rows(v_desc, batch, kv_head, tile * BLOCK_K, k_row0, sizes.num_k, v_full, v_smem)
        first, end = query_tiles(tile, batch, kv_head, sizes)
        visit, pattern = visit_at(first, first, end, sizes)
        next_visit, next_pattern = visit_at(first + 1, first, end, sizes)
        for member in range(group_size):
            head = kv_head * group_size + member
            for position in range(first, end):
                row = query_tile_at(walked(position - first, first, end, from_last), visit, sizes) * BLOCK_Q
                stage, phase = slot(step, call.STAGES)
                ready = full.index(stage)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                announce_patterns(pattern, next_pattern, stage, sizes.masked)
                visit, pattern = next_visit, next_pattern
                next_visit, next_pattern = visit_at(position + 2, first, end, sizes)
                mbarrier.expect(ready, step_bytes)
                load_rows(q_desc, batch, head, row, q_row0, sizes.num_q, ready, q_smem.index(stage))
                load_rows(do_desc, batch, head, row, q_row0, sizes.num_q, ready, do_smem.index(stage))
                tma.load(
                    lse_desc, [batch * sizes.num_heads + head, padded_row0 + row], ready,
                    lse_smem.index(stage)._reinterpret(gl.float32, [1, BLOCK_Q], lse_desc.layout),
                )  # fmt: skip
                tma.load(
                    delta_desc, [batch * sizes.num_heads + head, padded_row0 + row], ready,
                    delta_smem.index(stage)._reinterpret(gl.float32, [1, BLOCK_Q], delta_desc.layout),
                )  # fmt: skip
                step += 1
        done += 1
        item = draw_item(done, draws)


@gluon.jit
def product(left, right):
    """Issue left @ right, (64, 64) in fp32, asynchronously. The caller waits for it."""
    return warpgroup_mma(left, right, gl.zeros([64, 64], gl.float32, S_LAYOUT), use_acc=False, is_async=True)


@gluon.jit
def in_register_order(dq):
    """dQ (64, 64) in wgmma's layout as (4096,), with a thread's values side by side: a thread stores and adds 16 bytes
    at a time, and a warp 512 consecutive ones. Row 16 w + 8 h + r, column 8 n + 2 c + b go to (((((n 4 + w) 8 + r)
    4 + c) 2 + h) 2 + b); the sum in global memory has this order too, and `_after_kernel` undoes it."""
    return gl.reshape(gl.permute(gl.reshape(dq, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5)), [BLOCK_Q * 64])


@gluon.jit
def wait_for_turn(turns, step):
    """Wait until a step's share of dQ may be added. Returns the index of its query tile among those of all heads, times
    2, plus 1 unless it is the tile's first share."""
    announced, turn_ready = turns
    keeper, use = slot(step, KEEPERS)
    mbarrier.wait(turn_ready.index(keeper), use)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(announced.index(keeper).load(one), 0)


@gluon.jit
def add_in_turn(dq, dq_ptr, place, step, PART: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Add dQ's columns 64 PART to 64 PART + 64 where `wait_for_turn` says, or store them as the tile's first share."""
    share = in_register_order(dq)
    start = dq_ptr + (place >> 1).to(gl.int64) * (BLOCK_Q * HEAD_DIM) + PART * BLOCK_Q * 64
    pointers = start + gl.arange(0, BLOCK_Q * 64, layout=share.type.layout)
    if place & 1 == 0:
        gl.store(pointers, share)
    else:
        gl.atomic_add(pointers, share, sem="relaxed", scope="gpu")  # 16 bytes an instruction: REDG.ADD.F32x4
    tma.named_barrier("bar.arrive", ADDED + (step & 1), 32 + 2 * HEAD_DIM)


@gluon.jit
def turn_keeper(turns_ptr, turns, draws, call, num_q_padded, WHICH: gl.constexpr):
    """Waits for the turn of every second step's query tile, signals the warpgroups that add to it, and passes the turn
    on when they have.

    An add is complete, and the turn passed on, only a few thousand cycles after its step: hence two of these warps.
    """
    announced, turn_ready = turns
    group_size = call.num_heads // call.num_kv_heads
    before, done, end_item = 0, 0, end_of_items(call)
    item = next_item(done, draws, 1)
    while item < end_item:
        sizes = sizes_of(item, call)
        _q_row0, _k_row0, padded_row0 = first_rows(sizes)
        tile, batch, kv_head, from_last = owned(item, sizes)
        first, end = query_tiles(tile, batch, kv_head, sizes)
        steps = end - first
        visit, _pattern = visit_at(first + ((before + WHICH) & 1), first, end, sizes)
        for step in range((before + WHICH) & 1, group_size * steps, KEEPERS):
            member = step // steps
            query_tile = query_tile_at(walked(step - member * steps, first, end, from_last), visit, sizes)
            turn = adds_before(query_tile, visit, tile, from_last, sizes)
            following = step + KEEPERS
            visit, _pattern = visit_at(first + following % steps, first, end, sizes)
            place = (batch * sizes.num_heads + kv_head * group_size + member) * (num_q_padded // BLOCK_Q) + query_tile
            place += padded_row0 // BLOCK_Q
            if turn > 0:
                tma.wait_turn(turns_ptr + place, turn)
            one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
            announced.index(WHICH).store(gl.full([1], place * 2 + gl.minimum(turn, 1), gl.int32, one))
            mbarrier.arrive(turn_ready.index(WHICH), count=1)
            tma.named_barrier("bar.sync", ADDED + WHICH, 32 + 2 * call.HEAD_DIM, 1)
            tma.pass_turn(turns_ptr + place)
        before += group_size * steps
        done += 1
        item = next_item(done, draws, 1)


@gluon.jit
def query_gradient(dq_ptr, turns, tiles, barriers, draws, call):
    """dQ = dS K of every step, for head_dim 64."""
    k_smem, ds_smem = tiles
    k_full, k_empty, ds_full, ds_empty = barriers
    step, done, end_item = 0, 0, end_of_items(call)
    item = next_item(done, draws, 4)
    while item < end_item:
        sizes = sizes_of(item, call)
        tile, batch, kv_head, _from_last = owned(item, sizes)
        first, end = query_tiles(tile, batch, kv_head, sizes)
        k_stage, k_phase = slot(done, call.K_STAGES)
        mbarrier.wait(k_full.index(k_stage), k_phase)
        for _ in range(sizes.num_heads // sizes.num_kv_heads * (end - first)):
            place, use = slot(step, 2)
            mbarrier.wait(ds_full.index(place), use)
            dq = product(ds_smem.index(place).permute((1, 0)), k_smem.index(k_stage))
            dq = warpgroup_mma_wait(0, deps=(dq,))
            mbarrier.arrive(ds_empty.index(place), count=1)
            add_in_turn(dq, dq_ptr, wait_for_turn(turns, step), step, 0, call.HEAD_DIM)
            step += 1
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        done += 1
        item = next_item(done, draws, 4)
