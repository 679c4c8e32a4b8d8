"""Several processes, one run: their ranks, what they communicate, and the sum of their gradients.

`torchrun --nproc-per-node W train.py ...`, or one task a GPU by srun. Each process computes its share of a step's rows
with the whole model, or with parallel.data=shard a block at a time. The gradients of all micro-batches are summed as
one binary tree over their numbers in the step: its lower levels within a process, its upper ones between processes. So
any power-of-two number of processes adds the same numbers in the same order and ends with the same bits (1, 2 and 4 are
tested), as long as `train.micro_batch` is the same and divides a process's rows. No order is left to a communication
library, and the traffic is that of a ring all-reduce.

Rare messages (the run's folder, an evaluation's losses, a summary) go through the key-value store of the rendezvous
(training/rendezvous.py); what each step needs travels as the last elements of the gradient.
"""

import json
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from model.context import METHODS
from training.ordered_sum import sum_over_ranks
from training.step_messages import StepMessages
from training.watchdog import Failure, Watchdog

MODES = ("replicate", "shard")
CONTEXT_METHODS = ("auto", *METHODS)
CHECK_EVERY = 32  # steps between two comparisons of the processes' weights
IN_A_STEP, BETWEEN_STEPS = 45.0, 600.0  # seconds that a process may be late; between: evaluation, samples, saving
FOREVER = timedelta(days=30)  # a process that never arrives is found by training/watchdog.py, not by a timeout
MEETING = timedelta(minutes=5)  # for all to arrive


@dataclass
class ParallelConfig:
    data: str = "replicate"  # replicate | shard: each process holds the whole model, or a part of each weight
    context: int = 1  # processes that split each row's tokens among themselves
    context_method: str = "auto"  # auto | heads | gather | ring: what attention exchanges, see training/README.md

    def __post_init__(self) -> None:
        for key, choices in (("data", MODES), ("context_method", CONTEXT_METHODS)):
            if getattr(self, key) not in choices:
                raise ValueError(f"parallel.{key}={getattr(self, key)} is not one of {', '.join(choices)}")
        if self.context < 1:
            raise ValueError(f"parallel.context={self.context} must be at least 1")


