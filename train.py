"""Train a GPT through our own flash attention.

    python train.py                                    the quickstart: a minute or two on two cores, seconds on a GPU
    python train.py experiment=NAME                    a named experiment
    python train.py model.num_layers=4 optim.lr=1e-3   change single values
    python train.py -m optim.lr=1e-3,3e-4              one run for each value
    python train.py data=text data.files=my.txt name=mine   your own text, in runs/mine/
    python train.py resume=runs/mine/TIME              continue a run with its own settings; other keys change them
    python train.py resume=auto name=mine              the newest run of that name, or a first one
    python train.py init_from=CHECKPOINT               a new run that starts with those weights
    python train.py --cfg job                          print the configuration of a new run

This file is a run from top to bottom: resolve the settings, build, loop, close. Each thing it calls has a file of its
own; this is the only training loop.
"""

import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from conf.interrupt import before_a_run

    before_a_run()  # before PyTorch is imported, which takes seconds

import torch

from conf.program import is_sweep_run, program
from conf.schema import Settings
from data import Prefetcher, TokenBatches
from model import attend_with
from model.attention import AttentionFunction
from training import resume
from training.bad_steps import BadSteps, NumberCheck
from training.comparison import show_sweep
from training.evaluate import EvaluationSet, unigram_loss
from training.lock import locked
from training.log import RunLog
from training.memory import advice_when_out_of_memory
from training.optimizer import Optimizer, lr_factor
from training.parallel import ALONE, World
from training.profile import StepProfiler
from training.provenance import provenance
from training.random_states import seed_everything
from training.rendezvous import this_world
from training.run import Run, resolve
from training.saver import saver_of
from training.shard import parallelize
from training.speed import Speed
from training.step import Step
from training.stepper import Stepper, step_record
from training.stop import StopRequest


def train(
    settings: Settings,
    run_dir: Path,
    *,
    attend: AttentionFunction | None = None,
    on_step: Callable[[Step], None] | None = None,
    world: World = ALONE,
) -> dict[str, Any]:
    """Train with `settings`, write everything to `run_dir`, return the summary.

    Args:
        attend: called in place of the attention that `settings` names, with the same arguments (model/attention.py).
        on_step: called after each step, before the loop does anything else with it; it must change nothing.
        world: the processes that train together; each of them calls `train`, and only the first one writes.

    Raises:
        ValueError: the settings cannot run, raised before the run writes anything but its text's tokens; later, where
            memory runs out or the last weights are not finite.
        OSError: the last checkpoint could not be written.
    """
    began = time.perf_counter()
    with world.on_first(locked)(run_dir):
        # makes every choice, and refuses what cannot run before anything is written or allocated
        chosen = resolve(settings, run_dir, world=world)
        with advice_when_out_of_memory(chosen.plan):
            return run(settings, chosen, run_dir, began, attend, on_step or (lambda step: None))


