"""Backward pass: the launcher, and the kernel that prepares rows for the two main ones.

dK with dV, and dQ, are kernels apart. Each recomputes S and dP, seven products in place of five; in exchange
every gradient has one owner: no atomics, the same bits each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.flash_dkdv import flash_dkdv_kernel
from kernels.flash_dq import flash_dq_kernel
from kernels.launch import dot_precision, heads_per_section, kernel_inputs, kernel_operands, on_device
from kernels.tiles import LOG2_E, head_base, load_tile
from kernels.tuning import Tile, tile_for

# The LSE and delta scratch is padded to a multiple of every BLOCK_Q, so that the main loops load it unmasked.
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
    scale_log2 = scale * LOG2_E.value
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
        flash_dkdv_kernel[(triton.cdiv(num_k, tile.block_k) * batch * num_kv_heads,)](
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
        flash_dq_kernel[(triton.cdiv(num_q, tile.block_q) * batch * num_heads,)](
            *operands, lse_log2, delta, dq, *strides, dq.stride()[:3],
            num_heads, num_heads // num_kv_heads, batch * num_heads, num_q, num_q_padded, num_k,
            section, scale, scale_log2,
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k,
            CAUSAL=causal, EVEN_K=num_k % tile.block_k == 0, PRECISION=precision, TMA=tma,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
