"""Shared by the attention tests: inputs, the float64 oracle, and flash-attention's error criterion."""

import torch
from torch import Tensor

from kernels import naive_attention

NAMES = ("o", "lse", "dq", "dk", "dv")
FLOAT32_FLOOR = 2e-6  # dP - delta cancels two float32 sums of magnitude up to about 10; the plain formula may hit 0


def make_qkv(
    batch: int,
    heads: int,
    kv_heads: int,
    num_q: int,
    num_k: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    layout: str = "bhnd",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v of shape (B, H, N, D) that require gradients.

    layout: "bhnd" contiguous; "bnhd" stored as (B, N, H, D); "packed" slices of one (B, N, Hq + 2 Hkv, D)
        tensor;
    "strided" with a last dimension that is not contiguous; "padded" views into a larger tensor filled with
    NaN.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    shapes = [(heads, num_q), (kv_heads, num_k), (kv_heads, num_k)]
    if layout == "packed":
        assert num_q == num_k
        qkv = random(batch, num_q, heads + 2 * kv_heads, head_dim).transpose(1, 2)
        tensors = qkv.split([heads, kv_heads, kv_heads], dim=1)
    elif layout == "bhnd":
        tensors = [random(batch, h, n, head_dim) for h, n in shapes]
    elif layout == "bnhd":
        tensors = [random(batch, n, h, head_dim).transpose(1, 2) for h, n in shapes]
    elif layout == "strided":
        tensors = [random(batch, h, head_dim, n).transpose(2, 3) for h, n in shapes]
    elif layout == "padded":
        tensors = []
        for h, n in shapes:
            whole = torch.full((batch, h + 1, n + 3, head_dim + 16), float("nan"), dtype=dtype, device=device)
            whole[:, :h, :n, :head_dim] = random(batch, h, n, head_dim)
            tensors.append(whole[:, :h, :n, :head_dim])
    else:
        raise AssertionError(layout)
    return tuple(x.detach().requires_grad_() for x in tensors)


def results(attention, q, k, v, do, dlse, **options) -> dict[str, Tensor]:
    """O, LSE and the gradients of sum(O * dO) + sum(LSE * dLSE); rows with LSE -inf get no dLSE."""
    o, lse = attention(q, k, v, return_lse=True, **options)
    finite = torch.isfinite(lse)
    loss_terms, grads = [o], [do.to(o.dtype)]
    if dlse is not None:
        loss_terms.append(lse)
        grads.append(torch.where(finite, dlse, 0.0).to(lse.dtype))
    return dict(
        zip(
            NAMES,
            [x.detach() for x in (o, lse, *torch.autograd.grad(loss_terms, (q, k, v), grads))],
            strict=True,
        )
    )


def oracle(q, k, v, do, dlse, **options) -> dict[str, Tensor]:
    """The same five results by the naive formula in float64."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    return results(naive_attention, *wide, do.double(), None if dlse is None else dlse.double(), **options)


def assert_within_budget(ours: dict, reference: dict, lowp: dict, factor: float = 2.0) -> None:
    """flash-attention's criterion: our error is at most `factor` times the plain formula's in the same
    precision.

    The floor, 2 max|(x + 0.3 - 0.3) - x| in the output's dtype, is theirs too: it keeps results that the
    plain formula happens to hit exactly from failing. NaN never passes; infinities must agree in place and
    sign.
    """
    for name, expected in reference.items():
        actual, plain = ours[name], lowp[name]
        assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}"
        assert not torch.isnan(actual).any(), f"{name} holds NaN"
        finite = torch.isfinite(expected)
        assert torch.equal(actual[~finite].double(), expected[~finite].double()), f"{name}: infinities differ"
        if not finite.any():
            continue
        expected, actual, plain = (x[finite].double() for x in (expected, actual, plain))
        rounded = expected.to(ours[name].dtype)
        floor = FLOAT32_FLOOR + 2 * float(((rounded + 0.3 - 0.3).double() - rounded.double()).abs().max())
        error, allowed = (
            float((actual - expected).abs().max()),
            factor * float((plain - expected).abs().max()) + floor,
        )
        assert error <= allowed, f"{name}: error {error:.3g} is more than {allowed:.3g}"


def compare_with_oracle(attention, q, k, v, *, with_dlse: bool = True, factor: float = 2.0, seed: int = 1, **options):
    """Run forward and backward and hold all five results to the budget."""
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(q.dtype).to(q.device)
    dlse = (
        torch.randn(q.shape[:3], generator=generator, dtype=torch.float64).float().to(q.device) if with_dlse else None
    )
    ours = results(attention, q, k, v, do, dlse, **options)
    exact = oracle(q, k, v, do, dlse, **options)
    lowp = results(naive_attention, q, k, v, do, dlse, **options)
    assert ours["o"].dtype == q.dtype
    assert ours["lse"].dtype == torch.float32
    assert_within_budget(ours, exact, lowp, factor)
    return ours
