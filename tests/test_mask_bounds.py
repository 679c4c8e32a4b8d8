"""Blocks of a mask that bounds decide: never wrongly, and all that need no look inside."""

import pytest
import torch

from kernels import block_mask, block_masks
from kernels.mask_bounds import Undecided, decided_blocks
from scripts.bench.mask_table import masks
from tests.test_block_mask import DEVICE, evaluated

SIZES = 2, 2, 300, 257
SHIFT = torch.tensor([0, 40], device=DEVICE)
WHERE = torch.arange(300, device=DEVICE) // 70
LARGE = torch.tensor([-(2**63), -(2**62), 2**62, 2**63 - 1], device=DEVICE)[WHERE.clamp(max=3)]
NARROW = torch.tensor([-128, -100, 100, 127], dtype=torch.int8, device=DEVICE)[WHERE.clamp(max=3)]
BYTES = (torch.arange(300, device=DEVICE) * 4).to(torch.uint8)
HUNDRED = torch.tensor(100, device=DEVICE)
EDGE = torch.tensor([[-2, -1], [1, 2]], device=DEVICE)
HUNDREDS = torch.tensor([0, 100, 200], device=DEVICE)
SEEN = torch.tensor([[True, False, True], [False, True, True], [True, True, True]], device=DEVICE)
EXACT_AND_MIXED = {
    "comparisons": lambda b, h, q, k: ((q < k) ^ (q <= k - 3)) | ((q > k + 200) & (k >= h)) | (k <= 5),
    "less at an edge": lambda b, h, q, k: q < k + EDGE[b, h],
    "at most at an edge": lambda b, h, q, k: q <= k + EDGE[b, h],
    "more at an edge": lambda b, h, q, k: q > k + EDGE[b, h],
    "at least at an edge": lambda b, h, q, k: q >= k + EDGE[b, h],
    "equal at an edge": lambda b, h, q, k: q == k + EDGE[b, h],
    "unequal at an edge": lambda b, h, q, k: q != k + EDGE[b, h],
    "not equal": lambda b, h, q, k: (WHERE[q] != WHERE[k]) & ~((q == k) | (k != q + 130)) | (q - k == 7),
    "signs": lambda b, h, q, k: ((-q + k).abs() < 90) | (200 - k < q - 250) | (abs(q - k + 3) > 220),
    "whole numbers": lambda b, h, q, k: ((q - k) // 100 == 1) | ((q - k + 40) % 256 < 17) | ((q - 150) // 64 < -1),
    "the largest remainder": lambda b, h, q, k: (q - k) % 100 == 99,
    "negated": lambda b, h, q, k: -(q - k) < 90,
    "taken from a number": lambda b, h, q, k: 200 - (q - k) < 120,
    "from a table's end": lambda b, h, q, k: HUNDREDS[q // 128 - k // 128] > 150,
    "halves": lambda b, h, q, k: (q - k) + 0.5 > 255.25,
    "negative divisors": lambda b, h, q, k: ((q - k) // -100 == 1) | ((q - k) % -90 < -80),
    "where": lambda b, h, q, k: torch.where(q < 130, k < 100, torch.where(k <= q, q - k, 700 - k)) < 140,
    "where, the smaller one last": lambda b, h, q, k: torch.where(k <= q, 700 - k, q - k) < 140,
    "where of booleans": lambda b, h, q, k: torch.where(k <= q, WHERE[q] == WHERE[k], k > 250),
    "logic by name": lambda b, h, q, k: torch.logical_and(k <= q, torch.logical_not((q ^ 3) == (k & 5) + (q | k))),
    "logic beside a number": lambda b, h, q, k: ((k <= q) ^ 2 == 2) | ((k > 250) & 1 == 1) & (q > 280),
    "batch and heads": lambda b, h, q, k: (k <= q + SHIFT[b]) & (q - k < 100 * (h + 1)) | (b == h) & (k == 256),
    "two indices": lambda b, h, q, k: SEEN[q // 128, k // 100] | SEEN[b, k % 3] & (q > 290),
    "large numbers": lambda b, h, q, k: (LARGE[q] - LARGE[k] > 0) | (LARGE[q] == LARGE[k]) & (k * 2**55 > q),
    "numbers that grow": lambda b, h, q, k: q * 2**54 + k * 2**54 < 0,
    "wrapped in a byte": lambda b, h, q, k: NARROW[q] - NARROW[k] > 50,
    "wrapped in a byte without a sign": lambda b, h, q, k: (BYTES[q] - BYTES[k] < 3) | (BYTES[q] + 100 < 60),
    "beyond a byte": lambda b, h, q, k: (NARROW[q] < 300) & (NARROW[k] + 200 > 20) | (NARROW[k] == -156) & (q < k),
    "bytes beside any number": lambda b, h, q, k: NARROW[q] < torch.minimum(q, k),
    "open": lambda b, h, q, k: (k <= q) & (((q * 7 + k * 2**61) >> 3) % 5 < 3) | (torch.minimum(q, k) == 3),
    "truth beside a number": lambda b, h, q, k: ((k <= q) == 2) | ((k > q) != -1) & ((q < k + 90) > -1) & (k > 3),
    "after what has no rule": lambda b, h, q, k: ((q - k) * 2 - 1 < 100) & (q != 7 - ((k <= q) + 2)) & (q * k + 1 > 99),
    "constant": lambda b, h, q, k: q >= 0,
}
NOT_FOLLOWED = {
    "a number with a dtype": lambda b, h, q, k: (NARROW[q] - HUNDRED < -150) | (NARROW[q] + NARROW[k] * HUNDRED > 9000),
    "a number with a dtype, in rows": lambda b, h, q, k: NARROW[q] - HUNDRED < -150,
    "floats": lambda b, h, q, k: (q - k).float().sin() > 0.2,
    "a list of keys": lambda b, h, q, k: (k == SHIFT).any() | (q == k),
    "no operand": lambda b, h, q, k: torch.ones((), dtype=torch.bool, device=DEVICE),
    "shapes": lambda b, h, q, k: (k <= q) & torch.ones(q.shape, dtype=torch.bool, device=q.device),
    "in place": lambda b, h, q, k: (k <= q).logical_and_((q - k).sub_(90).abs_() < 20),
    "keywords": lambda b, h, q, k: (q - k).clamp(min=5) > 30,
    "keywords alone": lambda b, h, q, k: torch.minimum(input=q, other=k) > 30,
    "a list of operands": lambda b, h, q, k: (torch.stack((q, k)) > 30).all(0),
}


@pytest.mark.parametrize("name", EXACT_AND_MIXED | NOT_FOLLOWED)
def test_a_mask_is_what_its_function_says(name):
    mod = (EXACT_AND_MIXED | NOT_FOLLOWED)[name]
    each = torch.vmap(torch.vmap(mod, (None, None, None, 0)), (None, None, 0, None))
    expected = evaluated(lambda b, h, q, k: each(b, h, q[:, 0], k[0]), *SIZES)
    assert torch.equal(block_mask(mod, *SIZES, DEVICE).dense(), expected)
    if name in NOT_FOLLOWED:
        with pytest.raises(Undecided):
            decided_blocks(mod, SIZES, 128, torch.device(DEVICE))


@pytest.mark.parametrize("name", sorted(masks(1).keys() - {"images", "bigbird"}))
def test_only_partial_blocks_are_asked(name, monkeypatch):
    """Of 256 blocks: as many as the mask has partial ones."""
    asked, real = [], block_masks._evaluate_partial_blocks
    monkeypatch.setattr(block_masks, "_evaluate_partial_blocks", lambda *given: asked.append(given[2]) or real(*given))
    mask = block_mask(masks(2048, DEVICE)[name], None, None, 2048, 2048, DEVICE)
    assert int(asked[0].sum()) == mask.counts()["partial"] < 150


@pytest.mark.gpu
def test_what_is_on_another_device_decides_no_block():
    """A single number on the CPU is read for a GPU's mask, as PyTorch does it; nothing of a GPU for a CPU's."""
    document, limit = torch.zeros(200, dtype=torch.int64, device="cuda"), torch.tensor(300, device="cuda")
    for read in (lambda b, h, q, k: document[q] == document[k], lambda b, h, q, k: q + k < limit + limit):
        with pytest.raises(Undecided):
            decided_blocks(read, (1, 1, 200, 200), 128, torch.device("cpu"))
    with pytest.raises(ValueError, match="read what is on cpu"):
        block_mask(lambda b, h, q, k: document[q] == document[k], None, None, 200, 200, "cpu")
    for number in (limit, limit.cpu()):
        mask = block_mask(lambda b, h, q, k, number=number: q + k < number, None, None, 200, 200, "cuda")
        rows, cols = torch.arange(200, device="cuda")[:, None], torch.arange(200, device="cuda")
        assert torch.equal(mask.dense()[0, 0], rows + cols < 300)
