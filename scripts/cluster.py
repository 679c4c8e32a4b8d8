"""How the processes of a run were started, for `scripts.doctor`: by srun in a SLURM job, by torchrun, or alone."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from scripts.machine import Finding
from training.hardware import Hardware
from training.parallel import ranks, refuse_nowhere

Environment = Mapping[str, str]
PATIENCE = timedelta(seconds=60)  # of a process until the others have imported PyTorch, and for the network itself


@dataclass(frozen=True)
class Combination:
    """What does not go together. `says` and `fix` name variables of the environment as {NAME}."""

    when: Callable[[Environment], bool]
    says: str
    fix: str
    wrong: bool = True  # False: it would train, and something else is lost


def by_torchrun(environment: Environment) -> bool:
    return "TORCHELASTIC_RUN_ID" in environment


def tasks(environment: Environment) -> int:
    """That srun started together with this process. SLURM_NTASKS says how many the job has room for."""
    return int(environment.get("SLURM_STEP_NUM_TASKS", 1))


def nodes(environment: Environment) -> int:
    return int(environment.get("SLURM_STEP_NUM_NODES", 1))


# the first that holds is named
COMBINATIONS = (
    Combination(
        lambda e: by_torchrun(e) and tasks(e) > nodes(e),
        "srun started {SLURM_STEP_NUM_TASKS} tasks, and each is a torchrun that starts processes of its own",
        "srun python train.py without torchrun, as scripts/train.sbatch does",
    ),
    Combination(
        lambda e: by_torchrun(e) and "SLURM_JOB_ID" in e,
        "torchrun dies of SIGUSR1, which SLURM sends before a time limit: nothing would be saved then",
        "sbatch scripts/train.sbatch: srun starts one task a GPU",
        wrong=False,
    ),
    Combination(
        lambda e: int(e.get("SLURM_NTASKS", 1)) > 1 and tasks(e) == 1 and "WORLD_SIZE" not in e,
        "job {SLURM_JOB_ID} has {SLURM_NTASKS} tasks, and srun did not start this process: it would train alone",
        "srun before python, or sbatch scripts/train.sbatch",
    ),
    Combination(
        lambda e: tasks(e) > 1 and not (e.get("MASTER_ADDR") and e.get("MASTER_PORT")),
        "srun started {SLURM_STEP_NUM_TASKS} tasks, and MASTER_ADDR and MASTER_PORT do not say where they meet",
        "sbatch scripts/train.sbatch, or export both as it does",
    ),
    Combination(
        lambda e: nodes(e) > 1 and e.get("MASTER_ADDR", "").startswith(("localhost", "127.", "::1")),
        "MASTER_ADDR={MASTER_ADDR} is another machine on each of {SLURM_STEP_NUM_NODES} nodes",
        "MASTER_ADDR=$(scontrol show hostnames | head -n 1)",
    ),
)


def launch(environment: Environment = os.environ) -> Finding:
    """Its value is the number of processes."""
    for found in COMBINATIONS:
        if found.when(environment):
            says, fix = (text.format_map(environment) for text in (found.says, found.fix))
            return Finding(says, fix, value=None if found.wrong else ranks(environment)[1], wrong=found.wrong)
    _, size, _ = ranks(environment)
    said = "one process" if size == 1 else f"{size} processes"
    if "SLURM_JOB_ID" in environment:
        said += " of SLURM job {SLURM_JOB_ID}".format_map(environment)
    return Finding(said, facts={"processes": size}, value=size)


def network(hardware: Hardware) -> Finding:
    """Meets the other processes, which call this too, and adds a number of each: by NCCL on GPUs, else by gloo."""
    rank, size, local_rank = ranks()
    refuse_nowhere(size)
    backend, device = "gloo", hardware.device
    if device.type == "cuda":
        backend, device = "nccl", torch.device("cuda", local_rank % torch.cuda.device_count())
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # what takes too long raises here, and does not end the process
    try:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=PATIENCE)
        number = torch.ones(1, device=device)
        dist.all_reduce(number)
        number.item()
    except RuntimeError as error:
        place = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"rank {rank} of {size} does not reach the others by {backend}, to meet at {place} ({reason}); "
            "NCCL_SOCKET_IFNAME=INTERFACE or GLOO_SOCKET_IFNAME=INTERFACE for another network, NCCL_DEBUG=INFO for more"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return Finding(f"{size} processes reach each other by {backend}")
