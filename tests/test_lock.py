"""A run folder belongs to one process; what kill -9 leaves behind keeps nobody out."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.folders import listing
from tests.runs import SMALL, metrics, small_run
from tests.test_bad_input import contents, told
from train import train
from training import lock
from training.lock import InUse, locked

ROOT = Path(__file__).resolve().parent.parent


HOLDER = """
import select, sys
from pathlib import Path
from training.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        Path(sys.argv[1], "metrics.jsonl").touch()  # it writes, as a run does
"""


@pytest.mark.parametrize("name", ["lock", "checkpoints/step_001000"])
def test_files_of_something_else_are_refused_and_stay(tmp_path, name):
    """A new run deleted them."""
    theirs = tmp_path / "run" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    with pytest.raises(ValueError, match=r"lock is no lock of a run|has a checkpoints/step_001000, which"):
        train(small_run(tmp_path, "train.steps=1"), tmp_path / "run")
    assert theirs.read_text() == "theirs"


def test_a_second_process_is_refused_and_kill_9_frees_the_folder(tmp_path, monkeypatch, capsys):
    """With resume=auto, as a requeued job comes while the first still runs. tests/crash.py kills whole runs."""
    story = ("train.log_every=1", "resume=auto")
    train(small_run(tmp_path, *story, "train.steps=2"), tmp_path / "run")
    before = contents(tmp_path / "run")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    try:
        files = ("data=text", f"data.files={tmp_path / 'corpus.txt'}", f"data.cache_dir={tmp_path / 'cache'}")
        arguments = [*files, *SMALL, *story, f"hydra.run.dir={tmp_path / 'run'}", "train.steps=4"]
        refused = told("train", arguments, monkeypatch, capsys)
        assert refused.code == 2
        assert refused.error == (
            f"error: run folder {tmp_path / 'run'} is in use by process {holder.pid} on {socket.gethostname()}; wait "
            "for its end, stop it, or give another hydra.run.dir\n"
        )
    finally:
        holder.kill()
        holder.communicate()
    left = contents(tmp_path / "run")
    assert left.pop("lock")
    assert left == before
    # nor is a lock that goes a sign that the run had begun, which would have its traceback kept
    refused = told("train", [*arguments, "model.num_layers=3"], monkeypatch, capsys)
    assert refused.error.endswith("use 2\n")
    assert contents(tmp_path / "run") == before
    train(small_run(tmp_path, *story, "train.steps=4"), tmp_path / "run")
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert not (tmp_path / "run" / "lock").exists()


def test_a_file_that_goes_while_a_folder_is_listed_refuses_no_run(tmp_path, monkeypatch):
    """As loss.png's hidden one, of the run that has the folder, before this one looks for its lock."""
    names = ["metrics.jsonl", ".loss.png.tmp", "lock"]
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr(Path, "iterdir", lambda folder: (folder / name for name in names))
    assert list(listing(tmp_path)) == ["metrics.jsonl"]


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


def test_who_only_looks_refuses_nobody(tmp_path, monkeypatch):
    """`holder` has the lock for a moment: here when the run asks for the first time."""
    take, asked = lock._lock, []

    def busy(descriptor):
        asked.append(descriptor)
        if len(asked) == 1:
            raise BlockingIOError
        take(descriptor)

    monkeypatch.setattr(lock, "_lock", busy)
    with locked(tmp_path):
        assert len(asked) == 2


def test_a_folder_is_left_as_it_was_found(tmp_path):
    for folder in (tmp_path, tmp_path / "new"):
        with locked(folder):
            assert (folder / "lock").exists()
        assert folder.exists() == (folder == tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_names_its_holder_alone_and_goes_before_it_is_released(tmp_path, monkeypatch):
    """A file that kill -9 left may be longer; one that is removed after its release may be another holder's."""
    (tmp_path / "lock").write_text("process 12345678901234567890 on a host with a long name, SLURM job 1\n")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    close, there = os.close, []
    with locked(tmp_path):
        assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}, SLURM job 77\n"
        monkeypatch.setattr(
            os, "close", lambda descriptor: there.append((tmp_path / "lock").exists()) or close(descriptor)
        )
    assert there == [False]


def test_two_may_look_at_once(tmp_path):
    """Neither takes the other one for a run's process."""
    (tmp_path / "lock").touch()
    looking = os.open(tmp_path / "lock", os.O_RDONLY)
    lock._lock(looking, shared=True)
    assert lock.holder(tmp_path) == ""
    os.close(looking)
    with locked(tmp_path):
        assert lock.holder(tmp_path).startswith(f"process {os.getpid()} on ")


def test_where_nothing_can_be_locked_that_is_said_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock, "fcntl", SimpleNamespace(flock=flock, LOCK_EX=2, LOCK_NB=4))
    train(small_run(tmp_path, "train.steps=2"), tmp_path / "run")
    said = capsys.readouterr().out
    assert f"lock       none: {tmp_path / 'run'} cannot be locked (" in said
    assert "start no second process in it" in said
