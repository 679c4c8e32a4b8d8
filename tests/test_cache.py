"""The caches: what a row attends to is its own, pages are never lost and never shared while they grow."""

import random

import pytest
import torch

from kernels import naive_attention
from kernels.fused.write_kvcache_kernel import launch_write_kvcache
from model import GPTConfig, KVCache, PagedKVCache, attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
CONFIG = GPTConfig(num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, n_embd=HEADS * HEAD_DIM)


def paged(num_rows=3, num_pages=8, max_tokens=64, dtype=torch.float32) -> PagedKVCache:
    return PagedKVCache(CONFIG, num_rows, max_tokens, num_pages, 16, DEVICE, dtype)


@pytest.mark.parametrize("page", [0, 8, 24, -16, 32.0])
def test_a_page_is_a_power_of_two_from_16_on(page):
    """A kernel would refuse it, at its first step."""
    with pytest.raises(ValueError, match=rf"page={page} must be a power of two from 16 on"):
        PagedKVCache(CONFIG, 2, 64, None, page)


def tokens(num_rows: int, count: int, seed: int) -> list[torch.Tensor]:
    """q, k, v of `count` new tokens of each row, (1, H, num_rows * count, D) as a layer has them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, num_rows * count, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]


@pytest.mark.parametrize("window", [(-1, -1), (5, -1)])
def test_flash_reads_the_cache_as_the_views_do(window):
    """Two rows in each kind of cache, of which one begins later."""
    caches = [KVCache(CONFIG, 2, 40, DEVICE), KVCache(CONFIG, 2, 40, DEVICE), paged(2), paged(2)]
    for cache in caches:
        cache.allocate(0)
    for step, count in enumerate((20, 1, 1, 4, 1)):  # a prompt, then tokens
        q, k, v = tokens(2, count, step)
        results = []
        for cache, attend in zip(caches, (attention.naive, attention.flash) * 2, strict=True):
            if step == 2:
                cache.allocate(1)
            in_use = [row for row in range(2) if cache.reserved[row] >= 0]
            cache.extend(in_use, count)
            results.append(cache.attend(0, q, k, v, attend, window=window))
            cache.advance(count)
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-5)
    for cache in caches:
        assert cache.lengths.tolist() == cache.reserved == [27, 6]
    assert torch.equal(caches[0].keys[:, 0, :, :27], caches[1].keys[:, 0, :, :27])
    with pytest.raises(ValueError, match="row 0 of the KV cache would hold 43 tokens and a row has room for 40; free"):
        caches[0].extend([1, 0], 16)
    for cache in caches:
        for counts in ([3, -1], torch.tensor([3, -1])):
            with pytest.raises(
                ValueError, match="row 0 of the KV cache cannot be extended by -1 tokens; use 0 or more"
            ):
                cache.extend([1, 0], counts)
        assert cache.reserved == [27, 6]


def test_a_row_not_in_use_is_left_out_of_a_call(poisoned_memory):
    cache = KVCache(CONFIG, 2, 40, DEVICE)
    cache.allocate(1, 1)
    assert cache.lengths.tolist() == [-1, 0]
    cache.extend([1], 3)
    assert cache.positions(2, 3).tolist() == [0, 1, 2] * 2
    q, k, v = tokens(2, 3, 0)
    o = cache.attend(0, q, k, v, attention.naive)
    assert not o[:, :, :3].any()
    expected = naive_attention(*(x[:, :, 3:] for x in (q, k, v)), causal=True)
    torch.testing.assert_close(o[:, :, 3:], expected, rtol=1e-4, atol=1e-5)
    cache.advance(3)
    assert cache.lengths.tolist() == cache.reserved == [-1, 3]


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_layers_keys_and_values_have_scales_of_their_own(kind):
    """Values of other sizes than keys and than another layer's, of a model in bfloat16."""
    config = GPTConfig(num_layers=2, num_heads=HEADS, num_kv_heads=KV_HEADS, n_embd=HEADS * HEAD_DIM)
    cache = kind(config, 1, 64, *((None, 16) if kind is PagedKVCache else ()), DEVICE, torch.int8)
    cache.allocate(0)
    stored = [[], []]
    for count in (20, 1):
        cache.extend([0], count)
        for layer, size in enumerate((30.0, 0.01)):
            q, k, v = (x.bfloat16() for x in tokens(1, count, count + layer))
            stored[layer].append((k, size * v))
            o = cache.attend(layer, q, *stored[layer][-1], attention.naive)
            keys, values = (torch.cat(x, 2) for x in zip(*stored[layer], strict=True))
            expected = naive_attention(q, keys, values, causal=True)
            assert o.dtype == torch.bfloat16
            assert (o - expected).abs().max() < 0.05 * size
        cache.advance(count)


