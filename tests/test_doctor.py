"""The page before a run: every seeded misconfiguration has its named fix, and what is fine is not complained about."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import pytest
import torch

import training.speed
from data import open_dataset
from kernels import naive_attention
from model import ATTENTION, GPT, GPTConfig
from scripts import cluster, doctor, machine, selftest
from scripts.causality import probe
from scripts.doctor import Page, examine
from scripts.machine import Finding
from tests.runs import small_run, told, without_network
from train import train
from training.checkpoint import open_checkpoint
from training.hardware import Hardware
from training.lock import locked
from training.provenance import ROOT
from training.run import TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")

SMI = [{"name": "NVIDIA H200", "driver_version": "470.1", "memory.total": "143771", "memory.used": "0"}]
RIGHT = {"float32": 1.0}
NOTE, FIX = "note", "FIX"


@dataclass
class Place:
    """Where a case happens: `path` holds corpus.txt, `runs` is where the run would write."""

    path: Path
    patch: pytest.MonkeyPatch
    runs: Path


Setup = Callable[[Place], object]


@dataclass(frozen=True)
class Case:
    name: str
    check: str  # the finding's name
    says: str  # words of what was found
    fix: str  # words of the fix
    overrides: list[str] = field(default_factory=list)
    setup: Setup | None = None
    status: str = FIX


# --- what spoils the place


def driver_sees(gpus: list[dict], cuda: str | None = "12.8", **variables: str) -> Setup:
    """A machine whose driver knows of GPUs that PyTorch does not see."""

    def spoil(place: Place) -> None:
        place.patch.setattr(torch.cuda, "is_available", lambda: False)
        place.patch.setattr(machine, "installed_gpus", lambda: gpus)
        place.patch.setattr(torch.version, "cuda", cuda)
        place.patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in variables.items():
            place.patch.setenv(name, value)

    return spoil


def gpu_with(free: int) -> Setup:
    """An H200 as PyTorch describes it, for the line about the GPU alone: the run is on the CPU."""

    def spoil(place: Place) -> None:
        properties = type("Properties", (), {"name": "NVIDIA H200", "major": 9, "minor": 0})()
        place.patch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        place.patch.setattr(torch.cuda, "mem_get_info", lambda index: (free, 140 * 2**30))
        place.patch.setattr(torch.cuda, "device_count", lambda: 1)
        real = machine.gpu

        def gpu(device: str) -> Finding:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "is_available", lambda: True)
                return real(device)

        place.patch.setattr(machine, "gpu", gpu)

    return spoil


def installed(name: str, version: str) -> Setup:
    real = metadata.version
    return lambda place: place.patch.setattr(metadata, "version", lambda n: version if n == name else real(n))


def distributions(*names: str) -> Setup:
    packages = [type("Distribution", (), {"metadata": {"Name": name}}) for name in names]
    return lambda place: place.patch.setattr(metadata, "distributions", lambda: packages)


def broken_kernel(place: Place) -> None:
    """Off by a thousandth: 16-bit dtypes hide it, float32 does not."""

    def wrong(q, k, v, *, causal):
        return naive_attention(q, k, v, causal=causal) * (1.001 if q.dtype == torch.float32 else 1.0)

    place.patch.setattr(selftest, "flash_attention", wrong)
    place.patch.setattr(doctor, "self_test", selftest.self_test)


def no_compiler(place: Place) -> None:
    def stop(*_):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC.")

    place.patch.setattr(doctor, "self_test", stop)


def future_mask(place: Place) -> None:
    place.patch.setattr(doctor, "probe", probe)
    place.patch.setitem(ATTENTION, "naive", lambda q, k, v, **options: naive_attention(q, k, v))


def no_network(place: Place) -> None:
    without_network(place.patch, place.path)


def cached(place: Place) -> None:
    no_network(place)
    place.patch.setattr("datasets.load_dataset_builder", lambda *_, **__: None)


def full_disk(place: Place) -> None:
    usage = type("Usage", (), {"free": 10**6})()
    place.patch.setattr(shutil, "disk_usage", lambda path: usage)


def runs_is_a_file(place: Place) -> None:
    place.runs.write_text("")


def finished(place: Place) -> Path:
    """Trains four steps; returns the checkpoint."""
    train(small_run(place.path, "train.steps=4"), place.path / "first")
    return place.path / "first" / "checkpoints" / "last"


def damaged_checkpoint(place: Place) -> None:
    (finished(place) / "model.safetensors").write_bytes(b"")


def altered_tokens(place: Place) -> None:
    (cached,) = (finished(place).parents[2] / "cache").iterdir()
    (cached / "train-00000.bin").write_bytes(b"\0" * (cached / "train-00000.bin").stat().st_size)


def environment(**variables: str) -> Setup:
    return lambda place: [place.patch.setenv(name, value) for name, value in variables.items()]


def job(**variables: str) -> Setup:
    """In a step of a SLURM job of four tasks on a node, one of which this process is."""
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    return environment(**{"SLURM_JOB_ID": "77", **step, "MASTER_ADDR": "node1", "MASTER_PORT": "1077", **variables})


def any_step_is_slow(place: Place) -> None:
    for limit in ("FEW_FLOPS", "SLOW_STEP_SECONDS"):
        place.patch.setattr(training.speed, limit, 0.0)


def no_login(place: Place) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_BASE_URL"):
        place.patch.delenv(name, raising=False)
    place.patch.setenv("HOME", str(place.path))


def no_interpreter(place: Place) -> None:
    place.patch.setattr(torch.cuda, "is_available", lambda: False)
    place.patch.delenv("TRITON_INTERPRET", raising=False)


CASES = [
    Case("torchrun in each task", "launch", "srun started 4 tasks, and each is a torchrun", "without torchrun",
         setup=job(TORCHELASTIC_RUN_ID="77", WORLD_SIZE="16")),
    Case("torchrun in a job", "launch", "torchrun dies of SIGUSR1", "sbatch scripts/train.sbatch", status=NOTE,
         setup=job(TORCHELASTIC_RUN_ID="77", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="2", WORLD_SIZE="1",
                   RANK="0", LOCAL_RANK="0")),
    Case("an allocation without srun", "launch", "job 77 has 4 tasks, and srun did not start this",
         "srun before python", setup=environment(SLURM_JOB_ID="77", SLURM_NTASKS="4")),
    Case("a shell of srun in an allocation", "launch", "it would train alone", "sbatch scripts/train.sbatch",
         setup=job(SLURM_STEP_NUM_TASKS="1")),
    Case("tasks without a place to meet", "launch", "MASTER_ADDR and MASTER_PORT do not say", "export both",
         setup=job(MASTER_PORT="")),
    Case("each node meets itself", "launch", "MASTER_ADDR=127.0.0.1 is another machine on each of 2 nodes", "scontrol",
         setup=job(SLURM_STEP_NUM_NODES="2", MASTER_ADDR="127.0.0.1")),
    Case("the GPU is hidden", "gpu", "CUDA_VISIBLE_DEVICES= hides it", "unset CUDA_VISIBLE_DEVICES",
         setup=driver_sees(SMI, CUDA_VISIBLE_DEVICES="")),
    Case("PyTorch for the CPU beside a GPU", "gpu", "was built for the CPU", "uv sync", setup=driver_sees(SMI, None)),
    Case("driver too old", "gpu", "NVIDIA H200 (driver 470.1), which PyTorch does not see", "driver for CUDA 12.8",
         setup=driver_sees(SMI)),
    Case("kernels interpreted beside a GPU", "gpu", "TRITON_INTERPRET is set", "unset TRITON_INTERPRET",
         setup=lambda place: (gpu_with(139 * 2**30)(place), environment(TRITON_INTERPRET="1")(place))),
    Case("GPU shared", "gpu", "100.0 GiB of it are held by others", "hardware.device=cuda:N", status=NOTE,
         setup=lambda place: (gpu_with(40 * 2**30)(place), environment(TRITON_INTERPRET="0")(place))),
    Case("numpy too new", "versions", "numpy 2.4.1 is not <2.4,>=2.0", "uv sync", setup=installed("numpy", "2.4.1")),
    Case("another Triton", "versions", "triton 3.7.0 is not ==3.6.0", "uv sync", setup=installed("triton", "3.7.0")),
    Case("a package in our name", "versions", "called kernels", "uv pip uninstall kernels",
         setup=distributions("torch", "kernels")),
    Case("no GPU", "hardware", "PyTorch sees no CUDA GPU", "hardware.device=cpu", ["hardware.device=cuda"],
         driver_sees([])),
    Case("too many threads", "hardware", "hardware.num_threads=1000", "hardware.num_threads=",
         ["hardware.num_threads=1000"], lambda place: place.patch.setattr(torch, "set_num_threads", lambda n: None),
         NOTE),
    Case("no C++ compiler", "compiler", "no C++ compiler (nothing++)", "hardware.compile=false",
         ["hardware.compile=true"], environment(CXX="nothing++")),
    Case("flash without a GPU", "attention", "model.attention=flash cannot run", "model.attention=auto: sdpa",
         ["model.attention=flash"], no_interpreter),
    Case("documents in sdpa", "attention", "varlen in float32 is not supported by sdpa", "model.attention=auto: naive",
         ["data.document_mask=true", "hardware.dtype=float32"]),
    Case("a wrong kernel", "kernels", "in float32 is", "model.attention=sdpa", ["model.attention=flash"],
         broken_kernel),
    Case("a kernel that does not compile", "kernels", "RuntimeError: Failed to find C compiler.",
         "model.attention=sdpa", ["model.attention=flash"], no_compiler),
    Case("a wrong mask", "causality", "model: attention of layer 0: token 0 sees token 1",
         "do not train with model.attention=naive", ["model.attention=naive"], future_mask),
    Case("a window that hides nothing", "model", "model.window=64 hides nothing at data.seq_len=32", "leave",
         ["model.window=64", "model.attention=naive"], status=NOTE),
    Case("a prefix before any tokens are counted", "model", "leaves nothing to predict of data.seq_len=32", "prefix:16",
         ["model.mask=prefix:200", "tokenizer=characters", "model.attention=naive"]),
    Case("rotary positions that come around", "model", "fewer than data.seq_len=32", "model.rope_base=",
         ["model.rope_base=2"], status=NOTE),
    Case("no text", "data", "missing.txt does not exist", "give a path", ["data.files=missing.txt"]),
    Case("not UTF-8", "data", "is not UTF-8 (byte 0)", "iconv",
         setup=lambda place: (place.path / "corpus.txt").write_bytes(b"\xff\xfe" * 99)),
    Case("tokens altered", "data", "train-00000.bin was altered", "delete", setup=altered_tokens),
    Case("cache below a file", "data", "data.cache_dir=", "data.cache_dir=FOLDER",
         setup=lambda place: (place.path / "cache").write_text("")),
    Case("a mask for one document", "data", "the text is a single document", "leave data.document_mask out",
         ["data.document_mask=true", "model.attention=naive"], finished, NOTE),
    Case("the hub out of reach", "data", "cannot be had from the Hugging Face hub", "data.local_dir=FOLDER",
         ["data=wikitext2", "~data.files", "data.seq_len=32"], no_network),
    Case("the hub out of reach of a text in its cache", "data", "the run will read its cache", "data.local_dir=FOLDER",
         ["data=wikitext2", "~data.files", "data.seq_len=32"], cached, NOTE),
    Case("GPT-2's vocabulary out of reach", "tokenizer", "could not be downloaded", "TIKTOKEN_CACHE_DIR",
         ["tokenizer=gpt2"], no_network),
    Case("a slow CPU", "speed", "s a step on this CPU", "use model=tiny", setup=any_step_is_slow, status=NOTE),
    Case("too little room for checkpoints", "disk", "0.0 GB free", "train.keep_last=1", setup=full_disk),
    Case("a run's folder that is a file", "disk", "cannot be made", "hydra.run.dir=FOLDER", setup=runs_is_a_file),
    Case("a run's folder that is a link to nothing", "disk", "is a link to nothing", "hydra.run.dir=FOLDER",
         setup=lambda place: place.runs.symlink_to("unmounted")),
    Case("wandb out of reach", "wandb", "http://127.0.0.1:9 does not answer", "logger.wandb=offline",
         ["logger.wandb=online"], environment(WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")),
    Case("wandb without a login", "wandb", "no login was found", "logger.wandb=offline", ["logger.wandb=online"],
         no_login),
    Case("WANDB_MODE that is none", "wandb", "WANDB_MODE=maybe", "use logger.wandb=offline", ["logger.wandb=auto"],
         environment(WANDB_MODE="maybe")),
    Case("a damaged checkpoint", "resume", "model.safetensors is damaged", "use another checkpoint",
         ["resume={p}/first/checkpoints/last"], damaged_checkpoint),
    Case("a checkpoint of another model", "resume", "model.num_layers=2, this run has 3", "use 2",
         ["resume={p}/first/checkpoints/last", "train.steps=9", "model.num_layers=3"], finished),
    Case("too few steps to profile", "start", "profile=true needs 7 steps", "raise train.steps",
         ["profile=true", "train.steps=4"], finished),
]  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The kernels' own self-test and the probe of causality are replaced: they take a second, and have own tests."""
    monkeypatch.setattr(doctor, "self_test", lambda *_: RIGHT)
    monkeypatch.setattr(doctor, "probe", lambda *_: {"model": None})
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_"))]:
        monkeypatch.delenv(name)  # the tests themselves may run in a job
    return Place(tmp_path, monkeypatch, tmp_path / "runs")


