"""Prompts of any lengths in one call of the model, end to end without padding, on their way into a KV cache."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels import place_documents
from model.attention import AttentionFunction, Documents, flash

if TYPE_CHECKING:
    from model.cache import KVCache


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device` without waiting for the GPU's work: CUDA has read x when the call returns."""
    return x.to(device, non_blocking=device.type == "cuda")


def in_rows(x: Tensor, rows: int) -> Tensor:
    """x (1, H, rows * N, D), whose rows lie end to end, as (rows, H, N, D)."""
    return x.view(x.size(1), rows, -1, x.size(3)).transpose(0, 1)


def end_to_end(o: Tensor) -> Tensor:
    """The reverse of `in_rows`; no copy of attention's results, which are stored tokens first."""
    return o.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


class Prompts:
    """A cache for one call of the model: reads the prompts of some rows, end to end without padding.

    cache: the rows' cache, in which `extend` has reserved slots for the prompts.
    rows: which rows, in the order of their tokens; they hold no tokens yet.
    """

    def __init__(self, cache: "KVCache", rows: list[int]):
        device = cache.lengths.device
        if not isinstance(rows, Sequence) or not rows or len(set(rows)) < len(rows):
            raise ValueError(f"rows is {rows}; name those whose prompts are to be read in a list, each once")
        for row in rows:
            cache._check_in_use(row)
            if cache.stored[row] or not cache.reserved[row]:
                raise ValueError(
                    f"row {row} of the KV cache has {cache.stored[row]} tokens and room for {cache.reserved[row]}; "
                    "a prompt is read into a row with room and without tokens: allocate and extend it first"
                )
        self.cache, self.products_workspace, self._row_numbers = cache, cache.products_workspace, list(rows)
        self.counts = [cache.reserved[row] for row in rows]
        counts, row_numbers = torch.tensor([self.counts, rows], device="cpu")
        ends, longest = counts.cumsum(0), max(self.counts)
        of_rows = sent(torch.stack((row_numbers, counts, ends - 1, ends - counts)), device)
        self.rows, self.lengths, self.last, begins = of_rows  # last: each row's last token among all
        num_tokens = sum(self.counts)  # passed, so that the GPU is not waited for
        of_tokens = torch.stack((self.rows, begins)).repeat_interleave(self.lengths, 1, output_size=num_tokens)
        self._row_of_token, self._positions = of_tokens[0], torch.arange(num_tokens, device=device) - of_tokens[1]
        self.documents = None  # for prompts of one length: they are a batch, for which dense kernels are faster
        if longest > min(self.counts):
            cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).int()
            self.documents = Documents(place_documents(cu_seqlens, longest, device), longest)

    def positions(self, num_rows: int, num_tokens: int) -> Tensor:
        """Positions of all tokens, in one row: (num_tokens,) int64. ValueError where the cache's rows have changed."""
        for row, count in zip(self._row_numbers, self.counts, strict=True):
            if self.cache.stored[row] or self.cache.reserved[row] < count:
                raise ValueError(
                    f"row {row} of the KV cache has {self.cache.stored[row]} tokens and room for "
                    f"{self.cache.reserved[row]}, and its prompt of {count} needs a row without tokens; read prompts "
                    "once, before their rows are freed, and call cache.prompts(rows) for new ones"
                )
        if (num_rows, num_tokens) != (1, len(self._positions)):
            raise ValueError(
                f"the prompts of the KV cache have {len(self._positions)} tokens, end to end in one row, not "
                f"{num_tokens} in {num_rows}"
            )
        # now: a row that was freed and has been given room again has other pages
        self.places = self.cache.places(self._row_of_token, self._positions)
        return self._positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attend: AttentionFunction, **options: Any) -> Tensor:
        """Store k, v (1, Hkv, tokens, D), and attend within each row: (1, Hq, tokens, D); `options` as in a cache."""
        self.cache.store(layer, self.places, k[0], v[0])
        if self.documents is None:
            q, k, v = (in_rows(x, len(self.counts)) for x in (q, k, v))
            return end_to_end(attend(q, k, v, causal=True, **options))
        if attend is flash:
            return attend(q, k, v, causal=True, **options, documents=self.documents)
        each = zip(*(x.split(self.counts, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([attend(*row, causal=True, **options) for row in each], dim=2)

    def advance(self, num_tokens: int) -> None:
        """Count the tokens as stored."""
        self.cache.lengths[self.rows] = self.lengths.int()
        for row, count in zip(self._row_numbers, self.counts, strict=True):
            self.cache.stored[row] = count
