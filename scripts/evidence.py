"""Every measured figure and picture of the project again: `python -m scripts.evidence books='books/*.txt'`.

Runs the experiments below, each as a command of its own, and keeps their files in `.github/evidence/<name>/`; logs stay
in the run's folder. Those that measure speed run last, one after the other. What was kept becomes the tables of
`.github/evidence/README.md` and the figures of the README's first screen; a part that was not run leaves its old files,
and each table says its own commit.

    python -m scripts.evidence attention/peers training    those whose names begin so
    python -m scripts.evidence tables                      the tables alone, from the files as they are

Where the code was copied without its git history, the environment variable GIT_COMMIT must name its commit. The exit
code is 1 where an experiment did not end as it should. The last line is one JSON object.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from conf.program import program
from scripts.bench.report import table
from scripts.evidence_tables import headline, inserted, page
from scripts.variants import MUTANTS
from training.log import ROOT, git_commit

FAILED = 1  # exit code
TABLES = "tables"  # a name that is no experiment
AT_ONCE = 4  # experiments that run beside each other on one GPU, where none is timed
BOOKS = ("data=text", "data.files={books}", "tokenizer=gpt2")
WIKITEXT = ("data=wikitext2", "data.local_dir={wikitext}", "tokenizer=gpt2")
GPU = "experiment=parity_gpu"
FEW = ("parity.nulls=5", "parity.seeds=2", "parity.attention=[flash]")  # where each run takes long
STEPS_1000 = ("train.steps=1000", "train.batch_tokens=4096", *FEW)
TEN_STEPS = ("bench.steps=10", "bench.warmup_steps=3")
PROFILE = (
    "model=gpt2_124m", *BOOKS, "optim=adamw", "data.seq_len=1024", "train.batch_tokens=65536", "train.steps=8",
    "optim.warmup_steps=1", "train.eval_windows=1", "train.sample_tokens=0", "profile=true",
)  # fmt: skip

# module -> what is kept of its folder; not every run of one draws a picture
KEPT = {
    "scripts.parity": ("*.json", "*.md", "*.png"),
    "scripts.break_it": ("break_it.png", "console.txt"),
    "scripts.bench.error_budget": ("*.md", "*.json"),
    "tests.promises.invariance": ("*.md",),
    "tests.promises.soak": ("soak.json",),
    "scripts.explain": ("console.txt",),
    "scripts.bench.attention": ("attention.json", "attention_causal_*.png"),
    "scripts.bench.loss": ("*.json",),
    "scripts.bench.training": ("*.json", "*.png"),
    "train": ("profile/profile.json",),
}
# these measure no speed, so they may run beside each other
UNTIMED = ("scripts.parity", "scripts.break_it", "scripts.bench.error_budget", "tests.promises.invariance")


@dataclass(frozen=True)
class Experiment:
    """A command and how it should end."""

    program: str  # module, a key of KEPT
    overrides: tuple[str, ...] = ()
    exit_code: int = 0


def parity(*overrides: str, exit_code: int = 0) -> Experiment:
    return Experiment("scripts.parity", overrides, exit_code)


def attention(*overrides: str) -> Experiment:
    return Experiment("scripts.bench.attention", overrides)


def training(*overrides: str) -> Experiment:
    return Experiment("scripts.bench.training", overrides)


EXPERIMENTS = {  # the longest first: they run beside each other
    "parity/books_fp32_200": parity(GPU, *BOOKS, "hardware.dtype=float32", "parity.nulls=6", "parity.seeds=3"),
    "parity/books_bf16_1000_compiled_selective": parity(
        GPU, *BOOKS, *STEPS_1000, "hardware.compile=true", "model.activation_checkpointing=selective"
    ),
    # bytes: GPT-2's vocabulary would take most of the time in float32
    "parity/books_fp32_1000": parity(GPU, *BOOKS[:2], *STEPS_1000, "hardware.dtype=float32"),
    "parity/wikitext_bf16_1000": parity(GPU, *WIKITEXT, *STEPS_1000),
    "parity/books_bf16_1000": parity(GPU, *BOOKS, *STEPS_1000),
    "parity/wikitext_fp32_200": parity(GPU, *WIKITEXT, *FEW, "hardware.dtype=float32"),
    "parity/books_bf16_200_compiled": parity(GPU, *BOOKS, *FEW, "hardware.compile=true"),
    "parity/books_bf16_200_compiled_full": parity(
        GPU, *BOOKS, *FEW, "hardware.compile=true", "model.activation_checkpointing=full"
    ),
    "parity/books_bf16_200": parity(GPU, *BOOKS),
    "parity/wikitext_bf16_200": parity(GPU, *WIKITEXT),
    # the mask in plain PyTorch is slow
    "parity/books_bf16_60_dropout": parity(
        GPU, *BOOKS, "model.attention_dropout=0.1", "parity.attention=[tiled,flash]", "train.steps=60",
        "train.batch_tokens=4096", "parity.nulls=5", "parity.seeds=2",
    ),
    "parity/mutants": parity(
        GPU, *BOOKS, "train.steps=60", "parity.seeds=2", "parity.attention=[flash]",
        f"parity.mutants=[{','.join(MUTANTS)}]", exit_code=1,
    ),
    "parity/repeats": parity("parity.repeats=20", "parity.nulls=5", "parity.seeds=2"),
    "break_it": Experiment("scripts.break_it"),
    "attention/error_budget": Experiment("scripts.bench.error_budget"),
    "invariance": Experiment("tests.promises.invariance"),
    "soak": Experiment("tests.promises.soak"),
    "explain": Experiment("scripts.explain"),
    "attention/speed": attention(
        "bench.seq_len=[1024,4096,16384]", "bench.mask=[causal,full,window,packed]", "bench.budget_ms=60"
    ),
    "attention/peers": attention(
        "bench.seq_len=[1024,2048,4096,8192,16384,32768]", "bench.attention=[flash,sdpa_flash,sdpa_cudnn]"
    ),
    "attention/long": attention(
        "bench.head_dim=[128]", "bench.mask=[causal]", "bench.budget_ms=30",
        "bench.attention=[flash,naive,sdpa_flash,sdpa_cudnn]",
    ),
    "attention/fp8": attention(
        "bench.seq_len=[1024,4096,16384]", "bench.attention=[flash,fp8,sdpa_cudnn]", "bench.passes=[forward]",
        "bench.budget_ms=60",
    ),
    "profile/naive": Experiment("train", (*PROFILE, "model.attention=naive")),
    "profile/flash": Experiment("train", (*PROFILE, "model.attention=flash")),
    "training/loss": Experiment("scripts.bench.loss"),
    "training/compiled": training(
        "bench.attention=[flash,sdpa_cudnn]", "bench.seq_len=[1024,4096,16384,65536]", *TEN_STEPS
    ),
    "training/checkpointing": training(
        "bench.checkpointing=[none,pointwise,selective,full]", "bench.seq_len=[1024]", *TEN_STEPS
    ),
    "training/saving": training("bench.saving=true", *TEN_STEPS),
    "training/grid": training(
        "hardware.compile=false", "bench.attention=[flash,naive]", "bench.checkpointing=[none,full,selective]",
        "bench.seq_len=[512,1024,2048,4096,8192,16384,32768,65536,131072]", "train.batch_tokens=131072",
        "bench.micro_batch_tokens=65536", "bench.steps=1", "bench.warmup_steps=1",
    ),
}  # fmt: skip


@dataclass
class EvidenceSettings:
    only: list[str] = field(default_factory=list)  # beginnings of names, or tables; empty: all; `only=` may be left out
    books: str = "books/*.txt"  # long texts
    wikitext: str | None = None  # a folder with WikiText-2's own files; null: from the hub
    folder: str = ".github/evidence"  # where files and tables are kept
    readme: str = "README.md"  # gets the first screen's figures, between its comments `figures`

    def __post_init__(self) -> None:
        for beginning in self.only:
            if not any(name.startswith(beginning) for name in (*EXPERIMENTS, TABLES)):
                raise ValueError(f"only={beginning} begins no name; the names are {', '.join((*EXPERIMENTS, TABLES))}")


@program("tool", EvidenceSettings, run_dir="runs/evidence", positional="only")
def main(settings: EvidenceSettings, run_dir: Path) -> None:
    console = Console(highlight=False)
    chosen = {
        name: experiment
        for name, experiment in EXPERIMENTS.items()
        if not settings.only or name.startswith(tuple(settings.only))
    }

    if chosen and not git_commit():
        raise ValueError(
            "no git checkout is here and a figure must name its commit; give it as the variable GIT_COMMIT"
        )

    def one(name: str) -> dict:
        row = run(name, chosen[name], settings, run_dir)
        console.print(f"{name}: {row['verdict']}, {row['seconds']:.0f} s", markup=False)
        return row

    untimed = [name for name in chosen if chosen[name].program in UNTIMED]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(one, untimed))
    rows += [one(name) for name in chosen if name not in untimed]
    columns = {"seconds": "{seconds:.0f}", "verdict": "{verdict}"}
    console.print(table(rows, {"experiment": "{name}"}, columns).console())
    write_tables(ROOT / settings.folder, ROOT / settings.readme)
    print(json.dumps({"folder": str(run_dir), "experiments": rows}))
    if any(row["verdict"] != "as expected" for row in rows):
        sys.exit(FAILED)


def write_tables(folder: Path, readme: Path) -> None:
    """The page of `folder`, and the figures of the README's first screen, from the files that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(page(folder))
    if readme.is_file():
        readme.write_text(inserted(readme.read_text(), "figures", headline(folder)))


