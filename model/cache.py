"""The keys and values of the tokens already seen, so that a step of generation computes one token a row.

A layer has one line for any cache: `cache.attend(layer, q, k, v, attend)`. Before a call of the model `extend` makes
room for the tokens it will bring, on the host; the call stores them and then moves the lengths, on the device, so that
the same call can be a CUDA graph. Keys are stored after RoPE: positions never change.
"""

from typing import Any

import torch
from torch import Tensor

from kernels import flash_attention_with_kvcache, kvcache_workspace, place_documents, read_kvcache, write_kvcache
from kernels.decode import MAX_QUERIES
from model.attention import AttentionFunction, Documents, flash
from model.config import GPTConfig

ABSENT = -1  # the length of a row that is not in use


class KVCache:
    """Preallocated keys and values of every layer, for rows of lengths of their own; each row has its own place.

    A row that is not in use has the length -1, and no kernel touches it.

    Args:
        config: the model's.
        num_rows: rows that can be in use at a time.
        max_tokens: the longest row.
        device: of the stored keys and values.
        dtype: of them, the one attention runs in, or int8 or float8_e4m3fn, which have a scale for each token and head.
        pool: (places, tokens in each) of the storage; None: a place for each row.
    """

    block_table: Tensor | None = None
    last: Tensor | None = None  # of which tokens the model gives logits; None: of all

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
        wide = dtype.is_floating_point and dtype.itemsize > 1
        if not wide and dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ValueError(
                f"a KV cache in {dtype} is not known; use a floating point dtype of 16 bits or more, torch.int8 or "
                "torch.float8_e4m3fn"
            )
        if num_rows < 1 or max_tokens < 1:
            raise ValueError(f"a KV cache of {num_rows} rows of {max_tokens} tokens holds nothing; use at least 1")
        places, slots = pool or (num_rows, max_tokens)
        shape = (config.num_layers, places, config.kv_heads, slots, config.head_dim)
        # zeros: what is behind a row's last key is loaded with it, and 0 times NaN is NaN
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.scales: list[Tensor] = []  # of keys and of values
        if dtype.itemsize == 1:
            self.scales = [torch.ones(shape[:4], device=device) for _ in range(2)]
        self.max_tokens = max_tokens
        self.lengths = torch.full((num_rows,), ABSENT, dtype=torch.int32, device=device)  # tokens stored
        self.length_of = [ABSENT] * num_rows  # the same on the host, with those for which there is room
        self.stored_of = [0] * num_rows  # of these, how many a call has stored
        self.workspace: Tensor | None = None  # of attention, once it is asked
        self.products_workspace = torch.zeros(config.n_embd, dtype=torch.int32, device=device)

    def allocate(self, row: int) -> None:
        """Put a row that is not in use into use, without tokens."""
        self._check_row(row)
        if self.length_of[row] != ABSENT:
            raise ValueError(f"row {row} of the KV cache is in use with {self.length_of[row]} tokens; free it first")
        self._set_length(row, 0)

    def extend(self, rows: list[int], num_tokens: int | list[int]) -> None:
        """Make room for `num_tokens` more tokens of each row, or of each its own, which the next call stores.

        ValueError where they do not fit, and then nothing changes.
        """
        counts = num_tokens if isinstance(num_tokens, list | tuple) else [num_tokens] * len(rows)
        if len(counts) != len(rows):
            raise ValueError(f"the KV cache is to extend {len(rows)} rows by {len(counts)} numbers; give one for each")
        ends = list(self.length_of)
        for row, count in zip(rows, counts, strict=True):
            self._check_in_use(row)
            if count < 0 or count != int(count):
                raise ValueError(
                    f"row {row} of the KV cache cannot be extended by {count} tokens; use 0 or more, a whole number"
                )
            ends[row] += int(count)
            if ends[row] > self.max_tokens:
                raise ValueError(
                    f"row {row} of the KV cache would hold {ends[row]} tokens and a row has room for "
                    f"{self.max_tokens}; free it or make a cache with larger max_tokens"
                )
        self.length_of = ends

    def free(self, row: int) -> None:
        """Take a row out of use."""
        self._check_in_use(row)
        self._set_length(row, ABSENT)

    def prompts(self, rows: list[int]) -> "Prompts":
        """What a call of the model takes for its cache to read the first tokens of some rows, packed end to end."""
        return Prompts(self, rows)

    def positions(self, num_tokens: int) -> Tensor:
        """Of `num_tokens` new tokens a row, row after row: (rows * num_tokens,) int64."""
        for row, (length, stored) in enumerate(zip(self.length_of, self.stored_of, strict=True)):
            if length != ABSENT and length - stored < num_tokens:
                raise ValueError(
                    f"row {row} of the KV cache has room for {length - stored} more tokens, not {num_tokens}; before "
                    "the model, which stores tokens of all rows in use, call extend with it"
                )
        first = self.lengths.clamp(min=0)
        if num_tokens == 1:  # a step: no kernel more than it needs
            return first.long()
        return (first[:, None] + torch.arange(num_tokens, device=first.device)).flatten()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attend: AttentionFunction, **options: Any) -> Tensor:
        """Store the new tokens of one layer, for which `extend` has made room, and attend over each row's tokens.

        Args:
            q: (1, Hq, rows * N, D); k, v: (1, Hkv, rows * N, D): N new tokens of each row, row after row.
            attend: the model's attention; `flash` reads up to 16 tokens a row by `flash_attention_with_kvcache`, others
                read all rows of one length at a time.
            options: window and scale, as `attend` takes them.

        Returns (1, Hq, rows * N, D); rows that are not in use give 0.
        """
        q, k, v = (x[0].unflatten(1, (len(self.length_of), -1)).transpose(0, 1) for x in (q, k, v))  # (rows, H, N, D)
        if attend is flash and q.size(2) <= MAX_QUERIES:
            if self.workspace is None:
                self.workspace = kvcache_workspace(q.size(0), q.size(1), q.device)
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
        return o.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` as stored in each row in use, once every layer has attended. Of a CUDA graph this is a
        part, but for the host's count: whoever replays it calls `count_stored`."""
        self.lengths.add_(self.lengths != ABSENT, alpha=num_tokens)
        if not (self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.count_stored(num_tokens)

    def count_stored(self, num_tokens: int) -> None:
        """`advance` on the host alone."""
        for row, length in enumerate(self.length_of):
            if length != ABSENT:
                self.stored_of[row] += num_tokens

    def _append(self, layer: int, rows: Tensor, length: int, k: Tensor, v: Tensor) -> list[Tensor]:
        """Store k, v (n, Hkv, N, D) behind n rows of `length` tokens; all keys and values then, in k's dtype."""
        count = k.size(2)
        slots = torch.arange(length + count, device=rows.device).expand(len(rows), -1)  # (n, length + N)
        places = self.places(rows[:, None].expand_as(slots).flatten(), slots.flatten())
        new = self.places(rows.repeat_interleave(count), slots[:, length:].flatten())
        self.store(layer, new, *(x.transpose(0, 1).flatten(1, 2) for x in (k, v)))
        return [x[0].unflatten(1, slots.shape).transpose(0, 1) for x in self.read(layer, places, k.dtype)]

    def places(self, rows: Tensor, slots: Tensor) -> tuple:
        """The index of tokens (N,) in the keys of a layer."""
        return rows, slice(None), slots

    def store(self, layer: int, places: tuple, k: Tensor, v: Tensor) -> None:
        """Write k, v (Hkv, N, D) to the places of N tokens."""
        for new, (stored, scale) in zip((k, v), self._of(layer), strict=True):
            write_kvcache(stored, scale, places, new)

    def read(self, layer: int, places: tuple, dtype: torch.dtype) -> list[Tensor]:
        """Keys and values (1, Hkv, N, D) of the places of N tokens, in `dtype`."""
        return [read_kvcache(stored, scale, places).to(dtype) for stored, scale in self._of(layer)]

    def _of(self, layer: int) -> list[tuple[Tensor, Tensor | None]]:
        """Keys and their scales, values and theirs; a scale is None where the cache has 16 or 32 bits."""
        scales = [scale[layer] for scale in self.scales] or [None, None]
        return [(self.keys[layer], scales[0]), (self.values[layer], scales[1])]

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self.length_of):
            raise ValueError(f"the KV cache has rows 0 to {len(self.length_of) - 1}, and none of number {row}")

    def _check_in_use(self, row: int) -> None:
        self._check_row(row)
        if self.length_of[row] == ABSENT:
            raise ValueError(f"row {row} of the KV cache is not in use; allocate it first")

    def _set_length(self, row: int, length: int) -> None:
        self.length_of[row] = length
        self.stored_of[row] = max(length, 0)
        self.lengths[row] = length


class PagedKVCache(KVCache):
    """The same in pages of one pool, which rows take as they grow and give back; rows may share full pages.

    Args:
        config, num_rows, max_tokens, device, dtype: as of `KVCache`.
        num_pages: of the pool; None: enough for all rows.
        page: tokens in each, a power of two from 16.

    Raises:
        ValueError: another page.
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
        if page < 16 or page & (page - 1):
            raise ValueError(f"page={page} must be a power of two from 16 on")
        num_pages = num_rows * -(-max_tokens // page) if num_pages is None else num_pages
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be at least 1")
        super().__init__(config, num_rows, max_tokens, device, dtype, pool=(num_pages, page))
        self.page = page
        self.users_of = [0] * num_pages
        self.block_table = torch.zeros(num_rows, -(-max_tokens // page), dtype=torch.int32, device=device)
        self.pages_of: list[list[int]] = [[] for _ in range(num_rows)]
        self.free_pages = list(range(num_pages))[::-1]  # the last is the next

    def extend(self, rows: list[int], num_tokens: int | list[int]) -> None:
        before = self.length_of
        super().extend(rows, num_tokens)
        try:
            self._take({row: -(-self.length_of[row] // self.page) - len(self.pages_of[row]) for row in rows})
        except ValueError:
            self.length_of = before
            raise

    def free(self, row: int) -> None:
        """Take a row out of use, and give back the pages that no other row shares."""
        super().free(row)
        for page in reversed(self.pages_of[row]):
            self.users_of[page] -= 1
            if self.users_of[page] == 0:
                self.free_pages.append(page)
        self.pages_of[row] = []

    def fork(self, source: int, target: int) -> None:
        """Make `target`, not in use, a copy of `source`: full pages are shared, the growing one is copied.

        ValueError where source has room that no call has filled: both would fill the page that they share.
        """
        self._check_in_use(source)
        if self.length_of[source] != self.stored_of[source]:
            raise ValueError(
                f"row {source} of the KV cache has {self.stored_of[source]} tokens and room for "
                f"{self.length_of[source]}; fork it before extend, or after the model has filled it"
            )
        self.allocate(target)
        full, rest = divmod(self.length_of[source], self.page)
        shared = self.pages_of[source][:full]
        self.pages_of[target] = list(shared)
        for page in shared:
            self.users_of[page] += 1
        self.block_table[target, :full] = self.block_table[source, :full]
        self._set_length(target, self.length_of[source])
        if rest:
            try:
                self._take({target: 1})
            except ValueError:
                self.free(target)
                raise
            ours, theirs = self.pages_of[target][full], self.pages_of[source][full]
            for stored in (self.keys, self.values, *self.scales):
                stored[:, ours] = stored[:, theirs]

    def places(self, rows: Tensor, slots: Tensor) -> tuple:
        return self.block_table[rows, slots // self.page].long(), slice(None), slots % self.page

    def _take(self, pages_for: dict[int, int]) -> None:
        """Give rows so many pages more; those of all rows go to the device in one copy."""
        wanted = sum(pages_for.values())
        if wanted > len(self.free_pages):
            row = next(row for row, count in pages_for.items() if count)
            raise ValueError(
                f"row {row} of the KV cache needs a page, {wanted} with the other rows, and {len(self.free_pages)} of "
                f"{len(self.users_of)} are free; free a row or make a cache with more pages"
            )
        rows, columns, pages = [], [], []
        for row, count in pages_for.items():
            for _ in range(count):
                page = self.free_pages.pop()
                self.users_of[page] = 1
                rows.append(row)
                columns.append(len(self.pages_of[row]))
                pages.append(page)
                self.pages_of[row].append(page)
        if pages:
            rows, columns, pages = torch.tensor([rows, columns, pages], device=self.block_table.device)
            self.block_table[rows, columns] = pages.int()


class Prompts:
    """The first tokens of some rows of a cache, end to end without padding, as a call of the model reads them.

    Args:
        cache: theirs, in which `extend` has made room for them.
        rows: which rows, in the order of their tokens; they hold no tokens yet.
    """

    def __init__(self, cache: KVCache, rows: list[int]):
        device = cache.lengths.device
        for row in rows:
            cache._check_in_use(row)
            if cache.stored_of[row] or not cache.length_of[row]:
                raise ValueError(
                    f"row {row} of the KV cache has {cache.stored_of[row]} tokens and room for {cache.length_of[row]}; "
                    "a prompt is read into a row with room and without tokens: allocate and extend it first"
                )
        if not rows or len(set(rows)) < len(rows):
            raise ValueError(f"rows is {rows}; name those whose prompts are to be read, each once")
        counts = torch.tensor([cache.length_of[row] for row in rows], device="cpu")
        self.cache, self.counts = cache, counts.tolist()
        self.products_workspace = cache.products_workspace
        self._positions = torch.cat([torch.arange(count, device="cpu") for count in self.counts]).to(device)
        self._row_numbers, self.rows = list(rows), torch.tensor(rows, device=device)
        self.lengths = counts.int().to(device)
        ends = counts.cumsum(0)
        self.last = (ends - 1).to(device)  # (rows,) int64: each row's last token among all
        longest = max(self.counts)
        cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).int()
        self.documents = Documents(place_documents(cu_seqlens, longest, device), longest)
        self.places = cache.places(self.rows.repeat_interleave(counts.to(device)), self._positions)

    def positions(self, num_tokens: int) -> Tensor:
        """Of all tokens, (num_tokens,) int64. ValueError where their rows are not any more as they were."""
        for row, count in zip(self._row_numbers, self.counts, strict=True):
            if self.cache.stored_of[row] or self.cache.length_of[row] < count:
                raise ValueError(
                    f"row {row} of the KV cache has {self.cache.stored_of[row]} tokens and room for "
                    f"{self.cache.length_of[row]}, and these prompts, of {count} there, were for a row without tokens; "
                    "read them once, before the row is freed, and make others for others"
                )
        if num_tokens != len(self._positions):
            raise ValueError(f"the prompts of the KV cache have {len(self._positions)} tokens, not {num_tokens}")
        return self._positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attend: AttentionFunction, **options: Any) -> Tensor:
        """Store k, v (1, Hkv, tokens, D), and attend within each row: (1, Hq, tokens, D); `options` as a cache's."""
        self.cache.store(layer, self.places, k[0], v[0])
        if len(set(self.counts)) == 1:  # a batch: dense kernels are faster
            q, k, v = (x[0].unflatten(1, (len(self.counts), -1)).transpose(0, 1) for x in (q, k, v))
            o = attend(q, k, v, causal=True, **options)  # (rows, Hq, N, D)
            return o.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]
        if attend is flash:
            return attend(q, k, v, causal=True, **options, documents=self.documents)
        each = zip(*(x.split(self.counts, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([attend(*row, causal=True, **options) for row in each], dim=2)

    def advance(self, num_tokens: int) -> None:
        """Count the tokens as stored."""
        self.cache.lengths[self.rows] = self.lengths
        for row, count in zip(self._row_numbers, self.counts, strict=True):
            self.cache.stored_of[row] = count
