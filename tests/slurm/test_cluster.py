"""`scripts/train.sbatch` on a real SLURM: `pytest -m slurm tests/slurm`."""

import random
import subprocess
from pathlib import Path

import pytest

from tests.runs import SMALL, contents, metrics, small_run
from tests.slurm.cluster import Cluster, obstacle, running
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


def arguments(cluster: Cluster, name: str) -> list[str]:
    text = ["data=text", f"data.files={cluster.folder / 'corpus.txt'}", f"data.cache_dir={cluster.folder / 'cache'}"]
    return [*text, *SMALL, *OWN, f"hydra.run.dir={cluster.folder / name}"]


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
