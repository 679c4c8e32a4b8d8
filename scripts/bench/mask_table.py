"""Common masks as functions of (batch, head, query, key). The tests compare them with naive attention, and
`scripts.bench.masks` times them.

Sizes are those of 16,384 tokens, and shrink with the number of tokens, so that a small case has as many blocks of each
kind. All but prefix, images and bigbird are causal.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TOKENS = 16_384


def masks(num_tokens: int, device: torch.device | str = "cpu") -> dict[str, MaskMod]:
    """Name -> mask_mod, for as many queries as keys."""

    def size(tokens: int) -> int:
        return max(2, tokens * num_tokens // TOKENS)

    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(num_tokens - 1, generator=generator)[:32] + 1  # 33 documents of any length
    document = torch.zeros(num_tokens, dtype=torch.int64)
    document[cuts] = 1
    document = document.cumsum(0).to(device)
    token = torch.arange(num_tokens)
    image = torch.where(token % size(4096) < size(1024), token // size(4096), -1).to(device)
    blocks = -(-num_tokens // size(128))
    random = (torch.rand(blocks, blocks, generator=generator) < 0.05).to(device)
    window = size(1024)

    def bigbird(b, h, q, k):
        near = (q - k).abs() < size(384)
        return near | (q < size(256)) | (k < size(256)) | random[q // size(128), k // size(128)]

    return {
        "causal": lambda b, h, q, k: k <= q,
        "documents": lambda b, h, q, k: (k <= q) & (document[q] == document[k]),
        "documents, window": lambda b, h, q, k: (k <= q) & (q - k < window) & (document[q] == document[k]),
        "window": lambda b, h, q, k: (k <= q) & (q - k < window),
        "window, sinks": lambda b, h, q, k: (k <= q) & ((q - k < window) | (k < 4)),
        "chunks": lambda b, h, q, k: (k <= q) & (q // size(2048) == k // size(2048)),
        "prefix": lambda b, h, q, k: (k <= q) | (k < size(2048)),
        "images": lambda b, h, q, k: (k <= q) | ((image[q] == image[k]) & (image[k] >= 0)),
        "bigbird": bigbird,
        "dilated": lambda b, h, q, k: (k <= q) & (q - k < 2 * window) & ((q - k) % 2 == 0),
        "strided": lambda b, h, q, k: (k <= q) & ((q - k < size(128)) | ((q - k) % size(128) == 0)),
    }
