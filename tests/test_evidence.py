"""The program that makes every figure again: its commands are commands, and it says which of them failed."""

import importlib
import json
import sys
from dataclasses import replace

import pytest

from scripts import evidence
from tests.runs import settings_of


@pytest.mark.parametrize("name", evidence.EXPERIMENTS)
def test_both_forms_are_configurations_of_their_program(name):
    experiment = evidence.EXPERIMENTS[name]
    main = importlib.import_module(experiment.program).main
    for overrides in (experiment.overrides, experiment.small):
        filled = [override.format(books="books.txt", wikitext="null") for override in overrides]
        settings_of(main, *filled)


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
    script = replace(evidence.EXPERIMENTS["explain"], overrides=("hardware.device=cpu", "seq_len=128"))
    row = evidence.run("explain", script, evidence.EvidenceSettings(folder=str(tmp_path / "kept")), tmp_path, None)
    assert row["verdict"] == "as expected"
    assert "4BHND" in (tmp_path / "kept" / "explain" / "console.txt").read_text()


def test_an_unknown_beginning_is_refused():
    with pytest.raises(ValueError, match="only=speed begins no name; the names are parity/books"):
        evidence.EvidenceSettings(only=["speed"])


def test_the_command_of_a_figure_can_be_typed(monkeypatch):
    from training.provenance import ROOT, command

    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "parity.py"), "train.steps=2", "hydra.run.dir=/tmp/x"])
    assert command() == "python -m scripts.parity train.steps=2"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "bench" / "loss.py"), "tokens=8"])
    assert command() == "python -m scripts.bench.loss tokens=8"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), "profile=true"])
    assert command() == "python train.py profile=true"
