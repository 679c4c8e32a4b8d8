"""Attention masks by name, `model.mask`: which token sees which, other than plain causal attention."""

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels import BlockMask, block_mask

# name -> which tokens each token sees, given its number N; all but prefix are causal. W is model.window.
PATTERNS = {
    "prefix": "the first N tokens see each other both ways, and all tokens see them",
    "bigbird": "the W tokens before, the first N tokens, and one block of 64 x 64 in twenty, drawn once",
    "dilated": "W tokens, every N-th one back",
}
RANDOM_BLOCK = 64  # tokens
NO_WINDOW = 2**31  # times the largest N it fits an int64


def parse_mask(mask: str) -> tuple[str, int]:
    """(name, N) of "name:N". Raises ValueError."""
    found = re.fullmatch(r"(\w+):(-?\d+)", mask)
    if found is None or found[1] not in PATTERNS:
        known = ", ".join(f"{name}:N ({meaning})" for name, meaning in PATTERNS.items())
        raise ValueError(f"model.mask={mask} is unknown; use null or one of {known}")
    if not 1 <= int(found[2]) <= 2**30:
        raise ValueError(f"model.mask={mask}: {found[1]}'s number is from 1 to 2^30; use {found[1]}:1 or more")
    return found[1], int(found[2])


def prefix_of(mask: str, seq_len: int) -> int:
    """How many tokens see each other both ways. ValueError where the mask leaves nothing to learn of seq_len tokens."""
    name, number = parse_mask(mask)
    if name == "prefix" and number > seq_len:
        raise ValueError(
            f"model.mask={mask} leaves nothing to predict of data.seq_len={seq_len} tokens; use fewer, as "
            f"prefix:{max(1, seq_len // 2)}, or a longer data.seq_len"
        )
    if name == "dilated" and number >= seq_len:
        raise ValueError(
            f"model.mask={mask} lets each of data.seq_len={seq_len} tokens see itself alone; use a smaller number, as "
            f"dilated:{max(1, seq_len // 2)}, or a longer data.seq_len"
        )
    return number if name == "prefix" else 0


def mask_mod(mask: str, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The pattern as a mask_mod for `kernels.block_mask`."""
    name, n = parse_mask(mask)
    w = NO_WINDOW if window is None else window

    def prefix(b, h, q, k):
        return (k <= q) & (q - k < w) | (k < n)

    def bigbird(b, h, q, k):
        # a hash in place of a table, so that it is not limited to a size
        mixed = (q // RANDOM_BLOCK * 0x9E3779B1 + k // RANDOM_BLOCK * 0x85EBCA77 + 1) * 0xC2B2AE3D
        return (k <= q) & ((q - k < w) | (k < n) | ((mixed >> 20) % 20 == 0))

    def dilated(b, h, q, k):
        return (k <= q) & ((q - k) % n == 0) & (q - k < w * n)

    return {"prefix": prefix, "bigbird": bigbird, "dilated": dilated}[name]


class Pattern(nn.Module):
    """The block mask of `model.mask`, built once for the longest context; all layers share one.

    On the meta device there is no mask: sizes do not depend on it.
    """

    def __init__(self, mask: str, window: int | None, seq_len: int, device: torch.device | str):
        super().__init__()
        self.pattern, self.seq_len = (mask, window), seq_len  # the mask's function cannot be pickled, only made again
        for name in BlockMask._fields[:3]:  # tensors that move with the model but are not part of a checkpoint
            self.register_buffer(name, None, persistent=False)
        self.make(device)

    def make(self, device: torch.device | str) -> None:
        """Make the mask, unless there is one or the device is meta."""
        if (self.starts is None or self.starts.is_meta) and torch.device(device).type != "meta":
            self.starts, self.visits, self.bits, *_ = self._made(self.seq_len, device)

    def forward(self, num_tokens: int) -> BlockMask | None:
        """The mask of the first `num_tokens` tokens; for fewer than seq_len it is built at each call."""
        if self.starts is None:
            return None
        if num_tokens != self.seq_len:
            return self._made(num_tokens, self.starts.device)
        return BlockMask(self.starts, self.visits, self.bits, num_tokens, num_tokens)

    def _made(self, num_tokens: int, device: torch.device | str) -> BlockMask:
        return block_mask(mask_mod(*self.pattern), None, None, num_tokens, num_tokens, device)
