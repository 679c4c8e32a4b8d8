"""The attention programs on a CPU: figures mean nothing here, but rows, files and refusals do."""

import csv
import json

import pytest
import torch

from conf.schema import HardwareConfig
from kernels.measure import measure
from scripts import bench_attention, bench_fp8, error_budget
from scripts.bench_attention import BenchConfig, Cell, charts, check_goals, run_cell, write_csv

CPU = torch.device("cpu")
CELL = Cell("float32", 1, 2, 1, 32, 16, "causal")
BENCH = BenchConfig(seq_len=[32], head_dim=[16], hidden=32, budget_ms=1.0)


def test_a_cell_has_a_row_for_each_pass():
    rows = run_cell("naive", CELL, BENCH, CPU)
    assert [row["pass"] for row in rows] == ["forward", "backward"]
    assert all(row["ms"] > 0 and row["tflops"] > 0 for row in rows)
    assert CELL.flops("forward") == 4 * 2 * 32 * 32 * 16 / 2
    assert CELL.flops("backward") == 2.5 * CELL.flops("forward")
    assert CELL.touched_bytes("forward") == 4 * 32 * 16 * (2 * 2 + 2 * 1)


def test_what_a_kernel_refuses_is_a_row_not_an_end():
    (row,) = run_cell("sdpa_cudnn", CELL, BenchConfig(passes=["forward"]), CPU)
    assert "error" in row


def test_out_of_memory_is_a_row_and_is_marked_in_the_charts(monkeypatch, tmp_path):
    def full(*args):
        raise torch.OutOfMemoryError("no")

    rows = run_cell("naive", CELL, BENCH, CPU)
    for row in rows:
        row["peak_extra_mib"] = 1.5
    monkeypatch.setattr(bench_attention, "time_cell", full)
    rows += run_cell("naive", Cell("float32", 1, 2, 1, 64, 16, "causal"), BENCH, CPU)
    assert [row.get("error") for row in rows] == [None, None, "out of memory", "out of memory"]
    write_csv(tmp_path / "attention.csv", rows, {"machine": "none", "driver": "none"})
    with (tmp_path / "attention.csv").open() as file:
        assert [row["error"] for row in csv.DictReader(file)] == ["", "", "out of memory", "out of memory"]
    charts(tmp_path / "attention.csv", tmp_path)
    assert (tmp_path / "attention_causal_16_float32.png").is_file()


def test_goals_compare_like_with_like():
    def row(name, which, ms, seq_len=1024, peak=1.0):
        return {"implementation": name, "pass": which, "ms": ms, "seq_len": seq_len, "head_dim": 64, "mask": "causal",
                "peak_extra_mib": peak}  # fmt: skip

    rows = [row("flash", "forward", 1.0), row("flex", "forward", 1.2), row("sdpa_flash", "forward", 1.25)]
    rows += [row("flash", "forward", 1.0, 8192, 2.0), row("naive", "forward", 4.0, 8192, 200.0)]
    rows += [row("flex", "forward", 1.0) | {"error": "out of memory", "seq_len": 4096}]
    goals = check_goals(rows, BENCH, CPU)
    assert [(g["measured"], g["met"]) for g in goals] == [
        ("1.2x", True), ("1.2x", True), ("1.25x", False), ("4x", False), ("1 %", True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"implementations": ["flsh"]}, "bench.implementations=flsh is not one of flash, naive"),
        ({"head_dim": [96]}, "bench.hidden=2048 is no multiple of head_dim 96 x group 1"),
    ],
)
def test_impossible_benchmarks_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        BenchConfig(**wrong)


def test_the_error_budget_writes_its_table(tmp_path, capsys):
    budget = error_budget.BudgetConfig(
        cases=["repeated maxima", "varlen"], dtypes=["float16"], head_dim=[16], seq_len=24, num_heads=1, draws=2, fp8=[]
    )
    settings = error_budget.BudgetSettings(budget, HardwareConfig(device="cpu"))
    error_budget.main.__wrapped__(settings, tmp_path)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["rows"] == 2
    assert summary["over_twice"] == []
    assert len((tmp_path / "error_budget.md").read_text().splitlines()) == 4


def test_the_error_budget_of_8_bits(tmp_path):
    budget = error_budget.BudgetConfig(cases=[], head_dim=[64], seq_len=24, num_heads=2, draws=2)
    error_budget.main.__wrapped__(error_budget.BudgetSettings(budget, HardwareConfig(device="cpu")), tmp_path)
    rows = {row["data"]: row for row in json.loads((tmp_path / "error_budget.json").read_text())["fp8"]}
    assert list(rows) == list(error_budget.FP8_DATA)
    for row in rows.values():
        assert row["by"] == "reference"
        assert 2 * row["bfloat16"] < row["scale a head"] < 0.1
    assert "| sink | 64 |" in (tmp_path / "error_budget.md").read_text()


def test_turning_leaves_products_alone():
    turn = error_budget.turn(64, CPU)
    torch.testing.assert_close(turn @ turn.T, torch.eye(64))


def test_the_fp8_benchmark_needs_its_gpu_and_shows_a_row(tmp_path):
    chosen = bench_fp8.Fp8BenchSettings(hardware=HardwareConfig(device="cpu"))
    with pytest.raises(ValueError, match="hopper needs a CUDA device; q is on cpu"):
        bench_fp8.main.__wrapped__(chosen, tmp_path)
    row = {"head_dim": 128, "seq_len": 8192, "mask": "full", "values_ms": 0.1, "ms": {"fp8": 2.0}}
    row |= {"tflops": dict.fromkeys(("fp8", "bf16", "cudnn_bf16"), 1.0)}
    row |= {"relative_error": {"fp8": 0.05, "bf16": 0.004}}
    cells = [list(column.cells) for column in bench_fp8.table([row]).columns]
    assert cells == [["128, 8,192 full"], ["1"], ["1"], ["1"], ["5.0 %"], ["5.00 %"], ["0.40 %"]]


def test_measuring_takes_the_median():
    times = measure(lambda: None, CPU)
    assert 0 <= times.p50 <= times.p99
    assert times.runs == 3
