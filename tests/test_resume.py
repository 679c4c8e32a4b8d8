"""Stopped at any step and resumed, a run ends with the bits of one that never stopped: weights, state, metrics."""

import itertools
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

import train as program
from tests.runs import contents, metrics, settings, small_run
from tests.test_checkpoint import described_anew
from train import train
from training import resume, speed
from training.checkpoint import open_checkpoint
from training.comparison import state
from training.curves import curve, read_run
from training.resume import held_out, refuse_another_text
from training.saver import Saver
from training.step import Step

# 36 windows and 4 a step: the first epoch ends exactly after step 9. Two micro-batches a step, dropout on; metrics,
# evaluations and samples at intervals that no stop coincides with
STEPS = 11
STORY = (
    f"train.steps={STEPS}",
    "data.seq_len=128",
    "train.batch_tokens=512",
    "train.micro_batch=2",
    "train.log_every=2",
    "train.eval_every=3",
    "train.eval_windows=2",
    "model.dropout=0.1",
    "model.num_layers=1",
)
AFTER_EACH_STEP = ("train.max_hours=1e-9", "resume=auto")


def live_step_by_step(tmp_path, run_dir, *overrides):
    """A run that is stopped after each of its steps and goes on each time; returns how many lives it had."""
    run = small_run(tmp_path, *overrides, *AFTER_EACH_STEP)
    for life in itertools.count(1):
        if train(run, run_dir)["stopped"] is None:
            return life


def same_end(one, other):
    parted = [records for records in zip(metrics(one), metrics(other), strict=True) if records[0] != records[1]]
    same_weights = contents(open_checkpoint(one)) == contents(open_checkpoint(other))
    assert (parted, same_weights) == ([], True)
    best = [open_checkpoint(run / "checkpoints" / "best") for run in (one, other)]
    assert best[0].step == best[1].step
    assert contents(best[0]) == contents(best[1])


@pytest.mark.parametrize(
    "overrides",
    [
        ("optim=adamw", "optim.lr=1", "optim.warmup_steps=10"),  # rising so far that the best loss is not the last one
        # an epoch ends in a step
        ("optim=muon", "optim.schedule=wsd", "data.seq_len=32", "train.batch_tokens=2560", "train.micro_batch=40"),
        ("data.document_mask=true", "model.attention=naive", "model.activation_checkpointing=full"),
    ],
    ids=" ".join,
)
def test_stopped_after_every_step(tmp_path, overrides):
    train(small_run(tmp_path, *STORY, *overrides), tmp_path / "whole")
    assert live_step_by_step(tmp_path, tmp_path / "parts", *STORY, *overrides) == STEPS
    same_end(tmp_path / "whole", tmp_path / "parts")


def test_other_workers_and_another_cache(tmp_path):
    """The text is tokenized anew, by more threads; the rest of the run cannot tell."""
    train(small_run(tmp_path, *STORY, "data.num_workers=1"), tmp_path / "whole")
    first = small_run(tmp_path, *STORY, "data.num_workers=1", "train.save_every=7", "train.keep_every=7")
    train(first, tmp_path / "parts")
    shutil.rmtree(tmp_path / "cache")
    path = tmp_path / "parts" / "checkpoints" / "step_000007"
    train(small_run(tmp_path, *STORY, "data.num_workers=4", f"resume={path}"), tmp_path / "parts")
    same_end(tmp_path / "whole", tmp_path / "parts")


def test_auto_begins_where_nothing_was_saved(tmp_path):
    """A run that died before its first checkpoint starts again in its folder."""
    train(small_run(tmp_path, *STORY), tmp_path / "whole")
    (tmp_path / "parts" / "checkpoints").mkdir(parents=True)
    (tmp_path / "parts" / "run.json").write_text("{}")  # a run's, which is written first
    (tmp_path / "parts" / "metrics.jsonl").write_text('{"step": 1, "loss": 99.0}\n')
    train(small_run(tmp_path, *STORY, "resume=auto"), tmp_path / "parts")
    same_end(tmp_path / "whole", tmp_path / "parts")


