"""Measure every figure and picture of the evidence again: `python -m scripts.evidence books='books/*.txt'`.

Runs the experiments below, each as a command of its own, and keeps their files in `.github/evidence/<name>/`; logs stay
in the run's folder. Those that measure speed run last, one after the other. The kept files become the tables of
`.github/evidence/README.md` and the figures of the README's first screen. A part that was not run keeps its old files,
and each table names its own commit.

    python -m scripts.evidence attention/peers training    that one, and all whose names begin with `training`
    python -m scripts.evidence tables                      the tables alone, from the files as they are

Nearly all need a GPU (those of several processes need two), GPT-2's vocabulary, the packages of PEERS below, and clones
of nanoGPT and nanochat in `.cache/`. Where the code was copied without its git history, the environment variable
GIT_COMMIT must name its commit. The exit code is 1 where an experiment did not end as it should. The last line is one
JSON object.
"""

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from conf.program import program
from scripts.bench.report import installed_gpus
from scripts.evidence_tables import headline, inserted, page
from scripts.variants import MUTANTS
from training.provenance import ROOT, git_commit
from training.stop import unless_ignored

FAILED = 1  # exit code
TABLES = "tables"  # a name that is no experiment
KEPT = ".github/evidence"
README = ROOT / "README.md"  # its first screen has figures between two comments `figures`
PEERS = {  # beginning of a name -> the package that it is measured beside, and how to get it
    "attention/peers": ("flash_attn", "pip install flash-attn-4"),
    "generation": ("transformers", "uv run --group hf"),
    "huggingface": ("transformers", "uv run --group hf"),
}
AT_ONCE = 4  # untimed experiments that run at the same time on one GPU
BOOKS = ("data=text", "data.files={books}", "tokenizer=gpt2")
WIKITEXT = ("data=wikitext2", "data.local_dir={wikitext}", "tokenizer=gpt2")
GPU = "experiment=parity_gpu"
FEW = ("parity.nulls=5", "parity.seeds=2", "parity.attention=[flash]")  # where each run takes long
STEPS_1000 = ("train.steps=1000", "train.batch_tokens=4096", *FEW)
TEN_STEPS = ("bench.steps=10", "bench.warmup_steps=3")
SMALL = (  # nanoGPT's GPU recipe for tinyshakespeare: its network, context, dropout and tokens a step
    "model=tiny", "model.num_layers=6", "model.num_heads=6", "model.n_embd=384", "model.mlp=gelu", "model.dropout=0.2",
    "train.batch_tokens=16384", "bench.seq_len=[256]", "bench.vocab_size=65", "bench.steps=60",
    "bench.warmup_steps=20", "hardware.compile=true",
)  # fmt: skip
LARGE = (  # 1.3 billion parameters
    "model.num_layers=24", "model.num_heads=16", "model.n_embd=2048", "bench.seq_len=[2048]",
    "bench.micro_batch_tokens=16384",
)  # fmt: skip
NOVELS = (  # the speedrun's recipe on more text than it can learn by heart, to the loss where nanoGPT's schedule ends
    "experiment=speedrun", "data.files={books}", "data.validation_fraction=0.05", "data.seq_len=1024",
    "model.dropout=0.0", "model.attention_dropout=0.0", "train.eval_windows=512", "bench.target=null",
    "model.mlp=relu2",  # arXiv:2109.08668
)  # fmt: skip
PROFILE = (
    "model=gpt2_124m", *BOOKS, "optim=adamw", "data.seq_len=1024", "train.batch_tokens=32768", "train.steps=8",
    "optim.warmup_steps=1", "train.eval_windows=1", "train.sample_tokens=0", "profile=true",
)  # fmt: skip

