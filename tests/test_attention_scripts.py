"""The attention programs on a CPU: figures mean nothing here, but rows, files and refusals do."""

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, pairwise, repeat
from types import SimpleNamespace

import pytest
import torch

from conf.schema import HardwareConfig
from kernels import naive_attention
from scripts.bench import attention, calls, clock, decode, error_budget
from scripts.bench import masks as bench_masks
from scripts.bench.attention import MASKS, BenchConfig, BenchSettings, Cell, run_cell
from scripts.bench.clock import measure
from scripts.evidence_tables import page
from scripts.selftest import gradients
from training.hardware import set_up
from training.provenance import ROOT

pytestmark = pytest.mark.usefixtures("smoke_test")
CPU, GPU = torch.device("cpu"), SimpleNamespace(type="cuda", index=0)
CELL = Cell("float32", 1, 2, 32, 16, "causal")
BENCH = BenchConfig(seq_len=[32], head_dim=[16], hidden=32, budget_ms=1.0)


def test_a_cell_has_a_row_for_each_pass():
    rows = run_cell(CELL, replace(BENCH, attention=["naive"]), CPU)
    assert [row["pass"] for row in rows] == ["forward", "backward"]
    assert all(row["ms"] > 0 and row["tflops"] > 0 for row in rows)
    assert CELL.flops("forward") == 4 * 2 * 32 * 32 * 16 / 2
    assert CELL.flops("backward") == 2.5 * CELL.flops("forward")


@pytest.mark.parametrize("calls", ["ab", "abc", "abcd", "abcde"])
def test_in_enough_rounds_each_call_has_each_place_and_each_neighbour_equally_often(calls):
    orders = list(clock.turns(calls, len(calls) * (1 + len(calls) % 2)))
    assert all(sorted(order) == list(calls) for order in orders)
    places = Counter((place, call) for order in orders for place, call in enumerate(order))
    neighbours = Counter(pair for order in orders for pair in pairwise(order))
    assert len(places) == len(calls) ** 2
    assert len(set(places.values())) == 1
    assert len(neighbours) == len(calls) * (len(calls) - 1)
    assert len(set(neighbours.values())) == 1


def test_what_a_kernel_refuses_is_a_row_not_an_end():
    rows = run_cell(CELL, BenchConfig(["sdpa_cudnn", "flash4", "naive"], passes=["forward"]), CPU)
    assert ["error" in row for row in rows] == [True, True, False]
    assert rows[1]["error"] == "flash-attn-4 is not installed"


def test_where_nothing_can_be_measured_the_table_says_why(tmp_path, capsys):
    bench = BenchConfig(["flash4"], seq_len=[32], head_dim=[16], mask=["causal"], hidden=32)
    with pytest.raises(SystemExit, match="2"):
        attention.main.__wrapped__(BenchSettings(bench, HardwareConfig(device="cpu")), tmp_path)
    said = capsys.readouterr()
    assert "flash-attn-4 is not installed" in said.out
    assert said.err == "error: nothing could be measured: flash-attn-4 is not installed\n"
    assert json.loads(said.out.splitlines()[-1])["rows"]
    assert not list(tmp_path.glob("*.png"))


def test_out_of_memory_is_a_row_and_is_marked_in_the_charts(monkeypatch, tmp_path, capsys):
    real = attention.prepared

    def full(name, cell, *rest):
        if cell.seq_len == 64:
            raise torch.OutOfMemoryError("no")
        call, _ = real(name, cell, *rest)
        return call, {"peak_extra_mib": 1.5}

    monkeypatch.setattr(attention, "prepared", full)
    bench = BenchConfig(["naive"], seq_len=[32, 64], head_dim=[16], mask=["causal"], hidden=32, budget_ms=1.0)
    attention.main.__wrapped__(BenchSettings(bench, HardwareConfig(device="cpu", dtype="bfloat16")), tmp_path)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row.get("error") for row in found["rows"]] == [None, None, "out of memory", "out of memory"]
    assert found["provenance"].keys() >= {"commit", "command", "versions", "driver"}
    assert json.loads((tmp_path / "attention.json").read_text())["rows"] == found["rows"]
    assert (tmp_path / "attention_causal_16_bfloat16.png").stat().st_size > 10_000


