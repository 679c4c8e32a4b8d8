"""Block masks: building one in each way, and every attention under it against the definition."""

import copy
import gc
import math
import weakref
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.nn.attention.flex_attention import create_block_mask, noop_mask

from kernels import (
    BlockMask,
    block_mask,
    block_masks,
    flash_attention,
    mask_visits,
    naive_attention,
    ops,
    tiled_attention,
)
from kernels.call import Options, key_of
from kernels.launch import PLANS
from kernels.portable.visits import where_shown
from model.attention import sdpa
from scripts.bench.mask_table import masks
from tests.attention_checks import assert_within_budget, compare_with_oracle, make_qkv, oracle, results

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE = masks(1).keys()
TOKENS = 300  # three blocks each way, the last one ragged


@pytest.fixture(autouse=True)
def _poison(poisoned_memory):
    """Every test runs on memory that begins as NaN."""


def random_mask(*shape: int, share: float = 0.3, seed: int = 0) -> torch.Tensor:
    """Booleans with full, partial and empty blocks, and some empty rows."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(shape, generator=generator) < share
    visible[..., :128, 128:256] = False
    visible[..., 128:, :128] = True
    visible[..., 5:9, :] = False
    visible[..., :, 30:32] = False
    return visible.to(DEVICE)


def evaluated(mask_mod, *sizes: int) -> torch.Tensor:
    """Booleans (B, H, Nq, Nk) by one call a batch entry and head, on whole index tensors."""
    b, h, q, k = (torch.arange(n, device=DEVICE) for n in sizes)
    heads = [torch.stack([mask_mod(i, j, q[:, None], k[None, :]) for j in h]) for i in b]
    return torch.stack(heads)


# ---- building


@pytest.fixture(params=["few", "many"])
def patterns(request, monkeypatch):
    """Few are kept as they come; of many, equal ones are kept once."""
    if request.param == "many":
        monkeypatch.setattr(mask_visits, "_FEW", 0)
    return request.param


@pytest.mark.parametrize("name", TABLE)
def test_a_mask_is_what_its_function_says(name, patterns):
    mod = masks(TOKENS, DEVICE)[name]
    built = block_mask(mod, None, None, TOKENS, TOKENS, DEVICE)
    expected = evaluated(mod, 1, 1, TOKENS, TOKENS)
    assert torch.equal(built.dense(), expected)
    for one, other in zip(built, BlockMask.from_dense(expected), strict=True):
        assert one == other if isinstance(one, int) else torch.equal(one, other)


def test_batch_and_heads_and_evaluation_in_strips(monkeypatch):
    shift = torch.tensor([0, 40], device=DEVICE)

    def mod(b, h, q, k):
        return (k <= q + shift[b]) | (k == 200 + h)

    whole = block_mask(mod, 2, 3, 257, 300, DEVICE)
    assert torch.equal(whole.dense(), evaluated(mod, 2, 3, 257, 300))
    monkeypatch.setattr(block_masks, "_PAIRS", 1)
    for one, other in zip(block_mask(mod, 2, 3, 257, 300, DEVICE)[:3], whole[:3], strict=True):
        assert torch.equal(one, other)


OF_TORCH = create_block_mask(lambda b, h, q, k: q >= k, None, None, 200, 200, device=DEVICE)


@pytest.mark.parametrize("build", [
    lambda: block_mask(lambda b, h, q, k: (q >= k) & (k % 7 > 0), None, None, 200, 200, DEVICE),
    lambda: BlockMask.from_dense(torch.ones(200, 200, dtype=torch.bool, device=DEVICE).tril(3)),
    lambda: BlockMask.from_torch(OF_TORCH),
], ids=["function", "booleans", "torch's"])  # fmt: skip
def test_a_mask_that_is_built_inside_what_is_compiled(build):
    """Dynamo, which follows NumPy, ended in its words."""
    q = torch.randn(1, 1, 200, 16, device=DEVICE)
    expected = flash_attention(q, q, q, block_mask=build())
    compiled = torch.compile(lambda q: flash_attention(q * 1, q, q, block_mask=build()), backend="eager")
    assert torch.equal(compiled(q), expected)


def test_counts_and_patterns_kept_once(patterns):
    window = block_mask(lambda b, h, q, k: (k <= q) & (q - k < 200), 1, 1, 1024, 1024, DEVICE)
    assert window.counts() == {"blocks": 64, "visited": 21, "partial": 21}
    # all and nothing; and of the diagonal, next to it, and two away
    assert window.bits.shape[0] == 2 + {"few": 21, "many": 3}[patterns]
    assert BlockMask.from_dense(torch.ones(256, 256, dtype=torch.bool)).counts()["partial"] == 0
    # bounds tell nothing of floats: blocks of which all is asked are full, partial and hidden all the same
    asked = block_mask(lambda b, h, q, k: (q - k).float() >= 0, 1, 1, 1024, 1024, DEVICE)
    for one, other in zip(asked, block_mask(lambda b, h, q, k: k <= q, 1, 1, 1024, 1024, DEVICE), strict=True):
        assert one == other if isinstance(one, int) else torch.equal(one, other)
    assert block_mask(lambda b, h, q, k: k >= 0, 1, 1, 130, 256, DEVICE).counts()["partial"] == 0  # rows past the last
    assert block_mask(lambda b, h, q, k: k < 0, 1, 1, 130, 256, DEVICE).counts()["visited"] == 0
    causal = block_mask(lambda b, h, q, k: k <= q + 100 * h, 2, 2, 384, 384, DEVICE)  # 6 blocks and 8, 3 and 5 of them
    assert causal.counts() == {"blocks": 36, "visited": 28, "partial": 16}


@pytest.mark.parametrize("mod", [lambda b, h, q, k: k % 64 == 5, lambda b, h, q, k: k % 64 != 5])
def test_a_pattern_of_like_words_is_not_one_of_all_or_nothing(mod, patterns):
    mask = block_mask(mod, 1, 1, 256, 256, DEVICE)
    assert torch.equal(mask.dense(), evaluated(mod, 1, 1, 256, 256).expand(1, 1, 256, 256))
    assert mask.counts()["partial"] == 4


def test_a_single_pair_makes_a_block_partial():
    """Beside blocks of all and of nothing."""
    visible = torch.zeros(256, 384, dtype=torch.bool, device=DEVICE)
    visible[:, 256:] = True
    visible[7, 140], visible[200, 300] = True, False
    for given in (visible, visible[:, :300]):
        mask = BlockMask.from_dense(given)
        assert torch.equal(mask.dense()[0, 0], given)
        assert mask.counts()["visited"] == 3


def test_patterns_with_one_hash_are_told_apart(monkeypatch):
    monkeypatch.setattr(mask_visits, "_FEW", 0)
    monkeypatch.setattr(mask_visits, "_ODD", 0)
    visible = random_mask(300, 300)
    assert torch.equal(BlockMask.from_dense(visible).dense()[0, 0], visible)


@pytest.mark.parametrize("sizes", [(256, 256), (300, 257)])
def test_torchs_mask_is_taken_as_it_is(sizes):
    def mod(b, h, q, k):
        return (k <= q + 50 * h) & (q - k < 190) | (k == b)

    theirs = create_block_mask(mod, 2, 2, *sizes, device=DEVICE)
    ours = BlockMask.from_torch(theirs)
    for one, other in zip(ours, block_mask(mod, 2, 2, *sizes, DEVICE), strict=True):
        assert one == other if isinstance(one, int) else torch.equal(one, other)
    q, k, v = make_qkv(2, 2, 1, *sizes, 16, device=DEVICE)
    found = flash_attention(q, k, v, block_mask=theirs)
    assert torch.equal(found, flash_attention(q, k, v, block_mask=ours))
    theirs.kv_num_blocks.fill_(0)  # a new version of the lists is another mask
    assert not torch.equal(found, flash_attention(q, k, v, block_mask=theirs))


def test_torchs_mask_of_inference_mode_serves_training_too():
    q, k, v = make_qkv(1, 1, 1, 130, 130, 16, device=DEVICE)
    with torch.inference_mode():
        theirs = create_block_mask(lambda b, h, q, k: k <= q, 1, 1, 130, 130, device=DEVICE)
        found = flash_attention(q.detach(), k.detach(), v.detach(), block_mask=theirs)
    o = flash_attention(q, k, v, block_mask=theirs)
    assert torch.equal(o, found)
    torch.autograd.grad(o.sum(), (q, k, v))


@pytest.mark.parametrize("hidden", [0, 1])
@pytest.mark.parametrize("together", [block_masks._PAIRS, 1])
def test_torchs_lists_decide_and_its_function_is_asked_inside_partial_blocks_only(together, hidden, monkeypatch):
    """Full blocks that reach past the keys, a mask without a function, and the lists of a mask that was cut."""
    monkeypatch.setattr(block_masks, "_PAIRS", together)
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32, device=DEVICE)
    blocks = torch.tensor([[[[1 - hidden, hidden], [0, 1]]]], dtype=torch.int32, device=DEVICE)
    nothing = lambda b, h, q, k: k < 0  # noqa: E731
    for arguments, mod in (((counts, blocks), noop_mask), ((counts * 0, blocks, counts, blocks), nothing)):
        theirs = TorchBlockMask.from_kv_blocks(*arguments, mask_mod=mod)
        expected = torch.ones(200, 150, dtype=torch.bool, device=DEVICE)
        expected[:128, 128 * hidden : 128 * (hidden + 1)] = False
        ours = BlockMask.from_torch(theirs, 200, 150)
        for one, other in zip(ours, BlockMask.from_dense(expected), strict=True):
            assert one == other if isinstance(one, int) else torch.equal(one, other)
    whole = create_block_mask(lambda b, h, q, k: k <= q, 1, 1, 256, 256, device=DEVICE)
    with pytest.raises(ValueError, match="sliced BlockMask"):  # pytorch#164702: never another mask in silence
        BlockMask.from_torch(whole[:1])


@triton.jit
def _shown_kernel(bits, out, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    at = (row % 128 + tl.arange(0, ROWS))[:, None] * 128 + col % 128 + tl.arange(0, COLS)[None, :]
    values = at.to(tl.float32)  # exact
    tl.store(out + at, where_shown(values, bits, row, col, ROWS, COLS))


@pytest.mark.parametrize("tile", [(16, 16), (32, 16), (16, 32), (128, 64), (64, 128)], ids=str)
def test_a_kernel_reads_the_bits_of_any_tile_from_either_side(tile):
    visible = random_mask(128, 128)
    bits = BlockMask.from_dense(visible).bits
    for side, expected in enumerate((visible, visible.T)):
        out = torch.empty(128, 128, device=DEVICE)
        for row in range(128, 256, tile[0]):
            for col in range(256, 384, tile[1]):
                _shown_kernel[(1,)](bits[2, 128 * side :], out, row, col, *tile)
        values = torch.arange(128.0 * 128, device=DEVICE).view(128, 128)
        assert torch.equal(out, values.masked_fill(~expected, -math.inf))


def test_a_mask_says_whether_it_visits_many_blocks_and_its_calls_have_other_plans():
    q = torch.empty(1, 1, 4096, 64)
    keys = []
    for name, crowded in {"causal": True, "window": False, "documents": False, "strided": True}.items():
        mask = block_mask(masks(4096)[name], None, None, 4096, 4096, "cpu")
        options = Options(False, 1.0, mask_starts=mask.starts, mask_visits=mask.visits, mask_bits=mask.bits)
        assert options.crowded == crowded, name
        keys.append(key_of("forward", options, q, q, q))
    assert keys[0] == keys[3] != keys[1] == keys[2]


def test_torchs_mask_is_converted_anew_where_it_has_other_lists_and_is_not_kept_alive():
    theirs = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device=DEVICE)
    assert BlockMask.from_torch(theirs) is BlockMask.from_torch(theirs)
    before = BlockMask.from_torch(theirs).dense().sum()
    theirs.full_kv_num_blocks = torch.zeros_like(theirs.full_kv_num_blocks)
    assert BlockMask.from_torch(theirs).dense().sum() == before - 128 * 128
    theirs.mask_mod = lambda b, h, q, k: q > k  # of the partial blocks, on the diagonal
    assert BlockMask.from_torch(theirs).dense().sum() == before - 128 * 128 - 256

    q, k = torch.arange(256, device=DEVICE)[:, None], torch.arange(256, device=DEVICE)
    for width in range(2, 20):  # of two that come and go the second may have the address of the first
        theirs.mask_mod = lambda b, h, q, k, width=width: (q >= k) & (q - k < width)
        if width % 2:
            on_diagonal = (q >= k) & (q - k < width) & (q // 128 == k // 128)
            assert torch.equal(BlockMask.from_torch(theirs).dense()[0, 0], on_diagonal)

    for numbers in (theirs.kv_num_blocks, theirs.kv_indices, theirs.full_kv_num_blocks, theirs.full_kv_indices):
        numbers.add_(0)
    BlockMask.from_torch(theirs)
    for tokens in ((256, 256), (200, 256), (200, 150)):  # of which it is these padded to whole blocks
        assert BlockMask.from_torch(theirs, *tokens).dense().shape[2:] == tokens
    theirs.kv_num_blocks.zero_()
    assert not BlockMask.from_torch(copy.deepcopy(theirs)).dense().any()  # whose lists count their versions anew

    class Owner:
        def __init__(self):
            self.shift = 0
            mod = lambda b, h, q, k: q + self.shift >= k  # noqa: E731
            self.mask = create_block_mask(mod, None, None, 128, 128, device=DEVICE)
            BlockMask.from_torch(self.mask)

    owner = weakref.ref(Owner())
    gc.collect()
    assert owner() is None


def test_a_mask_made_in_inference_mode_trains_later():
    with torch.inference_mode():
        mask = block_mask(lambda b, h, q, k: q >= k, None, None, 200, 200, DEVICE)
    q = torch.randn(1, 1, 200, 16, device=DEVICE, requires_grad=True)
    assert flash_attention(q, q, q, block_mask=mask).sum().backward() is None


def test_what_is_no_mask_and_no_device_is_refused():
    with pytest.raises(ValueError, match="mask has type int; expected torch's BlockMask"):
        BlockMask.from_torch(5)
    with pytest.raises(ValueError, match=r"a block mask has no dtype; give a device in place of torch\.float16"):
        BlockMask.from_dense(torch.ones(2, 2, dtype=torch.bool)).to(torch.float16)
    elsewhere = BlockMask.from_dense(torch.ones(20, 30, dtype=torch.bool, device=DEVICE)).to("meta")
    assert elsewhere[3:] == (20, 30)
    q, k, v = make_qkv(1, 1, 1, 20, 30, 16, device=DEVICE)
    with pytest.raises(ValueError, match=r"block_mask is on meta but q is on .*; move them to one device"):
        flash_attention(q, k, v, block_mask=elsewhere)


def test_a_mask_of_another_version_is_refused():
    mask = BlockMask.from_dense(torch.ones(200, 200, dtype=torch.bool))
    q = torch.zeros(1, 1, 200, 16)
    for other in (mask._replace(starts=mask.starts[:, :, :-2]), mask._replace(bits=mask.bits.unflatten(1, (2, 128)))):
        with pytest.raises(ValueError, match="was saved by another version"):
            tiled_attention(q, q, q, block_mask=other)


# ---- attention


def of_batch_and_heads(name: str, tokens: int, *dims: int) -> BlockMask:
    """A row of the table, less some whole rows, others for each batch entry and head."""
    mod = masks(tokens, DEVICE)[name]
    mask = block_mask(lambda b, h, q, k: mod(b, h, q, k) & ((q + b + 2 * h) % 9 != 4), *dims, tokens, tokens, DEVICE)
    assert tuple(mask.starts.shape[:2]) == dims
    return mask


@pytest.mark.parametrize("name", TABLE)
def test_agrees_with_float64(name):
    """Each row of the table, for each head another one, with empty rows and heads that share keys."""
    tokens = 170
    q, k, v = make_qkv(1, 2, 1, tokens, tokens, 16, device=DEVICE)
    ours = compare_with_oracle(flash_attention, q, k, v, block_mask=of_batch_and_heads(name, tokens, 1, 2))
    assert (ours["lse"] == -torch.inf).any(-1).all()


@pytest.mark.parametrize("dims", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_batch_and_head_dimensions_groups_and_empty_rows(dims):
    mask = BlockMask.from_dense(random_mask(*dims, 192, 192))  # whole tiles, but no whole blocks, with NaN behind
    q, k, v = make_qkv(2, 2, 1, 192, 192, 16, device=DEVICE, layout="padded")
    ours = compare_with_oracle(flash_attention, q, k, v, block_mask=mask)
    assert not ours["o"][:, :, 5:9].any()
    assert (ours["lse"][:, :, 5:9] == -torch.inf).all()
    assert not ours["dq"][:, :, 5:9].any()
    assert not ours["dk"][:, :, 30:32].any()
    assert not ours["dv"][:, :, 30:32].any()


def test_the_other_implementations_agree():
    mask = BlockMask.from_dense(random_mask(2, 2, 140, 257))
    q, k, v = make_qkv(2, 2, 1, 140, 257, 16, device=DEVICE)
    expected = naive_attention(q, k, v, block_mask=mask, scale=0.3)
    for attention in (tiled_attention, partial(tiled_attention, block_q=100, block_k=48), sdpa):
        ours = attention(q, k, v, block_mask=mask, scale=0.3)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        grads = [torch.autograd.grad(o.square().sum(), (q, k, v), retain_graph=True) for o in (ours, expected)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_naive_is_the_formula_over_the_booleans():
    visible = random_mask(2, 60, 70)
    q, k, v = (x.double() for x in make_qkv(1, 2, 2, 60, 70, 16, device=DEVICE))
    scores = (q @ k.mT / 4).masked_fill(~visible, -torch.inf)
    expected = torch.softmax(scores, -1).nan_to_num() @ v
    o, lse = naive_attention(q, k, v, block_mask=BlockMask.from_dense(visible), return_lse=True)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_blocks_that_are_not_visited_are_not_read():
    """They hold NaN: a product with one would show, however well it was masked."""
    visible = random_mask(300, 300)
    visible[:, 128:256] = False  # no query sees these keys,
    visible[128:256] = False  # and these queries see no key
    q, k, v = make_qkv(1, 1, 1, 300, 300, 16, device=DEVICE)
    for x in (q, k, v):
        x.data[:, :, 128:256] = torch.nan
    o = flash_attention(q, k, v, block_mask=BlockMask.from_dense(visible))
    do = torch.ones_like(o)
    grads = torch.autograd.grad(o, (q, k, v), do)
    for x in (o, *grads):
        assert torch.isfinite(x).all()
        assert not x[:, :, 128:256].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_two_bytes_padded_heads_and_the_same_bits_twice(dtype):
    mask = BlockMask.from_dense(random_mask(140, 200))
    q, k, v = make_qkv(1, 2, 1, 140, 200, 24, head_dim_v=40, dtype=dtype, device=DEVICE)
    options = {"block_mask": mask, "softcap": 3.0, "sinks": torch.tensor([0.3, -0.4], device=DEVICE)}
    first = compare_with_oracle(flash_attention, q, k, v, **options)
    again = compare_with_oracle(flash_attention, q, k, v, **options)
    assert all(torch.equal(again[name], value) for name, value in first.items())


# ---- FlexAttention's open bugs, each by its number


def test_pytorch_153799_finite_gradients_where_tokens_are_no_multiple_of_128():
    """There: NaN in the backward of a causal mask with a bias of the distance."""
    mask = block_mask(lambda b, h, q, k: q >= k, None, None, 129, 129, DEVICE)
    q, k, v = make_qkv(1, 1, 1, 129, 129, 16, device=DEVICE)
    compare_with_oracle(flash_attention, q, k, v, block_mask=mask, alibi_slopes=torch.ones(1, device=DEVICE))


def test_pytorch_158212_gradients_of_several_masks_in_a_row():
    """There: wrong dK and dV, once more than one mask of bands over three sections is compiled."""
    section, step = 90, 4
    q, k, v = make_qkv(1, 1, 1, 3 * section, 3 * section, 16, device=DEVICE)
    for offset in range(2):

        def mod(b, h, q, k, offset=offset):
            inside, group = q - section, (q - section - offset) // step
            first = (q < section) & (k < section) & (q > k - step)
            middle = (section <= q) & (q < 2 * section) & (inside % step != offset)
            before = middle & (k < section) & (k <= group * step + offset)
            same = middle & (section <= k) & (k < 2 * section) & (group == (k - section - offset) // step)
            after = middle & (k >= 2 * section) & (group == (k - 2 * section - offset) // step)
            return first | before | same | after

        mask = block_mask(mod, None, None, 3 * section, 3 * section, DEVICE)
        assert not mask.dense()[0, 0, 2 * section :].any()
        compare_with_oracle(flash_attention, q, k, v, block_mask=mask)


def test_pytorch_139462_a_mask_longer_than_the_call():
    """There: zeros for every batch entry but the first. Padded to whole blocks it is taken, else refused."""
    q, k, v = make_qkv(2, 1, 1, 2, 2, 16, device=DEVICE)
    fits, longer = (create_block_mask(lambda b, h, q, k: q >= k, 2, None, 128, n, device=DEVICE) for n in (128, 256))
    expected = naive_attention(q, k, v, causal=True)
    torch.testing.assert_close(flash_attention(q, k, v, block_mask=fits), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"block_mask is torch's of \(2, 1, 128, 256\); q and k have 2 x 2 tokens"):
        flash_attention(q, k, v, block_mask=longer)
    with pytest.raises(ValueError, match=r"torch's of \(1, 1, 100, 100\); q and k have 120 x 100"):
        BlockMask.from_torch(create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 100, 100, device=DEVICE), 120)


def test_a_sliced_mask_of_torchs_is_refused_by_its_lists():
    """Their slice keeps the mask's lengths, so those cannot tell it from a whole one."""
    q, k, v = make_qkv(1, 1, 1, 300, 300, 16, device=DEVICE)
    whole = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 300, 300, device=DEVICE)
    with pytest.raises(ValueError, match=r"kv_num_blocks \(1, 1, 1\); 300 queries have 3 blocks: \(B, H, 3\)"):
        flash_attention(q, k, v, block_mask=whole[:, :, 0])
    flat = TorchBlockMask.from_kv_blocks(*(x[0, 0] for x in (whole.kv_num_blocks, whole.kv_indices)))
    with pytest.raises(ValueError, match=r"kv_num_blocks \(3,\); 384 queries have 3 blocks: \(B, H, 3\)"):
        BlockMask.from_torch(flat)


