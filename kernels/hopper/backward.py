"""Backward pass for Hopper (sm_90a): one fused kernel (backward_kernel.py) between a pre- and a post-kernel."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ..block_masks import BlockMask
from ..call import Options, key_of
from ..device import num_sms
from ..launch import (
    Launch,
    Plan,
    grid_tiles,
    heads_per_section,
    option_tensors,
    plan_of,
    run,
    tma_ready,
    tokens_first,
    window_bounds,
)
from ..portable.prepare import (
    DELTA_ROWS,
    delta_launch,
    document_tiles,
    document_tiles_launch,
    documents_launches,
    in_sixteen_bytes,
)
from ..portable.tiles import LOG2_E, NOT_SPECIALIZED, ROW_PADDING, document_of, document_rows, head_base
from ..portable.visits import MASK_BLOCK, first_line, mask_constants
from . import tma
from .backward_kernel import hopper_bwd_kernel
from .backward_schedule import BLOCK_K, ROWS, num_adds
from .tma import tile_width

# How many bytes of Q, dO and dQ's sum the heads of a section may take, as a share of the L2 cache, by the width of the
# tiles: NOTES.md
L2_SHARE = {64: 1 / 4, 128: 1 / 2}
_UNTIL_ADDED = tl.constexpr(tma.spin("setp.ne.u32 waits, now, $2; @waits nanosleep.u32 100;"))


@triton.jit
def _wait_for_adds(address, adds):
    """Wait until the int32 at `address` is `adds`, asleep between two looks."""
    code: tl.constexpr = _UNTIL_ADDED
    tl.inline_asm_elementwise(code, "=r,l,r", [address, adds], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _after_kernel(
    dq_sum_ptr,  # (B, Hq, q_tokens_padded * TILE_WIDTH) fp32, each (64, 64) in the order of `in_register_order`
    turns_ptr,  # (B, Hq, q_tokens_padded / ROWS) int32: how many items have added to a tile
    dq_ptr,  # out, (B, Hq, Nq, D)
    cu_seqlens_q,  # (documents + 1,) int32, or None
    cu_seqlens_k,
    dq_strides,  # (batch, head, token)
    num_heads,
    q_tokens,  # Nq; all documents together where packed
    q_tokens_padded,
    k_tokens,
    num_docs,
    window_left,
    window_right,  # 0 in a causal call
    mask_starts,  # of a BlockMask, or None
    scale,
    HEAD_DIM: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    MASK_OF_BATCH: tl.constexpr,  # dimensions of the block mask
    MASK_OF_HEAD: tl.constexpr,
):
    """dQ = scale * its fp32 sum, rounded once; 0 in tiles that see no key, to which nothing was added.

    Needs: to start after all programs of the main kernel have started, because it waits for their adds.
    """
    tiles = q_tokens_padded // ROWS
    batch_head = tl.program_id(0) // tiles
    tile = tl.program_id(0) - batch_head * tiles
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    document = 0
    if cu_seqlens_q is not None:
        in_padding: tl.constexpr = ROW_PADDING // ROWS
        document, padded_tile = document_of(tile // in_padding, cu_seqlens_q, num_docs, ROW_PADDING)
        tile = padded_tile * in_padding + tile % in_padding
    row0, num_q = document_rows(document, cu_seqlens_q, q_tokens)
    rows = tile * ROWS + tl.arange(0, ROWS)
    if mask_starts is not None:
        line = first_line(mask_starts, batch, head, num_heads, q_tokens, k_tokens, MASK_OF_BATCH, MASK_OF_HEAD)
        of_block = line + tile // (MASK_BLOCK // ROWS) * 4
        adds = tl.load(of_block + 2) - tl.load(of_block)  # one by each block of keys that it visits
    else:
        _row0, num_k = document_rows(document, cu_seqlens_k, k_tokens)
        adds = num_adds(tile, num_q, num_k, window_left, window_right)
    _wait_for_adds(turns_ptr + tl.program_id(0), adds)
    cols = tl.arange(0, TILE_WIDTH)
    sums = dq_sum_ptr + tl.program_id(0).to(tl.int64) * ROWS * TILE_WIDTH + tl.arange(0, ROWS * TILE_WIDTH)
    stored = tl.load(sums, mask=adds > 0, other=0.0)  # some tiles of documents' padded rows have no token
    parts = tl.reshape(stored, [TILE_WIDTH // 64, 8, 4, 8, 4, 2, 2])  # half of the columns, n, w, r, c, h, b
    dq = tl.reshape(tl.permute(parts, (2, 5, 3, 0, 1, 4, 6)), [ROWS, TILE_WIDTH])
    dq *= scale
    dq_strides = in_sixteen_bytes(dq_strides)
    dq_base = head_base(dq_ptr, dq_strides, batch, head, row0)
    dq_at = dq_base + rows.to(tl.int64)[:, None] * dq_strides[2] + cols
    tl.store(dq_at, dq.to(dq_ptr.dtype.element_ty), mask=(rows < num_q)[:, None] & (cols < HEAD_DIM))
    if tl.program_id(0) == tl.num_programs(0) - 1:
        gdc_wait()  # the kernel after this one must find the main one ended


def launch_hopper_bwd(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    options: Options,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the backward kernels on the forward's inputs and outputs, for which `takes_hopper`.

    Arguments and results as in the portable `launch_flash_bwd`: dQ, dK, dV in q's dtype, stored as (B, N, H, D), and
    an empty tensor in the place of the sinks' gradient. The same inputs give the same bits. `plan` is the call's where
    it is known.
    """
    batch, num_heads, num_q, head_dim = q.shape
    do = do.to(q.dtype)
    plan = plan or plan_of(key_of(("hopper backward", dlse is None), options, do, q, k, v, o))
    do = do if tma_ready(do) else do.contiguous()
    o = o if tma_ready(o) else o.contiguous()
    dq, dk, dv = (tokens_first(x, head_dim) for x in (q, k, v))
    padding = ROW_PADDING.value if options.packed or options.masked else ROWS  # whole blocks of a mask
    padded_rows = grid_tiles(num_q, padding, options.cu_seqlens_q)[1] * padding
    rows = batch * num_heads * padded_rows
    lse_log2, delta = q.new_empty(2, batch * num_heads, padded_rows, dtype=torch.float32)
    tensors = {
        "do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse.contiguous(),
        "dlse": None if dlse is None else dlse.to(torch.float32).contiguous(),
        "lse_log2": lse_log2, "delta": delta, "turns": q.new_empty(rows // ROWS + 1, dtype=torch.int32),
        "dq_sum": q.new_empty(rows * tile_width(head_dim), dtype=torch.float32), "dq": dq, "dk": dk, "dv": dv,
        **option_tensors(options),
    }  # fmt: skip
    if options.packed:
        tensors["tiles"] = document_tiles(k, BLOCK_K.value, options.cu_seqlens_k)
    run(plan, tensors, partial(_launches, options))
    return dq, dk, dv, q.new_empty(0, dtype=torch.float32)


def _launches(
    options: Options, do, q, k, v, o, lse, dlse, lse_log2, delta, turns, dq_sum,
    dq, dk, dv, **given: Tensor,
) -> list[Launch]:  # fmt: skip
    assert DELTA_ROWS == ROWS, "a turn is of as many rows"
    batch, num_heads, num_q, head_dim = q.shape
    num_kv_heads, num_k, group_size = k.shape[1], k.shape[2], num_heads // k.shape[1]
    tile = tile_width(head_dim)
    num_docs, key_tiles = grid_tiles(num_k, BLOCK_K.value, options.cu_seqlens_k)
    programs = min(key_tiles * batch * num_kv_heads, num_sms(q.device.index))
    # bytes of a KV head: its query heads' Q and dO in 16 bits, and dQ's sum in 32
    section = heads_per_section(q, k, L2_SHARE[tile], bytes_per_kv_head=8 * num_q * head_dim * group_size)
    left, right = window_bounds(options, num_q, num_k)
    window = left, 0 if options.causal else right
    # a soft-cap too: the branch around the mask keeps ptxas from having all of a step's scores in flight
    in_window = options.local or (options.softcap and not options.masked)
    of_mask = mask_constants(options)
    describe = partial(tma.descriptor, packed=options.packed)
    main = (
        describe(q, 64, tile), describe(k, 128, tile), describe(v, 128, tile), describe(do, 64, tile),
        tma.descriptor(lse_log2, 1, 64), tma.descriptor(delta, 1, 64), dq_sum,
        describe(dk, tile, tile), describe(dv, tile, tile), turns,
        num_heads, num_kv_heads, batch * num_kv_heads, num_q, delta.shape[1], num_k, section // group_size,
        options.scale, options.scale * LOG2_E.value, options.softcap or None,
        *(window if in_window else (None, None)), given.get("alibi_slopes"), given.get("tiles"),
        *(given.get(f"mask_{name}") for name in BlockMask._fields[:3]),
    )  # fmt: skip
    after = (
        dq_sum, turns, dq, given.get("starts_q"), given.get("starts_k"), dq.stride()[:3],
        num_heads, num_q, delta.shape[1], num_k, num_docs, *window, given.get("mask_starts"), options.scale,
    )  # fmt: skip
    constants = {"HEAD_DIM": tile, "STAGES": 3, "CAUSAL": options.causal, **of_mask}
    launches = documents_launches(q, k, given)
    if options.packed:
        starts = given["starts_k"], given["starts_q"]
        launches.append(document_tiles_launch(k, q, BLOCK_K.value, *starts, given["tiles"]))
    return [
        *launches,
        delta_launch(o, do, lse, dlse, lse_log2, delta, turns=turns, **given),
        Launch(hopper_bwd_kernel, programs, main, constants, {"num_warps": 4, "launch_pdl": True}),
        Launch(
            _after_kernel, turns.shape[0] - 1, after,
            {"HEAD_DIM": head_dim, "TILE_WIDTH": tile, "ROWS": ROWS, **of_mask},
            {"num_warps": 4, "launch_pdl": True},
        ),
    ]  # fmt: skip
