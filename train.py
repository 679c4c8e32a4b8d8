"""Train a GPT. `python train.py` runs the quickstart; `python train.py --help` lists what can be chosen.

This file is the story of a run, top to bottom: choose the hardware, open the data, build the model, loop, evaluate,
save. Everything it calls is one file with one idea; this is the only training loop.
"""

import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from conf.program import program
from conf.schema import Settings
from data import Batch, Prefetcher, TokenBatches, fixed_windows, open_dataset, tokenizer_state
from model import GPT, resolve_attention
from model.config import resolve_loss
from training import resume
from training.documents import packed_rows
from training.evaluate import EvaluationSet, evaluate, prompt_of, sample, unigram_loss
from training.flops import mfu, model_flops, peak_flops
from training.guard import NumberGuard
from training.hardware import Hardware, set_up
from training.lock import locked
from training.memory import advice_when_out_of_memory, plan
from training.nonfinite import NonFinite
from training.optimizer import Optimizer, lr_factor
from training.profiler import StepProfiler, region
from training.provenance import provenance, write_description
from training.random_states import seed_everything
from training.runlog import RunLog
from training.saver import Saver
from training.stop import StopRequest
from training.stopwatch import Stopwatch


def train(settings: Settings, run_dir: Path) -> dict[str, Any]:
    """Train as `settings` says, keep everything in `run_dir`, return the summary; ValueError for what cannot be."""
    with locked(run_dir):
        return run(settings, run_dir)


