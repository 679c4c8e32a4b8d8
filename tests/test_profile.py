"""`profile=true`: the recording changes nothing, and a trace's kernels are grouped as they should be."""

import ast
import gzip
import io
import json
import warnings
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kernels.parts import PART_OF_KERNEL
from tests.runs import small_run
from train import train
from training.profile import (
    GROUPS,
    IDLE,
    OTHER,
    STEPS_NEEDED,
    TOP,
    StepProfiler,
    group_of,
    read_trace,
    refuse_too_few,
    short,
)

ROOT = Path(__file__).resolve().parent.parent

# operator | kernel: names as PyTorch, cuDNN, cuBLAS, Inductor and our kernels give them, cut short
NAMES = {
    "flashgpt::flash_fwd | flash_fwd_kernel": "attention",
    "flashgpt::flash_bwd | _delta_kernel": "attention",
    "flashgpt::flash_fwd | hopper_fwd_kernel": "attention",
    "aten::_scaled_dot_product_flash_attention | void pytorch_flash::flash_fwd_kernel<Flash_fwd": "attention",
    " | cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1": "attention",
    " | fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention": "attention",
    "aten::bmm | nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT": "attention",
    "aten::mm | nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT": "matmul",
    "aten::addmm | void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm": "matmul",
    "aten::_softmax | void (anonymous namespace)::cunn_SoftMaxForward<4": "softmax and normalisation",
    " | triton_red_fused__fused_rms_norm_add_4": "softmax and normalisation",
    "aten::_fused_rms_norm | void vectorized_layer_norm_kernel<float": "softmax and normalisation",
    "flashgpt::cross_entropy_fwd | cross_entropy_fwd_kernel": "cross-entropy",
    "aten::_foreach_norm | void at::native::multi_tensor_apply_kernel<LpNormFunctor": "optimizer",
    " | Memcpy DtoD (Device -> Device)": "memory copies",
    "aten::copy_ | void at::native::elementwise_kernel<direct_copy_kernel_cuda": "memory copies",
    "aten::gelu | void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl": OTHER,
    "flashgpt::rotary_fwd | rotary_kernel": OTHER,
    " | triton_poi_fused_gelu_3": OTHER,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_put_into_its_group(name):
    assert group_of(name) == NAMES[name]


def test_every_kernel_of_ours_has_its_part():
    """By the sources: a kernel that is renamed here would otherwise be counted as something else, in silence."""
    jitted = {"triton.jit", "gluon.jit"}
    kernels = {
        node.name
        for path in (ROOT / "kernels").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        and any(ast.unparse(d).partition("(")[0] in jitted for d in node.decorator_list)
    }  # fmt: skip
    assert kernels == set(PART_OF_KERNEL)
    assert len(kernels) > 8


def event(category, name, start, duration, **arguments):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": 1, "args": arguments}


def write_trace(path, events):
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def test_a_gpu_trace_gives_time_by_group_and_idle(tmp_path):
    """One step of 100 us: 40 of attention, 20 of AdamW's product, 30 of the softmax, overlapping by 10, and a gap."""
    events = [
        event("user_annotation", "ProfilerStep#4", 0, 60),
        event("user_annotation", "optimizer", 50, 10),
        event("cpu_op", "flashgpt::flash_fwd", 1, 8, **{"External id": 7}),
        event("cpu_op", "aten::mm", 51, 8, **{"External id": 8}),
        event("cpu_op", "aten::logsumexp", 20, 9, **{"External id": 9}),
        event("cpu_op", "aten::sub", 21, 3, **{"External id": 10}),
        event("cuda_driver", "cuLaunchKernel", 5, 1, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 55, 1, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 22, 1, correlation=3),
        event("kernel", "flash_fwd_kernel", 10, 40, correlation=1, **{"External id": 7}),
        event("kernel", "elementwise_kernel<sub>", 40, 30, correlation=3, **{"External id": 10}),
        event("kernel", "nvjet_sm90", 90, 20, correlation=2, **{"External id": 8}),
    ]
    path = tmp_path / "trace.json.gz"
    write_trace(path, events)
    found = read_trace(path)
    shares = {row.name: row.share for row in found.groups}
    assert (found.unit, found.steps, found.step_ms) == ("GPU kernels", 1, 0.1)
    assert shares["attention"] == pytest.approx(0.4)
    assert shares["softmax and normalisation"] == pytest.approx(0.3)  # by the operator that called the operator
    assert shares["optimizer"] == pytest.approx(0.2)  # a matrix product, but launched in the optimizer's region
    assert shares["matmul"] == 0
    assert shares[IDLE] == pytest.approx(0.2)
    assert found.kernels[0].name == "flash_fwd_kernel"


def read(tmp_path, *events):
    path = tmp_path / "trace.json.gz"
    write_trace(path, [event("user_annotation", "ProfilerStep#4", 0, 100), *events])
    return read_trace(path)


def test_an_operators_own_time_is_without_those_it_called(tmp_path):
    """Each thread has its own callers; one that begins where another ends was not called by it."""
    outer = event("cpu_op", "aten::linear", 10, 30)
    events = [
        event("user_annotation", "ProfilerStep#3", -100, 100),
        event("cpu_op", "aten::mm", 10, 20),  # which began with the one that called it
        event("cpu_op", "aten::view", 12, 4),
        outer,
        event("cpu_op", "aten::gelu", 40, 10),
        event("cpu_op", "aten::sub", 15, 15) | {"tid": 2},
        event("user_annotation", "optimizer", 60, 10),
        event("cpu_op", "aten::sub", 60, 5),
        event("cpu_op", "aten::gelu", 70, 3),
        event("gpu_user_annotation", "optimizer", 0, 100),
        event("python_function", "optimizer", 0, 100),
        {"ph": "i", "cat": "cpu_op", "name": "aten::mm", "ts": 80, "tid": 1},
        {"ph": "s", "cat": "user_annotation", "name": "ProfilerStep#5", "ts": 80},
        event("python_function", "ProfilerStep#6", 0, 10_000),
    ]
    found = read(tmp_path, *events)
    ms = {row.name: row.ms for row in found.groups}
    assert (found.unit, found.steps, found.step_ms) == ("CPU operators", 2, 0.1)
    # 10 of linear alone, 16 of mm and 4 of the view that it called
    assert ms["matmul"] == pytest.approx(30e-3 / 2)
    assert ms[OTHER] == pytest.approx((10 + 15 + 3) * 1e-3 / 2)
    assert ms["optimizer"] == pytest.approx(5e-3 / 2)
    assert ms[IDLE] == pytest.approx((200 - 30 - 28 - 5) * 1e-3 / 2)
    assert [(row.name, row.group, row.calls) for row in found.kernels] == [
        ("aten::mm", "matmul", 0.5),
        ("aten::sub", OTHER, 0.5),
        ("aten::gelu", OTHER, 1),
        ("aten::linear", "matmul", 0.5),
        ("aten::sub", "optimizer", 0.5),
        ("aten::view", "matmul", 0.5),
    ]


def test_an_operator_that_outlasts_its_caller_gives_it_no_negative_time(tmp_path):
    """Clocks of a trace are rounded."""
    found = read(tmp_path, event("cpu_op", "aten::linear", 10, 5), event("cpu_op", "aten::gelu", 10.5, 6))
    assert {row.name: row.ms for row in found.kernels} == {"aten::gelu": 6e-3, "aten::linear": 0}


def test_copies_and_fills_are_a_gpus_work_too(tmp_path):
    """And so is what nothing in the trace has launched; a long kernel may end after one that began later."""
    found = read(
        tmp_path,
        event("user_annotation", "optimizer", 0, 100),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 10, 10),
        event("gpu_memset", "Memset (Device)", 40, 2),
        event("kernel", "nvjet_sm90", 30, 30),
        event("kernel", "elementwise_kernel<gelu>", 45, 5),
        event("kernel", "rotary_kernel", 70, 4),
        event("kernel", "elementwise_kernel<gelu>", 50, 5),
        event("cuda_driver", "cuLaunchKernelEx", 20, 1, correlation=1),
        event("kernel", "nvjet_of_muon", 76, 6, correlation=1),
    )
    shares = {row.name: row.share * 72 for row in found.groups}
    assert found.step_ms == pytest.approx(72e-3)
    expected = {"memory copies": 12, "matmul": 30, OTHER: 14, "optimizer": 6, IDLE: 72 - 10 - 30 - 4 - 6}
    assert shares == pytest.approx(dict.fromkeys(GROUPS, 0) | expected)


