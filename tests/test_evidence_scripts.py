"""The evidence programs in their smallest form."""

import contextlib
import importlib
import json
import os
import shlex
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kernels import naive_attention
from scripts.bench import clock, processes, saving
from scripts.bench import context as bench_context
from scripts.bench import loss as bench_loss
from scripts.bench import parallel as bench_parallel
from scripts.bench import training as bench_training
from scripts.bench.loss import LossBenchSettings
from scripts.bench.training import BenchSettings
from scripts.evidence_tables import page
from tests.runs import settings, settings_of, told
from training.hardware import HardwareConfig, set_up
from training.memory import DoesNotFit
from training.run import resolve

pytestmark = pytest.mark.usefixtures("smoke_test")


def test_training_is_timed_with_each_checkpointing(tmp_path, capsys, monkeypatch):
    chosen = settings(
        "hardware.device=cpu", "model=tiny", "model.num_layers=1", "data.seq_len=16", "train.batch_tokens=64",
        "bench.steps=1", "bench.warmup_steps=1", "bench.vocab_size=50", "bench.attention=[sdpa,naive]",
        "bench.seq_len=[16,32]", "bench.checkpointing=[none,selective]", "model.loss=chunked",
        "bench.micro_batch_tokens=32", schema=BenchSettings, experiment=None,
    )  # fmt: skip
    real = bench_training.figures

    def full(settings, *rest):
        if settings.model.attention == "naive" and settings.data.seq_len == 32:
            raise torch.OutOfMemoryError
        return real(settings, *rest)

    monkeypatch.setattr(bench_training, "figures", full)
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
    assert list(rows) == ["plain", "chunked 4", "chunked 100"]
    for row in rows.values():
        assert row["ms"] > 0
        assert row["loss_error"] < 1e-3
        assert max(row["dh_error"], row["dweight_error"]) < 1e-2
    plain, hardware = bench_loss.implementations(chosen)["plain"], set_up(chosen.hardware)
    inputs = bench_loss.make(chosen, hardware.device)
    exact = bench_loss.exact_results(chosen, *inputs)
    twice = bench_loss.measured(chosen, lambda *given: 2 * plain(*given), hardware, exact, *inputs)
    for name in ("loss_error", "dh_error", "dweight_error"):
        assert twice[name] == pytest.approx(1, rel=0.01)
    with pytest.raises(ValueError, match="padded_vocab=64 must be at least vocab_size=65"):
        LossBenchSettings(vocab_size=65, padded_vocab=64)
    with pytest.raises(ValueError, match=r"chunk_tokens=\[4, 0\] must be at least 1"):
        LossBenchSettings(chunk_tokens=[4, 0])


TINY = (
    "hardware.device=cpu", "model=tiny", "model.num_layers=1", "data.seq_len=16",
    "train.batch_tokens=64", "bench.vocab_size=50", "bench.steps=1", "bench.warmup_steps=1",
)  # fmt: skip


def test_the_command_in_a_file_is_what_was_typed(tmp_path, monkeypatch, capsys):
    """Without the arguments that the program adds of its own."""
    monkeypatch.chdir(tmp_path)
    typed = ["tokens=16", "n_embd=8", "vocab_size=50", "padded_vocab=64", "chunk_tokens=[4]", "hardware.device=cpu"]
    assert told("scripts.bench.loss", typed, monkeypatch, capsys).code == 0
    (path,) = tmp_path.glob("runs/bench_loss/*/bench_loss.json")
    command = json.loads(path.read_text())["provenance"]["command"]
    assert command.partition(" tokens")[1:] == (" tokens", shlex.join(typed).removeprefix("tokens"))