def run(name: str, experiment: Experiment, settings: EvidenceSettings, run_dir: Path) -> dict:
    """Run one experiment in a process of its own and keep its files; what it printed is in console.txt."""
    folder = run_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    filled = [o.format(books=settings.books, wikitext=settings.wikitext or "null") for o in experiment.overrides]
    environment = dict(os.environ)
    environment.pop("HYDRA_FULL_ERROR", None)  # conf/program.py sets it for itself
    began = time.perf_counter()
    with (folder / "console.txt").open("w") as text:
        done = subprocess.run(
            [sys.executable, "-m", experiment.program, *filled, f"hydra.run.dir={folder}"],
            cwd=ROOT, env=environment, stdout=text, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    verdict = "as expected"
    files = {pattern: list(folder.glob(pattern)) for pattern in KEPT[experiment.program]}
    if done.returncode != experiment.exit_code:
        verdict = f"exit code {done.returncode}, see {folder / 'console.txt'}"
    elif missing := [pattern for pattern, found in files.items() if not found and pattern != "*.png"]:
        verdict = f"no {missing[0]}, see {folder / 'console.txt'}"
    else:
        kept = ROOT / settings.folder / name
        kept.mkdir(parents=True, exist_ok=True)
        for file in (file for found in files.values() for file in found):
            shutil.copy(file, kept)
    return {"name": name, "verdict": verdict, "seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    main()
