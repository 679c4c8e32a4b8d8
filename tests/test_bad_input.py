"""Bad input of every kind: one line that says what, where and the way out; a non-zero exit; nothing lost.

Each row of CASES runs a program's own `main` in this process on a folder with a text, its tokenized copy and a finished
run. Nothing that was there may be changed, and nothing may appear but tokenized text.
"""

import importlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.runs import CORPUS, SMALL, told, without_network
from training import checkpoint as checkpoints
from training.wandb_run import LoggerConfig, wandb_mode

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parent.parent
LAST = "first/checkpoints/last"
DEEP = b"[" * 100_000 + b"]" * 100_000
# a line without one of these says what is wrong and not what to do
REMEDY = re.compile(
    r"\b(use|must|expected|choose|did you mean|drop|give|write|leave|raise|delete|check|correct|convert|add|name|"
    r"unset|one of|lists all|move|reads)\b"
)


@dataclass
class Place:
    """Where a case happens: `path` holds corpus.txt, cache/ and first/, a finished run."""

    path: Path
    monkeypatch: pytest.MonkeyPatch


Setup = Callable[[Place], object]


@dataclass(frozen=True)
class Case:
    name: str
    arguments: list[str]  # "{p}" stands for the folder
    says: list[str]  # words of the one line
    setup: Setup | None = None
    program: str = "train"  # train.py's arguments come after a small run's

    def command_line(self, path: Path) -> list[str]:
        base = ["data=text", "data.files={p}/corpus.txt", "data.cache_dir={p}/cache", *SMALL, "train.steps=4"]
        return [a.replace("{p}", str(path)) for a in (base if self.program == "train" else []) + self.arguments]


# --- what spoils the place


def text(content: bytes, name: str = "x.txt") -> Setup:
    return lambda place: (place.path / name).write_bytes(content)


def folder_of_rows(place: Place) -> None:
    (place.path / "rows").mkdir()
    (place.path / "rows" / "a.jsonl").write_text('{"text": "a"}\n')


def parquet(columns: dict, keep: int | None = None, flip: slice = slice(0)) -> Setup:
    """A parquet file of which only `keep` bytes are left, or those in `flip` are inverted."""

    def write(place: Place) -> None:
        path = place.path / "x.parquet"
        pq.write_table(pa.table(columns), path)
        content = bytearray(path.read_bytes()[:keep])
        content[flip] = bytes(byte ^ 0xFF for byte in content[flip])
        path.write_bytes(content)

    return write


def in_cache(spoil: Callable[[Path], object]) -> Setup:
    return lambda place: spoil(next((place.path / "cache").iterdir()))


def in_checkpoint(name: str, content: Callable[[bytes], bytes]) -> Setup:
    """Damage: the manifest no longer holds."""

    def damage(place: Place) -> None:
        path = place.path / LAST / name
        path.write_bytes(content(path.read_bytes()))

    return damage


def rewritten(
    *,
    weights: Callable[[dict], object] | None = None,
    state: Callable[[dict], object] | None = None,
    meta: Callable[[dict], object] | None = None,
) -> Setup:
    """A whole checkpoint with other contents: the manifest holds. Each function changes its argument."""

    def write(place: Place) -> None:
        opened = checkpoints.open_checkpoint(place.path / LAST)
        parts = (load_file(opened.path / checkpoints.WEIGHTS), opened.load_state(), opened.meta)
        for part, change in zip(parts, (weights, state, meta), strict=True):
            if change:
                change(part)
        checkpoints.write(place.path / "first" / "checkpoints", *parts, best=False)

    return write


def without(key: str) -> Callable[[dict], object]:
    """Take a key out; "random.numpy" is one within another."""

    def take_out(values: dict) -> None:
        *outer, last = key.split(".")
        for name in outer:
            values = values[name]
        del values[last]

    return take_out


def crafted(name: str, content: Callable[[bytes], bytes]) -> Setup:
    """A file with other bytes, and the manifest that goes with them: no damage, but nothing this program wrote."""

    def write(place: Place) -> None:
        in_checkpoint(name, content)(place)
        path = place.path / LAST / checkpoints.MANIFEST
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps(manifest | {name: checkpoints.fingerprint(path.with_name(name))}))

    return write


def pickled(code: bytes) -> Setup:
    """A state of which the pickle is `code`, in an archive as torch.save writes it."""

    def archive(content: bytes) -> bytes:
        target = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(target, "w") as new:
            for name in old.namelist():
                new.writestr(name, code if name.endswith("/data.pkl") else old.read(name))
        return target.getvalue()

    return crafted("state.pt", archive)


class Bomb:
    """Unpickling it as pickle would leaves a file behind."""

    def __reduce__(self):
        return open, ("bomb_went_off", "w")


def first_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], None]:
    return lambda weights: weights.update({min(weights): change(weights[min(weights)])})


def environment(**variables: str) -> Setup:
    return lambda place: [place.monkeypatch.setenv(key, value) for key, value in variables.items()]


def logged_in(**variables: str) -> Setup:
    """A wandb login, and a server where nobody listens."""
    return environment(WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9", **variables)


def no_login(place: Place) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_BASE_URL"):
        place.monkeypatch.delenv(name, raising=False)
    place.monkeypatch.setenv("HOME", str(place.path))


def no_network(place: Place) -> None:
    without_network(place.monkeypatch, place.path)


def no_gpu(place: Place) -> None:
    place.monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def no_interpreter(place: Place) -> None:
    no_gpu(place)
    place.monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def old_gpu(place: Place) -> None:
    """A GPU without bfloat16; nothing is asked of it but its name."""
    place.monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    place.monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    place.monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    place.monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")


def no_headers(place: Place) -> None:
    """A Linux distribution's own Python, without the package of Python.h."""
    place.monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(place.path))


def full_disk(place: Place) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    place.monkeypatch.setattr(os, "fsync", fsync)


def theirs(contents: dict, end_of_text: str | None) -> Setup:
    """A folder with a tokenizer of Hugging Face's format."""

    def write(place: Place) -> None:
        if end_of_text:
            pytest.importorskip("tokenizers", reason="needs transformers: uv run --group hf")
        (place.path / "theirs").mkdir()
        (place.path / "theirs" / "tokenizer.json").write_text(json.dumps(contents))
        (place.path / "theirs" / "tokenizer_config.json").write_text(json.dumps({"eos_token": end_of_text}))

    return write


def experiment(content: bytes, group: str = "experiment", name: str = "mine") -> Setup:
    def write(place: Place) -> None:
        (place.path / group).mkdir()
        (place.path / group / f"{name}.yaml").write_bytes(content)

    return write


def empty_folder(place: Place) -> None:
    (place.path / "empty").mkdir()
    place.monkeypatch.chdir(place.path / "empty")


def links(name: str, target: str) -> Setup:
    return lambda place: (place.path / name).symlink_to(target)


