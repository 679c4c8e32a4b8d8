"""Products of a few rows with what is fused into them, against the operators they stand for."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from kernels.fused.rotary import rotary_fwd
from kernels.fused.skinny_linear import ACTIVATIONS, _composed, skinny_linear, takes_skinny_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(rows: int, width: int, outputs: int, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, width), (outputs, width), (rows, outputs))
    x, weight, residual = (torch.randn(shape, generator=generator) for shape in shapes)
    return [t.to(DEVICE, dtype) for t in (3 * x, weight * width**-0.5, residual)]


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("norm_eps", [None, 0.5])
@pytest.mark.parametrize(
    ("rows", "width", "outputs"), [(1, 48, 40), (3, 200, 16), (17, 130, 33), (64, 16, 100), (20, 2100, 40)]
)
def test_it_is_what_it_stands_for(rows, width, outputs, norm_eps, activation):
    x, weight, residual = tensors(rows, width, outputs)
    if activation == "swiglu":
        weight = torch.cat((weight, weight.flip(0) * 0.7))
    for given in (None, residual):
        expected = _composed(*(t if t is None else t.double() for t in (x, weight)), norm_eps, activation, given)
        actual = skinny_linear(x, weight, norm_eps=norm_eps, activation=activation, residual=given)
        torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "width", "norm_eps"),
    [
        *((1, 5, 8, 72, 0.5), (3, 3, 80, 72, 0.5), (40, 6, 64, 72, 0.5), (64, 9, 16, 72, 0.5), (3, 3, 16, 2100, None)),
        (1, 5, 8, 1300, 0.5),  # one row in more steps than one
    ],
)
def test_it_turns_heads(rows, heads, head_dim, width, norm_eps):
    """Those of queries and keys; the values behind them stay as they are."""
    x, weight, _ = tensors(rows, width, heads * head_dim)
    angle = torch.rand(rows, 1, head_dim // 2, device=DEVICE)
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((-angle, angle), -1).sin()
    for turned in (heads - 2, heads):
        rotary = (cos, sin, turned)
        expected = _composed(x.double(), weight.double(), norm_eps, None, None, rotary)
        actual = skinny_linear(x, weight, norm_eps=norm_eps, rotary=rotary)
        torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-4)
    places = torch.arange(rows, device=DEVICE).flip(0)
    places[0], places[-1] = rows + 5, -7  # the last of the tables and the first
    clamped = places.clamp(0, rows - 1)
    expected = skinny_linear(x, weight, norm_eps=norm_eps, rotary=(cos[clamped], sin[clamped], heads))
    for positions in (places, places.int(), torch.stack((places, places), -1)[:, 0]):
        actual = skinny_linear(x, weight, norm_eps=norm_eps, rotary=(cos, sin, heads), positions=positions)
        assert torch.equal(actual, expected)
    exact = _composed(x.double(), weight.double(), norm_eps, None, None, (cos, sin, heads), places)
    torch.testing.assert_close(actual, exact.float(), rtol=1e-4, atol=1e-4)
    actual = skinny_linear(x, weight, norm_eps=norm_eps, rotary=(cos, sin, heads))
    apart = [torch.stack((t, t + 1), -1)[..., 0] for t in (x, cos, sin)]
    strided = skinny_linear(apart[0], weight, norm_eps=norm_eps, rotary=(*apart[1:], heads))
    assert torch.equal(strided, actual)


def test_positions_of_more_than_32_bits_are_the_nearest_too():
    x, weight, _ = tensors(3, 16, 8)
    angles = torch.arange(10.0, device=DEVICE)[:, None, None].repeat(1, 1, 4)
    rotary = angles.cos(), angles.sin(), 2
    positions = torch.tensor([2**32 + 3, -(2**40), 2**31], device=DEVICE)
    nearest = skinny_linear(x, weight, rotary=rotary, positions=torch.tensor([9, 0, 9], device=DEVICE))
    assert torch.equal(skinny_linear(x, weight, rotary=rotary, positions=positions), nearest)


def test_parts_of_a_long_product_take_turns_and_leave_none():
    x, weight, residual = tensors(7, 2100, 40)
    workspace = torch.zeros(40, dtype=torch.int32, device=DEVICE)
    alone = skinny_linear(x, weight, residual=residual)
    for _ in range(3):
        assert torch.equal(skinny_linear(x, weight, residual=residual, workspace=workspace), alone)
        assert not workspace.any()
    for wrong in (workspace[:39], workspace.long(), workspace[:1].expand(40), workspace.repeat(2)[::2]):
        with pytest.raises(
            ValueError, match=r"workspace has (39|40) elements of .*; expected 40 int32 zeros, contiguous"
        ):
            skinny_linear(x, weight, workspace=wrong)


def test_in_float64_it_is_pytorchs():
    """Kernels sum in float32; in Triton's interpreter they gave other numbers."""
    x, weight, residual = (t.double() for t in tensors(5, 48, 32))
    expected = residual + F.linear(F.rms_norm(x, (48,), eps=1e-5), weight)
    torch.testing.assert_close(skinny_linear(x, weight, norm_eps=1e-5, residual=residual), expected)


