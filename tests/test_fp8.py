"""FP8 attention: the quantizer, the reference, what is refused, what the kernel compiles to (no GPU needed), and that
it is right (GPU)."""

import importlib.util
import math

import numpy as np
import pytest
import torch

from kernels import flash_attention_fp8, naive_attention, naive_attention_fp8, quantize_per_head
from kernels.call import Options
from kernels.hopper import fp8
from kernels.hopper.fp8 import check_fp8_call, flash_fwd_fp8
from tests.compiled import compiled

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU (compute capability 9.0)",
)


def _quantized(*tensors):
    """(q, k, v) in e4m3 and their scales by the names of the arguments."""
    pairs = [quantize_per_head(x) for x in tensors]
    return [x for x, _ in pairs], dict(zip(("q_scale", "k_scale", "v_scale"), (s for _, s in pairs), strict=True))


def _dequantized(tensors, scales):
    return [x.double() * s.double()[:, :, None, None] for x, s in zip(tensors, scales.values(), strict=True)]


def _rms(x):
    return float(x.double().square().mean().sqrt())


def _with_sink(num_q, num_k, head_dim, gap):
    """Normal q, k, v where every query scores `gap` with the first key, whose value is 0: other weights are small."""
    q, k, v = (torch.randn(1, 2, n, head_dim) for n in (num_q, num_k, num_k))
    q[..., 0] = k[:, :, 0, 0] = math.sqrt(gap * math.sqrt(head_dim))
    k[:, :, 0, 1:] = k[:, :, 1:, 0] = v[:, :, 0] = 0.0
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_head_uses_the_whole_range(dtype):
    x = (torch.randn(2, 50, 3, 16) * torch.tensor([1e-3, 1.0, 1e3])[:, None]).to(dtype).transpose(1, 2)
    x8, scale = quantize_per_head(x)
    assert x8.dtype == torch.float8_e4m3fn
    assert x8.stride() == x.stride()
    assert scale.shape == (2, 3)
    assert scale.dtype == torch.float32
    assert torch.equal(x8.float().abs().amax((2, 3)), torch.full((2, 3), 448.0))
    back = x8.float() * scale[:, :, None, None]
    # three bits of mantissa: half a unit is a 16th; below 2^-6 of the scale, half of 2^-9
    allowed = torch.maximum(x.float().abs() / 16, scale[:, :, None, None] / 2**10) * 1.001
    assert ((back - x.float()).abs() <= allowed).all()


@pytest.mark.parametrize("size", [1e-10, 1.0, 1e10, 1e38])
def test_the_largest_value_does_not_overflow_by_rounding(size):
    """PyTorch turns what is beyond 464 into NaN."""
    x8, _ = quantize_per_head((1.0 + torch.rand(1, 4096, 4, 8)) * size)
    assert torch.equal(x8.float().amax((2, 3)), torch.full((1, 4096), 448.0))


def test_a_head_of_zeros_stays_zero():
    x8, scale = quantize_per_head(torch.zeros(1, 2, 4, 8))
    assert (x8.float() == 0).all()
    assert (scale > 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_head_that_is_not_finite_is_seen(bad):
    x = torch.randn(1, 2, 40, 16)
    clean, scales = _quantized(x, x, x)
    expected = naive_attention_fp8(*clean, **scales)
    for place in range(3):
        tensors = [x.clone() for _ in range(3)]
        tensors[place][0, 1, 7, 3] = bad
        broken, scales = _quantized(*tensors)
        o = naive_attention_fp8(*broken, **scales)
        assert o[:, 1].isnan().all()
        assert torch.equal(o[:, 0], expected[:, 0])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 3, 4), "x has shape \\(2, 3, 4\\); expected 4 dimensions"),
        (torch.zeros(1, 1, 2, 8, dtype=torch.int32), "x has dtype torch.int32; expected float64"),
        (torch.zeros(1, 1, 2, 8).to(torch.float8_e4m3fn), "x has dtype torch.float8_e4m3fn; expected float64"),
    ],
)
def test_the_quantizer_refuses(x, message):
    with pytest.raises(ValueError, match=message):
        quantize_per_head(x)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "num_q", "num_k"), [(4, 4, 60, 60), (4, 2, 33, 90), (2, 1, 90, 33)])
