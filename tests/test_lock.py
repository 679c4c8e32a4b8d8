"""A run folder belongs to one process; what kill -9 leaves behind keeps nobody out."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.runs import SMALL, metrics, small_run
from tests.test_bad_input import told
from train import train
from training import lock
from training.lock import InUse, locked

ROOT = Path(__file__).resolve().parent.parent


def test_a_second_process_is_refused_and_kill_9_frees_the_folder(tmp_path, monkeypatch, capsys):
    """The command line twice in one folder; the second, as a requeued job would come, with resume=auto."""
    small_run(tmp_path)  # writes the corpus
    run_dir = tmp_path / "run"
    files = ("data=text", f"data.files={tmp_path / 'corpus.txt'}", f"data.cache_dir={tmp_path / 'cache'}")
    arguments = [*files, *SMALL, f"hydra.run.dir={run_dir}", "train.log_every=1", "train.eval_every=0", "resume=auto"]
    first = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments, "train.steps=1000000", "train.save_every=2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert any(line.startswith("step      5") for line in first.stdout)
        refused = told("train", [*arguments, "train.steps=9"], monkeypatch, capsys)
        assert refused.code == 2
        (line,) = refused.error.splitlines()
        folder = os.path.relpath(run_dir)
        assert line.startswith(f"error: run folder {folder} is in use by process {first.pid} on ")
        assert line.endswith("wait for its end, stop it, or give another hydra.run.dir")
        assert first.poll() is None
        assert not (run_dir / "error.log").exists()
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
    assert (run_dir / "lock").exists()
    last = metrics(run_dir)[-1]["step"]
    train(small_run(tmp_path, "train.log_every=1", f"train.steps={last + 2}", "resume=auto"), run_dir)
    assert [record["step"] for record in metrics(run_dir)] == list(range(1, last + 3))
    assert not (run_dir / "lock").exists()


def test_the_lock_is_taken_anew_where_its_file_was_just_removed(tmp_path, monkeypatch):
    """Opened before the holder removed it, locked after: a lock on a file that nobody else will ever see."""
    take, removed = lock._lock, []

    def late(descriptor):
        if not removed:
            removed.append((tmp_path / "lock").unlink())
        take(descriptor)

    monkeypatch.setattr(lock, "_lock", late)
    with locked(tmp_path), pytest.raises(InUse, match=f"in use by process {os.getpid()} on "), locked(tmp_path):
        pass


def test_a_folder_is_left_as_it_was_found(tmp_path):
    for folder in (tmp_path, tmp_path / "new"):
        with locked(folder):
            assert (folder / "lock").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["on this disk", "on this system"])
def test_where_nothing_can_be_locked_that_is_said_and_the_run_goes_on(tmp_path, monkeypatch, capsys, missing):
    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    refusing = SimpleNamespace(flock=flock, LOCK_EX=2, LOCK_NB=4)
    monkeypatch.setattr(lock, "fcntl", refusing if missing == "on this disk" else None)
    train(small_run(tmp_path, "train.steps=2"), tmp_path / "run")
    said = capsys.readouterr().out
    assert f"lock       none: {tmp_path / 'run'} cannot be locked (" in said
    assert "start no second process in it" in said
