"""Compile attention and the products of generation for a GPU that need not be here; print what each kernel uses.

    python -m scripts.bench.compile_kernels                                all plans of compute capability 9.0
    python -m scripts.bench.compile_kernels arch=80 only='fwd.*causal'     those whose names match
    python -m scripts.bench.compile_kernels only=hopper > before.txt       ... and, when the kernels have changed,
    python -m scripts.bench.compile_kernels only=hopper against=before.txt

A row holds registers for each thread, bytes spilled, shared memory in KB, and counts of SASS instructions: GMMA and
HMMA (tensor cores with and without wgmma), DEPBAR (waits for wgmma), all. `sass` is the beginning of the SHA-256 of the
instructions, without addresses, labels and names: two builds with the same hash run the same instructions. One PTX can
have several hashes: ptxas for 10.0 is not deterministic, and elsewhere line numbers can change a register's name.
DIFFERS therefore means that the PTX without line numbers differs too. The notes name spills beyond 32 bytes, wgmma that
ptxas serialized, a missing wgmma, and a tile that is copied over while wgmma may still read it: its results are wrong
now and then. A tile that spills may still be the fastest. The exit code is 1 where a kernel needs more shared memory
than a block may use. A kernel takes seconds and needs no GPU. The last line is one JSON object.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import triton

from conf.program import program
from kernels.device import SHARED_LIMIT_BYTES, interpreting
from scripts.bench.kernel_plans import ARCHS, compiled, plans
from scripts.bench.report import refuse_out_of_range, refuse_unknown

SPILL_LIMIT_BYTES = 32  # a few bytes outside the loop cost nothing that can be measured
DOES_NOT_FIT = "TOO MUCH SHARED MEMORY"
OPCODES = ("HGMMA", "QGMMA", "HMMA", "WARPGROUP.DEPBAR", "UTMALDG", "UTMASTG", "REDG.E.ADD.F32x4", "IMAD.HI")
FAILED = 1


@dataclass
class CompileSettings:
    arch: int = 90  # compute capability x 10: 80, 86, 89, 90, 100 or 120
    only: str = ""  # a regular expression: the plans whose names match; empty: all
    against: str | None = None  # the output of an earlier run: says which plans' instructions differ
    workers: int = 2  # processes

    def __post_init__(self) -> None:
        refuse_unknown("", self, arch=ARCHS)
        refuse_out_of_range("", self, "workers")
        try:
            re.compile(self.only)
        except re.error as error:
            raise ValueError(
                f"only={self.only} is no regular expression ({error}); put \\ before a sign that stands for itself"
            ) from error


@program("tool", CompileSettings)
def main(settings: CompileSettings, run_dir: Path) -> None:
    if interpreting():
        raise ValueError("TRITON_INTERPRET is set: a process that interprets kernels cannot compile them; unset it")
    known = plans(settings.arch)
    chosen = [name for name in known if re.search(settings.only, name)]
    if not chosen:
        raise ValueError(
            f"only={settings.only!r} matches none of the {len(known)} plans of arch={settings.arch}; "
            f"give a part of a name as in {next(iter(known))!r}"
        )
    before = rows_of(settings.against) if settings.against else {}
    print(f"{'plan':76} regs spill  KB GMMA HMMA DEPBAR   all  sass")
    rows = []
    with ProcessPoolExecutor(settings.workers) as pool:
        for row in pool.map(partial(compile_plan, settings.arch), chosen):
            if settings.against and row["plan"] not in before:
                row["notes"].append("new")
            elif settings.against and not same_program(row, before[row["plan"]]):
                row["notes"].append("DIFFERS")
            rows.append(row)
            print(line(row), flush=True)
    report = {"arch": settings.arch, "compiled": len(rows)}
    report["failed"] = sum(DOES_NOT_FIT in row["notes"] for row in rows)
    if settings.against:
        report["differ"] = [row["plan"] for row in rows if "DIFFERS" in row["notes"]]
    print(json.dumps(report | {"rows": rows}))
    if report["failed"]:
        sys.exit(FAILED)


def compile_plan(arch: int, plan: str) -> dict:
    """Compile one plan and read its resources and its instructions. Runs in a worker process."""
    kernel = compiled(plans(arch)[plan], arch)
    tools = triton.knobs.nvidia
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(kernel.asm["cubin"])
        usage = output(tools.cuobjdump.path, "--dump-resource-usage", cubin)
        sass = output(tools.nvdisasm.path, "-c", cubin)
        complaints = []
        if plan.startswith("hopper"):  # only ptxas says why it serialized wgmma, and Triton does not pass it on
            ptx.write_text(kernel.asm["ptx"])
            opinion = output(tools.ptxas.path, "-v", "--gpu-name=sm_90a", ptx, "-o", Path(folder, "again.cubin"))
            complaints = sorted(set(re.findall(r"C75\d\d", opinion)))
    resources = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    code = instructions(sass, kernel.metadata.name)
    row = {
        "plan": plan,
        "registers": int(resources["REG"]),
        "spill_bytes": max(int(resources["STACK"]), int(resources["LOCAL"])),
        "shared_bytes": kernel.metadata.shared,
        **{opcode: sum(bool(re.search(rf"\b{re.escape(opcode)}", line)) for line in code) for opcode in OPCODES},
        "instructions": len(code),
        "sass": hashlib.sha256("\n".join(code).encode()).hexdigest(),
        "ptx": hashlib.sha256(without_lines(kernel.asm["ptx"], kernel.metadata.name).encode()).hexdigest(),
        "complaints": complaints,
    }
    wgmma = row["HGMMA"] + row["QGMMA"]
    verdicts = {
        DOES_NOT_FIT: row["shared_bytes"] > SHARED_LIMIT_BYTES[arch],
        "spills": row["spill_bytes"] > SPILL_LIMIT_BYTES,
        # the Hopper kernels place their buffers themselves
        "copied over": not plan.startswith("hopper") and copied_over(kernel.asm["ttgir"]),
        "wgmma serialized": bool(complaints) or row["WARPGROUP.DEPBAR"] * 2 > wgmma > 0,
        "no wgmma": arch == 90 and "fp32" not in plan and not plan.startswith(("decode", "skinny")) and row["HMMA"] > 0,
    }
    return row | {"notes": [note for note, true in verdicts.items() if true]}


def copied_over(ttgir: str) -> bool:
    """Whether Triton's loop copies into shared memory that an asynchronous wgmma may still read.

    With `pendings` a step's products are in flight when the copies for a later step are issued. The copies need a slot
    that is not filled before the loop, where slot indices are constants. Triton 3.6 makes no such slot for a tile that
    is loaded into registers too.
    """
    if not re.search(r"warp_group_dot_wait.*\bpendings = [1-9]", ttgir):
        return False
    alias = dict(re.findall(r"(%\w+) = ttg\.memdesc_(?:index|trans) (%\w+)", ttgir))
    operands = re.findall(r"ttng\.warp_group_dot (%\w+), (%\w+)", ttgir)
    # an operand is a slot of a buffer, or its transpose
    read = {alias.get(of := alias.get(x, x), of) for pair in operands for x in pair}
    filled: dict[str, set[str]] = {}
    for buffer, slot in re.findall(r"ttg\.memdesc_index (%\w+)\[(%c\d+_i32)\]", ttgir):
        filled.setdefault(buffer, set()).add(slot)
    slots = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x.*mutable", ttgir)
    return any(buffer in read and len(filled.get(buffer, ())) == int(number) for buffer, number in slots)


def instructions(sass: str, name: str) -> list[str]:
    """The instructions that nvdisasm printed, without addresses; labels are numbered as they are met."""
    labels: dict[str, str] = {}
    number = lambda match: labels.setdefault(match[0], f"label {len(labels)}")  # noqa: E731
    found = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", sass, re.MULTILINE)
    return [re.sub(r"\.L_\w+", number, line.replace(name, "kernel")) for line in found]


def without_lines(ptx: str, name: str) -> str:
    """PTX without the parts that only map instructions to source lines."""
    code = ptx.replace(name, "kernel").split(".section\t.debug")[0]
    return re.sub(r"(?m)^\s*(\.loc|\.file|\$L__tmp\d+:|\$L__func_).*\n|\s*//.*$", "", code)


def output(*command: str | Path) -> str:
    """What a command prints on stdout and stderr."""
    done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


def same_program(row: dict, before: dict) -> bool:
    return row["sass"] == before["sass"] or row["ptx"] == before["ptx"]


def rows_of(path: str) -> dict[str, dict]:
    """Plan -> its row, from the last line of an earlier run's output."""
    try:
        rows = json.loads(Path(path).read_text().splitlines()[-1])["rows"]
        return {row["plan"]: row for row in rows}
    except (LookupError, TypeError, ValueError) as error:  # no JSON, another program's, or not even text
        raise ValueError(f"against={path} is no output of scripts.bench.compile_kernels") from error


def line(row: dict) -> str:
    resources = f"{row['registers']:4} {row['spill_bytes']:5} {row['shared_bytes'] // 1024:3}"
    counts = f"{row['HGMMA'] + row['QGMMA']:4} {row['HMMA']:4} {row['WARPGROUP.DEPBAR']:6} {row['instructions']:5}"
    return f"{row['plan']:76} {resources} {counts}  {row['sass'][:8]}  {', '.join(row['notes']) or 'ok'}"


if __name__ == "__main__":
    main()
