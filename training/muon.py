"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon): the direction of a matrix's momentum, its lengths taken away.

Nesterov momentum D = U S V^T of each matrix is replaced by U V^T, or nearly so, by a few matrix products
(`orthogonalize`). Matrices of one shape are one batched product. Nothing here asks the host, and nothing is allocated
late, so that a step can be captured in a CUDA graph.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# The quintics a x + b x^3 + c x^5 of five iterations: each is the best approximation of 1, in the largest error, on
# the interval that those before it leave of [0.001, 1] (Polar Express, arXiv:2505.16932, theorem 3.1 and section 3.3).
# Together they take [0.001, 1] to [0.887, 1.113].
QUINTICS = (
    (8.4703288, -25.1080747, 18.6292756),
    (4.1828342, -3.1087011, 0.5806067),
    (3.9618573, -2.9540637, 0.5629762),
    (3.2865862, -2.4647201, 0.5073577),
    (2.2737500, -1.6446604, 0.4161909),
)
# beyond its interval a quintic grows fast, and rounding reaches beyond: all but the last are used a little short of it
SAFETY = 1.01
EPS = 1e-7
# A stack is as many matrices of a shape as have gram matrices of so many entries: a few waves of tiles on any GPU.
STACK_ENTRIES = 2**23


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape that share their products: the unit of work that ranks could deal among themselves.

    Which matrices it holds follows from the model alone, so that a matrix gets the same bits whoever computes it.
    """

    parameters: tuple[nn.Parameter, ...]
    momentum: Tensor  # (matrices, rows, columns) fp32


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, decoupled weight decay and a rate that lies on the device.

    A step is taken unless `found_inf`, which is set before it, is 1: torch.amp.GradScaler's convention, which fused
    AdamW follows too. Weights and momenta then keep every bit.

    Args:
        group: `params`, matrices alone, and `lr`, 0-d on their device. Where a matrix has more rows than columns its
            rate is sqrt(rows / columns) times as high.
        momentum: of the mean of gradients.
        weight_decay: decoupled, times the rate.
        dtype: of the products of `orthogonalize`.
    """

    def __init__(self, group: dict[str, Any], *, momentum: float, weight_decay: float, dtype: torch.dtype) -> None:
        super().__init__([group], {"momentum": momentum, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None
        self.dtype = dtype
        self.stacks = stacked(group["params"])
        for stack in self.stacks:
            for p, momentum_buffer in zip(stack.parameters, stack.momentum, strict=True):
                self.state[p]["momentum_buffer"] = momentum_buffer

    @torch.no_grad()
    def step(self) -> None:
        (group,), skip = self.param_groups, self.found_inf > 0
        decay = torch.where(skip, 1.0, 1.0 - group["lr"] * group["weight_decay"])
        directions = (nesterov(stack, group["momentum"], skip) for stack in self.stacks)
        for stack, update in zip(self.stacks, self.orthogonalized(directions), strict=True):
            rows, columns = update.shape[1:]
            rate = -math.sqrt(max(1.0, rows / columns)) * group["lr"]
            update = torch.where(skip, -0.0, update * rate)  # x + -0 is x, the sign of a zero included
            torch._foreach_mul_(stack.parameters, decay)
            torch._foreach_add_(stack.parameters, update.unbind())

    def orthogonalized(self, directions: Iterable[Tensor]) -> Iterator[Tensor]:
        """`orthogonalize` of each stack. Ranks could deal these among themselves."""
        return (orthogonalize(direction, self.dtype) for direction in directions)


def stacked(parameters: list[nn.Parameter]) -> list[Stack]:
    """All of the parameters, matrices of one shape together and in their order; momenta are zero."""
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for p in parameters:
        by_shape.setdefault(p.shape, []).append(p)
    stacks = []
    for shape, matrices in by_shape.items():
        most = max(1, STACK_ENTRIES // min(shape) ** 2)
        for start in range(0, len(matrices), most):
            some = tuple(matrices[start : start + most])
            stacks.append(Stack(some, some[0].new_zeros(len(some), *shape, requires_grad=False)))
    return stacks


def nesterov(stack: Stack, momentum: float, skip: Tensor) -> Tensor:
    """(matrices, rows, columns): the gradients' mean, moved on by this step's, unless `skip`, and looked ahead."""
    gradient = torch.stack([p.grad for p in stack.parameters])
    moved = stack.momentum.lerp(gradient, 1 - momentum)
    torch.where(skip, stack.momentum, moved, out=stack.momentum)
    return gradient.lerp_(moved, momentum)


def orthogonalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest matrices with orthonormal rows (columns, if those are fewer), in `dtype`.

    Each singular value s of a matrix with Frobenius norm 1 becomes one in [0.87, 1.13], if it was at least 0.001, by
    products that never compute it: for an odd polynomial p, U p(S) V^T = a X + (b X X^T + c (X X^T)^2) X.

    Args:
        x: (matrices, rows, columns).
        dtype: of the products.
    """
    x = (x / x.norm(dim=(1, 2), keepdim=True).mul(SAFETY).clamp(min=EPS)).to(dtype)
    wide = x.size(1) <= x.size(2)
    for i, (a, b, c) in enumerate(QUINTICS, 1):
        safety = SAFETY if i < len(QUINTICS) else 1.0
        a, b, c = a / safety, b / safety**3, c / safety**5
        gram = x @ x.mT if wide else x.mT @ x  # over the longer side
        weights = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((weights, x) if wide else (x, weights)), beta=a)
    return x


def products_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """What Newton-Schulz's products run in on `device`, and why: bfloat16 suffices, but not every device is fast in it.

    A CPU without units for it takes 3.4 times as long as in float32.
    """
    if device.type == "cuda":
        if not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "tensor cores"
        return torch.float32, "this GPU has no bfloat16 units"
    units = [name for name in ("amx_bf16", "avx512_bf16") if torch.cpu.get_capabilities().get(name)]
    if device.type == "cpu" and units:
        return torch.bfloat16, f"this CPU has {units[0]}"
    return torch.float32, f"this {device.type.upper()} has no bfloat16 units that PyTorch knows"


def newton_schulz_flops(parameters: list[nn.Parameter]) -> float:
    """What `orthogonalize` costs a step."""
    sides = [sorted(p.shape) for p in parameters]
    return sum(len(QUINTICS) * (4 * short**2 * long + 2 * short**3) for short, long in sides)
