"""What a run will be: `resolve` turns settings into a `Run`, with every choice made, or refuses the start.

It allocates nothing on the device and writes nothing but the text's tokens into their cache.
"""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from data import Dataset, open_dataset, tokenizer_state
from data.shards import file_sha256
from model import GPT, GPTConfig, build_model, resolve_model
from model.masks import prefix_of
from training import memory, resume
from training.bad_steps import POLICIES
from training.checkpoint import MANIFEST, Checkpoint, open_checkpoint
from training.comparison import flat
from training.context import resolve_method
from training.evaluate import prompt_of
from training.hardware import Hardware, set_up
from training.memory import Plan
from training.parallel import ALONE, World
from training.profile import refuse_too_few
from training.speed import slow_on_a_cpu
from training.stop import folder_value
from training.wandb_run import wandb_mode


@dataclass
class TrainConfig:
    """What the loop itself reads."""

    steps: int = 300  # optimizer steps
    seed: int = 0  # seeds the initial weights, the order of the windows and dropout
    data_seed: int | None = None  # seeds the order of the windows alone; null: seed
    batch_tokens: int = 4096  # tokens per optimizer step, over all processes and micro-batches
    micro_batch: int | str | None = None  # sequences per forward and backward; null: the whole step; auto: what fits
    log_every: int = 10  # steps between two lines of metrics
    eval_every: int = 100  # steps between two evaluations; 0: only at the end
    eval_windows: int = 64  # validation windows of seq_len tokens, always the same ones
    sample_every: int = 0  # steps between two printed samples; 0: only at the end
    sample_tokens: int = 200  # length of a printed sample; 0: none
    sample_prompt: str = ""  # what the samples continue; empty: the beginning of the validation text
    save_every: int = 0  # steps between two checkpoints; 0: only the best and the last
    keep_last: int = 3  # how many of the newest checkpoints are kept; the best is kept in any case
    keep_every: int = 0  # checkpoints at multiples of this many steps are kept for good; 0: none
    on_nonfinite: str = "stop"  # stop | skip | rollback: what to do after a step with a non-finite loss or gradient
    max_hours: float | None = None  # save and stop after this many hours, start-up included; null: no limit

    def __post_init__(self) -> None:
        for key in ("steps", "batch_tokens", "log_every", "eval_windows", "keep_last"):
            if getattr(self, key) < 1:
                raise ValueError(f"train.{key}={getattr(self, key)} must be at least 1")
        for key, most in (("steps", 2**63 - 1), ("batch_tokens", 2**32), ("sample_tokens", 2**20)):
            if getattr(self, key) > most:
                raise ValueError(f"train.{key}={getattr(self, key)} must be at most {most}")
        for key in ("eval_every", "sample_every", "sample_tokens", "save_every", "keep_every", "seed", "data_seed"):
            if (getattr(self, key) or 0) < 0:
                raise ValueError(f"train.{key}={getattr(self, key)} must be at least 0")
        for key in ("seed", "data_seed"):
            if (getattr(self, key) or 0) >= 1 << 64:
                raise ValueError(f"train.{key}={getattr(self, key)} must be below 2^64, as generators take no more")
        number = 1 if self.micro_batch in (None, "auto") else self.micro_batch
        if isinstance(number, bool | str) or number < 1:
            raise ValueError(f"train.micro_batch={self.micro_batch} must be at least 1 sequence, auto or null")
        if self.on_nonfinite not in POLICIES:
            raise ValueError(f"train.on_nonfinite={self.on_nonfinite} is not one of {', '.join(POLICIES)}")
        if self.on_nonfinite == "rollback" and not (self.save_every or self.eval_every):
            raise ValueError("train.on_nonfinite=rollback needs checkpoints and train.save_every=0; raise it")
        if self.max_hours is not None and not self.max_hours > 0:
            raise ValueError(f"train.max_hours={self.max_hours} must be more than 0, or null")

    @property
    def window_seed(self) -> int:
        """The seed of the order of the windows."""
        return self.seed if self.data_seed is None else self.data_seed

    def is_due(self, every: int, step: int) -> bool:
        """Whether an action that runs every `every` steps (0: only at the end) is due after `step`.

        Every action is due after the last step. Steps are counted from 1.
        """
        return step == self.steps or bool(every and step % every == 0)

    def is_logged(self, step: int) -> bool:
        return step == 1 or self.is_due(self.log_every, step)

    def is_observed(self, step: int) -> bool:
        """Whether `step`'s numbers or the weights after it are used for anything besides training."""
        cadences = (self.eval_every, self.save_every, self.sample_every)
        return self.is_logged(step) or any(self.is_due(every, step) for every in cadences)