X, PARQUET, JSONL = (["data.files={p}/x." + kind] for kind in ("txt", "parquet", "jsonl"))
MINE = ["--config-dir={p}", "experiment=mine"]
RESUME = ["resume={p}/" + LAST, "train.steps=9"]
SAMPLE = ["checkpoint={p}/" + LAST, "hardware.device=cpu", "max_new_tokens=2"]
EXPORT = ["checkpoint={p}/" + LAST, "folder={p}/new"]
HUB = ["data=hub", "~data.files", "data.seq_len=32"]
WIKITEXT = ["data=wikitext2", "~data.files", "data.seq_len=32"]
ROWS = ["hello world " * 10] * 200
THEIRS = ["tokenizer={p}/theirs"]
WORDS = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"},
         "model": {"type": "WordLevel", "vocab": {"<eos>": 0, "the": 1}, "unk_token": "<unk>"}}  # fmt: skip

COMMAND_LINES = [
    Case("added key that is there", ["+data.seq_len=12"], ["+data.seq_len adds a key", "write data.seq_len=VALUE"]),
    Case("added group that is there", ["+model=tiny"], ["+model adds a group", "write model=NAME"]),
    Case(
        "SLURM where there is none",
        ["-m", "hydra/launcher=submitit_slurm", "optim.lr=1e-3,3e-3"],
        ["hydra/launcher=submitit_slurm needs SLURM's srun, which is not here; use a machine of the cluster"],
    ),
    Case("added experiment", ["+experiment=shakespeare"], ["+experiment adds a group", "write experiment=NAME"]),
    Case("deleted key without a value", ["~resume"], ["~resume deletes nothing: resume is null already", "drop it"]),
    Case("deleted key that there is not", ["~model.num_layerz"], ["did you mean model.num_layers?"]),
    Case("deleted group that another needs", ["~model"], ["${model}} refers to a group", "choose each as group=NAME"]),
    Case("deleted experiment", ["~experiment"], ["a run has one experiment", "write experiment=NAME"]),
    Case("two experiments", ["experiment=[quickstart,parity]"], ["a run has one experiment", "experiment=NAME"]),
    Case("reference for a choice", ["data=${text}"], ["${text} refers to a group", "choose each as group=NAME"]),
    Case("unknown key", ["model.num_layerz=3"], ["model.num_layerz", "did you mean model.num_layers?"]),
    Case("key without its group", ["lr=0.1"], ["lr is not a known key", "did you mean optim.lr?"]),
    Case("unknown group", ["modle=tiny"], ["modle", "did you mean model?"]),
    Case("unknown choice", ["model=tinny"], ["model=tinny", "did you mean tiny?", "gpt2_124m"]),
    Case("unknown experiment", ["experiment=quikstart"], ["experiment=quikstart", "quickstart"]),
    Case("new key", ["+model.n_layer=3"], ["model.n_layer is not a known key"]),
    Case("key of Hydra", ["hydra.run.dirr=x"], ["hydra.run.dirr is not a known key"]),
    Case("no equals sign", ["train.steps 5"], ["'train.steps 5'", "key=value"]),
    Case("open bracket", ["data.files=["], ["'data.files=['", "quote lists"]),
    Case("unquoted accent", ["train.steps=É"], ["'train.steps=É'", "accents"]),
    Case("nothing before =", ["=3"], ["a group takes a file's name"]),
    Case("no choice", ["experiment=null"], ["a group takes a file's name"]),
    Case("package", ["model@other=tiny"], ["model@other", "write model=NAME"]),
    Case("group as value", ["train=3"], ["train=3 is no value", "train.KEY=VALUE"]),
    Case("several values", ["train.steps=1,2"], ["train.steps=1,2 is several values", "-m"]),
    Case("unknown flag", ["--steps"], ["unrecognized arguments: --steps", "--help"]),
    Case("unknown --cfg", ["--cfg=everything"], ["--cfg", "'everything'", "'job'"]),
    Case("missing --config-dir", ["--config-dir={p}/x"], ["--config-dir={p}/x is not a folder"]),
    Case("missing --config-name", ["--config-name=x"], ["the configuration x does not exist"]),
    Case("run folder is a file", ["hydra.run.dir={p}/corpus.txt"], ["hydra.run.dir={p}/corpus.txt", "name another"]),
    Case("run folder below a file", ["hydra.run.dir={p}/corpus.txt/x"], ["hydra.run.dir=", "Not a directory"]),
    Case(
        "run folder below a link to nothing",
        ["hydra.run.dir={p}/scratch/x"],
        ["cannot be made (a link to nothing)", "as hydra.run.dir=FOLDER"],
        lambda place: (place.path / "scratch").symlink_to("unmounted"),
    ),
    Case(
        "sweep below a file", ["-m", "optim.lr=1,2", "hydra.sweep.dir={p}/corpus.txt/x"], ["as hydra.sweep.dir=FOLDER"]
    ),
    Case("run folder in use", ["hydra.run.dir=first"], ["run folder first already holds a run", "resume=auto"]),
    Case("range without -m", ["train.steps=range(1,3)"], ["train.steps=range(1,3) is several values", "-m"]),
    Case("thousands", ["train.steps=1e3"], ["train.steps=1000.0 has the wrong type", "number; write 1000"]),
    Case("a number for a boolean", ["profile=3"], ["profile=3 has the wrong type", "expected true or false"]),
    Case("a number for a boolean or null", ["hardware.compile=-1"], ["hardware.compile=-1 has the wrong type"]),
    Case("mapping for a list", ["logger.tags={a:1}"], ["logger.tags={a:1} has the wrong type", "--cfg job"]),
    *(
        Case(
            f"run folder with a {name}",
            ["hydra.run.dir=."],
            [f"has a {name}", "give another hydra.run.dir"],
            text(b"mine", name),
        )
        for name in ("config.yaml", "summary.json", "loss.png")
    ),
    Case("folder without a name", ["hydra.run.dir="], ["hydra.run.dir= names no folder; write . for this one"]),
    Case(
        "a key of Hydra's with a wrong type",
        ["hydra.run=3"],
        ["has the wrong type; write a value as `--cfg hydra` shows"],
    ),
    Case(
        "a key that Hydra lacks", ["hydra.run.dirr=x"], ["hydra.run.dirr is not a known key", "`--cfg hydra` lists all"]
    ),
    Case(
        "no launcher",
        ["-m", "hydra.launcher=null", "train.steps=1,2"],
        ["Hydra cannot use hydra.* as given (Hydra launch"],
    ),
    Case(
        "no batch of jobs",
        ["-m", "hydra.sweeper.max_batch_size=0", "train.steps=1,2"],
        ["(AssertionError); leave them out"],
    ),
    Case("~ in quotes", ["hydra.run.dir='~/runs'"], ["begins with ~, which only a shell expands; write $HOME"]),
    *(
        Case(f"~ after {typed}", [f"{typed}~/x"], [f"{typed}~/x begins with ~, which only a shell expands"])
        for typed in ("init_from=", "resume=", "model.name=", "tokenizer='")
    ),
    Case("a file in place of data's", ["data=/dev/null/x.txt"], ["data=/dev/null/x.txt does not exist; did"]),
    Case(
        "a text in place of data's", [f"data={__file__}"], [f"write data=text data.files={__file__}, or choose one of"]
    ),
    Case(
        "another working folder", ["hydra.job.chdir=true"], ["hydra.job.chdir=true would change what each path means"]
    ),
    Case("sweep", ["-m", "train.steps=0"], ["train.steps=0 must be at least 1"]),
]