def test_the_reference_is_attention_with_a_rounded_p(causal, heads, kv_heads, num_q, num_k):
    torch.manual_seed(0)
    q = torch.randn(2, heads, num_q, 32) * torch.tensor([0.5, 1.0, 2.0, 4.0])[:heads, None, None]
    sizes = torch.tensor([1.0, 3.0, 0.1, 1.0])[:kv_heads, None, None]
    k, v = (torch.randn(2, kv_heads, num_k, 32) * sizes for _ in range(2))
    tensors, scales = _quantized(q, k, v)
    o, lse = naive_attention_fp8(*tensors, **scales, causal=causal, return_lse=True)
    exact, exact_lse = naive_attention(*_dequantized(tensors, scales), causal=causal, return_lse=True)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=1e-5, rtol=1e-5)
    # each weight is off by a 16th of itself at most
    limit = naive_attention(*_dequantized(tensors, scales)[:2], _dequantized(tensors, scales)[2].abs(), causal=causal)
    assert ((o - exact).abs() <= limit / 16 + 0.01).all()
    assert 0.001 < _rms(o - exact) / _rms(exact) < 0.03


def test_one_key_is_exact():
    """P of a single key is 256 whatever the score is, which e4m3 and the division hold exactly."""
    tensors, scales = _quantized(torch.randn(1, 1, 5, 16), torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16))
    v = tensors[2].float() * scales["v_scale"][:, :, None, None]
    assert torch.equal(naive_attention_fp8(*tensors, **scales), v.expand(1, 1, 5, 16).bfloat16())


def test_small_weights_survive_beside_a_large_one(monkeypatch):
    """e^-8 is below half of e4m3's smallest number; times 256 it is not."""
    torch.manual_seed(0)
    tensors, scales = _quantized(*_with_sink(64, 2048, 64, gap=8.0))
    exact = naive_attention(*_dequantized(tensors, scales))
    assert _rms(naive_attention_fp8(*tensors, **scales) - exact) < 0.05 * _rms(exact)
    monkeypatch.setattr(fp8, "FP8_P_SCALE", 1.0)
    assert _rms(naive_attention_fp8(*tensors, **scales) - exact) > 0.3 * _rms(exact)


def _refused(message, attention=flash_attention_fp8, head_dim=64, **changes):
    tensors, scales = _quantized(*(torch.randn(2, 4, 8, head_dim) for _ in range(3)))
    call = dict(zip("qkv", tensors, strict=True)) | scales
    call |= {name: change(call[name]) if callable(change) else change for name, change in changes.items()}
    with pytest.raises(ValueError, match=message):
        attention(**call)


def test_refusals_say_what_and_the_way_out():
    _refused("hopper needs a CUDA device; q is on cpu; use flash_attention in bfloat16")
    _refused("head_dim 32 is not supported in FP8 \\(64 or 128\\); use flash_attention in bfloat16", head_dim=32)
    both = {"attention": naive_attention_fp8}
    e4m3 = "expected torch.float8_e4m3fn, as quantize_per_head returns it"
    _refused(f"v has dtype torch.bfloat16; {e4m3}", v=lambda x: x.bfloat16(), **both)
    _refused(f"k has dtype torch.float8_e5m2; {e4m3}", k=lambda x: x.float().to(torch.float8_e5m2), **both)
    _refused("k_scale has dtype torch.float64; expected torch.float32", k_scale=lambda x: x.double(), **both)
    _refused("q_scale has shape \\(4, 2\\); expected \\(2, 4\\), or one that broadcasts", q_scale=lambda x: x.T, **both)
    _refused("v_scale has shape \\(1, 2, 4\\); expected", v_scale=lambda x: x[None], **both)
    _refused("q asks for a gradient, and FP8 attention has none", q=lambda x: x.requires_grad_(), **both)
    _refused("k_scale asks for a gradient", k_scale=lambda x: x.requires_grad_(), **both)
    _refused("scale is -1.0; it must be positive in FP8 attention", scale=-1.0, **both)
    _refused("v has head_dim 32 but q has 64; they must be equal in FP8", v=lambda x: x[..., :32], **both)
    _refused("k has batch size 1 but q has 2", k=lambda x: x[:1], **both)


