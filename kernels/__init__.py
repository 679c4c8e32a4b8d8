"""Operators: Triton kernels and their PyTorch references; attention, and the two passes a GPT loses most time in.

The package imports torch only. Triton is loaded when a kernel is launched for the first time.
"""

from kernels.api import flash_attention, flash_attention_varlen, unsupported_reason
from kernels.cross_entropy import cross_entropy
from kernels.fp8 import flash_attention_fp8, quantise_per_head
from kernels.inputs import place_documents
from kernels.linear_cross_entropy import linear_cross_entropy
from kernels.reference import naive_attention, naive_attention_fp8, naive_attention_varlen
from kernels.rotary import rotate_and_split
from kernels.support import refusal
from kernels.tiled import tiled_attention, tiled_attention_varlen

__all__ = [
    "cross_entropy",
    "flash_attention",
    "flash_attention_fp8",
    "flash_attention_varlen",
    "linear_cross_entropy",
    "naive_attention",
    "naive_attention_fp8",
    "naive_attention_varlen",
    "place_documents",
    "quantise_per_head",
    "refusal",
    "rotate_and_split",
    "tiled_attention",
    "tiled_attention_varlen",
    "unsupported_reason",
]
