"""Time to a loss: the arithmetic of the table, the opponent's recipe, and the program in its smallest form."""

import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conf.program import changed
from model.config import GPTConfig
from scripts.bench import opponents, time_to_loss
from scripts.bench.opponents import NanochatConfig, NanoGPTConfig, RandomRows
from scripts.bench.time_to_loss import (
    TimeToLossConfig,
    TimeToLossSettings,
    crossing,
    curve_of_ours,
    reached,
    rows_of,
)
from tests.runs import CORPUS, settings
from training.hardware import HardwareConfig, set_up

OPPONENT = '''
"""The interface of nanoGPT's model.py, and none of its code: a bigram model."""
import dataclasses, torch
from torch import nn

@dataclasses.dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.table = nn.Embedding(config.vocab_size, min(config.vocab_size, 64))
        assert config.block_size == 32 and not config.bias

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        self.asked = weight_decay, learning_rate, betas, device_type
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)
        return self.optimizer

    def forward(self, idx, targets=None):
        logits = self.table(idx)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
'''

NANOCHAT = '''
"""The interface of nanochat's gpt.py, and none of its code: a table of bigrams."""
import dataclasses, torch
from torch import nn

@dataclasses.dataclass
class GPTConfig:
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    window_pattern: str

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)
        assert self.table.weight.is_meta and config.window_pattern == "L"
        self.matrices = 12 * config.n_layer * config.n_embd**2

    def init_weights(self):
        nn.init.zeros_(self.table.weight)

    def num_scaling_params(self):
        return {"transformer_matrices": self.matrices, "lm_head": 0, "wte": 10**9}

    def setup_optimizer(self, **given):
        self.given = given
        group = {"params": list(self.parameters()), "lr": given["embedding_lr"], "kind": "muon"}
        self.optimizer = torch.optim.SGD([group | {"initial_lr": group["lr"]}])
        return self.optimizer

    def forward(self, idx, targets):
        assert not torch.is_autocast_enabled("cpu")
        return nn.functional.cross_entropy(self.table(idx).flatten(0, 1), targets.flatten(), ignore_index=-1)
'''


