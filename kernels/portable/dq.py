"""Backward pass, dQ: the kernel that owns a tile of queries."""

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
    store_tile,
    visible_keys,
)


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
    """Add one tile of keys to dQ."""
    k_tile = load_tile(k, k_strides, batch, kv_head, k_start, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, RAGGED, TMA)
    scores = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)  # (BLOCK_Q, BLOCK_K), unscaled
    rows = q_start + tl.arange(0, BLOCK_Q)[:, None]
    cols = k_start + tl.arange(0, BLOCK_K)[None, :]
    logits, factor, cap_gradient = logits_of(
        scores, rows, cols, num_k - num_q, scale_log2, slope_log2, switches, PRECISION == "ieee"
    )
    if MASKED:
        logits = mask_scores(logits, rows, cols, num_q, num_k, window, CAUSAL, LOCAL)
    probs = tl.exp2(logits * factor - lse_log2[:, None])
    v_tile = load_tile(v, v_strides, batch, kv_head, k_start, num_k, HEAD_DIM_V, BLOCK_DV, BLOCK_K, RAGGED, TMA)
    dprobs = tl.dot(do_tile, v_tile.T, input_precision=PRECISION)
    if switches.dropout_seed is not None:
        keep = kept(q_row0 + rows, k_row0 + cols, batch_head, switches)
        dprobs = tl.where(keep, dprobs * (1.0 / (1.0 - switches.dropout_p)), 0.0)
    dscores = probs * (dprobs - delta[:, None])
    if switches.softcap is not None:
        dscores = dscores * cap_gradient
    return tl.dot(dscores.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)


@triton.jit(
    do_not_specialize=[
        "num_heads", "q_tokens", "q_tokens_padded", "k_tokens", "num_docs", "heads_per_section", "window_left",
        "window_right",
    ]
)  # fmt: skip
def flash_dq_kernel(
    # inputs: pointers, or rank-4 TMA descriptors where TMA
    q,  # (B, Hq, Nq, D) fp16 | bf16 | fp32, one dtype
    k,  # (B, Hkv, Nk, D)
    v,  # (B, Hkv, Nk, Dv)
    do,  # (B, Hq, Nq, Dv)
    lse_log2_ptr,  # (B, Hq, q_tokens_padded) fp32, +inf where a row sees nothing
    delta_ptr,  # (B, Hq, q_tokens_padded) fp32
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
    EVEN_K: tl.constexpr,  # Nk is a multiple of BLOCK_K; False where packed
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """One program writes one (BLOCK_Q, HEAD_DIM) tile of dQ.

    Grid:     tiles of queries * B * Hq programs, heaviest causal tiles first.
    Math:     dQ = scale * dS K with dS = P * (dO V^T - delta); tiles of keys in the forward's order.
    Numerics: scores, dP, dS and the accumulator fp32; dS rounded to the input dtype before its product.
    Needs:    head dimensions 16 to 256, scale > 0. Keys past Nk are masked: P there would be exp2(0 - LSE),
              perhaps inf.
    Source:   FlashAttention-2, arXiv:2307.08691, algorithm 2.
    """
    if switches.cu_seqlens_q is not None:
        num_tiles = q_tokens // BLOCK_Q + num_docs
        ordinal, batch_head = program_tile(num_tiles, num_batch_heads, heads_per_section, False)
        document, tile = longest_first(ordinal, switches.cu_seqlens_q, num_docs, BLOCK_Q)
        if document < 0:
            return
        q_row0, num_q = document_rows(document, switches.cu_seqlens_q)
        k_row0, num_k = document_rows(document, switches.cu_seqlens_k)
        padded_row0 = (q_row0 // ROW_PADDING + document) * ROW_PADDING
    else:
        num_tiles = tl.cdiv(q_tokens, BLOCK_Q)
        tile, batch_head = program_tile(num_tiles, num_batch_heads, heads_per_section, CAUSAL)
        q_row0 = 0
        k_row0 = 0
        padded_row0 = 0
        num_q = q_tokens
        num_k = k_tokens
    batch = batch_head // num_heads
    head = batch_head - batch * num_heads
    kv_head = head // group_size
    q_start = tile * BLOCK_Q
    window = (window_left, window_right)
    if switches.cu_seqlens_q is not None:
        slope_log2 = slope_of(document, head, num_heads, switches)
    else:
        slope_log2 = slope_of(batch, head, num_heads, switches)

    q_base = head_base(q, q_strides, batch, head, q_row0, TMA)
    do_base = head_base(do, do_strides, batch, head, q_row0, TMA)
    k_base = head_base(k, k_strides, batch, kv_head, k_row0, TMA)
    v_base = head_base(v, v_strides, batch, kv_head, k_row0, TMA)
    q_tile = load_tile(q_base, q_strides, batch, head, q_start, num_q, HEAD_DIM, BLOCK_D, BLOCK_Q, True, TMA)
    do_tile = load_tile(do_base, do_strides, batch, head, q_start, num_q, HEAD_DIM_V, BLOCK_DV, BLOCK_Q, True, TMA)
    padded = batch_head.to(tl.int64) * q_tokens_padded + padded_row0 + q_start + tl.arange(0, BLOCK_Q)
    lse_log2 = tl.load(lse_log2_ptr + padded)
    delta = tl.load(delta_ptr + padded)

    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    full_start, full_end, masked_start, masked_end = visible_keys(
        q_start, num_q, num_k, window, CAUSAL, LOCAL, BLOCK_Q, BLOCK_K
    )
    for k_start in range(full_start, full_end, BLOCK_K):
        dq = _dq_step(
            q_tile, do_tile, lse_log2, delta, dq, k_base, v_base, k_strides, v_strides, batch, kv_head, batch_head,
            q_row0, k_row0, q_start, k_start, num_q, num_k, window, scale_log2, slope_log2, switches,
            False, CAUSAL, LOCAL, False, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K, PRECISION, TMA,
        )  # fmt: skip
    if CAUSAL or LOCAL or not EVEN_K:
        for position in range(masked_start, masked_end, BLOCK_K):
            k_start = masked_tile(position, full_start, full_end, LOCAL)
            dq = _dq_step(
                q_tile, do_tile, lse_log2, delta, dq, k_base, v_base, k_strides, v_strides, batch, kv_head,
                batch_head, q_row0, k_row0, q_start, k_start, num_q, num_k, window, scale_log2, slope_log2, switches,
                True, CAUSAL, LOCAL, not EVEN_K, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K,
                PRECISION, TMA,
            )  # fmt: skip
    store_tile(dq_ptr, dq_strides, batch, head, q_row0, q_start, num_q, dq * scale, HEAD_DIM, BLOCK_D, BLOCK_Q)
