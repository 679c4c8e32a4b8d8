"""Runs in which numbers go bad: the step, module and tensor are named, the step is kept, and the policy followed."""

import errno
import json
import math
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from kernels import naive_attention
from model import build_model
from scripts import replay
from tests.runs import contents, digest, metrics, replaced, small_run
from train import train
from training import bad_steps, stepper
from training import checkpoint as checkpoints
from training import optimizer as optimizers
from training.checkpoint import open_checkpoint
from training.hardware import HardwareConfig, set_up
from training.optimizer import Optimizer
from training.random_states import random_states
from training.resume import refuse_unless_it_fits, settings_as_asked
from training.stop import resume_command, shell_command

# dropout on: only a step that begins with the same random state has the same bits
STORY = (
    *("optim=adamw", "model.attention=naive", "model.dropout=0.1", "train.steps=8", "train.micro_batch=4"),
    *("train.log_every=100", "train.eval_every=0", "train.save_every=2", "train.keep_every=1"),
)
BAD, LAYERS, MICRO_BATCHES = 5, 2, 2


class Faulty:
    """`function`, but for one input, known again by its bits: NaN in O there, or in dK.

    The input is that of layer 1 in a micro-batch of step BAD, as the run comes there for the first time.
    """

    def __init__(self, tensor="o", function=naive_attention, micro_batch=1):
        self.tensor, self.function = tensor, function
        self.at = LAYERS * ((BAD - 1) * MICRO_BATCHES + micro_batch + 1)
        self.calls, self.poison, self.hits = 0, None, 0

    def __call__(self, q, k, v, *, documents=None, **options):
        bits = q.detach().float().cpu().numpy().tobytes()
        self.calls += 1
        if self.calls == self.at:
            self.poison = bits
        if bits == self.poison and self.tensor == "dk" and k.requires_grad:
            k = k.view_as(k)
            k.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        o = self.function(q, k, v, **options)
        if bits == self.poison:
            self.hits += 1
            if self.tensor == "o":
                o = o.index_put((torch.tensor(1), torch.tensor(0)), o.new_tensor(math.nan))
        return o


def faulty_run(tmp_path, name, *overrides, **fault):
    """(summary, folder, the attention) of a run whose attention fails once."""
    attention = Faulty(**fault)
    with replaced("naive", attention):
        summary = train(small_run(tmp_path, *STORY, *overrides), tmp_path / name)
    return summary, tmp_path / name, attention


def learnt(path):
    """A digest of weights and moments."""
    checkpoint = open_checkpoint(path)
    moments = [part["state"] for part in checkpoint.load_state()["optimizer"]]
    return digest([(checkpoint.path / "model.safetensors").read_bytes(), moments])


def at_step(number, action, monkeypatch):
    """Call `action(optimizer)` in place of the update of that step; the gradient is dropped."""
    real, steps = Optimizer.step, iter(range(1, 1000))

    def step(self, loss=None):
        # the forecast of memory takes steps of its own, on fake tensors
        if isinstance(self.held, FakeTensor) or next(steps) != number:
            return real(self, loss)
        action(self)
        for part in self.optimizers:
            part.zero_grad()
        return torch.ones_like(self.held, dtype=torch.float32)

    monkeypatch.setattr(Optimizer, "step", step)


# --- the policies