@pytest.fixture
def nanochat(tmp_path, monkeypatch):
    folder = tmp_path / "nanochat_clone"
    (folder / "nanochat").mkdir(parents=True)
    (folder / "nanochat" / "gpt.py").write_text(NANOCHAT)
    (folder / "nanochat" / "optim.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield NanochatConfig(folder=str(folder), steps=100, batch_tokens=2**17, warmup_steps=10)
    for name in ("nanochat", "nanochat.gpt"):
        sys.modules.pop(name, None)


@pytest.fixture
def small(tmp_path):
    (tmp_path / "nanogpt").mkdir()
    (tmp_path / "nanogpt" / "model.py").write_text(OPPONENT)
    (tmp_path / "corpus.txt").write_text(CORPUS)
    return settings(
        "data=text", f"data.files={tmp_path}/corpus.txt", f"data.cache_dir={tmp_path}/cache", "model=tiny",
        "tokenizer=characters", "model.num_layers=1", "model.n_embd=32", "data.seq_len=32", "train.batch_tokens=128",
        "train.steps=8", "optim=muon", "train.eval_windows=4", "bench.every=2", "bench.seeds=[0]", "bench.target=3.2",
        f"nanogpt.folder={tmp_path}/nanogpt", "nanogpt.lr=[0.1,0.3]", "nanogpt.steps=40", "nanogpt.batch_tokens=64",
        "nanogpt.warmup_steps=2", "hardware.device=cpu", "logger.wandb=disabled",
        schema=TimeToLossSettings, experiment=None,
    )  # fmt: skip


def test_a_loss_is_crossed_between_two_evaluations():
    curve = [(100, 1.0, 3.0), (200, 2.0, 2.0), (300, 4.0, 1.0), (400, 5.0, 1.5)]
    assert crossing(curve, 1.25) == (275.0, 3.5)
    assert crossing(curve, 3.5) == (100.0, 1.0)  # at the first evaluation at the latest
    assert crossing(curve, 0.9) is None


def test_a_ratio_of_times_is_one_of_tokens_times_one_of_rates():
    curves = {
        ("ours", 0): [(100, 1.0, 2.0)],
        ("ours", 1): [(300, 2.0, 2.0)],
        ("nanoGPT, lr 0.001", 0): [(1000, 10.0, 2.0)],
        ("nanoGPT, lr 0.001", 1): [(1000, 20.0, 2.0)],
        ("nanoGPT, lr 0.002", 0): [(900, 9.0, 2.0)],
        ("nanoGPT, lr 0.002", 1): [(900, 9.0, 2.0)],
        ("nanoGPT, lr 0.003", 0): [(900, 9.0, 2.0)],
        ("nanoGPT, lr 0.003", 1): [(900, 9.0, 2.1)],
    }
    ours, default, best, never = rows_of(curves, 2.0, "nanoGPT")
    assert (ours["seconds"], ours["tokens"]) == (1.5, 200)
    assert ours["seconds_sd"] == pytest.approx(math.sqrt(0.5))
    assert never["error"] == "1 of 2 never; least 2.0500"
    assert never["tokens_per_second"] == 100
    for which, peer in (("", default), ("_best", best)):
        assert ours[f"times{which}"] == pytest.approx(peer["seconds"] / 1.5)
        assert ours[f"times{which}"] == pytest.approx(ours[f"fewer_tokens{which}"] * ours[f"rate{which}"])
    assert ours["fewer_tokens"] == 5
    assert ours["times_best"] == 6
    _, default, best, _ = rows_of(curves, 2.0, "ours")  # whoever is named first
    assert (default["times"], best["times"]) == (0.1, pytest.approx(1 / 6))
    assert not any("times" in row for row in rows_of(curves, 2.0, ""))


def test_without_a_target_it_is_what_nanogpt_reaches_with_every_seed():
    curves = {
        ("ours", 0): [(1, 1.0, 1.0)],
        ("nanoGPT, lr 0.001", 0): [(1, 1.0, 2.0), (2, 2.0, 2.2)],
        ("nanoGPT, lr 0.001", 1): [(1, 1.0, 3.0), (2, 2.0, 2.1)],
        ("nanoGPT, lr 0.002", 1): [(1, 1.0, 4.0)],
    }
    assert reached(curves, "nanoGPT, lr 0.001") == 2.1
    with pytest.raises(ValueError, match=r"bench.target=null is an opponent's loss"):
        TimeToLossConfig(target=None, opponents=[])
    for seeds in ([0, 0], [0, -1], [2**64]):  # of a second one an hour of training would know
        with pytest.raises(ValueError, match=r"bench.seeds=.* must be different, from 0 to 2\^64 - 1"):
            TimeToLossConfig(seeds=seeds)
    with pytest.raises(ValueError, match=r"bench.changes=model.window has no value; write KEY=VALUE"):
        TimeToLossConfig(changes=["model.qk_norm=true", "model.window"])  # it was null, and ours was trained twice


def test_the_recipe_of_nanogpt():
    config = NanoGPTConfig(steps=1100, warmup_steps=100)
    rates = [config.lr_factor(step) for step in (0, 99, 100, 600, 1100)]
    assert rates == pytest.approx([1 / 101, 100 / 101, 1.0, 0.55, 0.1])
    rows = RandomRows(np.arange(40, dtype=np.uint16), 8, 2000, seed=0)
    inputs, targets = rows.batch(0)
    assert torch.equal(targets, inputs + 1)
    assert set(inputs[:, 0].tolist()) == set(range(32))  # each place where a row and its last target fit
    assert not torch.equal(rows.batch(1)[0], inputs)


def test_the_network_of_nanogpt_is_trained_by_its_recipe(small, monkeypatch):
    config, clipped = replace(small.nanogpt, beta2=0.95, warmup_steps=9), []
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda weights, most: clipped.append((len([*weights]), most)))
    hardware = set_up(HardwareConfig(device="cpu", dtype="float32", compile=False))
    model = GPTConfig(num_layers=2, num_heads=3, n_embd=48, dropout=0.2)
    run = SimpleNamespace(model=model, seq_len=32, vocab_size=50, hardware=hardware)
    contender = config.contender(0.01, run)
    net = contender.net
    shape = net.config.n_layer, net.config.n_head, net.config.n_embd, net.config.vocab_size, net.config.dropout
    assert shape == (2, 3, 48, 50, 0.2)
    assert net.asked == (0.1, 0.01, (0.9, 0.95), "cpu")
    tokens = torch.zeros(2, 32, dtype=torch.long)
    contender.mean_loss(tokens, tokens).backward()
    contender.update(4)
    assert [group["lr"] for group in net.optimizer.param_groups] == [pytest.approx(0.01 * 5 / 10)]
    assert clipped == [(1, 1.0)]
    assert net.table.weight.grad is None
    run.vocab_size = 50257
    assert config.contender(0.01, run).net.config.vocab_size == 50304


