"""Every configuration composes; mistakes are in tests/test_bad_input.py."""

import errno
import getpass
import importlib
import math
import pickle
import re
import shlex
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from conf import folders
from conf.keys import known_keys
from conf.mistakes import EXIT_USER_ERROR, fail, of_the_system
from conf.program import name_user, program, register
from conf.schema import Settings
from data import DataConfig
from data.config import SOURCES, TOKENIZERS
from model import ATTENTION
from model.config import LOSSES, MLPS
from model.recompute import MODES
from scripts.parity import ParitySettings
from scripts.sample import SampleSettings
from tests.runs import settings, told
from tests.test_text import Echo
from training.bad_steps import POLICIES
from training.hardware import DTYPES
from training.lock import locked
from training.optimizer import OPTIMIZERS, SCHEDULES
from training.parallel import World
from training.stop import TRAIN, resume_command
from training.wandb_run import WANDB_MODES

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = sorted(p.stem for p in (ROOT / "conf" / "experiment").glob("*.yaml"))


def choices(group: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / "conf" / group).glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_composes(experiment):
    composed = settings(
        f"experiment={experiment}", "data.files=x.txt" if experiment in ("shakespeare", "speedrun") else "train.seed=0"
    )
    assert composed.train.batch_tokens % composed.data.seq_len == 0


@pytest.mark.parametrize(
    ("group", "choice"),
    [(group, choice) for group in ("model", "optim") for choice in choices(group)],
)
def test_group_choice_composes(group, choice):
    theirs = choice == "huggingface"
    composed = settings(f"{group}={choice}", *(["model.name=openai-community/gpt2"] if theirs else []))
    if group == "model":
        assert composed.optim.name == ("adamw" if theirs else "muon")  # of quickstart


@pytest.mark.parametrize("experiment", ["wikitext2", "wikitext103", "long_context"])
def test_a_model_of_transformers_keeps_its_tokenizer_in_an_experiment(experiment):
    theirs = ("model=huggingface", "model.name=OWNER/NAME")
    assert settings(f"experiment={experiment}").tokenizer == "gpt2"
    assert settings(f"experiment={experiment}", *theirs).tokenizer == "OWNER/NAME"
    assert settings(f"experiment={experiment}", *theirs, "tokenizer=bytes").tokenizer == "bytes"


def test_long_context_is_what_it_says():
    composed = settings("experiment=long_context")
    assert composed.data.seq_len == 32768
    assert composed.model.attention == "flash"
    assert composed.model.activation_checkpointing != "none"


def test_command_line_wins_over_experiment():
    assert settings("experiment=long_context", "data.seq_len=64", "train.batch_tokens=128").data.seq_len == 64
    assert settings("experiment=long_context", "data=text", "data.files=a.txt").data.source == "text"


def commands_of_many() -> list[tuple[int, str]]:
    """(processes, arguments) of every torchrun and sbatch that the pages tell a reader to type."""
    text = "\n".join((ROOT / page).read_text() for page in ("README.md", "scripts/SLURM.md", "scripts/train.sbatch"))
    text = text.replace("\\\n", " ")
    found = [
        (int(number), given) for number, given in re.findall(r"torchrun --nproc-per-node (\d+) train.py (.+?)`", text)
    ]
    for options, given in re.findall(r"sbatch( --.*?)? scripts/train.sbatch (.+?)(?:`|  |$)", text, flags=re.M):
        count = {"nodes": 1, "ntasks-per-node": 8}  # of scripts/train.sbatch
        count |= {key: int(number) for key, number in re.findall(r"--([a-z-]+)=(\d+)\b", options) if key in count}
        found.append((math.prod(count.values()), given))
    return found


@pytest.mark.parametrize(("processes", "given"), [*commands_of_many(), (2, "experiment=wikitext103")])
def test_the_processes_of_a_documented_command_share_its_rows(processes, given, monkeypatch):
    """wikitext103's micro_batch was 64 rows, all of a step: more than one process refused it."""
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    composed = settings(*shlex.split(given.replace("FOLDER", "runs/long")))
    world = World(size=processes)
    world.arrange(composed.parallel)
    world.local_sequences(composed.sequences_per_step, composed.train.micro_batch, composed.data.seq_len)


def test_other_programs_compose():
    chosen = settings("num_samples=3", "hardware.device=cpu", schema=SampleSettings, config="tool")
    assert (chosen.num_samples, chosen.hardware.device) == (3, "cpu")


