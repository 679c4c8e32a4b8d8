"""A quick look at whether the kernels run and are right on this machine: forward and backward, one small call a dtype.

The long look is in tests/; this one is for the moment before a run, and finds a broken compiler, a driver that is too
old, a GPU that computes wrongly.
"""

import torch
from torch import Tensor

from kernels import flash_attention, naive_attention
from kernels.device import interpreting

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTITIES = ("O", "dQ", "dK", "dV")
# the largest error may be so many times that of the plain formula in the same dtype (flash-attention's criterion is 2;
# a call as small as ours has few numbers to take the largest of)
BUDGET = 4.0


def self_test(device: torch.device, head_dim: int = 64) -> dict[str, float]:
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
        exact = _call(naive_attention, [x.double() for x in inputs])
        flash, plain = (_errors(_call(function, inputs), exact) for function in (flash_attention, naive_attention))
        floor = 4 * torch.finfo(dtype).eps  # where the plain formula happens to be exact
        ratios = [ours / max(theirs, floor) for ours, theirs in zip(flash, plain, strict=True)]
        for quantity, ratio in zip(QUANTITIES, ratios, strict=True):
            if not ratio <= BUDGET:  # a NaN too
                raise ValueError(f"{quantity} in {name} is {ratio:.3g} times as wrong as the plain formula")
        worst[name] = max(ratios)
    return worst


def _call(attention, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV of a causal call."""
    q, k, v, do = (x.detach().requires_grad_() for x in inputs)
    o = attention(q, k, v, causal=True)
    return o, *torch.autograd.grad(o, (q, k, v), do.detach())


def _errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    return [(a.double() - b).abs().max().item() for a, b in zip(found, exact, strict=True)]
