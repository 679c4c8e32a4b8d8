"""One page before a run: `python -m scripts.doctor` with the arguments that `train.py` will get.

Inspects the machine, tests the kernels in every dtype and which token sees which, and makes every check that a run
makes at its start (training/run.py); a failed check does not end the page. Every finding that needs one has a fix: a
value to set, a command to type. A wrong configuration ends the program in one line, as it does train.py. Nothing is
trained, tokenized or written.

Exit code 1 where something must be fixed before the run, else 0. The last line is one JSON object.

In a SLURM job `srun python -m scripts.doctor` with the same arguments finds what is wrong with the job or between its
processes; the first of them prints the page. Without a GPU the kernels run in Triton's interpreter, on a tiny call.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from math import ceil, pi
from pathlib import Path
from typing import Any

import torch

import scripts.cluster as cluster
import scripts.machine as machine
from conf.program import program
from conf.schema import Settings
from data import Dataset, build_tokenizer, open_dataset, tokenizer_state
from data.dataset import digest, locate
from data.hub import refuse_if_not_cached, within_reach
from kernels import why_not
from kernels.device import HAS_TRITON
from model import GPT, GPTConfig, build_model, resolve_model
from scripts.causality import probe
from scripts.machine import Finding
from scripts.selftest import self_test
from training import memory, resume
from training.hardware import Hardware, choose_hardware
from training.parallel import World
from training.rendezvous import ranks
from training.run import resolve
from training.speed import SLOW_STEP_SECONDS, slow_on_a_cpu
from training.wandb_run import wandb_mode

FAILED = 1  # exit code
USUAL_HEAD_DIM = 64  # of the kernels' self-test where the run does not use flash attention


@program("config", Settings, experiment="quickstart", run_dir=".", alone=False)
def main(settings: Settings, run_dir: Path) -> None:
    began = time.perf_counter()
    if ranks()[0] > 0:  # the first process makes the checks; the others only have to meet it
        if cluster.launch().value:
            cluster.network(choose_hardware(settings.hardware))
        return
    page = examine(settings, Path("runs") if run_dir == Path(".") else run_dir)  # hydra.run.dir=FOLDER is the run's
    show(page)
    wrong = [name for name, finding in page.items() if finding.wrong]
    keys = ("status", "text", "fix", "facts")
    report = {name: {key: getattr(finding, key) for key in keys} for name, finding in page.items()}
    print(json.dumps({"ready": not wrong, "wrong": wrong, "seconds": time.perf_counter() - began, "checks": report}))
    if wrong:
        sys.exit(FAILED)


class Page(dict[str, Finding]):
    """Findings by name, in the order of the questions."""

    def ask(self, name: str, question: Callable[..., Finding], *grounds: Any, **known: Any) -> Any:
        """Record what `question` finds and return its value; None where a ground is None, or it raises ValueError or
        OSError."""
        if any(ground is None for ground in grounds):
            return None
        try:
            self[name] = question(*grounds, **known)
        except (ValueError, OSError) as error:
            what, _, remedy = str(error).rpartition("; ")
            self[name] = Finding(what or remedy, remedy if what else "correct it", wrong=True)
        return self[name].value


def examine(settings: Settings, folder: Path) -> Page:
    """Ask every question whose grounds, its positional arguments, were found. Its keyword arguments may be None."""
    page = Page()
    load_triton()
    processes = page.ask("launch", cluster.launch)
    page.ask("gpu", machine.gpu, settings.hardware.device)
    page.ask("versions", machine.versions)
    hardware = page.ask("hardware", chosen_hardware, settings, processes=processes)
    if processes and processes > 1:
        page.ask("network", cluster.network, hardware)
    page.ask("compiler", machine.compiler, hardware)
    model = page.ask("attention", attention, settings, hardware)
    sound = page.ask("kernels", kernels, hardware, model=model)
    if sound:  # kernels that fail would fail here too
        page.ask("causality", causality, model, hardware)
    dataset = page.ask("data", text, settings)
    vocab_size = page.ask("tokenizer", tokenizer, settings, dataset=dataset)
    parameters = page.ask("model", network, model, settings.data.seq_len, vocab_size=vocab_size)
    plan = page.ask("memory", step_memory, settings, model, hardware, vocab_size)
    if plan and hardware.device.type == "cpu" and model.name is None:
        page.ask("speed", speed, settings, model, hardware, vocab_size)
    page.ask("disk", machine.disk, settings.train, folder, parameters=parameters)
    page.ask("wandb", wandb, settings)
    if settings.resume not in (None, "auto"):
        page.ask("resume", check_resume, settings, model=model, dataset=dataset)
    if not any(finding.wrong for finding in page.values()):
        page.ask("start", start, settings, folder, hardware=hardware, dataset=dataset)
    return page


def load_triton() -> None:
    """Without a GPU, import Triton as an interpreter, for the kernels' self-test.

    Triton reads TRITON_INTERPRET when it is first imported, and transformers may import it during another question. The
    variable is removed again, so that the other questions are answered as for a run.
    """
    if HAS_TRITON and "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        import_module("triton")
        del os.environ["TRITON_INTERPRET"]


def chosen_hardware(settings: Settings, *, processes: int | None) -> Finding:
    """This process's hardware, in a world of as many processes as were started; that world is only for planning."""
    hardware = replace(choose_hardware(settings.hardware), world=World(size=processes or 1))
    threads, cores = settings.hardware.num_threads, os.cpu_count() or 1
    if threads is not None and threads > cores:
        waiting = f"hardware.num_threads={threads} on {cores} cores: threads would wait for each other"
        return Finding(waiting, f"hardware.num_threads={cores}", value=hardware)
    return Finding(hardware.description, facts={"description": hardware.description}, value=hardware)


