"""The benchmark of our attention in transformers, in small."""

import json

import pytest

from scripts.bench import huggingface as bench
from training.hardware import HardwareConfig

pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")
SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip


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


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="parts=prefil is not one of prefill, decode, step"):
        bench.HuggingFaceBenchSettings(parts=["prefil"])