# beginning of a name -> module, and the files that are kept of its folder; not every run of a module draws a picture
PROGRAMS = {
    "parity/": ("scripts.parity", ("*.json", "*.md", "*.png")),
    "attention/error_budget": ("scripts.bench.error_budget", ("*.md", "*.json")),
    "invariance": ("tests.promises.invariance", ("*.md",)),
    "soak": ("tests.promises.soak", ("soak.json",)),
    "explain": ("scripts.explain", ("console.txt",)),
    "attention/": ("scripts.bench.attention", ("attention.json", "attention_causal_*.png")),
    "decode/bits": ("scripts.bench.cache_bits", ("cache_bits.json", "cache_bits.png")),
    "decode": ("scripts.bench.decode", ("decode.json", "decode.md", "*.png")),
    "generation": ("scripts.bench.generation", ("bench_generation.json",)),
    "huggingface": ("scripts.bench.huggingface", ("bench_huggingface.json",)),
    "masks": ("scripts.bench.masks", ("masks.json",)),
    "mosaicbert": ("scripts.bench.mosaicbert", ("bench_mosaicbert.json", "*.png")),
    "parallel/context": ("scripts.bench.context", ("bench_context.json",)),
    "parallel/": ("scripts.bench.parallel", ("bench_parallel.json",)),
    "profile/": ("train", ("profile/profile.json",)),
    "time_to_loss/": ("scripts.bench.time_to_loss", ("time_to_loss.json", "time_to_loss.png")),
    "training/loss": ("scripts.bench.loss", ("*.json",)),
    "training/": ("scripts.bench.training", ("*.json", "*.png")),
}
SEVERAL_GPUS = ("parallel/",)  # left out where there are fewer than two, unless named
UNTIMED = ("parity/", "attention/error_budget", "invariance")  # so these may run at the same time
EXIT_CODES = {"parity/mutants": 1}  # all others: 0