def attention(settings: Settings, hardware: Hardware) -> Finding:
    """What the run's attention resolves to, and what `auto` would. The value is the resolved model."""
    config, asked = settings.model, {"document_mask": settings.data.document_mask}
    call = hardware.device, hardware.dtype
    automatic, why, _ = resolve_model(replace(config, attention="auto"), *call, **asked)
    try:
        model, reason, _ = resolve_model(config, *call, **asked)
    except ValueError as error:
        raise ValueError(f"{error}, or model.attention=auto: {automatic.attention}") from error
    said = f"{model.attention} ({reason})"
    if config.attention != "auto":
        said += f"; auto would be {automatic.attention} ({why})"
    return Finding(said, facts={"name": model.attention, "reason": reason}, value=model)


def kernels(hardware: Hardware, *, model: GPTConfig | None) -> Finding:
    """A self-test of flash attention, whatever attention the run uses."""
    is_used, on_gpu = model is not None and model.attention == "flash", hardware.device.type == "cuda"
    head_dim = model.head_dim if is_used else USUAL_HEAD_DIM
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # see `load_triton`
    if not is_used and (obstacle := why_not("flash", torch.float32, device=hardware.device, head_dim=head_dim)):
        return Finding(f"not tested: {obstacle.partition('; use ')[0]}", value=True)
    began, fix = time.perf_counter(), "model.attention=sdpa, or `uv sync` for the versions that were tested"
    try:
        ratios = self_test(hardware.device, head_dim)
    except Exception as error:  # a compiler, driver or GPU may raise anything, and the page goes on
        fault = f"the self-test failed ({type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]})"
        if is_used or on_gpu:  # on a GPU the rotary and the loss kernels need what this one needs
            raise ValueError(f"{fault}; {fix}") from error
        return Finding(fault, fix, value=True)
    facts = {"seconds": time.perf_counter() - began, "errors": ratios}
    errors = ", ".join(f"{dtype} {ratio:.2f}" for dtype, ratio in ratios.items())
    where = "" if on_gpu else " in Triton's interpreter"
    right = f"forward and backward are right{where}, {facts['seconds']:.1f} s; error over the plain formula's: {errors}"
    return Finding(right, facts=facts, value=True)


def causality(model: GPTConfig, hardware: Hardware) -> Finding:
    if model.name is not None:
        return Finding(f"not asked: {model.name} has layers of its own, and the probe knows a GPT of ours")
    faults = probe(model, hardware)
    if found := "; ".join(f"{part}: {fault}" for part, fault in faults.items() if fault):
        raise ValueError(f"{found}; do not train with model.attention={model.attention}: its mask is wrong")
    return Finding(f"no token sees what it must not: {', '.join(faults)}", facts=faults)


def text(settings: Settings) -> Finding:
    """The text's fingerprint, and its tokens where they are in the cache: nothing is tokenized here."""
    config = settings.data
    _, identity, path = locate(config, settings.tokenizer)
    if os.path.lexists(path):
        return tokens(settings, open_dataset(config, settings.tokenizer))
    if obstacle := machine.not_writable(path.parent):
        raise ValueError(f"data.cache_dir={path.parent} {obstacle}; data.cache_dir=FOLDER")
    fingerprint = digest(identity)
    facts, said = {"fingerprint": fingerprint, "tokenized": False}, f"{path.name} is not tokenized yet"
    if "hub" in identity and not within_reach(config.name, config.revision):
        refuse_if_not_cached(config)
        fix = "if the cache has not all of its splits: data.local_dir=FOLDER with the dataset's files"
        return Finding(f"{said}, and the Hugging Face hub does not answer; the run will read its cache", fix, facts)
    return Finding(f"{said}; the run will do it (fingerprint {fingerprint[:12]})", facts=facts)


def tokens(settings: Settings, dataset: Dataset) -> Finding:
    """Token counts and epochs of a text in the cache, whose checksums were compared."""
    epochs = settings.train.steps * settings.train.batch_tokens / len(dataset.train)
    said = (
        f"{len(dataset.train):,} training tokens, {len(dataset.validation):,} validation tokens; the run is "
        f"{epochs:.1f} epochs (fingerprint {dataset.fingerprint[:12]})"
    )
    facts = {"fingerprint": dataset.fingerprint, "tokenized": True, "epochs": epochs, "path": str(dataset.path)}
    fix = None
    if settings.data.document_mask and dataset.manifest["splits"]["train"]["documents"] == 1:
        said = f"data.document_mask=true, and the text is a single document; {said}"
        fix = "leave data.document_mask out, or give a file for each document"
    return Finding(said, fix, facts, value=dataset)


