"""The support matrix is true: every "yes" runs forward and backward within the error budget, every "no" refuses."""

import itertools
import re
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from kernels import (
    BlockMask,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
    linear_cross_entropy,
    rms_norm,
    support,
    tiled_attention,
)
from kernels.call import Options, autocast_inputs, check_call, key_of, plain_options, unchanged
from kernels.decode import Call
from kernels.support import (
    DTYPES,
    FEATURES,
    IMPLEMENTATIONS,
    IN_THE_MASK,
    KERNELS,
    features_of,
    takes_hopper,
    why_not,
)
from model.attention import ATTENTION as MODEL_ATTENTION
from tests.attention_cases import ATTENTION, OPTIONS, call_for
from tests.attention_checks import compare_with_oracle, make_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CELLS = [
    pytest.param(name, feature, dtype, id=f"{name}-{feature}-{str(dtype).removeprefix('torch.')}")
    for name, feature, dtype in itertools.product(IMPLEMENTATIONS, FEATURES, DTYPES)
]


YES = [cell for cell in CELLS if IMPLEMENTATIONS[cell.values[0]].supports(*cell.values[1:])]
NO = [cell for cell in CELLS if cell not in YES]


@pytest.mark.parametrize(("name", "feature", "dtype"), YES)
@pytest.mark.usefixtures("poisoned_memory")
def test_what_the_matrix_promises_works(name, feature, dtype):
    which, q, k, v, options = call_for([feature], dtype, DEVICE)
    if name == "sdpa":  # it returns no LSE: hold O alone, with its own autograd
        o = MODEL_ATTENTION["sdpa"](q, k, v, **options)
        expected = ATTENTION["naive"][0](q, k, v, **options)
        tolerance = {torch.float16: 1e-2, torch.bfloat16: 5e-2}.get(dtype, 1e-5)
        torch.testing.assert_close(o, expected, rtol=tolerance, atol=tolerance)
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(o.sum(), (q, k, v)))
        return
    compare_with_oracle(ATTENTION[name][which], q, k, v, with_dlse=feature == "lse", **options)


@pytest.mark.parametrize(("name", "feature", "dtype"), NO)
def test_what_the_matrix_denies_is_refused(name, feature, dtype):
    reason = why_not(name, dtype, [feature])
    short = str(dtype).removeprefix("torch.")
    assert reason == f"{feature} in {short} is not supported by {name}; use {IMPLEMENTATIONS[name].instead}"
    if name == "flash":
        which, q, k, v, options = call_for([feature], dtype, DEVICE)
        with pytest.raises(ValueError, match=r"is not supported by flash.*; use naive_attention \(model\.attention="):
            ATTENTION["flash"][which](q, k, v, **options)


def test_an_option_is_refused_by_tiles_that_do_not_name_it(monkeypatch):
    """As one is that has just been added: only the definition takes it."""
    tiled = IMPLEMENTATIONS["tiled"]
    monkeypatch.setitem(IMPLEMENTATIONS, "tiled", replace(tiled, features=tiled.features - {"softcap"}))
    _, q, k, v, options = call_for(["softcap"], torch.float32, DEVICE)
    ATTENTION["naive"][0](q, k, v, **options)
    with pytest.raises(ValueError, match="softcap in float32 is not supported by tiled; use naive_attention "):
        ATTENTION["tiled"][0](q, k, v, **options)


def test_a_feature_that_has_just_been_added_is_the_definitions_alone():
    """As CONTRIBUTING.md says of a row of FEATURES; tiles and kernels would pass over what they do not know."""
    fresh = ModuleType("kernels.support_of_tomorrow")
    fresh.__package__ = "kernels"
    source = Path(support.__file__).read_text().replace("FEATURES = {", 'FEATURES = {\n    "new": "",', 1)
    exec(source, fresh.__dict__)
    takes = {name for name, i in (fresh.IMPLEMENTATIONS | fresh.KERNELS).items() if "new" in i.features}
    assert takes == {"naive"}