def run(settings: Settings, run_dir: Path) -> dict[str, Any]:
    """The story of a run, in a folder that is this process's own."""
    config, began = settings.train, time.perf_counter()

    # --- what to run on and what to learn from; whatever cannot work is refused here, before memory is taken
    hardware = set_up(settings.hardware)
    features = settings.model.attention_features(settings.data.document_mask)
    settings.model.attention, why_attention = resolve_attention(
        settings.model.attention, hardware.device, hardware.dtype, settings.model.head_dim, features
    )
    settings.model.loss, why_loss = resolve_loss(settings.model.loss, hardware.device.type)
    dataset = open_dataset(settings.data, settings.tokenizer, report=print)
    tokenizer = tokenizer_state(dataset.tokenizer)
    prompt = prompt_of(config.sample_prompt, dataset, settings.data.seq_len)
    resumed = resume.find(settings.resume, run_dir)
    if resumed:
        resume.refuse_unless_same(resumed, asdict(settings), tokenizer, dataset.vocab_size)

    planned = plan(settings, settings.model, hardware, dataset.vocab_size)
    if config.micro_batch == "auto":
        config.micro_batch = planned.micro_batch
    print(f"memory     {planned}")
    resolved = asdict(settings)  # from here on nothing is chosen

    # --- the model and its optimizer; the seed fixes the initial weights, whatever the attention
    seed_everything(config.seed)
    model = GPT(settings.model, dataset.vocab_size, settings.data.seq_len, device=hardware.device, dtype=hardware.dtype)
    optimizer = Optimizer(model, settings.optim, hardware.dtype)
    first_step, seconds_before, best_loss = 0, 0.0, math.inf
    if resumed:
        state = resume.restore(resumed, model, optimizer, hardware.device)
        first_step, seconds_before, best_loss = resumed.step, resumed.meta["seconds"], state["best_loss"]
    forward = torch.compile(model, dynamic=False) if hardware.compile else model

    # --- batches are a pure function of (seed, step); an evaluation always sees the same windows
    data_seed = config.seed if config.data_seed is None else config.data_seed
    batches = TokenBatches(dataset.train, settings.data.seq_len, settings.sequences_per_step, data_seed)
    windows = fixed_windows(dataset.validation, settings.data.seq_len, config.eval_windows)
    evaluation = EvaluationSet.of(windows, dataset.tokenizer)
    # where documents end, if they must not see each other
    boundary = dataset.end_of_text if settings.data.document_mask else None

    # --- what is written down: the log, the description, checkpoints, and what a step costs, for the MFU
    flops, peak = model_flops(model), peak_flops(hardware.device, hardware.dtype)
    resumes = settings.resume is not None
    log = RunLog(run_dir, settings.logger, resolved, first_step=first_step, steps=config.steps, resumes=resumes)
    write_description(run_dir, resolved, dataset.manifest, evaluation.protocol)
    profiler = None
    if settings.profile:
        profiler = StepProfiler(run_dir / "profile", hardware, config.steps - first_step, log.console)
    saver = Saver(run_dir / "checkpoints", keep_last=config.keep_last, keep_every=config.keep_every, say=log.say)
    description = {
        "settings": resolved,
        "tokenizer": tokenizer,
        "vocab_size": dataset.vocab_size,
        "data_fingerprint": dataset.fingerprint,
        "provenance": provenance(),
    }

    guard = NumberGuard(optimizer, hardware, log.say)
    if resumed and "guard" in state:
        guard.load_state_dict(state["guard"])
    nonfinite = NonFinite(
        config.on_nonfinite, run_dir, model, forward, optimizer, hardware, guard, saver, description, log.say
    )

    def take(forward: Callable[..., torch.Tensor], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets, starts = batch  # (sequences, seq_len) each, and where documents begin
        return training_step(forward, optimizer, inputs, targets, settings.micro_batch, hardware, starts)

    def seconds() -> float:
        """Time spent on this run, by the processes before this one too."""
        return seconds_before + time.perf_counter() - began

    def save(step: int, *, best: bool) -> None:
        state = resume.state_of(optimizer, guard, best_loss, hardware.device)
        epoch, window = batches.position(step)
        progress = {"step": step, "seconds": seconds(), "data_position": {"epoch": epoch, "window": window}}
        saver.save(model, state, progress | description, best=best)

    with (
        log,
        saver,
        StopRequest(config.max_hours, began) as stop,
        Prefetcher(batches, first_step, hardware.device, end_of_text=boundary) as prefetcher,
        profiler or nullcontext(),
        advice_when_out_of_memory(planned),
    ):
        log.say(f"run        {run_dir}")
        log.say(f"hardware   {hardware.description}")
        log.say(f"attention  {settings.model.attention} ({why_attention})")
        log.say(f"loss       {model.loss} ({why_loss})")
        log.say(f"model      {model.num_parameters():,} parameters, {settings.model.num_layers} layers")
        log.say(
            f"data       {len(dataset.train):,} tokens to learn from, {len(dataset.validation):,} held out; "
            f"{config.steps:,} steps of {config.batch_tokens:,} tokens are "
            f"{config.steps * config.batch_tokens / len(dataset.train):.1f} epochs"
        )
        log.say(f"logging    {run_dir / 'metrics.jsonl'}, {log.wandb_note}")
        if resumed:
            resume.tell(resumed, resolved, dataset.fingerprint, log.say)

        # --- the loop
        step, finished, stopped, results = first_step, False, False, {}
        watch = Stopwatch(hardware.synchronize, step)
        cadences = (config.log_every, config.eval_every, config.save_every, config.sample_every)
        while not (finished or stopped):
            optimizer.set_lr_factor(lr_factor(step, config.steps, settings.optim))
            step_loss, grad_norm = take(forward, next(prefetcher))
            step += 1

            # --- after a loss or gradient that is not finite the optimizer does nothing, so it is soon enough to look a
            # step late; but at once where numbers or weights are used for anything
            asked = stop.requested
            due = asked or step in (1, config.steps) or any(every and step % every == 0 for every in cadences)
            if bad := guard.look(step, step_loss, grad_norm, wait=due):
                step, step_loss, grad_norm = bad.step, torch.tensor(bad.loss), torch.tensor(bad.grad_norm)
                if not nonfinite.handle(bad, prefetcher, take, stop):
                    step, stopped = step - 1, True
                    save(step, best=False)
                    break
            log.advance(step)

            # --- from here to the end of the loop the run is only watched: nothing draws from a training stream
            if step == first_step + 2 and (held := hardware.peak_memory_gib()):  # the optimizer has its state
                log.say(f"memory     {planned.beside(held)}")
            profile_written = profiler is not None and profiler.step()
            # a run that is stopped saves and leaves: what it would log or evaluate beyond that, no other run has
            finished = step == config.steps
            stopped = asked and not finished
            record: dict[str, float | None] = {}
            if finished or step == 1 or step % config.log_every == 0:
                # the first step of a process compiles, so it is no measure of speed
                step_seconds = watch.lap(step) if step > first_step + 1 else None
                rate = config.batch_tokens / step_seconds if step_seconds else None
                record = {
                    "loss": step_loss.item(),
                    "lr": optimizer.lr,
                    "grad_norm": grad_norm.item(),
                    "loss_scale": optimizer.loss_scale.scale.item() if optimizer.loss_scale else None,
                    "loss_spikes": guard.spikes or None,
                    "bad_steps": guard.bad_steps or None,
                    "tokens": step * config.batch_tokens,
                    "seconds": seconds(),
                    "tokens_per_second": rate,
                    "mfu": mfu(flops["causal"], rate, peak),
                    "mfu_full": mfu(flops["full"], rate, peak),
                    "peak_memory_gib": hardware.peak_memory_gib(),
                }
            is_best = False
            if finished or (config.eval_every and step % config.eval_every == 0):
                results = evaluate(forward, evaluation, settings.micro_batch, hardware, boundary)
                is_best = results["val_loss"] < best_loss
                best_loss = min(best_loss, results["val_loss"])
                record |= results
            if record:
                log.metrics(step, record)
            if finished or stopped or is_best or (config.save_every and step % config.save_every == 0):
                save(step, best=is_best)
            if config.sample_tokens and (finished or (config.sample_every and step % config.sample_every == 0)):
                text = sample(model, prompt, config.sample_tokens, config.seed, dataset.tokenizer, hardware)
                log.say(f"--- a sample after {step} steps\n{text}\n---")
            if record or is_best or profile_written or bad:
                watch.restart(step)

        saved = saver.wait()
        summary = {
            "steps": step,
            "tokens": step * config.batch_tokens,
            "seconds": seconds(),
            **results,
            "best_val_loss": best_loss if math.isfinite(best_loss) else None,
            "unigram_val_loss": unigram_loss(dataset.train, evaluation.targets, dataset.vocab_size),
            "attention": settings.model.attention,
            "bad_steps": guard.bad_steps,
            "loss_spikes": guard.spikes,
            "stopped": stop.reason if stopped else None,
            "exit_code": stop.exit_code if stopped else 0,
            "checkpoint": str(saved) if saved else None,
        }
        log.summary(summary)
        if finished:
            log.say(
                f"held-out loss {summary['val_loss']:.4f} nats a token ({summary['val_bits_per_byte']:.3f} bits a "
                f"byte); a unigram model of the same text: {summary['unigram_val_loss']:.4f}"
            )
        else:
            log.say(f"stopped by {stop.reason}; resume={run_dir} goes on")
        log.say(f"{step} steps in {summary['seconds']:.0f} s; everything is in {run_dir}")
        saver.check()
    return summary


def training_step(
    forward: Callable[..., torch.Tensor],
    optimizer: Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    micro_batch: int,
    hardware: Hardware,
    starts: torch.Tensor | None = None,
    region: Callable[[str], AbstractContextManager] = region,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step over (sequences, seq_len) tokens, `micro_batch` sequences at a time.

    `forward` returns a sum over tokens, so dividing by the tokens of the whole step gives the same gradient however
    the step is split. `starts` (documents,) are the first tokens of documents that must not see each other, on the
    CPU. `region` names the parts of the step for whoever watches. Returns the mean loss (nats a token) and the
    gradient norm, both still on the device.
    """
    step_loss = torch.zeros((), device=hardware.device)
    for start in range(0, len(inputs), micro_batch):
        part = slice(start, start + micro_batch)
        documents = packed_rows(starts, start, *inputs[part].shape, hardware.device)
        with region("forward"), hardware.autocast():
            loss = forward(inputs[part], targets[part], **documents) / targets.numel()
        with region("backward"):
            optimizer.scaled(loss).backward()
        step_loss += loss.detach()
    with region("optimizer"):
        grad_norm = optimizer.step(step_loss)
    return step_loss, grad_norm


@program("config", Settings)
def main(settings: Settings, run_dir: Path) -> None:
    if exit_code := train(settings, run_dir)["exit_code"]:
        sys.exit(exit_code)


if __name__ == "__main__":
    main()
