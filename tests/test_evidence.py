"""The program that makes every figure again: its commands are commands, and it says which of them failed."""

import importlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from scripts import evidence
from scripts.bench.report import Report, table
from scripts.evidence_tables import PAGE, headline, inserted, page
from tests.runs import settings_of
from training.provenance import ROOT

TEXTS = {"books": "books.txt", "wikitext": "null", "shakespeare": "input.txt"}


@pytest.mark.parametrize("name", evidence.EXPERIMENTS)
def test_each_is_a_configuration_of_its_program(name):
    module, kept = evidence.program_of(name)
    main = importlib.import_module(module).main
    settings_of(main, *(argument.format(**TEXTS) for argument in evidence.EXPERIMENTS[name]))
    assert kept


def test_one_that_fails_is_named_and_what_it_made_is_not_kept(tmp_path, capsys, monkeypatch, quick_python):
    monkeypatch.setenv("GIT_COMMIT", "c0ffee")  # a copy of the code without its history can be tested, too
    monkeypatch.setattr(sys, "executable", quick_python)
    monkeypatch.setattr(evidence, "EXPERIMENTS", {"explain": ("seq_len=128",), "explain wrong": ("gpu=none",)})
    kept = tmp_path / "kept"
    with pytest.raises(SystemExit) as stopped:
        evidence.main.__wrapped__(evidence.EvidenceSettings(folder=str(kept)), tmp_path)
    assert stopped.value.code == 1
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["experiments"]
    assert [row["verdict"].partition(",")[0] for row in rows] == ["as expected", "exit code 2"]
    assert "4BHND" in (kept / "explain" / "console.txt").read_text()
    assert sorted(path.name for path in kept.iterdir()) == ["README.md", "explain"]


def test_a_verdict_that_fails_is_kept(tmp_path, monkeypatch):
    def parity(command, **_):
        for name in ("parity.json", "parity.md"):
            (tmp_path / "run" / "parity" / "x" / name).write_text("FAIL")
        return 1

    monkeypatch.setattr(evidence, "EXPERIMENTS", {"parity/x": ()})
    monkeypatch.setattr(evidence, "CHILDREN", SimpleNamespace(run=parity))
    row = evidence.run("parity/x", evidence.EvidenceSettings(folder=str(tmp_path / "kept")), tmp_path / "run")
    assert row["verdict"].startswith("exit code 1")
    assert (tmp_path / "kept" / "parity" / "x" / "parity.json").read_text() == "FAIL"


def test_what_a_benchmark_measured_before_it_broke_off_takes_no_record_from_its_place(tmp_path, monkeypatch):
    """An exception has the exit code of a verdict that fails."""

    def broken(command, **_):
        Report("masks", tmp_path / "run" / "masks", "none").add({"ms": 1.0})
        return 1

    write(tmp_path / "kept" / "masks" / "masks.json", {"rows": "all"})
    monkeypatch.setattr(evidence, "CHILDREN", SimpleNamespace(run=broken))
    row = evidence.run("masks", evidence.EvidenceSettings(folder=str(tmp_path / "kept")), tmp_path / "run")
    assert row["verdict"].startswith("exit code 1")
    assert json.loads((tmp_path / "kept" / "masks" / "masks.json").read_text()) == {"rows": "all"}