def test_rows_in_pages_attend_to_their_own_tokens(monkeypatch):
    """Rows begin and end at any time, one is forked; each attends as if it were alone, in 32 and in 8 bits.

    Without a GPU by the definition, as on any CPU: Triton's interpreter would take a minute.
    """
    for module in ("kernels.decode", "kernels.support"):
        monkeypatch.setattr(f"{module}.interpreting", lambda: False)
    for dtype, allowed in ((torch.float32, 1e-5), (torch.int8, 0.05)):
        cache, seen = paged(dtype=dtype), {}
        for step in range(24):
            if step in (0, 3):
                cache.allocate(step % 2)
                seen[step % 2] = [torch.zeros(KV_HEADS, 0, HEAD_DIM, device=DEVICE) for _ in range(2)]
            if step == 19:
                cache.fork(0, 2)
                seen[2] = seen[0]
            if step == 21:
                cache.free(0)
                del seen[0]
            q, k, v = tokens(3, 1, step)
            cache.extend(list(seen), 1)
            for row in seen:
                new = (x[0, :, row : row + 1] for x in (k, v))
                seen[row] = [torch.cat((old, x), 1) for old, x in zip(seen[row], new, strict=True)]
            o = cache.attend(0, q, k, v, attention.flash)
            cache.advance(1)
            for row in range(3):
                expected = torch.zeros_like(o[0, :, row])
                if row in seen:
                    expected = naive_attention(q[:, :, row : row + 1], *(x[None] for x in seen[row]))[0, :, 0]
                assert (o[0, :, row] - expected).abs().max() < allowed, (step, row)
        assert cache.lengths.tolist() == cache.reserved == [-1, 21, 24]


@pytest.mark.parametrize("attend", [attention.flash, attention.naive])
@pytest.mark.parametrize("make", [paged, lambda: KVCache(CONFIG, 3, 64, DEVICE)])
@pytest.mark.parametrize("counts", [{2: 17, 0: 5}, {2: 11, 0: 11}])
def test_prompts_are_read_without_padding(counts, make, attend):
    """Rows read end to end attend within themselves, and what they leave in the cache serves the next token."""
    cache, options = make(), {"window": (5, -1), "scale": 0.5}
    for row, count in counts.items():
        cache.allocate(row)
        cache.extend([row], count)
    prompts = cache.prompts(list(counts))
    assert prompts.positions(1, 22).tolist() == [*range(counts[2]), *range(counts[0])]
    q, k, v = tokens(1, 22, 0)
    o = prompts.attend(0, q, k, v, attend, **options)
    prompts.advance(22)
    parts = {2: slice(0, counts[2]), 0: slice(counts[2], 22)}
    for part in parts.values():
        expected = naive_attention(*(x[:, :, part] for x in (q, k, v)), causal=True, **options)
        torch.testing.assert_close(o[:, :, part], expected, rtol=1e-4, atol=1e-5)
    assert prompts.last.tolist() == [counts[2] - 1, 21]
    assert cache.lengths.tolist() == cache.reserved == [counts[0], -1, counts[2]]
    cache.extend([0, 2], 1)
    new = tokens(3, 1, 1)
    o = cache.attend(0, *new, attention.naive, **options)
    for row, part in parts.items():
        one = [x[:, :, row : row + 1] for x in new]
        keys, values = (torch.cat((x[:, :, part], y), 2) for x, y in zip((k, v), one[1:], strict=True))
        expected = naive_attention(one[0], keys, values, causal=True, **options)
        torch.testing.assert_close(o[:, :, row : row + 1], expected, rtol=1e-4, atol=1e-5)


def check_pages(cache: PagedKVCache) -> None:
    """Each page is free or has as many users as rows that list it; the page that a row grows in has one."""
    users = [0] * len(cache.ref_counts)
    for row, pages in enumerate(cache.row_pages):
        assert cache.block_table[row, : len(pages)].tolist() == pages
        for page in pages:
            users[page] += 1
        full = max(cache.reserved[row], 0) // cache.page
        assert all(cache.ref_counts[page] == 1 for page in pages[full:])
    assert users == cache.ref_counts
    assert sorted(cache.free_pages) == [page for page, count in enumerate(users) if count == 0]


