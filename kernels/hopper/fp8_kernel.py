"""FP8 forward pass for Hopper (sm_90a), in Gluon: e4m3 operands, fp32 softmax. Inference only.

Roles are forward.py's, barriers pipeline.py's. So is the order of work but for O, which is brought up to date a tile
later, while the tensor cores are at the next S. Where 64 * CONSUMERS does not divide Nq the last tile is the smaller.

    tensor cores   S(1) P(0)V(0)            S(2) P(1)V(1)                 S(3) P(2)V(2)
    other units                max, P(1)    O = P(0)V(0)   max, P(2)      O = r O + P(1)V(1)   max, P(3) ...

What 8 bits change:

V. An 8-bit wgmma reads both shared operands along the summed dimension only, and for P V that is the keys. A kernel of
its own (fp8_values.py) therefore writes V^T (B, Hkv, D, Nk) first: 2 bytes moved per element of V.

P. Of 16 scores of a row a thread (the t-th of four) holds, in the accumulator, keys 2t, 2t + 1, 2t + 8 and 2t + 9, and
as the left operand of 8 bits columns 4t to 4t + 3. So column 16b + 4t + 2h + i of P is key 16b + 8h + 2t + i: no
register moves, only V^T's keys must stand in that order, which costs its kernel nothing.

Range. e4m3 reaches from 2^-9 to 448. P = 2^8 exp(S - max) uses that range; the exponent takes the factor at no cost,
and it stands in the row sum too, so O needs no correction (LSE does).

Sums. The 8-bit tensor core cuts what it adds at about 14 bits of the largest: of values that are all positive it loses
a quarter over 16,384 keys (NOTES.md). So each tile's P V starts at zero, and joins O in fp32 by the
multiplication that rescales O anyway.
"""

from functools import partial

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..call import Options, key_of
from ..launch import Launch, heads_per_section, plan_of, run
from ..portable.tiles import LN_2, LOG2_E, Mask
from . import tma
from .forward import L2_SHARE, ForwardPlan, grid_of
from .fp8_values import launch_values
from .pipeline import Build, Tiles, hand_back, load_rows, pass_baton, ready_barriers, store_rows, take_baton
from .schedule import Sizes, key_tiles, num_turns, turn_tile
from .softmax import hide, thread_sums
from .tma import slot

LOG2_P_SCALE = gl.constexpr(8.0)  # 256, below e4m3's 448, and a power of two: the largest P is exact

O_DTYPE = torch.bfloat16


@gluon.jit
def _producer(q_desc, k_desc, v_desc, tiles, barriers, sizes, build):
    mask = Mask(sizes.num_q, sizes.num_k, None, build.CAUSAL, build.LOCAL)
    num_tiles = (sizes.num_q + 64 * build.CONSUMERS - 1) // (64 * build.CONSUMERS)
    step = 0
    for turn in range(num_turns(num_tiles, sizes, None, build)):
        tile, batch_head = turn_tile(turn, num_tiles, sizes, None, build)
        batch = batch_head // sizes.num_heads
        head = batch_head - batch * sizes.num_heads
        kv_head = head // sizes.group_size
        row = tile * 64 * build.CONSUMERS
        _, visited, _, _ = key_tiles(row, row + 64 * build.CONSUMERS, mask, build.BLOCK_K)
        for c in gl.static_range(build.CONSUMERS):
            mbarrier.wait(barriers.q_empty.index(c), (turn & 1) ^ 1)
            mbarrier.expect(barriers.q_full.index(c), 64 * build.HEAD_DIM)
            load_rows(q_desc, batch, head, row + 64 * c, 0, sizes.num_q, barriers.q_full.index(c), tiles.q.index(c))
        for i in range(visited):
            key = (visited - 1 - i) * build.BLOCK_K
            stage, phase = slot(step, build.STAGES)
            mbarrier.wait(barriers.k_empty.index(stage), phase ^ 1)
            full = barriers.k_full.index(stage)
            mbarrier.expect(full, build.BLOCK_K * build.HEAD_DIM)
            load_rows(k_desc, batch, kv_head, key, 0, sizes.num_k, full, tiles.k.index(stage))
            mbarrier.wait(barriers.v_empty.index(stage), phase ^ 1)
            full = barriers.v_full.index(stage)
            mbarrier.expect(full, build.BLOCK_K * build.HEAD_DIM)
            v_tile = tiles.v.index(stage)._reinterpret(v_desc.dtype, v_desc.block_type.shape, v_desc.layout)
            tma.load(v_desc, [batch, kv_head, 0, key], full, v_tile)
            step += 1


