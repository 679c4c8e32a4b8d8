"""Triton's interpreter as tests/interpreter.py makes it quick: its results are as they were."""

import pytest
import torch
import triton
import triton.language as tl

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


def test_a_launch_leaves_the_language_as_it_was():
    before = tl.load, tl.where, tl.tensor.__add__
    _last_of[(1,)](torch.ones(16, dtype=torch.int32), 16)
    assert (tl.load, tl.where, tl.tensor.__add__) == before
