"""The references define correct: they are held to PyTorch's own attention and to finite differences."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import BlockMask, flash_attention, naive_attention, naive_attention_varlen, tiled_attention
from tests.attention_checks import make_qkv, oracle, results

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [
    # batch, heads, kv_heads, num_q, num_k, head_dim
    (2, 2, 2, 16, 16, 16),
    (1, 4, 2, 33, 33, 8),
    (1, 4, 1, 7, 40, 24),
    (2, 2, 1, 40, 7, 16),
    (1, 2, 2, 1, 65, 5),
    (1, 1, 1, 50, 1, 16),
]


def _double(shape):
    return tuple(x.detach().double().requires_grad_() for x in make_qkv(*shape))


def test_one_compiled_function_takes_every_length():
    """Its loops are unrolled over lengths that are symbols from the second call on."""
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v: tiled_attention(q, k, v, causal=True, window=(7, 0)), backend="eager")
    for length in (20, 33, 40):
        q, k, v = _double((1, 2, 1, length, length, 8))
        expected = tiled_attention(q, k, v, causal=True, window=(7, 0))
        actual = compiled(q, k, v)
        torch.testing.assert_close(actual, expected)
        for each in zip(*(torch.autograd.grad(o.sin().sum(), (q, k, v)) for o in (actual, expected)), strict=True):
            torch.testing.assert_close(*each)


@pytest.mark.parametrize("given", [lambda q, k: (q, k, k), lambda q, k: (q, q, k), lambda q, k: (q, q, q)])
def test_a_tensor_given_twice_has_the_gradients_of_both_when_compiled(given):
    """Of an autograd.Function with one tensor in two places Dynamo kept one gradient (torch 2.11)."""
    q, k = (torch.randn(1, 2, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def gradients(function):
        return torch.autograd.grad(function(q, k).sin().sum(), (q, k), allow_unused=True)

    def tiled(q, k):
        return tiled_attention(*given(q, k), causal=True)

    torch.compiler.reset()
    for actual, expected in zip(gradients(torch.compile(tiled, backend="eager")), gradients(tiled), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiled_equals_naive_in_float64(shape, causal):
    q, k, v = _double(shape)
    do, dlse = torch.randn_like(q), torch.randn(q.shape[:3], dtype=torch.float64)
    expected = oracle(q, k, v, do, dlse, causal=causal)
    actual = results(tiled_attention, q, k, v, do, dlse, causal=causal, block_q=16, block_k=12)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("attention", [naive_attention, tiled_attention])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_pytorch_full_and_causal(attention, shape):
    q, k, v = _double(shape)
    group = shape[1] // shape[2]
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    torch.testing.assert_close(attention(q, k, v), F.scaled_dot_product_attention(q, wide_k, wide_v))
    num_q, num_k = shape[3], shape[4]
    if num_q <= num_k:  # PyTorch leaves NaN where a row sees nothing
        mask = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        expected = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=mask, scale=0.3)
        torch.testing.assert_close(attention(q, k, v, causal=True, scale=0.3), expected)


@pytest.mark.parametrize("attention", [naive_attention, tiled_attention])
@pytest.mark.parametrize(("num_q", "num_k", "causal"), [(5, 5, True), (4, 7, True), (4, 7, False), (7, 4, True)])
def test_gradients_agree_with_finite_differences(attention, num_q, num_k, causal):
    q, k, v = _double((1, 2, 1, num_q, num_k, 3))
    blocks = {"block_q": 3, "block_k": 2} if attention is tiled_attention else {}

    def both_outputs(q, k, v):
        o, lse = attention(q, k, v, causal=causal, return_lse=True, **blocks)
        return o, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(both_outputs, (q, k, v))


OPTIONS = {
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 9},
    "sinks": {"sinks": torch.tensor([0.3, -0.7]), "causal": True},
    "all": {
        "window": (3, 1),
        "softcap": 1.5,
        "alibi_slopes": torch.tensor([[0.5, 0.25]]),
        "dropout_p": 0.4,
        "dropout_seed": 9,
        "sinks": torch.tensor([0.3, -0.7]),
    },
}


@pytest.mark.parametrize("attention", [naive_attention, tiled_attention])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("num_q", "num_k"), [(4, 6), (6, 4)])
def test_gradients_of_options_agree_with_finite_differences(attention, options, num_q, num_k):
    q, k, v = (x.detach().double().requires_grad_() for x in make_qkv(1, 2, 1, num_q, num_k, 3, head_dim_v=2))
    blocks = {"block_q": 3, "block_k": 2} if attention is tiled_attention else {}
    options = dict(OPTIONS[options])
    sinks = options.pop("sinks", None)
    sinks = () if sinks is None else (sinks.double().requires_grad_(),)

    def both_outputs(q, k, v, *sinks):
        o, lse = attention(q, k, v, sinks=sinks[0] if sinks else None, return_lse=True, **options, **blocks)
        return o, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(both_outputs, (q, k, v, *sinks))


def test_window_softcap_and_alibi_by_hand():
    """The options' definitions, written out for one row."""
    q, k, v = (x.detach() for x in _double((1, 1, 1, 6, 8, 3)))
    scores = (q[0, 0, 2] @ k[0, 0].T) * 3**-0.5
    scores = 2.0 * torch.tanh(scores / 2.0) - 0.5 * (4 - torch.arange(8)).abs()  # row 2 stands at key 2 + 8 - 6
    weights = torch.softmax(scores[1:6], -1)  # three keys back, one ahead
    o = naive_attention(q, k, v, softcap=2.0, alibi_slopes=torch.tensor([0.5]), window=(3, 1))
    torch.testing.assert_close(o[0, 0, 2], weights @ v[0, 0, 1:6])