def test_the_tables_have_the_longest_first_and_name_it_for_each_group(tmp_path):
    events = [event("kernel", f"nvjet_{number}", 100 * number, number) for number in range(1, TOP + 3)]
    found = read(tmp_path, event("kernel", "copy_kernel", 0, 50), *events)
    groups, kernels = found.tables()
    columns = {column.header: list(column.cells) for column in groups.columns}
    row = columns["group"].index("matmul")
    window = found.step_ms
    assert columns["ms"][row] == f"{sum(range(1, TOP + 3)) / 1e3:,.2f}"
    assert columns["share"][row] == f"{sum(range(1, TOP + 3)) / 10 / window:.1f}%"
    assert (columns["calls"][row], columns["longest"][row]) == (str(TOP + 2), f"nvjet_{TOP + 2}")
    assert columns["longest"][columns["group"].index("memory copies")] == "copy_kernel"
    assert columns["longest"][columns["group"].index("attention")] == ""
    columns = {column.header: list(column.cells) for column in kernels.columns}
    assert columns["name"] == ["copy_kernel", *(f"nvjet_{number}" for number in range(TOP + 2, 3, -1))]
    assert (columns["ms"][0], columns["share"][0]) == ("0.05", f"{5 / window:.1f}%")
    assert (columns["calls"][0], columns["group"][0]) == ("1", "memory copies")
    assert f"{window:,.1f} ms" in groups.title


