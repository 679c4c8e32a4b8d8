"""One page before a run: `python -m scripts.doctor` with the arguments that `train.py` will get.

Looks at the machine, the kernels (a self-test in every dtype), the attention that would be taken, who sees whom, data,
tokenizer, memory, disk and wandb. Every finding that needs one has a fix: a value to set, a command to type. A wrong
configuration ends as it does for train.py, in one line. Nothing is trained, tokenized or written.

Exit code 1 where something must be mended before the run, else 0. The last line is one JSON object.

Without a GPU the kernels run in Triton's interpreter, on a minute call.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

import scripts.doctor_checks as checks
from conf.program import program
from conf.schema import Settings
from scripts.doctor_checks import FIX, Finding

FAILED = 1  # exit code


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
    hardware, chosen = checks.hardware(settings)
    findings.append(hardware)
    attention = None
    if chosen is not None:
        found, attention = checks.attention(settings, chosen)  # as the run will see it: not yet in the interpreter
        findings.append(found)
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, which is next
        findings.append(checks.kernels(settings, chosen, attention))
    data, dataset = checks.data(settings)
    tokenizer, vocab_size = checks.tokenizer(settings, dataset)
    parameters = None
    if attention is not None:
        settings.model.attention = attention
        if findings[-1].status != FIX:  # kernels that stop would stop this too
            findings.append(checks.causality(settings, chosen, attention))
        model, parameters = checks.model(settings, vocab_size)
        findings.append(model)
    findings += [data, tokenizer]

    if attention is not None and vocab_size is not None:
        findings.append(checks.memory(settings, vocab_size, chosen))
    findings += [checks.disk(settings, folder, parameters), checks.wandb(settings)]
    if resume := checks.resume(settings, dataset):
        findings.append(resume)
    return findings


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
