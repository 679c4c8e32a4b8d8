"""What saving costs the loop: `python -m scripts.bench_saving model=gpt2_124m train.save_every=100`.

Blocks of `train.save_every` steps (100 where it is 0) of the run's own step on random tokens, by turns without a save,
with one in the background as train.py saves, and with one that the loop waits for. The save falls on a block's
beginning, so that the writing competes with the steps that follow. The last line is one JSON object.
"""

import json
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
from training.optim import Optimiser
from training.provenance import provenance
from training.random_states import random_states
from training.saver import Saver

VOCAB_SIZE = 50257  # GPT-2's: the embedding is a third of its weights
BLOCKS = 5  # of each kind; the median is reported
KINDS = ("none", "background", "waited for")


@program("config", Settings)
def main(settings: Settings, run_dir: Path) -> None:
    config, hardware = settings.train, set_up(settings.hardware)
    settings.model.attention, _ = resolve_attention(
        settings.model.attention, hardware.device, hardware.dtype, settings.model.head_dim
    )
    torch.manual_seed(config.seed)
    model = GPT(settings.model, VOCAB_SIZE, settings.data.seq_len, device=hardware.device, dtype=hardware.dtype)
    optimiser = Optimiser(model, settings.optim)
    forward = torch.compile(model, dynamic=False) if hardware.compile else model
    shape = settings.sequences_per_step, settings.data.seq_len
    tokens = torch.randint(VOCAB_SIZE, shape, device=hardware.device)
    steps, origin = config.save_every or 100, provenance()

    def train(count: int) -> None:
        for _ in range(count):
            training_step(forward, optimiser, tokens, tokens, settings.micro_batch, hardware)
        hardware.synchronize()

    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    writing = []
    with Saver(run_dir / "checkpoints", keep_last=1, keep_every=0, say=print) as saver:

        def save(step: int) -> None:
            state = {"optimiser": optimiser.state_dict(), "random": random_states(hardware.device)}
            saver.save(model, state, {"step": step, "settings": asdict(settings), "provenance": origin}, best=False)

        train(3)  # compiles, fills the optimiser's state
        save(0)  # takes the host memory
        saver.wait()
        for block in range(BLOCKS * len(KINDS)):
            kind, began = KINDS[block % len(KINDS)], time.perf_counter()
            if kind != "none":
                save(block)
            if kind == "waited for":
                saver.wait()
                writing.append(time.perf_counter() - began)
            train(steps)
            seconds[kind].append(time.perf_counter() - began)
            saver.wait()
        saver.check()
        size = sum(file.stat().st_size for file in saver.folder.glob("step_*/*"))

    plain, background, waited = (statistics.median(seconds[kind]) for kind in KINDS)
    found = {
        "hardware": hardware.description,
        "parameters": model.num_parameters(),
        "checkpoint_mb": size / 1e6,
        "steps_between_saves": steps,
        "step_ms": 1e3 * plain / steps,
        "write_ms": 1e3 * statistics.median(writing),
        "background_cost_ms": 1e3 * (background - plain),
        "background_cost": background / plain - 1,
        "waited_for_cost": waited / plain - 1,
        "spread": max(seconds["none"]) / min(seconds["none"]) - 1,  # what this measurement cannot see
        "provenance": origin,
    }
    print(
        f"{size / 1e6:,.0f} MB every {steps} steps of {found['step_ms']:.1f} ms costs {found['background_cost']:.2%} "
        f"in the background, {found['waited_for_cost']:.2%} waited for (blocks without differ by {found['spread']:.2%})"
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
