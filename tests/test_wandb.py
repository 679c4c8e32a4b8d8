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

# Reads lives of a run from stdin, one JSON object a line, forks a child for each and prints how it ended: everything is
# imported once. `dies` is the step at which the child kills itself (0: never), `with_wandb` whether wandb's own process
# dies with it, as when the machine does.
LIVES = """
import json, os, signal, sys
from pathlib import Path
import wandb
import train as program
from tests.runs import small_run
from training.log import RunLog

folder = Path(sys.argv[1])
names = "train.steps=12", "train.save_every=3", "train.log_every=1", "train.eval_every=0", "model.num_layers=1"
metrics = RunLog.metrics


def live(run, dies, mode, with_wandb):
    def die(self, step, values):
        metrics(self, step, values)
        if step == dies:
            if with_wandb:
                children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
                assert children, "wandb has no process of its own"
                for child in children:
                    os.kill(int(child), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    RunLog.metrics = die
    program.train(small_run(folder, *names, "resume=auto", f"logger.wandb={mode}"), folder / run)


program.torch.set_num_threads(1)
answers, sys.stdout = sys.stdout, sys.stderr
program.train(small_run(folder, *names), folder / "rehearsal")
for line in sys.stdin:
    if not (child := os.fork()):
        os.dup2(2, 1)
        try:
            live(**json.loads(line))
        except BaseException as error:
            print(repr(error))
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
"""


def environment(url: str) -> dict[str, str]:
    """That of a fresh process: WANDB_SERVICE would tie it to the wandb process that earlier tests started."""
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return inherited | {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}


class Lives:
    """Runs in `folder` that die and go on."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._output = folder / "output.txt"
        self._process = subprocess.Popen(
            [sys.executable, "-c", LIVES, str(folder)],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output.open("w"),
            text=True,
            env=environment(url) | {"PYTHONPATH": str(ROOT)},
        )

    def __enter__(self) -> "Lives":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate(timeout=60)

    def live(self, run: str, *, dies: int, mode: str, with_wandb: bool = True) -> None:
        plan = {"run": run, "dies": dies, "mode": mode, "with_wandb": with_wandb}
        self._process.stdin.write(json.dumps(plan) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        output = self._output.read_text()
        assert answer.strip() == str(-signal.SIGKILL if dies else 0), output
        assert "wandb failed" not in output, output


def steps(records: list[dict]) -> list[int]:
    return [record["step"] for record in records]


def written(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def server():
    with WandbStub() as stub:
        yield stub


@pytest.fixture(scope="module")
def lives(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lives")
    small_run(folder)  # writes the corpus
    with Lives(folder, server.url) as opened:
        yield opened


def test_three_crashes_leave_one_history(server, lives):
    """Killed at 4 (one step after a save), 8 (with wandb's process) and 11; 5, 8 and 11 are far from saved."""
    lives.live("online", dies=4, mode="online", with_wandb=False)
    lives.live("online", dies=8, mode="online")
    (run,) = server.lines
    server.forget(run, 2)  # what had not arrived when the machine died
    lives.live("online", dies=11, mode="online")
    lives.live("online", dies=0, mode="online")
    assert list(server.lines) == [run]
    history, logged = server.history(run), written(lives.folder / "online")
    assert steps(logged) == list(range(1, 13))
    assert steps(history) == list(range(1, 13))
    assert [row["_step"] for row in history] == list(range(1, 13))
    assert [row["loss"] for row in history] == pytest.approx([record["loss"] for record in logged])


def test_offline_the_last_folder_holds_the_whole_run(server, lives):
    """Nobody knows what was synchronised before, so every life begins the offline copy anew."""
    lives.live("offline", dies=8, mode="offline")
    lives.live("offline", dies=0, mode="offline")
    (folder,) = (lives.folder / "offline" / "wandb").glob("offline-run-*")
    before = set(server.lines)
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", "--project", "flashgpt", str(folder)],
        cwd=lives.folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(server.url),
    )
    assert done.returncode == 0, done.stderr
    (run,) = set(server.lines) - before
    assert run == (lives.folder / "offline" / "wandb_id").read_text().strip()
    assert steps(server.history(run)) == steps(written(lives.folder / "offline")) == list(range(1, 13))