def test_auto_passes_over_a_damaged_checkpoint(tmp_path, capsys):
    train(small_run(tmp_path, *STORY), tmp_path / "whole")
    train(small_run(tmp_path, *STORY, "train.save_every=4"), tmp_path / "parts")
    damaged = open_checkpoint(tmp_path / "parts").path / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    train(small_run(tmp_path, *STORY, "resume=auto"), tmp_path / "parts")
    assert f"passed over: checkpoint {damaged.parent}" in capsys.readouterr().out
    same_end(tmp_path / "whole", tmp_path / "parts")


def test_auto_begins_no_run_anew_over_checkpoints_that_cannot_be_read(tmp_path):
    """Of another version, say: the new run would delete them, and the metrics too."""
    run = tmp_path / "run"
    train(small_run(tmp_path, *STORY, "train.save_every=4"), run)
    for path in (run / "checkpoints").glob("step_*/checkpoint.json"):
        path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"no whole checkpoint .*step_000011 has format 1.*; move .*/checkpoints away"):
        train(small_run(tmp_path, *STORY, "resume=auto"), run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("torn", [b"", b"\0" * 64, b'{"step": 9, "lo'], ids=["a line", "zeros", "half a line"])
def test_a_history_that_lost_its_end_is_noticed(tmp_path, capsys, torn):
    """As after a power cut: the checkpoint was flushed, the lines before it were not."""
    run = tmp_path / "run"
    train(small_run(tmp_path, *STORY, "train.steps=6", "optim.schedule=constant"), run)
    metrics = run / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:2]) + torn)
    capsys.readouterr()
    train(small_run(tmp_path, *STORY, "train.steps=8", "optim.schedule=constant", "resume=auto"), run)
    said = f"metrics    {metrics} has lost {len(lines) - 2} of its {len(lines)} lines up to step 6"
    assert said in capsys.readouterr().out
    train(small_run(tmp_path, *STORY, "train.steps=9", "optim.schedule=constant", "resume=auto"), run)
    assert "has lost" not in capsys.readouterr().out


def test_a_run_that_is_refused_late_has_changed_nothing(tmp_path):
    """`best` was a link, is a folder now, and holds somebody's notes."""
    run = tmp_path / "run"
    train(small_run(tmp_path, *STORY, "train.save_every=4", "train.keep_every=4"), run)
    best = run / "checkpoints" / "best"
    best.unlink()
    best.mkdir()
    (best / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    path = run / "checkpoints" / "step_000004"
    with pytest.raises(ValueError, match="best is a folder and no copy"):
        train(small_run(tmp_path, *STORY, f"resume={path}", "optim.lr=1"), run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_going_on_from_an_earlier_checkpoint_with_nothing_to_do_loses_no_metrics(tmp_path):
    run_dir = tmp_path / "run"
    train(small_run(tmp_path, "train.steps=4", "train.log_every=1", "train.save_every=2"), run_dir)
    before = (run_dir / "metrics.jsonl").read_bytes()
    earlier = f"resume={run_dir / 'checkpoints' / 'step_000002'}"
    assert train(small_run(tmp_path, "train.steps=2", earlier), run_dir)["steps"] == 2
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_run_that_goes_on_in_the_folder_of_another_is_refused(tmp_path):
    """It would mix their metrics and delete that one's checkpoints. One that was moved and linked is the run's own."""
    one, other = tmp_path / "one", tmp_path / "other"
    for run in (one, other):
        train(small_run(tmp_path, "train.steps=2"), run)
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"run folder .*other already holds a run; give another hydra\.run\.dir"):
        train(small_run(tmp_path, "train.steps=4", f"resume={one}"), other)
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    (other / "checkpoints" / "step_000002").rename(tmp_path / "moved")
    (other / "checkpoints" / "step_000002").symlink_to(tmp_path / "moved")
    train(small_run(tmp_path, "train.steps=4", f"resume={other}"), other)
    assert [line["step"] for line in metrics(other)] == [1, 2, 4]


def test_a_run_leaves_hidden_files_of_the_user_alone(tmp_path):
    """hydra.run.dir may name a folder that has a .config.yaml of its own."""
    names = [f".{name}" for name in ("config.yaml", "run.json", "summary.json", "metrics.jsonl")]
    for name in names:
        (tmp_path / name).write_text("mine")
    for steps in (1, 2):  # the second one cuts metrics.jsonl
        train(small_run(tmp_path, f"train.steps={steps}", "resume=auto"), tmp_path)
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * 4


def test_lines_of_two_lives_do_not_mix(tmp_path):
    """The second goes back, saves more often than it logs, and is killed before its first line."""
    run, story = tmp_path / "run", ("optim.schedule=constant", "train.eval_every=0", "train.save_every=2")
    train(small_run(tmp_path, *story, "train.steps=8", "train.log_every=1", "train.keep_every=2"), run)
    before, back = (run / "metrics.jsonl").read_bytes(), f"resume={run / 'checkpoints' / 'step_000004'}"

    def kill(step: Step) -> None:
        if step.number == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(
            small_run(tmp_path, *story, "train.steps=8", "train.log_every=8", "optim.lr=1e-5", back), run, on_step=kill
        )
    assert (run / "metrics.jsonl").read_bytes() == before
    train(small_run(tmp_path, *story, "train.steps=8", "train.log_every=8", "optim.lr=1e-5", "resume=auto"), run)
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 8]