def test_a_trace_that_cannot_be_read_says_why(tmp_path):
    path = tmp_path / "trace.json.gz"
    write_trace(path, [])
    with pytest.raises(ValueError, match="holds no recorded step"):
        read_trace(path)
    for launch in ("cuda_runtime", "cudaLaunchKernel"), ("cuda_driver", "cuLaunchKernel"):
        with pytest.raises(ValueError, match="launches and no GPU kernel"):
            read(tmp_path, event(*launch, 1, 1, correlation=1))


def test_long_kernel_names_are_read_at_a_glance():
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIterator&)>(int)"
    assert short(name) == "GeluCUDAKernelImpl"
    assert short("void (anonymous namespace)::cunn_SoftMaxForward<4, float>(float*)") == "cunn_SoftMaxForward"
    assert (
        short("void at::native::elementwise_kernel<4, at::native::direct_copy_kernel_cuda>")
        == "direct_copy_kernel_cuda"
    )
    assert short("void at::native::vectorized_elementwise_kernel<4, AddFunctor<float> >(int)") == "AddFunctor"
    assert short("void at::native::reduce_kernel<512, MeanFunctor>(int)") == "reduce_kernel"
    assert short("void at::native::elementwise_kernel<4, at::native::lambda>(int)") == "elementwise_kernel"
    assert short("x" * 56) == "x" * 56
    assert short("x" * 57) == "x" * 55 + "…"


class Machine:
    """What the profiler asks of a run's hardware; counts how often it was waited for."""

    device, description, waits = torch.device("cpu"), "a CPU", 0

    def synchronize(self):
        self.waits += 1


def recorded(folder, steps):
    """(what each step said, steps before which the device was waited for, what was printed)"""
    machine, said, waited = Machine(), [], []
    console = Console(file=io.StringIO())
    with StepProfiler(folder, machine, console) as profiler:
        for number in range(1, steps + 1):
            before = machine.waits
            torch.ones(2) @ torch.ones(2)
            said.append(profiler.step())
            waited += [number] * (machine.waits - before)
    assert not torch.autograd._profiler_enabled(), "it would go on recording the run"
    return said, waited, console.file.getvalue()


