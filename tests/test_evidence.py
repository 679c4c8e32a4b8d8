"""The program that makes every figure again: its commands are commands, and it says which of them failed."""

import json
import sys
from dataclasses import replace

import pytest

from conf.schema import Settings
from scripts import (
    bench_attention,
    bench_loss,
    bench_training,
    break_it,
    error_budget,
    evidence,
    explain,
    invariance,
    parity,
    soak,
)
from tests.runs import settings

SCHEMAS = {
    "train": (Settings, "config"),
    "scripts.parity": (parity.ParitySettings, "parity"),
    "scripts.bench_attention": (bench_attention.BenchSettings, "bench_attention"),
    "scripts.bench_loss": (bench_loss.LossBenchSettings, "bench_loss"),
    "scripts.bench_training": (bench_training.BenchSettings, "bench_training"),
    "scripts.break_it": (break_it.BreakSettings, "break_it"),
    "scripts.error_budget": (error_budget.BudgetSettings, "error_budget"),
    "scripts.invariance": (invariance.InvarianceSettings, "invariance"),
    "scripts.soak": (soak.SoakSettings, "soak"),
    "scripts.explain": (explain.ExplainSettings, "explain"),
}


@pytest.mark.parametrize("name", evidence.EXPERIMENTS)
def test_both_forms_are_configurations_of_their_program(name):
    experiment = evidence.EXPERIMENTS[name]
    schema, config = SCHEMAS[experiment.program]
    for overrides in (experiment.overrides, experiment.small):
        filled = [override.format(books="books.txt", wikitext="null") for override in overrides]
        settings(*filled, schema=schema, config=config)


def test_one_that_fails_is_named_and_what_it_made_is_not_kept(tmp_path, capsys, monkeypatch):
    wrong = replace(evidence.EXPERIMENTS["explain"], small=("gpu=none",))
    chosen = {"explain": evidence.EXPERIMENTS["explain"], "explain wrong": wrong}
    monkeypatch.setattr(evidence, "EXPERIMENTS", chosen)
    with pytest.raises(SystemExit):
        evidence.main.__wrapped__(evidence.EvidenceSettings(small=True, folder=str(tmp_path / "kept")), tmp_path)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["experiments"]
    assert [row["verdict"].partition(",")[0] for row in rows] == ["as expected", "exit code 2"]
    assert "the same bits" in (tmp_path / "explain" / "console.txt").read_text()
    assert not (tmp_path / "kept").exists()


def test_what_is_kept_lies_in_the_experiments_folder(tmp_path):
    script = replace(evidence.EXPERIMENTS["explain"], overrides=("hardware=cpu", "seq_len=128"))
    row = evidence.run("explain", script, evidence.EvidenceSettings(folder=str(tmp_path / "kept")), tmp_path, None)
    assert row["verdict"] == "as expected"
    assert "4BHND" in (tmp_path / "kept" / "explain" / "console.txt").read_text()


def test_an_unknown_beginning_is_refused():
    with pytest.raises(ValueError, match="only=speed begins no name; the names are parity/books"):
        evidence.EvidenceSettings(only=["speed"])


def test_the_command_of_a_figure_can_be_typed(monkeypatch):
    from training.log import ROOT, command

    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "parity.py"), "train.steps=2", "hydra.run.dir=/tmp/x"])
    assert command() == "python -m scripts.parity train.steps=2"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), "profile=true"])
    assert command() == "python train.py profile=true"
