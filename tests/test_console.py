"""A console that cannot be written: programs go on without it, and lose nothing but what nobody could read."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import train as program
from conf.console import protect_console
from tests.runs import SMALL, settings, small_run
from training.checkpoint import open_checkpoint
from training.log import RunLog

ROOT = Path(__file__).resolve().parent.parent


def dead_pipe() -> io.TextIOWrapper:
    """What `| head` leaves behind."""
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


CONSOLES = {
    "full disk": lambda: os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"),
    "dead pipe": dead_pipe,
    "closed": lambda: None,
    "ascii": lambda: io.TextIOWrapper(io.BytesIO(), encoding="ascii"),
    "latin-1": lambda: io.TextIOWrapper(io.BytesIO(), encoding="latin-1"),
}


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize("console", CONSOLES)
def test_a_run_goes_on_without_its_console(tmp_path, monkeypatch, console):
    """The whole program, with words that neither ASCII nor Latin-1 has."""
    small_run(tmp_path)  # writes the corpus
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("日本語 — " * 2000)
    stdout, stderr = CONSOLES[console](), io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    arguments = ["data=text", f"data.files={tmp_path / 'corpus.txt'}", f"data.cache_dir={tmp_path / 'cache'}", *SMALL]
    arguments += ["tokenizer=characters", "train.steps=2", "train.log_every=1", "train.sample_tokens=3"]
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments, "hydra.run.dir=run"])
    program.main()  # would exit with a code
    metrics = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics == [1, 2]
    assert open_checkpoint(tmp_path / "run").step == 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_code"] == 0
    said = stderr.getvalue().splitlines()
    if isinstance(getattr(stdout, "buffer", None), io.BytesIO):
        stdout.flush()
        assert "--- a sample after 2 steps" in (text := stdout.buffer.getvalue().decode("ascii"))
        assert "\\u" in text
        assert said == []
    elif stdout is None:
        assert said == []
    else:
        assert len(said) == 1
        assert said[0].startswith("the console cannot be written (")
        with contextlib.suppress(OSError):  # or Python 3.13 warns of it when it is collected
            stdout.close()


PRINTS = """
import sys
from conf.console import protect_console
protect_console(prints_only={prints_only})
for line in range(20000):
    print("line", line, "日本")
sys.exit(3)
"""


@pytest.mark.parametrize("prints_only", [True, False])
def test_an_interpreter_ends_with_its_own_exit_code(prints_only):
    """`| head` is no error, neither while it prints nor when the interpreter flushes what is left."""
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
    code = PRINTS.format(prints_only=prints_only)
    for stdout, words in ((write, "Broken pipe"), (os.open("/dev/full", os.O_WRONLY), "No space left on device")):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment
        )
        os.close(stdout)
        assert done.returncode == 3, done.stderr
        quiet = prints_only and words == "Broken pipe"
        assert done.stderr.splitlines() == (
            [] if quiet else [f"the console cannot be written ({words}); the program goes on without it"]
        )


def test_what_a_run_says_is_said_as_it_is(tmp_path, capsys):
    """No picture takes the place of a word between colons, in a sample or in the folder to go on with."""
    RunLog(tmp_path, settings(), ("disabled", ""), {}).say("a :key: [bold]")
    assert capsys.readouterr().out == "a :key: [bold]\n"


def test_a_width_of_nothing_hides_no_word(tmp_path, monkeypatch, capsys):
    """COLUMNS=0, as of a terminal that is none."""
    monkeypatch.setenv("COLUMNS", "0")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # it is replaced
    protect_console(prints_only=False)
    RunLog(tmp_path, settings(), ("disabled", ""), {}).say("step 1")
    assert capsys.readouterr().out == "step 1\n"