def test_the_summary_of_an_earlier_life_does_not_outlive_its_metrics(tmp_path):
    """It gave a run that went on and was killed the seconds of the stop before, and one that went back the end too."""
    run, story = tmp_path / "run", ("optim.schedule=constant", "train.log_every=1", "train.save_every=2")
    train(small_run(tmp_path, *story, "train.steps=6"), run)
    back = small_run(tmp_path, *story, "train.steps=6", f"resume={run / 'checkpoints' / 'step_000002'}")

    def kill(step: Step) -> None:
        if step.number == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(back, run, on_step=kill)
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    assert state(read_run(run)) == "killed"
    assert train(small_run(tmp_path, *story, "train.steps=6", "resume=auto"), run)["steps"] == 6
    assert state(read_run(run)) == "finished"


def test_time_spent_goes_on(tmp_path):
    """`seconds` counts all lives of the run, so curves over time do not jump back."""
    live_step_by_step(tmp_path, tmp_path / "run", *STORY)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines if "seconds" in line]
    assert seconds == sorted(seconds)


def test_speed_is_measured_without_the_first_step_of_a_life_and_what_is_between_steps(tmp_path, monkeypatch):
    """That step compiles: here it takes 100 s, as an evaluation, a sample and a save do; every other step takes 1."""
    now = [0.0]
    for module in (speed, program):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slow(owner: type, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **o: now.append(now.pop() + 100.0) or real(*a, **o))

    measured = {"val_loss": 1.0, "val_bits_per_byte": 1.0}  # the first is the best, and the others are not saved
    monkeypatch.setattr(program.Stepper, "evaluate", lambda self, windows: dict(measured))
    slow(program.Stepper, "evaluate")
    slow(program.Stepper, "sample")
    slow(Saver, "save")
    run, story = tmp_path / "run", ("train.log_every=8", "train.batch_tokens=256", "train.sample_tokens=1")
    for steps in (8, 16):
        between = ("train.eval_every=3", "train.save_every=4", "train.sample_every=5", "resume=auto")
        life = small_run(tmp_path, *story, *between, f"train.steps={steps}")

        def on_step(step: Step, first: int = steps - 7) -> None:
            now[0] += 100.0 if step.number == first else 1.0

        train(life, run, on_step=on_step)
    _, rates = curve(read_run(run), "tokens_per_second")
    assert rates == [256.0, 256.0]


