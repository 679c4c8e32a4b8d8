"""How the processes of a run were started, for `scripts.doctor`: by srun in a SLURM job, by torchrun, or alone."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scripts.machine import Finding

Environment = Mapping[str, str]


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
        lambda e: nodes(e) > 1 and e["MASTER_ADDR"].startswith(("localhost", "127.", "::1")),
        "MASTER_ADDR={MASTER_ADDR} is another machine on each of {SLURM_STEP_NUM_NODES} nodes",
        "MASTER_ADDR=$(scontrol show hostnames | head -n 1)",
    ),
)


def launch(environment: Environment = os.environ) -> Finding:
    for found in COMBINATIONS:
        if found.when(environment):
            says, fix = (text.format_map(environment) for text in (found.says, found.fix))
            return Finding(says, fix, wrong=found.wrong)
    if "SLURM_JOB_ID" not in environment:
        return Finding("by torchrun" if by_torchrun(environment) else "one process, outside of SLURM")
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    return Finding(f"{tasks(environment)} tasks of SLURM job {environment['SLURM_JOB_ID']}, requeued {restarts} times")
