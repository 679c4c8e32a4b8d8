"""The processes of a benchmark, one a GPU of this host: they start once, and all of its cells run in them."""

import gc
import logging
import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch._dynamo  # any optimizer imports it at its first step; here that is before gc.freeze
import torch.distributed as dist
import torch.multiprocessing as mp

from training.hardware import Hardware, set_up
from training.parallel import ALONE, World


@dataclass(frozen=True)
class Host:
    """The processes, as one of them sees them.

    Attributes:
        hardware: this process's.
        worlds: size -> the world of the first `size` processes; only worlds that this process is in.
    """

    hardware: Hardware
    worlds: dict[int, World]

    @property
    def world(self) -> World:
        """All processes."""
        return self.worlds[max(self.worlds)]


def on_each_gpu(sizes: list[int], function: Callable[..., Any], settings: Any) -> Any:
    """Run `function(host, settings)` in max(sizes) processes, over NCCL or gloo; return the first one's result.

    Raises:
        ValueError: a process raised one, or ran out of memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        found = Path(folder) / "found"
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it logs the processes that it ends
        try:
            mp.spawn(_run, (sizes, port, function, settings, found), nprocs=max(sizes))
        except (mp.ProcessExitedException, mp.ProcessRaisedException):
            if refusals := sorted(Path(folder).glob("refused_by_*")):
                raise ValueError(refusals[0].read_text()) from None
            raise
        return pickle.loads(found.read_bytes())


def _run(rank: int, *given: Any) -> None:
    try:
        _compute(rank, *given)
    except (ValueError, torch.OutOfMemoryError) as error:  # the others may wait for this one: its exit ends them
        *_, found = given
        refusal, unfinished = str(error), found.with_name(f"refusal_{rank}")
        if isinstance(error, torch.OutOfMemoryError):
            refusal = (
                f"process {rank} is out of memory ({refusal.partition('. GPU')[0]}); use smaller sizes or more GPUs"
            )
        unfinished.write_text(refusal)
        unfinished.rename(found.with_name(f"refused_by_{rank}"))  # only once whole: another one's exit may end this one
        sys.exit(1)


def _compute(rank: int, sizes: list[int], port: int, function: Callable[..., Any], settings: Any, found: Path) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast is not needed, and not allowed in every container
    count = max(sizes)
    store = dist.TCPStore("127.0.0.1", port, count, is_master=rank == 0)
    world = World(rank, count, rank, dist.PrefixStore("all", store))
    hardware = set_up(settings.hardware, world, trains=True)
    world.mesh(hardware.device)  # the process group begins
    worlds = {count: world} | ({1: ALONE} if rank == 0 else {})
    for size in sizes:
        if 1 < size < count:
            group = dist.new_group(range(size))  # all processes make it
            if rank < size:
                named = dist.PrefixStore(f"first_{size}", store)
                worlds[size] = World(rank, size, rank, named, group)
    gc.freeze()  # imported objects stay: collecting what a cell leaves does not scan them
    result = function(Host(hardware, worlds), settings)
    if rank == 0:
        found.write_bytes(pickle.dumps(result))
    world.close()
