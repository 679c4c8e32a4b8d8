"""What a run does where memory is short: it says so first, names what fits, chooses micro-batches, explains an end."""

import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train as training
from model import GPTConfig
from model.free_memory import free_host_bytes
from tests.runs import SMALL, settings, small_run
from training import memory, stepper
from training.checkpoint import open_checkpoint
from training.hardware import Hardware, set_up
from training.memory import GIB, HEAP, MARGIN, Plan, advice_when_out_of_memory
from training.optimizer import OptimConfig
from training.parallel import World

ROOT = Path(__file__).resolve().parent.parent
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def flash_can_run(monkeypatch):
    monkeypatch.setattr("kernels.support._flash_device_reason", lambda *_: None)


def plan(free_gib: float | None, **changes) -> Plan:
    """Two layers as the 124M model's, 65,536 tokens at once, and so much free memory."""
    config = GPTConfig(**{"num_layers": 2, "attention": "flash", "loss": "chunked"} | changes)
    free = None if free_gib is None else int(free_gib * GIB)
    hardware = Hardware(CUDA, torch.bfloat16, False, "")
    return Plan(config, OptimConfig(), hardware, 50257, 1024, sequences=64, micro_batch=64, free=free)


def refused(made: Plan, **options) -> str:
    with pytest.raises(ValueError, match="GiB are free on cuda; ") as caught:
        made.checked(**options)
    return str(caught.value)


def test_what_fits_is_left_alone():
    made = plan(80)
    assert made.checked() is made
    line = str(made)
    assert re.search(r"fullest in the backward: .*activations \d\.\d\d.*; 80\.00 GiB free$", line)
    kinds = [float(size) for size in re.findall(r" (\d\.\d\d)(?=[,;])", line.partition(": ")[2])]
    assert sum(kinds) == pytest.approx(made.peak / GIB, abs=0.05)
    assert min(kinds) > 0  # others are too small to be named
    assert "free" not in str(plan(None))
    assert made.beside(1.5) == f"1.50 GiB at most in two steps; forecast {made.peak / GIB:.2f} GiB"


def test_what_does_not_fit_is_refused_with_the_cheapest_changes_and_their_forecasts():
    message = refused(plan(4.4))
    assert message.startswith("train.micro_batch=64 needs 5.3")
    found = dict(re.findall(r"([a-z_.]+=\w+) \((\d+\.\d+) GiB\)", message))
    assert list(found) == [
        "train.micro_batch=32", "model.activation_checkpointing=selective", "model.activation_checkpointing=full",
    ]  # fmt: skip
    assert all(float(forecast) <= 4.4 / MARGIN for forecast in found.values())


