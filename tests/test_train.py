"""Whole runs, small: the loss falls, watching changes nothing."""

import copy
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import train as program
from data import TokenBatches, build_tokenizer, document_starts, open_dataset
from model import GPT, GPTConfig
from tests.runs import SMALL, settings, small_run, told
from train import train
from training import stepper
from training.checkpoint import open_checkpoint
from training.evaluate import EvaluationSet, evaluate, unigram_loss
from training.hardware import HardwareConfig, set_up
from training.optimizer import OptimConfig, Optimizer, lr_factor
from training.parallel import ALONE
from training.saver import Saver
from training.step import Step, training_step
from training.stop import StopRequest

ROOT = Path(__file__).resolve().parent.parent


def records(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights_digest(run_dir: Path, name: str = "last") -> str:
    return hashlib.sha256((run_dir / "checkpoints" / name / "model.safetensors").read_bytes()).hexdigest()


def losses(run_dir: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in records(run_dir) if "loss" in r}


def test_a_run_reads_shifted_windows_where_it_was_asked_to(tmp_path):
    chosen = small_run(tmp_path, "train.steps=2", "data.shift_windows=true")
    rows: list[torch.Tensor] = []
    train(chosen, tmp_path / "run", on_step=lambda step: rows.append(step.batch[0].clone()))
    tokens = open_dataset(chosen.data, chosen.tokenizer).train
    shifted, straight = (TokenBatches(tokens, 32, 8, chosen.train.seed, shifted=shift) for shift in (True, False))
    assert all(torch.equal(shifted.batch(step)[0], rows[step]) for step in range(2))
    assert not torch.equal(straight.batch(0)[0], rows[0])


def test_a_run_learns_and_leaves_its_story(tmp_path):
    run_dir = tmp_path / "run"
    chosen = small_run(tmp_path, "train.steps=60", "train.eval_every=20", "train.sample_tokens=5")
    summary = train(chosen, run_dir)
    assert summary["val_loss"] < summary["unigram_val_loss"]
    assert summary["steps"] == 60
    written = {p.name for p in run_dir.iterdir()}
    assert {"metrics.jsonl", "config.yaml", "run.json", "summary.json", "checkpoints"} <= written
    description = json.loads((run_dir / "run.json").read_text())
    assert description["provenance"]["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert description["evaluation"]["stride_tokens"] == 32
    curve = losses(run_dir)
    assert curve[60] < curve[1] - 1.0
    rates = {r["step"]: r["lr"] for r in records(run_dir)}
    assert rates == {step: chosen.optim.lr * lr_factor(step - 1, 60, chosen.optim) for step in rates}
    first = records(run_dir)[0]
    assert first["loss"] == pytest.approx(5.55, abs=0.4)  # log(257): a new model knows nothing
    assert [r["step"] for r in records(run_dir)] == sorted({r["step"] for r in records(run_dir)})
    meta = open_checkpoint(run_dir).meta
    assert meta["settings"]["model"]["attention"] == "sdpa"  # the resolved name, never "auto"


def test_seeds_decide_the_weights_and_the_windows(tmp_path):
    def first_step(*overrides: str) -> Step:
        steps: list[Step] = []
        train(small_run(tmp_path, "train.steps=1", *overrides), tmp_path / "-".join(overrides), on_step=steps.append)
        return steps[0]

    one, weights, windows = (first_step(f"train.seed={a}", f"train.data_seed={b}") for a, b in ((1, 5), (2, 5), (1, 6)))
    assert torch.equal(one.batch[0], weights.batch[0])
    assert one.loss != weights.loss
    assert not torch.equal(one.batch[0], windows.batch[0])


def test_the_best_is_that_of_all_evaluations_and_not_of_the_last_two(tmp_path, monkeypatch):
    measured = iter((3.0, 1.0, 4.0, 2.0))
    monkeypatch.setattr(
        program.Stepper, "evaluate", lambda self, windows: {"val_loss": next(measured), "val_bits_per_byte": 1.0}
    )
    summary = train(small_run(tmp_path, "train.steps=4", "train.eval_every=1"), tmp_path / "run")
    assert (summary["val_loss"], summary["best_val_loss"]) == (2.0, 1.0)
    assert open_checkpoint(tmp_path / "run" / "checkpoints" / "best").step == 2


def test_the_end_of_a_document_is_no_text(tmp_path):
    """Else bits per byte of many short documents would be far too few."""
    bytes_, tokens = build_tokenizer("bytes"), np.array([0, 97, 256, 98, 256], dtype=np.uint16)
    dataset = SimpleNamespace(validation=tokens, tokenizer=bytes_)
    windows = EvaluationSet.of(dataset, 4, 1)
    assert windows.bytes == 2
    assert windows.metrics(math.log(8)) == pytest.approx(  # 4 tokens of 3 bits for 2 bytes
        {"val_loss": math.log(8), "val_perplexity": 8.0, "val_bits_per_byte": 6.0}
    )
    assert windows.metrics(750.0)["val_perplexity"] == math.inf
    assert replace(windows, bytes=0).metrics(1.0)["val_loss"] == 1.0  # of empty documents alone


@pytest.mark.parametrize("end_of_text", [None, 9])
def test_an_evaluation_is_the_mean_over_its_tokens(end_of_text):
    """However many windows are computed at a time, always as many; without dropout, and the mode is as before."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(1, 2, n_embd=32, dropout=0.5, attention="naive", loss="plain"), 10, 8)
    inputs, targets = torch.randint(9, (2, 5, 8))
    inputs[:, 3] = 9
    evaluated = EvaluationSet(inputs, targets, 1)
    hardware = set_up(HardwareConfig(device="cpu", dtype="float32"))
    called: list[int] = []
    model.register_forward_pre_hook(lambda _, arguments: called.append(len(arguments[0])))
    for training in (False, True):
        model.train(training)
        found = [evaluate(model, evaluated, size, hardware, end_of_text)["val_loss"] for size in (1, 2, 5)]
        assert model.training is training
    assert called == [1, 1, 1, 1, 1, 2, 2, 2, 5] * 2
    model.eval()
    parts = [slice(0, 8)] if end_of_text is None else [slice(0, 3), slice(3, 8)]
    logits = torch.cat([model(inputs[:, part]) for part in parts], 1)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert found == pytest.approx([expected] * 3, rel=1e-6)


def test_an_evaluation_is_in_the_dtype_of_training():
    seen = []

    def model(inputs, targets):
        seen.append(torch.ones(2, 2) @ torch.ones(2, 2))
        return torch.tensor(1.0)

    model.training, model.eval, model.train = False, lambda: None, lambda mode: None
    windows = EvaluationSet(*torch.zeros(2, 3, 4, dtype=torch.int64), 1)
    evaluate(model, windows, 3, set_up(HardwareConfig(device="cpu", dtype="bfloat16")))
    assert [product.dtype for product in seen] == [torch.bfloat16]


def test_each_micro_batch_has_the_documents_of_its_own_rows():
    torch.manual_seed(0)
    inputs, targets = torch.randint(9, (2, 4, 8))
    inputs[0, 3] = inputs[2, 5] = 9
    first, found = GPT(GPTConfig(1, 2, n_embd=32, attention="naive", loss="plain"), 10, 8), []
    hardware = set_up(HardwareConfig(device="cpu", dtype="float32"))
    for size in (4, 3, 2, 1):  # 3 does not divide them
        model = copy.deepcopy(first)
        optimizer = Optimizer(model, OptimConfig())
        step = training_step(model, optimizer, (inputs, targets, document_starts(inputs, 9)), size, hardware)
        found.append([value.item() for value in step])
    assert all(other == pytest.approx(found[0], rel=1e-5) for other in found)


def test_a_unigram_model_counts_each_token_once_more():
    expected = -sum(math.log(count / 6) for count in (3, 1)) / 2
    assert unigram_loss(np.array([0, 0, 1], np.uint16), torch.tensor([[0], [2]]), 3) == pytest.approx(expected)


def test_a_unigram_model_reads_each_token_of_a_split_that_memory_does_not_hold_once():
    read = []

    class Mapped:
        def __len__(self):
            return (2 << 24) + 5

        def __getitem__(self, part):
            read.append(part.indices(len(self)))
            return np.zeros(1, np.uint16)

    unigram_loss(Mapped(), torch.tensor([[0]]), 3)
    assert read == [(0, 1 << 24, 1), (1 << 24, 2 << 24, 1), (2 << 24, (2 << 24) + 5, 1)]


def test_the_others_wait_while_the_first_reads_all_of_the_text(tmp_path, monkeypatch):
    found = []
    real = program.unigram_loss
    monkeypatch.setattr(program, "unigram_loss", lambda *text: found.append(ALONE.patience) or real(*text))
    train(
        small_run(tmp_path, "train.steps=2"), tmp_path / "run", on_step=lambda step: setattr(ALONE, "patience", 600.0)
    )
    assert found == [math.inf]


def test_a_signal_ends_nobody_who_waits_for_the_first_to_end(tmp_path, monkeypatch):
    """The others died of it, and the first one's last checkpoint with them."""
    handlers = []
    monkeypatch.setattr(ALONE, "broadcast", lambda value: handlers.append(signal.getsignal(signal.SIGTERM)) or value)
    train(small_run(tmp_path, "train.steps=2"), tmp_path / "run")
    assert handlers[-1].__func__ is StopRequest._on_signal


def test_the_first_is_waited_for_while_it_saves_and_samples(tmp_path, monkeypatch):
    patience = {}

    def noting(name, real):
        return lambda *given, **named: patience.setdefault(name, ALONE.patience) and real(*given, **named)

    for owner, name in ((Saver, "wait"), (stepper, "sample")):  # for what is being written
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    sampled = small_run(tmp_path, "train.steps=2", "train.sample_tokens=4", "train.sample_every=1")
    train(sampled, tmp_path / "run", on_step=lambda step: setattr(ALONE, "patience", 600.0))
    assert patience == {"wait": math.inf, "sample": math.inf}


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_watching_changes_nothing(tmp_path, optim):
    """Evaluating, sampling, logging and saving more or less often: the same bits at every step."""
    common = (f"optim={optim}", "train.steps=12", "model.dropout=0.2", "optim.warmup_steps=2")
    seldom = small_run(tmp_path, *common, "train.log_every=1", "train.eval_every=0")
    often = small_run(
        tmp_path,
        *common,
        "train.log_every=1",
        "train.eval_every=1",
        "train.sample_every=2",
        "train.sample_tokens=4",
        "train.save_every=3",
        "train.eval_windows=7",
    )
    train(seldom, tmp_path / "seldom")
    train(often, tmp_path / "often")
    assert losses(tmp_path / "seldom") == losses(tmp_path / "often")
    assert weights_digest(tmp_path / "seldom") == weights_digest(tmp_path / "often")
    logging = small_run(tmp_path, *common, "train.log_every=5", "train.eval_every=0")
    train(logging, tmp_path / "logging")
    assert weights_digest(tmp_path / "logging") == weights_digest(tmp_path / "seldom")


def test_any_split_into_micro_batches_is_the_same_step(tmp_path):
    curves = []
    for micro_batch in (16, 8, 4):
        run_dir = tmp_path / str(micro_batch)
        train(
            small_run(
                tmp_path,
                "train.batch_tokens=512",
                f"train.micro_batch={micro_batch}",
                "train.steps=8",
                "train.log_every=1",
                "train.eval_every=0",
                "optim=adamw",
                "optim.warmup_steps=1",
            ),
            run_dir,
        )
        curves.append(records(run_dir))
    for other in curves[1:]:
        for a, b in zip(curves[0], other, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=2e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_backends_train_alike(tmp_path):
    curves = {}
    for attention in ("naive", "tiled", "sdpa", "flash"):
        if attention == "flash" and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("on the CPU flash needs TRITON_INTERPRET=1; the GPU has a test of its own")
        run_dir = tmp_path / attention
        overrides = (
            "train.steps=3",
            "train.log_every=1",
            "train.eval_every=0",
            "optim=adamw",  # Muon's Newton-Schulz iteration runs in bfloat16 and makes large what rounding left
            "data.seq_len=16",
        )
        small = ("train.batch_tokens=64", f"model.attention={attention}", "train.eval_windows=1")
        train(small_run(tmp_path, *overrides, *small), run_dir)
        curves[attention] = losses(run_dir)
    for attention, curve in curves.items():
        assert curve == pytest.approx(curves["naive"], abs=1e-5), attention


def test_a_window_longer_than_the_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.seq_len=4096"):
        train(small_run(tmp_path, "data.seq_len=4096", "train.batch_tokens=4096"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def command(python: str, tmp_path: Path, *arguments: str) -> list[str]:
    return [
        python,
        str(ROOT / "train.py"),
        "data=text",
        f"data.files={tmp_path / 'corpus.txt'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        *SMALL,
        *arguments,
    ]


def test_the_command_line_end_to_end(tmp_path, monkeypatch, capsys):
    small_run(tmp_path)  # writes the corpus
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(
        [*command(sys.executable, tmp_path, "train.steps=12", "train.sample_tokens=8"), "logger.wandb=auto"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "runs" / "quickstart").iterdir()
    assert str(run_dir.relative_to(tmp_path)) in done.stdout
    assert "attention  sdpa" in done.stdout
    assert "a sample after 12 steps, its prompt in brackets" in done.stdout
    assert re.search(
        r"^step     10  loss \d\.\d+  lr .* grad norm .* tok/s  elapsed \d+:\d\d  ETA \d+:\d\d$", done.stdout, re.M
    )
    assert re.search(r"^step     12  validation loss .*  perplexity .* bits per byte$", done.stdout, re.M)
    assert "wandb offline" in done.stdout
    assert list((run_dir / "wandb").glob("offline-run-*"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "corpus.txt", "runs"]  # nothing strays

    monkeypatch.chdir(tmp_path)
    arguments = ["prompt=the", "max_new_tokens=9", "num_samples=2", "hardware.device=cpu"]
    sampled = told("scripts.sample", arguments, monkeypatch, capsys)
    assert sampled.code == 0, sampled.error
    assert sampled.out.count("the") >= 2
    assert json.loads(sampled.out.splitlines()[-1])["step"] == 12


def test_ctrl_c_saves_and_leaves(tmp_path, quick_python):
    small_run(tmp_path)
    process = subprocess.Popen(
        command(quick_python, tmp_path, "train.steps=100000", "train.log_every=1", "train.eval_every=0"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},  # or a hundred steps are taken before the third is read of
    )
    for line in process.stdout:
        if line.startswith("step      3"):
            process.send_signal(signal.SIGINT)
            break
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    (run_dir,) = (tmp_path / "runs" / "quickstart").iterdir()
    assert open_checkpoint(run_dir).step == records(run_dir)[-1]["step"] >= 3


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_backends_give_one_loss_curve_on_the_gpu(tmp_path, dtype, bound):
    """Fifty steps of a small GPT; the largest difference to naive."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    curves = {}
    for attention in ("naive", "tiled", "sdpa", "flash"):
        run_dir = tmp_path / attention
        composed = settings(
            f"data.cache_dir={tmp_path / 'cache'}",
            "logger.wandb=disabled",
            "train.steps=50",
            "optim=adamw",  # Muon's Newton-Schulz iteration runs in bfloat16 and makes large what rounding left
            "optim.warmup_steps=10",
            "train.log_every=1",
            "train.eval_every=0",
            "train.sample_tokens=0",
            f"model.attention={attention}",
            f"hardware.dtype={dtype}",
            "hardware.tf32=false",
            "hardware.compile=false",
        )
        train(composed, run_dir)
        curves[attention] = losses(run_dir)
    for attention, curve in curves.items():
        assert len(curve) == 50
        worst = max(abs(curve[step] - curves["naive"][step]) for step in curve)
        print(f"{dtype} {attention}: largest difference to naive {worst:.2e}")
        assert worst < bound, attention
