"""The Hopper kernels are right, run by Python and on a GPU; tests/test_offline_compilation.py: what they compile to."""

import itertools
import math
from random import Random

import pytest
import torch

from kernels import flash_attention, flash_attention_varlen, naive_attention, naive_attention_varlen, support
from kernels.block_masks import BlockMask
from kernels.call import Options, canonical_window, check_call
from kernels.launch import heads_per_section
from kernels.support import FEATURES, KERNELS
from tests.attention_cases import ATTENTION, call_for
from tests.attention_checks import (
    assert_within_budget,
    compare_with_oracle,
    make_packed,
    make_qkv,
    naive_for,
    oracle,
    results,
    rounded_o_term,
)
from tests.fuzz import random_mask, run_case

MASK_TENSORS = ("mask_starts", "mask_visits", "mask_bits")

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU (compute capability 9.0)",
)


def _reference(q, k, v, do, dlse, causal, scale, dtype):
    """The plain formula and its gradients in `dtype`: (o, lse, dq, dk, dv); rows that see nothing give zeros."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril(k.shape[2] - q.shape[2])
    blind = ~visible.any(1)
    scores = scores.masked_fill(~visible, -torch.inf)
    if dtype != torch.float64:
        scores = scores.float()
    p = torch.softmax(scores.masked_fill(blind[:, None], 0.0), -1).masked_fill(blind[:, None], 0.0)
    o = p.to(dtype) @ v.repeat_interleave(group, 1)
    lse = torch.logsumexp(scores, -1)
    loss = (o * do.to(dtype)).double().sum() + (lse.masked_fill(blind, 0.0) * dlse).double().sum()
    return o.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v))


def _assert_within_budget(ours, exact, plain):
    """flash-attention's criterion: at most twice the error of the plain formula in the same precision."""
    rounded = exact.to(ours.dtype)
    floor = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max()
    error = (ours.double() - exact).abs().max()
    assert error <= 2 * (plain.double() - exact).abs().max() + floor


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "num_heads", "num_kv_heads", "num_q", "num_k", "causal"),
    [
        (1, 1, 1, 1, 1, True),
        (2, 3, 3, 127, 127, True),
        (2, 4, 2, 193, 193, False),
        (1, 4, 1, 300, 100, True),  # the first 200 rows see nothing
        (1, 2, 2, 100, 300, True),
        (1, 2, 2, 700, 5, False),
        (4, 16, 16, 1024, 1024, True),  # more tiles than SMs
        (1, 27, 27, 600, 600, True),  # 135 tiles, taken in pairs: the last share is half a pair
    ],
)
def test_hopper_agrees_with_float64(head_dim, dtype, batch, num_heads, num_kv_heads, num_q, num_k, causal):
    from kernels.hopper.backward import launch_hopper_bwd
    from kernels.hopper.forward import launch_hopper_fwd

    torch.manual_seed(0)

    def tokens_first(heads, tokens):
        padded = torch.full((batch, tokens + 8, heads, head_dim), torch.nan, dtype=dtype, device="cuda")
        padded[:, :tokens] = torch.randn(batch, tokens, heads, head_dim, device="cuda")
        return padded[:, :tokens].transpose(1, 2)

    q, do = tokens_first(num_heads, num_q), tokens_first(num_heads, num_q)
    k, v = tokens_first(num_kv_heads, num_k), tokens_first(num_kv_heads, num_k)
    dlse = torch.randn(batch, num_heads, num_q, device="cuda")
    scale = head_dim**-0.5
    options = Options(causal, scale)
    assert support.takes_hopper(q, k, v, options)
    o, lse = launch_hopper_fwd(q, k, v, options)
    again = launch_hopper_fwd(q, k, v, options)
    assert torch.equal(o, again[0])
    assert torch.equal(lse, again[1])
    *gradients, _ = launch_hopper_bwd(do, dlse, q, k, v, o, lse, options)
    for _ in range(5):
        *again, _ = launch_hopper_bwd(do, dlse, q, k, v, o, lse, options)
        assert all(torch.equal(x, y) for x, y in zip(gradients, again, strict=True))
    exact = _reference(q, k, v, do, dlse, causal, scale, torch.float64)
    plain = _reference(q, k, v, do, dlse, causal, scale, dtype)
    torch.testing.assert_close(lse.double(), exact[1].double(), atol=1e-3, rtol=0)
    _assert_within_budget(o, exact[0], plain[0])
    for ours, right, low in zip(gradients, exact[2:], plain[2:], strict=True):
        _assert_within_budget(ours, right, low)


WIDTHS = [32, 40, 72, 96, 112, 192, 256]  # one, two and four swizzled columns of 128 bytes, the last one full or not