@pytest.mark.parametrize("steps", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_page_leaks(steps):
    chance, cache = random.Random(0), paged(num_rows=6, num_pages=20, max_tokens=96)
    refused = 0
    for step in range(steps):
        row, other, *more = chance.sample(range(6), chance.choice((2, 2, 2, 3, 6)))  # mostly one is taken or freed
        try:
            if chance.random() < 0.3:
                cache.allocate(row, *more)
            elif chance.random() < 0.3:
                cache.free(row, *more)
            elif chance.random() < 0.2:
                cache.fork(row, other)
            else:
                count = chance.randint(1, 9)
                cache.extend([used for used in range(6) if cache.reserved[used] >= 0], count)
                cache.advance(count)
        except ValueError:
            refused += 1
        if step % 10 == 0:
            check_pages(cache)
            assert cache.lengths.tolist() == cache.reserved
    cache.free(*(row for row in range(6) if cache.reserved[row] >= 0))
    assert refused > steps / 10
    assert sorted(cache.free_pages) == list(range(20))
    assert not any(cache.ref_counts)


def test_a_row_is_not_forked_between_its_room_and_its_tokens():
    """The copy would have a token that nobody stored, or fill a page that it shares."""
    cache = paged(num_rows=2)
    cache.allocate(0)
    cache.extend([0], 15)
    cache.advance(15)
    cache.extend([0], 1)
    with pytest.raises(ValueError, match="row 0 of the KV cache has 15 tokens and room for 16; fork it before extend"):
        cache.fork(0, 1)
    cache.advance(1)
    cache.fork(0, 1)
    assert cache.lengths.tolist() == cache.reserved == cache.stored == [16, 16]


@pytest.mark.parametrize("cache", [KVCache(CONFIG, 2, 40, DEVICE), paged(2)])
def test_tokens_of_other_rows_than_its_own_are_refused_by_the_cache(cache):
    for row in range(2):
        cache.allocate(row)
    cache.extend([0, 1], 4)
    for rows, count in ((3, 1), (1, 4), (4, 2)):
        with pytest.raises(ValueError, match=f"for {rows} rows and the KV cache has 2; give {count} tokens for each"):
            cache.positions(rows, count)
    with pytest.raises(ValueError, match="3 tokens are not a multiple of the KV cache's 2 rows; give the same number"):
        cache.attend(0, *tokens(3, 1, 0), attention.flash)


def test_prompts_are_read_once_and_into_the_rows_they_were_made_for():
    """Read again they would take back a row's later tokens; after it was freed, write into another's pages."""
    cache = paged(num_rows=3)
    cache.allocate(0, 1)
    cache.extend([0, 1], (3, 0))
    with pytest.raises(ValueError, match="row 1 of the KV cache has 0 tokens and room for 0; a prompt is read"):
        cache.prompts([1])
    for rows in ([], [0, 0], 0):
        with pytest.raises(ValueError, match="name those whose prompts are to be read in a list, each once"):
            cache.prompts(rows)
    prompts = cache.prompts([0])
    for rows, count in ((1, 4), (3, 1)):
        with pytest.raises(ValueError, match=f"have 3 tokens, end to end in one row, not {count} in {rows}"):
            prompts.positions(rows, count)
    cache.extend([0], 1)  # for what follows them
    prompts.positions(1, 3)
    prompts.advance(3)
    for change in (lambda: None, lambda: cache.free(0), lambda: cache.allocate(0), lambda: cache.extend([0], 2)):
        change()
        with pytest.raises(ValueError, match="its prompt of 3 needs a row without tokens"):
            prompts.positions(1, 3)


def test_prompts_are_written_to_the_pages_that_their_row_has_now():
    """Not to those that it had when they were made: they may be another row's."""
    cache = paged(num_rows=2)
    cache.allocate(0)
    cache.extend([0], 20)
    prompts = cache.prompts([0])
    cache.free(0)
    for row in (1, 0):  # row 1 has the pages of row 0
        cache.allocate(row)
        cache.extend([row], 20)
    new = cache.prompts([0])
    for each in (prompts, new):
        each.positions(1, 20)
    assert torch.equal(prompts.places[0], new.places[0])


def test_what_a_pool_cannot_hold_is_refused_and_changes_nothing():
    with pytest.raises(ValueError, match="max_tokens=0 must be a whole number of at least 1"):
        KVCache(CONFIG, 1, 0)
    with pytest.raises(ValueError, match="num_rows=0 must be a whole number of at least 1"):  # no num_pages was given
        paged(num_rows=0, num_pages=None, max_tokens=40)
    for number in (0, 2.5):
        with pytest.raises(ValueError, match=f"num_pages={number} must be a whole number of at least 1"):
            paged(num_rows=1, num_pages=number, max_tokens=40)
    cache = paged(num_rows=2, num_pages=3, max_tokens=40)
    with pytest.raises(ValueError, match=r"has rows 0 to 1, and none of number \[0, 1\]"):
        cache.allocate([0, 1])
    with pytest.raises(ValueError, match="has rows 0 to 1, and none of number True"):
        cache.allocate(True)
    with pytest.raises(ValueError, match="rows is 0; give a list of row numbers"):
        cache.extend(0, 10)
    with pytest.raises(ValueError, match="extend got 2 rows and 1 counts of tokens; give one count a row"):
        cache.extend([0, 1], [3])
    cache.allocate(0)
    with pytest.raises(ValueError, match="row 0 of the KV cache is in use with 0 tokens; free it first"):
        cache.allocate(1, 0)
    with pytest.raises(ValueError, match="row 1 of the KV cache is not in use; allocate it first"):
        cache.free(0, 1)
    assert cache.lengths.tolist() == cache.reserved == [0, -1]
    for count in (-1, 2.5, None):
        with pytest.raises(ValueError, match=f"be extended by {count} tokens; use 0 or more, a whole number"):
            cache.extend([0], count)
    assert cache.reserved == [0, -1]
    with pytest.raises(ValueError, match="row 1 of the KV cache is not in use; allocate it first"):
        cache.extend([1], 1)
    with pytest.raises(ValueError, match="row 0 of the KV cache would hold 50 tokens"):
        cache.extend([0, 0], 25)  # a row named twice
    with pytest.raises(ValueError, match="row 0 of the KV cache would hold 41 tokens and a row has room for 40; f"):
        cache.extend([0], 41)
    cache.extend([0], 40)
    cache.advance(40)
    with pytest.raises(
        ValueError, match="row 1 of the KV cache needs a page, 1 with the other rows, and 0 of 3 are free; fr"
    ):
        cache.fork(0, 1)
    check_pages(cache)
    assert cache.reserved == [40, -1]
    with pytest.raises(ValueError, match="row 1 of the KV cache is not in use; allocate it first"):
        cache.fork(1, 0)
    cache.allocate(1)
    with pytest.raises(ValueError, match="row 1 of the KV cache needs a page, 1 with the other rows, and 0 of 3 are"):
        cache.extend([0, 1], [0, 1])
    check_pages(cache)
    assert cache.reserved == [40, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "head_dim", "count"), [(3, 20, 70), (1, 64, 5)])
