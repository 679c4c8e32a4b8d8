"""What `scripts.doctor` looks at: each function answers one question about a run that has not begun.

A check returns a Finding and raises nothing for what a user can mend; nothing is written but a file that is deleted at
once, where a folder must be writable.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import tomllib
from dataclasses import asdict, dataclass, field
from importlib import metadata
from math import pi
from pathlib import Path
from typing import Any

import tiktoken
import torch
from packaging.requirements import Requirement

from conf.schema import Settings
from data import build_tokenizer, open_dataset, tokenizer_from_state, tokenizer_state
from data.dataset import Dataset, digest, locate
from data.hub import within_reach
from kernels import unsupported_reason
from kernels.selftest import self_test
from model import ATTENTION, GPTConfig, resolve_attention
from model.config import FLASH_HEAD_DIMS, resolve_loss, round_up
from model.gpt import VOCAB_MULTIPLE, Block
from scripts.causality import probe
from training import resume as resuming
from training.checkpoint import open_checkpoint
from training.hardware import Hardware, set_up
from training.memory import plan
from training.runlog import wandb_mode

ROOT = Path(__file__).resolve().parent.parent
OK, NOTE, FIX = "ok", "note", "FIX"  # fine; worth knowing; the run would not start, or would be wrong
CROWDED_BYTES = 2**30  # so much of a GPU's memory in use by others is more than a desktop takes


@dataclass(frozen=True)
class Finding:
    """The answer to one question: `status` is ok, note or FIX, `fix` what to type or do about it."""

    name: str
    status: str
    text: str
    fix: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def refused(name: str, error: Exception) -> Finding:
    """A run's own refusal, 'what; remedy', as a finding."""
    what, _, remedy = str(error).rpartition("; ")
    return Finding(name, FIX, what or remedy, remedy if what else "correct it")


# --- the machine


def installed_gpus() -> list[dict[str, str]]:
    """What the driver knows, whatever PyTorch sees: name, driver, memory in MiB; [] without a driver."""
    keys = ("name", "driver_version", "memory.total", "memory.used")
    command = ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(keys, line.split(", "), strict=True)) for line in lines]


def gpu() -> Finding:
    installed = installed_gpus()
    if not torch.cuda.is_available():
        if not installed:
            return Finding("gpu", OK, f"none; {os.cpu_count()} CPU cores")
        text = f"{installed[0]['name']} (driver {installed[0]['driver_version']}), which PyTorch does not see"
        if torch.version.cuda is None:
            return Finding("gpu", FIX, f"{text}: this PyTorch was built for the CPU", "uv sync, for the CUDA build")
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            hidden = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides it"
            return Finding("gpu", FIX, f"{text}: {hidden}", "unset CUDA_VISIBLE_DEVICES")
        return Finding("gpu", FIX, text, f"install a driver for CUDA {torch.version.cuda} or newer")
    properties = torch.cuda.get_device_properties(0)
    driver = installed[0]["driver_version"] if installed else "unknown"
    free, total = torch.cuda.mem_get_info(0)
    text = (
        f"{torch.cuda.device_count()} x {properties.name}, capability {properties.major}.{properties.minor}, "
        f"{total / 2**30:.1f} GiB, driver {driver}"
    )
    facts = {"name": properties.name, "driver": driver, "free_bytes": free, "total_bytes": total}
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y"):
        return Finding("gpu", FIX, "TRITON_INTERPRET is set: kernels would run on the CPU", "unset TRITON_INTERPRET")
    if total - free > CROWDED_BYTES:
        held = f"; {(total - free) / 2**30:.1f} GiB of it are held by others"
        return Finding("gpu", NOTE, text + held, "end them, or hardware.device=cuda:N for another GPU", facts)
    return Finding("gpu", OK, text, facts=facts)


def versions() -> Finding:
    """Installed packages beside what pyproject.toml asks for."""
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found, wrong = {"python": platform.python_version()}, []
    for requirement in map(Requirement, pins):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            found[requirement.name] = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement} is not installed")
            continue
        if not requirement.specifier.contains(found[requirement.name].split("+")[0], prereleases=True):
            wrong.append(f"{requirement.name} {found[requirement.name]} is not {requirement.specifier}")
    shown = ", ".join(f"{name} {found[name]}" for name in ("python", "torch", "triton", "numpy") if name in found)
    shadows = {d.metadata["Name"].lower() for d in metadata.distributions()} & {"kernels", "flashgpt"}
    if shadows:
        name = min(shadows)
        return Finding(
            "versions", FIX, f"an installed package is called {name}, as ours is", f"uv pip uninstall {name}"
        )
    if wrong:
        return Finding("versions", FIX, f"{'; '.join(wrong)} (python {found['python']})", "uv sync", found)
    return Finding("versions", OK, shown, facts=found)


