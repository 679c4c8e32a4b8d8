"""What ends a run early: kill -9, signals, the time limit. Nothing saved is lost, and the run goes on afterwards."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import train as program
from tests.runs import SMALL, small_run
from train import train
from training import stepper
from training.checkpoint import open_checkpoint
from training.parallel import World
from training.stop import REASONS, SIGNALS, StopRequest
from training.watchdog import SHOW_CURSOR

ROOT = Path(__file__).resolve().parent.parent


def records(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("kills", "processes"),
    [(10, 1), *(pytest.param(*some, marks=pytest.mark.slow) for some in ((200, 1), (100, 2), (30, 4)))],
)
def test_kill_9_at_random_moments(tmp_path, quick_python, kills, processes):
    """See tests/crash.py for what is checked after every kill."""
    done = subprocess.run(
        [quick_python, "-m", "tests.crash", str(tmp_path), str(kills), "0", str(processes)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["leftovers"] > 0 or processes > 1, "no kill fell into a save, so this has shown nothing"
    assert found["different_ends"] > kills // 4


# --- signals and the time limit


def stop_at(step: int, monkeypatch, *numbers: int) -> None:
    """Send this process signals while it is in `step`."""
    real, steps = stepper.training_step, iter(range(1, 1000))

    def signalled(*arguments, **options):
        if next(steps) == step:
            for number in numbers:
                os.kill(os.getpid(), number)
        return real(*arguments, **options)

    monkeypatch.setattr(stepper, "training_step", signalled)


@pytest.fixture
def _at_a_terminal():
    """Under nohup SIGHUP is ignored, in a script's background SIGINT."""
    defaults = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_at_a_terminal")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138), ("SIGHUP", 129)])
def test_a_signal_finishes_the_step_saves_and_leaves(tmp_path, monkeypatch, capsys, name, code):
    """In this process, through the command line's own entry; the shell's Ctrl-C is tested in test_train.py."""
    small_run(tmp_path)  # writes the corpus
    monkeypatch.chdir(tmp_path)
    files = ("data=text", f"data.files={tmp_path / 'corpus.txt'}", f"data.cache_dir={tmp_path / 'cache'}")
    arguments = [*files, *SMALL, "train.steps=6", "train.eval_every=2", "train.log_every=2"]
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *arguments])
        stop_at(3, patch, getattr(signal, name))
        with pytest.raises(SystemExit) as left:
            program.main()
    assert left.value.code == code
    (run_dir,) = (tmp_path / "runs" / "quickstart").iterdir()
    assert open_checkpoint(run_dir).step == 3
    assert [r["step"] for r in records(run_dir)] == [1, 2]  # step 3 is logged in no run, so not in this one
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["stopped"], summary["steps"]) == (name, 3)
    assert "unigram_val_loss" not in summary, "it reads all of the text, and a stop has little time"
    assert "val_loss" not in summary, "that of step 2 is not of these weights"
    out = capsys.readouterr().out
    assert f"stopped by {name}; to go on:\n" in out
    assert f"{shlex.quote(program.__file__)} resume={run_dir.relative_to(tmp_path)}\n" in out
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments, "resume=auto"])
    program.main()  # in the same folder: it is the experiment's newest
    assert [r["step"] for r in records(run_dir)] == [1, 2, 4, 6]
    assert json.loads((run_dir / "summary.json").read_text())["unigram_val_loss"] > 0


def test_the_time_limit_saves_and_leaves(tmp_path):
    summary = train(small_run(tmp_path, "train.steps=5", "train.max_hours=1e-9"), tmp_path / "run")
    assert (summary["steps"], summary["stopped"], summary["exit_code"]) == (1, "train.max_hours=1e-09", 75)
    assert open_checkpoint(tmp_path / "run").step == 1


