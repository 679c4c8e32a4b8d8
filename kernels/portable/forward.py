"""Forward pass: one Triton kernel and its launcher."""

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import Options, key_of
from ..launch import (
    Launch,
    Plan,
    dot_precision,
    heads_per_section,
    kernel_inputs,
    next_power_of_2,
    option_tensors,
    plan_of,
    run,
    switches_of,
    tokens_first,
    window_bounds,
)
from .prepare import documents_launches
from .scores import Scoring, kept, logits_of, slope_of
from .tiles import (
    LN_2,
    LOG2_E,
    NOT_SPECIALIZED,
    Mask,
    document_rows,
    load_tile,
    mask_scores,
    masked_tile,
    rows_of,
    store_tile,
)
from .tuning import Tile, fitting, kernel_operands, tile_for
from .visits import Tables, bits_at, is_even, keys_met, mask_constants, owned_queries, tiles_of, visited, where_shown


@triton.jit
def _softmax_step(
    q_tile, q_start, k_rows, v_rows, k_start, scoring, acc, running_max, running_sum,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, bits=None,
):  # fmt: skip
    """Add one tile of keys: online softmax in base 2, everything but the dots' operands in fp32.

    MASKED by the call's mask, or by `bits` of a block mask.
    """
    k_tile = load_tile(k_rows, k_start, RAGGED)
    scores = tl.dot(q_tile, k_tile.T, input_precision=scoring.PRECISION)  # (BLOCK_Q, BLOCK_K), unscaled
    in_q, in_k = tl.arange(0, q_tile.shape[0])[:, None], tl.arange(0, k_tile.shape[0])[None, :]
    rows, cols = q_start + in_q, k_start + in_k
    logits, factor, _ = logits_of(scores, rows, cols, scoring)
    if bits is not None:
        logits = where_shown(logits, bits, q_start, k_start, q_tile.shape[0], k_tile.shape[0])
    elif MASKED:
        logits = mask_scores(logits, rows, cols, scoring.mask)
    # the maximum of raw scores, scaled once a row, leaves one fused multiply-add and one exp2 for each score
    new_max = tl.maximum(running_max, tl.max(logits, 1) * factor)
    if MASKED:
        # a row that has seen no key keeps -inf, and -inf - -inf would be NaN: subtract 0 there
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
    else:
        base = new_max
    probs = tl.exp2(logits * factor - base[:, None])
    rescale = tl.exp2(running_max - base)
    running_sum = running_sum * rescale + tl.sum(probs, 1)
    if scoring.switches.dropout_seed is not None:  # after the sum: dropout acts on normalised probabilities
        probs = tl.where(kept(q_start, in_q, k_start, in_k, scoring), probs, 0.0)
    v_tile = load_tile(v_rows, k_start, RAGGED)
    acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=scoring.PRECISION)
    return acc, new_max, running_sum


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def flash_fwd_kernel(
    # inputs: pointers, or rank-4 TMA descriptors where TMA
    q,  # (B, Hq, Nq, D) fp16 | bf16 | fp32, one dtype
    k,  # (B, Hkv, Nk, D)
    v,  # (B, Hkv, Nk, Dv)
    # outputs
    o_ptr,  # (B, Hq, Nq, Dv), q's dtype
    lse_ptr,  # (B, Hq, Nq) fp32, contiguous, natural logarithm
    # layout and sizes
    q_strides,  # (batch, head, token), elements; the last stride is 1
    k_strides,
    v_strides,
    o_strides,
    num_heads,  # Hq
    group_size,  # Hq // Hkv
    num_batch_heads,  # B * Hq
    q_tokens,  # Nq, any length; all documents together where packed
    k_tokens,  # Nk
    num_docs,
    heads_per_section,
    window_left,  # read only where LOCAL
    window_right,
    scale_log2,  # scale * log2(e), positive
    switches,  # Switches: what is None is compiled away
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM padded to a power of two
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
    """One program writes one (BLOCK_Q, HEAD_DIM_V) tile of O and its LSE; no tile holds two documents.

    Grid:     tiles of queries * B * Hq programs, heaviest causal tiles first (`owned_tile`).
    Math:     O = softmax(scale * Q K^T + mask) V; keys left to right: tiles that need no mask, then those
              that do (the diagonal, a window's edges, the ragged tail). A block mask's list of blocks has the
              same order; BLOCK_Q and BLOCK_K then divide its 128.
    Numerics: scores, running max, running sum and accumulator fp32; P rounded to V's dtype before P V.
    Needs:    head dimensions 16 to 256, scale > 0, Nk > 0; the launcher sees to it.
    Source:   FlashAttention-2, arXiv:2307.08691, algorithm 1.
    """
    tables = Tables(switches, num_heads, q_tokens, k_tokens, MASK_OF_BATCH, MASK_OF_HEAD)
    document, tile, batch_head = owned_queries(tables, num_docs, num_batch_heads, heads_per_section, BLOCK_Q, CAUSAL)
    if document < 0:
        return
    q_row0, num_q = document_rows(document, switches.cu_seqlens_q, q_tokens)
    k_row0, num_k = document_rows(document, switches.cu_seqlens_k, k_tokens)
    batch = batch_head // num_heads
    head = batch_head - batch * num_heads
    kv_head = head // group_size
    q_start = tile * BLOCK_Q
    mask = Mask(num_q, num_k, (window_left, window_right), CAUSAL, LOCAL)
    slope_log2 = slope_of(batch if switches.cu_seqlens_q is None else document, head, num_heads, switches)
    scoring = Scoring(mask, scale_log2, slope_log2, switches, batch_head, q_row0, PRECISION)

    q_rows = rows_of(q, q_strides, batch, head, q_row0, num_q, HEAD_DIM, BLOCK_D, BLOCK_Q, TMA)
    k_rows = rows_of(k, k_strides, batch, kv_head, k_row0, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, TMA)
    v_rows = rows_of(v, v_strides, batch, kv_head, k_row0, num_k, HEAD_DIM_V, BLOCK_DV, BLOCK_K, TMA)
    q_tile = load_tile(q_rows, q_start, True)

    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    if switches.sinks is not None:  # a key without a value: it is in the maximum and in the sum from the start
        sink_log2 = tl.load(switches.sinks + head) * LOG2_E
        running_max = tl.zeros([BLOCK_Q], tl.float32) + sink_log2
        running_sum = tl.full([BLOCK_Q], 1.0, tl.float32)
    else:
        running_max = tl.full([BLOCK_Q], -float("inf"), tl.float32)
        running_sum = tl.zeros([BLOCK_Q], tl.float32)
    visits, full_start, full_end, masked_start, masked_end = keys_met(
        q_start, mask, tables, batch, head, BLOCK_Q, BLOCK_K
    )
    for position in range(full_start, full_end, BLOCK_K):
        k_start = visited(position, visits)
        acc, running_max, running_sum = _softmax_step(
            q_tile, q_start, k_rows, v_rows, k_start, scoring, acc, running_max, running_sum, False, False
        )
    if CAUSAL or LOCAL or not EVEN_K or visits.entries is not None:
        for position in range(masked_start, masked_end, BLOCK_K):
            k_start = visited(masked_tile(position, full_start, full_end, LOCAL), visits)
            acc, running_max, running_sum = _softmax_step(
                q_tile, q_start, k_rows, v_rows, k_start, scoring, acc, running_max, running_sum, True, not EVEN_K,
                None if visits.entries is None else bits_at(position, visits),
            )  # fmt: skip

    # a row without a visible key has sum 0 and max -inf: O = 0 / 1 and LSE = -inf + log2(1) = -inf
    denominator = tl.where(running_sum == 0.0, 1.0, running_sum)
    if switches.dropout_seed is not None:
        acc = acc * (1.0 / (denominator * (1.0 - switches.dropout_p)))[:, None]
    else:
        acc = acc * (1.0 / denominator)[:, None]
    o_rows = rows_of(o_ptr, o_strides, batch, head, q_row0, num_q, HEAD_DIM_V, BLOCK_DV, BLOCK_Q, False)
    store_tile(o_rows, q_start, acc)
    rows = q_start + tl.arange(0, BLOCK_Q)
    lse = (running_max + tl.log2(denominator)) * LN_2
    tl.store(lse_ptr + batch_head.to(tl.int64) * q_tokens + q_row0 + rows, lse, mask=rows < num_q)


def launch_flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, options: Options, tile: Tile | None = None, plan: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel. q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv), already checked;
    options.scale > 0; packed documents have B = 1.

    Returns O (B, Hq, Nq, Dv), stored as (B, Nq, Hq, Dv), and LSE (B, Hq, Nq) float32. `tile` overrides the table.
    `plan` is the call's where it is known.
    """
    dtype = q.dtype
    plan = plan or plan_of(key_of(("flash forward", tile), options, q, k, v))
    q, k, v = kernel_inputs(q, k, v)
    o, lse = tokens_first(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    if o.numel() == 0 or k.numel() == 0:
        sinks = -math.inf if options.sinks is None else options.sinks[None, :, None]
        return o.zero_().to(dtype), lse.copy_(torch.as_tensor(sinks).expand_as(lse))
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, **option_tensors(options)}
    run(plan, tensors, partial(_launches, options, tile))
    return o.to(dtype), lse


def _launches(
    options: Options, tile: Tile | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, **given: Tensor
) -> list[Launch]:
    batch, num_heads, num_q, head_dim = q.shape
    num_kv_heads, num_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    block_d, block_dv = next_power_of_2(head_dim), next_power_of_2(head_dim_v)

    def launch(tile: Tile) -> Launch:
        operands, strides, tma = kernel_operands(
            tile, options, (q, tile.block_q, block_d), (k, tile.block_k, block_d), (v, tile.block_k, block_dv)
        )
        num_docs, num_tiles = tiles_of(options, num_q, tile.block_q, options.cu_seqlens_q)
        arguments = (
            *operands, o, lse, *strides, o.stride()[:3],
            num_heads, num_heads // num_kv_heads, batch * num_heads, num_q, num_k, num_docs, heads_per_section(q, k),
            *window_bounds(options, num_q, num_k), options.scale * LOG2_E.value, switches_of(options, given),
        )  # fmt: skip
        constants = {
            "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v, "BLOCK_D": block_d, "BLOCK_DV": block_dv,
            "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k, "CAUSAL": options.causal, "LOCAL": options.local,
            "EVEN_K": is_even(options, num_k, tile.block_k), "PRECISION": dot_precision(q), "TMA": tma,
            **mask_constants(options),
        }  # fmt: skip
        return Launch(flash_fwd_kernel, num_tiles * batch * num_heads, arguments, constants, tile.how)

    tile = tile or tile_for("fwd", q.device, q.dtype, max(head_dim, head_dim_v), options)
    return [*documents_launches(q, k, given), fitting(tile, launch)]
