"""Small runs for tests: settings composed as the command line composes them, and what a run left, by its bits."""

import copy
import hashlib
import importlib
import json
import os
import pickle
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiktoken.registry
import torch
from hydra import compose, initialize_config_module
from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf

from conf.program import register, settings_from
from conf.schema import Settings
from model import ATTENTION
from training import memory
from training.checkpoint import Checkpoint

CORPUS = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs.\n" * 60

# a GPT small enough that a step takes milliseconds
SMALL = (
    "model.num_layers=2",
    "model.num_heads=2",
    "model.n_embd=32",
    "model.attention=sdpa",
    "data.seq_len=32",
    "train.batch_tokens=256",
    "optim.warmup_steps=1",
    "train.eval_windows=4",
    "train.sample_tokens=0",
    "logger.wandb=disabled",
    "hardware.device=cpu",
    "hardware.dtype=float32",  # whatever units this CPU has
)


class Forecasts(dict):
    """What steps hold, in files: the many processes of the suite ask of the same few dozen steps."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def _file(self, step: str) -> Path:
        return self._folder / hashlib.sha256(step.encode()).hexdigest()

    def __contains__(self, step: str) -> bool:
        return super().__contains__(step) or self._file(step).exists()

    def __missing__(self, step: str) -> dict[str, Counter]:
        held = pickle.loads(self._file(step).read_bytes())
        super().__setitem__(step, held)
        return held

    def __setitem__(self, step: str, held: dict[str, Counter]) -> None:
        super().__setitem__(step, held)
        written = self._file(step).with_suffix(f".{os.getpid()}")
        written.write_bytes(pickle.dumps(held))
        written.rename(self._file(step))


if "FORECASTS" in os.environ:  # tests/conftest.py has made it
    memory._PEAKS = Forecasts(Path(os.environ["FORECASTS"]))


def settings(*overrides: str, schema: type = Settings, config: str = "config", experiment: str | None = "quickstart"):
    """The settings that a program of this schema and experiment would run; by default `python train.py <overrides>`."""
    if config == "config" and experiment and not any(override.startswith("experiment=") for override in overrides):
        overrides = (*overrides, f"experiment={experiment}")
    return copy.deepcopy(composed(overrides, schema, config))  # tests write into theirs


@cache
def composed(overrides: tuple[str, ...], schema: type, config: str):
    register(schema)
    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose(config, overrides=list(overrides))
    OmegaConf.set_struct(cfg, False)
    return settings_from(cfg, schema)


def settings_of(main, *overrides: str):
    """The settings with which the command line `overrides` would call the `main` of a program."""
    config, schema, defaults = main.front
    keys = {override.partition("=")[0] for override in overrides}
    own = [default for default in defaults if default.partition("=")[0] not in keys and "hydra." not in default]
    return settings(*own, *overrides, schema=schema, config=config, experiment=None)


def small_run(tmp_path: Path, *overrides: str) -> Settings:
    """A run on a corpus of a few kilobytes, with its cache under `tmp_path`."""
    corpus = tmp_path / "corpus.txt"
    if not corpus.exists():
        corpus.write_text(CORPUS)
    on_gpu = any(override.startswith("hardware.device=") for override in overrides)
    dtype = ("hardware.dtype=auto",) if on_gpu else ()
    made = settings("data=text", "data.files=corpus.txt", *SMALL, *dtype, *overrides)
    if made.data.files == ["corpus.txt"]:
        made.data.files = [str(corpus)]
    if not any(override.startswith("data.cache_dir=") for override in overrides):
        made.data.cache_dir = str(tmp_path / "cache")
    return made


def digest(value: Any) -> str:
    """SHA-256 of nested containers and tensors, by their bits."""
    if isinstance(value, torch.Tensor):
        own = (
            str(value.dtype)
            + str(tuple(value.shape))
            + hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
        )
    elif isinstance(value, dict):
        own = "{" + ",".join(f"{key}:{digest(value[key])}" for key in sorted(value, key=str)) + "}"
    elif isinstance(value, list | tuple):
        own = "[" + ",".join(map(digest, value)) + "]"
    else:
        own = repr(value)
    return hashlib.sha256(own.encode()).hexdigest()


def contents(checkpoint: Checkpoint) -> str:
    """One digest of all that a run goes on with: weights and state."""
    weights = hashlib.sha256((checkpoint.path / "model.safetensors").read_bytes()).hexdigest()
    return weights + digest(checkpoint.load_state())


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    error: str


def told(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys) -> Outcome:
    """Run a program's `main` as its command line would: without the seconds that a new interpreter takes."""
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    # Hydra composes everything twice, first for `hydra.mode`, which is not set here: half the time of these tests
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)
    capsys.readouterr()
    code: object = 0
    try:
        code = importlib.import_module(program).main()
    except SystemExit as stopped:
        code = stopped.code
    captured = capsys.readouterr()
    if isinstance(code, str):  # what the interpreter does with it
        return Outcome(1, captured.out, captured.err + code)
    return Outcome(int(code or 0), captured.out, captured.err)  # type: ignore[call-overload]


CLOCK = ("seconds", "tokens_per_second", "mfu", "mfu_full", "peak_memory_gib")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """What a run logged, without what a clock said."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCK} for line in lines]


def without_network(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """No name can be resolved, and GPT-2's vocabulary is not cached."""

    def fail(*_, **__):
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    patch.setattr(socket, "getaddrinfo", fail)
    patch.setattr(tiktoken.registry, "ENCODINGS", {})
    patch.setenv("TIKTOKEN_CACHE_DIR", str(folder / "vocabulary"))


@contextmanager
def replaced(name: str, function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """For the duration, models that are built with attention=name call `function`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ATTENTION, name, function)
        yield