def hardware(settings: Settings) -> tuple[Finding, Hardware | None]:
    try:
        chosen = set_up(settings.hardware)
    except ValueError as error:
        return refused("hardware", error), None
    threads, cores = settings.hardware.num_threads, os.cpu_count() or 1
    if threads is not None and threads > cores:
        text = f"hardware.num_threads={threads} on {cores} cores: threads would wait for each other"
        return Finding("hardware", NOTE, text, f"hardware.num_threads={cores}"), chosen
    compiler = os.environ.get("CXX") or "g++"
    if chosen.compile and chosen.device.type == "cpu" and not shutil.which(compiler):
        text = f"hardware.compile=true, and there is no C++ compiler ({compiler})"
        return Finding("hardware", FIX, text, "hardware.compile=false, or install g++"), chosen
    return Finding("hardware", OK, chosen.description, facts={"description": chosen.description}), chosen


# --- kernels and model


def attention(settings: Settings, chosen: Hardware) -> tuple[Finding, str | None]:
    """What the run's attention becomes, and what `auto` would; the name is None where it cannot run."""
    config = settings.model
    call = (chosen.device, chosen.dtype, config.head_dim, config.attention_features(settings.data.document_mask))
    automatic = "{} ({})".format(*resolve_attention("auto", *call))
    try:
        name, reason = resolve_attention(config.attention, *call)
    except ValueError as error:
        found = refused("attention", error)
        return Finding("attention", FIX, found.text, f"{found.fix}, or model.attention=auto: {automatic}"), None
    shown = f"{name} ({reason})" + ("" if config.attention == "auto" else f"; auto would be {automatic}")
    return Finding("attention", OK, shown, facts={"name": name, "reason": reason}), name


def kernels(settings: Settings, chosen: Hardware, attention: str | None) -> Finding:
    """A self-test of flash attention, whatever the run's `attention`."""
    fix = "model.attention=sdpa until this is mended; `uv sync` brings the versions that were tested"
    # on a GPU the rotary and the loss kernels need what this one needs
    bad = FIX if attention == "flash" or chosen.device.type == "cuda" else NOTE
    smallest, largest = FLASH_HEAD_DIMS
    head_dim = min(max(settings.model.head_dim, smallest), largest)
    if attention != "flash" and (obstacle := unsupported_reason(chosen.device, torch.float32, head_dim)):
        return Finding("kernels", NOTE, f"flash attention is not for this machine: {obstacle}", "model.attention=sdpa")
    try:
        results = self_test(chosen.device, head_dim)
    except Exception as error:  # a compiler, a driver, a GPU: they fail in any way they like, and the page goes on
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return Finding("kernels", bad, f"the self-test stopped ({type(error).__name__}: {first_line})", fix)
    seconds = sum(result.seconds for result in results)
    facts = {"seconds": seconds, "results": [asdict(result) for result in results]}
    faults = [result.fault for result in results if result.fault]
    if faults:
        return Finding("kernels", bad, "; ".join(faults), fix, facts)
    where = "" if chosen.device.type == "cuda" else " in Triton's interpreter"
    errors = ", ".join(f"{result.dtype} {result.ratio:.2f}" for result in results)
    text = f"forward and backward are right{where}, {seconds:.1f} s; error over the plain formula's: {errors}"
    return Finding("kernels", OK, text, facts=facts)


def causality(settings: Settings, chosen: Hardware, name: str) -> Finding:
    faults = probe(settings.model, chosen)
    found = {part: fault for part, fault in faults.items() if fault}
    if found:
        text = "; ".join(f"{part}: {fault}" for part, fault in found.items())
        return Finding("causality", FIX, text, f"do not train with model.attention={name}: its mask is wrong", faults)
    text = f"no token sees what it must not: {', '.join(faults)}"
    return Finding("causality", OK, text, facts=faults)


