"""The full matrix of attention on a GPU: a fixed set of 2,000 cases and a fresh one; see tests/fuzz.py."""

import json
import os
import random

import pytest
import torch

from tests.attention_cases import ATTENTION
from tests.attention_checks import compare_with_oracle, make_qkv
from tests.fuzz import CONFIGURATIONS, KINDS, fuzz, make_case, run_case


@pytest.mark.gpu
@pytest.mark.parametrize("cases", [2000, 500], ids=["fixed", "fresh"])
def test_gpu_random_calls(cases):
    seed = 0 if cases == 2000 else random.SystemRandom().randrange(2**31)
    summary = fuzz(cases, seed, workers=min(14, os.cpu_count()))
    assert not summary["failures"], json.dumps(summary)  # pytest cuts a dictionary short


def test_the_fuzz_covers_every_configuration_and_kind_of_input():
    cases = [make_case(number, seed=0) for number in range(2000)]
    assert {c["configuration"] for c in cases} == set(range(len(CONFIGURATIONS)))
    assert {(c["configuration"], c["kind"]) for c in cases} == {
        (i, kind) for i in range(len(CONFIGURATIONS)) for kind in KINDS
    }
    assert make_case(7, seed=1) == make_case(7, seed=1) != make_case(7, seed=2)


def test_the_fuzz_notices_a_wrong_result(monkeypatch):
    """Guards the checks: a kernel that lost one row in a hundred is caught."""
    import tests.fuzz as module

    case = {"number": 0, "dtype": "float32", "kind": "normal", "heads": 1, "kv_heads": 1, "head_dims": (16, 16),
            "causal": True, "layout": "bhnd", "batch": 1, "num_q": 101, "num_k": 101}  # fmt: skip
    naive, _ = ATTENTION["naive"]
    monkeypatch.setattr(module, "flash_attention", naive)
    assert run_case(case, "cpu") is None

    def wrong(q, *args, **kwargs):
        o, lse = naive(q, *args, **kwargs)
        keep = (torch.arange(q.shape[2]) % 100 != 99)[:, None]
        return o * keep, lse

    monkeypatch.setattr(module, "flash_attention", wrong)
    assert run_case(case, "cpu").startswith("o: error")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has no interpreter")
def test_one_key_of_float32_outliers_is_within_what_its_sums_round():
    """dS is dP - delta, two sums of 80,000 in another order each, and 0."""
    case = {"number": 261, "dtype": "float32", "kind": "outliers", "heads": 8, "kv_heads": 1, "head_dims": (48, 80),
            "causal": False, "layout": "bhnd", "batch": 1, "num_q": 1, "num_k": 1}  # fmt: skip
    assert run_case(case, "cpu") is None


def test_the_gradient_of_a_sink_is_within_what_rounded_outliers_of_o_add_up_to(monkeypatch):
    """O of some thousands is rounded by tens; in a sum over rows these errors cancel in one O and not in another."""
    case = make_case(296, seed=841111817)
    assert (case["kind"], case["dtype"], case["sinks"]) == ("outliers", "bfloat16", True)
    monkeypatch.setattr("tests.fuzz.flash_attention", ATTENTION["tiled"][0])  # it rounds as the kernels do
    assert run_case(case, "cpu") is None


@pytest.mark.gpu
def test_gpu_agrees_beyond_two_to_the_31_elements():
    """Q, K, V and O of 2^31 + elements each: the last head, reached by 64-bit offsets only, equals a chunked
    reference; so do its gradients."""
    batch, heads, num_tokens, head_dim = 1, 65, 262_400, 128  # 65 * 262,400 * 128 = 2^31 + 35.6 million
    q, k, v = (
        torch.empty(batch, num_tokens, heads, head_dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        for _ in range(3)
    )
    assert q.numel() > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    for x in (q, k, v):
        x.normal_(generator=generator)
        x.requires_grad_()
    window = (64, 0)  # so that the work fits a test
    o = ATTENTION["flash"][0](q, k, v, window=window)
    do = torch.zeros_like(o)
    do[:, -1].normal_(generator=generator)
    grads = torch.autograd.grad(o, (q, k, v), do)
    for start in (0, num_tokens - 512):  # a row needs the 64 before it, a key the 64 after it
        rows = slice(start, start + 512)
        checked = slice(0, 448) if start == 0 else slice(64, 512)
        part = [x[:, -1:, rows].detach().double().requires_grad_() for x in (q, k, v)]
        expected = ATTENTION["naive"][0](*part, window=window)
        torch.testing.assert_close(
            o[:, -1:, rows][:, :, checked].double(), expected[:, :, checked], rtol=2e-2, atol=2e-2
        )
        wide_do = do[:, -1:, rows].double()
        inner = slice(0, 384) if start == 0 else slice(128, 512)
        for grad, value in zip(grads, torch.autograd.grad(expected, part, wide_do), strict=True):
            torch.testing.assert_close(
                grad[:, -1:, rows][:, :, inner].double(), value[:, :, inner], rtol=5e-2, atol=5e-2
            )
    assert not grads[0][:, 0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("features", [{}, {"dropout_p": 0.2, "dropout_seed": 1}], ids=["plain", "dropout"])
def test_gpu_131072_tokens(features):
    """The longest context: the first and last rows against float64."""
    num_tokens = 131_072
    q, k, v = (torch.randn(1, 2, num_tokens, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    o, lse = ATTENTION["flash"][0](q, k, v, causal=True, return_lse=True, **features)
    head = [x[:, :, :256] for x in (q, k, v)]
    if not features:
        expected, expected_lse = ATTENTION["naive"][0](*(x.double() for x in head), causal=True, return_lse=True)
        torch.testing.assert_close(o[:, :, :256].double(), expected, rtol=2e-2, atol=2e-2)
        last = (q[:, :, -8:].double(), k.double(), v.double())
        expected, expected_lse = ATTENTION["naive"][0](*last, causal=True, return_lse=True)
        torch.testing.assert_close(o[:, :, -8:].double(), expected, rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(lse[:, :, -8:].double(), expected_lse, rtol=1e-4, atol=1e-3)
    assert torch.isfinite(o).all()


@pytest.mark.gpu
def test_gpu_options_in_half_precision():
    """The matrix's features in bfloat16 at sizes of several tiles."""
    q, k, v = make_qkv(1, 4, 2, 700, 900, 64, dtype=torch.bfloat16, device="cuda", layout="bnhd")
    slopes, sinks = torch.rand(4, device="cuda"), torch.randn(4, device="cuda")
    for options in (
        {"window": (100, 50)},
        {"causal": True, "window": (128, -1)},
        {"softcap": 20.0, "causal": True},
        {"alibi_slopes": slopes, "causal": True},
        {"sinks": sinks, "causal": True},
        {"dropout_p": 0.2, "dropout_seed": 3, "causal": True},
    ):
        compare_with_oracle(ATTENTION["flash"][0], q, k, v, **options)