IN_KERNELS = [f for f in FEATURES if f in IMPLEMENTATIONS["flash"].features]
SENSIBLE_PAIRS = [
    ("causal", "gqa"),
    ("causal", "window"),
    ("causal", "softcap"),
    ("causal", "alibi_slopes"),
    ("causal", "sinks"),
    ("causal", "dropout"),
    ("causal", "varlen"),
    ("gqa", "varlen"),
    ("gqa", "dropout"),
    ("gqa", "alibi_slopes"),
    ("window", "sinks"),
    ("window", "varlen"),
    ("window", "dropout"),
    ("softcap", "alibi_slopes"),
    ("softcap", "window"),
    ("softcap", "sinks"),
    ("sinks", "dropout"),
    ("sinks", "varlen"),
    ("alibi_slopes", "varlen"),
    ("dropout", "varlen"),
    ("block_mask", "sinks"),
    tuple(f for f in IN_KERNELS if f not in ("full", "window", "block_mask")),
    tuple(f for f in IN_KERNELS if f not in ("full", "lse", *IN_THE_MASK)),  # lse's case is causal
]


@pytest.mark.parametrize("features", SENSIBLE_PAIRS, ids="+".join)
@pytest.mark.usefixtures("poisoned_memory")
def test_options_work_together(features):
    which, q, k, v, options = call_for(features, torch.float32, DEVICE)
    compare_with_oracle(ATTENTION["flash"][which], q, k, v, **options)


@pytest.mark.parametrize("feature", [f for f in FEATURES if OPTIONS[f] and f != "lse"])
def test_the_cases_do_what_they_say(feature):
    """An option that changed nothing would pass every comparison."""
    which, q, k, v, options = call_for([feature], torch.float64)
    plain = ATTENTION["naive"][which](q, k, v)
    assert not torch.allclose(ATTENTION["naive"][which](q, k, v, **options), plain, atol=1e-3)


def test_features_are_read_off_the_options():
    everything = Options(
        False, 1.0, 3, 4, 5.0, torch.ones(1, 4), torch.ones(4), 0.1, torch.zeros(()), torch.zeros(2), torch.zeros(2),
        mask_starts=torch.zeros(1, 1, 2, 4),
    )  # fmt: skip
    assert features_of(everything, 4, 2, 16, 32) == [f for f in FEATURES if f not in ("full", "causal", "lse")]
    assert features_of(Options(True, 1.0), 4, 4, 16, 16) == ["causal"]
    assert features_of(Options(False, 1.0), 4, 4, 16, 16) == ["full"]


def test_a_refusal_names_all_features_and_the_remedy():
    missing = "window with dropout"
    instead = "flash_attention (model.attention=flash) or naive_attention (model.attention=naive)"
    expected = f"{missing} in float32 is not supported by sdpa; use {instead}"
    assert why_not("sdpa", torch.float32, ["causal", "window", "dropout"]) == expected


def test_every_implementation_answers_for_device_and_head_dim():
    bf16 = torch.bfloat16
    assert "needs a CUDA device; q is on cpu; use the portable" in why_not("hopper", bf16, device="cpu")
    assert "head_dim 24 is not supported by hopper" in why_not("hopper", bf16, head_dim=24)
    assert "head_dim 8 is not supported by kvcache" in why_not("kvcache", bf16, head_dim=8)
    assert "head_dim 8 is not supported by flash" in why_not("flash", bf16, head_dim=8)
    assert why_not("naive", bf16, device="cpu", head_dim=8) is None


@pytest.mark.parametrize(
    ("call", "asked_otherwise"),
    [
        (flash_attention, {"q", "k", "v", "block_mask", "dropout_seed", "deterministic", "return_lse"}),
        (flash_attention_with_kvcache, {*Call._fields, "k", "v", "return_lse"}),
    ],
)
def test_each_argument_is_part_of_what_tells_calls_apart(call, asked_otherwise):
    """One that is not would be ignored, in silence, after a call without it whose other arguments are the same."""
    missing = {*signature(call).parameters} - {*signature(plain_options).parameters} - asked_otherwise
    assert not missing, f"plain_options of kernels/call.py has no {missing}, or its callers do not ask for them before"


