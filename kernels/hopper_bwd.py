"""Backward pass for Hopper (sm_90a), in Gluon: one fused kernel between a pre- and a post-kernel.

Roles. A program owns 128 keys of one KV head. Eight consumer warps hold dK and dV in registers; one producer
warp streams the query tiles (Q with LSE, dO with delta) of all query heads of the group past them; two writer
warps take turns to add a step's share of dQ to global memory.

One step, scores transposed so that P^T and dS^T are left operands from registers (wait n: all but n are done):

    tensor cores   S^T = K Q^T | dP^T = V dO^T | dV += P^T dO | dQ = dS K      | dK += dS^T Q
    other units                  exp2: P^T       dS^T -> shared                  dQ -> shared; the writer adds it
    waits                      1               1              0               1               0

Barriers (mbarriers; stage s of a ring of STAGES):
    k_full, v_full   this program's keys and values have arrived
    q_full[s]        Q and LSE have arrived      q_empty[s]    S^T and dK with them are done
    do_full[s]       dO and delta have arrived   do_empty[s]   dP^T and dV with them are done
    dq_full[w]       a step's dQ is there for writer w   dq_empty[w]   it has been read

dQ is summed in fp32 in global memory by bulk adds. Each query tile has a counter, its turn: the program of key tile t
adds when t programs have added, so the order of the sum, and its bits, are the same in every run. Programs start in
the order of their key tiles and walk the queries backwards, so whoever waits waits for a program that is running.
An add is done, and the turn passed on, only a few thousand cycles after its step: hence two writers. dK and dV have
one owner.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels import hopper_tma as tma
from kernels.hopper import addressable
from kernels.hopper_fwd import LOG2_E, heads_per_section
from kernels.launch import addresses_of, launch, on_device
from kernels.options import Options
from kernels.replay import description, known, remember, replay

LOG2_E_CONSTANT = tl.constexpr(LOG2_E)
ROWS = 64  # of a program of the two memory-bound kernels, and of a turn: divides every BLOCK_Q
TURN_ROWS = gl.constexpr(ROWS)
WRITERS = gl.constexpr(2)
BLOCK_Q, BLOCK_K = 64, 128  # queries of a step, keys of a program


@triton.jit(do_not_specialize=["num_heads", "num_q", "num_q_padded"])
def _before_kernel(
    o_ptr,  # (B, Hq, Nq, D)
    do_ptr,  # (B, Hq, Nq, D)
    lse_ptr,  # (B, Hq, Nq) fp32, natural logarithm
    dlse_ptr,  # (B, Hq, Nq) fp32, or None
    lse_log2_ptr,  # out, (B, Hq, num_q_padded) fp32
    delta_ptr,  # out, (B, Hq, num_q_padded) fp32
    turns_ptr,  # out, (B, Hq, num_q_padded / ROWS) int32: zeros
    dq_sum_ptr,  # out, (B, Hq, num_q_padded, D) fp32: zeros
    o_strides,  # (batch, head, token)
    do_strides,
    num_heads,
    num_q,
    num_q_padded,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """delta = rowsum(dO * O) - dLSE, LSE in base 2, and zeros where dQ will be summed.

    Rows without a visible key (LSE -inf) and rows past Nq get LSE +inf, so that exp2(s - inf) = 0 makes their P
    and their gradients 0 with no mask in the main loop.
    """
    tiles = num_q_padded // ROWS
    batch_head = tl.program_id(0) // tiles
    rows = (tl.program_id(0) - batch_head * tiles) * ROWS + tl.arange(0, ROWS)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    cols = tl.arange(0, HEAD_DIM)
    inside = rows < num_q
    o_at = o_ptr + batch * o_strides[0] + head * o_strides[1] + rows.to(tl.int64)[:, None] * o_strides[2] + cols
    do_at = do_ptr + batch * do_strides[0] + head * do_strides[1] + rows.to(tl.int64)[:, None] * do_strides[2] + cols
    o = tl.load(o_at, mask=inside[:, None], other=0.0).to(tl.float32)
    do = tl.load(do_at, mask=inside[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    lse = tl.load(lse_ptr + batch_head.to(tl.int64) * num_q + rows, mask=inside, other=-float("inf"))
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + batch_head.to(tl.int64) * num_q + rows, mask=inside, other=0.0)
    padded = batch_head.to(tl.int64) * num_q_padded + rows
    tl.store(lse_log2_ptr + padded, tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E_CONSTANT))
    tl.store(delta_ptr + padded, delta)
    tl.store(turns_ptr + tl.program_id(0), 0)
    tl.store(dq_sum_ptr + padded[:, None] * HEAD_DIM + cols, tl.zeros([ROWS, HEAD_DIM], tl.float32))


@triton.jit(do_not_specialize=["num_heads", "num_q", "num_q_padded"])
def _after_kernel(
    dq_sum_ptr,  # (B, Hq, num_q_padded, D) fp32
    dq_ptr,  # out, (B, Hq, Nq, D)
    dq_strides,  # (batch, head, token)
    num_heads,
    num_q,
    num_q_padded,
    scale,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dQ = scale * its fp32 sum, rounded once."""
    tiles = num_q_padded // ROWS
    batch_head = tl.program_id(0) // tiles
    rows = (tl.program_id(0) - batch_head * tiles) * ROWS + tl.arange(0, ROWS)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    cols = tl.arange(0, HEAD_DIM)
    padded = batch_head.to(tl.int64) * num_q_padded + rows
    dq = tl.load(dq_sum_ptr + padded[:, None] * HEAD_DIM + cols) * scale
    dq_at = dq_ptr + batch * dq_strides[0] + head * dq_strides[1] + rows.to(tl.int64)[:, None] * dq_strides[2] + cols
    tl.store(dq_at, dq.to(dq_ptr.dtype.element_ty), mask=(rows < num_q)[:, None])