def test_an_opponent_counts_its_steps_and_has_its_seed(small, monkeypatch):
    made, updated = [], []

    class Rows(RandomRows):
        def __init__(self, *given):
            made.append(given[2:])
            super().__init__(*given)

    def contender(self, lr, run):
        made.append((lr, torch.initial_seed()))
        weight = torch.zeros((), requires_grad=True)
        return SimpleNamespace(mean_loss=lambda inputs, _: weight * inputs.sum(), update=updated.append)

    monkeypatch.setattr(opponents, "RandomRows", Rows)
    monkeypatch.setattr(NanoGPTConfig, "contender", contender)
    hardware = SimpleNamespace(device=torch.device("cpu"), compile=False)
    dataset = SimpleNamespace(train=np.arange(99, dtype=np.uint16))
    run = SimpleNamespace(seq_len=32, hardware=hardware, dataset=dataset)
    assert len([*opponents.train_opponent(replace(small.nanogpt, steps=3), 0.5, run, 7)]) == 3
    assert made == [(0.5, 7), (2, 7)]
    assert updated == [0, 1, 2]


@pytest.mark.parametrize(
    ("losses", "evaluations"),
    [([3.0, 2.0, *[2.5] * 8], 7), ([3.0, 2.6, 2.0, 2.5, 2.0, 2.5, 2.015, 2.5, 2.01, 2.4], 10)],
)
def test_seconds_of_an_opponent_are_those_of_all_its_steps(small, monkeypatch, losses, evaluations):
    """The first one, of 50 s, compiles and counts like the others, an evaluation of 100 s does not count. It ends where
    it overfits five evaluations in a row, and not where it does in one."""
    now, asked = [0.0], []

    def training(*_):
        for step in range(40):
            now[0] += 50 if step == 0 else 1
            yield None

    def evaluated(*given):
        asked.append(given[2])
        now[0] += 100
        return {"val_loss": losses[len(asked) - 1]}

    monkeypatch.setattr(time_to_loss, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(time_to_loss, "train_opponent", training)
    monkeypatch.setattr(time_to_loss, "evaluate", evaluated)
    monkeypatch.setattr(time_to_loss.EvaluationSet, "of", lambda *_: None)
    small.bench.target = None
    hardware = SimpleNamespace(synchronize=lambda: None)
    run = SimpleNamespace(hardware=hardware, dataset=None, seq_len=32)
    curve = time_to_loss.curve_of_opponent(small, run, small.nanogpt, 0.1, 0)
    assert len(curve) == evaluations
    for number, (tokens, seconds, _) in enumerate(curve, 1):  # every second step of ours has as many tokens as 4
        assert (tokens, seconds) == (4 * number * 64, 4 * number)
    assert {*asked} == {2}


def test_the_recipe_of_nanochat(nanochat):
    assert [nanochat.lr_factor(step) for step in (0, 9, 10, 35, 100)] == pytest.approx([0.1, 1.0, 1.0, 1.0, 0.05])
    assert nanochat.lr_factor(60) == pytest.approx(0.05 + 0.95 * 40 / 65)
    assert replace(nanochat, steps=1000).momentum(399) == pytest.approx(0.97, abs=4e-4)
    assert replace(nanochat, steps=1000).momentum(1000) == pytest.approx(0.90)
    hardware = set_up(HardwareConfig(device="cpu", dtype="bfloat16", compile=False))
    model = GPTConfig(num_layers=6, num_heads=6, n_embd=384)
    run = SimpleNamespace(model=model, seq_len=32, vocab_size=50, hardware=hardware)
    contender = nanochat.contender(0.04, run)
    net = contender.net
    # a step of a quarter of the reference's tokens, so half of its rates; twice of that as lr is twice 0.02
    assert net.given["matrix_lr"] == pytest.approx(0.02)
    assert net.given["embedding_lr"] == pytest.approx(0.3)
    assert net.given["weight_decay"] == pytest.approx(0.28 / 2 * (12 * 768**2) / (6 * 384**2))
    inputs = torch.zeros(2, 32, dtype=torch.long)
    targets = inputs.clone()
    targets[:, 16:] = -1
    with hardware.autocast():
        assert contender(inputs, targets).item() == pytest.approx(32 * math.log(50))
    contender.mean_loss(inputs, targets).backward()
    contender.update(60)
    (group,) = net.optimizer.param_groups
    assert group["lr"] == pytest.approx(0.3 * nanochat.lr_factor(60))
    assert group["weight_decay"] == pytest.approx(net.given["weight_decay"] * 0.5 * (1 + math.cos(0.6 * math.pi)))
    assert net.table.weight.grad is None
    assert net.table.weight.abs().sum() > 0


def test_a_change_is_a_key_that_a_run_has(small):
    assert changed(small, "optim.lr=0.5").optim.lr == 0.5
    assert changed(small, "optim.lr=1e-3").optim.lr == 0.001  # text in YAML
    assert changed(small, "model.qk_norm=true").model.qk_norm is True
    assert changed(small, "model.mlp=relu2").nanogpt == small.nanogpt
    assert changed(small, "train.max_hours=null").train.max_hours is None
    assert changed(small, "data.files=[a.txt]").data.files == ["a.txt"]
    prompted = replace(small, train=replace(small.train, sample_prompt="a ${b} \\${c}"))
    assert changed(prompted, "optim.lr=0.5").train == prompted.train
    for change in ("optim.lr=fast", "optim.lr=null", "train.steps=1.5", "model.qk_norm=2"):
        with pytest.raises(ValueError, match=rf"^{change} has the wrong type: expected"):
            changed(small, change)
    for change in ("optim.rate=1", "nothing.lr=1", "seed=1"):
        with pytest.raises(ValueError, match="is not a known key"):
            changed(small, change)


def test_a_change_that_cannot_be_is_refused_before_anything_is_trained(small, tmp_path, monkeypatch):
    monkeypatch.setattr(time_to_loss, "curve_of_ours", lambda *_: pytest.fail("trained"))
    small.bench.changes = ["model.qk_norm=true", "data.files=[missing.txt]"]
    with pytest.raises(ValueError, match=r"missing.txt does not exist"):
        time_to_loss.main.__wrapped__(small, tmp_path / "run")


@pytest.mark.parametrize(("changes", "says"), [
    (["data.seq_len=16"], "bench.changes=data.seq_len=16 changes what is held out: its loss would be of other windows"),
    (["optim.lr=1", "train.eval_windows=1"], "bench.changes=train.eval_windows=1 changes what is held out"),
    (["data.validation_fraction=0.2"], "bench.changes=data.validation_fraction=0.2 changes what is held out"),
    (["train.seed=5"], r"^train.seed has no effect here; use bench.seeds$"),
    (["train.eval_every=1"], r"^train.eval_every has no effect here; use bench.every$"),
])  # fmt: skip
def test_a_change_of_what_is_held_out_or_of_what_is_not_read_is_refused(small, tmp_path, monkeypatch, changes, says):
    monkeypatch.setattr(time_to_loss, "curve_of_ours", lambda *_: pytest.fail("trained"))
    small.bench.changes = changes
    with pytest.raises(ValueError, match=says):
        time_to_loss.main.__wrapped__(small, tmp_path / "run")
    small.bench.changes = []
    monkeypatch.setattr(sys, "argv", ["time_to_loss.py", "train.seed=9"])
    with pytest.raises(ValueError, match=r"^train.seed has no effect here; use bench.seeds$"):
        time_to_loss.main.__wrapped__(small, tmp_path / "run")
    with pytest.raises(ValueError, match=r"bench.changes has optim.lr=1 twice; name each once"):
        replace(small.bench, changes=["optim.lr=1"] * 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": []}, r"nanogpt.lr=\[\] trains nothing; name a rate, or leave nanoGPT out of bench.opponents"),
        ({"lr": [1e-3, 0.0]}, r"nanogpt.lr=\[0.001, 0.0\] must be positive"),
        ({"batch_tokens": 0}, "nanogpt.batch_tokens=0 must be at least 1"),
        ({"steps": 1}, "nanogpt.steps=1 must be at least 2: the first one, which compiles, is not timed"),
        ({"warmup_steps": -1}, "nanogpt.warmup_steps=-1 must be at least 0"),
        ({"beta2": 1.0}, r"nanogpt.beta2=1.0 must lie in \[0, 1\)"),
    ],
)
def test_an_impossible_recipe_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        NanoGPTConfig(**wrong)