def test_operands_of_other_dtypes_are_other_plans(monkeypatch):
    """A replay reads its operands as those that were compiled for, whatever they are."""
    monkeypatch.setattr("kernels.launch.PLANS", plans := {})
    x, weight, _ = tensors(3, 48, 32)
    angle = torch.rand(3, 1, 4, device=DEVICE)
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((-angle, angle), -1).sin()
    for known, cast in enumerate((torch.float32, torch.float64, torch.float32)):
        skinny_linear(x, weight, rotary=(cos.to(cast), sin.to(cast), 2))
        rotary_fwd(x.view(1, 3, 6, 8), cos.to(cast), sin.to(cast), 2)
        assert len(plans) == (2, 4, 4)[known]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 20])
def test_a_replayed_launch_is_of_its_own_tensors(rows):
    """With and without what may stand beside a product, in parts too, and at addresses that only Triton takes."""
    for width, outputs in ((256, 96), (2304, 48)):
        angle = torch.rand(rows, 1, 8, device=DEVICE)
        tables = torch.cat((angle, angle), -1).cos(), torch.cat((-angle, angle), -1).sin()
        for call in (
            {}, {"norm_eps": 0.5}, {"activation": "gelu"}, {"activation": "swiglu"}, {"residual": None},
            {"rotary": (*tables, 2)}, {"rotary": (*tables, 1)},
        ):  # fmt: skip
            for seed in range(3):
                x, weight, residual = (t.bfloat16().roll(seed, 0) for t in tensors(rows, width, outputs))
                if seed == 2:  # one element further on
                    x = torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x)
                given = call | ({"residual": residual} if "residual" in call else {})
                halves = outputs // 2 if call.get("activation") == "swiglu" else outputs
                actual = skinny_linear(x, weight, **given)
                expected = skinny_linear(x.float().cpu(), weight.float().cpu(), **on_the_cpu(given))
                assert actual.shape == (rows, halves)
                torch.testing.assert_close(actual.float().cpu(), expected, rtol=2e-2, atol=2e-2)


def on_the_cpu(options: dict) -> dict:
    moved = {name: x.float().cpu() for name, x in options.items() if isinstance(x, torch.Tensor)}
    if "rotary" in options:
        moved["rotary"] = tuple(x.cpu() if isinstance(x, torch.Tensor) else x for x in options["rotary"])
    return options | moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_is_rounded_once(dtype):
    x, weight, residual = tensors(5, 96, 24, dtype)
    wide = (t.double() for t in (x, weight))
    expected = _composed(*wide, 1e-6, "gelu", residual.double())
    actual = skinny_linear(x[None], weight, norm_eps=1e-6, activation="gelu", residual=residual[None])
    assert actual.shape == (1, 5, 24)
    rounded = expected.to(dtype)
    assert ((actual[0].double() - expected).abs() <= (rounded.double() - expected).abs() * 1.01 + 2e-5).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "width", "outputs"), [(1, 1304, 64), (3, 1000, 64), (40, 1000, 2304), (64, 1000, 16512), (20, 3000, 64)]
)
def test_gpu_products_of_generation_are_near_float64(rows, width, outputs):
    """In 16 bits, where they run on tensor cores; widths are no whole tiles."""
    x, weight, residual = tensors(rows, width, outputs, torch.bfloat16)
    angle = torch.rand(rows, 1, 8, device=DEVICE)
    rotary = torch.cat((angle, angle), -1).cos(), torch.cat((-angle, angle), -1).sin(), outputs // 16 - 2
    for norm_eps, activation, given, turned in (
        *((None, None, None, None), (None, None, residual, None), (0.5, "gelu", residual, None)),
        *((0.5, "swiglu", None, None), (None, None, None, rotary), (0.5, None, None, rotary)),
    ):
        wide = None if given is None else given.double()
        expected = _composed(x.double(), weight.double(), norm_eps, activation, wide, turned)
        actual = skinny_linear(x, weight, norm_eps=norm_eps, activation=activation, residual=given, rotary=turned)
        torch.testing.assert_close(actual.double(), expected, rtol=5e-3, atol=5e-3)