@pytest.mark.parametrize("late", [0, 1, 3])
def test_stop_names_the_place_and_saves_the_state_before(tmp_path, monkeypatch, capsys, late):
    """However late it is found out. `late` 1 is what a GPU has."""
    monkeypatch.setattr(bad_steps, "steps_late", lambda device: late)
    summary, run_dir, attention = faulty_run(tmp_path, "bad", "train.save_every=100")
    said = capsys.readouterr().out
    assert f"bad step   {BAD}: its loss is not finite; first in blocks.1.attention: o, " in said
    assert (summary["steps"], summary["exit_code"]) == (BAD - 1, bad_steps.EXIT_BAD_NUMBERS)
    assert "step 5" in summary["stopped"]
    (place,) = [place for place, line in enumerate(said.splitlines()) if "resume=" in line]  # no other is to be pasted
    words, command = said.splitlines()[place - 1 : place + 1]
    assert words == f"stopped by {summary['stopped']}; to go on without its batch:"
    assert command.strip() == resume_command(run_dir, "train.on_nonfinite=skip")
    kept = run_dir / "bad_steps" / f"step_{BAD:06d}"
    assert f"{kept}; {shell_command('python', '-m', 'scripts.replay', f'dump={kept}')} runs the step again" in said
    for start in (settings_as_asked, lambda dump: refuse_unless_it_fits(dump, {}, {}, 0)):
        with pytest.raises(ValueError, match=rf"{kept} is the dump of a bad step.* use one of {run_dir}/checkpoints"):
            start(open_checkpoint(kept))
    assert attention.hits == 2  # in the run, and when it was run again: with the same bits, so from the same state
    train(small_run(tmp_path, *STORY, "train.save_every=1"), tmp_path / "sound")
    sound = open_checkpoint(tmp_path / "sound" / "checkpoints" / f"step_{BAD - 1:06d}")
    assert learnt(run_dir) == learnt(sound.path)
    states = [checkpoint.load_state() for checkpoint in (open_checkpoint(run_dir), sound)]
    for key in ("random", "number_check", "best_loss"):
        assert digest(states[0][key]) == digest(states[1][key])


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_skip_is_the_run_without_that_update(tmp_path, monkeypatch, late, optim):
    monkeypatch.setattr(bad_steps, "steps_late", lambda device: late)
    policy = ("train.on_nonfinite=skip", f"optim={optim}", "train.save_every=100")
    summary, run_dir, _ = faulty_run(tmp_path, "bad", *policy)
    assert (summary["steps"], summary["bad_steps"], summary["exit_code"]) == (8, 1, 0)
    at_step(BAD, lambda optimizer: None, monkeypatch)
    train(small_run(tmp_path, *STORY, *policy), tmp_path / "sound")
    assert learnt(run_dir) == learnt(tmp_path / "sound")
    random = [open_checkpoint(path).load_state()["random"] for path in (run_dir, tmp_path / "sound")]
    assert digest(random[0]) == digest(random[1])


def test_rollback_takes_the_weights_of_the_checkpoint_and_new_batches(tmp_path, monkeypatch, capsys):
    summary, run_dir, _ = faulty_run(tmp_path, "bad", "train.on_nonfinite=rollback", "train.save_every=3")
    assert (summary["steps"], summary["bad_steps"]) == (8, 1)
    assert "back to the weights of" in capsys.readouterr().out

    def load(optimizer):
        checkpoint = open_checkpoint(run_dir / "checkpoints" / "step_000003")  # two steps before
        checkpoint.load_weights(models[-1])
        optimizer.load_state_dict(checkpoint.load_state())

    models, real = [], build_model
    monkeypatch.setattr("training.run.build_model", lambda *a, **o: models.append(real(*a, **o)) or models[-1])
    at_step(BAD, load, monkeypatch)
    train(small_run(tmp_path, *STORY), tmp_path / "sound")
    assert learnt(run_dir) == learnt(tmp_path / "sound")


def test_a_bad_step_is_in_the_metrics_as_null_and_no_step_is_lost_or_twice(tmp_path):
    _, run_dir, _ = faulty_run(tmp_path, "bad", "train.on_nonfinite=skip", "train.log_every=1")
    records = metrics(run_dir)
    assert [r["step"] for r in records] == list(range(1, 9))
    assert [r["step"] for r in records if r["loss"] is None] == [BAD]
    assert [r.get("bad_steps") for r in records] == [None] * 4 + [1] * 4


def test_a_skipped_step_is_resumed_bit_by_bit(tmp_path, monkeypatch):
    """Stopped after each step, among them the bad one, which is not found late then: the same end."""
    monkeypatch.setattr(bad_steps, "steps_late", lambda device: 1)
    story = ("train.on_nonfinite=skip", "train.log_every=1")
    _, whole, _ = faulty_run(tmp_path, "whole", *story)
    with replaced("naive", (attention := Faulty())):
        for _ in range(8):
            train(small_run(tmp_path, *STORY, *story, "train.max_hours=1e-9", "resume=auto"), tmp_path / "parts")
    assert attention.hits == 2
    assert metrics(whole) == metrics(tmp_path / "parts")
    assert contents(open_checkpoint(whole)) == contents(open_checkpoint(tmp_path / "parts"))