EXPERIMENTS = {  # name -> arguments; the longest first, because the untimed ones run at the same time
    "parity/books_fp32_200": (GPU, *BOOKS, "hardware.dtype=float32", "parity.nulls=6", "parity.seeds=3"),
    "parity/books_bf16_1000_compiled_selective": (
        GPU, *BOOKS, *STEPS_1000, "hardware.compile=true", "model.activation_checkpointing=selective"
    ),
    "parity/wikitext_bf16_1000": (GPU, *WIKITEXT, *STEPS_1000),
    "parity/wikitext_fp32_200": (GPU, *WIKITEXT, *FEW, "hardware.dtype=float32"),
    "parity/books_bf16_200_compiled": (GPU, *BOOKS, *FEW, "hardware.compile=true"),
    "parity/books_bf16_200_compiled_full": (
        GPU, *BOOKS, *FEW, "hardware.compile=true", "model.activation_checkpointing=full"
    ),
    "parity/books_bf16_200": (GPU, *BOOKS),
    "parity/wikitext_bf16_200": (GPU, *WIKITEXT),
    # the mask in plain PyTorch is slow
    "parity/books_bf16_60_dropout": (
        GPU, *BOOKS, "model.attention_dropout=0.1", "parity.attention=[tiled,flash]", "train.steps=60",
        "train.batch_tokens=4096", "parity.nulls=5", "parity.seeds=2",
    ),
    "parity/mutants": (
        GPU, *BOOKS, "train.steps=60", "parity.seeds=2", "parity.attention=[flash]",
        f"parity.mutants=[{','.join(MUTANTS)}]",
    ),
    "parity/repeats": ("parity.repeats=20", "parity.nulls=5", "parity.seeds=2"),
    "attention/error_budget": (),
    "invariance": (),
    "soak": (),
    "explain": (),
    "attention/speed": (
        "bench.seq_len=[1024,4096,16384]", "bench.mask=[causal,full,window,packed]", "bench.budget_ms=60"
    ),
    "attention/peers": (
        "bench.seq_len=[1024,2048,4096,8192,16384,32768]", "bench.budget_ms=40",
        "bench.attention=[flash,flash4,flash4_deterministic,sdpa_flash,sdpa_cudnn]",
    ),
    "attention/long": (
        "bench.head_dim=[128]", "bench.mask=[causal]", "bench.budget_ms=30",
        "bench.attention=[flash,naive,sdpa_flash,sdpa_cudnn]",
    ),
    "masks": ("bench.rounds=24", "bench.budget_ms=20"),  # four calls take turns: each has each place six times
    "decode/context": ("bench.family=[context]", "bench.attention=[flash]"),
    "decode/peers": (
        "bench.family=[context]", "bench.heads=[32/8/128,12/12/64,64/8/128]", "bench.batch=[1,8,16,64]",
        "bench.largest_gib=9",
    ),
    "decode/variants": ("bench.family=[group,queries,pages,ragged,bits]",),
    "decode/growing": ("bench.family=[growing]",),
    "decode/bits": (),
    "generation": (),
    "huggingface": ("budget_ms=1000",),
    "mosaicbert": ("budget_ms=300",),
    "parallel/step": ("bench.cells=[replicate,hashes,context]",),
    "parallel/shard": ("bench.cells=[shard]", "bench.steps=8"),
    "parallel/context": ("runs=5",),
    "profile/naive": (*PROFILE, "model.attention=naive"),
    "profile/flash": (*PROFILE, "model.attention=flash"),
    "training/loss": (),
    "training/compiled": (
        "bench.attention=[flash,sdpa_cudnn]", "bench.seq_len=[1024,4096,16384,65536]", *TEN_STEPS
    ),
    "training/checkpointing": (
        "bench.checkpointing=[none,pointwise,selective,full]", "bench.seq_len=[1024]", *TEN_STEPS
    ),
    "training/saving": ("bench.saving=true", *TEN_STEPS),
    "time_to_loss/cpu": (
        "data.files={shakespeare}", "hardware.device=cpu", "train.steps=225", "nanogpt.lr=[1e-3,2e-3,4e-3]",
        'bench.changes=["hardware.dtype=float32"]',  # where auto is bfloat16, the CPU has units for it
    ),
    "time_to_loss/shakespeare": (
        "experiment=speedrun", "data.files={shakespeare}", "bench.target=1.4698", "nanogpt.lr=[1e-3,2e-3,3e-3]",
        "nanogpt.steps=5000", "nanogpt.batch_tokens=16384",
    ),
    "time_to_loss/small": (  # the CPU's recipe on a GPU
        "data.files={shakespeare}", "hardware.compile=true", "train.steps=225", "nanogpt.lr=[1e-3,2e-3]",
    ),
    "time_to_loss/points": (  # speedrun without each of its points, and with other activations
        "experiment=speedrun", "data.files={shakespeare}", "bench.target=1.4698", "bench.opponents=[]",
        'bench.changes=["model.qk_norm=false","model.mlp=relu2","model.mlp=gelu","data.shift_windows=false"]',
    ),
    "time_to_loss/cpu_points": (  # experiment=shakespeare without each of its points
        "data.files={shakespeare}", "hardware.device=cpu", "bench.opponents=[]", "bench.seeds=[0,1,2,3,4,5]",
        'bench.changes=["model.qk_norm=false","model.rope_base=10000",'
        '"optim.cautious_decay=false","optim.momentum=0.95","optim.schedule=cosine"]',
    ),
    "time_to_loss/bytes": (
        *NOVELS, "tokenizer=bytes", "train.batch_tokens=65536", "train.steps=200", "optim.lr=3e-3", "bench.every=25",
        'bench.changes=["train.steps=150","optim.lr=0.002","model.mlp=gelu"]', "bench.opponents=[nanogpt,nanochat]",
        "nanogpt.lr=[1e-3,2e-3,4e-3]", "nanogpt.steps=600", "nanogpt.batch_tokens=65536", "nanochat.lr=[0.02,0.04]",
    ),
    "time_to_loss/nanochat": (  # to where its schedule ends, tuned upwards from its recipe's rate, 0.02
        *NOVELS, "tokenizer=bytes", "train.batch_tokens=65536", "train.steps=320", "model.qk_gain=2",
        "optim.momentum=0.9", "bench.target=1.1085", "bench.every=20", 'bench.changes=["train.steps=350"]',
        "bench.opponents=[nanochat]", "nanochat.lr=[0.08,0.16]", "nanochat.steps=300",
    ),
    "time_to_loss/gpt2": (  # 124M
        *NOVELS, "tokenizer=gpt2", "model.num_layers=12", "model.num_heads=12", "model.n_embd=768",
        "train.batch_tokens=32768", "train.steps=100", "bench.every=20", "nanogpt.lr=[6e-4,1.2e-3]",
        "nanogpt.steps=300", "nanogpt.batch_tokens=32768", "nanogpt.beta2=0.95",
    ),
    **{f"training/small_{optim}": (*SMALL, f"optim={optim}") for optim in ("adamw", "muon")},
    **{f"training/large_{fp8}": (*LARGE, f"model.fp8={fp8}", *TEN_STEPS) for fp8 in ("none", "mlp", "all")},
    "training/grid": (
        "hardware.compile=false", "bench.attention=[flash,naive]", "bench.checkpointing=[none,full,selective]",
        "bench.seq_len=[512,1024,2048,4096,8192,16384,32768,65536,131072]", "train.batch_tokens=131072",
        "bench.micro_batch_tokens=65536", "bench.steps=3", "bench.warmup_steps=2",
    ),
}  # fmt: skip


