"""How the processes of a run were started, for `scripts.doctor`: by srun in a SLURM job, by torchrun, or alone."""

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from scripts.machine import Finding
from training.hardware import Hardware
from training.rendezvous import check_address, number_in, ranks

Environment = Mapping[str, str]
PATIENCE = timedelta(seconds=60)  # for the other processes to import PyTorch, and for the network itself


def launch(environment: Environment = os.environ) -> Finding:
    """How the processes were started, or the first thing that is wrong with that. The value is their number."""
    job = environment.get("SLURM_JOB_ID")
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    # tasks and nodes of the srun step that started this process; SLURM_NTASKS is the number that the job has room for
    names = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_NTASKS"
    tasks, nodes, room = (number_in(environment, name) for name in names)
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT")
    if by_torchrun and tasks > nodes:
        says = f"srun started {tasks} tasks, and each is a torchrun that starts processes of its own"
        return Finding(says, "srun python train.py without torchrun, as scripts/train.sbatch does", wrong=True)
    if by_torchrun and job:  # not wrong: it would train
        says = "torchrun dies of SIGUSR1, which SLURM sends before a time limit: nothing would be saved then"
        return Finding(says, "sbatch scripts/train.sbatch: srun starts one task a GPU", value=ranks(environment)[1])
    if job and room > 1 and tasks == 1 and "WORLD_SIZE" not in environment:
        says = f"job {job} has {room} tasks, and srun did not start this process: it would train alone"
        return Finding(says, "srun before python, or sbatch scripts/train.sbatch", wrong=True)
    if tasks > 1 and not (address and port):
        says = f"srun started {tasks} tasks, and MASTER_ADDR and MASTER_PORT do not say where they meet"
        return Finding(says, "sbatch scripts/train.sbatch, or export both as it does", wrong=True)
    if nodes > 1 and address.startswith(("localhost", "127.", "::1")):
        says = f"MASTER_ADDR={address} is another machine on each of {nodes} nodes"
        return Finding(says, "MASTER_ADDR=$(scontrol show hostnames | head -n 1)", wrong=True)
    _, size, _ = ranks(environment)
    said = "one process" if size == 1 else f"{size} processes"
    if job:
        said += f" of SLURM job {job}"
    return Finding(said, facts={"processes": size}, value=size)


def network(hardware: Hardware) -> Finding:
    """All-reduce one number with the other processes, which call this too: over NCCL on GPUs, else over gloo."""
    rank, size, local_rank = ranks()
    check_address(size)
    backend, device = "gloo", hardware.device
    if device.type == "cuda":
        backend, device = "nccl", torch.device("cuda", local_rank % torch.cuda.device_count())
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a timeout raises here and does not end the process
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
