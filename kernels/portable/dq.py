"""Backward pass, dQ: the kernel that owns a tile of queries."""

import triton
import triton.language as tl

from .scores import Scoring, kept, logits_of, slope_of
from .tiles import (
    NOT_SPECIALIZED,
    ROW_PADDING,
    Mask,
    document_rows,
    load_tile,
    mask_scores,
    masked_tile,
    rows_of,
    store_tile,
)
from .visits import Tables, bits_at, keys_met, owned_queries, visited, where_shown


@triton.jit
def _dq_step(
    q_tile, do_tile, lse_log2, delta, q_start, k_rows, v_rows, k_start, scoring, dq,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, bits=None,
):  # fmt: skip
    """Add one tile of keys to dQ."""
    switches = scoring.switches
    k_tile = load_tile(k_rows, k_start, RAGGED)
    scores = tl.dot(q_tile, k_tile.T, input_precision=scoring.PRECISION)  # (BLOCK_Q, BLOCK_K), unscaled
    in_q, in_k = tl.arange(0, q_tile.shape[0])[:, None], tl.arange(0, k_tile.shape[0])[None, :]
    rows, cols = q_start + in_q, k_start + in_k
    logits, factor, cap_gradient = logits_of(scores, rows, cols, scoring)
    if bits is not None:
        logits = where_shown(logits, bits, q_start, k_start, q_tile.shape[0], k_tile.shape[0])
    elif MASKED:
        logits = mask_scores(logits, rows, cols, scoring.mask)
    probs = tl.exp2(logits * factor - lse_log2[:, None])
    v_tile = load_tile(v_rows, k_start, RAGGED)
    dprobs = tl.dot(do_tile, v_tile.T, input_precision=scoring.PRECISION)
    if switches.dropout_seed is not None:
        keep = kept(q_start, in_q, k_start, in_k, scoring)
        dprobs = tl.where(keep, dprobs * (1.0 / (1.0 - switches.dropout_p)), 0.0)
    dscores = probs * (dprobs - delta[:, None])
    if switches.softcap is not None:
        dscores = dscores * cap_gradient
    return tl.dot(dscores.to(k_tile.dtype), k_tile, dq, input_precision=scoring.PRECISION)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
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
    MASK_OF_BATCH: tl.constexpr,  # dimensions of the block mask, where there is one
    MASK_OF_HEAD: tl.constexpr,
):
    """One program writes one (BLOCK_Q, HEAD_DIM) tile of dQ.

    Grid:     tiles of queries * B * Hq programs, heaviest causal tiles first.
    Math:     dQ = scale * dS K with dS = P * (dO V^T - delta); tiles of keys in the forward's order.
    Numerics: scores, dP, dS and the accumulator fp32; dS rounded to the input dtype before its product.
    Needs:    head dimensions 16 to 256, scale > 0. Keys past Nk are masked: P there would be exp2(0 - LSE),
              perhaps inf.
    Source:   FlashAttention-2, arXiv:2307.08691, algorithm 2.
    """
    tables = Tables(switches, num_heads, q_tokens, k_tokens, MASK_OF_BATCH, MASK_OF_HEAD)
    document, tile, batch_head = owned_queries(tables, num_docs, num_batch_heads, heads_per_section, BLOCK_Q, CAUSAL)
    if document < 0:
        return
    q_row0, num_q = document_rows(document, switches.cu_seqlens_q, q_tokens)
    k_row0, num_k = document_rows(document, switches.cu_seqlens_k, k_tokens)
    padded_row0 = (q_row0 // ROW_PADDING + document) * ROW_PADDING
    batch = batch_head // num_heads
    head = batch_head - batch * num_heads
    kv_head = head // group_size
    q_start = tile * BLOCK_Q
    mask = Mask(num_q, num_k, (window_left, window_right), CAUSAL, LOCAL)
    slope_log2 = slope_of(batch if switches.cu_seqlens_q is None else document, head, num_heads, switches)
    scoring = Scoring(mask, scale_log2, slope_log2, switches, batch_head, q_row0, PRECISION)

    q_rows = rows_of(q, q_strides, batch, head, q_row0, num_q, HEAD_DIM, BLOCK_D, BLOCK_Q, TMA)
    do_rows = rows_of(do, do_strides, batch, head, q_row0, num_q, HEAD_DIM_V, BLOCK_DV, BLOCK_Q, TMA)
    k_rows = rows_of(k, k_strides, batch, kv_head, k_row0, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, TMA)
    v_rows = rows_of(v, v_strides, batch, kv_head, k_row0, num_k, HEAD_DIM_V, BLOCK_DV, BLOCK_K, TMA)
    q_tile = load_tile(q_rows, q_start, True)
    do_tile = load_tile(do_rows, q_start, True)
    padded = batch_head.to(tl.int64) * q_tokens_padded + padded_row0 + q_start + tl.arange(0, BLOCK_Q)
    lse_log2 = tl.load(lse_log2_ptr + padded)
    delta = tl.load(delta_ptr + padded)

    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    visits, full_start, full_end, masked_start, masked_end = keys_met(
        q_start, mask, tables, batch, head, BLOCK_Q, BLOCK_K
    )
    for position in range(full_start, full_end, BLOCK_K):
        k_start = visited(position, visits)
        dq = _dq_step(q_tile, do_tile, lse_log2, delta, q_start, k_rows, v_rows, k_start, scoring, dq, False, False)
    if CAUSAL or LOCAL or not EVEN_K or visits.entries is not None:
        for position in range(masked_start, masked_end, BLOCK_K):
            k_start = visited(masked_tile(position, full_start, full_end, LOCAL), visits)
            dq = _dq_step(
                q_tile, do_tile, lse_log2, delta, q_start, k_rows, v_rows, k_start, scoring, dq, True, not EVEN_K,
                None if visits.entries is None else bits_at(position, visits),
            )  # fmt: skip
    dq *= scale
    dq_rows = rows_of(dq_ptr, dq_strides, batch, head, q_row0, num_q, HEAD_DIM, BLOCK_D, BLOCK_Q, False)
    store_tile(dq_rows, q_start, dq)
