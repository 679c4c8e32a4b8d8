"""What a save in the background costs the loop.

Pairs of blocks of steps: one block begins with a save, as train.py saves, and competes with the writing; the other does
not save; which comes first alternates. The difference is what one save costs the loop, at any interval in which the
writing can finish, so a short measurement holds for long runs. The expected cost on a GPU is that of the copies to
pinned host memory, 12 bytes a parameter at the bus's bandwidth (124M: 1.5 GB, 30 ms at 50 GB/s), because they are in
the stream of the steps; hashing and writing run beside the loop and leave Python's lock to it.
"""

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from model import GPT
from scripts.bench.report import Row
from training.hardware import Hardware
from training.optimizer import Optimizer
from training.random_states import random_states
from training.saver import Saver

PAIRS = 5  # of blocks; the median of their differences is reported
BLOCK_SECONDS = 3.0  # about what writing 1.5 GB takes, and long enough for one step's jitter not to matter
PROMISE = 0.02  # the share of the loop's time that saving may cost at most


def save_cost(step: Callable[[], None], model: GPT, optimizer: Optimizer, hardware: Hardware, folder: Path) -> Row:
    """Milliseconds of the loop's time that a save costs, of a loop of `step` (already compiled); writes to `folder`."""

    def steps(count: int) -> None:
        for _ in range(count):
            step()
        hardware.synchronize()

    with Saver(folder, keep_last=1, keep_every=0, say=print) as saver:

        def save(number: int) -> None:
            state = {"optimizer": optimizer.state_dict(), "random": random_states(hardware.device)}
            saver.save(model, state, {"step": number})

        save(0)  # allocates the host memory
        saver.wait()
        began = time.perf_counter()
        steps(10)
        block_steps = max(1, round(BLOCK_SECONDS * 10 / (time.perf_counter() - began)))
        blocks: dict[bool, list[float]] = {True: [], False: []}
        for pair in range(PAIRS):
            for saves in (pair % 2 == 0, pair % 2 == 1):
                began = time.perf_counter()
                if saves:
                    save(pair + 1)
                steps(block_steps)
                blocks[saves].append(time.perf_counter() - began)
                saver.wait()
        saver.check()
        size = sum(file.stat().st_size for file in saver.folder.glob("step_*/*"))

    costs = sorted(1e3 * (with_save - without) for with_save, without in zip(blocks[True], blocks[False], strict=True))
    cost_ms, step_ms = statistics.median(costs), 1e3 * statistics.median(blocks[False]) / block_steps
    return {
        "checkpoint_mb": size / 1e6,
        "save_ms": cost_ms,  # of one save, in the loop's time
        "save_ms_least": costs[0],  # of the pairs
        "save_ms_most": costs[-1],
        "save_block_steps": block_steps,
        "save_every_at_promise": max(1, math.ceil(cost_ms / (PROMISE * step_ms))),  # steps
    }