@pytest.mark.parametrize("mask", MASKS)
def test_each_mask_counts_the_pairs_that_it_leaves(mask, monkeypatch):
    """FLOPs are the definition's: 4 D a pair that is seen; and the two that know every mask agree."""
    monkeypatch.setattr(attention, "WINDOW", 8)
    cell = replace(CELL, batch=2, mask=mask)
    q, k, v, _ = calls.tensors(2, 32, 2, 2, 16, CPU, torch.float32)
    ones = torch.eye(32).expand(2, 2, 32, 32)  # with V the identity, O holds the weights
    weights = attention.implementation("naive", cell, CPU)(0 * q, 0 * k, ones)
    seen = float((weights[0, 0] > 0).sum())
    diagonal = {"full": 0, "window": 8 / 2}.get(mask, 32 / 2)  # the field counts half of a square, without it
    assert cell.flops("forward") == 4 * 16 * 2 * 2 * (seen - diagonal)
    ours, plain = (attention.implementation(name, cell, CPU)(q, k, v) for name in ("flash", "naive"))
    torch.testing.assert_close(ours, plain)


def test_a_mask_that_is_not_measured_is_a_row():
    rows = run_cell(replace(CELL, mask="packed"), replace(BENCH, attention=["sdpa_flash"]), CPU)
    assert {row["error"] for row in rows} == {"sdpa_flash is not measured with packed"}


@pytest.mark.parametrize(
    ("config", "wrong", "message"),
    [
        (BenchConfig, {"attention": ["flsh"]}, "bench.attention=flsh is not one of flash, naive"),
        (BenchConfig, {"head_dim": [96]}, "bench.hidden=2048 is no multiple of bench.head_dim=96"),
        (bench_masks.BenchConfig, {"hidden": 100}, "bench.hidden=100 is no multiple of bench.head_dim=64; use one"),
        (BenchConfig, {"head_dim": [0]}, r"bench.head_dim=\[0\] must be at least 1"),
        (BenchConfig, {"seq_len": [512, 0]}, r"bench.seq_len=\[512, 0\] must be at least 1"),
        (BenchConfig, {"tokens": 0}, "bench.tokens=0 must be at least 1"),
        (BenchConfig, {"budget_ms": -1.0}, "bench.budget_ms=-1.0 must be at least 1"),
        (BenchConfig, {"budget_ms": float("nan")}, "bench.budget_ms=nan must be at least 1"),
        (decode.BenchConfig, {"batch": [0]}, r"bench.batch=\[0\] must be at least 1"),
        (decode.BenchConfig, {"context": [0]}, r"bench.context=\[0\] must be at least 1"),
        (decode.BenchConfig, {"heads": ["32/8"]}, "bench.heads=32/8 is no Hq/Hkv/D; write three numbers"),
        (decode.BenchConfig, {"heads": ["32/8/x"]}, "bench.heads=32/8/x is no Hq/Hkv/D; write three numbers"),
        (decode.BenchConfig, {"heads": ["8/3/64"]}, "bench.heads=8/3/64 has 8 query heads for 3 KV heads; use a"),
        (decode.BenchSettings, {"hardware": HardwareConfig(dtype="float16")},
         "hardware.dtype=float16: queries are in bfloat16 here; leave it out"),
        (error_budget.BudgetConfig, {"seq_len": 0}, "budget.seq_len=0 must be at least 1"),
        (error_budget.BudgetConfig, {"head_dim": [0]}, r"budget.head_dim=\[0\] must be at least 1"),
        (error_budget.BudgetConfig, {"num_heads": 0}, "budget.num_heads=0 must be at least 1"),
    ],
)  # fmt: skip
def test_impossible_benchmarks_are_refused(config, wrong, message):
    with pytest.raises(ValueError, match=message):
        config(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"largest_gib": 0.0}, "bench.largest_gib=0.0 leaves out every call; the smallest needs 1.9e-06 GiB"),
        ({"family": []}, r"bench.family=\[\] of bench.attention=\['flash'\] is no call; name some"),
    ],
)
def test_a_benchmark_without_a_call_is_refused(tmp_path, wrong, message):
    bench = replace(decode.BenchConfig(["context"], ["flash"], [2], [16, 32], ["2/1/16"]), **wrong)
    with pytest.raises(ValueError, match=message):
        decode.main.__wrapped__(decode.BenchSettings(bench, HardwareConfig(device="cpu")), tmp_path)