def model(settings: Settings, vocab_size: int | None) -> tuple[Finding, int | None]:
    """Size, and switches that would do nothing or too little; the number of parameters."""
    config, seq_len = settings.model, settings.data.seq_len
    parameters, shown = None, f"{config.num_layers} layers of {config.n_embd}"
    if vocab_size is not None:
        parameters = num_parameters(config, vocab_size)
        shown = f"{parameters:,} parameters, {shown}, vocabulary {vocab_size:,}"
    facts = {"parameters": parameters}
    period = 2 * pi * config.rope_base ** ((config.head_dim - 2) / config.head_dim)
    if config.window is not None and config.window >= seq_len:
        text = f"model.window={config.window} hides nothing at data.seq_len={seq_len}"
        return Finding("model", NOTE, f"{shown}; {text}", "leave model.window out", facts), parameters
    if config.head_dim > 2 and period < seq_len:
        least = (seq_len / (2 * pi)) ** (config.head_dim / (config.head_dim - 2))
        text = f"the slowest rotary pair turns once in {period:,.0f} tokens, fewer than data.seq_len={seq_len}"
        return Finding("model", NOTE, f"{shown}; {text}", f"model.rope_base={least:.0f} or more", facts), parameters
    return Finding("model", OK, shown, facts=facts), parameters


def num_parameters(config: GPTConfig, vocab_size: int) -> int:
    """What GPT(config, vocab_size, ...).num_parameters() would say, without its memory."""
    with torch.device("meta"):  # shapes only
        block = Block(config, 0, ATTENTION["naive"])
    table = round_up(vocab_size, VOCAB_MULTIPLE) * config.n_embd
    in_a_layer = sum(weight.numel() for weight in block.parameters())
    return config.num_layers * in_a_layer + (1 if config.tie_embeddings else 2) * table


def memory(settings: Settings, vocab_size: int, chosen: Hardware) -> Finding:
    """A training step's forecast beside what is free; attention must be resolved."""
    settings.model.loss, _ = resolve_loss(settings.model.loss, chosen.device.type)
    try:
        planned = plan(settings, settings.model, chosen, vocab_size)
    except ValueError as error:
        return refused("memory", error)
    text = f"micro-batches of {planned.micro_batch}; {planned}"
    return Finding("memory", OK, text, facts={"forecast_bytes": planned.peak, "free_bytes": planned.free})


# --- data


def data(settings: Settings) -> tuple[Finding, Dataset | None]:
    """The text's fingerprint, and its tokens where they are in the cache: nothing is tokenized here."""
    config = settings.data
    try:
        _, identity, path = locate(config, settings.tokenizer)
        fingerprint = digest(identity)
        if path.exists():
            return _tokens(settings, open_dataset(config, settings.tokenizer, prepare=False))
    except ValueError as error:
        return refused("data", error), None
    facts = {"fingerprint": fingerprint, "tokenized": False}
    text = f"{path.name} is not tokenized yet; the run will do it"
    if obstacle := not_writable(path.parent):
        return Finding("data", FIX, f"data.cache_dir={path.parent} {obstacle}", "data.cache_dir=FOLDER", facts), None
    size = sum(file["bytes"] for file in identity.get("files", ())) if config.source == "text" else None
    if size is not None and size * config.validation_fraction < config.seq_len:
        # no tokenizer makes more tokens than there are bytes
        text = f"data.seq_len={config.seq_len} is longer than the validation split of a text of {size:,} bytes"
        longest = int(size * config.validation_fraction) - 1
        fix = f"data.seq_len={longest} or less" if longest > 0 else "a longer text"
        return Finding("data", FIX, text, fix, facts), None
    if "hub" in identity and not within_reach():
        text += ", and the Hugging Face hub does not answer; its cache may hold the text"
        return Finding(
            "data", NOTE, text, "without a network: data.local_dir=FOLDER with WikiText's files", facts
        ), None
    return Finding("data", OK, f"{text} (fingerprint {fingerprint[:12]})", facts=facts), None


def _tokens(settings: Settings, dataset: Dataset) -> tuple[Finding, Dataset]:
    """What is known of a text that is in the cache, its checksums compared."""
    tokens = settings.train.steps * settings.train.batch_tokens
    epochs = tokens / len(dataset.train)
    text = (
        f"{len(dataset.train):,} tokens to learn from, {len(dataset.validation):,} held out; the run is {epochs:.1f} "
        f"epochs (fingerprint {dataset.fingerprint[:12]})"
    )
    facts = {"fingerprint": dataset.fingerprint, "tokenized": True, "epochs": epochs, "path": str(dataset.path)}
    documents = dataset.manifest["splits"]["train"]["documents"]
    if settings.data.document_mask and documents == 1:
        text = f"data.document_mask=true, and the text is a single document; {text}"
        return Finding(
            "data", NOTE, text, "leave data.document_mask out, or give a file for each document", facts
        ), dataset
    return Finding("data", OK, text, facts=facts), dataset


