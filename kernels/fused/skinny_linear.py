"""A product of a few rows with a weight, fused with the operations around it in a block: one launch, no gradients.

A step of generation has one row per sequence. Its products take as long as loading their weights, and the launches of
norms, non-linearities and sums between them as long as the products. Here each of those is part of a product.

This file is the contract (torch only); the kernel loads when a CUDA tensor, or the interpreter, needs it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import interpreting
from ..ops import needs_dispatcher
from ..support import refuse_forward_mode
from .rotary import rotate

MAX_ROWS = 64
ACTIVATIONS = ("gelu", "swiglu", "relu2")


def takes_skinny_linear(x: Tensor) -> bool:
    """Whether the product is one launch: on CUDA, in 16 bit, with few rows and no gradient."""
    few = x.numel() // max(1, x.size(-1)) <= MAX_ROWS
    return x.is_cuda and x.dtype.itemsize == 2 and few and not torch.is_grad_enabled()


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_eps: float | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    rotary: tuple[Tensor, Tensor, int] | None = None,
    positions: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """activation(rms_norm(x) weight^T) + residual, or the product's heads turned to their rows' positions; each part
    but the product is left out where it is None.

    A row's bits are the same among 2 to 64 rows; one row alone is summed in another order.

    Args:
        x: (..., C), at most 64 rows in all, contiguous.
        weight: (N, C), x's dtype, rows contiguous; (2 N, C) with swiglu, the gates first.
        norm_eps: of the RMS norm of x, without a gain; it scales the product, so x is not rounded in between.
        activation: None, "gelu" (tanh), "relu2" or "swiglu".
        residual: (..., N), x's dtype, contiguous.
        rotary: (cos, sin, H) turns the first H of N / D heads as `rotate_and_split` does, before they are rounded; cos
            and sin (positions, ..., D) fp32. Neither activation nor residual may be given with it.
        positions: (rows,) int32 or int64, the index of each row in cos and sin, clamped to their range. None: row i has
            index i, and they have as many positions as rows.
        workspace: (N,) int32 zeros, which are zeros again afterwards, for calls that follow one another; None: a new
            one, where a product needs it.

    Returns:
        (..., N) in x's dtype.

    Raises:
        ValueError: more than 64 rows, integers, an input that requires a gradient, an unknown activation, a weight or
            residual of another shape, dtype or layout; tables of other rows or an odd width, outputs that are not whole
            heads or too few, or an activation or residual with them; positions of another shape or dtype, or without
            tables; another workspace.
        RuntimeError: forward-mode derivatives.

    Triton on CUDA and in its interpreter, PyTorch's own operators elsewhere, in float64 and where a tracer or transform
    must see them. Autocast changes nothing.
    """
    rows, ways = math.prod(x.shape[:-1]), 2 if activation == "swiglu" else 1
    if rows > MAX_ROWS:
        raise ValueError(f"x has {rows} rows; a skinny product takes at most {MAX_ROWS}: use F.linear")
    if activation not in (None, *ACTIVATIONS):
        raise ValueError(f"activation={activation} is not one of None, {', '.join(ACTIVATIONS)}")
    fits = weight.dim() == 2 and x.shape[-1:] == weight.shape[1:] != (0,) and weight.size(0) % ways == 0
    if not fits or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, strides {weight.stride()} and dtype {weight.dtype}; expected "
            f"({'2 ' * (ways - 1)}N, C), contiguous, and {x.dtype}, of x with shape {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}; a skinny product is of floating point numbers")
    if rotary is not None and len(rotary) != 3:
        raise ValueError(f"rotary has {len(rotary)} parts; expected (cos, sin, H)")
    cos, sin, num_turned = rotary or (None, None, 0)
    given = {"x": x, "weight": weight, "residual": residual, "cos": cos, "sin": sin}
    for name, tensor in (*given.items(), ("positions", positions), ("workspace", workspace)):
        if tensor is None:
            continue
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} but x is on {x.device}; move them to one device")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} asks for a gradient, and this product has none; use torch.no_grad() or F.linear")
        refuse_forward_mode("skinny_linear", "F.linear", tensor)
    shape = *x.shape[:-1], weight.size(0) // ways
    if residual is not None and (residual.shape != shape or residual.dtype != x.dtype or not residual.is_contiguous()):
        raise ValueError(
            f"residual has shape {tuple(residual.shape)}, strides {residual.stride()} and dtype {residual.dtype}; "
            f"expected {shape}, contiguous, and {x.dtype}"
        )
    if rotary is not None:
        if activation is not None or residual is not None:
            raise ValueError("rotary turns a plain product; leave activation and residual out, or rotary")
        head_dim = max(1, cos.size(-1))
        heads, left = weight.size(0) // head_dim, weight.size(0) % head_dim  # torch.compile has no divmod of its sizes
        fits = cos.shape == sin.shape and cos.numel() == cos.size(0) * head_dim
        fits = fits and (cos.size(0) == rows if positions is None else cos.size(0) > 0)
        if not fits or head_dim % 2 or left or not 0 <= num_turned <= heads:
            raise ValueError(
                f"rotary has tables of shape {tuple(cos.shape)} and {tuple(sin.shape)} and turns {num_turned} heads; "
                f"expected ({rows}, ..., D), the rows of x, D even, and at most the heads in {weight.size(0)} outputs"
            )
    if positions is not None and (
        rotary is None or positions.numel() != rows or positions.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            f"positions has shape {tuple(positions.shape)} and dtype {positions.dtype}; expected int32 or int64, one "
            f"for each of {rows} rows, beside rotary"
        )
    if workspace is not None and (
        workspace.dtype != torch.int32 or workspace.numel() < weight.size(0) or not workspace.is_contiguous()
    ):
        raise ValueError(
            f"workspace has {workspace.numel()} elements of {workspace.dtype} and strides {workspace.stride()}; "
            f"expected {weight.size(0)} int32 zeros, contiguous"
        )
    of_kernel = x.dtype != torch.float64 and (x.is_cuda or interpreting())  # kernels sum in float32
    if not of_kernel or needs_dispatcher(x, weight):
        with torch.autocast(x.device.type, enabled=False):
            return _composed(x, weight, norm_eps, activation, residual, rotary, positions)
    from .skinny_linear_kernel import launch_skinny_linear

    return launch_skinny_linear(x, weight, norm_eps, activation, residual, rotary, positions, workspace)


def _composed(x, weight, norm_eps, activation, residual, rotary=None, positions=None) -> Tensor:
    """The definition, in PyTorch's own operators."""
    if norm_eps is not None:
        x = F.rms_norm(x, (x.size(-1),), eps=norm_eps)
    y = F.linear(x, weight)
    if activation == "gelu":
        y = F.gelu(y, approximate="tanh")
    elif activation == "relu2":
        y = F.relu(y).square()
    elif activation == "swiglu":
        gate, value = y.chunk(2, dim=-1)
        y = F.silu(gate) * value
    if rotary is not None:
        cos, sin, num_turned = rotary
        if positions is not None:
            cos, sin = (table[positions.flatten().clamp(0, len(table) - 1)] for table in (cos, sin))
        rows, head_dim = len(cos), cos.size(-1)
        heads = y.view(1, rows, y.size(-1) // head_dim, head_dim)
        turned = rotate(heads[:, :, :num_turned], *(table.view(rows, 1, head_dim) for table in (cos, sin)))
        y = torch.cat((turned, heads[:, :, num_turned:]), 2).view_as(y)
    return y if residual is None else residual + y