# --- what changed, what may not


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run after its first step, to be resumed in other folders."""
    folder = tmp_path_factory.mktemp("stopped")
    train(small_run(folder, *STORY, "train.max_hours=1e-9", "tokenizer=characters"), folder / "run")
    return folder


def go_on(stopped, *overrides):
    run = small_run(stopped, *STORY, "tokenizer=characters", f"resume={stopped / 'run'}", *overrides)
    shutil.rmtree(stopped / "elsewhere", ignore_errors=True)
    return train(run, stopped / "elsewhere")


def test_changes_are_printed_and_hold(stopped, capsys):
    changed = ("optim.lr=5e-4", "optim.weight_decay=0", "train.steps=3", "logger.group=null")
    changed += ("model.attention=naive", "model.attention_dropout=0.1")
    go_on(stopped, *changed)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed")]
    assert [line for line in said if "attention_dropout" in line] == ["changed    model.attention_dropout 0 -> 0.1"]
    said = [line for line in said if "model." not in line]
    assert said == [
        "changed    optim.lr 3e-3 -> 5e-4",
        "changed    optim.weight_decay 0.1 -> 0",
        "changed    train.max_hours 1e-9 -> null",
        "changed    train.steps 11 -> 3",
    ]
    groups = open_checkpoint(stopped / "elsewhere").load_state()["optimizer"][0]["param_groups"]
    assert (groups[0]["peak_lr"], groups[0]["weight_decay"]) == (5e-4, 0.0)


def test_what_a_change_does_to_the_schedule_and_the_epoch_is_printed(stopped, capsys):
    go_on(stopped, "train.steps=300", "optim.warmup_steps=50", "train.data_seed=7", "train.max_hours=1e-9")
    said = capsys.readouterr().out
    assert "changed    the next step's learning rate, 1 -> 0.04 of optim.lr\n" in said
    assert "changed    the order of the windows, which begins anew: in this epoch some come twice" in said
    assert "unchanged  the weights" not in said
    go_on(stopped, "train.max_hours=1e-9", "train.log_every=3")
    said = capsys.readouterr().out
    assert "changed    train.log_every" in said
    assert "changed    the" not in said.replace("changed    the commit", "")
    go_on(stopped, "train.max_hours=1e-9", "train.steps=12")  # 0.9999 of the rate
    said = capsys.readouterr().out
    assert "changed    train.steps 11 -> 12" in said
    assert "learning rate" not in said
    go_on(stopped, "train.steps=1", "optim.warmup_steps=50", "train.seed=7")  # of no next step
    said = capsys.readouterr().out
    assert "unchanged  the weights and dropout's random numbers, which go on as they were\n" in said
    assert "learning rate" not in said


def test_another_commit_is_printed(stopped, capsys, monkeypatch):
    then = open_checkpoint(stopped / "run").meta["provenance"]["commit"]
    monkeypatch.setenv("GIT_COMMIT", "c0ffee")
    go_on(stopped, "train.steps=3")
    assert f"changed    the commit {then or 'unknown'} -> c0ffee\n" in capsys.readouterr().out


def test_a_checkpoint_from_before_there_was_a_key_goes_on(stopped, capsys):
    """What it lacks it was trained with the default of."""
    shutil.copytree(stopped / "run", stopped / "older", symlinks=True)
    described_anew(open_checkpoint(stopped / "older").path, lambda meta: meta["settings"]["model"].pop("qk_norm"))
    older = f"resume={stopped / 'older'}"
    assert go_on(stopped, "train.steps=3", older)["steps"] == 3
    assert "changed    model.qk_norm null -> false\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"trained with model\.qk_norm=false, this run has true; use false"):
        go_on(stopped, "model.qk_norm=true", older)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("model.n_embd=64",), r"trained with model\.n_embd=32, this run has 64; use 32"),
        (("model.num_layers=2",), r"trained with model\.num_layers=1, this run has 2; use 1"),
        (("model.rope_base=1e5",), r"trained with model\.rope_base=1e4, this run has 1e5; use 1e4"),
        (("model.tie_embeddings=false",), r"trained with model\.tie_embeddings=true, this run has false"),
        (("tokenizer=bytes",), r"trained with tokenizer=characters, this run has bytes; use tokenizer=characters"),
        (
            ("data.files=OTHER",),
            r"trained with tokenizer=characters of \d+ tokens, this run's has \d+ or other ones; .* leave resume out",
        ),
        (("train.batch_tokens=1024",), r"train\.batch_tokens=512, this run has 1024; use 512, or begin .* init_from="),
        (("optim=adamw",), r"trained with optim\.name=muon, this run has adamw; use muon"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_change_is_refused_by_name(stopped, overrides, says):
    other = stopped / "other.txt"
    other.write_text("another alphabet: ÄÖÜ\n" * 300)
    with pytest.raises(ValueError, match=says):
        go_on(stopped, *(override.replace("OTHER", str(other)) for override in overrides))


def test_the_best_loss_is_of_what_is_evaluated_now(tmp_path):
    """One on another text, or on other windows of it, may be lower than any to come: `best` would stay where it was."""
    run_dir, other = tmp_path / "run", tmp_path / "other.txt"
    other.write_bytes(bytes((7 * i * i + i // 3) % 128 for i in range(6000)))
    ended = train(small_run(tmp_path, "train.steps=40", "optim.lr=1e-2"), run_dir)
    same = train(small_run(tmp_path, "train.steps=40", f"resume={run_dir}"), run_dir)
    assert same["best_val_loss"] == ended["best_val_loss"]
    fewer = train(small_run(tmp_path, "train.steps=40", f"resume={run_dir}", "train.eval_windows=2"), run_dir)
    assert fewer["best_val_loss"] == fewer["val_loss"] != same["val_loss"]
    begun = train(small_run(tmp_path, "train.steps=41", f"resume={run_dir}", f"data.files={other}"), run_dir)
    assert begun["best_val_loss"] == begun["val_loss"] > ended["best_val_loss"]
    assert open_checkpoint(run_dir / "checkpoints" / "best").step == 41
    described_anew(run_dir / "checkpoints" / "step_000041", lambda meta: meta.update(best_loss=0.5))
    again = train(small_run(tmp_path, "train.steps=41", f"resume={run_dir}", f"data.files={other}"), run_dir)
    assert again["best_val_loss"] == 0.5  # the written one's, whatever was found since


@pytest.mark.parametrize("key", ["data.seq_len", "data.document_mask", "train.eval_windows", "fingerprint"])
def test_a_best_loss_of_other_windows_does_not_count(key):
    def run(value: int) -> dict:
        groups = {"data": {"seq_len": 1, "document_mask": 1}, "train": {"eval_windows": 1, "steps": value}}
        group, _, name = key.partition(".")
        groups.get(group, {})[name] = value
        return {"settings": groups, "data_fingerprint": value if key == "fingerprint" else 1}

    assert held_out(run(1)) == held_out(run(1))
    assert held_out(run(1)) != held_out(run(2))


def test_a_run_that_went_back_and_was_killed_goes_back_again(tmp_path):
    """It went on from the last save of the branch that it had left, without that branch's lines."""
    run_dir, saved = tmp_path / "run", ("train.save_every=1", "train.keep_last=9", "train.log_every=1")
    train(small_run(tmp_path, "train.steps=4", *saved), run_dir)

    def killed(step: Step) -> None:
        if step.number == 4:  # the lines of the branch that is left are gone
            raise KeyboardInterrupt

    back = f"resume={run_dir}/checkpoints/step_000002"
    with pytest.raises(KeyboardInterrupt):
        train(
            small_run(tmp_path, back, "optim.lr=1e-2", "train.steps=6", "train.save_every=9", "train.log_every=1"),
            run_dir,
            on_step=killed,
        )
    train(small_run(tmp_path, f"resume={run_dir}", "train.steps=5", *saved), run_dir)
    train(small_run(tmp_path, "train.steps=5", *saved), tmp_path / "other")
    same_end(run_dir, tmp_path / "other")