@pytest.mark.parametrize("key", ["attention", "seq_len", "head_dim", "mask", "passes"])
def test_a_benchmark_of_nothing_is_refused_and_writes_nothing(tmp_path, key):
    bench = replace(BENCH, **{"attention": ["naive"], key: []})
    with pytest.raises(ValueError, match=r"nothing was measured: a list .* is empty; name something"):
        attention.main.__wrapped__(attention.BenchSettings(bench, HardwareConfig(device="cpu")), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_hardware_is_said_as_it_is_used(tmp_path, monkeypatch):
    """TF32 is off in the error budget and queries over a cache are in bfloat16, whatever is the default elsewhere."""
    asked = []
    monkeypatch.setattr("scripts.bench.report.set_up", lambda config: asked.append(config) or set_up(config))
    cpu = HardwareConfig(device="cpu", dtype="auto")
    budget = error_budget.BudgetConfig(cases=[])
    with pytest.raises(ValueError, match=r"nothing was measured: a list .* is empty; name something"):
        error_budget.main.__wrapped__(error_budget.BudgetSettings(budget, cpu), tmp_path)
    monkeypatch.setattr(decode.Machine, "read_bandwidth", lambda self: 1e12)
    monkeypatch.setattr(decode.Machine, "microseconds", lambda self, cell: 1.0)
    bench = decode.BenchConfig(["context"], ["flash"], batch=[2], context=[16], heads=["2/1/16"])
    decode.main.__wrapped__(decode.BenchSettings(bench, cpu), tmp_path)
    assert (asked[0].tf32, asked[1].dtype) == (False, "bfloat16")
    assert "bfloat16" in json.loads((tmp_path / "decode.json").read_text())["hardware"]


def test_the_error_budget_writes_its_table(tmp_path, capsys):
    budget = error_budget.BudgetConfig(
        cases=["repeated maxima", "varlen"], dtypes=["float16"], head_dim=[16], seq_len=24, num_heads=1, draws=2
    )
    settings = error_budget.BudgetSettings(budget, HardwareConfig(device="cpu"))
    error_budget.main.__wrapped__(settings, tmp_path)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(summary["rows"]) == 2
    assert summary["summary"]["over_twice"] == []
    page = (tmp_path / "error_budget.md").read_text().splitlines()
    assert len([line for line in page if line.startswith("|")]) == 4


def test_signs_that_a_locale_lacks_are_read_and_written(tmp_path):
    """A program's source, which has one, ended in a traceback, and its table would have."""
    chosen = [*error_budget.SMOKE.split(), "budget.cases=[full]", f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench.error_budget", *chosen], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONUTF8": "0", "LC_ALL": "C", "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert " ± " in (tmp_path / "error_budget.md").read_text(encoding="utf-8")


def test_the_error_is_held_to_float64_and_to_the_plain_formula(monkeypatch):
    """Ours is wrong by 0.01 in one draw and by half of that in the other; O alone is."""
    wrong = iter([0.01, 0.005])
    monkeypatch.setattr(error_budget, "flash_attention", lambda *x, **o: naive_attention(*x, **o) + next(wrong))
    budget = error_budget.BudgetConfig(seq_len=24, num_heads=1, draws=2)
    row = error_budget.measure("causal", "float32", 16, budget, CPU)
    assert row["ours"]["o"] == pytest.approx(0.01, rel=1e-3)
    assert 0 < row["plain"]["o"] < 1e-5
    assert row["ratio"]["o"] == row["ours"]["o"] / row["plain"]["o"]
    assert row["ratio"]["dv"] == 1.0
    assert error_budget.over_budget(row) == ["o"]
    assert row["bias"]["ours"] == (pytest.approx(0.0075, rel=1e-3), pytest.approx(0.0184, rel=0.01))
    row["ratio"] |= {"o": 2.1, "dq": 1.9}
    assert error_budget.over_budget(row) == ["o"]
    assert error_budget.confidence([1.0, 3.0] * 4) == pytest.approx(2.365 * 1.069 / 8**0.5, rel=0.01)
    monkeypatch.setattr(error_budget, "flash_attention", lambda *x, **o: naive_attention(*x, **o) + 0.01)
    assert not error_budget.measure("causal", "float32", 16, budget, CPU)["bias_no_larger"]


class Ticking:
    """Time that passes when it is told to: `clock.Mark` of any device, and perf_counter."""

    now = 0.0

    def take(self, seconds):
        self.now += seconds

    def mark(self, device):
        at = self.now
        mark = SimpleNamespace(at=at, wait=lambda: None, event=SimpleNamespace(query=lambda: True))
        mark.seconds_to = lambda later: later.at - at
        return mark


@pytest.fixture
def ticking(monkeypatch):
    time = Ticking()
    monkeypatch.setattr(clock, "Mark", time.mark)
    return time


def test_measuring_takes_the_median(monkeypatch):
    times = measure(lambda: None, CPU)
    assert 0 <= times.p50 <= times.p99
    assert times.runs == 3
    assert [clock.p99(range(runs)) for runs in (1, 2, 40, 100, 101, 200)] == [0, 1, 39, 98, 99, 197]
    monkeypatch.setattr(clock, "spans", lambda *_: [4.0, 1.0, 3.0, 2.0])
    assert measure(lambda: None, CPU) == clock.Milliseconds(2500.0, 4000.0, 4)  # of an even number too


def test_what_is_between_calls_or_warms_up_is_not_timed(ticking):
    assert clock.spans(lambda: ticking.take(2), CPU, 3, before=lambda: ticking.take(5)) == [2, 2, 2]
    takes = iter([9, 8, 1, 2, 3])
    assert clock.laps(lambda: ticking.take(next(takes)), CPU, 2, 3) == [1, 2, 3]
    takes = iter([9, 8, 0.5, 0.25, 0.5])  # the first builds, the second is looked at for its memory
    found = clock.token_throughput(lambda: ticking.take(next(takes)), 10, CPU, 1.0)
    assert found == {"ms": 500.0, "p99_ms": 500.0, "tokens_per_second": 20.0, "peak_gib": None}


@pytest.mark.parametrize(("with_host", "fills"), [(True, 1), (False, 6)])
def test_without_the_host_a_gpu_is_busy_until_all_of_a_call_was_asked_for(with_host, fills, ticking, monkeypatch):
    """Twice as long as the host took: 3 ms, where a fill takes 1 ms."""
    filled, at_begin = [], []

    def zero():
        ticking.take(1e-3)
        filled.append(ticking.now)

    def call():
        at_begin.append(len(filled))
        ticking.take(3e-3)

    empty = SimpleNamespace(zero_=zero)
    cuda = SimpleNamespace(synchronize=lambda _: None)
    monkeypatch.setattr(clock, "torch", SimpleNamespace(empty=lambda *_, **__: empty, int8=None, cuda=cuda))
    monkeypatch.setattr(clock, "l2_bytes", lambda _: 1)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: ticking.now))
    found = measure(call, GPU, budget_ms=1.0, with_host=with_host)
    assert (found.p50, found.p99, found.runs) == (pytest.approx(3.0), pytest.approx(3.0), 5)
    assert [later - sooner for sooner, later in pairwise(at_begin[-5:])] == [fills] * 4