@pytest.mark.gpu
def test_products_that_begin_before_others_have_ended_are_as_exact():
    """In a graph they overlap, as in a step of generation: rows were wrong when a tile was copied over too early."""
    x, weight, _ = tensors(64, 768, 3072, torch.bfloat16)
    weights = [weight.roll(i, 0) for i in range(14)]  # more than the second-level cache holds
    options = {"norm_eps": 1e-6, "activation": "gelu"}
    alone = [skinny_linear(x, weight, **options) for weight in weights]
    exact = _composed(x.double(), weight.double(), **options, residual=None)
    torch.testing.assert_close(alone[0].double(), exact, rtol=2e-2, atol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        overlapping = [skinny_linear(x, weight, **options) for weight in weights]
    for _ in range(20):
        graph.replay()
        assert all(map(torch.equal, overlapping, alone))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "outputs"), [(1000, 70), (1000, 2304), (1000, 16500), (3072, 768)])
def test_a_row_s_bits_do_not_depend_on_how_many_others_there_are(width, outputs, dtype):
    x, weight, residual = tensors(64, width, outputs, dtype)
    options = {"norm_eps": 1e-6, "activation": "gelu"} if width == 1000 else {}  # a long one is in parts if plain
    together = skinny_linear(x, weight, residual=residual, **options)
    for rows in (slice(0, 2), slice(5, 8), slice(9, 26), slice(30, 62)):
        assert torch.equal(skinny_linear(x[rows], weight, residual=residual[rows], **options), together[rows])


def test_where_something_must_see_it_it_is_pytorchs():
    """A launch of it takes addresses, which these have not."""
    x, weight, _ = tensors(3, 16, 8)
    expected = x @ weight.T
    torch.testing.assert_close(torch.vmap(skinny_linear, (0, None))(x, weight), expected)
    torch.testing.assert_close(torch.compile(skinny_linear, backend="eager", fullgraph=True)(x, weight), expected)
    turned = partial(skinny_linear, rotary=(torch.ones(3, 2, device=DEVICE), torch.zeros(3, 2, device=DEVICE), 4))
    compiled = torch.compile(turned, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x, weight), turned(x, weight))
    with FakeTensorMode() as mode:
        assert skinny_linear(mode.from_tensor(x), mode.from_tensor(weight)).shape == expected.shape
    with torch.autocast(x.device.type, torch.bfloat16):
        assert skinny_linear(x, weight).dtype == skinny_linear(x.double(), weight.double()).float().dtype == x.dtype


def test_no_rows_have_no_heads_to_turn():
    x, weight, _ = tensors(3, 16, 8)
    angles = torch.zeros(0, 2, device=DEVICE)
    for dtype in (torch.float32, torch.float64):  # a kernel's, and PyTorch's
        y = skinny_linear(x[:0].to(dtype), weight.to(dtype), rotary=(angles, angles, 1))
        assert (y.shape, y.dtype) == ((0, len(weight)), dtype)


