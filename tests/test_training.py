"""The training room: schedule, optimizers, FLOPs, the log."""

import contextlib
import copy
import ctypes
import errno
import io
import itertools
import json
import math
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from model import GPT, GPTConfig, resolve_attention
from tests.runs import settings, small_run
from training import log as run_log
from training import provenance
from training.checkpoint import Checkpoint
from training.hardware import HardwareConfig, set_up
from training.log import RunLog
from training.optimizer import OptimConfig, Optimizer, lr_factor
from training.random_states import random_states, restore_random_states
from training.run import resolve
from training.speed import Speed, mfu, model_flops, peak_flops

ROOT = Path(__file__).resolve().parent.parent


class Net(nn.Module):
    """Names and shapes like the GPT's: an embedding, a block with a matrix, tied output."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"linear": nn.Linear(4, 4, bias=False), "norm": nn.RMSNorm(4, elementwise_affine=False)})]
        )
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        block = self.blocks[0]
        return self.head(block["norm"](block["linear"](self.embedding(x))))


# --- schedule


def test_warmup_is_linear_and_ends_at_the_peak():
    config = OptimConfig(warmup_steps=4)
    assert [lr_factor(step, 100, config) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_values():
    config = OptimConfig(warmup_steps=10, min_lr_ratio=0.1)
    assert lr_factor(10, 110, config) == pytest.approx(1.0)
    assert lr_factor(60, 110, config) == pytest.approx(0.55)  # half-way: the mean of both ends
    assert lr_factor(110, 110, config) == pytest.approx(0.1)


def test_wsd_is_flat_then_linear():
    config = OptimConfig(schedule="wsd", warmup_steps=10, decay_fraction=0.2, min_lr_ratio=0.0)
    assert {lr_factor(step, 100, config) for step in range(10, 81)} == {1.0}
    assert lr_factor(90, 100, config) == pytest.approx(0.5)
    assert lr_factor(99, 100, config) == pytest.approx(0.05)
    assert lr_factor(90, 100, replace(config, min_lr_ratio=0.5)) == pytest.approx(0.75)  # half-way to it
    assert lr_factor(99, 100, replace(config, decay_fraction=0.0)) == 1.0
    assert lr_factor(72, 100, replace(config, decay_fraction=0.29)) < 1.0  # 0.29 times 100 is less than 29


def test_a_warm_up_as_long_as_the_run_has_no_room():
    config = OptimConfig(warmup_steps=50)
    assert [config.warmup_within(steps) for steps in (49, 50, 51)] == [4, 5, 50]


def test_no_warmup():
    assert lr_factor(0, 10, OptimConfig(warmup_steps=0, schedule="constant")) == 1.0


# --- optimizers


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_acts_on_every_matrix_and_on_nothing_else(name):
    optimizer = Optimizer(Net(), OptimConfig(name=name, weight_decay=0.1))
    assert {group["weight_decay"] for part in optimizer.optimizers for group in part.param_groups} == {0.1}
    net = Net()
    net.blocks.append(nn.LayerNorm(3))  # a gain and a bias
    net.experts = nn.ParameterDict({"up": torch.zeros(4, 3, 5), "up_bias": torch.zeros(4, 5)})  # as in transformers
    groups = [group for part in Optimizer(net, OptimConfig(name=name)).optimizers for group in part.param_groups]
    kept = [tuple(p.shape) for group in groups if group["weight_decay"] == 0 for p in group["params"]]
    assert kept == [(3,), (3,), (4, 5)]
    decayed = [p.ndim for group in groups if group["weight_decay"] for p in group["params"]]
    assert sorted(decayed) == [2] * (len(decayed) - 1) + [3]


def test_muon_takes_the_hidden_matrices_and_nothing_else():
    net = Net()
    adamw, muon = Optimizer(net, OptimConfig(name="muon")).optimizers
    assert [p for g in muon.param_groups for p in g["params"]] == [net.blocks[0]["linear"].weight]
    assert len([p for g in adamw.param_groups for p in g["params"]]) == 1  # the embedding, once, though tied


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_optimizer_learns_clips_and_round_trips(name):
    torch.manual_seed(0)
    net, tokens = Net(), torch.randint(11, (64,))
    optimizer = Optimizer(net, OptimConfig(name=name, lr=0.05, grad_clip=0.5, weight_decay=0.0))
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(net(tokens), tokens)
        loss.backward()
        norm = optimizer.step(loss.detach())
        losses.append(loss.item())
        assert norm > 0
        assert all(p.grad is None for p in net.parameters())
    assert losses[-1] < 0.5 * losses[0]
    other = Optimizer(net, OptimConfig(name=name, lr=0.01))
    other.load_state_dict(optimizer.state_dict())
    states = [[str(part["state"]) for part in o.state_dict()["optimizer"]] for o in (other, optimizer)]
    assert states[0] == states[1]
    assert other.optimizers[0].param_groups[0]["peak_lr"] == 0.01  # what the configuration says now


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_state_from_before_the_first_step_is_one_without_moments(name):
    """Earlier versions made moments in their first step."""
    net = Net()
    optimizer = Optimizer(net, OptimConfig(name=name))
    loss = net(torch.arange(11)).square().sum()
    loss.backward()
    optimizer.step(loss.detach())
    empty = [{"state": {}} for _ in optimizer.optimizers]
    optimizer.load_state_dict({"optimizer": empty, "loss_scale": None})
    moments = [value for part in optimizer.optimizers for state in part.state.values() for value in state.values()]
    assert len(moments) >= 3
    assert not any(value.any() for value in moments)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x.to("meta"), "is a Tensor, expected a tensor with values"),
        (lambda x: x.to_sparse(), "is a Tensor, expected a tensor with values"),
        (nn.Parameter, "is a Parameter, expected a tensor with values"),
        (torch.t, "is a view or has a gradient, expected values alone"),
        (lambda x: x.clone().requires_grad_(), "is a view or has a gradient, expected values alone"),
        (lambda x: x[:1].clone(), r"is \(1, 4\) in torch.float32, expected \(4, 4\)"),
        (torch.Tensor.double, r"is \(4, 4\) in torch.float64, expected \(4, 4\) in torch.float32"),
        (lambda x: x / 0, "holds NaN, expected numbers"),
    ],
)
def test_moments_that_a_checkpoint_cannot_have_are_refused_before_any_is_loaded(change, says):
    optimizer = Optimizer(Net(), OptimConfig(name="muon"))
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["optimizer"][0]["state"].values():
        values["exp_avg"].fill_(1.0)
    moments = state["optimizer"][1]["state"][0]
    moments["momentum_buffer"] = change(moments["momentum_buffer"])
    with pytest.raises(ValueError, match=f"^momentum_buffer of parameter 0 {says}"):
        optimizer.load_state_dict(state)
    assert not any(value["exp_avg"].any() for value in optimizer.optimizers[0].state.values())


@pytest.mark.parametrize(
    ("keys", "limit", "values"),
    [
        (("lr", "muon_lr_ratio"), r"be positive, finite and at most 1e\+06", (0.0, -1.0, 2e6, math.nan)),
        (("weight_decay", "grad_clip", "warmup_steps"), "be at least 0 and finite", (-1, math.inf, math.nan)),
        (("beta1", "beta2", "momentum"), r"lie in \[0, 1\)", (-0.1, 1.0, math.nan)),
        (("decay_fraction", "min_lr_ratio"), r"lie in \[0, 1\]", (-0.1, 1.1, math.nan)),
    ],
)
def test_a_number_that_no_optimizer_can_use_is_refused(keys, limit, values):
    for key in keys:
        for value in values:
            with pytest.raises(ValueError, match=rf"optim\.{key}={value} must {limit}"):
                OptimConfig(**{key: value})


def test_numbers_at_their_limits_are_accepted():
    OptimConfig(lr=1e6, muon_lr_ratio=1e6, weight_decay=0.0, grad_clip=0.0, warmup_steps=0)
    OptimConfig(beta1=0.0, beta2=0.0, momentum=0.0, decay_fraction=0.0, min_lr_ratio=0.0)
    OptimConfig(decay_fraction=1.0, min_lr_ratio=1.0)


def test_the_loss_scale_goes_on():
    first, second = (Optimizer(Net(), OptimConfig(), torch.float16) for _ in range(2))
    first.loss_scale.scale.fill_(8.0)
    first.loss_scale.good_steps.fill_(5)
    second.load_state_dict(first.state_dict())
    assert (second.loss_scale.scale, second.loss_scale.good_steps) == (8.0, 5)


def test_clipping_bounds_the_gradient():
    net = Net()
    optimizer = Optimizer(net, OptimConfig(grad_clip=1e-3))
    seen = {}
    optimizer.optimizers[0].step = lambda: seen.update(
        norm=torch.cat([p.grad.flatten() for p in optimizer.parameters]).norm().item()
    )
    loss = net(torch.arange(11)).square().sum()
    loss.backward()
    before = optimizer.step(loss.detach())
    assert before > 1e-3
    assert seen["norm"] == pytest.approx(1e-3, rel=1e-3)


def test_lr_factor_scales_every_group_from_its_own_peak():
    optimizer = Optimizer(Net(), OptimConfig(name="muon", lr=1e-3, muon_lr_ratio=20.0))
    optimizer.set_lr_factor(0.5)
    assert [part.param_groups[0]["lr"].item() for part in optimizer.optimizers] == pytest.approx([5e-4, 0.01])
    saved = optimizer.state_dict()["optimizer"]
    assert [part["param_groups"][0]["lr"] for part in saved] == pytest.approx([5e-4, 0.01])
    optimizer.set_lr_factor(0.25)  # not cumulative
    assert optimizer.lr == 2.5e-4


# --- FLOPs


def test_flops_by_hand():
    # one layer, one head of 2: 4 * 2 = 8 FLOPs a pair forward, 24 with the backward
    one_head = {"num_layers": 1, "num_heads": 1, "n_embd": 2}

    def counted(seq_len, window=None):
        config = GPTConfig(**one_head, window=window)
        return model_flops(SimpleNamespace(config=config, seq_len=seq_len, num_matmul_parameters=lambda: 10))

    assert counted(3) == {"causal": 60 + 24 * 2, "full": 60 + 24 * 3}  # a causal token sees 2 of 3 on average
    assert counted(4, window=2) == {"causal": 60 + 24 * 7 / 4, "full": 60 + 24 * 2}  # 1 + 2 + 2 + 2
    assert counted(4, window=9) == counted(4)


def test_flops_of_gpt2_are_nanogpts():
    # nanoGPT's estimate: 6 N + 12 L H Q T with N = 123.6 M, L, H, Q, T = 12, 12, 64, 1024
    config = GPTConfig(num_layers=12, num_heads=12, n_embd=768, mlp="gelu", attention="naive", loss="plain")
    model = GPT(config, 50257, 1024, device="meta")
    assert model.num_matmul_parameters() == 123_568_128
    assert model_flops(model)["full"] == 6 * 123_568_128 + 12 * 12 * 12 * 64 * 1024


def test_mfu_is_absent_where_the_peak_is_unknown():
    assert mfu(1e9, 1e5, None) is None
    assert mfu(1e9, 1e5, 1e15) == pytest.approx(0.1)


def test_mfu_is_a_share_of_all_gpus_in_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    now = iter((0.0, 0.5, 7.0))
    monkeypatch.setattr("training.speed.time", SimpleNamespace(perf_counter=lambda: next(now)))
    gpu, model = torch.device("cuda"), GPT(GPTConfig(1, 1, n_embd=8, attention="naive", loss="plain"), 16, 4)
    two = SimpleNamespace(device=gpu, dtype=torch.bfloat16, world=SimpleNamespace(size=2), synchronize=lambda: None)
    two.peak_memory_gib = lambda: 9.5
    speed = Speed(model, two, batch_tokens=1000, step=3, began=-21.0)
    flops, peak = model_flops(model), peak_flops(gpu, torch.bfloat16)
    assert speed.lap(5) == pytest.approx({
        "tokens_per_second": 4000, "mfu": 2000 * flops["causal"] / peak, "mfu_full": 2000 * flops["full"] / peak,
        "peak_memory_gib": 9.5,
    })  # fmt: skip
    assert speed.progress(5) == {"tokens": 5000, "seconds": 28}
    assert peak_flops(gpu, torch.float32) is peak_flops(torch.device("cpu"), torch.bfloat16) is None
    for name in ("Tesla T4", "Some future GPU"):  # without bfloat16, and not known
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(gpu, torch.bfloat16) is None


# --- hardware


def test_named_hardware_that_is_absent_raises():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"hardware\.device=cuda .*use hardware.device=cpu"):
        set_up(HardwareConfig(device="cuda"))


def test_threads_and_tf32_are_as_configured(monkeypatch):
    """A run of a sweep that sets no threads has those of the process, whatever the runs before it set."""
    threads, said = [8], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    monkeypatch.setattr("training.hardware._FOUND", [])
    amd, intel = {"cpu_name": "AMD EPYC", "avx512_f": True}, {"cpu_name": "Intel Xeon", "avx512_f": True}
    amd_with_amx = amd | {"amx_bf16": True}  # which would round to bfloat16
    for number, tf32, cpu in ((None, True, intel), (3, False, amd), (2, True, amd_with_amx), (None, True, amd)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda cpu=cpu: cpu)
        set_up(HardwareConfig(device="cpu", num_threads=number, tf32=tf32), trains=True)
    assert threads == [8, 3, 2, 8]
    assert said == ["high", "highest", "high", "high", "medium"]
    set_up(HardwareConfig(device="cpu"))
    assert said[5:] == ["high"], "a cache that grows has a new shape for each token"


def test_a_run_has_the_products_of_who_trains(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "AMD EPYC", "avx512_f": True})
    resolve(small_run(tmp_path, "hardware.device=cpu"))
    assert said[-1] == "medium"


def test_products_in_float32_on_a_cpu_are_float32s():
    """Of all shapes, whichever library has them: by those that PyTorch may round to bfloat16 where it is allowed to."""
    set_up(HardwareConfig(device="cpu"), trains=True)
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in itertools.product((1, 7, 64, 257), (3, 64, 500), (1, 65, 512)):
        a, b = (torch.randn(2, *shape, generator=generator) for shape in ((rows, inner), (columns, inner)))
        right = a.double() @ b.double().mT
        for found in (a @ b.mT, F.linear(a[0], b[0])[None], (b @ a.mT).mT, torch.baddbmm(torch.zeros(()), a, b.mT)):
            assert (found - right[: len(found)]).norm() <= 3e-6 * right[: len(found)].norm()


def test_a_mac_where_pytorch_takes_it(monkeypatch):
    """By name only, and the line says that it was never measured; its random stream is the checkpoint's, too."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device=mps but PyTorch sees no Apple GPU; use hardware.device=cpu"):
        set_up(HardwareConfig(device="mps"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    hardware = set_up(HardwareConfig(device="mps"))
    assert (hardware.device.type, hardware.dtype, hardware.compile) == ("mps", torch.float32, False)
    assert "never measured" in hardware.description
    assert hardware.peak_memory_gib() is None
    assert resolve_attention("auto", hardware.device, hardware.dtype, 64)[0] == "sdpa"
    restored = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.tensor([7]))
    monkeypatch.setattr(torch.mps, "set_rng_state", restored.append)
    restore_random_states(random_states("mps"), "mps")
    assert [state.item() for state in restored] == [7]
    restore_random_states(random_states("cpu"), "mps")
    assert len(restored) == 1


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another libc than glibc")
def test_a_cpu_keeps_the_memory_that_a_step_frees():
    """In a process of its own: an allocator is asked once and for all."""
    code = """
import resource, torch
from training.hardware import HardwareConfig, set_up
set_up(HardwareConfig(device="cpu", num_threads=1))
def step():
    tensors = [torch.ones(2**18 * 4**(i % 3)) for i in range(20)]  # 1, 4 and 16 MiB
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(8)))  # the first ones take memory, and now and then a later one
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50


def test_a_cpu_defaults_to_what_it_has_units_for_and_to_eager(monkeypatch):
    for units, dtype in (("amx_bf16", torch.bfloat16), ("avx512_f", torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda units=units: {units: True})
        hardware = set_up(HardwareConfig(device="cpu"))
        assert (hardware.dtype, hardware.compile, hardware.peak_memory_gib()) == (dtype, False, None)
        assert hardware.description.endswith(f"{str(dtype).removeprefix('torch.')}, eager")


# --- the log


def log(tmp_path, *, steps=9, first_step=0):
    """Of a new run, or of one that resumes the folder's checkpoint of `first_step`."""
    chosen, checkpoint = settings(f"train.steps={steps}", "logger.wandb=disabled"), None
    if first_step:
        path = tmp_path / "checkpoints" / f"step_{first_step:06d}"
        path.mkdir(parents=True, exist_ok=True)
        checkpoint = Checkpoint(path.resolve(), {"step": first_step, "metric_lines": first_step})
        chosen.resume = str(path)
    return RunLog(tmp_path, chosen, ("disabled", ""), {"settings": {"resume": chosen.resume}}, checkpoint)


def records(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_one_json_object_a_step(tmp_path):
    with log(tmp_path) as opened:
        opened.metrics(1, {"loss": 2.5, "mfu": None})
        opened.metrics(2, {"loss": math.inf})
    assert records(tmp_path) == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]


def test_a_line_says_how_long_it_took_and_will_take(tmp_path, monkeypatch, capsys):
    """At the pace since this process's first line, which compiled."""
    now = iter((100.0, 140.0))
    monkeypatch.setattr("training.log.time", SimpleNamespace(perf_counter=lambda: next(now)))
    with log(tmp_path, steps=200) as opened:
        opened.metrics(1, {"loss": 1.0, "seconds": 59.6})
        opened.metrics(5, {"loss": 1.0, "seconds": 3700.0})
    assert [line.partition("elapsed ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "1:00",
        "1:01:40  ETA 32:30",  # 195 steps of 10 s
    ]


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    with log(tmp_path) as opened:
        for step in (1, 2, 3):
            opened.metrics(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # all that a machine which lost power got to write
    (tmp_path / "run.json").touch()  # the folder is a run's
    with log(tmp_path, first_step=2) as opened:
        opened.metrics(3, {"loss": 9.0})
    assert [(r["step"], r["loss"]) for r in records(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 9.0)]


def test_until_the_first_new_line_nothing_is_dropped(tmp_path, monkeypatch):
    """Whatever refuses the run after its log is open, wandb among others, has changed nothing."""
    with log(tmp_path) as opened:
        for step in (1, 2, 3):
            opened.metrics(step, {"loss": float(step)})
    (tmp_path / "run.json").touch()  # the folder is a run's
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="refused"), log(tmp_path, first_step=1):
        raise ValueError("refused")

    def refuse(*_, **__):
        raise ValueError("wandb does not start")

    with monkeypatch.context() as patch:
        patch.setattr("training.log.start_wandb", refuse)
        with pytest.raises(ValueError, match="does not start"):
            log(tmp_path, first_step=1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    with log(tmp_path, first_step=1) as opened:
        opened.metrics(2, {"loss": 9.0})
    assert [(r["step"], r["loss"]) for r in records(tmp_path)] == [(1, 1.0), (2, 9.0)]
    assert not (tmp_path / "metrics.tmp").exists()


def test_a_file_that_cannot_be_opened_for_a_moment_keeps_its_lines(tmp_path, monkeypatch):
    """As on a network's disk that does not answer."""
    with log(tmp_path) as opened:
        opened.metrics(1, {"loss": 1.0})
    (tmp_path / "run.json").touch()  # the folder is a run's
    real = Path.open

    def open_file(path, mode="r", *args, **kwargs):
        if mode == "ab":
            raise OSError(errno.EIO, "no answer", str(path))
        return real(path, mode, *args, **kwargs)

    with log(tmp_path, first_step=1) as opened:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", open_file)
            opened.metrics(2, {"loss": 2.0})
        opened.metrics(3, {"loss": 3.0})
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]


def test_a_summary_that_cannot_be_removed_costs_no_line_of_metrics(tmp_path):
    with log(tmp_path) as opened:
        opened.metrics(1, {"loss": 1.0})
    (tmp_path / "summary.json").mkdir()
    with log(tmp_path, first_step=1) as opened:
        opened.metrics(2, {"loss": 2.0})
    assert [r["step"] for r in records(tmp_path)] == [1, 2]


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    with log(tmp_path) as opened:
        opened.metrics(1, {"loss": 1.0})
    with pytest.raises(ValueError, match="already holds a run"):
        log(tmp_path)


def test_a_stop_whose_checkpoint_is_not_on_disk_has_the_exit_code_of_that(tmp_path):
    """`train` then raises what the disk said, and a launcher that resumes after a stop must not."""
    check = SimpleNamespace(bad_steps=0, spikes=0)
    stop = SimpleNamespace(reason="SIGTERM", exit_code=143, purpose="to go on", overrides=())
    results = {"steps": 1, "seconds": 1.0}
    with log(tmp_path) as opened:
        for unsaved, code in ((None, 143), (OSError("No space left"), 2)):
            summary = opened.finish(results, check, stop, tmp_path / "step_000001", unsaved)
            assert (summary["stopped"], summary["exit_code"]) == ("SIGTERM", code)
            assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_without_a_terminal_no_progress_bar_exists(tmp_path, monkeypatch):
    """Nothing of it is made, asked or drawn: `advance` costs a run in a file or a pipe one comparison."""
    from training import log as logging

    calls, real = [], logging._progress_bar

    def counted(*args):
        bar, update = real(*args), logging.Progress.update
        monkeypatch.setattr(bar, "update", lambda *a, **k: calls.append(k["completed"]) or update(bar, *a, **k))
        calls.append("made")
        return bar

    monkeypatch.setattr(logging, "_progress_bar", counted)
    threads = threading.active_count()
    with log(tmp_path / "file") as opened:
        assert not opened.console.is_terminal
        opened.advance(1)
        assert threading.active_count() == threads  # none that redraws
    assert calls == []
    terminal = Console(force_terminal=True, file=io.StringIO(), width=80)
    monkeypatch.setattr(logging, "Console", lambda **_: terminal)
    with log(tmp_path / "terminal") as opened:
        opened.advance(1)
        opened.advance(2)
    assert calls == ["made", 1, 2]
    assert "2/9 steps" in re.sub(r"\x1b\[[0-9;]*m", "", terminal.file.getvalue())


def test_wandb_is_offline_without_a_login(tmp_path, monkeypatch):
    from training.wandb_run import _has_wandb_login

    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not _has_wandb_login()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password " + "0" * 40 + "\n")
    assert _has_wandb_login()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080/")
    assert not _has_wandb_login()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert _has_wandb_login()


def test_a_failing_wandb_does_not_stop_the_run(tmp_path, capsys):
    class Broken:
        starting_step = 0

        def log(self, values, step):
            raise RuntimeError("no more")

    with log(tmp_path) as opened:
        opened._wandb = Broken()
        opened.metrics(1, {"loss": 1.0})
        opened.metrics(2, {"loss": 1.0})
    assert len(records(tmp_path)) == 2
    assert capsys.readouterr().out.count("goes on without it") == 1


@pytest.mark.parametrize("code", [0, 1])
def test_wandb_hears_whether_the_run_failed(tmp_path, code):
    ended = []
    with contextlib.suppress(ValueError), log(tmp_path) as opened:
        opened._wandb = SimpleNamespace(finish=lambda exit_code: ended.append(exit_code))
        if code:
            raise ValueError("refused")
    assert ended == [code]


def test_a_file_of_a_run_is_on_disk_before_its_name_is(tmp_path, monkeypatch):
    """A power cut then leaves it whole or as it was."""
    path, flushed = tmp_path / "summary.json", []
    monkeypatch.setattr(run_log, "flush", lambda file: flushed.append((file.read_text(), path.exists())))
    run_log._write_whole(path, "{}")
    assert (flushed, path.read_text()) == ([("{}", False)], "{}")


def test_the_commit_says_whether_the_code_is_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")  # which may ask for signatures
    monkeypatch.delenv("GIT_COMMIT", raising=False)

    def git(*arguments: str) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", "-C", str(tmp_path), *name, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert provenance.git_commit() is None
    (tmp_path / "train.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (tmp_path / "notes.txt").write_text("untracked")
    assert provenance.git_commit() == git("rev-parse", "HEAD")
    (tmp_path / "train.py").write_text("2")
    assert provenance.git_commit() == git("rev-parse", "HEAD") + "+changes"
    monkeypatch.setenv("GIT_COMMIT", "c0ffee")
    assert provenance.git_commit() == "c0ffee"


def test_a_run_that_is_killed_while_it_is_described_has_the_mark_of_one(tmp_path, monkeypatch):
    written, description = [], {"provenance": {}, "left_open": {}, "settings": {}}
    monkeypatch.setattr(run_log, "_write_whole", lambda path, content: written.append(path.name))
    RunLog(tmp_path, settings(), ("disabled", ""), description).describe({}, {})
    assert written == ["run.json", "config.yaml"]
