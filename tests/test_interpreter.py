"""Triton's interpreter as tests/interpreter.py makes it quick: its results are as they were."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@triton.jit
def _last(a, b):
    return tl.where(b == 0, a, b)


@triton.jit
def _last_of(x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, tl.associative_scan(tl.load(x_ptr + at), 0, _last))


def test_a_scan_keeps_the_order_of_its_operands():
    """With a function that does not commute: what was last not 0."""
    x = torch.tensor([0, 3, 0, 0, 7, 0, 1, 0, 0, 0, 0, 0, 0, 5, 0, 0])
    _last_of[(1,)](x, 16)
    assert x.tolist() == [0, 3, 3, 3, 7, 7, 1, 1, 1, 1, 1, 1, 1, 5, 5, 5]


@triton.jit
def _outer(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    rows, columns = x[:, None], x[None, :]
    tl.static_assert(rows.shape[0] == N and rows.shape[1] == 1 and columns.shape[0] == 1 and rows.numel == N)
    wide = rows.to(tl.float64) + 0.5 * columns
    tl.store(out_ptr + at[:, None] * N + at[None, :], wide + wide + 1)


def test_values_of_one_shape_share_it_and_nothing_else():
    """Blocks that differ are broadcast, and have their own dtypes."""
    x, out = torch.arange(8, dtype=torch.int32), torch.empty(8, 8, dtype=torch.float64)
    _outer[(1,)](x, out, 8)
    assert torch.equal(out, 2 * x[:, None] + 1.0 * x[None, :] + 1)
    with pytest.raises(InterpreterError, match="incompatible dimensions at index 0: 8 and 16"):
        _last_of_two[(1,)](x)


@triton.jit
def _last_of_two(x_ptr):
    tl.store(x_ptr, tl.sum(tl.arange(0, 8) + tl.arange(0, 16), 0))


def test_a_launch_leaves_the_language_as_it_was():
    before = tl.load, tl.where, tl.tensor.__add__
    _last_of[(1,)](torch.ones(16, dtype=torch.int32), 16)
    assert (tl.load, tl.where, tl.tensor.__add__) == before