def test_a_finished_run_keeps_the_description_of_what_trained_it(tmp_path):
    """A comparison gave its loss to a learning rate that had never trained it."""
    run_dir = tmp_path / "run"
    train(small_run(tmp_path, "train.steps=2", "optim.lr=1e-3"), run_dir)
    described = (run_dir / "config.yaml").read_text()
    train(small_run(tmp_path, f"resume={run_dir}", "train.steps=2", "optim.lr=5e-4"), run_dir)
    assert (run_dir / "config.yaml").read_text() == described

    def killed(step: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(small_run(tmp_path, f"resume={run_dir}", "train.steps=3", "optim.lr=1"), run_dir, on_step=killed)
    assert (run_dir / "config.yaml").read_text() == described
    train(small_run(tmp_path, f"resume={run_dir}", "train.steps=3", "optim.lr=5e-4"), run_dir)
    assert (run_dir / "config.yaml").read_text() != described


def test_what_is_held_out_is_refused_wherever_the_text_lies_now(stopped, tmp_path):
    """Another name for a text that is the same would hide that it was trained on."""
    moved = tmp_path / "moved.txt"
    shutil.copy(stopped / "corpus.txt", moved)
    with pytest.raises(
        ValueError, match=r"with data.validation_fraction=0.1, this run has 0.3; use 0.1, as what is held"
    ):
        go_on(stopped, f"data.files={moved}", "data.validation_fraction=0.3")
    moved.write_text((stopped / "corpus.txt").read_text()[::-1])
    assert go_on(stopped, f"data.files={moved}", "data.validation_fraction=0.3", "train.max_hours=1e-9")["steps"] == 2


def test_a_text_that_has_changed_is_refused_whatever_else_changes():
    """Keys of the data group that do not change the text do not stand for another one."""
    before = {"files": ["a.txt"], "source": "text", "seq_len": 8, "shift_windows": False, "document_mask": False}
    before |= {"cache_dir": "a", "num_workers": 1, "validation_fraction": 0.1}
    checkpoint = SimpleNamespace(path="run", meta={"data_fingerprint": "then", "settings": {"data": before}})
    same = {"seq_len": 16, "shift_windows": True, "document_mask": True, "cache_dir": "b", "num_workers": 2}
    for key, value in same.items():
        with pytest.raises(ValueError, match="trained on another text"):
            refuse_another_text(checkpoint, {"data": before | {key: value}}, "now")
        refuse_another_text(checkpoint, {"data": before | {key: value}}, "then")
    another = {"data": before | {"files": ["b.txt"], "validation_fraction": 0.2}, "tokenizer": "bytes"}
    refuse_another_text(checkpoint, another, "now")
    refuse_another_text(checkpoint, {"data": before | {"validation_fraction": 0.05}}, "now")
    of_hub = before | {"split": "train[:10%]", "validation_split": "validation"}
    hub = SimpleNamespace(path="run", meta={"data_fingerprint": "then", "settings": {"data": of_hub}})
    refuse_another_text(hub, {"data": of_hub | {"split": "train[:20%]"}}, "now")
    of_its_end = before | {"split": "train", "validation_split": None}
    for then, now, key in (
        (of_its_end, {"split": "train[:50%]", "validation_fraction": 0.05}, "split"),
        (of_hub, {"validation_split": None}, "validation_split"),
    ):
        hub.meta["settings"]["data"] = then
        with pytest.raises(ValueError, match=rf"was trained with data\.{key}="):
            refuse_another_text(hub, {"data": then | now}, "now")
    for more in ({}, {"streaming": True}, {"split": "train[10%:]"}):
        with pytest.raises(ValueError, match=r"with data.validation_split=validation, this run has train\[:10%\]; use"):
            refuse_another_text(hub, {"data": of_hub | {"validation_split": "train[:10%]"} | more}, "now")
    with pytest.raises(
        ValueError, match=r"with data.validation_fraction=0.1, this run has 0.2; use 0.1, as what is held"
    ):
        refuse_another_text(checkpoint, {"data": before | {"validation_fraction": 0.2}}, "now")


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (
            {"source": "text", "files": ["a.txt"]},
            "data.files=['a.txt'] {}, name the new one (data.files=OTHER_PATH), or",
        ),
        ({"local_dir": "x", "name": "a/b"}, "data.local_dir=x {}, name the new one (data.local_dir=OTHER_PATH), or"),
        ({"local_dir": None, "name": "a/b"}, "data.name=a/b {}, name the new one (data.revision=NEW), or"),
        ({"source": "embedded"}, "data.source=embedded {}, or"),
    ],
)
def test_a_new_text_is_named_with_the_key_of_its_source(named, says):
    data = {"source": "hub", "files": None} | named
    checkpoint = SimpleNamespace(path="run", meta={"data_fingerprint": "then", "settings": {"data": data}})
    says = says.format("has changed since (then, now now); put it back")
    with pytest.raises(ValueError, match=re.escape(says)):
        refuse_another_text(checkpoint, {"data": data}, "now")