@gluon.jit
def _owned(sizes, BLOCK_K: gl.constexpr):
    """(key tile, batch, KV head) of this program, and of `sizes` what its roles need: query heads in all and of the
    group, queries, keys. Sections of heads that share L2, in each the longest tiles first."""
    num_heads, num_kv_heads, num_batch_kv_heads, num_q, num_k, heads_per_section = sizes
    num_tiles = (num_k + BLOCK_K - 1) // BLOCK_K
    program = gl.program_id(0)
    section = program // (num_tiles * heads_per_section)
    first_head = section * heads_per_section
    rest = program - first_head * num_tiles
    heads_here = gl.minimum(heads_per_section, num_batch_kv_heads - first_head)
    tile = rest // heads_here
    batch_kv_head = first_head + rest - tile * heads_here
    batch = batch_kv_head // num_kv_heads
    return tile, batch, batch_kv_head - batch * num_kv_heads, num_heads, num_heads // num_kv_heads, num_q, num_k


@gluon.jit
def _query_steps(key, num_q, num_k, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """Query tiles that a key tile visits, as (first, first that needs no mask, end)."""
    end = (num_q + BLOCK_Q - 1) // BLOCK_Q
    if CAUSAL:
        first = gl.minimum(gl.maximum(key - (num_k - num_q), 0) // BLOCK_Q, end)
        full = (gl.maximum(key + BLOCK_K - 1 - (num_k - num_q), 0) + BLOCK_Q - 1) // BLOCK_Q
        return first, gl.minimum(gl.maximum(full, first), end), end
    else:
        return 0, gl.where(key + BLOCK_K > num_k, end, 0), end


@gluon.jit
def _slot(step, STAGES: gl.constexpr):
    """Stage of a ring and phase of its barriers at the step-th use."""
    if STAGES == 2:
        return step & 1, (step >> 1) & 1
    else:
        return step % STAGES, (step // STAGES) & 1


@gluon.jit
def _producer(
    descriptors, tiles, barriers, sizes,
    HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = descriptors
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem = tiles
    k_full, v_full, q_full, q_empty, do_full, do_empty = barriers
    tile, batch, kv_head, num_heads, group_size, num_q, num_k = _owned(sizes, BLOCK_K)
    k_tile4: gl.constexpr = [1, 1, BLOCK_K, HEAD_DIM]
    q_tile4: gl.constexpr = [1, 1, BLOCK_Q, HEAD_DIM]
    q_bytes: gl.constexpr = BLOCK_Q * HEAD_DIM * 2 + BLOCK_Q * 4
    key = tile * BLOCK_K
    mbarrier.expect(k_full, BLOCK_K * HEAD_DIM * 2)
    tma.load(k_desc, [batch, kv_head, key, 0], k_full, k_smem._reinterpret(k_desc.dtype, k_tile4, k_desc.layout))
    first, _, end = _query_steps(key, num_q, num_k, CAUSAL, BLOCK_Q, BLOCK_K)
    step = 0
    for member in range(group_size):
        head = kv_head * group_size + member
        batch_head = batch * num_heads + head
        for j in range(first, end):
            row = (first + end - 1 - j) * BLOCK_Q
            stage, phase = _slot(step, STAGES)
            mbarrier.wait(q_empty.index(stage), phase ^ 1)
            mbarrier.expect(q_full.index(stage), q_bytes)
            tma.load(
                q_desc, [batch, head, row, 0], q_full.index(stage),
                q_smem.index(stage)._reinterpret(q_desc.dtype, q_tile4, q_desc.layout),
            )  # fmt: skip
            tma.load(
                lse_desc, [batch_head, row], q_full.index(stage),
                lse_smem.index(stage)._reinterpret(gl.float32, [1, BLOCK_Q], lse_desc.layout),
            )  # fmt: skip
            if step == 0:
                mbarrier.expect(v_full, BLOCK_K * HEAD_DIM * 2)
                tma.load(
                    v_desc, [batch, kv_head, key, 0], v_full,
                    v_smem._reinterpret(v_desc.dtype, k_tile4, v_desc.layout),
                )  # fmt: skip
            mbarrier.wait(do_empty.index(stage), phase ^ 1)
            mbarrier.expect(do_full.index(stage), q_bytes)
            tma.load(
                do_desc, [batch, head, row, 0], do_full.index(stage),
                do_smem.index(stage)._reinterpret(do_desc.dtype, q_tile4, do_desc.layout),
            )  # fmt: skip
            tma.load(
                delta_desc, [batch_head, row], do_full.index(stage),
                delta_smem.index(stage)._reinterpret(gl.float32, [1, BLOCK_Q], delta_desc.layout),
            )  # fmt: skip
            step += 1


@gluon.jit
def _gradient_step(
    tiles, barriers, step, row, key, num_q, num_k, scale_log2, dk, dv,
    MASKED: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One query tile: its share of dK and dV, and this key tile's share of its dQ."""
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem = tiles
    q_full, q_empty, do_full, do_empty, dq_full, dq_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_Q, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HEAD_DIM, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HEAD_DIM // 2, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dk_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = k_smem.dtype
    stage, phase = _slot(step, STAGES)

    mbarrier.wait(q_full.index(stage), phase)
    scores = warpgroup_mma(
        k_smem, q_smem.index(stage).permute((1, 0)), gl.zeros([BLOCK_K, BLOCK_Q], gl.float32, s_layout),
        use_acc=False, is_async=True,
    )  # fmt: skip
    lse = lse_smem.index(stage).load(columns)
    mbarrier.wait(do_full.index(stage), phase)
    dp = warpgroup_mma(
        v_smem, do_smem.index(stage).permute((1, 0)), gl.zeros([BLOCK_K, BLOCK_Q], gl.float32, s_layout),
        use_acc=False, is_async=True,
    )  # fmt: skip
    scores = warpgroup_mma_wait(1, deps=(scores,))
    p = gl.exp2(scores * scale_log2 - lse[None, :])
    if MASKED:
        keys = key + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, s_layout))[:, None]
        if CAUSAL:
            last_seen = row + (num_k - num_q) + gl.arange(0, BLOCK_Q, layout=columns)[None, :]
            p = gl.where(keys <= last_seen, p, 0.0)
        else:
            p = gl.where(keys < num_k, p, 0.0)
    dv = warpgroup_mma(gl.convert_layout(p.to(dtype), operand), do_smem.index(stage), dv, is_async=True)
    delta = delta_smem.index(stage).load(columns)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = (p * (dp - delta[None, :])).to(dtype)
    ds_smem.store(ds)
    fence_async_shared()
    dv = warpgroup_mma_wait(0, deps=(dv,))
    mbarrier.arrive(do_empty.index(stage), count=1)
    dq = warpgroup_mma(
        ds_smem.permute((1, 0)), k_smem, gl.zeros([BLOCK_Q, HEAD_DIM], gl.float32, dq_layout),
        use_acc=False, is_async=True,
    )  # fmt: skip
    dk = warpgroup_mma(gl.convert_layout(ds, operand), q_smem.index(stage), dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    writer, use = _slot(step, WRITERS)
    mbarrier.wait(dq_empty.index(writer), use ^ 1)
    dq_smem.index(writer).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_full.index(writer), count=1)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(q_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _consumer(
    descriptors, tiles, barriers, sizes, scale, scale_log2,
    HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    dk_desc, dv_desc = descriptors
    k_smem, v_smem = tiles[0], tiles[1]
    k_full, v_full, q_full, q_empty, do_full, do_empty, dq_full, dq_empty = barriers
    tile, batch, kv_head, _num_heads, group_size, num_q, num_k = _owned(sizes, BLOCK_K)
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HEAD_DIM, 16])
    key = tile * BLOCK_K
    first, full_from, end = _query_steps(key, num_q, num_k, CAUSAL, BLOCK_Q, BLOCK_K)
    ring = (q_full, q_empty, do_full, do_empty, dq_full, dq_empty)
    dk = gl.zeros([BLOCK_K, HEAD_DIM], gl.float32, dk_layout)
    dv = gl.zeros([BLOCK_K, HEAD_DIM], gl.float32, dk_layout)
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0, pred=first < end)
    for member in range(group_size):
        before = member * (end - first)
        for j in range(end - full_from):
            dk, dv = _gradient_step(
                tiles, ring, before + j, (end - 1 - j) * BLOCK_Q, key, num_q, num_k, scale_log2, dk, dv,
                False, HEAD_DIM, BLOCK_Q, BLOCK_K, STAGES, CAUSAL,
            )  # fmt: skip
        for j in range(end - full_from, end - first):
            dk, dv = _gradient_step(
                tiles, ring, before + j, (end - 1 - j) * BLOCK_Q, key, num_q, num_k, scale_log2, dk, dv,
                True, HEAD_DIM, BLOCK_Q, BLOCK_K, STAGES, CAUSAL,
            )  # fmt: skip
    # K's and V's tiles are dead now and carry dK and dV out
    k_smem.store((dk * scale).to(k_smem.dtype))
    v_smem.store(dv.to(v_smem.dtype))
    fence_async_shared()
    k_tile4: gl.constexpr = [1, 1, BLOCK_K, HEAD_DIM]
    tma.store(dk_desc, [batch, kv_head, key, 0], k_smem._reinterpret(k_smem.dtype, k_tile4, dk_desc.layout))
    tma.store(dv_desc, [batch, kv_head, key, 0], v_smem._reinterpret(v_smem.dtype, k_tile4, dv_desc.layout))
    tma.store_wait(0)


@gluon.jit
def _writer(
    tensors, barriers, sizes, num_q_padded,
    WHICH: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    dq_desc, turns_ptr, dq_smem = tensors
    dq_full, dq_empty = barriers
    tile, batch, kv_head, num_heads, group_size, num_q, num_k = _owned(sizes, BLOCK_K)
    first, _, end = _query_steps(tile * BLOCK_K, num_q, num_k, CAUSAL, BLOCK_Q, BLOCK_K)
    steps = end - first
    for step in range(WHICH, group_size * steps, WRITERS):
        member = step // steps
        row = (batch * num_heads + kv_head * group_size + member) * num_q_padded
        here = row + (end - 1 - (step - member * steps)) * BLOCK_Q
        turn = turns_ptr + here // TURN_ROWS
        tma.wait_turn(turn, tile)
        mbarrier.wait(dq_full.index(WHICH), (step // WRITERS) & 1)
        tma.reduce_add(dq_desc, [here, 0], dq_smem.index(WHICH))
        tma.store_wait(0)
        mbarrier.arrive(dq_empty.index(WHICH), count=1)
        tma.pass_turn(turn)


@gluon.jit(
    do_not_specialize=[
        "num_heads", "num_kv_heads", "num_batch_kv_heads", "num_q", "num_q_padded", "num_k", "heads_per_section",
    ]
)  # fmt: skip
def hopper_bwd_kernel(
    q_desc,  # (B, Hq, Nq, D) bf16 | fp16, tiles of BLOCK_Q rows
    k_desc,  # (B, Hkv, Nk, D), tiles of BLOCK_K rows
    v_desc,  # (B, Hkv, Nk, D), tiles of BLOCK_K rows
    do_desc,  # (B, Hq, Nq, D), tiles of BLOCK_Q rows
    lse_desc,  # (B * Hq, num_q_padded) fp32, base 2, +inf where a row sees nothing
    delta_desc,  # (B * Hq, num_q_padded) fp32
    dq_desc,  # (B * Hq * num_q_padded, D) fp32, zeros: dQ / scale is added up here
    dk_desc,  # (B, Hkv, Nk, D), tiles of BLOCK_K rows
    dv_desc,  # (B, Hkv, Nk, D), tiles of BLOCK_K rows
    turns_ptr,  # (B * Hq * num_q_padded / ROWS,) int32, zeros: how many programs have added to a query tile
    num_heads,
    num_kv_heads,
    num_batch_kv_heads,
    num_q,
    num_q_padded,
    num_k,
    heads_per_section,
    scale,
    scale_log2,
    HEAD_DIM: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, HEAD_DIM], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_Q, HEAD_DIM], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], dtype)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    k_smem = gl.allocate_shared_memory(dtype, [BLOCK_K, HEAD_DIM], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [BLOCK_K, HEAD_DIM], k_layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, HEAD_DIM], q_layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, HEAD_DIM], q_layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], row_layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], row_layout)
    ds_smem = gl.allocate_shared_memory(dtype, [BLOCK_K, BLOCK_Q], ds_layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [WRITERS, BLOCK_Q, HEAD_DIM], dq_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    dq_full = gl.allocate_shared_memory(gl.int64, [WRITERS, 1], bar_layout)
    dq_empty = gl.allocate_shared_memory(gl.int64, [WRITERS, 1], bar_layout)
    for writer in gl.static_range(WRITERS):
        mbarrier.init(dq_full.index(writer), count=1)
        mbarrier.init(dq_empty.index(writer), count=1)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=1)
        mbarrier.init(do_full.index(stage), count=1)
        mbarrier.init(do_empty.index(stage), count=1)
    fence_async_shared()

    loaded = (k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem)
    tiles = (k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem)
    loads = (k_full, v_full, q_full, q_empty, do_full, do_empty)
    barriers = (k_full, v_full, q_full, q_empty, do_full, do_empty, dq_full, dq_empty)
    sizes = (num_heads, num_kv_heads, num_batch_kv_heads, num_q, num_k, heads_per_section)
    inputs = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc)
    outputs = (dk_desc, dv_desc)
    sums = (dq_desc, turns_ptr, dq_smem)
    gl.warp_specialize(
        [
            (_consumer, (outputs, tiles, barriers, sizes, scale, scale_log2,
                         HEAD_DIM, BLOCK_Q, BLOCK_K, STAGES, CAUSAL)),
            (_producer, (inputs, loaded, loads, sizes, HEAD_DIM, BLOCK_Q, BLOCK_K, STAGES, CAUSAL)),
            (_writer, (sums, (dq_full, dq_empty), sizes, num_q_padded, 0, BLOCK_Q, BLOCK_K, CAUSAL)),
            (_writer, (sums, (dq_full, dq_empty), sizes, num_q_padded, 1, BLOCK_Q, BLOCK_K, CAUSAL)),
        ],
        [1, 1, 1], [24, 24, 24],
    )  # fmt: skip


