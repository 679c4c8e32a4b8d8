"""How the processes of a run find each other: torchrun's or srun's environment, and the store that they meet at."""

import os
from collections.abc import Mapping
from functools import cache

import torch.distributed as dist

from training.parallel import ALONE, MEETING, World
from training.watchdog import LIMITS, Limits, Watchdog


def ranks(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """(rank, processes, rank on this host): torchrun's, else those of a srun step of several tasks, else alone.

    SLURM_NTASKS will not do: it is also set in a shell of salloc, where one process would wait for others for ever.
    """
    if "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    else:
        return 0, 1, 0
    if missing := [name for name in names if name not in environment]:
        raise ValueError(f"{missing[0]} is not set beside {names[1]}; start with torchrun or srun, or unset {names[1]}")
    rank, size, local_rank = (number_in(environment, name) for name in names)
    if not 0 <= rank < size:
        limit = f"0 to {size - 1}, as {names[1]}={size} says" if size > 0 else f"possible with {names[1]}={size}"
        raise ValueError(f"{names[0]}={rank} is not {limit}; start with torchrun or srun")
    return rank, size, local_rank


def number_in(environment: Mapping[str, str], name: str) -> int:
    """A variable of torchrun or srun, 1 where it is not set."""
    try:
        return int(environment.get(name, 1))
    except ValueError:
        raise ValueError(f"{name}={environment[name]} is no number; start with torchrun or srun") from None


def check_address(size: int) -> None:
    """Raise ValueError unless MASTER_ADDR and MASTER_PORT name a place where `size` processes can meet."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ValueError(f"{name} is not set, and {size} processes must meet; torchrun sets it")
    port = os.environ["MASTER_PORT"]
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"MASTER_PORT={port} is no port; use one number from 1 to 65535 for all processes")


@cache
def this_world() -> World:
    """The processes that this one was started with, as the environment says; ValueError if that is incomplete."""
    return meet(*ranks())


def meet(rank: int, size: int, local_rank: int, limits: Limits = LIMITS) -> World:
    """This process among `size` that meet at MASTER_ADDR:MASTER_PORT.

    Raises:
        ValueError: the others do not arrive within five minutes, or the address is not valid.
    """
    if size == 1:
        return ALONE
    check_address(size)
    try:
        meeting = dist.rendezvous("env://", rank=rank, world_size=size, timeout=MEETING)
        # torchrun --max-restarts keeps the store with what earlier processes wrote in it, so each restart has a prefix;
        # but each host counts its own restarts, so processes on several hosts have no number in common
        alone = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
        store = dist.PrefixStore(f"run {attempt}", next(iter(meeting))[0])
        world = World(rank, size, local_rank, store)
    except RuntimeError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"rank {rank} of {size} cannot meet the others at {place} ({reason}); start all with that address"
        ) from error
    world.watchdog = Watchdog(world, store, limits)
    return world