# --- compiled, and on a GPU


@pytest.mark.slow
def test_compiled_on_the_cpu(tmp_path):
    """Dropout's masks are drawn by compiled code; its stream is resumed as well."""
    compiled = (*STORY, "hardware.compile=true", "train.steps=5", "train.save_every=2", "train.keep_every=2")
    train(small_run(tmp_path, *compiled), tmp_path / "whole")
    path = tmp_path / "whole" / "checkpoints" / "step_000002"
    train(small_run(tmp_path, *compiled, f"resume={path}"), tmp_path / "parts")
    first, second = (contents(open_checkpoint(tmp_path / run)) for run in ("whole", "parts"))
    assert first == second


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_on_the_gpu(tmp_path, optim, compiled):
    """With our kernels, bf16, dropout and accumulation; stopped in the middle of an epoch and near its end."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    common = (
        *(f"data.cache_dir={tmp_path / 'cache'}", "logger.wandb=disabled", f"optim={optim}"),
        *("model.attention=flash", "model.dropout=0.1", f"hardware.compile={compiled}", "train.sample_tokens=0"),
        *("train.steps=90", "optim.warmup_steps=5", "train.micro_batch=16", "train.eval_every=20"),
        *("train.save_every=41", "train.keep_every=41"),
    )
    train(settings(*common), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts", symlinks=True)
    path = tmp_path / "parts" / "checkpoints" / "step_000041"
    train(settings(*common, f"resume={path}"), tmp_path / "parts")
    same_end(tmp_path / "whole", tmp_path / "parts")


def test_of_another_model_its_name_is_what_differs():
    """The other keys follow from it: to do as they say would not do."""
    before = SimpleNamespace(meta={"settings": {"model": {"mlp_hidden": 2, "name": "a"}}}, theirs=None)
    with pytest.raises(ValueError, match=r"^resume=x was trained with model.name=a, this run has b; use a$"):
        resume._refuse_another_model("resume=x", before, {"model": {"mlp_hidden": None, "name": "b"}}, ())


def test_how_a_network_is_computed_and_regularised_may_change():
    then = {"attention": "naive", "loss": "plain", "activation_checkpointing": "none", "dropout": 0.0}
    then |= {"attention_dropout": 0.0, "fp8": "none"}
    now = {"attention": "sdpa", "loss": "chunked", "activation_checkpointing": "full", "dropout": 0.1}
    now |= {"attention_dropout": 0.1, "fp8": "mlp"}
    before = SimpleNamespace(meta={"settings": {"model": then}}, theirs=None)
    resume._refuse_another_model("resume=x", before, {"model": now}, resume.MAY_CHANGE)
    for key in resume.MAY_BE_LEARNED:
        with pytest.raises(ValueError, match=rf"trained with model\.{key}="):
            resume._refuse_another_model("resume=x", before, {"model": {key: 7}}, resume.MAY_CHANGE)


def test_of_a_tokenizer_the_name_and_what_its_tokens_mean_count():
    def refuse(then: dict, now: dict) -> None:
        checkpoint = SimpleNamespace(meta={"tokenizer": then, "vocab_size": 4})
        resume._refuse_another_tokenizer("resume=x", checkpoint, now, 4)

    own = {"name": "characters", "alphabet": "abc"}
    refuse(own, own)
    refuse(own, own | {"name": "elsewhere/characters"})
    with pytest.raises(ValueError, match=r"characters of 4 tokens, this run's has 4 or other ones"):
        refuse(own, own | {"alphabet": "abd"})
    with pytest.raises(ValueError, match=r"trained with tokenizer=gpt2, this run has bytes; use tokenizer=gpt2"):
        refuse({"name": "gpt2", "alphabet": ""}, {"name": "bytes", "alphabet": ""})


# ---- back to an earlier step

WORSE = ("optim.lr=3", "train.save_every=2", "train.eval_every=4", "train.keep_last=1", "train.log_every=1")


@pytest.fixture(scope="module")
def of_12_steps(tmp_path_factory):
    """A run that is best after its last step and keeps every second one."""
    folder = tmp_path_factory.mktemp("of_12_steps")
    train(small_run(folder, *WORSE, "optim.lr=6e-4", "train.steps=12", "train.keep_every=2"), folder / "run")
    assert best(folder / "run") == (12, losses(folder / "run")[12])
    assert losses(folder / "run")[4] > losses(folder / "run")[8] > losses(folder / "run")[12]
    return folder


@pytest.fixture
def copied(of_12_steps, tmp_path):
    return shutil.copytree(of_12_steps, tmp_path / "copy", symlinks=True) / "run"


def losses(run_dir):
    return {record["step"]: record["val_loss"] for record in metrics(run_dir) if "val_loss" in record}


def best(run_dir):
    """(step that `best` names, best loss of the summary)"""
    summary = json.loads((run_dir / "summary.json").read_text())
    return open_checkpoint(run_dir / "checkpoints" / "best").step, summary["best_val_loss"]


def back_to(run_dir, step, *overrides, **options):
    if step is not None:
        overrides = (f"resume={run_dir}/checkpoints/step_{step:06}", *overrides)
    return train(small_run(run_dir.parent, *WORSE, "train.steps=13", *overrides), run_dir, **options)


@pytest.mark.parametrize("step", [4, 6])
def test_going_back_takes_best_along(copied, step):
    """It stayed on the branch that was left, came to name a worse step there, and what was really best was deleted."""
    before, loss = contents(open_checkpoint(copied / "checkpoints" / "step_000004")), losses(copied)[4]
    assert back_to(copied, step)["val_loss"] > loss
    assert best(copied) == (4, loss)
    assert contents(open_checkpoint(copied / "checkpoints" / "best")) == before


def test_a_last_step_that_was_moved_and_linked_has_the_runs_best(copied, tmp_path):
    """It was taken for another run's, and the best was deleted."""
    last, loss = (copied / "checkpoints" / "last").resolve(), losses(copied)[12]
    shutil.move(last, tmp_path / "archive")
    last.symlink_to(tmp_path / "archive")
    for link in (copied / "checkpoints" / "last", copied / "checkpoints" / "best"):
        link.unlink()
        link.symlink_to(last)  # absolute, as a user makes them
    back_to(copied, None, f"resume={copied}", "train.keep_last=1", "train.steps=16")
    assert best(copied) == (12, loss)


