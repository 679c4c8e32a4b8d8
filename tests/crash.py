"""`python -m tests.crash FOLDER KILLS SEED [PROCESSES]`: kill -9 a run that saves at every step, at random moments.

One process imports everything once and forks the children of each life of the run; they go on with resume=auto until
one of them, any, is killed, or one time in ten stopped. The others must then end with one line that names it. After
each death the newest checkpoint must be whole, no older than the one before, and hold the very bits that this step has
in every other life and in a run of one process that was never killed. The last line printed is one JSON object.
"""

import contextlib
import gc
import json
import os
import random
import re
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from conf.schema import Settings
from tests.runs import contents, small_run
from train import train
from training import curves
from training.checkpoint import newest_complete, open_checkpoint
from training.rendezvous import meet
from training.watchdog import EXIT_LOST, Limits

QUICK = Limits(beat=0.1, silent=6.0, silent_if_suspected=2.0, grace=0.5)
LONGEST_END = 60  # seconds for the others to notice, and to leave
STOPPED = 0.1  # of the deaths are SIGSTOP: the process is there, and says nothing
STEADY = (
    "train.save_every=1",
    "train.keep_last=2",
    "train.log_every=1",
    "train.eval_every=7",  # evaluations are often the best so far: the second link moves too
    "train.eval_windows=1",
    "optim.schedule=constant",  # so that a run of any length has the same steps
    "model.dropout=0.1",
    "model.num_layers=1",
    "train.micro_batch=1",
)


class Life:
    """The processes of a run from their start to the death of one of them; each says when it has met the others."""

    def __init__(self, settings: Settings, run_dir: Path, size: int = 1) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        self.words = run_dir.with_suffix(".err")
        self.words.unlink(missing_ok=True)
        met, says = os.pipe()
        self.pids = [os.fork() or self._train(rank, size, settings, run_dir, says) for rank in range(size)]
        self.watched = [os.pidfd_open(pid) for pid in self.pids]
        os.close(says)
        with os.fdopen(met, "rb") as met:
            assert len(met.read(size)) == size, "they have not met"

    def _train(self, rank: int, size: int, settings: Settings, run_dir: Path, says: int) -> NoReturn:
        os.dup2(os.open(self.words, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        code = 1
        try:
            world = meet(rank, size, rank, QUICK)
            os.write(says, b"m")
            os.close(says)
            code = train(settings, run_dir, world=world)["exit_code"]
            world.close()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(code)

    def wait(self) -> list[int]:
        """The exit codes, once all have ended."""
        for watched in self.watched:
            os.close(watched)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]

    def end(self, after: float, chance: random.Random) -> float:
        """Kill or stop one of them after so many seconds; the seconds that the others then took to end."""
        died, _, _ = select.select(self.watched, [], [], after)
        assert not died, f"the run ended by itself: {self.words.read_text()}"
        rank, others = chance.randrange(len(self.pids)), list(self.watched)
        is_stopped = len(self.pids) > 1 and chance.random() < STOPPED
        os.kill(self.pids[rank], signal.SIGSTOP if is_stopped else signal.SIGKILL)
        struck = time.monotonic()
        others.remove(self.watched[rank])
        while others:
            ended, _, _ = select.select(others, [], [], LONGEST_END)
            assert ended, f"rank {rank} is gone, and others go on: {self.words.read_text()}"
            others = [watched for watched in others if watched not in ended]
        took = time.monotonic() - struck
        os.kill(self.pids[rank], signal.SIGKILL)
        codes, said = self.wait(), self.words.read_text()
        assert codes.pop(rank) == -signal.SIGKILL
        assert set(codes) <= {EXIT_LOST}, f"{codes}: {said}"
        if codes:
            (line,) = re.findall("^error: .*", said, flags=re.M)
            assert re.fullmatch(f"error: rank {rank} of .*, after step .*; all end", line), said
        return took


def steps_logged(run_dir: Path) -> dict[int, float]:
    """Losses by step; every line whole, every step once and none missing."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "metrics.jsonl: twice or missing"
    return {line["step"]: line["loss"] for line in lines}


def main(folder: Path, kills: int, seed: int, size: int = 1) -> dict[str, Any]:
    torch.set_num_threads(1)  # a forked child cannot use its parent's threads
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = folder / "killed"
    known: dict[int, str] = {}
    newest, leftovers, ended, took = 0, 0, [], []

    def settings(steps: int) -> Settings:
        tokens = f"train.batch_tokens={32 * max(2, size)}"  # a row for each
        return small_run(folder, *STEADY, tokens, f"train.steps={steps}", "resume=auto")

    curves.draw_run = lambda run, path: None
    train(settings(2), folder / "rehearsal")  # imports and prepares what every life would spend its time on
    gc.freeze()  # or a life's collector would write to all memory, and so copy it
    # a life begins with opening data and checkpoint; kills fall there as well. How long it takes depends on the machine
    # and on what else runs there
    begun = time.monotonic()
    assert not any(Life(settings(8 * size), folder / "timed", size).wait())
    longest_life = time.monotonic() - begun
    endless = settings(1_000_000)
    # on a busy machine lives are longer than the one that was timed: more kills then, until one has met a save
    while len(took) < kills or (size == 1 and not leftovers and len(took) < 5 * kills):
        took.append(Life(endless, run_dir, size).end(chance.uniform(0, longest_life), chance))
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
    for run, processes in zip(runs, (size, 1), strict=True):
        assert not any(Life(settings(newest + 3), run, processes).wait())
    first, second = (contents(open_checkpoint(run / "checkpoints" / "last")) for run in runs)
    assert first == second, "the run that was killed ends with other bits"
    first, second = (steps_logged(run) for run in runs)
    assert first == second, "the run that was killed logged other losses"
    found = {"kills": len(took), "leftovers": leftovers, "steps": newest + 3, "different_ends": len(set(ended))}
    return found | {"processes": size, "longest_end_seconds": round(max(took), 1)}


if __name__ == "__main__":
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        result = main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    print(json.dumps(result))