CONFIGURATIONS = [
    Case("word for a number", ["model.num_layers=three"], ["model.num_layers=three", "a whole number"]),
    *(Case(f"no value for {key}", [f"{key}=???"], [f"{key}=??? stands for a value that is missing", "give one"])
      for key in ("model.n_embd", "tokenizer", "optim.lr", "logger.tags", "train.max_hours", "resume")),
    Case("an experiment that wants a file", ["experiment=shakespeare"], [
        "data.files=??? stands for a value that is missing in data=text; give one, as data.files=VALUE"],
         program="scripts.prepare"),
    Case("no value in a file", MINE, ["train.eval_every=???", "give one"], experiment(
        b"# @package _global_\ntrain:\n  eval_every: ???\n")),
    Case("an experiment by one of our names", ["--config-dir={p}", "experiment=quickstart"], [
        "/conf/experiment/quickstart.yaml, and {p}/experiment/quickstart.yaml would be ignored; give yours another"],
         experiment(b"# @package _global_\ntrain:\n  steps: 7\n", name="quickstart")),
    Case("no value in a group's file", ["--config-dir={p}", "model=mine"], ["model.qk_norm=???", "give one"],
         experiment(b"qk_norm: ???", "model")),
    Case("a value for a file's ???", [*MINE, "train.steps=0"], ["train.steps=0 must be at least 1"], experiment(
        b"# @package _global_\ntrain:\n  steps: ???\n  seed: ${train.eval_every}\n")),
    Case("no value for a tool", ["seed=???", "checkpoint=x"], ["seed=???", "give one"], program="scripts.sample"),
    *(Case(f"{key} far too large", [f"{key}={10**25}"], [f"{key}={10**25} must be at most {most}"]) for key, most in (
        ("model.num_layers", 4096), ("model.n_embd", 2**20), ("model.mlp_hidden", 2**22), ("model.window", 2**31 - 1),
        ("train.batch_tokens", 2**32), ("train.sample_tokens", 2**20))),
    *(Case(f"{key} far too large", [f"optim.{key}=1e300"], [f"optim.{key}=1e+300", "at most 1e+06"]) for key in (
        "lr", "muon_lr_ratio")),
    Case("a step that fits nowhere", ["train.batch_tokens=4294967296", "model.num_layers=1"],
         ["25312.00 GiB and", "are free on cpu"]),
    Case("resume from nowhere", ["resume=''"], ["resume is empty", "leave it out"]),
    Case("fraction for a count", ["train.steps=1e3"], ["train.steps=1000.0", "a whole number"]),
    Case("null", ["model.num_layers=null"], ["model.num_layers=null", "a whole number"]),
    Case("no truth", ["model.tie_embeddings=perhaps"], ["model.tie_embeddings=perhaps", "true or false"]),
    Case("no list", ["logger.tags=a"], ["logger.tags=a", "a list, as [a,b]"]),
    Case("lr a word", ["optim.lr=fast"], ["optim.lr=fast", "a number"]),
    Case("lr negative", ["optim.lr=-1"], ["optim.lr=-1", "positive"]),
    Case("lr not a number", ["optim.lr=nan"], ["optim.lr=nan", "finite"]),
    Case("lr infinite", ["optim.lr=1e400"], ["optim.lr=inf", "finite"]),
    Case("schedule", ["optim.schedule=linear"], ["optim.schedule=linear", "cosine"]),
    Case("beta2", ["optim.beta2=1.0"], ["optim.beta2=1.0", "[0, 1)"]),
    Case("no such policy", ["train.on_nonfinite=ignore"], ["train.on_nonfinite=ignore", "stop, skip, rollback"]),
    Case("nothing to roll back to", ["train.on_nonfinite=rollback", "train.eval_every=0", "train.save_every=0"],
         ["train.on_nonfinite=rollback", "train.save_every=0", "raise it"]),
    Case("heads do not divide", ["model.n_embd=129"], ["model.n_embd=129", "num_heads=2", "use n_embd=132 "]),
    Case("KV heads do not divide", ["model.num_kv_heads=3"], ["model.num_kv_heads=3", "1, 2"]),
    Case("odd head_dim", ["model.n_embd=6"], ["odd head_dim 3", "n_embd=8"]),
    Case("attention", ["model.attention=fast"], ["model.attention=fast", "flash"]),
    Case("window", ["model.window=0"], ["model.window=0", "at least 1"]),
    Case("no steps", ["train.steps=0"], ["train.steps=0", "at least 1"]),
    Case("tokens of a step", ["train.batch_tokens=1000"], ["train.batch_tokens=1000", "data.seq_len=32", "992"]),
    Case("micro-batch", ["train.micro_batch=5"], ["train.micro_batch=5", "8 sequences"]),
    Case("seed too large", ["train.seed=99999999999999999999"], ["train.seed=99999999999999999999", "2^64"]),
    Case("data seed too large", ["train.data_seed=18446744073709551616"], ["train.data_seed", "2^64"]),
    Case("reference to nothing", ["data.seq_len=${train.nothing}"], ["data.seq_len", "'train.nothing'"]),
    Case("reference to itself", ["data.seq_len=${data.seq_len}"], ["data.seq_len", "Recursive"]),
    Case("unset variable", ["data.seq_len=${oc.env:NOT_SET}"], ["data.seq_len", "'NOT_SET'"]),
    Case("typo in a file", MINE, ["model.num_layerz", "model.num_layers?"], experiment(
        b"# @package _global_\nmodel:\n  num_layerz: 3\n")),
    Case("not YAML", MINE, ["{p}/experiment/mine.yaml line 3"], experiment(b"# @package _global_\nmodel: {a: [1\n")),
    Case("tab in YAML", MINE, ["mine.yaml line 2"], experiment(b"model:\n\tnum_layers: 1\n")),
    Case("set in YAML", MINE, ["train.steps=set has the wrong type", "a whole number"], experiment(
        b"# @package _global_\ntrain:\n  steps: !!set {a, b}\n")),
    Case("half a reference in YAML", MINE, ["train.eval_every refers to what cannot be had", "write the value"],
         experiment(b"# @package _global_\ntrain:\n  eval_every: '${'\n")),
    Case("mapping for a number", ["train.steps={a:{b:1}}"], ["train.steps={'a': {'b': 1}} has the wrong type"]),
    *(Case(f"tags that are {tags}", [f"logger.tags={tags}"], ["must be words; use logger.tags=[a,b]"])
      for tags in ("[[1]]", "[{a:1}]", "${train.seed}")),
    Case("file not UTF-8", MINE, ["configuration file is not UTF-8"], experiment(b"\xff\xfe")),
    Case("file without package", MINE, ["# @package _global_"], experiment(b"train:\n  steps: 3\n")),
    Case("file overrides nothing", MINE, ["model=nope", "tiny"], experiment(
        b"# @package _global_\ndefaults:\n  - override /model: nope\n")),
    Case("prompt the tokenizer lacks", ["tokenizer=characters", "train.sample_prompt='É'", "train.sample_tokens=2"],
         ["train.sample_prompt=É", "U+00C9", "tokenizer=bytes"]),
]  # fmt: skip