def test_what_it_does_not_take():
    x, weight, _ = tensors(65, 16, 8)
    with pytest.raises(ValueError, match="x has 65 rows; a skinny product takes at most 64: use"):
        skinny_linear(x, weight)
    with pytest.raises(ValueError, match="activation=tanh is not one of None, gelu, swiglu, relu2"):
        skinny_linear(x[:1], weight, activation="tanh")
    for wrong in (weight[:, :8], weight.double(), weight.T.contiguous().T, weight[0], weight[:, :0]):
        with pytest.raises(
            ValueError, match=r"weight has shape .* expected \(N, C\), contiguous, and torch.float32, of"
        ):
            skinny_linear(x[:1], wrong)
    for wrong in (x[:3, :0], x[0, 0]):
        with pytest.raises(ValueError, match=r"expected \(N, C\), contiguous, .* of x with shape \((3, 0)?\)"):
            skinny_linear(wrong, weight[:, : wrong.shape[-1] if wrong.dim() else 0])
    with pytest.raises(ValueError, match=r"weight has shape \(7, 16\), .* expected \(2 N, C\), contiguous"):
        skinny_linear(x[:1], weight[:7], activation="swiglu")
    residual = torch.zeros(3, 16, device=DEVICE)
    for wrong in (residual[0, :8], residual[0, :8].expand(3, 8), residual[:, :8], residual[:, :8].double(), residual):
        with pytest.raises(ValueError, match=r"residual has shape .* expected \(3, 8\), contiguous, and torch.float32"):
            skinny_linear(x[:3], weight, residual=wrong)
    tables = torch.ones(2, 3, 1, 4, device=DEVICE)
    for rows, turned, outputs in ((3, 3, 8), (2, 1, 8), (3, 1, 6)):
        with pytest.raises(ValueError, match=rf"and turns {turned} heads; expected \({rows}, ..., D\), the rows of x"):
            skinny_linear(x[:rows], weight[:outputs], rotary=(*tables, turned))
    with pytest.raises(
        ValueError, match=r"has tables of shape \(3, 1, 4\) and \(2, 1, 4\) and turns 1 heads; expected"
    ):
        skinny_linear(x[:3], weight, rotary=(tables[0], tables[1][:2], 1))
    narrow = torch.ones(3, 1, 1, device=DEVICE)  # an odd D: the last output's partner would lie behind the result
    for cos, sin, turned in ((narrow, narrow, 1), (narrow[..., :0],) * 2 + (0,), (*tables, -1), (tables[0], narrow, 1)):
        with pytest.raises(
            ValueError, match=r"rotary has tables of shape .* expected \(3, ..., D\), the rows of x, D even"
        ):
            skinny_linear(x[:3], weight, rotary=(cos, sin, turned))
    with pytest.raises(ValueError, match="rotary turns a plain product"):
        skinny_linear(x[:3], weight, rotary=(*tables, 1), activation="gelu")
    rotary, places = (*tables, 1), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    for wrong, beside in ((places[:2], rotary), (places.float(), rotary), (places, None)):
        with pytest.raises(ValueError, match=r"positions has shape .* expected int32 or int64, one for each of 3 rows"):
            skinny_linear(x[:3], weight, rotary=beside, positions=wrong)
    with pytest.raises(ValueError, match=r"weight is on meta but x is on (cpu|cuda:0); move them to one device"):
        skinny_linear(x[:3], weight.to("meta"))
    with pytest.raises(ValueError, match="sin is on meta but x is on"):
        skinny_linear(x[:3], weight, rotary=(tables[0], tables[1].to("meta"), 1))
    with pytest.raises(ValueError, match=r"x has dtype torch\.int32; a skinny product is of floating point numbers"):
        skinny_linear(x[:3].int(), weight.int())
    with pytest.raises(ValueError, match=r"rotary has 2 parts; expected \(cos, sin, H\)"):
        skinny_linear(x[:3], weight, rotary=(*tables,))
    with pytest.raises(ValueError, match=r"weight asks for a gradient, and this product has none; use torch\.no_grad"):
        skinny_linear(x[:3], weight.clone().requires_grad_())
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="skinny_linear has no forward-mode derivative"):
        skinny_linear(forward_ad.make_dual(x[:3], x[:3]), weight)
    assert not takes_skinny_linear(x[:64].cpu())
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(2, 32, 16, dtype=torch.bfloat16, device="cuda")
        assert takes_skinny_linear(x)
        assert not takes_skinny_linear(x.float())
        assert not takes_skinny_linear(torch.cat((x, x)))
        with torch.enable_grad():
            assert not takes_skinny_linear(x)
