"""A stand-in for MosaicBERT's code (a part of DNABERT-2), on which `model.mosaicbert` is tested and timed.

That code is not ours to keep here. This one is written anew; its modules, attributes and forward signatures have the
same names. It has embeddings without positions, then layers over unpadded tokens whose attention pads again and adds a
dense bias (B, H, N, N), ALiBi and padding, to the scores.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def dnabert2_config(**changed) -> SimpleNamespace:
    """The sizes of DNABERT-2, 117M."""
    sizes = {
        "vocab_size": 4096, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "attention_probs_dropout_prob": 0.0, "alibi_starting_size": 512,
    }  # fmt: skip
    return SimpleNamespace(**sizes | changed)


def slopes_of(heads: int) -> list[float]:
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (head + 1) / heads) for head in range(heads)]
    fewer = 2 ** math.floor(math.log2(heads))
    return slopes_of(fewer) + slopes_of(2 * fewer)[::2][: heads - fewer]


class BertUnpadSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        max_seqlen_in_batch: int,
        indices: Tensor,
        attn_mask: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """hidden_states (tokens, C) of all rows, bias that broadcasts to (B, H, N, N) -> (tokens, C)."""
        rows = len(cu_seqlens) - 1
        qkv = self.Wqkv(hidden_states)
        padded = qkv.new_zeros(rows * max_seqlen_in_batch, qkv.shape[1]).index_copy(0, indices, qkv)
        padded = padded.view(rows, max_seqlen_in_batch, 3, self.num_attention_heads, self.attention_head_size)
        q, k, v = padded.permute(2, 0, 3, 1, 4)
        o = self.attend(q, k, v, bias.to(q.dtype))
        return o.transpose(1, 2).reshape(rows * max_seqlen_in_batch, -1)[indices]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.attention_head_size) + bias
        return self.dropout(scores.softmax(-1)) @ v


class BertUnpadAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self = BertUnpadSelfAttention(config)
        self.output = nn.ModuleDict(
            {"dense": nn.Linear(config.hidden_size, config.hidden_size), "LayerNorm": nn.LayerNorm(config.hidden_size)}
        )

    def forward(self, input_tensor, cu_seqlens, max_s, subset_idx=None, indices=None, attn_mask=None, bias=None):
        o = self.self(input_tensor, cu_seqlens, max_s, indices, attn_mask, bias)
        return self.output["LayerNorm"](self.output["dense"](o) + input_tensor)


class BertLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = BertUnpadAttention(config)
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size)

    def forward(self, hidden_states, cu_seqlens, seqlen, subset_idx=None, indices=None, attn_mask=None, bias=None):
        x = self.attention(hidden_states, cu_seqlens, seqlen, subset_idx, indices, attn_mask, bias)
        gate, value = self.gated_layers(x).chunk(2, dim=-1)
        return self.layernorm(self.wo(F.gelu(gate) * value) + x)


class BertEncoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.num_attention_heads = config.num_attention_heads
        # a plain attribute: on the current default device, in no state_dict, and not moved with the model
        self._current_alibi_size = int(config.alibi_starting_size)
        self.alibi = torch.zeros((1, self.num_attention_heads, self._current_alibi_size, self._current_alibi_size))
        self.rebuild_alibi_tensor(size=config.alibi_starting_size)

    def rebuild_alibi_tensor(self, size: int, device: torch.device | str | None = None) -> None:
        places = torch.arange(size, device=device)
        distance = (places[None, :] - places[:, None]).abs().expand(self.num_attention_heads, -1, -1)
        slopes = torch.Tensor(slopes_of(self.num_attention_heads)).to(device)
        self.alibi = (slopes[:, None, None] * -distance)[None]
        self._current_alibi_size = size

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, output_all_encoded_layers: bool = True, subset_mask=None
    ) -> list[Tensor]:
        rows, seqlen, width = hidden_states.shape
        masked = (1.0 - attention_mask[:, None, None].to(hidden_states.dtype)) * -10000.0
        indices = attention_mask.flatten().nonzero().flatten()
        lengths = attention_mask.sum(1, dtype=torch.int32)
        cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        if self._current_alibi_size < seqlen:
            self.rebuild_alibi_tensor(size=seqlen, device=hidden_states.device)
        elif self.alibi.device != hidden_states.device:
            self.alibi = self.alibi.to(hidden_states.device)
        bias = masked[:, :, :seqlen, :seqlen] + self.alibi[:, :, :seqlen, :seqlen]
        x = hidden_states.flatten(0, 1)[indices]
        for layer_module in self.layer:
            x = layer_module(x, cu_seqlens, seqlen, None, indices, attn_mask=attention_mask, bias=bias)
        return [x.new_zeros(rows * seqlen, width).index_copy(0, indices, x).view(rows, seqlen, width)]


class BertModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encoder = BertEncoder(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, N) tokens and 1s at real ones -> (B, N, C)."""
        return self.encoder(self.embeddings(input_ids), attention_mask, output_all_encoded_layers=False)[-1]
