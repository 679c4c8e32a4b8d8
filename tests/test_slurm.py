"""`scripts/train.sbatch` without SLURM: a fake srun starts the tasks, a fake scontrol notes what is requeued.

tests/slurm/ shows the same on a real one, where it is installed.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.runs import SMALL, contents, metrics, small_run
from train import train
from training.checkpoint import open_checkpoint
from training.stop import StopRequest

ROOT = Path(__file__).resolve().parent.parent
JOB = "77"

SRUN = """
import os, runpy, sys
sys.argv = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
tasks = os.environ["SLURM_NTASKS"]
os.environ |= {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": tasks}
started = []
for rank in map(str, range(int(tasks))):
    if not (task := os.fork()):
        os.environ |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        sys.exit(runpy.run_path(sys.argv[0], run_name="__main__") and 0)
    started.append(task)
codes = [os.waitstatus_to_exitcode(os.waitpid(task, 0)[1]) for task in started]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("localhost", "another", sep="\\n")
else:
    assert sys.argv[1:] == ["requeue", os.environ["SLURM_JOB_ID"]], sys.argv
    open("requeued", "x").close()
"""
# train.py as it is; but in its third step, before it was ever requeued, the last task gets the signal
SIGNALLED = """
import itertools, os, signal, sys
sys.argv = sys.argv[1:]
import train
from training import stepper
real, count = stepper.training_step, itertools.count(1)
def training_step(*arguments, **options):
    is_last = int(os.environ["SLURM_PROCID"]) == int(os.environ["SLURM_NTASKS"]) - 1
    if next(count) == 3 and is_last and os.environ["SLURM_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGUSR1)
    return real(*arguments, **options)
stepper.training_step = training_step
train.main()
"""


@dataclass
class Cluster:
    """Where jobs run; `python` is what stands in for the project's own."""

    folder: Path
    python: Path

    def sbatch(
        self, *arguments: str, tasks: int = 1, lives: int = 3, name: str = "flashgpt"
    ) -> list[subprocess.CompletedProcess]:
        """Run the job, again for as long as it requeues itself, at most `lives` times."""
        ended = []
        while len(ended) < lives:
            own = {"SLURM_JOB_ID": JOB, "SLURM_JOB_NAME": name, "SLURM_JOB_NODELIST": "node[1-2]"}
            own |= {"SLURM_NTASKS": str(tasks), "SLURM_CPUS_PER_TASK": "1", "SLURM_RESTART_COUNT": str(len(ended))}
            own |= {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "PYTHON": str(self.python)}
            script = ["bash", ROOT / "scripts" / "train.sbatch", *arguments]
            kept = {"cwd": self.folder, "env": {**os.environ, **own, "OMP_NUM_THREADS": "1"}}
            ended.append(subprocess.run(script, **kept, capture_output=True, text=True, timeout=120))
            if not (self.folder / "requeued").exists():
                break
            (self.folder / "requeued").unlink()
        return ended


@pytest.fixture
def cluster(tmp_path) -> Callable[[str], Cluster]:
    """A cluster for jobs whose python is the given script, and whose srun is run by `interpreter`."""

    def start(python: str, interpreter: str = sys.executable) -> Cluster:
        (tmp_path / "bin").mkdir()
        for name, source in (("srun", SRUN), ("scontrol", SCONTROL), ("python", python)):
            program = tmp_path / "bin" / name
            program.write_text(f"#!{interpreter if name == 'srun' else sys.executable}\n{source}")
            program.chmod(0o755)
        return Cluster(tmp_path, tmp_path / "bin" / "python")

    return start


@pytest.mark.usefixtures("one_thread")
def test_a_job_that_is_signalled_ends_with_the_bits_of_one_that_is_not(cluster, quick_python):
    """Two tasks, one of which gets the signal; beside it a run of one process."""
    job = cluster(SIGNALLED, quick_python)
    own = ["train.steps=8", "train.log_every=1", "train.eval_every=8", "model.dropout=0.1", "train.micro_batch=4"]
    train(small_run(job.folder, *own), job.folder / "whole")
    text = ["data=text", f"data.files={job.folder / 'corpus.txt'}", f"data.cache_dir={job.folder / 'cache'}"]
    first, second = job.sbatch(*text, *SMALL, *own, tasks=2)
    assert (first.returncode, second.returncode) == (138, 0), first.stderr + second.stderr
    assert "stopped by SIGUSR1" in first.stdout
    run = job.folder / "runs" / "flashgpt" / JOB
    assert re.search(rf"resumed    from {run.resolve()}/checkpoints/step_00000[345] ", second.stdout), second.stdout
    assert contents(open_checkpoint(run)) == contents(open_checkpoint(job.folder / "whole"))
    assert metrics(run) == metrics(job.folder / "whole")


# ends with a code, after a step if it is to make one; MASTER_ADDR and the run's folder are what the script says
ENDING = """
import os, sys
from pathlib import Path
assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("localhost", "10077")
assert os.environ["SRUN_CPUS_PER_TASK"] == os.environ["SLURM_CPUS_PER_TASK"]
program, code, steps, *_, resume, folder = sys.argv[1:]
assert (program, resume) == ("train.py", "resume=auto")
last = Path(folder.removeprefix("hydra.run.dir=").strip('"'), "checkpoints", "last")
last.parent.mkdir(parents=True, exist_ok=True)
if steps == "steps":
    last.unlink(missing_ok=True)
    last.symlink_to("step_00000" + os.environ["SLURM_RESTART_COUNT"])
if code == "killed":
    os.kill(os.getpid(), 10)
sys.exit(int(code))
"""


@pytest.mark.parametrize("code", [0, 1, 2, 65, 75, 137, 138, 143])
def test_what_is_requeued(cluster, code):
    """Only a run that has saved and has more to do."""
    ended = cluster(ENDING).sbatch(str(code), "steps")
    assert [life.returncode for life in ended] == ([code] * 3 if code in (75, 138) else [code]), ended


@pytest.mark.parametrize("end", ["138", "75", "killed"])
def test_a_restart_that_made_no_step_is_the_last(cluster, end):
    first, second = cluster(ENDING).sbatch(end, "none")
    assert first.returncode == second.returncode == int(end if end != "killed" else 138)
    assert first.stderr == ""
    assert second.stderr == ("not requeued: this restart made no step past the beginning; give it a longer --time\n")


def test_a_folder_that_is_named_is_the_one_that_is_watched(cluster):
    job = cluster(ENDING)
    ended = job.sbatch("138", "steps", "hydra.run.dir=my/run")
    assert [life.returncode for life in ended] == [138] * 3
    assert (job.folder / "my" / "run" / "checkpoints" / "last").is_symlink()


def test_a_checkpoint_to_begin_with_is_refused(cluster):
    (refused,) = cluster(ENDING).sbatch("0", "steps", "resume=runs/first")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: resume=runs/first: a requeued job would begin there again; hydra.run.dir=")


@pytest.mark.parametrize("folder", ["runs/${oc.env:SLURM_ARRAY_TASK_ID}", '"my/run"', "'my/run'"])
def test_a_folder_that_only_hydra_can_read_is_refused(folder, cluster):
    """Its checkpoints were not found, so the second life was said to have made no step and was the last."""
    (refused,) = cluster(ENDING).sbatch("75", "steps", f"hydra.run.dir={folder}")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: hydra.run.dir={folder}: this script looks into the folder")
    assert refused.stderr.count("\n") == 1


def test_a_job_may_be_named_after_what_it_varies(cluster):
    """Its run lies in a folder of that name, which Hydra reads only in quotes."""
    job = cluster('import sys\nopen("argument", "x").write(sys.argv[-1])')
    (ended,) = job.sbatch(name="lr=3e-4, the first")
    assert ended.returncode == 0, ended.stderr
    read = OverridesParser.create().parse_override((job.folder / "argument").read_text())
    assert (read.key_or_group, read.value()) == ("hydra.run.dir", f"runs/lr=3e-4, the first/{JOB}")


# --- a signal before the run listens


def test_a_signal_while_pytorch_is_imported_waits(tmp_path):
    """Here what is imported as PyTorch is a file that gets the signal."""
    (tmp_path / "torch.py").write_text("import os, signal, sys\nos.kill(os.getpid(), signal.SIGUSR1)\nsys.exit(7)\n")
    found = subprocess.run([sys.executable, "train.py"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert found.returncode == 7


def test_a_signal_that_waited_is_a_request_to_stop():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        signal.raise_signal(signal.SIGUSR1)  # to this thread: others of this process do not block it
        with StopRequest() as stop:
            assert (stop.poll(), stop.reason, stop.exit_code) == (True, "SIGUSR1", 138)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
