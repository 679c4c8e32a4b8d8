"""What saving costs the loop: `python -m scripts.bench_saving` with the arguments of a run.

    python -m scripts.bench_saving model=gpt2_124m data.seq_len=1024 train.batch_tokens=65536 hardware.compile=true

Pairs of blocks of the run's own step on random tokens: one block begins with a save in the background, as train.py
saves, and competes with the writing; the other does not save; which comes first alternates.
The difference is what one save costs the loop, at any cadence that leaves the writing its time, so a short measurement
answers for long runs. To expect on a GPU: the copies to pinned host memory, 12 bytes a parameter at what the bus
carries (124M: 1.5 GB, 30 ms at 50 GB/s), because they stand in the stream of the steps; hashing and writing run beside
it and leave Python's lock to the loop. The last line is one JSON object.
"""

import json
import math
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch

from conf.program import program
from conf.schema import Settings
from model import GPT, resolve_attention
from train import training_step
from training.hardware import set_up
from training.log import provenance
from training.optimizer import Optimizer
from training.random_states import random_states
from training.saver import Saver

VOCAB_SIZE = 50257  # GPT-2's: the embedding is a third of its weights
PAIRS = 5  # of blocks; the median of their differences is reported
BLOCK_SECONDS = 3.0  # about what writing 1.5 GB takes, and long enough for one step's jitter not to matter
PROMISE = 0.02  # of the loop's time is the most that saving may cost


@program("config", Settings)
def main(settings: Settings, run_dir: Path) -> None:
    config, hardware = settings.train, set_up(settings.hardware)
    settings.model.attention, _ = resolve_attention(
        settings.model.attention, hardware.device, hardware.dtype, settings.model.head_dim
    )
    torch.manual_seed(config.seed)
    model = GPT(settings.model, VOCAB_SIZE, settings.data.seq_len, device=hardware.device, dtype=hardware.dtype)
    optimizer = Optimizer(model, settings.optim)
    forward = torch.compile(model, dynamic=False) if hardware.compile else model
    shape = settings.sequences_per_step, settings.data.seq_len
    tokens = torch.randint(VOCAB_SIZE, shape, device=hardware.device)
    origin = provenance()

    def train(count: int) -> float:
        """Seconds that `count` steps take."""
        began = time.perf_counter()
        for _ in range(count):
            training_step(forward, optimizer, tokens, tokens, settings.micro_batch, hardware)
        hardware.synchronize()
        return time.perf_counter() - began

    with Saver(run_dir / "checkpoints", keep_last=1, keep_every=0, say=print) as saver:

        def save(step: int) -> None:
            state = {"optimizer": optimizer.state_dict(), "random": random_states(hardware.device)}
            saver.save(model, state, {"step": step, "settings": asdict(settings), "provenance": origin}, best=False)

        train(3)  # compiles, fills the optimizer's state
        save(0)  # takes the host memory
        saver.wait()
        steps = max(1, round(BLOCK_SECONDS * 10 / train(10)))
        blocks: dict[bool, list[float]] = {True: [], False: []}
        calling, writing = [], []
        for pair in range(PAIRS):
            for saves in (pair % 2 == 0, pair % 2 == 1):
                began = time.perf_counter()
                if saves:
                    save(pair + 1)
                    calling.append(time.perf_counter() - began)
                train(steps)
                blocks[saves].append(time.perf_counter() - began)
                saver.wait()
                if saves:
                    writing.append(time.perf_counter() - began)
        saver.check()
        size = sum(file.stat().st_size for file in saver.folder.glob("step_*/*"))

    costs = sorted(1e3 * (w - wo) for w, wo in zip(blocks[True], blocks[False], strict=True))
    cost_ms, step_ms = statistics.median(costs), 1e3 * statistics.median(blocks[False]) / steps
    save_every = config.save_every or 100
    found = {
        "hardware": hardware.description,
        "parameters": model.num_parameters(),
        "checkpoint_mb": size / 1e6,
        "step_ms": step_ms,
        "block_steps": steps,
        "cost_ms": cost_ms,  # of one save, in the loop's time
        "costs_ms": costs,  # of each pair
        "call_ms": 1e3 * statistics.median(calling),  # until Saver.save returned
        "written_within_ms": 1e3 * max(writing),  # at least a block
        "save_every": save_every,
        "cost": cost_ms / (save_every * step_ms),
        "save_every_at_promise": max(1, math.ceil(cost_ms / (PROMISE * step_ms))),
        "spread": max(blocks[False]) / min(blocks[False]) - 1,  # of blocks without a save
        "provenance": origin,
    }
    print(
        f"one save of {size / 1e6:,.0f} MB costs the loop {cost_ms:.0f} ms ({costs[0]:.0f} to {costs[-1]:.0f} in "
        f"{PAIRS} pairs of blocks of {steps} steps; blocks without differ by {found['spread']:.2%})\n"
        f"every {save_every} steps of {step_ms:.1f} ms that is {found['cost']:.2%}; {PROMISE:.0%} would be every "
        f"{found['save_every_at_promise']} steps; on disk within {found['written_within_ms'] / 1e3:.1f} s"
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
