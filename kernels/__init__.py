"""Operators: Triton kernels and their PyTorch references; attention, and the two passes a GPT loses most time in.

The package imports torch only. Triton is loaded when a kernel is launched for the first time.
"""

from kernels.api import flash_attention, unsupported_reason
from kernels.cross_entropy import cross_entropy
from kernels.reference import naive_attention, tiled_attention
from kernels.rotary import rotate_and_split

__all__ = [
    "cross_entropy",
    "flash_attention",
    "naive_attention",
    "rotate_and_split",
    "tiled_attention",
    "unsupported_reason",
]
