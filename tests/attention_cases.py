"""One call for each feature of the support matrix, small enough for the interpreter and crossing tile borders."""

import torch

from kernels import (
    BlockMask,
    flash_attention,
    flash_attention_varlen,
    naive_attention,
    naive_attention_varlen,
    tiled_attention,
    tiled_attention_varlen,
)
from tests.attention_checks import make_packed, make_qkv

ATTENTION = {
    "naive": (naive_attention, naive_attention_varlen),
    "tiled": (tiled_attention, tiled_attention_varlen),
    "flash": (flash_attention, flash_attention_varlen),
}
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 16
NUM_Q, NUM_K = 37, 52  # two tiles each way in the interpreter, ragged, unequal

_GENERATOR = torch.Generator().manual_seed(0)

# feature -> the options that switch it on; seeds and values are arbitrary
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "gqa": {},
    "head_dim_v": {},
    "lse": {"causal": True},
    "window": {"window": (9, 4)},
    "softcap": {"softcap": 2.5},  # below the largest scores, so that it bends them
    "alibi_slopes": {"alibi_slopes": torch.tensor([[0.3, 0.05]])},
    "sinks": {"sinks": torch.tensor([0.4, -1.1])},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 0x1234_5678_9ABC},
    "varlen": {},
    "block_mask": {"block_mask": BlockMask.from_dense(torch.rand(NUM_Q, NUM_K, generator=_GENERATOR) < 0.4)},
}
# with documents: one with more queries than keys, one without queries, one without keys, one without both
LENGTHS_Q = [20, 0, 33, 0, 5]
LENGTHS_K = [7, 19, 50, 0, 0]


def call_for(features, dtype: torch.dtype, device: str = "cpu"):
    """(index into ATTENTION's pair, q, k, v, options) of a call that uses all these features."""
    kv_heads = KV_HEADS if "gqa" in features else HEADS
    head_dim_v = 32 if "head_dim_v" in features else HEAD_DIM
    options = {}
    for feature in features:
        for name, value in OPTIONS[feature].items():
            options[name] = value.to(device) if isinstance(value, torch.Tensor | BlockMask) else value
    kind = {"head_dim_v": head_dim_v, "dtype": dtype, "device": device}
    if "varlen" in features:
        qkv, arguments = make_packed(LENGTHS_Q, LENGTHS_K, HEADS, kv_heads, HEAD_DIM, **kind)
        if "alibi_slopes" in options:
            options["alibi_slopes"] = torch.rand(len(LENGTHS_Q), HEADS).to(device)
        return 1, *qkv, options | arguments
    return 0, *make_qkv(1, HEADS, kv_heads, NUM_Q, NUM_K, HEAD_DIM, **kind), options