def test_tokens_are_put_in_their_places_by_one_kernel(heads, head_dim, count, dtype):
    """Of a cache and tokens of any strides; a place that there is not leaves all as it was."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drawn = torch.Generator().manual_seed(count)
    shape = 7, heads, 16, 2 * head_dim
    caches = [(9 * torch.randn(shape, generator=drawn)).to(device, dtype)[..., :head_dim] for _ in range(2)]
    k = (9 * torch.randn(count + 4, heads, head_dim, generator=drawn)).to(device, dtype)
    v = (9 * torch.randn(heads, count + 4, head_dim, generator=drawn)).to(device, dtype).transpose(0, 1)
    flat = torch.randperm(7 * 16, generator=drawn)[:count].to(device)
    lines, slots = flat // 16, flat % 16
    expected = [cache.float() for cache in caches]
    for one, new in zip(expected, (k, v), strict=True):
        one[lines, :, slots] = new[:count].float()
    for line, slot in ((7, 0), (-1, 0), (2, 16), (2, -1)):
        lines, slots = (torch.cat((x, x.new_tensor([one]))) for x, one in ((lines, line), (slots, slot)))
    launch_write_kvcache(*caches, lines, slots, k, v)
    for cache, one in zip(caches, expected, strict=True):
        assert torch.equal(cache.float(), one)
    launch_write_kvcache(*caches, lines[:0], slots[:0], k[:0], v[:0])


@pytest.mark.parametrize(("dtype", "size"), [(torch.int8, 1), (torch.float16, 2), (torch.float32, 4)])
def test_a_cache_is_refused_to_the_byte(dtype, size, monkeypatch):
    """In 8 bits a token and head has a scale of 4 bytes beside each 32 of keys and of values."""
    config = GPTConfig(1, 2, n_embd=64, attention="naive", loss="plain")
    needed = 2 * 2 * 8 * (32 * size + 4 * (size == 1))
    monkeypatch.setattr("model.cache.free_bytes", lambda device: needed - 1)
    with pytest.raises(ValueError, match="a KV cache of 1 rows of 8 tokens needs"):
        KVCache(config, 1, 8, "cpu", dtype)
    for free in (needed, None):  # None: where nobody counts
        monkeypatch.setattr("model.cache.free_bytes", lambda device, free=free: free)
        KVCache(config, 1, 8, "cpu", dtype)
