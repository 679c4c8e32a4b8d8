"""Attention over a cache by the Hopper kernel, its own source run by Python: no GPU needed.

On a GPU tests/test_decode.py meets it: the calls that it takes are most of those there. What it compiles to is with the
other Hopper kernels in tests/test_offline_compilation.py.
"""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch

from kernels import naive_attention_with_kvcache
from kernels.call import Options, canonical_window
from kernels.decode import Call, kvcache_workspace
from kernels.launch import PLANS, sizes_described
from kernels.portable.tuning import DecodeTile
from kernels.support import takes_hopper_kvcache

SMALL = DecodeTile(block_k=64, span=4, num_warps=4, num_stages=2, per_sm=1, groups=2, least_rows=8, quad=2)
AS_ROWS_TILE = replace(SMALL, span=2, least_rows=64, quad=None)  # queries as rows
LONG = replace(SMALL, block_k=128)  # two of wgmma's rows of keys


def a_call(
    lengths, head_dim=64, heads=2, kv_heads=1, num_q=1, page=0, append=True, leftpad=None, seed=0, scaled=None,
    tokens_first=False, dtype=torch.float32,
):  # fmt: skip
    """A call in whose cache all slots before and behind a row's keys are NaN; or, scaled by "head" or "token", in int8,
    and with a scale a token such slots have NaN for one. tokens_first: in memory a token's heads lie together."""
    generator = torch.Generator().manual_seed(seed)
    rows, capacity = len(lengths), max(0, *lengths) + num_q + 3
    shapes = ((rows, h, num_q, head_dim) for h in (heads, kv_heads, kv_heads))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    pages = -(-capacity // page) if page else 1
    table = torch.randperm(rows * pages, generator=generator).reshape(rows, pages).int() if page else None
    shape = (rows * pages, kv_heads, page, head_dim) if page else (rows, kv_heads, capacity, head_dim)
    caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    scales = None, None
    if scaled:
        q = q.bfloat16().to(dtype)  # float16, through which it goes, holds it
        caches = [(cache * 40).to(torch.int8) for cache in caches]
        of_scales = shape[:3] if scaled == "token" else shape[1:2]
        scales = [torch.rand(of_scales, generator=generator) * 0.02 + 0.01 for _ in range(2)]
    for row, length in enumerate(lengths):
        slots = torch.arange(max(length, 0), pages * page if page else capacity)
        if leftpad is not None:
            slots = torch.cat((torch.arange(leftpad[row]), slots))
        line = table[row].long()[slots // page] if page else torch.full_like(slots, row)
        for absent in {None: caches, "head": [], "token": scales}[scaled]:
            absent[line, :, slots % page if page else slots] = torch.nan
    if tokens_first:
        k, v, *caches = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v, *caches))
        if scaled == "token":
            scales = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in scales]
    new = (k, v) if append else (None, None)
    tensors = (torch.tensor(lengths, dtype=torch.int32), leftpad, table, *scales)
    return Call(q, *caches, *new, *tensors, kvcache_workspace(rows, heads, "cpu"))