DATA = [
    Case("empty", X, ["{p}/x.txt is empty"], text(b"")),
    Case("one token", X, ["the train split has 0 tokens and a prediction needs 2", "use a longer text"], text(b"a")),
    Case("not UTF-8", X, ["{p}/x.txt is not UTF-8 (byte 3)", "iconv"], text(b"caf\xe9 au lait" * 99)),
    Case("UTF-16", X, ["not UTF-8 (byte 0)"], text(("hello " * 99).encode("utf-16"))),
    Case("shorter than a window", X, ["data.seq_len=32", "validation split has 24"], text(b"hello world\n" * 20)),
    Case("window too long", ["data.seq_len=6400", "train.batch_tokens=6400"], ["data.seq_len=6400", "or less"]),
    Case("folder", ["data.files={p}"], ["data.files={p} is a folder", "*.txt"]),
    Case("empty folder", ["data.files={p}/empty"], ["data.files={p}/empty is an empty folder; give one"],
         setup=lambda place: (place.path / "empty").mkdir()),
    Case("folder of rows", ["data.files={p}/rows"], ["is a folder; use data.files=", "rows/*.jsonl"], folder_of_rows),
    Case("missing", ["data.files=missing.txt"], ["data.files=missing.txt does not exist", "{p}"]),
    Case("two in one word", ["data.files='a.txt,b.txt'"], ["does not exist", "several as data.files=[a.txt,b.txt]"]),
    Case("glob without match", ["data.files='*.none'"], ["data.files=*.none matches no file"]),
    Case("name not UTF-8", ["data.files={p}/caf\udce9.txt"],
         ["data.files: ", "caf\\udce9' is not UTF-8; give the file"],
         lambda place: (place.path / "caf\udce9.txt").write_text(CORPUS)),
    Case("words not UTF-8", ["train.sample_prompt=caf\udce9"],
         ["train.sample_prompt: 'caf\\udce9' is not UTF-8", "type"]),
    Case("text without files", ["~data.files"], ["data.source=text needs data.files"]),
    Case("no files", ["data.files=[]"], ["data.files=corpus.txt"]),
    Case("number for a file", ["data.files=[3]"], ["data.files=[3] must be paths"]),
    Case("link to nothing", X, ["{p}/x.txt does not exist"], links("x.txt", "nowhere")),
    Case("link to itself", X, ["{p}/x.txt does not exist"], links("x.txt", "x.txt")),
    Case("parquet: junk", PARQUET, ["{p}/x.parquet cannot be read as parquet"], text(b"PAR1" + b"junk" * 50 + b"PAR1",
         "x.parquet")),
    Case("parquet: cut", PARQUET, ["{p}/x.parquet cannot be read as parquet"], parquet({"text": ROWS}, keep=300)),
    Case("parquet: flipped bytes", PARQUET, ["{p}/x.parquet cannot be read as parquet"], parquet(
        {"text": ROWS}, flip=slice(20, 60))),
    Case("parquet: no text", PARQUET, ['no column "text", only body'], parquet({"body": ROWS})),
    Case("parquet: numbers", PARQUET, ["x.parquet: row 1 has no text", "choose another column with data.text_field"],
         parquet({"text": [1, 2, 3]})),
    Case("parquet: no rows", PARQUET, ["train split has 0"], parquet({"text": pa.array([], pa.string())})),
    Case("JSONL: cut", JSONL, ["{p}/x.jsonl cannot be read as json"], text(b'{"text": "a"}\n{"text":', "x.jsonl")),
    Case("JSONL: no text", JSONL, ['no column "text", only body'], text(b'{"body": "a"}\n', "x.jsonl")),
    Case("JSONL: null", JSONL, ["row 2 has no text"], text(b'{"text": "a"}\n{"text": null}\n', "x.jsonl")),
    Case("JSONL: a number", [*JSONL, "data.text_field=body"], ['row 2 has no text in its column "body" (it is 3)'],
         text(b'{"body": "a"}\n{"body": 3}\n', "x.jsonl")),
    Case("end-of-text first held out", [*X, "tokenizer=characters"], ["'<' (U+003C)", "tokenizer=bytes"],
         text(b"abcd\n" * 200 + b"<|endoftext|>")),
    Case("tokenizer: no end-of-text", THEIRS, ["tokenizer={p}/theirs has no", "(eos_token is None)", "use one of ours"],
         theirs(WORDS, None)),
    Case("tokenizer: another format", THEIRS, ["tokenizer={p}/theirs has a tokenizer.json of another format"],
         theirs({}, "<eos>")),
    Case("tokenizer: a word without a token", THEIRS,
         ["error: tokenizer={p}/theirs cannot encode the text", "use another"], theirs(WORDS, "<eos>")),
    Case("no cache", ["data.cache_dir="], ["data.cache_dir='' is empty", "~/.cache/flashgpt/data"]),
    Case("cache of nobody", ["data.cache_dir='~nosuchuser/x'"], ["data.cache_dir=~nosuchuser/x names no home"]),
    Case("text of nobody", ["data.files='~nosuchuser/x'"], ["data.files=~nosuchuser/x names no home"]),
    Case("huge window", ["data.seq_len=4294967296", "train.batch_tokens=4294967296"],
         ["data.seq_len=4294967296", "or less"]),
    Case("endless window", [f"data.seq_len={'9' * 40}"], ["data.seq_len=9999"]),
    Case("too many threads", ["data.num_workers=1000000000"], ["data.num_workers=1000000000 must be at most"]),
    Case("compressed", ["data.files={p}/x.txt.gz"], ["x.txt.gz is not UTF-8"], text(b"\x1f\x8b\x08" * 99, "x.txt.gz")),
    Case("character first held out", [*X, "tokenizer=characters"], ["'é'", "tokenizer=bytes"],
         text(b"abcd\n" * 200 + "é".encode())),
    Case("nothing to learn from", [*X, "tokenizer=characters", "data.validation_fraction=0.999"],
         ["training split is empty"], text(b"abc" * 99)),
    Case("hub without a name", HUB, ["data.source=hub needs data.name=OWNER/NAME"]),
    Case("hub: unknown part", [*HUB, "data.local_dir={p}/set", "data.config=fr"],
         ["data.local_dir={p}/set cannot be read", "'fr' not found", "['en']", "data.config"], lambda place: (
             (place.path / "set").mkdir(), (place.path / "set" / "en.txt").write_text("a\n"),
             (place.path / "set" / "README.md").write_text(
                 "---\nconfigs:\n- config_name: en\n  data_files: en.txt\n---\n"))),
    Case("hub: part of odd signs", [*HUB, "data.local_dir={p}/cache", "data.config='**/*'"],
         ["data.local_dir={p}/cache cannot be read", "data.config"]),
    Case("WikiText from no folder", [*WIKITEXT, "data.local_dir=x"], ["data.local_dir=x is not a folder"]),
    Case("WikiText without a split", [*WIKITEXT, "data.local_dir={p}"], ["no validation split"],
         text(b"x", "train.txt")),
    Case("key of another source", ["data.local_dir=x"],
         ["x is read only with data.source=hub", "or data.local_dir=null"]),
    Case("cached tokens altered", [], ["train-00000.bin was altered", "delete {p}/cache/"], in_cache(
        lambda folder: (folder / "train-00000.bin").write_bytes(b"\0" * (folder / "train-00000.bin").stat().st_size))),
    Case("cached tokens cut", [], ["train-00000.bin has 9 bytes", "delete {p}/cache/"], in_cache(
        lambda folder: os.truncate(folder / "train-00000.bin", 9))),
    Case("manifest cut", [], ["manifest.json is not a manifest", "delete {p}/cache/"], in_cache(
        lambda folder: os.truncate(folder / "manifest.json", 9))),
    Case("manifest gone", [], ["manifest.json is missing", "delete {p}/cache/"], in_cache(
        lambda folder: (folder / "manifest.json").unlink())),
    Case("file in place of tokens", [], ["manifest.json cannot be read", "delete {p}/cache/"], in_cache(
        lambda folder: (shutil.rmtree(folder), folder.write_text("")))),
    Case("prepare: missing", ["data=text", "data.files=x.txt"], ["data.files=x.txt does not exist"],
         program="scripts.prepare"),
    *(Case(f"prepare: files are {files}", ["--config-dir={p}", "data=mine"], ["must be paths; use data.files=a.txt"],
           experiment(f"source: text\nfiles: {files}\n".encode(), "data"), "scripts.prepare")
      for files in ("3", "{a.txt: 1}")),
    Case("prepare: unknown text", ["data=book"], ["data=book", "wikitext2"], program="scripts.prepare"),
    Case("prepare: unknown tokenizer", ["tokenizer=gpt5"], ["tokenizer=gpt5", "gpt2"], program="scripts.prepare"),
]  # fmt: skip

