"""The benchmark of our attention in transformers, in small."""

import json

import pytest
import torch

from scripts.bench import huggingface as bench
from training.hardware import HardwareConfig

pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")
SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip


@pytest.mark.usefixtures("smoke_test")
def test_each_part_has_a_row_for_each_attention(tmp_path):
    settings = bench.HuggingFaceBenchSettings(
        ["gpt_triton", "sdpa", "flash_attention_2"], prompts=1, prompt_tokens=17, decode_rows=2, decode_context=17,
        new_tokens=2, sizes=SMALL, hardware=HardwareConfig(device="cpu", dtype="float32", num_threads=1),
    )  # fmt: skip
    bench.main.__wrapped__(settings, tmp_path)
    rows = json.loads((tmp_path / "bench_huggingface.json").read_text())["rows"]
    assert [(row["part"], row["attention"]) for row in rows] == [
        (p, a) for p in settings.parts for a in settings.attention
    ]
    for row in rows:  # flash-attn needs a GPU
        assert ("error" in row) == (row["attention"] == "flash_attention_2")
        assert "error" in row or row["tokens_per_second"] > 0
        assert "error" in row or row["p99_ms"] >= row["ms"]  # of two times the longer
        tokens = 2 if row["part"] == "decode" else 17
        assert "error" in row or row["tokens_per_second"] == pytest.approx(1e3 * tokens / row["ms"])


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="parts=prefil is not one of prefill, decode, step"):
        bench.HuggingFaceBenchSettings(parts=["prefil"])


def test_sizes_of_no_model_are_one_line():
    """They ended in transformers' own error, which is no ValueError."""
    with pytest.raises(ValueError, match=r"^sizes={'hidden_size': 33} are no Llama's \(.*multiple.*\); use others$"):
        bench.build(bench.HuggingFaceBenchSettings(sizes={"hidden_size": 33}))


def test_their_flash_path_runs_over_lent_kernels(monkeypatch):
    """Padded and not: transformers' own padding around functions that get flash-attn's arguments."""
    asked = []

    def attend(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, softmax_scale=None,
               causal=False):  # fmt: skip
        asked.append(cu_seqlens_q)
        rows = [(q, k, v)]
        if cu_seqlens_q is not None:
            split = [x.split(starts.diff().tolist()) for x, starts in ((q, cu_seqlens_q), (k, cu_seqlens_k))]
            rows = zip(*split, v.split(cu_seqlens_k.diff().tolist()), strict=True)
        o = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(-3, -2) for x in row), is_causal=causal, scale=softmax_scale, enable_gqa=True
            ).transpose(-3, -2)
            for row in rows
        ]
        return torch.cat(o)

    monkeypatch.setattr(bench, "pytorch_flash", attend)
    model = bench.build(bench.HuggingFaceBenchSettings(sizes=SMALL)).eval()
    ids, mask = torch.arange(1, 25).view(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    for padding in (torch.ones_like(mask), mask):
        with torch.no_grad():
            model.set_attn_implementation("eager")
            theirs = model(ids, attention_mask=padding).logits
            bench.lend_kernels()
            model.config._attn_implementation = bench.FLASH
            found = model(ids, attention_mask=padding).logits
        assert (found - theirs)[padding == 1].abs().max() <= 1e-5 * theirs.abs().max()
    assert asked[0] is None
    assert asked[1].tolist() == [0, 12, 19]
