"""The picture that a run leaves, and runs over each other: finished, under way, killed, swept."""

import builtins
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure

from conf import arguments
from conf.program import program
from scripts import parity
from scripts.bench.report import OTHER_COLOURS, Panel, draw_lengths
from tests.runs import SMALL, small_run, told
from tests.test_text import Echo
from train import train
from training import comparison, curves
from training.comparison import as_typed, compare, labels, loss_at, runs_below, show_sweep, state
from training.curves import LossPicture, draw_run, read_run
from training.lock import locked
from training.provenance import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def pictures(monkeypatch):
    """Runs of these tests leave theirs."""
    monkeypatch.setattr(curves, "draw_run", draw_run)


def written(folder: Path, records: list[dict], summary: dict | None = None, **settings) -> Path:
    """A run's folder as far as `scripts.compare` reads it."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    if settings:
        (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return folder


def record(step: int, **values: float) -> dict:
    return {"step": step, "loss": 5 / step, "lr": 1e-3, "grad_norm": 1.0, "tokens": 8 * step, "seconds": 1.0} | values


RECORDS = [record(1), record(2, val_loss=3.0), {"step": 3, "val_loss": 2.5}, record(4, loss=None)]


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """Every figure that is written."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: figures.append(figure) or save(figure, *a, **k))
    return figures


# ---- of one run


def test_a_run_leaves_its_picture_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(curves, "_SHARE_OF_TIME", 1e9)
    seen = []
    monkeypatch.setattr(
        curves, "draw_run", lambda run, path: seen.append(run["records"][-1]["step"]) or draw_run(run, path)
    )
    train(small_run(tmp_path, "train.steps=6", "train.eval_every=2"), tmp_path / "run")
    assert seen == [2, 4, 6]
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "logging    metrics.jsonl and, at evaluations, loss.png in " in out
    assert f"the curves are in {tmp_path / 'run' / 'loss.png'}" in out
    assert not list((tmp_path / "run").glob(".*"))


def test_the_picture_has_both_losses_the_rate_and_the_norm(tmp_path, drawn):
    draw_run(read_run(written(tmp_path / "run", RECORDS, {"unigram_val_loss": 3.28})), tmp_path / "loss.png")
    losses, rate, norm = drawn[0].axes
    training, validation, unigram = losses.lines
    assert training.get_xydata().tolist() == [[1, 5.0], [2, 2.5]]
    assert validation.get_xydata().tolist() == [[2, 3.0], [3, 2.5]]
    assert unigram.get_ydata() == [3.28, 3.28]
    assert [len(axes.lines[0].get_xdata()) for axes in (rate, norm)] == [3, 3]
    assert {line.get_color() for line in (training, validation, *rate.lines, *norm.lines)} == {"C0"}  # of the run
    shown = [text.get_text() for text in losses.get_legend().get_texts()]
    assert shown == ["training", "validation", "unigram model of the same text (3.28)"]


def test_a_few_points_are_seen(tmp_path, drawn):
    """Of a single one there is no line."""
    for number, marker in ((1, "."), (3, "."), (20, "None")):
        folder = written(tmp_path / str(number), [record(step + 1) for step in range(number)])
        draw_run(read_run(folder), tmp_path / "loss.png")
        assert [axes.lines[0].get_marker() for axes in drawn[-1].axes] == [marker] * 3


