"""Shared by the attention tests: inputs, the float64 oracle, and flash-attention's error criterion."""

import math

import torch
from torch import Tensor

from kernels import naive_attention, naive_attention_varlen

NAMES = ("o", "lse", "dq", "dk", "dv", "dsinks")
FLOAT32_FLOOR = 2e-6  # dP - delta cancels two float32 sums of magnitude up to about 10; the plain formula may hit 0
SOFTCAP_FACTOR = 3.0  # flash-attention's allowance: tanh in a few instructions


def make_qkv(
    batch: int,
    heads: int,
    kv_heads: int,
    num_q: int,
    num_k: int,
    head_dim: int,
    *,
    head_dim_v: int | None = None,
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

    head_dim_v = head_dim_v or head_dim
    shapes = [(heads, num_q, head_dim), (kv_heads, num_k, head_dim), (kv_heads, num_k, head_dim_v)]
    if layout == "packed":
        assert num_q == num_k
        assert head_dim_v == head_dim
        qkv = random(batch, num_q, heads + 2 * kv_heads, head_dim).transpose(1, 2)
        tensors = qkv.split([heads, kv_heads, kv_heads], dim=1)
    elif layout == "bhnd":
        tensors = [random(batch, h, n, d) for h, n, d in shapes]
    elif layout == "bnhd":
        tensors = [random(batch, n, h, d).transpose(1, 2) for h, n, d in shapes]
    elif layout == "strided":
        tensors = [random(batch, h, d, n).transpose(2, 3) for h, n, d in shapes]
    elif layout == "padded":
        tensors = []
        for h, n, d in shapes:
            whole = torch.full((batch, h + 1, n + 3, d + 16), float("nan"), dtype=dtype, device=device)
            whole[:, :h, :n, :d] = random(batch, h, n, d)
            tensors.append(whole[:, :h, :n, :d])
    else:
        raise AssertionError(layout)
    return tuple(x.detach().requires_grad_() for x in tensors)


def make_packed(
    lengths_q: list[int],
    lengths_k: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict]:
    """q, k, v of documents end to end, (tokens, heads, head_dim), and the arguments that say where each is."""
    sizes = (heads, kv_heads, sum(lengths_q), sum(lengths_k), head_dim)
    dense = make_qkv(1, *sizes, head_dim_v=head_dim_v, dtype=dtype, device=device, layout="bnhd", seed=seed)
    qkv = tuple(x.detach()[0].transpose(0, 1).requires_grad_() for x in dense)
    arguments = {}
    for name, lengths in (("q", lengths_q), ("k", lengths_k)):
        starts = torch.tensor([0, *lengths]).cumsum(0)
        arguments[f"cu_seqlens_{name}"] = starts.to(torch.int32).to(device)
        arguments[f"max_seqlen_{name}"] = max(lengths)
    return qkv, arguments


def results(attention, q, k, v, do, dlse, **options) -> dict[str, Tensor]:
    """O, LSE and the gradients of sum(O * dO) + sum(LSE * dLSE), of sinks too; rows with LSE -inf get no dLSE."""
    inputs = [q, k, v]
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].detach().requires_grad_()
        inputs.append(options["sinks"])
    o, lse = attention(q, k, v, return_lse=True, **options)
    finite = torch.isfinite(lse)
    loss_terms, grads = [o], [do.to(o.dtype)]
    if dlse is not None:
        loss_terms.append(lse)
        grads.append(torch.where(finite, dlse, 0.0).to(lse.dtype))
    values = (o, lse, *torch.autograd.grad(loss_terms, inputs, grads))
    return dict(zip(NAMES, [x.detach() for x in values], strict=False))


def naive_for(options: dict):
    """The naive formula that takes these options: dense, or a loop over packed documents."""
    return naive_attention_varlen if "cu_seqlens_q" in options else naive_attention