@pytest.mark.parametrize(
    ("beginning", "at_once", "number"),
    [
        ("parity/", evidence.AT_ONCE, signal.SIGTERM),
        ("parity/", evidence.AT_ONCE, signal.SIGINT),
        ("explain", 1, signal.SIGINT),
        ("explain", 1, signal.SIGHUP),
    ],
)
def test_a_signal_ends_the_experiments_that_run_and_begins_no_others(
    beginning, at_once, number, tmp_path, quick_python
):
    """They ran on after SIGTERM and SIGHUP, and those beside each other after SIGINT to this process alone."""
    os.mkfifo(tmp_path / "pids")
    (tmp_path / "python").write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'pids'}\nexec sleep 600\n")
    (tmp_path / "python").chmod(0o755)
    experiments = {f"{beginning}{which}": () for which in range(at_once + 2)}
    source = (
        "import sys; from scripts import evidence; "
        f"evidence.EXPERIMENTS = {experiments}; sys.executable = {str(tmp_path / 'python')!r}; "
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); evidence.main()"  # pytest may run under nohup
    )
    command = [quick_python, "-c", source, f"folder={tmp_path / 'kept'}", f"hydra.run.dir={tmp_path / 'run'}"]
    with open(os.open(tmp_path / "pids", os.O_RDWR)) as pids:
        done = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"GIT_COMMIT": "c0ffee"}, stderr=subprocess.PIPE)
        children = [int(pids.readline()) for _ in range(at_once)]
        done.send_signal(number)
        _, error = done.communicate()
        alive = [child for child in children if Path(f"/proc/{child}").exists()]
        for child in alive:
            os.kill(child, signal.SIGKILL)
        os.set_blocking(pids.fileno(), False)
        with pytest.raises(BlockingIOError):  # no other began
            os.read(pids.fileno(), 1)
    assert (done.returncode, error, alive) == (128 + number, b"", [])


def test_without_a_checkout_the_commit_must_be_given(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "EXPERIMENTS", {"explain": ()})
    monkeypatch.setattr(evidence, "run", lambda *_: pytest.fail("ran"))
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="give it as the variable GIT_COMMIT"):
        evidence.main.__wrapped__(evidence.EvidenceSettings(folder=str(tmp_path)), tmp_path)
    monkeypatch.setattr(evidence, "run", lambda name, *_: {"name": name, "verdict": "as expected", "seconds": 0.0})
    monkeypatch.setenv("GIT_COMMIT", "c0ffee")
    evidence.main.__wrapped__(evidence.EvidenceSettings(folder=str(tmp_path)), tmp_path)


def test_an_unknown_beginning_is_refused():
    with pytest.raises(ValueError, match="only=speed begins no name; the names are parity/books"):
        evidence.EvidenceSettings(only=["speed"])


@pytest.mark.parametrize(
    ("named", "only", "says"),
    [
        ({"books": "none/*.txt"}, "x/books", r"books=none/\*\.txt is not there, and x/books reads it; give books=PATH"),
        ({"wikitext": "none"}, "x/wikitext", "wikitext=none is not there, and x/wikitext reads it"),
        ({}, "x/peer", r"x/peer measures beside gone, which is not installed \(get it\); or name other parts"),
        ({"folder": "README.md"}, "x/plain", "folder=README.md is no folder"),
        ({"folder": "none"}, evidence.TABLES, "folder=none has no files to make tables of"),
    ],
)
def test_what_would_end_hours_later_or_empty_the_readme_is_refused_first(named, only, says, tmp_path, monkeypatch):
    experiments = {"x/plain": (), "x/books": ("data.files={books}",), "x/wikitext": ("data.local_dir={wikitext}",)}
    monkeypatch.setattr(evidence, "EXPERIMENTS", experiments | {"x/peer": ()})
    monkeypatch.setattr(evidence, "PEERS", {"x/pe": ("gone", "get it")})
    monkeypatch.setattr(evidence, "run", lambda *_: pytest.fail("ran"))
    monkeypatch.setattr(evidence, "page", lambda *_: pytest.fail("wrote"))
    with pytest.raises(ValueError, match=says):
        evidence.main.__wrapped__(evidence.EvidenceSettings(only=[only], **named), tmp_path)


def test_a_whole_name_asks_for_no_other_that_begins_with_it():
    def asked(only: str) -> list[str]:
        return [name for name in evidence.EXPERIMENTS if evidence.named(name, only)]

    assert asked("parity/books_bf16_200") == ["parity/books_bf16_200"]
    assert len(asked("parity/books_bf16_200_")) == 2
    assert set(asked("decode")) > {"decode/bits", "decode/peers"}


