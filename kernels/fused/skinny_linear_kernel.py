"""The Triton kernels of skinny_linear.py: a program owns some outputs and loops over all of their weights.

Bound by memory: each weight is read once; every program reads the rows, from the L2 cache. With wide rows a program
therefore handles a part of the columns, and the last program to arrive adds an output's parts. A launch is not short
compared with such a product. So on Hopper and later a kernel starts while its predecessor ends; the kernel of a single
row issues the loads of its first weights, which no kernel writes, and only then waits (programmatic dependent launch).
Starting sooner, loading weights into the L2 cache meanwhile, or starting behind every product (`Tile.lets_next`) made
a step of 64 rows longer (hopper/NOTES.md).
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..device import capability, interpreting
from ..launch import Launch, dot_precision, plan_of, run
from ..portable.split import last_of

LONG = 2048  # columns
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


class Tile(NamedTuple):
    """How a product is cut: a program computes block_m rows by block_n outputs, block_k columns at a time. Where
    `parts` is more than one, it sums over one of that many parts of the columns.

    lets_next: whether the next kernel may start while this one ends. Its programs may then all be placed on the
        multiprocessors that this one leaves idle, three on each.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    parts: int = 1
    lets_next: bool = True


def tile_for(num_rows: int, num_outputs: int, width: int, plain: bool) -> Tile:
    """The fastest of a sweep on an H200 over GPT-2 124M's products (bf16, cold weights, in a CUDA graph)."""
    if num_rows == 1:
        return Tile(1, 4, 1024, 4, 1)
    if plain and width >= LONG:
        return Tile(64, 16, 128, 4, 4, parts=2)
    if num_outputs < 2048:  # few programs: rows are shared among them too
        few = num_rows <= 16
        return Tile(16 if few else 32, 16, 256, 4, 3, lets_next=few)
    # 64 rows, however few there are: wgmma needs 64, and without it few rows take longer
    return Tile(64, 32, 64, 4, 5) if num_outputs < 16384 else Tile(64, 128, 64, 4, 3)