@dataclass
class EvidenceSettings:
    only: list[str] = field(default_factory=list)  # beginnings of names, or tables; empty: all; `only=` may be left out
    books: str = "books/*.txt"  # long texts
    wikitext: str | None = None  # a folder with WikiText-2's own files; null: from the hub
    shakespeare: str = "input.txt"  # tinyshakespeare
    folder: str = KEPT  # where files and tables are kept; only the default changes the project's README

    def __post_init__(self) -> None:
        for beginning in self.only:
            if not beginning or not any(named(name, beginning) for name in (*EXPERIMENTS, TABLES)):
                raise ValueError(f"only={beginning} begins no name; the names are {', '.join((*EXPERIMENTS, TABLES))}")


@program("tool", EvidenceSettings, run_dir="runs/evidence", positional="only")
def main(settings: EvidenceSettings, run_dir: Path) -> None:
    chosen = [name for name in EXPERIMENTS if not settings.only or any(named(name, only) for only in settings.only)]
    if not settings.only and len(installed_gpus()) < 2:
        chosen = [name for name in chosen if not name.startswith(SEVERAL_GPUS)]
        print(f"{', '.join(SEVERAL_GPUS)} left out: they need two GPUs", flush=True)

    refuse_unusable(settings, chosen)
    if chosen and not git_commit():
        raise ValueError(
            "no git checkout is here and a figure must name its commit; give it as the variable GIT_COMMIT"
        )

    def one(name: str) -> dict:
        row = run(name, settings, run_dir)
        print(f"{name}: {row['verdict']}, {row['seconds']:.0f} s", flush=True)
        return row

    untimed = [name for name in chosen if name.startswith(UNTIMED)]
    with CHILDREN:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            begun = [pool.submit(one, name) for name in untimed]
            while wait(begun, timeout=1).not_done:  # Python may sleep through a signal in one long wait
                pass
        rows = [future.result() for future in begun]
        rows += [one(name) for name in chosen if name not in untimed]
    kept = ROOT / settings.folder
    kept.mkdir(parents=True, exist_ok=True)
    (kept / "README.md").write_text(page(kept))
    if kept == ROOT / KEPT:
        README.write_text(inserted(README.read_text(), "figures", headline(kept)))
    print(json.dumps({"folder": str(run_dir), "experiments": rows}))
    if any(row["verdict"] != "as expected" for row in rows):
        sys.exit(FAILED)