class NullObject:
    """Replaces, in the other processes, what only the first one has: every attribute and call returns itself."""

    def __getattr__(self, name: str) -> Self:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class World:
    """The processes of a run, as one of them sees them: their ranks, and what they communicate.

    Without a store this process is alone, or a run of `size` processes is only planned.

    Attributes:
        rank, size: this process's number, and how many there are.
        local_rank: its number on its host, which chooses its GPU.
        hosts: the host of each rank.
        step: steps done, as far as the host knows.
        collectives_entered: steps and collectives that it has entered; processes that wait for it have entered more.
        context: neighbouring ranks that share each row's tokens (context parallelism).
        shards: whether each process holds a part of every weight (training/shard.py).
        patience: seconds that the others wait for it in a collective before it counts as hanging.
        messages: the numbers that are summed with the gradients of each step.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, local_rank: int = 0, store: dist.Store | None = None, group: Any = None
    ) -> None:
        self.rank, self.size, self.local_rank, self._store = rank, size, local_rank, store
        self.collectives_entered = self._gathers = 0
        self.context, self.shards = 1, False
        self.watchdog: Watchdog | None = None
        self._group = group
        self.begin_run()
        self.hosts = self.all_gather(socket.gethostname(), MEETING)

    def begin_run(self) -> None:
        """Start afresh: in a sweep the same processes train one run after another."""
        self.step = self._sums = 0
        self.patience = math.inf  # preparing a text or compiling takes long
        self.messages = StepMessages(self)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Its group among the `data_size` that have batches of their own; processes that share rows are one group."""
        return self.rank // self.context

    @property
    def data_size(self) -> int:
        return self.size // self.context

    def arrange(self, parallel: ParallelConfig) -> None:
        """Set which processes share rows, and whether all shard the weights.

        Raises:
            ValueError: `parallel.context` does not divide the number of processes.
        """
        context = parallel.context
        if self.size % context:
            raise ValueError(
                f"parallel.context={context} does not divide {self.size}, the number of processes; start the run with "
                f"torchrun --nproc-per-node {context}, or use parallel.context=1"
            )
        self.context, self.shards = context, parallel.data == "shard" and self.size > 1

    def describe(self, rank: int) -> str:
        return f"rank {rank} of {self.size} on {self.hosts[rank]}"

    # --- rare collectives, through the store

    def all_gather(self, value: Any, within: timedelta = FOREVER) -> list[Any]:
        """Return each process's value, by rank. All must call it, and none returns before all have. `value` is JSON."""
        if self._store is None:
            return [value] * self.size
        keys = [f"all_gather/{self._gathers}/{rank}" for rank in range(self.size)]
        self.collectives_entered += 1
        with self.communicating():
            self._store.set(keys[self.rank], json.dumps(value))
            self._store.wait(keys, within)
            found = [json.loads(text) for text in self._store.multi_get(keys)]
            if self._gathers:  # every process that is here has read all of the one before
                self._store.delete_key(f"all_gather/{self._gathers - 1}/{self.rank}")
        self._gathers += 1
        return found

    def broadcast(self, value: Any) -> Any:
        """Return the first process's value; all must call it."""
        return self.all_gather(value if self.is_first else None)[0]

    def on_first(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` in the first process; in the others a function that does nothing and returns a `NullObject`."""
        return function if self.is_first else NullObject()

    def local_sequences(self, sequences: int, micro_batch: int | str | None, seq_len: int) -> int:
        """This process's sequences of a step's; ValueError where they cannot be shared equally."""
        groups = self.data_size
        share, rest = divmod(sequences, groups)
        if rest or not share:
            nearest = sorted({max(1, share), share + 1})
            nearest = " or ".join(str(number * groups * seq_len) for number in nearest)
            fewer = next(number for number in range(groups - 1, 0, -1) if sequences % number == 0)
            raise ValueError(
                f"train.batch_tokens={sequences * seq_len} is {sequences} sequences, which {self.size} processes "
                f"cannot share equally; use {nearest}, or fewer processes: {fewer * self.size // groups}"
            )
        if isinstance(micro_batch, int) and share % micro_batch:
            each = f" that each of {self.size} processes has" if self.size > 1 else ""
            raise ValueError(
                f"train.micro_batch={micro_batch} does not divide the {share} sequences of a step{each} "
                f"(train.batch_tokens={sequences * seq_len} / data.seq_len={seq_len}); use one that does"
            )
        return share

    # --- the sum of a step

    def begin_step(self, device: torch.device) -> None:
        if self.size > 1:
            self.messages.clock.begin(device)
            if self._sums > 1:
                self.patience = max(IN_A_STEP, self.messages.clock.last_ms / 1e3)
            self.collectives_entered += 1

    def suspend_timeout(self) -> None:
        """Let the first process take any time until its next step; if it dies meanwhile, the others still notice."""
        if self.is_first:
            self.patience = math.inf

    @torch.no_grad()
    def sum(self, terms: list[Tensor], loss: Tensor, weights: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The sum of `terms` (fp32, any shapes) and `loss` over all processes, as a binary tree over ranks.

        The sums are in the memory of `terms`. Where weights are sharded, `terms` are sums already, and stay.
        """
        if self.size == 1:
            return terms, loss
        if self._sums % CHECK_EVERY == 0 and not self.shards:
            self.messages.check_weights(weights)
        tail = self.messages.pack(loss)
        terms = [term.contiguous() for term in terms]
        self.collectives_entered += 1
        with self.communicating():
            sum_over_ranks([tail] if self.shards else [*terms, tail], self._group_for(loss.device))
        self.patience = BETWEEN_STEPS
        self._sums += 1
        return terms, tail[0]

    def _group_for(self, device: torch.device) -> Any:
        """The process group, created at its first use, when the device is known."""
        if self._group is None:
            backend = {"cpu": "gloo", "cuda": "nccl"}[device.type]
            store = dist.PrefixStore("group", self._store)
            own = device if device.type == "cuda" else None
            # only the watchdog names a process that hangs, except in what it does not count: exchanges inside a step
            within = FOREVER if self.context == 1 and not self.shards else None
            ranks = {"rank": self.rank, "world_size": self.size, "device_id": own}
            with self.communicating():
                dist.init_process_group(backend, timeout=within, store=store, **ranks)
            self._group = dist.group.WORLD
        return self._group

    def mesh(self, device: torch.device) -> dist.DeviceMesh:
        """The processes as a mesh (data, context): neighbours along `context` share each row's tokens."""
        self._group_for(device)
        names = ("data", "context")
        with self.communicating():
            return dist.init_device_mesh(device.type, (self.size // self.context, self.context), mesh_dim_names=names)

    def flat_mesh(self, device: torch.device) -> dist.DeviceMesh:
        """All processes in one row."""
        return dist.DeviceMesh.from_group(self._group_for(device), device.type)

    # --- the end

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Wrap communication, which fails if another process has ended; the watchdog then names it and ends this."""
        try:
            yield
        except RuntimeError as error:
            if self.watchdog is None or isinstance(error, torch.OutOfMemoryError):
                raise
            self.watchdog.wait_for_the_end(str(error))

    def fail(self, message: str, code: int) -> None:
        """Tell the others why this process ends early."""
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog.post(Failure(self.rank, self.hosts[self.rank], self.step, message, code))

    def close(self) -> None:
        """Leave the group, once all processes are ready to."""
        if self.size == 1:
            return
        self.all_gather("end")
        if self.watchdog is not None:
            self.watchdog.stop()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group()
        if not self.is_first:
            self._store.set(f"left/{self.rank}", "")
        else:  # the store may run in this process
            with suppress(RuntimeError):
                self._store.wait([f"left/{rank}" for rank in range(1, self.size)], timedelta(seconds=30))


ALONE = World()
