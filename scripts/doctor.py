"""One page before a run: `python -m scripts.doctor` with the arguments that `train.py` will get.

Looks at the machine, the kernels (a self-test in every dtype), the attention that would be taken, who sees whom, data,
tokenizer, memory, disk and wandb, and asks every question that a start asks (training/run.py). Every finding that needs
one has a fix: a value to set, a command to type. A wrong configuration ends as it does for train.py, in one line.
Nothing is trained, tokenized or written.

Exit code 1 where something must be mended before the run, else 0. The last line is one JSON object.

Without a GPU the kernels run in Triton's interpreter, on a tiny call.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from math import pi
from pathlib import Path

import torch
from rich.console import Console

import scripts.doctor_checks as checks
from conf.program import program
from conf.schema import Settings
from data import Dataset, tokenizer_state
from kernels import why_not
from model import GPT, GPTConfig, resolve_attention, resolve_model
from scripts.causality import probe
from scripts.doctor_checks import FIX, NOTE, OK, Finding, refused
from scripts.selftest import self_test
from training import memory as memories
from training import resume
from training.hardware import Hardware
from training.run import resolve

FAILED = 1  # exit code
USUAL_HEAD_DIM = 64  # of the kernels' self-test where the run's attention is another


@program("config", Settings, experiment="quickstart", run_dir=".")
def main(settings: Settings, run_dir: Path) -> None:
    began = time.perf_counter()
    folder = Path("runs") if run_dir == Path(".") else run_dir  # hydra.run.dir=FOLDER is the run's, as for train.py
    findings = examine(settings, folder)
    wrong = [finding.name for finding in findings if finding.status == FIX]
    show(findings)
    report = {finding.name: {k: v for k, v in asdict(finding).items() if k != "name"} for finding in findings}
    print(json.dumps({"ready": not wrong, "wrong": wrong, "seconds": time.perf_counter() - began, "checks": report}))
    if wrong:
        sys.exit(FAILED)


def examine(settings: Settings, folder: Path) -> list[Finding]:
    """Every finding, in the order of the page; a check whose ground is missing is left out."""
    findings = [checks.gpu(), checks.versions()]
    found, hardware = checks.hardware(settings)
    findings.append(found)
    model = None
    if hardware is not None:
        found, model = attention(settings, hardware)  # as the run will see it: not yet in the interpreter
        findings.append(found)
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, which is next
        findings.append(kernels(model, hardware))
    data, dataset = checks.data(settings)
    tokenizer, vocab_size = checks.tokenizer(settings, dataset)
    parameters = None
    if model is not None:
        if findings[-1].status != FIX:  # kernels that stop would stop this too
            findings.append(causality(model, hardware))
        found, parameters = network(model, vocab_size, settings.data.seq_len)
        findings.append(found)
    findings += [data, tokenizer]
    if model is not None and vocab_size is not None:
        findings.append(memory(settings, model, hardware, vocab_size))
    findings += [checks.disk(settings, folder, parameters), checks.wandb(settings)]
    if settings.resume not in (None, "auto"):
        findings.append(goes_on(settings, dataset))
    if dataset is not None and not any(finding.status == FIX for finding in findings):
        findings += start(settings, folder)
    return findings


def attention(settings: Settings, hardware: Hardware) -> tuple[Finding, GPTConfig | None]:
    """What the run's attention becomes, and what `auto` would; and the resolved model, None where it cannot run."""
    config, mask = settings.model, settings.data.document_mask
    features = config.attention_features(mask)
    call = hardware.device, hardware.dtype
    automatic = "{} ({})".format(*resolve_attention("auto", *call, config.head_dim, features))
    try:
        model, reason, _ = resolve_model(config, *call, document_mask=mask)
    except ValueError as error:
        found = refused("attention", error)
        return Finding("attention", FIX, found.text, f"{found.fix}, or model.attention=auto: {automatic}"), None
    text = f"{model.attention} ({reason})" + ("" if config.attention == "auto" else f"; auto would be {automatic}")
    return Finding("attention", OK, text, facts={"name": model.attention, "reason": reason}), model