def test_a_question_about_what_there_is_not_is_refused():
    with pytest.raises(ValueError, match="implementation=falsh is unknown; use one of naive, tiled, flash"):
        why_not("falsh", torch.bfloat16)
    with pytest.raises(ValueError, match=r"features has 'causla', which is unknown; use names of full, causal"):
        why_not("flash", torch.bfloat16, ["causla"])
    with pytest.raises(ValueError, match=r"features is 'causal'; expected names in a list, as \['causal'\]"):
        why_not("flash", torch.bfloat16, "causal")
    with pytest.raises(ValueError, match="device='gpu' is unknown: Expected one of cpu, cuda"):
        why_not("flash", torch.bfloat16, device="gpu")


def test_the_hopper_kernels_take_what_gpts_are_trained_with():
    assert why_not("hopper", torch.bfloat16, ["gqa", "window", "softcap", "varlen"]) is None
    assert why_not("hopper", torch.bfloat16, ["gqa", "block_mask"]) is None
    reason = why_not("hopper", torch.bfloat16, ["gqa", "dropout"])
    assert reason == "dropout in bfloat16 is not supported by hopper; use the portable kernels"


def test_hopper_leaves_the_calls_that_its_kernels_would_get_wrong(monkeypatch):
    """Without the GPU that it asks for first."""
    monkeypatch.setattr("kernels.support._no_hopper_device_reason", lambda device: None)
    q, k, v = make_qkv(1, 4, 2, 40, 40, 64, dtype=torch.bfloat16)

    def reason(heads=1, **options):
        mask = BlockMask.from_dense(torch.ones(heads, 40, 40, dtype=torch.bool).tril())
        return takes_hopper(*check_call(q, k, v, block_mask=mask, **options), backward=True)

    assert reason()
    assert not reason(heads=4)
    assert not reason(alibi_slopes=torch.ones(4))


def test_the_hopper_forward_is_for_calls_in_which_it_is_right_and_the_faster(monkeypatch):
    """Without the GPU that it asks for first."""
    monkeypatch.setattr("kernels.support._no_hopper_device_reason", lambda device: None)

    def taken(head_dim, tokens=128, dtype=torch.bfloat16, **options):
        q = torch.zeros(1, 2, tokens, head_dim, dtype=dtype)
        return takes_hopper(*check_call(q, q, q, **options))

    assert taken(40)
    documents = {"cu_seqlens": torch.tensor([0, 100, 128], dtype=torch.int32)}
    assert [taken(d, **documents) for d in (56, 64, 256)] == [False, True, True]
    sparse, crowded = (
        {"block_mask": BlockMask.from_dense(dense), "tokens": 1024}
        for dense in (torch.eye(1024, dtype=torch.bool), torch.ones(1024, 1024, dtype=torch.bool))
    )
    assert [taken(d, **sparse) for d in (64, 72, 128, 136)] == [False, True, True, False]
    assert [taken(d, **crowded) for d in (56, 64, 72, 136)] == [False, True, True, False]
    assert not taken(64, **crowded, softcap=2.0)
    assert not taken(128, **crowded, alibi_slopes=torch.ones(2))
    assert taken(128, alibi_slopes=torch.ones(2))
    assert not taken(128, sinks=torch.ones(2))
    assert not taken(128, dtype=torch.float32)
    assert not taken(128, tokens=0)
    odd = torch.zeros(1, 2, 128, 65, dtype=torch.bfloat16)[..., 1:]
    assert not takes_hopper(*check_call(odd, odd, odd))


def test_a_plain_call_is_asked_without_features():
    assert why_not("flash", torch.float32) is why_not("naive", torch.float64) is None
    assert why_not("flash", torch.float64).startswith("full in float64 is not supported by flash; use naive_attention")
    with pytest.raises(ValueError, match="dtype='bfloat16' is unknown; use one of PyTorch's"):
        why_not("flash", "bfloat16", ["window"])


def test_the_readme_shows_the_matrix():
    """The table of kernels/README.md: a cell names the dtypes that work."""
    short = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
    matrix = IMPLEMENTATIONS | KERNELS
    lines = ["| feature | " + " | ".join(matrix) + " | meaning |", "|---" * (len(matrix) + 2) + "|"]
    for feature, meaning in FEATURES.items():
        cells = [" ".join(short[d] for d in DTYPES if i.supports(feature, d)) or "no" for i in matrix.values()]
        lines.append(f"| {feature} | " + " | ".join(cells) + f" | {meaning} |")
    assert "\n".join(lines) in (Path(__file__).parent.parent / "kernels" / "README.md").read_text(), "\n".join(lines)