def test_the_command_of_a_figure_can_be_typed(monkeypatch):
    from training.provenance import command

    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "parity.py"), "train.steps=2", "hydra.run.dir=/tmp/x"])
    assert command() == "python -m scripts.parity train.steps=2"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "bench" / "loss.py"), "tokens=8"])
    assert command() == "python -m scripts.bench.loss tokens=8"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), 'bench.changes=["optim.lr=1"]', "a='b c'"])
    assert shlex.split(command()) == ["python", *(a.removeprefix(f"{ROOT}/") for a in sys.argv)]


# --- the tables

ORIGIN = {
    "commit": "c0ffee",
    "gpu": "X",
    "command": "python -m scripts.x",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
}
STEP = {"activation_checkpointing": "none", "loss": "chunked", "tokens_per_second": 590395, "step_ms": 111.0,
        "mfu": 0.476, "peak_memory_gib": 18.4, "batch_tokens": 65536}  # fmt: skip


def small_evidence(folder):
    """Files as the programs write them, with few figures."""

    def cell(name, which, seq_len, ms):
        shape = {"batch": 4, "num_heads": 2, "seq_len": seq_len, "head_dim": 64, "mask": "causal"}
        return {"attention": name, "pass": which, **shape, "ms": ms, "tflops": 400 / ms, "peak_extra_mib": 8.0 * ms}

    rows = [cell("flash", which, n, 1.0) for which in ("forward", "backward") for n in (1024, 4096)]
    rows += [cell("sdpa_cudnn", "forward", 1024, 2.0), cell("sdpa_cudnn", "forward", 4096, 8.0)]
    rows.append({"attention": "sdpa_cudnn", "pass": "backward", "seq_len": 4096, "head_dim": 64, "mask": "causal",
                 "error": "out of memory"})  # fmt: skip
    report = {"hardware": "NVIDIA X, bfloat16", "provenance": ORIGIN}
    for name in ("peers", "long"):
        write(folder / "attention" / name / "attention.json", report | {"rows": rows})
    steps = [{"attention": "flash", "seq_len": 1024} | STEP, {"attention": "naive", "seq_len": 65536} | STEP]
    steps[1]["error"] = "out of memory"
    saved = [{"attention": "flash", "seq_len": 1024, "save_ms": 24.0, "save_every_at_promise": 11} | STEP]
    for name, its_rows in (("compiled", steps), ("saving", saved)):
        write(folder / "training" / name / "bench_training.json", report | {"rows": its_rows})
    shared = [{"cell": "replicate", "processes": 1, "seq_len": 1024} | STEP]
    shared.append(shared[0] | {"processes": 2, "tokens_per_second": 1150000, "speedup": 1.95, "sum_ms": 2.2})
    shared.append({"cell": "hashes", "optimizer": "adamw", "processes": 2, "sha256": "f00", "equal": True})
    write(folder / "parallel" / "step" / "bench_parallel.json", report | {"rows": shared})
    call = {"num_heads": 12, "num_kv_heads": 4, "head_dim": 64, "context": 512, "of_goal": 0.9}
    calls = [call | {"batch": batch, "attention": "flash", "us": 10.0 * batch} for batch in (1, 2)]
    late = call | {"batch": 4, "attention": "flash", "us": 10.0, "of_goal": 1.01}
    write(folder / "decode" / "context" / "decode.json", report | {"rows": [*calls, late]})
    peers = [
        call | {"batch": 1, "attention": name, "us": us} for name, us in (("sdpa_cudnn", 30.0), ("sdpa_flash", 25.0))
    ]
    write(folder / "decode" / "peers" / "decode.json", report | {"rows": calls + peers})
    asked = {"choice": "greedy", "prompt_tokens": 9, "new_tokens": 9}
    speeds = [
        asked | {"model": name, "batch": batch, "tokens_per_second": 1e3 * batch}
        for name in ("gpt", "transformers_static")
        for batch in (1, 64)
    ]
    speeds += [row | {"choice": "top_k", "tokens_per_second": 7.0} for row in speeds]
    write(folder / "generation" / "bench_generation.json", report | {"rows": speeds})
    raced = [{"name": "ours", "seconds": 2.0, "times": 4.12, "times_best": 3.88}, {"name": "nanoGPT, lr 0.001"}]
    write(folder / "time_to_loss" / "shakespeare" / "time_to_loss.json", report | {"rows": raced, "target": 1.4698})
    noise = {span: {"typical": 1e-5, "limit": 1e-3} for span in ("early", "whole")}
    verdict = {"passes": True, "distances": {"early": 2e-5, "whole": 3e-4}, "val_loss": 5.07163}
    verdict |= {"first_outside": None, "fault": None}
    write(folder / "parity" / "books" / "parity.json", report | {"noise": noise, "verdicts": {"flash": verdict}})
    stopped = {"early": None, "whole": None}  # its loss was not finite
    fault = "before training: O of layer 0: relative error 0.5 (at most 0.03)"
    failed = verdict | {"passes": False, "distances": stopped, "first_outside": 13, "fault": fault}
    wrong = {"passes": False, "verdicts": {"no rescaling": failed, "flash": verdict}, "noise": noise}
    write(folder / "parity" / "mutants" / "parity.json", report | wrong)


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_the_tables_are_made_from_the_files_alone(tmp_path, capsys, monkeypatch):
    small_evidence(tmp_path)
    readme = tmp_path / "front.md"
    readme.write_text("before\n<!-- figures -->\nold\n<!-- /figures -->\nafter\n")
    monkeypatch.setattr(evidence, "KEPT", str(tmp_path))
    monkeypatch.setattr(evidence, "README", readme)
    chosen = evidence.EvidenceSettings(only=["tables"], folder=str(tmp_path))
    evidence.main.__wrapped__(chosen, tmp_path / "run")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["experiments"] == []
    text = (tmp_path / "README.md").read_text()
    assert "| 64, causal, 1,024 | 400 | 200 (2.00x) | 400 | - |" in text
    assert "| 64, causal, 4,096 | 400 | 50 (8.00x) | 400 | out of memory |" in text
    assert "forward 4.000x cuDNN" in text
    assert "backward 0" not in text
    assert "| backward | 4,096 | 8 | out of memory |" in text
    assert "| flash | none | chunked | 1,024 | 590,395 | 111.00 | 47.6% | 18.4 |" in text
    assert "| naive | none | chunked | 65,536 | out of memory |" in text
    assert "| 24 | 11 |" in text
    assert "| books | flash | pass | 2.0e-05 (1.0e-03) | 3.0e-04 (1.0e-03) | - | 5.0716 | - |" in text
    wrong = "before training: O of layer 0: relative error 0.5"
    assert f"| mutants | no rescaling | FAIL | - (1.0e-03) | - (1.0e-03) | 13 | 5.0716 | {wrong} |" in text
    tables = text.split("\n## ")[1:]
    assert "| 12/4, 64, 512 | 10.0 (0.90) | 20.0 (0.90) | 10.0 (1.01) |" in text
    assert "2 of 3 calls take at most 5 us and the time of those bytes." in text
    assert "| 12/4, 64, 512 | 1 | 10.0 | 30.0 | 25.0 |" in text
    assert "Flash is 2.50 to 2.50 times as fast as the faster of its peers." in text
    assert len(tables) == 12
    for part in tables:  # each says where it comes from, the table of the parity runs for each of its two
        origins = 2 if "mutants" in part else 1
        assert (
            part.count("NVIDIA X, bfloat16; torch 2.11.0, triton 3.6.0; commit c0ffee; `python -m scripts.x`")
            == origins
        )
    for title in ("Attention's error", "Output head and loss"):  # not measured
        assert title not in text
    assert readme.read_text() == f"before\n<!-- figures -->\n{headline(tmp_path)}\n<!-- /figures -->\nafter\n"
    lines = readme.read_text().splitlines()[2:-2]
    assert len(lines) == 3  # cuDNN's backward was not measured
    step = "65,536 tokens a GPU and step in sequences of 1,024; one batch gives the same bits on all of them"
    assert f"590,395 tokens/s in 18.4 GiB on one GPU, 1,150,000 on 2 ({step})" in lines[0]
    assert "a loss of 1.4698 on Shakespeare 4.1 times as soon as nanoGPT, 3.9 with its learning rate tuned" in lines[0]
    assert "1,000 alone and 64,000 in a batch of 64 (ours), 1,000 alone" in lines[1]
    assert "With the same weights" not in text  # the report does not say how near both are
    assert "rounding alone in 1 of 1 parity runs" in lines[2]
    for line in lines:
        assert line.endswith("(X, torch 2.11.0, commit c0ffee)")


