"""Train a GPT through our own flash attention.

    python train.py                                    the quickstart: a minute on two CPU cores, seconds on a GPU
    python train.py experiment=NAME                    a named experiment
    python train.py model.num_layers=4 optim.lr=1e-3   change single values
    python train.py -m optim.lr=1e-3,3e-4              one run for each value
    python train.py resume=auto                        go on with the experiment's newest run; resume=PATH: any
    python train.py --cfg job                          print the configuration that would run

This file is the story of a run, top to bottom: resolve what it will be, build, loop, close. Everything it calls is one
file with one idea; this is the only training loop.
"""

import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from conf.program import program
from conf.schema import Settings
from data import Batch, Prefetcher, TokenBatches, fixed_windows
from model import GPT, attend_with
from training import resume
from training.evaluate import EvaluationSet, evaluate, sample
from training.fit import explained
from training.guard import NumberGuard
from training.lock import locked
from training.nonfinite import NonFinite
from training.optimizer import Optimizer, lr_factor
from training.profiler import StepProfiler
from training.provenance import provenance, write_description
from training.random_states import seed_everything
from training.report import Speed, first_lines, last_lines, step_record, summary_of
from training.run import resolve
from training.runlog import RunLog
from training.saver import Saver
from training.step import Step, training_step
from training.stop import StopRequest


