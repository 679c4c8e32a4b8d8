"""Every configuration composes; mistakes are in tests/test_bad_input.py."""

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


def test_cfg_and_help_from_another_folder(tmp_path):
    shown = run("--cfg", "job", "model.num_layers=7", cwd=tmp_path)
    assert shown.returncode == 0
    assert "num_layers: 7" in shown.stdout
    help_text = run("--help", cwd=tmp_path)
    assert help_text.returncode == 0
    assert "long_context, parity, parity_gpu, quickstart" in help_text.stdout
    assert not (tmp_path / "runs").exists()
