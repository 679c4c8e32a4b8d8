"""Every configuration composes; every mistake ends in one line that names key, value and remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench_training import BenchSettings
from scripts.sample import SampleSettings
from tests.runs import settings

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = sorted(p.stem for p in (ROOT / "conf" / "experiment").glob("*.yaml"))


def choices(group: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / "conf" / group).glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_composes(experiment):
    composed = settings(
        f"experiment={experiment}", "data.files=x.txt" if experiment == "shakespeare" else "train.seed=0"
    )
    assert composed.train.batch_tokens % composed.data.seq_len == 0


@pytest.mark.parametrize(
    ("group", "choice"),
    [(group, choice) for group in ("model", "tokenizer", "optim", "hardware", "logger") for choice in choices(group)],
)
def test_group_choice_composes(group, choice):
    settings(f"{group}={choice}")


def test_long_context_is_what_it_says():
    composed = settings("experiment=long_context")
    assert composed.data.seq_len == 32768
    assert composed.model.attention == "flash"
    assert composed.model.activation_checkpointing != "none"


def test_command_line_wins_over_experiment():
    assert settings("experiment=long_context", "data.seq_len=64", "train.batch_tokens=128").data.seq_len == 64
    assert settings("experiment=long_context", "data=text", "data.files=a.txt").data.source == "text"


def test_other_programs_compose():
    assert settings(schema=BenchSettings, config="bench_training").model.n_embd == 768
    assert settings("num_samples=3", schema=SampleSettings, config="sample").num_samples == 3


MISTAKES = [
    # command line                                  what the one line must say
    (["model.num_layerz=3"], ["model.num_layerz", "model.num_layers"]),
    (["modle=tiny"], ["modle", "model"]),
    (["model=tinny"], ["model=tinny", "tiny", "gpt2_124m"]),
    (["experiment=quikstart"], ["experiment=quikstart", "quickstart"]),
    (["+model.n_layer=3"], ["model.n_layer", "not a known key"]),
    (["model.num_layers=three"], ["model.num_layers=three", "whole number"]),
    (["model.tie_embeddings=perhaps"], ["model.tie_embeddings=perhaps", "true or false"]),
    (["optim.lr=fast"], ["optim.lr=fast", "a number"]),
    (["optim.lr=-1"], ["optim.lr=-1"]),
    (["optim.schedule=linear"], ["optim.schedule=linear", "cosine"]),
    (["optim.beta2=1.0"], ["optim.beta2=1.0", "[0, 1)"]),
    (["optim.warmup_steps=100000"], ["optim.warmup_steps=100000", "train.steps"]),
    (["model.n_embd=130"], ["model.n_embd=130", "num_heads"]),
    (["model.num_kv_heads=3"], ["num_kv_heads", "3"]),
    (["model.attention=fast"], ["model.attention=fast", "flash"]),
    (["train.steps=0"], ["train.steps=0", "at least 1"]),
    (["train.batch_tokens=1000"], ["train.batch_tokens=1000", "data.seq_len=128", "1024"]),
    (["train.micro_batch=5"], ["train.micro_batch=5", "32 sequences"]),
    (["hardware.device=tpu"], ["hardware.device=tpu", "cpu"]),
    (["hardware.dtype=int8"], ["hardware.dtype=int8", "bfloat16"]),
    (["logger.wandb=maybe"], ["logger.wandb=maybe", "offline"]),
    (["data.seq_len=1000000", "train.batch_tokens=1000000"], ["data.seq_len", "1000000"]),
    (["data=text"], ["data.files"]),
    (["data=text", "data.files=missing.txt"], ["missing.txt"]),
    (["resume=nowhere"], ["nowhere", "does not exist"]),
    (["train.steps 5"], ["train.steps 5", "key=value"]),
]


def run(*arguments: str, cwd: Path = ROOT, module: str | None = None) -> subprocess.CompletedProcess:
    program = ["-m", module] if module else [str(ROOT / "train.py")]
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"},
    )


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_mistake_is_one_line(arguments, says, tmp_path, capsys, monkeypatch):
    """In this process: the same entry point as the command line, without the seconds a new interpreter takes."""
    from train import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "logger.wandb=disabled", *arguments])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main()
    error = capsys.readouterr().err.strip()
    assert stopped.value.code == 2
    assert len(error.splitlines()) == 1
    assert error.startswith("error: ")
    assert "Traceback" not in error
    for words in says:
        assert words in error
    assert not list(tmp_path.glob("runs/*/*")), "a refused run must leave no folder behind"


def test_typo_inside_an_experiment_file(tmp_path, capsys, monkeypatch):
    from train import main

    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nmodel:\n  num_layerz: 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config-dir", str(tmp_path), "experiment=mine"])
    with pytest.raises(SystemExit) as stopped:
        main()
    error = capsys.readouterr().err.strip()
    assert stopped.value.code == 2
    assert error == "error: model.num_layerz is not a known key; did you mean model.num_layers? `--cfg job` lists all"


def test_cfg_and_help_from_another_folder(tmp_path):
    shown = run("--cfg", "job", "model.num_layers=7", cwd=tmp_path)
    assert shown.returncode == 0
    assert "num_layers: 7" in shown.stdout
    help_text = run("--help", cwd=tmp_path)
    assert help_text.returncode == 0
    assert "experiment: long_context, parity, parity_gpu, quickstart" in help_text.stdout
    assert not (tmp_path / "runs").exists()
