"""What the log keeps of a run: the record of a step, its speed, the summary."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from model import GPT
from training.flops import mfu, model_flops, peak_flops
from training.guard import NumberGuard
from training.hardware import Hardware
from training.optimizer import Optimizer
from training.runlog import RunLog
from training.stop import StopRequest
from training.stopwatch import Stopwatch

MFU = {"mfu": "causal", "mfu_full": "full"}  # name in the log -> which pairs are counted


class Speed:
    """Measures a run's steps, without what is between them: evaluation, samples, saving, compilation.

    Args:
        batch_tokens: tokens of a step.
        first_step: steps done before this process.
    """

    def __init__(self, model: GPT, hardware: Hardware, batch_tokens: int, first_step: int) -> None:
        self._batch_tokens, self._first_step = batch_tokens, first_step
        self._flops, self._peak = model_flops(model), peak_flops(hardware.device, hardware.dtype)
        self._watch = Stopwatch(hardware.synchronize, first_step)

    def restart(self, step: int) -> None:
        """Begin to measure after `step` steps."""
        self._watch.restart(step)

    def lap(self, step: int) -> dict[str, float | None]:
        """Tokens a second and MFU since `restart` or the last lap; the first step of a process compiles, so it is no
        measure."""
        seconds = self._watch.lap(step)
        if not seconds or step <= self._first_step + 1:
            return {}
        rate = self._batch_tokens / seconds
        shares = {name: mfu(self._flops[kind], rate, self._peak) for name, kind in MFU.items()}
        return {"tokens_per_second": rate, **shares}


def step_record(loss: Tensor, grad_norm: Tensor, optimizer: Optimizer, guard: NumberGuard) -> dict[str, float | None]:
    """What the log keeps of a step by itself; reading it waits for the device."""
    return {
        "loss": loss.item(),
        "lr": optimizer.lr,
        "grad_norm": grad_norm.item(),
        "loss_scale": optimizer.loss_scale.scale.item() if optimizer.loss_scale else None,
        "loss_spikes": guard.spikes or None,
        "bad_steps": guard.bad_steps or None,
    }


def finish(
    log: RunLog, results: Mapping[str, Any], guard: NumberGuard, stop: StopRequest | None, checkpoint: Path | None
) -> dict[str, Any]:
    """Write the summary, print the run's last lines, return the summary.

    results: "steps", "seconds" and what else is known; where the run was not stopped, its evaluation too.
    stop: why it was stopped. checkpoint: the last one that was saved.
    """
    best = results["best_val_loss"]
    summary = {
        **results,
        "best_val_loss": best if math.isfinite(best) else None,
        "bad_steps": guard.bad_steps,
        "loss_spikes": guard.spikes,
        "stopped": stop.reason if stop else None,
        "exit_code": stop.exit_code if stop else 0,
        "checkpoint": str(checkpoint) if checkpoint else None,
    }
    log.summary(summary)
    if stop:
        log.say(f"stopped by {stop.reason}; resume={log.run_dir} goes on")
    else:
        log.say(
            f"held-out loss {summary['val_loss']:.4f} nats a token ({summary['val_bits_per_byte']:.3f} bits a byte); "
            f"a unigram model of the same text: {summary['unigram_val_loss']:.4f}"
        )
    log.say(f"{summary['steps']} steps in {summary['seconds']:.0f} s; everything is in {log.run_dir}")
    return summary
