"""Muon's work shared among processes: each stack of matrices is orthogonalized once, by the process that owns it."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from training.parallel import World

Compute = Callable[[Tensor], Tensor]  # (matrices, rows, columns) -> the same shape, in `dtype`


class Owners:
    """Which process orthogonalizes which stacks, and how the others get the results.

    world: the processes; they all hold whole matrices, or with `world.shards` some rows of each.
    shapes: of the stacks, (matrices, rows, columns), whole.
    costs: of each, in FLOPs.
    dtype: of the results.
    device: where the matrices lie.
    """

    def __init__(
        self, world: World, shapes: list[torch.Size], costs: list[float], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._world, self._shapes, self._dtype = world, shapes, dtype
        self._none = torch.empty(0, dtype=dtype, device=device)  # the result of a process without a stack
        self.owners = dealt_by_cost(costs, world.size)
        self._group = world.flat_mesh(device).get_group()

    def computed(self, directions: Iterable[Tensor], compute: Compute) -> Iterator[Tensor]:
        """Yield `compute` of each stack; directions and results are as this process holds them: whole, or its rows."""
        with self._world.communicating():
            yield from (self._from_rows if self._world.shards else self._from_wholes)(directions, compute)

    def _from_wholes(self, directions: Iterable[Tensor], compute: Compute) -> list[Tensor]:
        updates, arriving = [], []
        for owner, direction in zip(self.owners, directions, strict=True):
            is_own = owner == self._world.rank
            update = compute(direction) if is_own else torch.empty_like(direction, dtype=self._dtype)
            self._world.collectives_entered += 1
            arriving.append(dist.broadcast(update, group=self._group, group_src=owner, async_op=True))
            updates.append(update)
        for work in arriving:
            work.wait()
        return updates

    def _from_rows(self, directions: Iterable[Tensor], compute: Compute) -> list[Tensor]:
        rank, ranks, directions = self._world.rank, range(self._world.size), list(directions)
        owned = [[i for i, owner in enumerate(self.owners) if owner == rank] for rank in ranks]
        pieces = self._exchange(
            [[directions[i] for i in owned[to]] for to in ranks],
            [[self._rows_of(sender, i) for i in owned[rank]] for sender in ranks],
        )
        parts = []
        for i, rows in zip(owned[rank], zip(*pieces, strict=True), strict=True):
            whole = compute(torch.cat(rows, dim=1))
            parts.append(whole.split([self._rows_of(to, i)[1] for to in ranks], dim=1))
        back = self._exchange(
            [[part[to] for part in parts] for to in ranks],
            [[self._rows_of(rank, i) for i in owned[owner]] for owner in ranks],
        )
        arrived = {i: update for owner in ranks for i, update in zip(owned[owner], back[owner], strict=True)}
        return [arrived[i] for i in range(len(directions))]

    def _rows_of(self, rank: int, index: int) -> tuple[int, int, int]:
        """The shape of `rank`'s rows of a stack, as FSDP2 shards them."""
        matrices, rows, columns = self._shapes[index]
        most = -(-rows // self._world.size)
        return matrices, min(most, max(0, rows - rank * most)), columns

    def _exchange(self, sent: list[list[Tensor]], shapes: list[list[tuple[int, ...]]]) -> list[list[Tensor]]:
        """An all-to-all of lists: sends `sent[r]` to rank r; returns what each rank sent here, tensors of `shapes`."""
        flat = torch.cat([x.reshape(-1) for xs in sent for x in xs] or [self._none])
        sizes = [[torch.Size(shape).numel() for shape in of_rank] for of_rank in shapes]
        received = flat.new_empty(sum(map(sum, sizes)))
        self._world.collectives_entered += 1
        splits = list(map(sum, sizes)), [sum(x.numel() for x in xs) for xs in sent]
        dist.all_to_all_single(received, flat, *splits, group=self._group)
        pieces = iter(received.split([size for of_rank in sizes for size in of_rank]))
        return [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]


def dealt_by_cost(costs: list[float], size: int) -> list[int]:
    """The owner of each stack: most expensive first, to the rank with the least work so far; the lowest on a tie."""
    loads, owners = [0.0] * size, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners
