"""The Triton kernels against float64: in the interpreter on a CPU, the same matrix and more on a GPU."""

import math
import random
import re
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from kernels import flash_attention, flash_attention_varlen, why_not
from kernels.call import Options
from kernels.device import gpu_named
from kernels.flash_attn import flash_attn_func, flash_attn_varlen_func
from kernels.launch import Launch, kernel_inputs, start
from kernels.portable.backward import launch_flash_bwd
from kernels.portable.forward import launch_flash_fwd
from kernels.portable.tiles import Mask, masked_tile, section_tile, seeing_queries, visible_keys
from kernels.portable.tuning import Tile
from tests.attention_checks import compare_with_oracle, make_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# batch, heads, kv_heads, num_q, num_k, head_dim, causal: each line is there for what its comment says
SMALL = [
    (1, 2, 2, 64, 64, 16, True),  # whole tiles only
    (1, 2, 2, 64, 64, 16, False),
    (2, 2, 1, 45, 45, 32, True),  # ragged, grouped
    (1, 4, 2, 45, 45, 32, False),
    (1, 4, 1, 33, 70, 16, True),  # more keys than queries, multi-query
    (1, 2, 2, 33, 70, 16, False),
    (1, 2, 1, 70, 33, 16, True),  # fewer: the first 37 rows see nothing
    (1, 2, 1, 70, 33, 16, False),
    (1, 1, 1, 1, 50, 64, True),  # one query, as in decoding
    (1, 1, 1, 50, 1, 64, True),  # one key
    (1, 1, 1, 1, 1, 16, True),
    (1, 1, 1, 17, 31, 40, True),  # head_dim padded to 64
    (1, 1, 1, 31, 17, 80, False),  # to 128
    (1, 1, 1, 20, 40, 96, True),
    (1, 1, 1, 20, 33, 128, True),
    (1, 1, 1, 18, 35, 192, False),
    (1, 1, 1, 18, 35, 256, True),
    (1, 1, 1, 20, 20, 17, True),  # odd: rows are not 16-byte aligned
]

# The backward recomputes P from scores and LSE, both rounded at their size (2^-24 * 500 here); the plain
# formula kept differences to the row's maximum, which are exact. In 16-bit dtypes this disappears under the
# operands' rounding.
LARGE_SCORES_FACTOR = 32.0