@gluon.jit
def _pack(probs, BLOCK_K: gl.constexpr):
    """Round (64, BLOCK_K) fp32 to e4m3, four columns of the left operand in one int32: (64, BLOCK_K / 16, 4)."""
    halves = gl.permute(gl.reshape(probs, [64, BLOCK_K // 16, 2, 4, 2]), (0, 1, 3, 4, 2))
    low, high = gl.split(halves)
    a, b = gl.split(low)
    c, d = gl.split(high)
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _unpack(packed, dtype: gl.constexpr, BLOCK_K: gl.constexpr, p_layout: gl.constexpr):
    """The (64, BLOCK_K) left operand of P V from `_pack`'s integers: no instruction, only names."""
    a = (packed & 0xFF).to(gl.int8)
    b = ((packed >> 8) & 0xFF).to(gl.int8)
    c = ((packed >> 16) & 0xFF).to(gl.int8)
    d = ((packed >> 24) & 0xFF).to(gl.int8)
    columns = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [64, BLOCK_K])
    return gl.convert_layout(columns.to(dtype, bitcast=True), p_layout, assert_trivial=True)


@gluon.jit
def _scores(q_tile, k_tile, BLOCK_K: gl.constexpr):
    """Q K^T: started, to be waited for."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 32])
    zeros = gl.zeros([64, BLOCK_K], gl.float32, layout)
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _p_v(probs, v_tile, build):
    """P V from zero: started, to be waited for."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, build.HEAD_DIM, 32])
    left = _unpack(probs, v_tile.dtype, build.BLOCK_K, gl.DotOperandLayout(0, layout, 4))
    zeros = gl.zeros([64, build.HEAD_DIM], gl.float32, layout)
    return warpgroup_mma(left, v_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _softmax_step(
    tiles, barriers, mask, build, CONSUMER: gl.constexpr, scale_log2, row, key, more,
    step, acc, product, rescale, next_rescale, probs, running_max, running_sum,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of key tile `step` while the tensor cores multiply the previous tile's P V.

    `product` is the P V of the tile before that one, `rescale` brings acc to its scale, `next_rescale` both to the
    previous tile's.
    """
    stage, _ = slot(step, build.STAGES)
    last_stage, last_phase = slot(step - 1, build.STAGES)
    take_baton(build, CONSUMER)
    scores = _scores(tiles.q.index(CONSUMER), tiles.k.index(stage), build.BLOCK_K)
    acc = acc * rescale[:, None] + product  # while the tensor cores are at S
    mbarrier.wait(barriers.v_full.index(last_stage), last_phase)
    product = _p_v(probs, tiles.v.index(last_stage), build)
    pass_baton(build, CONSUMER)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(barriers.k_empty.index(stage), count=1)
    if MASKED:
        scores = hide(scores, row, key, mask, build.BLOCK_K)
    new_max = gl.maximum(running_max, gl.max(scores, 1))
    if MASKED:
        # a row that has seen no key keeps -inf, and -inf - -inf would be NaN: subtract 0 there
        base = gl.where(new_max == -float("inf"), 0.0, new_max)
    else:
        base = new_max
    base_log2 = base * scale_log2
    new_rescale = gl.exp2(running_max * scale_log2 - base_log2)
    p = gl.exp2(scores * scale_log2 - (base_log2 - LOG2_P_SCALE)[:, None])
    sum_layout: gl.constexpr = gl.SliceLayout(1, running_sum.type.layout)
    running_sum = running_sum * gl.convert_layout(new_rescale, sum_layout)[:, None] + thread_sums(p, build.BLOCK_K)
    # this wait ends a basic block, which keeps the wait for P V behind the exponentials (softmax.py)
    next_stage, next_phase = slot(step + 1, build.STAGES)
    mbarrier.wait(barriers.k_full.index(next_stage), next_phase, pred=more)
    product = warpgroup_mma_wait(0, deps=(product,))
    mbarrier.arrive(barriers.v_empty.index(last_stage), count=1)
    new_probs = _pack(p, build.BLOCK_K)
    new_rescale = gl.convert_layout(new_rescale, gl.SliceLayout(1, acc.type.layout))
    return acc, product, next_rescale, new_rescale, new_probs, new_max, running_sum


@gluon.jit
def _consumer(
    o_desc, lse_ptr, scales, tiles, barriers, sizes, scale_log2, build, CONSUMER: gl.constexpr
):  # fmt: skip
    q_scale_ptr, k_scale_ptr, v_scale_ptr = scales
    mask = Mask(sizes.num_q, sizes.num_k, None, build.CAUSAL, build.LOCAL)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, build.BLOCK_K, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, build.HEAD_DIM, 32])
    o_tile = tiles.o.index(CONSUMER)
    num_tiles = (sizes.num_q + 64 * build.CONSUMERS - 1) // (64 * build.CONSUMERS)
    if build.PING_PONG and CONSUMER == build.CONSUMERS - 1:
        pass_baton(build, CONSUMER)  # the first consumer begins
    step = 0
    for turn in range(num_turns(num_tiles, sizes, None, build)):
        tile, batch_head = turn_tile(turn, num_tiles, sizes, None, build)
        batch = batch_head // sizes.num_heads
        head = batch_head - batch * sizes.num_heads
        kv_batch_head = batch * (sizes.num_heads // sizes.group_size) + head // sizes.group_size
        scores_log2 = scale_log2 * gl.load(q_scale_ptr + batch_head) * gl.load(k_scale_ptr + kv_batch_head)
        first_row = tile * 64 * build.CONSUMERS
        row = first_row + 64 * CONSUMER
        _, loaded, _, _ = key_tiles(first_row, first_row + 64 * build.CONSUMERS, mask, build.BLOCK_K)
        _, visited, _, unmasked = key_tiles(row, row + 64, mask, build.BLOCK_K)
        mbarrier.wait(barriers.q_full.index(CONSUMER), turn & 1)

        step = hand_back(step, loaded - visited, barriers, build, CONSUMER)

        # the rightmost tile: masked, nothing to rescale
        stage, phase = slot(step, build.STAGES)
        mbarrier.wait(barriers.k_full.index(stage), phase)
        take_baton(build, CONSUMER)
        scores = _scores(tiles.q.index(CONSUMER), tiles.k.index(stage), build.BLOCK_K)
        pass_baton(build, CONSUMER)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(barriers.k_empty.index(stage), count=1)
        scores = hide(scores, row, (visited - 1) * build.BLOCK_K, mask, build.BLOCK_K)
        running_max = gl.max(scores, 1)
        base = gl.where(running_max == -float("inf"), 0.0, running_max)
        p = gl.exp2(scores * scores_log2 - (base * scores_log2 - LOG2_P_SCALE)[:, None])
        running_sum = thread_sums(p, build.BLOCK_K)
        probs = _pack(p, build.BLOCK_K)
        acc = gl.zeros([64, build.HEAD_DIM], gl.float32, o_layout)
        product = acc
        rescale = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, o_layout))
        next_rescale = rescale
        first = step + 1
        end = step + visited
        stage, phase = slot(first, build.STAGES)
        mbarrier.wait(barriers.k_full.index(stage), phase, pred=first < end)
        full_from = end - gl.minimum(unmasked, visited - 1)
        if build.CAUSAL:
            for step in range(first, full_from):
                key = (end - 1 - step) * build.BLOCK_K
                acc, product, rescale, next_rescale, probs, running_max, running_sum = _softmax_step(
                    tiles, barriers, mask, build, CONSUMER, scores_log2, row, key, step + 1 < end,
                    step, acc, product, rescale, next_rescale, probs, running_max, running_sum, True,
                )  # fmt: skip
        for step in range(full_from, end):
            acc, product, rescale, next_rescale, probs, running_max, running_sum = _softmax_step(
                tiles, barriers, mask, build, CONSUMER, scores_log2, row, 0, step + 1 < end,
                step, acc, product, rescale, next_rescale, probs, running_max, running_sum, False,
            )  # fmt: skip
        step = end
        mbarrier.arrive(barriers.q_empty.index(CONSUMER), count=1)

        v_scale = gl.load(v_scale_ptr + kv_batch_head)
        last_stage, last_phase = slot(step - 1, build.STAGES)
        mbarrier.wait(barriers.v_full.index(last_stage), last_phase)
        acc = (acc * rescale[:, None] + product) * next_rescale[:, None]
        product = _p_v(probs, tiles.v.index(last_stage), build)
        # a row without a visible key has sum 0 and max -inf: O = 0 / 1 and LSE = -inf + log2(1) = -inf
        row_sum = gl.convert_layout(gl.sum(running_sum, 1), gl.SliceLayout(1, s_layout))
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        lse = (running_max * scores_log2 + gl.log2(row_sum) - LOG2_P_SCALE) * LN_2
        inverse = gl.convert_layout(v_scale / row_sum, gl.SliceLayout(1, o_layout))
        rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
        gl.store(lse_ptr + batch_head.to(gl.int64) * sizes.num_q + rows, lse, mask=rows < sizes.num_q)
        tma.store_wait(0)  # the previous tile's O has left its buffer
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(barriers.v_empty.index(last_stage), count=1)
        o_tile.store(((acc + product) * inverse[:, None]).to(o_desc.dtype))
        fence_async_shared()
        store_rows(o_desc, batch, head, row, 0, sizes.num_q, o_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_heads", "group_size", "num_batch_heads", "num_q", "num_k", "heads_in_section"])
def hopper_fp8_kernel(
    q_desc,  # (B, Hq, Nq, D) e4m3, tiles of 64 rows
    k_desc,  # (B, Hkv, Nk, D) e4m3, tiles of BLOCK_K rows
    v_desc,  # (B, Hkv, D, Nk) e4m3 as `hopper_fp8_values_kernel` writes it, tiles of BLOCK_K columns
    o_desc,  # (B, Hq, Nq, D) bf16, tiles of 64 rows
    lse_ptr,  # (B, Hq, Nq) fp32, contiguous, natural logarithm
    q_scale_ptr,  # (B, Hq) fp32, contiguous, positive
    k_scale_ptr,  # (B, Hkv)
    v_scale_ptr,  # (B, Hkv)
    num_heads,  # Hq
    group_size,  # Hq // Hkv
    num_batch_heads,  # B * Hq
    num_q,
    num_k,
    heads_in_section,
    scale_log2,  # scale * log2(e), positive
    HEAD_DIM: gl.constexpr,
    BLOCK_K: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    PING_PONG: gl.constexpr,
    PAIRED: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    o_dtype: gl.constexpr = o_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, HEAD_DIM], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEAD_DIM, BLOCK_K], dtype)
    o_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], o_dtype)
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, HEAD_DIM], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, HEAD_DIM], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, HEAD_DIM, BLOCK_K], v_layout)
    o_smem = gl.allocate_shared_memory(o_dtype, [CONSUMERS, 64, HEAD_DIM], o_layout)
    tiles = Tiles(q_smem, k_smem, v_smem, o_smem)
    barriers = ready_barriers(CONSUMERS, STAGES)

    sizes = Sizes(num_heads, group_size, num_batch_heads, num_q, num_k, heads_in_section)
    build = Build(HEAD_DIM, BLOCK_K, CONSUMERS, STAGES, CAUSAL, False, PING_PONG, PAIRED)
    scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (o_desc, lse_ptr, scales, tiles, barriers, sizes, scale_log2, build, 0)),
                (_consumer, (o_desc, lse_ptr, scales, tiles, barriers, sizes, scale_log2, build, 1)),
                (_producer, (q_desc, k_desc, v_desc, tiles, barriers, sizes, build)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (o_desc, lse_ptr, scales, tiles, barriers, sizes, scale_log2, build, 0)),
                (_consumer, (o_desc, lse_ptr, scales, tiles, barriers, sizes, scale_log2, build, 1)),
                (_consumer, (o_desc, lse_ptr, scales, tiles, barriers, sizes, scale_log2, build, 2)),
                (_producer, (q_desc, k_desc, v_desc, tiles, barriers, sizes, build)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip


def plan_for(head_dim: int, causal: bool) -> ForwardPlan:
    """The fastest of 12 (head_dim 128) and 6 (64) plans at 8,192 tokens: one H200, torch 2.11.0, triton 3.6.0,
    2026-11-21, 16,384 tokens a call, hidden size 2,048 (NOTES.md)."""
    if head_dim == 64:
        return ForwardPlan(consumers=2, stages=3)
    if causal:
        return ForwardPlan(consumers=2, stages=3, ping_pong=True, persistent=False)
    return ForwardPlan(consumers=2, stages=4)


def launch_hopper_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    options: Options,
    plan: ForwardPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """Run both kernels. q (B, Hq, Nq, D), k and v (B, Hkv, Nk, D) e4m3, not refused by
    `why_not_fp8`; scales float32, contiguous, (B, Hq) and twice (B, Hkv); options.scale > 0.

    Returns O (B, Hq, Nq, D) bfloat16, stored as (B, Nq, Hq, D), and LSE (B, Hq, Nq) float32, natural logarithm. `plan`
    overrides the choice.
    """
    batch, num_heads, num_q, head_dim = q.shape
    num_kv_heads, num_k = k.shape[1], k.shape[2]
    num_columns = -(-num_k // 16) * 16  # TMA wants rows of whole 16 bytes
    values = torch.empty((batch, num_kv_heads, head_dim, num_columns), dtype=v.dtype, device=v.device)
    o = torch.empty((batch, num_q, num_heads, head_dim), dtype=O_DTYPE, device=q.device).transpose(1, 2)
    lse = torch.empty((batch, num_heads, num_q), dtype=torch.float32, device=q.device)
    launch_values(v, values)
    tensors = {
        "q": q, "k": k, "values": values, "o": o, "lse": lse,
        "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    run(plan_of(key_of(("fp8", plan), options, q, k, v)), tensors, partial(_launches, options, plan))
    return o, lse


def _launches(options: Options, plan: ForwardPlan | None, q, k, values, o, lse, q_scale, k_scale, v_scale):
    batch, num_heads, num_q, head_dim = q.shape
    plan = plan or plan_for(head_dim, options.causal)
    tiles = -(-num_q // (64 * plan.consumers)) * batch * num_heads
    programs, paired = grid_of(plan, tiles, options, q.device.index)
    arguments = (
        tma.descriptor(q, 64), tma.descriptor(k, plan.block_k), tma.descriptor(values, head_dim, plan.block_k),
        tma.descriptor(o, 64), lse, q_scale, k_scale, v_scale,
        num_heads, num_heads // k.shape[1], batch * num_heads, num_q, k.shape[2], heads_per_section(q, k, L2_SHARE),
        options.scale * LOG2_E.value,
    )  # fmt: skip
    constants = {
        "HEAD_DIM": head_dim, "BLOCK_K": plan.block_k, "CONSUMERS": plan.consumers, "STAGES": plan.stages,
        "CAUSAL": options.causal, "PING_PONG": plan.ping_pong, "PAIRED": paired,
    }  # fmt: skip
    return [Launch(hopper_fp8_kernel, programs, arguments, constants, {"num_warps": 4})]