def test_a_stopped_run_goes_on_with_another_policy(tmp_path):
    """As the message says: the same end as if it had been the policy from the start."""
    _, whole, _ = faulty_run(tmp_path, "whole", "train.on_nonfinite=skip", "train.log_every=1")
    with replaced("naive", Faulty()):
        for policy in ("stop", "skip"):
            story = (*STORY, "train.log_every=1", f"train.on_nonfinite={policy}", "resume=auto")
            train(small_run(tmp_path, *story), tmp_path / "parts")
    assert metrics(whole) == metrics(tmp_path / "parts")
    assert contents(open_checkpoint(whole)) == contents(open_checkpoint(tmp_path / "parts"))


# --- places


def test_a_gradient_alone(tmp_path, capsys):
    _, run_dir, _ = faulty_run(tmp_path, "bad", tensor="dk")
    meta = open_checkpoint(run_dir / "bad_steps" / f"step_{BAD:06d}").meta
    assert [math.isfinite(float(meta[name])) for name in ("loss", "grad_norm")] == [True, False]
    said = capsys.readouterr().out
    assert f"bad step   {BAD}: its gradient is not finite; first in blocks.1.attention: dk, " in said


@pytest.mark.parametrize(
    ("changed", "tensor", "how"),
    [
        (("model.dropout=0.1",), "o", "(run again module by module, with other dropout masks than compiled)"),
        (("model.dropout=0",), "dk", ""),
    ],
)
def test_a_compiled_run_is_diagnosed_module_by_module(tmp_path, monkeypatch, capsys, changed, tensor, how):
    """With a compiler that changes nothing, as only what is said is tested here."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *a, **o: function(*a, **o))
    _, run_dir, _ = faulty_run(tmp_path, "bad", "hardware.compile=true", *changed, tensor=tensor)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bad step")]
    assert f"not finite; first in blocks.1.attention: {tensor}, " in line
    assert line.endswith(how)
    assert ("run again" in line) == bool(how)
    replay.show(open_checkpoint(run_dir / "bad_steps" / f"step_{BAD:06d}"), [], "cpu")
    assert ("dropout's masks are not the run's: compiled" in capsys.readouterr().out) == bool(how)


def flip(monkeypatch, name, step):
    """Damage a weight before that step, as a flipped bit would."""
    models, real, real_step, steps = [], build_model, stepper.training_step, iter(range(1, 1000))
    monkeypatch.setattr("training.run.build_model", lambda *a, **o: models.append(real(*a, **o)) or models[-1])

    def damaged(*arguments, **options):
        if next(steps) == step:
            models[-1].get_parameter(name).data.view(-1)[7] = math.inf
        return real_step(*arguments, **options)

    monkeypatch.setattr(stepper, "training_step", damaged)


def lose_from(monkeypatch, step):
    """No loss is finite from that step on."""
    real, steps = stepper.training_step, iter(range(1, 1000))

    def lost(forward, *arguments, **options):
        factor = 1 if next(steps) < step else math.nan
        return real(lambda *a, **o: forward(*a, **o) * factor, *arguments, **options)

    monkeypatch.setattr(stepper, "training_step", lost)


def test_a_damaged_weight_is_named_and_rollback_heals_it(tmp_path, monkeypatch, capsys):
    flip(monkeypatch, "blocks.1.mlp.up.weight", BAD)
    summary = train(small_run(tmp_path, *STORY, "train.on_nonfinite=rollback"), tmp_path / "run")
    assert "first in blocks.1.mlp.up: weight, 1 of 8,192 values are not" in capsys.readouterr().out
    assert (summary["steps"], summary["bad_steps"]) == (8, 1)
    assert math.isfinite(summary["val_loss"])


def damage_after(monkeypatch, step):
    """Damage a weight in the last micro-batch's backward, when the step's own numbers were already there."""
    real, steps = Optimizer.step, iter(range(1, 1000))

    def damaging(self, loss=None):
        norm = real(self, loss)
        if not isinstance(self.held, FakeTensor) and next(steps) == step:
            self.parameters[0].data[0, 0] = math.nan
        return norm

    monkeypatch.setattr(Optimizer, "step", damaging)


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_damaged_weights_are_not_saved_and_take_no_good_checkpoint_s_place(tmp_path, monkeypatch, capsys, policy):
    damage_after(monkeypatch, 4)
    monkeypatch.setattr(bad_steps, "MOST_IN_A_ROW", 3)
    story = (*STORY, f"train.on_nonfinite={policy}", "train.save_every=1", "train.keep_last=1", "train.eval_every=0")
    summary = train(small_run(tmp_path, *story), tmp_path / "run")
    said = capsys.readouterr().out
    assert "not saved: step 4: embedding.weight is not finite; earlier checkpoints are untouched" in said
    if policy == "rollback":
        assert "back to the weights of" in said
        assert "step_000003" in said
        assert math.isfinite(summary["val_loss"])
    else:
        assert summary["exit_code"] == bad_steps.EXIT_BAD_NUMBERS
        assert open_checkpoint(tmp_path / "run").step == 3
        assert summary["checkpoint"].endswith("step_000003")
        assert len(list((tmp_path / "run" / "bad_steps").iterdir())) == 1, "no other batch mends them"
        remedy = said.partition("to go on from weights that are finite, and more slowly:\n")[2].splitlines()[0]
        assert remedy.strip() == resume_command(tmp_path / "run", "optim.lr=6e-05")


def test_weights_that_are_damaged_before_the_first_save_leave_nothing_to_go_on_from(tmp_path, monkeypatch, capsys):
    damage_after(monkeypatch, 1)
    train(small_run(tmp_path, *STORY, "train.on_nonfinite=stop", "train.save_every=1"), tmp_path / "run")
    said = capsys.readouterr().out
    assert "not saved: step 1: embedding.weight is not finite\n" in said
    assert "nothing was saved to go on from: begin anew" in said


@pytest.mark.parametrize(("save_every", "remedy"), [(2, "then .*python.* train.py resume="), (0, "and begin anew")])
def test_a_run_whose_last_weights_are_damaged_has_not_saved_its_end(tmp_path, monkeypatch, save_every, remedy):
    damage_after(monkeypatch, 8)  # no later step finds it
    with pytest.raises(ValueError, match=rf"embedding.weight is not finite\): mend its cause,? {remedy}"):
        train(small_run(tmp_path, *STORY, f"train.save_every={save_every}"), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["unsaved"], summary["exit_code"]) == ("embedding.weight is not finite", 2)


def test_where_nothing_could_be_saved_no_way_on_is_shown(tmp_path, monkeypatch, capsys):
    flip(monkeypatch, "embedding.weight", 1)
    summary = train(small_run(tmp_path, *STORY), tmp_path / "run")
    assert (summary["checkpoint"], summary["exit_code"]) == (None, bad_steps.EXIT_BAD_NUMBERS)
    said = capsys.readouterr().out
    assert "nothing was saved to go on from: begin anew, with its cause mended" in said
    assert "loss.png: " not in said  # nor that there is nothing to draw
    assert "resume=" not in said


def test_no_policy_goes_on_for_ever(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bad_steps, "MOST_IN_A_ROW", 2)
    lose_from(monkeypatch, 2)
    summary = train(small_run(tmp_path, *STORY, "train.on_nonfinite=skip", "train.save_every=1"), tmp_path / "run")
    assert summary["exit_code"] == bad_steps.EXIT_BAD_NUMBERS
    assert (summary["steps"], summary["bad_steps"]) == (3, 2)
    said = capsys.readouterr().out
    assert "more than 2 bad steps in a row" in said
    assert f"to meet it again, once its cause is mended:\n  {resume_command(tmp_path / 'run')}\n" in said


def test_rollback_without_a_checkpoint_stops(tmp_path, monkeypatch, capsys):
    flip(monkeypatch, "embedding.weight", 2)
    summary = train(small_run(tmp_path, *STORY, "train.on_nonfinite=rollback"), tmp_path / "run")
    assert (summary["steps"], summary["exit_code"]) == (1, bad_steps.EXIT_BAD_NUMBERS)
    assert "has no good checkpoint: set or lower train.save_every" in capsys.readouterr().out


def test_rollback_goes_back_to_where_the_run_was_resumed_from_in_another_folder(tmp_path, monkeypatch, capsys):
    train(small_run(tmp_path, *STORY, "train.max_hours=1e-9"), tmp_path / "run")
    flip(monkeypatch, "embedding.weight", 1)
    life = (*STORY, f"resume={tmp_path / 'run'}", "train.on_nonfinite=rollback")
    assert train(small_run(tmp_path, *life), tmp_path / "other")["exit_code"] == 0
    assert f"back to the weights of {tmp_path / 'run'}" in capsys.readouterr().out


def test_the_checkpoint_to_go_back_to_is_whole_there_and_from_before_the_step(tmp_path):
    """One may still be being written, one lie there from a branch that the run has left, and one be gone."""
    write = lambda step: checkpoints.write_step(tmp_path, {"a": torch.zeros(1)}, {}, {"step": step})  # noqa: E731
    write(2)
    gone = SimpleNamespace(path=tmp_path / "gone")
    saver = SimpleNamespace(folder=tmp_path, wait=lambda: [write(4), write(5)])
    handler = bad_steps.BadSteps("rollback", None, None, None, None, None, saver, {}, print, gone)
    assert handler._newest_good(5) == str(tmp_path / "step_000004")
    assert handler._newest_good(1) is None


@pytest.mark.parametrize("compiled", [False, True])
def test_what_only_the_run_saw_is_said_so(tmp_path, monkeypatch, capsys, compiled):
    """NaN once and never again: a fault of the hardware, say, or of what was compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    real, steps = stepper.training_step, iter(range(1, 1000))

    def once(forward, optimizer, *arguments, **options):
        if next(steps) == BAD:
            forward = lambda *a, forward=forward, **o: forward(*a, **o) * math.nan  # noqa: E731
        return real(forward, optimizer, *arguments, **options)

    monkeypatch.setattr(stepper, "training_step", once)
    story = (*STORY, "model.dropout=0", f"hardware.compile={compiled}".lower(), "train.on_nonfinite=skip")
    summary = train(small_run(tmp_path, *story), tmp_path / "run")
    why = " (run again module by module, not compiled)" if compiled else "; is the hardware sound?"
    assert f"the step was finite when run again{why}\n" in capsys.readouterr().out
    assert summary["steps"] == 8