def test_speed_beside_peers_is_a_geometric_mean_of_both_passes(tmp_path):
    small_evidence(tmp_path)
    path = tmp_path / "attention" / "peers" / "attention.json"
    report = json.loads(path.read_text())
    backward = [row | {"pass": "backward", "ms": row["ms"] * 2} for row in report["rows"] if row["pass"] == "forward"]
    report["rows"] = [row for row in report["rows"] if row["pass"] == "forward"] + backward
    for row in backward[:2]:
        row["ms"] = 1.0
    write(path, report)
    line = headline(tmp_path)
    assert "means over 2 shapes (" in line
    assert "4.00 times cuDNN's speed forward (2.00 to 8.00) and 8.00 times backward (4.00 to 16.00), geometric " in line
    report["rows"] = report["rows"][:-1]
    write(path, report)
    assert "and 4.00 times backward (4.00 to 4.00), geometric means over 1 to 2 shapes (" in headline(tmp_path)


def test_the_same_bits_are_said_where_all_were_equal(tmp_path):
    small_evidence(tmp_path)
    path = tmp_path / "parallel" / "step" / "bench_parallel.json"
    report = json.loads(path.read_text())
    assert "sequences of 1,024; one batch gives the same bits on all of them)" in headline(tmp_path)
    hashes = report["rows"][-1]
    for rows in ([*report["rows"], hashes | {"equal": False}], report["rows"][:-1]):
        write(path, report | {"rows": rows})
        assert "1,150,000 on 2 (65,536 tokens a GPU and step in sequences of 1,024);" in headline(tmp_path)


