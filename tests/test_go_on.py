"""From the command line: a run goes on as what it was, another begins with its weights, a short one just works."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets  # noqa: F401  its log would keep the first test's stderr, and later tests write to it
import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from safetensors.torch import load_file

import train as program
from conf.folders import newest_run
from data import build_tokenizer
from data.tokenizer_json import tokenizer_json
from model import GPT, attend_with, resolve_model
from tests.runs import CORPUS, SMALL, contents, metrics, settings, told
from training.checkpoint import META, open_checkpoint
from training.hardware import set_up
from training.optimizer import Optimizer, lr_factor
from training.parallel import World
from training.resume import earlier_settings
from training.speed import measured_forward, slow_on_a_cpu
from training.stop import resume_command, shell_command

# nothing of it is a default: what is forgotten shows
OWN = (
    *("data=text", "data.files=own.txt", "data.cache_dir=cache", "name=mine", "tokenizer=characters"),
    *(key for key in SMALL if not key.startswith(("model.attention", "optim.warmup"))),
    *("optim=adamw", "optim.lr=2e-3", "optim.schedule=wsd", "train.steps=6", "train.log_every=1", "train.seed=3"),
    *("model.dropout=0.1", "train.eval_every=4"),
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of a newcomer's, with a text of their own."""
    monkeypatch.chdir(tmp_path)
    Path("own.txt").write_text(CORPUS)
    return tmp_path


@pytest.fixture
def train(monkeypatch, capsys):
    return lambda *arguments: told("train", list(arguments), monkeypatch, capsys)


def the_run(name: str = "mine") -> Path:
    (found,) = Path("runs", name).iterdir()
    return found


def changes(out: str) -> list[str]:
    return [line.removeprefix("changed    ") for line in out.splitlines() if line.startswith("changed")]


def test_what_a_stopped_run_advises_goes_on_when_pasted_and_ends_with_the_same_bits(
    here, train, quick_python, monkeypatch
):
    """Into a shell, in whatever folder the run lies."""
    monkeypatch.setattr(sys, "executable", quick_python)
    assert train(*OWN, "hydra.run.dir=whole").code == 0
    stopped = train(*OWN, """hydra.run.dir='it\\'s "mine", a=b'""", "train.max_hours=1e-9")
    assert stopped.code == 75
    advised = next(line for line in stopped.out.splitlines() if line.startswith("  ")).strip()
    pasted = subprocess.run(f"{advised} train.max_hours=null", shell=True, capture_output=True, text=True, timeout=300)
    assert pasted.returncode == 0, pasted.stderr
    assert changes(pasted.stdout) == ["train.max_hours 1e-9 -> null"]
    run = Path("""it's "mine", a=b""")
    assert metrics(run) == metrics(Path("whole"))
    assert contents(open_checkpoint(run)) == contents(open_checkpoint("whole"))


@pytest.mark.parametrize(
    "folder",
    [
        *("runs/quickstart/2026-11-22_01-02-03", "runs/a b", "runs/it's", 'a"b', "runs/a=b,c", "[x]", "{a: 1}"),
        *(
            "runs/日本",
            "a\\",
            "a\\'b",
            'a\\"b\\\\',
            "${x}",
            "\\${x}",
            "$HOME",
            "null",
            "true",
            "auto",
            "3",
            "1e3",
            "a#b",
        ),
    ],
)
def test_any_folder_survives_the_shell_and_hydra(folder):
    argument, change = shlex.split(resume_command(Path(folder), "train.steps=9"))[-2:]
    value = OverridesParser.create().parse_override(argument).value()
    assert value != "auto"
    assert os.path.normpath(OmegaConf.create({"resume": value}).resume) == folder
    assert change == "train.steps=9"