# --- what is kept


def test_the_dump_holds_the_step(tmp_path):
    _, run_dir, _ = faulty_run(tmp_path, "bad")
    assert sorted(p.name for p in (run_dir / "bad_steps").iterdir()) == ["step_000005"]
    dump, saved = open_checkpoint(run_dir / "bad_steps" / "step_000005"), open_checkpoint(run_dir)
    assert dump.step == BAD
    assert dump.meta["first"] == {
        "module": "blocks.1.attention",
        "tensor": "o",
        "how": dump.meta["first"]["how"],
        "micro_batch": 1,
    }
    assert (dump.path / "model.safetensors").read_bytes() == (saved.path / "model.safetensors").read_bytes()
    kept, state = dump.load_state(), saved.load_state()
    assert digest(kept["random"]) == digest(state["random"])
    assert digest(kept["optimizer"][0]["state"]) == digest(state["optimizer"][0]["state"])
    inputs, targets, starts = kept["batch"]
    assert inputs.shape == targets.shape == (8, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert starts is None


def test_a_dump_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "bad_steps").write_text("in the way")
    summary, _, _ = faulty_run(tmp_path, "bad", "train.on_nonfinite=skip")
    assert summary["steps"] == 8
    assert "not saved: what reproduces step 5" in capsys.readouterr().out