def without_other_pages(call, block_k, left):
    """The call with -1 in place of pages that hold no key of a tile that a query sees, `left` keys before its own:
    those given back, those not yet taken, those of absent rows."""
    table, page, num_q = call.block_table.clone(), call.k_cache.shape[2], call.q.shape[2]
    for row, length in enumerate(call.cache_seqlens.tolist()):
        keys = 0 if length < 0 else length + (0 if call.k_new is None else num_q)
        table[row, : max(keys - num_q - left, 0) // block_k * block_k // page] = -1
        table[row, -(-keys // page) :] = -1
    return call._replace(block_table=table)


def exactly(call):
    """The call in float64, all but what is in 8 bits: positional and named arguments of the definition."""
    wide = [x.double() if x is not None and x.dtype == torch.float32 else x for x in call[:5]]
    fields = "cache_seqlens", "cache_leftpad", "block_table", "k_scale", "v_scale"
    named = {name: None if getattr(call, name) is None else getattr(call, name).clone() for name in fields}
    return [x.clone() for x in wide[:3]], {"k": wide[3], "v": wide[4], **named}


def run(monkeypatch, call, tile=SMALL, cut=(3, 5), pauses=None, causal=True, window=(-1, -1), softcap=0.0, scale=None,
    **tensors,
):  # fmt: skip
    """O, LSE, and the caches and their scales after the call, by the kernel's own source."""
    from kernels.hopper import decode as hopper
    from kernels.portable import decode as portable
    from tests import hopper_simulator

    hopper_simulator.simulate(monkeypatch, hopper.hopper_decode_kernel, pauses=pauses, residents=cut[0])
    monkeypatch.setattr(portable, "cut_for", lambda *_: cut)
    PLANS.clear()
    mask, *bounds = canonical_window(causal, window)
    options = Options(mask, scale or call.q.shape[3] ** -0.5, *bounds, softcap)._replace(**tensors)
    written = "k_cache", "v_cache", "k_scale", "v_scale"
    call = call._replace(**{name: x if (x := getattr(call, name)) is None else x.clone() for name in written})
    o, lse = hopper.launch_hopper_decode(call, options, tile)
    assert not call.workspace[1:].any(), "a turn is left"
    PLANS.clear()
    return o, lse, *(getattr(call, name) for name in written)


PADS = torch.tensor([13, 70], dtype=torch.int32)
CASES = {
    "one tile": {"lengths": [30, 63]},
    "new tokens in two tiles": {"lengths": [62, 190], "num_q": 4, "heads": 4, "kv_heads": 2},
    "tiles of a row, spans of a row": {"lengths": [200, 700, 0, -1, 64]},
    "groups of spans": {"lengths": [1200]},
    "nothing appended": {"lengths": [64, 100, 1], "append": False},
    "narrow heads": {"lengths": [150, 20], "head_dim": 48},
    "wide heads": {"lengths": [150, 20, 300], "head_dim": 80},
    "pages of 16": {"lengths": [150, 20, 400], "head_dim": 128, "page": 16},
    "pages of 64": {"lengths": [150, 20, 400], "page": 64},
    "pages larger than tiles": {"lengths": [300, 127], "head_dim": 80, "page": 128},
    "left padding": {"lengths": [150, 90, 60], "leftpad": torch.cat((PADS, PADS[:1]))},
    "8 bits, a scale a head": {"lengths": [150, 20, 300], "head_dim": 80, "heads": 4, "kv_heads": 2, "scaled": "head"},
    "8 bits, a scale a token": {"lengths": [62, 0, 700], "head_dim": 128, "num_q": 4, "heads": 2, "scaled": "token"},
    "8 bits in pages": {"lengths": [150, 20, 400], "head_dim": 128, "kv_heads": 2, "page": 16, "scaled": "token"},
    "8 bits in large pages": {"lengths": [200, 90], "head_dim": 96, "page": 128, "scaled": "token"},
    "8 bits behind padding": {"lengths": [150, 90], "head_dim": 128, "leftpad": PADS, "scaled": "token"},
    "tokens first": {"lengths": [62, 90], "num_q": 4, "heads": 4, "kv_heads": 2, "tokens_first": True},
    "8 bits, tokens first": {
        "lengths": [62, 90],
        "head_dim": 96,
        "kv_heads": 2,
        "scaled": "token",
        "tokens_first": True,
    },
    "8 bits, all columns": {"lengths": [150, 20], "head_dim": 128, "num_q": 8, "heads": 2, "scaled": "token"},
    "many queries": {"lengths": [300, 2, 58], "head_dim": 80, "num_q": 11, "heads": 4, "page": 16},
}
OPTIONS = [{"window": (70, 0)}, {"softcap": 5.0}, {"causal": False, "window": (100, 40)}]
WITH_OPTIONS = "new tokens in two tiles", "tiles of a row, spans of a row", "pages of 16", "8 bits, a scale a token"
IN_LONG = "8 bits, a scale a token", "tiles of a row, spans of a row"
AS_ROWS = "many queries", "tiles of a row, spans of a row", "left padding"


@pytest.mark.parametrize(
    ("name", "options", "tile"),
    [
        *((name, {}, SMALL) for name in CASES), *product(WITH_OPTIONS, OPTIONS, [SMALL]),
        *((name, {}, LONG) for name in IN_LONG), *((name, {}, AS_ROWS_TILE) for name in AS_ROWS),
        *product(AS_ROWS[:1], OPTIONS, [AS_ROWS_TILE]),
    ],
    ids=str,
)  # fmt: skip
def test_simulated_it_agrees_with_float64(name, options, tile, monkeypatch):
    call = a_call(**CASES[name])
    exact, named = exactly(call)
    o, lse, *written = run(monkeypatch, call, tile, pauses=Random(len(name)), **options)
    expected = naive_attention_with_kvcache(*exact, **named, **options, return_lse=True)
    torch.testing.assert_close(o.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1], atol=2e-5, rtol=1e-5)
    for ours, theirs in zip(written, (*exact[1:], named["k_scale"], named["v_scale"]), strict=True):
        if ours is not None:
            assert torch.equal(ours.double().nan_to_num(9.0), theirs.double().nan_to_num(9.0))


def test_simulated_a_new_token_that_is_not_a_number_makes_its_row_none(monkeypatch):
    call = a_call([150, 20], head_dim=80, scaled="token")
    call.k_new[0, ..., 3] = call.v_new[1] = torch.nan
    o, _, _, _, k_scale, v_scale = run(monkeypatch, call)
    assert o.isnan().all()
    new = [[scale[0, 0, 150].item(), scale[1, 0, 20].item()] for scale in (k_scale, v_scale)]
    assert torch.tensor(new).isnan().tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize("scaled", ["head", "token"])
def test_simulated_queries_of_any_size_go_through_float16(scaled, monkeypatch):
    call = a_call([150, 20], head_dim=80, num_q=2, scaled=scaled)
    expected = run(monkeypatch, call, scale=0.1)[:2]
    for power in (2.0**100, 2.0**-100):
        found = run(monkeypatch, call._replace(q=call.q * power), scale=0.1 / power)[:2]
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("page", [16, 128])
def test_simulated_pages_that_no_query_sees_may_be_gone(page, monkeypatch):
    call = without_other_pages(a_call([85, -1, 150], page=page, append=False), SMALL.block_k, 5)
    exact, named = exactly(call)
    found = run(monkeypatch, call, window=(5, 0))[:2]
    expected = naive_attention_with_kvcache(*exact, **named, window=(5, 0), return_lse=True)
    assert call.workspace[0] == 0
    torch.testing.assert_close(found[0].double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1].double(), expected[1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("tile", [SMALL, AS_ROWS_TILE], ids=str)
def test_simulated_sinks_and_slopes(tile, monkeypatch):
    call = a_call([150, 20], heads=4, kv_heads=2)
    given = {"sinks": torch.randn(4), "alibi_slopes": torch.rand(2, 4)}
    o, lse, *_ = run(monkeypatch, call, tile, **given)
    exact = [x.double().clone() for x in call[:5]]
    expected = naive_attention_with_kvcache(*exact, cache_seqlens=call.cache_seqlens, **given, return_lse=True)
    torch.testing.assert_close(o.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("tile", [SMALL, AS_ROWS_TILE], ids=str)
def test_simulated_items_give_the_same_bits(tile, monkeypatch):
    """Tiles and quads, folded at once and by levels, spans, many programs and one."""
    call = a_call([500, 61, 1300])
    cuts = (3, 1), (3, 500), (1, 1), (40, 500), (2, 15), (3, 20)
    first, *others = (run(monkeypatch, call, tile, cut)[:2] for cut in cuts)
    assert all(torch.equal(ours, theirs) for other in others for ours, theirs in zip(other, first, strict=True))


def test_simulated_spans_of_four_quads_give_the_bits_of_tiles(monkeypatch):
    """Queries as rows, whose sums wait in memory while a quad is added up."""
    call, tile = a_call([1000, 600], heads=20, append=False), replace(AS_ROWS_TILE, span=16, quad=4)
    spans, tiles = (run(monkeypatch, call, tile, cut)[:2] for cut in ((3, 1), (3, 500)))
    assert all(map(torch.equal, spans, tiles))


@pytest.mark.parametrize("tile", [AS_ROWS_TILE, replace(AS_ROWS_TILE, span=4, quad=2)], ids=str)
def test_simulated_folds_that_programs_share_give_the_same_bits(tile, monkeypatch):
    """Where each has one item, of tiles, quads and spans; else the last to come folds all lines."""
    call = a_call([300, 61, 700], head_dim=80, num_q=10, heads=6)
    cuts = (3, 500), (20, 500), (24, 12), (24, 1)
    results = [run(monkeypatch, call, tile, cut, pauses=Random(cut[1]))[:2] for cut in cuts]
    assert all(torch.equal(x, y) for result in results for x, y in zip(result, results[0], strict=True))


@pytest.mark.parametrize("cut", [(3, 5), (3, 1)])
@pytest.mark.parametrize("fault", ["length", "page", "page of the last tile", "page of the new token"])
@pytest.mark.parametrize("scaled", [None, "token"])
def test_simulated_what_does_not_fit_is_nan_and_overwrites_nothing(fault, cut, scaled, monkeypatch):
    """Items are tiles or quads, and spans, whose later pages are looked at after others are told of the item."""
    call = a_call([100, 40], page=16, head_dim=128 if scaled else 64, scaled=scaled)
    if fault == "length":
        call.cache_seqlens[0] = 16 * call.block_table.shape[1]
    else:
        call.block_table[0, {"page": 2, "page of the last tile": 5, "page of the new token": 6}[fault]] = 99
    before = [x.clone() for x in (call.k_cache, call.v_cache, call.k_scale, call.v_scale) if x is not None]
    o, _, *after = run(monkeypatch, call, cut=cut)
    assert o[0].isnan().all()
    assert not o[1].isnan().any()
    assert call.workspace[0] == 1
    mine = call.block_table[0][(call.block_table[0] >= 0) & (call.block_table[0] < len(call.k_cache))].long()
    for ours, theirs in zip((x for x in after if x is not None), before, strict=True):
        appends = fault in ("page", "page of the last tile")  # to a page that there is
        assert torch.equal(ours[mine].nan_to_num(9.0), theirs[mine].nan_to_num(9.0)) != appends


def test_what_it_does_not_take_is_said(monkeypatch):
    monkeypatch.setattr("kernels.support._no_hopper_device_reason", lambda device: None)
    half = {"dtype": torch.bfloat16}
    q, cache, lengths = torch.zeros(2, 8, 1, 64, **half), torch.zeros(2, 2, 10, 64, **half), torch.zeros(2)
    new, odd = torch.zeros(2, 2, 1, 64, **half), torch.zeros(2, 8, 1, 65, **half)[..., 1:]
    assert takes_hopper_kvcache(q, cache, cache, new, new, None, None)
    table = torch.zeros(2, 1)
    nothing = (None,) * 4
    refused = {
        "16 and 8 bits": (q, cache.float(), cache.float(), *nothing),
        "8 bits with head_dim multiples of 16 from 80 to 128": (q, cache.char(), cache.char(), *nothing),
        "24 queries share a KV head; hopper takes up to 16": (
            torch.zeros(2, 8, 6, 128, **half),
            *[torch.zeros(2, 2, 10, 128, dtype=torch.int8)] * 2,
            *nothing,
        ),
        "head_dim": (q[..., :32], cache[..., :32], cache[..., :32], *nothing),
        "72 queries share": (q.expand(2, 8, 18, 64), cache, cache, *nothing),
        "cache_leftpad": (q, cache, cache, None, None, lengths, table),
        "empty": (q, cache[:, :, :0], cache[:, :, :0], *nothing),
        "k_cache 16-byte aligned": (q, cache.expand(2, 2, 10, 64)[:1].expand(2, -1, -1, -1), cache, *nothing),
        "q 16-byte aligned": (odd, cache, cache, *nothing),
        "v 16-byte aligned": (q, cache, cache, new, odd[:, :2], None, None),
    }
    for part, tensors in refused.items():
        assert not takes_hopper_kvcache(*tensors), part


def test_a_longer_cache_is_another_descriptor_of_the_same_launch(monkeypatch):
    """Calls of one key are replayed with the shape and strides that each gives."""
    from kernels.hopper import decode as hopper

    seen = []
    monkeypatch.setattr(hopper, "run", lambda plan, tensors, make, **numbers: seen.append((make(**tensors), numbers)))
    for length in (64, 75):
        call = a_call([length - 4])
        hopper.launch_hopper_decode(call, Options(True, 1.0))
        (launch,), numbers = seen[-1]
        for name, tensor in (("k_desc", call.k_cache), ("v_desc", call.v_cache)):
            described = launch.arguments[hopper.hopper_decode_kernel.arg_names.index(name)]
            assert numbers[name] == sizes_described(tensor) == (tuple(described.shape), tuple(described.strides))


@pytest.mark.parametrize(("num_q", "head_dim", "waits"), [(1, 128, False), (10, 128, True), (10, 64, False)])
def test_programs_that_wait_for_one_another_are_launched_all_or_none(num_q, head_dim, waits, monkeypatch):
    from kernels.hopper import decode as hopper

    seen = []
    monkeypatch.setattr(hopper, "run", lambda plan, tensors, make, **numbers: seen.extend(make(**tensors)))
    hopper.launch_hopper_decode(a_call([60], head_dim=head_dim, num_q=num_q, heads=6), Options(True, 1.0))
    assert [launch.how["launch_cooperative_grid"] for launch in seen] == [waits]


@pytest.mark.parametrize("appends", [False, True])
def test_only_a_call_that_appends_begins_while_the_kernel_before_ends(appends, monkeypatch):
    """It waits before it reads what that makes; the others would not."""
    from kernels.hopper import decode as hopper

    seen = []
    monkeypatch.setattr(hopper, "run", lambda plan, tensors, make, **numbers: seen.extend(make(**tensors)))
    hopper.launch_hopper_decode(a_call([60], append=appends), Options(True, 1.0))
    assert [launch.how["launch_pdl"] for launch in seen] == [appends]


def test_a_span_that_is_no_square_of_quads_is_refused():
    """Two ways of cutting a row would then fold its tiles in two orders."""
    with pytest.raises(ValueError, match=r"a span of 8 tiles is not 4 quads of 4: .*; use span=16, or quad=None"):
        replace(SMALL, span=8, quad=4)
