"""What watches a run leaves every bit of every step; a draw that does not is seen and named. Recomputation too."""

import json

import numpy as np
import pytest

from tests.promises import invariance
from tests.promises.invariance import BASELINE, PLANTED, TINY, TOGGLES, InvarianceSettings
from tests.runs import settings
from training import stepper

pytestmark = pytest.mark.usefixtures("threads_as_before")


def matrix(tmp_path, *overrides: str) -> dict:
    chosen = settings(*TINY, "hardware.device=cpu", *overrides, schema=InvarianceSettings, experiment=None)
    return invariance.compare(chosen, tmp_path)


@pytest.mark.parametrize("with_wandb", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_steps_have_the_same_bits_whatever_watches_them(tmp_path, capsys, monkeypatch, with_wandb):
    """Fifty, for each thing that watches; without wandb 22 of one layer, for all of them at once and for a profile."""
    overrides, steps = (), 50
    if not with_wandb:  # most of the time would be wandb's processes starting, and long traces being written
        only = "invariance.only=[profiling,everything]"  # what is watched at intervals is watched twice
        overrides, steps = ("model.num_layers=1", "train.micro_batch=8", "train.steps=22", only), 22
        for name, toggle in TOGGLES.items():
            left_out = {"logger.wandb"} | ({"profile"} if name == "everything" else set())
            monkeypatch.setitem(TOGGLES, name, {key: value for key, value in toggle.items() if key not in left_out})
    chosen = settings(*TINY, "hardware.device=cpu", *overrides, schema=InvarianceSettings, experiment=None)
    invariance.main.__wrapped__(chosen, tmp_path)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["passes"]
    watched = list(TOGGLES) if with_wandb else ["profiling", "everything"]
    assert list(said["rows"]) == [BASELINE, *watched, *PLANTED]
    assert {said["rows"][name] for name in watched} == {f"the same bits at all {steps} steps"}
    for name, stream in (("planted torch.rand", "cpu"), ("planted random.random", "python")):
        assert said["rows"][name].startswith(f"seen: differs from step 4 on: random stream {stream}")  # after step 3's
    rows = json.loads((tmp_path / "invariance.json").read_text())["rows"]
    assert len({row["digest"] for row in rows.values()}) == 1 + len(PLANTED)
    # what is switched did happen, and every step is another one
    if with_wandb:
        assert len((tmp_path / "evaluation" / "metrics.jsonl").read_text().splitlines()) == 2 + steps // 3
    for name in ("samples", "everything") if with_wandb else ("everything",):
        assert "a sample after 7 steps" in (tmp_path / name / "console.txt").read_text()
    for name in ("saving", "everything") if with_wandb else ("everything",):
        assert (tmp_path / name / "checkpoints" / f"step_0000{steps // 10}0").is_dir()
    lines = [json.loads(line) for line in (tmp_path / "everything" / "metrics.jsonl").read_text().splitlines()]
    assert sum("val_loss" in line for line in lines) >= steps // 3
    assert (tmp_path / "profiling" / "profile" / "trace.json.gz").exists()
    assert bool(list((tmp_path / "wandb").glob("wandb/offline-run-*"))) == with_wandb
    assert len({step["weights"] for step in rows[BASELINE]["steps"]}) == steps
    line = f"| everything | what each row switches | {rows[BASELINE]['digest']} | the same bits at all {steps} steps |"
    assert line in (tmp_path / "invariance.md").read_text()


def test_a_mistake_is_named(tmp_path, monkeypatch):
    """A sample that draws from NumPy's stream: the row fails, with the first step and the stream."""
    real = stepper.sample
    monkeypatch.setattr(stepper, "sample", lambda *args: np.random.rand() and real(*args))
    report = matrix(tmp_path, "train.steps=9", "invariance.only=[samples]")
    assert not report["passes"]
    assert report["rows"]["samples"]["verdict"] == "differs from step 8 on: random stream numpy"


def test_a_comparison_that_sees_nothing_fails(tmp_path, monkeypatch):
    monkeypatch.setitem(PLANTED, "planted nothing", lambda: None)
    report = matrix(tmp_path, "train.steps=7", "invariance.only=[logging]")
    assert not report["passes"]
    assert [row["verdict"] for row in report["rows"].values() if not row["as_expected"]] == ["NOT SEEN"]


def test_impossible_matrices_are_refused():
    with pytest.raises(ValueError, match=r"invariance\.only=weather is unknown; use some of evaluation, samples"):
        invariance.InvarianceConfig(only=["weather"])
    with pytest.raises(ValueError, match=r"train\.steps=6 must be at least 7, as one run is profiled"):
        settings(*TINY, "train.steps=6", schema=InvarianceSettings, experiment=None)
