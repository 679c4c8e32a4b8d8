"""What a run says of itself: its first lines, the record of a step, its speed, the summary."""

import math
import time
from pathlib import Path
from typing import Any

from model import GPT
from training.evaluate import EvaluationSet, unigram_loss
from training.flops import mfu, model_flops, peak_flops
from training.guard import NumberGuard
from training.hardware import Hardware
from training.optimizer import Optimizer
from training.run import Run, TrainConfig
from training.step import Step
from training.stop import StopRequest
from training.stopwatch import Stopwatch


def first_lines(run: Run, config: TrainConfig, model: GPT, run_dir: Path) -> list[str]:
    """What will run, with the reasons."""
    dataset = run.dataset
    epochs = config.steps * config.batch_tokens / len(dataset.train)
    return [
        f"run        {run_dir}",
        f"hardware   {run.hardware.description}",
        f"attention  {run.model.attention} ({run.attention_reason})",
        f"loss       {run.model.loss} ({run.loss_reason})",
        f"model      {model.num_parameters():,} parameters, {run.model.num_layers} layers",
        f"data       {len(dataset.train):,} tokens to learn from, {len(dataset.validation):,} held out; "
        f"{config.steps:,} steps of {config.batch_tokens:,} tokens are {epochs:.1f} epochs",
    ]


class Speed:
    """Tokens a second and MFU of the steps since it was last asked or restarted.

    Args:
        step: steps done before; the next one compiles, so it is no measure of speed.
        began: when the run's time began, on time.perf_counter's clock.
    """

    def __init__(self, model: GPT, hardware: Hardware, batch_tokens: int, *, step: int, began: float) -> None:
        self._hardware, self._batch_tokens, self._began = hardware, batch_tokens, began
        self._flops, self._peak = model_flops(model), peak_flops(hardware.device, hardware.dtype)
        self._first_timed = step + 2
        self._watch = Stopwatch(hardware.synchronize, step)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def restart(self, step: int) -> None:
        """Leave out the time since the last lap: it went into something beside training."""
        self._watch.restart(step)

    def record(self, step: int) -> dict[str, float | None]:
        """None for what is not known here."""
        lap = self._watch.lap(step)
        rate = self._batch_tokens / lap if lap and step >= self._first_timed else None
        return {
            "tokens": step * self._batch_tokens,
            "seconds": self.seconds,
            "tokens_per_second": rate,
            "mfu": mfu(self._flops["causal"], rate, self._peak),
            "mfu_full": mfu(self._flops["full"], rate, self._peak),
            "peak_memory_gib": self._hardware.peak_memory_gib(),
        }


def step_record(step: Step, guard: NumberGuard) -> dict[str, float | None]:
    """What the log keeps of a step; reading its loss waits for the device."""
    optimizer: Optimizer = step.optimizer
    return {
        "loss": step.loss.item(),
        "lr": optimizer.lr,
        "grad_norm": step.grad_norm.item(),
        "loss_scale": optimizer.loss_scale.scale.item() if optimizer.loss_scale else None,
        "loss_spikes": guard.spikes or None,
        "bad_steps": guard.bad_steps or None,
    }


def summary_of(
    run: Run,
    config: TrainConfig,
    step: int,
    results: dict[str, float],
    best_loss: float,
    evaluation: EvaluationSet,
    guard: NumberGuard,
    stop: StopRequest,
    seconds: float,
    saved: Path | None,
) -> dict[str, Any]:
    """What a run ends with, after `step` steps: `results` of its last evaluation, why it stopped if it was stopped."""
    stopped = step < config.steps
    return {
        "steps": step,
        "tokens": step * config.batch_tokens,
        "seconds": seconds,
        **results,
        "best_val_loss": best_loss if math.isfinite(best_loss) else None,
        "unigram_val_loss": unigram_loss(run.dataset.train, evaluation.targets, run.vocab_size),
        "attention": run.model.attention,
        "bad_steps": guard.bad_steps,
        "loss_spikes": guard.spikes,
        "stopped": stop.reason if stopped else None,
        "exit_code": stop.exit_code if stopped else 0,
        "checkpoint": str(saved) if saved else None,
    }


def last_lines(summary: dict[str, Any], run_dir: Path) -> list[str]:
    if summary["stopped"]:
        end = f"stopped by {summary['stopped']}; resume={run_dir} goes on"
    else:
        end = (
            f"held-out loss {summary['val_loss']:.4f} nats a token ({summary['val_bits_per_byte']:.3f} bits a "
            f"byte); a unigram model of the same text: {summary['unigram_val_loss']:.4f}"
        )
    return [end, f"{summary['steps']} steps in {summary['seconds']:.0f} s; everything is in {run_dir}"]
