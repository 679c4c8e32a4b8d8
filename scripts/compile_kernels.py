"""Compile the attention kernels for a GPU that need not be here, and print what the hardware would say.

    python -m scripts.compile_kernels --arch 90 --head-dim 64 128
    python -m scripts.compile_kernels --kernel fwd --tile 128,64,8,3,tma --tile 128,128,8,2,tma
    python -m scripts.compile_kernels --arch 80 --every-entry

Without --tile it takes the tiles of portable/tuning.py; with --every-entry, all of them. A row holds
registers per thread, spilled bytes, shared memory in KB, and counts of SASS instructions: HGMMA and HMMA (tensor cores
with and without wgmma) and DEPBAR (waits for wgmma). Noted are spills beyond 32 bytes, waits after every wgmma (the
compiler gave up overlapping them) and a missing wgmma; a tile that spills may still be the fastest. The exit code is 1
where a kernel needs more shared memory than a block may use. Takes seconds a kernel; needs no GPU. The last line is
one JSON object.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from kernels.device import SHARED_LIMIT_BYTES

ARCHITECTURES = [arch for arch in SHARED_LIMIT_BYTES if arch >= 80]
SPILL_LIMIT_BYTES = 32  # a few bytes outside the loop cost nothing that can be measured
DOES_NOT_FIT = "TOO MUCH SHARED MEMORY"
DTYPES = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}


# What --options switches on: the fields of kernels.launch.Switches that are not None, with their types.
OPTIONS = {
    "softcap": {"softcap": "fp32"},
    "alibi_slopes": {"alibi_slopes": "*fp32"},
    "sinks": {"sinks": "*fp32"},
    "dropout": {"dropout_seed": "*i64", "dropout_p": "fp32"},
    "varlen": {"cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32"},
    "window": {},  # a constant of the kernel, LOCAL
}


def _signature(kernel, constants: dict, dtype: str, switched_on: list[str]):
    """Types, constants and alignment of a launch on dense (B, N, H, D) tensors."""
    from kernels.launch import Switches

    types = {field: kind for option in switched_on for field, kind in OPTIONS[option].items()}
    switches = Switches(*(types.get(field, "constexpr") for field in Switches._fields))
    pointer = DTYPES[dtype]
    element = pointer[1:]
    aligned = [["tt.divisibility", 16]]
    signature, constexprs, attributes = {}, {}, {}
    rows = {
        "q": constants["BLOCK_Q"],
        "do": constants["BLOCK_Q"],
        "k": constants.get("BLOCK_K"),
        "v": constants.get("BLOCK_K"),
    }
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
        elif name == "group_size":  # 1: no grouped queries
            signature[name], constexprs[(i,)] = "constexpr", 1
        elif name == "switches":
            signature[name] = switches
            for j, value in enumerate(switches):
                if value == "constexpr":
                    constexprs[(i, j)] = None
        elif name in rows and constants["TMA"]:
            width = constants["BLOCK_D" if name in "qk" else "BLOCK_DV"]
            leading = "1, 1, 1" if "varlen" in switched_on else "1, 1"
            signature[name] = f"tensordesc<{element}[{leading}, {rows[name]}, {width}]>"
        elif name in rows:
            signature[name], attributes[(i,)] = pointer, aligned
        elif name.endswith("_strides"):
            signature[name] = ("i32", "i32", "i32")
            for j in range(3):
                attributes[(i, j)] = aligned
        elif name in ("lse_ptr", "dlse_ptr", "lse_log2_ptr", "delta_ptr"):
            signature[name], attributes[(i,)] = "*fp32", aligned
        elif name.endswith("_ptr"):
            signature[name], attributes[(i,)] = pointer, aligned
        elif name in ("scale", "scale_log2"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
    return signature, constexprs, attributes


def compile_one(job: dict) -> dict:
    """Compile one configuration and read its resources. Runs in a worker process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.portable.dkdv import flash_dkdv_kernel
    from kernels.portable.dq import flash_dq_kernel
    from kernels.portable.forward import flash_fwd_kernel
    from kernels.portable.tuning import Tile

    kernel = {"fwd": flash_fwd_kernel, "dkdv": flash_dkdv_kernel, "dq": flash_dq_kernel}[job["kernel"]]
    tile = Tile(*job["tile"])
    constants = {
        "HEAD_DIM": job["head_dim"],
        "HEAD_DIM_V": job["head_dim"],
        "BLOCK_D": triton.next_power_of_2(job["head_dim"]),
        "BLOCK_DV": triton.next_power_of_2(job["head_dim"]),
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "CAUSAL": job["causal"] and "window" not in job["options"],
        "LOCAL": "window" in job["options"],
        "EVEN_Q": job["even"],
        "EVEN_K": job["even"],
        "PRECISION": "ieee" if job["dtype"] == "fp32" else "tf32",
        "TMA": tile.tma,
    }
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    source = ASTSource(kernel, *_signature(kernel, constants, job["dtype"], job["options"]))
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", job["arch"], 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin)
        sass = _run(triton.knobs.nvidia.nvdisasm.path, "-c", cubin)
    resources = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    row = {
        **job,
        "registers": int(resources["REG"]),
        "spill_bytes": max(int(resources["STACK"]), int(resources["LOCAL"])),
        "shared_bytes": compiled.metadata.shared,
        "hgmma": len(re.findall(r"\bHGMMA\.", sass)),
        "hmma": len(re.findall(r"\bHMMA\.", sass)),
        "depbar": len(re.findall(r"WARPGROUP\.DEPBAR", sass)),
        "lines": sass.count("\n"),
    }
    row["notes"] = [
        reason
        for reason, bad in (
            ("spills", row["spill_bytes"] > SPILL_LIMIT_BYTES),
            ("wgmma serialized", row["hgmma"] > 0 and row["depbar"] * 2 > row["hgmma"]),
            ("no wgmma", job["arch"] == 90 and job["dtype"] != "fp32" and row["hmma"] > 0),
        )
        if bad
    ]
    if row["shared_bytes"] > SHARED_LIMIT_BYTES[job["arch"]]:
        row["notes"].insert(0, DOES_NOT_FIT)
    return row


