"""The norm whose gradient reads its result, against PyTorch's in float64."""

import pytest
import torch
import torch.nn.functional as F

from kernels import rms_norm

EPS = 1e-6


def gradient(function, x, dy):
    y = function(x)
    return y, *torch.autograd.grad(y, x, dy.to(y.dtype))


# of rows as long as a fresh embedding's, where eps counts, and of longer ones
@pytest.mark.parametrize("size", [1e-3, 0.02, 30.0])
@pytest.mark.parametrize(("autocast", "rounding"), [(False, 1e-6), (True, 2**-8)])
def test_compiled_it_has_the_gradient_of_the_definition(size, autocast, rounding):
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    x = size * torch.randn(5, 48, generator=generator)
    dy = torch.randn(5, 48, generator=generator) + 0.5  # far from orthogonal to x
    compiled = torch.compile(lambda x: rms_norm(x, EPS), backend="aot_eager", fullgraph=True)
    exact = gradient(lambda x: F.rms_norm(x, (48,), eps=EPS), x.double().requires_grad_(), dy)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual = gradient(compiled, x.requires_grad_(), dy)
        again = gradient(compiled, x, dy)
        uncompiled = gradient(lambda x: rms_norm(x, EPS), x, dy)
    assert actual[0].dtype == uncompiled[0].dtype == (torch.bfloat16 if autocast else torch.float32)
    assert actual[1].dtype == torch.float32
    for ours, plain, twice, expected in zip(actual, uncompiled, again, exact, strict=True):
        assert torch.equal(ours, twice)
        assert (ours - expected).norm() < rounding * expected.norm()
        assert (plain - expected).norm() < rounding * expected.norm()


def test_float64_stays_under_autocast_as_in_pytorchs_own():
    x = torch.randn(3, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(rms_norm(x, 1e-6), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_it_keeps_its_result_and_not_its_input(autocast):
    torch.compiler.reset()
    x = torch.randn(64, 48, requires_grad=True)
    kept = []
    compiled = torch.compile(lambda x: rms_norm(x * 2, EPS), backend="aot_eager_decomp_partition", fullgraph=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = compiled(x)
    assert sum(t.nbytes for t in kept) == y.nbytes + 64 * 4


def test_16_bits_are_rounded_once():
    x = 30 * torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    x, dy = (t.bfloat16() for t in (x, x.flip(0) / 30))
    exact = gradient(lambda x: F.rms_norm(x, (48,), eps=EPS), x.double().requires_grad_(), dy)
    for ours, expected in zip(gradient(lambda x: rms_norm(x, EPS), x.requires_grad_(), dy), exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - expected).norm() < 2**-8 * expected.norm()


def test_on_a_cpu_float64_keeps_its_digits():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, EPS), x)


def test_whole_numbers_are_refused():
    """They would be cut off."""
    with pytest.raises(ValueError, match=r"^x has dtype torch.int64; a norm is of floating point numbers$"):
        rms_norm(torch.arange(1, 5), 1e-5)