def test_a_window_of_booleans_is_refused_after_its_like_in_numbers_too():
    q, k, v = (x.detach() for x in make_qkv(1, 2, 2, 4, 4, 16, device=DEVICE))
    flash_attention(q, k, v, window=(1, 0))
    with pytest.raises(ValueError, match="window's left bound is True; it must be an integer"):
        flash_attention(q, k, v, window=(True, 0))


def test_slopes_that_ask_for_a_gradient_are_refused_after_their_like_that_do_not_too():
    q, k, v = (x.detach() for x in make_qkv(1, 2, 2, 4, 4, 16, device=DEVICE))
    slopes = torch.ones(1, 2, device=DEVICE)
    for _ in range(2):
        flash_attention(q, k, v, alibi_slopes=slopes)
    with pytest.raises(ValueError, match="alibi_slopes asks for a gradient; slopes are constants here"):
        flash_attention(q, k, v, alibi_slopes=slopes.requires_grad_())


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "softcap", "window"])
def test_a_call_whose_like_was_checked_before_has_the_options_that_it_is_given(name):
    torch.manual_seed(0)
    q, k, v = (x.detach() for x in make_qkv(1, 2, 2, 5, 5, 16, device=DEVICE))
    per_head = torch.tensor([0.5, 2.0], device=DEVICE)
    values = {"alibi_slopes": per_head[None], "sinks": per_head, "softcap": 0.5, "window": (-1, 1)}
    for value in (values[name], values[name], values[name] * 3 if name != "window" else (1, 0)):
        o, expected = (ATTENTION[which][0](q, k, v, **{name: value}) for which in ("flash", "naive"))
        torch.testing.assert_close(o, expected, rtol=1e-3, atol=1e-3)


def test_slopes_of_all_rows_and_of_each_tell_calls_apart():
    q, slopes = torch.zeros(3, 2, 4, 16), torch.ones(2)
    keys = {
        key_of("forward", Options(True, 1.0, alibi_slopes=x), q) for x in (slopes.expand(3, 2), slopes.repeat(3, 1))
    }
    assert len(keys) == 2, "their strides are not the same"


ENDS = torch.tensor([0, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    "given",
    [
        *({"window": [1, 0]}, {"window": (1, True)}, {"window": (1, 0, 0)}, {"scale": 0.0}, {"scale": -0.5}),
        *({"scale": torch.tensor(0.5)}, {"dropout_p": 0.5}, {"max_seqlen": 4}, {"cu_seqlens": ENDS}),
        *({"cu_seqlens": ENDS, "max_seqlen": pair} for pair in ((4, None), (None, 4), (4, 4, 4))),
        *({"sinks": torch.ones(4)[::2]}, {"alibi_slopes": torch.ones(1, 2, requires_grad=True)}, {"sinks": [0.0, 0.0]}),
        {"cu_seqlens": torch.zeros(4, dtype=torch.int32)[::2], "max_seqlen": 4},
    ],
    ids=str,
)
def test_what_a_check_may_change_or_refuse_is_looked_at_in_every_call(given):
    plain = {"causal": True, "scale": None, "window": (-1, -1), "softcap": 0.0, "dropout_p": 0.0}
    assert plain_options(**plain, cu_seqlens=ENDS, max_seqlen=4) is not None
    assert plain_options(**plain | given) is None


def test_what_the_checks_cast_or_expanded_is_not_as_it_was_given():
    given, same = (Options(True, 1.0, sinks=torch.ones(2), alibi_slopes=torch.ones(1, 2)) for _ in range(2))
    assert unchanged(given, same)
    assert not unchanged(given, same._replace(alibi_slopes=torch.ones(3, 2)))
    assert not unchanged(given, same._replace(sinks=torch.ones(2, dtype=torch.float64)))


def test_autocast_leaves_float64_alone():
    q = torch.zeros(1, 1, 2, 16, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert [x.dtype for x in autocast_inputs(q, q.float(), q)] == [torch.float64, torch.bfloat16, torch.float64]


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (torch.zeros(1, 1, 2, 16, dtype=torch.float8_e4m3fn), "q has dtype torch.float8_e4m3fn; expected a floating"),
        (torch.zeros(1, 1, 2, 16, dtype=torch.int32), "q has dtype torch.int32; expected a floating"),
        (torch.zeros(1, 1, 2, 0), "q has head_dim 0; it must be at least 1"),
        (torch.zeros(1, 0, 2, 16), "q has 0 heads; it must be a multiple of k's 0 heads"),
    ],
)
def test_tensors_that_no_attention_is_for_are_refused(q, message):
    with pytest.raises(ValueError, match=message):
        check_call(q, q, q)