def tokenizer(settings: Settings, dataset: Dataset | None) -> tuple[Finding, int | None]:
    """Its vocabulary and a fingerprint of it; the number of its tokens."""
    name = settings.tokenizer.name
    if dataset is None and name == "characters":
        return Finding("tokenizer", OK, "characters; those of the training split, not tokenized yet"), None
    try:
        encoding = tokenizer_from_state(tokenizer_state(dataset.tokenizer)) if dataset else build_tokenizer(name)
    except ValueError as error:
        return refused("tokenizer", error), None
    mark = fingerprint_of(encoding)
    text = f"{name}, {encoding.n_vocab:,} tokens (fingerprint {mark[:12]})"
    return Finding("tokenizer", OK, text, facts={"fingerprint": mark, "vocab_size": encoding.n_vocab}), encoding.n_vocab


def fingerprint_of(encoding: tiktoken.Encoding) -> str:
    """SHA-256 of every token's bytes in the order of their ids."""
    content = hashlib.sha256()
    for token in range(encoding.n_vocab):
        try:
            raw = encoding.decode_single_token_bytes(token)
        except KeyError:  # an id that stands for nothing
            raw = b""
        content.update(len(raw).to_bytes(4, "little") + raw)
    return content.hexdigest()


# --- what the run writes


def disk(settings: Settings, folder: Path, parameters: int | None) -> Finding:
    """Room for the checkpoints that will lie beside each other, in the run's folder."""
    if obstacle := not_writable(folder):
        return Finding("disk", FIX, f"{folder} {obstacle}", "hydra.run.dir=FOLDER")
    free = shutil.disk_usage(existing(folder)).free
    if parameters is None:
        return Finding("disk", OK, f"{free / 1e9:,.1f} GB free in {folder}", facts={"free_bytes": free})
    train = settings.train
    # weights and AdamW's two moments in float32, an upper bound for Muon's one
    size = 12 * parameters
    milestones = train.steps // train.keep_every if train.keep_every and train.save_every else 0
    saves = train.steps // train.save_every + 2 if train.save_every else 2  # the last and the best are always saved
    count = min(train.keep_last + 1, saves) + milestones + 1  # and one that is being written
    facts = {"free_bytes": free, "checkpoint_bytes": size, "checkpoints": count, "needed_bytes": size * count}
    text = (
        f"{count} checkpoints of at most {size / 1e9:,.2f} GB are {size * count / 1e9:,.2f} GB; {free / 1e9:,.1f} GB "
        f"free in {folder}"
    )
    if size * count > free:
        fix = "train.keep_last=1 train.keep_every=0, or hydra.run.dir=FOLDER on another disk"
        return Finding("disk", FIX, text, fix, facts)
    return Finding("disk", OK, text, facts=facts)


def wandb(settings: Settings) -> Finding:
    try:
        mode, why = wandb_mode(settings.logger)
    except ValueError as error:
        return refused("wandb", error)
    return Finding("wandb", OK, f"{mode} ({why})", facts={"mode": mode, "why": why})


def resume(settings: Settings, dataset: Dataset | None) -> Finding | None:
    """Whether the checkpoint that is named is whole and fits; None where none is named."""
    if settings.resume in (None, "auto"):
        return None
    try:
        checkpoint = open_checkpoint(settings.resume)
        if dataset is not None:
            state = tokenizer_state(dataset.tokenizer)
            resuming.refuse_unless_same(checkpoint, asdict(settings), state, dataset.vocab_size)
    except ValueError as error:
        return refused("resume", error)
    return Finding("resume", OK, f"{checkpoint.path} after {checkpoint.step} steps", facts={"step": checkpoint.step})


def not_writable(folder: Path) -> str | None:
    """Why nothing can be written there, or None."""
    place = existing(folder)
    if not place.is_dir():
        return f"cannot be made: {place} is a file"
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"cannot be written ({error.strerror})"


def existing(folder: Path) -> Path:
    """`folder`, or the nearest of its parents that exists."""
    folder = Path(os.path.abspath(folder.expanduser()))
    return next(place for place in (folder, *folder.parents) if place.exists())