def test_pytorch_141126_chunks_that_see_some_chunks_before():
    """There: results far off under a mask of whole chunks with limited context."""
    mask = block_mask(
        lambda b, h, q, k: (k // 24 <= q // 24) & (k // 24 >= q // 24 - 3), None, None, 277, 277, DEVICE
    )  # fmt: skip
    q, k, v = make_qkv(2, 1, 1, 277, 277, 16, device=DEVICE)
    expected = oracle(q, k, v, do := torch.randn_like(q), None, block_mask=mask)
    ours, plain = (results(f, q, k, v, do, None, block_mask=mask) for f in (flash_attention, naive_attention))
    assert_within_budget(ours, expected, plain)


def test_pytorch_141486_other_masks_of_a_size_compile_nothing():
    """There: another length of documents is another kernel. One plan, and so one kernel, serves them all."""
    q, k, v = make_qkv(1, 1, 1, 200, 200, 16, device=DEVICE)
    counts = []
    for share in (0.1, 0.5, 1.0):
        mask = BlockMask.from_dense(torch.rand(200, 200, device=DEVICE) < share)
        torch.autograd.grad(flash_attention(q, k, v, block_mask=mask).sum(), (q, k, v))
        counts.append(len(PLANS))
    assert counts[0] == counts[-1]


def test_attention_gym_60_one_query_over_many_keys():
    mask = block_mask(lambda b, h, q, k: (k % 3 == 0) | (k > 280), None, None, 1, 300, DEVICE)
    compare_with_oracle(flash_attention, *make_qkv(1, 4, 2, 1, 300, 16, device=DEVICE), block_mask=mask)


# ---- the operator and refusals


def test_opcheck_and_one_compiled_graph():
    mask = BlockMask.from_dense(random_mask(1, 2, 20, 150))
    q, k, v = make_qkv(1, 2, 1, 20, 150, 16, device=DEVICE)
    arguments = (q, k, v, False, 0.25, -1, -1, 0.0, None, None, 0.0, None, None, None, 0, 0, *mask[:3])
    torch.library.opcheck(ops.flash_fwd, arguments, test_utils=("test_schema", "test_faketensor"))

    def loss(q, k, v, mask):
        return flash_attention(q, k, v, block_mask=mask).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for other in (mask, BlockMask.from_dense(random_mask(1, 2, 20, 150, seed=1, share=0.8))):
        grads = [torch.autograd.grad(f(q, k, v, other), (q, k, v)) for f in (compiled, loss)]
        assert all(map(torch.equal, *grads))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": True}, "block_mask with causal is not supported; put all of it into the mask"),
        ({"causal": True, "window": (5, 0)}, "block_mask with window is not supported; put all of it into the mask"),
        ({"block_mask": "causal"}, "block_mask has type str; expected a kernels.BlockMask"),
        ({"block_mask": (1, 21, 30)}, "block_mask is of 21 x 30 tokens; q and k have 20 x 30"),
        ({"block_mask": (20, 31)}, "block_mask is of 20 x 31 tokens; q and k have 20 x 30"),
        ({"block_mask": (3, 1, 20, 30)}, "block_mask has a batch dimension of 3; it must be 1 or q's 2"),
        ({"block_mask": (2, 20, 30)}, "block_mask has a heads dimension of 2; it must be 1 or q's 4"),
    ],
)
@pytest.mark.parametrize("attention", [flash_attention, naive_attention, tiled_attention])
def test_refusals(attention, options, message):
    q, k, v = make_qkv(2, 4, 2, 20, 30, 16, device=DEVICE)
    given = options.get("block_mask", (20, 30))
    mask = given if isinstance(given, str) else BlockMask.from_dense(torch.ones(given, dtype=torch.bool, device=DEVICE))
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, **(options | {"block_mask": mask}))


