"""What kernels compile to, without a GPU: some of them, or every plan of every GPU (`pytest -m slow`)."""

import json
import re

import pytest

from kernels.philox import ROUNDS
from scripts.bench import compile_kernels
from scripts.bench.compile_kernels import CompileSettings, instructions, rows_of, same_program, without_lines
from tests.compiled import compiled

SHARED_LIMIT = 232_448  # bytes that one program may use on sm_90

# plan, as scripts.bench.compile_kernels names it -> most bytes of stack: more means new spills
COMPILED = {
    "hopper_fwd 90 128 bf16 causal 2x64x128 s2 ping_pong paired": 0,
    "hopper_bwd 90 128 bf16 causal": 64,  # of an item and its heads; of a step 4 bytes
    "hopper_bwd 90 128 bf16 full block_mask": 120,  # of an item, not of its steps
    "hopper_decode 90 64 bf16 1 rows page 0 scales 0": 0,
    "hopper_decode 90 128 bf16 1 rows page 16 scales 0 softcap alibi sinks": 0,
}
THE_OTHERS = {
    "hopper_fwd 90 64 bf16 full 3x64x128 s2 ping_pong": 0,
    "hopper_fwd 90 128 bf16 window softcap varlen 2x64x128 s2": 32,  # of a tile, not of its steps
    "hopper_fwd 90 128 bf16 full 2x64x128 s2": 0,
    "hopper_fwd 90 64 bf16 causal 3x64x128 s2 ping_pong paired": 0,
    "hopper_fwd 90 128 bf16 causal softcap 2x64x128 s2 paired": 0,
    "hopper_fwd 90 128 bf16 full block_mask 2x64x128 s2": 0,
    "hopper_fwd 90 64 bf16 full block_mask 3x64x128 s2 ping_pong": 0,
    "hopper_fwd 90 128 bf16 window 2x64x128 s2": 0,
    "hopper_fwd 90 64 bf16 causal varlen 3x64x128 s2 ping_pong": 0,
    "hopper_fwd 90 256 bf16 causal 2x64x64 s2 paired": 8,  # of a program
    "hopper_fwd 90 256 bf16 full 2x64x64 s2": 0,
    "hopper_fwd 90 256 bf16 window softcap varlen 2x64x64 s2": 24,  # as above
    "hopper_bwd 90 128 bf16 full": 16,  # of an item, not of its steps
    "hopper_bwd 90 128 bf16 window": 48,  # as above
    "hopper_bwd 90 128 bf16 causal varlen": 64,  # as above
    "hopper_bwd 90 128 bf16 causal softcap": 136,  # of a step 18 accesses
    "hopper_bwd 90 64 bf16 window softcap varlen": 40,
    "hopper_bwd 90 64 bf16 causal": 72,  # of an item, not of its steps
    "hopper_bwd 90 64 bf16 full": 40,  # as above
    "hopper_decode 90 128 bf16 64 rows page 0 scales 0": 40,  # of items, not of their tiles
    "hopper_decode 90 64 bf16 32 rows page 0 scales 0": 40,  # of items, not of their tiles
    "hopper_decode 90 128 int8 1 rows page 0 scales 1": 0,
    "hopper_decode 90 128 int8 1 rows page 16 scales 3": 24,  # of items, not of their tiles
    "hopper_decode 90 128 fp8e4nv 1 rows page 0 scales 3": 0,
}
SKINNY = "skinny.*[0-9]{4}.outputs.64.rows.*"
NARROW = "(fwd|dq).90.128.fp32.full.block_mask.*"
DROPOUT = {  # plan -> scores that a thread has of a tile
    "fwd 90 128 bf16 causal dropout 64x64 w4 s2 tma": 32,
    "dkdv 90 64 bf16 causal dropout 32x64 w4 s2 tma": 16,
}
CHANGED = next(iter(COMPILED))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_every_plan_compiles_and_fits(arch):
    summary = compiled(f"arch={arch}", "workers=2")
    assert summary["failed"] == 0
    assert summary["compiled"] >= 60


