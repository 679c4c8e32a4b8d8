"""Three classic mistakes of online softmax, small and named: the checks that guard the kernels catch each."""

import pytest
import torch

from kernels import naive_attention
from scripts.variants import online_softmax
from tests.attention_checks import assert_within_budget, make_qkv


def inputs(spread: float, dtype: torch.dtype):
    q, k, v = (x.detach() for x in make_qkv(1, 2, 2, 40, 40, 16, seed=3))
    return [(x * s).to(dtype) for x, s in ((q, spread), (k, 1.0), (v, 1.0))]


def caught(mutant, q, k, v) -> bool:
    """Whether the error criterion of every kernel test refuses this forward."""
    exact = naive_attention(*(x.double() for x in (q, k, v)), causal=True)
    try:
        assert_within_budget(
            {"o": mutant(q, k, v)}, {"o": exact}, {"o": naive_attention(q, k, v, causal=True)}, factor=4.0
        )
    except AssertionError:
        return True
    return False


def test_the_algorithm_without_mistakes_passes():
    assert not caught(online_softmax, *inputs(3.0, torch.float32))
    assert torch.isfinite(online_softmax(*inputs(8.0, torch.float16))).all()


def test_without_the_running_maximum_fp16_overflows_to_nan():
    q, k, v = inputs(8.0, torch.float16)  # scores beyond 11.1, whose exponential passes fp16's 65,504
    output = online_softmax(q, k, v, running_max=False)
    assert torch.isnan(output).any()
    assert caught(lambda *x: online_softmax(*x, running_max=False), q, k, v)


def test_without_rescaling_the_result_is_finite_and_wrong():
    q, k, v = inputs(3.0, torch.float32)
    output = online_softmax(q, k, v, rescale=False)
    assert torch.isfinite(output).all()
    assert float((output - naive_attention(q, k, v, causal=True)).abs().max()) >= 0.1
    assert caught(lambda *x: online_softmax(*x, rescale=False), q, k, v)


@pytest.mark.parametrize("num_k", [40, 56])
def test_a_mask_from_tile_local_indices_is_caught(num_k):
    q, k, v = inputs(1.0, torch.float32)
    k, v = (torch.cat([x, x[:, :, : num_k - 40]], 2) for x in (k, v))
    assert not caught(online_softmax, q, k, v)
    assert caught(lambda *x: online_softmax(*x, global_indices=False), q, k, v)
