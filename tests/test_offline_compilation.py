"""What the offline compile tool says; every plan of every GPU compiles and fits (`pytest -m slow`)."""

import json

import pytest

from scripts.bench.compile_kernels import instructions
from tests.compiled import compiled


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_every_plan_compiles_and_fits(arch):
    summary = compiled(f"arch={arch}", "workers=2")
    assert summary["failed"] == 0
    assert summary["compiled"] >= 60


def test_a_changed_kernel_is_seen_and_an_unchanged_one_is_not(tmp_path):
    """By the hash of its instructions, beside the output of an earlier run."""
    arguments = ("arch=80", "only='fwd 80 16 bf16 causal 128'")
    earlier = compiled(*arguments)
    path = tmp_path / "earlier.txt"
    for rows, differing in ((earlier["rows"], 0), ([{**row, "sass": "0"} for row in earlier["rows"]], 1)):
        path.write_text(json.dumps({"rows": rows}))
        assert len(compiled(*arguments, f"against={path}")["differ"]) == differing


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