def test_options_in_canonical_form():
    q = torch.zeros(1, 2, 4, 16, dtype=torch.float64)
    per_head = torch.ones(2, dtype=torch.float64, requires_grad=True)
    scale = torch.zeros((), requires_grad=True)
    with torch.no_grad():
        *_, options = check_call(q, q, q, alibi_slopes=per_head, sinks=per_head, scale=scale)
    assert (options.alibi_slopes.dtype, options.sinks.dtype, options.scale) == (torch.float64, torch.float64, 0.0)
    assert check_call(q, q, q, dropout_p=0.5, dropout_seed=torch.zeros(1, dtype=torch.int64))[3].dropout_seed.dim() == 0
    on_meta = torch.zeros((), dtype=torch.int64, device="meta")
    for seed, said in ((torch.zeros(2).long(), "shape"), (on_meta, "on meta")):
        with pytest.raises(ValueError, match=f"dropout_seed .*{said}"):
            check_call(q, q, q, dropout_p=0.5, dropout_seed=seed)
    apart = torch.tensor([0, 9, 4, 9], dtype=torch.int32)[::2]
    packed = check_call(q, q, q, cu_seqlens=apart)[3]
    assert packed.cu_seqlens_q.is_contiguous()
    assert packed.cu_seqlens_k.is_contiguous()


def test_the_gpu_that_kernels_need(monkeypatch):
    monkeypatch.setattr("kernels.support._is_elsewhere", lambda device: False)
    monkeypatch.setattr("kernels.support.HAS_TRITON", True)
    monkeypatch.setattr("kernels.support._triton_release", lambda: "3.6.0")
    bf16, taken = torch.bfloat16, {}
    for found in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr("kernels.support.capability", lambda index, found=found: found)
        narrow = support._kvcache_device_reason(torch.device("cuda"), torch.float8_e4m3fn)
        others = [why_not(name, bf16, device="cuda") for name in ("flash", "kvcache", "hopper")]
        taken[found] = [reason is None for reason in (*others, narrow)]
    assert taken == {
        (7, 5): [False, False, False, False],
        (8, 0): [True, True, False, False],
        (8, 9): [True, True, False, True],
        (9, 0): [True, True, True, True],
        (10, 0): [True, True, False, True],
    }
    monkeypatch.setattr("kernels.support.capability", lambda index: (9, 0))
    monkeypatch.setattr("kernels.support._triton_release", lambda: "3.60.0")
    assert "is written for Triton 3.6; 3.60.0 is installed" in why_not("hopper", bf16, device="cuda")
    assert [why_not("flash", bf16, head_dim=d) is None for d in (15, 16, 256, 257)] == [False, True, True, False]