def test_a_save_is_paid_for_by_the_loop_once_a_cadence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(saving, "BLOCK_SECONDS", 0.01)
    calls, real = [], bench_training.save_cost

    def counted(step, *rest):
        monkeypatch.setattr(saving.time, "perf_counter", iter(range(10**6)).__next__)  # every look takes a second
        return real(lambda: calls.append(1), *rest)

    monkeypatch.setattr(bench_training, "save_cost", counted)
    bench_training.main.__wrapped__(settings_of(bench_training.main, *TINY, "bench.saving=true"), tmp_path)
    out = capsys.readouterr().out
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert "what a save costs the loop" in out
    assert len(calls) == 10 + 2 * saving.PAIRS * row["save_block_steps"]
    assert row["save_ms"] == row["save_ms_least"] == row["save_ms_most"] == 0.0  # a look at the clock each
    assert row["checkpoint_mb"] > 0.1
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000005"]


def test_a_save_costs_what_a_block_takes_more(tmp_path, monkeypatch):
    """A save of 50 s among steps of 2 s; the first block of each pair takes 7 s more, whichever it is."""
    now, order = [0.0], []

    class Saver:
        def __init__(self, folder, **_):
            self.folder = folder

        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def wait(self):
            now[0] += 1000
            order.append("|")

        def check(self): ...
        def save(self, *_, **__):
            order.append("save")
            now[0] += 50

    def step():
        now[0] += 2 + (7 if len(order) > 2 and order.count("|") % 2 == 1 and order[-1] != "step" else 0)
        order.append("step")

    monkeypatch.setattr(saving, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(saving, "Saver", Saver)
    monkeypatch.setattr(saving, "random_states", lambda _: {})
    monkeypatch.setattr(saving, "BLOCK_SECONDS", 8.0)
    optimizer = SimpleNamespace(state_dict=dict)
    hardware = SimpleNamespace(synchronize=lambda: None, device=torch.device("cpu"))
    row = saving.save_cost(step, None, optimizer, hardware, tmp_path)
    assert row["save_block_steps"] == 4
    assert (row["save_ms_least"], row["save_ms"], row["save_ms_most"]) == (43e3, 57e3, 57e3)
    assert row["save_every_at_promise"] == 57 / (0.02 * 2)


def test_a_step_that_captures_its_graphs_is_not_timed(tmp_path, monkeypatch):
    """With one step of warm-up it was: GPT-2 124M at 336,000 tokens/s in place of 510,000."""
    warmups = []

    def counted(step, device, warmup, runs):
        warmups.append(warmup)
        return [2.0] * runs if len(warmups) > 1 else clock.laps(step, device, warmup, runs)

    monkeypatch.setattr(bench_training, "laps", counted)
    settings = settings_of(bench_training.main, *TINY)
    hardware = set_up(settings.hardware)
    row = bench_training.one_row(settings, 16, "none", "sdpa", hardware)
    found = bench_training.figures(row, replace(resolve(row, vocab_size=50, hardware=hardware), graphs=True), tmp_path)
    assert warmups == [1, 2]
    assert (found["step_ms"], found["tokens_per_second"]) == (2000, 32)


def test_speed_is_that_of_the_median_step_and_of_all_its_tokens(tmp_path, monkeypatch):
    """Two micro-batches a step; the parts are of the same steps."""
    numbers = iter(range(9))

    class Parts:
        def __init__(self, _):
            self.number = next(numbers)

        def __call__(self, _):
            return contextlib.nullcontext()

        def seconds(self):
            return {"forward": float(self.number)}

    def counted(step, device, warmup, runs):
        for _ in range(warmup + runs):
            step()
        return [1.0, 2.0, 6.0]

    monkeypatch.setattr(bench_training, "laps", counted)
    monkeypatch.setattr(bench_training, "Parts", Parts)
    monkeypatch.setattr(bench_training, "peak_flops", lambda *_: 1e12)
    monkeypatch.setattr(bench_training, "model_flops", lambda _: {"causal": 3e9, "full": 5e9})
    settings = settings_of(bench_training.main, *TINY, "bench.steps=3", "bench.micro_batch_tokens=32")
    hardware = set_up(settings.hardware)
    row = bench_training.one_row(settings, 16, "none", "sdpa", hardware)
    assert row.train.micro_batch == 2
    found = bench_training.figures(row, resolve(row, vocab_size=50, hardware=hardware), tmp_path)
    assert (found["step_ms"], found["tokens_per_second"], found["forward_ms"]) == (2000, 32, 2000)
    assert found["mfu"] == pytest.approx(3e9 * 32 / 1e12)


def test_a_row_of_pytorchs_kernel_is_held_to_it(tmp_path, monkeypatch):
    cuda, held = torch.backends.cuda, []
    monkeypatch.setattr(bench_training, "figures", lambda *_: held.append(cuda.math_sdp_enabled()) or {})
    settings = settings_of(bench_training.main, *TINY, "bench.attention=[sdpa,sdpa_flash]")
    bench_training.main.__wrapped__(settings, tmp_path)
    assert held == [True, False]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_of_pytorchs_that_cannot_run_is_a_row(dtype, tmp_path, capsys):
    """It ended the program, and with it the rows that were still to come; in bfloat16 it was timed as another one."""
    asked = f"hardware.dtype={dtype}", "bench.attention=[sdpa_cudnn,naive]"
    bench_training.main.__wrapped__(settings_of(bench_training.main, *TINY, *asked), tmp_path)
    refused, naive = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert refused["error"].startswith("No viable backend")
    assert naive["tokens_per_second"] > 0


def test_the_typed_keys_of_a_run_hold_in_its_benchmark(tmp_path, monkeypatch):
    """Where no list of the benchmark's own has other values; without a word the length is 1,024."""
    rows = []
    monkeypatch.setattr(bench_training, "measure", lambda *row: rows.append(row) or {"seq_len": 16})
    for more in ((), ("bench.attention=[sdpa]", "bench.seq_len=[32]")):
        typed = settings_of(bench_training.main, *TINY, "model.attention=naive", *more)
        bench_training.main.__wrapped__(typed, tmp_path)
    found = [(name, chosen.model.attention, chosen.data.seq_len) for name, chosen, *_ in rows]
    assert found == [("naive", "naive", 16), ("sdpa", "sdpa", 32)]
    # the length that is there without a word is in nobody's way
    few = settings_of(bench_training.main, *(x for x in TINY if "seq_len" not in x), "bench.seq_len=[16,32]")
    assert few.data.seq_len == 16
    assert settings_of(bench_training.main).data.seq_len == 1024


@pytest.mark.parametrize(("dropout", "draws"), [(0.0, False), (0.1, True)])
def test_a_step_draws_as_that_of_a_run_does(tmp_path, monkeypatch, dropout, draws):
    """With dropout each micro-batch has a stream of its own, which is set up in the step."""
    asked, real = [], bench_training.training_step
    monkeypatch.setattr(bench_training, "training_step", lambda *a, **how: asked.append(how) or real(*a, **how))
    chosen = settings_of(bench_training.main, *TINY, f"model.dropout={dropout}")
    bench_training.main.__wrapped__(chosen, tmp_path)
    assert {how["dropout"] for how in asked} == {draws}


@pytest.mark.parametrize("number", ["auto", "2", "null"])
def test_the_micro_batch_of_a_run_is_that_of_its_benchmark(tmp_path, capsys, number):
    chosen = settings_of(bench_training.main, *TINY, f"train.micro_batch={number}")
    bench_training.main.__wrapped__(chosen, tmp_path)
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["micro_batch"] == {"auto": 4, "2": 2, "null": 4}[number]
    assert row["tokens_per_second"] > 0


def test_only_a_lack_of_memory_is_a_row(tmp_path, capsys, monkeypatch):
    """train.micro_batch=auto: what `resolve` refuses for any other reason is an error."""
    chosen = settings_of(bench_training.main, *TINY, "train.micro_batch=auto")
    refusals = iter([DoesNotFit("9 GiB are needed"), ValueError("there is no such dtype")])

    def refuse(*_, **__):
        raise next(refusals)

    monkeypatch.setattr(bench_training, "resolve", refuse)
    with pytest.raises(SystemExit, match="2"):  # no row has figures
        bench_training.main.__wrapped__(chosen, tmp_path)
    said = capsys.readouterr()
    (row,) = json.loads(said.out.splitlines()[-1])["rows"]
    assert (row["error"], row["why"]) == ("out of memory", "9 GiB are needed")
    assert said.err == "error: nothing could be measured: 9 GiB are needed\n"
    with pytest.raises(ValueError, match="there is no such dtype"):
        bench_training.main.__wrapped__(chosen, tmp_path)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("bench.attention=[sdpa,fast]", "bench.attention=fast is not one of auto, flash"),
        ("bench.seq_len=[16,48]", "bench.seq_len=48 does not divide train.batch_tokens=64; use another"),
        ("train.micro_batch=3", "train.micro_batch=3 does not divide the 4 sequences"),
        ("train.micro_batch=some", "train.micro_batch=some must be at least 1 sequence, auto or null"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(tmp_path, monkeypatch, capsys, override, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_training, "measure", lambda *_: pytest.fail("trained"))
    key = override.partition("=")[0]
    arguments = [*(argument for argument in TINY if argument.partition("=")[0] != key), override]
    refused = told("scripts.bench.training", arguments, monkeypatch, capsys)
    assert refused.code == 2
    assert len(refused.error.splitlines()) == 1
    assert says in refused.error
    assert not list(tmp_path.glob("runs/*/*"))


def test_parts_of_a_step_are_summed_over_its_micro_batches(monkeypatch):
    monkeypatch.setattr(clock.Mark, "seconds_to", lambda self, later: 1.0)
    parts = clock.Parts(torch.device("cpu"))
    for name in ("forward", "backward", "forward", "backward", "optimizer"):
        with parts(name):
            pass
    assert parts.seconds() == {"forward": 2.0, "backward": 2.0, "optimizer": 1.0}


def test_impossible_benchmarks_are_refused():
    with pytest.raises(ValueError, match=r"bench\.micro_batch_tokens=0 must be at least 1"):
        bench_training.BenchConfig(micro_batch_tokens=0)
    with pytest.raises(ValueError, match=r"bench\.checkpointing=some is not one of none, pointwise"):
        bench_training.BenchConfig(checkpointing=["some"])
    with pytest.raises(ValueError, match=r"^methods=some is not one of heads, gather, ring"):  # it has no group
        bench_context.ContextBenchSettings(methods=["some"])
    with pytest.raises(ValueError, match="seq_len=66 cannot be cut into 4 equal pieces; use seq_len=64"):
        bench_context.ContextBenchSettings(seq_len=[66])  # pieces that differed ended in an abort
    bench_context.ContextBenchSettings(seq_len=[66], methods=["heads"])
    for wrong in ({"shard_embd": 2000}, {"shard_embd": 33}):  # their model refused them, after all other cells
        with pytest.raises(ValueError, match=r"bench\.shard_embd=.* heads of an even width; use a multiple of 128"):
            bench_parallel.BenchConfig(**wrong)
    for key in ("shard_layers", "shard_embd", "vocab_size"):
        with pytest.raises(ValueError, match=rf"bench\.{key}=0 must be at least 1"):
            bench_parallel.BenchConfig(**{key: 0})


# its processes are forked, and not started anew, where there is no GPU that would not have it
FORKED = """
from functools import partial
import torch.multiprocessing as mp
import torch
mp.spawn = partial(mp.start_processes, start_method="fork")
torch.cuda.device_count = lambda: 1  # a GPU that is not asked for
from scripts.bench.parallel import main
main()
"""


def test_what_processes_refuse_is_one_line(tmp_path, quick_python, monkeypatch):
    """It was a traceback of one of them, and lines about the others."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    chosen = ["hardware.device=cpu", "hardware.num_threads=1", "data.seq_len=16", "bench.tokens=24",
              "bench.processes=[1,2]", f"hydra.run.dir={tmp_path / 'run'}"]  # fmt: skip
    command, environment = [quick_python, "-c", FORKED, *chosen], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (
        2, "error: train.batch_tokens=24 is not a multiple of data.seq_len=16; use 32\n"
    )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_one_and_two_processes_are_compared(tmp_path, quick_python):
    """Over gloo: all cells in the same processes, and the tables of evidence from what they left."""
    chosen = [
        "hardware.device=cpu", "hardware.num_threads=1", "model=tiny", "model.num_layers=1",
        "model.n_embd=32", "model.num_heads=2", "data.seq_len=16", "bench.processes=[1,2]", "bench.tokens=32",
        "bench.shard_layers=1", "bench.shard_embd=32", "bench.context_tokens=32", "model.attention=naive",
        "bench.vocab_size=50", "bench.steps=2", "bench.warmup_steps=1", "bench.hash_steps=2",
        f"hydra.run.dir={tmp_path / 'parallel' / 'step'}",
    ]  # fmt: skip
    command, environment = [quick_python, "-c", FORKED, *chosen], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    hashes = [row for row in rows if row["cell"] == "hashes"]
    assert [(row["optimizer"], row["processes"]) for row in hashes] == [
        (name, size) for name in ("adamw", "muon") for size in (1, 2)
    ]
    for one, two in (hashes[:2], hashes[2:]):
        assert one["sha256"] == two["sha256"]
        assert two["equal"]
    assert hashes[0]["sha256"] != hashes[2]["sha256"]
    one, two = (row for row in rows if row["cell"] == "replicate")
    assert (one["batch_tokens"], two["batch_tokens"]) == (32, 64)
    assert two["speedup"] == two["tokens_per_second"] / one["tokens_per_second"]
    assert min(two["sum_ms"], two["all_reduce_ms"]) > 0
    assert one["slowest_ms"] == pytest.approx(max(map(float, one["alone"].split())), abs=0.01)
    assert two["speedup_of_slowest"] == two["speedup"] * one["slowest_ms"] / one["step_ms"]
    assert two["rest_ms"] == pytest.approx(two["step_ms"] - two["sum_ms"] - one["slowest_ms"], abs=2e-3)
    for name in ("sum", "all_reduce"):
        assert two[f"{name}_share"] == pytest.approx(two[f"{name}_ms"] / two["step_ms"], rel=0.05)
    assert [(row["processes"], row["seq_len"]) for row in rows if "context" in row["cell"]] == [
        (1, 32),
        (2, 32),
        (2, 32),
        (2, 64),
    ]
    repeated = [row for row in rows if "twice" in row]
    assert [(row["cell"], row["seq_len"], row["twice"]) for row in repeated] == [
        ("context", 32, True),
        ("context, ring", 32, True),
        ("shard", 32, True),
    ]
    text = page(tmp_path)
    assert f"| muon | 2 | 2 | {hashes[3]['sha256']} | True |" in text
    assert text.count("\n## ") == 3


ONE = SimpleNamespace(size=1, all_gather=lambda value: [value])  # a world


def test_bits_that_differ_are_seen(monkeypatch):
    """Of weights, of moments, and of a step that is computed twice: that of 2 processes ends elsewhere."""
    weight, ended = torch.zeros(2), {"weight": [0.0, 1.0], "moment": [0.0, 0.0]}

    def begin(chosen, _):
        weight.fill_(ended["weight"][chosen.size - 1])
        state = {"exp_avg": torch.full((2,), ended["moment"][chosen.size - 1])}
        seen.clear()
        optimizer = SimpleNamespace(optimizers=[SimpleNamespace(state={weight: state})])
        return optimizer, SimpleNamespace(step=seen.append)

    seen = []
    network = SimpleNamespace(begin=begin, model=SimpleNamespace(parameters=lambda: [weight]))
    monkeypatch.setattr(bench_parallel, "choose", lambda made, hardware, world: SimpleNamespace(size=world.size))
    monkeypatch.setattr(bench_parallel, "batch_of", lambda chosen, step: step)
    settings = settings_of(bench_parallel.main, "bench.processes=[1,2]", "bench.hash_steps=3")
    worlds = {1: ONE, 2: SimpleNamespace(size=2)}
    host = processes.Host(SimpleNamespace(device=torch.device("cpu")), worlds)
    host.worlds[2].all_gather = ONE.all_gather
    for ended["weight"], ended["moment"], equal in (
        ([0.0, 1.0], [0.0, 0.0], False), ([0.0, 0.0], [0.0, 1.0], False), ([0.0, 0.0], [0.0, 0.0], True),
    ):  # fmt: skip
        rows = list(bench_parallel.hashes(host, settings, network))
        assert [row["equal"] for row in rows] == [True, equal] * 2
        assert seen == [0, 1, 2]


@pytest.mark.parametrize(("graphs", "spans"), [(False, [2, 3, 4]), (True, [3, 4, 5])])
def test_the_step_of_several_is_that_of_the_slowest_after_its_warmup(graphs, spans, monkeypatch):
    """Where graphs are on the second step captures, and is not timed either; bits that differ are said."""
    told, now = [], [0.0]
    world = SimpleNamespace(size=1, all_gather=lambda own: told.append(own) or [own, [7.0, 2.5], [1.0, 9.5]])
    device = torch.device("cpu")
    hardware = SimpleNamespace(device=device, world=world, synchronize=lambda: None, peak_memory_gib=lambda: 1.0)
    chosen = SimpleNamespace(hardware=hardware, graphs=graphs, seq_len=16, settings={"train": {"batch_tokens": 140}})
    takes = iter([1e-3, 2e-3, 3e-3, 4e-3, 5e-3])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench_parallel, "batch_of", lambda *_: None)
    steps = SimpleNamespace(step=lambda _: now.__setitem__(0, now[0] + next(takes)))
    hashes = iter("ab")
    network = SimpleNamespace(begin=lambda *_: (None, steps), repeated=lambda *_: next(hashes))
    settings = settings_of(bench_parallel.main, "bench.warmup_steps=1", "bench.steps=3")
    row = bench_parallel.timed(chosen, network, settings, twice=True)
    assert told == [[pytest.approx(spans[1]), 1.0]]
    assert (row["step_ms"], row["tokens_per_second"], row["peak_memory_gib"]) == (7.0, 20000, 9.5)
    assert (row["sha256"], row["twice"]) == ("a", False)


def test_several_are_compared_with_the_first_gpu_and_with_the_slowest(monkeypatch):
    monkeypatch.setattr(bench_parallel, "choose", lambda *_: None)
    monkeypatch.setattr(bench_parallel, "timed", lambda *_: {"tokens_per_second": 100, "step_ms": 5.0})
    world = SimpleNamespace(all_gather=lambda own: [own, 6.0], broadcast=lambda row: row)
    one = bench_parallel.alone(processes.Host(None, {2: world}), None, network=1)
    assert one == {"tokens_per_second": 100, "step_ms": 5.0, "alone": "5.00 6.00", "slowest_ms": 6.0}
    found = bench_parallel.against(one, {"tokens_per_second": 180})
    assert found == {"speedup": 1.8, "speedup_of_slowest": pytest.approx(1.8 * 6 / 5)}


@pytest.mark.parametrize("exact", [True, False])
def test_a_shared_row_is_held_to_one_gpus_time_and_bits(exact, monkeypatch):
    times = iter([1.0, 8.0, 2.0, 4.0])  # ms: forward and both passes, of one GPU and of two
    monkeypatch.setattr(bench_context, "median_ms", lambda *_: next(times))
    way = lambda attend, *x, group, causal: attend(*x, causal=causal) + (0.0 if exact else 1e-3)  # noqa: E731
    monkeypatch.setattr(bench_context, "METHODS", {"heads": way})
    monkeypatch.setattr(bench_context, "flash", naive_attention)
    monkeypatch.setattr(bench_context, "part_of", lambda x, *_, **__: x)
    hardware = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, description="")
    host = SimpleNamespace(world=SimpleNamespace(rank=0, all_gather=lambda x: [x]), hardware=hardware)
    chosen = bench_context.ContextBenchSettings(2, [32], ["heads"], 2, 2, 16)
    _, (one, two) = bench_context.work(host, chosen)
    assert (one["forward_ms"], one["ms"], two["ms"], two["speedup"], two["bits"]) == (1.0, 8.0, 4.0, 2.0, exact)
    pairs = 2 * (32 * 33 / 2)
    assert one["tflops"] == pytest.approx(3.5 * 4 * 16 * pairs / 8e-3 / 1e12)
    assert two["tflops"] == pytest.approx(3.5 * 4 * 16 * pairs / 4e-3 / 1e12 / 2)


def test_a_shared_call_takes_as_long_as_on_the_slowest_gpu_after_two(monkeypatch):
    monkeypatch.setattr(bench_context, "spans", lambda *_, **__: [9.0, 9.0, 1.0, 2.0, 3.0])
    host = SimpleNamespace(
        world=SimpleNamespace(all_gather=lambda own: [own, [2.0, 0.0, 5.0]]), hardware=SimpleNamespace(device=None)
    )
    assert bench_context.median_ms(lambda: None, 3, host) == 2000.0


OF_A_GPU = (
    "attention",
    "cache_bits",
    "decode",
    "error_budget",
    "generation",
    "huggingface",
    "loss",
    "masks",
    "mosaicbert",
)


@pytest.mark.parametrize("name", [*OF_A_GPU, "context", "parallel"])
def test_without_a_gpu_sizes_of_one_are_refused_before_anything_begins(name, tmp_path, monkeypatch, capsys):
    """The others took all memory or many minutes and said nothing, or ended in the tracebacks of their processes."""
    module = importlib.import_module(f"scripts.bench.{name}")
    begins = "scripts.bench.report.set_up" if name in OF_A_GPU else f"{module.__name__}.on_each_gpu"
    monkeypatch.setattr(begins, lambda *_: pytest.fail("it began"))
    monkeypatch.setattr("scripts.bench.report.interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    refused = told(module.__name__, [], monkeypatch, capsys)
    assert refused.code == 2
    (line,) = refused.error.splitlines()
    needed, _, remedy = line.partition(" and PyTorch sees none; use another machine, or for a smoke test ")
    expected = {"context": "NVIDIA GPUs (gpus=2)", "parallel": "NVIDIA GPUs (bench.processes=[1, 2, 4])"}
    assert needed.endswith(f" is measured on {expected.get(name, 'an NVIDIA GPU')}")
    interpreted, *smoke = shlex.split(remedy)
    assert interpreted == "TRITON_INTERPRET=1"
    assert smoke[0] == "with"
    settings_of(module.main, *smoke[1:])  # it knows the keys
    assert not list(tmp_path.glob("runs/*"))


def test_a_cpu_beside_a_gpu_is_refused_by_its_key(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.bench.report.interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"an NVIDIA GPU and hardware.device=cpu is none; leave it out, or for a"):
        bench_loss.main.__wrapped__(LossBenchSettings(hardware=HardwareConfig(device="cpu")), tmp_path)


def test_a_benchmark_of_several_gpus_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"bench.processes=\[1, 2, 4\] but there are 1 GPUs; use a machine"):
        bench_parallel.main.__wrapped__(settings_of(bench_parallel.main), tmp_path)
    with pytest.raises(ValueError, match="gpus=2 but there are 1 GPUs; use gpus=1"):
        bench_context.main.__wrapped__(bench_context.ContextBenchSettings(), tmp_path)


def test_a_process_without_memory_ends_all_in_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 9.00 GiB. GPU 1 has a total capacity of 80 GiB"
        )

    monkeypatch.setattr(processes, "_compute", full)
    with pytest.raises(SystemExit):
        processes._run(1, tmp_path / "found")
    assert (tmp_path / "refused_by_1").read_text() == (
        "process 1 is out of memory (CUDA out of memory. Tried to allocate 9.00 GiB); use smaller sizes or more GPUs"
    )
