"""Tiny random models of transformers' families, and what is asked of each with our attention and with theirs."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")

import kernels  # noqa: E402
from model import huggingface  # noqa: E402

VOCAB, N = 97, 21  # more tokens than a call over a cache takes
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 16}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
GPT2 = {
    "vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.15,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODERS = {
    "GPT2": GPT2,
    "Llama": GROUPED,
    "Qwen3": GROUPED | LAYERS | {"use_sliding_window": True},
    "Mistral": GROUPED | {"sliding_window": 6},
    "Gemma2": GROUPED | LAYERS | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "Gemma3": GROUPED | LAYERS | {"query_pre_attn_scalar": 16},
    "GptOss": GROUPED | LAYERS | {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_scaling": None},
    "Olmo2": GROUPED,
    "Phi3": {k: v for k, v in GROUPED.items() if k != "head_dim"} | {"sliding_window": 6},
    "GPTNeoX": SIZES | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "OPT": {
        "vocab_size": VOCAB, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "init_std": 0.15, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": None, "word_embed_proj_dim": 64,
    },
}  # fmt: skip
ENCODERS = {
    "Bert": SIZES | STILL,
    "Roberta": SIZES | STILL,
    "ModernBert": SIZES | {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
}
BART = {
    "vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 64,
    "init_std": 0.15, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
HEADS = {"GPT2": "GPT2LMHeadModel", "Bart": "BartForConditionalGeneration"}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def build(family: str, **changed):
    """A model whose attention matters: large weights, sinks that are not zero."""
    sizes = {**DECODERS, **ENCODERS, "Bart": BART}[family] | changed
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][: sizes["num_hidden_layers"]]
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**sizes)
    head = HEADS.get(family, f"{family}ForMaskedLM" if family in ENCODERS else f"{family}ForCausalLM")
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = getattr(transformers, head)(config).eval()
    for name, x in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(x)
    return model


def tokens(rows=3, length=N, seed=1):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str, rows=3, length=N):
    """A mask (B, N) of 1s at real tokens: no padding, much, little."""
    pads = torch.tensor([0, 2 * length // 3, 3])[:rows, None]
    places = torch.arange(length)
    return (places >= pads if side == "left" else places < length - pads).long()


def pytorch_on_a_cpu(monkeypatch) -> None:
    """What a CPU without Triton's interpreter runs: the mathematics of the kernels in PyTorch."""
    if not torch.cuda.is_available():
        off = {"why_not": lambda *_, **__: "the interpreter is off"}
        monkeypatch.setattr(huggingface, "kernels", SimpleNamespace(**vars(kernels) | off))
        naive = kernels.naive_attention_with_kvcache
        monkeypatch.setattr(huggingface, "flash_attention_with_kvcache", naive)
        monkeypatch.setattr(huggingface, "KVCacheLayers", lambda **options: partial(naive, **options))


def with_each(model, run, **more):
    """What `run(model)` gives with their eager attention and with ours."""
    found = []
    for name in ("eager", huggingface.NAME):
        model.set_attn_implementation(name)
        found.append(run(model, **more))
    return found


def close(theirs, ours, tolerance=3e-6):
    """tolerance: of the largest number; float32 in another order."""
    assert theirs.abs().max() > 0
    assert (theirs - ours).abs().max() <= tolerance * theirs.abs().max()