def test_three_steps_are_recorded_once(tmp_path):
    """And a device is waited for before them, whose earlier kernels would be counted."""
    with warnings.catch_warnings(record=True) as warned:
        said, waited, printed = recorded(tmp_path / "a" / "profile", 16)
    assert warned == []
    assert printed.count("the whole trace: ") == 1
    assert [number for number, last in enumerate(said, 1) if last] == [STEPS_NEEDED]
    assert waited == [STEPS_NEEDED - 3]
    report = json.loads((tmp_path / "a" / "profile" / "profile.json").read_text())
    assert (report["steps"], report["hardware"]) == (3, "a CPU")
    assert report["provenance"]["cpu_threads"] == torch.get_num_threads()
    first = report["step_ms"]
    recorded(tmp_path / "a" / "profile", STEPS_NEEDED)  # again into the same folder, as after a resume
    assert json.loads((tmp_path / "a" / "profile" / "profile.json").read_text())["step_ms"] != first


def test_a_run_that_ends_early_ends_its_recording(tmp_path):
    assert recorded(tmp_path / "profile", STEPS_NEEDED - 1)[0] == [False] * (STEPS_NEEDED - 1)


def test_a_driver_that_forbids_profiling_ends_no_run(tmp_path, monkeypatch):
    def nothing_counted(path):
        raise ValueError(f"{path} holds launches and no GPU kernel")

    monkeypatch.setattr("training.profile.read_trace", nothing_counted)
    said, _, printed = recorded(tmp_path, STEPS_NEEDED)
    assert said[-1], "and nothing of what follows is recorded"
    assert f"not profiled: {tmp_path}: {tmp_path}/trace.json.gz holds launches and no GPU kernel; the run" in printed


def test_a_profiled_run_has_a_trace_a_table_and_the_same_numbers(tmp_path, capsys):
    steps = ("train.steps=8", "train.log_every=1")
    plain = train(small_run(tmp_path, *steps), tmp_path / "plain")
    capsys.readouterr()
    profiled = train(small_run(tmp_path, *steps, "profile=true"), tmp_path / "profiled")
    printed = capsys.readouterr().out
    assert profiled["val_loss"] == plain["val_loss"]
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("plain", "profiled")
    ]
    assert losses[0] == losses[1]
    report = json.loads((tmp_path / "profiled" / "profile" / "profile.json").read_text())
    groups = {row["name"]: row for row in report["groups"]}
    assert set(groups) == {*GROUPS, OTHER, IDLE}
    assert all(name in printed for name in groups)
    assert f"the whole trace: {tmp_path}/profiled/profile/trace.json.gz (open it" in printed, "on one line"
    assert report["steps"] == 3
    assert groups["attention"]["calls"] >= 2 * 2  # two layers, forward and backward
    assert groups["matmul"]["ms"] > 0
    assert groups["optimizer"]["ms"] > 0
    assert sum(row["share"] for row in groups.values()) == pytest.approx(1.0, abs=0.02)
    assert not (tmp_path / "plain" / "profile").exists()
    trace = json.loads(gzip.decompress((tmp_path / "profiled" / "profile" / "trace.json.gz").read_bytes()))
    regions = {e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"}
    assert {"forward", "backward", "optimizer"} <= regions


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "profile").write_text("somebody's own")
    summary = train(small_run(tmp_path, "train.steps=8", "profile=true"), run)
    assert (summary["exit_code"], summary["steps"]) == (0, 8)
    assert f"not profiled: {run}/profile: [Errno 17] File exists" in capsys.readouterr().out


def test_too_few_steps_to_profile_are_refused(tmp_path):
    """Also of a run that went further than the checkpoint it is to go on from: nothing of it is lost."""
    run = tmp_path / "run"
    train(small_run(tmp_path, "train.steps=6", "train.log_every=1", "train.save_every=3"), run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    refuse_too_few(STEPS_NEEDED)
    for overrides, left in (((), 6), ((f"resume={run / 'checkpoints' / 'step_000003'}",), 3)):
        says = (
            rf"profile=true needs 7 steps \(4 to settle, 3 to record\) and there are {left}; raise train.steps, or use "
            "profile=false"
        )
        with pytest.raises(ValueError, match=says):
            train(small_run(tmp_path, "train.steps=6", "profile=true", *overrides), run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    summary = train(small_run(tmp_path, "train.steps=6", "profile=true", f"resume={run}"), run)  # there is no step left
    assert (summary["exit_code"], summary["steps"]) == (0, 6)