def launch_hopper_bwd(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the backward kernels on the forward's inputs and outputs, not refused by `hopper_unsupported_reason`.

    Arguments and results as of the portable `launch_flash_bwd`: dQ, dK, dV in q's dtype, stored as (B, N, H, D), and
    an empty tensor in the place of the sinks' gradient. The same inputs give the same bits.
    """
    batch, num_heads, num_q, head_dim = q.shape
    num_kv_heads, num_k = k.shape[1], k.shape[2]
    do = do.to(q.dtype)
    do = do if addressable(do) else do.contiguous()
    o = o if addressable(o) else o.contiguous()
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.to(torch.float32).contiguous()
    dq = q.new_empty(batch, num_q, num_heads, head_dim).transpose(1, 2)
    dk, dv = (q.new_empty(batch, num_k, num_kv_heads, head_dim).transpose(1, 2) for _ in range(2))
    num_q_padded = -(-num_q // ROWS) * ROWS
    rows = batch * num_heads * num_q_padded
    lse_log2, delta = q.new_empty(2, batch * num_heads, num_q_padded, dtype=torch.float32)
    turns = q.new_empty(rows // ROWS, dtype=torch.int32)
    dq_sum = q.new_empty(rows, head_dim, dtype=torch.float32)
    dsinks = q.new_empty(0, dtype=torch.float32)

    described = description(options, ("hopper backward", dlse is None), do, q, k, v, o)
    if known(described) and replay(
        described,
        addresses_of(o, do, lse, dlse, lse_log2, delta, turns, dq_sum),
        addresses_of(q, k, v, do, lse_log2, delta, dq_sum, dk, dv, turns),
        addresses_of(dq_sum, dq),
    ):
        return dq, dk, dv, dsinks

    # short sequences have few programs that wait for each other, and many heads that can run beside them
    heads = 16 if num_q <= 1024 else heads_per_section(q, 1)
    constants = {
        "HEAD_DIM": head_dim, "BLOCK_Q": BLOCK_Q, "BLOCK_K": BLOCK_K, "STAGES": 2 if head_dim == 128 else 3,
        "CAUSAL": options.causal,
    }  # fmt: skip
    memory_bound = {"HEAD_DIM": head_dim, "ROWS": ROWS}
    with on_device(q):
        before = launch(
            _before_kernel, rows // ROWS,
            (
                o, do, lse, dlse, lse_log2, delta, turns, dq_sum, o.stride()[:3], do.stride()[:3],
                num_heads, num_q, num_q_padded,
            ),
            memory_bound, num_warps=4,
        )  # fmt: skip
        main = launch(
            hopper_bwd_kernel, -(-num_k // BLOCK_K) * batch * num_kv_heads,
            (
                tma.descriptor(q, BLOCK_Q), tma.descriptor(k, BLOCK_K), tma.descriptor(v, BLOCK_K),
                tma.descriptor(do, BLOCK_Q), tma.row_descriptor(lse_log2, BLOCK_Q), tma.row_descriptor(delta, BLOCK_Q),
                tma.descriptor(dq_sum, BLOCK_Q), tma.descriptor(dk, BLOCK_K), tma.descriptor(dv, BLOCK_K), turns,
                num_heads, num_kv_heads, batch * num_kv_heads, num_q, num_q_padded, num_k,
                max(heads * num_kv_heads // num_heads, 1), options.scale, options.scale * LOG2_E,
            ),
            constants, num_warps=8,
        )  # fmt: skip
        after = launch(
            _after_kernel, rows // ROWS,
            (dq_sum, dq, dq.stride()[:3], num_heads, num_q, num_q_padded, options.scale), memory_bound, num_warps=4,
        )  # fmt: skip
    remember(described, before, main, after)
    return dq, dk, dv, dsinks