def test_one_scale_may_stand_for_all_heads():
    tensors, _ = _quantized(*(torch.randn(2, 4, 8, 16) for _ in range(3)))
    factor = torch.tensor(0.01)
    shapes = (factor, factor.expand(4), factor.expand(2, 4))
    first, *others = (naive_attention_fp8(*tensors, q_scale=s, k_scale=s, v_scale=s) for s in shapes)
    assert all(torch.equal(first, o) for o in others)


def test_autocast_leaves_8_bits_alone():
    tensors, scales = _quantized(*(torch.randn(2, 4, 8, 16) for _ in range(3)))
    with torch.autocast("cpu", torch.bfloat16):
        *checked, _, _ = check_fp8_call(*tensors, *scales.values(), True, None)
    assert all(x is y for x, y in zip(checked, tensors, strict=True))


@pytest.mark.parametrize("num_k", [1, 16, 77, 300])
def test_values_are_transposed_in_the_order_of_p(num_k):
    from kernels.hopper.fp8_kernel import launch_values

    device = "cuda" if torch.cuda.is_available() else "cpu"
    v = torch.randn(2, num_k, 3, 64, device=device).to(torch.float8_e4m3fn).transpose(1, 2)
    columns = -(-num_k // 16) * 16
    out = torch.full((2, 3, 64, columns), math.nan, device=device).to(torch.float8_e4m3fn)
    launch_values(v, out)
    # a thread's four columns of P, 4t + (0 .. 3), are keys 2t, 2t + 1, 2t + 8, 2t + 9 of each 16
    order = [2 * t + 8 * h + i for t in range(4) for h in range(2) for i in range(2)]
    keys = torch.tensor([16 * b + x for b in range(columns // 16) for x in order], device=device)
    padded = torch.nn.functional.pad(v.float(), (0, 0, 0, columns - num_k))
    assert torch.equal(out.float(), padded[:, :, keys].transpose(-1, -2))


def test_the_operator_knows_its_shapes():
    q = torch.empty(2, 50, 6, 64, dtype=torch.float8_e4m3fn, device="meta").transpose(1, 2)
    k, scale = q[:, :2], torch.empty(2, 6, device="meta")
    o, lse = flash_fwd_fp8(q, k, k, scale, scale[:, :2], scale[:, :2], True, 0.125)
    assert (o.shape, o.dtype, o.stride()) == (q.shape, torch.bfloat16, q.stride())
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)


def _pack_in_numpy(probs, block_k):
    """`_pack` with `_unpack`: P rounded to e4m3, its columns in the order of V^T's keys."""
    rounded = torch.from_numpy(np.ascontiguousarray(probs)).to(torch.float8_e4m3fn).float().numpy()
    return rounded.reshape(64, block_k // 16, 2, 4, 2).swapaxes(2, 3).reshape(64, block_k).view(type(probs))


def _product_of_14_bits(left, right, acc, use_acc=True, is_async=False):
    """What the 8-bit tensor core was measured to do: it adds 32 products and what it has so far after cutting each at
    2^-13 of the largest one's power of two."""
    a, b = getattr(left, "array", left), right.array
    total = acc if use_acc else acc * 0
    for k in range(0, a.shape[1], 32):
        terms = np.concatenate((a[:, k : k + 32, None] * b[None, k : k + 32], total[:, None]), 1)
        unit = np.ldexp(1.0, np.frexp(np.abs(terms).max(1, keepdims=True))[1] - 14)
        total = (np.trunc(terms / unit) * unit).sum(1).astype(np.float32)
    return total.view(type(acc))


def _simulated(monkeypatch, tensors, scales, options, **replaced):
    """O and LSE by the kernel's own source, run by Python (tests/hopper_simulator.py): Gluon has no interpreter."""
    from kernels.hopper import forward as hopper_fwd
    from kernels.hopper import fp8_kernel as hopper_fp8
    from tests import hopper_simulator

    transpose = hopper_fp8.launch_values
    replaced = {"_pack": _pack_in_numpy} | replaced
    hopper_simulator.simulate(monkeypatch, hopper_fp8.hopper_fp8_kernel, element_bytes=1, replaced=replaced)

    def launch_values(v, out):
        out8 = torch.empty(out.shape, dtype=torch.float8_e4m3fn)
        transpose(v.to(torch.float8_e4m3fn), out8)
        out.copy_(out8)

    monkeypatch.setattr("kernels.launch.l2_bytes", lambda _: 3 * 2**18)
    monkeypatch.setattr(hopper_fwd, "num_sms", lambda _: 2)
    monkeypatch.setattr(hopper_fp8, "O_DTYPE", torch.float32)
    monkeypatch.setattr(hopper_fp8, "launch_values", launch_values)
    plan = hopper_fwd.ForwardPlan(consumers=2, stages=3, ping_pong=True)
    return hopper_fp8.launch_hopper_fp8(*(x.float() for x in tensors), *scales.values(), options, plan)


@pytest.mark.parametrize(
    "shape",
    [(1, 2, 1, 130, 300, False), (2, 2, 2, 200, 70, True), (1, 4, 2, 70, 520, True), (1, 1, 1, 1, 1, True)],
)
def test_the_simulated_kernel_is_as_good_as_the_reference(shape, monkeypatch):
    torch.manual_seed(0)
    tensors, scales = _made(*shape[:5], 64, "cpu")
    o, lse = _simulated(monkeypatch, tensors, scales, Options(shape[5], 0.125))
    _assert_as_good_as_the_reference(o, lse, tensors, scales, shape[5])


def test_sums_of_14_bits_are_kept_short(monkeypatch):
    """Positive values, 4,096 keys: 7 % too small where the tensor core adds to O, 0.6 % if only the last tile is."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64) for n in (16, 4096, 4096))
    tensors, scales = _quantized(q, k, v.abs())
    exact = naive_attention(*_dequantized(tensors, scales))
    o, _ = _simulated(monkeypatch, tensors, scales, Options(False, 0.125), warpgroup_mma=_product_of_14_bits)
    assert _rms(o - exact) < 0.003 * _rms(exact)


# (plan, as scripts.bench.compile_kernels names it, most bytes of stack: 8 are one value of Triton's own, stored and
# read once a program)
COMPILED = [
    pytest.param("128 fp8e4nv causal 2x64x128 s3 ping_pong", 8, marks=pytest.mark.slow),
    pytest.param("128 fp8e4nv full 2x64x128 s4", 0, marks=pytest.mark.slow),
    pytest.param("64 fp8e4nv causal 2x64x128 s3", 0, marks=pytest.mark.slow),
    pytest.param("64 fp8e4nv full 2x64x128 s3", 0, marks=pytest.mark.slow),
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, whose wheel carries ptxas")
@pytest.mark.parametrize(("plan", "most_stack"), COMPILED)
def test_compiles_to_asynchronous_8_bit_wgmma(plan, most_stack):
    (row,) = compiled(f"only='^hopper_fp8 90 {plan}$'")["rows"]
    assert row["complaints"] == [], "ptxas serialized the wgmma instructions"
    assert row["QGMMA"] > 0
    assert row["HGMMA"] == row["HMMA"] == 0
    assert row["WARPGROUP.DEPBAR"] <= row["QGMMA"] / 3
    assert row["PRMT"] == 0, "P must reach the tensor cores without moving bytes"
    assert row["spill_bytes"] <= most_stack
    assert row["shared_bytes"] <= 232_448


def _made(batch, num_heads, num_kv_heads, num_q, num_k, head_dim, device="cuda"):
    """Quantized heads of unequal size, tokens first in memory, NaN behind the last token."""

    def tokens_first(heads, tokens):
        size = 2.0 ** torch.randint(-3, 2, (batch, 1, heads, 1), device=device)
        x, scale = quantize_per_head(
            (torch.randn(batch, tokens, heads, head_dim, device=device) * size).transpose(1, 2)
        )
        padded = torch.full((batch, tokens + 8, heads, head_dim), math.nan, device=device).to(torch.float8_e4m3fn)
        padded[:, :tokens] = x.transpose(1, 2)
        return padded[:, :tokens].transpose(1, 2), scale

    pairs = [tokens_first(num_heads, num_q), tokens_first(num_kv_heads, num_k), tokens_first(num_kv_heads, num_k)]
    return [x for x, _ in pairs], dict(zip(("q_scale", "k_scale", "v_scale"), (s for _, s in pairs), strict=True))


def _assert_as_good_as_the_reference(o, lse, tensors, scales, causal):
    """Held to float64 on the quantized inputs, beside the reference, which differs in what P is rounded against."""
    exact, exact_lse = naive_attention(*_dequantized(tensors, scales), causal=causal, return_lse=True)
    plain = naive_attention_fp8(*tensors, **scales, causal=causal)
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=1e-2, rtol=0)
    floor = 2e-3 * _rms(exact)
    assert _rms(o - exact) <= 1.2 * _rms(plain - exact) + floor
    assert (o - exact).abs().max() <= 2 * (plain - exact).abs().max() + 4 * floor


SHAPES = [  # batch, query heads, KV heads, queries, keys, causal
    (1, 1, 1, 1, 1, True),
    (2, 3, 3, 127, 127, True),
    (2, 4, 2, 193, 193, False),
    (1, 4, 1, 300, 100, True),  # the first 200 rows see nothing
    (1, 2, 2, 100, 300, True),
    (1, 2, 2, 700, 5, False),
    (4, 16, 4, 1024, 1024, True),  # more tiles than SMs
    (1, 2, 2, 256, 8192, False),
]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_is_as_good_as_the_reference(head_dim, shape, poisoned_memory):
    torch.manual_seed(0)
    tensors, scales = _made(*shape[:5], head_dim)
    o, lse = flash_attention_fp8(*tensors, **scales, causal=shape[5], return_lse=True)
    for _ in range(3):
        again = flash_attention_fp8(*tensors, **scales, causal=shape[5], return_lse=True)
        assert torch.equal(o, again[0])
        assert torch.equal(lse, again[1])
    _assert_as_good_as_the_reference(o, lse, tensors, scales, shape[5])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_sink_leaves_the_other_keys_their_weight(head_dim, causal):
    torch.manual_seed(0)
    tensors, scales = _quantized(*(x.cuda() for x in _with_sink(2048, 2048, head_dim, gap=8.0)))
    o, lse = flash_attention_fp8(*tensors, **scales, causal=causal, return_lse=True)
    _assert_as_good_as_the_reference(o, lse, tensors, scales, causal)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_sums_of_positive_values_lose_nothing(head_dim):
    """The 8-bit tensor core cuts what it adds at about 14 bits: summed by it alone, O is a quarter too small here."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, head_dim, device="cuda") for n in (256, 16384, 16384))
    tensors, scales = _quantized(q, k, v.abs())
    exact = naive_attention(*_dequantized(tensors, scales))
    assert _rms(flash_attention_fp8(*tensors, **scales) - exact) < 0.02 * _rms(exact)


@pytest.mark.gpu
@needs_hopper
def test_the_operator_keeps_its_contract():
    tensors, scales = _made(2, 4, 2, 130, 200, 64)
    before = [x.view(torch.int8).clone() for x in tensors]
    # without "test_schema", which multiplies the inputs, and PyTorch has no product of 8-bit floats
    torch.library.opcheck(
        flash_fwd_fp8, (*tensors, *scales.values(), True, 0.125),
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )  # fmt: skip
    assert all(torch.equal(x.view(torch.int8), y) for x, y in zip(tensors, before, strict=True))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_way_to_run_is_right(head_dim, causal):
    from kernels.hopper.forward import ForwardPlan
    from kernels.hopper.fp8_kernel import launch_hopper_fp8

    torch.manual_seed(0)
    tensors, scales = _made(1, 8, 4, 1500, 1500, head_dim)
    options = Options(causal, head_dim**-0.5)
    for consumers, stages, block_k in ((2, 2, 128), (2, 4, 128), (2, 4, 64), (3, 3, 64)):
        for persistent in (True, False):
            plan = ForwardPlan(consumers, stages, not persistent, persistent, block_k)
            o, lse = launch_hopper_fp8(*tensors, *scales.values(), options, plan)
            _assert_as_good_as_the_reference(o, lse, tensors, scales, causal)
