"""Operators: Triton kernels and their PyTorch references, for attention and a GPT's other costly operations.

The package imports torch and numpy; Triton is loaded when a kernel is launched for the first time.
"""

from .api import flash_attention, flash_attention_varlen
from .block_masks import BlockMask, block_mask
from .decode import (
    flash_attention_with_kvcache,
    kvcache_workspace,
    naive_attention_with_kvcache,
    read_kvcache,
    write_kvcache,
)
from .decode_layers import KVCacheLayers
from .documents import padded_documents, place_documents
from .fused.cross_entropy import cross_entropy
from .fused.draw_tokens import draw_tokens, takes_draw_tokens
from .fused.linear_cross_entropy import linear_cross_entropy
from .fused.rms_norm import rms_norm
from .fused.rotary import rotate_and_split
from .fused.skinny_linear import skinny_linear, takes_skinny_linear
from .reference import naive_attention, naive_attention_varlen
from .support import why_not
from .tiled import tiled_attention, tiled_attention_varlen

__all__ = [
    "BlockMask",
    "KVCacheLayers",
    "block_mask",
    "cross_entropy",
    "draw_tokens",
    "flash_attention",
    "flash_attention_varlen",
    "flash_attention_with_kvcache",
    "kvcache_workspace",
    "linear_cross_entropy",
    "naive_attention",
    "naive_attention_varlen",
    "naive_attention_with_kvcache",
    "padded_documents",
    "place_documents",
    "read_kvcache",
    "rms_norm",
    "rotate_and_split",
    "skinny_linear",
    "takes_draw_tokens",
    "takes_skinny_linear",
    "tiled_attention",
    "tiled_attention_varlen",
    "why_not",
    "write_kvcache",
]
