"""Soft-cap's tanh: exact to a few ulp where scores are small beside the cap, and gradients that follow it."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels import flash_attention
from kernels.portable.scores import half_tanh
from tests.attention_checks import make_qkv, oracle, results

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ARGUMENTS = 2**15


@triton.jit
def _half_tanh_of(y_ptr, half_ptr, ARGUMENTS: tl.constexpr):
    at = tl.arange(0, ARGUMENTS)
    y = tl.load(y_ptr + at)
    root = tl.rsqrt(1.0 + tl.exp2(y))
    tl.store(half_ptr + at, half_tanh(y, root * root))


def test_tanh_is_exact_to_a_few_ulp_at_every_magnitude():
    """Against float64, from 1e-30 to where it is 1; and its derivative 1 - tanh^2."""
    x = np.geomspace(1e-30, 200.0, ARGUMENTS // 2)
    y = torch.from_numpy(np.concatenate([x, -x]) * 2 / np.log(2)).float().to(DEVICE)
    half = torch.empty_like(y)
    _half_tanh_of[(1,)](y, half, ARGUMENTS)
    exact = torch.tanh(y.double() * np.log(2) / 2)
    error = (2 * half.double() / exact - 1).abs()
    assert error[y.abs() < 0.6].max() < 4 * 2**-23
    # just past the polynomial, where tanh is 0.22: the errors of a GPU's exp2 and rsqrt may add up to 2.9e-6
    assert error.max() < 32 * 2**-23
    assert error[y.abs() > 4].max() < 8 * 2**-23
    assert ((1.0 - 4.0 * half * half).double() - (1 - exact**2)).abs().max() < 2e-6


@pytest.mark.parametrize("softcap", [50.0, 1e4, 1e8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scores_far_below_the_cap_keep_their_digits(softcap, dtype):
    """LSE to float32's ulp; O and gradients as near as rounding to the inputs' dtype lets them be."""
    q, k, v = make_qkv(1, 2, 1, 20, 45, 16, dtype=dtype, device=DEVICE)
    do, dlse = torch.randn_like(q), torch.randn(q.shape[:3], device=DEVICE)
    ours = results(flash_attention, q, k, v, do, dlse, softcap=softcap)
    exact = oracle(q, k, v, do, dlse, softcap=softcap)
    assert (ours["lse"].double() - exact["lse"]).abs().max() < 3e-6
    for name in ("o", "dq", "dk", "dv"):
        error = (ours[name].double() - exact[name]).norm() / exact[name].norm()
        assert error < 2 * torch.finfo(dtype).eps + 4e-7, name