def test_a_tokenizer_is_a_plain_key():
    assert settings("tokenizer=gpt2").tokenizer == "gpt2"
    with pytest.raises(ValueError, match="tokenizer=gpt5 is not known; use one of bytes, characters, gpt2"):
        settings("tokenizer=gpt5")


@pytest.mark.parametrize("choice", choices("data"))
def test_no_default_of_the_text_is_said_twice(choice):
    said = yaml.safe_load((ROOT / "conf" / "data" / f"{choice}.yaml").read_text())
    defaults = {field.name: field.default for field in fields(DataConfig)}
    assert not {key: value for key, value in said.items() if key != "defaults" and defaults[key] == value}


def test_cfg_and_help_from_another_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shown = told("train", ["--cfg", "job", "model.num_layers=7"], monkeypatch, capsys)
    assert shown.code == 0
    assert "num_layers: 7" in shown.out
    help_text = told("train", ["--help"], monkeypatch, capsys)
    assert help_text.code == 0
    assert help_text.out.startswith("Train a GPT")
    assert f"  experiment: {', '.join(EXPERIMENTS)}\n" in help_text.out
    information = told("train", ["--info"], monkeypatch, capsys)  # the experiment was read as what to tell
    assert information.code == 0, information.error
    of_hydra = told("train", ["--hydra-help"], monkeypatch, capsys)
    assert of_hydra.code == 0, of_hydra.error
    assert "--config-dir" in of_hydra.out
    assert not (tmp_path / "runs").exists()


