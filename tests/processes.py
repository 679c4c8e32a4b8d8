"""`python -m tests.processes FOLDER [gpus]`: runs of several processes, most of them in ways that must not work.

One process imports everything once and forks a child for each rank of each case. The last line printed is one JSON
object: case -> what its processes left, and what they said.
"""

import contextlib
import errno
import gc
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # these four once, before the processes part
import torch._inductor.compile_fx
import torch.distributed.fsdp
import torch.distributed.tensor

import train as program
from model import ATTENTION
from tests.runs import SMALL, contents, metrics, small_run
from train import train
from training import checkpoint, curves, muon, ordered_sum, parallel, rendezvous
from training.checkpoint import Checkpoint, newest_complete, open_checkpoint
from training.step import Step
from training.watchdog import Limits, wait_for_saves

QUICK = Limits(beat=0.1, silent=6.0, silent_if_suspected=2.0, grace=0.5)
RUN = (
    *("train.steps=10", "train.batch_tokens=512", "train.micro_batch=2", "train.log_every=1"),
    *("train.eval_every=5", "train.eval_windows=7", "train.keep_last=9", "model.dropout=0.1", "model.n_embd=16"),
)
THREE = "train.batch_tokens=768"  # micro-batches of each of 4 processes
Case = Callable[[int, parallel.World], None]  # what a rank does


def processes(folder: Path, size: int, case: Case, *, stopped: int | None = None) -> dict[str, Any]:
    """Fork `size` processes that meet and run `case`; what became of each, by rank."""
    return begun(folder, size, case, stopped=stopped)()


