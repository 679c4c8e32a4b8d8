"""Dropout: one mask for every implementation, fair, and decided by the seed alone."""

import pytest
import torch
import triton
import triton.language as tl

from kernels import flash_attention, naive_attention
from kernels.philox import ROUNDS, keep_mask, philox
from tests.attention_checks import make_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _philox_kernel(out, seed, ROUNDS: tl.constexpr):
    cols = tl.arange(0, 8)[None, :] * 1_000_003
    rows = tl.arange(0, 4)[:, None] - 2  # negative: the upper half of the counter's range
    words = tl.philox(tl.load(seed), cols, rows, tl.cast(77, tl.int32), tl.cast(5, tl.int32), ROUNDS)
    places = out + tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    for word in tl.static_range(4):
        tl.store(places + 32 * word, words[word].to(tl.int64))


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**62 - 1])
def test_torch_draws_tritons_bits(seed):
    out = torch.empty(4, 4, 8, dtype=torch.int64, device=DEVICE)
    seed = torch.tensor(seed, device=DEVICE)
    _philox_kernel[(1,)](out, seed, ROUNDS)
    cols = (torch.arange(8, device=DEVICE) * 1_000_003)[None, :]
    rows = ((torch.arange(4, device=DEVICE) - 2) % 2**32)[:, None]
    words = philox(seed, cols, rows, torch.tensor(77, device=DEVICE), torch.tensor(5, device=DEVICE))
    assert torch.equal(out & 0xFFFFFFFF, torch.stack(words))


def test_known_answers():
    """The authors' test vectors for Philox4x32-10 (kat_vectors in Random123)."""
    zero = torch.zeros((), dtype=torch.int64)
    words = philox(zero, zero, zero, zero, zero, rounds=10)
    assert [*map(int, words)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize(
    ("document", "expected"),
    [(0, ["1101100111101110", "1101101111111110"]), (5, ["1010110110000110", "1011011011101110"])],
)
def test_a_seed_means_the_same_mask_for_ever(document, expected):
    rows, cols = torch.tensor([1, 9])[:, None], torch.arange(16)[None, :]
    kept = keep_mask(torch.tensor(42), 0.5, torch.tensor(3), rows, cols, document)
    assert ["".join(map(str, row.int().tolist())) for row in kept] == expected


def test_the_mask_is_fair_and_uncorrelated():
    rows, cols = torch.arange(500)[:, None], torch.arange(400)[None, :]
    heads = torch.arange(3).reshape(3, 1, 1)
    kept = keep_mask(torch.tensor(5), 0.25, heads, rows, cols).double()
    deviation = (0.25 * 0.75 / kept.numel()) ** 0.5
    assert abs(float(kept.mean()) - 0.75) < 5 * deviation
    # the next head, query, key, and another word of the same draw
    for other in (kept.roll(1, 0), kept.roll(1, 1), kept.roll(1, 2), kept.roll(8, 1), kept.roll(8, 2)):
        correlation = float(((kept - 0.75) * (other - 0.75)).mean()) / (0.25 * 0.75)
        assert abs(correlation) < 5 / kept.numel() ** 0.5


def test_the_seed_decides():
    q, k, v = (x.detach() for x in make_qkv(1, 2, 2, 33, 33, 16, device=DEVICE))
    first = flash_attention(q, k, v, dropout_p=0.5, dropout_seed=1)
    assert torch.equal(first, flash_attention(q, k, v, dropout_p=0.5, dropout_seed=torch.tensor(1, device=DEVICE)))
    assert not torch.equal(first, flash_attention(q, k, v, dropout_p=0.5, dropout_seed=2))


def test_without_a_seed_pytorchs_generator_decides():
    q, k, v = (x.detach() for x in make_qkv(1, 2, 2, 33, 33, 16, device=DEVICE))
    torch.manual_seed(3)
    first, second = (flash_attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    torch.testing.assert_close(naive_attention(q, k, v, dropout_p=0.5), first)


def test_no_dropout_draws_nothing():
    q, k, v = (x.detach() for x in make_qkv(1, 1, 1, 4, 4, 16, device=DEVICE))
    before = torch.get_rng_state()
    flash_attention(q, k, v)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_mean_over_seeds_is_attention_without_dropout():
    q, k, v = (x.detach().double() for x in make_qkv(1, 1, 1, 8, 12, 16))
    draws = torch.stack([naive_attention(q, k, v, dropout_p=0.4, dropout_seed=s) for s in range(2000)])
    standard_error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - naive_attention(q, k, v)).abs() < 5 * standard_error).all()


def test_lse_is_of_the_whole_row():
    q, k, v = (x.detach() for x in make_qkv(1, 1, 1, 20, 20, 16, device=DEVICE))
    _, plain = flash_attention(q, k, v, return_lse=True)
    _, dropped = flash_attention(q, k, v, dropout_p=0.5, dropout_seed=1, return_lse=True)
    assert torch.equal(plain, dropped)