PROGRAMS = ["train"] + [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted((ROOT / "scripts").rglob("*.py"))
    if "\n@program(" in file.read_text()
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_says_what_it_does_and_what_each_of_its_keys_means(name, monkeypatch, capsys):
    config, schema, _ = (module := importlib.import_module(name)).main.front
    assert config in ("config", "tool")
    assert f"python {name}.py" in module.__doc__ or f"python -m {name}" in module.__doc__
    assert told(name, ["--help"], monkeypatch, capsys).out.startswith(module.__doc__.splitlines()[0])
    assert [key for key, said in known_keys(schema).items() if not is_dataclass(said.type) and not said.comment] == []


def test_a_choice_is_named_with_all_of_its_values():
    """What a key refuses others for stands beside it."""
    keys = known_keys(Settings)
    for key, allowed in {
        "model.attention": ATTENTION,
        "model.mlp": MLPS,
        "model.loss": LOSSES,
        "model.activation_checkpointing": MODES,
        "data.source": SOURCES,
        "tokenizer": TOKENIZERS,
        "optim.name": OPTIMIZERS,
        "optim.schedule": SCHEDULES,
        "hardware.dtype": DTYPES,
        "logger.wandb": WANDB_MODES,
        "train.on_nonfinite": POLICIES,
    }.items():
        assert [name for name in allowed if name not in keys[key].comment] == [], key


def test_help_begins_with_the_programs_own_keys_as_they_stand(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shown = told("scripts.parity", ["parity.nulls=5", "--help", "train.steps=7"], monkeypatch, capsys)
    assert shown.code == 0
    lines = shown.out.splitlines()
    listed = lines[lines.index("== The configuration as it stands (key=value changes it) ==") + 1 :]
    keys = [line.split("=")[0].strip() for line in listed[: listed.index("")]]
    assert [key.partition(".")[0] for key in keys[:5]] == ["parity"] * 5
    assert sorted(keys) == sorted(
        name for name, key in known_keys(ParitySettings).items() if not is_dataclass(key.type)
    )
    assert re.search(r"^  parity\.nulls=5 +runs of the baseline that differ by rounding .*20$", shown.out, flags=re.M)
    assert re.search(r"^  train\.steps=7 +optimizer steps$", shown.out, flags=re.M)
    assert "hardware.compile=false" in shown.out  # of experiment=parity
    assert "text arrives as typed" in lines[lines.index("== What is typed ==") + 1]
    assert not list(tmp_path.iterdir())


def test_only_the_first_process_reads_the_files_of_a_configuration(tmp_path, monkeypatch):
    """The others are told what it found: a file may lie on its disk alone, or be written by it."""

    @dataclass
    class Resumable(Echo):
        resume: str | None = None

    theirs, read = {"prompt": "the first one's"}, []
    answers = iter([str(tmp_path), {**asdict(Resumable()), **theirs}])
    second = SimpleNamespace(size=2, rank=1, is_first=False, broadcast=lambda _: next(answers), close=lambda: None)

    @program("tool", Resumable, world=lambda: second)
    def main(settings: Resumable, run_dir: Path) -> None:
        read.append(settings.prompt)

    monkeypatch.setattr("conf.program._refuse_missing_in_files", lambda **_: read.append("files"))
    monkeypatch.setattr("conf.resumed.with_earlier_settings", lambda cfg, *_: read.append("run") or cfg)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # it is replaced: only the first one prints
    monkeypatch.setattr(sys, "argv", ["echo.py", "prompt=its own", "resume=auto"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    main()
    assert read == ["the first one's"]


def test_a_job_of_a_launcher_has_the_folder_of_its_sweep(tmp_path, monkeypatch):
    """It is another process, which has made no folder yet, and each life of a job is one more."""
    monkeypatch.chdir(tmp_path)
    asked = ["experiment=quickstart", "name=lr"]
    register(Settings)
    with initialize_config_module("conf", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        sweep = loader.load_configuration("config", asked, RunMode.MULTIRUN)
        folder = sweep.hydra.sweep.dir
        folders._own.cache_clear()
        job = loader.load_sweep_config(pickle.loads(pickle.dumps(sweep)), [*asked, "optim.lr=1e-3"])
    assert job.hydra.sweep.dir == folder
    assert [str(path) for path in Path("runs", "lr").iterdir()] == [folder]


def test_a_user_without_a_name_gets_one(monkeypatch):
    """As in a container that was started for a number; PyTorch's cache and wandb ask for the name."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOGNAME", "")  # so that it is as before after the test
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises((KeyError, OSError)):
        getpass.getuser()
    name_user()
    assert getpass.getuser()


def test_a_newer_python_is_refused_before_hydra_fails_on_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("conf.program.NEWER", (3, 0))
    shown = told("scripts.sample", [], monkeypatch, capsys)
    assert shown.code == 2
    assert "is newer than Hydra 1.3; use 3.13" in shown.error


@pytest.mark.parametrize("size", [1, 2])
def test_ctrl_c_before_the_first_step_leaves_nothing_behind(size, tmp_path, monkeypatch, capsys):
    told_the_others = []
    first = SimpleNamespace(
        size=size, rank=0, is_first=True, broadcast=lambda value: value, fail=lambda *why: told_the_others.append(why)
    )

    @program("tool", Echo, run_dir="echoes", world=lambda: first)
    def main(settings: Echo, run_dir: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["echo.py"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130
    assert told_the_others == [("interrupted by SIGINT", 130)] * (size - 1)
    assert "Traceback" not in capsys.readouterr().err
    assert not any(Path("echoes").iterdir())


def test_a_program_without_a_folder_of_its_own_leaves_no_traceback_where_others_write(tmp_path, monkeypatch, capsys):
    @program("tool", Echo)
    def main(settings: Echo, run_dir: Path) -> None:
        Path("of another program").touch()
        raise ValueError("steps=1 is one")

    monkeypatch.setattr(sys, "argv", ["echo.py"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "error: steps=1 is one\n"
    assert [path.name for path in tmp_path.iterdir()] == ["of another program"]


def test_a_refusal_leaves_no_traceback_in_a_run_of_another_process(tmp_path, monkeypatch, capsys):
    """Both were given one folder."""
    held = ExitStack()

    @program("tool", Echo, run_dir="runs")
    def main(settings: Echo, run_dir: Path) -> None:
        held.enter_context(locked(run_dir))
        raise ValueError("steps=1 is one")

    monkeypatch.setattr(sys, "argv", ["echo.py"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.chdir(tmp_path)
    with held, pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "error: steps=1 is one\n"
    assert not list(tmp_path.rglob("error.log"))


def test_runs_begun_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of_each = []
    for _ in range(3):
        folders._own.cache_clear()  # as in another process
        of_each.append(folders.folder_of_run(None, "k", "quickstart", "T"))
        assert folders.folder_of_run(None, "k", "quickstart", "T") == of_each[-1]
    assert of_each == ["runs/k/T", "runs/k/T_2", "runs/k/T_3"]


def test_the_first_process_reads_the_environment_for_all(tmp_path, monkeypatch):
    """Each read its own, and trained otherwise without a word."""
    told, read = [], []
    first = SimpleNamespace(size=2, rank=0, is_first=True, broadcast=lambda value: told.append(value) or value)
    first.close = lambda: None

    @program("tool", Echo, world=lambda: first)
    def main(settings: Echo, run_dir: Path) -> None:
        read.append(settings.prompt)

    monkeypatch.setenv("WHO", "the first")
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    for given, expected in (("${oc.env:WHO}", "the first"), ("a \\${b}", "a ${b}")):
        monkeypatch.setattr(sys, "argv", ["echo.py", f"prompt='{given}'", f"hydra.run.dir={tmp_path}"])
        main()
        assert told[-1]["prompt"] == read[-1] == expected


def test_a_sweep_of_a_resumed_run_has_that_runs_name(tmp_path, monkeypatch):
    """It was in the folder of an experiment that nobody had asked for."""
    monkeypatch.chdir(tmp_path)
    for run in ("runs/r/T", "runs/lr/T/0"):
        Path(run, "checkpoints").mkdir(parents=True)
    Path("runs/lr/T/multirun.yaml").touch()
    for resume, name, folder in (
        ("runs/r/T", None, "runs/r/A"), ("runs/lr/T/0", None, "runs/lr/A"), ("runs/r/T", "k", "runs/k/A"),
        (None, None, "runs/quickstart/A"), ("no such", None, "runs/quickstart/A"),
    ):  # fmt: skip
        folders._own.cache_clear()
        shutil.rmtree(folder, ignore_errors=True)
        assert folders.folder_of_sweep(resume, name, "quickstart", "A") == folder
    assert set(Path("runs/quickstart").iterdir()) == {Path("runs/quickstart/A")}


def test_only_the_first_process_shows_a_sweep(tmp_path, monkeypatch):
    """Two that draw its picture at once take the unfinished file from each other."""
    shown = []
    firsts = ({**asdict(Echo()), "prompt": prompt} for prompt in "ab")
    second = SimpleNamespace(
        size=2, rank=1, is_first=False, broadcast=lambda value: value or next(firsts), close=lambda: None
    )
    settings_seen = []

    @program("tool", Echo, after_sweep=shown.append, world=lambda: second)
    def main(settings: Echo, run_dir: Path) -> None:
        settings_seen.append(settings.prompt)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # it is replaced: only the first one prints
    monkeypatch.setattr(sys, "argv", ["echo.py", "-m", "prompt=a,b"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    main()
    assert settings_seen == ["a", "b"]
    assert shown == []


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("train", ["-m", "optim.lr=-1,-2"], 2),  # refused
        ("train", ["-m", "lr=1,2"], 2),  # composed by nobody
        ("scripts.explain", ["-m", "gpu=h100,h200"], 0),  # which writes nothing
        ("scripts.export_kernels", ["-m", "folder=a,b"], 0),  # folders of their own
    ],
)
def test_a_sweep_that_has_left_nothing_leaves_no_folder(name, arguments, code, tmp_path, monkeypatch, capsys):
    """Hydra writes its own file before the first run begins."""
    monkeypatch.chdir(tmp_path)
    assert told(name, arguments, monkeypatch, capsys).code == code
    assert {path.name for path in tmp_path.iterdir()} - {"a", "b"} <= {"runs"}
    assert not list(tmp_path.glob("runs/*"))


def test_a_sweep_ends_with_the_runs_that_there_are_not(tmp_path, monkeypatch, capsys):
    """Each was refused at its turn, hours above; what is the same in all, which Hydra writes as False, is not named."""
    monkeypatch.chdir(tmp_path)
    result = told("train", ["-m", "hardware.compile=false", "optim.lr=-1,abc"], monkeypatch, capsys)
    assert result.error.splitlines()[-2:] == [
        "no run of optim.lr=-1: optim.lr=-1.0 must be positive, finite and at most 1e+06",
        "no run of optim.lr=abc: optim.lr=abc has the wrong type: expected a number",
    ]


def test_torchrun_repeats_the_line_below_its_own_words(tmp_path, monkeypatch, capsys):
    """By the file in which it looks for what a process died of; without one there is the line alone."""
    file = tmp_path / "error.json"
    assert fail("train.steps=0\nmust be at least 1") == EXIT_USER_ERROR
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    fail("train.steps=0\nmust be at least 1")
    assert capsys.readouterr().err == "error: train.steps=0 must be at least 1\n" * 2
    told = ProcessFailure(local_rank=0, pid=1, exitcode=EXIT_USER_ERROR, error_file=str(file))
    assert told.message == "error: train.steps=0 must be at least 1"
    assert abs(told.timestamp - time.time()) < 60
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    assert fail("no room") == EXIT_USER_ERROR


def test_what_the_system_refuses_is_said_with_its_place(tmp_path):
    own = "the last checkpoint was not saved to x: free what is short, then python train.py resume=x"
    for error, said in (
        (OSError(own), own),
        (
            OSError(errno.ENOSPC, "No space left"),
            f"No space left (the run's folder is {tmp_path}); free what is short ",
        ),
        (OSError(errno.EACCES, "Permission denied", "there"), "there cannot be used (Permission denied); check "),
        # of a file that was to take another's name the user knows the latter
        (OSError(errno.EISDIR, "Is a directory", "a.tmp", None, "a"), "a cannot be used (Is a directory); check "),
        (
            OSError(errno.EROFS, "Read-only", f"{tmp_path}/lock"),
            f"{tmp_path} cannot be written to (Read-only); resume ",
        ),
    ):
        message = of_the_system(error, tmp_path)
        assert message.startswith(said)
        assert (message == own) == (said == own)


def test_a_traceback_that_cannot_be_kept_is_not_promised(tmp_path):
    assert folders.keep_traceback(tmp_path / "error.log") == f" [traceback: {tmp_path / 'error.log'}]"
    assert folders.keep_traceback(tmp_path / "gone" / "error.log") == ""


def test_a_traceback_with_a_name_that_is_no_text_is_kept(tmp_path):
    try:
        raise ValueError("runs/b\udcff cannot be written")
    except ValueError:
        assert folders.keep_traceback(tmp_path / "error.log")
    assert "runs/b\\udcff cannot be written" in (tmp_path / "error.log").read_text()


@pytest.mark.parametrize(("rank", "code", "said"), [("0", 2, "is one process, and 2 were started"), ("1", None, "")])
def test_a_program_of_one_process_is_not_run_by_several(rank, code, said, monkeypatch, capsys):
    """The first says so, and the others leave without a word or an error."""

    @program("tool", Echo)
    def main(settings: Echo, run_dir: Path) -> None:
        raise AssertionError

    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert said in (err := capsys.readouterr().err)
    assert bool(err) == bool(said)


def test_a_program_of_one_process_does_not_mind_half_an_environment(tmp_path, monkeypatch):
    """As a cluster gives to a pod: there WORLD_SIZE counts pods."""
    ran = []

    @program("tool", Echo)
    def main(settings: Echo, run_dir: Path) -> None:
        ran.append(settings)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["echo.py"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    main()
    assert len(ran) == 1


def test_a_command_is_told_where_the_current_folder_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert resume_command(tmp_path / "run").endswith(f"{TRAIN} resume={tmp_path}/run")
    assert not folders.remove_if_empty(Path())


def test_our_own_folder_may_be_named_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = told("train", [f"--config-dir={ROOT / 'conf'}", "train.steps=0"], monkeypatch, capsys)
    assert "train.steps=0 must be at least 1" in found.error


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("data: {files: mine.txt}", "train.steps=0 must be at least 1"),
        ("data: {seq_len: 64}", "data.files=??? stands for a value that is missing in data=text"),
        ("data: {files: '???'}", "data.files=??? stands for a value that is missing"),
        (
            "data: {files: mine.txt}\noptim: {lr: '???'}",
            "optim.lr=??? stands for a value that is missing in experiment=mine",
        ),
    ],
)
def test_an_experiment_gives_the_values_that_its_groups_want(keys, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "experiment").mkdir()
    defaults = "defaults: [override /data: text, override /optim: muon]"
    (tmp_path / "experiment/mine.yaml").write_text(f"# @package _global_\n{defaults}\n{keys}\n")
    found = told("train", [f"--config-dir={tmp_path}", "experiment=mine", "train.steps=0"], monkeypatch, capsys)
    assert (found.code, found.out) == (EXIT_USER_ERROR, "")
    assert said in found.error


def test_a_refused_run_leaves_no_runs_behind(tmp_path):
    for kept, left in ((None, []), ("runs/name/other", ["other"]), ("runs/another", ["another"])):
        refused = tmp_path / "runs" / "name" / "time"
        for path in (refused, kept and tmp_path / kept):
            if path:
                path.mkdir(parents=True)
        (tmp_path / "runs" / "of_a_cluster" / "runs" / "name" / "time").mkdir(parents=True)
        assert folders.remove_if_empty(tmp_path / "runs" / "of_a_cluster" / "runs" / "name" / "time")
        (tmp_path / "runs" / "of_a_cluster").rmdir()  # where it was typed
        assert folders.remove_if_empty(refused)
        assert sorted(path.name for path in tmp_path.rglob("*") if not list(path.iterdir())) == left
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)


def test_a_sweep_has_the_highest_exit_code_of_its_runs(tmp_path, monkeypatch):
    @program("tool", Echo)
    def main(settings: Echo, run_dir: Path) -> None:
        sys.exit(int(settings.prompt))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["echo.py", "-m", "prompt=65,75,2"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 75
