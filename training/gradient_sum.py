"""The sum of a step's gradients, in an order that does not depend on how many processes share the step."""

import torch
from torch import Tensor

from training.parallel import World


class GradientSum:
    """The sum of a step's gradients: of this process's micro-batches and of all processes, as one binary tree.

    Call `add` after each backward pass. Autograd adds the second gradient of a pair to the first. Larger sums
    (`sums_completed`) are added as soon as both terms are complete, so log2(micro-batches) gradients are held. If the
    backward passes always write to the same addresses, the sum's address is always the same too.

    micro_batches: how often `add` will be called.
    copied: whether the next backward pass writes where this one did, as a CUDA graph does.
    """

    def __init__(self, parameters: list[Tensor], world: World, micro_batches: int, *, copied: bool = False) -> None:
        self._parameters, self._world, self._copied = parameters, world, copied
        self._to_end = sums_completed(micro_batches)[::-1]  # for each micro-batch to come, the next one last
        self._loss: Tensor | None = None  # of the first micro-batch of a pair, whose gradient is in `grad`
        self._pending: list[list[Tensor]] = []  # gradients and loss of sums that wait for their other term

    def add(self, loss: Tensor) -> None:
        """After a backward pass: the micro-batch's loss; its gradients are in `grad`."""
        sums = self._to_end.pop()
        if self._loss is not None:
            self._loss = self._loss + loss
            self._push(sums - 1)
        else:
            self._loss = loss
            if sums or not self._to_end:  # without a partner: one of three, say
                self._push(sums)

    @torch.no_grad()
    def total(self) -> Tensor:
        """The loss of the whole step; its gradients are in `grad`."""
        (terms,) = self._pending
        loss = terms.pop()
        terms, loss = self._world.sum(terms, loss, self._parameters)
        for parameter, gradient in zip(self._parameters, terms, strict=True):
            parameter.grad = gradient
        return loss

    @torch.no_grad()
    def _push(self, sums: int) -> None:
        """Take the gradients out of `grad`, and add them to the last `sums` pending terms."""
        terms = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        if self._copied and self._to_end:
            terms = [term.clone() for term in terms]
        terms.append(self._loss)
        self._loss = None
        for parameter in self._parameters:
            parameter.grad = None
        for _ in range(sums):
            torch._foreach_add_(terms, self._pending.pop())  # in the memory of the last backward pass
        self._pending.append(terms)


def sums_completed(micro_batches: int) -> list[int]:
    """For each micro-batch, how many sums of the tree it completes.

    The tree is split from the top into halves that differ by one micro-batch at most. The halves (or quarters) of a
    step are then added as two (or four) processes add theirs, however many micro-batches each has.
    """
    if micro_batches == 1:
        return [0]
    later = micro_batches // 2
    *ends, last = sums_completed(micro_batches - later) + sums_completed(later)
    return [*ends, last + 1]
