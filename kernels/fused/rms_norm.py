"""RMS norm, without a gain, whose backward pass reads its output and not its input.

A compiled block keeps the norm's output anyway, for the gradient of the product after it. PyTorch's own gradient reads
the residual stream too, which is in fp32, twice as wide, and kept until then. With y = x / rms(x) in place of x it is
dx = (dy - y mean(dy y)) / rms(x), the same within the rounding of y. On a CPU, where PyTorch composes its gradient of
many operators, this one takes about half of the time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import autocast_dtype
from ..support import refuse_forward_mode, refuse_second_derivative, refuse_torch_func


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension (arXiv:1910.07467), in autocast's dtype or x's (float64 stays).

    The compiler fuses the gradient of a compiled call with the operations around it. On a GPU, uncompiled, PyTorch's
    operator is used: it is one kernel.
    """
    dtype = autocast_dtype(x)
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}; a norm is of floating point numbers")
    if not x.is_cuda or (torch.compiler.is_compiling() and torch.is_grad_enabled()):
        refuse_torch_func("rms_norm", "torch.nn.functional.rms_norm")
        refuse_forward_mode("rms_norm", "torch.nn.functional.rms_norm", x)
        return _RMSNorm.apply(x, eps, dtype)
    return F.rms_norm(x, (x.size(-1),), eps=eps).to(dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        y = wide * scale
        if y.dtype != dtype:  # PyTorch 2.11, compiling, loses the gradient of a result that `to` leaves as it is
            y = y.to(dtype)
        ctx.save_for_backward(y, scale)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("rms_norm", "torch.nn.functional.rms_norm")
        y, scale = ctx.saved_tensors
        dy, y = dy.to(scale.dtype), y.to(scale.dtype)
        dx = scale * (dy - y * (dy * y).mean(-1, keepdim=True))
        return dx.to(ctx.dtype), None, None