def test_of_a_model_of_transformers_what_lives_between_steps_is_known_and_no_remedys_saving(monkeypatch):
    monkeypatch.setattr(memory, "held_parameters", lambda config: 2**30 // 4)  # weights, gradients, two moments: 4 GiB
    made = replace(plan(4), model=GPTConfig(name="theirs", attention="sdpa", loss="plain"))
    assert made.checked() is made
    less = replace(made, free=3 * GIB)
    ways = "use a smaller model, train.micro_batch or data.seq_len, model.activation_checkpointing=full or a larger GPU"
    assert refused(less) == f"train.micro_batch=64 needs 4.00 GiB and 3.00 GiB are free on cuda; {ways}"


def test_what_costs_no_time_comes_first():
    message = refused(plan(20, attention="naive", loss="plain"))
    assert re.search(r"what fits: model\.attention=flash \(16\.\d+ GiB\), train\.micro_batch=32 ", message)
    assert "what fits: model.loss=chunked (5.3" in refused(plan(10, loss="plain"))


def test_what_is_advised_is_the_fastest_first_and_an_attention_that_can_run(monkeypatch):
    monkeypatch.setattr(Plan, "peak", 0)  # without a forecast: all that is advised

    def advised(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, features=("causal",), **changes) -> str:
        made = replace(plan(1, **changes), hardware=Hardware(torch.device(device), dtype, False, ""), features=features)
        return made.remedies(1)[0].model.attention

    models = [made.model for made in plan(1, attention="naive", loss="plain").remedies(1)]
    own = models[2]  # with fewer sequences at a time
    modes = [replace(own, activation_checkpointing=mode) for mode in ("pointwise", "selective", "full")]
    assert models == [replace(own, attention="flash"), replace(own, loss="chunked"), own, *modes]
    assert advised(attention="naive") == advised(attention="tiled") == "flash"
    assert advised(attention="naive", num_heads=2) == "sdpa"  # head_dim 384
    assert advised(dtype=torch.float64, attention="tiled") == "sdpa"
    assert advised("cpu", attention="naive") == "sdpa"
    assert advised("cpu", features=("causal", "window"), attention="tiled") == "tiled"
    assert advised(attention="sdpa") == "sdpa"


def test_where_no_single_change_is_enough_they_come_together():
    message = refused(plan(2.25, attention="naive", loss="plain"))
    assert "what fits: model.attention=flash model.loss=chunked model.activation_checkpointing=full" in message
    assert "train.micro_batch=16 (" in message  # not fewer: sums of more gradients would be held


def test_where_nothing_is_enough_that_is_said():
    assert "use a smaller model, a shorter data.seq_len or a larger GPU" in refused(plan(1))


def test_a_forecast_near_the_limit_is_a_warning():
    made = plan(5.35)
    assert made.checked() is made
    assert "which may not be enough; what fits: train.micro_batch=32 (" in str(made)
    made = replace(made, free=int(made.peak / MARGIN) + 1)  # a forecast may be 10 % too high
    assert made.checked() is made
    refused(replace(made, free=made.free - 2))


@pytest.mark.parametrize(("free", "expected"), [(80, 64), (5.35, 32), (3.9, 32), (2.8, 8)])
def test_auto_takes_the_largest_that_fits(free, expected):
    chosen = plan(free).checked(auto=True)
    assert (chosen.micro_batch, chosen.sequences) == (expected, 64)
    assert chosen.peak <= chosen.free / MARGIN
    if expected < 64:
        assert replace(chosen, micro_batch=2 * expected).peak > chosen.free / MARGIN


def test_auto_without_a_fitting_micro_batch_says_what_would_fit():
    message = refused(plan(1.7), auto=True)
    single = replace(plan(1.7), micro_batch=1).peak / GIB
    assert message.startswith(f"train.micro_batch=auto needs {single:.2f} GiB with a single sequence and 1.70 GiB are")


def test_auto_advises_changes_for_a_single_sequence_or_else_more_of_them_at_a_time(monkeypatch):
    """Which may need less: fewer micro-batches hold no sums of gradients, so it said that nothing fits."""

    def step_peaks(model, *shape):
        fixed = {"none": 5.0, "pointwise": 5.0, "selective": 4.0, "full": 3.0}[model.activation_checkpointing]
        sums = 2 * GIB if shape[-1] < 16 else 0
        return {
            "backward": Counter(
                {("activations", ""): fixed * GIB + shape[-1] * GIB / 20, ("sums of gradients", ""): sums}
            )
        }

    monkeypatch.setattr(memory, "_PEAKS", {})
    monkeypatch.setattr(memory, "step_peaks", step_peaks)
    for free, fits in ((5.5, "full (5.05 GiB)"), (4.0, "full train.micro_batch=16 (3.80 GiB)")):
        message = refused(plan(free * MARGIN), auto=True)
        assert message.endswith(f"; what fits: model.activation_checkpointing={fits}")
    single = replace(plan(7.05), sequences=1, micro_batch=1)  # near the limit
    assert single.checked() is single
    refused(single, auto=True)


def test_a_step_is_forecast_once(monkeypatch):
    """However often, and by whomever, it is asked about; a step that differs in anything is another one."""
    asked, real = [], memory.step_peaks
    monkeypatch.setattr(memory, "_PEAKS", {})
    monkeypatch.setattr(memory, "step_peaks", lambda *arguments: asked.append(repr(arguments)) or real(*arguments))
    for _ in range(2):
        made = plan(None, num_layers=1)
        assert made.peak > 0
    changed = {"optim": OptimConfig(name="muon"), "vocab_size": 5000, "sequences": 128, "seq_len": 512}
    changed |= {"hardware": replace(made.hardware, dtype=torch.float32), "micro_batch": 32}
    for key, value in changed.items():
        assert replace(made, **{key: value}).peak != made.peak
    assert len(asked) == len(set(asked)) > len(changed)
    worlds = World(size=2), World(size=2), World(size=4)
    worlds[1].shards = worlds[2].shards = True
    peaks = [replace(made, hardware=replace(made.hardware, world=world)).peak for world in worlds]
    assert peaks[0] > peaks[1] > peaks[2]


def test_auto_knows_that_a_whole_step_may_need_less_than_its_half():
    """Two micro-batches hold the gradients of the first; of few tokens all activations are less."""
    whole = replace(plan(80), seq_len=64, sequences=2, micro_batch=2)
    half = replace(whole, micro_batch=1)
    assert whole.peak < half.peak
    assert replace(whole, free=int(whole.peak * MARGIN) + 1).checked(auto=True).micro_batch == 2


def test_the_forecast_of_a_large_step_takes_no_time_and_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    assert plan(None, num_layers=48, n_embd=1600, num_heads=25).peak > 50 * GIB
    assert time.process_time() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_running_out_of_memory_ends_with_advice():
    with (
        pytest.raises(ValueError, match=r"cuda is out of memory, with train\.micro_batch=64") as caught,
        advice_when_out_of_memory(plan(24)),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
    assert "24.00 GiB free at the start; what fits: train.micro_batch=32 (" in str(caught.value)
    with pytest.raises(ValueError, match=r"of 5\.3\d GiB; what fits: "), advice_when_out_of_memory(plan(None)):
        raise MemoryError  # the machine's, as Python says it
    with (
        pytest.raises(ValueError, match=r"4\.40 GiB free at the start; ") as caught,
        advice_when_out_of_memory(plan(4.4)),
    ):
        raise MemoryError
    assert max(map(float, re.findall(r"\((\d+\.\d+) GiB\)", str(caught.value)))) <= 4.4 / MARGIN  # less than was free
    with pytest.raises(RuntimeError, match="other"), advice_when_out_of_memory(plan(24)):
        raise RuntimeError("other memory")


# ---- a CPU: what the machine and its control groups leave


def machine(folder: Path, groups: str, **files: str) -> Path:
    """A stand-in for / on a machine with 8 GiB available; __ in a name stands for /."""
    contents = {"proc__meminfo": "MemTotal: 16777216 kB\nMemAvailable:    8388608 kB\n", "proc__self__cgroup": groups}
    for name, content in (contents | files).items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def group(path: str, limit: str, used: int, caches: int = 0, version: int = 2) -> dict[str, str]:
    """A control group's files; both kinds of file caches hold `caches` bytes."""
    names = ("memory_DOT_max", "memory_DOT_current"), ("memory_DOT_limit_in_bytes", "memory_DOT_usage_in_bytes")
    prefix = "total_" if version == 1 else ""
    stat = f"anon 5\n{prefix}inactive_file {caches}\n{prefix}active_file {caches}\nworkingset_refault 7\n"
    found = dict(zip(names[2 - version], (f"{limit}\n", f"{used}\n"), strict=True)) | {"memory_DOT_stat": stat}
    return {f"sys__fs__cgroup{path}__{name}": content for name, content in found.items()}


UNLIMITED = str(2**63 - 4096)  # as version 1 writes it


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        pytest.param("0::/\n", {}, 8 * GIB, id="no group: the machine"),
        pytest.param("0::/a/b\n", group("__a__b", "max", GIB), 8 * GIB, id="no limit"),
        pytest.param("0::/a/b\n", group("__a__b", str(3 * GIB), GIB), 2 * GIB, id="a limit"),
        pytest.param("0::/a/b\n", group("__a", str(3 * GIB), GIB) | group("__a__b", "max", 0), 2 * GIB, id="above"),
        pytest.param("0::/a\n", group("__a", str(3 * GIB), 2 * GIB, GIB // 4), 3 * GIB // 2, id="caches are dropped"),
        pytest.param("0::/a\n", group("__a", str(GIB), 2 * GIB), 0, id="nothing left"),
        pytest.param("0::/\n", group("", str(3 * GIB), GIB), 2 * GIB, id="in a container, version 2"),
        pytest.param("7:cpu:/x\n4:memory:/docker/1\n0::/\n", group("__memory", str(3 * GIB), GIB, 0, 1), 2 * GIB,
                     id="in a container, version 1"),
        pytest.param("4:memory:/a\n", group("__memory__a", str(3 * GIB), 2 * GIB, GIB // 4, 1), 3 * GIB // 2,
                     id="version 1"),
        pytest.param("4:memory:/a\n", group("__memory__a", UNLIMITED, GIB, 0, 1), 8 * GIB, id="version 1, no limit"),
        pytest.param("0::/a\n", group("__a", str(99 * GIB), GIB), 8 * GIB, id="more than the machine"),
    ],
)  # fmt: skip
def test_what_is_free_is_the_least_of_machine_and_control_groups(tmp_path, groups, files, free):
    assert free_host_bytes(machine(tmp_path, groups, **files)) == free


def test_where_nobody_counts_nothing_is_refused(tmp_path):
    assert free_host_bytes(tmp_path) is None
    assert replace(on_cpu(None), free=free_host_bytes(tmp_path)).checked() is not None


def on_cpu(free_gib: float | None) -> Plan:
    return replace(
        plan(free_gib, attention="sdpa", loss="plain"), hardware=Hardware(torch.device("cpu"), torch.float32, False, "")
    )


def test_a_cpu_refuses_what_its_forecast_exceeds_and_advises_where_fragments_would():
    peak = on_cpu(None).peak / GIB
    with pytest.raises(
        ValueError, match="GiB are free on cpu, limits of control groups included; what fits: "
    ) as caught:
        on_cpu(peak * 0.99).checked()
    found = re.findall(r"\((\d+\.\d+) GiB\)", str(caught.value))
    assert found
    assert all(float(forecast) <= peak * 0.99 / HEAP + 0.01 for forecast in found)
    assert "which may not be enough; what fits: " in str(on_cpu(peak * 1.01).checked())
    assert str(on_cpu(peak * 1.6).checked()).endswith("GiB free")
    with pytest.raises(ValueError, match=r"a shorter data\.seq_len or more memory"):
        on_cpu(on_cpu(None).least / GIB + 0.001).checked()
    with pytest.raises(ValueError, match=r"0\.00 GiB are free on cpu"):
        on_cpu(0).checked()


def test_a_model_whose_weights_do_not_fit_is_refused_without_a_forecast(monkeypatch):
    """It would take minutes, and as long for each remedy."""
    monkeypatch.setattr(memory, "step_peaks", None)
    with pytest.raises(
        ValueError,
        match=r"moments of model.num_layers=2 and model.n_embd=768 need 0.59 GiB and 0.50 GiB are free on cpu, limits "
        r"of control groups included; use a smaller model or more memory",
    ):
        on_cpu(0.5).checked()
    sharded = replace(on_cpu(None).hardware, world=World(size=4))
    sharded.world.shards = True
    assert replace(on_cpu(0.1), hardware=sharded).least == on_cpu(0.1).least // 4
    sharded.world.shards = False  # each of the four holds all
    assert replace(on_cpu(0.1), hardware=sharded).least == on_cpu(0.1).least


# ---- in a run


def test_a_run_says_its_forecast_first_and_ends_an_out_of_memory_error_with_advice(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(stepper, "training_step", full)
    chosen = small_run(tmp_path, "train.steps=2", "hardware.compile=false")
    with pytest.raises(ValueError, match=r"cpu is out of memory, with train\.micro_batch=8, a forecast of 0\.00 GiB"):
        training.train(chosen, tmp_path / "run")
    printed = capsys.readouterr().out
    assert printed.index("memory     forecast") < printed.index("hardware ")


# a run that meets a limit on its address space in step 3, so that the allocator itself fails
STARVED = """
import resource, sys
import train as program
from training import stepper

step, steps = stepper.training_step, iter(range(1, 100))

def starved(*arguments, **options):
    if next(steps) == 3:
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + 2**23  # enough for words, not for a tensor of 32 MiB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return step(*arguments, **options)

stepper.training_step = starved
program.main()
"""
# scores of 16 x 2 x 512 x 512 numbers, 32 MiB
LARGE = ("data.seq_len=512", "train.batch_tokens=8192", "model.attention=naive", "optim=adamw", "train.steps=5")


def text_in(folder):
    """Overrides for a run on a small text in `folder`."""
    small_run(folder)  # writes it
    return ["data=text", f"data.files={folder / 'corpus.txt'}", f"data.cache_dir={folder / 'cache'}"]


def check_advice(error, device, run_dir):
    (line,) = error.splitlines()
    assert line.startswith(f"error: {device} is out of memory, with train.micro_batch=16, a forecast of ")
    assert re.search(r"what fits: .*train\.micro_batch=\d+ \(\d\.\d\d GiB\)", line)
    assert line.endswith("[traceback: run/error.log]")
    assert "llocate" in (run_dir / "error.log").read_text()  # for those who ask: what PyTorch said


# a run whose process may have 64 MiB of the GPU, which its forecast does not know
SCARCE = """
import torch
import train as program

torch.cuda.set_per_process_memory_fraction(2**26 / torch.cuda.get_device_properties(0).total_memory)
program.main()
"""


def ended(python, program, arguments, folder):
    """`program` in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.run(
        [python, "-c", program, *arguments], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a limit on the address space that holds")
def test_a_run_that_is_really_starved_ends_with_advice(tmp_path, quick_python):
    arguments = [*text_in(tmp_path), *SMALL, *LARGE, "hydra.run.dir=run", "hardware.num_threads=1"]
    done = ended(quick_python, STARVED, [*arguments, "train.save_every=1"], tmp_path)
    assert done.returncode == 2, done.stderr
    check_advice(done.stderr, "cpu", tmp_path / "run")
    assert open_checkpoint(tmp_path / "run").step == 2  # what was saved before is whole


def test_memory_that_ends_while_the_model_is_built_ends_with_advice(tmp_path, monkeypatch):
    """With the allocator's own error."""
    monkeypatch.setattr("training.run.build_model", lambda *_, **__: torch.empty(2**52))
    with pytest.raises(ValueError, match=r"cpu is out of memory, with train\.micro_batch=8, a forecast of 0\.00 GiB"):
        training.train(small_run(tmp_path, "train.steps=2"), tmp_path / "run")


@pytest.mark.gpu
def test_a_gpu_whose_memory_really_runs_out(tmp_path):
    """The allocator fails in step 1."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    done = ended(
        sys.executable,
        SCARCE,
        [
            *text_in(tmp_path),
            *SMALL,
            *LARGE,
            "hardware.device=auto",
            "hardware.dtype=auto",
            "hardware.compile=false",
            "hydra.run.dir=run",
        ],
        tmp_path,
    )
    assert done.returncode == 2, done.stderr
    check_advice(done.stderr, "cuda", tmp_path / "run")


def test_a_run_chooses_its_micro_batch_and_refuses_what_cannot_fit(tmp_path, monkeypatch):
    chosen = small_run(tmp_path, "train.steps=2", "train.micro_batch=auto", "train.eval_windows=1")
    model = replace(chosen.model, attention="sdpa", loss="plain")
    whole = memory.plan(chosen, model, set_up(chosen.hardware), 257, chosen.sequences_per_step)
    limit = int(replace(whole, micro_batch=2).peak * HEAP) + 1
    monkeypatch.setattr(memory, "free_bytes", lambda device: limit)
    training.train(chosen, tmp_path / "run")
    assert open_checkpoint(tmp_path / "run").meta["settings"]["train"]["micro_batch"] == 2
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match=r"n_embd=32 need 0\.00 GiB and 0\.00 GiB are free on cpu, limits of"):
        training.train(small_run(tmp_path, "train.steps=2"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_processes_share_the_memory_of_their_host_and_the_tokens_of_a_row(monkeypatch):
    chosen = settings(*SMALL, "data.document_mask=true")
    world = World(size=4)
    world.hosts, world.context = ["a", "a", "a", "b"], 2
    free, auto = [30 * GIB], []
    monkeypatch.setattr(memory, "free_bytes", lambda device: free[0])
    monkeypatch.setattr(Plan, "checked", lambda plan, **asked: auto.append(asked["auto"]) or plan)  # without a forecast
    model = GPTConfig(1, 2, n_embd=32, attention="naive", loss="plain")
    made = memory.plan(chosen, model, replace(set_up(chosen.hardware), world=world), 257, 4)
    assert (made.free, made.seq_len, made.micro_batch) == (10 * GIB, 16, 4)
    assert made.optim == chosen.optim.resolved(torch.device("cpu"))[0]
    assert "varlen" in made.features
    on_gpu = replace(set_up(chosen.hardware), device=CUDA, world=world)  # which is each process's own
    assert memory.plan(chosen, model, on_gpu, 257, 4).free == 30 * GIB
    free[0] = None
    assert memory.plan(chosen, model, replace(on_gpu, device=torch.device("cpu")), 257, 4).free is None
    assert auto == [False] * 3  # nobody asked


@pytest.mark.parametrize("value", ["few", "0", "true"])
def test_other_words_for_a_micro_batch_are_refused(value):
    with pytest.raises(ValueError, match=r"train\.micro_batch"):
        settings(f"train.micro_batch={value}")