def test_the_command_is_for_the_shell_that_the_run_began_in(monkeypatch, tmp_path):
    root = Path(program.__file__).resolve().parent
    monkeypatch.chdir(root)
    monkeypatch.setenv("UV", "/usr/bin/uv")
    assert resume_command(Path("runs/a/b")) == "uv run python train.py resume=runs/a/b"
    assert shell_command("wandb", "sync", "my runs/a") == "uv run wandb sync 'my runs/a'"
    monkeypatch.delenv("UV")
    beside = Path(program.sys.executable).parent
    monkeypatch.setattr("training.stop.shutil.which", lambda name: None)
    assert shell_command("wandb", "sync", "x") == f"{beside / 'wandb'} sync x"
    own = {"python": program.sys.executable, "wandb": str(beside / "wandb")}
    monkeypatch.setattr("training.stop.shutil.which", own.get)
    assert resume_command(Path("runs/a/b")) == "python train.py resume=runs/a/b"
    assert shell_command("wandb", "sync", "x") == "wandb sync x"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert resume_command(Path("runs/a/b")) == "python train.py resume=runs/a/b"
    # one process may not do: for rows that two share, or for the memory that two have
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    own["torchrun"] = str(beside / "torchrun")
    assert resume_command(Path("runs/a/b")) == "torchrun --nproc-per-node 2 train.py resume=runs/a/b"
    monkeypatch.chdir(tmp_path)
    assert f"{shlex.quote(str(root / 'train.py'))} resume=" in resume_command(Path("runs/a/b"))
    monkeypatch.setenv("UV", "/usr/bin/uv")  # which finds no project here
    assert shell_command("wandb", "sync", "x") == "wandb sync x"
    own["wandb"] = "/usr/bin/wandb"  # of another installation
    assert shell_command("wandb", "sync", "x") == f"{beside / 'wandb'} sync x"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert f"{shlex.quote(str(root / 'train.py'))} resume=" in resume_command(tmp_path / "run")


def test_the_command_line_changes_on_top(here, train):
    assert train(*OWN, "train.max_hours=1e-9").code == 75
    assert changes(train("resume=auto", "name=mine", "optim.lr=1e-3").out) == ["optim.lr 2e-3 -> 1e-3"]
    # an experiment and a group that were typed again are those of the run, with its context, files and rate
    again = train("resume=auto", "data=text", "optim=adamw", "name=mine", "experiment=quickstart", "train.max_hours=1")
    assert changes(again.out) == ["train.max_hours 1e-9 -> 1"]
    assert "settings   the run's own; experiment is not read again" not in again.out  # it is the program's default
    needs_files = train("resume=auto", "name=mine", "experiment=shakespeare", "train.max_hours=1")
    assert needs_files.code == 0, needs_files.error  # it has some
    other = train("resume=auto", "name=mine", "experiment=parity", "train.steps=7", "train.max_hours=null")
    assert other.code == 0
    assert "settings   the run's own; experiment is not read again" in other.out
    assert yaml.safe_load((the_run() / "config.yaml").read_text())["model"]["n_embd"] == 32
    assert json.loads((the_run() / "summary.json").read_text())["steps"] == 7


def test_a_group_of_ones_own_that_is_typed_again_changes_nothing(here, train):
    Path("own/model").mkdir(parents=True)
    Path("own/model/mine.yaml").write_text("rope_base: 5000\n")
    mine = "--config-dir=own", "model=mine"
    assert train(*OWN, *mine, "train.max_hours=1e-9").code == 75
    again = train("resume=auto", "name=mine", *mine, "train.max_hours=1")
    assert (changes(again.out), again.error) == (["train.max_hours 1e-9 -> 1"], "")


def test_another_text_is_refused_unless_it_is_named(here, train):
    run = train(*OWN, "train.max_hours=1e-9")
    assert run.code == 75
    own = Path("own.txt")
    before = {path: path.read_bytes() for path in the_run().rglob("*") if path.is_file()}
    shutil.copy(own, "copy.txt")
    own.write_text(own.read_text() * 2)
    refused = train("resume=auto", "name=mine")
    assert refused.code == 2
    assert "data.files=['own.txt'] has changed since" in refused.error
    assert "data.files=OTHER_PATH" in refused.error
    assert {path: path.read_bytes() for path in the_run().rglob("*") if path.is_file()} == before
    Path("new.txt").write_text(own.read_text())
    named = train("resume=auto", "name=mine", "data.files=copy.txt")  # the old text under another name
    assert changes(named.out) == ["data.files [own.txt] -> [copy.txt]"]
    assert "the text itself" in train("resume=auto", "name=mine", "data.files=new.txt").out
    assert "trained with tokenizer=characters" in train("resume=auto", "name=mine", "tokenizer=bytes").error
    assert "model.num_layers=2, this run has 4" in train("resume=auto", "name=mine", "model=tiny").error


