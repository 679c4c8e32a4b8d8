"""The evidence programs in their smallest form."""

import json

import pytest
import torch

from conf.schema import Settings
from scripts import bench_loss, bench_saving, bench_training, break_it
from scripts.bench_loss import LossBenchSettings
from scripts.bench_training import BenchSettings
from scripts.break_it import MISTAKES
from tests.runs import settings
from training.hardware import HardwareConfig, set_up


def test_each_mistake_shows_as_it_was_expected(tmp_path, capsys):
    chosen = settings(
        "hardware.device=cpu", "logger.wandb=disabled", "train.steps=6", f"data.cache_dir={tmp_path}",
        schema=Settings, experiment="parity",
    )  # fmt: skip
    break_it.main.__wrapped__(chosen, tmp_path / "run")
    calls = {(c["mistake"], c["dtype"]): c for c in json.loads(capsys.readouterr().out.splitlines()[-1])["calls"]}
    assert len(calls) == 2 * len(MISTAKES)
    for dtype in ("float16", "float32"):
        assert calls["no running maximum", dtype]["rows_not_finite"] > 0
        assert "key tile 0" in calls["no running maximum", dtype]["happened"]
        assert calls["no rescaling", dtype]["rows_not_finite"] == 0
        assert calls["no rescaling", dtype]["largest_error"] > 0.1
        assert "the first is query 16 (tile 1)" in calls["tile-local causal mask", dtype]["happened"]
    assert (tmp_path / "run" / "break_it.png").stat().st_size > 10_000


def test_training_is_timed_with_each_checkpointing(tmp_path, capsys, monkeypatch):
    chosen = settings(
        "hardware.device=cpu", "model=tiny", "model.num_layers=1", "data.seq_len=16", "train.batch_tokens=64",
        "bench.steps=1", "bench.warmup_steps=1", "bench.vocab_size=50", "bench.attention=[sdpa,naive]",
        "bench.seq_len=[16,32]", "bench.checkpointing=[none,selective]", "bench.loss=[chunked]",
        "bench.micro_batch_tokens=32", schema=BenchSettings, experiment=None,
    )  # fmt: skip
    real = bench_training.timed_steps

    def full(settings, config, seq_len, *rest):
        if config.attention == "naive" and seq_len == 32:
            raise torch.OutOfMemoryError
        return real(settings, config, seq_len, *rest)

    monkeypatch.setattr(bench_training, "timed_steps", full)
    bench_training.main.__wrapped__(chosen, tmp_path)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(rows) == 8
    for row in rows:
        if "error" not in row:
            parts = [row[f"{part}_ms"] for part in ("forward", "backward", "optimizer")]
            assert min(parts) > 0
            assert sum(parts) <= row["step_ms"] + 0.1  # rounding
    assert [row.get("error") for row in rows if row["attention"] == "naive"] == [None, None, *["out of memory"] * 2]
    assert (tmp_path / "bench_training.png").stat().st_size > 5_000


def test_the_losses_are_compared(tmp_path, capsys):
    chosen = LossBenchSettings(
        tokens=32, n_embd=16, vocab_size=50, padded_vocab=64, chunk_tokens=[4, 100], exact_tokens=8,
        hardware=HardwareConfig(device="cpu", dtype="bfloat16"),
    )  # fmt: skip
    bench_loss.main.__wrapped__(chosen, tmp_path)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}
    assert list(rows)[:3] == ["plain", "chunked 4", "chunked 100"]
    for row in list(rows.values())[:3]:
        assert row["ms"] > 0
        assert row["loss_error"] < 1e-3
        assert max(row["dh_error"], row["dweight_error"]) < 1e-2
    with pytest.raises(ValueError, match="padded_vocab=64 must be at least vocab_size=65"):
        LossBenchSettings(vocab_size=65, padded_vocab=64)


def test_a_save_is_paid_for_by_the_loop_once_a_cadence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_saving, "VOCAB_SIZE", 50)
    monkeypatch.setattr(bench_saving, "BLOCK_SECONDS", 0.01)
    calls = []
    monkeypatch.setattr(bench_saving, "training_step", lambda *_: calls.append(1))
    monkeypatch.setattr(bench_saving.time, "perf_counter", iter(range(10**6)).__next__)  # every look takes a second
    chosen = settings("hardware.device=cpu", "model=tiny", "model.num_layers=1", "data.seq_len=16",
                      "train.batch_tokens=64", "train.save_every=20")  # fmt: skip
    bench_saving.main.__wrapped__(chosen, tmp_path)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(calls) == 3 + 10 + 2 * bench_saving.PAIRS * found["block_steps"]
    assert found["costs_ms"] == [1000.0] * bench_saving.PAIRS  # the look after the call
    assert found["cost"] == pytest.approx(1000 / (20 * found["step_ms"]))
    assert found["save_every_at_promise"] == pytest.approx(50_000 / found["step_ms"], abs=1)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000005"]


def test_parts_of_a_step_are_summed_over_its_micro_batches(monkeypatch):
    monkeypatch.setattr(bench_training.Mark, "seconds_to", lambda self, later: 1.0)
    parts = bench_training.Parts(set_up(HardwareConfig(device="cpu")))
    for name in ("forward", "backward", "forward", "backward", "optimizer"):
        with parts(name):
            pass
    assert parts.seconds() == {"forward": 2.0, "backward": 2.0, "optimizer": 1.0}


def test_impossible_benchmarks_are_refused():
    with pytest.raises(ValueError, match=r"bench\.micro_batch_tokens=0 must be at least 1"):
        bench_training.BenchConfig(micro_batch_tokens=0)
    with pytest.raises(ValueError, match=r"bench\.checkpointing=some is unknown; use one of none, pointwise"):
        bench_training.BenchConfig(checkpointing=["some"])
    with pytest.raises(ValueError, match=r"bench\.loss=some is unknown; use one of auto, chunked, plain"):
        bench_training.BenchConfig(loss=["some"])