def test_bad_steps_in_a_row_are_kept_alike_however_late_they_are_found(tmp_path, monkeypatch, capsys):
    """Each with its own random state; and no more than a few, as the disk is not endless."""
    monkeypatch.setattr(bad_steps, "MOST_DUMPS", 3)
    found = []
    for late in (0, 2):
        monkeypatch.setattr(bad_steps, "steps_late", lambda device, late=late: late)
        with monkeypatch.context() as patch:
            lose_from(patch, 2)
            train(small_run(tmp_path, *STORY, "train.on_nonfinite=skip"), tmp_path / str(late))
        paths = sorted((tmp_path / str(late) / "bad_steps").iterdir())
        assert [path.name for path in paths] == ["step_000002", "step_000003", "step_000004"]
        assert "not saved: what reproduces step 5" in capsys.readouterr().out
        states = [open_checkpoint(path).load_state() for path in paths]
        found.append([digest([state["random"], list(state["batch"])]) for state in states])
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


@pytest.mark.parametrize("file", ["checkpoint.json", "state.pt", "model.safetensors"])
def test_a_damaged_dump_is_refused_in_one_line(tmp_path, file):
    _, run_dir, _ = faulty_run(tmp_path, "bad", "train.steps=5")
    path = run_dir / "bad_steps" / "step_000005"
    content = (path / file).read_bytes()
    (path / file).write_bytes(content[:-4] + bytes([content[-4] ^ 1]) + content[-3:])
    with pytest.raises(ValueError, match=f"step_000005: {file} is damaged"):
        replay.open_dump(str(path))
    (path / file).unlink()
    with pytest.raises(ValueError, match=f"step_000005 has no {file}; give a folder"):
        replay.open_dump(str(path))