def oracle(q, k, v, do, dlse, **options) -> dict[str, Tensor]:
    """The same results by the naive formula in float64."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    for name in ("sinks", "alibi_slopes"):
        if options.get(name) is not None:
            options[name] = options[name].double()
    return results(naive_for(options), *wide, do.double(), None if dlse is None else dlse.double(), **options)


def rounded_o_term(o: Tensor, q, k, v, do, **options) -> dict[str, float]:
    """How far the gradients move, at most, when delta = rowsum(dO * O) is taken from O rounded to q's dtype, and is
    summed in float32 in another order than dP, which it cancels where a row sees one key: two roundings of 2^-24.

    `o` is the exact O in float64. An error e in delta changes dS by -P e, and P is the derivative of LSE, so the
    gradients move by those of sum(LSE * e).
    """
    e = (do.double() * (o - o.to(q.dtype).double())).sum(-1)
    e += torch.copysign(2**-23 * (do.double() * o).norm(dim=-1), e)
    # of roundings by up to half an ulp, the standard deviation
    spread = torch.finfo(q.dtype).eps / 12**0.5 * (do.double() * o).norm(dim=-1)
    if o.dim() == 3:  # packed: LSE has heads first
        e, spread = e.transpose(0, 1), spread.transpose(0, 1)
    moved = oracle(q, k, v, torch.zeros_like(do), e, **options)
    terms = {name: float(moved[name].abs().max()) for name in ("dq", "dk") if moved[name].numel()}
    if "dsinks" in moved and moved["dsinks"].numel():
        # one sum over all rows, in which the errors of this O may cancel and another's may not: two deviations of it
        p = (options["sinks"].double()[:, None] - moved["lse"]).exp()  # what the sink has of each row
        terms["dsinks"] = 2 * float((p * spread).transpose(0, -2).flatten(1).norm(dim=-1).max())
    return terms


def lse_term(exact: dict[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """What float32 gradients lose because S, LSE and their difference are rounded to 2^-24 of LSE; softmax subtracts
    exactly."""
    finite = exact["lse"][torch.isfinite(exact["lse"])]
    if dtype != torch.float32 or finite.numel() == 0:
        return {}
    largest = float(finite.abs().max())
    return {n: 2**-23 * largest * float(exact[n].abs().max()) for n in ("dq", "dk", "dv") if exact[n].numel()}


def assert_within_budget(
    ours: dict,
    reference: dict,
    lowp: dict,
    factor: float = 2.0,
    floor: float = FLOAT32_FLOOR,
    extra: dict[str, float] | None = None,
) -> None:
    """flash-attention's criterion: our error is at most `factor` times the plain formula's in the same
    precision.

    The least that is allowed, 2 max|(x + 0.3 - 0.3) - x| in the output's dtype, is theirs too: it keeps
    results that the plain formula happens to hit exactly from failing. `extra` is allowed once more, doubled, by
    result. NaN never passes; infinities must agree in place and sign.
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
        least = floor + 2 * float(((rounded + 0.3 - 0.3).double() - rounded.double()).abs().max())
        if name == "dsinks":
            # a sum over rows of P * rowsum(dO * O), where our O has been rounded and eager code's has not: each row
            # adds about eps / 4 * sqrt(Dv), and P keeps the sum of long ones near eps
            eps, entries = torch.finfo(ours["o"].dtype).eps, ours["o"].numel() / actual.numel()
            least += eps * min(8.0, 0.25 * math.sqrt(entries))
        error, allowed = (
            float((actual - expected).abs().max()),
            factor * float((plain - expected).abs().max()) + 2 * (extra or {}).get(name, 0.0) + least,
        )
        assert error <= allowed, f"{name}: error {error:.3g} is more than {allowed:.3g}"


def compare_with_oracle(attention, q, k, v, *, with_dlse: bool = True, factor: float = 2.0, seed: int = 1, **options):
    """Run forward and backward and hold all results to the budget."""
    generator = torch.Generator().manual_seed(seed)
    packed = "cu_seqlens_q" in options
    do_shape, lse_shape = (*q.shape[:-1], v.shape[-1]), (q.shape[1::-1] if packed else q.shape[:3])
    do = torch.randn(do_shape, generator=generator, dtype=torch.float64).to(q.dtype).to(q.device)
    dlse = torch.randn(lse_shape, generator=generator, dtype=torch.float64).float().to(q.device) if with_dlse else None
    if options.get("softcap"):
        factor = max(factor, SOFTCAP_FACTOR)
    ours = results(attention, q, k, v, do, dlse, **options)
    exact = oracle(q, k, v, do, dlse, **options)
    lowp = results(naive_for(options), q, k, v, do, dlse, **options)
    assert ours["o"].dtype == q.dtype
    assert ours["lse"].dtype == torch.promote_types(q.dtype, torch.float32)
    assert_within_budget(ours, exact, lowp, factor, extra=lse_term(exact, q.dtype))
    return ours
