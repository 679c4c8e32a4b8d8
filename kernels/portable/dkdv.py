"""Backward pass, dK and dV: the kernel that owns a tile of keys."""

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
    owned_tile,
    rows_of,
    seeing_queries,
    store_tile,
)
from .visits import Tables, Visits, bits_at, busiest_first, visited, visits_of, where_shown


@triton.jit
def _dkdv_step(
    k_tile, v_tile, k_start, q_rows, do_rows, lse_log2_ptr, delta_ptr, q_start, scoring, dk, dv,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, bits=None,
):  # fmt: skip
    """Add one tile of queries to dK and dV.

    Scores are transposed, so that P^T and dS^T are left operands of their products straight from registers.
    """
    switches = scoring.switches
    q_tile = load_tile(q_rows, q_start, RAGGED)
    lse_log2 = tl.load(lse_log2_ptr + q_start + tl.arange(0, q_tile.shape[0]))
    scores = tl.dot(k_tile, q_tile.T, input_precision=scoring.PRECISION)  # S^T, (BLOCK_K, BLOCK_Q), unscaled
    in_q, in_k = tl.arange(0, q_tile.shape[0])[None, :], tl.arange(0, k_tile.shape[0])[:, None]
    rows, cols = q_start + in_q, k_start + in_k
    logits, factor, cap_gradient = logits_of(scores, rows, cols, scoring)
    if bits is not None:
        logits = where_shown(logits, bits, k_start, q_start, k_tile.shape[0], q_tile.shape[0])
    elif MASKED:
        logits = mask_scores(logits, rows, cols, scoring.mask)
    probs = tl.exp2(logits * factor - lse_log2[None, :])
    do_tile = load_tile(do_rows, q_start, RAGGED)
    if switches.dropout_seed is not None:
        keep = kept(q_start, in_q, k_start, in_k, scoring)
        dropped = tl.where(keep, probs, 0.0)
        dv = tl.dot(dropped.to(do_tile.dtype), do_tile, dv, input_precision=scoring.PRECISION)
    else:
        dv = tl.dot(probs.to(do_tile.dtype), do_tile, dv, input_precision=scoring.PRECISION)
    delta = tl.load(delta_ptr + q_start + tl.arange(0, q_tile.shape[0]))
    dprobs = tl.dot(v_tile, do_tile.T, input_precision=scoring.PRECISION)  # dP^T
    if switches.dropout_seed is not None:
        dprobs = tl.where(keep, dprobs * (1.0 / (1.0 - switches.dropout_p)), 0.0)
    dscores = probs * (dprobs - delta[None, :])
    if switches.softcap is not None:
        dscores = dscores * cap_gradient
    dk = tl.dot(dscores.to(q_tile.dtype), q_tile, dk, input_precision=scoring.PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
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
    MASK_OF_BATCH: tl.constexpr,  # dimensions of the block mask, where there is one
    MASK_OF_HEAD: tl.constexpr,
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
    tables = Tables(switches, num_heads, q_tokens, k_tokens, MASK_OF_BATCH, MASK_OF_HEAD)
    if switches.mask_starts is not None:
        document = 0
        tile, batch_head = busiest_first(tables, group_size, num_batch_heads, heads_per_section, 1, BLOCK_K)
    else:
        document, tile, batch_head = owned_tile(
            k_tokens, switches.cu_seqlens_k, num_docs, num_batch_heads, heads_per_section, BLOCK_K, False
        )
    if document < 0:
        return
    q_row0, num_q = document_rows(document, switches.cu_seqlens_q, q_tokens)
    k_row0, num_k = document_rows(document, switches.cu_seqlens_k, k_tokens)
    padded_row0 = (q_row0 // ROW_PADDING + document) * ROW_PADDING
    if switches.cu_seqlens_k is not None:
        tile = tl.cdiv(num_k, BLOCK_K) - 1 - tile  # the first keys have the most work
    batch = batch_head // num_kv_heads
    kv_head = batch_head - batch * num_kv_heads
    k_start = tile * BLOCK_K
    mask = Mask(num_q, num_k, (window_left, window_right), CAUSAL, LOCAL)

    k_rows = rows_of(k, k_strides, batch, kv_head, k_row0, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, TMA)
    v_rows = rows_of(v, v_strides, batch, kv_head, k_row0, num_k, HEAD_DIM_V, BLOCK_DV, BLOCK_K, TMA)
    k_tile = load_tile(k_rows, k_start, True)
    v_tile = load_tile(v_rows, k_start, True)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    if switches.mask_starts is None:
        full_start, full_end, masked_start, masked_end = seeing_queries(k_start, mask, BLOCK_Q, BLOCK_K)
    for member in range(group_size):
        head = kv_head * group_size + member
        slope_log2 = slope_of(batch if switches.cu_seqlens_q is None else document, head, num_heads, switches)
        q_rows = rows_of(q, q_strides, batch, head, q_row0, num_q, HEAD_DIM, BLOCK_D, BLOCK_Q, TMA)
        do_rows = rows_of(do, do_strides, batch, head, q_row0, num_q, HEAD_DIM_V, BLOCK_DV, BLOCK_Q, TMA)
        q_head = batch * num_heads + head
        row_offset = q_head.to(tl.int64) * q_tokens_padded + padded_row0
        lse_base, delta_base = lse_log2_ptr + row_offset, delta_ptr + row_offset
        scoring = Scoring(mask, scale_log2, slope_log2, switches, q_head, q_row0, PRECISION)
        if switches.mask_starts is not None:
            visits = visits_of(k_start, tables, batch, head, 1)
            full_start, full_end, masked_start, masked_end = 0, visits.full, visits.full, visits.end
        else:
            visits = Visits(None, 0, 0, None, 1)
        if CAUSAL or LOCAL or visits.entries is not None:
            for position in range(masked_start, masked_end, BLOCK_Q):
                q_start = visited(masked_tile(position, full_start, full_end, LOCAL), visits)
                dk, dv = _dkdv_step(
                    k_tile, v_tile, k_start, q_rows, do_rows, lse_base, delta_base, q_start, scoring, dk, dv,
                    True, not EVEN_Q, None if visits.entries is None else bits_at(position, visits),
                )  # fmt: skip
        for position in range(full_start, full_end, BLOCK_Q):
            q_start = visited(position, visits)
            dk, dv = _dkdv_step(
                k_tile, v_tile, k_start, q_rows, do_rows, lse_base, delta_base, q_start, scoring, dk, dv,
                False, not EVEN_Q,
            )  # fmt: skip
    if switches.dropout_seed is not None:
        dv = dv * (1.0 / (1.0 - switches.dropout_p))
    dk *= scale
    dk_rows = rows_of(dk_ptr, dk_strides, batch, kv_head, k_row0, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, False)
    store_tile(dk_rows, k_start, dk)
    dv_rows = rows_of(dv_ptr, dv_strides, batch, kv_head, k_row0, num_k, HEAD_DIM_V, BLOCK_DV, BLOCK_K, False)
    store_tile(dv_rows, k_start, dv)