def test_a_full_disk_leaves_no_half_dump(tmp_path, monkeypatch, capsys):
    real = checkpoints.flush

    def full(path):
        if path.parent.parent.name == "bad_steps":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path)

    monkeypatch.setattr(checkpoints, "flush", full)
    summary, run_dir, _ = faulty_run(tmp_path, "bad", "train.on_nonfinite=skip")
    assert summary["steps"] == 8
    assert "not saved: what reproduces step 5: [Errno 28] No space left on device" in capsys.readouterr().out
    assert list((run_dir / "bad_steps").iterdir()) == []


# --- spikes


def test_a_spike_is_logged_and_counted(tmp_path, monkeypatch, capsys):
    real, steps = stepper.training_step, iter(range(1, 1000))

    def spiking(*arguments, **options):
        loss, norm = real(*arguments, **options)
        return loss + (9.0 if next(steps) == 20 else 0.0), norm

    monkeypatch.setattr(stepper, "training_step", spiking)
    summary = train(small_run(tmp_path, *STORY, "train.steps=30", "train.log_every=5"), tmp_path / "run")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("spike")]
    assert len(said) == 1
    assert said[0].startswith("spike      step 20: loss 1")
    assert summary["loss_spikes"] == 1
    assert [r.get("loss_spikes") for r in metrics(tmp_path / "run")] == [None] * 4 + [1] * 3
    assert open_checkpoint(tmp_path / "run").load_state()["number_check"]["spikes"] == 1


@pytest.mark.parametrize(("before", "loss", "spikes"), [(15, 99.0, 0), (16, 8.1, 0), (16, 8.3, 1)])
def test_a_spike_is_six_deviations_above_sixteen_losses(before, loss, spikes):
    """Of 1 and 3 by turns: a mean of 2, and a standard deviation of 1.03."""
    optimizer, cpu = SimpleNamespace(held=torch.tensor(False)), set_up(HardwareConfig(device="cpu"))
    watching = bad_steps.NumberCheck(optimizer, cpu, lambda line: None)
    for step, value in enumerate([*([1.0, 3.0] * 8)[:before], loss], 1):
        watching.bad_step(step, torch.tensor(value), torch.tensor(1.0), wait=False)
    assert watching.spikes == spikes


def test_a_spike_above_losses_that_are_all_the_same_is_no_division_by_zero():
    said = []
    optimizer, cpu = SimpleNamespace(held=torch.tensor(False)), set_up(HardwareConfig(device="cpu"))
    watching = bad_steps.NumberCheck(optimizer, cpu, said.append)
    for step, value in enumerate([*[1.0] * 16, 2.0], 1):
        watching.bad_step(step, torch.tensor(value), torch.tensor(1.0), wait=False)
    assert [line.partition(" standard")[0] for line in said] == ["spike      step 17: loss 2.0000 is inf"]


def test_what_is_found_late_is_of_the_step_that_it_was_found_in(monkeypatch):
    """As on a GPU, of two processes: a spike, and what another process sent with its step."""
    monkeypatch.setattr(bad_steps, "steps_late", lambda device: 1)
    said, heard = [], []
    messages = SimpleNamespace(tail=torch.zeros(2), read=lambda step, tail: heard.append((step, tail)) or [])
    optimizer, cpu = SimpleNamespace(held=torch.tensor(False)), set_up(HardwareConfig(device="cpu"))
    two = replace(cpu, world=SimpleNamespace(size=2, messages=messages))
    watching = bad_steps.NumberCheck(optimizer, two, said.append)
    for step, value in enumerate([*[1.0, 3.0] * 8, 99.0, 1.0], 1):
        messages.tail = torch.tensor([step, 7.0])
        watching.bad_step(step, torch.tensor(value), torch.tensor(1.0), wait=False)
    assert [line.partition(" is ")[0] for line in said] == ["spike      step 17: loss 99.0000"]
    assert heard == [(step, [step, 7.0]) for step in range(1, 18)]