def test_microseconds_in_a_graph_are_those_of_the_call_alone(ticking, monkeypatch):
    class Graph:
        def __init__(self, parts, runs):
            self.graph = SimpleNamespace(replay=lambda: [part() for _ in range(runs) for part in parts])

    stream = SimpleNamespace(wait_stream=lambda _: None)
    cuda = SimpleNamespace(
        Stream=lambda: stream, current_stream=lambda: stream, stream=lambda _: nullcontext(), synchronize=lambda _: None
    )
    monkeypatch.setattr(clock, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(clock, "Graph", Graph)
    timed = object.__new__(clock.GraphClock)
    timed.device, timed.flush = GPU, lambda: ticking.take(7e-3)
    assert timed(lambda: ticking.take(1e-3))() == pytest.approx(1000)


def test_memory_is_what_a_call_takes_beyond_what_is_held(monkeypatch):
    memory = {"held": 1 << 30, "peak": 9 << 30}  # of a call before it
    cuda = SimpleNamespace(
        empty_cache=lambda: None, memory_allocated=lambda _: memory["held"],
        reset_peak_memory_stats=lambda _: memory.update(peak=memory["held"]),
        max_memory_allocated=lambda _: memory["peak"],
    )  # fmt: skip
    monkeypatch.setattr(clock, "torch", SimpleNamespace(cuda=cuda))
    collected = []
    monkeypatch.setattr(clock.gc, "collect", lambda: collected.append(memory["peak"]))
    assert clock.peak_gib(lambda: memory.update(peak=max(memory["peak"], 3 << 30)), GPU) == 2.0
    assert collected == [9 << 30]  # before the peak is reset
    monkeypatch.setattr(attention, "peak_gib", lambda *_: 0.5)
    assert attention.prepared("naive", CELL, "forward", CPU)[1] == {"peak_extra_mib": 512.0}


def test_pythons_share_of_a_call_is_without_its_first_and_without_the_wait(ticking, monkeypatch):
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: ticking.now))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ticking.take(9))
    takes = chain([5.0], repeat(1e-4))
    assert attention.python_us(lambda: ticking.take(next(takes))) == pytest.approx(100)


