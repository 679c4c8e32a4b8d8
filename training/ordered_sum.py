"""Sums over processes in the order of a binary tree over ranks, independent of the communication library.

The bits of a sum then depend on the terms alone, so that runs of 1, 2, 4 or 8 processes can have the same bits.
"""

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

PIECE = 2**26  # elements that more than two processes sum at a time; the sum needs memory for twice as many
ALIGNED = 64  # elements: each tensor is as aligned in a piece as by itself


@torch.no_grad()
def sum_over_ranks(terms: list[Tensor], group: dist.ProcessGroup) -> None:
    """Replace `terms` (contiguous, any shapes, the same in all processes) by their sums over the processes of `group`.

    A sum of two terms has only one order, so the library adds those of two processes in place. With more, each process
    adds its part of the terms of all, piece by piece; the traffic is that of a ring all-reduce too.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size == 2:
        with dist._coalescing_manager(group):
            for term in terms:
                dist.all_reduce(term, group=group)
        return
    unit = size * ALIGNED
    for piece in cut(terms, PIECE // unit * unit):
        starts = [0, *accumulate(map(padded, piece))]
        flat = piece[0].new_empty(-(-starts.pop() // unit) * unit)
        places = [flat[start:][: len(x)] for start, x in zip(starts, piece, strict=True)]
        torch._foreach_copy_(places, piece)
        own = flat.view(size, -1)[rank]
        reduce_scatter(own, flat, group)
        dist.all_gather_into_tensor(flat, own, group=group)  # in place: its own part is there
        torch._foreach_copy_(piece, places)


def reduce_scatter(own: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
    """Write to `own` this process's part, a W-th, of the sum of `flat` over the processes of `group`."""
    if dist.get_world_size(group) == 2:
        dist.reduce_scatter_tensor(own, flat, group=group)
        return
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    tree_sum(list(received.view(-1, own.numel()).unbind()), out=own)


def tree_sum(rows: list[Tensor], out: Tensor) -> None:
    """Write to `out` the sum of two `rows` or more, in the order of `gradient_sum.sums_completed`; overwrites some."""
    first = -(-len(rows) // 2)
    torch.add(_tree(rows[:first]), _tree(rows[first:]), out=out)


def _tree(rows: list[Tensor]) -> Tensor:
    first = -(-len(rows) // 2)
    return rows[0] if first == len(rows) else _tree(rows[:first]).add_(_tree(rows[first:]))


def cut(terms: list[Tensor], size: int) -> list[list[Tensor]]:
    """Flat views that cover `terms`, in lists that take up at most `size` elements, a multiple of ALIGNED."""
    pieces, room = [[]], size
    for term in terms:
        rest = term.view(-1)
        while len(rest):
            if not room:
                pieces.append([])
                room = size
            view, rest = rest[:room], rest[room:]
            pieces[-1].append(view)
            room -= padded(view)
    return pieces


def padded(x: Tensor) -> int:
    """Elements that x takes up in a piece."""
    return -(-x.numel() // ALIGNED) * ALIGNED