def _in_nan(x):
    """x with NaN behind its last column and its last row."""
    *outer, tokens, head_dim = x.shape
    whole = x.new_full((*outer, tokens + 8, head_dim + 16), torch.nan)
    whole[..., :tokens, :head_dim] = x
    return whole[..., :tokens, :head_dim]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("head_dim", [16, 32, 40, 48, 72, 80, 96, 112, 120, 136, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padding_is_neither_read_nor_written(head_dim, dtype):
    """Also head_dims below those for which the Hopper kernels are chosen."""
    from kernels.hopper.backward import launch_hopper_bwd
    from kernels.hopper.forward import launch_hopper_fwd

    torch.manual_seed(0)
    for batch, num_heads, num_kv_heads, num_q, num_k, causal in [
        (1, 1, 1, 1, 1, True),
        (2, 4, 2, 193, 193, True),
        (1, 4, 1, 300, 100, False),
        (2, 3, 3, 127, 321, True),
        (4, 16, 4, 1024, 1024, True),  # more tiles than multiprocessors
    ]:
        shapes = [(num_heads, num_q)] * 2 + [(num_kv_heads, num_k)] * 2
        q, do, k, v = (_in_nan(torch.randn(batch, *x, head_dim, device="cuda").to(dtype)) for x in shapes)
        dlse = torch.randn(batch, num_heads, num_q, device="cuda")
        options = Options(causal, head_dim**-0.5)
        o, lse = launch_hopper_fwd(q, k, v, options)
        again = launch_hopper_fwd(q, k, v, options)  # a replay
        assert torch.equal(o, again[0])
        assert torch.equal(lse, again[1])
        exact = _reference(q, k, v, do, dlse, causal, options.scale, torch.float64)
        plain = _reference(q, k, v, do, dlse, causal, options.scale, dtype)
        torch.testing.assert_close(lse.double(), exact[1].double(), atol=1e-3, rtol=0)
        _assert_within_budget(o, exact[0], plain[0])
        if head_dim > 128:
            continue
        for _ in range(2):
            *gradients, _ = launch_hopper_bwd(do, dlse, q, k, v, o, lse, options)
            for ours, right, low in zip(gradients, exact[2:], plain[2:], strict=True):
                _assert_within_budget(ours, right, low)


DENSE = {
    "softcap-5": {"softcap": 5.0, "causal": True},
    "softcap-50": {"softcap": 50.0},
    "softcap-1e6": {"softcap": 1e6, "causal": True},  # scores keep their digits
    "scale": {"scale": 0.3, "causal": True},
    "smaller than a tile": {"window": (20, 7)},
    "itself": {"window": (0, 0)},
    "one back": {"window": (1, 0)},  # the first row of a tile sees the last key of the tile before
    "a tile": {"window": (127, 0), "causal": True},
    "three tiles": {"window": (255, 128)},
    "larger than N": {"window": (5000, 0)},
    "left only": {"window": (100, -1)},
    "right only": {"window": (-1, 65)},
    "window and softcap": {"window": (200, 0), "softcap": 5.0},
}
PACKED = {
    "around a tile": ([1, 64, 0, 127, 128, 129, 300], None),
    "unequal": ([20, 0, 133, 0, 5, 200], [70, 19, 50, 0, 1, 333]),
    "ones": ([1] * 70, None),
    "more than are counted at a time": ([3, 0, 130] * 50, None),
}
SHAPES = [(1, 1), (193, 193), (300, 100), (100, 300), (640, 640), (1000, 1000)]


def simulated_forward(monkeypatch, multiprocessors: int = 3, **how):
    """The module of the forward, whose kernel Python runs (tests/hopper_simulator.py); in L2 a head or two."""
    from kernels.hopper import forward as hopper_fwd
    from tests import hopper_simulator

    hopper_simulator.simulate(monkeypatch, hopper_fwd.hopper_fwd_kernel, **how)
    monkeypatch.setattr(hopper_fwd, "num_sms", lambda _: multiprocessors)
    monkeypatch.setattr("kernels.launch.l2_bytes", lambda _: 3 * 2**18)
    return hopper_fwd


SIMULATED = [
    # lengths of queries and of keys, causal, window, soft-cap; two numbers are no documents
    ([193], [193], True, (-1, -1), 0.0),
    ([200], [100], True, (-1, -1), 5.0),
    ([129], [229], False, (20, 7), 0.0),  # a consumer whose rows all lie past the end
    ([400], [400], True, (127, -1), 0.0),
    ([500], [500], False, (150, 150), 50.0),  # consumers that see different tiles at both ends
    ([70], [300], False, (-1, 65), 0.0),
    ([33, 0, 150, 1, 64], [64, 7, 130, 0, 64], True, (-1, -1), 0.0),
    ([1, 200, 5], [1, 200, 5], False, (31, 0), 5.0),
    ([70], [90], True, (-1, -1), 1e6),  # scores keep their digits
]


@pytest.mark.parametrize(
    ("head_dim", "lengths_q", "lengths_k", "causal", "window", "softcap"),
    [(64, *case) for case in SIMULATED]
    + [(width, *case) for width in WIDTHS for case in (SIMULATED[1], SIMULATED[4], SIMULATED[6])],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_simulated_forward_agrees_with_float64(head_dim, lengths_q, lengths_k, causal, window, softcap, monkeypatch):
    """The kernel's own source, run by Python (tests/hopper_simulator.py), where Gluon has no interpreter."""
    hopper_fwd = simulated_forward(monkeypatch)  # of three, not all take as many tiles
    qkv, packed = make_packed(lengths_q, lengths_k, 2, 1, head_dim)
    documents = packed if len(lengths_q) > 1 else {}
    q, k, v = (_in_nan(x.detach()).transpose(0, 1)[None] for x in qkv)
    mask, *bounds = canonical_window(causal, window)
    options = Options(mask, head_dim**-0.5, *bounds, softcap)
    o, lse = hopper_fwd.launch_hopper_fwd(q, k, v, options._replace(**documents))
    wide = [x.detach().double() for x in qkv]
    exact = naive_attention_varlen(*wide, causal=causal, window=window, softcap=softcap, return_lse=True, **packed)
    torch.testing.assert_close(o[0].transpose(0, 1).double(), exact[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[0].double(), exact[1], atol=1e-5, rtol=1e-5)


def with_nan_in_the_second(lengths, *tensors):
    """Copies of packed tensors (tokens, heads, head_dim) whose second document is NaN, and the rows of the others."""
    rows = torch.ones(sum(lengths), dtype=torch.bool)
    rows[lengths[0] : lengths[0] + lengths[1]] = False
    copies = [x.detach().clone() for x in tensors]
    for x in copies:
        x[~rows] = torch.nan
    return [x.requires_grad_() for x in copies], rows


@pytest.mark.usefixtures("poisoned_memory")
def test_simulated_document_of_nan_leaves_the_others_their_bits(monkeypatch):
    hopper_fwd = simulated_forward(monkeypatch)
    lengths = [100, 28, 72]
    qkv, packed = make_packed(lengths, lengths, 2, 1, 64)
    with_nan, others = with_nan_in_the_second(lengths, *qkv)
    options = Options(True, 0.125, **packed)
    right, ours = (
        hopper_fwd.launch_hopper_fwd(*(x.detach().transpose(0, 1)[None] for x in tensors), options)
        for tensors in (qkv, with_nan)
    )
    for x, y in zip(right, ours, strict=True):
        assert torch.equal(x[:, :, others], y[:, :, others])


@pytest.mark.usefixtures("poisoned_memory")
def test_simulated_documents_in_sections_of_heads_agree_with_float64(monkeypatch):
    """A cache that does not hold K and V of all heads; the second section is taken from its shortest tile on."""
    hopper_fwd = simulated_forward(monkeypatch)
    monkeypatch.setattr("kernels.launch.l2_bytes", lambda _: 100_000)
    lengths = [33, 0, 150, 1, 64]
    qkv, packed = make_packed(lengths, lengths, 2, 2, 64)
    q, k, v = (x.detach().transpose(0, 1)[None] for x in qkv)
    assert heads_per_section(q, k, hopper_fwd.L2_SHARE, uneven=True) == 1
    o, lse = hopper_fwd.launch_hopper_fwd(q, k, v, Options(True, 0.125, **packed))
    exact = naive_attention_varlen(*(x.detach().double() for x in qkv), causal=True, return_lse=True, **packed)
    torch.testing.assert_close(o[0].transpose(0, 1).double(), exact[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[0].double(), exact[1], atol=1e-5, rtol=1e-5)


ALIBI = [
    ([193], [193], {"causal": True}),
    ([129], [229], {}),
    ([300], [300], {"window": (150, 150)}),
    ([200], [100], {"causal": True, "softcap": 5.0}),
    ([33, 0, 150, 1, 64], [64, 7, 130, 0, 64], {}),  # other slopes in each document
]


@pytest.mark.parametrize(("lengths_q", "lengths_k", "how"), ALIBI)
@pytest.mark.usefixtures("poisoned_memory")
def test_simulated_alibi_forward_agrees_with_float64(lengths_q, lengths_k, how, monkeypatch):
    hopper_fwd = simulated_forward(monkeypatch)
    qkv, packed = make_packed(lengths_q, lengths_k, 2, 1, 64)
    how = how | {"alibi_slopes": torch.rand(len(lengths_q), 2) + 0.05}
    q, k, v = (_in_nan(x.detach()).transpose(0, 1)[None] for x in qkv)
    slopes = how.pop("alibi_slopes")
    options = check_call(q, k, v, **how)[3]._replace(alibi_slopes=slopes)
    o, lse = hopper_fwd.launch_hopper_fwd(q, k, v, options._replace(**(packed if len(lengths_q) > 1 else {})))
    exact = naive_attention_varlen(
        *(x.detach().double() for x in qkv), return_lse=True, alibi_slopes=slopes, **how, **packed
    )
    torch.testing.assert_close(o[0].transpose(0, 1).double(), exact[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[0].double(), exact[1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_q", "num_k"),
    [(4, 2, 200, 200), (4, 2, 129, 400), (4, 2, 300, 70), (3, 1, 513, 513)],  # the last: an odd number of tiles in all
)
@pytest.mark.parametrize(("consumers", "stages", "ping_pong"), [(2, 2, False), (2, 3, True), (3, 2, True)])
@pytest.mark.usefixtures("poisoned_memory")
def test_simulated_plans(
    consumers, stages, ping_pong, num_heads, num_kv_heads, num_q, num_k, causal, monkeypatch
):  # fmt: skip
    """Programs of several tiles, whose order and barriers depend on the plan."""
    hopper_fwd = simulated_forward(monkeypatch, 2, pauses=Random(num_q))
    sizes = (num_heads, num_q), (num_kv_heads, num_k), (num_kv_heads, num_k)
    q, k, v = (torch.randn(1, heads, n, 64) for heads, n in sizes)
    plan = hopper_fwd.ForwardPlan(consumers, stages, ping_pong)
    o, lse = hopper_fwd.launch_hopper_fwd(q, k, v, Options(causal, 0.125), plan)
    wide = [x.double() for x in (q, k, v)]
    exact = naive_attention(*wide, causal=causal, return_lse=True)
    torch.testing.assert_close(o.double(), exact[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact[1], atol=1e-5, rtol=1e-5)


def test_simulated_maximum_that_rises_with_each_key_tile(monkeypatch):
    """By little and by much: O and the sum are rescaled at each. The rightmost tile is the first."""
    hopper_fwd = simulated_forward(monkeypatch, 2)
    q, k, v = (0.1 * torch.randn(1, 1, n, 128) for n in (130, 700, 700))
    q[..., 0] = torch.linspace(0.5, 20.0, 130)  # how much a row's scores rise a tile, as exponents of 2
    k[..., 0] = (700 - torch.arange(700)) / 128
    options = Options(False, math.log(2.0))
    o, lse = hopper_fwd.launch_hopper_fwd(q, k, v, options)
    exact = naive_attention(*(x.double() for x in (q, k, v)), scale=options.scale, return_lse=True)
    torch.testing.assert_close(o.double(), exact[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128])  # groups of 192 queries, rows of 128
@pytest.mark.parametrize(
    ("dims", "num_q", "num_k", "softcap"),
    [((1, 1), 577, 300, 0.0), ((2, 2), 130, 257, 0.0), ((2, 1), 200, 129, 5.0), ((1, 2), 64, 400, 0.0)],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_simulated_forward_under_a_block_mask(dims, num_q, num_k, softcap, head_dim, monkeypatch):
    """Full, partial and hidden blocks, rows of blocks without any, rows that see nothing; batch and heads."""
    hopper_fwd = simulated_forward(monkeypatch, pauses=Random(num_q))
    mask = random_mask(*dims, num_q, num_k, torch.Generator().manual_seed(num_q))
    q, k, v = (torch.randn(2, heads, n, head_dim) for heads, n in ((2, num_q), (1, num_k), (1, num_k)))
    options = Options(False, 0.125, softcap=softcap, **dict(zip(MASK_TENSORS, mask, strict=False)))
    o, lse = hopper_fwd.launch_hopper_fwd(q, k, v, options)
    wide = [x.double() for x in (q, k, v)]
    exact = naive_attention(*wide, block_mask=mask, scale=options.scale, softcap=softcap, return_lse=True)
    torch.testing.assert_close(o.double(), exact[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("seen_by_all", "heads"), [(0, 2), (1, 8)])
def test_heads_of_an_uneven_mask_are_worked_on_together(seen_by_all, heads):
    """Else the block of keys that all queries see ends long after the others of its head."""
    from kernels.hopper import masked
    from tests import hopper_simulator

    q, k = torch.arange(2048)[:, None], torch.arange(2048)
    mask = BlockMask.from_dense((q // 128 == k // 128) | (k < 128 * seen_by_all))
    lists = masked.Masked(hopper_simulator.on_device(mask.starts), None, None, None, False, False, 1)
    assert hopper_simulator.call(masked.heads_together, lists, 2, 8, 2048, 2048) == heads


def test_few_tiles_are_not_taken_in_pairs(monkeypatch):
    """A program for each: a pair would leave half of the multiprocessors without work."""
    from kernels.hopper import forward as hopper_fwd

    monkeypatch.setattr(hopper_fwd, "num_sms", lambda _: 132)
    persistent, plain = hopper_fwd.ForwardPlan(2), hopper_fwd.ForwardPlan(2, persistent=False)
    causal, full = Options(True, 1.0), Options(False, 1.0)
    assert hopper_fwd.grid_of(persistent, 132, causal, 0) == (132, False)
    assert hopper_fwd.grid_of(persistent, 133, causal, 0) == (132, True)
    assert hopper_fwd.grid_of(persistent, 133, full, 0) == (132, False)
    assert hopper_fwd.grid_of(plain, 133, causal, 0) == (133, False)


@pytest.fixture
def simulated_backward(monkeypatch, poisoned_memory):
    """The Hopper backward's own source, run by Python: (inputs as of launch_hopper_bwd) -> (dq, dk, dv).

    One kernel after the other: where the last one waits for adds on a GPU, for ever if it is for another number, it is
    looked here whether there have been as many."""
    from triton import language as tl

    from kernels.hopper import backward as hopper_bwd
    from tests import hopper_simulator

    def have_come(address, adds):
        assert tl.load(address).handle.data.item() == adds.handle.data.item()

    monkeypatch.setattr(hopper_bwd, "_wait_for_adds", have_come)
    monkeypatch.setattr(hopper_bwd, "gdc_wait", lambda: None)
    monkeypatch.setattr("kernels.portable.prepare.gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(hopper_bwd, "L2_SHARE", {64: 1.0, 128: 1.0})
    monkeypatch.setattr(hopper_bwd, "num_sms", lambda _: 3)
    monkeypatch.setattr("kernels.launch.l2_bytes", lambda _: 3 * 2**19)

    def run(inputs, **how):
        hopper_simulator.simulate(monkeypatch, hopper_bwd.hopper_bwd_kernel, **how)
        return hopper_bwd.launch_hopper_bwd(*inputs)[:3]

    return run


def _backward_inputs(batch, num_heads, num_kv_heads, num_q, num_k, head_dim, causal, *, with_dlse=True, shift=0.0):
    """Arguments of launch_hopper_bwd in float32, among NaN, and exact gradients. shift: added to Q, taken from K."""
    torch.manual_seed(0)
    q, do = (torch.randn(batch, num_heads, num_q, head_dim) for _ in range(2))
    k, v = (torch.randn(batch, num_kv_heads, num_k, head_dim) for _ in range(2))
    q, k = q + shift, k - shift
    dlse = torch.randn(batch, num_heads, num_q) if with_dlse else torch.zeros(batch, num_heads, num_q)
    options = Options(causal, 0.2)  # of no head_dim here
    o, lse, *gradients = _reference(q, k, v, do, dlse, causal, options.scale, torch.float64)
    do, q, k, v, o = (_in_nan(x) for x in (do, q, k, v, o.float()))
    return (do, dlse if with_dlse else None, q, k, v, o, lse.float(), options), gradients


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("batch", "num_heads", "num_kv_heads", "num_q", "num_k"),
    [
        (1, 1, 1, 1, 1),
        (2, 3, 3, 300, 270),  # sections of four heads and of two
        (1, 4, 2, 100, 300),
        (1, 2, 1, 330, 100),  # causal: the first 230 rows see nothing, and three query tiles of nobody
        (1, 1, 1, 64, 600),
    ],
)
def test_simulated_backward_agrees_with_float64(
    batch, num_heads, num_kv_heads, num_q, num_k, causal, head_dim, simulated_backward
):
    sizes = (batch, num_heads, num_kv_heads, num_q, num_k, head_dim, causal)
    inputs, exact = _backward_inputs(*sizes, with_dlse=num_q != 1)
    for ours, right in zip(simulated_backward(inputs, residents=3), exact, strict=True):
        torch.testing.assert_close(ours.double(), right.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "causal", "window", "softcap"),
    [*SIMULATED[1:], ([400], [400], True, (128, -1), 0.0)],  # of a tile of keys the last one is seen, by one query
)
def test_simulated_backward_under_options_agrees_with_float64(
    head_dim, lengths_q, lengths_k, causal, window, softcap, simulated_backward
):
    """Windows, soft-caps and documents; programs begin and end as they like, with NaN around every document."""
    how = {"causal": causal, "window": window, "softcap": softcap}
    check_simulated_backward(head_dim, lengths_q, lengths_k, how, simulated_backward)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("lengths_q", "lengths_k", "how"), ALIBI)
def test_simulated_alibi_backward_agrees_with_float64(head_dim, lengths_q, lengths_k, how, simulated_backward):
    how = how | {"alibi_slopes": torch.rand(len(lengths_q), 2) + 0.05}
    check_simulated_backward(head_dim, lengths_q, lengths_k, how, simulated_backward)


def check_simulated_backward(head_dim, lengths_q, lengths_k, how, simulated_backward):
    heads, kv_heads = 2, 1
    qkv, packed = make_packed(lengths_q, lengths_k, heads, kv_heads, head_dim)
    q, k, v = qkv
    do, dlse = torch.randn_like(q), torch.randn(heads, q.shape[0])
    exact = oracle(q, k, v, do, dlse, **how, **packed)
    do, q, k, v, o = (_in_nan(x.detach().float()).transpose(0, 1)[None] for x in (do, q, k, v, exact["o"]))
    slopes = how.pop("alibi_slopes", None)
    *_, options = check_call(q, k, v, **how)
    options = options._replace(alibi_slopes=slopes, **(packed if len(lengths_q) > 1 else {}))
    dlse = torch.where(torch.isfinite(exact["lse"]), dlse, 0.0)
    inputs = (do, dlse[None], q, k, v, o, exact["lse"][None].float(), options)
    ours = simulated_backward(inputs, residents=3, pauses=Random(sum(lengths_q)))
    for name, gradient in zip(("dq", "dk", "dv"), ours, strict=True):
        right = exact[name].transpose(0, 1)[None]
        torch.testing.assert_close(
            gradient.double(), right.double(), atol=2e-5, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("dims", "kv_heads", "num_q", "num_k", "softcap"),
    [((1, 1), 1, 500, 500, 0.0), ((2, 2), 2, 130, 257, 0.0), ((2, 1), 1, 300, 129, 5.0), ((1, 2), 2, 64, 400, 0.0)],
)
def test_simulated_backward_under_a_block_mask(dims, kv_heads, num_q, num_k, softcap, head_dim, simulated_backward):
    """Rows and columns of blocks without visits, in any order; grouped heads that share a mask; batch and heads."""
    mask = random_mask(*dims, num_q, num_k, torch.Generator().manual_seed(num_q + num_k))
    torch.manual_seed(0)
    q, do = (torch.randn(2, 2, num_q, head_dim) for _ in range(2))
    k, v = (torch.randn(2, kv_heads, num_k, head_dim) for _ in range(2))
    dlse = torch.randn(2, 2, num_q)
    exact = oracle(q, k, v, do, dlse, block_mask=mask, softcap=softcap)
    options = Options(False, head_dim**-0.5, softcap=softcap, **dict(zip(MASK_TENSORS, mask, strict=False)))
    dlse = torch.where(torch.isfinite(exact["lse"]), dlse, 0.0)
    do, q, k, v, o = (_in_nan(x.float()) for x in (do, q, k, v, exact["o"]))
    inputs = (do, dlse, q, k, v, o, exact["lse"].float(), options)
    ours = simulated_backward(inputs, residents=3, pauses=Random(num_q))
    for name, gradient in zip(("dq", "dk", "dv"), ours, strict=True):
        torch.testing.assert_close(
            gradient.double(), exact[name], atol=2e-5, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("head_dim", [width for width in WIDTHS if width <= 128])
@pytest.mark.parametrize("causal", [True, False])
def test_simulated_backward_pads_narrow_heads(causal, head_dim, simulated_backward):
    inputs, exact = _backward_inputs(2, 4, 2, 150, 200, head_dim, causal)
    for ours, right in zip(simulated_backward(inputs, residents=3), exact, strict=True):
        torch.testing.assert_close(ours.double(), right.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bounds", [-1, 100], ids=["full", "window"])
def test_keys_past_the_end_do_not_overflow_in_the_backward(bounds, head_dim, simulated_backward):
    """They are loaded as zeros, so their score is 0: exp2(0 - LSE) overflows where LSE is far below 0."""
    inputs, exact = _backward_inputs(1, 1, 1, 64, 70, head_dim, False, shift=5.0)
    assert inputs[6].max() < -100
    inputs = (*inputs[:7], inputs[7]._replace(window_left=bounds, window_right=bounds))  # a window that hides nothing
    for ours, right in zip(simulated_backward(inputs), exact, strict=True):
        torch.testing.assert_close(ours.double(), right.double(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("causal", "head_dim"), [(True, 128), (False, 64)])
def test_dq_is_added_in_one_order_by_any_number_of_programs(causal, head_dim, simulated_backward, monkeypatch):
    """With one, some or all of the programs resident none waits for ever; the last are as many as there are items."""
    inputs, _ = _backward_inputs(1, 2, 1, 300, 600, head_dim, causal)
    first = simulated_backward(inputs, residents=1)
    for programs, residents in ((3, 2), (3, 3), (10, 4), (10, 10)):
        monkeypatch.setattr("kernels.hopper.backward.num_sms", lambda _, programs=programs: programs)
        again = simulated_backward(inputs, residents=residents, pauses=Random(residents))
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_the_last_heads_of_a_causal_call_begin_with_their_longest_items():
    """The others begin with the shortest, as each item waits for those before it."""
    from kernels.hopper import backward_schedule as schedule
    from tests import hopper_simulator

    # five heads of three tiles, two a section; causal
    sizes = schedule.Sizes(1, 1, 5, 300, 300, 2, None, None, None, None, None, 64, 3, 2, True)
    items = [hopper_simulator.call(schedule.owned, item, sizes) for item in range(15)]
    assert [(tile, batch) for tile, batch, *_ in items[:6]] == [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
    assert [tile for tile, *_ in items[6:]] == [2, 2, 1, 1, 0, 0, 0, 1, 2]
    assert [bool(from_last) for *_, from_last in items] == [False] * 12 + [True] * 3


@pytest.fixture
def forwards(monkeypatch) -> list:
    """The Hopper forward's calls, which take documents and block masks of any head_dim here."""
    from kernels.hopper import forward as hopper_fwd

    monkeypatch.setattr(support, "HOPPER_PACKED_HEAD_DIMS", support.HOPPER_HEAD_DIMS)
    monkeypatch.setattr(support, "HOPPER_MASKED_HEAD_DIMS", support.HOPPER_BACKWARD_HEAD_DIMS)
    monkeypatch.setattr("kernels.launch.PLANS", {})  # what was chosen before
    calls, launch = [], hopper_fwd.launch_hopper_fwd
    monkeypatch.setattr(hopper_fwd, "launch_hopper_fwd", lambda *a: calls.append(a) or launch(*a))
    return calls


@pytest.fixture
def backwards(monkeypatch) -> list:
    """The Hopper backward's calls."""
    from kernels.hopper import backward as hopper_bwd

    monkeypatch.setattr("kernels.launch.PLANS", {})
    calls, launch = [], hopper_bwd.launch_hopper_bwd
    monkeypatch.setattr(hopper_bwd, "launch_hopper_bwd", lambda *a: calls.append(a) or launch(*a))
    return calls


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", DENSE)
def test_options_agree_with_float64(head_dim, dtype, case, forwards):
    """NaN in memory beyond every tensor."""
    for num_q, num_k in SHAPES:
        q, k, v = make_qkv(2, 4, 2, num_q, num_k, head_dim, dtype=dtype, device="cuda", layout="padded")
        ours = compare_with_oracle(flash_attention, q, k, v, **DENSE[case])
        o, lse = flash_attention(q, k, v, return_lse=True, **DENSE[case])
        assert torch.equal(o, ours["o"])
        assert torch.equal(lse, ours["lse"])
    assert len(forwards) == 2 * len(SHAPES)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (100, 30), "softcap": 5.0}], ids=["causal", "window"])
@pytest.mark.parametrize("case", PACKED)
def test_documents_agree_with_float64(head_dim, options, case, forwards):
    """No document reads or writes another's rows."""
    lengths_q, lengths_k = PACKED[case]
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    (q, k, v), arguments = make_packed(lengths_q, lengths_k or lengths_q, 4, 2, head_dim, **kind)
    ours = compare_with_oracle(flash_attention_varlen, q, k, v, **arguments, **options)
    for _ in range(2):  # the second is a replay
        o, lse = flash_attention_varlen(q, k, v, return_lse=True, **arguments, **options)
        assert torch.equal(o, ours["o"])
        assert torch.equal(lse, ours["lse"])
    assert len(forwards) == 3


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_documents_in_sections_of_heads_agree_with_float64(head_dim, forwards, monkeypatch):
    """A cache that does not hold K and V of all heads; the second section is taken from its shortest tile on."""
    from kernels.hopper.forward import L2_SHARE

    monkeypatch.setattr("kernels.launch.l2_bytes", lambda _: 100_000)
    qkv, arguments = make_packed(*PACKED["unequal"], 4, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    q, k, _ = (x.detach().transpose(0, 1)[None] for x in qkv)
    assert heads_per_section(q, k, L2_SHARE, uneven=True) == 2
    compare_with_oracle(flash_attention_varlen, *qkv, causal=True, **arguments)
    assert len(forwards) == 1


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_document_of_nan_leaves_the_others_their_bits(head_dim, forwards, backwards):
    """P = 0 does not hide a neighbour's NaN from the product with V."""
    lengths = [100, 28, 72]
    qkv, arguments = make_packed(lengths, lengths, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    with_nan, others = with_nan_in_the_second(lengths, *qkv)
    gradients = torch.randn_like(qkv[0]), torch.randn(4, sum(lengths), device="cuda")
    expected, ours = (
        results(flash_attention_varlen, *x, *gradients, causal=True, **arguments) for x in (qkv, with_nan)
    )
    for name, value in ours.items():
        rows, right = (x.T[others] if name == "lse" else x[others] for x in (value, expected[name]))
        assert torch.equal(rows, right), name
    assert len(forwards) == len(backwards) == 2


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_that_are_one_expanded_number_agree_with_float64(head_dim, forwards, backwards):
    """Those of a sum, whose strides are 0; TMA cannot address them."""

    def gradients(attention, *qkv):
        o, lse = attention(*qkv, causal=True, return_lse=True)
        return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o.sum() + lse.sum(), qkv), strict=True))

    qkv = make_qkv(2, 4, 2, 193, 193, head_dim, dtype=torch.bfloat16, device="cuda", layout="padded")
    wide = [x.detach().double().requires_grad_() for x in qkv]
    ours, plain, exact = (
        gradients(flash_attention, *qkv), gradients(naive_attention, *qkv), gradients(naive_attention, *wide),
    )  # fmt: skip
    o = naive_attention(*wide, causal=True).detach()
    assert_within_budget(ours, exact, plain, extra=rounded_o_term(o, *qkv, torch.ones_like(qkv[0]), causal=True))
    assert len(forwards) == 1
    ((do, dlse, *_),) = backwards
    assert not any(do.stride())
    assert not any(dlse.stride())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [(-1, -1), (100, 100)], ids=["full", "window"])
def test_keys_past_the_end_do_not_overflow_on_a_gpu(window, head_dim, backwards):
    """As in the simulator: their score is 0, far above a LSE below -100."""
    q, k, v = make_qkv(1, 1, 1, 64, 70, head_dim, dtype=torch.bfloat16, device="cuda", layout="padded")
    q, k = ((x.detach() + shift).requires_grad_() for x, shift in ((q, 5.0), (k, -5.0)))
    do, dlse = torch.randn(q.shape, device="cuda").bfloat16(), torch.randn(q.shape[:3], device="cuda")
    ours, plain = (results(x, q, k, v, do, dlse, window=window) for x in (flash_attention, naive_attention))
    exact = oracle(q, k, v, do, dlse, window=window)
    assert exact["lse"].max() < -100
    extra = rounded_o_term(exact["o"], q, k, v, do, window=window)
    assert_within_budget(ours, exact, plain, extra=extra | {"lse": 2**-24 * float(exact["lse"].abs().max())})
    assert len(backwards) == 1


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [True, False])
def test_maxima_that_rise_with_each_key_tile_agree_with_float64(causal, dtype, forwards):
    """Scores of some hundreds."""
    case = {"number": 0, "dtype": dtype, "kind": "large", "heads": 4, "kv_heads": 2, "head_dims": (128, 128),
            "causal": causal, "layout": "padded", "batch": 2}  # fmt: skip
    for num_q, num_k in [(300, 300), (193, 1000)]:
        assert run_case(case | {"num_q": num_q, "num_k": num_k}, "cuda") is None
    assert len(forwards) == 4


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("head_dim", [40, 80, 96, 192, 256])
@pytest.mark.parametrize("case", ["window and softcap", "three tiles", "softcap-50", "documents"])
def test_options_of_padded_heads_agree_with_float64(case, head_dim, forwards):
    for num_q, num_k in [(193, 193), (300, 100), (640, 640)]:
        if case == "documents":
            lengths_q, lengths_k = [num_q, 0, 1, 130], [num_k, 5, 1, 130]
            qkv, options = make_packed(lengths_q, lengths_k, 4, 2, head_dim, dtype=torch.bfloat16)
            options = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()} | {"causal": True}
            q, k, v = (_in_nan(x.detach().cuda()) for x in qkv)
            ours = flash_attention_varlen(q, k, v, return_lse=True, **options)
        else:
            options = DENSE[case]
            q, k, v = (
                x.detach()
                for x in make_qkv(2, 4, 2, num_q, num_k, head_dim, dtype=torch.bfloat16, device="cuda", layout="padded")
            )
            ours = flash_attention(q, k, v, return_lse=True, **options)
        exact = naive_for(options)(q.double(), k.double(), v.double(), return_lse=True, **options)
        plain = naive_for(options)(q, k, v, return_lse=True, **options)
        named = (dict(zip(("o", "lse"), x, strict=True)) for x in (ours, exact, plain))
        assert_within_budget(*named, factor=3.0 if "softcap" in options else 2.0)
    assert len(forwards) == 3


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@pytest.mark.parametrize(("dims", "kv_heads"), [((1, 1), 2), ((2, 1), 4), ((1, 4), 4), ((2, 4), 4), ((1, 4), 2)])
def test_block_masks_agree_with_float64(dims, kv_heads, head_dim, forwards, backwards):
    """The last mask tells heads of one group apart, and goes back on the portable kernels."""
    for num_q, num_k in SHAPES:
        mask = random_mask(*dims, num_q, num_k, torch.Generator().manual_seed(num_q + head_dim)).to("cuda")
        qkv = make_qkv(2, 4, kv_heads, num_q, num_k, head_dim, dtype=torch.bfloat16, device="cuda", layout="padded")
        ours = compare_with_oracle(flash_attention, *qkv, block_mask=mask)
        again = compare_with_oracle(flash_attention, *qkv, block_mask=mask)
        assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert len(forwards) == 2 * len(SHAPES)
    assert len(backwards) == (2 * len(SHAPES) if (dims[1], kv_heads) != (4, 2) else 0)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_block_masks_with_a_soft_cap_agree_with_float64(head_dim, forwards, backwards):
    for num_q, num_k in SHAPES:
        mask = random_mask(2, 1, num_q, num_k, torch.Generator().manual_seed(num_q + head_dim)).to("cuda")
        qkv = make_qkv(2, 4, 2, num_q, num_k, head_dim, dtype=torch.bfloat16, device="cuda", layout="padded")
        compare_with_oracle(flash_attention, *qkv, block_mask=mask, softcap=5.0)
    assert len(forwards) == len(backwards) == len(SHAPES)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("head_dim", [96, 192, 256])
def test_wide_heads_go_forward_on_hopper_and_back_on_the_portable_kernels(head_dim, forwards, monkeypatch):
    from kernels.hopper import backward as hopper_bwd
    from kernels.portable import backward as flash_bwd

    backwards = []
    for module, name in ((flash_bwd, "launch_flash_bwd"), (hopper_bwd, "launch_hopper_bwd")):
        launch = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, launch=launch: backwards.append(name) or launch(*a))
    qkv = make_qkv(2, 4, 2, 193, 193, head_dim, dtype=torch.bfloat16, device="cuda", layout="padded")
    compare_with_oracle(flash_attention, *qkv, causal=True)
    assert len(forwards) == 1
    assert backwards == ["launch_flash_bwd" if head_dim > 128 else "launch_hopper_bwd"]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_alibi_agrees_with_float64(head_dim, forwards):
    """Each batch entry and document has slopes of its own."""
    masks = {}, {"causal": True}, {"causal": True, "softcap": 5.0}
    for (num_q, num_k), how in itertools.product(SHAPES, masks):
        qkv = make_qkv(2, 4, 2, num_q, num_k, head_dim, dtype=torch.bfloat16, device="cuda", layout="padded")
        compare_with_oracle(flash_attention, *qkv, alibi_slopes=torch.rand(2, 4, device="cuda"), **how)
    for lengths_q, lengths_k in PACKED.values():
        lengths = lengths_q, lengths_k or lengths_q
        qkv, arguments = make_packed(*lengths, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda")
        slopes = torch.rand(len(lengths_q), 4, device="cuda")
        compare_with_oracle(flash_attention_varlen, *qkv, alibi_slopes=slopes, **arguments)
    assert len(forwards) == len(masks) * len(SHAPES) + len(PACKED)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("head_dim", [96, 192])  # key tiles of 128, and of 64
def test_alibi_of_padded_heads_agrees_with_float64(head_dim, forwards):
    for num_q, num_k in SHAPES:
        qkv = make_qkv(2, 4, 2, num_q, num_k, head_dim, dtype=torch.bfloat16, device="cuda", layout="padded")
        compare_with_oracle(flash_attention, *qkv, causal=True, alibi_slopes=torch.rand(2, 4, device="cuda"))
    assert len(forwards) == len(SHAPES)


@pytest.mark.gpu
@needs_hopper
def test_other_packings_replay_the_same_kernel(forwards):
    """Where documents begin is in memory only, so a launch may be replayed for another packing of the same sizes."""
    for lengths in ([100, 200, 300], [300, 0, 300], [1, 598, 1]):
        (q, k, v), arguments = make_packed(lengths, lengths, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
        arguments |= {"max_seqlen_q": 600, "max_seqlen_k": 600}
        compare_with_oracle(flash_attention_varlen, q, k, v, causal=True, **arguments)
    assert len(forwards) == 3


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("plan", range(6))
def test_every_plan_agrees_with_the_portable_kernel(plan):
    """Each plan that `plan_for` can choose, on lengths with a ragged end and more tiles than multiprocessors."""
    from kernels.hopper.forward import launch_hopper_fwd, plan_for
    from kernels.portable.forward import launch_flash_fwd

    masks, lengths = (Options(True, 1.0), Options(False, 1.0)), (1024, 2048, 4096, 16384)
    chosen = sorted(
        {(d, mask.causal, plan_for(d, mask, n)) for d in (64, 128, 256) for mask in masks for n in lengths}, key=repr
    )
    for head_dim, causal, its_plan in chosen[plan::6]:
        for tokens in (333, 2048):
            q, k, v = (torch.randn(2, tokens, 8, head_dim, device="cuda").bfloat16().transpose(1, 2) for _ in range(3))
            options = Options(causal, head_dim**-0.5)
            expected = launch_flash_fwd(q, k, v, options)
            for actual, right in zip(launch_hopper_fwd(q, k, v, options, its_plan), expected, strict=True):
                torch.testing.assert_close(actual, right, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("feature", FEATURES)
def test_the_matrix_says_which_kernel_runs(feature, dtype, monkeypatch):
    """A "yes" of the Hopper column runs its kernels, a "no" the portable ones; both are right."""
    from kernels.hopper import backward as hopper_bwd
    from kernels.hopper import forward as hopper_fwd

    launches = []
    for which, module, name in (
        ("forward", hopper_fwd, "launch_hopper_fwd"),
        ("backward", hopper_bwd, "launch_hopper_bwd"),
    ):
        launch = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, which=which, launch=launch: launches.append(which) or launch(*a))
    monkeypatch.setattr("kernels.launch.PLANS", {})
    monkeypatch.setattr(support, "HOPPER_PACKED_HEAD_DIMS", support.HOPPER_HEAD_DIMS)
    monkeypatch.setattr(support, "HOPPER_MASKED_HEAD_DIMS", support.HOPPER_BACKWARD_HEAD_DIMS)
    which, q, k, v, options = call_for([feature], dtype, "cuda")
    widen = [torch.randn((*x.shape[:-1], 64), device="cuda").to(dtype).requires_grad_() for x in (q, k, v)]
    if feature == "head_dim_v":
        widen[2] = torch.randn((*v.shape[:-1], 128), device="cuda").to(dtype).requires_grad_()
    compare_with_oracle(ATTENTION["flash"][which], *widen, with_dlse=feature == "lse", **options)
    for which in ("forward", "backward"):
        assert (which in launches) == KERNELS["hopper"].supports(feature, dtype)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("head_dim", "num_kv_heads"), [(64, 12), (64, 3), (128, 8), (128, 1)])
def test_the_backward_adds_in_one_order(head_dim, num_kv_heads, causal):
    """Many programs on one query tile, on a busy and on an idle GPU: the same bits, and right."""
    from kernels.hopper.backward import launch_hopper_bwd
    from kernels.portable.backward import launch_flash_bwd
    from kernels.portable.forward import launch_flash_fwd

    num_heads = 12 if head_dim == 64 else 8
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    q, k, v, do = (torch.randn(1, 8192, h, head_dim, device="cuda").bfloat16().transpose(1, 2) for h in heads)
    options = Options(causal, head_dim**-0.5)
    o, lse = launch_flash_fwd(q, k, v, options)
    first = launch_hopper_bwd(do, None, q, k, v, o, lse, options)
    for x, y in zip(first, launch_flash_bwd(do, None, q, k, v, o, lse, options), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    side = torch.cuda.Stream()
    for run in range(10):
        if run % 2:
            with torch.cuda.stream(side):  # takes multiprocessors away, so that programs start at other times
                torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
        again = launch_hopper_bwd(do, None, q, k, v, o, lse, options)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), run


@pytest.mark.gpu
@needs_hopper
def test_documents_with_narrow_heads_take_the_portable_forward():
    ends = torch.tensor([0, 100, 512], device="cuda", dtype=torch.int32)
    documents = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 412, "max_seqlen_k": 412}
    options = Options(True, 0.1, **documents)
    for head_dim in (64, 56):
        q = torch.randn(1, 1, 512, head_dim, device="cuda", dtype=torch.bfloat16)
        assert support.takes_hopper(q, q, q, options) == (head_dim == 64)
        assert support.takes_hopper(q, q, q, options, backward=True)


@pytest.mark.parametrize(
    ("head_dim", "backward", "taken"),
    [
        (24, False, False), (36, False, False), (264, False, False), (136, True, False), (128, True, True),
        (256, False, True), (40, True, True),
    ],
)  # fmt: skip
def test_other_head_dims_are_refused(head_dim, backward, taken, monkeypatch):
    q = torch.empty(1, 1, 128, head_dim, dtype=torch.bfloat16)
    assert not support.takes_hopper(q, q, q, Options(True, 1.0), backward=backward)  # on a CPU
    monkeypatch.setattr("kernels.support._no_hopper_device_reason", lambda device: None)
    assert support.takes_hopper(q, q, q, Options(True, 1.0), backward=backward) == taken


@pytest.mark.gpu
@needs_hopper
def test_what_tma_cannot_address_runs_on_the_portable_kernel():
    whole = torch.randn(1, 2, 64, 72, dtype=torch.bfloat16, device="cuda")
    odd = whole[..., 1:65]
    o = flash_attention(odd, odd, odd)
    torch.testing.assert_close(o, flash_attention(*[odd.contiguous()] * 3), rtol=2e-2, atol=2e-2)