def test_speed_is_of_the_median_round_and_the_longest_is_of_all(monkeypatch):
    rounds = iter([clock.Milliseconds(p50, p50 + 1, 5) for p50 in (4.0, 1.0, 2.0)])
    monkeypatch.setattr(attention, "measure", lambda *_, with_host: next(rounds))
    (row,) = run_cell(CELL, replace(BENCH, attention=["naive"], passes=["forward"]), CPU)
    assert (row["ms"], row["ms_p99"], row["runs"]) == (2.0, 5.0, 15)
    assert row["tflops"] == pytest.approx(CELL.flops("forward") / 2e-3 / 1e12)


@pytest.mark.parametrize("mask", ["causal", "full", "window"])
def test_peers_compute_the_same(mask, monkeypatch):
    """By their own words for a mask."""
    told = []

    def flash4(q, k, v, causal=False, window_size=(-1, -1), deterministic=False):
        told.append(deterministic)
        if window_size != (-1, -1):
            causal = True
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return naive_attention(q, k, v, causal=causal, window=window_size).transpose(1, 2), None

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=flash4))
    monkeypatch.setattr(attention, "create_block_mask", lambda rule, *_, **__: rule)
    monkeypatch.setattr(attention.torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(attention, "WINDOW", 8)
    cell = replace(CELL, mask=mask)
    q, k, v, _ = calls.tensors(1, 32, 2, 2, 16, CPU, torch.float32)
    exact = attention.implementation("naive", cell, CPU)(q, k, v)
    for name in ("flash4", "flash4_deterministic", *(["sdpa_flash"] if mask != "window" else [])):
        torch.testing.assert_close(attention.implementation(name, cell, CPU)(q, k, v), exact)
    assert told == [False, True]
    flex = attention.implementation("flex", cell, CPU).keywords["block_mask"]
    if mask == "full":
        assert flex is None
    else:
        weights = attention.implementation("naive", cell, CPU)(q, k, torch.eye(32).expand(1, 2, 32, 32))[0, 0]
        i = torch.arange(32)
        assert torch.equal(flex(0, 0, i[:, None], i), weights > 0)


def test_a_pass_is_its_name_and_pytorchs_kernels_are_theirs():
    q, k, v, do = calls.tensors(2, 8, 4, 2, 16, CPU, torch.float32)
    assert [x.shape[1] for x in (q, k, v, do)] == [4, 2, 2, 4]
    backward = calls.one_pass(naive_attention, "backward", q, k, v, do)
    for found, exact in zip(backward(), gradients(naive_attention, (q, k, v, do))[1:], strict=True):
        torch.testing.assert_close(found, exact)
    cuda = torch.backends.cuda
    for name, kernels in {"sdpa_flash": (True, False, False), "sdpa_cudnn": (False, True, False)}.items():
        with calls.held_to(name):
            assert (cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()) == kernels


def test_a_growing_cache_is_one_call_whose_lengths_change(monkeypatch):
    found = [cell for cell in decode.cells(decode.BenchConfig(family=["growing"])) if cell.page]
    assert {cell.capacity for cell in found} == {2**17}
    assert {max(cell.lengths) for cell in found} >= {2**10, 2**17}
    small = replace(found[0], num_heads=2, num_kv_heads=1, head_dim=16, page=16, capacity=48)
    machine = decode.Machine(CPU, small.held_bytes // 4)
    made, seen = machine.call, []
    monkeypatch.setattr(machine, "call", lambda *given: seen.append(given) or made(*given))
    for length in (20, 33, 48):
        assert machine.microseconds(replace(small, lengths=(length,))) > 0
    ((cell, lengths),) = seen
    assert (cell.lengths, lengths.tolist()) == ((48,), [47])  # a token is appended to the 47 of the last call


def test_the_verdict_on_a_growing_cache_is_of_each_line_and_of_large_caches(tmp_path):
    def row(page, mib, share):
        return {"batch": 1, "page": page, "kv_mib": mib, "of_read": share}

    small = [row(0, 4, 0.9), row(0, 32, 0.1)]
    rows = [*small, row(0, 128, 0.6), row(0, 512, 0.8), row(0, 256, 0.58), row(64, 512, 0.3)]
    assert decode.least_kept(rows) == 0.58 / 0.6
    assert decode.least_kept([*rows, row(0, 1024, 0.4)]) == 0.5
    decode.draw_growing(rows, tmp_path / "x.png", "t")
    assert (tmp_path / "x.png").stat().st_size > 5_000


def test_the_cells_cover_the_goal_and_those_past_it_are_listed(tmp_path, capsys, monkeypatch):
    cells = [cell for cell in decode.cells(decode.BenchConfig()) if cell.family == "context"]
    for head_dim in (64, 128):
        of = [cell for cell in cells if cell.head_dim == head_dim and cell.attention == "flash"]
        assert {cell.num_heads // cell.num_kv_heads for cell in of} == {1, 2, 4, 8, 16}
        assert {(len(cell.lengths), cell.lengths[0]) for cell in of} >= {
            (1, 2**10),
            (64, 2**10),
            (1, 2**17),
            (64, 2**17),
        }
    assert {len(cell.lengths) for cell in cells if cell.lengths[0] == 512} == {1, 64}
    bench = decode.BenchConfig(["context"], ["flash"], batch=[2], context=[16, 32], heads=["2/1/16"])
    monkeypatch.setattr(decode.Machine, "read_bandwidth", lambda self: 2e12)
    monkeypatch.setattr(decode.Machine, "microseconds", lambda self, cell: 1.0 if cell.lengths[0] == 16 else 50.0)
    decode.main.__wrapped__(decode.BenchSettings(bench, HardwareConfig(device="cpu")), tmp_path)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    row = json.loads((tmp_path / "decode.json").read_text())["rows"][1]
    kv_bytes = 2 * 32 * (2 * 16 * 2)  # of two rows of 32 keys and values of 16 elements in 16 bits
    assert row["tb_per_s"] == pytest.approx(kv_bytes / 50e-6 / 1e12)
    assert row["of_read"] == pytest.approx(row["tb_per_s"] / 2)
    assert row["goal_us"] == pytest.approx(5 + 1e6 * kv_bytes / (0.9 * 2e12))
    assert row["of_goal"] == pytest.approx(50 / row["goal_us"])
    assert last["cells"] == 4
    assert list(last["past_the_goal"]) == [f"B{b} H{h} N{n} uniform D{d} Nq1" for b, h, n, d in
                                           ((2, "2/1", 32, 16), (1, "12/12", 512, 64))]  # fmt: skip


def test_bytes_of_a_cache_are_of_its_keys_values_and_scales(monkeypatch):
    cell = decode.Cell("x", (10, 20), 4, 2, 16)
    assert cell.kv_bytes == 30 * 2 * 2 * 16 * 2
    eight = replace(cell, cache="int8")
    assert eight.kv_bytes == 30 * 2 * 2 * 16
    assert replace(eight, scale="token").kv_bytes == 30 * 2 * 2 * (16 + 4)
    monkeypatch.setattr(decode, "num_sms", lambda _: 1)
    for elements in (0, 3 * 17):  # an odd number of columns too
        machine, times = decode.Machine(CPU, elements), iter([3.0, 2.0, 4.0])  # us, of three grids
        with monkeypatch.context() as patch:
            patch.setattr(machine, "timed", lambda call, times=times: lambda: next(times))
            patch.setattr(machine, "device", GPU)
            patch.setattr(torch, "empty", lambda *_, **__: None)
            assert machine.read_bandwidth() == 2**16 * 2 / 2e-6


@pytest.mark.parametrize(("late", "passes"), [(1.0, True), (1.3, False)])
def test_a_growing_cache_passes_where_it_keeps_its_bandwidth(late, passes, tmp_path, capsys, monkeypatch):
    class Machine:
        def __init__(self, *_): ...
        def read_bandwidth(self):
            return 1e12

        def microseconds(self, cell):
            return cell.kv_bytes / 1e6 * (late if cell.lengths[0] == 2**17 else 1)

    monkeypatch.setattr(decode, "Machine", Machine)
    bench = decode.BenchConfig(["growing"])
    decode.main.__wrapped__(decode.BenchSettings(bench, HardwareConfig(device="cpu")), tmp_path)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["growing"]
    assert (found["passes"], found["least_of_best"]) == (passes, pytest.approx(1 / late))


def test_a_call_over_a_cache_without_memory_is_a_row(tmp_path, capsys, monkeypatch):
    def microseconds(self, cell):
        if len(cell.lengths) == 2:
            raise torch.OutOfMemoryError("no")
        return 1.0

    monkeypatch.setattr(decode.Machine, "read_bandwidth", lambda self: 1e12)
    monkeypatch.setattr(decode.Machine, "microseconds", microseconds)
    bench = decode.BenchConfig(["context"], ["flash"], batch=[2], context=[16], heads=["2/1/16"])
    decode.main.__wrapped__(decode.BenchSettings(bench, HardwareConfig(device="cpu")), tmp_path)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cells"] == 2
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert [row.get("error") for row in rows] == ["out of memory", None, None]
    (tmp_path / "decode" / "context").mkdir(parents=True)
    (tmp_path / "decode.json").rename(tmp_path / "decode" / "context" / "decode.json")
    assert "2 of 2 calls take at most 5 us and the time of those bytes." in page(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
def test_a_mask_is_timed_in_both_passes_and_a_block_beside_the_dense_kernels():
    bench = bench_masks.BenchConfig(seq_len=128, head_dim=[16], hidden=16, rounds=1)
    forward, backward = bench_masks.rows_of("all partial", 16, bench, CPU, torch.float32)
    assert (forward["visited"], forward["partial"], forward["pass"], backward["pass"]) == (1, 1, "forward", "backward")
    assert forward["of_dense"] == forward["dense_ms"] / forward["ms"]
    assert forward["build_ms"] > 0
    with pytest.raises(ValueError, match=r"bench.mask=squares is not one of causal, documents"):
        bench_masks.BenchConfig(mask=["squares"])


def test_a_mask_beside_flex_attention(monkeypatch):
    """How often our time goes into theirs; a block is one of a head."""
    times = {"ms": 2.0, "flex_ms": 5.0}
    counts = SimpleNamespace(counts=lambda: {"visited": 10, "partial": 3})
    for name, found in {
        "masks": {"causal": None}, "block_mask": counts, "create_block_mask": None, "build_ms": 1.0, "tensors": [],
    }.items():  # fmt: skip
        monkeypatch.setattr(bench_masks, name, lambda *_, found=found, **__: found)
    monkeypatch.setattr(bench_masks.torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(bench_masks.torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(bench_masks, "one_pass", lambda call, which: call)
    flash = bench_masks.flash_attention
    ms = lambda call: times["ms" if call.func is flash else "flex_ms"]  # noqa: E731
    monkeypatch.setattr(bench_masks, "measure", lambda call, *_, with_host: clock.Milliseconds(ms(call), 9.0, 1))
    bench = bench_masks.BenchConfig(seq_len=128, head_dim=[16], hidden=64, passes=["forward"])
    (row,) = bench_masks.rows_of("causal", 16, bench, SimpleNamespace(type="cuda"), torch.float32)
    assert (row["ratio"], row["block_us"]) == (2.5, 50.0)


def test_the_time_to_build_a_mask_is_the_median_after_the_first(ticking, monkeypatch):
    monkeypatch.setattr(bench_masks, "time", SimpleNamespace(perf_counter=lambda: ticking.now))
    takes = iter([9.0, *[0.001] * 11, *[0.5] * 9])
    assert bench_masks.build_ms(lambda: ticking.take(next(takes)), CPU) == pytest.approx(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
def test_the_dense_kernels_beside_a_block_have_no_mask():
    q, k, v, do = calls.tensors(1, 16, 1, 1, 16, CPU, torch.float32)
    exact = gradients(naive_attention, (q, k, v, do))
    found = bench_masks.portable("forward", q, k, v, do)()[0], *bench_masks.portable("backward", q, k, v, do)()[:3]
    for ours, right in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-4)
