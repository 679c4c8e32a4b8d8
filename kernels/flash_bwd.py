"""Backward pass: three Triton kernels (delta, dK and dV, dQ) and their launcher. Deterministic: no atomics.

Two kernels recompute S and dP once each, seven products in place of five; in exchange every gradient has one
owner.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import (
    LOG2_E as HOST_LOG2_E,
)
from kernels.launch import dot_precision, heads_per_section, kernel_inputs, kernel_operands, on_device
from kernels.tiles import (
    LOG2_E,
    head_base,
    load_tile,
    mask_scores,
    program_tile,
    seeing_queries,
    store_tile,
    visible_keys,
)
from kernels.tuning import Tile, tile_for

# Rows of the LSE and delta scratch are padded to a multiple of every BLOCK_Q, so that the main loops load
# them unmasked.
ROW_PADDING = 128


@triton.jit(do_not_specialize=["num_heads", "num_q", "num_q_padded"])
def _delta_kernel(
    # inputs
    o_ptr,  # (B, Hq, Nq, D)
    do_ptr,  # (B, Hq, Nq, D)
    lse_ptr,  # (B, Hq, Nq) fp32, natural logarithm
    dlse_ptr,  # (B, Hq, Nq) fp32, or lse_ptr where not HAS_DLSE
    # outputs, (B, Hq, num_q_padded) fp32
    lse_log2_ptr,
    delta_ptr,
    # layout and sizes
    o_strides,  # (batch, head, token), elements; the last stride is 1
    do_strides,
    num_heads,
    num_q,
    num_q_padded,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """One program prepares BLOCK_Q rows of one head for the two main kernels.

    Grid:     num_q_padded / BLOCK_Q * B * Hq programs.
    Math:     delta = rowsum(dO * O) - dLSE (dLSE/dS = P, so LSE's gradient only shifts delta); LSE in base 2.
    Numerics: fp32. Rows without a visible key (LSE -inf) and rows past Nq get LSE +inf: exp2(s - inf) = 0
              then makes their P and their gradients 0 with no mask in the main loops.
    """
    program = tl.program_id(0)
    tiles = num_q_padded // BLOCK_Q
    batch_head = program // tiles
    q_start = (program - batch_head * tiles) * BLOCK_Q
    batch = batch_head // num_heads
    head = batch_head - batch * num_heads

    o_base = head_base(o_ptr, o_strides, batch, head, False)
    do_base = head_base(do_ptr, do_strides, batch, head, False)
    o = load_tile(o_base, o_strides, batch, head, q_start, num_q, HEAD_DIM, BLOCK_D, BLOCK_Q, True, False)
    do = load_tile(do_base, do_strides, batch, head, q_start, num_q, HEAD_DIM, BLOCK_D, BLOCK_Q, True, False)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    rows = q_start + tl.arange(0, BLOCK_Q)
    unpadded = batch_head.to(tl.int64) * num_q + rows
    lse = tl.load(lse_ptr + unpadded, mask=rows < num_q, other=-float("inf"))
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + unpadded, mask=rows < num_q, other=0.0)
    padded = batch_head.to(tl.int64) * num_q_padded + rows
    tl.store(lse_log2_ptr + padded, tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E))
    tl.store(delta_ptr + padded, delta)


@triton.jit
def _dkdv_step(
    k_tile,
    v_tile,
    dk,
    dv,
    q,
    do,
    q_strides,
    do_strides,
    lse_log2_ptr,
    delta_ptr,
    batch,
    head,
    q_start,
    k_start,
    num_q,
    num_k,
    scale_log2,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Add one tile of queries to dK and dV.

    Scores are transposed, so that P^T and dS^T are left operands of their products straight from registers.
    """
    q_tile = load_tile(q, q_strides, batch, head, q_start, num_q, HEAD_DIM, BLOCK_D, BLOCK_Q, RAGGED, TMA)
    lse_log2 = tl.load(lse_log2_ptr + q_start + tl.arange(0, BLOCK_Q))
    scores = tl.dot(k_tile, q_tile.T, input_precision=PRECISION)  # S^T, (BLOCK_K, BLOCK_Q), unscaled
    if MASKED:
        rows = q_start + tl.arange(0, BLOCK_Q)[None, :]
        cols = k_start + tl.arange(0, BLOCK_K)[:, None]
        scores = mask_scores(scores, rows, cols, num_q, num_k, CAUSAL)
    probs = tl.exp2(scores * scale_log2 - lse_log2[None, :])
    do_tile = load_tile(do, do_strides, batch, head, q_start, num_q, HEAD_DIM, BLOCK_D, BLOCK_Q, RAGGED, TMA)
    dv = tl.dot(probs.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
    delta = tl.load(delta_ptr + q_start + tl.arange(0, BLOCK_Q))
    dprobs = tl.dot(v_tile, do_tile.T, input_precision=PRECISION)  # dP^T
    dscores = probs * (dprobs - delta[None, :])
    dk = tl.dot(dscores.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["num_heads", "num_q", "num_q_padded", "num_k", "heads_per_section"])
def _dkdv_kernel(
    # inputs: pointers, or rank-4 TMA descriptors where TMA
    q,  # (B, Hq, Nq, D) fp16 | bf16 | fp32, one dtype
    k,  # (B, Hkv, Nk, D)
    v,  # (B, Hkv, Nk, D)
    do,  # (B, Hq, Nq, D)
    lse_log2_ptr,  # (B, Hq, num_q_padded) fp32, +inf where a row sees nothing
    delta_ptr,  # (B, Hq, num_q_padded) fp32
    # outputs
    dk_ptr,  # (B, Hkv, Nk, D), q's dtype
    dv_ptr,
    # layout and sizes
    q_strides,  # (batch, head, token), elements; the last stride is 1
    k_strides,
    v_strides,
    do_strides,
    dk_strides,
    dv_strides,
    num_heads,  # Hq
    group_size,  # Hq // Hkv
    num_batch_heads,  # B * Hkv
    num_q,
    num_q_padded,
    num_k,
    heads_per_section,
    scale,
    scale_log2,  # scale * log2(e), positive
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN_Q: tl.constexpr,  # Nq is a multiple of BLOCK_Q
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """One program writes one (BLOCK_K, HEAD_DIM) tile of dK and of dV.

    Grid:     cdiv(Nk, BLOCK_K) * B * Hkv programs; the first keys, which most queries see, first.
    Math:     P = exp2(S - LSE), dV = P^T dO, dP = dO V^T, dS = P * (dP - delta), dK = scale * dS^T Q, summed
              over the group's query heads; queries from the diagonal down.
    Numerics: scores, dP, dS and both accumulators fp32; P and dS rounded to the input dtype before their
              products.
    Needs:    HEAD_DIM 16 to 256, scale > 0. Rows past Nk hold garbage that is never stored, columns past Nq
              are 0.
    Source:   FlashAttention-2, arXiv:2307.08691, algorithm 2.
    """
    num_kv_heads = num_heads // group_size
    tile, batch_head = program_tile(tl.cdiv(num_k, BLOCK_K), num_batch_heads, heads_per_section, False)
    batch = batch_head // num_kv_heads
    kv_head = batch_head - batch * num_kv_heads
    k_start = tile * BLOCK_K

    k_base = head_base(k, k_strides, batch, kv_head, TMA)
    v_base = head_base(v, v_strides, batch, kv_head, TMA)
    k_tile = load_tile(
        k_base, k_strides, batch, kv_head, k_start, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, True, TMA
    )
    v_tile = load_tile(
        v_base, v_strides, batch, kv_head, k_start, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, True, TMA
    )
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    first, full = seeing_queries(k_start, num_q, num_k, CAUSAL, BLOCK_Q, BLOCK_K)
    for member in range(group_size):
        head = kv_head * group_size + member
        q_base = head_base(q, q_strides, batch, head, TMA)
        do_base = head_base(do, do_strides, batch, head, TMA)
        row_offset = (batch * num_heads + head).to(tl.int64) * num_q_padded
        lse_base, delta_base = lse_log2_ptr + row_offset, delta_ptr + row_offset
        if CAUSAL:
            for q_start in range(first, tl.minimum(full, num_q), BLOCK_Q):
                dk, dv = _dkdv_step(
                    k_tile, v_tile, dk, dv, q_base, do_base, q_strides, do_strides, lse_base, delta_base,
                    batch, head, q_start, k_start, num_q, num_k, scale_log2, True, CAUSAL, not EVEN_Q,
                    HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, PRECISION, TMA,
                )  # fmt: skip
        for q_start in range(full, num_q, BLOCK_Q):
            dk, dv = _dkdv_step(
                k_tile, v_tile, dk, dv, q_base, do_base, q_strides, do_strides, lse_base, delta_base,
                batch, head, q_start, k_start, num_q, num_k, scale_log2, False, CAUSAL, not EVEN_Q,
                HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, PRECISION, TMA,
            )  # fmt: skip
    store_tile(dk_ptr, dk_strides, batch, kv_head, k_start, num_k, dk * scale, HEAD_DIM, BLOCK_D, BLOCK_K)
    store_tile(dv_ptr, dv_strides, batch, kv_head, k_start, num_k, dv, HEAD_DIM, BLOCK_D, BLOCK_K)


@triton.jit
def _dq_step(
    q_tile,
    do_tile,
    lse_log2,
    delta,
    dq,
    k,
    v,
    k_strides,
    v_strides,
    batch,
    kv_head,
    q_start,
    k_start,
    num_q,
    num_k,
    scale_log2,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Add one tile of keys to dQ."""
    k_tile = load_tile(k, k_strides, batch, kv_head, k_start, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, RAGGED, TMA)
    scores = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)  # (BLOCK_Q, BLOCK_K), unscaled
    if MASKED:
        rows = q_start + tl.arange(0, BLOCK_Q)[:, None]
        cols = k_start + tl.arange(0, BLOCK_K)[None, :]
        scores = mask_scores(scores, rows, cols, num_q, num_k, CAUSAL)
    probs = tl.exp2(scores * scale_log2 - lse_log2[:, None])
    v_tile = load_tile(v, v_strides, batch, kv_head, k_start, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, RAGGED, TMA)
    dprobs = tl.dot(do_tile, v_tile.T, input_precision=PRECISION)
    dscores = probs * (dprobs - delta[:, None])
    return tl.dot(dscores.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_heads", "num_q", "num_q_padded", "num_k", "heads_per_section"])
def _dq_kernel(
    # inputs: pointers, or rank-4 TMA descriptors where TMA
    q,  # (B, Hq, Nq, D) fp16 | bf16 | fp32, one dtype
    k,  # (B, Hkv, Nk, D)
    v,  # (B, Hkv, Nk, D)
    do,  # (B, Hq, Nq, D)
    lse_log2_ptr,  # (B, Hq, num_q_padded) fp32, +inf where a row sees nothing
    delta_ptr,  # (B, Hq, num_q_padded) fp32
    # output
    dq_ptr,  # (B, Hq, Nq, D), q's dtype
    # layout and sizes
    q_strides,  # (batch, head, token), elements; the last stride is 1
    k_strides,
    v_strides,
    do_strides,
    dq_strides,
    num_heads,  # Hq
    group_size,  # Hq // Hkv
    num_batch_heads,  # B * Hq
    num_q,
    num_q_padded,
    num_k,
    heads_per_section,
    scale,
    scale_log2,  # scale * log2(e), positive
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN_K: tl.constexpr,  # Nk is a multiple of BLOCK_K
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """One program writes one (BLOCK_Q, HEAD_DIM) tile of dQ.

    Grid:     cdiv(Nq, BLOCK_Q) * B * Hq programs, heaviest causal tiles first.
    Math:     dQ = scale * dS K with dS = P * (dO V^T - delta); keys left to right, as in the forward.
    Numerics: scores, dP, dS and the accumulator fp32; dS rounded to the input dtype before its product.
    Needs:    HEAD_DIM 16 to 256, scale > 0. Keys past Nk are masked: P there would be exp2(0 - LSE), perhaps
              inf.
    Source:   FlashAttention-2, arXiv:2307.08691, algorithm 2.
    """
    tile, batch_head = program_tile(tl.cdiv(num_q, BLOCK_Q), num_batch_heads, heads_per_section, CAUSAL)
    batch = batch_head // num_heads
    head = batch_head - batch * num_heads
    kv_head = head // group_size
    q_start = tile * BLOCK_Q

    q_base = head_base(q, q_strides, batch, head, TMA)
    do_base = head_base(do, do_strides, batch, head, TMA)
    k_base = head_base(k, k_strides, batch, kv_head, TMA)
    v_base = head_base(v, v_strides, batch, kv_head, TMA)
    q_tile = load_tile(q_base, q_strides, batch, head, q_start, num_q, HEAD_DIM, BLOCK_D, BLOCK_Q, True, TMA)
    do_tile = load_tile(
        do_base, do_strides, batch, head, q_start, num_q, HEAD_DIM, BLOCK_D, BLOCK_Q, True, TMA
    )
    padded = batch_head.to(tl.int64) * num_q_padded + q_start + tl.arange(0, BLOCK_Q)
    lse_log2 = tl.load(lse_log2_ptr + padded)
    delta = tl.load(delta_ptr + padded)

    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    full_end, end = visible_keys(q_start, num_q, num_k, CAUSAL, BLOCK_Q, BLOCK_K)
    for k_start in range(0, full_end, BLOCK_K):
        dq = _dq_step(
            q_tile, do_tile, lse_log2, delta, dq, k_base, v_base, k_strides, v_strides, batch, kv_head,
            q_start, k_start, num_q, num_k, scale_log2, False, CAUSAL, False,
            HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, PRECISION, TMA,
        )  # fmt: skip
    if CAUSAL or not EVEN_K:
        for k_start in range(full_end, end, BLOCK_K):
            dq = _dq_step(
                q_tile, do_tile, lse_log2, delta, dq, k_base, v_base, k_strides, v_strides, batch, kv_head,
                q_start, k_start, num_q, num_k, scale_log2, True, CAUSAL, not EVEN_K,
                HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, PRECISION, TMA,
            )  # fmt: skip
    store_tile(dq_ptr, dq_strides, batch, head, q_start, num_q, dq * scale, HEAD_DIM, BLOCK_D, BLOCK_Q)


def launch_flash_bwd(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    dkdv_tile: Tile | None = None,
    dq_tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward kernels on the forward's inputs and outputs; `dlse` (B, Hq, Nq) may be None.

    Returns dQ, dK, dV in q's dtype, stored as (B, N, H, D). The tiles override the table.
    """
    batch, num_heads, num_q, head_dim = q.shape
    num_kv_heads, num_k = k.shape[1], k.shape[2]
    dtype = q.dtype
    do, q, k, v, o = kernel_inputs(do.to(dtype), q, k, v, o)
    dq = q.new_empty(batch, num_q, num_heads, head_dim).transpose(1, 2)
    dk = q.new_empty(batch, num_k, num_kv_heads, head_dim).transpose(1, 2)
    dv = torch.empty_like(dk)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_().to(dtype), dk.zero_().to(dtype), dv.zero_().to(dtype)
    dkdv_tile = dkdv_tile or tile_for("dkdv", q.device, q.dtype, head_dim, causal)
    dq_tile = dq_tile or tile_for("dq", q.device, q.dtype, head_dim, causal)

    num_q_padded = triton.cdiv(num_q, ROW_PADDING) * ROW_PADDING
    lse_log2 = q.new_empty(batch, num_heads, num_q_padded, dtype=torch.float32)
    delta = torch.empty_like(lse_log2)
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    block_d = triton.next_power_of_2(head_dim)
    section = heads_per_section(q, k)
    scale_log2 = scale * HOST_LOG2_E
    precision = dot_precision(q)
    with on_device(q):
        delta_rows = 64  # memory-bound: any tile that fills the loads' vectors will do
        _delta_kernel[(num_q_padded // delta_rows * batch * num_heads,)](
            o, do, lse, lse if dlse is None else dlse, lse_log2, delta, o.stride()[:3], do.stride()[:3],
            num_heads, num_q, num_q_padded,
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_Q=delta_rows, HAS_DLSE=dlse is not None, num_warps=4,
        )  # fmt: skip

        tile = dkdv_tile
        assert ROW_PADDING % tile.block_q == 0
        operands, strides, tma = kernel_operands(
            tile, block_d, (q, tile.block_q), (k, tile.block_k), (v, tile.block_k), (do, tile.block_q)
        )
        _dkdv_kernel[(triton.cdiv(num_k, tile.block_k) * batch * num_kv_heads,)](
            *operands, lse_log2, delta, dk, dv, *strides, dk.stride()[:3], dv.stride()[:3],
            num_heads, num_heads // num_kv_heads, batch * num_kv_heads, num_q, num_q_padded, num_k,
            max(section // (num_heads // num_kv_heads), 1), scale, scale_log2,
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k,
            CAUSAL=causal, EVEN_Q=num_q % tile.block_q == 0, PRECISION=precision, TMA=tma,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

        tile = dq_tile
        assert ROW_PADDING % tile.block_q == 0
        operands, strides, tma = kernel_operands(
            tile, block_d, (q, tile.block_q), (k, tile.block_k), (v, tile.block_k), (do, tile.block_q)
        )
        _dq_kernel[(triton.cdiv(num_q, tile.block_q) * batch * num_heads,)](
            *operands, lse_log2, delta, dq, *strides, dq.stride()[:3],
            num_heads, num_heads // num_kv_heads, batch * num_heads, num_q, num_q_padded, num_k,
            section, scale, scale_log2,
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k,
            CAUSAL=causal, EVEN_K=num_k % tile.block_k == 0, PRECISION=precision, TMA=tma,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
