"""`profile=true`: the recording changes nothing, and a trace's kernels are grouped as they should be."""

import ast
import gzip
import json
from pathlib import Path

import pytest

from kernels.parts import PART_OF_KERNEL
from tests.runs import small_run
from train import train
from training.profile import GROUPS, IDLE, OTHER, STEPS_NEEDED, group_of, read_trace, short

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


def test_a_trace_that_cannot_be_read_says_why(tmp_path):
    path = tmp_path / "trace.json.gz"
    write_trace(path, [])
    with pytest.raises(ValueError, match="holds no recorded step"):
        read_trace(path)
    launch = event("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=1)
    write_trace(path, [event("user_annotation", "ProfilerStep#4", 0, 9), launch])
    with pytest.raises(ValueError, match="launches and no GPU kernel"):
        read_trace(path)


def test_long_kernel_names_are_read_at_a_glance():
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIterator&)>(int)"
    assert short(name) == "GeluCUDAKernelImpl"
    assert short("void (anonymous namespace)::cunn_SoftMaxForward<4, float>(float*)") == "cunn_SoftMaxForward"
    assert len(short("x" * 100)) == 56


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
    for overrides, left in (((), 6), ((f"resume={run / 'checkpoints' / 'step_000003'}",), 3)):
        says = rf"profile=true needs {STEPS_NEEDED} steps .* there are {left}; raise train.steps"
        with pytest.raises(ValueError, match=says):
            train(small_run(tmp_path, "train.steps=6", "profile=true", *overrides), run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
