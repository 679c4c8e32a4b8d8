"""Forward pass: one Triton kernel and its launcher."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import dot_precision, heads_per_section, kernel_inputs, kernel_operands, on_device
from kernels.tiles import (
    LN_2,
    LOG2_E,
    head_base,
    load_tile,
    mask_scores,
    program_tile,
    store_tile,
    visible_keys,
)
from kernels.tuning import Tile, tile_for


@triton.jit
def _softmax_step(
    q_tile,
    acc,
    running_max,
    running_sum,
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
    """Take in one tile of keys: online softmax in base 2, everything but the dots' operands in fp32."""
    k_tile = load_tile(k, k_strides, batch, kv_head, k_start, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, RAGGED, TMA)
    scores = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)  # (BLOCK_Q, BLOCK_K), unscaled
    if MASKED:
        rows = q_start + tl.arange(0, BLOCK_Q)[:, None]
        cols = k_start + tl.arange(0, BLOCK_K)[None, :]
        scores = mask_scores(scores, rows, cols, num_q, num_k, CAUSAL)
    # the maximum of raw scores, scaled once a row, leaves one fused multiply-add and one exp2 for each score
    new_max = tl.maximum(running_max, tl.max(scores, 1) * scale_log2)
    if MASKED:
        # a row that has seen no key keeps -inf, and -inf - -inf would be NaN: subtract 0 there
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
    else:
        base = new_max
    probs = tl.exp2(scores * scale_log2 - base[:, None])
    rescale = tl.exp2(running_max - base)
    running_sum = running_sum * rescale + tl.sum(probs, 1)
    v_tile = load_tile(v, v_strides, batch, kv_head, k_start, num_k, HEAD_DIM, BLOCK_D, BLOCK_K, RAGGED, TMA)
    acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
    return acc, new_max, running_sum


@triton.jit(do_not_specialize=["num_heads", "num_q", "num_k", "heads_per_section"])
def flash_fwd_kernel(
    # inputs: pointers, or rank-4 TMA descriptors where TMA
    q,  # (B, Hq, Nq, D) fp16 | bf16 | fp32, one dtype
    k,  # (B, Hkv, Nk, D)
    v,  # (B, Hkv, Nk, D)
    # outputs
    o_ptr,  # (B, Hq, Nq, D), q's dtype
    lse_ptr,  # (B, Hq, Nq) fp32, contiguous, natural logarithm
    # layout and sizes
    q_strides,  # (batch, head, token), elements; the last stride is 1
    k_strides,
    v_strides,
    o_strides,
    num_heads,  # Hq
    group_size,  # Hq // Hkv
    num_batch_heads,  # B * Hq
    num_q,  # Nq, any length
    num_k,  # Nk, any length
    heads_per_section,
    scale_log2,  # scale * log2(e), positive
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM padded to a power of two
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN_K: tl.constexpr,  # Nk is a multiple of BLOCK_K
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """One program writes one (BLOCK_Q, HEAD_DIM) tile of O and its LSE.

    Grid:     cdiv(Nq, BLOCK_Q) * B * Hq programs, heaviest causal tiles first (`program_tile`).
    Math:     O = softmax(scale * Q K^T + mask) V; keys left to right: tiles that need no mask, then the
              diagonal and the ragged tail.
    Numerics: scores, running max, running sum and accumulator fp32; P rounded to V's dtype before P V.
    Needs:    HEAD_DIM 16 to 256, scale > 0, Nk > 0; the launcher sees to it.
    Source:   FlashAttention-2, arXiv:2307.08691, algorithm 1.
    """
    tile, batch_head = program_tile(tl.cdiv(num_q, BLOCK_Q), num_batch_heads, heads_per_section, CAUSAL)
    batch = batch_head // num_heads
    head = batch_head - batch * num_heads
    kv_head = head // group_size
    q_start = tile * BLOCK_Q

    q_base = head_base(q, q_strides, batch, head, TMA)
    k_base = head_base(k, k_strides, batch, kv_head, TMA)
    v_base = head_base(v, v_strides, batch, kv_head, TMA)
    q_tile = load_tile(q_base, q_strides, batch, head, q_start, num_q, HEAD_DIM, BLOCK_D, BLOCK_Q, True, TMA)

    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    running_max = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_Q], tl.float32)
    full_end, end = visible_keys(q_start, num_q, num_k, CAUSAL, BLOCK_Q, BLOCK_K)
    for k_start in range(0, full_end, BLOCK_K):
        acc, running_max, running_sum = _softmax_step(
            q_tile, acc, running_max, running_sum, k_base, v_base, k_strides, v_strides, batch, kv_head,
            q_start, k_start, num_q, num_k, scale_log2, False, CAUSAL, False,
            HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, PRECISION, TMA,
        )  # fmt: skip
    if CAUSAL or not EVEN_K:
        for k_start in range(full_end, end, BLOCK_K):
            acc, running_max, running_sum = _softmax_step(
                q_tile, acc, running_max, running_sum, k_base, v_base, k_strides, v_strides, batch, kv_head,
                q_start, k_start, num_q, num_k, scale_log2, True, CAUSAL, not EVEN_K,
                HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, PRECISION, TMA,
            )  # fmt: skip

    # a row without a visible key has sum 0 and max -inf: O = 0 / 1 and LSE = -inf + log2(1) = -inf
    denominator = tl.where(running_sum == 0.0, 1.0, running_sum)
    acc = acc * (1.0 / denominator)[:, None]
    store_tile(o_ptr, o_strides, batch, head, q_start, num_q, acc, HEAD_DIM, BLOCK_D, BLOCK_Q)
    rows = q_start + tl.arange(0, BLOCK_Q)
    lse = (running_max + tl.log2(denominator)) * LN_2
    tl.store(lse_ptr + batch_head.to(tl.int64) * num_q + rows, lse, mask=rows < num_q)


def launch_flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel. q (B, Hq, Nq, D), k and v (B, Hkv, Nk, D), already checked; scale > 0.

    Returns O (B, Hq, Nq, D), stored as (B, Nq, Hq, D), and LSE (B, Hq, Nq) float32. `tile` overrides the
    table.
    """
    batch, num_heads, num_q, head_dim = q.shape
    num_kv_heads, num_k = k.shape[1], k.shape[2]
    dtype = q.dtype
    q, k, v = kernel_inputs(q, k, v)
    o = q.new_empty(batch, num_q, num_heads, head_dim).transpose(1, 2)
    lse = q.new_empty(batch, num_heads, num_q, dtype=torch.float32)
    if o.numel() == 0 or num_k == 0:
        return o.zero_().to(dtype), lse.fill_(-math.inf)
    if tile is None:
        tile = tile_for("fwd", q.device, q.dtype, head_dim, causal)
    block_d = triton.next_power_of_2(head_dim)
    operands, strides, tma = kernel_operands(tile, block_d, (q, tile.block_q), (k, tile.block_k), (v, tile.block_k))
    grid = (triton.cdiv(num_q, tile.block_q) * batch * num_heads,)
    with on_device(q):
        flash_fwd_kernel[grid](
            *operands, o, lse, *strides, o.stride()[:3],
            num_heads, num_heads // num_kv_heads, batch * num_heads, num_q, num_k,
            heads_per_section(q, k), scale * LOG2_E.value,
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k,
            CAUSAL=causal, EVEN_K=num_k % tile.block_k == 0, PRECISION=dot_precision(q), TMA=tma,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return o.to(dtype), lse
