"""`python -m tests.crash FOLDER KILLS SEED`: kill -9 a run that saves at every step, at random moments, and look.

One process imports everything once and forks a child for each life of the run; a child goes on with resume=auto until
it is killed. After each death the newest checkpoint must be whole, no older than the one before, and hold the very bits
that this step has in every other life and in a run that was never killed. The last line printed is one JSON object.
"""

import contextlib
import gc
import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from conf.schema import Settings
from tests.runs import contents, small_run
from train import train
from training import curves
from training.checkpoint import newest_complete, open_checkpoint

STEADY = (
    "train.save_every=1",
    "train.keep_last=2",
    "train.log_every=1",
    "train.eval_every=7",  # evaluations are often the best so far: the second link moves too
    "train.eval_windows=1",
    "optim.schedule=constant",  # so that a run of any length has the same steps
    "model.dropout=0.1",
    "model.num_layers=1",
    "train.batch_tokens=64",
)


def live(settings: Settings, run_dir: Path) -> int:
    """Fork a child that trains; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        train(settings, run_dir)
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def steps_logged(run_dir: Path) -> dict[int, float]:
    """Losses by step; every line whole, every step once and none missing."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "metrics.jsonl: twice or missing"
    return {line["step"]: line["loss"] for line in lines}


def main(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)  # a forked child cannot use its parent's threads
    chance = random.Random(seed)
    run_dir = folder / "killed"
    known: dict[int, str] = {}
    newest, leftovers, ended = 0, 0, []

    def settings(steps: int) -> Settings:
        return small_run(folder, *STEADY, f"train.steps={steps}", "resume=auto")

    curves.draw_run = lambda run, path: None
    train(settings(2), folder / "rehearsal")  # imports and prepares what every life would spend its time on
    gc.freeze()  # or a life's collector would write to all memory, and so copy it
    # a life begins with opening data and checkpoint; kills fall there as well. How long it takes depends on the machine
    # and on what else runs there
    begun = time.monotonic()
    assert os.waitpid(live(settings(8), folder / "timed"), 0)[1] == 0
    longest_life = time.monotonic() - begun
    endless = settings(1_000_000)
    for _ in range(kills):
        pid = live(endless, run_dir)
        watched = os.pidfd_open(pid)
        died, _, _ = select.select([watched], [], [], chance.uniform(0, longest_life))
        assert not died, "the run ended by itself"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(watched)
        if not (run_dir / "checkpoints").exists():
            continue  # it had not come so far
        leftovers += any(run_dir.glob("checkpoints/.*"))

        def damaged(line: str) -> None:
            raise AssertionError(f"half a checkpoint was taken for a whole one: {line}")

        checkpoint = newest_complete(run_dir / "checkpoints", report=damaged)
        assert checkpoint is not None or newest == 0, "no checkpoint is left"
        if checkpoint:
            assert checkpoint.step >= newest, f"step {newest} was saved, {checkpoint.step} is the newest"
            newest = checkpoint.step
            found = contents(checkpoint)
            assert known.setdefault(newest, found) == found, f"step {newest} has other bits in another life"
            if (run_dir / "checkpoints" / "last").exists():
                open_checkpoint(run_dir / "checkpoints" / "last")
        ended.append(newest)

    assert newest > 0, "no life was long enough to save"
    runs = run_dir, folder / "whole"
    for run in runs:
        assert os.waitpid(live(settings(newest + 3), run), 0)[1] == 0
    first, second = (contents(open_checkpoint(run / "checkpoints" / "last")) for run in runs)
    assert first == second, "the run that was killed ends with other bits"
    first, second = (steps_logged(run) for run in runs)
    assert first == second, "the run that was killed logged other losses"
    return {"kills": kills, "leftovers": leftovers, "steps": newest + 3, "different_ends": len(set(ended))}


if __name__ == "__main__":
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        result = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(result))