def test_mistakes_in_building(monkeypatch):
    with pytest.raises(ValueError, match=r"visible has dtype torch.float32 and shape \(2, 2\); expected booleans"):
        BlockMask.from_dense(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"mask_mod returned torch.int64 on \w+:?\d*; it must return a boolean"):
        block_mask(lambda b, h, q, k: q - k, None, None, 4, 4, DEVICE)
    with pytest.raises(ValueError, match="Nk is 0; it must be an integer of at least 1"):
        block_mask(lambda b, h, q, k: q >= k, None, None, 4, 0, DEVICE)
    for name, sizes in (("Nq", (2**22 + 1, 4)), ("Nk", (4, 2**22 + 1))):
        with pytest.raises(ValueError, match=f"{name} is 4,194,305; a block mask takes at most 4,194,304 tokens"):
            block_mask(lambda b, h, q, k: q >= k, None, None, *sizes, DEVICE)
    assert block_mask(lambda b, h, q, k: k < 5, None, None, 1, 2**22, DEVICE).counts()["visited"] == 1
    blocks = torch.zeros(1, 1, 2**15 + 1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="Nq is 4,194,432; a block mask takes at most 4,194,304 tokens"):
        BlockMask.from_torch(TorchBlockMask.from_kv_blocks(blocks[..., 0], blocks))
    theirs = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 256, 256, device=DEVICE, BLOCK_SIZE=64)
    with pytest.raises(ValueError, match=r"block_mask has BLOCK_SIZE \(64, 64\); make it with BLOCK_SIZE=128"):
        BlockMask.from_torch(theirs)
    monkeypatch.setattr(mask_visits, "MOST_VISITS", 3)
    with pytest.raises(ValueError, match="the mask visits 3 blocks of 128 x 128; the most are 2"):
        block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 40)])
