"""What both engines launch before their main kernels: valid document bounds, and the backward's LSE and delta."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from ..launch import Launch, grid_tiles, next_power_of_2
from .tiles import (
    LOG2_E,
    NOT_SPECIALIZED,
    ROW_PADDING,
    document_of,
    document_rows,
    load_tile,
    longest_first,
    rows_of,
    tile_counts,
)

DELTA_ROWS = 64  # memory-bound: any tile that fills the loads' vectors will do
_DOCUMENTS = 1024  # read at a time


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _documents_kernel(
    cu_seqlens_q,  # (documents + 1,) int32
    cu_seqlens_k,
    starts_q,  # out, (documents + 1,) int32
    starts_k,
    num_docs,
    q_tokens,
    k_tokens,
    BLOCK: tl.constexpr,
):
    """Copy cu_seqlens as the nearest valid packing: it begins at 0, never falls, and ends at the number of tokens.

    Grid:  2 programs, queries and keys.
    Needs: nothing; the values may be anything. The kernels that read the copy can then address no memory outside their
           tensors, whatever was written to cu_seqlens since the host read them.
    """
    if tl.program_id(0) == 0:
        given = cu_seqlens_q
        starts = starts_q
        num_tokens = q_tokens
    else:
        given = cu_seqlens_k
        starts = starts_k
        num_tokens = k_tokens
    highest = 0
    for first in range(0, num_docs + 1, BLOCK):
        documents = first + tl.arange(0, BLOCK)
        inside = (documents > 0) & (documents <= num_docs)
        values = tl.load(given + documents, mask=inside, other=0)
        values = tl.minimum(tl.maximum(values, highest), num_tokens)
        values = tl.associative_scan(values, 0, _larger)
        values = tl.where(documents == 0, 0, values)
        values = tl.where(documents == num_docs, num_tokens, values)
        tl.store(starts + documents, values, mask=documents <= num_docs)
        highest = tl.max(values, 0)


def documents_launches(q: Tensor, k: Tensor, given: dict[str, Tensor]) -> list[Launch]:
    """The launch that fills `starts_q` and `starts_k` (see `option_tensors`); none without documents."""
    if "starts_q" not in given:
        return []
    tensors = [given[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "starts_q", "starts_k")]
    arguments = *tensors, tensors[0].shape[0] - 1, q.shape[2], k.shape[2]
    return [Launch(_documents_kernel, 2, arguments, {"BLOCK": _DOCUMENTS}, {"num_warps": 4})]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _document_tiles_kernel(
    starts,  # (documents + 1,) int32, of queries or of keys
    other_starts,  # of the others
    tiles,  # out, (1 + tiles, 8) int32
    num_docs,
    num_tokens,
    other_tokens,
    BLOCK: tl.constexpr,
):
    """List the tiles of BLOCK packed tokens by `longest_first`. A row holds the tile's number inside its document, the
    document's first token and length, its first token and length among the others (keys for queries, or the reverse),
    and the document. The row before the first holds the number of tiles.

    Grid: as many programs as there can be tiles.
    """
    document, tile = longest_first(tl.program_id(0), starts, num_docs, BLOCK)
    if tl.program_id(0) == 0:
        count = 0
        for first in range(0, num_docs, 128):
            count += tl.sum(tile_counts(first + tl.arange(0, 128), starts, num_docs, BLOCK), 0)
        tl.store(tiles, count)
    if document >= 0:
        first, length = document_rows(document, starts, num_tokens)
        other_first, other_length = document_rows(document, other_starts, other_tokens)
        row = tiles + (1 + tl.program_id(0)) * 8
        tl.store(row, tile)
        tl.store(row + 1, first)
        tl.store(row + 2, length)
        tl.store(row + 3, other_first)
        tl.store(row + 4, other_length)
        tl.store(row + 5, document)


def document_tiles(x: Tensor, block: int, starts: Tensor) -> Tensor:
    """Allocate the list that `document_tiles_launch` fills."""
    return x.new_empty(1 + grid_tiles(x.shape[2], block, starts)[1], 8, dtype=torch.int32)


def document_tiles_launch(
    x: Tensor, others: Tensor, block: int, starts: Tensor, other_starts: Tensor, tiles: Tensor
) -> Launch:
    """The launch that lists the tiles of `block` tokens of packed x (1, H, N, D) in `tiles`; see the kernel."""
    num_docs, num_tiles = grid_tiles(x.shape[2], block, starts)
    arguments = starts, other_starts, tiles, num_docs, x.shape[2], others.shape[2]
    return Launch(_document_tiles_kernel, num_tiles, arguments, {"BLOCK": block}, {"num_warps": 1})


@triton.jit
def in_sixteen_bytes(strides):
    """The same strides as visible multiples of 16 bytes: otherwise a D of 40 or 72 is loaded element by element."""
    return strides[0] // 8 * 8, strides[1] // 8 * 8, strides[2] // 8 * 8


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
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
    turns_ptr,  # (B * Hq * q_tokens_padded / BLOCK_Q + 1,) int32, set to 0, for Hopper; or None
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
    """One program prepares BLOCK_Q rows of one head for the backward's main kernels.

    Grid:     q_tokens_padded / BLOCK_Q * B * Hq programs: every row of the scratch is written.
    Math:     delta = rowsum(dO * O) - dLSE (dLSE/dS = P, so LSE's gradient only shifts delta); LSE in base 2.
    Numerics: fp32. Rows without a visible key (LSE -inf) and padding rows get LSE +inf: exp2(s - inf) = 0
              then makes their P and their gradients 0 with no mask in the main loops. Their delta is 0, too: dLSE
              may not be finite there, and 0 * NaN is NaN.
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
    if turns_ptr is not None:
        gdc_launch_dependents()
        # TMA reads them too, so their strides are multiples of 16 bytes
        o_strides, do_strides = in_sixteen_bytes(o_strides), in_sixteen_bytes(do_strides)

    o_rows = rows_of(o_ptr, o_strides, batch, head, row0, num_q, HEAD_DIM_V, BLOCK_DV, BLOCK_Q, False)
    do_rows = rows_of(do_ptr, do_strides, batch, head, row0, num_q, HEAD_DIM_V, BLOCK_DV, BLOCK_Q, False)
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
    tl.store(delta_ptr + padded, tl.where(lse == -float("inf"), 0.0, delta))
    if turns_ptr is not None:
        tl.store(turns_ptr + program, 0)
        if program == 0:
            tl.store(turns_ptr + tl.num_programs(0), 0)


def delta_launch(
    o: Tensor,
    do: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    lse_log2: Tensor,
    delta: Tensor,
    *,
    starts_q: Tensor | None = None,
    turns: Tensor | None = None,
    **others: Tensor,
) -> Launch:
    """The launch that fills lse_log2 and delta (B * Hq, padded rows), and sets turns to 0. With turns, o and do must be
    addressable by TMA, and the next kernel may start meanwhile (launch_pdl)."""
    batch, num_heads, num_q, head_dim_v = o.shape
    padded_rows = lse_log2.shape[-1]
    arguments = (
        o, do, lse, dlse, starts_q, lse_log2, delta, turns, o.stride()[:3], do.stride()[:3],
        num_heads, num_q, padded_rows, grid_tiles(num_q, DELTA_ROWS, starts_q)[0],
    )  # fmt: skip
    constants = {"HEAD_DIM_V": head_dim_v, "BLOCK_DV": next_power_of_2(head_dim_v), "BLOCK_Q": DELTA_ROWS}
    return Launch(_delta_kernel, padded_rows // DELTA_ROWS * batch * num_heads, arguments, constants, {"num_warps": 4})
