"""The keys and values of the tokens already seen, so that a step of generation computes one token."""

import torch
from torch import Tensor


class KVCache:
    """Preallocated keys and values of every layer, owned by the caller.

    Each layer appends its own keys and values; the model calls `advance` once at the end of its forward, so
    no layer has to know that it is the last one. Keys are stored after RoPE: positions never change.

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
        self.max_tokens = max_tokens

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
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` as stored, once every layer has appended them."""
        self.length += num_tokens

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.length = 0
