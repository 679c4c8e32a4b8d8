"""Several GPUs of one host: `python -m scripts.bench.parallel` times and compares the training step on 1, 2 and 4.

It starts one process a GPU itself, and all cells run in them:

    replicate  tokens a second at the same tokens a GPU; the sum of the gradients beside NCCL's all-reduce
    hashes     SHA-256 of weights and moments after some steps, from 1, 2 and 4 processes: they must be equal
    context    a row of tokens on one GPU and on all of them, by heads and in a ring; and a row W times as long on W
               GPUs, which share weights too
    shard      tokens a second of 1.3 billion parameters, whose weights and moments the processes share

In shard, and in context except for the longer row, steps from the same weights are computed twice and must end with the
same SHA-256 of weights. One GPU's speed is that of the first. All are also timed alone, at the same time, because a
step of several takes as long as on the slowest: `rest` is a step's time less that of the slowest alone and less the
sum. Random tokens; the step is that of `train.py`, compiled and as CUDA graphs where the run would be. The last line is
one JSON object. On a CPU with TRITON_INTERPRET=1 it is a smoke test over gloo, for which model.attention=naive gives
the ring its LSE: its figures mean nothing.
"""

import hashlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conf.program import program
from conf.schema import Settings
from data import Batch
from scripts.bench.clock import Mark, free, laps
from scripts.bench.processes import Host, on_each_gpu
from scripts.bench.report import Report, Row, refuse_out_of_range, refuse_unknown, refuse_without_gpu
from scripts.evidence_tables import SHARED_BITS, SHARED_STEP, SHARED_SUM
from training.graph import BEFORE_REPLAY
from training.hardware import Hardware
from training.optimizer import OPTIMIZERS, OptimConfig, Optimizer
from training.parallel import ALONE, ParallelConfig, World
from training.run import Run, resolve
from training.shard import local_shard, parallelize
from training.stepper import Stepper

CELLS = ("replicate", "hashes", "context", "shard")
SAME_NETWORK = CELLS[:2]
SHARD_HEAD_DIM = 128
SMOKE = (
    "model=tiny model.num_layers=1 model.n_embd=32 model.num_heads=2 model.attention=naive data.seq_len=16 "
    "bench.processes=[1,2] bench.tokens=32 bench.shard_layers=1 bench.shard_embd=32 bench.context_tokens=32 "
    "bench.vocab_size=50 bench.steps=2 bench.warmup_steps=1 bench.hash_steps=2"
)


