"""Attention operators: Triton kernels, their PyTorch references, public functions.

The package imports torch only. Triton is loaded when a kernel is launched for the first time.
"""

from kernels.api import flash_attention, flash_attention_varlen, unsupported_reason
from kernels.reference import naive_attention, naive_attention_varlen
from kernels.tiled import tiled_attention, tiled_attention_varlen

__all__ = [
    "flash_attention",
    "flash_attention_varlen",
    "naive_attention",
    "naive_attention_varlen",
    "tiled_attention",
    "tiled_attention_varlen",
    "unsupported_reason",
]