def _run(program: str, *arguments) -> str:
    return subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def _parse_tile(text: str) -> tuple:
    block_q, block_k, warps, stages, *tma = text.split(",")
    if tma not in ([], ["tma"]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected BLOCK_Q,BLOCK_K,WARPS,STAGES[,tma]")
    return int(block_q), int(block_k), int(warps), int(stages), bool(tma)


def jobs_for(arguments) -> list[dict]:
    """The configurations to compile: those given with --tile, else the table's."""
    from dataclasses import astuple

    from kernels.portable.tuning import table_tile

    jobs = []
    masks = {"both": (True, False), "causal": (True,), "full": (False,)}[arguments.mask]
    for kernel, dtype, head_dim, causal in product(arguments.kernel, arguments.dtype, arguments.head_dim, masks):
        element_bytes = 4 if dtype == "fp32" else 2
        arch = (arguments.arch // 10, arguments.arch % 10)
        tiles = arguments.tile or [
            astuple(table_tile(kernel, arch, element_bytes, head_dim, _variant(arguments.options, causal)))
        ]
        for tile in tiles:
            jobs.append(
                {"kernel": kernel, "arch": arguments.arch, "dtype": dtype, "head_dim": head_dim, "causal": causal,
                 "even": not (arguments.ragged or "varlen" in arguments.options), "tile": tile,
                 "options": arguments.options}
            )  # fmt: skip
    return jobs


def every_entry(arch: int) -> list[dict]:
    """A job for each line of the tuning table: the options of its variant, causal unless it is the full one."""
    from dataclasses import astuple

    from kernels.portable.tuning import table_for

    jobs = []
    for dtype, element_bytes in (("bf16", 2), ("fp32", 4)):
        for (kernel, head_dim, variant), tile in table_for((arch // 10, arch % 10), element_bytes).items():
            options = [variant] if variant in OPTIONS else []
            jobs.append(
                {"kernel": kernel, "arch": arch, "dtype": dtype, "head_dim": head_dim, "causal": variant != "full",
                 "even": False, "tile": astuple(tile), "options": options}
            )  # fmt: skip
    return jobs


def _variant(switched_on: list[str], causal: bool) -> str:
    """The tuning table's variant, as `kernels.portable.tuning.variant_of` finds it."""
    for name in ("dropout", "softcap", "varlen", "window"):
        if name in switched_on:
            return name
    return "causal" if causal else "full"


def _line(row: dict) -> str:
    block_q, block_k, warps, stages, tma = row["tile"]
    tile = f"{block_q}x{block_k} w{warps} s{stages}" + (" tma" if tma else "")
    mask = "causal" if row["causal"] else "full"
    resources = f"{row['registers']:4} {row['spill_bytes']:5} {row['shared_bytes'] // 1024:4}"
    counts = f"{row['hgmma']:5} {row['hmma']:5} {row['depbar']:6} {row['lines']:6}"
    verdict = ", ".join(row["notes"]) or "ok"
    name = f"{row['kernel']:6} {row['head_dim']:4} {row['dtype']:5} {mask:6} {tile:24}"
    return f"{name} {resources} {counts}  {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, choices=ARCHITECTURES, help="compute capability x 10")
    parser.add_argument("--kernel", nargs="+", default=["fwd", "dkdv", "dq"], choices=["fwd", "dkdv", "dq"])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", nargs="+", default=["bf16"], choices=sorted(DTYPES))
    parser.add_argument("--mask", default="both", choices=["both", "causal", "full"])
    parser.add_argument("--options", nargs="+", default=[], choices=sorted(OPTIONS), help="switched on, together")
    parser.add_argument("--ragged", action="store_true", help="lengths that are no multiple of the tile")
    parser.add_argument(
        "--tile", type=_parse_tile, action="append", help="BLOCK_Q,BLOCK_K,WARPS,STAGES[,tma]; repeatable"
    )
    parser.add_argument("--every-entry", action="store_true", help="the whole tuning table of the architecture")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()

    header = f"{'kernel':6} {'D':>4} {'dtype':5} {'mask':6} {'tile':24} {'regs':>4} {'spill':>5} {'KB':>4} "
    print(header + f"{'HGMMA':>5} {'HMMA':>5} {'DEPBAR':>6} {'lines':>6}  verdict")
    rows = []
    with ProcessPoolExecutor(arguments.workers) as pool:
        for row in pool.map(compile_one, every_entry(arguments.arch) if arguments.every_entry else jobs_for(arguments)):
            rows.append(row)
            print(_line(row), flush=True)
    failed = sum(DOES_NOT_FIT in row["notes"] for row in rows)
    print(json.dumps({"arch": arguments.arch, "compiled": len(rows), "failed": failed, "rows": rows}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
