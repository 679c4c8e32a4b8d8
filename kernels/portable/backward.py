"""Backward pass of the portable engine: the launcher.

dK with dV, and dQ, have separate kernels. Each recomputes S and dP, which makes seven products instead of five;
in exchange every gradient has one owner: no atomics, the same bits each time.
"""

import math
from functools import partial

import torch
from torch import Tensor

from ..call import Options, key_of
from ..launch import (
    Launch,
    Plan,
    dot_precision,
    grid_tiles,
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
from .dkdv import flash_dkdv_kernel
from .dq import flash_dq_kernel
from .prepare import delta_launch, documents_launches
from .tiles import LOG2_E, ROW_PADDING
from .tuning import Tile, fitting, kernel_operands, tile_for
from .visits import is_even, mask_constants, tiles_of


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
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the backward kernels on the forward's inputs and outputs; `dlse` (B, Hq, Nq) may be None.

    Returns dQ, dK, dV in q's dtype, stored as (B, N, H, D), and dsinks (Hq,) float32, (0,) without sinks.
    The tiles override the table. `plan` is the call's where it is known.
    """
    dtype, num_heads = q.dtype, q.shape[1]
    do = do.to(dtype)
    plan = plan or plan_of(key_of(("flash backward", dkdv_tile, dq_tile, dlse is None), options, do, q, k, v, o))
    do, q, k, v, o = kernel_inputs(do, q, k, v, o)
    dq, dk, dv = tokens_first(q, q.shape[3]), tokens_first(k, k.shape[3]), tokens_first(v, v.shape[3])
    if q.numel() == 0 or k.numel() == 0:
        # a row sees only its sink, so LSE is the sink, where that is above -inf
        dsinks = lse.new_zeros(0 if options.sinks is None else num_heads)
        if options.sinks is not None and dlse is not None:
            seen = options.sinks.to(torch.float32) > -math.inf
            dsinks = torch.where(seen, dlse.to(torch.float32).sum((0, 2)), dsinks)
        return dq.zero_().to(dtype), dk.zero_().to(dtype), dv.zero_().to(dtype), dsinks
    padded_rows = grid_tiles(q.shape[2], ROW_PADDING.value, options.cu_seqlens_q)[1] * ROW_PADDING.value
    lse_log2, delta = q.new_empty(2, q.shape[0], num_heads, padded_rows, dtype=torch.float32)
    tensors = {
        "do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse.contiguous(),
        "dlse": None if dlse is None else dlse.to(torch.float32).contiguous(),
        "lse_log2": lse_log2, "delta": delta, "dq": dq, "dk": dk, "dv": dv, **option_tensors(options),
    }  # fmt: skip
    run(plan, tensors, partial(_launches, options, dkdv_tile, dq_tile))
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), _sinks_gradient(options.sinks, lse_log2, delta)


def _launches(
    options: Options, dkdv_tile: Tile | None, dq_tile: Tile | None, do, q, k, v, o, lse, dlse, lse_log2, delta,
    dq, dk, dv, **given: Tensor,
) -> list[Launch]:  # fmt: skip
    batch, num_heads, num_q, head_dim = q.shape
    num_kv_heads, num_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group_size, section = num_heads // num_kv_heads, heads_per_section(q, k)
    padded_rows, switches = delta.shape[2], switches_of(options, given)
    scales = *window_bounds(options, num_q, num_k), options.scale, options.scale * LOG2_E.value

    def operands_and_constants(tile: Tile, **even: bool):
        assert ROW_PADDING.value % tile.block_q == 0
        rows_q, rows_k, d, dv = tile.block_q, tile.block_k, next_power_of_2(head_dim), next_power_of_2(head_dim_v)
        operands, strides, tma = kernel_operands(
            tile, options, (q, rows_q, d), (k, rows_k, d), (v, rows_k, dv), (do, rows_q, dv)
        )
        constants = {
            "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v, "BLOCK_D": d, "BLOCK_DV": dv,
            "BLOCK_Q": rows_q, "BLOCK_K": rows_k, "CAUSAL": options.causal, "LOCAL": options.local, **even,
            "PRECISION": dot_precision(q), "TMA": tma, **mask_constants(options),
        }  # fmt: skip
        return operands, strides, constants

    def launch_dkdv(tile: Tile) -> Launch:
        even = is_even(options, num_q, tile.block_q)
        operands, strides, constants = operands_and_constants(tile, EVEN_Q=even)
        num_docs, num_tiles = tiles_of(options, num_k, tile.block_k, options.cu_seqlens_k)
        arguments = (
            *operands, lse_log2, delta, dk, dv, *strides, dk.stride()[:3], dv.stride()[:3],
            num_heads, group_size, batch * num_kv_heads, num_q, padded_rows, num_k, num_docs,
            max(section // group_size, 1), *scales, switches,
        )  # fmt: skip
        return Launch(flash_dkdv_kernel, num_tiles * batch * num_kv_heads, arguments, constants, tile.how)

    def launch_dq(tile: Tile) -> Launch:
        even = is_even(options, num_k, tile.block_k)
        operands, strides, constants = operands_and_constants(tile, EVEN_K=even)
        num_docs, num_tiles = tiles_of(options, num_q, tile.block_q, options.cu_seqlens_q)
        arguments = (
            *operands, lse_log2, delta, dq, *strides, dq.stride()[:3],
            num_heads, group_size, batch * num_heads, num_q, padded_rows, num_k, num_docs, section, *scales, switches,
        )  # fmt: skip
        return Launch(flash_dq_kernel, num_tiles * batch * num_heads, arguments, constants, tile.how)

    widest = max(head_dim, head_dim_v)
    dkdv_tile = dkdv_tile or tile_for("dkdv", q.device, q.dtype, widest, options)
    dq_tile = dq_tile or tile_for("dq", q.device, q.dtype, widest, options)
    return [
        *documents_launches(q, k, given),
        delta_launch(o, do, lse, dlse, lse_log2, delta, **given),
        fitting(dkdv_tile, launch_dkdv),
        fitting(dq_tile, launch_dq),
    ]


def _sinks_gradient(sinks: Tensor | None, lse_log2: Tensor, delta: Tensor) -> Tensor:
    """dsinks (Hq,): a sink is a key whose value is 0, so its dP is 0 and its dS is P * (0 - delta).

    Padding rows have LSE +inf and so P = 0. One sum in a fixed order: the same bits each time.
    """
    if sinks is None:
        return delta.new_empty(0)
    probs = torch.exp2(sinks.to(torch.float32)[:, None] * LOG2_E.value - lse_log2)
    return -(probs * delta).sum((0, 2))