DENSE_MISTAKES = {
    "causal is 'yes'; it must be True or False": {"causal": "yes"},
    "causal is tensor([ True, False]); it must be True or False": {"causal": torch.tensor([True, False])},
    "window has left bound -2; it must be at least 0, or -1 for no bound": {"window": (-2, 0)},
    "window has right bound -7": {"window": (3, -7), "causal": False},
    "window is 5; expected two integers (left, right)": {"window": 5},
    "softcap is -1.0; it must be a positive number, or 0 for none": {"softcap": -1.0},
    "softcap is nan": {"softcap": float("nan")},
    "alibi_slopes has shape (3,); expected (2,) or (1, 2)": {"alibi_slopes": torch.ones(3)},
    "alibi_slopes has dtype torch.int64; expected a floating point dtype": {
        "alibi_slopes": torch.ones(2, dtype=torch.int64)
    },
    "alibi_slopes asks for a gradient": {"alibi_slopes": torch.ones(2, requires_grad=True)},
    "sinks has shape (1, 2); expected (2,)": {"sinks": torch.ones(1, 2)},
    "sinks is on meta but q is on": {"sinks": torch.ones(2, device="meta")},
    "dropout_p is 1.0; it must be at least 0 and less than 1": {"dropout_p": 1.0},
    "dropout_p is -0.5": {"dropout_p": -0.5},
    "dropout_p is 0.9999999999; it must be at least 0 and less than 1": {"dropout_p": 1 - 1e-10},  # 1 in float32
    "window's left bound is 1.5; it must be an integer": {"window": (1.5, 2)},
    "window's right bound is None; it must be an integer": {"window": (1, None)},
    "window's left bound is 'all'; it must be an integer": {"window": ("all", 0)},
    "dropout_seed is 1.5; it must be an integer": {"dropout_p": 0.5, "dropout_seed": 1.5},
    "dropout_seed is 9223372036854775808; it must be from -2^63 to 2^63 - 1": {"dropout_p": 0.5, "dropout_seed": 2**63},
    "scale is 1e-320; it must be 0 or, without its sign, from 1e-30 to 1e+30": {"scale": 1e-320},
    "scale is -1e+200; it must be 0 or, without its sign,": {"scale": -1e200},
    "scale has type str; it must be a number": {"scale": "0.5"},
    "scale asks for a gradient and is a constant here": {"scale": torch.ones((), requires_grad=True)},
    "softcap is 1e-320; it must be 0 or from 1e-30 to 1e+30": {"softcap": 1e-320},
    "softcap is 1e-20 and scale -1e+20; scale may be at most 1e+30 times as large": {"softcap": 1e-20, "scale": -1e20},
    "softcap has type NoneType; it must be a number": {"softcap": None},
    "softcap has type ndarray; it must be a number": {"softcap": np.ones(2)},
    "dropout_p has type ndarray; it must be a number": {"dropout_p": np.ones(2)},
    "alibi_slopes has type ndarray; expected a torch.Tensor": {"alibi_slopes": np.ones(2)},
    "sinks has type list; expected a torch.Tensor": {"sinks": [0.0, 0.0]},
    "deterministic is False; every result here is deterministic: leave it True": {"deterministic": False},
    "max_seqlen is 9, which needs cu_seqlens; pass both or neither": {"max_seqlen": 9},
    "cu_seqlens is a tuple of 1; it must be one for all or a pair": {"cu_seqlens": (torch.ones(2).int(),)},
    "max_seqlen is a tuple of 3; it must be": {"cu_seqlens": torch.ones(2).int(), "max_seqlen": (4, 4, 4)},
    "dropout_seed has dtype torch.float32": {"dropout_p": 0.5, "dropout_seed": torch.ones(())},
}


@pytest.mark.parametrize("message", DENSE_MISTAKES, ids=lambda message: message.split(";")[0])
def test_bad_options_are_refused_by_name(message):
    q, k, v = make_qkv(1, 2, 2, 4, 4, 16, device=DEVICE)
    options = {
        name: x.detach().to(DEVICE).requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor) and x.device.type == "cpu"
        else x
        for name, x in DENSE_MISTAKES[message].items()
    }
    for attention, _ in ATTENTION.values():
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            attention(q, k, v, **options)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("head_dim_v", [8, 264])
def test_vs_head_dim_is_limited_too(head_dim_v):
    q, k, v = make_qkv(1, 2, 2, 4, 4, 16, head_dim_v=head_dim_v, device=DEVICE)
    with pytest.raises(ValueError, match=rf"head_dim {head_dim_v} is not supported by flash attention \(16 to 256\)"):
        flash_attention(q, k, v)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (np.ones((1, 2, 4, 16)), "ndarray")])
def test_what_is_no_tensor_is_refused_by_name(name, value, kind):
    q, k, v = make_qkv(1, 2, 2, 4, 4, 16, device=DEVICE)
    for attention, packed in ATTENTION.values():
        with pytest.raises(ValueError, match=f"{name} has type {kind}; expected a torch.Tensor"):
            attention(**{"q": q, "k": k, "v": v} | {name: value})
        (pq, pk, pv), arguments = packed_call()
        with pytest.raises(ValueError, match=f"{name} has type {kind}; expected a torch.Tensor"):
            packed(**{"q": pq, "k": pk, "v": pv} | arguments | {name: value})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("kind", ["jagged", "strided", "sparse"])
