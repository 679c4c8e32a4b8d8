"""Backward pass, dQ: the kernel that owns a tile of queries."""

import triton
import triton.language as tl

from kernels.tiles import head_base, load_tile, mask_scores, program_tile, store_tile, visible_keys


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
def flash_dq_kernel(
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
    do_tile = load_tile(do_base, do_strides, batch, head, q_start, num_q, HEAD_DIM, BLOCK_D, BLOCK_Q, True, TMA)
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
