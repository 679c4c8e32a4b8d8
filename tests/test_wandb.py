"""wandb after crashes, against a server on localhost: one run, on one step axis, no step twice and none missing."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.runs import small_run
from tests.wandb_stub import WandbStub
from train import train
from training.provenance import ROOT
from training.stop import shell_command
from training.wandb_run import LoggerConfig, _can_write_below_home, _earlier_lives, send, start_wandb, wandb_mode

REMOTE = "https://somebodys-login:secret@git.example.org/somebodys-group/model.git"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
DESCRIPTION = {"settings": {}, "provenance": {"commit": COMMIT}}  # of a run

# Reads lives of a run from stdin, one JSON object a line, forks a child for each and prints how it ended: everything is
# imported once. `dies` is the step at which the child kills itself (0: never), `with_wandb` whether wandb's own process
# dies with it, as when the machine does, or None: it has all in its files before.
LIVES = """
import gc, json, os, signal, sys
from pathlib import Path
import wandb.sdk.launch  # as a run that is online does, whose child would do so each time
import train as program
from tests.runs import small_run
from training.log import RunLog

folder = Path(sys.argv[1])
names = "train.steps=12", "train.save_every=3", "train.log_every=1", "train.eval_every=0", "model.num_layers=1"
metrics = RunLog.metrics


