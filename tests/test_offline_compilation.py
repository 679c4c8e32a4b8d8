"""What the offline compile tool says; every plan of every GPU compiles and fits (`pytest -m slow`)."""

import json

import pytest

from scripts.bench.compile_kernels import CompileSettings, instructions, same_program, without_lines
from tests.compiled import compiled


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_every_plan_compiles_and_fits(arch):
    summary = compiled(f"arch={arch}", "workers=2")
    assert summary["failed"] == 0
    assert summary["compiled"] >= 60


def test_a_changed_kernel_is_seen_and_an_unchanged_one_is_not(tmp_path):
    """By the hashes of its instructions and its PTX, beside the output of an earlier run."""
    plan, path = "fwd 80 16 bf16 causal 128x64 w4 s2", tmp_path / "earlier.txt"
    path.write_text(json.dumps({"rows": [{"plan": plan, "sass": "0", "ptx": "0"}]}))
    found = compiled("arch=80", f"only='{plan}'", f"against={path}")
    (row,) = found["rows"]
    assert found["differ"] == [row["plan"]] == [plan]
    for changed, same in (({}, True), ({"sass": "0"}, True), ({"ptx": "0"}, True), ({"sass": "0", "ptx": "0"}, False)):
        assert same_program(row, row | changed) == same


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"only=\( is no regular expression \(missing \), unterminated .*; put"):
        CompileSettings(only="(")
    with pytest.raises(ValueError, match="workers=0 must be at least 1"):
        CompileSettings(workers=0)


def test_instructions_have_neither_addresses_nor_names():
    sass = """
        .section .text.{0},"ax"
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        {1}:
        /*0010*/              @!P0 BRA `({1}) ;
        /*0020*/                   MOV R2, 32@lo(({0} + {1}@srel)) ;
    """
    first, second = sass.format("flash_fwd", ".L_x_3"), sass.format("flash_fwd_new", ".L_x_17")
    assert instructions(first, "flash_fwd") == instructions(second, "flash_fwd_new")
    assert instructions(first, "flash_fwd")[0] == "LDC R1, c[0x0][0x28]"
    assert len(instructions(first, "flash_fwd")) == 3


def test_ptx_without_lines_has_no_names_either():
    with_lines = """
.visible .entry flash_fwd(
$L__func_begin0:
\t.loc\t1 120 0                         // forward.py:120:0
\tmov.b32 \t%r1, %ctaid.x;
$L__tmp0:
\t.loc\t1 9 4, function_name $L__info_string0, inlined_at 1 120 0
\tsetp.lt.s32 \t%p1, %r1, 1;             // begin inline asm
\t@%p1 bra \t$L__BB0_2;
$L__BB0_2:
\tret;
$L__func_end0:
}
\t.file\t1 "forward.py"
\t.section\t.debug_abbrev
"""
    code = without_lines(with_lines, "flash_fwd")
    assert [line.split() for line in code.splitlines() if line.strip()] == [
        [".visible", ".entry", "kernel("], ["mov.b32", "%r1,", "%ctaid.x;"], ["setp.lt.s32", "%p1,", "%r1,", "1;"],
        ["@%p1", "bra", "$L__BB0_2;"], ["$L__BB0_2:"], ["ret;"], ["}"],
    ]  # fmt: skip
