"""Checkpoints on disk: whole or not there, whatever the disk does, and never code."""

import contextlib
import errno
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from tests.runs import small_run
from train import train
from training import checkpoint as checkpoints
from training import checkpoint_files
from training.checkpoint import Checkpoint
from training.checkpoint_files import write_weights
from training.comparison import state
from training.log import MetricsFile
from training.random_states import random_states, restore_random_states, seed_everything
from training.saver import Saver
from training.trained import given_or_newest

FILES = (checkpoints.META, checkpoints.WEIGHTS, checkpoints.STATE, checkpoints.MANIFEST)


class Net(nn.Module):
    """An embedding tied to the output, and a matrix."""

    def __init__(self, width=4):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.linear = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight


def save(folder, net, step, *, best=False):
    state = {"value": torch.tensor(step), "random": random_states()}
    return checkpoints.write(folder, checkpoints.weights_of(net), state, {"step": step}, best=best)


def steps(folder):
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


@pytest.fixture
def saver(tmp_path):
    lines = []
    made = Saver(tmp_path / "checkpoints", keep_last=1, keep_every=0, say=lines.append)
    made.lines = lines
    return made


def test_round_trip(tmp_path):
    net, other = Net(), Net()
    save(tmp_path, net, 3, best=True)
    opened = checkpoints.open_checkpoint(tmp_path / "last")
    opened.load_weights(other)
    assert opened.step == 3
    assert opened.load_state()["value"] == 3
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, dict(other.named_parameters())[name])
    assert other.head.weight is other.embedding.weight
    assert (tmp_path / "best").resolve() == opened.path


def test_a_run_that_saves_while_its_last_checkpoint_is_opened(tmp_path, monkeypatch):
    """Of one the description was read and of the next the weights: `damaged`."""
    save(tmp_path, Net(), 1)
    real = checkpoints.read_json

    def read_and_save(folder, name):
        monkeypatch.setattr(checkpoints, "read_json", real)
        found = real(folder, name)
        save(tmp_path, Net(), 2)
        return found

    monkeypatch.setattr(checkpoints, "read_json", read_and_save)
    opened = checkpoints.open_checkpoint(tmp_path / "last")
    assert (opened.step, opened.path.name) == (1, "step_000001")
    opened.load_weights(Net())
    shutil.rmtree(opened.path)
    with pytest.raises(ValueError, match=f"step_000001 is gone: .*; use {tmp_path / 'last'}"):
        opened.load_weights(Net())


def test_the_newest_the_best_and_milestones_are_kept(tmp_path):
    net = Net()
    for step in (10, 15, 20, 25, 30, 35):
        save(tmp_path, net, step, best=step == 15)
        checkpoints.prune(tmp_path, keep_last=2, keep_every=20)
    assert steps(tmp_path) == [15, 20, 30, 35]
    checkpoints.prune(tmp_path, keep_last=1, keep_every=0)
    assert steps(tmp_path) == [15, 35]
    (tmp_path / "step_000035" / checkpoints.META).write_text("")  # counts as newest
    save(tmp_path, net, 40)
    checkpoints.prune(tmp_path, keep_last=1, keep_every=0)
    assert (tmp_path / "last").resolve().name == "step_000040" in {path.name for path in tmp_path.iterdir()}
    assert checkpoints.open_checkpoint(tmp_path / "last").step == 40


def test_a_milestone_past_a_million_is_kept(tmp_path):
    for step in (1_200_000, 1_200_001):
        save(tmp_path, Net(), step)
    checkpoints.prune(tmp_path, keep_last=1, keep_every=300_000)
    assert steps(tmp_path) == [1_200_000, 1_200_001]


def test_the_newest_is_the_one_written_last(tmp_path):
    """A run that went back to step 10 may meet the step 30 that it left."""
    for step in (10, 30, 20):
        save(tmp_path, Net(), step)
    assert checkpoints.newest_complete(tmp_path).step == 20
    checkpoints.prune(tmp_path, keep_last=2, keep_every=0)
    assert steps(tmp_path) == [20, 30]
    save(tmp_path, Net(), 1_000_000)  # its name is longer
    assert checkpoints.newest_complete(tmp_path).step == 1_000_000
    checkpoints.prune(tmp_path, keep_last=1, keep_every=0)
    assert steps(tmp_path) == [1_000_000]


def test_a_branch_that_was_left_is_not_the_newest(tmp_path, monkeypatch):
    net = Net()
    for step in (2, 4, 6, 8):
        save(tmp_path, net, step)
    checkpoints.go_back(tmp_path, checkpoints.open_checkpoint(tmp_path / "step_000008"))
    assert not (tmp_path / checkpoints.WENT_BACK).exists()
    with monkeypatch.context() as patch:
        flushed = []
        patch.setattr(checkpoints, "flush", lambda path: flushed.append(path.name))
        checkpoints.go_back(tmp_path, checkpoints.open_checkpoint(tmp_path / "step_000002"))
        assert flushed == [checkpoints.WENT_BACK, tmp_path.name]
    checkpoints.prune(tmp_path, keep_last=2, keep_every=0)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000002", "step_000008"]
    for _ in range(2):  # killed before it saved, and again
        newest = checkpoints.newest_complete(tmp_path)
        assert newest.step == 2
        checkpoints.go_back(tmp_path, newest)
    assert checkpoints.newest_complete(tmp_path, last_step=7).step == 2  # what rollback asks for
    checkpoints.go_back(tmp_path, checkpoints.open_checkpoint(tmp_path / "step_000008"))  # after all
    assert checkpoints.newest_complete(tmp_path).step == 8
    checkpoints.go_back(tmp_path, checkpoints.open_checkpoint(tmp_path / "step_000002"))
    shutil.copytree(tmp_path, tmp_path / "copy")
    for part in (tmp_path / "copy" / "step_000002").iterdir():
        part.unlink()
    assert checkpoints.newest_complete(tmp_path / "copy", lambda line: None).step == 8  # rather than none
    save(tmp_path, net, 3)
    assert checkpoints.newest_complete(tmp_path).step == 3
    checkpoints.go_back(tmp_path, checkpoints.open_checkpoint(tmp_path / "step_000008"))  # after all
    assert checkpoints.newest_complete(tmp_path).step == 8


