"""What a run will be is decided once, before anything is written; who watches or replaces a part changes no bit."""

import dataclasses
import hashlib
import importlib
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from subprocess import CalledProcessError
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import train as program
from kernels import naive_attention
from model import ATTENTION, GPT, GPTConfig, attend_with
from scripts.bench import processes
from tests.runs import metrics, small_run
from train import train
from training import memory
from training import run as resolving
from training.hardware import Hardware, refuse_without_compiler
from training.run import TrainConfig, resolve
from training.step import Step

SHORT = ("train.steps=6", "train.log_every=1", "train.eval_every=2", "model.dropout=0.1", "optim.warmup_steps=1")


def weights_of(run_dir) -> str:
    return hashlib.sha256((run_dir / "checkpoints" / "last" / "model.safetensors").read_bytes()).hexdigest()


def test_a_run_is_resolved_once_and_its_settings_stay_as_they_were(tmp_path, monkeypatch):
    chosen, found = small_run(tmp_path, *SHORT, "model.attention=auto", "train.micro_batch=auto"), []
    before = asdict(chosen)
    monkeypatch.setattr(
        program, "resolve", lambda *args, **options: found.append(resolve(*args, **options)) or found[-1]
    )
    train(chosen, tmp_path / "run")
    (run,) = found
    assert asdict(chosen) == before
    assert (run.model.attention, run.model.loss, run.micro_batch) == ("sdpa", "plain", 8)
    assert run.settings["model"]["attention"] == "sdpa"
    assert run.settings["train"]["micro_batch"] == 8
    assert run.attention_reason == "auto: the device is cpu, flash is for CUDA"
    for field in dataclasses.fields(run):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(run, field.name, None)


