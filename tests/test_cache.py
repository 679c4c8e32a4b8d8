"""The caches: what a row attends to is its own, pages are never lost and never shared while they grow."""

import random

import pytest
import torch

from kernels import naive_attention
from model import KVCache, PagedKVCache, attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def paged(num_rows=3, num_pages=8, max_tokens=64, dtype=torch.float32) -> PagedKVCache:
    return PagedKVCache(1, num_rows, KV_HEADS, num_pages, 16, max_tokens, HEAD_DIM, DEVICE, dtype)


def tokens(num_rows: int, count: int, seed: int) -> list[torch.Tensor]:
    """q, k, v of new tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_rows, heads, count, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]


@pytest.mark.parametrize("window", [(-1, -1), (5, -1)])
def test_flash_reads_the_cache_as_the_views_do(window):
    caches = [KVCache(1, 2, KV_HEADS, 40, HEAD_DIM, DEVICE) for _ in range(2)]
    for step, count in enumerate((20, 1, 1, 4, 1)):  # a prompt, then tokens
        q, k, v = tokens(2, count, step)
        ours = caches[0].attend(0, q, k, v, attention.flash, window)
        theirs = caches[1].attend(0, q, k, v, attention.naive, window)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        for cache in caches:
            cache.advance(count)
    assert torch.equal(caches[0].keys[..., :27, :], caches[1].keys[..., :27, :])
    assert caches[0].lengths.tolist() == [27, 27]
    with pytest.raises(ValueError, match="the KV cache has room for 40 tokens and would hold 43; call reset"):
        caches[0].attend(0, *tokens(2, 16, 0), attention.flash)


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
            for row in seen:
                cache.reserve(row, 1)
                seen[row] = [torch.cat((old, new[row]), 1) for old, new in zip(seen[row], (k, v), strict=True)]
            o = cache.attend(0, q, k, v, attention.flash)
            cache.advance(1)
            for row in range(3):
                expected = torch.zeros_like(o[row])
                if row in seen:
                    expected = naive_attention(q[row][None], *(x[None] for x in seen[row]))[0]
                assert (o[row] - expected).abs().max() < allowed, (step, row)
        assert cache.lengths.tolist() == cache.length_of == [-1, 21, 24]


def check_pages(cache: PagedKVCache) -> None:
    """Each page is free or has as many users as rows that list it; the page that a row grows in has one."""
    users = [0] * len(cache.users_of)
    for row, pages in enumerate(cache.pages_of):
        assert cache.block_table[row, : len(pages)].tolist() == pages
        for page in pages:
            users[page] += 1
        full = max(cache.length_of[row], 0) // cache.page
        assert all(cache.users_of[page] == 1 for page in pages[full:])
    assert users == cache.users_of
    assert sorted(cache.free_pages) == [page for page, count in enumerate(users) if count == 0]


@pytest.mark.parametrize("steps", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_page_leaks(steps):
    chance, cache = random.Random(0), paged(num_rows=6, num_pages=20, max_tokens=96)
    refused = 0
    for step in range(steps):
        row, other = chance.sample(range(6), 2)
        try:
            if chance.random() < 0.3:
                cache.allocate(row)
            elif chance.random() < 0.3:
                cache.free(row)
            elif chance.random() < 0.2:
                cache.fork(row, other)
            else:
                count = chance.randint(1, 9)
                for used in range(6):
                    if cache.length_of[used] >= 0:
                        cache.reserve(used, count)
                cache.advance(count)
        except ValueError:
            refused += 1
        if step % 10 == 0:
            check_pages(cache)
    for row in range(6):
        if cache.length_of[row] >= 0:
            cache.free(row)
    assert refused > steps / 10
    assert sorted(cache.free_pages) == list(range(20))
    assert not any(cache.users_of)


def test_what_a_pool_cannot_hold_is_refused_and_changes_nothing():
    cache = paged(num_rows=2, num_pages=3, max_tokens=40)
    cache.allocate(0)
    with pytest.raises(ValueError, match="row 0 of the KV cache is in use with 0 tokens; free it first"):
        cache.allocate(0)
    with pytest.raises(ValueError, match="row 1 of the KV cache is not in use; allocate it first"):
        cache.reserve(1, 1)
    with pytest.raises(ValueError, match="row 0 of the KV cache would hold 41 tokens and a row has room for 40; f"):
        cache.reserve(0, 41)
    cache.reserve(0, 40)
    cache.advance(40)
    with pytest.raises(ValueError, match="row 1 of the KV cache needs 1 pages and 0 of 3 are free; free a row or make"):
        cache.fork(0, 1)
    check_pages(cache)
    assert cache.length_of == [40, -1]
