"""The sum of a step's gradients, in an order that does not depend on how many processes share the step."""

import torch
from torch import Tensor

from training.parallel import World


class GradientSum:
    """The sum of a step's gradients: of this process's micro-batches and of all processes, as one binary tree.

    Call `add` after each backward pass. Autograd adds every second micro-batch's gradient to the first's; pairs and
    what is made of them are added like the digits of a binary counter, so log2(micro-batches) gradients are held.
    The sum's address is always the same as long as the backward passes always write to the same addresses.

    micro_batches: how often `add` will be called.
    copied: whether the next backward pass writes where this one did, as a CUDA graph does.
    """

    def __init__(self, parameters: list[Tensor], world: World, micro_batches: int, *, copied: bool = False) -> None:
        self._parameters, self._world, self._copied = parameters, world, copied
        self._to_come = micro_batches
        self._loss: Tensor | None = None  # of an odd micro-batch, whose gradient is in `grad`
        self._pending: list[tuple[int, list[Tensor]]] = []  # (level, gradients and loss), the highest level first

    def add(self, loss: Tensor) -> None:
        """After a backward pass: the micro-batch's loss; its gradients are in `grad`."""
        self._to_come -= 1
        if self._loss is None:
            self._loss = loss
        else:
            self._loss = self._loss + loss
            self._push()

    @torch.no_grad()
    def total(self) -> Tensor:
        """The loss of the whole step; its gradients are in `grad`."""
        if self._loss is not None:
            self._push()
        terms = self._pending.pop()[1]
        while self._pending:
            terms = _added(self._pending.pop()[1], terms)
        loss = terms.pop()
        terms, loss = self._world.sum(terms, loss, self._parameters)
        for parameter, gradient in zip(self._parameters, terms, strict=True):
            parameter.grad = gradient
        return loss

    @torch.no_grad()
    def _push(self) -> None:
        """Add the gradients in `grad` to the pending terms; two of one level become one of the next."""
        level, terms = 1, [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        if self._copied and self._to_come:
            terms = [term.clone() for term in terms]
        terms.append(self._loss)
        self._loss = None
        for parameter in self._parameters:
            parameter.grad = None
        while self._pending and self._pending[-1][0] == level:
            level, terms = level + 1, _added(self._pending.pop()[1], terms)
        self._pending.append((level, terms))


def _added(earlier: list[Tensor], later: list[Tensor]) -> list[Tensor]:
    """The sum, in the memory of `later`: the last backward pass wrote there."""
    torch._foreach_add_(later, earlier)
    return later
