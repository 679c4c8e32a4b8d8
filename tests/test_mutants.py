"""Three classic mistakes of online softmax, small and named: the checks that guard the kernels catch each."""

import math

import pytest
import torch

from kernels import naive_attention
from tests.attention_checks import assert_within_budget, make_qkv


def online_softmax(q, k, v, *, causal=True, block=16, running_max=True, rescale=True, global_indices=True):
    """Forward in the input's precision throughout, with one switch for each mistake."""
    num_q, num_k, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
    output = torch.zeros_like(q)
    for q_start in range(0, num_q, block):
        q_tile = q[:, :, q_start : q_start + block]
        maximum = torch.full(q_tile.shape[:-1], -math.inf if running_max else 0.0, dtype=q.dtype)
        total, acc = torch.zeros_like(maximum), torch.zeros_like(q_tile)
        for k_start in range(0, num_k, block):
            k_tile, v_tile = (x[:, :, k_start : k_start + block] for x in (k, v))
            scores = q_tile @ k_tile.mT * scale
            if causal:
                rows, cols = torch.arange(q_tile.shape[2])[:, None], torch.arange(k_tile.shape[2])[None, :]
                if global_indices:
                    rows, cols = rows + q_start + num_k - num_q, cols + k_start
                scores = scores.masked_fill(cols > rows, -math.inf)
            new_maximum = torch.maximum(maximum, scores.amax(-1)) if running_max else maximum
            base = new_maximum.masked_fill(new_maximum == -math.inf, 0.0)
            probs = torch.exp(scores - base[..., None])
            correction = torch.exp(maximum - base) if rescale else torch.ones_like(base)
            total = total * correction + probs.sum(-1)
            acc = acc * correction[..., None] + probs @ v_tile
            maximum = new_maximum
        output[:, :, q_start : q_start + block] = acc / total[..., None]
    return output


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