def live(settings, run, dies, with_wandb):
    def die(self, step, values):
        metrics(self, step, values)
        if step == dies:
            if with_wandb is None:
                self._wandb.finish()
            elif with_wandb:
                children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
                assert children, "wandb has no process of its own"
                for child in children:
                    os.kill(int(child), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    RunLog.metrics = die
    program.train(settings, folder / run)


answers, sys.stdout = sys.stdout, sys.stderr
program.train(small_run(folder, *names), folder / "rehearsal")
gc.freeze()
for line in sys.stdin:
    plan = json.loads(line)
    settings = small_run(folder, *names, "resume=auto", f"logger.wandb={plan.pop('mode')}")
    if not (child := os.fork()):
        os.dup2(2, 1)
        try:
            live(settings, **plan)
        except BaseException as error:
            print(repr(error))
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
"""


def environment(url: str) -> dict[str, str]:
    """That of a fresh process: WANDB_SERVICE would tie it to the wandb process that earlier tests started."""
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return inherited | {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "GIT_COMMIT": COMMIT}


class Lives:
    """Runs in `folder` that die and go on."""

    def __init__(self, python: str, folder: Path, url: str) -> None:
        self.folder = folder
        self._output = folder / "output.txt"
        self._process = subprocess.Popen(
            [python, "-c", LIVES, str(folder)],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output.open("w"),
            text=True,
            env=environment(url),
        )

    def __enter__(self) -> "Lives":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate(timeout=60)

    def live(self, run: str, *, dies: int, mode: str, with_wandb: bool | None = True) -> None:
        plan = {"run": run, "dies": dies, "mode": mode, "with_wandb": with_wandb}
        self._process.stdin.write(json.dumps(plan) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        output = self._output.read_text()
        assert answer.strip() == str(-signal.SIGKILL if dies else 0), output
        assert "wandb failed" not in output, output


def steps(records: list[dict]) -> list[int]:
    return [record["step"] for record in records]


def written(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def server():
    with WandbStub() as stub:
        yield stub


@pytest.fixture(scope="module")
def lives(server, tmp_path_factory, quick_python):
    folder = tmp_path_factory.mktemp("lives")
    small_run(folder)  # writes the corpus
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "remote", "add", "origin", REMOTE], check=True)
    with Lives(quick_python, folder, server.url) as opened:
        yield opened


def test_three_crashes_leave_one_history(server, lives):
    """Killed at 4 (one step after a save), 8 (with wandb's process) and 11; 5, 8 and 11 are far from saved."""
    lives.live("online", dies=4, mode="online", with_wandb=False)
    lives.live("online", dies=8, mode="online")
    (run,) = server.lines
    server.forget(run, 2)  # what had not arrived when the machine died
    lives.live("online", dies=11, mode="online")
    lives.live("online", dies=0, mode="online")
    assert list(server.lines) == [run]
    history, logged = server.history(run), written(lives.folder / "online")
    assert steps(logged) == list(range(1, 13))
    assert steps(history) == list(range(1, 13))
    assert [row["_step"] for row in history] == list(range(1, 13))
    assert [row["train/loss"] for row in history] == pytest.approx([record["loss"] for record in logged])


def test_offline_each_step_is_synchronised_once(server, lives):
    """A life begins the offline copy anew, but for what a `wandb sync` has sent: that cannot be taken back."""
    run_dir, before = lives.folder / "offline", set(server.lines)

    def synchronised() -> list[int]:
        folder = max(run_dir.glob("wandb/offline-run-*"))
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", "--project", "flashgpt", str(folder)],
            cwd=lives.folder,
            capture_output=True,
            text=True,
            timeout=120,
            env=environment(server.url),
        )
        assert done.returncode == 0, done.stderr
        (run,) = set(server.lines) - before
        assert run == (run_dir / "wandb_id").read_text().split()[0]
        return steps(server.history(run))

    lives.live("offline", dies=5, mode="offline")
    lives.live("offline", dies=8, mode="offline", with_wandb=None)
    assert len(list(run_dir.glob("wandb/offline-run-*"))) == 1
    assert synchronised() == list(range(1, 9))
    lives.live("offline", dies=11, mode="offline")  # from step 6, and 9 is the first that is new
    lives.live("offline", dies=0, mode="offline")
    assert synchronised() == steps(written(run_dir)) == list(range(1, 13))
    kept = b"".join(file.read_bytes() for file in run_dir.glob("wandb/*/**/*") if file.is_file())
    assert COMMIT.encode() in kept
    assert b"somebodys" not in kept  # of the remote of the repository that the run was started in


class Recorded:
    """Stands for `wandb.init`, and for the run."""

    def __init__(self, **options) -> None:
        self.options, self.rows, self.summary = options, [], {}
        self.dir = str(options["dir"] / "wandb" / "offline-run" / "files")

    def define_metric(self, *_, **__) -> None:
        pass

    def log(self, values, step) -> None:
        self.rows.append(values)

    def finish(self, **_) -> None:
        pass


@pytest.fixture
def begun(monkeypatch) -> list[Recorded]:
    """The runs that were started in place of wandb's."""
    found: list[Recorded] = []
    monkeypatch.setattr("wandb.init", lambda **options: found.append(Recorded(**options)) or found[-1])
    return found


def test_an_error_of_wandb_without_words_ends_nothing(tmp_path, monkeypatch, capsys, one_thread):
    """As wandb's own of a service that has died."""

    class Dead(Recorded):
        def log(self, values, step) -> None:
            raise TimeoutError

    monkeypatch.setattr("wandb.init", lambda **options: Dead(**options))
    train(small_run(tmp_path, "train.steps=3", "train.log_every=1", "logger.wandb=offline"), tmp_path / "run")
    assert "wandb failed (TimeoutError); the run goes on without it" in capsys.readouterr().out


def test_metrics_are_grouped_as_the_field_has_them(tmp_path, begun, capsys, one_thread):
    train(small_run(tmp_path, "train.steps=3", "train.log_every=1", "logger.wandb=offline"), tmp_path / "a run")
    (run,) = begun
    (logged,) = [record for record in written(tmp_path / "a run") if "val_loss" in record]
    assert set(run.rows[-1]) == {"step", "tokens", "seconds", "speed/tokens_per_second"} | {
        *("train/loss", "train/lr", "train/grad_norm", "val/loss", "val/perplexity", "val/bits_per_byte")
    }
    assert run.rows[-1]["val/loss"] == run.summary["val/loss"] == logged["val_loss"]
    assert {"stopped": "", "unsaved": ""}.items() <= run.summary.items()
    assert None not in run.summary.values()  # for which wandb would import pandas
    offline = "wandb offline (logger.wandb=offline), without console output, system metrics and git remote; later: "
    said = capsys.readouterr().out
    assert f"{offline}{shell_command('wandb', 'sync', str(Path(run.dir).parent))}\n" in said
    assert " sync '" in said  # a folder with a space is quoted for the shell


@pytest.mark.parametrize(
    ("chosen", "swept", "expected"),
    [
        ({}, False, ("flashgpt", None, "sweep/0", None)),
        ({}, True, ("flashgpt", None, "sweep/0", "{parent}/sweep")),
        (
            {"project": "mine", "entity": "team", "name": "first try", "group": "tries"},
            True,
            ("mine", "team", "first try", "tries"),
        ),
    ],
)
def test_the_run_has_the_names_that_were_chosen(tmp_path, begun, chosen, swept, expected):
    run_dir = tmp_path / "sweep" / "0"
    run_dir.mkdir(parents=True)
    if swept:
        (run_dir.parent / "multirun.yaml").touch()
    start_wandb(run_dir, LoggerConfig(**chosen), "offline", "", DESCRIPTION, resume=False)
    found = tuple(begun[0].options[key] for key in ("project", "entity", "name", "group"))
    assert found == tuple(text and text.format(parent=tmp_path.name) for text in expected)
    said = begun[0].options["settings"]
    assert (said.disable_git, said.console, said.x_disable_stats) == (True, "off", True)


def test_a_run_that_nobody_named_has_the_environments_names(tmp_path, begun, monkeypatch):
    """As in every program with wandb."""
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_NAME", "run 7")
    monkeypatch.setenv("WANDB_RUN_GROUP", "tries")
    (tmp_path / "multirun.yaml").touch()
    (tmp_path / "0").mkdir()
    for chosen in ({}, {"project": "mine", "name": "first try", "group": "others"}):
        start_wandb(tmp_path / "0", LoggerConfig(**chosen), "offline", "", DESCRIPTION, resume=False)
    found = [tuple(run.options[key] for key in ("project", "name", "group")) for run in begun]
    assert found == [("theirs", "run 7", "tries"), ("mine", "first try", "others")]


def test_an_id_that_a_power_cut_damaged_is_replaced(tmp_path, begun):
    """A resumed run whose id is none would else be refused, or go on without wandb, at each start."""
    for content in (b"\xff\xfe", bytes(8), b""):
        (tmp_path / "wandb_id").write_bytes(content)
        start_wandb(tmp_path, LoggerConfig(), "offline", "", DESCRIPTION, resume=True)
        written = (tmp_path / "wandb_id").read_text().split()[0]
        assert re.fullmatch("[0-9a-f]{8}", written)
        start_wandb(tmp_path, LoggerConfig(), "offline", "", DESCRIPTION, resume=True)
        assert [run.options["id"] for run in begun[-2:]] == [written, written]


@pytest.mark.parametrize("home", ["a file", "", None])
def test_a_home_that_cannot_be_written_leaves_the_console_to_the_run(tmp_path, quick_python, home):
    """As of a container's user without one. wandb's process would print its own log beside the run's."""
    (tmp_path / "a file").touch()
    code = f"""
from tests.test_wandb import *
run, *_ = start_wandb(Path({str(tmp_path)!r}), LoggerConfig(), "offline", "", DESCRIPTION, resume=False)
run.finish()
"""
    inherited = environment("http://127.0.0.1:9")
    for name in ("HOME", "XDG_CACHE_HOME", "WANDB_CACHE_DIR"):
        inherited.pop(name, None)
    own = {} if home is None else {"HOME": home and str(tmp_path / home)}
    done = subprocess.run(
        [quick_python, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, env=inherited | own
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_home_of_another_user_is_no_place_for_logs(tmp_path, monkeypatch):
    """As in `docker run --user 1000` where HOME is root's: even to ask whether something is in it is forbidden."""

    def closed(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _can_write_below_home()
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, "relative")  # wandb refuses the first
        assert not _can_write_below_home()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "closed"))
    monkeypatch.setattr("os.stat", closed)
    monkeypatch.setattr("os.mkdir", closed)
    assert not _can_write_below_home()


def test_a_run_that_does_not_start_leaves_the_one_before_its_folder(tmp_path, monkeypatch):
    def refuse(**_):
        raise RuntimeError("Invalid project\nname")

    monkeypatch.setattr("wandb.init", refuse)
    (tmp_path / "wandb_id").write_text("abcdefgh")
    (tmp_path / "wandb" / "offline-run-20260101_000000-abcdefgh").mkdir(parents=True)
    start = partial(start_wandb, tmp_path, mode="offline", why="", description=DESCRIPTION, resume=True)
    run, said, _ = start(config=LoggerConfig())
    assert (run, said) == (None, "wandb failed to start (RuntimeError: Invalid project name); going on without it")
    with pytest.raises(ValueError, match=r"^logger.wandb=offline but wandb failed to start .*logger.wandb=disabled$"):
        start(config=LoggerConfig(wandb="offline"))
    assert [path.name for path in tmp_path.glob("wandb/*")] == ["offline-run-20260101_000000-abcdefgh"]


def test_wandb_that_cannot_be_imported_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    run, said, _ = start_wandb(tmp_path, LoggerConfig(), "offline", "", DESCRIPTION, resume=False)
    assert run is None
    assert said.startswith("wandb failed to start (ModuleNotFoundError: ")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert wandb_mode(LoggerConfig()) == ("disabled", "auto: wandb is not installed")
    with pytest.raises(ValueError, match=r"^logger.wandb=offline but wandb is not installed; "):
        wandb_mode(LoggerConfig(wandb="offline"))


def test_a_life_that_began_in_the_second_of_another_is_one(tmp_path):
    """wandb gives its folder the same name with a number."""
    (tmp_path / "wandb_id").write_text("abcdefgh 0\n")
    life = tmp_path / "wandb" / "offline-run-20260101_000000-abcdefgh-1"
    life.mkdir(parents=True)
    assert _earlier_lives(tmp_path, 8) == ("abcdefgh", 0, [life])
    (life / "run-abcdefgh.wandb.synced").touch()
    assert _earlier_lives(tmp_path, 8) == ("abcdefgh", 8, [])


def test_a_copied_folder_is_a_run_of_its_own_and_a_renamed_one_is_not(tmp_path):
    """Their steps would be two histories in one wandb run. A folder has two names where one is a link."""
    first, second, third, link = (tmp_path / name for name in ("first run", "second", "third", "link"))
    first.mkdir()
    run_id, *_ = _earlier_lives(first, 0)
    shutil.copytree(first, second)
    other_id, *_ = _earlier_lives(second, 8)
    assert other_id != run_id
    link.symlink_to(first)
    first.rename(third)
    first.symlink_to(third)
    for folder in (third, first, link):
        assert _earlier_lives(folder, 8)[0] == run_id
    third.rename(tmp_path / "elsewhere")
    third.mkdir()
    (third / "wandb_id").write_text("another1 0\n")
    assert _earlier_lives(tmp_path / "elsewhere", 8)[0] == run_id, "what took the place of a run is no copy of it"
    (third / "wandb_id").write_text("another1 0 /\0")
    assert _earlier_lives(third, 8)[0] == "another1"
    assert _earlier_lives(second, 8)[0] == other_id


def test_what_wandb_was_told_before_is_heard(tmp_path, monkeypatch):
    """By `wandb login --host`, for the user, and by `wandb disabled` and `wandb online`, for a folder."""
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".netrc").write_text("machine 127.0.0.1\n  login user\n  password " + "0" * 40 + "\n")
    assert wandb_mode(LoggerConfig()) == ("offline", "auto: no login was found")
    for folder, content in ((".config/wandb", "[default]\nbase_url = http://127.0.0.1:9\n"), ("wandb", "[default]\n")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "settings").write_text(content)
    mode, why = wandb_mode(LoggerConfig())
    assert (mode, why.split(" (")[0]) == ("offline", "auto: http://127.0.0.1:9 does not answer")
    for said in ("disabled", "offline"):
        (tmp_path / "wandb" / "settings").write_text(f"[default]\nmode = {said}\n")
        assert wandb_mode(LoggerConfig()) == (said, f"wandb's settings: mode={said}")
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = online\n")
    assert wandb_mode(LoggerConfig())[1].startswith("auto: http://127.0.0.1:9 does not answer")
    (tmp_path / "wandb" / "settings").write_text("no section")
    assert wandb_mode(LoggerConfig())[0] == "offline"


def test_what_was_no_number_is_one_for_wandb():
    """A bad step's loss is null in metrics.jsonl; wandb would leave the point out."""
    run = Recorded(dir=Path())
    send(run, {"step": 3, "loss": None})
    assert math.isnan(run.rows[0]["train/loss"])