def test_the_best_step_that_is_saved_again_stays_the_best(tmp_path):
    """As the step before a bad one is."""
    net = Net()
    for step, best in ((4, True), (8, True), (8, False), (9, False)):
        save(tmp_path, net, step, best=best)
    four, eight, nine = (checkpoints.open_checkpoint(tmp_path / f"step_{step:06}") for step in (4, 8, 9))
    assert [each.meta["best_save"] for each in (four, eight, nine)] == [1, 3, 3]
    assert checkpoints.best_of(nine) == checkpoints.best_of(eight) == eight.path == (tmp_path / "best").resolve()
    assert checkpoints.best_of(four) == four.path


def test_going_back_takes_the_links_along(tmp_path):
    for step, best in ((4, True), (6, False), (8, True)):
        save(tmp_path, Net(), step, best=best)
    back = lambda: checkpoints.go_back(tmp_path, checkpoints.open_checkpoint(tmp_path / "step_000006"))  # noqa: E731
    described_anew(tmp_path / "step_000006", lambda meta: meta.pop("best_save"))  # of an earlier version
    back()
    assert [os.readlink(tmp_path / name) for name in ("last", "best")] == ["step_000006", "step_000008"]
    described_anew(tmp_path / "step_000006", lambda meta: meta.update(best_save=1))
    back()
    assert [os.readlink(tmp_path / name) for name in ("last", "best")] == ["step_000006", "step_000004"]
    shutil.rmtree(tmp_path / "step_000004")
    back()
    assert not os.path.lexists(tmp_path / "best")


def described_anew(path, change):
    """Change a checkpoint's description; its manifest fits."""
    meta = json.loads((path / checkpoints.META).read_text())
    change(meta)
    (path / checkpoints.META).write_text(json.dumps(meta))
    manifest = {name: checkpoints.fingerprint(path / name) for name in checkpoints.FILES}
    (path / checkpoints.MANIFEST).write_text(json.dumps(manifest))


def test_a_clock_that_was_put_back_does_not_make_an_older_one_the_newest(tmp_path):
    ahead = save(tmp_path, Net(), 6)
    for path in (*ahead.iterdir(), ahead):
        os.utime(path, (4e9, 4e9))
    save(tmp_path, Net(), 14)
    assert checkpoints.newest_complete(tmp_path).step == 14
    checkpoints.prune(tmp_path, keep_last=1, keep_every=0)
    assert steps(tmp_path) == [14]
    save(tmp_path, Net(), 10)  # after a resume from an earlier one, and with all but one pruned
    assert checkpoints.newest_complete(tmp_path).step == 10


def test_the_newest_run_is_the_one_that_saved_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, written in (("a", 2e9), ("b", 1e9)):
        folder = Path("runs", "mine", name, "checkpoints")
        folder.mkdir(parents=True)
        os.utime(save(folder, Net(), 1) / checkpoints.META, (written, written))
    assert given_or_newest(None) == Path("runs/mine/a/checkpoints/last")
    for folder in ("runs", "runs/mine"):
        with pytest.raises(ValueError, match=rf"^{folder} is a folder of runs; give one of them, such as runs/mine/b$"):
            checkpoints.open_checkpoint(folder)


def test_a_step_in_the_description_counts_and_not_the_folders_name(tmp_path):
    """A rollback that asks for step 3 or earlier would otherwise be given step 7 for ever."""
    save(tmp_path, Net(), 2)
    save(tmp_path, Net(), 7).rename(tmp_path / "step_000003")
    assert checkpoints.newest_complete(tmp_path, last_step=3).step == 2
    assert checkpoints.newest_complete(tmp_path, last_step=2).step == 2
    (save(tmp_path, Net(), 9) / checkpoints.META).write_text("")  # not asked for, so its damage is not reported
    assert checkpoints.newest_complete(tmp_path, pytest.fail, last_step=3).step == 2


# --- a folder that others touched


