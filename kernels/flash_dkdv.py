"""Backward pass, dK and dV: the kernel that owns a tile of keys."""

import triton
import triton.language as tl

from kernels.tiles import head_base, load_tile, mask_scores, program_tile, seeing_queries, store_tile


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
def flash_dkdv_kernel(
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
    k_tile = load_tile(k_base, k_strides, batch, kv_head, k_start, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, True, TMA)
    v_tile = load_tile(v_base, v_strides, batch, kv_head, k_start, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, True, TMA)
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