def test_gpu_agrees_with_float64(name, dtype, head_dim):
    """Sizes with many blocks of each kind: batch, groups, a ragged end; one mask for all, and one for each with empty
    rows."""
    tokens = 1900
    q, k, v = make_qkv(2, 4, 2, tokens, tokens, head_dim, dtype=dtype, device=DEVICE, layout="bnhd")
    shared = block_mask(masks(tokens, DEVICE)[name], None, None, tokens, tokens, DEVICE)
    for mask in (shared, of_batch_and_heads(name, tokens, 2, 4)):
        compare_with_oracle(flash_attention, q, k, v, block_mask=mask)


def test_what_makes_no_mask_is_refused_in_a_line(tmp_path):
    instead = r"\); use &, \| and torch.where of tensors where it has if, and, or"
    with pytest.raises(ValueError, match=r"mask_mod cannot be evaluated \(.*" + instead):
        block_mask(lambda b, h, q, k: k <= q if q > 3 else k < 2, None, None, 200, 200, DEVICE)
    short = torch.zeros(199, device=DEVICE)
    told = r"; it must be a function of \(b, h, q, k\), for q up to 199 and k up"
    for wrong, reason in ((lambda q, k: k <= q, "takes 2 positional"), (short, "not callable")):
        with pytest.raises(ValueError, match=rf"mask_mod cannot be evaluated \(.*{reason}.*\){told} to 299"):
            block_mask(wrong, None, None, 200, 300, DEVICE)
    if DEVICE == "cpu":  # a GPU's own check ends the process
        with pytest.raises(ValueError, match=rf"evaluated \(index 199 is out of bounds.*{told}"):
            block_mask(lambda b, h, q, k: short[k] == short[q], None, None, 200, 200, DEVICE)
    sliced = create_block_mask(lambda b, h, q, k: k <= q + h, None, 2, 200, 200, device=DEVICE)[:, :1]
    with pytest.raises(ValueError, match=r"must set it from the original BlockMask's mask_mod.*" + instead):
        BlockMask.from_torch(sliced)
    elsewhere = torch.zeros(200, device="meta")
    with pytest.raises(ValueError, match=rf"mask_mod returned torch.bool on meta; .* and read what is on {DEVICE}"):
        block_mask(lambda b, h, q, k: elsewhere[q] == elsewhere[k], None, None, 200, 200, DEVICE)
    for read in (lambda b, h, q, k: (k <= q) & (elsewhere[q] > 0), lambda b, h, q, k: k <= q + elsewhere.sum()):
        with pytest.raises(ValueError, match=rf"mask_mod cannot be .* and read what is on {DEVICE}"):
            block_mask(read, None, None, 200, 200, DEVICE)
    with pytest.raises(ValueError, match=r"mask_mod cannot be .*must only return Tensors, got type <class 'bool'>"):
        block_mask(lambda b, h, q, k: True, None, None, 8, 8, DEVICE)

    asked = []

    def greedy(b, h, q, k):
        asked.append(q)
        if len(asked) > 1:  # the first time bounds were asked for, of which a float has none
            raise torch.OutOfMemoryError("no room")
        return (q - k).float() >= 0

    with pytest.raises(torch.OutOfMemoryError, match="no room"):  # no mistake of the function
        block_mask(greedy, None, None, 8, 8, DEVICE)
    with pytest.raises(ValueError, match="visible has type list; expected a tensor of booleans"):
        BlockMask.from_dense([[True]])
    with pytest.raises(ValueError, match="H is 0; it must be an integer of at least 1"):
        BlockMask.from_dense(torch.ones(0, 8, 8, dtype=torch.bool, device=DEVICE))
    with pytest.raises(ValueError, match="B is 0; it must be an integer of at least 1"):
        block_mask(lambda b, h, q, k: k <= q, 0, None, 8, 8, DEVICE)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device=cuda is not there or keeps no values; give device='cpu'"):
            block_mask(lambda b, h, q, k: k <= q, None, None, 8, 8)
    for device in ("meta", "gpu"):
        with pytest.raises(ValueError, match=f"device={device} is not there or keeps no values; give device='cpu'"):
            block_mask(lambda b, h, q, k: k <= q, None, None, 8, 8, device)
    with pytest.raises(ValueError, match="device=meta is not there"):
        BlockMask.from_dense(torch.ones(8, 8, dtype=torch.bool, device="meta"))
    with FakeTensorMode(), pytest.raises(ValueError, match="from values, which FakeTensorMode has not; make it before"):
        block_mask(lambda b, h, q, k: k <= q, None, None, 9, 9, DEVICE)
    assert block_mask(lambda b, h, q, k: k <= q, None, None, 9, 9, DEVICE).dense().sum() == 45  # it left nothing behind
    made = block_mask(lambda b, h, q, k: k <= q, None, None, 8, 8, DEVICE)
    torch.save(made, tmp_path / "mask")
    assert torch.equal(torch.load(tmp_path / "mask").dense(), made.dense())
