"""`scripts/train.sbatch`, doctor and a sweep on a real SLURM: `pytest -m slurm`."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import SMALL, contents, metrics, small_run
from tests.slurm.cluster import ROOT, Cluster, obstacle, running
from train import train
from training.checkpoint import open_checkpoint

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))]

TASKS = 4
STEPS = 400
OWN = (
    "train.log_every=1",
    "train.eval_every=50",
    "train.sample_every=0",
    "model.dropout=0.1",
    "train.micro_batch=2",
    f"train.steps={STEPS}",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture(scope="module")
def whole(cluster, one_thread) -> Path:
    """The run that nobody stops, in this process."""
    train(small_run(cluster.folder, *OWN), cluster.folder / "whole")
    return cluster.folder / "whole"


def story(cluster: Cluster) -> list[str]:
    text = ["data=text", f"data.files={cluster.folder / 'corpus.txt'}", f"data.cache_dir={cluster.folder / 'cache'}"]
    return [*text, *SMALL, *OWN]


def arguments(cluster: Cluster, name: str) -> list[str]:
    return [*story(cluster), f"hydra.run.dir={cluster.folder / name}"]


def test_ten_signals_at_random_steps_leave_no_trace(cluster, whole):
    job = cluster.sbatch("signalled", *arguments(cluster, "signalled"), tasks=TASKS)
    for life in range(1, 11):
        assert job.say(rf"^step {random.randint(1, 20) + 20 * life:>6}  loss")
        job.signal("USR1")
        job.say("^stopped by SIGUSR1", times=life)
    assert job.end() == 0
    assert contents(open_checkpoint(cluster.folder / "signalled")) == contents(open_checkpoint(whole))
    assert metrics(cluster.folder / "signalled") == metrics(whole)


def test_a_job_that_is_cancelled_is_saved_and_not_requeued(cluster, whole):
    job = cluster.sbatch("cancelled", *arguments(cluster, "cancelled"), tasks=TASKS)
    job.say("^step +9  loss")
    job.signal("TERM")
    assert job.end() == 143
    assert open_checkpoint(cluster.folder / "cancelled").step >= 9
    assert not subprocess.check_output(["squeue", "--noheader"])


def test_an_array_is_a_run_for_each_of_its_numbers(cluster, whole):
    own = ["train.seed=${oc.env:SLURM_ARRAY_TASK_ID}", "train.steps=3", "hydra.run.dir=${oc.env:RUNS}/${train.seed}"]
    options = ("--array=5,6", f"--export=ALL,RUNS={cluster.folder}")
    assert cluster.sbatch("array", *story(cluster), *own, tasks=1, options=options).end() == 0
    seeds = [open_checkpoint(cluster.folder / name).meta["settings"]["train"]["seed"] for name in ("5", "6")]
    assert seeds == [5, 6]


def in_a_job(*command: str, tasks: int) -> subprocess.CompletedProcess:
    """In an allocation, without train.sbatch."""
    meeting = "export MASTER_ADDR=localhost MASTER_PORT=29876; exec"
    allocated = ["salloc", f"--ntasks={tasks}", "bash", "-c", f'{meeting} "$@"', "bash", *command]
    return subprocess.run(allocated, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_doctor_in_a_job(cluster, whole):
    """Through srun its processes meet; without it they never would."""
    command = [sys.executable, "-m", "scripts.doctor", *story(cluster)]
    started = in_a_job("srun", *command, tasks=2)
    report = json.loads(started.stdout.splitlines()[-1])["checks"]
    assert report["network"]["text"] == "2 processes reach each other by gloo", started.stderr
    assert (report["launch"]["status"], report["launch"]["facts"]) == ("ok", {"processes": 2})
    assert started.stdout.count("ok    launch") == 1, "the first process alone prints"
    alone = in_a_job(*command, tasks=2)
    assert json.loads(alone.stdout.splitlines()[-1])["wrong"] == ["launch"]


def test_a_sweep_of_two_jobs(cluster, whole):
    """And a third that is refused: the others end, and the sweep says so."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs `uv sync --group slurm`")
    launcher = ["-m", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=10", "hydra.launcher.mem_gb=0"]
    own = ["train.steps=3", "optim.lr=1e-3,3e-3,-1", f"hydra.sweep.dir={cluster.folder / 'sweep'}"]
    command = [sys.executable, "train.py", *launcher, *story(cluster), *own]
    swept = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert swept.returncode == 2, swept.stderr
    assert swept.stderr.splitlines()[-1] == "error: optim.lr=-1.0 must be positive, finite and at most 1e+06"
    for run, lr in (("0", 0.001), ("1", 0.003)):
        checkpoint = open_checkpoint(cluster.folder / "sweep" / run)
        assert (checkpoint.step, checkpoint.meta["settings"]["optim"]["lr"]) == (3, lr)
