"""Backward pass for Hopper (sm_90a): one fused kernel (backward_kernel.py) between a pre- and a post-kernel."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import l2_bytes, num_sms
from ..launch import addresses_of, launch, on_device
from ..options import Options
from ..replay import description, known, remember, replay
from . import tma
from .backward_kernel import hopper_bwd_kernel
from .backward_roles import BLOCK_K, ROWS
from .forward import LOG2_E, LOG2_E_CONSTANT
from .when import addressable, tile_width


@triton.jit
def _in_sixteen_bytes(strides):
    """The same strides, visibly multiples of 16 bytes: without it a D of 40 or 72 is loaded element by element."""
    return strides[0] // 8 * 8, strides[1] // 8 * 8, strides[2] // 8 * 8


@triton.jit(do_not_specialize=["num_heads", "num_q", "num_q_padded"])
def _before_kernel(
    o_ptr,  # (B, Hq, Nq, D)
    do_ptr,  # (B, Hq, Nq, D)
    lse_ptr,  # (B, Hq, Nq) fp32, natural logarithm
    dlse_ptr,  # (B, Hq, Nq) fp32, or None
    lse_log2_ptr,  # out, (B, Hq, num_q_padded) fp32
    delta_ptr,  # out, (B, Hq, num_q_padded) fp32
    turns_ptr,  # out, (B, Hq, num_q_padded / ROWS) int32: zeros
    o_strides,  # (batch, head, token)
    do_strides,
    num_heads,
    num_q,
    num_q_padded,
    HEAD_DIM: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """delta = rowsum(dO * O) - dLSE, LSE in base 2, and zeros where the turns are counted.

    Rows without a visible key (LSE -inf) and rows past Nq get LSE +inf, so that exp2(s - inf) = 0 makes their P
    and their gradients 0 with no mask in the main loop.
    """
    tiles = num_q_padded // ROWS
    batch_head = tl.program_id(0) // tiles
    rows = (tl.program_id(0) - batch_head * tiles) * ROWS + tl.arange(0, ROWS)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    cols = tl.arange(0, TILE_WIDTH)
    inside = rows < num_q
    loaded = inside[:, None] & (cols < HEAD_DIM)
    o_strides, do_strides = _in_sixteen_bytes(o_strides), _in_sixteen_bytes(do_strides)
    o_at = o_ptr + batch * o_strides[0] + head * o_strides[1] + rows.to(tl.int64)[:, None] * o_strides[2] + cols
    do_at = do_ptr + batch * do_strides[0] + head * do_strides[1] + rows.to(tl.int64)[:, None] * do_strides[2] + cols
    o = tl.load(o_at, mask=loaded, other=0.0).to(tl.float32)
    do = tl.load(do_at, mask=loaded, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    lse = tl.load(lse_ptr + batch_head.to(tl.int64) * num_q + rows, mask=inside, other=-float("inf"))
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + batch_head.to(tl.int64) * num_q + rows, mask=inside, other=0.0)
    padded = batch_head.to(tl.int64) * num_q_padded + rows
    tl.store(lse_log2_ptr + padded, tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E_CONSTANT))
    tl.store(delta_ptr + padded, delta)
    tl.store(turns_ptr + tl.program_id(0), 0)


@triton.jit(do_not_specialize=["num_heads", "num_q", "num_q_padded", "first_seeing"])
def _after_kernel(
    dq_sum_ptr,  # (B, Hq, num_q_padded * TILE_WIDTH) fp32, each (64, 64) in the order of `in_register_order`
    dq_ptr,  # out, (B, Hq, Nq, D)
    dq_strides,  # (batch, head, token)
    num_heads,
    num_q,
    num_q_padded,
    first_seeing,  # tiles before this row see no key: nothing was stored for them
    scale,
    HEAD_DIM: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dQ = scale * its fp32 sum, rounded once."""
    tiles = num_q_padded // ROWS
    batch_head = tl.program_id(0) // tiles
    rows = (tl.program_id(0) - batch_head * tiles) * ROWS + tl.arange(0, ROWS)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    cols = tl.arange(0, TILE_WIDTH)
    stored = tl.load(dq_sum_ptr + tl.program_id(0).to(tl.int64) * ROWS * TILE_WIDTH + tl.arange(0, ROWS * TILE_WIDTH))
    parts = tl.reshape(stored, [TILE_WIDTH // 64, 8, 4, 8, 4, 2, 2])  # half of the columns, n, w, r, c, h, b
    dq = tl.reshape(tl.permute(parts, (2, 5, 3, 0, 1, 4, 6)), [ROWS, TILE_WIDTH])
    dq = tl.where((rows >= first_seeing)[:, None], dq * scale, 0.0)
    dq_strides = _in_sixteen_bytes(dq_strides)
    dq_at = dq_ptr + batch * dq_strides[0] + head * dq_strides[1] + rows.to(tl.int64)[:, None] * dq_strides[2] + cols
    tl.store(dq_at, dq.to(dq_ptr.dtype.element_ty), mask=(rows < num_q)[:, None] & (cols < HEAD_DIM))


@dataclass(frozen=True)
class BackwardPlan:
    """How the main kernel runs: one program for each SM or for each item, and how many bytes of Q, dO and dQ's sum
    the heads of a section may take, as a share of the L2 cache."""

    persistent: bool
    l2_share: float


def plan_for(head_dim: int, causal: bool, num_q: int) -> BackwardPlan:
    """The fastest or within 3 % of it at 1,024, 4,096 and 16,384 tokens (NOTES.md): one H200, torch 2.11.0,
    triton 3.6.0, 2026-11-21, 16,384 tokens a call, hidden size 2,048."""
    if head_dim == 128:
        return BackwardPlan(persistent=False, l2_share=1 / 4 if num_q <= 1024 else 1 / 2)
    if causal:
        return BackwardPlan(persistent=num_q <= 2048, l2_share=5 / 8 if num_q <= 2048 else 1 / 4)
    return BackwardPlan(persistent=True, l2_share=1 / 4)


def _heads_per_section(q: Tensor, num_kv_heads: int, l2_share: float) -> int:
    """KV heads whose query heads' Q, dO (16 bit) and dQ (32 bit) fill at most this share of L2: a power of two."""
    batch, num_heads, num_q, head_dim = q.shape
    bytes_per_kv_head = 8 * num_q * head_dim * (num_heads // num_kv_heads)
    fitting = int(l2_bytes(q.device.index) * l2_share) // bytes_per_kv_head
    return min(1 << max(fitting.bit_length() - 1, 0), batch * num_kv_heads)


def launch_hopper_bwd(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    options: Options,
    plan: BackwardPlan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the backward kernels on the forward's inputs and outputs, not refused by `hopper_unsupported_reason`.

    Arguments and results as of the portable `launch_flash_bwd`: dQ, dK, dV in q's dtype, stored as (B, N, H, D), and
    an empty tensor in the place of the sinks' gradient. The same inputs give the same bits. `plan` overrides the
    choice.
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
    tile = tile_width(head_dim)
    dq_sum = q.new_empty(rows * tile, dtype=torch.float32)
    dsinks = q.new_empty(0, dtype=torch.float32)

    described = description(options, ("hopper backward", dlse is None, plan), do, q, k, v, o)
    if known(described) and replay(
        described,
        addresses_of(o, do, lse, dlse, lse_log2, delta, turns),
        addresses_of(q, k, v, do, lse_log2, delta, dq_sum, dk, dv, turns),
        addresses_of(dq_sum, dq),
    ):
        return dq, dk, dv, dsinks

    plan = plan or plan_for(tile, options.causal, num_q)
    items = -(-num_k // BLOCK_K.value) * batch * num_kv_heads
    programs = min(items, num_sms(q.device.index)) if plan.persistent else items
    constants = {"HEAD_DIM": tile, "STAGES": 3, "CAUSAL": options.causal}
    memory_bound = {"HEAD_DIM": head_dim, "TILE_WIDTH": tile, "ROWS": ROWS}
    with on_device(q):
        before = launch(
            _before_kernel, rows // ROWS,
            (o, do, lse, dlse, lse_log2, delta, turns, o.stride()[:3], do.stride()[:3], num_heads, num_q, num_q_padded),
            memory_bound, num_warps=4,
        )  # fmt: skip
        main = launch(
            hopper_bwd_kernel, programs,
            (
                tma.descriptor(q, 64, tile), tma.descriptor(k, 128, tile), tma.descriptor(v, 128, tile),
                tma.descriptor(do, 64, tile), tma.row_descriptor(lse_log2, 64), tma.row_descriptor(delta, 64), dq_sum,
                tma.descriptor(dk, tile, tile), tma.descriptor(dv, tile, tile), turns,
                num_heads, num_kv_heads, batch * num_kv_heads, num_q, num_q_padded, num_k,
                _heads_per_section(q, num_kv_heads, plan.l2_share), options.scale, options.scale * LOG2_E,
            ),
            constants, num_warps=4, launch_cooperative_grid=plan.persistent,
        )  # fmt: skip
        first_seeing = max(num_q - num_k, 0) if options.causal else 0
        after = launch(
            _after_kernel, rows // ROWS,
            (
                dq_sum, dq, dq.stride()[:3], num_heads, num_q, num_q_padded, first_seeing // ROWS * ROWS,
                options.scale,
            ),
            memory_bound, num_warps=4,
        )  # fmt: skip
    remember(described, before, main, after)
    return dq, dk, dv, dsinks