def test_bad_steps_in_a_row_are_counted_from_the_last_good_one():
    optimizer, cpu = SimpleNamespace(held=torch.tensor(False)), set_up(HardwareConfig(device="cpu"))
    optimizer.release = lambda: optimizer.held.fill_(False)
    watching, one, counts = bad_steps.NumberCheck(optimizer, cpu, lambda line: None), torch.tensor(1.0), []
    for step, is_bad in enumerate((True, True, False, True), 1):
        optimizer.held.fill_(is_bad)
        if watching.bad_step(step, one, one, wait=True):
            watching.go_on()
        counts.append((watching.in_a_row, watching.bad_steps))
    assert counts == [(1, 1), (2, 2), (0, 2), (1, 3)]
    resumed = bad_steps.NumberCheck(optimizer, cpu, lambda line: None, watching.state_dict())
    assert resumed.state_dict() == watching.state_dict()


def test_noise_is_no_spike_and_a_jump_is_one_or_two():
    torch.manual_seed(0)
    said = []
    optimizer, cpu = SimpleNamespace(held=torch.tensor(False)), set_up(HardwareConfig(device="cpu"))
    watching = bad_steps.NumberCheck(optimizer, cpu, said.append)
    for step, noise in enumerate(torch.randn(500), 1):
        loss = 3 + 0.1 * noise + (2 if step > 400 else 0)  # a new level
        watching.bad_step(step, loss, loss, wait=False)
    assert watching.spikes in (1, 2, 3)
    assert said[0].startswith("spike      step 401: loss ")


# --- float16