def test_nested_and_sparse_tensors_are_refused(kind):
    q, k, v = make_qkv(1, 2, 2, 4, 4, 16, device=DEVICE)
    rows = [torch.ones(n, 2, 16, device=DEVICE) for n in (3, 5)]
    other = (
        k.detach().to_sparse() if kind == "sparse" else torch.nested.nested_tensor(rows, layout=getattr(torch, kind))
    )
    for attention, _ in ATTENTION.values():
        for tensors in ((other, other, other), (q, other, v)):
            with pytest.raises(ValueError, match="is nested or sparse; expected a dense tensor"):
                attention(*tensors)


def test_numbers_that_are_integers_may_be_of_any_type():
    """Whatever was called before: what is remembered as right is looked up by value."""
    q, k, v = make_qkv(1, 2, 2, 4, 4, 16, device=DEVICE)
    expected = flash_attention(q, k, v, window=(2, 1), scale=0.5)
    for window, scale in (((2.0, 1), 0.5), ((np.int64(2), 1), np.float32(0.5)), ([2, 1], torch.tensor(0.5))):
        assert torch.equal(flash_attention(q, k, v, window=window, scale=scale), expected)


PACKED_MISTAKES = {
    "cu_seqlens_q has type NoneType; expected a torch.Tensor": lambda a: a | {"cu_seqlens_q": None},
    "cu_seqlens_k has type list; expected a torch.Tensor": lambda a: a | {"cu_seqlens_k": [0, 4, 7, 12]},
    "max_seqlen_q is 4.5; it must be an integer": lambda a: a | {"max_seqlen_q": 4.5},
    "deterministic is False": lambda a: a | {"deterministic": False},
    "q has shape (1, 12, 2, 16); expected 3 dimensions (tokens, heads, head_dim)": lambda a: a | {"q": a["q"][None]},
    "cu_seqlens_q has dtype torch.int64": lambda a: a | {"cu_seqlens_q": a["cu_seqlens_q"].long()},
    "cu_seqlens_k has dtype torch.int32 and shape (1, 4)": lambda a: a | {"cu_seqlens_k": a["cu_seqlens_k"][None]},
    "cu_seqlens_k is on meta": lambda a: a | {"cu_seqlens_k": a["cu_seqlens_k"].to("meta")},
    "cu_seqlens_k has 2 documents but cu_seqlens_q has 3": lambda a: a | {"cu_seqlens_k": a["cu_seqlens_k"][:-1]},
    "cu_seqlens_q starts at 1; it must start at 0": lambda a: a | {"cu_seqlens_q": a["cu_seqlens_q"] + 1},
    "cu_seqlens_q ends at 12; it must end at q's 11 tokens": lambda a: a | {"q": a["q"][:-1]},
    "cu_seqlens_k falls at document 1": lambda a: a | {"cu_seqlens_k": a["cu_seqlens_k"][[0, 2, 1, 3]]},
    "max_seqlen_k is 4 but document 2 has 5 tokens": lambda a: a | {"max_seqlen_k": 4},
    "max_seqlen_q is -1": lambda a: a | {"max_seqlen_q": -1},
    "v has shape (11, 2, 16) but k has (12, 2, 16)": lambda a: a | {"v": a["v"][:-1]},
    "alibi_slopes has shape (4, 2); expected (2,) or (3, 2)": lambda a: a | {"alibi_slopes": torch.ones(4, 2)},
}


@pytest.mark.parametrize("message", PACKED_MISTAKES, ids=lambda message: message.split(";")[0])
def test_bad_packings_are_refused_by_name(message):
    (q, k, v), arguments = packed_call()
    calls = PACKED_MISTAKES[message]({"q": q, "k": k, "v": v} | arguments)
    for _, attention in ATTENTION.values():
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            attention(**calls)
        assert "\n" not in str(caught.value)


def packed_call():
    from tests.attention_checks import make_packed

    return make_packed([4, 3, 5], [4, 3, 5], 2, 2, 16, device=DEVICE)


