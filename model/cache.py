"""The keys and values of the tokens already seen, so that a step of generation computes one token.

A layer has one line for either cache: `cache.attend(layer, q, k, v, attend)`. The model then calls `advance` once, so
that no layer has to know that it is the last one. Keys are stored after RoPE: positions never change.
"""

import torch
from torch import Tensor

from kernels import flash_attention_with_kvcache, kvcache_workspace
from model.attention import ALL, AttentionFunction, flash

MAX_QUERIES = 16  # of a row, from which on attention over a cache is `flash_attention`'s
ABSENT = -1  # the length of a row that is not in use


class KVCache:
    """Preallocated keys and values of every layer, owned by the caller.

    All rows are of one length, `length` on the host and `lengths` (B,) int32 on the device.

    Args:
        num_layers, batch_size, num_kv_heads, head_dim: sizes of the model and of the batch.
        max_tokens: room for so many tokens a sequence.
        device, dtype: of the stored keys and values (the dtype attention runs in).
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        num_kv_heads: int,
        max_tokens: int,
        head_dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        shape = (num_layers, batch_size, num_kv_heads, max_tokens, head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)  # (L, B, Hkv, max_tokens, D)
        self.values = torch.empty(shape, device=device, dtype=dtype)  # (L, B, Hkv, max_tokens, D)
        self.length = 0  # tokens stored in every layer
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.max_tokens = max_tokens
        self.workspace: Tensor | None = None  # of the kernels, once they are asked

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, attend: AttentionFunction, window: tuple[int, int] = ALL
    ) -> Tensor:
        """Store the new tokens of one layer, and attend over all tokens so far, new ones included.

        Args:
            q: (B, Hq, N, D); k, v: (B, Hkv, N, D), the new tokens.
            attend: the model's attention; `flash` reads up to 16 tokens by `flash_attention_with_kvcache`.

        Returns (B, Hq, N, D). Raises as `append`.
        """
        if attend is not flash or q.size(2) > MAX_QUERIES:
            k, v = self.append(layer, k, v)
            return attend(q, k, v, causal=True, window=window)
        self._check(k)
        if self.workspace is None:
            self.workspace = kvcache_workspace(q.size(0), q.size(1), q.device)
        return flash_attention_with_kvcache(
            q, self.keys[layer], self.values[layer], k, v, cache_seqlens=self.lengths, window=window,
            workspace=self.workspace,
        )  # fmt: skip

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens of one layer behind the old ones.

        Args:
            layer: index of the layer.
            k, v: (B, Hkv, N, D), the new tokens.

        Returns:
            Keys and values of all tokens so far, new ones included: views (B, Hkv, length + N, D).

        Raises:
            ValueError: batch or dtype differ from the cache's, or the tokens do not fit.
        """
        end = self._check(k)
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def _check(self, k: Tensor) -> int:
        """The length with the new tokens."""
        end = self.length + k.size(2)
        if end > self.max_tokens:
            raise ValueError(
                f"the KV cache has room for {self.max_tokens} tokens and would hold {end}; "
                "call reset() or make a larger one"
            )
        if k.dtype != self.keys.dtype or k.size(0) != self.keys.size(1):
            raise ValueError(
                f"the KV cache holds {self.keys.size(1)} sequences in {self.keys.dtype} and was given "
                f"{k.size(0)} in {k.dtype}; make it under the same autocast and for the same batch"
            )
        return end

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` as stored, once every layer has appended them."""
        self.length += num_tokens
        self.lengths += num_tokens

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.length = 0
        self.lengths.zero_()


class PagedKVCache:
    """Keys and values of rows of any lengths in pages of one pool, which rows take as they grow and give back.

    Rows may share full pages (`fork`). What is allocated is known on the host. Lengths and the table of pages are also
    on the device, where attention reads them. A row that is not in use has the length -1, and no kernel touches it.

    Args:
        num_layers, num_kv_heads, head_dim: sizes of the model.
        num_rows: rows that can be in use at a time.
        num_pages: of the pool; page: tokens in each, a power of two from 16.
        max_tokens: the longest row.
        device, dtype: of the stored keys and values. int8 and float8_e4m3fn have a scale for each token and head.
    """

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        num_kv_heads: int,
        num_pages: int,
        page: int,
        max_tokens: int,
        head_dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        shape = (num_layers, num_pages, num_kv_heads, page, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.scales: list[Tensor] = []  # of keys and of values (L, P, Hkv, page)
        if dtype.itemsize == 1:
            self.scales = [torch.ones(shape[:4], device=device) for _ in range(2)]
        self.page, self.max_tokens = page, max_tokens
        self.block_table = torch.zeros(num_rows, -(-max_tokens // page), dtype=torch.int32, device=device)
        self.lengths = torch.full((num_rows,), ABSENT, dtype=torch.int32, device=device)
        self.length_of = [ABSENT] * num_rows  # the same on the host
        self.pages_of: list[list[int]] = [[] for _ in range(num_rows)]
        self.free_pages = list(range(num_pages))[::-1]  # the last is the next
        self.users_of = [0] * num_pages
        self.workspace: Tensor | None = None  # of the kernels, once they are asked

    def allocate(self, row: int) -> None:
        """Put a row that is not in use into use, without tokens."""
        if self.length_of[row] != ABSENT:
            raise ValueError(f"row {row} of the KV cache is in use with {self.length_of[row]} tokens; free it first")
        self._set_length(row, 0)

    def reserve(self, row: int, num_tokens: int) -> None:
        """Give a row pages for `num_tokens` more tokens. Where they do not fit nothing changes: ValueError."""
        self._check_in_use(row)
        end = self.length_of[row] + num_tokens
        if end > self.max_tokens:
            raise ValueError(
                f"row {row} of the KV cache would hold {end} tokens and a row has room for {self.max_tokens}; "
                "free it or make a cache with larger max_tokens"
            )
        self._take(row, -(-end // self.page) - len(self.pages_of[row]))

    def free(self, row: int) -> None:
        """Take a row out of use, and give back the pages that no other row shares."""
        self._check_in_use(row)
        for page in reversed(self.pages_of[row]):
            self.users_of[page] -= 1
            if self.users_of[page] == 0:
                self.free_pages.append(page)
        self.pages_of[row] = []
        self._set_length(row, ABSENT)

    def fork(self, source: int, target: int) -> None:
        """Make `target`, not in use, a copy of `source`: full pages are shared, the growing one is copied."""
        self._check_in_use(source)
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
                self._take(target, 1)
            except ValueError:
                self.free(target)
                raise
            ours, theirs = self.pages_of[target][full], self.pages_of[source][full]
            for stored in (self.keys, self.values, *self.scales):
                stored[:, ours] = stored[:, theirs]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, attend: AttentionFunction, window: tuple[int, int] = ALL
    ) -> Tensor:
        """Store the new tokens of one layer, for which `reserve` has made room, and attend over each row's tokens.

        q (rows, Hq, N, D), k, v (rows, Hkv, N, D), N from 1 to 16; rows not in use give 0. Every `attend` is
        `flash_attention_with_kvcache` here, which on a CPU is plain PyTorch. Raises as that does.
        """
        if self.workspace is None:
            self.workspace = kvcache_workspace(q.size(0), q.size(1), q.device)
        named = dict(zip(("k_scale", "v_scale"), (x[layer] for x in self.scales), strict=False))
        return flash_attention_with_kvcache(
            q, self.keys[layer], self.values[layer], k, v, cache_seqlens=self.lengths, block_table=self.block_table,
            window=window, workspace=self.workspace, **named,
        )  # fmt: skip

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` as stored in each row in use, once every layer has attended."""
        self.length_of = [x if x == ABSENT else x + num_tokens for x in self.length_of]
        self.lengths += num_tokens * (self.lengths != ABSENT)

    def _check_in_use(self, row: int) -> None:
        if self.length_of[row] == ABSENT:
            raise ValueError(f"row {row} of the KV cache is not in use; allocate it first")

    def _set_length(self, row: int, length: int) -> None:
        self.length_of[row] = length
        self.lengths[row] = length

    def _take(self, row: int, num_pages: int) -> None:
        if num_pages <= 0:
            return
        if num_pages > len(self.free_pages):
            raise ValueError(
                f"row {row} of the KV cache needs {num_pages} pages and {len(self.free_pages)} of "
                f"{len(self.users_of)} are free; free a row or make a cache with more pages"
            )
        taken = [self.free_pages.pop() for _ in range(num_pages)]
        for page in taken:
            self.users_of[page] = 1
        first = len(self.pages_of[row])
        self.pages_of[row] += taken
        self.block_table[row, first : first + num_pages] = torch.tensor(taken, dtype=torch.int32)
