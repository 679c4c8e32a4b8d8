"""A SLURM of one node in a folder: the installed munged, slurmctld and slurmd; most of its CPUs and GPUs are not there.

Debian and Ubuntu, as root: apt-get install --no-install-recommends munge slurmctld slurmd slurm-client
"""

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
GPUS = 8
NULL_DEVICE = os.makedev(1, 3)

# no cgroups and no accounting, which containers and test machines lack; config_overrides: more CPUs than there are.
# cred_expire: how long a requeued job waits
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName={host} CPUs=128 Gres=gpu:{gpus} RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def obstacle() -> str | None:
    """Why there can be no cluster here, or None."""
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"needs SLURM ({', '.join(missing)})"
    return None if os.geteuid() == 0 else "needs root, as slurmd does"


@dataclass
class Job:
    """A job that was submitted; its output is kept over all its lives."""

    number: str
    output: Path
    process: subprocess.Popen  # sbatch, which waits

    def signal(self, name: str) -> None:
        subprocess.run(["scancel", f"--signal={name}", self.number], check=True)

    def say(self, expression: str, times: int = 1) -> re.Match:
        """Wait for the line of the output, from its beginning, that matches for the `times`-th time."""
        with subprocess.Popen(["tail", "-F", "-n", "+1", self.output], stdout=subprocess.PIPE, text=True) as tail:
            try:
                for line in tail.stdout:
                    if found := re.search(expression, line):
                        times -= 1
                        if not times:
                            return found
            finally:
                tail.terminate()
        raise AssertionError("tail ended")

    def end(self) -> int:
        """Wait for its last life; the script's exit code."""
        return self.process.wait(timeout=600)


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.waiting: list[subprocess.Popen] = []

    def sbatch(self, name: str, *arguments: str, tasks: int, options: tuple[str, ...] = ()) -> Job:
        """Submit scripts/train.sbatch from the repository's root."""
        output = self.folder / f"{name}.out"
        output.touch()
        sized = [f"--ntasks-per-node={tasks}", f"--gpus-per-node={tasks}", "--cpus-per-task=1", f"--output={output}"]
        command = ["sbatch", "--wait", f"--job-name={name}", *sized, *options, "scripts/train.sbatch", *arguments]
        given = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=given, stdout=subprocess.PIPE, text=True)
        self.waiting.append(process)
        return Job(process.stdout.readline().split()[-1], output, process)


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster in `folder`, whose daemons end with the block; programs of this process find it."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    for number in range(GPUS):
        os.mknod(folder / f"gpu{number}", 0o666 | stat.S_IFCHR, NULL_DEVICE)
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    host = socket.gethostname().split(".")[0]
    controller, node = free_port(), free_port()
    ports = {"controller_port": controller, "node_port": node}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=host, gpus=GPUS, **ports))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    own = {"key-file": key, "socket": folder / "munge.socket", "seed-file": folder / "munge.seed"}
    own |= {"pid-file": folder / "munged.pid", "log-file": folder / "munged.log"}
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    try:
        # each goes into the background once it answers
        subprocess.run(["munged", "--force", *(f"--{name}={path}" for name, path in own.items())], check=True)
        subprocess.run(["slurmctld"], check=True)
        subprocess.run(["slurmd"], check=True)
        subprocess.run(["srun", "true"], check=True, timeout=60)  # waits for the node
        cluster = Cluster(folder)
        yield cluster
        for process in cluster.waiting:  # for ever, where a test has failed
            process.terminate()
    finally:
        if (folder / "slurmd.pid").exists():
            subprocess.run(["scancel", "--user=root"], check=True)
            subprocess.run(["srun", "--exclusive", "true"], check=True, timeout=120)  # waits until nothing else runs
        for name in ("slurmd", "slurmctld", "munged"):
            if (file := folder / f"{name}.pid").exists():
                os.kill(int(file.read_text()), signal.SIGTERM)
        del os.environ["SLURM_CONF"]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