def test_where_the_best_of_a_branch_is_gone_the_next_one_counts(copied):
    shutil.rmtree(copied / "checkpoints" / "step_000004")
    back_to(copied, 6)
    loss, step = min((loss, step) for step, loss in losses(copied).items() if step > 6)
    assert best(copied) == (step, loss)


def test_a_run_that_went_back_and_was_killed_has_the_links_of_that_branch(copied):
    def killed(step: Step) -> None:
        if step.number == 8:
            raise KeyboardInterrupt

    loss = losses(copied)[4]
    with pytest.raises(KeyboardInterrupt):
        back_to(copied, 6, "train.save_every=100", on_step=killed)
    assert [open_checkpoint(copied / "checkpoints" / name).step for name in ("last", "best")] == [6, 4]
    back_to(copied, None, f"resume={copied}")
    assert best(copied) == (4, loss)


def test_after_all_a_run_goes_on_with_the_branch_that_it_had_left(copied, capsys):
    loss = losses(copied)[8]
    back_to(copied, 4, "train.steps=6", "train.keep_every=2")
    back_to(copied, 10)
    assert best(copied) == (8, loss)
    assert re.search(r"has lost 4 of its 10 lines .* another branch of the run", capsys.readouterr().out)


def test_a_fork_has_a_best_of_its_own(of_12_steps, tmp_path):
    """What it inherited was better than all of its own, of which none was kept then."""
    fork = tmp_path / "fork"
    train(small_run(of_12_steps, *WORSE, f"resume={of_12_steps}/run/checkpoints/last", "train.steps=16"), fork)
    assert best(fork) == (16, losses(fork)[16])


def test_where_nothing_is_left_to_do_the_summary_of_later_steps_stays(copied):
    summary = (copied / "summary.json").read_text()
    back_to(copied, 6, "train.steps=6")
    assert (copied / "summary.json").read_text() == summary
    assert state(read_run(copied)) == "finished"
