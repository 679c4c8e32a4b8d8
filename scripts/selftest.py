"""A quick look at whether the kernels run and are right on this machine: forward and backward, one small call a dtype.

The thorough tests are in tests/; this one is run just before a training run, and finds a broken compiler, a driver that
is too old, a GPU that computes wrongly.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels import flash_attention, naive_attention
from kernels.device import interpreting

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OUTPUTS = ("O", "dQ", "dK", "dV")
# the largest error may be this many times that of the plain formula in the same dtype (flash-attention's criterion is
# 2, but in a call as small as ours the maximum is over few numbers)
BUDGET = 4.0


def self_test(device: torch.device, head_dim: int) -> dict[str, float]:
    """Flash attention's worst error in every dtype, over that of the plain formula; both against float64.

    On a CPU it needs Triton's interpreter, and a smaller call.

    Raises:
        ValueError: an error beyond BUDGET.
    """
    tokens, head_dim = (40, 16) if interpreting() else (200, head_dim)  # neither is a multiple of a tile
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, tokens, head_dim) for heads in (2, 1, 1, 2)]  # q, k, v, dO: two query heads share one of k, v
    random = [torch.randn(shape, generator=generator) for shape in shapes]
    worst = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        inputs = [x.to(device, dtype) for x in random]
        exact = gradients(naive_attention, [x.double() for x in inputs], causal=True)
        flash, plain = (gradients(attention, inputs, causal=True) for attention in (flash_attention, naive_attention))
        floor = 4 * torch.finfo(dtype).eps  # where the plain formula happens to be exact
        ratios = [_error(a, e) / max(_error(b, e), floor) for a, b, e in zip(flash, plain, exact, strict=True)]
        for quantity, ratio in zip(OUTPUTS, ratios, strict=True):
            if not ratio <= BUDGET:  # a NaN too
                raise ValueError(f"{quantity} in {name} is {ratio:.3g} times as wrong as the plain formula")
        worst[name] = max(ratios)
    return worst


def gradients(attention: Callable[..., Tensor], inputs: Sequence[Tensor], **options) -> tuple[Tensor, ...]:
    """O, dQ, dK and dV of a call. inputs: q, k, v and dO."""
    *qkv, do = (x.detach().clone() for x in inputs)
    for x in qkv:
        x.requires_grad_()
    o = attention(*qkv, **options)
    return o.detach(), *torch.autograd.grad(o, qkv, do.to(o.dtype))


def _error(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).abs().max().item()