def begun(folder: Path, size: int, case: Case, *, stopped: int | None = None) -> Callable[[], dict[str, Any]]:
    """`processes`, to be waited for later: those that mostly wait themselves run beside each other."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    children = [_forked(folder, rank, size, case) for rank in range(size)]

    def ended() -> dict[str, Any]:
        codes = {}
        for rank in sorted(range(size), key=lambda rank: rank == stopped):
            if rank == stopped:  # the last: its test is over
                os.kill(children[rank], signal.SIGKILL)
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(children[rank], 0)[1])
        said = [[(folder / f"{rank}.{name}").read_text() for name in ("out", "err")] for rank in range(size)]
        found = {"out": [out for out, _ in said], "err": [err for _, err in said]}
        return {"codes": [codes[rank] for rank in range(size)]} | found

    return ended


def _forked(folder: Path, rank: int, size: int, case: Case) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        world = rendezvous.this_world()
        case(rank, world)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def training(folder: Path, run: str, *overrides: str, on_step: Callable[[Step], None] | None = None, **options) -> Case:
    """A case: train in `folder/run`. on_step is called with the rank too."""
    settings = small_run(folder, *RUN, *overrides)  # once, and not in each child

    def case(rank: int, world: parallel.World) -> None:
        watched = (lambda step: on_step(rank, step)) if on_step else None
        summary = train(settings, folder / run, world=world, on_step=watched, **options)
        world.close()
        sys.exit(summary["exit_code"])

    return case


def left_by(run: Path) -> dict[str, Any]:
    """The bits of a run: of its last checkpoint, and of what it logged."""
    last = open_checkpoint(run)
    return {"step": last.step, "contents": contents(last), "metrics": metrics(run)}


def at(step_number: int, culprit: int, act: Callable[[], Any]) -> Callable[[int, Step], None]:
    """For `on_step`: `act` in rank `culprit` after that step."""

    def on_step(rank: int, step: Step) -> None:
        if (rank, step.number) == (culprit, step_number):
            act()

    return on_step


def kill_me(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def with_bad_steps(folder: Path, run: str, *overrides: str) -> Case:
    """`training` where attention of the first rank is not finite in two steps: in the first also when looked into."""

    def case(rank: int, world: parallel.World) -> None:
        def attend(q, k, v, **options):
            o = ATTENTION["sdpa"](q, k, v, **options)
            return o * math.nan if world.step in (4, 5) and rank == 0 else o

        training(folder, run, *overrides, attend=attend)(rank, world)

    return case


def same_bits(folder: Path) -> dict[str, Any]:
    found = {}
    for optimizer in ("adamw", "muon"):
        for size in (1, 2, 4):
            name = f"{optimizer}_{size}"
            ended = processes(folder / f"said_{name}", size, training(folder, name, f"optim={optimizer}", THREE))
            found[name] = ended | left_by(folder / name)
    return found


def resumed_elsewhere(folder: Path) -> dict[str, Any]:
    """1 -> 2 -> 1 processes; the second life is ended by a signal to one of its two."""
    lives = (
        (1, at(3, 0, kill_me(signal.SIGTERM))),
        (2, at(6, 1, kill_me(signal.SIGUSR1))),
        (1, None),
    )
    found = {}
    for life, (size, on_step) in enumerate(lives):
        resume = ["resume=auto"] if life else []
        case = training(folder, "resumed", "optim=muon", THREE, *resume, on_step=on_step)
        found[f"resumed_{life}"] = processes(folder / f"said_resumed_{life}", size, case)
        found[f"resumed_{life}"] |= left_by(folder / "resumed")
    return found


def sharded(folder: Path) -> dict[str, Any]:
    """parallel.data=shard beside one process, where each process has one micro-batch, and beside itself."""
    shard, go_on = "parallel.data=shard", "resume=auto"
    few = ("train.steps=8", "optim=muon", "train.micro_batch=4")
    # matrices of three shapes, and so three stacks; 4 processes divide the rows of none
    uneven = ("model.n_embd=18", "model.num_heads=1", "model.mlp_hidden=27")
    plain = (*few, "optim.grad_clip=0", *uneven, "train.sample_tokens=8")
    clipped = (*few, "optim.grad_clip=0.5", "train.eval_every=9", shard)
    rows = (
        *(*few, "optim=adamw", "optim.grad_clip=0", "train.micro_batch=16"),
        *("parallel.context=2", "hardware.dtype=bfloat16"),
    )
    bad = (shard, "parallel.context=2", "train.on_nonfinite=rollback", "train.save_every=1", "train.steps=8")
    lives = [  # name, run, processes, overrides, at which step which rank is asked to stop
        ("shard_1", "whole", 1, plain, None),
        ("shard_4", "shared", 4, (*plain, shard, "model.activation_checkpointing=selective"), None),
        ("moved_1", "moved", 1, (*plain, shard), (2, 0)),
        ("moved_4", "moved", 4, (*plain, shard, go_on), (4, 3)),
        ("moved_2", "moved", 2, (*plain, go_on), None),
        ("clipped", "clipped", 2, clipped, None),
        ("stopped_0", "stopped_shard", 2, clipped, (3, 0)),
        ("stopped_1", "stopped_shard", 2, (*clipped, go_on), None),
        ("rows", "rows", 2, rows, None),
        ("rows_shard", "rows_shard", 2, (*rows, shard), None),
        ("bad_shard", "bad_shard", 2, bad, None),
        ("compiled", "compiled", 2, (*clipped, "hardware.compile=true", "train.steps=2"), None),
    ]
    found = {}
    for name, run, size, overrides, stop in lives:
        on_step = at(*stop, kill_me(signal.SIGUSR1)) if stop else None
        begun = with_bad_steps if name == "bad_shard" else partial(training, on_step=on_step)
        case = begun(folder, run, *overrides)
        watched = {"compiled": compiling, "shard_4": counting, "moved_2": counting}.get(name)
        case = watched(case) if watched else case
        found[name] = processes(folder / f"said_{name}", size, case) | left_by(folder / run)
    dump = min((folder / "bad_shard" / "bad_steps").glob("step_*"))
    found["bad_shard"]["shapes"] = [shapes(open_checkpoint(path)) for path in (dump, folder / "bad_shard")]
    return found


def counting(case: Case) -> Case:
    """`case`, of which each process prints last what it sharded and how many stacks of matrices it orthogonalized."""

    def counted(rank: int, world: parallel.World) -> None:
        computed, orthogonalize = [], muon.orthogonalize
        sharded, fully_shard = [], torch.distributed.fsdp.fully_shard

        def watched(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            if type(x) is torch.Tensor:  # not one of the forecast's
                computed.append(x.shape)
            return orthogonalize(x, dtype)

        def shard(module: torch.nn.Module, **options) -> torch.nn.Module:
            sharded.append(type(module).__name__)
            return fully_shard(module, **options)

        muon.orthogonalize, torch.distributed.fsdp.fully_shard = watched, shard
        try:
            case(rank, world)
        finally:
            print("sharded", *sharded)
            print("orthogonalized", len(computed))

    return counted


def shapes(checkpoint: Checkpoint) -> list[tuple[int, ...]]:
    """Of all moments."""
    parts = checkpoint.load_state()["optimizer"]
    return [tuple(x.shape) for part in parts for of_one in part["state"].values() for x in of_one.values()]


def compiling(case: Case) -> Case:
    """`case` without Inductor, which takes a minute; each process prints how many graphs were compiled."""

    def traced(rank: int, world: parallel.World) -> None:
        torch.compile = partial(torch.compile, backend="aot_eager")
        try:
            case(rank, world)
        finally:
            print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])

    return traced


def numbers(folder: Path) -> dict[str, Any]:
    found = {}
    for size in (1, 2):
        name = f"nan_{size}"
        case = with_bad_steps(folder, name, "train.on_nonfinite=skip", "train.steps=8")
        found[name] = processes(folder / f"said_{name}", size, case) | left_by(folder / name)
        found[name]["summary"] = json.loads((folder / name / "summary.json").read_text())
    return found


def lost(folder: Path) -> dict[str, Any]:
    """Ranks that die, stop, hang, part or raise."""

    def hang_in_step(rank: int, world: parallel.World) -> None:
        def attend(q, k, v, **options):
            parallel.IN_A_STEP = 3.0
            if rank == 1 and world.step == 3:
                threading.Event().wait()
            return ATTENTION["sdpa"](q, k, v, **options)

        training(folder, "hung", attend=attend)(rank, world)

    def part(rank: int, step: Step) -> None:
        parallel.CHECK_EVERY = 1
        if (rank, step.number) == (1, 3):
            with torch.no_grad():
                step.optimizer.parameters[0][0, 0] += 1e-3

    save = "train.save_every=1"
    cases = {
        "killed": training(folder, "killed", save, on_step=at(5, 1, kill_me(signal.SIGKILL))),
        "first_killed": training(folder, "first_killed", save, on_step=at(5, 0, kill_me(signal.SIGKILL))),
        "stopped": training(folder, "stopped", save, on_step=at(5, 1, kill_me(signal.SIGSTOP))),
        "first_stopped": training(folder, "first_stopped", save, on_step=at(5, 0, kill_me(signal.SIGSTOP))),
        "hung": hang_in_step,
        "parted": training(folder, "parted", save, on_step=part),
        "killed_shard": training(
            folder, "killed_shard", save, "parallel.data=shard", on_step=at(5, 1, kill_me(signal.SIGKILL))
        ),
    }
    stopped = {"stopped": 1, "first_stopped": 0}
    ended = {  # side by side: most of their time passes until somebody counts as lost
        name: begun(folder / f"said_{name}", 4 if name == "killed" else 2, case, stopped=stopped.get(name))
        for name, case in cases.items()
    }
    found = {}
    for name in cases:
        found[name] = ended[name]()
        if (folder / name / "checkpoints").exists():
            newest = newest_complete(folder / name / "checkpoints")
            found[name]["step"] = newest and newest.step
    return found


def lost_disk(reason: int) -> None:
    def flush(path: Path) -> None:
        raise OSError(reason, os.strerror(reason), str(path))

    checkpoint.flush = flush


def disks(folder: Path) -> dict[str, Any]:
    """The first rank's disk is full for a while, and then bad; the other's is always full."""
    flush = checkpoint.flush

    def watched(rank: int, step: Step) -> None:
        wait_for_saves()
        if rank == 1 or step.number in (4, 6):
            lost_disk(errno.ENOSPC if step.number < 6 else errno.EIO)
        elif step.number == 8:
            checkpoint.flush = flush

    case = training(folder, "disk", "optim=muon", THREE, "train.save_every=1", on_step=watched)
    return {"disk": processes(folder / "said_disk", 2, case) | left_by(folder / "disk")}


def gpus(folder: Path) -> dict[str, Any]:
    """Bits over NCCL, and its collectives that never return where another rank dies or stops."""
    cuda = ("hardware.device=cuda", "hardware.compile=false", "model.attention=flash", "model.n_embd=64")
    ended = {}
    for size in (1, 2):
        name = f"nccl_{size}"
        ended[name] = begun(folder / f"said_{name}", size, training(folder, name, "optim=muon", *cuda))
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        case = training(folder, name, "train.save_every=1", *cuda, on_step=at(5, 1, kill_me(number)))
        ended[name] = begun(folder / f"said_{name}", 2, case, stopped=1)
    found = {name: wait() for name, wait in ended.items()}
    for name in ("nccl_1", "nccl_2"):
        assert not any(found[name]["codes"]), found[name]["err"]
        found[name] |= left_by(folder / name)
    return found


def command_lines(folder: Path) -> dict[str, Any]:
    """Through the command line's own entry."""
    files = ("data=text", f"data.files={folder / 'corpus.txt'}", f"data.cache_dir={folder / 'cache'}")
    os.chdir(folder)

    def typed(*overrides: str, failing: tuple[int, ...] = (), full: bool = False) -> Case:
        def case(rank: int, world: parallel.World) -> None:
            sys.argv = ["train.py", *SMALL, *RUN, *files, "train.steps=3", *overrides]
            if rank in failing:
                program.Optimizer = partial(refuse, last=rank == 0)
            if full:
                lost_disk(errno.ENOSPC)
            program.main()
            sys.exit(0)  # it has left the others already

        return case

    def refuse(*arguments, last: bool, **options):
        while last and not list((folder / "runs" / "none_begins").glob("*/rank_1.log")):
            pass
        raise ValueError("the moon is full; wait a week")

    found = {}
    for name, case in {
        "told": typed("name=told"),
        "refused": typed("name=refused", "train.micro_batch=3"),
        "mistyped": typed("name=mistyped", "train.lrr=1"),
        "flag": typed("name=flag", "--lr"),
        "failed": typed("name=failed", failing=(1,)),
        "none_begins": typed("name=none_begins", failing=(0, 1)),
        "full": typed("name=full", "train.save_every=1", full=True),
    }.items():
        found[name] = processes(folder / f"said_{name}", 2, case)
        runs = folder / "runs" / name
        found[name]["runs"] = sorted(str(path.relative_to(runs)) for path in runs.rglob("*") if path.is_file())
    return found


def main(folder: Path, *only: str) -> dict[str, Any]:
    rendezvous.meet = partial(rendezvous.meet, limits=QUICK)
    ordered_sum.PIECE = 4096  # elements, so that these small models are summed in several
    torch.set_num_threads(1)  # a forked child cannot use its parent's threads
    curves.draw_run = lambda run, path: None
    settings = small_run(folder, *RUN, "train.steps=2")
    if not only:  # a run names the GPU it finds, after which children could not use it
        train(settings, folder / "rehearsal")  # imports and prepares what every child would spend its time on
    gc.freeze()  # or a child's collector would write to all memory, and so copy it
    found = {}
    for cases in [gpus] if only else [same_bits, resumed_elsewhere, sharded, numbers, disks, command_lines, lost]:
        print(cases.__name__, time.monotonic(), file=sys.stderr)
        found |= cases(folder)
    return found


if __name__ == "__main__":
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        result = main(Path(sys.argv[1]), *sys.argv[2:])
    print(json.dumps(result))