@pytest.fixture(scope="module")
def some(tmp_path_factory) -> dict:
    """Compiled by one process, beside the output of an earlier run, which knew one of them in another form."""
    path = tmp_path_factory.mktemp("compiled") / "earlier.txt"
    path.write_text(json.dumps({"rows": [{"plan": CHANGED, "sass": "0", "ptx": "0"}]}))
    return compiled(f"only='^({'|'.join([*COMPILED, *DROPOUT])}|{SKINNY}|{NARROW})$'", f"against={path}")


def check_wgmma(rows: list[dict], plans: dict[str, int]) -> None:
    """Asynchronous, fed by TMA, with no more bytes of stack than known."""
    assert {row["plan"] for row in rows} == set(plans)
    for row in rows:
        plan = row["plan"]
        assert row["complaints"] == [], f"{plan}: ptxas serialized the wgmma instructions"
        assert row["HGMMA"] > 0, plan
        assert row["HMMA"] == 0, plan
        assert row["WARPGROUP.DEPBAR"] <= row["HGMMA"] / 3, plan
        assert row["spill_bytes"] <= plans[plan], plan
        assert row["shared_bytes"] <= SHARED_LIMIT, plan
        assert row["UTMALDG"] > 0, plan
        assert (row["UTMASTG"] > 0) != plan.startswith("hopper_decode"), plan
        assert (row["REDG.E.ADD.F32x4"] > 0) == plan.startswith("hopper_bwd"), f"{plan}: dQ is added 16 bytes at a time"


def test_compiles_to_asynchronous_wgmma(some):
    check_wgmma([row for row in some["rows"] if row["plan"].startswith("hopper")], COMPILED)


@pytest.mark.slow
def test_the_others_compile_to_asynchronous_wgmma():
    check_wgmma(compiled(f"only='^({'|'.join(THE_OTHERS)})$'")["rows"], THE_OTHERS)


def test_tiles_narrower_than_a_word_of_a_mask_compile(some):
    """The interpreter takes what the compiler does not."""
    assert some["failed"] == 0
    assert len([row for row in some["rows"] if re.match(NARROW, row["plan"])]) == 2


def test_no_copy_overtakes_a_product(some):
    """Triton gives some loops a buffer too few; `compile_kernels` reads it from what they compile to."""
    rows = [row for row in some["rows"] if row["plan"].startswith("skinny")]
    assert len(rows) == 4
    for row in rows:
        assert row["HGMMA"] > 0, row["plan"]
        assert "copied over" not in row["notes"], row["plan"]


@pytest.mark.parametrize("plan", DROPOUT)
def test_four_scores_share_a_draw_of_philox(some, plan):
    """By the high halves of its products, two a round: in the kernel's result layout a thread draws once for four."""
    (row,) = (row for row in some["rows"] if row["plan"] == plan)
    loops, draws = 2, DROPOUT[plan] // 4  # with a mask and without
    assert 0 < row["IMAD.HI"] <= loops * draws * 2 * ROUNDS


def test_a_changed_kernel_is_seen_and_an_unchanged_one_is_not(some):
    """By the hashes of its instructions and its PTX."""
    (row,) = (row for row in some["rows"] if row["plan"] == CHANGED)
    assert some["differ"] == [CHANGED]
    for changed, same in (({}, True), ({"sass": "0"}, True), ({"ptx": "0"}, True), ({"sass": "0", "ptx": "0"}, False)):
        assert same_program(row, row | changed) == same


@pytest.mark.parametrize("content", [b"", b"no JSON", b"[1]", b'{"rows": [{"mask": "causal"}]}', b"\xff"], ids=repr)
def test_an_earlier_output_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "before.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"against=.*before.txt is no output of scripts.bench.compile_kernels"):
        rows_of(str(tmp_path / "before.txt"))


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"only=\( is no regular expression \(missing \), unterminated .*; put"):
        CompileSettings(only="(")
    with pytest.raises(ValueError, match="workers=0 must be at least 1"):
        CompileSettings(workers=0)


def test_a_process_that_interprets_kernels_compiles_none(tmp_path, monkeypatch):
    """However it was told to: kernels read the variable as Triton does."""
    monkeypatch.setenv("TRITON_INTERPRET", "true")
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET is set: .* cannot compile them; unset it"):
        compile_kernels.main.__wrapped__(CompileSettings(), tmp_path)


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
