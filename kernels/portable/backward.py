"""Backward pass: the launcher, and the kernel that prepares rows for the two main ones.

dK with dV, and dQ, are kernels apart. Each recomputes S and dP, seven products in place of five; in exchange
every gradient has one owner: no atomics, the same bits each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import (
    addresses_of,
    dot_precision,
    grid_tiles,
    heads_per_section,
    kernel_inputs,
    kernel_operands,
    launch,
    on_device,
    padded,
    switches_of,
    window_bounds,
)
from ..options import Options
from ..replay import Replay, description, known, remember, replay
from .dkdv import flash_dkdv_kernel
from .dq import flash_dq_kernel
from .tiles import LOG2_E, ROW_PADDING, Rows, document_of, document_rows, head_base, load_tile
from .tuning import Tile, launch_fitting, tile_for

_DELTA_ROWS = 64  # memory-bound: any tile that fills the loads' vectors will do


@triton.jit(do_not_specialize=["num_heads", "q_tokens", "q_tokens_padded", "num_docs"])
def _delta_kernel(
    # inputs
    o_ptr,  # (B, Hq, Nq, Dv)
    do_ptr,  # (B, Hq, Nq, Dv)
    lse_ptr,  # (B, Hq, Nq) fp32, natural logarithm
    dlse_ptr,  # (B, Hq, Nq) fp32, or None
    cu_seqlens_ptr,  # (documents + 1,) int32, or None
    # outputs, (B, Hq, q_tokens_padded) fp32
    lse_log2_ptr,
    delta_ptr,
    # layout and sizes
    o_strides,  # (batch, head, token), elements; the last stride is 1
    do_strides,
    num_heads,
    q_tokens,
    q_tokens_padded,
    num_docs,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """One program prepares BLOCK_Q rows of one head for the two main kernels.

    Grid:     q_tokens_padded / BLOCK_Q * B * Hq programs: every row of the scratch is written.
    Math:     delta = rowsum(dO * O) - dLSE (dLSE/dS = P, so LSE's gradient only shifts delta); LSE in base 2.
    Numerics: fp32. Rows without a visible key (LSE -inf) and padding rows get LSE +inf: exp2(s - inf) = 0
              then makes their P and their gradients 0 with no mask in the main loops.
    """
    program = tl.program_id(0)
    tiles = q_tokens_padded // BLOCK_Q
    batch_head = program // tiles
    tile = program - batch_head * tiles
    batch = batch_head // num_heads
    head = batch_head - batch * num_heads
    if cu_seqlens_ptr is not None:
        parts: tl.constexpr = ROW_PADDING // BLOCK_Q
        document, padded_tile = document_of(tile // parts, cu_seqlens_ptr, num_docs, ROW_PADDING)
        row0, num_q = document_rows(document, cu_seqlens_ptr, q_tokens)
        q_start = padded_tile * ROW_PADDING + tile % parts * BLOCK_Q
    else:
        row0 = 0
        num_q = q_tokens
        q_start = tile * BLOCK_Q

    o_base = head_base(o_ptr, o_strides, batch, head, row0, False)
    do_base = head_base(do_ptr, do_strides, batch, head, row0, False)
    o_rows = Rows(o_base, o_strides, batch, head, num_q, HEAD_DIM_V, BLOCK_DV, BLOCK_Q, False)
    do_rows = Rows(do_base, do_strides, batch, head, num_q, HEAD_DIM_V, BLOCK_DV, BLOCK_Q, False)
    o = load_tile(o_rows, q_start, True)
    do = load_tile(do_rows, q_start, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    rows = q_start + tl.arange(0, BLOCK_Q)
    unpadded = batch_head.to(tl.int64) * q_tokens + row0 + rows
    lse = tl.load(lse_ptr + unpadded, mask=rows < num_q, other=-float("inf"))
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + unpadded, mask=rows < num_q, other=0.0)
    padded = batch_head.to(tl.int64) * q_tokens_padded + tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
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
    options: Options,
    dkdv_tile: Tile | None = None,
    dq_tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the backward kernels on the forward's inputs and outputs; `dlse` (B, Hq, Nq) may be None.

    Returns dQ, dK, dV in q's dtype, stored as (B, N, H, D), and dsinks (Hq,) float32, (0,) without sinks.
    The tiles override the table.
    """
    batch, num_heads, num_q, head_dim = q.shape
    num_kv_heads, num_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    dtype = q.dtype
    do, q, k, v, o = kernel_inputs(do.to(dtype), q, k, v, o)
    dq = q.new_empty(batch, num_q, num_heads, head_dim).transpose(1, 2)
    dk = q.new_empty(batch, num_k, num_kv_heads, head_dim).transpose(1, 2)
    dv = q.new_empty(batch, num_k, num_kv_heads, head_dim_v).transpose(1, 2)
    if q.numel() == 0 or k.numel() == 0:
        # all that a row sees is its sink, so LSE is the sink
        dsinks = lse.new_zeros(num_heads) if dlse is None else dlse.to(torch.float32).sum((0, 2))
        dsinks = dsinks if options.sinks is not None else dsinks[:0].clone()
        return dq.zero_().to(dtype), dk.zero_().to(dtype), dv.zero_().to(dtype), dsinks
    padding = ROW_PADDING.value
    num_docs, padded_tiles = grid_tiles(num_q, padding, options.cu_seqlens_q)
    num_q_padded = padded_tiles * padding
    lse_log2, delta = q.new_empty(2, batch, num_heads, num_q_padded, dtype=torch.float32)
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    switches = switches_of(options)

    described = description(options, (dkdv_tile, dq_tile, dlse is None), do, q, k, v, o)
    inputs, rows, optional = addresses_of(q, k, v, do), addresses_of(lse_log2, delta), switches.tensors()
    if known(described) and replay(
        described,
        addresses_of(o, do, lse, dlse, options.cu_seqlens_q, lse_log2, delta),
        [*inputs, *rows, *addresses_of(dk, dv, *optional)],
        [*inputs, *rows, *addresses_of(dq, *optional)],
    ):
        return dq, dk, dv, _sinks_gradient(options.sinks, lse_log2, delta)

    widest = max(head_dim, head_dim_v)
    dkdv_tile = dkdv_tile or tile_for("dkdv", q.device, q.dtype, widest, options)
    dq_tile = dq_tile or tile_for("dq", q.device, q.dtype, widest, options)
    group_size = num_heads // num_kv_heads
    section = heads_per_section(q, k)
    window = window_bounds(options, num_q, num_k)
    shared_constants = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_D": padded(head_dim),
        "BLOCK_DV": padded(head_dim_v),
    }

    def operands_and_constants(tile: Tile, **even: bool):
        assert padding % tile.block_q == 0
        rows_q, rows_k, d, dv = tile.block_q, tile.block_k, padded(head_dim), padded(head_dim_v)
        operands, strides, tma = kernel_operands(
            tile, options, (q, rows_q, d), (k, rows_k, d), (v, rows_k, dv), (do, rows_q, dv)
        )
        constants = shared_constants | {
            "BLOCK_Q": rows_q, "BLOCK_K": rows_k, "CAUSAL": options.causal, "LOCAL": options.local, **even,
            "PRECISION": dot_precision(q), "TMA": tma,
        }  # fmt: skip
        return operands, strides, constants

    def launch_delta() -> Replay | None:
        return launch(
            _delta_kernel, num_q_padded // _DELTA_ROWS * batch * num_heads,
            (
                o, do, lse, dlse, options.cu_seqlens_q, lse_log2, delta, o.stride()[:3], do.stride()[:3],
                num_heads, num_q, num_q_padded, num_docs,
            ),
            {"HEAD_DIM_V": head_dim_v, "BLOCK_DV": padded(head_dim_v), "BLOCK_Q": _DELTA_ROWS}, num_warps=4,
        )  # fmt: skip

    def launch_dkdv(tile: Tile) -> Replay | None:
        even = not options.packed and num_q % tile.block_q == 0
        operands, strides, constants = operands_and_constants(tile, EVEN_Q=even)
        num_tiles = grid_tiles(num_k, tile.block_k, options.cu_seqlens_k)[1]
        return launch(
            flash_dkdv_kernel, num_tiles * batch * num_kv_heads,
            (
                *operands, lse_log2, delta, dk, dv, *strides, dk.stride()[:3], dv.stride()[:3],
                num_heads, group_size, batch * num_kv_heads, num_q, num_q_padded, num_k, num_docs,
                max(section // group_size, 1), *window, options.scale, options.scale * LOG2_E.value, switches,
            ),
            constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    def launch_dq(tile: Tile) -> Replay | None:
        even = not options.packed and num_k % tile.block_k == 0
        operands, strides, constants = operands_and_constants(tile, EVEN_K=even)
        num_tiles = grid_tiles(num_q, tile.block_q, options.cu_seqlens_q)[1]
        return launch(
            flash_dq_kernel, num_tiles * batch * num_heads,
            (
                *operands, lse_log2, delta, dq, *strides, dq.stride()[:3],
                num_heads, group_size, batch * num_heads, num_q, num_q_padded, num_k, num_docs,
                section, *window, options.scale, options.scale * LOG2_E.value, switches,
            ),
            constants, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    with on_device(q):
        launched = launch_delta(), launch_fitting(dkdv_tile, launch_dkdv), launch_fitting(dq_tile, launch_dq)
    remember(described, *launched)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), _sinks_gradient(options.sinks, lse_log2, delta)


def _sinks_gradient(sinks: Tensor | None, lse_log2: Tensor, delta: Tensor) -> Tensor:
    """dsinks (Hq,): a sink is a key whose value is 0, so its dP is 0 and its dS is P * (0 - delta).

    Padding rows have LSE +inf and so P = 0. One sum in a fixed order: the same bits each time.
    """
    if sinks is None:
        return delta.new_empty(0)
    probs = torch.exp2(sinks.to(torch.float32)[:, None] * LOG2_E.value - lse_log2)
    return -(probs * delta).sum((0, 2))