@triton.jit
def _weights(weight, rows, num_outputs, first, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr = 1):
    """Load the columns first .. first + BLOCK_K of some rows of the weight."""
    k = first + tl.arange(0, BLOCK_K)
    mask = (rows < num_outputs)[:, None] & (k < K)[None, :]
    if K % (PARTS * BLOCK_K) == 0:
        mask = (rows < num_outputs)[:, None]
    at = weight + rows.to(tl.int64)[:, None] * K + k[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")  # not read again in this step


@triton.jit
def _outputs(program, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """A program's BLOCK_N outputs or, with heads, the first ones of BLOCK_N pairs."""
    outputs = program * BLOCK_N + tl.arange(0, BLOCK_N)
    if HEAD_DIM > 0:
        outputs += outputs // (HEAD_DIM // 2) * (HEAD_DIM // 2)
    return outputs


@triton.jit
def _finish(acc, other, squares, norm_eps, K: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr):
    """What follows the product, all in fp32; squares: the sum of x^2 of each row, as wide as acc."""
    if NORM:
        scale = tl.rsqrt(squares / K + norm_eps)
        acc *= scale
        other *= scale
    if ACTIVATION == "gelu":
        acc *= tl.sigmoid(2.0 * SQRT_2_OVER_PI * (acc + 0.044715 * acc * acc * acc))  # (1 + tanh(y)) / 2 is a sigmoid
    elif ACTIVATION == "relu2":
        acc = tl.maximum(acc, 0.0) * tl.maximum(acc, 0.0)
    elif ACTIVATION == "swiglu":
        acc = acc * tl.sigmoid(acc) * other
    return acc, other


@triton.jit
def _place(positions, rows, num_rows, num_positions):
    """Return each row's index in the tables of rotary positions."""
    if positions is not None:
        rows = tl.load(positions + rows, mask=rows < num_rows, other=0)
        rows = tl.minimum(tl.maximum(rows, 0), num_positions - 1).to(tl.int32)
    return rows


@triton.jit
def _store(
    acc, other, rows, place, outputs, residual, out, cos, sin, num_rows, num_outputs, turned, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Store acc and, with heads, the other one of each pair, turned to the row's place; rows and outputs broadcast."""
    at = rows.to(tl.int64) * num_outputs + outputs
    real = (rows < num_rows) & (outputs < num_outputs)
    if HEAD_DIM > 0:
        table = place * HEAD_DIM + outputs % HEAD_DIM
        turns = real & (outputs < turned)
        c = tl.load(cos + table, mask=turns, other=1.0)
        s = tl.load(sin + table + HEAD_DIM // 2, mask=turns, other=0.0)
        acc, other = acc * c - other * s, other * c + acc * s
        tl.store(out + at + HEAD_DIM // 2, other.to(out.dtype.element_ty), mask=real)
    if residual is not None:
        acc += tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=real)


@triton.jit
def _summed(acc, block, part, sums, turns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr):
    """Sum a block's parts in their order, in the last program to arrive: (sum, whether this program is the last)."""
    at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sums += block * (PARTS * BLOCK_M * BLOCK_N)
    tl.store(sums + part * (BLOCK_M * BLOCK_N) + at, acc)
    last = last_of(turns + block, PARTS)
    if last:
        acc = tl.load(sums + at, cache_modifier=".cg")  # bypassing the L1 cache, as folds do
        for other in tl.static_range(1, PARTS):
            acc += tl.load(sums + other * (BLOCK_M * BLOCK_N) + at, cache_modifier=".cg")
    return acc, last


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "num_positions", "turned"])
def skinny_linear_kernel(
    x,  # (num_rows, K)
    weight,  # (num_outputs, K), or (2 num_outputs, K) with swiglu
    residual,  # (num_rows, num_outputs) or None
    out,  # (num_rows, num_outputs)
    cos,  # (num_positions, HEAD_DIM) fp32, or None without heads
    sin,  # the same, negative in the first half
    positions,  # (num_rows,) of each row, or None where row i has position i
    sums,  # (blocks, PARTS, BLOCK_M, BLOCK_N) fp32: scratch memory of the launch, where PARTS > 1
    turns,  # (blocks,) int32 arrival counters, 0 before and after, where PARTS > 1
    num_rows,
    num_outputs,
    num_positions,
    turned,  # how many of the outputs turn: the first ones
    norm_eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # of heads that turn; 0: none do
    EARLY: tl.constexpr,  # launched before the predecessor has ended
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,  # of the columns; more than one only in a plain product
    LETS_NEXT: tl.constexpr,  # lets the next kernel start before this one has ended
    PRECISION: tl.constexpr,
):
    """Computes BLOCK_N outputs, or pairs of a head's outputs, of BLOCK_M rows on tensor cores.

    Grid:     PARTS * cdiv(num_outputs, BLOCK_N) programs for each BLOCK_M rows; with heads half as many.
    Math:     out = activation(x W^T / sqrt(mean(x^2) + eps)) + residual; the sums of x^2 are the diagonal of x x^T.
    Numerics: products accumulate in fp32, over K in order, and so do parts; all that follows is fp32; rounded once.

    Only tensor cores may read a tile of x. Where threads read it too, Triton 3.6 gives the loop one buffer too few for
    wgmma, which is asynchronous: the copy of a later tile overwrote rows that were still being multiplied.
    """
    blocks = tl.cdiv(num_outputs, (2 if HEAD_DIM > 0 else 1) * BLOCK_N)
    block = tl.program_id(0) // PARTS
    rows = block // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = _outputs(block % blocks, HEAD_DIM, BLOCK_N)
    COLUMNS: tl.constexpr = (K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K) * BLOCK_K  # of a part
    begin = tl.program_id(0) % PARTS * COLUMNS
    TWO: tl.constexpr = ACTIVATION == "swiglu" or HEAD_DIM > 0
    others = weight + (HEAD_DIM // 2 if HEAD_DIM > 0 else num_outputs.to(tl.int64)) * K  # of the second product
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    other = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gram = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
    if EARLY:
        gdc_wait()
    place = rows
    if HEAD_DIM > 0:
        place = _place(positions, rows, num_rows, num_positions)
    for step in range(0, COLUMNS, BLOCK_K):
        first = begin + step
        k = first + tl.arange(0, BLOCK_K)
        mask = (rows < num_rows)[:, None] & (k < K)[None, :]
        if K % (PARTS * BLOCK_K) == 0:
            mask = (rows < num_rows)[:, None]
        x_tile = tl.load(x + rows[:, None] * K + k[None, :], mask=mask, other=0.0)
        tile = _weights(weight, outputs, num_outputs, first, K, BLOCK_K, PARTS)
        acc = tl.dot(x_tile, tile.T, acc, input_precision=PRECISION)
        if TWO:
            tile = _weights(others, outputs, num_outputs, first, K, BLOCK_K, PARTS)
            other = tl.dot(x_tile, tile.T, other, input_precision=PRECISION)
        if NORM:
            gram = tl.dot(x_tile, x_tile.T, gram, input_precision=PRECISION)
    if EARLY and LETS_NEXT:
        gdc_launch_dependents()
    if PARTS > 1:
        acc, last = _summed(acc, block, tl.program_id(0) % PARTS, sums, turns, BLOCK_M, BLOCK_N, PARTS)
        num_rows = tl.where(last, num_rows, 0)  # the others store nothing
    diagonal = tl.arange(0, BLOCK_M)[:, None] == tl.arange(0, BLOCK_M)[None, :]
    squares = tl.sum(tl.where(diagonal, gram, 0.0), 1)
    acc, other = _finish(acc, other, squares[:, None], norm_eps, K, NORM, ACTIVATION)
    _store(
        acc, other, rows[:, None], place[:, None], outputs[None, :], residual, out, cos, sin, num_rows, num_outputs,
        turned, HEAD_DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_outputs", "num_positions", "turned"])
def one_row_linear_kernel(
    x,  # (K,)
    weight,
    residual,
    out,
    cos,
    sin,
    positions,
    num_outputs,
    num_positions,
    turned,
    norm_eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes BLOCK_N outputs, or pairs, of the only row by multiplications and a sum: tensor cores need 15 more rows.

    Grid, math, numerics: as `skinny_linear_kernel`, but for the order of the sums.
    """
    outputs = _outputs(tl.program_id(0), HEAD_DIM, BLOCK_N)
    TWO: tl.constexpr = ACTIVATION == "swiglu" or HEAD_DIM > 0
    others = weight + (HEAD_DIM // 2 if HEAD_DIM > 0 else num_outputs.to(tl.int64)) * K
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    other = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    tile = _weights(weight, outputs, num_outputs, 0, K, BLOCK_K)
    if TWO:
        other_tile = _weights(others, outputs, num_outputs, 0, K, BLOCK_K)
    if EARLY:
        gdc_wait()
    place = 0 * outputs
    if HEAD_DIM > 0:
        place = _place(positions, place, 1, num_positions)
    for first in tl.static_range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x_tile = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        if first > 0:
            tile = _weights(weight, outputs, num_outputs, first, K, BLOCK_K)
            if TWO:
                other_tile = _weights(others, outputs, num_outputs, first, K, BLOCK_K)
        acc += tile.to(tl.float32) * x_tile[None, :]
        if TWO:
            other += other_tile.to(tl.float32) * x_tile[None, :]
        if NORM:
            squares += x_tile * x_tile
    if EARLY:
        gdc_launch_dependents()
    acc, other = _finish(
        tl.sum(acc, 1), tl.sum(other, 1), tl.sum(squares, 0), norm_eps, K, NORM, ACTIVATION
    )  # fmt: skip
    _store(acc, other, 0 * outputs, place, outputs, residual, out, cos, sin, 1, num_outputs, turned, HEAD_DIM)


def launch_skinny_linear(
    x: Tensor,
    weight: Tensor,
    norm_eps: float | None,
    activation: str | None,
    residual: Tensor | None,
    rotary: tuple[Tensor, Tensor, int] | None,
    positions: Tensor | None,
    workspace: Tensor | None,
) -> Tensor:
    """`skinny_linear` with checked arguments."""
    if interpreting() and x.dtype.itemsize == 2:  # which keeps bfloat16 as integers
        x32, weight32, residual32 = (None if t is None else t.float() for t in (x, weight, residual))
        out = launch_skinny_linear(x32, weight32, norm_eps, activation, residual32, rotary, positions, workspace)
        return out.to(x.dtype)
    width = x.size(-1)
    num_rows, num_outputs = x.numel() // width, weight.size(0) // (2 if activation == "swiglu" else 1)
    out = x.new_empty((*x.shape[:-1], num_outputs))
    if out.numel() == 0:
        return out
    (cos, sin, num_turned), num_positions, head_dim = rotary or (None, None, 0), 0, 0
    if rotary is not None:
        cos, sin, num_positions, head_dim = cos.contiguous(), sin.contiguous(), cos.size(0), cos.size(-1)
    plain = norm_eps is None and activation is None and rotary is None
    tile = tile_for(num_rows, num_outputs, width, plain)
    blocks = triton.cdiv(num_outputs, tile.block_n) * triton.cdiv(num_rows, tile.block_m)
    sums = turns = None
    if tile.parts > 1:
        sums = x.new_empty((blocks, tile.parts, tile.block_m, tile.block_n), dtype=torch.float32)
        turns = x.new_zeros(blocks, dtype=torch.int32) if workspace is None else workspace
    tensors = {
        "x": x.contiguous(), "weight": weight, "residual": residual, "out": out, "cos": cos, "sin": sin,
        "positions": None if positions is None else positions.contiguous(), "sums": sums, "turns": turns,
    }  # fmt: skip
    sizes = num_rows, num_outputs, num_positions, width, norm_eps, activation, head_dim, num_turned
    key = "skinny_linear", x.device, *sizes, *(t is not None and t.dtype for t in tensors.values())
    run(plan_of(key), tensors, partial(_launches, tile, tile.parts * blocks, *sizes))
    return out


def _launches(
    tile: Tile, grid: int, num_rows: int, num_outputs: int, num_positions: int, width: int, norm_eps: float | None,
    activation: str | None, head_dim: int, num_turned: int, *, x: Tensor, sums: Tensor | None, turns: Tensor | None,
    **given: Tensor | None,
) -> list[Launch]:  # fmt: skip
    early = x.is_cuda and not interpreting() and capability(x.device.index) >= (9, 0)
    if num_rows == 1:
        kernel, memory, sizes, more = one_row_linear_kernel, (), (num_outputs, num_positions), {}
    else:
        kernel, memory, sizes = skinny_linear_kernel, (sums, turns), (num_rows, num_outputs, num_positions)
        more = {
            "BLOCK_M": tile.block_m, "PARTS": tile.parts, "LETS_NEXT": tile.lets_next, "PRECISION": dot_precision(x),
        }  # fmt: skip
    block_n = tile.block_n // 2 if head_dim else tile.block_n  # of heads: pairs
    constants = {
        "K": width, "NORM": norm_eps is not None, "ACTIVATION": activation, "HEAD_DIM": head_dim, "EARLY": early,
        "BLOCK_N": block_n, "BLOCK_K": tile.block_k, **more,
    }  # fmt: skip
    how = {"num_warps": tile.num_warps, "num_stages": tile.num_stages} | ({"launch_pdl": True} if early else {})
    arguments = x, *given.values(), *memory, *sizes, num_turned * head_dim, norm_eps or 0.0
    return [Launch(kernel, grid, arguments, constants, how)]
