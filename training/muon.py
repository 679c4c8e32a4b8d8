"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon): momentum, with each matrix's update orthogonalized.

The Nesterov momentum D = U S V^T of each matrix becomes nearly U V^T, by a few matrix products (`orthogonalize`).
Matrices of one shape are one batched product. A step never waits for the host, and its state is allocated at
construction, so that it can be captured in a CUDA graph.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from training.owners import Owners
from training.parallel import ALONE, World

# The quintics a x + b x^3 + c x^5 of the iterations: each is the best approximation of 1, in maximum error, on the
# interval to which those before it map [least, 1] (Polar Express, arXiv:2505.16932, theorem 3.1). Four, with SAFETY,
# map [0.005, 1] to [0.901, 1.083]. In float32, where a CPU is slow, three map [0.003, 1] to [0.347, 1.646], for the
# same loss: experiment=shakespeare has 1.8692 after 225 steps, 1.8702 with four (means of four seeds, whose differences
# have a standard error of 0.002), 1.8725 with three from 0.005 on, 1.8875 from 0.02 on (two seeds).
QUINTICS = {
    torch.bfloat16: (
        (8.2987035, -24.4304981, 18.0903042),
        (3.9152210, -2.9211302, 0.5592233),
        (3.1746037, -2.3804328, 0.4978264),
        (2.1894628, -1.5672207, 0.4078872),
    ),
    torch.float32: (
        (8.3836736, -24.7659059, 18.3570819),
        (4.0434204, -3.0114050, 0.5695122),
        (3.5055706, -2.6266538, 0.5257194),
    ),
}
# beyond its interval a quintic grows fast, and rounding can exceed it: all but the last are evaluated at x / SAFETY
SAFETY = 1.01
EPS = 1e-7
# entries in the gram matrices of one stack of matrices: a few waves of tiles on any GPU
STACK_ENTRIES = 2**23


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape that share their products: the unit of work that processes share (training/owners.py).

    Which matrices it holds follows from the model alone, so that a matrix gets the same bits on any process.
    """

    shape: torch.Size  # (matrices, rows, columns), whole
    parameters: tuple[nn.Parameter, ...]  # all of their rows, or those that this process holds
    momentum: Tensor  # fp32, of those rows


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, decoupled weight decay and a learning rate on the device.

    A step is taken unless `found_inf`, which is set before it, is 1: torch.amp.GradScaler's convention, which fused
    AdamW follows too. Weights and momenta then keep every bit.

    group: `params`, matrices alone; `lr`, 0-d on their device; `cautious`: whether only those weights decay
        that the update brings nearer to zero (cautious weight decay, arXiv:2510.12402). Where a matrix has more rows
        than columns its rate is sqrt(rows / columns) times as high.
    momentum: the weight of earlier gradients in their mean.
    weight_decay: decoupled, times `lr`.
    dtype: of the products of `orthogonalize`.
    shapes: of the whole matrices, where `params` are only some rows of them.
    world: the processes that share the products.
    """

    def __init__(
        self,
        group: dict[str, Any],
        *,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype,
        shapes: list[torch.Size] | None = None,
        world: World = ALONE,
    ) -> None:
        super().__init__([group], {"momentum": momentum, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None
        self.dtype = dtype
        self.stacks = stacked(group["params"], shapes)
        self._owners = None
        if world.size > 1:
            costs = [newton_schulz_flops([stack.shape[1:]] * stack.shape[0], dtype) for stack in self.stacks]
            place = dtype, group["params"][0].device
            self._owners = Owners(world, [stack.shape for stack in self.stacks], costs, *place)
        for stack in self.stacks:
            for p, momentum_buffer in zip(stack.parameters, stack.momentum, strict=True):
                self.state[p]["momentum_buffer"] = momentum_buffer

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        directions = (nesterov(stack, group["momentum"], self.found_inf) for stack in self.stacks)
        for stack, update in zip(self.stacks, self.orthogonalized(directions), strict=True):
            _, rows, columns = stack.shape
            faster = math.sqrt(max(1.0, rows / columns))
            update, decay = update.float(), group["weight_decay"] / faster
            if group["cautious"]:
                weights = torch.stack(stack.parameters)
                decaying = (weights * update).gt_(0).mul_(weights)  # on a CPU `where` takes four times as long
                update, decay = update.add(decaying, alpha=decay), 0.0
            step_towards(update.unbind(), stack.parameters, group["lr"] * faster, decay, self.found_inf)

    def orthogonalized(self, directions: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield `orthogonalize` of each stack, each computed by one of the processes."""
        compute = partial(orthogonalize, dtype=self.dtype)
        return self._owners.computed(directions, compute) if self._owners else map(compute, directions)


def stacked(parameters: list[nn.Parameter], shapes: list[torch.Size] | None = None) -> list[Stack]:
    """Stacks of all the parameters: matrices of one shape together, in their order; momenta are zero.

    shapes: of whole matrices, where the parameters are only some of their rows.
    """
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for p, shape in zip(parameters, shapes or [p.shape for p in parameters], strict=True):
        by_shape.setdefault(shape, []).append(p)
    stacks = []
    for shape, matrices in by_shape.items():
        most = max(1, STACK_ENTRIES // min(shape) ** 2)
        for start in range(0, len(matrices), most):
            some = tuple(matrices[start : start + most])
            momentum = some[0].new_zeros(len(some), *some[0].shape, requires_grad=False)
            stacks.append(Stack(torch.Size((len(some), *shape)), some, momentum))
    return stacks


def nesterov(stack: Stack, momentum: float, found_inf: Tensor) -> Tensor:
    """Update the momentum unless `found_inf` is 1; return its Nesterov look-ahead, (matrices, rows, columns)."""
    gradients = [p.grad for p in stack.parameters]
    step_towards(gradients, stack.momentum.unbind(), momentum - 1, -1.0, found_inf)  # m + (1 - momentum) (gradient - m)
    return torch.stack(gradients).lerp_(stack.momentum, momentum)


def step_towards(
    updates: Sequence[Tensor], tensors: Sequence[Tensor], rate: Tensor | float, decay: float, found_inf: Tensor
) -> None:
    """Replace each tensor x by x - rate (update + decay x), but keep every bit if `found_inf` is 1.

    All are float32. This is a step of SGD: one fused kernel, which reads rate and found_inf on the device.
    """
    torch._fused_sgd_(
        list(tensors), list(updates), [], lr=rate, weight_decay=decay, found_inf=found_inf, momentum=0.0,
        dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip


def orthogonalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest matrices with orthonormal rows (columns, if those are fewer), in `dtype`.

    For an odd polynomial p, U p(S) V^T = W X with W = a + b X X^T + c (X X^T)^2: the singular values S are moved to 1
    by products that never compute them (QUINTICS says how near). They are first divided by the fourth root of the sum
    of their fourth powers, |X X^T|^(1/2) in Frobenius norms: at least the largest, and far nearer to it than |X|.

    In float32, where that is fewer FLOPs, only the gram matrix X X^T along the shorter side is iterated, and X is
    multiplied once at the end: 0.63 of the FLOPs where one side is four times the other. The gram matrix's eigenvalues
    are the squares of singular values, so bfloat16 would lose the smallest.

    x: (matrices, rows, columns), entries below 1e9: fourth powers that overflow fp32 give zeros. Clipping sees to that.
    dtype: of the products.
    """
    x = x.to(dtype)
    wide, by_gram = x.size(1) <= x.size(2), _by_gram(*x.shape[1:], dtype)
    gram, whole = (x @ x.mT if wide else x.mT @ x), None
    largest = gram.norm(dim=(1, 2), keepdim=True, dtype=torch.float32).clamp(min=EPS**2) * SAFETY**2
    gram, x = gram.div_(largest), torch.div(x, largest.sqrt(), out=torch.empty_like(x))
    for i, (a, b, c) in enumerate(QUINTICS[dtype], 1):
        last = i == len(QUINTICS[dtype])
        safety = 1.0 if last else SAFETY
        a, b, c = a / safety, b / safety**3, c / safety**5
        weights = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        if by_gram:
            weights.diagonal(dim1=1, dim2=2).add_(a)
            whole = weights if whole is None else weights @ whole
            gram = gram if last else weights @ (gram @ weights)
        else:
            x = torch.baddbmm(x, *((weights, x) if wide else (x, weights)), beta=a)
            gram = gram if last else (x @ x.mT if wide else x.mT @ x)
    if whole is not None:
        x = whole @ x if wide else x @ whole
    return x


def _by_gram(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether the gram matrix alone is iterated: in float32, where that is fewer FLOPs (`newton_schulz_flops`)."""
    return dtype == torch.float32 and 2 * max(rows, columns) > 3 * min(rows, columns)


def newton_schulz_flops(shapes: list[torch.Size], dtype: torch.dtype) -> float:
    """FLOPs of `orthogonalize` for matrices of these shapes."""
    n, flops = len(QUINTICS[dtype]), 0.0
    for short, long in map(sorted, shapes):
        over_long, over_short = (2, 4 * n - 3) if _by_gram(short, long, dtype) else (2 * n, n)
        flops += 2 * short**2 * (over_long * long + over_short * short)
    return flops
