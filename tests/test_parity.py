"""The parity program: true attentions pass, every mutant is caught with the quantity named."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import naive_attention
from scripts import parity, variants
from scripts.parity import ParityConfig, ParitySettings, main, plan_runs, run_parity, with_one_micro_batch
from scripts.parity_verdict import QUANTITIES, TOLERANCE, fault, final_losses, judge, limits_of, noise
from scripts.variants import MUTANTS, nulls, train_once
from tests.runs import settings, small_run
from training import memory


def test_every_mutant_is_caught_and_true_attention_passes(tmp_path):
    overrides = [
        "train.steps=8", "parity.nulls=4", "parity.seeds=2", "parity.attention=[tiled,sdpa]", "logger.wandb=disabled",
        "hardware.device=cpu", "hardware.dtype=float32", f"data.cache_dir={tmp_path}",
        f"parity.mutants={json.dumps(list(MUTANTS))}",
    ]  # fmt: skip
    report = run_parity(settings(*overrides, schema=ParitySettings, experiment="parity"), tmp_path / "parity")
    verdicts = report["verdicts"]
    for name in ("tiled", "sdpa"):
        assert verdicts[name]["passes"], verdicts[name]
        assert verdicts[name]["fault"] is None
    for name, (_, quantity) in MUTANTS.items():
        assert not verdicts[name]["passes"], name
        assert f": {quantity} " in verdicts[name]["fault"], (name, verdicts[name]["fault"])
    assert not report["passes"]
    for file in ("parity.json", "parity.png", "parity.md", "tiled/metrics.jsonl"):
        assert (tmp_path / "parity" / file).stat().st_size > 0


def test_one_micro_batch_is_chosen_for_all_runs_before_anything_is_trained(tmp_path, monkeypatch):
    """train.micro_batch=auto: the most that fits with every attention; and a refusal costs no training."""
    overrides = [
        "train.steps=8", "parity.attention=[tiled,sdpa]", "train.micro_batch=auto", "hardware.device=cpu",
        "hardware.dtype=float32", f"data.cache_dir={tmp_path}", "logger.wandb=disabled",
    ]  # fmt: skip
    chosen = settings(*overrides, schema=ParitySettings, experiment="parity")
    fits, real = {"naive": 2, "tiled": 4, "sdpa": 4}, memory.plan

    def plan(settings, model, *rest):
        return replace(real(settings, model, *rest), micro_batch=fits[model.attention])

    monkeypatch.setattr(memory, "plan", plan)
    assert with_one_micro_batch(chosen, tmp_path / "parity").train.micro_batch == 2
    assert chosen.train.micro_batch == "auto"
    monkeypatch.undo()
    monkeypatch.setattr(variants, "train", lambda *_, **__: pytest.fail("trained"))
    drops = replace(chosen, model=replace(chosen.model, attention_dropout=0.1))
    with pytest.raises(ValueError, match="dropout in float32 is not supported by sdpa"):
        run_parity(replace(drops, parity=replace(drops.parity, mutants=[])), tmp_path / "parity")
    for key, value in (("window", 5), ("mask", "dilated:2")):
        changed = replace(chosen, model=replace(chosen.model, **{key: value}))
        with pytest.raises(ValueError, match=f"model.{key}={value} is not judged: .*; leave it out"):
            run_parity(changed, tmp_path / "parity")


@pytest.mark.parametrize("steps", [1, 2])
def test_a_signal_ends_the_program_and_is_no_verdict(steps, tmp_path, capsys):
    """The run ends as it would alone, or is complete; half of its losses would fail a right attention."""
    signals = iter([signal.SIGTERM])

    def attend(q, k, v, *, documents, **options):
        for number in signals:
            signal.raise_signal(number)
        return naive_attention(q, k, v, **options)

    with pytest.raises(SystemExit) as stopped:
        train_once(small_run(tmp_path, f"train.steps={steps}", "model.num_layers=1"), tmp_path / "run", attend=attend)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert f"ended by {'SIGTERM' if steps > 1 else 'a signal'}: without all of its" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_nan(tmp_path):
    overrides = "train.steps=2", "train.on_nonfinite=skip", "model.num_layers=1", "train.sample_tokens=0"
    found = train_once(small_run(tmp_path, *overrides), tmp_path / "run", attend=lambda q, *_, **__: q * math.nan)
    assert [math.isnan(loss) for loss in (*found["losses"], found["val_loss"])] == [True] * 3


@pytest.mark.parametrize(("losses", "val_loss"), [([1.0, math.nan], 1.0), ([1.0, 1.0], math.nan)])
def test_a_baseline_that_is_not_finite_ends_in_one_line(losses, val_loss, tmp_path, monkeypatch):
    """What is judged may fail; beside a baseline that fails nothing can be judged."""
    monkeypatch.setattr(parity, "with_one_micro_batch", lambda chosen, _: chosen)
    monkeypatch.setattr(parity, "plan_runs", lambda *_: dict.fromkeys(("sdpa", "null 0"), (None, None)))
    run = {"losses": losses, "val_loss": val_loss, "seconds": 1.0}
    monkeypatch.setattr(parity, "train_once", lambda *_: dict(run))
    typed = "parity.nulls=4", "parity.attention=[sdpa]", "hardware.device=cpu"
    with pytest.raises(ValueError, match=r"the baseline's own run \(null 0\) has a loss that is not finite, .*; lower"):
        run_parity(settings(*typed, schema=ParitySettings, experiment="parity"), tmp_path)


@pytest.mark.parametrize("asked", [(), ("parity.repeats=2",)])
def test_a_verdict_is_the_exit_code(asked, tmp_path, monkeypatch):
    verdicts = iter([True, False])
    monkeypatch.setattr(parity, "run_parity", lambda *_: {"passes": next(verdicts)})
    monkeypatch.setattr(parity, "repeat", lambda *_: next(verdicts))
    chosen = settings(*asked, schema=ParitySettings, experiment="parity")
    parity.main.__wrapped__(chosen, tmp_path)
    with pytest.raises(SystemExit) as stopped:
        parity.main.__wrapped__(chosen, tmp_path)
    assert stopped.value.code == 1


def test_a_null_is_compiled_as_the_run_that_it_is_beside():
    """Without a break in the graph, which would also keep the step from being one of CUDA."""
    q, k, v = torch.randn(3, 1, 2, 32, 16, generator=torch.Generator().manual_seed(0))
    for attend in nulls(2, 32, 16, torch.device("cpu")).values():
        whole = torch.compile(attend, fullgraph=True, backend="eager")
        torch.testing.assert_close(whole(q, k, v, causal=True), naive_attention(q, k, v, causal=True))


def test_what_judges_nothing_is_refused():
    with pytest.raises(ValueError, match=r"parity.attention=\[\] judges nothing; name one"):
        ParityConfig(attention=[])


def test_a_run_to_go_on_with_is_refused_before_the_first_one(tmp_path, capsys):
    chosen = settings("resume=auto", schema=ParitySettings, experiment="parity")
    with pytest.raises(ValueError, match="resume=auto goes on with one run, and these are several; leave it out"):
        main.__wrapped__(chosen, tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("typed", "orders"), [((), [5, 6, 7]), (("train.data_seed=9",), [9, 10, 11])])
def test_the_order_of_the_batches_is_the_typed_one(tmp_path, typed, orders):
    """And those of the seed runs are others."""
    chosen = settings("train.seed=5", "parity.seeds=2", *typed, schema=ParitySettings, experiment="parity")
    plan = {name: changed.train for name, (changed, _) in plan_runs(chosen, tmp_path, {}).items()}
    assert [plan[name].data_seed for name in ("naive", "seed 1", "seed 2")] == orders
    assert {train.seed for train in plan.values()} == {5}


def test_parity_with_a_micro_batch_that_is_chosen(tmp_path):
    overrides = [
        "train.steps=8", "parity.nulls=4", "parity.seeds=2", "parity.attention=[sdpa]", "train.micro_batch=auto",
        "hardware.device=cpu", "hardware.dtype=float32", f"data.cache_dir={tmp_path}", "logger.wandb=disabled",
    ]  # fmt: skip
    chosen = settings(*overrides, schema=ParitySettings, experiment="parity")
    assert run_parity(chosen, tmp_path / "parity")["verdicts"]["sdpa"]["passes"]


def test_dropout_is_compared_with_one_mask(tmp_path):
    overrides = [
        "train.steps=8", "parity.nulls=4", "parity.seeds=2", "parity.attention=[tiled]", "logger.wandb=disabled",
        "hardware.device=cpu", "hardware.dtype=float32", f"data.cache_dir={tmp_path}", "model.attention_dropout=0.2",
    ]  # fmt: skip
    chosen = settings(*overrides, schema=ParitySettings, experiment="parity")
    verdict = run_parity(chosen, tmp_path / "parity")["verdicts"]["tiled"]
    assert verdict["passes"], verdict
    assert verdict["distances"]["whole"] < 1e-5
    chosen.parity.mutants = ["scale x 1.01"]
    with pytest.raises(ValueError, match=r"parity\.mutants know no dropout"):
        run_parity(chosen, tmp_path / "parity")


@pytest.mark.parametrize(("right", "wrong", "passes"), [(20, 0, True), (19, 0, True), (18, 0, False), (20, 1, False)])
def test_repeats_pass_by_95_percent_and_no_mutant(right, wrong, passes, tmp_path, monkeypatch):
    seeds = []

    def run_parity(one, folder):
        seeds.append((one.train.seed, folder.name))
        count = len(seeds)
        return {"verdicts": {"flash": {"passes": count <= right}, "no rescaling": {"passes": count <= wrong}}}

    monkeypatch.setattr(parity, "run_parity", run_parity)
    typed = "train.seed=3", "parity.attention=[flash]", "parity.mutants=['no rescaling']", "hardware.device=cpu"
    chosen = settings(*typed, schema=ParitySettings, experiment="parity")
    assert parity.repeat(chosen, tmp_path, 20) == passes
    assert seeds == [(3 + number, f"seed_{3 + number}") for number in range(20)]
    assert json.loads((tmp_path / "repeats.json").read_text())["passed"] == {"flash": right, "no rescaling": wrong}


@pytest.mark.parametrize(
    ("step", "end", "fault", "passes"),
    [(1e-5, 0.0, None, True), (1e-2, 0.0, None, False), (1e-5, 0.2, None, False), (1e-5, 0.0, "O is wrong", False)],
)
def test_a_verdict_needs_the_curve_its_end_and_each_call(step, end, fault, passes, tmp_path, monkeypatch):
    """Orders of the batches say where a final loss may lie, and nothing of a curve."""
    names = ("naive", *(f"null {number}: x" for number in range(4)), "seed 1", "seed 2", "sdpa")

    def train_once(_, folder, attend):
        number = [name.partition(":")[0].replace(" ", "_") for name in names].index(folder.name)
        apart = 0.5 if folder.name.startswith("seed") else step if folder.name == "sdpa" else number * 1e-5
        final = 4.0 + (end if folder.name == "sdpa" else 0.01 * number)
        return {"losses": [5.0 + apart] * 12, "val_loss": final, "seconds": 1.0}

    monkeypatch.setattr(parity, "with_one_micro_batch", lambda chosen, _: chosen)
    monkeypatch.setattr(parity, "plan_runs", lambda *_: dict.fromkeys(names, (None, None)))
    monkeypatch.setattr(parity, "train_once", train_once)
    recorded = [(torch.zeros(1, 1, 2, 4),) * 4]
    monkeypatch.setattr(parity, "record_both", lambda *_: {"before training": recorded})
    for name, found in {"compare": [], "stress": 0.0, "limits_of": {}, "fault": fault, "draw": None}.items():
        monkeypatch.setattr(parity, name, lambda *_, found=found: found)
    typed = "parity.nulls=4", "parity.attention=[sdpa]", "hardware.device=cpu"
    chosen = settings(*typed, schema=ParitySettings, experiment="parity")
    verdict = run_parity(chosen, tmp_path)["verdicts"]["sdpa"]
    assert (verdict["passes"], verdict["ends_near"]) == (passes, end == 0.0)


def test_a_call_may_err_ten_times_as_much_as_nulls():
    nulls = [[{"quantity": name, "relative_error": error} for name in QUANTITIES] for error in (1e-3, 2e-3)]
    limits = limits_of(nulls, [1e-4, 3e-4])
    assert limits == dict.fromkeys(QUANTITIES, pytest.approx(0.02)) | {"stress": pytest.approx(3e-3)}
    row = {"layer": 1, "size": 1.0, "cosine": 1.0}
    rows = [row | {"quantity": name, "relative_error": 0.019} for name in QUANTITIES]
    assert fault(rows, 2.9e-3, limits) is None
    assert fault(rows, 3.1e-3, limits).startswith("O where scores reach 120: relative error 0.0031; is there")
    assert "O where" in fault(rows, math.inf, limits)
    for quantity in QUANTITIES:
        worse = [one | {"relative_error": 0.021} if one["quantity"] == quantity else one for one in rows]
        assert fault(worse, 0.0, limits).startswith(f"{quantity} of layer 1: relative error 0.021 (at most 0.02)")
    assert fault([row | {"quantity": "O", "relative_error": math.nan}], 0.0, limits)


def test_two_floats_are_no_distance_where_null_runs_are_equal():
    """So they are on some CPUs with a tiny model, where a right attention was two floats away in one step of eight."""
    baseline = [4.8561544] * 6
    allowed = noise([baseline] * 4, baseline)
    step = 2.0**-21
    within = judge([loss + 2 * step for loss in baseline], baseline, *allowed)
    assert (within["passes"], within["first_outside"]) == (True, None)
    beyond = judge([loss + 3 * step for loss in baseline], baseline, *allowed)
    assert (beyond["passes"], beyond["first_outside"]) == (False, 1)


def test_a_curve_is_judged_by_the_noise():
    baseline = [4.0 - 0.1 * step for step in range(10)]
    nulls = [[x + sign * 1e-5 * (1 + step) for step, x in enumerate(baseline)] for sign in (1, -1, 1.5, 0.7, 1.2)]
    allowed = noise(nulls, baseline)
    assert allowed[0]["runs"] == 5
    near = judge([x + 2e-5 for x in baseline], baseline, *allowed)
    assert (near["passes"], near["first_outside"]) == (True, None)
    far = judge([x + (1e-2 if step >= 6 else 0) for step, x in enumerate(baseline)], baseline, *allowed)
    assert far["first_outside"] == 7
    # a small mistake, seen in the first steps, while later ones differ by more for rounding alone
    nulls = [[x + sign * 1e-6 * 10 ** (step / 3) for step, x in enumerate([4.0] * 30)] for sign in (1, -1, 1.5, 0.7)]
    grown = noise(nulls, [4.0] * 30)
    early = judge([4.0 + (1e-3 if step < 10 else 1e-6) for step in range(30)], [4.0] * 30, *grown)
    assert early["distances"]["whole"] < grown[0]["whole"]["limit"]
    assert not early["passes"]
    wrong = judge([x + 1e-2 for x in baseline], baseline, *allowed)
    assert not wrong["passes"]
    assert not judge([*baseline[:9], math.nan], baseline, *allowed)["passes"]


def test_a_final_loss_is_judged_by_all_runs_of_the_baseline():
    """By the largest distance of its two seeds, a third of right attentions would fail, and these null runs."""
    import numpy as np

    draws = np.random.default_rng(0).normal(4.5, 0.01, (2000, 9))  # the last: a right attention
    limits = [final_losses(list(row)) for row in draws[:, :8]]
    inside = [abs(row[-1] - limit["center"]) <= limit["limit"] for row, limit in zip(draws, limits, strict=True)]
    assert 0.99 < sum(inside) / len(inside) < 1
    assert limits[0]["runs"] == 8
    wrong = [abs(row[-1] + 0.1 - limit["center"]) > limit["limit"] for row, limit in zip(draws, limits, strict=True)]
    assert sum(wrong) / len(wrong) > 0.98
    assert final_losses([4.5] * 30)["limit"] == 2.0**-21  # the next float32


@pytest.mark.parametrize(("runs", "factor"), TOLERANCE.items())
def test_the_tolerance_factor_covers_what_it_says(runs, factor):
    """Of normal samples of so many, mean + k sd lies above the 99 % quantile in 95 % of cases."""
    import numpy as np

    samples = np.random.default_rng(0).standard_normal((40_000, runs))
    covered = samples.mean(1) + factor * samples.std(1, ddof=1) >= 2.3263
    assert covered.mean() == pytest.approx(0.95, abs=0.005)


# of each run, which would take longer than the run
NO_PICTURES = """
import runpy
from training import curves
curves.draw_run = lambda run, path: None
runpy.run_module("scripts.parity", run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_as_typed_without_a_gpu(tmp_path):
    """A process that nobody told to interpret: the program does, before Triton is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            sys.executable, "-c", NO_PICTURES, "train.steps=2", "train.batch_tokens=32", "model.num_layers=1",
            "model.num_heads=1", "model.n_embd=16", "train.eval_windows=2", "parity.nulls=4", "parity.seeds=2",
            "parity.attention=[flash]", "logger.wandb=disabled",
            f"data.cache_dir={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}",
        ],
        cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "flash" in json.loads((tmp_path / "run" / "parity.json").read_text())["verdicts"], done.stderr[-2000:]
    assert done.returncode == 0, done.stdout