def test_the_time_limit_is_in_hours(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("training.stop.time", SimpleNamespace(perf_counter=lambda: now[0]))
    stop = StopRequest(2, began=0.0)
    for seconds, requested in ((7199.0, False), (7200.0, True), (7201.0, True)):
        now[0] = seconds
        assert stop.poll() == requested
    assert not StopRequest(None).poll()


def type_two_steps(tmp_path, monkeypatch, *arguments):
    small_run(tmp_path)  # writes the corpus
    monkeypatch.chdir(tmp_path)
    files = ("data=text", f"data.files={tmp_path / 'corpus.txt'}", f"data.cache_dir={tmp_path / 'cache'}")
    monkeypatch.setattr(sys, "argv", ["train.py", *files, *SMALL, "train.steps=2", *arguments])


@pytest.mark.parametrize("sweep", [["-m", "optim.lr=1e-3,2e-3"], ["optim.lr=1e-3"]])
def test_a_signal_in_the_last_step_ends_a_sweep_and_leaves_its_run_complete(sweep, tmp_path, monkeypatch):
    """It was said to have been heard, and the next run began."""
    type_two_steps(tmp_path, monkeypatch, *sweep)
    stop_at(2, monkeypatch, signal.SIGTERM)
    if "-m" in sweep:
        with pytest.raises(SystemExit) as left:
            program.main()
        assert left.value.code == 143
    else:
        program.main()
    (summary,) = (tmp_path / "runs").rglob("summary.json")
    summary = json.loads(summary.read_text())
    assert (summary["stopped"], summary["exit_code"], summary["steps"]) == (None, 0, 2)


def test_a_signal_that_another_process_heard_in_the_last_step_ends_a_sweep(tmp_path, monkeypatch):
    type_two_steps(tmp_path, monkeypatch, "-m", "optim.lr=1e-3,2e-3")
    gather = World.all_gather
    monkeypatch.setattr(World, "all_gather", lambda self, x: gather(self, x) + ([143] if isinstance(x, int) else []))
    with pytest.raises(SystemExit) as left:
        program.main()
    assert left.value.code == 143
    assert len([*(tmp_path / "runs").rglob("summary.json")]) == 1


# for each line on stdin a child, and how it ended: PyTorch is imported once. A child is busy, as a step is;
# `signal.pause` would sleep through a signal that came just before it
LOOP = """
import os, signal, sys
from training.stop import StopRequest
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup pytest's children would ignore it
for line in sys.stdin:
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    with StopRequest() as stop:
        print(os.getpid(), flush=True)
        while stop.reason is None:
            pass
        print(stop.reason, flush=True)
        while True:
            pass
"""


@pytest.fixture(scope="module")
def busy(quick_python):
    process = subprocess.Popen(
        [quick_python, "-c", LOOP], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    yield process
    process.communicate(timeout=60)


def ended_by(busy: subprocess.Popen, *names: str) -> int:
    """The exit code of a process that gets these signals, the second when it has heard the first; it says no more.

    At the first one it says at once what will follow.
    """
    busy.stdin.write("\n")
    busy.stdin.flush()
    pid = int(busy.stdout.readline())
    os.kill(pid, getattr(signal, names[0]))
    twice = names[0] in ("SIGHUP", "SIGUSR1")
    said = "the run ends after this step, saved" + ("" if twice else "; a second one ends it at once, unsaved")
    heard = [busy.stdout.readline() for _ in range(3)]  # the loop's line and the handler's come in either order
    assert sorted(heard) == sorted(["\n", f"{names[0]}: {said}\n", f"{names[0]}\n"])
    for name in names[1:]:
        os.kill(pid, getattr(signal, name))
    return int(busy.stdout.readline())


@pytest.mark.parametrize("second", ["SIGTERM", "SIGINT"])
def test_a_second_signal_leaves_at_once(busy, second):
    """From a step that never ends, without a word."""
    assert ended_by(busy, "SIGTERM", second) == -getattr(signal, second)


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1"])
def test_what_is_said_twice_is_no_second_signal(busy, name):
    """The shell's SIGHUP and the kernel's, SLURM's SIGUSR1 and a wrapper's; another signal ends a stuck process."""
    assert ended_by(busy, name, name, "SIGTERM") == -signal.SIGTERM


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_signal_that_was_ignored_stays_so(name, monkeypatch):
    """SIGHUP under nohup; SIGINT where a script started the run with `&`: Ctrl-C is for the script's foreground."""
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), number)
            assert not stop.poll()
            monkeypatch.setattr(sys, "stdout", None)  # a closed one has no cursor to show
            os.kill(os.getpid(), signal.SIGTERM)
            assert (stop.reason, stop.exit_code) == ("SIGTERM", 143)
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_two_signals_at_once_are_one_and_leave_no_traceback(monkeypatch):
    """As systemd sends them, and as a loop that is deep in one call finds both."""
    both, reported = (signal.SIGHUP, signal.SIGTERM), []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    with StopRequest() as stop:
        signal.pthread_sigmask(signal.SIG_BLOCK, both)
        for number in both:
            signal.pthread_kill(threading.get_ident(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
        assert (stop.poll(), stop.reason) == (True, "SIGHUP")
        sys.unraisablehook(SimpleNamespace(exc_value=OSError("another")))
    assert [str(each.exc_value) for each in reported] == ["another"]
    assert sys.unraisablehook == reported.append


def test_of_several_processes_each_says_what_it_was_asked_and_does_what_all_have_heard():
    votes = []
    messages = SimpleNamespace(vote=votes.append, verdict=None)
    world = SimpleNamespace(size=2, messages=messages, is_first=False, watchdog=None)
    stop = StopRequest(2, began=time.perf_counter(), world=world)
    assert not stop.poll()
    stop.reason, stop.exit_code = "SIGTERM", 143
    assert not stop.poll(), "the other one has not heard of it yet"
    assert votes == [REASONS.index(143)]
    for code, reason in ((138, "SIGUSR1"), (75, "train.max_hours=2")):
        messages.verdict = REASONS.index(code)
        for each in (stop, StopRequest(2, began=time.perf_counter(), world=world)):  # which was asked nothing itself
            assert (each.poll(), each.exit_code, each.reason) == (True, code, reason)
    bad, votes[:], messages.verdict = StopRequest(world=world), [], None
    bad.request("a step that was not finite, step 5", 65, "to go on")  # as in all others, so that none is asked
    assert (bad.poll(), bad.exit_code, votes) == (True, 65, [])


@pytest.mark.parametrize(("number", "suspected"), [(signal.SIGTERM, ["SIGTERM"]), (signal.SIGINT, [])])
def test_of_several_processes_one_hears_what_torchrun_passes_on_and_says_nothing(number, suspected, capfd):
    """The terminal has sent it to all already; and torchrun sends a SIGTERM when another process has died."""
    found = []
    world = SimpleNamespace(size=2, is_first=False, watchdog=SimpleNamespace(suspect=found.append))
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with StopRequest(world=world) as stop:
            for _ in range(2):
                signal.raise_signal(number)
            assert stop.exit_code == 128 + number
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert found == suspected
    assert capfd.readouterr().err == ""


def test_a_terminal_gets_its_cursor_back_and_a_closed_one_is_no_error(monkeypatch):
    reads, writes = os.pipe()
    for is_terminal in (False, True):
        stdout = SimpleNamespace(isatty=lambda answer=is_terminal: answer, fileno=lambda: writes)
        monkeypatch.setattr(sys, "stdout", stdout)
        with StopRequest():
            signal.raise_signal(signal.SIGTERM)
    os.close(writes)
    assert os.read(reads, 100) == SHOW_CURSOR.encode()
    monkeypatch.setattr("training.stop.STDERR", reads)  # where nothing can be written
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
    os.close(reads)
    assert stop.reason == "SIGTERM"


def test_a_run_in_another_thread_leaves_signals_to_the_main_one():
    handlers = [signal.getsignal(number) for number in SIGNALS]

    def run():
        with StopRequest() as stop:
            return stop.poll(), [signal.getsignal(number) for number in SIGNALS]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result() == (False, handlers)


def test_a_signal_after_the_time_limit_is_the_reason():
    stop = StopRequest(max_hours=1e-9)
    stop.request("a step that was not finite, step 5", 65, "to go on")
    assert stop.poll()
    assert (stop.exit_code, stop.reason) == (65, "a step that was not finite, step 5")
