"""The KV cache: keys and values of earlier tokens, so that a step of generation computes one token per row.

A layer has one line for any cache: `cache.attend(layer, q, k, v, attend)`. Before a call of the model, the host
reserves slots for its tokens with `extend`. The call stores the tokens and then advances the lengths on the device, so
that it can be replayed as a CUDA graph. Keys are stored after RoPE: positions never change.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import flash_attention_with_kvcache, kvcache_workspace, read_kvcache, write_kvcache
from kernels.decode import MAX_QUERIES
from model.attention import AttentionFunction, flash
from model.config import GPTConfig
from model.free_memory import free_bytes
from model.prompts import Prompts, end_to_end, in_rows, sent
from model.sampling import whole

ABSENT = -1  # the length of a row that is not in use
# 8-bit dtypes of keys and values, which have scales, by the names that programs accept
EIGHT_BIT_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


class KVCache:
    """Preallocated keys and values of every layer, contiguous for each row; each row has its own length.

    A row that is not in use has the length -1, and no kernel touches it.

    Args:
        config: the model's.
        num_rows: rows that can be in use at a time.
        max_tokens: the longest row.
        device: of the stored keys and values.
        dtype: of both, the one attention runs in, or int8 or float8_e4m3fn with a scale for each token and head.
        pool: (places, tokens in each) of the storage; None: a place for each row.
    """

    block_table: Tensor | None = None
    last: Tensor | None = None  # indices of the tokens whose logits the model returns; None: of all

    def __init__(
        self,
        config: GPTConfig,
        num_rows: int,
        max_tokens: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        pool: tuple[int, int] | None = None,
    ):
        wide = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        if not wide and dtype not in EIGHT_BIT_DTYPES.values():
            raise ValueError(
                f"a KV cache in {dtype} is not known; use a floating point dtype of 16 bits or more, torch.int8 or "
                "torch.float8_e4m3fn"
            )
        num_rows, max_tokens = whole("num_rows", num_rows, 1), whole("max_tokens", max_tokens, 1)
        places, slots = pool or (num_rows, max_tokens)
        shape = (config.num_layers, places, config.kv_heads, slots, config.head_dim)
        device, needed = torch.device(device), 2 * math.prod(shape) * dtype.itemsize
        if dtype.itemsize == 1:
            needed += 2 * math.prod(shape[:4]) * 4  # scales
        try:
            if device.type == "cpu" and (free := free_bytes(device)) is not None and needed > free:
                raise MemoryError  # zeros take no memory until they are written to, which then kills the process
            # zeros: slots past a row's last key are loaded with it, and 0 times NaN would be NaN
            self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
            self.scales: list[Tensor] = []  # of keys and of values
            if dtype.itemsize == 1:
                self.scales = [torch.ones(shape[:4], device=device, dtype=torch.float32) for _ in range(2)]
        except (MemoryError, torch.OutOfMemoryError) as error:
            paged, or_pages = (f", {places} pages of {slots},", " or pages") if pool else ("", "")
            raise ValueError(
                f"a KV cache of {num_rows} rows of {max_tokens} tokens{paged} needs {needed / 2**30:.2f} GiB and "
                f"{(free_bytes(device) or 0) / 2**30:.2f} GiB are free on {device}; use fewer rows "
                f"(batch_size){or_pages}"
            ) from error
        self.max_tokens = max_tokens
        self.lengths = torch.full((num_rows,), ABSENT, dtype=torch.int32, device=device)  # tokens stored
        self.in_use = torch.zeros_like(self.lengths)  # 1 for each row in use: what a token adds to its length
        self.stored = [0] * num_rows  # the lengths on the host, 0 for ABSENT
        self.reserved = [ABSENT] * num_rows  # lengths including the slots that `extend` has reserved
        self.workspace = kvcache_workspace(num_rows, config.num_heads, device)  # of attention
        self.products_workspace = torch.zeros(config.n_embd, dtype=torch.int32, device=device)

    def allocate(self, *rows: int) -> None:
        """Put unused rows into use, without tokens."""
        for row in rows:
            self._check_row(row)
            if self.reserved[row] != ABSENT:
                raise ValueError(f"row {row} of the KV cache is in use with {self.reserved[row]} tokens; free it first")
        self._set_length(rows, 0)

    def extend(self, rows: list[int], num_tokens: int | list[int]) -> None:
        """Reserve slots for the next call: `num_tokens` more tokens for each row, or a number of its own for each row.

        ValueError where they do not fit; then nothing changes.
        """
        if not isinstance(rows, Sequence):
            raise ValueError(f"rows is {rows}; give a list of row numbers")
        if hasattr(num_tokens, "tolist"):  # an array's or a tensor's
            num_tokens = num_tokens.tolist()
        counts = num_tokens if isinstance(num_tokens, list | tuple) else [num_tokens] * len(rows)
        if len(counts) != len(rows):
            raise ValueError(f"extend got {len(rows)} rows and {len(counts)} counts of tokens; give one count a row")
        ends = list(self.reserved)
        for row, count in zip(rows, counts, strict=True):
            self._check_in_use(row)
            if not hasattr(count, "__index__") or count < 0:
                raise ValueError(
                    f"row {row} of the KV cache cannot be extended by {count} tokens; use 0 or more, a whole number"
                )
            ends[row] += int(count)
            if ends[row] > self.max_tokens:
                raise ValueError(
                    f"row {row} of the KV cache would hold {ends[row]} tokens and a row has room for "
                    f"{self.max_tokens}; free it or make a cache with larger max_tokens"
                )
        self.reserved = ends

    def free(self, *rows: int) -> None:
        """Take rows out of use."""
        for row in rows:
            self._check_in_use(row)
        self._set_length(rows, ABSENT)

    def prompts(self, rows: list[int]) -> Prompts:
        """What replaces the cache in a call of the model that reads some rows' first tokens, packed end to end."""
        return Prompts(self, rows)

    def positions(self, num_rows: int, num_tokens: int) -> Tensor:
        """Positions of new tokens, row after row: (rows * num_tokens,) int64; for one per row the lengths, int32."""
        if num_rows != len(self.reserved):
            raise ValueError(
                f"the call has tokens for {num_rows} rows and the KV cache has {len(self.reserved)}; give {num_tokens} "
                "tokens for each row, any ids for a row that is not in use"
            )
        for row, (length, stored) in enumerate(zip(self.reserved, self.stored, strict=True)):
            if length != ABSENT and length - stored < num_tokens:
                raise ValueError(
                    f"row {row} of the KV cache has room for {length - stored} more tokens and the call adds "
                    f"{num_tokens}; call extend with all rows in use before the model"
                )
        if num_tokens == 1:  # a step of generation: no extra kernel
            return self.lengths
        return (self.lengths.clamp(min=0)[:, None] + torch.arange(num_tokens, device=self.lengths.device)).flatten()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attend: AttentionFunction, **options: Any) -> Tensor:
        """Store the new tokens of one layer, for which `extend` has made room, and attend over each row's tokens.

        Args:
            q: (1, Hq, rows * N, D); k, v: (1, Hkv, rows * N, D): N new tokens of each row, row after row.
            attend: the model's attention. `flash` runs up to 16 tokens a row by `flash_attention_with_kvcache`; others
                and longer inputs run all rows of one length at a time.
            options: window and scale, as `attend` accepts them.

        Returns (1, Hq, rows * N, D); rows that are not in use give 0.
        """
        if q.size(2) % len(self.reserved):
            raise ValueError(
                f"{q.size(2)} tokens are not a multiple of the KV cache's {len(self.reserved)} rows; give the same "
                "number for each"
            )
        q, k, v = (in_rows(x, len(self.reserved)) for x in (q, k, v))  # (rows, H, N, D)
        if attend is flash and q.size(2) <= MAX_QUERIES:
            (keys, k_scale), (values, v_scale) = self._of(layer)
            o = flash_attention_with_kvcache(
                q, keys, values, k, v, cache_seqlens=self.lengths, block_table=self.block_table,
                k_scale=k_scale, v_scale=v_scale, workspace=self.workspace, **options,
            )  # fmt: skip
        else:
            o = torch.zeros_like(q)
            lengths = self.lengths.tolist()
            for length in sorted(set(lengths) - {ABSENT}):  # rows of one length are one call
                rows = torch.tensor([row for row, other in enumerate(lengths) if other == length], device=q.device)
                stored = self._append(layer, rows, length, k[rows], v[rows])
                o[rows] = attend(q[rows], *stored, causal=True, **options)
        return end_to_end(o)

    def advance(self, num_tokens: int) -> None:
        """Add `num_tokens` to the length of each row in use, once every layer has attended. A CUDA graph replays it on
        the device alone: after a replay, call `count_stored`."""
        self.lengths.add_(self.in_use, alpha=num_tokens)
        if not (self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.count_stored(num_tokens)

    def count_stored(self, num_tokens: int) -> None:
        """The host's part of `advance`."""
        for row, length in enumerate(self.reserved):
            if length != ABSENT:
                self.stored[row] += num_tokens

    def _append(self, layer: int, rows: Tensor, length: int, k: Tensor, v: Tensor) -> list[Tensor]:
        """Append k, v (n, Hkv, N, D) to n rows of `length` tokens; returns all their keys and values, in k's dtype."""
        count = k.size(2)
        slots = torch.arange(length + count, device=rows.device).expand(len(rows), -1)  # (n, length + N)
        places = self.places(rows[:, None].expand_as(slots).flatten(), slots.flatten())
        new = self.places(rows.repeat_interleave(count), slots[:, length:].flatten())
        self.store(layer, new, *(x.transpose(0, 1).flatten(1, 2) for x in (k, v)))
        return [x[0].unflatten(1, slots.shape).transpose(0, 1) for x in self.read(layer, places, k.dtype)]

    def places(self, rows: Tensor, slots: Tensor) -> tuple:
        """The index into a layer's keys for N tokens, from their rows (N,) and slots (N,)."""
        return rows, slice(None), slots

    def store(self, layer: int, places: tuple, k: Tensor, v: Tensor) -> None:
        """Write k, v (Hkv, N, D) to the places of N tokens."""
        caches, scales = zip(*self._of(layer), strict=True)
        write_kvcache(caches, scales, places, (k, v))

    def read(self, layer: int, places: tuple, dtype: torch.dtype) -> list[Tensor]:
        """Keys and values (1, Hkv, N, D) of the places of N tokens, in `dtype`."""
        return [read_kvcache(stored, scale, places).to(dtype) for stored, scale in self._of(layer)]

    def _of(self, layer: int) -> list[tuple[Tensor, Tensor | None]]:
        """(keys, their scales) and (values, their scales); scales are None where the cache has 16 or 32 bits."""
        scales = [scale[layer] for scale in self.scales] or [None, None]
        return [(self.keys[layer], scales[0]), (self.values[layer], scales[1])]

    def _check_row(self, row: int) -> None:
        if isinstance(row, bool) or not hasattr(row, "__index__") or not 0 <= row < len(self.reserved):
            raise ValueError(f"the KV cache has rows 0 to {len(self.reserved) - 1}, and none of number {row}")

    def _check_in_use(self, row: int) -> None:
        self._check_row(row)
        if self.reserved[row] == ABSENT:
            raise ValueError(f"row {row} of the KV cache is not in use; allocate it first")

    def _set_length(self, rows: Sequence[int], length: int) -> None:
        for row in rows:
            self.reserved[row] = length
            self.stored[row] = max(length, 0)
        is_all = len(set(rows)) == len(self.reserved)  # then one launch; a list of rows would be copied, and waited for
        for place in [slice(None)] if is_all else rows:
            self.lengths[place].fill_(length)  # an assignment to one place waits for the GPU
            self.in_use[place].fill_(length != ABSENT)


class PagedKVCache(KVCache):
    """A KV cache in pages of one pool: rows take pages as they grow, give them back, and may share full ones.

    config, num_rows, max_tokens, device, dtype: as in `KVCache`.
    num_pages: pages in the pool; None: enough for all rows.
    page: tokens in each page, a power of two from 16.
    """

    def __init__(
        self,
        config: GPTConfig,
        num_rows: int,
        max_tokens: int,
        num_pages: int | None,
        page: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        if not hasattr(page, "__index__") or page < 16 or page & (page - 1):
            raise ValueError(f"page={page} must be a power of two from 16 on")
        if num_pages is None:
            num_pages = num_rows * -(-max_tokens // page)
        else:
            num_pages = whole("num_pages", num_pages, 1)
        super().__init__(config, num_rows, max_tokens, device, dtype, pool=(num_pages, page))
        self.page = page
        self.ref_counts = [0] * num_pages  # rows that use each page
        self.block_table = torch.zeros(num_rows, -(-max_tokens // page), dtype=torch.int32, device=device)
        self.row_pages: list[list[int]] = [[] for _ in range(num_rows)]
        self.free_pages = list(range(num_pages))[::-1]  # the last one is used next

    def extend(self, rows: list[int], num_tokens: int | list[int]) -> None:
        before = self.reserved
        super().extend(rows, num_tokens)
        try:
            self._take({row: -(-self.reserved[row] // self.page) - len(self.row_pages[row]) for row in rows})
        except ValueError:
            self.reserved = before
            raise

    def free(self, *rows: int) -> None:
        """Take rows out of use, and give back the pages that no other row shares."""
        super().free(*rows)
        for row in rows:
            for page in reversed(self.row_pages[row]):
                self.ref_counts[page] -= 1
                if self.ref_counts[page] == 0:
                    self.free_pages.append(page)
            self.row_pages[row] = []

    def fork(self, source: int, target: int) -> None:
        """Make the unused row `target` a copy of `source`: full pages are shared, the growing one is copied.

        ValueError where source has reserved slots that no call has filled: both rows would fill a page that they share.
        """
        self._check_in_use(source)
        if self.reserved[source] != self.stored[source]:
            raise ValueError(
                f"row {source} of the KV cache has {self.stored[source]} tokens and room for "
                f"{self.reserved[source]}; fork it before extend, or after the model has filled it"
            )
        self.allocate(target)
        full, rest = divmod(self.reserved[source], self.page)
        shared = self.row_pages[source][:full]
        self.row_pages[target] = list(shared)
        for page in shared:
            self.ref_counts[page] += 1
        self.block_table[target, :full] = self.block_table[source, :full]
        self._set_length([target], self.reserved[source])
        if rest:
            try:
                self._take({target: 1})
            except ValueError:
                self.free(target)
                raise
            ours, theirs = self.row_pages[target][full], self.row_pages[source][full]
            for stored in (self.keys, self.values, *self.scales):
                stored[:, ours] = stored[:, theirs]

    def places(self, rows: Tensor, slots: Tensor) -> tuple:
        return self.block_table[rows, slots // self.page].long(), slice(None), slots % self.page

    def _take(self, pages_for: dict[int, int]) -> None:
        """Give each row the number of pages that it needs, with one copy to the device for all rows."""
        wanted = sum(pages_for.values())
        if wanted > len(self.free_pages):
            row = next(row for row, count in pages_for.items() if count)
            raise ValueError(
                f"row {row} of the KV cache needs a page, {wanted} with the other rows, and {len(self.free_pages)} of "
                f"{len(self.ref_counts)} are free; free a row or make a cache with more pages"
            )
        if wanted:
            pages, rows, columns, begin = self.free_pages[: -wanted - 1 : -1], [], [], 0
            del self.free_pages[-wanted:]
            for page in pages:
                self.ref_counts[page] = 1
            for row, count in pages_for.items():
                held = self.row_pages[row]
                rows += [row] * count
                columns += range(len(held), len(held) + count)
                held += pages[begin : begin + count]
                begin += count
            rows, columns, pages = sent(torch.tensor([rows, columns, pages], device="cpu"), self.block_table.device)
            self.block_table[rows, columns] = pages.int()


Cache = KVCache | Prompts  # where a call of the model stores keys and values