def tokenizer(settings: Settings, *, dataset: Dataset | None) -> Finding:
    """The tokenizer's vocabulary size, and a fingerprint of the state that rebuilds it."""
    name = settings.tokenizer
    if dataset is None and name == "characters":
        return Finding("characters; those of the training split, not tokenized yet")
    encoding = dataset.tokenizer if dataset else build_tokenizer(name)
    fingerprint, size = digest(tokenizer_state(encoding)), encoding.n_vocab
    facts = {"fingerprint": fingerprint, "vocab_size": size}
    return Finding(f"{name}, {size:,} tokens (fingerprint {fingerprint[:12]})", facts=facts, value=size)


def network(config: GPTConfig, seq_len: int, *, vocab_size: int | None) -> Finding:
    """The number of parameters, and a window that would hide nothing or a rope_base that is too small."""
    parameters, said = None, f"{config.num_layers} layers of {config.n_embd}"
    if config.name is None:
        built = GPT(config, vocab_size or 1, seq_len, device="meta")  # it may refuse whatever the vocabulary is
        parameters = built.num_parameters() if vocab_size else None
    elif vocab_size is not None:
        parameters = memory.held_parameters(config)
    if parameters is not None:
        said = f"{parameters:,} parameters, {said}, vocabulary {vocab_size:,}"
    period, fix = 2 * pi * config.rope_base ** ((config.head_dim - 2) / config.head_dim), None
    if config.window is not None and config.window >= seq_len:
        said += f"; model.window={config.window} hides nothing at data.seq_len={seq_len}"
        fix = "leave model.window out"
    elif config.name is None and config.head_dim > 2 and period < seq_len:
        said += f"; the slowest rotary pair turns once in {period:,.0f} tokens, fewer than data.seq_len={seq_len}"
        least = (seq_len / (2 * pi)) ** (config.head_dim / (config.head_dim - 2))
        fix = f"model.rope_base={ceil(least)} or more"
    return Finding(said, fix, {"parameters": parameters}, value=parameters)


def step_memory(settings: Settings, model: GPTConfig, hardware: Hardware, vocab_size: int) -> Finding:
    """The memory forecast of this process's share of a training step, beside the free memory."""
    world = hardware.world
    world.arrange(settings.parallel)
    share = world.local_sequences(settings.sequences_per_step, settings.train.micro_batch, settings.data.seq_len)
    plan = memory.plan(settings, model, hardware, vocab_size, share)
    facts = {"forecast_bytes": plan.peak, "free_bytes": plan.free}
    return Finding(f"micro-batches of {plan.micro_batch}; {plan}", facts=facts, value=plan)


def speed(settings: Settings, model: GPTConfig, hardware: Hardware, vocab_size: int) -> Finding:
    """Whether a step takes long on this CPU."""
    network, config = build_model(model, vocab_size, settings.data.seq_len, device="cpu"), settings.train
    optim, _ = settings.optim.resolved(hardware.device)
    slow = slow_on_a_cpu(network, optim, hardware, batch_tokens=config.batch_tokens, steps=config.steps)
    said, _, fix = (slow or f"a step takes less than {SLOW_STEP_SECONDS:g} s").partition("; ")
    return Finding(said, fix or None)


def wandb(settings: Settings) -> Finding:
    mode, why = wandb_mode(settings.logger)
    return Finding(f"{mode} ({why})", facts={"mode": mode, "why": why})


def check_resume(settings: Settings, *, model: GPTConfig | None, dataset: Dataset | None) -> Finding:
    """Whether the checkpoint that `resume` names is whole and fits the settings."""
    checkpoint = resume.find(settings.resume, None)
    if dataset is not None:
        # a model of transformers brings its own sizes
        sized = asdict(settings) | ({"model": asdict(model), "theirs": model.theirs} if model else {})
        resume.refuse_unless_same(checkpoint, sized, tokenizer_state(dataset.tokenizer), dataset.vocab_size)
    return Finding(f"{checkpoint.path} after {checkpoint.step} steps", facts={"step": checkpoint.step})


def start(settings: Settings, folder: Path, *, hardware: Hardware, dataset: Dataset | None) -> Finding:
    """The start itself, with all its refusals. It is tried only where the text is cached, so nothing is tokenized."""
    if dataset is None:
        again = "python -m scripts.prepare with the same arguments, then this again"
        return Finding("not tried, as the text is not tokenized", again)
    resolve(settings, folder, hardware=hardware, world=hardware.world, report=lambda line: None)
    known = ", as far as is known without the weights of model.name" if settings.model.name else ""
    return Finding(f"train.py would take this{known}")


def show(page: Page) -> None:
    """Print a line for each finding, and its fix below."""
    for name, finding in page.items():
        print(f"{finding.status:<5} {name:<10} {finding.text}")
        if finding.fix:
            print(f"{'':16} -> {finding.fix}")
    wrong = sum(finding.wrong for finding in page.values())
    print(f"{wrong} to mend before the run" if wrong else "ready to run")


if __name__ == "__main__":
    main()
