"""The dropout mask in plain PyTorch: the same counter-based generator as in the kernels, bit for bit.

Source: Philox4x32, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import torch
from torch import Tensor

ROUNDS = 7  # the fewest that pass BigCrush (the paper's table 2); flash-attention uses as many
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(
    seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor | int, rounds: int = ROUNDS
) -> tuple[Tensor, ...]:
    """Four words of 32 random bits, as int64 in [0, 2^32), for counters that broadcast; seed is () int64."""
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(rounds):
        # products of 32-bit numbers wrap in int64, but their 64 bits are right, and so are both halves
        product_0, product_2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((product_2 >> 32) & _LOW) ^ c1 ^ k0, ((product_0 >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = product_2 & _LOW, product_0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, p: float, heads: Tensor, rows: Tensor, cols: Tensor, document: int = 0) -> Tensor:
    """Which probabilities dropout keeps: bool, True with probability 1 - p; the three int64 tensors broadcast.

    The four words of one draw serve queries i and i + 8 against keys j and j + 8, where i and j have bit 3 clear.

    heads: batch * Hq + head (head alone where documents are packed).
    rows, cols: query and key index, within the document where documents are packed.
    document: the index of its first query in the whole tensor.
    """
    words = philox(seed, cols & ~8, rows & ~8, heads, document)
    first_row, first_col = (rows & 8) == 0, (cols & 8) == 0
    upper, lower = torch.where(first_col, *words[:2]), torch.where(first_col, *words[2:])
    uniform = (torch.where(first_row, upper, lower) >> 8).to(torch.float32) * 2.0**-24
    return uniform >= torch.tensor(p, dtype=torch.float32, device=uniform.device)