@pytest.mark.parametrize(("tokens", "nearest"), [(20, 32), (700, 672)])
def test_a_step_that_is_no_whole_rows_is_refused(small, tmp_path, monkeypatch, tokens, nearest):
    monkeypatch.setattr(time_to_loss, "curve_of_ours", lambda *_: pytest.fail("trained"))
    small.nanogpt.batch_tokens = tokens
    message = f"nanogpt.batch_tokens={tokens} is not a multiple of data.seq_len=32; use {nearest}"
    with pytest.raises(ValueError, match=message):
        time_to_loss.main.__wrapped__(small, tmp_path / "run")


def test_seconds_of_ours_are_those_of_all_its_steps(small, tmp_path, monkeypatch):
    """What lies between the steps is not in a record's rate, and each step is in one."""
    trained = []
    monkeypatch.setattr(
        "scripts.variants.train", lambda one, *_, **__: trained.append(one.train.seed) or {"exit_code": 0, "signal": 0}
    )
    records = [
        {"step": 1, "val_loss": 4.0},  # with bench.every=1; the first step compiles and has no rate
        {"step": 2, "val_loss": 3.5, "tokens_per_second": 128.0},
        {"step": 4, "val_loss": 3.0, "tokens_per_second": 64.0},
        {"step": 5, "val_loss": 2.9, "tokens_per_second": 128.0},
    ]
    lines = (json.dumps(record | {"tokens": 128 * record["step"]}) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    curve = curve_of_ours(small, tmp_path, seed=7)
    assert trained == [7]
    assert curve == [(256, 2.0, 3.5), (512, 6.0, 3.0), (640, 7.0, 2.9)]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(records[0]) + "\n")
    with pytest.raises(ValueError, match=r"ended before an evaluation after its first step; raise train.steps"):
        curve_of_ours(small, tmp_path, seed=0)