@pytest.fixture(autouse=True)
def _poison(poisoned_memory):
    """Every test runs on memory that begins as NaN."""


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_agrees_with_float64(shape):
    *sizes, causal = shape
    q, k, v = make_qkv(*sizes, device=DEVICE)
    compare_with_oracle(flash_attention, q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_agrees_with_float64_in_half_precision(dtype):
    q, k, v = make_qkv(1, 4, 2, 45, 70, 32, dtype=dtype, device=DEVICE)
    compare_with_oracle(flash_attention, q, k, v, causal=True)


@pytest.mark.parametrize("layout", ["bnhd", "packed", "strided", "padded"])
def test_any_strides(layout):
    q, k, v = make_qkv(2, 2, 1, 35, 35, 16, layout=layout, device=DEVICE)
    compare_with_oracle(flash_attention, q, k, v, causal=True)


def test_expanded_heads_and_expanded_gradient():
    q, k, v = make_qkv(2, 2, 1, 20, 20, 16, device=DEVICE)
    k, v = (x.detach()[:1, :1].expand(2, 2, 20, 16).requires_grad_() for x in (k, v))
    compare_with_oracle(flash_attention, q, k, v, causal=True)
    dense = flash_attention(q, k, v)
    (grad,) = torch.autograd.grad(dense.sum(), q)  # dO is one element expanded
    (expected,) = torch.autograd.grad(flash_attention(q, k, v), q, torch.ones_like(dense))
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("window", [(60, 20), (-1, 50), (45, -1), (70, 0), (0, 40)])
def test_windows_with_whole_tiles_inside(window):
    """Wide enough for tiles that need no mask, with masked ones on both sides."""
    q, k, v = make_qkv(1, 1, 1, 100, 110, 16, device=DEVICE)
    compare_with_oracle(flash_attention, q, k, v, window=window)


@triton.jit(do_not_specialize=["num_q", "num_k", "left", "right"])
def _visits(
    counts, num_q, num_k, left, right, TILES: tl.constexpr, CAUSAL: tl.constexpr, LOCAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """How often a tile of queries (or KEYS) meets each of the others, unmasked and masked: (tiles, 2, TILES)."""
    mask = Mask(num_q, num_k, (left, right), CAUSAL, LOCAL)
    tile = tl.program_id(0)
    counts += tile * 2 * TILES
    STEP: tl.constexpr = BLOCK_Q if KEYS else BLOCK_K
    if KEYS:
        full_start, full_end, masked_start, masked_end = seeing_queries(tile * BLOCK_K, mask, BLOCK_Q, BLOCK_K)
    else:
        full_start, full_end, masked_start, masked_end = visible_keys(tile * BLOCK_Q, mask, BLOCK_Q, BLOCK_K)
    for position in range(full_start, full_end, STEP):
        tl.store(counts + position // STEP, tl.load(counts + position // STEP) + 1)
    for position in range(masked_start, masked_end, STEP):
        at = counts + TILES + masked_tile(position, full_start, full_end, LOCAL) // STEP
        tl.store(at, tl.load(at) + 1)


@pytest.mark.parametrize("keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_tiles_are_met_once_unmasked_where_all_is_seen_and_not_where_nothing_is(kind, keys):
    draw = random.Random(0)
    for _ in range(12):
        num_q, num_k, left, right = (draw.randint(1, 25) for _ in range(4))
        left, right = draw.choice(((left, right), (left, 0), (0, right), (50, right), (left, 50)))
        block_q, block_k = draw.choice(((4, 8), (8, 4)))
        own, other = (block_k, block_q) if keys else (block_q, block_k)
        tiles = -(-(num_k if keys else num_q) // own)
        counts = torch.zeros(tiles, 2, 12, dtype=torch.int32, device=DEVICE)
        _visits[(tiles,)](
            counts, num_q, num_k, left, right, TILES=12, CAUSAL=kind == "causal", LOCAL=kind == "window",
            BLOCK_Q=block_q, BLOCK_K=block_k, KEYS=keys,
        )  # fmt: skip
        distance = torch.arange(32) - torch.arange(32)[:, None] - (num_k - num_q)
        seen = {"full": distance < 99, "causal": distance <= 0, "window": (distance >= -left) & (distance <= right)}
        seen = seen[kind].T if keys else seen[kind]
        num_own, num_others = (num_k, num_q) if keys else (num_q, num_k)
        for tile, (full, masked) in enumerate(counts.cpu()):
            own_rows = seen[tile * own :][:own]  # as if there were whole tiles of them
            for place in range(12):
                others = own_rows[:, :num_others][:, place * other :][:, :other]
                part = others[: num_own - tile * own]
                whole = part.numel() and part.all() and (keys or part.shape[1] == other)
                where = kind, num_q, num_k, left, right, block_q, block_k, tile, place
                assert full[place] + masked[place] <= 1, where
                assert whole or not full[place], where
                assert full[place] or masked[place] or not part.any(), where
                assert others.any() or not masked[place], where


@triton.jit
def _sections(counts, num_tiles, num_heads, heads_per_section):
    tile, head = section_tile(tl.program_id(0), num_tiles, num_heads, heads_per_section, True)
    tl.store(counts + tile * num_heads + head, tl.program_id(0) + 1)


@pytest.mark.parametrize(("heads", "section"), [(6, 6), (7, 2), (5, 4)])
def test_sections_of_heads_have_each_tile_once_and_all_last_tiles_first(heads, section):
    """Also the last one, of fewer heads."""
    turns = torch.zeros(3, heads, dtype=torch.int32, device=DEVICE)
    _sections[(3 * heads,)](turns, 3, heads, section)
    expected = [part.flip(0).flatten() for part in turns.split(section, dim=1)]
    assert torch.cat(expected).tolist() == list(range(1, 3 * heads + 1))


def test_tiles_outside_the_window_are_never_visited():
    """They hold NaN: a product with them would show, however well it was masked. Forward and both gradients."""
    q, k, v = (x.detach().clone() for x in make_qkv(1, 1, 1, 16, 256, 16, device=DEVICE))
    near = slice(
        128, None
    )  # the last query tile stands at keys 240 to 255 and looks 20 back; tiles are 32, 128 on a GPU
    outside = [x[:, :, :128] for x in (k, v)]
    for x in outside:
        x.fill_(math.nan)
    for x in (q, k, v):
        x.requires_grad_()
    o = flash_attention(q, k, v, window=(20, 0))
    dq, dk, dv = torch.autograd.grad(o.square().sum(), (q, k, v))
    expected = flash_attention(q, k[:, :, near], v[:, :, near], window=(20, 0))
    assert torch.equal(o, expected)
    assert torch.isfinite(dq).all()
    for grad in (dk, dv):
        assert torch.isfinite(grad[:, :, near]).all()
        assert not grad[:, :, :128].any()


@pytest.mark.parametrize("scale", [0.7, -0.3, 0.0])
def test_any_scale(scale):
    q, k, v = make_qkv(1, 2, 2, 20, 40, 16, device=DEVICE)
    compare_with_oracle(flash_attention, q, k, v, causal=True, scale=scale)


def test_without_keys_all_that_is_seen_is_the_sink():
    q, k, v = make_qkv(2, 2, 2, 3, 3, 16, device=DEVICE)
    sinks = torch.tensor([0.5, -2.0], device=DEVICE, requires_grad=True)
    none = k[:, :, :0], v[:, :, :0]
    o, lse = flash_attention(q, *none, sinks=sinks, return_lse=True)
    assert not o.any()
    assert torch.equal(lse, sinks[:, None].expand(2, 2, 3))
    (dsinks,) = torch.autograd.grad(lse, sinks, torch.arange(12.0, device=DEVICE).view(2, 2, 3))
    assert dsinks.tolist() == [0 + 1 + 2 + 6 + 7 + 8, 3 + 4 + 5 + 9 + 10 + 11]
    assert (flash_attention(q, *none, return_lse=True)[1] == -math.inf).all()
    sinks = torch.tensor([-math.inf, 1.0], device=DEVICE, requires_grad=True)
    _, lse = flash_attention(q, *none, sinks=sinks, return_lse=True)
    assert torch.autograd.grad(lse, sinks, torch.ones_like(lse))[0].tolist() == [0.0, 6.0]


def test_tokens_too_far_apart_for_offsets_of_32_bits_are_copied():
    for stride, copied in ((2**24 - 1, False), (2**24, True)):
        x = torch.empty(1, dtype=torch.float16, device="meta").as_strided((1, 2, 18, 16), (2**30, 16, stride, 1))
        (given,) = kernel_inputs(x)
        assert (given is not x) == copied == given.is_contiguous()


def test_without_a_gradient_for_lse():
    q, k, v = make_qkv(1, 2, 2, 40, 40, 16, device=DEVICE)
    compare_with_oracle(flash_attention, q, k, v, causal=True, with_dlse=False)


def test_gradient_of_lse_alone():
    q, k, v = make_qkv(1, 2, 2, 40, 40, 16, device=DEVICE)
    _, lse = flash_attention(q, k, v, return_lse=True)
    dq, dv = torch.autograd.grad(lse.sum(), (q, v))
    scores = (q.double() @ k.double().transpose(-1, -2)) * 0.25
    expected = torch.softmax(scores, -1) @ k.double() * 0.25
    torch.testing.assert_close(dq.double(), expected, rtol=1e-5, atol=1e-5)
    assert not dv.any()


@pytest.mark.parametrize("spread", [50.0, 1e-3])
def test_large_and_small_scores(spread):
    """exp overflows float32 at 89 without the running maximum."""
    q, k, v = make_qkv(1, 1, 1, 40, 40, 16, device=DEVICE)
    q = (q.detach() * spread).requires_grad_()
    compare_with_oracle(flash_attention, q, k, v, causal=True, factor=LARGE_SCORES_FACTOR)


def test_strongly_negative_scores_do_not_leak_from_padding():
    """Real scores near -300: a padded key's score of 0 would win the maximum, or exp2(0 - LSE) overflow."""
    q = torch.full((1, 1, 20, 16), 8.0, device=DEVICE)
    k = torch.full((1, 1, 20, 16), -10.0, device=DEVICE)
    noise = make_qkv(1, 1, 1, 20, 20, 16, device=DEVICE)
    q, k = ((x + n.detach()).requires_grad_() for x, n in zip((q, k), noise[:2], strict=True))
    for causal in (False, True):
        compare_with_oracle(flash_attention, q, k, noise[2], causal=causal, factor=LARGE_SCORES_FACTOR)


def test_equal_rows_average_the_values():
    q = torch.ones(1, 1, 20, 16, device=DEVICE)
    v = make_qkv(1, 1, 1, 20, 33, 16, device=DEVICE)[2].detach()
    o = flash_attention(q, torch.ones(1, 1, 33, 16, device=DEVICE), v)
    torch.testing.assert_close(o, v.mean(2, keepdim=True).expand_as(o))


def test_rows_without_a_visible_key():
    q, k, v = make_qkv(1, 2, 1, 60, 20, 16, device=DEVICE)
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert not o[:, :, :40].any()
    assert (lse[:, :, :40] == -math.inf).all()
    dq, dk, dv = torch.autograd.grad(o.sum() + lse[:, :, 40:].sum(), (q, k, v))
    assert not dq[:, :, :40].any()
    assert all(torch.isfinite(g).all() for g in (dq, dk, dv))


@pytest.mark.parametrize(("num_q", "num_k"), [(0, 20), (20, 0), (0, 0)])
def test_empty_lengths(num_q, num_k):
    q, k, v = make_qkv(2, 2, 1, num_q, num_k, 16, device=DEVICE)
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert o.shape == q.shape
    assert not o.any()
    assert (lse == -math.inf).all()
    for grad, x in zip(torch.autograd.grad(o.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


TILE_OPTIONS = {
    "causal": {"causal": True},
    "window": {"window_left": 20, "window_right": 3},
    "all": {
        "window_left": 33,
        "window_right": 0,
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([[0.1, 0.02]]),
        "sinks": torch.tensor([0.3, -1.0]),
        "dropout_p": 0.3,
        "dropout_seed": torch.tensor(11),
    },
}


@pytest.mark.parametrize("switched_on", TILE_OPTIONS)
@pytest.mark.parametrize(
    ("block_q", "block_k", "tma"), [(16, 16, True), (32, 16, False), (16, 64, False), (64, 32, True)]
)
def test_every_tile_shape_agrees(block_q, block_k, tma, switched_on):
    """Tile sizes, and descriptors in place of pointers, change nothing beyond rounding; no dropout mask either."""
    q, k, v = (x.detach() for x in make_qkv(1, 2, 1, 45, 70, 16, device=DEVICE, dtype=torch.float16))
    chosen = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in TILE_OPTIONS[switched_on].items()}
    do = torch.randn_like(q)
    tile = Tile(block_q, block_k, num_warps=4, num_stages=1, tma=tma and DEVICE == "cpu")

    def run(tile):
        options = Options(**({"causal": False, "scale": 0.25} | chosen))
        o, lse = launch_flash_fwd(q, k, v, options, tile)
        return o, lse, *launch_flash_bwd(do, None, q, k, v, o, lse, options, tile, tile)

    for actual, expected in zip(run(tile), run(Tile(16, 32, 4, 1)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


def test_a_tile_that_does_not_fit_is_replaced_and_reported(caplog):
    from triton.runtime.errors import OutOfResources

    from kernels.portable import tuning

    tried = []

    class Kernel:
        def __getitem__(self, grid):
            return self.launch

        def launch(self, tile, **how):
            tried.append((tile.block_q, tile.block_k, tile.num_stages))
            if tile.block_k > 32 or tile.num_stages > 1:
                raise OutOfResources(232_449, 232_448, "shared memory")

    start(tuning.fitting(Tile(64, 64, 4, 2), lambda tile: Launch(Kernel(), 1, (tile,), {}, tile.how)))
    assert tried == [(64, 64, 2), (64, 64, 1), (64, 32, 1)]
    assert len(caplog.records) == 2
    tried.clear()  # an equal tile of another kernel may fit
    start(tuning.fitting(Tile(64, 64, 4, 2), lambda tile: Launch(Kernel(), 1, (tile,), {}, tile.how)))
    assert tried[0] == (64, 64, 2)
    never = Launch(Kernel(), 1, (Tile(64, 64, 4, 2),), {}, {})
    with pytest.raises(OutOfResources):
        start(tuning.fitting(Tile(16, 16, 4, 1), lambda tile: never))


def test_same_inputs_give_the_same_bits():
    q, k, v = make_qkv(1, 2, 1, 45, 45, 16, device=DEVICE)
    runs = []
    for _ in range(2):
        o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        runs.append((o, lse, *torch.autograd.grad(o.square().sum() + lse.sum(), (q, k, v))))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_outputs_are_stored_with_tokens_before_heads():
    q, k, v = make_qkv(2, 3, 3, 20, 20, 16, device=DEVICE)
    o = flash_attention(q, k, v)
    merged = o.transpose(1, 2).reshape(2, 20, 48)
    assert merged.data_ptr() == o.data_ptr()
    for grad in torch.autograd.grad(o.square().sum(), (q, k, v)):
        assert grad.transpose(1, 2).is_contiguous()


BAD_CALLS = {
    "q has shape (2, 20, 16); expected 4 dimensions": lambda q, k, v: (q[0], k, v),
    "k has dtype torch.float16 but q has torch.float32": lambda q, k, v: (q, k.half(), v),
    "v has dtype torch.bfloat16 but q has torch.float32": lambda q, k, v: (q, k, v.bfloat16()),
    "q has dtype torch.int64; expected a floating point dtype": lambda q, k, v: (q.long(), k, v),
    "q has dtype torch.float8_e4m3fn; expected a floating point dtype of 16 bits": lambda *qkv: [
        x.to(torch.float8_e4m3fn) for x in qkv
    ],
    "v is on meta but q is on": lambda q, k, v: (q, k, v.to("meta")),
    "k has batch size 1 but q has 2": lambda q, k, v: (q, k[:1], v[:1]),
    "k has head_dim 8 but q has 16": lambda q, k, v: (q, k[..., :8], v[..., :8]),
    "v has shape (2, 2, 19, 16) but k has (2, 2, 20, 16); all but head_dim must be equal": lambda q, k, v: (
        q,
        k,
        v[:, :, :19],
    ),
    "q has 3 heads; it must be a multiple of k's 2 heads": lambda q, k, v: (
        torch.cat([q, q[:, :1]], 1),
        k,
        v,
    ),
    "head_dim 8 is not supported by flash attention (16 to 256)": lambda q, k, v: (
        q[..., :8],
        k[..., :8],
        v[..., :8],
    ),
    "head_dim 272 is not supported": lambda q, k, v: [x.repeat(1, 1, 1, 17) for x in (q, k, v)],
    "dtype torch.float64 is not supported": lambda q, k, v: [x.double() for x in (q, k, v)],
}


@pytest.mark.parametrize("message", BAD_CALLS, ids=lambda message: message.split(";")[0])
def test_bad_input_is_refused_by_name(message):
    q, k, v = (x.detach() for x in make_qkv(2, 2, 2, 20, 20, 16, device=DEVICE))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        flash_attention(*BAD_CALLS[message](q, k, v))
    assert "\n" not in str(caught.value)


def test_flash_attns_layout_is_named_in_its_own_order():
    q, k, v = (x.detach().transpose(1, 2) for x in make_qkv(2, 3, 3, 20, 20, 16, device=DEVICE))
    for wrong, told in (
        ((q[0], k, v), "q has shape (20, 3, 16); expected 4 dimensions (batch, tokens, heads, head_dim)"),
        ((q, k[0, 0], v), "k has shape (3, 16); expected 4 dimensions (batch, tokens, heads, head_dim)"),
        ((q, k, [v]), "v has type list; expected a torch.Tensor"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            flash_attn_func(*wrong)


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_scale_must_be_finite(scale):
    q, k, v = make_qkv(1, 1, 1, 4, 4, 16, device=DEVICE)
    with pytest.raises(ValueError, match=f"scale is {scale}; it must be a finite number"):
        flash_attention(q, k, v, scale=scale)


@pytest.mark.parametrize("packing", [{"max_seqlen": 0}, {"cu_seqlens": (None, None), "max_seqlen": (0, 0)}], ids=str)
def test_a_right_call_makes_no_wrong_one_right(packing):
    """Its checks are not made twice for one kind of call."""
    q, k, v = make_qkv(1, 1, 1, 4, 4, 16, device=DEVICE)
    flash_attention(q, k, v)
    with pytest.raises(ValueError, match="seqlen"):
        flash_attention(q, k, v, **packing)


def test_why_not_names_the_remedy(monkeypatch):
    assert why_not("flash", torch.float32, device=DEVICE, head_dim=64) is None
    sdpa = "use PyTorch's scaled_dot_product_attention (model.attention=sdpa)"
    assert sdpa in why_not("flash", torch.float32, device=DEVICE, head_dim=320)
    tiled = "use tiled_attention (model.attention=tiled)"  # SDPA has no windows
    assert why_not("flash", torch.float32, ["window"], head_dim=320).endswith(f"; {tiled}")
    naive = "use naive_attention (model.attention=naive)"
    assert naive in why_not("flash", torch.float64, device=DEVICE, head_dim=64)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    reason = why_not("flash", torch.float32, device="cpu", head_dim=64)
    assert f"needs an NVIDIA GPU; {sdpa}" in reason
    assert f"needs an NVIDIA GPU; {tiled}" in why_not("flash", torch.float32, ["window"], device="cpu")


def test_boards_by_the_names_of_their_devices():
    assert gpu_named("NVIDIA H200").dense_flops == 989.4e12
    assert gpu_named("NVIDIA A100-SXM4-80GB").dense_flops == 312e12
    assert gpu_named("NVIDIA L40S").dense_flops == 362.05e12
    assert gpu_named("NVIDIA L4000") is gpu_named("Some future GPU") is None


# batch, heads, kv_heads, num_q, num_k
LARGE = [
    (2, 4, 4, 512, 512),
    (1, 4, 2, 1023, 1023),
    (1, 4, 1, 257, 700),
    (1, 2, 1, 700, 257),
    (1, 2, 2, 1, 1000),
    (1, 2, 2, 129, 127),
]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [16, 32, 40, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gpu_agrees_with_float64(dtype, head_dim, causal):
    for shape in LARGE:
        q, k, v = make_qkv(*shape, head_dim, dtype=dtype, device="cuda", layout="bnhd")
        compare_with_oracle(flash_attention, q, k, v, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhnd", "packed", "strided", "padded"])
def test_gpu_any_strides(layout):
    q, k, v = make_qkv(2, 4, 2, 300, 300, 64, dtype=torch.bfloat16, layout=layout, device="cuda")
    compare_with_oracle(flash_attention, q, k, v, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("columns", [0, 4])
def test_gpu_strides_of_no_whole_16_bytes(columns, batch):
    """TMA takes none; that of a batch of one is used by nobody."""
    heads, tokens, generator = 4, 100, torch.Generator("cuda").manual_seed(0)
    drawn = torch.randn(3, 2, heads * tokens * (64 + columns) + 4, device="cuda", generator=generator).bfloat16()
    # cut to the batch after it has its stride: a view of one row would have another
    q, k, v = (x[:, :-4].view(2, heads, tokens, -1)[:batch, ..., :64].requires_grad_() for x in drawn)
    assert {x.stride(0) % 8 for x in (q, k, v)} == {4}
    compare_with_oracle(flash_attention, q, k, v, causal=True)


@pytest.mark.gpu
def test_gpu_more_heads_than_a_grid_axis_holds():
    q, k, v = make_qkv(1, 70_000, 70_000, 17, 17, 16, dtype=torch.bfloat16, device="cuda")
    compare_with_oracle(flash_attention, q, k, v, causal=True)


@pytest.mark.gpu
def test_gpu_same_bits_fifty_times():
    q, k, v = make_qkv(2, 8, 2, 1000, 1000, 128, dtype=torch.bfloat16, device="cuda")
    do = torch.randn_like(q)

    def run():
        o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        return o, lse, *torch.autograd.grad(o, (q, k, v), do)

    first = run()
    for _ in range(49):
        for expected, actual in zip(first, run(), strict=True):
            assert torch.equal(actual, expected)


_ONE_CALL = """
import hashlib, torch
from kernels import flash_attention
generator = torch.Generator("cuda").manual_seed(0)
q, k, v, do = (torch.randn(2, 8, 1000, 64, device="cuda", generator=generator).bfloat16() for _ in range(4))
q, k, v = (x.requires_grad_() for x in (q, k, v))
sinks = torch.zeros(8, device="cuda", requires_grad=True)
o = flash_attention(q, k, v, causal=True, sinks=sinks, dropout_p=0.1, dropout_seed=1)
results = (o, *torch.autograd.grad(o, (q, k, v, sinks), do))
print(hashlib.sha256(b"".join(x.detach().float().cpu().numpy().tobytes() for x in results)).hexdigest())
"""


@pytest.mark.gpu
def test_gpu_same_bits_in_ten_fresh_processes():
    runs = [subprocess.Popen([sys.executable, "-c", _ONE_CALL], stdout=subprocess.PIPE, text=True) for _ in range(10)]
    assert len({run.communicate()[0] for run in runs}) == 1
    assert all(run.returncode == 0 for run in runs)


@pytest.mark.parametrize("more", [{"window": (5, 3)}, {"causal": True}], ids=str)
def test_flash_attentions_arguments_are_ours_by_other_names(more):
    q, k, v = (x.detach().transpose(1, 2) for x in make_qkv(1, 4, 2, 20, 20, 16, device=DEVICE))
    sinks, slopes = torch.randn(4, device=DEVICE), torch.rand(4, device=DEVICE)
    ours = more | {"scale": 0.3, "sinks": sinks, "alibi_slopes": slopes, "softcap": 2.0, "dropout_p": 0.2}
    names = {"scale": "softmax_scale", "sinks": "s_aux", "window": "window_size"}
    theirs = {names.get(name, name): x for name, x in ours.items()}
    starts = torch.tensor([0, 9, 20], dtype=torch.int32, device=DEVICE)
    packed = q[0], k[0], v[0], starts, starts, 11, 11

    def drawn(attention, *arguments, **options):
        torch.manual_seed(0)
        return attention(*arguments, **options)

    o, lse = drawn(flash_attention, *(x.transpose(1, 2) for x in (q, k, v)), return_lse=True, **ours)
    for expected, found in (
        ((o.transpose(1, 2), lse), drawn(flash_attn_func, q, k, v, return_attn_probs=True, **theirs)),
        (
            drawn(flash_attention_varlen, *packed, return_lse=True, **ours),
            drawn(flash_attn_varlen_func, *packed, return_attn_probs=True, **theirs),
        ),
    ):
        assert found[2] is None
        assert all(map(torch.equal, found[:2], expected))
    with pytest.raises(ValueError, match=r"max_seqlen_q is 11.5; it must be an integer"):
        flash_attn_varlen_func(*packed[:5], 11.5, 11)
