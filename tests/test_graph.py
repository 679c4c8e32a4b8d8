"""The training step as CUDA graphs: the same bits as launched kernel by kernel, and when it is not used."""

import shutil
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.runs import settings, small_run
from tests.test_resume import same_end
from train import train
from training import graph
from training.hardware import Hardware, set_up
from training.run import Run, resolve

RUN = (
    "logger.wandb=disabled",
    "model.attention=flash",
    "train.sample_tokens=20",
    "train.steps=24",
    "train.eval_every=10",
    "train.save_every=10",
    "train.log_every=1",
    "optim.warmup_steps=5",
)
CASES = {
    "adamw": ("optim=adamw",),
    "muon, compiled, dropout": ("optim=muon", "hardware.compile=true", "model.dropout=0.1"),
    "two micro-batches": ("optim=muon", "train.micro_batch=16", "model.dropout=0.1"),
    "eight micro-batches": ("optim=adamw", "train.micro_batch=4", "hardware.compile=true"),
    "recomputed": ("optim=adamw", "model.activation_checkpointing=selective", "hardware.compile=true"),
    "attention's dropout, plain loss": ("optim=muon", "model.attention_dropout=0.1", "model.loss=plain"),
    "float16": ("optim=muon", "hardware.dtype=float16"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_graphs_give_the_same_bits(tmp_path, case):
    """Weights, moments, random streams and every line of metrics; also of a run that goes on from a checkpoint."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    common = (*RUN, f"data.cache_dir={tmp_path / 'cache'}", "hardware.compile=false", *CASES[case])
    for graphs in ("true", "false"):
        train(settings(*common, f"hardware.cuda_graphs={graphs}"), tmp_path / graphs)
    same_end(tmp_path / "true", tmp_path / "false")
    path = tmp_path / "parts" / "checkpoints" / "step_000010"
    shutil.copytree(tmp_path / "true", tmp_path / "parts", symlinks=True)
    train(settings(*common, "hardware.cuda_graphs=true", f"resume={path}"), tmp_path / "parts")
    same_end(tmp_path / "parts", tmp_path / "false")


def test_each_gpu_captures_on_a_stream_of_its_own(monkeypatch):
    """PyTorch's default stream for captures is of the first GPU: runs of a sweep may take others."""
    taken = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, *, stream, **_: nullcontext(taken.append(stream)))
    monkeypatch.setattr(graph, "capture_stream", cache(graph.capture_stream.__wrapped__))
    with FakeTensorMode():
        for number in (0, 1, 0):
            captured, x = graph.Captured(torch.neg), torch.empty(2, device=f"cuda:{number}")
            for _ in range(2):
                captured(x)
    assert taken == [torch.device("cuda", number) for number in (0, 1, 0)]


@pytest.mark.gpu
def test_a_step_is_two_launches(tmp_path):
    """Of graphs: nothing of the network or the optimizer is launched by itself."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    seen = []
    with torch.profiler.profile() as watched:
        train(small_run(tmp_path, "hardware.device=cuda", "train.steps=12"), tmp_path / "run", on_step=seen.append)
    launches = sum(event.name == "cudaGraphLaunch" for event in watched.events())
    assert launches == 2 * (12 - 1)


def test_graphs_are_for_cuda():
    with pytest.raises(ValueError, match="cuda_graphs=true but hardware"):
        set_up(settings("hardware.device=cpu", "hardware.cuda_graphs=true").hardware)


DOCUMENTS = ("data.document_mask=true", "model.attention=naive", "model.loss=plain")


def resolved(monkeypatch, asked: bool | None, *changes: str) -> Run:
    monkeypatch.setattr("training.memory.free_bytes", lambda device: 4 * 2**30)
    hardware = Hardware(torch.device("cuda"), torch.bfloat16, False, "", asked)
    return resolve(settings("train.micro_batch=null", *changes), vocab_size=65, hardware=hardware)


@pytest.mark.parametrize(
    ("asked", "changes", "used", "why"),
    [
        (None, (), True, "forward and backward, and the optimizer"),
        (None, DOCUMENTS, False, "documents differ in number from step to step"),
        (None, ("train.batch_tokens=131072",), False, "the forecast is more than half of the memory; hardware."),
        (True, ("train.batch_tokens=131072",), True, "as configured"),
        (None, ("model.activation_checkpointing=full",), False, "recomputation keeps random states"),
        (None, ("model.attention=tiled",), False, "tiled attention may ask the host; hardware.cuda_graphs=true tries"),
        (False, (), False, "as configured"),
    ],
)
def test_graphs_are_used_where_shapes_stay_and_memory_is_ample(monkeypatch, asked, changes, used, why):
    chosen = resolved(monkeypatch, asked, *changes)
    assert chosen.graphs == used
    assert chosen.graphs_reason.startswith(why)


def test_graphs_that_would_not_be_used_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"cuda_graphs=true does not work with data\.document_mask=true: documents"):
        resolved(monkeypatch, True, *DOCUMENTS)
