"""A quick look at whether the kernels run and are right on this machine: forward and backward, one small call a dtype.

The long look is in tests/; this one is for the moment before a run, and finds a broken compiler, a driver that is too
old, a GPU that computes wrongly.
"""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import flash_attention, naive_attention, why_not
from kernels.device import interpreting

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTITIES = ("O", "dQ", "dK", "dV")
# the largest error may be so many times that of the plain formula in the same dtype (flash-attention's criterion is 2;
# a call as small as ours has few numbers to take the largest of)
BUDGET = 4.0


@dataclass(frozen=True)
class Result:
    """One dtype. `ratio` is the worst error over the plain formula's, `fault` a sentence or None."""

    dtype: str
    ratio: float
    seconds: float
    fault: str | None


def self_test(device: torch.device, head_dim: int = 64) -> list[Result]:
    """Run flash attention in every dtype against the plain formula in float64.

    On a CPU it needs Triton's interpreter, and a smaller call.
    """
    tokens, head_dim = (40, 16) if interpreting() else (200, head_dim)  # neither is a multiple of a tile
    return [_test(device, dtype, tokens, head_dim) for dtype in DTYPES]


def _test(device: torch.device, dtype: torch.dtype, tokens: int, head_dim: int) -> Result:
    name, began = str(dtype).removeprefix("torch."), time.perf_counter()
    if obstacle := why_not("flash", dtype, device=device, head_dim=head_dim):
        return Result(name, math.nan, 0.0, obstacle)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, tokens, head_dim) for heads in (2, 1, 1, 2)]  # q, k, v, dO: two query heads share one of k, v
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    exact = _call(naive_attention, [x.double() for x in inputs])
    errors = {}
    for kind, attention in (("flash", flash_attention), ("plain", naive_attention)):
        found = _call(attention, inputs)
        errors[kind] = [(a.double() - b).abs().max().item() for a, b in zip(found, exact, strict=True)]
    floor = 4 * torch.finfo(dtype).eps  # where the plain formula happens to be exact
    ratios = [ours / max(plain, floor) for ours, plain in zip(errors["flash"], errors["plain"], strict=True)]
    # a NaN is no larger than anything: it is looked for apart
    worst = next((i for i, ratio in enumerate(ratios) if math.isnan(ratio)), ratios.index(max(ratios)))
    fault = None
    if not ratios[worst] <= BUDGET:
        fault = f"{QUANTITIES[worst]} in {name} is {ratios[worst]:.3g} times as wrong as the plain formula"
    return Result(name, ratios[worst], time.perf_counter() - began, fault)


def _call(attention, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV of a causal call."""
    q, k, v, do = (x.detach().requires_grad_() for x in inputs)
    o = attention(q, k, v, causal=True)
    return o, *torch.autograd.grad(o, (q, k, v), do.detach())