def page_of(place: Place, *overrides: str) -> Page:
    settings = small_run(place.path, *(o.replace("{p}", str(place.path)) for o in overrides))
    return examine(settings, place.runs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_misconfiguration_has_a_named_fix(case, place):
    small_run(place.path)  # the text is written first, so that it can be spoiled
    if case.setup:
        case.setup(place)
    found = page_of(place, *case.overrides)
    assert found[case.check].status == case.status, found[case.check]
    assert case.says in found[case.check].text
    assert case.fix in found[case.check].fix
    others = {name: finding for name, finding in found.items() if finding.wrong and name != case.check}
    assert not others, "one fault, one fix"


def test_the_rope_base_that_is_advised_is_the_least_that_is_enough():
    config = GPTConfig(1, 1, n_embd=16, rope_base=2.0, attention="naive", loss="plain")
    advised = doctor.network(config, 32, vocab_size=None).fix
    least = int(re.fullmatch(r"model\.rope_base=(\d+) or more", advised)[1])
    assert doctor.network(replace(config, rope_base=least), 32, vocab_size=None).fix is None
    assert doctor.network(replace(config, rope_base=least - 1), 32, vocab_size=None).fix == advised


def test_the_gpu_of_the_run_is_looked_at(place):
    """Whoever took another one, as the note says, would read the same note again."""
    gpu_with(40 * 2**30)(place)
    place.patch.setattr(torch.cuda, "mem_get_info", lambda index: ((40, 139)[index] * 2**30, 140 * 2**30))
    place.patch.setattr(torch.cuda, "device_count", lambda: 2)
    place.patch.setattr(machine, "interpreting", lambda: False)
    for device, status in (("auto", NOTE), ("cpu", NOTE), ("cuda", NOTE), ("cuda:1", "ok"), ("cuda:2", NOTE)):
        assert machine.gpu(device).status == status, device


def test_there_are_enough():
    assert len(CASES) >= 15
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_run_that_is_fine(place):
    before = finished(place)
    found = page_of(place, f"resume={before}", "train.steps=9")
    assert {finding.status for finding in found.values()} == {"ok"}, found
    assert list(found) == [
        "launch", "gpu", "versions", "hardware", "compiler", "attention", "kernels", "causality", "data", "tokenizer",
        "model", "memory", "speed", "disk", "wandb", "resume", "start",
    ]  # fmt: skip
    meta = json.loads((before / "checkpoint.json").read_text())
    assert found["data"].facts["fingerprint"] == meta["data_fingerprint"]
    assert found["disk"].facts["checkpoint_bytes"] >= (before / "model.safetensors").stat().st_size
    assert not place.runs.exists(), "nothing is written"


def test_the_newest_run_of_a_name_is_what_is_asked_about(place, monkeypatch, capsys):
    """resume=auto, whose run has a text, an optimizer and sizes of its own."""
    monkeypatch.chdir(place.path)
    run = place.runs / "mine" / "2026-01-01_00-00-00"
    train(small_run(place.path, "train.steps=4"), run)
    before = open_checkpoint(run)
    for more, wrong in (([], []), (["model.num_layers=3"], ["start"])):
        outcome = told("scripts.doctor", ["resume=auto", "name=mine", *more], monkeypatch, capsys)
        page = json.loads(outcome.out.splitlines()[-1])
        assert page["wrong"] == wrong
        assert page["checks"]["data"]["facts"]["fingerprint"] == before.meta["data_fingerprint"]
    assert "was trained with model.num_layers=2, this run has 3" in page["checks"]["start"]["text"]
    asked = []
    monkeypatch.setattr(doctor.machine, "disk", lambda train, folder, **_: asked.append(folder) or Finding("room"))
    for named in ("auto", run, run / "checkpoints" / before.path.name):
        told("scripts.doctor", [f"resume={named}", "name=mine"], monkeypatch, capsys)
    assert [folder.resolve() for folder in asked] == [run.resolve()] * 3, "that is where the run will write"


def test_what_several_processes_will_train_is_planned_for_them(place, monkeypatch):
    """Each computes its share of a step, and a context that they share is none of one process."""
    monkeypatch.setattr(cluster, "network", lambda hardware: Finding("they do"))
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    finished(place)
    asked = "model.attention=naive", "train.micro_batch=null"
    shared = page_of(place, *asked, "parallel.context=2")
    assert not [name for name, finding in shared.items() if finding.wrong], shared
    both = page_of(place, *asked)["memory"].text
    monkeypatch.delenv("WORLD_SIZE")
    alone = page_of(place, *asked)["memory"].text
    rows = [int(re.match(r"micro-batches of (\d+)", text)[1]) for text in (alone, both)]
    assert rows[0] == 2 * rows[1]


def test_processes_that_do_not_reach_each_other(place):
    """The second of two, where nobody is; and one that is all there are."""
    with socket.socket() as taken:  # bound, and not listening: nobody else can
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        job(SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1", SLURM_LOCALID="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)(
            place
        )
        place.patch.setattr(cluster, "PATIENCE", timedelta(seconds=0.1))
        found = page_of(place)["network"]
    assert found.wrong
    assert found.text.startswith(f"rank 1 of 2 does not reach the others by gloo, to meet at 127.0.0.1:{port} (")
    assert "NCCL_SOCKET_IFNAME=INTERFACE" in found.fix
    job(SLURM_STEP_NUM_TASKS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)(place)
    alone = cluster.network(Hardware(torch.device("cpu"), torch.float32, False, ""))
    assert alone.text == "1 processes reach each other by gloo"


def test_what_is_half_there_ends_nothing(tmp_path, monkeypatch):
    """Nodes without a place to meet, tasks without a job, and what an installation that was cut off leaves behind."""
    for half in ({"SLURM_STEP_NUM_NODES": "2"}, {"SLURM_NTASKS": "2"}):
        assert cluster.launch(half).value == 1
    with pytest.raises(ValueError, match="SLURM_NTASKS=a few is no number; start with torchrun or srun"):
        cluster.launch({"SLURM_NTASKS": "a few"})
    before = machine.versions()
    (tmp_path / "x-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert machine.versions() == before


def test_pip_install_of_this_folder_is_nothing_to_mend(place):
    """The README offers it in place of uv; the package that it leaves behind is called flashgpt and is empty."""
    before = machine.versions()
    distributions("flashgpt", "torch")(place)
    assert machine.versions() == before


def test_two_jobs_in_one_folder(place):
    place.patch.setenv("SLURM_JOB_ID", "77")
    with locked(place.runs):
        found = page_of(place)["disk"]
    assert found.wrong
    assert found.text == f"{place.runs} is in use by process {os.getpid()} on {socket.gethostname()}, SLURM job 77"
    assert "hydra.run.dir=FOLDER" in found.fix
    assert not page_of(place)["disk"].wrong


def test_the_page_and_its_json(place, capsys, monkeypatch):
    """The program itself, with the real self-test and probe."""
    monkeypatch.setattr(doctor, "self_test", selftest.self_test)
    monkeypatch.setattr(doctor, "probe", probe)
    monkeypatch.chdir(place.path)
    small_run(place.path)
    arguments = [
        "data=text",
        f"data.files={place.path / 'corpus.txt'}",
        f"data.cache_dir={place.path / 'cache'}",
        "data.seq_len=32",
        "train.batch_tokens=256",
        "logger.wandb=disabled",
    ]
    monkeypatch.setattr(sys, "argv", ["doctor.py", *arguments])
    doctor.main()
    *page, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert report["ready"]
    assert report["wrong"] == []
    assert list(report["checks"]["kernels"]["facts"]["errors"]) == ["float32", "bfloat16", "float16"]
    assert page[-1] == "ready to run"
    assert all(any(line.split()[1] == name for line in page[:-1]) for name in report["checks"])
    monkeypatch.setattr(sys, "argv", ["doctor.py", *arguments, "tokenizer=characters", "data.files=missing.txt"])
    monkeypatch.setattr(doctor, "self_test", lambda *_: RIGHT)
    with pytest.raises(SystemExit) as stopped:
        doctor.main()
    assert stopped.value.code == doctor.FAILED
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["ready"], report["wrong"]) == (False, ["data"])
    assert sorted(path.name for path in place.path.iterdir()) == ["corpus.txt"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's kernels are compiled")
def test_the_self_test_runs_whatever_loaded_triton():
    """transformers does, where a run's model is one of its own."""
    program = """
import os
from scripts import doctor
from training.hardware import HardwareConfig, set_up
doctor.load_triton()
assert "TRITON_INTERPRET" not in os.environ
import triton
print(doctor.kernels(set_up(HardwareConfig(device="cpu")), model=None).text)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "forward and backward are right" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "config",
    [GPTConfig(num_layers=2, n_embd=48, num_heads=4), GPTConfig(num_layers=1, n_embd=32, num_heads=2, mlp="swiglu"),
     GPTConfig(num_layers=3, n_embd=32, num_heads=4, num_kv_heads=1, tie_embeddings=False)],
)  # fmt: skip
def test_parameters_are_counted_without_memory(config):
    config = replace(config, attention="naive", loss="plain")
    counted = GPT(config, 100, 8, device="meta")
    assert counted.num_parameters() == GPT(config, 100, 8).num_parameters()
    assert all(weight.is_meta for weight in counted.parameters())


def test_the_fingerprint_of_a_tokenizer_is_of_its_tokens(place):
    def fingerprint(text: str) -> str:
        (place.path / "corpus.txt").write_text(text)
        settings = small_run(place.path, "tokenizer=characters")
        dataset = open_dataset(settings.data, settings.tokenizer)
        return doctor.tokenizer(settings, dataset=dataset).facts["fingerprint"]

    assert fingerprint("abc" * 400) == fingerprint("cab" * 500)
    assert fingerprint("abc" * 400) != fingerprint("abd" * 400)


@pytest.mark.gpu
def test_the_page_on_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["doctor.py", f"data.cache_dir={tmp_path}", "logger.wandb=disabled"])
    with contextlib.suppress(SystemExit):  # the machine may have other versions than ours, and the page says so
        doctor.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    print(json.dumps(report))
    assert set(report["wrong"]) <= {"versions"}
    assert report["checks"]["attention"]["facts"]["name"] == "flash"
    assert set(report["checks"]["causality"]["facts"]) == {"model", "packing", "KV cache", "paged KV cache"}


def test_checkpoints_that_lie_there_at_once_are_counted_with_the_one_that_is_written(tmp_path):
    for keys, count in (({}, 3), ({"steps": 100, "save_every": 10, "keep_every": 20}, 10)):
        assert machine.disk(TrainConfig(**keys), tmp_path, parameters=1).facts["checkpoints"] == count


def test_a_window_as_long_as_the_context_hides_nothing():
    config = GPTConfig(2, 2, n_embd=32, attention="naive", loss="plain", window=32)
    assert [doctor.network(config, n, vocab_size=None).fix for n in (32, 33)] == ["leave model.window out", None]