CHECKPOINTS = [
    Case("resume from nothing", ["resume=nowhere"], ["checkpoint nowhere does not exist", "checkpoints/last"]),
    Case("resume from a number", ["resume=3"], ["checkpoint 3 does not exist"]),
    Case("resume from a list", ["resume=[a]"], ["checkpoint [a] does not exist"]),
    Case("resume from a file", ["resume={p}/corpus.txt"], ["{p}/corpus.txt has no checkpoint.json"]),
    Case("resume from another folder", ["resume={p}"], ["{p} is a folder of runs; give one of them", "{p}/first"]),
    Case("resume from a part", ["resume={p}/first/checkpoints"], ["no checkpoint.json; give the run, {p}/first"]),
    Case("link to a deleted one", RESUME, ["{p}/first/checkpoints/last does not exist"],
         lambda place: shutil.rmtree((place.path / LAST).resolve())),
    Case("weights truncated", RESUME, ["model.safetensors is damaged", "use another"], in_checkpoint(
        "model.safetensors", lambda content: content[: len(content) // 2])),
    Case("weights empty", RESUME, ["model.safetensors is damaged"], in_checkpoint("model.safetensors", lambda _: b"")),
    Case("state truncated", RESUME, ["state.pt is damaged"], in_checkpoint("state.pt", lambda content: content[:-99])),
    Case("state junk", RESUME, ["state.pt is damaged"], in_checkpoint("state.pt", lambda _: b"junk" * 99)),
    Case("description truncated", RESUME, ["checkpoint.json is damaged"], in_checkpoint(
        "checkpoint.json", lambda content: content[:99])),
    Case("description altered", RESUME, ["checkpoint.json is damaged"], in_checkpoint(
        "checkpoint.json", lambda content: content.replace(b'"step": 4', b'"step": 3'))),
    Case("description a list", RESUME, ["checkpoint.json is damaged"], in_checkpoint(
        "checkpoint.json", lambda _: b"[]")),
    Case("description not UTF-8", RESUME, ["checkpoint.json is damaged"], in_checkpoint(
        "checkpoint.json", lambda _: b"\xff\xfe")),
    Case("another format", RESUME, ["format 99"], in_checkpoint(
        "checkpoint.json", lambda content: re.sub(rb'"format": \d+', b'"format": 99', content))),
    Case("a file missing", RESUME, ["has no state.pt"], lambda place: (place.path / LAST / "state.pt").unlink()),
    Case("wrong shape", RESUME, ["tensor blocks.0.attention.out.weight is (1, 32)", "(32, 32)"], rewritten(
        weights=first_tensor(lambda tensor: tensor[:1].clone()))),
    Case("wrong dtype", RESUME, ["tensor blocks.0", "torch.int32"], rewritten(weights=first_tensor(torch.Tensor.int))),
    Case("tensor missing", RESUME, ["does not fit the model", "blocks.0.attention.out.weight"], rewritten(
        weights=lambda weights: weights.pop(min(weights)))),
    Case("tensor too many", RESUME, ["does not fit the model", "tensor extra"], rewritten(
        weights=lambda weights: weights.update(extra=torch.zeros(1)))),
    Case("pickle bomb", RESUME, ["state.pt holds more than tensors", "checkpoint of your own"], rewritten(
        state=lambda state: state.update(bomb=Bomb()))),
    *(Case(f"state without {key}", RESUME, ["{p}/first", f"state.pt has no {key}", "use another checkpoint"],
           rewritten(state=without(key))) for key in ("optimizer", "random", "random.numpy", "best_loss")),
    *(Case(f"description without {key}", RESUME, ["{p}/first", f"checkpoint.json has no {key}", "use another"],
           rewritten(meta=without(key))) for key in ("seconds", "settings.optim", "tokenizer.name", "vocab_size")),
    Case("description without step", RESUME, ["checkpoint.json has no step"], crafted(
        "checkpoint.json", lambda content: content.replace(b'"step": ', b'"stop": '))),
    Case("step a word", RESUME, ["checkpoint.json has a str as its step"], crafted(
        "checkpoint.json", lambda content: content.replace(b'"step": 4', b'"step": "4"'))),
    Case("step below zero", RESUME, ["checkpoint.json has -1 as its step", "use another"], crafted(
        "checkpoint.json", lambda content: content.replace(b'"step": 4', b'"step": -1'))),
    Case("step past all counting", RESUME, ["has a number past 2^63 as its step"], crafted(
        "checkpoint.json", lambda content: content.replace(b'"step": 4', b'"step": 4' + b"0" * 400))),
    Case("seconds without end", RESUME, ["checkpoint.json has a number past 2^63 as its seconds", "use another"],
         rewritten(meta=lambda meta: meta.update(seconds=math.inf))),
    Case("description 100,000 deep", RESUME, ["checkpoint.json is damaged", "use another"], crafted(
        "checkpoint.json", lambda content: content.replace(b'"step"', b'"x": ' + DEEP + b', "step"'))),
    Case("guard without keys", RESUME, ["state.pt has no number_check.spikes", "use another"], rewritten(
        state=lambda state: state["number_check"].clear())),
    Case("losses that are words", RESUME, ["state.pt does not fit", "number_check.losses"], rewritten(
        state=lambda state: state["number_check"].update(losses=["a"]))),
    Case("moments of the wrong kind", RESUME, ["state.pt does not fit", "exp_avg of parameter 0 is a float"], rewritten(
        state=lambda state: state["optimizer"][0]["state"][0].update(exp_avg=0.5))),
    Case("moments of another optimizer", RESUME, ["state.pt does not fit", "parameter 0 has x, expected step"],
         rewritten(state=lambda state: state["optimizer"][0]["state"].update({0: {"x": torch.zeros(1)}}))),
    Case("moments below zero", RESUME, ["exp_avg_sq of parameter 0 holds what is below zero", "use another"], rewritten(
        state=lambda state: state["optimizer"][0]["state"][0]["exp_avg_sq"].fill_(-1))),
    Case("moments in one memory", RESUME, ["moments that share their memory", "use another"], rewritten(
        state=lambda state: state["optimizer"][0]["state"][0].update(
            exp_avg=state["optimizer"][0]["state"][0]["exp_avg_sq"]))),
    Case("NumPy's place out of its state", RESUME, ["random.numpy is no state", "use another"], rewritten(
        state=lambda state: state["random"].update(numpy=(*state["random"]["numpy"][:2], 10**6, 0, 0.0)))),
    Case("state a list", RESUME, ["state.pt has a list as its random"], rewritten(
        state=lambda state: state.update(random=[]))),
    Case("state no archive", RESUME, ["state.pt", "use a"], crafted("state.pt", lambda _: b"junk" * 99)),
    Case("state cut, with its manifest", RESUME, ["state.pt cannot be read", "use another"], crafted(
        "state.pt", lambda content: content[:-99])),
    *(Case(f"state's pickle: {name}", RESUME, ["state.pt cannot be read", "use another"], pickled(b"\x80\x02" + code))
      for name, code in (
          ("cut in a number", b"X\1"), ("a storage that is none", b"K\1Q."),
          ("a tensor of a number", b"ctorch._utils\n_rebuild_tensor_v2\n(K\1K\0))\x89}tR."))),
    Case("weights no safetensors", RESUME, ["model.safetensors cannot be read", "use another"], crafted(
        "model.safetensors", lambda _: b"junk" * 99)),
    Case("moments of a smaller model", RESUME, ["state.pt does not fit", "moments of 1 parameters, expected"],
         rewritten(state=lambda state: state["optimizer"][0]["state"].update({7: {}}) or [
             state["optimizer"][0]["state"].pop(key) for key in list(state["optimizer"][0]["state"]) if key != 7])),
    Case("moments of another shape", RESUME, ["state.pt does not fit", "exp_avg of parameter 0 is (3,)"],
         rewritten(state=lambda state: state["optimizer"][0]["state"][0].update(exp_avg=torch.zeros(3)))),
    Case("one optimizer of two", RESUME, ["state.pt does not fit", "1 optimizers, expected 2"],
         rewritten(state=lambda state: state["optimizer"].pop())),
    Case("random state cut", RESUME, ["state.pt does not fit", "use another"],
         rewritten(state=lambda state: state["random"].update(cpu=state["random"]["cpu"][:9]))),
    Case("sample: no tokenizer", SAMPLE, ["checkpoint.json has no tokenizer", "use another"],
         rewritten(meta=without("tokenizer")), "scripts.sample"),
    Case("other layers", [*RESUME, "model.num_layers=3"], ["model.num_layers=2, this run has 3; use 2"]),
    Case("other width", [*RESUME, "model.n_embd=64"], ["model.n_embd=32, this run has 64; use 32"]),
    Case("other optimizer", [*RESUME, "optim=adamw"], ["optim.name=muon, this run has adamw; use muon"]),
    Case("other tokenizer", [*RESUME, "tokenizer=characters"], ["tokenizer=bytes, this run has characters"]),
    Case("other alphabet of equal size", [*RESUME, *X, "tokenizer=characters"], ["use the data it was trained on"],
         lambda place: (text(b"abc\n" * 99)(place), rewritten(meta=lambda meta: meta.update(
             tokenizer={"name": "characters", "alphabet": "\nxyz"}, vocab_size=5))(place))),
    Case("metrics damaged", RESUME, ["first/metrics.jsonl is damaged", "move it away"],
         lambda place: (place.path / "first" / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n')),
    Case("metrics without a step", RESUME, ["first/metrics.jsonl is damaged", "move it away"],
         lambda place: (place.path / "first" / "metrics.jsonl").write_text('{"step": Infinity}\n')),
    Case("sample: no run", ["hardware.device=cpu"], ["no checkpoint under runs/", "checkpoint=PATH"],
         program="scripts.sample"),
    Case("sample: empty folder", ["hardware.device=cpu"], ["no checkpoint under runs/"], empty_folder,
         "scripts.sample"),
    Case("sample: two prompts", [*SAMPLE, "prompt=a\nb", "prompts={p}/corpus.txt"], ["prompt=a b another", "give one"],
         program="scripts.sample"),
    Case("sample: no prompts", [*SAMPLE, "prompts="], ["prompts is empty", "leave it out"], program="scripts.sample"),
    Case("sample: compiled", [*SAMPLE, "hardware.compile=true"], ["hardware.compile=true", "leave it out"],
         program="scripts.sample"),
    Case("sample: a training step's key", [*SAMPLE, "hardware.cuda_graphs=false"],
         ["hardware.cuda_graphs=False is of training steps", "leave it out"], program="scripts.sample"),
    Case("sample: no choice", ["checkpoint="], ["checkpoint is empty", "leave it out"], program="scripts.sample"),
    Case("export: no choice", ["checkpoint=", "folder={p}/new"], ["checkpoint is empty", "leave it out"],
         program="scripts.export_hf"),
    Case("sample: damaged", SAMPLE, ["model.safetensors is damaged"], in_checkpoint(
        "model.safetensors", lambda content: content[:99]), "scripts.sample"),
    Case("sample: model of another version", SAMPLE, ["model.shape, which this version does not know"], rewritten(
        meta=lambda meta: meta["settings"]["model"].update(shape=3)), "scripts.sample"),
    Case("sample: width a word", SAMPLE, ["checkpoint.json has a str as its settings.model.n_embd", "use another"],
         rewritten(meta=lambda meta: meta["settings"]["model"].update(n_embd="32")), "scripts.sample"),
    Case("sample: another vocabulary", SAMPLE, ["vocab_size=7, its tokenizer 257; use another"],
         rewritten(meta=lambda meta: meta.update(vocab_size=7)), "scripts.sample"),
    Case("sample: no alphabet", SAMPLE, ["tokenizer=characters without an alphabet", "use another"],
         rewritten(meta=lambda meta: meta["tokenizer"].update(name="characters")), "scripts.sample"),
    Case("sample: unknown tokenizer", SAMPLE, ["tokenizer=gpt9", "bytes"], rewritten(
        meta=lambda meta: meta["tokenizer"].update(name="gpt9")), "scripts.sample"),
    Case("export: no tokenizer", EXPORT, ["checkpoint.json has no tokenizer", "use another"],
         rewritten(meta=without("tokenizer")), "scripts.export_hf"),
    Case("export: nothing of the data", EXPORT, ["checkpoint.json has no data_fingerprint", "use another"],
         rewritten(meta=without("data_fingerprint")), "scripts.export_hf"),
    Case("export: damaged", EXPORT, ["model.safetensors is damaged"], in_checkpoint(
        "model.safetensors", lambda content: content[:99]), "scripts.export_hf"),
    Case("export: no architecture", EXPORT, ["model.window=5 with model.mlp=gelu", "model.mlp=swiglu"], rewritten(
        weights=lambda weights: weights.update({key: weights[key][:128] for key in weights if "mlp.up" in key}),
        meta=lambda meta: meta["settings"]["model"].update(window=5, mlp="gelu")), "scripts.export_hf"),
    Case("export: folder in use", [EXPORT[0], "folder={p}/first"], ["folder={p}/first exists", "give another"],
         program="scripts.export_hf"),
    Case("a group of its own for one choice", [*SAMPLE, "hardware=cpu"],
         ["hardware=cpu is no value", "hardware.KEY=VALUE"], program="scripts.sample"),
    Case("evidence: a variable that is not set", [""], ["only= begins no name"], program="scripts.evidence"),
    Case("evidence: unknown part", ["speed"], ["only=speed begins no name", "tables"], program="scripts.evidence"),
    Case("attention benchmark: unknown", ["bench.attention=[fast]"], ["bench.attention=fast is not one of flash"],
         program="scripts.bench.attention"),
    *(Case(f"{program} benchmark: {key} far too large", [f"{key}={value}"], [f"{key}={value} must be at most 16777216"],
           program=f"scripts.bench.{program}") for program, key, value in (
        ("attention", "bench.seq_len", f"[{10**20}]"), ("error_budget", "budget.seq_len", 10**11),
        ("loss", "tokens", 10**14), ("loss", "budget_ms", "inf"))),
    Case("huggingface benchmark: sizes without a plus", ["sizes={vocab_size:100}"],
         ["sizes has no such keys yet", "write +sizes={KEY:VALUE}"], program="scripts.bench.huggingface"),
    Case("loss benchmark: no list", ["chunk_tokens=4"], ["chunk_tokens=4", "a list, as [a,b]"],
         program="scripts.bench.loss"),
    Case("error budget: unknown case", ["budget.cases=[windows]"], ["budget.cases=windows is not one of full"],
         program="scripts.bench.error_budget"),
    Case("training benchmark: micro-batch", ["train.micro_batch=5"], ["train.micro_batch=5", "64 sequences"],
         program="scripts.bench.training"),
    Case("sample: temperature", [*SAMPLE, "temperature=-1"], ["temperature=-1.0", "must be 0"],
         program="scripts.sample"),
    Case("compare: no run", ["{p}/cache"], ["{p}/cache has no metrics.jsonl"], program="scripts.compare"),
    Case("sample: a path alone", ["{p}/first"], ["'{p}/first': write key=value, as checkpoint=PATH"],
         program="scripts.sample"),
    Case("train: a path alone", ["{p}/first"], ["'{p}/first': write key=value, as resume=PATH"]),
    Case("compare: a file", ["{p}/first/metrics.jsonl"], ["metrics.jsonl is a file; give the folder of a run"],
         program="scripts.compare"),
    Case("compare: nothing", [], ["runs=[]", "give the folders"], program="scripts.compare"),
    Case("compare: no picture", ["{p}/first", "out="], ["out= names no picture", "use"], program="scripts.compare"),
    Case("compare: no such format", ["{p}/first", "out=x.docx"], ["out=x.docx cannot be drawn", "use x.png"],
         program="scripts.compare"),
    Case("compare: a variable that is not set", [""], ["a run without a name", "give its folder"],
         program="scripts.compare"),
    Case("explain: bytes of no number", ["element=3"], ["element=3 is not one of 1, 2, 4"], program="scripts.explain"),
    Case("parity: of a run", ["resume={p}/first"], ["resume={p}/first goes on with one run", "leave it out"],
         program="scripts.parity"),
    Case("compare: a folder called runs", ["runs"], ["runs has no metrics.jsonl", "give the folder of a run"],
         program="scripts.compare"),
    Case("compare: both ways", ["{p}/first", "runs=[{p}/cache]"], ["{p}/first are given both ways", "leave runs= out"],
         program="scripts.compare"),
    Case("compare: odd name", ["{p}/it's, here", "{p}/first"], ["/it's, here has no metrics.jsonl", "give the folder"],
         program="scripts.compare"),
    Case("compare: unknown flag", ["{p}/first", "--out", "x.png"], ["--out", "key=value"], program="scripts.compare"),
    Case("compare: damaged", ["{p}/first"], ["{p}/first/metrics.jsonl", "damaged"],
         lambda place: (place.path / "first" / "metrics.jsonl").write_text("{\n"), "scripts.compare"),
    Case("compare: odd summary", ["{p}/first"], ["summary.json is damaged", "leave {p}/first out"],
         lambda place: (place.path / "first" / "summary.json").write_text("[]"), "scripts.compare"),
    Case("compare: step 0", ["{p}/first"], ["{p}/first/metrics.jsonl", "damaged"], lambda place: (
        place.path / "first" / "metrics.jsonl").write_text('{"step": 0, "tokens": 0}\n'), "scripts.compare"),
    Case("compare: no step yet", ["{p}/first"], ["{p}/first/metrics.jsonl has no line yet", "first step"],
         lambda place: (place.path / "first" / "metrics.jsonl").write_text("{"), "scripts.compare"),
    Case("compare: empty config.yaml", ["{p}/first", "{p}/first"], ["{p}/first/config.yaml is damaged", "delete it"],
         lambda place: (place.path / "first" / "config.yaml").write_text(""), "scripts.compare"),
    Case("compare: picture below a file", ["{p}/first", "out={p}/corpus.txt/x.png"], ["out={p}/corpus.txt/x"],
         program="scripts.compare"),
]  # fmt: skip

ENVIRONMENTS = [
    Case("no GPU", ["hardware.device=cuda"], ["hardware.device=cuda", "no CUDA GPU", "hardware.device=cpu"], no_gpu),
    Case("no such GPU", ["hardware.device=cuda:7"], ["hardware.device=cuda:7", "use hardware.device=cuda"], old_gpu),
    Case("no GPU 256", ["hardware.device=cuda:256"], ["hardware.device=cuda:256", "PyTorch sees 1 GPU;"], old_gpu),
    Case("no GPU 10^11", ["hardware.device=cuda:99999999999"], ["hardware.device=cuda:99", "sees 1 GPU;"], old_gpu),
    Case("GPU with a zero", ["hardware.device=cuda:00"], ["hardware.device=cuda:00", "cuda:N"], old_gpu),
    Case("GPU that is none", ["hardware.device=cuda:x"], ["hardware.device=cuda:x", "cuda:N"]),
    Case("no such device", ["hardware.device=tpu"], ["hardware.device=tpu", "cpu"]),
    Case("no bfloat16", ["hardware.device=cuda", "hardware.dtype=bfloat16"], ["Tesla T4", "float32"], old_gpu),
    Case("no such dtype", ["hardware.dtype=int8"], ["hardware.dtype=int8", "bfloat16"]),
    Case("a million threads", ["hardware.num_threads=1000000"], ["hardware.num_threads=1000000", "1024"]),
    Case("no C++ compiler", ["hardware.compile=true"],
         ["hardware.compile=true, and there is no C++ compiler (nothing++)", "; unset CXX, or use hardware.compile"],
         environment(CXX="nothing++")),
    Case("no headers of Python", ["hardware.compile=true"], ["finds no Python.h; install python3.", "-dev, or use"],
         no_headers),
    Case("flash without a GPU", ["model.attention=flash"], ["model.attention=flash", "attention=sdpa"],
         no_interpreter),
    Case("sdpa cannot mask documents", ["data.document_mask=true"], ["varlen", "attention=flash"]),
    Case("cache is a file", ["data.cache_dir={p}/corpus.txt"], ["data.cache_dir={p}/corpus.txt", "FOLDER"]),
    Case("cache below a file", ["data.cache_dir={p}/corpus.txt/x"], ["data.cache_dir=", "Not a directory"]),
    Case("cache where nobody writes", ["data.cache_dir=/proc/x"], ["data.cache_dir=/proc/x cannot be written"]),
    Case("full disk under the cache", ["data.cache_dir={p}/new"], ["data.cache_dir={p}/new", "No space left"],
         full_disk),
    Case("GPT-2's vocabulary out of reach", ["tokenizer=gpt2"], ["tokenizer=gpt2", "TIKTOKEN_CACHE_DIR"], no_network),
    Case("wandb out of reach", ["logger.wandb=online"], ["logger.wandb=online", "127.0.0.1:9", "wandb=offline"],
         logged_in()),
    Case("wandb out of reach, by environment", ["logger.wandb=auto"], ["WANDB_MODE=online", "127.0.0.1:9"],
         logged_in(WANDB_MODE="online")),
    Case("wandb without a login", ["logger.wandb=online"], ["no login was found", "wandb login"], no_login),
    Case("wandb mode that is none", ["logger.wandb=maybe"], ["logger.wandb=maybe", "offline"]),
    Case("WANDB_MODE that is none", ["logger.wandb=auto"], ["WANDB_MODE=maybe", "offline"],
         environment(WANDB_MODE="maybe")),
]  # fmt: skip

CASES = COMMAND_LINES + CONFIGURATIONS + DATA + CHECKPOINTS + ENVIRONMENTS


# --- running them


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with a text, its tokens and a run of four steps."""
    path = tmp_path_factory.mktemp("finished")
    (path / "corpus.txt").write_text(CORPUS)
    arguments = [*Case("", [], []).command_line(path), f"hydra.run.dir={path / 'first'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *arguments])
        importlib.import_module("train").main()
    return path


@pytest.fixture
def place(finished, tmp_path, monkeypatch) -> Place:
    path = tmp_path / "place"
    shutil.copytree(finished, path, symlinks=True)
    monkeypatch.chdir(path)
    return Place(path, monkeypatch)


def contents(path: Path) -> dict[str, bytes | str]:
    """Every file and link below `path`, but for tokenized texts that were added."""
    return {
        str(file.relative_to(path)): os.readlink(file) if file.is_symlink() else file.read_bytes()
        for file in path.rglob("*")
        if file.is_symlink() or file.is_file()
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_one_line_and_nothing_is_lost(case, place, capsys):
    if case.setup:
        case.setup(place)
    before = contents(place.path)
    outcome = told(case.program, case.command_line(place.path), place.monkeypatch, capsys)
    place.monkeypatch.undo()  # what was spoiled for the program must not spoil the checks

    line = outcome.error.strip()
    assert outcome.code not in (0, None), outcome
    assert line.startswith("error: "), outcome
    assert len(line.splitlines()) == 1
    assert "Traceback" not in outcome.out + line
    for words in case.says:
        assert words.replace("{p}", str(place.path)) in line, line
    assert REMEDY.search(line), f"no remedy in: {line}"

    after = contents(place.path)
    assert {name: after.get(name) for name in before} == before
    # what may appear: tokenized text, and Hydra's note of a sweep
    assert not {name for name in after.keys() - before.keys() if not re.match(r"cache/[^.]|.*/multirun\.yaml", name)}
    assert not [path for path in place.path.glob("runs/*/*/*") if path.name != "multirun.yaml"]


def test_there_are_enough():
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


# --- a traceback for those who ask; what is refused next to what is not


@pytest.mark.parametrize(
    ("arguments", "cause", "says"),
    [
        (["model.nope=1"], "ConfigCompositionException", "model.nope is not a known key"),
        (["model.num_layers=three"], "ValidationError", "model.num_layers=three has the wrong type"),
        (["data.files=missing.txt"], "ValueError", "data.files=missing.txt"),
    ],
)
def test_a_traceback_for_those_who_ask_and_the_line_below_it(arguments, cause, says, place, monkeypatch, capsys):
    """The variable is Hydra's, so that many have it set: the line and the exit code stay."""
    monkeypatch.setattr(monkeypatch, "delenv", lambda name, raising: monkeypatch.setenv(name, "1"))
    outcome = told("train", Case("", arguments, []).command_line(place.path), monkeypatch, capsys)
    assert outcome.code == 2
    *shown, line = outcome.error.splitlines()
    assert shown[0] == "Traceback (most recent call last):"
    assert any(re.match(rf"(\w+\.)*{cause}: ", text) for text in shown)
    assert line.startswith(f"error: {says}")


def test_each_refused_run_of_a_sweep_is_named_and_the_others_run(place, monkeypatch, capsys):
    arguments = ["-m", *Case("", ["train.steps=0,2,-1"], []).command_line(place.path)]
    outcome = told("train", arguments, monkeypatch, capsys)
    assert outcome.code == 2
    said = [f"train.steps={n} must be at least 1" for n in (0, -1)]
    assert outcome.error.splitlines() == [
        *(f"error: {line}" for line in said), *(f"no run of {line.split()[0]}: {line}" for line in said)
    ]  # fmt: skip
    (summary,) = place.path.glob("runs/*/*/*/summary.json")
    assert json.loads(summary.read_text())["steps"] == 2


def test_wandb_out_of_reach_is_offline_where_nobody_asked_for_online(place):
    no_login(place)
    assert wandb_mode(LoggerConfig()) == ("offline", "auto: no login was found")
    logged_in()(place)
    mode, why = wandb_mode(LoggerConfig())
    assert mode == "offline"
    assert why.startswith("auto: http://127.0.0.1:9 does not answer")


def test_a_torn_last_line_of_metrics_is_dropped(place, monkeypatch, capsys):
    metrics = place.path / "first" / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + '{"step": 5, "lo')
    assert told("train", Case("", RESUME, []).command_line(place.path), monkeypatch, capsys).code == 0
    assert metrics.read_text().startswith(whole)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()][-1] == 9


# --- what only a process of its own can show


def test_a_hub_out_of_reach(tmp_path, quick_python):
    """`datasets` reads its addresses when it is imported."""
    addresses = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    done = subprocess.run(
        [quick_python, str(ROOT / "train.py"), "data=wikitext2", cache, "logger.wandb=disabled"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"} | addresses,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: Salesforce/wikitext wikitext-2-raw-v1 cannot be had from the Hugging Face hub")
    assert "data.local_dir=FOLDER" in line
    assert not list((tmp_path / "cache").iterdir())


def test_a_user_without_a_home_has_no_login(monkeypatch):
    """A number in a container, without HOME: expanding ~ raises."""

    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert wandb_mode(LoggerConfig()) == ("offline", "auto: no login was found")