def test_random_tokens_need_no_text(tmp_path, monkeypatch):
    monkeypatch.setattr(resolving, "open_dataset", lambda *_, **__: pytest.fail("opened"))
    run = resolve(small_run(tmp_path, "resume=nowhere", "train.micro_batch=2"), vocab_size=50)
    assert (run.vocab_size, run.micro_batch, run.sequences, run.seq_len) == (50, 2, 8, 32)
    assert (run.dataset, run.resumed) == (None, None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.attention=sdpa", "data.document_mask=true"], "varlen in float32 is not supported by sdpa"),
        (["data.files=missing.txt"], "missing.txt does not exist"),
        (["resume=nowhere"], "nowhere"),
        (["profile=true", "train.steps=6"], "profile=true needs 7 steps"),
        (["logger.wandb=online"], "logger.wandb=online but"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written_or_allocated(tmp_path, monkeypatch, overrides, message):
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("training.run.build_model", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=message):
        train(small_run(tmp_path, *overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_memory_that_is_short_is_said_before_the_model_is_built(tmp_path, monkeypatch):
    def short(*_):
        raise ValueError("train.micro_batch=8 needs 3.00 GiB and 1.00 GiB are free; use 2")

    monkeypatch.setattr(memory, "plan", short)
    monkeypatch.setattr("training.run.build_model", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=r"needs 3\.00 GiB"):
        train(small_run(tmp_path), tmp_path / "run")


@pytest.mark.parametrize(
    ("failure", "has_headers", "why"),
    [
        (None, True, None),
        (None, False, None),  # the file that needs them was compiled before, elsewhere
        (RuntimeError("Failed to find C compiler."), False, "cc finds no Python.h; install python3"),
        (CalledProcessError(1, ["cc", "main.c"]), False, "cc finds no Python.h; install python3"),
        # what no compiler would mend
        (AssertionError("libcuda.so cannot found!\nPlease"), True, "libcuda.so cannot found!; mend that, or use"),
        (ModuleNotFoundError("No module named 'triton'"), True, "No module named 'triton'; mend that, or use hardware"),
        (PermissionError(13, "Permission denied", "/.triton"), True, ".*: '/.triton'; mend that, or use hardware"),
    ],
)
def test_a_gpu_that_triton_cannot_use_is_refused_with_the_reason(tmp_path, monkeypatch, failure, has_headers, why):
    """A container or a Linux distribution's own Python may have neither gcc nor Python.h."""
    driver = Mock()
    driver.active.get_current_target.side_effect = failure
    monkeypatch.setattr("triton.runtime.driver", driver)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    if has_headers:
        (tmp_path / "Python.h").touch()
    expected = pytest.raises(ValueError, match=f"^Triton cannot use this GPU: {why}") if why else nullcontext()
    with expected:
        refuse_without_compiler(Hardware(torch.device("cuda"), torch.float32, False, ""))


def test_every_run_on_a_gpu_needs_triton(tmp_path, monkeypatch):
    """An eager one of PyTorch's own attention, too: rotary positions and the loss are kernels of ours."""
    monkeypatch.setattr("training.hardware.failure_of_triton", lambda: "no Triton here")
    eager = Hardware(torch.device("cuda"), torch.float32, False, "")
    monkeypatch.setattr("training.hardware.choose_hardware", lambda *_: eager)
    with pytest.raises(ValueError, match=r"^Triton cannot use this GPU"):
        resolve(small_run(tmp_path, "model.attention=sdpa"))


ON_A_GPU = [
    "sample",
    *(f"bench.{name}" for name in ("attention", "cache_bits", "decode", "error_budget", "generation", "huggingface")),
    *(f"bench.{name}" for name in ("loss", "masks", "mosaicbert", "training")),
]


@pytest.mark.parametrize("name", ON_A_GPU)
def test_what_runs_on_a_gpu_needs_triton_too(name, monkeypatch, capsys, tmp_path):
    """It ended in PyTorch's traceback at its first kernel."""
    program = importlib.import_module(f"scripts.{name}")
    on_gpu = Hardware(torch.device("cuda"), torch.float32, False, "")
    monkeypatch.setattr("training.hardware.choose_hardware", lambda *_: on_gpu)
    monkeypatch.setattr("scripts.bench.report.refuse_without_gpu", lambda *_: None)
    monkeypatch.setattr("training.hardware.failure_of_triton", lambda: "no Triton here")
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        program.main()
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: Triton cannot use this GPU")


def test_a_benchmark_of_several_gpus_needs_triton_too(monkeypatch, tmp_path):
    """Each of its processes looks, and leaves what it refuses where the one that started it finds it."""
    on_gpu = Hardware(torch.device("cuda"), torch.float32, False, "")
    monkeypatch.setattr("training.hardware.choose_hardware", lambda *_: on_gpu)
    monkeypatch.setattr("training.hardware.failure_of_triton", lambda: "no Triton here")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    with pytest.raises(SystemExit):
        processes._run(0, [1], 0, None, SimpleNamespace(hardware=None), tmp_path / "found")
    assert (tmp_path / "refused_by_0").read_text().startswith("Triton cannot use this GPU")


@pytest.mark.parametrize(("platform", "why"), [("linux", "cc finds no Python.h"), ("darwin", None)])
def test_headers_are_not_looked_for_where_pytorch_finds_others(tmp_path, monkeypatch, platform, why):
    monkeypatch.setattr("training.hardware.sys", SimpleNamespace(platform=platform, version_info=sys.version_info))
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    monkeypatch.setenv("CXX", "cc")
    expected = pytest.raises(ValueError, match=f"^hardware.compile=true, and {why}; ") if why else nullcontext()
    with expected:
        refuse_without_compiler(Hardware(torch.device("cpu"), torch.float32, True, ""))


def test_on_macos_a_compiler_comes_with_its_own_command(monkeypatch):
    monkeypatch.setattr("training.hardware.sys", SimpleNamespace(platform="darwin", version_info=sys.version_info))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match=r"there is no C\+\+ compiler \(clang\+\+\); xcode-select --install, or use"):
        refuse_without_compiler(Hardware(torch.device("cpu"), torch.float32, True, ""))


@pytest.mark.parametrize("value", ["nothing++", "cc -m64", "", None])
def test_a_variable_that_names_no_compiler_is_what_to_mend(monkeypatch, value):
    """PyTorch and Triton take it for the name of one program; no installation helps."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    if value is not None:
        monkeypatch.setenv("CXX", value)
    remedy = "install [a-z]+[+][+] and python3" if value is None else "unset CXX, or use hardware.compile=false"
    with pytest.raises(ValueError, match=rf"there is no C\+\+ compiler \(.*\); {remedy}"):
        refuse_without_compiler(Hardware(torch.device("cpu"), torch.float32, True, ""))


def test_only_what_is_compiled_needs_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "nothing++")
    assert resolve(small_run(tmp_path, "hardware.compile=false")).hardware.compile is False
    with pytest.raises(ValueError, match="there is no C\\+\\+ compiler"):
        resolve(small_run(tmp_path, "hardware.compile=true"))


# ---- the seams


def test_the_seams_change_no_bit(tmp_path):
    """The named attention itself in place of the named attention, and a callback that reads everything."""
    seen: list[Step] = []
    plain, seamed = (small_run(tmp_path, *SHORT, "model.attention=naive") for _ in range(2))
    train(plain, tmp_path / "plain")
    train(seamed, tmp_path / "seamed", attend=ATTENTION["naive"], on_step=seen.append)
    assert weights_of(tmp_path / "seamed") == weights_of(tmp_path / "plain")
    assert metrics(tmp_path / "seamed") == metrics(tmp_path / "plain")
    assert [step.number for step in seen] == [1, 2, 3, 4, 5, 6]
    assert [step.loss.item() for step in seen] == [row["loss"] for row in metrics(tmp_path / "plain")]
    assert all(step.batch[0].shape == (8, 32) for step in seen)


def test_a_function_takes_the_place_of_the_named_attention(tmp_path):
    calls = []

    def first_token_only(q, k, v, **options):
        calls.append(options["causal"])
        return naive_attention(q, k[:, :, :1], v[:, :, :1])

    common = (*SHORT, "model.attention=naive", "train.eval_every=0")
    train(small_run(tmp_path, *common), tmp_path / "named")
    train(small_run(tmp_path, *common), tmp_path / "replaced", attend=first_token_only)
    assert len(calls) == 2 * (6 + 1)  # of two layers, in six steps and one evaluation
    assert weights_of(tmp_path / "replaced") != weights_of(tmp_path / "named")


def test_attend_with_wraps_each_layer_and_puts_it_back():
    model = GPT(GPTConfig(2, 2, n_embd=32, attention="naive", loss="plain"), 20, 8)
    tokens, order = torch.zeros(1, 8, dtype=torch.int64), []
    expected = model(tokens)

    def wrap(layer, attend):
        return lambda *qkv, **options: order.append(layer) or attend(*qkv, **options)

    with attend_with(model, wrap):
        assert torch.equal(model(tokens), expected)
        with attend_with(model, lambda layer, attend: lambda q, k, v, **_: torch.zeros_like(q)):
            assert not torch.equal(model(tokens), expected)
        model(tokens)
    assert order == [0, 1, 0, 1]
    with pytest.raises(RuntimeError), attend_with(model, wrap):
        raise RuntimeError
    assert torch.equal(model(tokens), expected)
    assert order == [0, 1, 0, 1]


def test_what_is_due_after_a_step():
    config = TrainConfig(steps=25, log_every=10, eval_every=0, save_every=7)
    assert [step for step in range(1, 26) if config.is_logged(step)] == [1, 10, 20, 25]
    assert [step for step in range(1, 26) if config.is_due(config.eval_every, step)] == [25]
    assert [step for step in range(1, 26) if config.is_observed(step)] == [1, 7, 10, 14, 20, 21, 25]
    assert replace(config, seed=3).window_seed == 3
    assert replace(config, seed=3, data_seed=5).window_seed == 5
    assert replace(config, seed=3, data_seed=0).window_seed == 0