@pytest.mark.parametrize("steps", [6, 5])
def test_a_run_that_was_killed_after_its_last_save_ends_well(here, train, steps):
    """As often as it is asked."""
    assert train(*OWN).code == 0
    summary, log = the_run() / "summary.json", (the_run() / "metrics.jsonl").read_bytes()
    whole = json.loads(summary.read_text())
    for _ in range(2):
        summary.unlink()
        again = train(*OWN, "resume=auto", f"train.steps={steps}")
        assert (again.code, again.error) == (0, "")
        assert f"complete   all of train.steps={steps} are done; raise train.steps to go on" in again.out
        found = json.loads(summary.read_text())
        assert Path(found.pop("checkpoint")).resolve() == Path(whole["checkpoint"]).resolve()
        assert found.items() <= (whole | {"seconds": found["seconds"]}).items()
        assert (the_run() / "metrics.jsonl").read_bytes() == log


def test_a_run_that_died_before_its_first_checkpoint_begins_again_as_it_was(here, train):
    assert train(*OWN, "train.max_hours=1e-9").code == 75
    shutil.rmtree(the_run() / "checkpoints")
    (the_run() / "checkpoints").mkdir()
    assert train("resume=auto", "name=mine", "train.max_hours=null").code == 0
    meta = open_checkpoint(the_run()).meta
    assert (meta["step"], meta["tokenizer"]["name"]) == (6, "characters")
    assert meta["settings"]["optim"]["lr"] == 2e-3
    shutil.rmtree(the_run() / "checkpoints")
    (the_run() / "checkpoints").mkdir()
    (the_run() / "config.yaml").write_text("a: [")
    assert "config.yaml or run.json is damaged" in train("resume=auto", "name=mine").error


def test_auto_takes_the_newest_by_time_and_says_what_it_took(here, train):
    """Not a folder that somebody renamed; nor is it the first run of a name whose newest died before it saved."""
    assert train(*OWN, "train.max_hours=1e-9").code == 75
    (first := the_run()).rename(first.with_name("to be kept"))
    newest = shutil.copytree(first.with_name("to be kept"), first, symlinks=True)
    assert f"resumed    from {newest.resolve()}/" in train("resume=auto", "name=mine").out
    shutil.rmtree(newest / "checkpoints")
    (newest / "checkpoints").mkdir()
    assert f"resumed    nothing: {newest} has no checkpoint yet" in train("resume=auto", "name=mine").out


def test_auto_says_how_the_last_sweep_of_a_name_goes_on(here, train):
    for time in ("2026-01-01_00-00-00", "2026-01-02_00-00-00"):
        (Path("runs/mine") / time / "0" / "checkpoints").mkdir(parents=True)
        (Path("runs/mine") / time / "multirun.yaml").write_text("")
    last = "hydra.sweep.dir=runs/mine/2026-01-02_00-00-00 goes on with the sweep there"
    assert last in train(*OWN, "resume=auto").out
    shutil.copytree("runs/mine", "runs/k=v")  # what it says is as it is typed
    said = """'hydra.sweep.dir="runs/k=v/2026-01-02_00-00-00"' goes on with the sweep there"""
    assert said in train(*OWN, "name=k=v", "resume=auto", "hydra.run.dir='runs/k=v/2026-01-03_00-00-00'").out
    Path("runs/mine/2026-01-03_00-00-00/1").mkdir(parents=True)
    Path("runs/mine/2026-01-03_00-00-00/multirun.yaml").write_text("")
    member = "hydra.run.dir=runs/mine/2026-01-0{}_00-00-00/1"
    assert last in train(*OWN, "resume=auto", member.format(3)).out  # the first of a sweep, in vain
    assert "with the sweep there" not in train(*OWN, "resume=auto", member.format(2)).out  # a sweep that goes on


def test_another_context_is_one_that_the_run_s_steps_can_have(here, train):
    assert train(*OWN, "train.steps=1").code == 0
    refused = train(f"resume={the_run()}", "data.seq_len=48", "train.steps=2").error
    assert "train.batch_tokens=256 is not a multiple of data.seq_len=48; use data.seq_len=" in refused
    remedy = refused.split()[-1]
    assert train(f"resume={the_run()}", remedy, "train.steps=2").code == 0