def test_drawing_takes_a_fiftieth_of_the_time_at_most(tmp_path, monkeypatch):
    now, seen = [100.0], []

    def slow(run, path):
        seen.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr(curves.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(curves, "draw_run", slow)
    picture = LossPicture(written(tmp_path / "run", RECORDS), print)
    picture.draw()
    for later in (50.0, 49.0, 2.0):
        now[0] += later
        picture.draw()
    picture.draw(last=True)
    assert seen == [100.0, 203.0, 205.0]  # 50 times 2 s after 102


def test_what_cannot_be_drawn_is_said_once_and_stops_nothing(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    monkeypatch.setattr(curves, "_SHARE_OF_TIME", 1e9)
    summary = train(small_run(tmp_path, "train.steps=4", "train.eval_every=1"), tmp_path / "run")
    assert summary["exit_code"] == 0
    out = capsys.readouterr().out
    assert out.count("No space left") == 1
    assert "the curves are in" not in out


def test_matplotlib_that_finds_no_folder_to_write_to_stops_no_run(tmp_path, monkeypatch, capsys):
    """Importing it is what fails then, with an OSError."""
    real = builtins.__import__

    def nowhere(name, *arguments, **options):
        if name == "matplotlib.figure":
            raise OSError("Matplotlib requires access to a writable cache directory")
        return real(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", nowhere)
        summary = train(small_run(tmp_path, "train.steps=2", "train.eval_every=1"), tmp_path / "run")
    assert summary["exit_code"] == 0
    assert capsys.readouterr().out.count("writable cache directory; the run goes on") == 1


@pytest.mark.parametrize("writable", [True, False])
def test_matplotlib_s_first_import_of_all_is_silent(tmp_path, writable):
    """It looks for fonts, keeps what it found in a folder of its own, and says so where information is logged. As a
    container's user without a home has none, it makes one for the time, and warns."""
    folder = tmp_path / "folder"
    folder.mkdir() if writable else folder.touch()
    code = "import logging; logging.basicConfig(level=20); import training.curves, matplotlib.figure"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"MPLCONFIGDIR": str(folder), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert not writable or list(folder.glob("fontlist-*"))
    assert not done.stdout + done.stderr


def test_a_notebook_s_screen_hides_no_picture(tmp_path):
    """`!python ...` in a notebook has MPLBACKEND of the notebook, which this environment need not have installed."""
    written(tmp_path / "run", [{"step": 1, "tokens": 8, "seconds": 1.0, "loss": 2.0, "tokens_per_second": 8}])
    done = subprocess.run(
        [sys.executable, "-m", "scripts.compare", str(tmp_path / "run"), f"out={tmp_path / 'x.png'}"],
        cwd=ROOT, env=os.environ | {"MPLBACKEND": "no_such_screen"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_a_disk_that_is_full_at_the_end_leaves_no_half_of_a_summary(tmp_path, monkeypatch, capsys):
    """With one the run could be neither drawn, nor compared, nor exported with its figures."""
    real = Path.write_text

    def full(path, content, *arguments, **options):
        if "summary.json" not in path.name:
            return real(path, content, *arguments, **options)
        real(path, content[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    train(small_run(tmp_path, "train.steps=2", "train.eval_every=1"), tmp_path / "run")
    out = capsys.readouterr().out
    assert "not written: " in out
    assert "not drawn" not in out
    assert not list((tmp_path / "run").glob("*summary.json"))
    assert state(read_run(tmp_path / "run")) == "killed"


# ---- over each other


def test_half_a_last_line_is_left_out(tmp_path):
    run = written(tmp_path / "run", RECORDS)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert [r["step"] for r in read_run(run)["records"]] == [1, 2, 3, 4]
    assert read_run(run)["records"][2] == {"step": 3, "val_loss": 2.5, "tokens": 24, "seconds": 1.0}


def test_the_speed_of_a_run_is_the_median_and_before_its_first_record_it_has_no_loss(tmp_path, drawn):
    lines = [record(step, tokens_per_second=rate) for step, rate in ((1, 30.0), (2, 10.0), (3, 20.0))]
    folder = written(tmp_path / "run", lines)
    assert compare([folder], tmp_path / "x.png")["runs"][0]["tokens_per_second"] == 20
    run = read_run(folder)
    assert (loss_at(run, "step", 0.5), loss_at(run, "step", 1)) == (None, lines[0]["loss"])


def test_each_step_is_counted_at_the_rate_that_was_measured_for_it(tmp_path):
    """One without a rate, the first of a process, at that of the steps after it."""
    rates = {1: None, 2: 10.0, 3: 20.0, 4: None, 5: 40.0, 6: None}
    lines = [{"step": step, "tokens": 20 * step, "tokens_per_second": rate} for step, rate in rates.items()]
    records = read_run(written(tmp_path / "run", lines))["records"]
    assert [each["training_seconds"] for each in records] == [2.0, 4.0, 5.0, 5.5, 6.0, 6.5]


def test_runs_are_compared_by_the_time_of_their_steps(tmp_path, capsys, drawn):
    """The first one of a sweep starts up and compiles for the others: its curve was shifted, a cell was empty."""
    rates = [record(step, tokens_per_second=8.0) for step in (2, 4)]
    steps = [record(1), rates[0], {"step": 3, "val_loss": 2.5}, rates[1]]
    late, soon = ([each | {"seconds": begin + each["step"]} for each in steps] for begin in (60.0, 0.0))
    folders = [written(tmp_path / "0", late), written(tmp_path / "1", soon), written(tmp_path / "2", [record(1)])]
    assert [each["training_seconds"] for each in read_run(folders[0])["records"]] == [1.0, 2.0, 3.0, 4.0]
    found = compare(folders, tmp_path / "x.png")
    by_time = drawn[0].axes[2]
    assert by_time.get_xlabel() == "seconds of training steps"
    shown = [line.get_xdata().tolist() for line in by_time.lines[:6]]
    assert shown == [[1, 2, 4], [3], [1, 2, 4], [3], [], []]  # of the third no rate is known
    assert found["equal"] == {"step": 1, "tokens": 8, "training_seconds": 4.0}
    assert [row["loss_at_equal_training_seconds"] for row in found["runs"]] == [1.25, 1.25, None]
    assert "4.0 s of steps" in capsys.readouterr().out


EDITS = [
    ("metrics.jsonl", "loss"),
    ("metrics.jsonl", "tokens"),
    ("metrics.jsonl", "seconds"),
    ("summary.json", "steps"),
]


@pytest.mark.parametrize("edit", EDITS)
def test_a_word_for_a_number_is_damage(tmp_path, edit):
    """Of somebody who edited it; compare ended in a traceback."""
    file, key = edit
    records = [record(1), record(2) | ({key: "x"} if file == "metrics.jsonl" else {})]
    run = written(tmp_path / "run", records, {"steps": 2} | ({key: "x"} if file == "summary.json" else {}))
    with pytest.raises(ValueError, match=r"is damaged \('x' is no number\)"):
        read_run(run)


def test_a_damaged_config_is_found_before_a_picture_is_drawn(tmp_path):
    run = written(tmp_path / "run", RECORDS)
    (run / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"config.yaml is damaged; delete it"):
        compare([run], tmp_path / "compare.png")
    assert not (tmp_path / "compare.png").exists()


def test_what_became_of_a_run(tmp_path):
    finished = written(tmp_path / "0", RECORDS, {"steps": 4, "stopped": None})
    stopped = written(tmp_path / "1", RECORDS, {"steps": 4, "stopped": "SIGTERM"})
    killed = written(tmp_path / "2", RECORDS)
    killed_later = written(tmp_path / "3", RECORDS, {"steps": 2, "stopped": "SIGTERM"})
    running = written(tmp_path / "4", RECORDS)
    with locked(running):
        states = [state(read_run(run)) for run in (finished, stopped, killed, killed_later, running)]
    assert states == ["finished", "stopped by SIGTERM", "killed", "killed", "running"]
    assert state(read_run(running)) == "killed"


LR = [{"optim": {"lr": lr}, "train": {"steps": 9}, "logger": {"tags": [str(lr)]}} for lr in (1e-3, 3e-4, 0.02, 6)]
WIDE = {"model": {"num_layers": 4, "n_embd": 128, "window": None, "mlp": "gelu"}}
DEEP = {"model": {"num_layers": 12, "n_embd": 768, "window": 9, "mlp": "swiglu"}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LR, ["optim.lr=1e-3", "optim.lr=3e-4", "optim.lr=0.02", "optim.lr=6"]),
        (
            [{"a": None, "b": True}, {"a": 1, "b": True}, {"a": 1, "b": False}],
            ["a=null, b=true", "a=1, b=true", "a=1, b=false"],
        ),
        ([WIDE, DEEP], ["model.num_layers=4", "model.num_layers=12"]),
        ([WIDE, WIDE], ["sweep/0", "sweep/1"]),
        ([WIDE], ["sweep/0"]),
    ],
)
def test_runs_are_called_by_what_differs(tmp_path, settings, expected):
    folders = [written(tmp_path / "sweep" / str(n), RECORDS, **each) for n, each in enumerate(settings)]
    assert labels(folders) == expected
    assert runs_below(tmp_path / "sweep") == folders
    assert runs_below(tmp_path) == folders  # of a name, whose sweeps are folders by their time
    assert runs_below(folders[0]) == folders[:1]
    (tmp_path / "sweep" / "multirun.yaml").write_text("")
    alone = written(tmp_path / "alone", RECORDS, **WIDE)
    assert runs_below(tmp_path) == [alone, *folders]  # a run of that name, and a sweep's


@pytest.mark.parametrize(("value", "typed"), [
    (0.001, "1e-3"), (1e4, "1e4"), (0.0015, "0.0015"), (0.0, "0"), (20 / 3, "6.666666666666667"), (math.inf, "inf"),
    (None, "null"), (True, "true"), ("a", "a"), ([1e-3, None, "a"], "[1e-3,null,a]"),
])  # fmt: skip
def test_a_value_is_shown_as_it_is_typed(value, typed):
    """With all of its digits: who types it has the same number."""
    assert as_typed(value) == typed


def test_all_runs_of_all_names_are_those_of_sweeps_too(tmp_path):
    alone = written(tmp_path / "mine" / "now", RECORDS)
    folders = [written(tmp_path / "mine" / "then" / str(n), RECORDS) for n in range(2)]
    written(alone / "of a program", RECORDS)
    (folders[0].parent / "multirun.yaml").write_text("")
    assert runs_below(tmp_path) == [alone, *folders]


def test_runs_of_their_own_that_differ_in_much_are_called_by_their_folders(tmp_path):
    folders = [written(tmp_path / name / "now", RECORDS, **each) for name, each in (("a", WIDE), ("b", DEEP))]
    assert labels(folders) == ["a/now", "b/now"]


def test_a_folder_s_brackets_are_letters(tmp_path, capsys):
    """And no markup, which the table would take out, or not understand."""
    compare([written(tmp_path / name, RECORDS) for name in ("a[b]/c[d]", "e[/f]")], tmp_path / "x.png")
    out = capsys.readouterr().out
    assert " a[b]/c[d] " in out
    assert " e[/f] " in out


def test_out_is_named_only_where_it_is_what_cannot_be_used(tmp_path, monkeypatch, capsys):
    run = written(tmp_path / "run", RECORDS)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"out=.*/file/x\.png cannot be written \(.*\); name another"):
        compare([run], tmp_path / "file" / "x.png")

    def unreadable(folder):
        raise PermissionError(13, "Permission denied", str(folder / "metrics.jsonl"))

    monkeypatch.setattr(comparison, "read_run", unreadable)
    denied = told("scripts.compare", [str(run), f"out={tmp_path / 'x.png'}"], monkeypatch, capsys)
    assert denied.code == 2
    assert f"{run / 'metrics.jsonl'}" in denied.error
    assert "out=" not in denied.error


def test_the_runs_of_a_sweep_stay_in_order(tmp_path):
    folders = [written(tmp_path / str(n), RECORDS) for n in range(12)]
    assert runs_below(tmp_path) == folders


def swept(tmp_path, monkeypatch, capsys, *overrides):
    """(what was said, the folder) of a sweep of small runs, which leaves nothing beside its folder."""
    small_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    own = ["data=text", "data.files=corpus.txt", "data.cache_dir=cache", *SMALL]
    done = told("train", ["-m", *own, *overrides], monkeypatch, capsys)
    assert done.code == 0, done.error
    (sweep,) = (tmp_path / "runs").glob("*/*")
    return done, sweep


def test_a_sweep_ends_with_its_table(tmp_path, monkeypatch, capsys, drawn):
    done, sweep = swept(tmp_path, monkeypatch, capsys, "optim.lr=1e-3,3e-4", "train.steps=2")
    assert sweep.parent.name == "quickstart"
    table = done.out[done.out.rindex("finished") - 400 :]
    for label in ("optim.lr=1e-3", "optim.lr=3e-4"):
        assert f" {label} finished " in " ".join(table.split())
    assert f"the curves over each other are in {(sweep / 'compare.png').relative_to(tmp_path)}" in done.out
    shown = [text.get_text() for text in drawn[-1].legends[0].get_texts()]
    assert shown == ["optim.lr=1e-3", "optim.lr=3e-4", "training", "validation"]

    killed = runs_below(sweep)[1]
    (killed / "summary.json").unlink()
    (sweep / "2").mkdir()
    (sweep / "2" / "metrics.jsonl").touch()  # its first step was not finite
    show_sweep([sweep / "0", killed, sweep / "2"])
    again = told("scripts.compare", [str(sweep / "0"), str(sweep), "out=again.png"], monkeypatch, capsys)  # 0 once
    rows = json.loads(again.out.splitlines()[-1])["runs"]
    assert [(row["run"], row["state"]) for row in rows] == [("optim.lr=1e-3", "finished"), ("optim.lr=3e-4", "killed")]
    assert [row["steps"] for row in rows] == [2, 2]
    assert f"left out: {sweep / '2'} has no line of metrics yet" in again.out


def test_a_sweep_without_room_for_its_picture_says_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs" / "s" / "1" / "compare.png").mkdir(parents=True)
    done, _ = swept(tmp_path, monkeypatch, capsys, "optim.lr=1e-3,3e-4", "train.steps=1", "hydra.sweep.dir=runs/s/1")
    assert "not compared: out=runs/s/1/compare.png cannot be written (Is a directory); name another" in done.out


def test_a_sweep_of_experiments_is_in_one_folder(tmp_path, monkeypatch, capsys):
    _, sweep = swept(tmp_path, monkeypatch, capsys, "experiment=quickstart,shakespeare", "train.steps=1")
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "compare.png", "multirun.yaml"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["several"]


def test_runs_that_a_sweep_resumes_have_no_name_in_common():
    for key in ("experiment", "name", "resume"):
        assert arguments.SEVERAL in arguments.read(["-m", f"{key}=a,b"], [], None, {})[1]
        assert arguments.SEVERAL not in arguments.read(["-m", f"{key}=a"], [], None, {})[1]


@pytest.mark.parametrize(("code", "runs"), [(65, 3), (143, 1)])
def test_a_sweep_outlives_a_run_that_diverges_and_no_signal(tmp_path, monkeypatch, code, runs):
    seen, ended = [], []

    @program("tool", Echo, after_sweep=ended.append)
    def main(settings: Echo, run_dir: Path) -> None:
        seen.append(settings.steps)
        if settings.steps == 1:
            sys.exit(code)

    monkeypatch.setattr(sys, "argv", ["echo.py", "-m", "steps=1,2,3", f"hydra.sweep.dir={tmp_path}"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == code
    assert seen == [1, 2, 3][:runs]
    assert len(ended) == (runs == 3)


# ---- colours


def test_a_cross_stands_where_memory_ran_out_first(tmp_path, drawn):
    rows = [{"seq_len": n, "attention": "flash", "ms": n} for n in (1, 2, 4, 8)]
    rows += [{"seq_len": 1, "attention": "naive", "ms": 5}]
    rows += [{"seq_len": n, "attention": "naive", "error": "out of memory"} for n in (8, 2, 4)]
    draw_lengths(tmp_path / "x.png", rows, [Panel("ms", "ms")], "{attention}".format_map, "")
    axes = drawn[-1].axes[0]
    assert [cross.get_offsets().tolist() for cross in axes.collections] == [[[2, 5]]]
    assert axes.get_legend_handles_labels()[1] == ["flash", "naive", "out of memory"]


@pytest.mark.parametrize("panels", [1, 2])
def test_no_name_is_cut_off_at_a_picture_s_edge(tmp_path, drawn, panels):
    names = [f"{attention}, {mode}, plain loss" for attention in ("sdpa", "naive") for mode in ("none", "full")]
    rows = [{"seq_len": n, "attention": name, "ms": n} for name in names for n in (1, 2)]
    draw_lengths(tmp_path / "x.png", rows, [Panel("ms", "ms")] * panels, "{attention}".format_map, "")
    (figure,) = drawn
    shown, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert whole.x0 <= shown.x0 < shown.x1 <= whole.x1


def test_an_attention_has_one_colour_in_every_picture(tmp_path, drawn):
    rows = [
        {"seq_len": n, "attention": name, "mode": mode, "ms": n} for name in ("naive", "flash", "mine") for n in (1, 2)
        for mode in ("none", "full")
    ]  # fmt: skip
    for chosen in (rows, rows[4:]):
        draw_lengths(tmp_path / "x.png", chosen, [Panel("ms", "ms")], "{attention}, {mode}".format_map, "")
    report = {"verdicts": {"flash": {}}, "passes": True}
    parity.draw(report, {"naive": [3, 2], "flash": [3, 2]}, [1, 1], tmp_path / "x.png", "")
    parity.draw(
        report | {"verdicts": {"no rescaling": {}}},
        {"naive": [3, 2], "no rescaling": [3, 1]},
        [1, 1],
        tmp_path / "x.png",
        "",
    )
    found = [{line.get_label(): line.get_color() for line in figure.axes[0].lines} for figure in drawn]
    assert [each.get("naive, none") or each.get("naive") for each in found] == [*("black", None, "black", "black")]
    assert [each.get("flash, full") or each.get("flash") for each in found] == ["C0", "C0", "C0", None]
    assert found[3]["no rescaling"] == OTHER_COLOURS[0]
    styles = {line.get_label(): line.get_linestyle() for line in drawn[0].axes[0].lines}
    assert (styles["flash, none"], styles["flash, full"]) == ("-", "--")


def test_a_narrow_terminal_cuts_no_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    folders = [written(tmp_path / "sweep" / str(n), RECORDS, **each) for n, each in enumerate((WIDE, DEEP))]
    compare(folders, tmp_path / "compare.png")
    assert "…" not in capsys.readouterr().out


def test_runs_are_compared_in_the_order_in_which_they_are_typed(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("scripts.compare.compare", lambda folders, out: seen.extend(folders) or {})
    typed = [written(tmp_path / name, RECORDS) for name in "dfaecb"]
    assert told("scripts.compare", [*map(str, typed)], monkeypatch, capsys).code == 0
    assert seen == typed
