"""Every measured figure and picture of the project again: `python -m scripts.evidence books='books/*.txt'`.

Runs the experiments below, each as a command of its own, and keeps their files in `.github/evidence/<name>/`; logs stay
in the run's folder. Those that measure speed run last, one after the other. What was kept becomes the tables of
`.github/evidence/README.md` and the figures of the README's first screen; a part that was not run leaves its old files,
and each table says its own commit.

    python -m scripts.evidence attention/peers training    those whose names begin so
    python -m scripts.evidence tables                      the tables alone, from the files as they are
    python -m scripts.evidence small=true                  every command in its smallest form, on a CPU; keeps nothing

The exit code is 1 where an experiment did not end as it should. The last line is one JSON object.
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
from training.provenance import ROOT

FAILED = 1  # exit code
TABLES = "tables"  # a name that is no experiment
BOOKS = ("data=text", "data.files={books}", "tokenizer=gpt2")
WIKITEXT = ("data=wikitext2", "data.local_dir={wikitext}", "tokenizer=gpt2")
FEW = ("parity.nulls=5", "parity.seeds=2", "parity.attention=[flash]")  # where each run takes long
TINY_PARITY = (
    "train.steps=6", "train.batch_tokens=32", "model.num_layers=1", "parity.attention=[tiled]", "parity.nulls=4",
    "parity.seeds=2", "hardware.device=cpu",
)  # fmt: skip
TINY_TRAINING = (
    "model=tiny", "model.num_layers=1", "train.batch_tokens=128", "bench.seq_len=[32,64]", "bench.vocab_size=50",
    "bench.attention=[sdpa,naive]", "bench.steps=1", "bench.warmup_steps=1", "hardware.device=cpu",
)  # fmt: skip
TINY_ATTENTION = (
    "bench.seq_len=[32]", "bench.attention=[naive]", "bench.head_dim=[64,128]", "bench.mask=[causal]",
    "bench.tokens=32", "bench.hidden=128", "bench.budget_ms=1", "hardware.device=cpu",
)  # fmt: skip
TINY_PROFILE = (
    "train.steps=8", "train.batch_tokens=256", "model.num_layers=1", "data.seq_len=64", "train.eval_windows=1",
    "optim.warmup_steps=1", "train.sample_tokens=0", "profile=true", "model.attention=naive", "hardware.device=cpu",
)  # fmt: skip
STEPS_1000 = ("train.steps=1000", "train.batch_tokens=4096", *FEW)


@dataclass(frozen=True)
class Experiment:
    """A command, the overrides of its small form, and the files of its folder that are kept."""

    program: str  # module
    overrides: tuple[str, ...]
    small: tuple[str, ...]
    keep: tuple[str, ...]
    timed: bool = False  # measures speed, so nothing may run beside it
    exit_code: int = 0  # expected


def parity(*overrides: str, exit_code: int = 0) -> Experiment:
    kept = tuple(o for o in overrides if o.startswith(("parity.mutants", "model.attention_dropout")))
    files = ("parity.md", "parity.json", "parity.png")
    return Experiment(
        "scripts.parity", ("experiment=parity_gpu", *overrides), (*kept, *TINY_PARITY), files, exit_code=exit_code
    )


def training(*overrides: str, picture: bool = True) -> Experiment:
    files = ("bench_training.json", *(["bench_training.png"] if picture else []))
    return Experiment("scripts.bench.training", overrides, TINY_TRAINING, files, timed=True)


def attention(*overrides: str, pictures: tuple[str, ...]) -> Experiment:
    kept = ("attention.csv", *(f"attention_{name}_bfloat16.png" for name in pictures))
    return Experiment("scripts.bench.attention", overrides, TINY_ATTENTION, kept, timed=True)


def profile(backend: str) -> Experiment:
    overrides = (
        "model=gpt2_124m", *BOOKS, "optim=adamw", "data.seq_len=1024", "train.batch_tokens=65536", "train.steps=8",
        "optim.warmup_steps=1", "train.eval_windows=1", "train.sample_tokens=0", "profile=true",
        f"model.attention={backend}",
    )  # fmt: skip
    return Experiment("train", overrides, TINY_PROFILE, ("profile/profile.json",), timed=True)


EXPERIMENTS = {  # the longest first: they run beside each other
    "parity/books_fp32_200": parity(*BOOKS, "hardware.dtype=float32", "parity.nulls=6", "parity.seeds=3"),
    "parity/books_bf16_1000_compiled_selective": parity(
        *BOOKS, *STEPS_1000, "hardware.compile=true", "model.activation_checkpointing=selective"
    ),
    # bytes: GPT-2's vocabulary would take most of the time in float32
    "parity/books_fp32_1000": parity("data=text", "data.files={books}", *STEPS_1000, "hardware.dtype=float32"),
    "parity/wikitext_bf16_1000": parity(*WIKITEXT, *STEPS_1000),
    "parity/books_bf16_1000": parity(*BOOKS, *STEPS_1000),
    "parity/wikitext_fp32_200": parity(*WIKITEXT, *FEW, "hardware.dtype=float32"),
    "parity/books_bf16_200_compiled": parity(*BOOKS, *FEW, "hardware.compile=true"),
    "parity/books_bf16_200_compiled_full": parity(
        *BOOKS, *FEW, "hardware.compile=true", "model.activation_checkpointing=full"
    ),
    "parity/books_bf16_200": parity(*BOOKS),
    "parity/wikitext_bf16_200": parity(*WIKITEXT),
    # the mask in plain PyTorch is slow
    "parity/books_bf16_60_dropout": parity(
        *BOOKS, "model.attention_dropout=0.1", "parity.attention=[tiled,flash]", "train.steps=60",
        "train.batch_tokens=4096", "parity.nulls=5", "parity.seeds=2",
    ),
    "parity/mutants": parity(
        *BOOKS, "train.steps=60", "parity.seeds=2", "parity.attention=[flash]",
        f"parity.mutants=[{','.join(MUTANTS)}]", exit_code=1,
    ),
    "parity/repeats": Experiment(
        "scripts.parity",
        ("parity.repeats=20", "parity.nulls=5", "parity.seeds=2"),
        (*TINY_PARITY, "parity.repeats=2"),
        ("repeats.json",),
    ),
    "break_it": Experiment(
        "scripts.break_it", (), ("train.steps=6", "hardware.device=cpu"), ("break_it.png", "console.txt")
    ),
    "attention/error_budget": Experiment(
        "scripts.bench.error_budget",
        (),
        (
            "budget.cases=[causal]", "budget.dtypes=[float32]", "budget.fp8=[normal]", "budget.seq_len=32",
            "budget.draws=2", "hardware.device=cpu",
        ),
        ("error_budget.md", "error_budget.json"),
    ),
    "invariance": Experiment(
        "tests.promises.invariance",
        (),
        ("hardware.device=cpu", "train.steps=7", "train.eval_windows=1", "invariance.only=[logging]"),
        ("invariance.md",),
    ),
    "soak": Experiment(
        "tests.promises.soak",
        (),
        ("hardware.device=cpu", "train.steps=60", "soak.samples=9", "soak.max_slowdown=null"),
        ("soak.json",),
        timed=True,
    ),
    "explain": Experiment("scripts.explain", (), ("hardware.device=cpu",), ("console.txt",), timed=True),
    "attention/speed": attention(
        "bench.seq_len=[1024,4096,16384]", "bench.budget_ms=60", "bench.goals=true",
        pictures=("causal_64",),
    ),
    "attention/peers": attention(
        "bench.seq_len=[1024,2048,4096,8192,16384,32768]", "bench.attention=[flash,sdpa_flash,sdpa_cudnn]",
        pictures=("causal_64", "causal_128"),
    ),
    "attention/long": attention(
        "bench.head_dim=[128]", "bench.mask=[causal]", "bench.budget_ms=30",
        "bench.attention=[flash,naive,sdpa_flash,sdpa_cudnn]", pictures=("causal_128",),
    ),
    "attention/fp8": attention(
        "bench.seq_len=[1024,4096,16384]", "bench.attention=[flash,fp8,sdpa_cudnn]", "bench.passes=[forward]",
        "bench.budget_ms=60", pictures=("causal_128",),
    ),
    "profile/naive": profile("naive"),
    "profile/flash": profile("flash"),
    "training/loss": Experiment(
        "scripts.bench.loss",
        (),
        ("tokens=16", "n_embd=8", "vocab_size=50", "padded_vocab=64", "chunk_tokens=[4]", "hardware.device=cpu"),
        ("bench_loss.json",),
        timed=True,
    ),
    "training/compiled": training(
        "bench.attention=[flash,sdpa_cudnn]", "bench.seq_len=[1024,4096,16384,65536]", "bench.steps=10",
        "bench.warmup_steps=3",
    ),
    "training/checkpointing": training(
        "bench.checkpointing=[none,pointwise,selective,full]", "bench.seq_len=[1024]", "bench.steps=10",
        "bench.warmup_steps=3", picture=False,
    ),
    "training/saving": training("bench.saving=true", "bench.steps=10", "bench.warmup_steps=3", picture=False),
    "training/grid": training(
        "hardware.compile=false", "bench.attention=[flash,naive]", "bench.checkpointing=[none,full,selective]",
        "bench.seq_len=[512,1024,2048,4096,8192,16384,32768,65536,131072]", "train.batch_tokens=131072",
        "bench.micro_batch_tokens=65536", "bench.steps=1", "bench.warmup_steps=1",
    ),
}  # fmt: skip


@dataclass
class EvidenceSettings:
    only: list[str] = field(default_factory=list)  # beginnings of names, or tables; empty: all; `only=` may be left out
    small: bool = False  # the form for a CPU; keeps nothing
    books: str = "books/*.txt"  # long texts
    wikitext: str | None = None  # a folder with WikiText-2's own files; null: from the hub
    jobs: int = 4  # experiments that run beside each other on one GPU, where none is timed
    folder: str = ".github/evidence"  # where files and tables are kept
    readme: str = "README.md"  # gets the first screen's figures, between its comments `figures`

    def __post_init__(self) -> None:
        for beginning in self.only:
            if not any(name.startswith(beginning) for name in (*EXPERIMENTS, TABLES)):
                raise ValueError(f"only={beginning} begins no name; the names are {', '.join((*EXPERIMENTS, TABLES))}")
        if self.jobs < 1:
            raise ValueError(f"jobs={self.jobs} must be at least 1")


@program("tool", EvidenceSettings, run_dir="runs/evidence", positional="only")
def main(settings: EvidenceSettings, run_dir: Path) -> None:
    console = Console(highlight=False)
    chosen = {
        name: experiment
        for name, experiment in EXPERIMENTS.items()
        if not settings.only or name.startswith(tuple(settings.only))
    }

    def one(name: str) -> dict:
        row = run(name, chosen[name], settings, run_dir)
        console.print(f"{name}: {row['verdict']}, {row['seconds']:.0f} s", markup=False)
        return row

    with ThreadPoolExecutor(1 if settings.small else settings.jobs) as pool:
        rows = list(pool.map(one, [name for name, experiment in chosen.items() if not experiment.timed]))
    rows += [one(name) for name, experiment in chosen.items() if experiment.timed]
    columns = {"seconds": lambda row: f"{row['seconds']:.0f}", "verdict": lambda row: row["verdict"]}
    console.print(table(rows, {"experiment": lambda row: row["name"]}, columns))
    if not settings.small:
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
    overrides = experiment.small if settings.small else experiment.overrides
    filled = [o.format(books=settings.books, wikitext=settings.wikitext or "null") for o in overrides]
    accepted = {experiment.exit_code, FAILED} if settings.small else {experiment.exit_code}  # few steps prove nothing
    environment = dict(os.environ)
    environment.pop("HYDRA_FULL_ERROR", None)  # conf/program.py sets it for itself
    if settings.small:
        environment["TRITON_INTERPRET"] = "1"
    began = time.perf_counter()
    with (folder / "console.txt").open("w") as text:
        done = subprocess.run(
            [sys.executable, "-m", experiment.program, *filled, f"hydra.run.dir={folder}"],
            cwd=ROOT, env=environment, stdout=text, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    missing = [file for file in experiment.keep if not (folder / file).is_file()]
    verdict = "as expected"
    if done.returncode not in accepted:
        verdict = f"exit code {done.returncode}, see {folder / 'console.txt'}"
    elif missing:
        verdict = f"no {missing[0]}, see {folder / 'console.txt'}"
    elif not settings.small:
        keep(folder, ROOT / settings.folder / name, experiment.keep)
    return {"name": name, "verdict": verdict, "seconds": round(time.perf_counter() - began, 1)}


def keep(folder: Path, kept: Path, files: tuple[str, ...]) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(folder / file, kept / Path(file).name)


if __name__ == "__main__":
    main()