def test_calls_over_a_cache_with_as_many_query_heads_are_told_apart(tmp_path):
    small_evidence(tmp_path)
    path = tmp_path / "decode" / "peers" / "decode.json"
    report = json.loads(path.read_text())
    wider = [row | {"head_dim": 128, "us": 100.0} for row in report["rows"] if row["batch"] == 1]
    write(path, report | {"rows": report["rows"] + wider})
    assert "Flash is 1.00 to 2.50 times as fast as the faster of its peers." in page(tmp_path)


def test_tables_show_the_worst_error_all_passes_and_a_step_as_a_whole(tmp_path):
    report = {"hardware": "X", "provenance": ORIGIN}
    rows = [
        {"case": "full", "dtype": "float16", "ratio": dict.fromkeys(("o", "dq", "dk", "dv"), x)} for x in (3.0, 1.0)
    ]
    write(tmp_path / "attention" / "error_budget" / "error_budget.json", report | {"rows": rows})
    write(tmp_path / "parity" / "repeats" / "repeats.json", report | {"repeats": 20, "passed": {"flash": 19}})
    profile = {"groups": [{"name": "attention", "ms": 2.0, "share": 0.25}], "step_ms": 8.0}
    write(tmp_path / "profile" / "flash" / "profile.json", report | profile)
    text = page(tmp_path)
    assert "| full | float16 | 3.00 | 3.00 | 3.00 | 3.00 |" in text
    assert "| flash | 19 of 20 |" in text
    assert "| attention | 2.00 (25%) |" in text
    assert "| a step | 8.00 (100%) |" in text