class Children:
    """Child processes: SIGINT, SIGTERM and SIGHUP (a closed terminal) end them before this one; use with `with`."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen] = set()
        self._signal: int | None = None

    def run(self, command: list[str], **options: Any) -> int:
        """Run `command` and return its exit code; raises SystemExit after a signal. Several threads may call it."""
        if self._signal is None:
            with subprocess.Popen(command, **options) as child:
                self._running.add(child)
                if self._signal is not None:  # the signal came before `child` was in the set
                    child.terminate()
                child.wait()
            self._running.discard(child)
        if self._signal is not None:
            sys.exit(128 + self._signal)
        return child.returncode

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        for child in tuple(self._running):
            child.terminate()

    def __enter__(self) -> None:
        self._signal = None
        numbers = unless_ignored((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        self._previous = {number: signal.signal(number, self._end) for number in numbers}

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


CHILDREN = Children()


def refuse_unusable(settings: EvidenceSettings, chosen: list[str]) -> None:
    """Raise ValueError, before hours of experiments, where a text, a peer or a place for the results is missing."""
    folder = ROOT / settings.folder
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder={settings.folder} is no folder; give one, as folder=.github/evidence")
    if not chosen and not any(folder.rglob("*.json")):  # empty tables would remove the README's figures
        raise ValueError(f"folder={settings.folder} has no files to make tables of; run experiments first")
    for key in ("books", "wikitext", "shakespeare"):
        value = getattr(settings, key)
        asks = [name for name in chosen if any(f"{{{key}}}" in argument for argument in EXPERIMENTS[name])]
        if not asks or value is None:
            continue
        for path in value[1:-1].split(",") if value.startswith("[") else [value]:
            if not path or not glob.glob(os.path.join(ROOT, os.path.expanduser(path))):
                raise ValueError(f"{key}={value} is not there, and {asks[0]} reads it; give {key}=PATH from {ROOT}")
    for name in chosen:
        for beginning, (package, remedy) in PEERS.items():
            if name.startswith(beginning) and find_spec(package) is None:
                raise ValueError(
                    f"{name} measures beside {package}, which is not installed ({remedy}); or name other parts"
                )


def named(name: str, only: str) -> bool:
    """Whether `only` selects experiment `name`: it is the name, or it begins the name and is no experiment's name."""
    return name == only or (only not in EXPERIMENTS and name.startswith(only))


def program_of(name: str) -> tuple[str, tuple[str, ...]]:
    """An experiment's module, and the patterns of the files that are kept of its folder."""
    return next(program for beginning, program in PROGRAMS.items() if name.startswith(beginning))


def run(name: str, settings: EvidenceSettings, run_dir: Path) -> dict:
    """Run one experiment in a process of its own and keep its files; what it printed is in console.txt."""
    (module, patterns), folder = program_of(name), run_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"books": settings.books, "wikitext": settings.wikitext or "null", "shakespeare": settings.shakespeare}
    filled = [o.format(**texts) for o in EXPERIMENTS[name]]
    environment = dict(os.environ)
    environment.pop("HYDRA_FULL_ERROR", None)  # conf/program.py sets it for itself
    began = time.perf_counter()
    with (folder / "console.txt").open("w") as text:
        code = CHILDREN.run(
            [sys.executable, "-m", module, *filled, f"hydra.run.dir={folder}"],
            cwd=ROOT, env=environment, stdout=text, stderr=subprocess.STDOUT,
        )  # fmt: skip
    verdict, expected = "as expected", EXIT_CODES.get(name, 0)
    files = {pattern: list(folder.glob(pattern)) for pattern in patterns}
    missing = [pattern for pattern, found in files.items() if not found and pattern != "*.png"]
    if code != expected:
        verdict = f"exit code {code}, see {folder / 'console.txt'}"
    elif missing:
        verdict = f"no {missing[0]}, see {folder / 'console.txt'}"
    # a failing verdict is a figure too and is kept; a program that broke off has the same exit code and only some files
    made = [file for found in files.values() for file in found]
    whole = not any(file.suffix == ".json" and '"unfinished": true' in file.read_text() for file in made)
    if not missing and code in (expected, FAILED) and whole:
        kept = ROOT / settings.folder / name
        kept.mkdir(parents=True, exist_ok=True)
        for file in made:
            shutil.copy(file, kept)
    return {"name": name, "verdict": verdict, "seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    main()