def run(
    settings: Settings, chosen: Run, run_dir: Path, began: float, attend: AttentionFunction | None,
    on_step: Callable[[Step], None],
) -> dict[str, Any]:  # fmt: skip
    """Train in `run_dir`, which the first process has locked; return the summary."""
    config = settings.train
    hardware, dataset, resumed, first_step = chosen.hardware, chosen.dataset, chosen.resumed, chosen.first_step
    world, on_first = hardware.world, hardware.world.on_first  # on_first(f) does nothing in the other processes
    print(f"memory     {chosen.plan}")

    # --- the model and its optimizer; the seed fixes the initial weights, whatever the attention
    seed_everything(config.seed)
    model = chosen.build_model()
    forward = parallelize(model, hardware)  # compiled if hardware.compile, sharded if parallel.data=shard
    optimizer = Optimizer(model, chosen.plan.optim, hardware.dtype, world)
    state, best_loss = resume.restore(resumed, model, optimizer, hardware.device, chosen.description, run_dir)
    if chosen.initial:
        chosen.initial.load_weights(model)
    stepper = Stepper(chosen, model, forward, optimizer)

    # --- batches are a pure function of (seed, step); an evaluation always sees the same windows
    batches = TokenBatches(
        dataset.train, chosen.seq_len, chosen.sequences, config.window_seed, rank=world.data_rank,
        world_size=world.data_size, shifted=settings.data.shift_windows,
    )  # fmt: skip
    evaluation = EvaluationSet.of(dataset, chosen.seq_len, config.eval_windows)

    # --- what the run writes: the log, the description, checkpoints
    description = chosen.description | {"provenance": provenance()}
    log = on_first(RunLog)(run_dir, settings, chosen.wandb, description, resumed)
    saver = saver_of(run_dir / "checkpoints", config, log.say, world, best_loss)
    log.describe(dataset.manifest, evaluation.protocol)
    profiler = on_first(StepProfiler)(run_dir / "profile", hardware, log.console) if settings.profile else None

    # --- what handles a loss or gradient that is not finite
    check = NumberCheck(optimizer, hardware, log.say, state.get("number_check"))
    bad_steps = BadSteps(
        config.on_nonfinite, run_dir, model, optimizer, hardware, check, saver, description, log.say, resumed
    )

    speed = Speed(model, hardware, config.batch_tokens, first_step, began - chosen.seconds_before)

    def save(step: int, val_loss: float | None = None) -> None:
        state = resume.state_of(optimizer, check, best_loss, hardware.device)
        progress = {"step": step, "metric_lines": log.lines} | speed.progress(step)
        saver.save(model, state, progress | description, val_loss)

    with (
        log,
        saver,
        StopRequest(config.max_hours, began, world=world) as stop,
        Prefetcher(batches, first_step, hardware.device, end_of_text=chosen.end_of_text) as prefetcher,
        profiler or nullcontext(),
        attend_with(model, lambda layer, own: attend or own),
    ):
        for line in chosen.first_lines(model, run_dir):
            log.say(line)
        log.say(f"logging    metrics.jsonl and, at evaluations, loss.png in {run_dir}; {log.wandb_note}")
        if resumed:
            resume.print_changes(resumed, description, log.say)

        step, results = first_step, {}
        if step >= config.steps:  # killed after its last save: only the summary may be missing
            log.say(f"complete   all of train.steps={config.steps} are done; raise train.steps to go on")
            results = stepper.evaluate(evaluation)

        # --- the loop
        while step < config.steps:
            optimizer.set_lr_factor(lr_factor(step, config.steps, settings.optim))
            batch = next(prefetcher)
            loss, grad_norm = stepper.step(batch)
            step += 1
            on_step(Step(step, batch, loss, grad_norm, optimizer))
            if resumed and step == first_step + 1:
                saver.go_back(resumed)

            # --- after a loss or gradient that is not finite the optimizer changes nothing, so the check may run a step
            # late and set `step` back; it waits for this step where the loss or weights are logged, saved or evaluated
            stopping = stop.poll()
            if bad := check.bad_step(step, loss, grad_norm, wait=stopping or config.is_observed(step)):
                if not bad_steps.handle(bad, prefetcher, stepper.compute_step, stop):
                    step = bad.step - 1
                    save(step)
                    break
                step, loss, grad_norm = bad.step, torch.tensor(bad.loss), torch.tensor(bad.grad_norm)
                speed.restart(step)
            log.advance(step)

            # --- the rest of the loop only observes the run: it draws from none of the random streams of training
            if step == first_step + 2 and (held := hardware.peak_memory_gib()):  # the second step captures the graphs
                log.say(f"memory     {chosen.plan.beside(held)}")
            if (profiler and profiler.step()) or step == first_step + 1:  # after its report; after compilation
                speed.restart(step)

            record, results, is_best = {}, {}, False
            if config.is_logged(step):
                record = step_record(loss, grad_norm, optimizer, check) | speed.lap(step) | speed.progress(step)
            if config.is_due(config.eval_every, step):
                results = stepper.evaluate(evaluation)
                is_best = results["val_loss"] < best_loss
                best_loss = min(best_loss, results["val_loss"])
                record |= results
            if record:
                log.metrics(step, record)
            if is_best or stopping or config.is_due(config.save_every, step):
                save(step, results.get("val_loss"))
            if config.sample_tokens and config.is_due(config.sample_every, step):
                text = stepper.sample(dataset.tokenizer)
                log.say(f"--- a sample after {step} steps, its prompt in brackets\n{text}\n---")
            if config.is_observed(step):
                speed.restart(step)
            if stopping:  # saved above; evaluating here would add a record that an uninterrupted run lacks
                break

        best_loss = min(best_loss, results.get("val_loss", math.inf))
        results |= {"steps": step, "best_val_loss": best_loss, "attention": chosen.model.attention}
        results |= speed.progress(step)
        world.suspend_timeout()  # the first process may read a large text, or wait for a slow disk
        if step >= config.steps and world.is_first:  # this reads all of the text; a stop has little time
            results["unigram_val_loss"] = unigram_loss(dataset.train, evaluation.targets, chosen.vocab_size)
        saved = saver.wait() or (resumed and resumed.path)
        summary = log.finish(results, check, stop if step < config.steps else None, saved, saver.error)
        saver.check()
        # inside `with`: after it, a signal would kill a process that waits here while the first one still writes
        summary = world.broadcast(summary)
        return summary | {"signal": max(world.all_gather(stop.signal))}  # heard by any process, while it waited too


@program("config", Settings, experiment="quickstart", after_sweep=show_sweep, world=this_world)
def main(settings: Settings, run_dir: Path) -> None:
    summary = train(settings, run_dir, world=this_world())
    if exit_code := summary["exit_code"] or (summary["signal"] if is_sweep_run() else 0):
        sys.exit(exit_code)


if __name__ == "__main__":
    main()
