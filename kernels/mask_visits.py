"""The lists of blocks that kernels visit, made from the table of a mask's blocks, and the bits of partial blocks.

The host makes the lists: a GPU would need many small launches, and would wait for each of them.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

BLOCK = 128  # queries and keys in a block, as in torch's BlockMask
GROUP = 192  # queries per program of Hopper's forward where heads are narrow
MOST_VISITS = 2**29  # places in the list of all three kinds are int32

_FEW = 2**10  # up to so many patterns, 4 MiB, equal ones are kept: merging them would take a sixth of the time
_BITS_OF_BYTES = 0x0102040810204080  # times a word of eight bytes of 0 or 1: the highest byte has their bits in order
_ODD = 0x5851F42D4C957F2D  # its powers are the weights of the words in a hash


def packed(seen: Tensor) -> Tensor:
    """Booleans (n, 128, 128) as bits of int64 (n, 2, 128, 2), of the rows and of the columns: see `BlockMask.bits`."""
    pairs = torch.stack((seen, seen.mT), dim=1).view(torch.int16).unflatten(3, (BLOCK // 8, 4))
    # eight bits of a word as bytes of 0 or 1
    sides = pairs.mT.clone(memory_format=torch.contiguous_format).view(torch.int64).flatten(3)
    highest = (sides * _BITS_OF_BYTES).view(torch.uint8)[..., 7::8]
    return highest.clone(memory_format=torch.contiguous_format).view(torch.int64)


@torch.inference_mode(False)  # training may use the same mask later
def visits_and_bits(
    full: np.ndarray, asked: np.ndarray, bits: list[Tensor], num_q: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """`starts`, `visits` and `bits` of a `BlockMask`.

    full, asked: (B, H, blocks of queries, blocks of keys) bool, never both.
    bits: of the asked blocks, as `packed` returns them; some may turn out to show all or nothing.

    Raises ValueError where more blocks are visited than the lists can number.
    """
    bits = torch.cat((_ends(device), *bits))  # pattern 0 shows everything, 1 nothing
    table = 1 - full.astype(np.int32)
    if len(bits) > _FEW:
        bits, numbers = _distinct_patterns(bits)
        table[asked] = numbers[2:]
        starts, visits = _lists(table, num_q)
    else:
        words, total = _least_and_greatest(bits), len(bits)
        table[asked] = np.arange(2, total)
        starts, visits = _lists(table, num_q)  # while the GPU works, as if none showed all or nothing
        bits, numbers = _merge_uniform_patterns(bits, words)
        if len(bits) < total:
            table[asked] = numbers[2:]
            starts, visits = _lists(table, num_q)
    lists = torch.from_numpy(np.concatenate((starts.reshape(-1, 4), visits))).to(device)  # in one copy
    starts, visits = lists[: starts.size // 4].view(starts.shape), lists[starts.size // 4 :]
    return starts, visits, bits.view(torch.int32).flatten(1, 2)


def _distinct_patterns(bits: Tensor) -> tuple[Tensor, np.ndarray]:
    """The distinct ones of patterns (n, 2, 128, 2), and for each of the n its number among them."""
    mixed = bits[:, 0].flatten(1) * _weights(_ODD, bits.device)
    hashes = (mixed ^ (mixed >> 29)).sum(1)  # unmixed, words that differ in their highest bits would cancel
    _, first, which = np.unique(hashes.cpu().numpy(), return_index=True, return_inverse=True)
    kept = np.sort(first)
    numbers = np.searchsorted(kept, first)[which]
    first, kept = torch.from_numpy(np.concatenate((first[which], kept))).to(bits.device).split((len(which), len(kept)))
    if torch.equal(bits, bits[first]):
        return bits[kept], numbers
    return _merge_uniform_patterns(bits, _least_and_greatest(bits))  # two distinct patterns share a hash


def _least_and_greatest(bits: Tensor) -> Tensor:
    """(2, n) int64: the least and the greatest word of each of the patterns (n, 2, 128, 2)."""
    return torch.stack(torch.aminmax(bits[:, 0].flatten(1), dim=1))


def _merge_uniform_patterns(bits: Tensor, words: Tensor) -> tuple[Tensor, np.ndarray]:
    """As `_distinct_patterns`, but merges only the patterns that show all or nothing.

    words: from `_least_and_greatest`; reading them waits for the GPU.
    """
    least, greatest = words.cpu().numpy()
    kept = (least != greatest) | (least < -1) | (least > 0)
    kept[:2] = True
    numbers = kept.cumsum() - 1
    if kept.all():
        return bits, numbers
    numbers[~kept] = least[~kept] + 1  # all bits set are -1
    return bits[torch.from_numpy(np.flatnonzero(kept)).to(bits.device)], numbers


def _lists(table: np.ndarray, num_q: int) -> tuple[np.ndarray, np.ndarray]:
    """`starts` and `visits` from the pattern numbers (B, H, blocks of queries, blocks of keys)."""
    q_blocks, k_blocks = table.shape[2:]
    visited = np.flatnonzero(table != 1)
    if len(visited) >= MOST_VISITS:
        raise ValueError(f"the mask visits {len(visited):,} blocks of 128 x 128; the most are {MOST_VISITS - 1:,}")
    row, col = np.divmod(visited, k_blocks)
    head, block = np.divmod(row, q_blocks)
    key_row, own = head * k_blocks + col, table.reshape(-1)[visited]
    above = np.arange(-(-num_q // GROUP)) * GROUP // BLOCK  # the upper of a group's two rows of blocks
    upper, lower = (table[:, :, rows].reshape(-1) for rows in (above, np.minimum(above + 1, q_blocks - 1)))
    of_groups = np.flatnonzero((upper != 1) | (lower != 1))
    group, group_col = np.divmod(of_groups, k_blocks)
    # the lines of queries, of keys and of groups, each kind for all heads
    kinds, heads = (q_blocks, k_blocks, len(above)), table.shape[0] * table.shape[1]
    line = np.concatenate((row, heads * q_blocks + key_row, heads * (q_blocks + k_blocks) + group))
    patterns, below = (np.concatenate((own, own, of_group[of_groups])) for of_group in (upper, lower))
    part = 2 * line + ((patterns | below) != 0)  # full blocks come first in a line
    number = np.bincount(part, minlength=2 * heads * sum(kinds)).reshape(-1, 2)
    stops = 1 + number.cumsum().reshape(-1, 2)
    starts = np.empty((len(number), 4), np.int32)
    starts[:, :2] = stops - number
    starts[:, 2] = stops[:, 1]
    by_kind, first = [], 0
    for lines in kinds:
        of_kind = starts[first : first + heads * lines].reshape(*table.shape[:2], lines, 4)
        of_kind[..., 3] = (of_kind[..., 0] - of_kind[..., 2]).argsort(axis=2, kind="stable")
        by_kind.append(of_kind)
        first += heads * lines
    order = part.argsort(kind="stable")
    visits = np.zeros((1 + len(line), 4), np.int32)
    visits[0] = 0, 1, 1, 0
    visits[1:, 0] = np.concatenate((col, block, group_col))[order]
    visits[1:, 1] = patterns[order]
    visits[1 + 2 * len(visited) :, 2] = below[order[2 * len(visited) :]]
    larger = np.bincount(row).cumsum()[row] - np.arange(1, len(visited) + 1)
    order = key_row.argsort(kind="stable")
    of_keys = visits[1 + len(visited) : 1 + 2 * len(visited)]
    of_keys[:, 2] = (block + (larger << 16))[order]
    of_keys[:, 3] = own[order]
    return np.concatenate(by_kind, axis=2), visits


@cache
def _ends(device: torch.device) -> Tensor:
    """(2, 2, 128, 2) int64: the bits of a pattern that shows everything, and of one that shows nothing."""
    return torch.arange(-1, 1, device=device)[:, None, None, None].expand(2, 2, BLOCK, 2)


@cache
def _weights(odd: int, device: torch.device) -> Tensor:
    return torch.full((2 * BLOCK,), odd, device=device).cumprod(0)