def test_a_changed_packing_is_looked_at_again():
    """What was found right is remembered for the tensor as it was, not for the tensor."""
    (q, k, v), arguments = packed_call()
    flash_attention_varlen(q, k, v, **arguments)
    arguments["cu_seqlens_q"][-1] = 11
    with pytest.raises(ValueError, match="cu_seqlens_q ends at 11"):
        flash_attention_varlen(q, k, v, **arguments)


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_a_packing_changed_past_pytorchs_versions_is_looked_at_again_on_a_cpu(how):
    (q, k, v), arguments = packed_call()
    if q.is_cuda:
        pytest.skip("on a GPU the kernels take it for the nearest packing: tests/test_varlen.py")
    flash_attention_varlen(q, k, v, **arguments)
    if how == "data":
        arguments["cu_seqlens_q"].data[-1] = 2**30
    else:
        arguments["cu_seqlens_q"].numpy()[-1] = 2**30
    with pytest.raises(ValueError, match="cu_seqlens_q ends at 1073741824"):
        flash_attention_varlen(q, k, v, **arguments)


def test_deterministic_may_be_stated():
    q, k, v = make_qkv(1, 1, 1, 4, 4, 16, device=DEVICE)
    assert torch.equal(flash_attention(q, k, v, deterministic=True), flash_attention(q, k, v))
    with pytest.raises(ValueError, match="deterministic is False; every result here is deterministic: leave it True"):
        flash_attention(q, k, v, deterministic=False)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: rms_norm(x, 1e-6).sum(), (4, 8)),
        (lambda x: linear_cross_entropy(x, torch.ones(8, 8), torch.arange(4), 8), (4, 8)),
        (lambda x: tiled_attention(x, x, x).sum(), (1, 1, 4, 8)),
    ],
)
def test_a_second_derivative_is_an_error_and_never_a_constant(function, shape):
    """Also where the incoming gradient is one: PyTorch's `once_differentiable` would then say nothing."""
    x = torch.randn(shape, requires_grad=True)
    torch.autograd.grad(function(x), x)
    with pytest.raises(RuntimeError, match=r"(rms_norm|linear_cross_entropy|tiled_attention) has no second derivative"):
        torch.autograd.grad(function(x), x, create_graph=True)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
@pytest.mark.parametrize(
    ("function", "shape", "instead"),
    [
        (lambda x: tiled_attention(x, x, x), (1, 2, 4, 8), "naive_attention"),
        (lambda x: rms_norm(x, 1e-5), (4, 8), "torch.nn.functional.rms_norm"),
        (
            lambda x: linear_cross_entropy(x, torch.ones(8, 8), torch.arange(4), 8),
            (4, 8),
            "cross_entropy of the logits",
        ),
    ],
)
def test_torch_func_is_told_what_takes_its_place(function, shape, instead, transform):
    x = torch.randn((2, *shape) if transform is torch.vmap else shape)
    if instead.startswith("cross_entropy") and transform is torch.vmap:  # which it knows
        assert transform(function)(x).shape == (2,)
        return
    with pytest.raises(RuntimeError, match=rf"^\w+ is not for torch.func \([a-z, ]+\): use {instead}$"):
        transform(lambda x: function(x).sum())(x)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: linear_cross_entropy(x, torch.ones(8, 8), torch.arange(4), 8), (4, 8)),
        (lambda x: linear_cross_entropy(torch.ones(4, 8), x, torch.arange(4), 8), (8, 8)),
        (
            lambda x: flash_attention_with_kvcache(x, x, x, cache_seqlens=torch.ones(1, dtype=torch.int32)),
            (1, 1, 1, 16),
        ),
    ],
)
def test_a_forward_mode_derivative_is_an_error_and_never_zero(function, shape):
    x = torch.randn(shape)
    with torch.no_grad():
        function(x)
    said = r"(linear_cross_entropy|attention over a cache) has no forward-mode derivative \(jvp\): use "
    with pytest.raises(RuntimeError, match=said):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=said):
        function(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("which", range(3))
def test_tiled_attention_has_none_either(which):
    qkv = list(torch.randn(3, 1, 1, 4, 16))
    with forward_ad.dual_level():
        qkv[which] = forward_ad.make_dual(qkv[which], torch.ones_like(qkv[which]))
        with pytest.raises(RuntimeError, match=r"^tiled_attention has no forward-mode derivative \(jvp\): use naive"):
            tiled_attention(*qkv)