def test_both_are_trained_and_compared(small, tmp_path, capsys):
    time_to_loss.main.__wrapped__(small, tmp_path / "run")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = ["ours", "nanoGPT, lr 0.1", "nanoGPT, lr 0.3"]
    assert [row["name"] for row in found["rows"]] == names
    assert [(c["name"], c["seed"]) for c in found["curves"]] == [(name, 0) for name in names]
    for row in found["rows"]:
        assert row["seeds"] == 1
        assert row["tokens"] / row["seconds"] == pytest.approx(row["tokens_per_second"])
    for curve in found["curves"]:
        tokens, seconds, losses = zip(*curve["tokens_seconds_loss"], strict=True)
        assert tokens[0] == 256  # evaluated as often in tokens
        assert list(seconds) == sorted(seconds)
        assert seconds[0] > 0
        if curve["name"].startswith("nanoGPT"):  # it stops there
            assert [loss <= 3.2 for loss in losses] == [False] * (len(losses) - 1) + [True]
    assert len(found["nanoGPT_sha256"]) == 64
    assert (tmp_path / "run" / "time_to_loss.png").stat().st_size > 5_000
    assert "times" in (tmp_path / "run" / "time_to_loss.md").read_text()
    assert not list(tmp_path.rglob("checkpoints"))


def test_a_run_that_is_stopped_keeps_the_curves_before_it(small, tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(time_to_loss, "curve_of_ours", lambda *_: [(100, 1.0, 3.0)])
    monkeypatch.setattr(time_to_loss, "curve_of_opponent", stopped)
    with pytest.raises(KeyboardInterrupt):
        time_to_loss.main.__wrapped__(small, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "time_to_loss.json").read_text())
    assert found["unfinished"]
    assert found["curves"] == [{"name": "ours", "seed": 0, "tokens_seconds_loss": [[100, 1.0, 3.0]]}]


def test_a_target_that_nobody_reaches_is_a_result(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time_to_loss, "curve_of_ours", lambda *_: [(100, 1.0, 3.0)])
    small.bench.target, small.bench.opponents = 0.5, []
    time_to_loss.main.__wrapped__(small, tmp_path / "run")
    assert "1 of 1 never; least 3.0000" in capsys.readouterr().out


def test_without_its_code_the_program_says_how_to_get_it(small, tmp_path):
    small.nanogpt.folder = str(tmp_path)
    with pytest.raises(ValueError, match=r"has no model.py; fetch it: git clone https://github.com/karpathy/nanoGPT"):
        time_to_loss.main.__wrapped__(small, tmp_path / "run")
    assert not (tmp_path / "run").exists()
