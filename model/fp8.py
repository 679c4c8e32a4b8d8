"""Linear layers whose products run in 8 bits while they train: `model.fp8`.

Forward and both backward products multiply e4m3 (inputs, weights) and e5m2 (gradients) tensors, each with one scale for
the whole tensor, computed from its largest entry at that call (Micikevicius et al., arXiv:2209.05433; section 3 of
arXiv:2310.18313 on one scale a tensor). Sums are in float32, but those of the forward keep 14 bits on Hopper. Weights,
their gradients and checkpoints stay float32, and evaluation and sampling do not use 8 bits.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kernels.call import autocast_dtype

FP8 = ("none", "mlp", "all")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of every side of a product in 8 bits
OLDEST = (8, 9)  # Ada, the first compute capability with such products
LEAST = 1e-12  # so that a tensor of zeros has a scale too


def use_fp8(model: nn.Module, which: str) -> None:
    """Let the MLPs of `model.blocks` (mlp), or all of the blocks' linear layers (all), multiply in 8 bits."""
    for block in model.blocks:
        for layer in (block if which == "all" else block.mlp).modules():
            if isinstance(layer, nn.Linear):
                layer.__class__ = Linear8  # the same weights under the same names


def why_no_fp8(device: torch.device | str) -> str | None:
    """Why `device` has no products in 8 bits; None where it has."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"a {device.type.upper()} has none"
    # without a GPU here, a forecast is made for a GPU elsewhere
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < OLDEST:
        return f"{torch.cuda.get_device_name(device)} is older than sm_{OLDEST[0]}{OLDEST[1]}"
    return None


class Linear8(nn.Linear):
    """A linear layer without a bias, in 8 bits while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        rows = x.flatten(0, -2)
        if len(rows) % MULTIPLE:
            raise ValueError(
                f"model.fp8 needs a multiple of {MULTIPLE} tokens in a micro-batch, not {len(rows)}; "
                "use another train.micro_batch or data.seq_len"
            )
        return Products8.apply(rows.to(autocast_dtype(rows)), self.weight).view(*x.shape[:-1], -1)


class Products8(torch.autograd.Function):
    """(tokens, in) and a weight (out, in) -> (tokens, out) in the input's dtype; the weight's gradient is float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (x8, x_scale), (w8, w_scale) = quantized(x, E4M3), quantized(weight, E4M3)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        return product(x8, x_scale, w8, w_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        dy8, dy_scale = quantized(dy, E5M2)
        dx = product(dy8, dy_scale, transposed(w8), w_scale, dy.dtype)
        dw = product(transposed(dy8), dy_scale, transposed(x8), x_scale, torch.float32)
        return dx, dw


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(q, scale) with q * scale about x; scale is 0-d float32. Entries that are not finite stay so in q."""
    largest = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=LEAST) / largest
    return (x / scale[None]).clamp_(-largest, largest).to(dtype), scale  # a float32 vector's quotient is float32


def transposed(x: Tensor) -> Tensor:
    """The transpose, as a copy: products in 8 bits read both operands along the dimension of the sum."""
    return x.t().contiguous()


def product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """a (M, K) times the transpose of b (N, K), scaled, in `dtype`. `fast` sums with 14 bits on Hopper."""
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)
