"""Attention operators: Triton kernels, their PyTorch references, one public function.

The package imports torch only. Triton is loaded when a kernel is launched for the first time.
"""

from kernels.api import flash_attention, unsupported_reason
from kernels.reference import naive_attention, tiled_attention

__all__ = ["flash_attention", "naive_attention", "tiled_attention", "unsupported_reason"]