def test_a_cache_that_was_timed_without_peers_has_a_table(tmp_path):
    small_evidence(tmp_path)
    path = tmp_path / "decode" / "peers" / "decode.json"
    report = json.loads(path.read_text())
    write(path, report | {"rows": [row for row in report["rows"] if row["attention"] == "flash"]})
    assert "| 12/4, 64, 512 | 1 | 10.0 |" in page(tmp_path)
    for row in report["rows"][:1]:  # nor ends it where ours found no memory
        row["error"] = "out of memory"
        del row["us"]
    write(path, report)
    assert "| 12/4, 64, 512 | 1 | - | 30.0 | 25.0 |" in page(tmp_path)


def test_a_report_is_json_whatever_its_numbers(tmp_path, capsys):
    found = {"distances": {"early": math.inf}, "losses": (1.5, math.nan)}
    Report("x", tmp_path, "none", [{"val_loss": -math.inf}], found).finish(last={"loss": math.nan})
    for text in ((tmp_path / "x.json").read_text(), capsys.readouterr().out.splitlines()[-1]):
        report = json.loads(text, parse_constant=lambda word: pytest.fail(word))
        if "rows" in report:
            assert report["distances"] == {"early": None}
            assert report["losses"] == [1.5, None]
            assert report["rows"] == [{"val_loss": None}]
        else:
            assert report["loss"] is None


def test_what_was_measured_outlives_a_benchmark_that_is_stopped(tmp_path, capsys):
    report, read = Report("x", tmp_path, "none"), lambda: json.loads((tmp_path / "x.json").read_text())
    report.add({"ms": 1.0})
    report.add({"ms": math.nan}, {"ms": 3.0})
    assert read()["rows"] == [{"ms": 1.0}, {"ms": None}, {"ms": 3.0}]
    assert read()["unfinished"]
    report.finish()
    assert "unfinished" not in read()
    assert len(read()["rows"]) == 3


def test_a_terminal_is_told_of_each_row(tmp_path, capsys, monkeypatch):
    report = Report("x", tmp_path, "none")
    report.add({"mask": "causal", "ms": 1.0})
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    report.add({"mask": "full", "pass": "forward", "ms": 1.0})
    assert capsys.readouterr().err == "2 measured: full, forward\n"


def test_a_page_without_the_comments_stays_as_it_is():
    assert inserted("nothing <!-- figures --> open", "figures", "x") == "nothing <!-- figures --> open"


def test_the_page_of_the_repository_is_that_of_its_files():
    folder = ROOT / ".github" / "evidence"
    text = page(folder)
    assert (folder / "README.md").read_text() == text, "python -m scripts.evidence tables"
    measured = [part.title for part in PAGE if list(folder.glob(part.files))]
    assert re.findall("^## (.*)$", text, flags=re.M) == measured
    paths = re.findall(r"[ '=\[](/[^ ']+)", " ".join(re.findall("`python .*`", text)))
    assert not paths, "a command names what lies on one machine alone"


def test_a_narrow_console_has_all_of_a_table(capsys):
    """What does not fit beside the names stands beside them further down; it was cut."""
    figures = {name: f"{{{name}}}" for name in ("milliseconds", "tokens_per_second", "peak_memory")}
    rows = [dict(zip(("attention", *figures), ("[flash]", 1234567, 7654321, 13), strict=True))]
    rows.append({"attention": "naive", "error": "out of memory"})
    shown = table(rows, {"attention": "{attention}"}, figures, "a title")
    for width, parts in ((80, 1), (40, 3), (45, 2), (12, 3)):
        Console(width=width).print(shown)
        out = capsys.readouterr().out
        assert "…" not in out
        assert out.count("title") == 1
        assert out.count("─ ") == parts
        if width > 12:  # else letters of a word stand below each other
            words = Counter(out.split())
            assert words["[flash]"] == parts
            assert [words[word] for word in (*figures, "1234567", "7654321", "13")] == [1] * 6