@dataclass
class BenchConfig:
    cells: list[str] = field(default_factory=lambda: list(CELLS))  # replicate | hashes | context | shard
    processes: list[int] = field(default_factory=lambda: [1, 2, 4])  # those above the number of GPUs are left out
    tokens: int = 65536  # of a step, a GPU, in sequences of data.seq_len; of shard, twice as long
    shard_layers: int = 24  # of its model
    shard_embd: int = 2048  # its width
    context_tokens: int = 131072  # of a row that one GPU computes
    vocab_size: int = 50257  # GPT-2's
    hash_steps: int = 6  # optimizer steps before weights and moments are compared
    warmup_steps: int = 4  # not timed; the first compiles, and where graphs are on the second captures
    steps: int = 20  # timed one by one; the median is reported

    def __post_init__(self) -> None:
        refuse_unknown("bench.", self, cells=CELLS)
        sizes = "processes", "tokens", "shard_layers", "shard_embd", "context_tokens", "vocab_size"
        refuse_out_of_range("bench.", self, *sizes, "hash_steps", "warmup_steps", "steps")
        if self.shard_embd % (2 * self.shard_heads):  # its model would refuse it too, but after all other cells
            heads = f"bench.shard_embd={self.shard_embd} cannot be cut into heads of an even width"
            raise ValueError(f"{heads}; use a multiple of {SHARD_HEAD_DIM}")
        if 1 not in self.processes or len(self.processes) < 2:
            raise ValueError(f"bench.processes={self.processes} must have 1 and more than that; use [1,2]")

    @property
    def shard_heads(self) -> int:
        return max(1, self.shard_embd // SHARD_HEAD_DIM)


@dataclass
class ParallelBenchSettings(Settings):
    bench: BenchConfig = field(default_factory=BenchConfig)


@program(
    "config", ParallelBenchSettings, run_dir="runs/bench_parallel", overrides=("model=gpt2_124m", "data.seq_len=1024")
)
def main(settings: ParallelBenchSettings, run_dir: Path) -> None:
    bench = settings.bench
    found = 0 if settings.hardware.device == "cpu" else torch.cuda.device_count()
    needs = f"NVIDIA GPUs (bench.processes={bench.processes})"
    refuse_without_gpu("a step of several GPUs", settings.hardware, SMOKE, needs=needs)
    sizes = sorted({size for size in bench.processes if size <= found or not found})
    if len(sizes) < 2:
        raise ValueError(f"bench.processes={bench.processes} but there are {found} GPUs; use a machine with several")
    settings = replace(settings, bench=replace(bench, processes=sizes))
    hardware, rows = on_each_gpu(sizes, work, settings)
    tables = [made({"": {"rows": rows}}) for made in (SHARED_STEP, SHARED_SUM, SHARED_BITS)]
    Report("bench_parallel", run_dir, hardware, rows).finish(*(table for table in tables if table.lines))


class Network:
    """A model, what is compiled from it, and its first weights, with which every measurement begins."""

    def __init__(self, chosen: Run) -> None:
        torch.manual_seed(chosen.settings["train"]["seed"])
        self.model = chosen.build_model()
        self.forward = parallelize(self.model, chosen.hardware)
        self._first = [local_shard(p).detach().to("cpu", copy=True) for p in self.model.parameters()]

    @torch.no_grad()
    def _reset(self) -> None:
        for p, first in zip(self.model.parameters(), self._first, strict=True):
            local_shard(p).copy_(first)

    def begin(self, chosen: Run, optim: OptimConfig) -> tuple[Optimizer, Stepper]:
        """Reset the weights; return a new optimizer, and the stepper of the run."""
        self._reset()
        optimizer = Optimizer(self.model, optim, chosen.hardware.dtype, chosen.hardware.world)
        return optimizer, Stepper(chosen, self.model, self.forward, optimizer)

    def repeated(self, optimizer: Optimizer, stepper: Stepper, chosen: Run, steps: int) -> str:
        """SHA-256 of the weights of all processes after `steps` steps from the first weights and from no moments."""
        self._reset()
        optimizer.load_state_dict({"optimizer": [{"state": {}} for _ in optimizer.optimizers]})
        for step in range(steps):
            stepper.step(batch_of(chosen, step))
        found = sha256([local_shard(p) for p in self.model.parameters()])
        return hashlib.sha256("".join(chosen.hardware.world.all_gather(found)).encode()).hexdigest()


def work(host: Host, settings: ParallelBenchSettings) -> tuple[str, list[Row]]:
    """Run all cells in one process; return its hardware in words, and the rows."""
    settings = sized(settings, settings.bench.tokens)
    rows, network = [], None
    known = {"replicate": replicate, "hashes": hashes, "context": context, "shard": shard}
    for name in sorted(settings.bench.cells, key=CELLS.index):
        if name in SAME_NETWORK and network is None:
            network = Network(choose(settings, host.hardware, ALONE))  # compiled once for both
        elif name not in SAME_NETWORK:
            network = None
            if host.hardware.compile:
                torch.compiler.reset()
            free(host.hardware.device)
        for row in known[name](host, settings, network):
            host.world.on_first(print)(json.dumps(row), flush=True)  # so it is known if a later one fails
            rows.append(row)
    return host.hardware.description, rows


def sized(settings: ParallelBenchSettings, tokens: int, seq_len: int | None = None, **groups: Any) -> Any:
    """`settings` with `tokens` tokens a step, in one micro-batch of each process."""
    data = replace(settings.data, seq_len=seq_len or settings.data.seq_len)
    train = replace(settings.train, batch_tokens=tokens, micro_batch=None)
    return replace(settings, data=data, train=train, **groups)


def choose(settings: ParallelBenchSettings, hardware: Hardware, world: World) -> Run:
    """Resolve `settings` to a run of `world`."""
    hardware = replace(hardware, world=world)
    return resolve(settings, vocab_size=settings.bench.vocab_size, hardware=hardware, world=world)


# --- cells


def replicate(host: Host, settings: ParallelBenchSettings, network: Network) -> Iterator[Row]:
    """The same model and the same number of tokens on each GPU."""
    one = {"cell": "replicate"} | alone(host, settings, network)
    yield one
    for size in settings.bench.processes[1:]:
        row = {}
        if world := host.worlds.get(size):
            chosen = choose(sized(settings, settings.bench.tokens * size), host.hardware, world)
            row = {"cell": "replicate"} | timed(chosen, network, settings)
            row |= against(one, row) | {"slowest_ms": one["slowest_ms"]}
            row |= sum_beside_all_reduce(world, network, row["step_ms"])
            row["rest_ms"] = round(row["step_ms"] - row["sum_ms"] - row["slowest_ms"], 3)
        yield host.world.broadcast(row)


def hashes(host: Host, settings: ParallelBenchSettings, network: Network) -> Iterator[Row]:
    """The same batches, dealt to 1, 2 and 4 processes, in micro-batches of the same size."""
    bench = settings.bench
    made = sized(settings, bench.tokens * bench.processes[-1])
    made.train.micro_batch = bench.tokens // settings.data.seq_len
    for optim in OPTIMIZERS:
        named, equal = replace(made, optim=replace(settings.optim, name=optim)), set()
        for size in bench.processes:
            found = None
            if world := host.worlds.get(size):
                chosen = choose(named, host.hardware, world)
                optimizer, stepper = network.begin(chosen, named.optim)
                for step in range(bench.hash_steps):
                    stepper.step(batch_of(chosen, step))
                found = sha256([*network.model.parameters(), *moments(optimizer)])
                del optimizer, stepper
                free(host.hardware.device)
            found = [value for value in host.world.all_gather(found) if value]
            equal |= {*found}
            row = {"cell": "hashes", "optimizer": optim, "processes": size, "steps": bench.hash_steps}
            yield row | {"sha256": found[0], "equal": len(equal) == 1}


def shard(host: Host, settings: ParallelBenchSettings, _: None) -> Iterator[Row]:
    """A model whose weights and moments are sharded over the processes, beside one GPU that holds all of them."""
    bench, size, seq_len = settings.bench, host.world.size, 2 * settings.data.seq_len
    shape = {"num_layers": bench.shard_layers, "n_embd": bench.shard_embd}
    model = replace(settings.model, **shape, num_heads=bench.shard_heads)
    one = {"cell": "shard"} | alone(host, sized(settings, bench.tokens, seq_len, model=model))
    yield one
    shared = ParallelConfig(data="shard")
    made = sized(settings, bench.tokens * size, seq_len, model=model, parallel=shared)
    chosen = choose(made, host.hardware, host.world)
    row = timed(chosen, Network(chosen), made, twice=True)
    yield {"cell": "shard"} | row | against(one, row)


def context(host: Host, settings: ParallelBenchSettings, _: None) -> Iterator[Row]:
    """A row that the processes share, and one with that many tokens on each GPU, for which they shard weights too.

    Activations are recomputed, and nothing is compiled.
    """
    bench, size = settings.bench, host.world.size
    tokens, host = bench.context_tokens, replace(host, hardware=replace(host.hardware, compile=False))
    model = replace(settings.model, activation_checkpointing="full")
    few = replace(bench, warmup_steps=1, steps=min(3, bench.steps), hash_steps=min(2, bench.hash_steps))
    one = {"cell": "context"} | alone(host, sized(settings, tokens, tokens, model=model, bench=few))
    yield one
    for cell, length, shared in (
        ("context", 1, {}),
        ("context, ring", 1, {"context_method": "ring"}),
        ("context, shard", size, {"data": "shard"}),
    ):
        parallel = ParallelConfig(context=size, **shared)
        made = sized(settings, tokens * length, tokens * length, model=model, bench=few, parallel=parallel)
        chosen = choose(made, host.hardware, host.world)
        row = timed(chosen, Network(chosen), made, twice=length == 1)
        yield {"cell": cell} | row | against(one, row)


# --- what cells are made of


def alone(host: Host, settings: ParallelBenchSettings, network: Network | None = None) -> Row:
    """Time one GPU's step on all GPUs at the same time, each by itself; the row is the first one's."""
    chosen = choose(settings, host.hardware, ALONE)
    row = timed(chosen, network or Network(chosen), settings)
    by_gpu = host.world.all_gather(row["step_ms"])
    shown = " ".join(f"{ms:.2f}" for ms in by_gpu)
    return host.world.broadcast(row) | {"alone": shown, "slowest_ms": max(by_gpu)}


def timed(chosen: Run, network: Network, settings: ParallelBenchSettings, *, twice: bool = False) -> Row:
    """Speed and memory of a run's step: ms of the slowest process's median, GiB of the one that holds most.

    twice: also compute some steps twice, and compare the bits that they end with.
    """
    bench, hardware = settings.bench, chosen.hardware
    free(hardware.device)
    optimizer, stepper = network.begin(chosen, settings.optim)
    batch, world, tails = batch_of(chosen, 0), hardware.world, []
    marks, warmup = [Mark(hardware.device)], max(bench.warmup_steps, BEFORE_REPLAY if chosen.graphs else 0)
    for _ in range(warmup + bench.steps):
        stepper.step(batch)
        if world.size > 1:
            tails.append(world.messages.tail.clone())
        marks.append(Mark(hardware.device))
        marks[-2].wait()  # as the training loop reads a step's numbers while the next one is computed
    hardware.synchronize()
    spans = [1e3 * begin.seconds_to(end) for begin, end in pairwise(marks)][warmup:]
    found = world.all_gather([statistics.median(spans), hardware.peak_memory_gib()])
    step_ms, tokens = max(ms for ms, _ in found), chosen.settings["train"]["batch_tokens"]
    shown = {}
    if tails:  # what each process sent the others in the last steps
        times = torch.stack([world.messages.parts_of(tail)[3] for tail in tails[-bench.steps :]]).median(0).values
        shown["computing"] = " ".join(f"{ms:.2f}" for ms in times.tolist())
    if twice:
        hashes = [network.repeated(optimizer, stepper, chosen, bench.hash_steps) for _ in range(2)]
        shown |= {"sha256": hashes[0], "twice": hashes[0] == hashes[1]}
    del optimizer, stepper
    free(hardware.device)
    return shown | {
        "processes": world.size,
        "seq_len": chosen.seq_len,
        "batch_tokens": tokens,
        "graphs": chosen.graphs,
        "tokens_per_second": round(1e3 * tokens / step_ms),
        "step_ms": round(step_ms, 3),
        "peak_memory_gib": max((gib for _, gib in found if gib), default=None),
    }


def against(first: Row, row: Row) -> Row:
    """Tokens a second over those of one GPU: of the first one, and of the slowest."""
    speedup = row["tokens_per_second"] / first["tokens_per_second"]
    return {"speedup": speedup, "speedup_of_slowest": speedup * first["slowest_ms"] / first["step_ms"]}


def sum_beside_all_reduce(world: World, network: Network, step_ms: float) -> Row:
    """Milliseconds of the sum that a step contains, and of the library's all-reduce of as many elements."""
    weights = list(network.model.parameters())
    device = weights[0].device
    group = world.flat_mesh(device).get_group()
    terms, loss = [torch.randn_like(p) for p in weights], torch.ones((), device=device)
    flat = torch.cat([term.view(-1) for term in terms])

    def ordered() -> None:
        world.begin_step(device)
        world.sum(list(terms), loss, weights)

    row = {"elements": len(flat)}
    for name, call in (("sum", ordered), ("all_reduce", lambda: dist.all_reduce(flat, group=group))):
        ms = max(world.all_gather(1e3 * statistics.median(laps(call, device, 5, 20))))  # in the slowest process
        row |= {f"{name}_ms": round(ms, 3), f"{name}_share": ms / step_ms}
    return row


def batch_of(chosen: Run, step: int) -> Batch:
    """This process's rows of a step's random tokens, split as `data.TokenBatches` splits them."""
    draw, world, rows = torch.Generator().manual_seed(step), chosen.hardware.world, chosen.sequences
    tokens = torch.randint(chosen.vocab_size, (rows * world.data_size, chosen.seq_len + 1), generator=draw)
    own = tokens[rows * world.data_rank :][:rows].to(chosen.hardware.device)
    return own[:, :-1].contiguous(), own[:, 1:].contiguous(), None


def moments(optimizer: Optimizer) -> list[Tensor]:
    states: list[Any] = [part.state[p] for part in optimizer.optimizers for p in part.state]
    return [state[key] for state in states for key in sorted(state)]


def sha256(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(x.detach().cpu().contiguous().numpy())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