@dataclass(frozen=True)
class Run:
    """A run with every choice made. A program that trains on random tokens leaves the fields of a dataset empty."""

    hardware: Hardware
    model: GPTConfig  # its attention and loss name the implementations that will run
    attention_reason: str  # why this attention, in a sentence
    loss_reason: str
    optimizer_line: str  # what the optimizer is, and why
    vocab_size: int
    seq_len: int  # tokens
    micro_batch: int  # sequences of one forward and backward
    sequences: int  # sequences of a step that this process computes
    plan: Plan  # the memory plan
    graphs: bool  # whether the step runs as CUDA graphs
    graphs_reason: str
    settings: dict[str, Any] = field(repr=False)  # all of the configuration as plain values, with the choices filled in
    left_open: dict[str, Any]  # dotted key -> the configured value (auto, null) that `settings` replaces by the choice
    dataset: Dataset | None = None
    tokenizer: dict[str, str] | None = None  # the state that rebuilds it
    prompt: list[int] = field(default_factory=list)  # tokens that a printed sample continues
    resumed: Checkpoint | None = None  # the checkpoint that the run resumes from
    context: tuple[str, str] | None = None  # how processes share rows, and why; None where they do not
    initial: Checkpoint | None = None  # the checkpoint whose weights a new run starts with
    wandb: tuple[str, str] = ("disabled", "nothing is logged")  # mode, and why

    @property
    def first_step(self) -> int:
        """Steps done before this start: the resumed checkpoint's, or 0."""
        return self.resumed.step if self.resumed else 0

    @property
    def seconds_before(self) -> float:
        """Seconds that the run took up to that step, in earlier processes."""
        return self.resumed.meta["seconds"] if self.resumed else 0.0

    def build_model(self) -> nn.Module:
        """The network, with initial weights from PyTorch's random stream."""
        how = {"device": self.hardware.device, "document_mask": self.settings["data"]["document_mask"]}
        return build_model(self.model, self.vocab_size, self.seq_len, **how)

    def first_lines(self, model: GPT, run_dir: Path) -> list[str]:
        """What a run prints before its first step: what will run, and why."""
        dataset, steps, tokens = self.dataset, *(self.settings["train"][key] for key in ("steps", "batch_tokens"))
        optim = self.plan.optim
        lines = [
            f"run        {run_dir}",
            f"hardware   {self.hardware.description}",
            f"attention  {self.model.attention} ({self.attention_reason})",
            f"loss       {self.model.loss} ({self.loss_reason})",
            f"optimizer  {self.optimizer_line}",
            f"model      {model.num_parameters():,} parameters, {self.model.num_layers} layers, "
            f"{self.seq_len:,} tokens of context",
            f"data       {len(dataset.train):,} training tokens, {len(dataset.validation):,} validation tokens; "
            f"{steps:,} steps of {tokens:,} tokens are {steps * tokens / len(dataset.train):.1f} epochs",
        ]
        if self.context:
            method, reason = self.context
            lines.append(f"context    {method}: {self.hardware.world.context} processes share each row ({reason})")
        if self.hardware.world.shards:
            size = self.hardware.world.size
            lines.append(f"shard      {size} processes hold 1 / {size} each of weights, gradients and moments")
        if (warmup := optim.warmup_within(steps)) != optim.warmup_steps:
            asked = f"optim.warmup_steps={optim.warmup_steps}"
            lines.append(f"warm-up    {warmup} steps, as train.steps={steps} has no room for {asked}")
        if self.hardware.device.type == "cuda":
            lines.append(f"graphs     {'on' if self.graphs else 'off'} ({self.graphs_reason})")
        if self.settings["resume"] == "auto" and not self.resumed:
            sweep = resume.newest_sweep(run_dir)
            argument = sweep and shlex.quote(f"hydra.sweep.dir={folder_value(sweep)}")
            another = f"; {argument} goes on with the sweep there" if sweep else ""
            lines.append(f"resumed    nothing: {run_dir} has no checkpoint yet; it begins at its first step{another}")
        if self.initial:
            lines.append(f"weights    of {self.initial.path} after {self.initial.step} steps; all else begins anew")
        if self.hardware.device.type == "cpu":
            slow = slow_on_a_cpu(model, optim, self.hardware, batch_tokens=tokens, steps=steps)
            lines += [f"slow       {slow}"] if slow else []
        return lines

    @property
    def description(self) -> dict[str, Any]:
        """What a checkpoint records about the run."""
        return {
            "settings": self.settings,
            "left_open": self.left_open,
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "data_fingerprint": self.dataset.fingerprint,
            "theirs": self.model.theirs,
        }

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a document where documents must not see each other, else None."""
        return self.dataset.end_of_text if self.settings["data"]["document_mask"] else None


def resolve(
    settings: Any,
    run_dir: Path | None = None,
    *,
    vocab_size: int | None = None,
    hardware: Hardware | None = None,
    report: Callable[[str], None] = print,
    world: World = ALONE,
) -> Run:
    """Make every choice that `settings` leaves open; `settings` itself is not changed.

    Args:
        settings: those of conf/schema.py, or of a program that adds groups of its own to them.
        run_dir: the run's folder, where resume=auto looks.
        vocab_size: given by a program that trains on random tokens; no text is then opened, no checkpoint searched for.
        hardware: given by a program that plans for another machine; None: settings.hardware, resolved on this one.
        report: called with lines about text that is being prepared and checkpoints that are passed over.
        world: the processes of the run; the first one prepares the text and chooses, the others receive its choices.

    Raises:
        ValueError: something cannot run (hardware, attention, text, prompt, checkpoint, profile, wandb, memory); one
            line gives the value, the limit and a remedy.
    """
    world.begin_run()
    if hardware is None:
        hardware = set_up(settings.hardware, world, trains=True)
    if not world.is_first:
        found = world.broadcast(None)  # waits for the choices that the first process sends below
        train = replace(settings.train, micro_batch=found["micro_batch"])
        settings = replace(settings, resume=found["resume"], train=train)
    asked = asdict(settings)
    world.arrange(settings.parallel)
    if (name := settings.model.name) is not None and world.shards:
        raise ValueError(f"model.name={name} cannot be sharded; use parallel.data=replicate")
    optim, optimizer_line = settings.optim.resolved(hardware.device)
    share = world.local_sequences(settings.sequences_per_step, settings.train.micro_batch, settings.data.seq_len)
    document_mask = settings.data.document_mask
    model, attention_reason, loss_reason = resolve_model(
        settings.model, hardware.device, hardware.dtype, document_mask=document_mask
    )
    settings = replace(settings, optim=optim, model=model)
    if model.mask is not None:
        prefix_of(model.mask, settings.data.seq_len)  # for what it refuses, before a text is tokenized
        if settings.train.sample_tokens and vocab_size is None:
            raise ValueError(f"model.mask={model.mask} cannot generate text; use train.sample_tokens=0")
    if model.name is not None and hardware.world.context > 1:
        raise ValueError(f"model.name={model.name} cannot share its rows among processes; use parallel.context=1")
    text = {}
    if vocab_size is None:
        text = _open_text(settings, run_dir, report, world)
        vocab_size = text["dataset"].vocab_size
    plan = memory.plan(settings, model, hardware, vocab_size, share)
    if world.is_first:
        resumed_path = str(text["resumed"].path) if text.get("resumed") else None
        world.broadcast({"micro_batch": plan.micro_batch, "resume": resumed_path})
    if text:
        checkpoint = text["resumed"] or text["initial"]
        manifest = file_sha256(checkpoint.path / MANIFEST) if checkpoint else ""
        _refuse_files_that_differ(world, {"text": text["dataset"].fingerprint, "checkpoint": manifest})
    settings = replace(settings, train=replace(settings.train, micro_batch=plan.micro_batch))
    context = None
    if world.context > 1:
        rows = settings.data.seq_len, plan.micro_batch, document_mask
        context = resolve_method(settings.parallel, model, hardware.dtype, *rows)
        settings = replace(settings, parallel=replace(settings.parallel, context_method=context[0]))
    graphs, graphs_reason = resolve_graphs(hardware, plan, document_mask)
    chosen = asdict(settings)
    before, now = flat(asked), flat(chosen)
    return Run(
        hardware=hardware,
        model=model,
        attention_reason=attention_reason,
        loss_reason=loss_reason,
        optimizer_line=optimizer_line,
        vocab_size=vocab_size,
        seq_len=settings.data.seq_len,
        micro_batch=plan.micro_batch,
        sequences=share,
        plan=plan,
        graphs=graphs,
        graphs_reason=graphs_reason,
        context=context,
        settings=chosen,
        left_open={key: value for key, value in before.items() if value != now[key]},
        **text,
    )


def _open_text(settings: Any, run_dir: Path | None, report: Callable[[str], None], world: World) -> dict[str, Any]:
    """The fields of a `Run` about its text and checkpoints. The model is resolved: one of any kind has its sizes."""
    dataset = open_dataset(settings.data, settings.tokenizer, report=report)
    sized = asdict(settings) | {"theirs": settings.model.theirs}
    vocab_size, tokenizer = dataset.vocab_size, tokenizer_state(dataset.tokenizer)
    prompt = prompt_of(settings.train.sample_prompt, dataset, settings.data.seq_len)
    resumed = resume.find(settings.resume, run_dir, report)
    initial = open_checkpoint(settings.init_from) if settings.init_from and not resumed else None
    if resumed:
        resume.refuse_unless_same(resumed, sized, tokenizer, vocab_size)
        resume.refuse_another_text(resumed, sized, dataset.fingerprint)
    if initial:
        resume.refuse_unless_it_fits(initial, sized, tokenizer, vocab_size)
    steps_left = settings.train.steps - (resumed.step if resumed else 0)
    if settings.profile and steps_left:
        refuse_too_few(steps_left)
    wandb = wandb_mode(settings.logger) if world.is_first else None  # only the first process needs a login
    checkpoints = {"resumed": resumed, "initial": initial}
    return {"dataset": dataset, "tokenizer": tokenizer, "prompt": prompt, "wandb": wandb} | checkpoints


def resolve_graphs(hardware: Hardware, plan: Plan, document_mask: bool) -> tuple[bool, str]:
    """Whether the step runs as CUDA graphs, and why; ValueError where they were asked for and cannot be used."""
    model, context = plan.model, hardware.world.context
    random_states = model.activation_checkpointing != "none" and (model.draws or not hardware.compile)
    enough = plan.free is None or plan.peak <= plan.free / 2  # graphs hold memory during evaluations and samples
    obstacles = [  # (does it apply, what it is, the key that rules graphs out; "" if they may be tried all the same)
        (context > 1, "processes that share rows exchange in the middle of the step", f"parallel.context={context}"),
        (hardware.world.shards, "weights are gathered in the middle of the step", "parallel.data=shard"),
        (document_mask, "documents differ in number from step to step", "data.document_mask=true"),
        (model.name is not None, "a model of transformers may ask the host", ""),
        (model.attention not in ("flash", "sdpa"), f"{model.attention} attention may ask the host", ""),
        (random_states, "recomputation keeps random states, which a graph may not read", ""),
        (not enough, "the forecast is more than half of the memory", ""),
    ]
    nothing = False, "forward and backward, and the optimizer", ""
    found, reason, key = next((row for row in obstacles if row[0]), nothing)
    if hardware.graphs and key:
        raise ValueError(f"hardware.cuda_graphs=true does not work with {key}: {reason}; leave it out")
    if hardware.graphs is not None:
        return hardware.graphs, "as configured"
    return not found, f"{reason}; hardware.cuda_graphs=true tries all the same" if found and not key else reason


def _refuse_files_that_differ(world: World, sums: dict[str, str]) -> None:
    """Raise ValueError if a process found another text or checkpoint under the same name, as on another disk.

    No other check finds a different text, as all processes sum the same gradients, or different weights where each
    process holds only some of their rows.
    """
    first, *others = world.all_gather(sums)
    for rank, found in enumerate(others, 1):
        for what in (what for what in found if found[what] != first[what]):
            raise ValueError(
                f"{world.describe(rank)} has another {what} than rank 0 (fingerprint {found[what][:12]}, there "
                f"{first[what][:12]}); give all hosts the same files"
            )
