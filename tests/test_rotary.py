"""The rotary kernel against the PyTorch formula, forward and backward."""

import pytest
import torch

from kernels.fused.rotary import rotary_bwd, rotary_fwd, rotate, rotate_and_split
from model.positions import rope_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    # B, N, Hq, Hkv, D
    (2, 19, 4, 4, 16),
    (1, 5, 6, 2, 40),
    (2, 33, 3, 1, 80),
    (1, 16, 2, 2, 256),
    (3, 1, 8, 8, 64),
]


def make(B, N, Hq, Hkv, D, dtype):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(B, N, Hq + 2 * Hkv, D, generator=generator).to(dtype).to(DEVICE).requires_grad_()
    cos, sin = (table[7 : 7 + N].to(DEVICE) for table in rope_tables(N + 7, D, 10000.0))  # a cache's later tokens
    return qkv, cos, sin


def formula(qkv, cos, sin, num_heads, norm_eps=None):
    kv_heads = (qkv.shape[2] - num_heads) // 2
    q, k, v = qkv.split([num_heads, kv_heads, kv_heads], dim=2)
    if norm_eps is not None:
        q, k = (x * (x.square().mean(-1, keepdim=True) + norm_eps).rsqrt() for x in (q, k))
    return [x.transpose(1, 2) for x in (rotate(q, cos, sin), rotate(k, cos, sin), v)]