def kernels(model: GPTConfig | None, hardware: Hardware) -> Finding:
    """A self-test of flash attention, whatever attention the run takes; `model` is None where it has none."""
    fix = "model.attention=sdpa until this is mended; `uv sync` brings the versions that were tested"
    is_used = model is not None and model.attention == "flash"
    # on a GPU the rotary and the loss kernels need what this one needs
    bad = FIX if is_used or hardware.device.type == "cuda" else NOTE
    head_dim = model.head_dim if is_used else USUAL_HEAD_DIM
    if not is_used and (obstacle := why_not("flash", torch.float32, device=hardware.device, head_dim=head_dim)):
        return Finding("kernels", NOTE, f"flash attention is not for this machine: {obstacle}", "model.attention=sdpa")
    try:
        results = self_test(hardware.device, head_dim)
    except Exception as error:  # a compiler, a driver, a GPU: they fail in any way they like, and the page goes on
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return Finding("kernels", bad, f"the self-test stopped ({type(error).__name__}: {first_line})", fix)
    seconds = sum(result.seconds for result in results)
    facts = {"seconds": seconds, "results": [asdict(result) for result in results]}
    if faults := [result.fault for result in results if result.fault]:
        return Finding("kernels", bad, "; ".join(faults), fix, facts)
    where = "" if hardware.device.type == "cuda" else " in Triton's interpreter"
    errors = ", ".join(f"{result.dtype} {result.ratio:.2f}" for result in results)
    text = f"forward and backward are right{where}, {seconds:.1f} s; error over the plain formula's: {errors}"
    return Finding("kernels", OK, text, facts=facts)


def causality(model: GPTConfig, hardware: Hardware) -> Finding:
    faults = probe(model, hardware)
    if found := {part: fault for part, fault in faults.items() if fault}:
        text = "; ".join(f"{part}: {fault}" for part, fault in found.items())
        fix = f"do not train with model.attention={model.attention}: its mask is wrong"
        return Finding("causality", FIX, text, fix, faults)
    return Finding("causality", OK, f"no token sees what it must not: {', '.join(faults)}", facts=faults)


def network(config: GPTConfig, vocab_size: int | None, seq_len: int) -> tuple[Finding, int | None]:
    """Size, and switches that would do nothing or too little; the number of parameters."""
    parameters, shown = None, f"{config.num_layers} layers of {config.n_embd}"
    if vocab_size is not None:
        parameters = GPT(config, vocab_size, seq_len, device="meta").num_parameters()
        shown = f"{parameters:,} parameters, {shown}, vocabulary {vocab_size:,}"
    facts = {"parameters": parameters}
    period = 2 * pi * config.rope_base ** ((config.head_dim - 2) / config.head_dim)
    if config.window is not None and config.window >= seq_len:
        text = f"{shown}; model.window={config.window} hides nothing at data.seq_len={seq_len}"
        return Finding("model", NOTE, text, "leave model.window out", facts), parameters
    if config.head_dim > 2 and period < seq_len:
        least = (seq_len / (2 * pi)) ** (config.head_dim / (config.head_dim - 2))
        turns = f"the slowest rotary pair turns once in {period:,.0f} tokens, fewer than data.seq_len={seq_len}"
        return Finding("model", NOTE, f"{shown}; {turns}", f"model.rope_base={least:.0f} or more", facts), parameters
    return Finding("model", OK, shown, facts=facts), parameters


def memory(settings: Settings, model: GPTConfig, hardware: Hardware, vocab_size: int) -> Finding:
    """A training step's forecast beside what is free."""
    try:
        plan = memories.plan(settings, model, hardware, vocab_size)
    except ValueError as error:
        return refused("memory", error)
    text = f"micro-batches of {plan.micro_batch}; {plan}"
    return Finding("memory", OK, text, facts={"forecast_bytes": plan.peak, "free_bytes": plan.free})


def goes_on(settings: Settings, dataset: Dataset | None) -> Finding:
    """Whether the checkpoint that is named is whole and fits."""
    try:
        checkpoint = resume.find(settings.resume, Path())
        if dataset is not None:
            state = tokenizer_state(dataset.tokenizer)
            resume.refuse_unless_same(checkpoint, asdict(settings), state, dataset.vocab_size)
    except ValueError as error:
        return refused("resume", error)
    return Finding("resume", OK, f"{checkpoint.path} after {checkpoint.step} steps", facts={"step": checkpoint.step})


def start(settings: Settings, folder: Path) -> list[Finding]:
    """What else the start itself would refuse: the page has nothing to mend and the text is in the cache."""
    try:
        resolve(settings, folder, report=lambda line: None)
    except ValueError as error:
        return [refused("start", error)]
    return []


def show(findings: list[Finding]) -> None:
    """The page: a line a finding, and its fix below."""
    console = Console(highlight=False)
    for finding in findings:
        console.print(f"{finding.status:<5} {finding.name:<10} {finding.text}", markup=False, soft_wrap=True)
        if finding.fix:
            console.print(f"{'':16} -> {finding.fix}", markup=False, soft_wrap=True)
    wrong = sum(finding.status == FIX for finding in findings)
    console.print(f"{wrong} to mend before the run" if wrong else "ready to run", soft_wrap=True)


if __name__ == "__main__":
    main()