def test_float16_trains_and_its_scale_is_resumed(tmp_path, monkeypatch):
    """From a scale that overflows: it falls until gradients fit, and a resumed run has it where it was."""
    monkeypatch.setattr(optimizers, "FIRST_SCALE", 2.0**24)
    half = (*STORY, "hardware.dtype=float16", "train.steps=12", "train.log_every=1", "optim.lr=5e-3")
    train(small_run(tmp_path, *half), tmp_path / "whole")
    records = metrics(tmp_path / "whole")
    scales = [r["loss_scale"] for r in records]
    overflows = [r["step"] for r in records if r["grad_norm"] is None]
    assert 2 < len(overflows) < 10
    assert scales[-1] == 2.0 ** (24 - len(overflows))
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    for _ in range(12):
        run = small_run(tmp_path, *half, "train.max_hours=1e-9", "resume=auto")
        if train(run, tmp_path / "parts")["stopped"] is None:
            break
    assert metrics(tmp_path / "parts") == records
    first, second = (open_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert first.load_state()["loss_scale"]["scale"] == scales[-1]
    assert contents(first) == contents(second)


# --- on a GPU


@pytest.mark.gpu
def test_on_the_gpu_compiled_float16_lowers_its_scale_and_is_resumed_with_it(tmp_path, monkeypatch):
    """Flash attention and inductor's kernels; the gradient of step 7 overflows by itself, its loss is finite."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    half = (*STORY, "hardware.device=auto", "hardware.dtype=float16", "hardware.compile=true", "model.attention=flash")
    half = (*half, "train.steps=24", "train.log_every=1", "optim.lr=5e-3", "train.save_every=10")
    real, steps = stepper.training_step, iter(range(1, 1000))

    def overflowing(forward, optimizer, *arguments, **options):
        if next(steps) != 7:
            return real(forward, optimizer, *arguments, **options)
        with mock.patch.object(optimizer, "scaled", lambda loss: Optimizer.scaled(optimizer, loss) * 2.0**60):
            return real(forward, optimizer, *arguments, **options | {"graphs": None})

    with monkeypatch.context() as patch:
        patch.setattr(stepper, "training_step", overflowing)
        train(small_run(tmp_path, *half), tmp_path / "whole")
    records = metrics(tmp_path / "whole")
    assert [r["step"] for r in records if r["grad_norm"] is None] == [7]
    assert all(r["loss"] is not None for r in records)
    first = optimizers.FIRST_SCALE
    assert [r["loss_scale"] for r in records] == [first] * 6 + [first / 2] * 18
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    shutil.copytree(tmp_path / "whole", tmp_path / "parts", symlinks=True)
    path = tmp_path / "parts" / "checkpoints" / "step_000010"
    assert open_checkpoint(path).load_state()["loss_scale"]["scale"] == first / 2
    train(small_run(tmp_path, *half, f"resume={path}"), tmp_path / "parts")
    assert metrics(tmp_path / "parts") == records
    assert contents(open_checkpoint(tmp_path / "whole")) == contents(open_checkpoint(tmp_path / "parts"))


@pytest.mark.gpu
@pytest.mark.parametrize(("optim", "dtype"), [("adamw", "bfloat16"), ("muon", "bfloat16"), ("muon", "float16")])
def test_a_gpu_is_not_asked(tmp_path, monkeypatch, optim, dtype):
    """No call of a step or of its guard waits for the device, but where metrics are read."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    real = bad_steps.NumberCheck.bad_step

    def bad_step(self, step, *numbers, wait):
        torch.cuda.set_sync_debug_mode("default" if wait else "error")
        try:
            return real(self, step, *numbers, wait=wait)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    real_step = stepper.training_step

    def strict(*arguments, **options):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real_step(*arguments, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(bad_steps.NumberCheck, "bad_step", bad_step)
    monkeypatch.setattr(stepper, "training_step", strict)
    summary = train(
        small_run(
            tmp_path,
            *STORY,
            "hardware.device=auto",
            f"hardware.dtype={dtype}",
            f"optim={optim}",
            "model.attention=flash",
            "hardware.compile=false",
            "train.steps=20",
        ),
        tmp_path / "run",
    )
    assert summary["steps"] == 20


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_on_the_gpu_a_skipped_step_changes_nothing(tmp_path, monkeypatch, capsys, optim, compiled):
    """The verdict stays on the device: the end is that of a run whose bad step was left out by hand."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    story = (*STORY, "hardware.device=auto", f"optim={optim}", "model.attention=flash", f"hardware.compile={compiled}")
    story = (*story, "train.on_nonfinite=skip", "train.save_every=100")
    real, seen = stepper.training_step, []

    def bad(forward, optimizer, batch, *arguments, **options):
        inputs, *_ = batch
        if inputs.shape == inputs_of_bad.shape and torch.equal(inputs, inputs_of_bad):
            seen.append(1)
            options |= {"graphs": None}  # they hold the step as it was
            return real(lambda *a, **o: forward(*a, **o) * math.nan, optimizer, batch, *arguments, **options)
        batches.append(inputs.clone())
        return real(forward, optimizer, batch, *arguments, **options)

    batches, inputs_of_bad = [], torch.zeros(1)
    monkeypatch.setattr(stepper, "training_step", bad)
    with monkeypatch.context() as patch:
        at_step(BAD, lambda optimizer: None, patch)
        train(small_run(tmp_path, *story, "hardware.cuda_graphs=false"), tmp_path / "sound")
    inputs_of_bad = batches[BAD - 1]
    assert train(small_run(tmp_path, *story), tmp_path / "bad")["bad_steps"] == 1
    assert "not finite" in capsys.readouterr().out
    assert seen
    assert learnt(tmp_path / "bad") == learnt(tmp_path / "sound")


def test_a_diagnosis_that_memory_does_not_hold_leaves_no_gradient_to_the_next_step():
    hardware, model = set_up(HardwareConfig(device="cpu")), torch.nn.Linear(2, 2)
    model.blocks, model.config = torch.nn.ModuleList([torch.nn.Linear(2, 2)]), SimpleNamespace(draws=False)
    bad = bad_steps.BadStep(1, math.nan, math.nan, random_states(), random_states())

    def again(forward):
        forward(torch.ones(2)).sum().backward()
        raise torch.OutOfMemoryError

    handler = bad_steps.BadSteps("skip", None, model, None, hardware, None, None, {}, print, None)
    assert "memory did not suffice" in handler._diagnose(bad, model, again)["how"]
    assert all(p.grad is None for p in model.parameters())