@pytest.mark.parametrize("norm_eps", [None, 1e-6, 0.5], ids=["plain", "norm", "large eps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=["-".join(map(str, c)) for c in CASES])
def test_agrees_with_the_formula(case, dtype, norm_eps, poisoned_memory):
    qkv, cos, sin = make(*case, dtype)
    *results, scale = rotary_fwd(qkv, cos, sin, case[2], norm_eps)
    assert not scale.requires_grad
    grads = [torch.randn_like(x) for x in results]
    torch.autograd.backward(results, grads)
    other = qkv.detach().float().requires_grad_()
    expected = formula(other, cos, sin, case[2], norm_eps)
    torch.autograd.backward(expected, [x.float() for x in grads])
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs, **tolerance)
    # with a norm the gradient reads heads that were rounded
    tolerance["atol"] *= 1 if norm_eps is None else 4
    torch.testing.assert_close(qkv.grad.float(), other.grad, **tolerance)


def test_turning_back_restores_the_input():
    qkv, cos, sin = make(2, 19, 4, 2, 16, torch.float32)
    back = rotary_bwd(*rotary_fwd(qkv, cos, sin, 4)[:3], cos, sin)
    torch.testing.assert_close(back, qkv, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_eps", [None, 1e-6])
def test_operators_are_well_formed(norm_eps):
    qkv, cos, sin = make(1, 5, 4, 2, 16, torch.float32)
    torch.library.opcheck(rotary_fwd, (qkv, cos, sin, 4, norm_eps))


@pytest.mark.parametrize("norm_eps", [None, 1e-6])
def test_public_function_agrees_with_the_operator(norm_eps):
    qkv, cos, sin = make(2, 19, 4, 2, 16, torch.float32)
    arguments = qkv, cos, sin, 4, norm_eps
    for ours, theirs in zip(rotate_and_split(*arguments), rotary_fwd(*arguments)[:3], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("norm_eps", [None, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_turned_where_they_are_heads_have_the_same_bits(dtype, norm_eps):
    from kernels.fused.rotary import _rotary_in_place

    qkv, cos, sin = make(2, 19, 4, 2, 16, dtype)
    expected = rotary_fwd(qkv, cos, sin, 4, norm_eps)[:3]
    room = qkv.detach().clone()
    results = _rotary_in_place(room, cos, sin, 4, norm_eps)
    for ours, theirs, part in zip(results, expected, room.transpose(1, 2).split([4, 2, 2], 1), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.data_ptr(), ours.stride()) == (part.data_ptr(), part.stride())


def test_turning_in_place_keeps_to_the_numbers_that_it_is_given():
    """The kernel read a copy of numbers with strides, and wrote to their neighbours."""
    from kernels.fused.rotary import _rotary_in_place

    qkv, cos, sin = make(2, 19, 4, 2, 16, torch.float32)
    expected = rotary_fwd(qkv, cos, sin, 4, None)[:3]
    strided, neighbours = torch.stack((qkv.detach(), qkv.detach()), dim=-1).unbind(-1)
    for ours, theirs in zip(_rotary_in_place(strided, cos, sin, 4), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(neighbours, qkv)


@pytest.mark.parametrize("shared", [0, 1, 2], ids=["rows", "tokens", "heads"])
def test_numbers_that_heads_share_are_turned_once_for_each(shared):
    from kernels.fused.rotary import _rotary_in_place

    qkv, cos, sin = make(2, 19, 4, 2, 16, torch.float32)
    qkv = qkv.detach().narrow(shared, 0, 1).expand_as(qkv)
    expected = rotary_fwd(qkv.clone(), cos, sin, 4, None)[:3]
    for ours, theirs in zip(_rotary_in_place(qkv, cos, sin, 4), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_projection_that_autograd_keeps_is_not_turned_in_silence():
    from kernels.fused.rotary import _rotary_in_place

    qkv, cos, sin = make(2, 19, 4, 2, 16, torch.float32)
    kept, weight = qkv.detach().clone(), torch.ones(16, device=DEVICE, requires_grad=True)
    total = (kept * weight).sum()
    _rotary_in_place(kept, cos, sin, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.gpu
def test_only_whom_no_gradient_asks_are_turned_where_they_are():
    qkv, cos, sin = make(2, 19, 4, 2, 16, torch.float32)
    before = qkv.detach().clone()
    rotate_and_split(qkv, cos, sin, 4, overwrite=True)
    assert torch.equal(qkv, before)
    with torch.no_grad():
        rotate_and_split(qkv, cos, sin, 4)
        assert torch.equal(qkv, before)
        rotate_and_split(qkv, cos, sin, 4, overwrite=True)
        assert not torch.equal(qkv, before)


@pytest.mark.skipif(DEVICE == "cuda", reason="the same lines, on a CPU")
def test_an_exported_graph_takes_any_number_of_tokens():
    class Split(torch.nn.Module):
        def forward(self, qkv, cos, sin):
            return rotate_and_split(qkv, cos, sin, 4)

    n = torch.export.Dim("n", min=2, max=64)
    exported = torch.export.export(
        Split(), make(1, 19, 4, 2, 16, torch.float32), dynamic_shapes=({1: n}, {0: n}, {0: n})
    ).module()
    other = make(1, 7, 4, 2, 16, torch.float32)
    for found, expected in zip(exported(*other), rotate_and_split(*other, 4), strict=True):
        torch.testing.assert_close(found, expected)


def test_strided_gradients():
    """Gradients arrive as PyTorch's attention leaves them: heads first, or expanded."""
    qkv, cos, sin = make(2, 19, 4, 2, 16, torch.float32)
    dq, dk, dv = (torch.randn(x.shape, device=DEVICE) for x in rotary_fwd(qkv, cos, sin, 4)[:3])
    dv = dv[..., :1].expand_as(dv)
    dense = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dq, dk, dv)]
    torch.testing.assert_close(rotary_bwd(dq, dk, dv, cos, sin), rotary_bwd(*dense, cos, sin))


def test_strided_projections_and_tables():
    """Tables may be parts of wider ones, each of its own."""
    qkv, cos, sin = make(2, 19, 4, 2, 16, torch.float32)
    apart = torch.stack((qkv, qkv + 1), -1)[..., 0]
    wider, wider_sin = (torch.cat((x, x + 1), -1)[..., :16] for x in (cos, sin))
    steps = torch.stack((cos, sin), -1)
    for tables in ((wider, wider_sin), (wider, sin), (cos, wider_sin), steps.unbind(-1)):
        for ours, theirs in zip(rotary_fwd(apart, *tables, 4), rotary_fwd(qkv, cos, sin, 4), strict=True):
            assert torch.equal(ours, theirs)


def test_under_autocast_all_parts_have_the_projections_dtype():
    qkv, cos, sin = make(2, 19, 4, 2, 16, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert {x.dtype for x in rotate_and_split(qkv, cos, sin, 4, 1e-6)} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.parametrize("norm_eps", [None, 0.5])
def test_a_replayed_launch_is_of_its_own_tensors(norm_eps):
    """At addresses that only Triton takes too, and with as many tokens and heads in another layout."""
    for seed in range(4):
        qkv, cos, sin = make(2, 19, 4, 2, 16, torch.float32)
        other = (qkv.detach() * (1 + seed)).sin()
        if seed == 2:  # one element further on
            other = torch.cat((other.new_zeros(1), other.flatten()))[1:].view_as(other)
        if seed == 3:
            other = other.transpose(0, 1).contiguous().transpose(0, 1)
        other.requires_grad_()
        results = rotary_fwd(other, cos, sin, 4, norm_eps)[:3]
        (actual,) = torch.autograd.grad(sum((x * x.detach().cos()).sum() for x in results), other)
        expected = formula(other, cos, sin, 4, norm_eps)
        (gradient,) = torch.autograd.grad(sum((x * x.detach().cos()).sum() for x in expected), other)
        for ours, theirs in zip((*results, actual), (*expected, gradient), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_eps", [None, 1e-6])
def test_rows_past_the_offsets_of_32_bits_are_launched_in_parts(norm_eps, monkeypatch):
    import kernels.fused.rotary_kernel as kernel

    qkv, cos, sin = make(2, 19, 4, 2, 16, torch.float32)

    def both_ways():
        *results, scale = rotary_fwd(qkv, cos, sin, 4, norm_eps)
        turned = () if norm_eps is None else (*results[:2], scale)
        return *results, scale, rotary_bwd(*(x + 1 for x in results), cos, sin, *turned)

    whole, launch, tokens = both_ways(), kernel.launch_rotary, []
    monkeypatch.setattr(kernel, "MOST_OFFSETS", 7 * qkv.stride(1) + 1)
    monkeypatch.setattr(kernel, "launch_rotary", lambda x, *a, **b: tokens.append(x.shape[:2]) or launch(x, *a, **b))
    for part, other in zip(both_ways(), whole, strict=True):
        assert torch.equal(part, other)
    parts = [(1, 7), (1, 7), (1, 5)] * 2
    assert tokens == 2 * [(2, 19), *parts]


def test_a_table_elsewhere_is_another_plan(monkeypatch):
    """Its address would be read on the wrong device."""
    import kernels.fused.rotary_kernel as kernel

    qkv, cos, sin = make(1, 3, 2, 1, 16, torch.float32)
    q, k, v = (torch.empty(1, heads, 3, 16) for heads in (2, 1, 1))
    keys = []
    monkeypatch.setattr(kernel, "plan_of", keys.append)
    monkeypatch.setattr(kernel, "run", lambda *_: None)
    for table in (cos, cos.to("meta")):
        kernel.launch_rotary(qkv, q, k, v, table, sin)
    assert keys[0] != keys[1]


def test_tables_of_other_tokens_are_refused():
    qkv, cos, sin = make(2, 19, 4, 2, 16, torch.float32)
    with pytest.raises(ValueError, match="cos and sin have 18 and 19 positions but qkv has 19 tokens"):
        rotate_and_split(qkv, cos[1:], sin, 4)
    with pytest.raises(ValueError, match="cos and sin have 19 and 18 positions but qkv has 19 tokens"):
        rotate_and_split(qkv, cos, sin[1:], 4)


@pytest.mark.parametrize("num_heads", [-1, 0, 3, 8, 9])
def test_heads_that_leave_none_or_an_odd_one_are_refused(num_heads):
    qkv, cos, sin = make(2, 19, 4, 2, 16, torch.float32)  # 8 heads
    with pytest.raises(ValueError, match=f"num_heads is {num_heads} and qkv has 8 heads; what is left must be k's and"):
        rotate_and_split(qkv, cos, sin, num_heads)


def test_tables_without_the_heads_dimension_are_refused():
    """With as many tokens as heads they would be read as other ones."""
    qkv, table = torch.randn(2, 3, 4, 8), torch.randn(3, 1, 8)
    with pytest.raises(ValueError, match=r"cos has shape \(3, 8\) and sin \(3, 1, 8\); expected \(N, 1, D\), and an"):
        rotate_and_split(qkv, table[:, 0], table, 2)
    with pytest.raises(ValueError, match=r"cos has shape \(3, 1, 8\) and sin \(3, 1, 6\); expected \(N, 1, D\)"):
        rotate_and_split(qkv, table, table[..., :6], 2)
    with pytest.raises(ValueError, match=r"expected \(N, 1, D\), and an even D: qkv has 7"):
        rotate_and_split(qkv[..., :7], table[..., :7], table[..., :7], 2)