@pytest.mark.parametrize("attention", [naive_attention, tiled_attention])
def test_slopes_are_of_float64_beside_float64(attention):
    q, k, v = _double((1, 1, 1, 1, 3000, 8))
    slope = -(0.5**0.5)
    scores = q @ k.transpose(-1, -2) * 8**-0.5 - slope * torch.arange(2999.0, -1.0, -1.0, dtype=torch.float64)
    slopes = torch.tensor([slope], dtype=torch.float64)
    o, lse = attention(q, k, v, alibi_slopes=slopes, return_lse=True)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-14, atol=0)
    torch.testing.assert_close(o, scores.softmax(-1) @ v, rtol=1e-9, atol=1e-12)


def test_sinks_are_keys_without_values():
    q, k, v = (x.detach() for x in _double((1, 2, 2, 5, 7, 3)))
    sinks = torch.tensor([0.4, -2.0])
    o, lse = naive_attention(q, k, v, sinks=sinks, return_lse=True)
    plain, plain_lse = naive_attention(q, k, v, return_lse=True)
    expected = torch.logaddexp(plain_lse, sinks.double()[None, :, None])
    torch.testing.assert_close(lse, expected)
    torch.testing.assert_close(o, plain * (plain_lse - expected).exp()[..., None])


class Logarithms(TorchDispatchMode):
    """Counts logsumexp."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function == torch.ops.aten.logsumexp.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True])
def test_lse_is_computed_only_where_asked_for(packed):
    """It is some passes over the scores that eager code does not make: with them the baseline would be too slow."""
    q, k, v = (x.detach() for x in _double((1, 2, 2, 7, 7, 3)))
    starts = torch.tensor([0, 2, 7], dtype=torch.int32)
    attention = partial(naive_attention, q, k, v)
    if packed:
        attention = partial(naive_attention_varlen, *(x[0].transpose(0, 1) for x in (q, k, v)), starts, starts, 5, 5)
    with Logarithms() as asked:
        o, _ = attention(return_lse=True)
    with Logarithms() as unasked:
        alone = attention()
    assert torch.equal(o, alone)
    assert (asked.count, unasked.count) == (2 if packed else 1, 0)


def test_a_row_that_sees_no_key_sees_its_sink():
    q, k, v = _double((1, 2, 1, 9, 4, 8))
    sinks = torch.tensor([0.5, -1.0])
    for attention in (naive_attention, tiled_attention):
        o, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
        assert not o[:, :, :5].any()
        assert torch.equal(lse[0, :, 0], sinks.double())


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("attention", [naive_attention, tiled_attention, flash_attention])
def test_an_infinite_score_makes_its_rows_nan(attention):
    """A running maximum cannot tell it from others, and an LSE of infinity would make all gradients 0 in silence."""
    qkv = (x.detach() for x in make_qkv(1, 2, 1, 9, 9, 16, device=DEVICE))
    sinks = torch.tensor([math.inf, 0.5], device=DEVICE)
    o, lse = attention(*qkv, causal=True, sinks=sinks, return_lse=True)
    assert o[0, 0].isnan().all()
    assert lse[0, 0].isnan().all()
    assert o[0, 1].isfinite().all()
    assert lse[0, 1].isfinite().all()


@pytest.mark.parametrize("attention", [naive_attention, tiled_attention])
def test_rows_without_a_visible_key(attention):
    q, k, v = _double((1, 2, 1, 9, 4, 8))
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(o[:, :, :5], torch.zeros_like(o[:, :, :5]))
    assert (lse[:, :, :5] == -math.inf).all()
    grads = torch.autograd.grad(o.sum() + lse[:, :, 5:].sum(), (q, k, v))
    assert torch.equal(grads[0][:, :, :5], torch.zeros(1, 2, 5, 8, dtype=torch.float64))
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
@pytest.mark.parametrize("attention", [naive_attention, tiled_attention, flash_attention])
def test_a_hidden_row_s_gradient_of_lse_may_be_no_number(attention, wrong):
    """As that of torch.where(seen, lse.square(), 0) is where LSE is -inf."""
    q, k, v = make_qkv(1, 2, 1, 20, 10, 16, device=DEVICE)
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    dlse = torch.ones_like(lse)
    expected = torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), dlse), retain_graph=True)
    dlse[:, :, :10] = wrong
    actual = torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), dlse))
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("attention", [naive_attention, tiled_attention])
@pytest.mark.parametrize(("num_q", "num_k"), [(0, 5), (5, 0), (0, 0)])
def test_empty_lengths(attention, num_q, num_k):
    q, k, v = _double((2, 2, 1, num_q, num_k, 8))
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(o, torch.zeros(2, 2, num_q, 8, dtype=torch.float64))
    assert torch.equal(lse, torch.full((2, 2, num_q), -math.inf, dtype=torch.float64))
    for grad in torch.autograd.grad(o.sum(), (q, k, v)):
        assert not grad.any()


@pytest.mark.parametrize("attention", [naive_attention, tiled_attention])
def test_shapes_alone(attention):
    q, k, v = (x.detach().to("meta").requires_grad_() for x in make_qkv(1, 4, 2, 20, 24, 16, head_dim_v=32))
    o = attention(q, k, v, causal=True, dropout_p=0.1, dropout_seed=1)
    assert o.shape == (1, 4, 20, 32)
    assert [x.shape for x in torch.autograd.grad(o.sum(), (q, k, v))] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("attention", [naive_attention, tiled_attention])
def test_no_heads(attention):
    q, k, v = _double((2, 2, 2, 5, 7, 8))
    assert attention(q[:, :0], k, v, causal=True).shape == (2, 0, 5, 8)


@pytest.mark.parametrize("attention", [tiled_attention, flash_attention])
@pytest.mark.parametrize("name", ["alibi_slopes", "dropout_seed", "block_mask"])
def test_options_that_change_before_the_backward_are_an_error(name, attention):
    q, k, v = make_qkv(1, 2, 2, 20, 20, 16, device=DEVICE)
    given = {
        "alibi_slopes": torch.ones(2), "dropout_seed": torch.tensor(5),
        "block_mask": BlockMask.from_dense(torch.ones(20, 20, dtype=torch.bool).tril()),
    }[name].to(DEVICE)  # fmt: skip
    o = attention(q, k, v, **{name: given}, dropout_p=0.5 if name == "dropout_seed" else 0.0)
    (given.bits if name == "block_mask" else given).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_tile_sizes_do_not_matter():
    q, k, v = _double((1, 2, 2, 37, 37, 8))
    expected = tiled_attention(q, k, v, causal=True, block_q=64, block_k=64)
    for block_q, block_k in [(1, 1), (5, 16), (16, 5), (37, 37), (128, 2)]:
        torch.testing.assert_close(tiled_attention(q, k, v, causal=True, block_q=block_q, block_k=block_k), expected)


def test_naive_runs_products_in_the_input_dtype():
    q, k, v = make_qkv(1, 2, 2, 20, 20, 16, dtype=torch.bfloat16)
    scores = (q @ k.transpose(-1, -2)) * 0.25
    expected = torch.softmax(scores.float(), dim=-1).to(torch.bfloat16) @ v
    assert torch.equal(naive_attention(q, k, v), expected)


@pytest.mark.parametrize("attention", [naive_attention, tiled_attention])
def test_autocast_casts_as_pytorch_does(attention):
    q, k, v = make_qkv(1, 2, 2, 20, 20, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = attention(q, k, v, causal=True)
    assert o.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(o.float().sum(), q)
    assert grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which leaves float64 alone
        assert attention(*_double((1, 2, 2, 5, 5, 16))).dtype == torch.float64


@pytest.mark.parametrize("size", [0, 1.5])
@pytest.mark.parametrize("block", ["block_q", "block_k"])
def test_refuses_an_impossible_tile(block, size):
    q, k, v = _double((1, 1, 1, 4, 4, 8))
    with pytest.raises(ValueError, match=f"{block} is {size}; it must be an integer of at least 1"):
        tiled_attention(q, k, v, **{block: size})


def test_a_row_without_keys_and_without_a_sink_gives_the_sink_no_gradient():
    sinks = torch.tensor([-math.inf], requires_grad=True)
    q, k = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 1, 16)  # causal: the first query sees nothing
    o, lse = naive_attention(q, k, k, sinks=sinks, causal=True, return_lse=True)
    assert lse[0, 0, 0] == -math.inf
    for result in (o.sum(), lse[0, 0, 1]):
        assert torch.autograd.grad(result, sinks, retain_graph=True)[0].tolist() == [0.0]