def test_the_tenth_run_of_a_second_is_newer_than_the_ninth(here):
    for name in ("2026-01-02_00-00-00", "2026-01-02_00-00-00_9", "2026-01-02_00-00-00_10", "renamed"):
        Path("runs/mine", name, "checkpoints").mkdir(parents=True)
    assert newest_run("mine", "quickstart") == Path("runs/mine/2026-01-02_00-00-00_10")


def test_a_run_that_goes_on_with_nothing_replaces_nobodys_files(here, train):
    Path("ours").mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        Path("ours", name).write_text('{"step": 1}\n{"step": 2}\n')
        refused = train(*OWN, "hydra.run.dir=ours", "resume=auto")
        assert refused.code == 2
        assert "give another hydra.run.dir" in refused.error
        assert Path("ours", name).read_text() == '{"step": 1}\n{"step": 2}\n'
        Path("ours", name).unlink()


def test_the_folder_of_a_tokenizer_may_be_moved(here, train):
    """Tokens in the cache and checkpoints hold what was in it."""
    pytest.importorskip("tokenizers")
    Path("theirs").mkdir()
    Path("theirs/tokenizer.json").write_text(json.dumps(tokenizer_json(build_tokenizer("bytes"))))
    Path("theirs/tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert train(*OWN, "tokenizer=theirs", "train.max_hours=1e-9").code == 75
    Path("theirs").rename("moved")
    again = train("resume=auto", "name=mine", "tokenizer=moved")
    assert again.code == 75, again.error
    shutil.rmtree("cache")
    last = train("resume=auto", "name=mine", "tokenizer=moved", "train.max_hours=null")
    assert last.code == 0, last.error
    assert "trained with tokenizer=" in train("resume=auto", "name=mine", "tokenizer=bytes").error


def test_what_was_left_open_is_chosen_anew(here, train):
    """On the machine that goes on, which may be another: the checkpoint holds both."""
    assert train(*OWN, "hardware.dtype=auto", "train.max_hours=1e-9").code == 75
    meta = open_checkpoint(the_run()).meta
    assert meta["settings"]["model"]["attention"] == "sdpa"
    found = earlier_settings("auto", the_run())
    assert (found["model.attention"], found["model.loss"], found["train.micro_batch"]) == ("auto", "auto", None)
    assert (found["hardware.dtype"], found["hardware.device"]) == ("auto", "cpu")


def test_settings_of_another_version_or_of_a_stranger_refer_to_nothing(here, train, monkeypatch):
    assert train(*OWN, "train.max_hours=1e-9").code == 75
    description = the_run() / "checkpoints" / "last" / META
    meta = json.loads(description.read_text())
    meta["settings"]["optim"]["of_yesterday"] = 1
    meta["settings"]["logger"]["group"] = "${oc.env:HOME}"
    meta["settings"]["profile"] = True  # it is asked for each time
    del meta["settings"]["init_from"]
    description.write_text(json.dumps(meta))
    manifest = description.parent / "manifest.json"
    monkeypatch.setattr("training.checkpoint.fingerprint", lambda path: json.loads(manifest.read_text())[path.name])
    found = train("resume=auto", "name=mine", "train.max_hours=null")
    assert found.code == 0, found.error
    said = ["optim.of_yesterday 1 -> null", "profile true -> false", "train.max_hours 1e-9 -> null"]
    assert changes(found.out) == said
    assert yaml.safe_load((the_run() / "config.yaml").read_text())["logger"]["group"] == "${oc.env:HOME}"


# --- a run of its own with another's weights


def test_a_run_begins_with_the_weights_of_another(here, train):
    assert train(*OWN, "model.dropout=0.1").code == 0
    source = the_run() / "checkpoints" / "last"
    tuning = ("data=text", "data.files=own.txt", "data.cache_dir=cache", "data.seq_len=32", "name=tuned")
    tuning = (*tuning, f"init_from={source}", "train.batch_tokens=256", "train.sample_tokens=0", "hardware.device=cpu")
    one_step = (*tuning, "logger.wandb=disabled", "train.eval_windows=4", "train.steps=3", "optim.lr=1e-30")
    tuned = train(*one_step, "train.max_hours=1e-9")
    assert tuned.code == 75, tuned.error
    assert f"weights    of {source.resolve()} after 6 steps; all else begins anew" in tuned.out
    found = open_checkpoint(the_run("tuned"))
    assert (found.step, found.meta["settings"]["optim"]["name"]) == (1, "muon")
    assert found.meta["settings"]["model"]["dropout"] == 0.0, "no part of the weights"
    weights = load_file(source / "model.safetensors")
    assert all(value.equal(weights[name]) for name, value in load_file(found.path / "model.safetensors").items())
    assert len(metrics(the_run("tuned"))) == 1
    again = train("resume=auto", "name=tuned", "train.max_hours=null")  # with its own weights
    assert again.code == 0, again.error
    assert "after 1 steps" in again.out
    assert "weights    of" not in again.out
    replaced = train("resume=auto", "name=tuned", "init_from=elsewhere", "train.steps=9")
    assert "init_from=elsewhere would replace them" in replaced.error

    fresh = (*one_step[:-1], "name=fresh")
    assert "trained with model.n_embd=32, this run has 64; use 32" in train(*fresh, "model.n_embd=64").error
    assert "trained with model.num_layers=2, this run has 4" in train(*fresh, "model=tiny").error
    assert "trained with tokenizer=characters, this run has bytes" in train(*fresh, "tokenizer=bytes").error
    assert "checkpoint nowhere does not exist" in train(*fresh[:5], "init_from=nowhere").error
    Path("other.txt").write_text("ÄÖÜ another alphabet\n" * 200)
    refused = train(*fresh, "data.files=other.txt").error
    assert "or other ones; use the data it was trained on, or train its export on (scripts.export_hf" in refused
    assert train(*fresh, "model.rope_base=50000", "model.dropout=0.2", "train.steps=1").code == 0
    assert open_checkpoint(the_run("fresh")).meta["settings"]["model"]["dropout"] == 0.2
    assert "init_from is empty" in train("init_from=").error


# --- names, one rate, short runs, slow ones


def test_a_name_is_a_folder_and_nothing_else(here, train):
    assert train(*OWN, "train.steps=1").code == 0
    assert the_run().parent == Path("runs/mine")
    for name in ("../x", "/tmp/x", "a/b", "''", ".hidden"):
        assert "is no name for a folder" in train(f"name={name}").error
    assert sorted(path.name for path in Path().iterdir()) == ["cache", "own.txt", "runs"]
    forked = train(f"resume={the_run()}", "name=fork", "train.steps=2")  # goes on in a folder of its own
    assert forked.code == 0
    assert open_checkpoint(the_run("fork")).step == 2
    assert open_checkpoint(the_run()).step == 1
    above = Path.cwd().name  # a folder that the run lies in is not its name
    assert train(f"resume={the_run()}", f"name={above}", "train.steps=2").code == 0
    assert open_checkpoint(the_run(above)).step == 2
    assert open_checkpoint(the_run()).step == 1
    assert train(f"resume={the_run('fork')}", "name=runs", "train.steps=3").code == 0  # nor is the folder of all runs
    assert open_checkpoint(the_run("runs")).step == 3
    assert open_checkpoint(the_run("fork")).step == 2
    assert "resume is empty" in train("resume=").error


def lose_checkpoints(name: str) -> None:
    """As where a run was killed before its first one."""
    shutil.rmtree(the_run(name) / "checkpoints")
    (the_run(name) / "checkpoints").mkdir()


def test_a_fork_that_was_killed_before_it_saved_begins_where_it_did(here, train):
    """It began with random weights, and deleted the metrics of its first life."""
    assert train(*OWN, "train.steps=2").code == 0
    forked = train(f"resume={the_run()}", "name=fork", "train.steps=4", "model.dropout=0.3")
    assert forked.code == 0, forked.error
    expected = metrics(the_run("fork"))
    assert [line["step"] for line in expected] == [3, 4]
    for _ in range(2):  # in each of its lives
        lose_checkpoints("fork")
        again = train("resume=auto", "name=fork")
        assert again.code == 0, again.error
        assert "after 2 steps" in again.out
        assert metrics(the_run("fork")) == expected
        config = yaml.safe_load((the_run("fork") / "config.yaml").read_text())
        assert (config["resume"], config["model"]["dropout"]) == (str(the_run()), 0.3)
    lose_checkpoints("fork")
    lose_checkpoints("mine")
    assert f"{the_run()} has no" in train("resume=auto", "name=fork").error


def test_one_learning_rate_moves_both_optimizers():
    def rates(*overrides: str) -> list[float]:
        run = settings(*overrides)
        model = GPT(resolve_model(run.model, "cpu", torch.float32)[0], 257, 128, device="meta")
        return [part.param_groups[0]["peak_lr"] for part in Optimizer(model, run.optim).optimizers]

    assert rates() == [3e-3, 0.02]  # to the last bit, as the two rates were before there was one
    assert rates("optim.lr=6e-3") == [6e-3, 0.04]
    assert rates("optim.muon_lr_ratio=1") == [3e-3, 3e-3]
    assert rates("optim=adamw") == [6e-4]


def test_a_short_run_has_a_short_warm_up_and_says_so(here, train):
    short = [key for key in OWN if not key.startswith("optim.")]
    said = train(*short, "train.steps=20", "train.max_hours=1e-9").out
    assert "warm-up    2 steps, as train.steps=20 has no room for optim.warmup_steps=50" in said
    optim = settings().optim
    assert [lr_factor(step, 20, optim) for step in range(3)] == [0.5, 1.0, 1.0]
    assert [lr_factor(step, 51, optim) for step in (0, 49)] == [1 / 50, 1.0]  # where there is room, nothing is cut
    assert lr_factor(0, 1, optim) == 1.0
    assert "warm-up" not in train(*short, "train.steps=51", "train.max_hours=1e-9").out


def test_a_warm_up_that_reaches_into_the_decay_is_followed_by_all_of_it():
    """Without a fall from the peak to the middle of the decay."""
    optim = replace(settings().optim, schedule="wsd", warmup_steps=80, decay_fraction=0.6, min_lr_ratio=0.0)
    rates = [lr_factor(step, 100, optim) for step in range(100)]
    assert rates[79] == rates[80] == 1.0
    assert rates[81:] == pytest.approx([1 - number / 20 for number in range(1, 20)])
    assert [lr_factor(step, 1000, optim) for step in (399, 400, 700, 999)] == pytest.approx([1, 1, 0.5, 1 / 600])


def test_a_large_model_on_a_cpu_is_announced_with_its_hours(monkeypatch):
    run = settings("model=gpt2_124m", "optim=muon", "optim.muon_dtype=bfloat16")

    def said(optim, bfloat16: float, config=run.model, forward=2.7, processes=1) -> str | None:
        model = GPT(resolve_model(config, "cpu", torch.float32)[0], 50257, 1024, device="meta")
        monkeypatch.setattr("training.speed.measured_forward", lambda *_: forward)
        monkeypatch.setattr("training.speed.measured_rate", {torch.float32: 1e11, torch.bfloat16: bfloat16}.get)
        hardware = replace(set_up(run.hardware), world=World(size=processes))
        return slow_on_a_cpu(model, optim, hardware, batch_tokens=4096, steps=300)

    # a backward takes two of four sequences' forwards, 2.7 s each: 32 s in all; Newton-Schulz: 4 x (4 m^2 n + 2 m^3)
    # for 12 layers of (2304, 768), (768, 768) and twice (3072, 768): 1.22e12 FLOPs
    assert said(run.optim, 1e11).startswith(
        "about 45 s a step on this CPU, 27% of it in Muon's Newton-Schulz iteration"
    )
    assert said(run.optim, 1e11, processes=2).startswith("about 28 s a step")  # each has half of the sequences
    slow = said(run.optim, 1e10)
    assert slow.startswith("about 154 s a step")
    assert slow.endswith(
        "12.8 h for train.steps=300; use optim=adamw, model=tiny, a smaller train.batch_tokens, or a GPU"
    )
    assert "Muon" not in said(settings("optim=adamw").optim, 1e10)
    assert said(run.optim, 1e9, settings().model, forward=0.1) is None


def test_the_speed_of_a_cpu_is_measured_without_a_trace():
    run = settings("model.attention=naive", "model.attention_dropout=0.5")
    hardware = set_up(run.hardware)
    model = GPT(resolve_model(run.model, "cpu", hardware.dtype)[0], 257, 32)
    before, seen = torch.random.get_rng_state(), []
    with attend_with(model, lambda layer, named: lambda *q, **kw: seen.append(kw["dropout_p"]) or named(*q, **kw)):
        assert measured_forward(model, hardware) > 0
    assert set(seen) == {0.5}  # as in training
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(weight.grad is None for weight in model.parameters())
