"""Compile a Hopper kernel for sm_90a without a GPU and print what came out, as one JSON line.

Constants may name an option's parameter too, as null: the option is off and its code compiled away.

Run as `python -m tests.hopper_compile fwd '{"HEAD_DIM": 128, ...}'` in a process without TRITON_INTERPRET: a
process that interprets kernels cannot compile them.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

_OPCODES = (
    "HGMMA", "QGMMA", "HMMA", "PRMT", "R2UR", "WARPGROUP.DEPBAR", "UTMALDG", "UTMASTG", "REDG.E.ADD.F32x4",
    "LDL", "STL",
)  # fmt: skip


def _descriptor(dtype: str, shape: list[int]) -> str:
    gluon_dtype = {"bf16": gl.bfloat16, "fp32": gl.float32, "fp8e4nv": gl.float8e4nv}[dtype]
    return f"tensordesc<{dtype}{shape},{gl.NVMMASharedLayout.get_default_for(shape, gluon_dtype)!r}>"


def _forward(constants: dict):
    from kernels.hopper.forward import hopper_fwd_kernel

    head_dim, block_k = constants["HEAD_DIM"], constants["BLOCK_K"]
    outer = [1, 1] if constants.get("cu_seqlens_q", 0) is None else [1, 1, 1]
    types = dict.fromkeys(("q_desc", "o_desc"), _descriptor("bf16", [*outer, 64, head_dim]))
    types |= dict.fromkeys(("k_desc", "v_desc"), _descriptor("bf16", [*outer, block_k, head_dim]))
    types |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "*i32")
    return hopper_fwd_kernel, types | {"lse_ptr": "*fp32", "scale_log2": "fp32", "softcap": "fp32"}, 4


def _backward(constants: dict):
    from kernels.hopper.backward_kernel import hopper_bwd_kernel

    head_dim = constants["HEAD_DIM"]
    types = dict.fromkeys(("q_desc", "do_desc"), _descriptor("bf16", [1, 1, 64, head_dim]))
    types |= dict.fromkeys(("dk_desc", "dv_desc"), _descriptor("bf16", [1, 1, head_dim, head_dim]))
    types |= dict.fromkeys(("k_desc", "v_desc"), _descriptor("bf16", [1, 1, 128, head_dim]))
    types |= dict.fromkeys(("lse_desc", "delta_desc"), _descriptor("fp32", [1, 64]))
    types |= {"dq_ptr": "*fp32", "turns_ptr": "*i32", "scale": "fp32", "scale_log2": "fp32"}
    return hopper_bwd_kernel, types, 4


def _fp8(constants: dict):
    from kernels.hopper.fp8_kernel import hopper_fp8_kernel

    head_dim, block_k = constants["HEAD_DIM"], constants["BLOCK_K"]
    types = dict.fromkeys(("lse_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr"), "*fp32")
    for name, dtype, tile in (
        ("q_desc", "fp8e4nv", [64, head_dim]),
        ("k_desc", "fp8e4nv", [block_k, head_dim]),
        ("v_desc", "fp8e4nv", [head_dim, block_k]),
        ("o_desc", "bf16", [64, head_dim]),
    ):
        types[name] = _descriptor(dtype, [1, 1, *tile])
    return hopper_fp8_kernel, types | {"scale_log2": "fp32"}, 4


def compile_report(which: str, constants: dict) -> dict:
    """Stack bytes (spills), shared bytes, opcode counts and ptxas's complaints of one configuration."""
    kernel, types, num_warps = {"fwd": _forward, "bwd": _backward, "fp8": _fp8}[which](constants)
    signature, values, attrs = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        else:
            signature[name] = types.get(name, "i32")
            if signature[name].startswith("*"):
                attrs[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, values, attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    tools = triton.knobs.nvidia
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        ptx.write_text(compiled.asm["ptx"])

        def output(*command: str) -> str:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            return done.stdout + done.stderr

        usage = output(tools.cuobjdump.path, "--dump-resource-usage", str(cubin))
        sass = output(tools.nvdisasm.path, "-c", str(cubin))
        opinion = output(tools.ptxas.path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", f"{folder}/out.cubin")
    return {
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared": compiled.metadata.shared,
        "complaints": sorted(set(re.findall(r"C75\d\d", opinion))),
        **{opcode: len(re.findall(rf"\b{re.escape(opcode)}", sass)) for opcode in _OPCODES},
    }


if __name__ == "__main__":
    print(json.dumps(compile_report(sys.argv[1], json.loads(sys.argv[2]))))
