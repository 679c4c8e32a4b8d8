"""Attention over a cache: right against float64, each row's bits its own, nothing compiled or overwritten for it."""

import random
import re
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from kernels import (
    BlockMask,
    KVCacheLayers,
    decode,
    flash_attention_with_kvcache,
    kvcache_workspace,
    naive_attention_with_kvcache,
    skinny_linear,
)
from kernels.call import Options
from kernels.fused.write_kvcache import read_kvcache, write_kvcache
from kernels.launch import PLANS
from kernels.portable.widen import widened
from kernels.support import takes_hopper_kvcache
from tests.attention_checks import SOFTCAP_FACTOR, assert_within_budget
from tests.test_hopper_decode import a_call, without_other_pages

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALVES = (torch.float16, torch.bfloat16)


def filled(shape, dtype, generator):
    """Random numbers of any dtype of a cache."""
    values = torch.randn(shape, generator=generator)
    return (values * 40).to(dtype) if dtype in decode.EIGHT_BITS else values.to(dtype)


def draw(seed: int, kind: int, longest: int, head_dims: tuple[int, ...]) -> tuple[list, dict]:
    """A random call: positional and named arguments. What is no key of a row is NaN, where the cache has one.

    Calls of a kind have one kernel, which a GPU takes seconds to compile.
    """
    chance = random.Random(kind)
    dtype = chance.choice((torch.float32, *HALVES))
    cached = chance.choice((dtype, dtype, torch.int8, torch.float8_e4m3fn))
    page, scaled, appends = chance.choice((0, 0, 16, 32, 64)), chance.choice(("head", "token")), chance.random() < 0.6
    group, num_q, head_dim = chance.choice((1, 2, 3, 4, 8)), chance.choice((1, 1, 2, 5, 16)), chance.choice(head_dims)
    shares = {"pad": 0.3, "window": 0.3, "softcap": 0.2, "alibi": 0.2, "sinks": 0.2, "scale": 0.2}
    with_option = {name for name, share in shares.items() if chance.random() < share}
    named = {"causal": chance.random() < 0.8}

    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, kv_heads, slots = chance.randint(1, 4), chance.randint(1, 3), chance.randint(17, longest)
    heads = kv_heads * group
    q = torch.randn(batch, num_q, heads, head_dim, generator=generator).to(dtype).transpose(1, 2)
    pages_of_row = -(-slots // page) if page else 0
    pool = batch * pages_of_row + 2
    outer = (pool, kv_heads, page) if page else (batch, kv_heads, slots)
    caches = [filled((*outer, head_dim), cached, generator) for _ in range(2)]
    if page:
        named["block_table"] = torch.randperm(pool, generator=generator)[: pool - 2].reshape(batch, -1).int()
        slots = page * pages_of_row
    if cached in decode.EIGHT_BITS:
        for name in ("k_scale", "v_scale"):
            shape = (kv_heads,) if scaled == "head" else outer
            named[name] = torch.rand(shape, generator=generator) * 0.02 + 0.01
    room = slots - (num_q if appends else 0)
    lengths = [chance.choice((0, -1, room, *[chance.randint(0, room)] * 5)) for _ in range(batch)]
    named["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
    if "pad" in with_option:
        pads = [chance.randint(0, max(0, min(length, 20))) for length in lengths]
        named["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
    if "window" in with_option:
        named["window"] = (chance.choice((0, 7, 40)), 0 if named["causal"] else chance.choice((-1, 0, 3)))
    if "softcap" in with_option:
        named["softcap"] = 3.0
    if "alibi" in with_option:
        named["alibi_slopes"] = torch.rand(batch, heads, generator=generator) * 0.2
    if "sinks" in with_option:
        named["sinks"] = torch.randn(heads, generator=generator)
    if "scale" in with_option:
        named["scale"] = chance.choice((0.3, -0.2))
    arguments = [q, *caches]
    if appends:
        arguments += [torch.randn(batch, kv_heads, num_q, head_dim, generator=generator).to(dtype) for _ in range(2)]
    poison(arguments, named)
    named = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in named.items()}
    return [x.to(DEVICE) for x in arguments], named


def slots_of(arguments, named) -> list[tuple]:
    """For each row where its keys lie, as an index into a cache (..., heads, ..., D)."""
    cache, table = arguments[1], named.get("block_table")
    pads = named.get("cache_leftpad")
    found = []
    for row, length in enumerate(named["cache_seqlens"].tolist()):
        slots = torch.arange(0 if pads is None else int(pads[row]), max(length, 0), device=cache.device)
        if table is None:
            found.append((row, slice(None), slots))
        else:
            page = cache.shape[2]
            found.append((table[row].long()[slots // page], slice(None), slots % page))
    return found


def poison(arguments, named) -> None:
    scales = [x for x in (named.get("k_scale"), named.get("v_scale")) if x is not None and x.dim() > 1]
    for cache in (*arguments[1:3], *scales):
        if cache.dtype not in decode.EIGHT_BITS:
            clean = cache.clone()
            cache.fill_(float("nan"))
            for where in slots_of(arguments, named):
                cache[where] = clean[where]


def after_append(arguments, named) -> tuple[list, dict]:
    """The same call when its new tokens are in the cache already."""
    lengths = named["cache_seqlens"]
    new = arguments[0].shape[2] if len(arguments) > 3 else 0
    return arguments[:3], named | {"cache_seqlens": torch.where(lengths < 0, lengths, lengths + new)}


def copied(arguments, named) -> tuple[list, dict]:
    return [x.clone() for x in arguments], {
        n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in named.items()
    }


def check(seed: int, kind: int, longest: int = 170, head_dims: tuple[int, ...] = (16, 24, 32)) -> None:
    """One random call."""
    check_call(*draw(seed, kind, longest, head_dims))


def check_call(arguments, named) -> None:
    """A call against the definition in float64, and the cache against the definition's."""
    expected, expected_named = copied(arguments, named)
    o, lse = flash_attention_with_kvcache(*arguments, **named, return_lse=True)
    naive_attention_with_kvcache(*expected, **expected_named)
    q, eight_bits = arguments[0], arguments[1].dtype in decode.EIGHT_BITS
    for ours, theirs in zip(arguments[1:3], expected[1:3], strict=True):
        if eight_bits:  # a quotient beside the middle of two numbers may go either way
            # Triton's interpreter forgets the carry where e4m3 rounds up to a power of two
            forgets = not GPU and ours.dtype == torch.float8_e4m3fn
            assert (ours.float() != theirs.float()).float().mean() < (0.05 if forgets else 0.002)
            if not forgets:
                bound = {"rtol": 0, "atol": 1} if ours.dtype == torch.int8 else {"rtol": 0.125, "atol": 0.002}
                torch.testing.assert_close(ours.float(), theirs.float(), **bound)
        else:
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    for name in ("k_scale", "v_scale"):
        if eight_bits:
            torch.testing.assert_close(named[name], expected_named[name], rtol=1e-6, atol=0, equal_nan=True)
    arguments, named = after_append(arguments, named)
    wide = {n: x.double() if n in ("alibi_slopes", "sinks") else x for n, x in named.items()}
    caches = [x if eight_bits else x.double() for x in arguments[1:]]
    exact = naive_attention_with_kvcache(q.double(), *caches, **wide, return_lse=True)
    if eight_bits:  # the plain formula has the keys in q's dtype
        scales = [named.pop(name) for name in ("k_scale", "v_scale")]
        scales = [x[None, :, None, None] if x.dim() == 1 else x[..., None] for x in scales]
        arguments = [q, *((x.float() * s).to(q.dtype) for x, s in zip(arguments[1:], scales, strict=True))]
    lowp = naive_attention_with_kvcache(*arguments, **named, return_lse=True)
    results = [dict(zip(("o", "lse"), pair, strict=True)) for pair in ((o, lse), exact, lowp)]
    assert_within_budget(*results, factor=SOFTCAP_FACTOR if named.get("softcap") else 2.0)


@pytest.mark.parametrize("seed", range(24))
def test_random_calls(seed):
    check(seed, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24, 224))
def test_more_random_calls(seed):
    check(seed, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", range(50))
def test_random_calls_on_the_gpu(kind):
    for seed in range(20):
        check(1000 * kind + seed, kind, longest=5000 if seed % 2 else 300, head_dims=(16, 64, 80, 128, 128, 256))


def check_on_hopper(call, **options) -> None:
    """A call of tests/test_hopper_decode.py, which the Hopper kernel takes where there is one."""
    call = call._replace(**{name: x.to(DEVICE) for name, x in call._asdict().items() if x is not None})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.support._no_hopper_device_reason", lambda device: None)
        assert takes_hopper_kvcache(*call[:5], call.cache_leftpad, call.block_table)
    names = "cache_seqlens", "cache_leftpad", "block_table", "k_scale", "v_scale"
    named = {name: getattr(call, name) for name in names if getattr(call, name) is not None}
    check_call([x for x in call[:5] if x is not None], named | options)


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [None, "token"])
def test_gpu_heads_of_a_token_may_lie_together(scaled):
    """In a cache, its scales and the new tokens, as a projection leaves them; behind padding, where slots are no keys'
    numbers."""
    pads = torch.tensor([13, 70, 0, 100], dtype=torch.int32)
    shape = {"head_dim": 128, "heads": 4, "kv_heads": 2, "num_q": 4, "dtype": torch.bfloat16}
    check_on_hopper(a_call([62, 126, 300, 700], leftpad=pads, scaled=scaled, tokens_first=True, **shape))


@pytest.mark.gpu
@pytest.mark.parametrize(("page", "head_dim"), product((16, 256), (64, 128)))
def test_gpu_pages_that_no_query_sees_may_be_gone(page, head_dim):
    """In pages of an eighth of a tile, and of two tiles, of 128 keys."""
    shape = {"head_dim": head_dim, "heads": 4, "kv_heads": 2, "dtype": torch.bfloat16}
    call = a_call([149, -1, 300, 250, 20], page=page, tokens_first=True, **shape)
    check_on_hopper(without_other_pages(call, 128, 5), window=(5, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"causal": False, "window": (40, 3)}], ids=["causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gpu_edges_of_tiles_are_masked_where_queries_are_rows(head_dim, options):
    """Where a query's last key, the window's first, and a row's last tile lie in every way to the tiles' bounds."""
    for num_q, heads in ((8, 4), (1, 32)):
        shape = {"head_dim": head_dim, "num_q": num_q, "heads": heads, "dtype": torch.bfloat16}
        check_on_hopper(a_call(range(240, 301), append=False, **shape), **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "scaled"), [(1, None), (16, None), (32, None), (2, "head")])
def test_gpu_more_spans_than_programs_are_as_exact(group, scaled):
    """A program's second item, and spans of up to four quads, against float64: bits that agree may all be wrong."""
    lengths = [300, 2000, 1100, 700, 5] * 8 + [2300]
    shape = {"head_dim": 128, "heads": 4 * group, "kv_heads": 4, "dtype": torch.bfloat16}
    check_on_hopper(a_call(lengths, append=False, scaled=scaled, **shape))


def bits_case(dtype, cached, head_dim, lengths, num_q=2, heads=4, kv_heads=2):
    """q, keys and values (B, Hkv, the longest, D) and the named arguments of a batch, new tokens included."""
    generator, batch, longest = torch.Generator().manual_seed(3), len(lengths), max(lengths)
    q = torch.randn(batch, heads, num_q, head_dim, generator=generator).to(dtype)
    caches = [filled((batch, kv_heads, longest, head_dim), cached, generator) for _ in range(2)]
    new = [torch.randn(batch, kv_heads, num_q, head_dim, generator=generator).to(dtype) for _ in range(2)]
    scales = [torch.rand(batch, kv_heads, longest, generator=generator) * 0.02 + 0.01 for _ in range(2)]
    tensors = [x.to(DEVICE) for x in (q, *caches, *new, *scales)]
    return *tensors, torch.tensor(lengths, dtype=torch.int32, device=DEVICE) - num_q


def laid_out(case, rows, capacity, page, seed=0):
    """O and LSE of these rows, in this order, in a cache of this capacity or of pages in random order; appending."""
    q, keys, values, k, v, k_scale, v_scale, lengths = (x[rows] for x in case)
    batch, kv_heads, longest, _ = keys.shape
    named = {"cache_seqlens": lengths, "sinks": torch.arange(q.shape[1], device=DEVICE).float(), "return_lse": True}
    per_token = keys.dtype in decode.EIGHT_BITS
    stored = [keys, values, *((k_scale, v_scale) if per_token else ())]
    outer = []
    for x in stored:
        row = torch.zeros(batch, kv_heads, capacity, *x.shape[3:], dtype=x.dtype, device=DEVICE)
        row[:, :, : min(longest, capacity)] = x[:, :, :capacity]
        if page:
            table = torch.randperm(batch * capacity // page, generator=torch.Generator().manual_seed(seed))
            pages = row.unflatten(2, (capacity // page, page)).transpose(1, 2).flatten(0, 1)
            row = torch.empty_like(pages)
            row[table.to(DEVICE)] = pages
            named["block_table"] = table.reshape(batch, -1).int().to(DEVICE)
        outer.append(row)
    named |= dict(zip(("k_scale", "v_scale"), outer[2:], strict=False))
    return flash_attention_with_kvcache(q, *outer[:2], k, v, **named)


BITS = [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.int8)]
BITS += [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn)] if GPU else []


@pytest.mark.parametrize(("dtype", "cached"), BITS, ids=str)
def test_the_bits_of_a_row_are_its_own(dtype, cached):
    """Alone, in any batch, capacity, page size and order: programs take tiles in the one and spans in the other."""
    head_dim, lengths = (128, [300, 9000, 1100, 17, 40_000, 4096]) if GPU else (16, [100, 33, 160])
    capacity = 65_536 if GPU else 192
    case = bits_case(dtype, cached, head_dim, lengths)
    rows = list(range(len(lengths)))
    o, lse = laid_out(case, rows, capacity, 0)
    layouts = [(capacity, 0), (2 * capacity, 0), (capacity, 16), (capacity, 64)]
    calls = product([rows, rows[::-1], *([row] for row in rows), rows * 3], layouts)
    if not GPU:  # the interpreter is slow
        calls = [(rows[::-1], layouts[1]), *(([row], layouts[2 + row % 2]) for row in rows)]
    for order, (size, page) in calls:
        here = laid_out(case, order, size, page, seed=len(order))
        assert torch.equal(here[0], o[order]), (order, size, page)
        assert torch.equal(here[1], lse[order]), (order, size, page)


def test_tiles_and_spans_give_the_same_bits():
    """The same call when programs take tiles, spans, and when there are more programs than items."""
    from kernels.portable import decode as portable

    case = bits_case(torch.float32, torch.float32, 16, [250, 61], num_q=1, heads=2, kv_heads=1)
    results = []
    for programs, min_span_items in ((3, 1), (3, 500), (1, 1), (40, 500)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(portable, "cut_for", lambda *_, cut=(programs, min_span_items): cut)
            PLANS.clear()
            results.append(laid_out(case, [0, 1], 256, 0))
    PLANS.clear()
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[8000], [300, 20_000, 65_536]], ids=["tiles", "spans"])
def test_a_thousand_runs_give_the_same_bits(lengths):
    """While another stream keeps some of the GPU busy, so that programs arrive in ever other orders."""
    q, keys, values, *_, lengths = bits_case(torch.bfloat16, torch.bfloat16, 128, lengths, heads=16, kv_heads=4)
    workspace, other = kvcache_workspace(len(lengths), 16, DEVICE), torch.cuda.Stream()
    noise = torch.randn(4096, 4096, device=DEVICE)
    named = {"cache_seqlens": lengths, "workspace": workspace, "return_lse": True}
    o, lse = flash_attention_with_kvcache(q, keys, values, **named)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for run in range(1000):
        if run % 3 == 0:
            with torch.cuda.stream(other):
                noise.add_(1.0)
        again = flash_attention_with_kvcache(q, keys, values, **named)
        wrong += (again[0] != o).sum() + (again[1] != lse).sum()
    assert wrong == 0
    assert not workspace.any()


def test_a_workspace_is_left_as_it_was():
    case = bits_case(torch.float32, torch.float32, 16, [220, 61, 5])
    q, keys, values, *_, lengths = case
    workspace = kvcache_workspace(3, 4, DEVICE)
    first = flash_attention_with_kvcache(q, keys, values, cache_seqlens=lengths, workspace=workspace)
    assert not workspace.any()
    again = flash_attention_with_kvcache(q, keys, values, cache_seqlens=lengths, workspace=workspace)
    assert torch.equal(first, again)
    assert torch.equal(first, flash_attention_with_kvcache(q, keys, values, cache_seqlens=lengths))


@triton.jit
def widen_kernel(pairs, even, odd, stored: tl.constexpr, NAN: tl.constexpr):
    places = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    even_values, odd_values = widened(tl.load(pairs + places), even.dtype.element_ty, stored, NAN)
    tl.store(even + places, even_values)
    tl.store(odd + places, odd_values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else []), ids=str)
@pytest.mark.parametrize("stored", decode.EIGHT_BITS, ids=str)
def test_eight_bits_are_widened_exactly(stored, dtype):
    """Every pair of neighbors; with e4m3's NaN only where that is asked for."""
    pairs = torch.arange(-(2**15), 2**15, device=DEVICE).short()
    even, odd = torch.empty(2, 2**16, dtype=dtype, device=DEVICE)
    expected = pairs.view(stored).to(dtype).reshape(-1, 2)
    known = expected.isfinite().all(1)
    assert known.sum() >= 254**2
    for nan in (False, True):
        widen_kernel[(64,)](pairs, even, odd, tl.int8 if stored == torch.int8 else tl.float8e4nv, nan)
        found = torch.stack((even, odd), 1)
        assert torch.equal(found[known], expected[known])
    if GPU and dtype == torch.float16:
        assert torch.equal(found.nan_to_num(1e3), expected.nan_to_num(1e3))


@pytest.mark.gpu
@pytest.mark.parametrize("stored", decode.EIGHT_BITS, ids=str)
def test_queries_of_any_size_give_the_same_bits_over_eight_bits(stored):
    """In Hopper's kernel they go through float16."""
    q, keys, values, *_, k_scale, v_scale, lengths = bits_case(torch.bfloat16, stored, 128, [400, 33])
    named = {"k_scale": k_scale, "v_scale": v_scale, "cache_seqlens": lengths}
    expected = flash_attention_with_kvcache(q, keys, values, scale=0.1, **named)
    for power in (2.0**90, 2.0**-90):
        assert torch.equal(flash_attention_with_kvcache(q * power, keys, values, scale=0.1 / power, **named), expected)


def launches(engine, batch, capacity, page, num_q=1):
    """(constants, how Triton specializes the arguments) of a call."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    from kernels.hopper import decode as hopper
    from kernels.portable import decode as portable

    q = torch.zeros(batch, 4, num_q, 64, dtype=torch.float16, device=DEVICE)
    if page:
        cache = torch.zeros(batch * capacity // page, 2, page, 64, dtype=q.dtype, device=DEVICE)
        table = torch.arange(batch * capacity // page, device=DEVICE, dtype=torch.int32).reshape(batch, -1)
    else:
        cache, table = torch.zeros(batch, 2, capacity, 64, dtype=q.dtype, device=DEVICE), None
    seen = []
    module, launch = {
        "portable": (portable, portable.launch_flash_decode), "hopper": (hopper, hopper.launch_hopper_decode)
    }[engine]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run", lambda plan, tensors, make, **_: seen.extend(make(**tensors)))
        new = torch.zeros(batch, 2, num_q, 64, dtype=q.dtype, device=DEVICE)
        lengths = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        call = decode.Call(q, cache, cache.clone(), new, new, lengths, None, table, None, None, None)
        launch(call, Options(True, 1.0))
    launch = seen[0]
    types = []
    for name, x in zip(launch.kernel.arg_names, launch.arguments, strict=False):
        special = name not in portable.NOT_SPECIALIZED_OVER_A_CACHE
        types.append(native_specialize_impl(CUDABackend, x, False, special, special))
    return launch.constants, types


@pytest.mark.parametrize("engine", ["portable", "hopper"])
@pytest.mark.parametrize("page", [0, 32])
def test_nothing_is_compiled_for_other_sizes(page, engine):
    """Batch, capacity, pool and lengths are no part of what Triton compiles for, nor is a count of 1 or 16."""
    first = launches(engine, 2, 64, page)
    for batch, capacity in ((1, 32), (16, 96), (3, 4096), (1, 160)) if page else ((1, 32), (16, 75), (3, 4096), (1, 1)):
        assert launches(engine, batch, capacity, page) == first


def test_a_longer_cache_is_the_same_call_but_for_numbers_that_it_gives(monkeypatch):
    from kernels.portable import decode as portable

    seen = []
    monkeypatch.setattr(portable, "run", lambda plan, tensors, make, **numbers: seen.append((make(**tensors), numbers)))
    q, lengths = torch.zeros(2, 4, 1, 32, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    keys, options = set(), Options(True, 1.0)
    for capacity, width in ((64, 32), (1, 32), (75, 64), (75, 32)):  # wider: other columns lie between the slots
        cache, values = torch.zeros(2, 2, 2, capacity, width, device=DEVICE)[..., :32]
        call = decode.Call(q, cache, values, None, None, lengths, None, None, None, None, None)
        keys.add(decode.decode_key(call, options))
        portable.launch_flash_decode(call, options)
    assert len(keys) == 1
    names = portable.flash_decode_kernel.arg_names
    rest = []
    for (launch,), numbers in seen:
        given = dict(zip(names, launch.arguments, strict=False))
        assert {name: given.pop(name) for name in numbers} == numbers
        rest.append({name: x for name, x in given.items() if not isinstance(x, torch.Tensor)})
    assert rest[0] == rest[1] == rest[2] == rest[3]
    for other in (cache[:, :, :, ::1].transpose(1, 2).contiguous().transpose(1, 2), cache[:1].expand(2, -1, -1, -1)):
        keys.add(decode.decode_key(call._replace(k_cache=other), options))  # no longer v's strides; and one is 0
    assert len(keys) == 3


def layers(count, tokens, dtype, strided=False):
    """q, k_cache and v_cache of each layer, (B, S, H, D) in memory if `strided`, and the rows' bounds."""
    made = []
    for _ in range(count):
        q = torch.randn(3, 1, 4, 64, dtype=dtype, device=DEVICE).transpose(1, 2)
        caches = torch.randn(2, 3, 2, tokens, 64, dtype=dtype, device=DEVICE)
        made.append((q, *(caches.transpose(2, 3).contiguous().transpose(2, 3) if strided else caches)))
    bounds = torch.tensor([[tokens, tokens - 5, 20], [0, 7, 20]], dtype=torch.int32, device=DEVICE)
    return made, {"cache_seqlens": bounds[0].clone(), "cache_leftpad": bounds[1].clone()}


@pytest.mark.parametrize("options", [{}, {"window": (30, 0), "softcap": 5.0}, {"sinks": [0.5, -1.0, 0.0, 2.0]}])
def test_layers_of_a_forward_share_a_call(options):
    """Each gives its own result, also after one of another shape, under autograd's eye, and when q cannot be taken."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    if "sinks" in options:
        options = {"sinks": torch.tensor(options["sinks"], device=DEVICE)}
    made, bounds = layers(3, 70, dtype)
    attend = KVCacheLayers(**bounds, **options)
    expected = [flash_attention_with_kvcache(*layer, **bounds, **options) for layer in made]
    with torch.no_grad():
        for _ in range(2):
            found = [attend(*layer) for layer in made]
            assert all(map(torch.equal, found, expected))
            assert len({x.data_ptr() for x in found}) == 3
        longer = [torch.cat((x, x[:, :, :3]), dim=2) if x.shape[2] > 1 else x for x in made[0]]
        assert torch.equal(attend(*longer), flash_attention_with_kvcache(*longer, **bounds, **options))
        assert torch.equal(attend(*made[1]), expected[1])
        with pytest.raises(ValueError, match="v_cache has dtype"):
            attend(made[0][0], made[0][1], made[0][2].double())
        assert torch.equal(attend(*made[2]), expected[2])
        with pytest.raises(ValueError, match="k_cache has type NoneType"):
            attend(made[0][0], None, made[0][2])
    with pytest.raises(ValueError, match="asks for a gradient"):
        attend(made[0][0].requires_grad_(), *made[0][1:])


@pytest.mark.gpu
def test_gpu_layers_after_the_first_are_replayed(monkeypatch):
    made, bounds = layers(4, 70, torch.bfloat16)
    attend = KVCacheLayers(**bounds)
    with torch.no_grad():
        expected = [flash_attention_with_kvcache(*layer, **bounds) for layer in made]
        attend(*made[0])
        monkeypatch.setattr("kernels.decode_layers.checked", None)
        assert all(torch.equal(attend(*layer), o) for layer, o in zip(made, expected, strict=True))


@torch.no_grad()
def test_only_layers_that_are_stored_alike_are_replayed(monkeypatch):
    """A replay reads with the first one's strides. What it would run is left out: a CPU has no replays."""
    replayed = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr("kernels.decode_layers.attend", lambda call, options, plan: (call.q, None))
    monkeypatch.setattr("kernels.portable.decode.repeated_decode", lambda *_: lambda **x: replayed.append(x) or True)
    ((q, *caches), last), bounds = layers(2, 70, torch.float32)
    attend = KVCacheLayers(**bounds)
    others = [layers(1, 70, torch.float32, strided=True), layers(1, 71, torch.float32), layers(1, 70, torch.float16)]
    for other in (*(made[0] for made, _ in others), (q.repeat(1, 1, 1, 2)[..., :64], *caches)):
        attend(q, *caches)
        attend(*other)
    attend(q, *caches)
    assert not replayed
    attend(*last)
    assert [replayed[0][name] is x for name, x in zip(("q", "k_cache", "v_cache"), last, strict=True)] == [True] * 3


@pytest.mark.gpu
@torch.no_grad()
def test_gpu_layers_stored_in_different_ways_each_give_their_own_result():
    made, bounds = layers(2, 70, torch.bfloat16)
    made[1:1] = layers(2, 70, torch.bfloat16, strided=True)[0]
    expected = [flash_attention_with_kvcache(*layer, **bounds) for layer in made]
    attend = KVCacheLayers(**bounds)
    assert all(torch.equal(attend(*layer), o) for layer, o in zip(made, expected, strict=True))


@pytest.mark.gpu
@torch.no_grad()
def test_gpu_layers_of_a_capture_are_in_the_graph():
    """The layer before them ran on another stream, where a replay would run at once and never again."""
    made, bounds = layers(3, 70, torch.bfloat16)
    expected = [flash_attention_with_kvcache(*layer, **bounds) for layer in made]
    attend = KVCacheLayers(**bounds)
    assert torch.equal(attend(*made[0]), expected[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [attend(*layer) for layer in made[1:]]
    for _ in range(2):
        for x in found:
            x.zero_()
        graph.replay()
        assert all(map(torch.equal, found, expected[1:]))


@pytest.mark.gpu
@pytest.mark.parametrize("stays", [False, True], ids=["copied", "in_place"])
def test_gpu_a_growing_cache_is_replayed(stays, monkeypatch):
    from kernels import launch

    monkeypatch.setattr(launch, "PLANS", {})
    q = torch.randn(2, 4, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    room = torch.empty(2, 2 * 2 * 5000 * 64, dtype=q.dtype, device=DEVICE)
    with torch.no_grad():
        for tokens in (70, 71, 5000, 72):
            k, v = torch.randn(2, 2, 2, tokens, 64, dtype=q.dtype, device=DEVICE)
            if stays:
                k, v = (x[: k.numel()].view_as(k).copy_(y) for x, y in zip(room, (k, v), strict=True))
            lengths = torch.tensor([tokens, tokens // 2], dtype=torch.int32, device=DEVICE)
            found = flash_attention_with_kvcache(q, k, v, cache_seqlens=lengths)
            assert len(launch.PLANS) == 1
            (kept,) = launch.PLANS.values()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launch, "PLANS", {})
                assert torch.equal(found, flash_attention_with_kvcache(q, k, v, cache_seqlens=lengths))
            assert kept.replays is not None


@pytest.mark.gpu
def test_kernels_compiled_are_counted():
    from kernels.hopper.decode import hopper_decode_kernel
    from kernels.portable.decode import flash_decode_kernel

    def compiled():
        caches = (kernel.device_caches[torch.cuda.current_device()][0] for kernel in kernels)
        return sum(map(len, caches))

    kernels = hopper_decode_kernel, flash_decode_kernel  # whichever takes the calls

    def call(batch, capacity, page, lengths):
        q = torch.randn(batch, 8, 1, 64, device=DEVICE, dtype=torch.bfloat16)
        rows = (batch * capacity // page, 2, page) if page else (batch, 2, capacity)
        cache = torch.zeros(*rows, 64, device=DEVICE, dtype=q.dtype)
        named = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=DEVICE)}
        if page:
            named["block_table"] = torch.arange(rows[0], device=DEVICE, dtype=torch.int32).reshape(batch, -1)
        flash_attention_with_kvcache(q, cache, cache.clone(), q[:, :2], q[:, :2], **named)

    for page in (0, 16):
        call(1, 64, page, [3])
        count = compiled()
        assert count > 0
        for batch, capacity in ((1, 64), (1, 2048), (4, 512), (16, 65_536), (33, 80)):
            for length in (0, 1, 16, capacity - 1):
                call(batch, capacity, page, [length] * batch)
        assert compiled() == count


@pytest.mark.gpu
def test_one_graph_while_the_cache_grows():
    """A captured graph appends and attends; only the device's lengths say where."""
    q = torch.randn(2, 8, 1, 128, device=DEVICE, dtype=torch.bfloat16)
    cache = [torch.zeros(2, 2, 3000, 128, device=DEVICE, dtype=q.dtype) for _ in range(2)]
    new = torch.randn(2, 2, 1, 128, device=DEVICE, dtype=q.dtype)
    lengths, workspace = torch.zeros(2, dtype=torch.int32, device=DEVICE), kvcache_workspace(2, 8, DEVICE)

    def step():
        o = flash_attention_with_kvcache(q, *cache, new, new, cache_seqlens=lengths, workspace=workspace)
        lengths.add_(1)
        return o

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    lengths.copy_(torch.tensor([0, 900]))
    expected_cache, expected = [x.clone() for x in cache], None
    for i in range(1100):
        new.normal_()
        at = torch.tensor([i, 900 + i], dtype=torch.int32, device=DEVICE)
        graph.replay()
        for x in expected_cache:
            x[torch.arange(2), :, [i, 900 + i]] = new[:, :, 0]
        if i % 100 == 99:
            expected = flash_attention_with_kvcache(q, *expected_cache, cache_seqlens=at + 1)
            assert torch.equal(o, expected)


def test_opcheck():
    q, keys, values, k, v, *_, lengths = bits_case(torch.float32, torch.float32, 16, [9, 5], 1, 2, 1)
    workspace = kvcache_workspace(2, 2, DEVICE)
    arguments = (q, keys, values, k, v, lengths, None, None, None, None, workspace, True, 0.25)
    torch.library.opcheck(decode.flash_kvcache, arguments)


def test_compiles_without_a_copy_of_the_cache():
    from torch._inductor.utils import run_and_get_code

    torch.compiler.reset()
    q, keys, values, k, v, *_, lengths = bits_case(torch.float32, torch.float32, 16, [40, 33])
    q, k, v = q[:, :, :1], k[:, :, :1], v[:, :, :1]

    def step(q, keys, values, k, v, lengths, workspace):
        return flash_attention_with_kvcache(q, keys, values, k, v, cache_seqlens=lengths, workspace=workspace)

    def inputs():
        return q, keys.clone(), values.clone(), k, v, lengths, kvcache_workspace(2, 4, DEVICE)

    ours, theirs = inputs(), inputs()
    expected = step(*theirs)
    o, code = run_and_get_code(torch.compile(step, fullgraph=True), *ours)
    assert all(torch.equal(a, b) for a, b in zip((o, *ours), (expected, *theirs), strict=True))
    assert not torch.equal(ours[1], keys)
    allocated = [line for line in "\n".join(code).splitlines() if "empty_strided" in line and "def " not in line]
    assert not any(f"{tuple(keys.shape)}" in line for line in allocated), allocated


@pytest.mark.parametrize("cached", [torch.float32, torch.int8], ids=str)
def test_a_cpu_without_triton_runs_the_definition(cached, monkeypatch):
    monkeypatch.setattr(decode, "interpreting", lambda: False)
    monkeypatch.setattr("kernels.support.interpreting", lambda: False)
    case = [x.cpu() for x in bits_case(torch.float32, cached, 16, [40, 33])]
    q, keys, values, k, v, k_scale, v_scale, lengths = case
    named = {"k_scale": k_scale, "v_scale": v_scale} if cached == torch.int8 else {}
    theirs = [x.clone() for x in (keys, values)], {n: x.clone() for n, x in named.items()}
    o = flash_attention_with_kvcache(q, keys, values, k, v, cache_seqlens=lengths, **named)
    assert torch.equal(o, naive_attention_with_kvcache(q, *theirs[0], k, v, cache_seqlens=lengths, **theirs[1]))
    for absent in (-1, -40):
        o = flash_attention_with_kvcache(q, keys, values, k, v, cache_seqlens=lengths.new_tensor([3, absent]), **named)
        assert o[0].any()
        assert not o[1].any()
    with pytest.raises(ValueError, match=r"row 1 has 39 tokens in the cache, 0 of them padding, and 2 new ones; the c"):
        flash_attention_with_kvcache(q, keys, values, k, v, cache_seqlens=lengths.new_tensor([5, 39]), **named)
    table = torch.zeros(2, 3, dtype=torch.int32)
    table[0, 1] = 7
    pages, scales = keys.new_zeros(6, 2, 16, 16), {n: torch.ones(6, 2, 16) for n in named}
    with pytest.raises(ValueError, match=r"row 0 of block_table has a page that is not from 0 to 5"):
        flash_attention_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table, **scales)


def test_the_definition_reads_eight_bits_in_float64():
    """What kernels are compared with has no rounding of its own."""
    q, keys, values, *_, k_scale, v_scale, lengths = bits_case(torch.float32, torch.int8, 16, [40, 33])
    call = partial(naive_attention_with_kvcache, cache_seqlens=lengths, return_lse=True)
    found = call(q.double(), keys, values, k_scale=k_scale, v_scale=v_scale)
    wide = [x.double() * scale.double()[..., None] for x, scale in ((keys, k_scale), (values, v_scale))]
    torch.testing.assert_close(found, call(q.double(), *wide), rtol=1e-12, atol=1e-12)
    assert found[1].dtype == torch.float64


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_token_of_zeros_is_zeros_in_eight_bits(stored, monkeypatch):
    """Its largest magnitude is no scale to divide by."""
    for interpreted in (False, True):
        for module in ("kernels.decode", "kernels.support"):
            monkeypatch.setattr(f"{module}.interpreting", lambda answer=interpreted: answer)
        keys, values = (torch.zeros(1, 1, 16, 16, device=DEVICE).to(stored) for _ in range(2))
        scales = [torch.ones(1, 1, 16, device=DEVICE) for _ in range(2)]
        o = flash_attention_with_kvcache(
            torch.ones(1, 1, 1, 16, device=DEVICE), keys, values, *torch.zeros(2, 1, 1, 1, 16, device=DEVICE),
            k_scale=scales[0], v_scale=scales[1], cache_seqlens=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        )  # fmt: skip
        assert o.eq(0).all()
        assert 0 < scales[1][0, 0, 0] < 1e-15


@pytest.mark.parametrize("attention", [flash_attention_with_kvcache, naive_attention_with_kvcache])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_token_that_is_not_a_number_makes_its_row_none(stored, attention):
    """Of one of its columns, or of all: its scale is NaN, not the largest of the others."""
    keys, values = (torch.zeros(2, 1, 16, 16, device=DEVICE).to(stored) for _ in range(2))
    scales = [torch.ones(2, 1, 16, device=DEVICE) for _ in range(2)]
    k, v = torch.ones(2, 2, 1, 1, 16, device=DEVICE)
    k[0, ..., 3] = v[1] = float("nan")
    q, lengths = torch.ones(2, 1, 1, 16, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    o = attention(q, keys, values, k, v, cache_seqlens=lengths, k_scale=scales[0], v_scale=scales[1])
    assert o.isnan().all()
    assert [scale[:, 0, 0].isnan().tolist() for scale in scales] == [[True, False], [False, True]]


@pytest.mark.parametrize("attention", [flash_attention_with_kvcache, naive_attention_with_kvcache])
def test_a_cache_that_autograd_keeps_is_not_written_in_silence(attention):
    cache, values, x = (torch.randn(1, 1, 32, 16, device=DEVICE) for _ in range(3))
    kept = (x.requires_grad_() * cache).sum()
    q, k, v = torch.randn(3, 1, 1, 1, 16, device=DEVICE)
    with torch.no_grad():
        attention(q, cache, values, k, v, cache_seqlens=torch.tensor([3], dtype=torch.int32, device=DEVICE))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


@pytest.mark.parametrize("odd", ["new", "cache", "offset"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_odd_strides_are_appended(dtype, odd):
    """Parts of wider tensors: their rows do not begin at whole words of eight bytes."""
    cache_width, width = (17 if odd == name else 16 for name in ("cache", "new"))
    keys, values = (torch.zeros(2, 2, 8, cache_width, dtype=dtype)[..., :16] for _ in range(2))
    k, v = (torch.randn(2, 2, 1, width).to(dtype)[..., :16] for _ in range(2))
    if odd == "offset":
        k, v = torch.randn(129).to(dtype)[1:].view(2, 2, 2, 1, 16)
    lengths = torch.tensor([3, 0], dtype=torch.int32)
    naive_attention_with_kvcache(k, keys, values, k, v, cache_seqlens=lengths)
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(keys[row, :, length], k[row, :, 0])
        assert torch.equal(values[row, :, length], v[row, :, 0])


def test_eight_bits_of_an_odd_head_dim_are_no_whole_words():
    q, keys, values, *_, lengths = bits_case(torch.float16, torch.int8, 32, [40, 33])
    q, *caches = (x[..., :17] for x in (q, keys, values))
    named = {"cache_seqlens": lengths, "k_scale": torch.full((2,), 0.01, device=DEVICE)}
    named["v_scale"] = named["k_scale"]
    found, expected = (f(q, *caches, **named) for f in (flash_attention_with_kvcache, naive_attention_with_kvcache))
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("of_heads", [torch.tensor([0.02]).expand(2), torch.tensor([[0.02, 9.0], [0.01, 9.0]])[:, 0]])
def test_scales_of_heads_may_have_any_stride(of_heads):
    q, *caches, k, v, _, _, lengths = bits_case(torch.float32, torch.int8, 16, [40, 33])
    same = [x.clone() for x in caches]
    scales = of_heads.to(DEVICE)
    named = {"cache_seqlens": lengths, "k_scale": scales, "v_scale": scales}
    found = flash_attention_with_kvcache(q, *caches, k, v, **named)
    torch.testing.assert_close(found, naive_attention_with_kvcache(q, *same, k, v, **named), rtol=2e-5, atol=2e-5)
    assert all(map(torch.equal, caches, same))


def test_new_values_may_be_stored_in_another_way_than_new_keys():
    """As a projection leaves them, (B, N, H, D) in memory, beside keys that a rotation has copied."""
    q, keys, values, k, v, *_, lengths = bits_case(torch.float32, torch.float32, 16, [40, 33])
    other = [x.clone() for x in (keys, values)]
    expected = flash_attention_with_kvcache(q, keys, values, k, v, cache_seqlens=lengths)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(flash_attention_with_kvcache(q, *other, k, v, cache_seqlens=lengths), expected)
    assert torch.equal(other[1], values)


UNFIT = "length", "length by one", "page", "negative page"


@pytest.mark.parametrize("fault", [*UNFIT, "padding", "negative padding"])
def test_what_does_not_fit_is_nan_and_overwrites_nothing(fault):
    check_unfit(fault, torch.float32, 16, padded=True)


@pytest.mark.gpu
@pytest.mark.parametrize("fault", UNFIT)
def test_gpu_what_does_not_fit_is_nan_and_overwrites_nothing(fault):
    """By the Hopper kernel, where there is one: it takes no padding in pages."""
    check_unfit(fault, torch.bfloat16, 128, padded=False)


def check_unfit(fault, dtype, head_dim, padded) -> None:
    q, _, _, k, v, *_, lengths = bits_case(dtype, dtype, head_dim, [40, 33])
    table = torch.randperm(6, generator=torch.Generator().manual_seed(0)).reshape(2, 3).int().to(DEVICE)
    pages = [torch.randn(6, 2, 16, head_dim, dtype=dtype, device=DEVICE) for _ in range(2)]
    pad = torch.zeros_like(lengths) if padded else None
    good = flash_attention_with_kvcache(q[1:], *pages, cache_seqlens=lengths[1:] + 2, block_table=table[1:])
    before = [x.clone() for x in pages]
    if fault == "length":
        lengths[0] = 2**31 - 1
    elif fault == "length by one":
        lengths[0] = 47  # of 48 slots, and two new tokens
    elif "padding" in fault:
        pad[0] = 39 if fault == "padding" else -1
    else:
        table[0, 2] = 6 if fault == "page" else -1
    workspace = kvcache_workspace(2, 4, DEVICE)
    o, lse = flash_attention_with_kvcache(
        q, *pages, k, v, cache_seqlens=lengths, block_table=table, cache_leftpad=pad, workspace=workspace,
        return_lse=True,
    )  # fmt: skip
    assert o[0].isnan().all()
    assert lse[0].isnan().all()
    assert workspace[0] == 1
    assert not workspace[1:].any()
    expected = flash_attention_with_kvcache(
        q[1:], *before, k[1:], v[1:], cache_seqlens=lengths[1:], block_table=table[1:]
    )
    assert torch.equal(o[1:], expected)
    assert not torch.equal(expected, good)
    assert all(torch.equal(a, b) for a, b in zip(pages, before, strict=True))


@pytest.mark.parametrize("attention", [flash_attention_with_kvcache, naive_attention_with_kvcache])
def test_pages_before_a_window_may_be_gone(attention):
    """Those that end 128 slots or more before the first key that is seen: tiles have at most so many."""
    q, _, _, k, v, *_ = bits_case(torch.float32, torch.float32, 16, [40, 33])
    lengths = torch.tensor([220, 213], dtype=torch.int32, device=DEVICE)
    table = torch.arange(28, dtype=torch.int32, device=DEVICE).reshape(2, 14)
    pages = [torch.randn(28, 2, 16, 16, device=DEVICE) for _ in range(2)]
    options = {"cache_seqlens": lengths, "window": (5, 0), "alibi_slopes": torch.rand(4, device=DEVICE)}
    expected = attention(q, *(x.clone() for x in pages), k, v, block_table=table, **options)
    assert not expected.isnan().any()
    table[:, : (213 - 5 - 128) // 16] = -1
    found = attention(q, *pages, k, v, block_table=table, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_cache_of_another_dtype_than_autocasts_is_told_why():
    q, cache = torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 40, 16)
    lengths = torch.ones(2, dtype=torch.int32)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(
            ValueError, match=r"autocast makes q torch.bfloat16 and k_cache has dtype torch.float32, .* make"
        ),
    ):
        flash_attention_with_kvcache(q, cache, cache.clone(), cache_seqlens=lengths)


MISTAKES = {
    "q has 17 tokens a row; attention over a cache takes 1 to 16: read a prompt": {"q": torch.zeros(2, 4, 17, 16)},
    "k_cache has shape (40, 16); expected 4 dimensions": {"k_cache": torch.zeros(40, 16)},
    "k_cache is nested or sparse; expected a dense tensor": {"k_cache": torch.zeros(2, 2, 40, 16).to_sparse()},
    "q is nested or sparse; expected a dense tensor": {"q": torch.zeros(2, 4, 1, 16).to_sparse()},
    "k_cache has dtype torch.float16 but q has torch.float32; expected that, torch.int8": {
        "k_cache": torch.zeros(2, 2, 40, 16).half()
    },
    "v_cache has shape torch.Size([2, 2, 41, 16]) but k_cache has": {"v_cache": torch.zeros(2, 2, 41, 16)},
    "v_cache has stride": {"v_cache": torch.zeros(2, 40, 2, 16).transpose(1, 2)},
    "k_cache has head_dim 32 but q has 16": {"k_cache": torch.zeros(2, 2, 40, 32)},
    "v is None; pass k and v, or neither": {"k": torch.zeros(2, 2, 1, 16)},
    "k is on meta but q is on cpu": {"k": torch.zeros(2, 2, 1, 16, device="meta"), "v": torch.zeros(2, 2, 1, 16)},
    "v has type int; expected a torch.Tensor": {"k": torch.zeros(2, 2, 1, 16), "v": 0},
    "k has shape (2, 2, 3, 16)": {"k": torch.zeros(2, 2, 3, 16), "v": torch.zeros(2, 2, 3, 16)},
    "k has shape (2, 2, 1, 16) and dtype torch.float16; expected (2, 2, 1, 16), the tokens of q, and torch.float32": {
        "k": torch.zeros(2, 2, 1, 16).half(), "v": torch.zeros(2, 2, 1, 16).half()
    },
    "cache_seqlens has dtype torch.int64 and shape (2,); expected int32": {"cache_seqlens": torch.zeros(2).long()},
    "cache_leftpad has dtype torch.float32": {"cache_leftpad": torch.zeros(2)},
    "k_cache has batch size 3 but q has 2": {"k_cache": torch.zeros(3, 2, 4, 16), "v_cache": torch.zeros(3, 2, 4, 16)},
    "block_table has dtype torch.int64": {"block_table": torch.zeros(2, 1).long()},
    "k_cache has pages of 40 tokens; expected a power of two from 16": {"block_table": torch.zeros(2, 1).int()},
    "k_scale is given but the cache is in torch.float32": {"k_scale": torch.ones(2)},
    "k_scale is None; a cache in 8 bits needs torch.float32 (2,) or (2, 2, 40)": {
        "k_cache": torch.zeros(2, 2, 40, 16).to(torch.int8), "v_cache": torch.zeros(2, 2, 40, 16).to(torch.int8)
    },
    "workspace has dtype torch.int32 and 3 elements": {"workspace": torch.zeros(3).int()},
    "workspace has dtype torch.int32 and 4000 elements, strides (0,)": {"workspace": torch.zeros(1).int().expand(4000)},
    "sinks asks for a gradient, and a cache's attention has none": {"sinks": torch.zeros(4, requires_grad=True)},
    "k_cache has strides (0, 640, 16, 1): tokens that share memory cannot be appended to": {
        "k_cache": torch.zeros(1, 2, 40, 16).expand(2, -1, -1, -1),
        "v_cache": torch.zeros(1, 2, 40, 16).expand(2, -1, -1, -1),
        "k": torch.zeros(2, 2, 1, 16), "v": torch.zeros(2, 2, 1, 16),
    },
    "k_cache asks for a gradient, and a cache's attention has none; use torch.no_grad()": {
        "k_cache": torch.zeros(2, 2, 40, 16, requires_grad=True)
    },
    "softcap is -1.0": {"softcap": -1.0},
    "q has 4 heads; it must be a multiple of k's 3 heads": {
        "k_cache": torch.zeros(2, 3, 40, 16), "v_cache": torch.zeros(2, 3, 40, 16)
    },
    "q has 4 heads; it must be a multiple of k's 8 heads": {
        "k_cache": torch.zeros(2, 8, 40, 16), "v_cache": torch.zeros(2, 8, 40, 16)
    },
    "takes no cu_seqlens, dropout_p": {"dropout_p": 0.5},
    "dropout_p or block_mask; use flash_attention": {"block_mask": BlockMask.from_dense(torch.ones(1, 1).bool())},
}  # fmt: skip


@pytest.mark.parametrize("message", MISTAKES)
@pytest.mark.parametrize("attention", [flash_attention_with_kvcache, naive_attention_with_kvcache])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_mistakes_are_named(message, attention, grad):
    """Without gradients a call is first looked up among those that were checked."""
    named = {
        "q": torch.zeros(2, 4, 1, 16), "k_cache": torch.zeros(2, 2, 40, 16), "v_cache": torch.zeros(2, 2, 40, 16),
        "cache_seqlens": torch.zeros(2).int(),
    } | MISTAKES[message]  # fmt: skip
    if attention is flash_attention_with_kvcache and {"dropout_p", "block_mask"} & set(named):
        pytest.skip("it has no such argument")
    if not grad and "asks for a gradient" in message:
        pytest.skip("it is no mistake there")
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=re.escape(message)) as error:
        attention(**named)
    assert "\n" not in str(error.value)


def test_a_cache_of_one_slot_is_another_call_than_one_whose_slots_share_memory():
    """The check of the second was skipped after a call of the first, and the token written to all of its slots."""

    def call(slots):
        cache = torch.zeros(1, 2, 1, 16, device=DEVICE).as_strided((1, 2, slots, 16), (32, 16, 0, 1))
        x = torch.ones(1, 2, 1, 16, device=DEVICE)
        lengths = torch.tensor([slots - 1], dtype=torch.int32, device=DEVICE)
        return flash_attention_with_kvcache(x, cache, cache, x, x, cache_seqlens=lengths)

    with torch.no_grad():
        call(1)
        with pytest.raises(ValueError, match=r"k_cache has strides .*: tokens that share memory cannot be"):
            call(4)


def test_forward_mode_is_refused_after_a_call_of_the_same_key_too():
    cache, x = torch.zeros(1, 2, 20, 16, device=DEVICE), torch.ones(1, 2, 1, 16, device=DEVICE)
    lengths = torch.tensor([9], dtype=torch.int32, device=DEVICE)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        for q in (x, dual):
            with pytest.raises(RuntimeError, match="no forward-mode derivative") if q is dual else nullcontext():
                flash_attention_with_kvcache(q, cache, cache, cache_seqlens=lengths)


@pytest.mark.parametrize("read", [False, True])
def test_tokens_and_scales_that_do_not_suit_a_cache_are_refused(read):
    """One head was written to all heads on a CPU, and a third one, by the kernel, to the next row's memory."""
    places = torch.zeros(1, dtype=torch.int64), slice(None), torch.zeros(1, dtype=torch.int64)
    cache, new = torch.zeros(2, 2, 4, 16), torch.ones(2, 1, 16)
    for stored, scale, x, said in (
        (cache, None, new[:1], r"new tokens have shape \(1, 1, 16\) and their cache \(2, 2, 4, 16\); expected"),
        (cache, None, new[..., :8], r"new tokens have shape \(2, 1, 8\)"),
        (cache.to(torch.int8), None, new, "its scale is None; a cache in 8 bits needs"),
        (cache, torch.ones(2), new, "its scale is given but the cache is in torch.float32"),
    ):
        if not read:
            with pytest.raises(ValueError, match=said):
                write_kvcache((stored, stored), (scale, scale), places, (x, x))
            assert not stored.float().any()
        elif x is new:
            with pytest.raises(ValueError, match=said):
                read_kvcache(stored, scale, places)


def test_what_would_be_written_elsewhere_is_refused_before_anything_is_written():
    """A kernel took the values' slots for as many as the keys', and places beside no tokens were left out."""
    one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    cache, new = torch.zeros(2, 2, 4, 16), torch.ones(2, 1, 16)
    narrow, scale = cache.to(torch.int8), torch.zeros(2, 2, 4)
    plain, of_8_bits, none = (cache, cache), (narrow, narrow), (None, None)
    for caches, scales, places, x, said in (
        ((cache, cache[:, :, :2]), none, one, new, r"caches have shapes \(2, 2, 4, 16\) of torch.float32 and"),
        ((cache, cache.double()), none, one, new, r"and \(2, 2, 4, 16\) of torch.float64; expected one shape"),
        (plain, none, two, new, r"places have \(2,\) of torch.int64 for new tokens of shapes \(2, 1,"),
        (plain, none, one.int(), new, r"places have \(1,\) of torch.int32 for new tokens"),
        (plain, none, one.to("meta"), new, r"places are on meta but the caches on cpu; move them there"),
        (plain, none, 0, new, r"places have 0; expected tensors \(N,\) of torch.int64"),
        (plain, none, one, new.clone().requires_grad_(), "new tokens ask for a gradient, and a cache's attention has"),
        (of_8_bits, (scale, None), one, new, "its scale is None; a cache in 8 bits needs"),
        (
            of_8_bits,
            (scale, scale[0]),
            one,
            new,
            r"its scale is torch.float32 \(2, 4\); .* needs torch.float32 \(2,\) or \(2, 2, 4\)",
        ),
        (of_8_bits, (scale, scale.half()), one, new, r"its scale is torch.float16 .*; a cache in 8 bits needs"),
    ):
        with pytest.raises(ValueError, match=said):
            write_kvcache(caches, scales, (places, slice(None), places), (x, x))
        assert not any(x.float().any() for x in (cache, narrow, scale))


@pytest.mark.parametrize("wrong", [(3, 8), (3, 9)])
def test_a_refused_call_of_the_definition_has_written_nothing(wrong):
    caches = [torch.zeros(2, 1, 8, 16) for _ in range(2)]
    new, lengths = torch.ones(2, 1, 1, 16), torch.tensor(wrong, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"row 1 has {wrong[1]} tokens in the cache, 0 of them padding, and 1 new one"):
        naive_attention_with_kvcache(new, *caches, new, new, cache_seqlens=lengths)
    assert not caches[0].any()
    assert not caches[1].any()


def test_a_stride_of_more_than_31_bits_is_given_whole():
    """Divided by the elements of 16 bytes it would pass for one of 32 bits, and so would the product with it."""
    from kernels.portable.decode import _unit

    for row, unit in ((2**30, 8), (2**31, 1), (2**33, 1), (2**30 + 4, 1)):
        cache = torch.empty(1, dtype=torch.float16, device="meta").as_strided((2, 1, 64, 16), (row, 1024, 16, 1))
        assert _unit(cache) == unit


def test_the_support_table_refuses():
    lengths = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    q, keys = torch.zeros(1, 1, 1, 8, device=DEVICE), torch.zeros(1, 1, 40, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"head_dim 8 is not supported by kvcache \(16 to 256\); use naive_attention"):
        flash_attention_with_kvcache(q, keys, keys, cache_seqlens=lengths)
    q, keys = (torch.zeros(1, 1, n, 16, device=DEVICE, dtype=torch.float64) for n in (1, 40))
    with pytest.raises(
        ValueError, match="full in float64 is not supported by kvcache; use naive_attention_with_kvcache"
    ):
        flash_attention_with_kvcache(q, keys, keys, cache_seqlens=lengths, causal=False)
    q, keys, lengths = q.float(), keys.float(), lengths.expand(1)
    for gradients in (True, False):
        on_meta = [x.to("meta") for x in (q, keys, keys)]
        refused = pytest.raises(ValueError, match="kvcache reads lengths, which tensors on meta have not")
        with torch.set_grad_enabled(gradients), refused:
            flash_attention_with_kvcache(*on_meta, cache_seqlens=lengths.to("meta"))
    with pytest.raises(RuntimeError, match=r"attention over a cache is not for torch\.func"), torch.no_grad():
        torch.vmap(lambda q: flash_attention_with_kvcache(q, keys, keys, cache_seqlens=lengths))(q[None])


def test_the_benchmark_has_calls_of_every_family():
    from scripts.bench import decode as bench

    settings = bench.BenchConfig(family=[*bench.FAMILIES], batch=[2], context=[48], heads=["4/2/16"])
    found = list(bench.cells(settings))
    assert {cell.family for cell in found} == set(bench.FAMILIES)
    assert len({str(cell.row) for cell in found}) == len(found)
    small = [bench.replace(cell, lengths=(33, 20)) for cell in found if cell.family in ("pages", "bits")]
    machine = bench.Machine(torch.device(DEVICE), max(2 * cell.held_bytes for cell in small))
    for cell in small[:5]:
        assert torch.isfinite(machine.call(cell)()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("page", [0, 128])
def test_calls_that_begin_before_the_kernel_before_has_ended_are_as_right(page):
    """In a graph an appending call begins while the product that makes its tokens ends, as in a step of generation,
    whose bits are those of kernels that take turns."""
    rows, heads, head_dim, tokens, layers = 64, 12, 64, 512, 6
    generator = torch.Generator("cuda").manual_seed(0)
    draw = partial(torch.randn, dtype=torch.bfloat16, device="cuda", generator=generator)
    width = heads * head_dim
    sizes = (3 * width, width), (width, width), (4 * width, width), (width, 4 * width)
    weights = [[draw(n, k) * k**-0.5 for n, k in sizes] for _ in range(layers)]
    table = torch.randperm(rows * tokens // page).reshape(rows, -1).int().cuda() if page else None
    shape = (rows * tokens // page, heads, page, head_dim) if page else (rows, heads, tokens, head_dim)
    caches = [(draw(shape), draw(shape)) for _ in range(layers)]
    lengths = torch.randint(1, tokens, (rows,), dtype=torch.int32).cuda()
    workspace, x = kvcache_workspace(rows, heads, "cuda"), draw(rows, width)
    turns = torch.zeros(width, dtype=torch.int32, device="cuda")

    def step(between=lambda: None):
        y = x
        for (into, out, up, down), (k_cache, v_cache) in zip(weights, caches, strict=True):
            qkv = skinny_linear(y, into, norm_eps=1e-6).view(rows, 3 * heads, 1, head_dim)
            between()
            o = flash_attention_with_kvcache(
                qkv[:, :heads], k_cache, v_cache, qkv[:, heads:-heads], qkv[:, -heads:], cache_seqlens=lengths,
                block_table=table, workspace=workspace,
            )  # fmt: skip
            between()
            y = skinny_linear(o.reshape(rows, width), out, residual=y)
            between()
            h = skinny_linear(y, up, norm_eps=1e-6, activation="gelu")
            between()
            y = skinny_linear(h, down, residual=y, workspace=turns)
            between()
        return y

    with torch.no_grad():
        expected = step(torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            overlapping = step()
        for _ in range(20):
            graph.replay()
            assert torch.equal(overlapping, expected)
