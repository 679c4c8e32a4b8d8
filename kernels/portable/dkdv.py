"""Backward pass, dK and dV: the kernel that owns a tile of keys."""

import triton
import triton.language as tl

from .scores import kept, logits_of, slope_of
from .tiles import (
    ROW_PADDING,
    document_rows,
    head_base,
    load_tile,
    longest_first,
    mask_scores,
    masked_tile,
    program_tile,
    seeing_queries,
    store_tile,
)


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
    batch_head,
    q_row0,
    k_row0,
    q_start,
    k_start,
    num_q,
    num_k,
    window,
    scale_log2,
    slope_log2,
    switches,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    LOCAL: tl.constexpr,
    RAGGED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
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
    rows = q_start + tl.arange(0, BLOCK_Q)[None, :]
    cols = k_start + tl.arange(0, BLOCK_K)[:, None]
    logits, factor, cap_gradient = logits_of(
        scores, rows, cols, num_k - num_q, scale_log2, slope_log2, switches, PRECISION == "ieee"
    )
    if MASKED:
        logits = mask_scores(logits, rows, cols, num_q, num_k, window, CAUSAL, LOCAL)
    probs = tl.exp2(logits * factor - lse_log2[None, :])
    do_tile = load_tile(do, do_strides, batch, head, q_start, num_q, HEAD_DIM_V, BLOCK_DV, BLOCK_Q, RAGGED, TMA)
    if switches.dropout_seed is not None:
        keep = kept(q_row0 + rows, k_row0 + cols, batch_head, switches)
        dropped = tl.where(keep, probs, 0.0)
        dv = tl.dot(dropped.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
    else:
        dv = tl.dot(probs.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
    delta = tl.load(delta_ptr + q_start + tl.arange(0, BLOCK_Q))
    dprobs = tl.dot(v_tile, do_tile.T, input_precision=PRECISION)  # dP^T
    if switches.dropout_seed is not None:
        dprobs = tl.where(keep, dprobs * (1.0 / (1.0 - switches.dropout_p)), 0.0)
    dscores = probs * (dprobs - delta[None, :])
    if switches.softcap is not None:
        dscores = dscores * cap_gradient
    dk = tl.dot(dscores.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "num_heads", "q_tokens", "q_tokens_padded", "k_tokens", "num_docs", "heads_per_section", "window_left",
        "window_right",
    ]
)  # fmt: skip
def flash_dkdv_kernel(
    # inputs: pointers, or rank-4 TMA descriptors where TMA
    q,  # (B, Hq, Nq, D) fp16 | bf16 | fp32, one dtype
    k,  # (B, Hkv, Nk, D)
    v,  # (B, Hkv, Nk, Dv)
    do,  # (B, Hq, Nq, Dv)
    lse_log2_ptr,  # (B, Hq, q_tokens_padded) fp32, +inf where a row sees nothing
    delta_ptr,  # (B, Hq, q_tokens_padded) fp32
    # outputs
    dk_ptr,  # (B, Hkv, Nk, D), q's dtype
    dv_ptr,  # (B, Hkv, Nk, Dv)
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
    q_tokens,  # Nq; all documents together where packed
    q_tokens_padded,
    k_tokens,  # Nk
    num_docs,
    heads_per_section,
    window_left,  # read only where LOCAL
    window_right,
    scale,
    scale_log2,  # scale * log2(e), positive
    switches,  # Switches: what is None is compiled away
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    LOCAL: tl.constexpr,  # a window (left, right) in place of CAUSAL
    EVEN_Q: tl.constexpr,  # Nq is a multiple of BLOCK_Q; False where packed
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """One program writes one (BLOCK_K, HEAD_DIM) tile of dK and one (BLOCK_K, HEAD_DIM_V) tile of dV.

    Grid:     tiles of keys * B * Hkv programs; the first keys, which most queries see, first.
    Math:     P = exp2(S - LSE), dV = P^T dO, dP = dO V^T, dS = P * (dP - delta), dK = scale * dS^T Q, summed
              over the group's query heads; only queries that see a key of the tile.
    Numerics: scores, dP, dS and both accumulators fp32; P and dS rounded to the input dtype before their
              products.
    Needs:    head dimensions 16 to 256, scale > 0. Rows past Nk hold garbage that is never stored, columns
              past Nq are 0.
    Source:   FlashAttention-2, arXiv:2307.08691, algorithm 2.
    """
    num_kv_heads = num_heads // group_size
    if switches.cu_seqlens_q is not None:
        num_tiles = k_tokens // BLOCK_K + num_docs
        ordinal, batch_head = program_tile(num_tiles, num_batch_heads, heads_per_section, False)
        document, level = longest_first(ordinal, switches.cu_seqlens_k, num_docs, BLOCK_K)
        if document < 0:
            return
        q_row0, num_q = document_rows(document, switches.cu_seqlens_q)
        k_row0, num_k = document_rows(document, switches.cu_seqlens_k)
        padded_row0 = (q_row0 // ROW_PADDING + document) * ROW_PADDING
        tile = tl.cdiv(num_k, BLOCK_K) - 1 - level  # the first keys have the most work
    else:
        num_tiles = tl.cdiv(k_tokens, BLOCK_K)
        tile, batch_head = program_tile(num_tiles, num_batch_heads, heads_per_section, False)
        q_row0 = 0
        k_row0 = 0
        padded_row0 = 0
        num_q = q_tokens
        num_k = k_tokens
    batch = batch_head // num_kv_heads
    kv_head = batch_head - batch * num_kv_heads
    k_start = tile * BLOCK_K
    window = (window_left, window_right)

    k_base = head_base(k, k_strides, batch, kv_head, k_row0, TMA)
    v_base = head_base(v, v_strides, batch, kv_head, k_row0, TMA)
    k_tile = load_tile(k_base, k_strides, batch, kv_head, k_start, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, True, TMA)
    v_tile = load_tile(v_base, v_strides, batch, kv_head, k_start, num_k, HEAD_DIM_V, BLOCK_DV, BLOCK_K, True, TMA)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    full_start, full_end, masked_start, masked_end = seeing_queries(
        k_start, num_q, num_k, window, CAUSAL, LOCAL, BLOCK_Q, BLOCK_K
    )
    for member in range(group_size):
        head = kv_head * group_size + member
        if switches.cu_seqlens_q is not None:
            slope_log2 = slope_of(document, head, num_heads, switches)
        else:
            slope_log2 = slope_of(batch, head, num_heads, switches)
        q_base = head_base(q, q_strides, batch, head, q_row0, TMA)
        do_base = head_base(do, do_strides, batch, head, q_row0, TMA)
        row_offset = (batch * num_heads + head).to(tl.int64) * q_tokens_padded + padded_row0
        lse_base, delta_base = lse_log2_ptr + row_offset, delta_ptr + row_offset
        if CAUSAL or LOCAL:
            for position in range(masked_start, masked_end, BLOCK_Q):
                q_start = masked_tile(position, full_start, full_end, LOCAL)
                dk, dv = _dkdv_step(
                    k_tile, v_tile, dk, dv, q_base, do_base, q_strides, do_strides, lse_base, delta_base,
                    batch, head, batch * num_heads + head, q_row0, k_row0, q_start, k_start, num_q, num_k, window,
                    scale_log2, slope_log2, switches, True, CAUSAL, LOCAL, not EVEN_Q,
                    HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K, PRECISION, TMA,
                )  # fmt: skip
        for q_start in range(full_start, full_end, BLOCK_Q):
            dk, dv = _dkdv_step(
                k_tile, v_tile, dk, dv, q_base, do_base, q_strides, do_strides, lse_base, delta_base,
                batch, head, batch * num_heads + head, q_row0, k_row0, q_start, k_start, num_q, num_k, window,
                scale_log2, slope_log2, switches, False, CAUSAL, LOCAL, not EVEN_Q,
                HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K, PRECISION, TMA,
            )  # fmt: skip
    if switches.dropout_seed is not None:
        dv = dv * (1.0 / (1.0 - switches.dropout_p))
    store_tile(dk_ptr, dk_strides, batch, kv_head, k_row0, k_start, num_k, dk * scale, HEAD_DIM, BLOCK_D, BLOCK_K)
    store_tile(dv_ptr, dv_strides, batch, kv_head, k_row0, k_start, num_k, dv, HEAD_DIM_V, BLOCK_DV, BLOCK_K)