@pytest.fixture
def copied(tmp_path):
    """A run copied by `cp -rL`: its `last` (step 3) and `best` (step 1) are folders."""
    (tmp_path / "run").mkdir()
    for step in (1, 2, 3):
        save(tmp_path / "run", Net(), step, best=step == 1)
    shutil.copytree(tmp_path / "run", tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints" / "best").is_symlink()
    return tmp_path / "checkpoints"


def test_a_copied_run_whose_links_are_folders_saves_and_prunes(copied):
    shutil.rmtree(copied / "step_000003")  # `last` is all there is of it
    saver = Saver(copied, keep_last=2, keep_every=0, say=pytest.fail)
    assert {link: os.readlink(copied / link) for link in ("last", "best")} == {
        "last": "step_000003",
        "best": "step_000001",
    }
    for step in (4, 5):
        saver.save(Net(), {}, {"step": step})
    saver.check()
    assert steps(copied) == [1, 4, 5]
    assert checkpoints.open_checkpoint(copied / "last").step == 5
    assert checkpoints.open_checkpoint(copied / "best").step == 1


@pytest.mark.parametrize("spoil", [
    lambda best: (best / "notes.txt").write_text("mine"),
    lambda best: (best / checkpoints.META).unlink(),
    lambda best: described_anew(best, lambda meta: meta.update(seconds=7)),
], ids=["other files", "no checkpoint", "another one of that step"])  # fmt: skip
def test_a_folder_that_is_no_copy_is_not_touched(copied, spoil):
    spoil(copied / "best")
    before = sorted(path.name for path in (copied / "best").iterdir())
    with pytest.raises(ValueError, match=r"best is a folder and no copy of a checkpoint .*; move it away"):
        checkpoints.prepare(copied)
    assert sorted(path.name for path in (copied / "best").iterdir()) == before


def test_a_start_that_died_between_folder_and_link_is_finished(copied, monkeypatch):
    """kill -9 after the folder `best` was renamed, before the link has its name: step 1 is still the best."""
    removed = checkpoints._remove

    def killed(path):
        removed(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "_remove", killed)
    for _ in range(2):  # `last`, then `best`
        with pytest.raises(KeyboardInterrupt):
            checkpoints.prepare(copied)
    monkeypatch.undo()
    checkpoints.prepare(copied)
    assert os.readlink(copied / "best") == "step_000001"
    assert os.readlink(copied / "last") == "step_000003"
    assert not list(copied.glob(".*"))


def test_a_checkpoint_that_was_moved_and_linked_is_not_lost(tmp_path):
    """Its place is pruned, the archive is not; a file that only looks like a checkpoint is nobody's business."""
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", Net(), 1).rename(tmp_path / "archived")
    (tmp_path / "run" / "step_000001").symlink_to(tmp_path / "archived")
    assert checkpoints.open_checkpoint(tmp_path / "run" / "step_000001").is_in(tmp_path / "run")
    (tmp_path / "run" / "best").symlink_to(tmp_path / "archived")  # as a user makes it
    assert checkpoints.open_checkpoint(tmp_path / "run" / "best").path == tmp_path / "archived"
    (tmp_path / "run" / "best").unlink()
    (tmp_path / "run" / "step_000009").write_text("notes")
    save(tmp_path / "run", Net(), 2)
    checkpoints.prune(tmp_path / "run", keep_last=1, keep_every=0)
    assert steps(tmp_path / "run") == [2, 9]
    assert checkpoints.open_checkpoint(tmp_path / "archived").step == 1


def test_the_same_step_can_be_written_again(tmp_path):
    first, second = Net(), Net()
    save(tmp_path, first, 5)
    checkpoints.open_checkpoint(save(tmp_path, second, 5)).load_weights(first)
    assert torch.equal(first.linear.weight, second.linear.weight)


@pytest.mark.parametrize("linked", [False, True], ids=["folder", "link"])
@pytest.mark.parametrize("killed_after", [False, True], ids=["between the renames", "after them"])
def test_a_kill_while_the_same_step_is_written_again_loses_neither(tmp_path, monkeypatch, killed_after, linked):
    """It may be the only one: the old one is kept until the new one has its name."""
    old, new, read = Net(), Net(), Net()
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    path = save(folder, old, 5)
    if linked:
        path.rename(tmp_path / "archived")
        path.symlink_to(tmp_path / "archived")
    rename, flush = Path.rename, checkpoints.flush

    def rename_killed(source, target):
        if Path(target) == path:
            raise KeyboardInterrupt
        return rename(source, target)

    def flush_killed(file):
        flush(file)
        if file == folder:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if killed_after:
            patch.setattr(checkpoints, "flush", flush_killed)
        else:
            patch.setattr(Path, "rename", rename_killed)
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # kill -9 clears nothing
        with pytest.raises(KeyboardInterrupt):
            save(folder, new, 5)
    assert [file for file in folder.iterdir() if file.name.startswith(".step_000005.replaced.")]
    # a run looks for it before it prepares the folder
    assert checkpoints.newest_complete(folder, report=pytest.fail).step == 5
    checkpoints.prepare(folder)
    checkpoints.newest_complete(folder, report=pytest.fail).load_weights(read)
    assert torch.equal(read.linear.weight, (new if killed_after else old).linear.weight)
    assert sorted(file.name for file in folder.iterdir()) == ["last", "step_000005"]
    if linked:
        assert checkpoints.open_checkpoint(tmp_path / "archived").step == 5


# --- damage


@pytest.mark.parametrize("missing", FILES)
def test_an_incomplete_checkpoint_is_named(tmp_path, missing):
    path = save(tmp_path, Net(), 1)
    (path / missing).unlink()
    with pytest.raises(ValueError, match=missing):
        checkpoints.open_checkpoint(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty"])
def test_damage_is_found_and_the_one_before_is_taken(tmp_path, name, damage):
    save(tmp_path, Net(), 1)
    file = save(tmp_path, Net(), 2) / name
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes({"truncated": content[: len(content) // 2], "one bit": content, "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"damaged|has format"):
        checkpoints.open_checkpoint(file.parent)
    passed_over = []
    assert checkpoints.newest_complete(tmp_path, passed_over.append).step == 1
    assert len(passed_over) == 1
    assert name in passed_over[0] or damage == "one bit"


def test_only_what_is_to_be_read_is_verified(tmp_path):
    """The weights of a large model take minutes, and are not needed for its settings."""
    (tmp_path / "checkpoints").mkdir()
    path = save(tmp_path / "checkpoints", Net(), 1)
    (path / checkpoints.WEIGHTS).write_bytes(b"damaged")
    for given in (path, tmp_path):
        assert checkpoints.open_checkpoint(given, verify=(checkpoints.META,)).step == 1
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        checkpoints.open_checkpoint(path)
    (path / checkpoints.MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match=r"checkpoint\.json is damaged"):
        checkpoints.open_checkpoint(path, verify=(checkpoints.META,))


def test_a_pickle_with_code_is_not_run(tmp_path, capsys):
    """Its checksum is right, so only the reader stands in the way."""

    class Bomb:
        def __reduce__(self):
            return (print, ("boom",))

    path = checkpoints.write(tmp_path, {}, {"x": Bomb()}, {"step": 1}, best=False)
    with pytest.raises(ValueError, match="not written by this program"):
        checkpoints.open_checkpoint(path).load_state()
    assert "boom" not in capsys.readouterr().out


def test_what_a_forger_wrote_is_refused_though_its_checksums_fit(tmp_path):
    readers = {checkpoints.WEIGHTS: lambda opened: opened.load_weights(Net()), checkpoints.STATE: Checkpoint.load_state}
    for file, read in readers.items():
        path = save(tmp_path, Net(), 1)
        (path / file).write_bytes(b"")
        described_anew(path, lambda meta: None)
        with pytest.raises(ValueError, match=rf"step_000001: {file} cannot be read \(.*\); use another checkpoint$"):
            read(checkpoints.open_checkpoint(path))
    for theirs in ("", 7):  # of a model of transformers, its configuration
        path = save(tmp_path, Net(), 1)
        described_anew(path, lambda meta, theirs=theirs: meta.update(theirs=theirs))
        with pytest.raises(ValueError, match=rf"has a {type(theirs).__name__} as its theirs; use another checkpoint$"):
            checkpoints.open_checkpoint(path).theirs  # noqa: B018


def test_weights_of_another_model_are_refused(tmp_path):
    """Nothing is cast, left out or kept as it was."""
    opened = checkpoints.open_checkpoint(save(tmp_path, Net(), 1))
    own, missing = Net(), Net()
    own.register_buffer("more", torch.zeros(1))
    del missing.linear
    for other, says in (
        (own, "does not fit the model: tensor more; check"),
        (missing, "does not fit the model: tensor linear.weight; check"),
        (Net().double(), r"is \(11, 4\) in torch.float32, the model's is \(11, 4\) in torch.float64"),
        (Net(5), r"is \(11, 4\) in torch.float32, the model's is \(11, 5\) in torch.float32"),
    ):
        with pytest.raises(ValueError, match=says):
            opened.load_weights(other)


def test_a_step_that_cannot_be_replaced_keeps_its_name(tmp_path, monkeypatch):
    save(tmp_path, Net(), 1)
    rename = Path.rename

    def refuse(path, target):
        if path.name.startswith(".step") and "replaced" not in path.name:
            raise OSError("no space")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(OSError, match="no space"):
            save(tmp_path, Net(), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_000001"]
    save(tmp_path, Net(), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_000001"]


@pytest.mark.parametrize("cut", ["", "[1]", "{}", '{"to": null, "from": 1}'])
def test_what_was_noted_of_a_way_back_may_be_cut(tmp_path, cut):
    save(tmp_path, Net(), 1)
    (tmp_path / checkpoints.WENT_BACK).write_text(cut)
    assert checkpoints.newest_complete(tmp_path, pytest.fail).step == 1


def test_who_goes_on_from_anothers_leaves_the_own_as_they_are(tmp_path):
    for run in ("own", "other"):
        (tmp_path / run).mkdir()
        for step in (1, 2):
            save(tmp_path / run, Net(), step)
    checkpoints.go_back(tmp_path / "own", checkpoints.open_checkpoint(tmp_path / "other" / "step_000001"))
    assert (tmp_path / "own" / "last").resolve().name == "step_000002"
    assert not (tmp_path / "own" / checkpoints.WENT_BACK).exists()


def test_a_format_to_come_is_refused(tmp_path):
    path = save(tmp_path, Net(), 1)
    described_anew(path, lambda meta: meta.update(format=checkpoints.FORMAT + 1))
    for provenance, commit in ({"commit": "c0ffee"}, "c0ffee"), (None, None), ("of a form to come", None):
        described_anew(path, lambda meta, provenance=provenance: meta.update(provenance=provenance))
        says = (
            rf"has format {checkpoints.FORMAT + 1}, this version reads .*; use the commit that wrote it \({commit}\)$"
        )
        with pytest.raises(ValueError, match=says):
            checkpoints.open_checkpoint(path)


def test_a_damaged_last_one_does_not_keep_a_run_from_its_start(tmp_path):
    save(tmp_path, Net(), 1)
    (save(tmp_path, Net(), 2) / checkpoints.META).unlink()
    checkpoints.prepare(tmp_path)
    assert checkpoints.newest_complete(tmp_path, lambda line: None).step == 1


def test_one_that_cannot_be_read_at_all_is_passed_over(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, Net(), step)
    real = checkpoints.fingerprint

    def fails(path):
        if path.parent.name == "step_000002":
            raise OSError("Input/output error")
        return real(path)

    monkeypatch.setattr(checkpoints, "fingerprint", fails)
    lines = []
    assert checkpoints.newest_complete(tmp_path, lines.append).step == 1
    assert lines == ["passed over: Input/output error"]


def test_a_folder_that_is_linked_holds_its_own(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    save(tmp_path / "checkpoints", Net(), 1)
    (tmp_path / "link").symlink_to(tmp_path / "checkpoints")
    opened = checkpoints.open_checkpoint(tmp_path / "link" / "last")
    assert opened.is_in(tmp_path / "link")
    assert opened.is_in(tmp_path / "checkpoints")


def test_folders_with_other_names_are_not_read(tmp_path):
    (tmp_path / "step_notes").mkdir()
    (tmp_path / "step_000009").write_text("notes")
    save(tmp_path, Net(), 1)
    save(tmp_path, Net(), 2)
    checkpoints.prune(tmp_path, keep_last=1, keep_every=0)
    assert checkpoints.newest_complete(tmp_path, pytest.fail).step == 2
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000002", "step_000009", "step_notes"]


def test_a_run_without_a_whole_checkpoint_is_refused(tmp_path):
    checkpoints.prepare(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="no whole checkpoint"):
        checkpoints.open_checkpoint(tmp_path)


# --- the order of things


def test_everything_is_on_disk_before_the_name_is(tmp_path, monkeypatch):
    """A machine that loses power keeps what was flushed, so the rename comes after every flush but the folder's.

    That fsync does what it promises, no test here can show: it would take the power away.
    """
    events = []
    rename = type(tmp_path).rename
    monkeypatch.setattr(
        os, "fsync", lambda open_file: events.append(Path(f"/proc/self/fd/{open_file}").readlink().name)
    )
    monkeypatch.setattr(
        type(tmp_path), "rename", lambda path, to: (events.append(f"rename to {to.name}"), rename(path, to))[1]
    )
    save(tmp_path, Net(), 7)
    renamed = events.index("rename to step_000007")
    hidden = events[renamed - 1]
    assert sorted(events[:renamed]) == sorted([*FILES, hidden])
    assert hidden.startswith(".step_000007")
    assert events[renamed + 1 :] == [tmp_path.name]


def test_leftovers_of_a_killed_process_are_cleared(tmp_path):
    save(tmp_path, Net(), 1)
    (tmp_path / ".step_000002.99").mkdir()
    (tmp_path / ".step_000002.99" / checkpoints.WEIGHTS).write_bytes(b"half")
    (tmp_path / ".last.99").symlink_to("step_000002")
    (tmp_path / ".best.99").symlink_to("step_000002")
    (tmp_path / ".step_000001.removed.99").mkdir()
    (tmp_path / ".best.removed.99").mkdir()  # that was a folder, in a copy
    (tmp_path / ".step_000003.removed.99").symlink_to("step_000001")  # of one that was moved and linked
    (tmp_path / "step_000004").symlink_to("unmounted")
    (tmp_path / ".step_000004.replaced.99").mkdir()
    checkpoints.prepare(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_000001", "step_000004"]


def test_what_a_failed_save_of_this_process_left_is_in_nobodys_way(tmp_path):
    """Its hidden names are those of the next save."""
    save(tmp_path, Net(), 1)
    (tmp_path / f".last.{os.getpid()}").symlink_to("gone")
    for mark in ("removed", "replaced"):
        (tmp_path / f".step_000001.{mark}.{os.getpid()}").mkdir()
        (tmp_path / f".step_000001.{mark}.{os.getpid()}" / "part").touch()
    for step in (1, 2):
        save(tmp_path, Net(), step)
    checkpoints.prune(tmp_path, keep_last=1, keep_every=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_000002"]


@pytest.mark.parametrize("linked", [False, True], ids=["folder", "link"])
def test_hidden_files_of_others_stay(tmp_path, linked):
    """A start clears what it wrote itself, also where `checkpoints/` is a link to a folder of somebody's."""
    folder = tmp_path / "checkpoints"
    if linked:
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    folder.mkdir(exist_ok=True)
    save(folder, Net(), 1)
    hidden = (".git", ".dvc", ".step_notes", ".last.99", ".step_000001.mine", ".step_000001", ".step_000003.99.mine")
    for name in hidden:
        (folder / name).mkdir()
        (folder / name / "HEAD").write_text("mine")
    for name in (".gitignore", ".env", ".last", ".best.orig", ".step_000002.99"):
        (folder / name).write_text("mine")
    (folder / ".link").symlink_to(tmp_path)
    before = sorted(path.name for path in folder.iterdir())
    checkpoints.prepare(folder)
    assert sorted(path.name for path in folder.iterdir()) == [name for name in before if name != ".last.99"]
    assert (folder / ".git" / "HEAD").read_text() == "mine"


# --- disks that fail; each in the ways that this machine permits


@contextlib.contextmanager
def small_disk(folder, megabytes=1):
    """A file system of its own; a visible skip where mounting is not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here")
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def size_limit(nbytes):
    """No file may grow past `nbytes`: what works without any permission.

    Bytecode neither: of what is imported here, Python would keep the first `nbytes`, and read them ever after.
    """
    import resource
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_none
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def save_with(saver, net, step):
    saver.save(net, {"value": torch.zeros(100_000)}, {"step": step})
    saver.wait()


def test_a_best_one_that_could_not_be_written_does_not_count(saver):
    """It would make the best one that there is look like any other, and that is deleted."""
    for step, val_loss, nbytes in ((1, 3.0, -1), (2, 1.0, 10_000), (3, 2.0, -1), (4, 2.5, -1), (5, None, -1)):
        with size_limit(nbytes) if nbytes > 0 else contextlib.nullcontext():
            saver.save(Net(), {"value": torch.zeros(100_000)}, {"step": step}, val_loss)
            saver.wait()
    assert [line.partition(" to ")[0] for line in saver.lines] == ["not saved: step 2"]
    assert steps(saver.folder) == [3, 5]
    best = checkpoints.open_checkpoint(saver.folder / "best")
    assert (best.step, best.meta["best_loss"]) == (3, 2.0)
    assert checkpoints.open_checkpoint(saver.folder / "last").meta["best_loss"] == 2.0


def check_survived(saver, said):
    """The failure was one clear line, the checkpoint before it is whole, nothing half is left."""
    (line,) = saver.lines
    assert line.startswith("not saved: step 2 to ")
    assert said in line
    assert "the run goes on" in line
    assert checkpoints.newest_complete(saver.folder, report=pytest.fail).step == 1
    assert sorted(path.name for path in saver.folder.iterdir()) == ["last", "step_000001"]
    with pytest.raises(OSError, match="the last checkpoint was not saved"):
        saver.check()


@pytest.mark.parametrize("fills", ["weights", "state"])
def test_a_full_disk(tmp_path, fills):
    with small_disk(tmp_path / "disk"):
        lines = []
        saver = Saver(tmp_path / "disk" / "checkpoints", keep_last=1, keep_every=0, say=lines.append)
        saver.lines = lines
        save_with(saver, Net(), 1)
        ballast = tmp_path / "disk" / "ballast"
        ballast.write_bytes(b"0" * 250_000)
        save_with(saver, Net(300 if fills == "weights" else 4), 2)
        check_survived(saver, "No space left on device")
        ballast.unlink()  # somebody made room: the next save works
        save_with(saver, Net(), 3)
        assert steps(saver.folder) == [3]
        saver.check()


@pytest.mark.parametrize("fills", ["weights", "state"])
def test_a_file_that_may_not_grow(saver, fills):
    save_with(saver, Net(), 1)
    with size_limit(200_000):
        save_with(saver, Net(300 if fills == "weights" else 4), 2)
    check_survived(saver, "File too large")


@pytest.mark.parametrize("file", FILES)
def test_no_space_for_any_one_file(saver, file, monkeypatch):
    """Whichever file meets the full disk: the flush that finds out is the last chance to hear of it."""
    save_with(saver, Net(), 1)
    flush = checkpoints.flush

    def full(path):
        if path.name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        flush(path)

    monkeypatch.setattr(checkpoints, "flush", full)
    save_with(saver, Net(), 2)
    check_survived(saver, "No space left on device")


def test_a_read_only_disk(tmp_path):
    disk = tmp_path / "disk"
    with small_disk(disk, megabytes=8):
        lines = []
        saver = Saver(disk / "checkpoints", keep_last=1, keep_every=0, say=lines.append)
        saver.lines = lines
        save_with(saver, Net(), 1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        save_with(saver, Net(), 2)
        check_survived(saver, "Read-only file system")


def test_a_folder_without_write_permission(saver):
    """As an ordinary user: permissions do not stop root."""
    save_with(saver, Net(), 1)
    os.chmod(saver.folder, 0o555)
    nobody = 65534
    as_root = os.geteuid() == 0
    if as_root:
        for folder in list(saver.folder.parents)[:3]:
            os.chmod(folder, 0o755)
        os.seteuid(nobody)
    try:
        save_with(saver, Net(), 2)
    finally:
        if as_root:
            os.seteuid(0)
        os.chmod(saver.folder, 0o755)
    check_survived(saver, "Permission denied")


def test_a_vanished_folder(saver, tmp_path):
    """It does not come back in silence, as on the disk below a mount that is gone; when it is back, saving is too."""
    save_with(saver, Net(), 1)
    saver.folder.rename(tmp_path / "elsewhere")
    save_with(saver, Net(), 2)
    assert not saver.folder.exists()
    (tmp_path / "elsewhere").rename(saver.folder)
    check_survived(saver, "No such file or directory")
    save_with(saver, Net(), 3)
    assert steps(saver.folder) == [3]


def test_metrics_wait_for_room(tmp_path):
    """A full disk costs no step and leaves no half line; it is told of once."""
    with small_disk(tmp_path / "disk"):
        lines = []
        path = tmp_path / "disk" / "metrics.jsonl"
        metrics = MetricsFile(path, 0, resume=False, say=lines.append)
        metrics.append(1, {"loss": 1.0})
        ballast = tmp_path / "disk" / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(b"0" * 4096):
                pass
        for step in range(2, 400):  # past the page that the file already has
            metrics.append(step, {"loss": float(step)})
        assert "No space left on device" in lines[0]
        assert len(lines) == 1
        assert path.read_bytes().endswith(b"}\n")
        ballast.unlink()
        metrics.append(400, {"loss": math.inf})
        metrics.close()
        assert lines[1:] == [f"written again: {path}"]
        written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in written] == list(range(1, 401))
    assert written[-1] == {"step": 400, "loss": None}


def test_a_run_survives_a_full_disk(tmp_path, capsys):
    """A whole run on a disk that fills while it trains: it ends by itself, with an error and all it could keep."""
    with small_disk(tmp_path / "disk", megabytes=2):
        run_dir = tmp_path / "disk" / "run"
        run = small_run(tmp_path, "train.steps=6", "train.save_every=1", "train.keep_every=1", "train.log_every=1")
        with pytest.raises(OSError, match=r"was not saved.*: free what is short, then .*python.* train.py resume="):
            train(run, run_dir)
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["exit_code"] == 2
        assert "No space left" in summary["unsaved"]
        assert state({"folder": run_dir, "summary": summary, "records": [{"step": 6}]}) == "its end not saved"
        said = capsys.readouterr().out
        assert "No space left on device" in said
        assert "6 steps in" in said
        saved = checkpoints.newest_complete(run_dir / "checkpoints", report=pytest.fail)
        assert 1 <= saved.step < 6
        assert not list(run_dir.glob("checkpoints/.*"))


def test_where_no_checkpoint_was_ever_saved_the_remedy_is_not_to_resume(saver):
    with size_limit(200_000):
        save_with(saver, Net(300), 1)
    with pytest.raises(OSError, match="free what is short and begin anew"):
        saver.check()


def test_a_checkpoint_that_cannot_be_deleted_is_no_failed_save(saver, monkeypatch):
    """As where somebody reads it on a network file system: its folder stays, with a hidden file."""
    save_with(saver, Net(), 1)

    def refuse(path, **_):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_remove", refuse)
        save_with(saver, Net(), 2)
    (line,) = saver.lines
    assert line.startswith(f"not deleted: a checkpoint in {saver.folder}: ")
    saver.check()
    assert steps(saver.folder) == [1, 2]


# --- in the background


def test_what_is_saved_is_what_was_there_when_save_was_called(saver, monkeypatch):
    """Training goes on while the file is written; the next save waits for it."""
    net, state = Net(), {"moments": [{"exp_avg": torch.ones(3)}], "text": ("plain", 1)}
    before = net.linear.weight.detach().clone()
    write, may_write, begun = checkpoints.write, threading.Event(), []

    def held_up(folder, weights, state, meta, *, best):
        begun.append(meta["step"])
        assert may_write.wait(timeout=60)
        return write(folder, weights, state, meta, best=best)

    monkeypatch.setattr(checkpoints, "write", held_up)
    saver.save(net, state, {"step": 1}, 1.0)
    with torch.no_grad():  # a step of training
        net.linear.weight.zero_()
        state["moments"][0]["exp_avg"].zero_()
    assert steps(saver.folder) == []
    may_write.set()
    saver.save(net, state, {"step": 2})
    saver.check()
    assert begun == steps(saver.folder) == [1, 2]
    for step, weight, moment in ((1, before, 1.0), (2, torch.zeros(4, 4), 0.0)):
        opened = checkpoints.open_checkpoint(saver.folder / f"step_{step:06d}")
        opened.load_weights(net)
        assert torch.equal(net.linear.weight, weight)
        read = opened.load_state()
        assert read["text"] == ("plain", 1)
        assert torch.equal(read["moments"][0]["exp_avg"], torch.full((3,), moment))


def test_a_mistake_of_ours_in_the_thread_is_not_swallowed(saver):
    saver.save(Net(), {}, {"step": 1, "wrong": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.wait()
    assert steps(saver.folder) == []


# --- random streams


def test_a_gpus_stream_is_kept_and_restored_there_alone(monkeypatch):
    """Without a GPU: what is asked of PyTorch. That the bits are right is tested on one (test_resume.py)."""
    given = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor([7]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: given.append((state.item(), str(device))))
    states = random_states("cuda:1")
    assert "cuda" not in random_states("cpu")
    restore_random_states(states, "cpu")
    assert given == []
    restore_random_states(states, torch.device("cuda:1"))
    assert given == [(7, "cuda:1")]


def test_random_states_round_trip(tmp_path):
    """Through a file, as plain values: Python's, NumPy's and PyTorch's streams."""
    import random

    import numpy as np

    def draw():
        return random.random(), np.random.standard_normal(), torch.rand(3).tolist()

    draw()  # NumPy's Gaussian stream keeps a second value ready
    path = save(tmp_path, Net(), 1)
    expected = draw(), draw()
    restore_random_states(checkpoints.open_checkpoint(path).load_state()["random"])
    assert (draw(), draw()) == expected
    seeded = []
    for _ in range(2):
        seed_everything(2**63)
        seeded.append(draw())
    assert seeded[0] == seeded[1]
    json.dumps(random_states()["numpy"])  # plain numbers and strings


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_weights_can_be_read_by_whom_other_files_can(tmp_path):
    (tmp_path / "other").touch()
    write_weights({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


# --- one file at a time


def test_weights_of_any_stride_are_written_and_what_is_said_of_them(tmp_path):
    matrix = torch.arange(6.0).view(2, 3)
    write_weights({"w": matrix.t()}, tmp_path / "w.safetensors", metadata={"format": "pt"})
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("w"), matrix.t())


def test_weights_that_cannot_be_written_name_their_file(tmp_path, monkeypatch):
    def full(*arguments):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint_files, "save_file", full)
    with pytest.raises(OSError, match=r"^/.*/w.safetensors: Error while serializing: .*No space left"):
        write_weights({"w": torch.ones(2)}, tmp_path / "w.safetensors")


class Partly(io.FileIO):
    """A disk that takes a hundred bytes at a time."""

    def write(self, content):
        return super().write(content[:100])


def test_a_disk_that_takes_a_part_is_given_the_rest(tmp_path, monkeypatch):
    """A write of several gigabytes may take less than it was given, and that is no error."""
    monkeypatch.setattr(checkpoint_files, "_File", type("_File", (checkpoint_files._File, Partly), {}))
    checkpoint_files.write_state({"x": torch.arange(1000), "y": "plain"}, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt")
    assert torch.equal(found["x"], torch.arange(1000))
    assert found["y"] == "plain"


def test_a_state_that_cannot_be_written_says_why_and_where(tmp_path, monkeypatch):
    """torch.save says of a full disk only that it failed; what is not the disk's is not said to be."""
    with size_limit(1000), pytest.raises(OSError, match=r"File too large: '/.*/state.pt'$") as error:
        checkpoint_files.write_state(torch.zeros(10_000), tmp_path / "state.pt")
    assert error.value.errno == errno.EFBIG

    def broken(*arguments):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        checkpoint_files.write_state({}, tmp_path / "state.pt")


def test_a_description_is_read_where_it_can_be_walked_over_and_written_again(tmp_path):
    def read(text):
        (tmp_path / "checkpoint.json").write_text(text)
        return checkpoint_files.read_json(tmp_path, "checkpoint.json")

    def nested(before, after, times):
        return '{"a": ' + before * times + "1" + after * times + "}"

    for before, after, times in (("[", "]", 14), ('{"b": ', "}", 14), ('[{"b": ', "}]", 7)):
        assert read(nested(before, after, times))
        with pytest.raises(ValueError, match=r"checkpoint.json is damaged; use another"):
            read(nested(before, after, times + 1))
    damaged = ("[1]", "1", "null", "", '{"a": ', '{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": ' + "[" * 100_000)
    for text in damaged:  # half a surrogate pair, and what no parser walks over, among them
        with pytest.raises(
            ValueError, match=rf"^checkpoint {tmp_path}: checkpoint.json is damaged; use another checkp"
        ):
            read(text)


def test_of_what_a_file_must_hold_the_first_that_is_missing_or_wrong_is_named(tmp_path):
    form = {"step": int, "of": {"loss": (int, float), "name": str}, "masked": bool}
    right = {"step": 0, "of": {"loss": 0.5, "name": "x"}, "masked": True}

    def require(values, file):
        checkpoint_files.require(tmp_path, form, values, file)

    def with_loss(loss):
        return right | {"of": {"loss": loss, "name": "x"}}

    for values in (right, right | {"step": 2**63 - 1}, with_loss(0), with_loss(1e18)):
        require(values, checkpoints.META)
    require(with_loss(math.inf), checkpoints.STATE)  # before there was one
    for values, says in (
        (3, "no step"),
        ({}, "no step"),
        (right | {"of": {"loss": 1}}, "no of.name"),
        (right | {"step": "3"}, "a str as its step"),
        (right | {"step": True}, "a bool as its step"),
        (right | {"step": -0.5}, "a float as its step"),
        (right | {"step": -1}, "-1 as its step"),
        (right | {"step": 2**63}, "a number past 2^63 as its step"),
        (right | {"of": 3}, "a int as its of"),
        (with_loss(-0.5), "-0.5 as its of.loss"),
        (with_loss(math.nan), "nan as its of.loss"),
        (with_loss(math.inf), "a number past 2^63 as its of.loss"),
        (right | {"masked": 1}, "a int as its masked"),
    ):
        with pytest.raises(
            ValueError, match=rf"^checkpoint {tmp_path}: checkpoint.json has {re.escape(says)}; use ano"
        ):
            require(values, checkpoints.META)


def test_a_description_has_a_line_for_each_value(tmp_path):
    """`diff` and people read it."""
    checkpoint_files.write_json({"step": 3, "of": ["a"]}, tmp_path / "checkpoint.json")
    assert (tmp_path / "checkpoint.json").read_text() == '{\n  "step": 3,\n  "of": [\n    "a"\n  ]\n}\n'


def test_a_folder_that_was_renamed_is_to_be_put_back(saver):
    save_with(saver, Net(), 1)
    moved = saver.folder.rename(saver.folder.with_name("moved"))
    save_with(saver, Net(), 2)
    assert saver.lines[-1].endswith("the run goes on; put the folder back before the next save")
    with pytest.raises(OSError, match=r"was not saved.*: put the folder back, then .*python.* train.py resume="):
        saver.check()
    moved.rename(saver.folder)
    save_with(saver, Net(), 3)
    saver.check()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_not_saved(saver, value):
    net = Net()
    net.linear.weight.data[1, 2] = value
    saver.save(net, {}, {"step": 1})
    saver.wait()
    assert saver.lines == ["not saved: step 1: linear.weight is not finite"]
    assert steps(saver.folder) == []
    with pytest.raises(ValueError, match=r"\(linear.weight is not finite\): mend its cause and begin anew"):
        saver.check()
    saver.ends_for_bad_numbers = True  # which is said already
    saver.save(net, {}, {"step": 1})
    saver.check()


def test_without_an_evaluation_nothing_is_said_of_the_best(saver):
    save_with(saver, Net(), 1)
    assert "best_loss" not in checkpoints.open_checkpoint(saver.folder / "last").meta
    assert not (saver.folder / "best").exists()


def test_a_saver_that_cannot_record_a_way_back_says_so(saver, monkeypatch):
    save_with(saver, Net(), 1)
    monkeypatch.setattr(checkpoints, "go_back", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    saver.go_back(checkpoints.open_checkpoint(saver.folder / "last"))
    assert saver.lines == [f"not written: {saver.folder / checkpoints.WENT_BACK}: no space; the run goes on"]


def test_a_folder_that_is_handed_on_is_on_disk_before_its_name_is(tmp_path, monkeypatch):
    events, flush, rename = [], checkpoint_files.flush, Path.rename
    monkeypatch.setattr(checkpoint_files, "flush", lambda path: (events.append(path.name), flush(path)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append("rename"), rename(path, to))[1])
    with checkpoint_files.whole_folder(tmp_path / "mine") as folder:
        (folder / "a").touch()
    assert events == ["a", folder.name, "rename", tmp_path.name]


def test_of_a_folder_that_could_not_be_filled_nothing_is_left(tmp_path):
    def fill(error):
        with checkpoint_files.whole_folder(tmp_path / "new" / "deep" / "mine") as folder:
            (folder / "a").touch()
            raise error

    full = os.strerror(errno.ENOSPC)
    named = rf"^\[Errno {errno.ENOSPC}\] {full}: '.*/new/deep/mine'$"
    for error, says in (
        (shutil.Error([("a", "b", f"[Errno {errno.ENOSPC}] {full}")]), named),
        (SafetensorError(f"{full} (os error {errno.ENOSPC})"), named),
        (OSError("of no number"), "^of no number$"),
    ):
        with pytest.raises(OSError, match=says):
            fill(error)
        assert list((tmp_path / "new" / "deep").iterdir()) == []


@pytest.mark.parametrize("key", ["step", "save"])
def test_a_description_without_a_count_is_refused(tmp_path, key):
    described_anew(save(tmp_path, Net(), 1), lambda meta: meta.pop(key))
    with pytest.raises(ValueError, match=f"checkpoint.json has no {key}; use another checkpoint"):
        checkpoints.open_checkpoint(tmp_path / "step_000001")
