"""wandb after crashes, against a server on localhost: one run, on one step axis, no step twice and none missing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import small_run
from tests.wandb_stub import WandbStub

ROOT = Path(__file__).resolve().parent.parent

# a life of the run: the step at which it dies (0: never), and whether wandb's own process dies with it
LIFE = """
import os, signal, subprocess, sys
from pathlib import Path
import train as program
from tests.runs import small_run
folder, dies, mode, with_wandb = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"
from training.runlog import RunLog
metrics = RunLog.metrics
def die(self, step, values):
    metrics(self, step, values)
    if step == dies:
        if with_wandb:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
RunLog.metrics = die
names = "train.steps=12", "train.save_every=3", "train.log_every=1", "train.eval_every=0", "model.num_layers=1"
program.train(small_run(folder, *names, "resume=auto", f"logger.wandb={mode}"), folder / "run")
"""


def live(folder: Path, dies: int, mode: str, url: str, *, with_wandb: bool = True) -> None:
    environment = os.environ | {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LIFE, str(folder), str(dies), mode, str(with_wandb)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == (-signal.SIGKILL if dies else 0), done.stderr
    assert "wandb failed" not in done.stdout, done.stdout


def steps(records: list[dict]) -> list[int]:
    return [record["step"] for record in records]


def written(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_three_crashes_leave_one_history(tmp_path):
    """Killed at 4 (one step after a save), 8 (with wandb's process) and 11; 5, 8 and 11 are far from saved."""
    small_run(tmp_path)
    with WandbStub() as server:
        live(tmp_path, 4, "online", server.url, with_wandb=False)
        live(tmp_path, 8, "online", server.url)
        (run,) = server.lines
        server.forget(run, 2)  # what had not arrived when the machine died
        live(tmp_path, 11, "online", server.url)
        live(tmp_path, 0, "online", server.url)
        history = server.history(run)
        assert list(server.lines) == [run]
    logged = written(tmp_path / "run")
    assert steps(logged) == list(range(1, 13))
    assert steps(history) == list(range(1, 13))
    assert [row["_step"] for row in history] == list(range(1, 13))
    assert [row["loss"] for row in history] == pytest.approx([record["loss"] for record in logged])
