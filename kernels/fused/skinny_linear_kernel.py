"""The Triton kernel of skinny_linear.py: a program has some outputs of all rows and runs over all of their weights.

Bound by memory: each weight is read once; the rows are read by every program, from the second-level cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..device import interpreting
from ..launch import dot_precision, on_device

SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def _product(acc, x_tile, weight, columns, k, inside, num_outputs, K: tl.constexpr, PRECISION: tl.constexpr):
    # of the weights nothing is read again before the step is over
    tile = tl.load(
        weight + columns.to(tl.int64)[:, None] * K + k[None, :],
        mask=(columns < num_outputs)[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first",
    )  # fmt: skip
    return tl.dot(x_tile, tile.T, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def skinny_linear_kernel(
    x,  # (num_rows, K)
    weight,  # (num_outputs, K), or (2 num_outputs, K) with swiglu
    residual,  # (num_rows, num_outputs) or None
    out,  # (num_rows, num_outputs)
    num_rows,
    num_outputs,
    norm_eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_N outputs of all rows.

    Grid:     cdiv(num_outputs, BLOCK_N).
    Math:     out = activation(x W^T / sqrt(mean(x^2) + eps)) + residual.
    Numerics: products accumulate in fp32, over K in order; all that follows is fp32; rounded once.
    """
    rows = tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < K
        x_tile = tl.load(x + rows[:, None] * K + k[None, :], mask=(rows < num_rows)[:, None] & inside[None, :], other=0)
        acc = _product(acc, x_tile, weight, columns, k, inside, num_outputs, K, PRECISION)
        if ACTIVATION == "swiglu":
            values = weight + num_outputs.to(tl.int64) * K
            value = _product(value, x_tile, values, columns, k, inside, num_outputs, K, PRECISION)
        if NORM:
            squares += tl.sum(x_tile.to(tl.float32) * x_tile.to(tl.float32), 1)
    if NORM:
        scale = tl.rsqrt(squares / K + norm_eps)[:, None]
        acc *= scale
        value *= scale
    if ACTIVATION == "gelu":
        inner = SQRT_2_OVER_PI * (acc + 0.044715 * acc * acc * acc)
        acc *= tl.sigmoid(2.0 * inner)  # (1 + tanh(y)) / 2
    elif ACTIVATION == "relu2":
        acc = tl.maximum(acc, 0.0) * tl.maximum(acc, 0.0)
    elif ACTIVATION == "swiglu":
        acc = acc * tl.sigmoid(acc) * value
    at = rows.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    real = (rows < num_rows)[:, None] & (columns < num_outputs)[None, :]
    if residual is not None:
        acc += tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=real)


def launch_skinny_linear(
    x: Tensor, weight: Tensor, norm_eps: float | None, activation: str | None, residual: Tensor | None
) -> Tensor:
    """As `skinny_linear`, whose arguments are checked."""
    if interpreting() and x.dtype.itemsize == 2:  # which keeps bfloat16 as integers
        wide = None if residual is None else residual.float()
        return launch_skinny_linear(x.float(), weight.float(), norm_eps, activation, wide).to(x.dtype)
    width = x.size(-1)
    num_rows, num_outputs = x.numel() // width, weight.size(0) // (2 if activation == "swiglu" else 1)
    out = x.new_empty((*x.shape[:-1], num_outputs))
    block_m = max(16, triton.next_power_of_2(num_rows))
    with on_device(x):
        skinny_linear_kernel[(triton.cdiv(num_outputs, BLOCK_N),)](
            x.contiguous(), weight, residual, out, num_rows, num_outputs, norm_eps or 0.0,
            K=width, NORM=norm_eps is not None, ACTIVATION=activation, BLOCK_M=block_m, BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K, PRECISION=dot_precision(x), num_warps=4, num_stages=4,
        )  # fmt: skip
    return out


BLOCK_N, BLOCK_K = 16, 128