def train(
    settings: Settings,
    run_dir: Path,
    *,
    attend: Callable[..., torch.Tensor] | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> dict[str, Any]:
    """Train as `settings` says, keep everything in `run_dir`, return the summary.

    Args:
        attend: called in place of the attention that `settings` names, with the same arguments (model/attention.py).
        on_step: called after each step, before anything else is done with it; it must change nothing.

    Raises:
        ValueError: what cannot be, before anything is written or allocated.
    """
    with locked(run_dir):
        return run(settings, run_dir, attend, on_step or (lambda step: None))


def run(
    settings: Settings,
    run_dir: Path,
    attend: Callable[..., torch.Tensor] | None,
    on_step: Callable[[Step], None],
) -> dict[str, Any]:
    """The story of a run, in a folder that is this process's own."""
    config, began = settings.train, time.perf_counter()

    # --- what this run will be; whatever cannot be is refused here, before anything is written or allocated
    chosen = resolve(settings, run_dir)
    hardware, dataset, resumed, first_step = chosen.hardware, chosen.dataset, chosen.resumed, chosen.first_step
    print(f"memory     {chosen.plan}")

    # --- the model and its optimizer; the seed fixes the initial weights, whatever the attention
    seed_everything(config.seed)
    model = GPT(chosen.model, chosen.vocab_size, chosen.seq_len, device=hardware.device)
    optimizer = Optimizer(model, settings.optim, hardware.dtype)
    best_loss, seconds_before, state = math.inf, 0.0, {}
    if resumed:
        state = resume.restore(resumed, model, optimizer, hardware.device)
        best_loss, seconds_before = state["best_loss"], resumed.meta["seconds"]
    forward = torch.compile(model, dynamic=False) if hardware.compile else model

    # --- batches are a pure function of (seed, step); an evaluation always sees the same windows
    batches = TokenBatches(dataset.train, chosen.seq_len, chosen.sequences_per_step, config.window_seed)
    windows = fixed_windows(dataset.validation, chosen.seq_len, config.eval_windows)
    evaluation = EvaluationSet.of(windows, dataset.tokenizer)

    # --- what is written down: the log, the description, checkpoints
    resumes = settings.resume is not None
    log = RunLog(
        run_dir,
        settings.logger,
        chosen.settings,
        first_step=first_step,
        steps=config.steps,
        resumes=resumes,
        wandb=chosen.wandb,
    )
    write_description(run_dir, chosen.settings, dataset.manifest, evaluation.protocol)
    profiler = StepProfiler(run_dir / "profile", hardware, log.console) if settings.profile else None
    saver = Saver(run_dir / "checkpoints", keep_last=config.keep_last, keep_every=config.keep_every, say=log.say)
    speed = Speed(model, hardware, config.batch_tokens, step=first_step, began=began - seconds_before)
    description = chosen.description | {"provenance": provenance()}

    # --- what is done about a loss or gradient that is not finite
    guard = NumberGuard(optimizer, hardware, log.say)
    if "guard" in state:
        guard.load_state_dict(state["guard"])
    nonfinite = NonFinite(
        config.on_nonfinite, run_dir, model, forward, optimizer, hardware, guard, saver, description, log.say
    )

    def take(forward: Callable[..., torch.Tensor], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets, starts = batch  # (sequences, seq_len) each, and where documents begin
        return training_step(forward, optimizer, inputs, targets, chosen.micro_batch, hardware, starts)

    def save(step: int, *, best: bool) -> None:
        state = resume.state_of(optimizer, guard, best_loss, hardware.device)
        epoch, window = batches.position(step)
        progress = {"step": step, "seconds": speed.seconds, "data_position": {"epoch": epoch, "window": window}}
        saver.save(model, state, progress | description, best=best)

    with (
        log,
        saver,
        StopRequest(config.max_hours, began) as stop,
        Prefetcher(batches, first_step, hardware.device, end_of_text=chosen.end_of_text) as prefetcher,
        profiler or nullcontext(),
        explained(chosen.plan),
        attend_with(model, lambda layer, named: attend or named),
    ):
        for line in first_lines(chosen, config, model, run_dir):
            log.say(line)
        log.say(f"logging    {run_dir / 'metrics.jsonl'}, {log.wandb_note}")
        if resumed:
            resume.tell(resumed, chosen.settings, dataset.fingerprint, log.say)

        # --- the loop
        step, results = first_step, {}
        speed.restart(step)
        while step < config.steps:
            optimizer.set_lr_factor(lr_factor(step, config.steps, settings.optim))
            batch = next(prefetcher)
            loss, grad_norm = take(forward, batch)
            step += 1
            done = Step(step, batch, loss, grad_norm, optimizer)
            on_step(done)

            # --- after a loss or gradient that is not finite the optimizer does nothing, so it is soon enough to look a
            # step late; but at once where numbers or weights are used for anything
            asked = stop.requested
            if bad := guard.look(step, loss, grad_norm, wait=asked or config.is_watched(step)):
                if not nonfinite.handle(bad, prefetcher, take, stop):
                    step = bad.step - 1
                    save(step, best=False)
                    break
                step = bad.step
                done = done._replace(number=step, loss=torch.tensor(bad.loss), grad_norm=torch.tensor(bad.grad_norm))
                speed.restart(step)
            log.advance(step)

            # --- from here to the end of the loop the run is only watched: nothing draws from a training stream
            if step == first_step + 2 and (held := hardware.peak_memory_gib()):  # the optimizer has its state
                log.say(f"memory     {chosen.plan.beside(held)}")
            if profiler and profiler.step():  # it has written its report
                speed.restart(step)

            record, is_best = {}, False
            if config.is_logged(step):
                record = step_record(done, guard) | speed.record(step)
            if config.is_due(config.eval_every, step):
                results = evaluate(forward, evaluation, chosen.micro_batch, hardware, chosen.end_of_text)
                is_best = results["val_loss"] < best_loss
                best_loss = min(best_loss, results["val_loss"])
                record |= results
            if record:
                log.metrics(step, record)
                speed.restart(step)

            if is_best or asked or config.is_due(config.save_every, step):
                save(step, best=is_best)
                speed.restart(step)

            if config.sample_tokens and config.is_due(config.sample_every, step):
                text = sample(model, chosen.prompt, config.sample_tokens, config.seed, dataset.tokenizer, hardware)
                log.say(f"--- a sample after {step} steps\n{text}\n---")
                speed.restart(step)

            if asked:  # a stopped run saves and leaves: what it would log or evaluate beyond that, no other run has
                break

        saved = saver.wait()
        summary = summary_of(
            chosen, config, step, results, best_loss, evaluation, guard, stop, seconds=speed.seconds, saved=saved
        )
        log.summary(summary)
        for line in last_lines(summary, run_dir):
            log.say(line)
        saver.check()
    return summary


@program("config", Settings, experiment="quickstart")
def main(settings: Settings, run_dir: Path) -> None:
    if exit_code := train(settings, run_dir)["exit_code"]:
        sys.exit(exit_code)


if __name__ == "__main__":
    main()
