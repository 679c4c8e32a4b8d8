"""A GPT in the terms of Hugging Face's transformers: the class that computes the same, its config.json, its tensors.

    mlp           qk_norm   window   class
    swiglu        false     null     LlamaForCausalLM
    swiglu        false     set      MistralForCausalLM
    swiglu        true      any      Qwen3ForCausalLM
    gelu, relu2   false     null     ArceeForCausalLM

transformers is not imported: these are names and shapes.
"""

from typing import Any

import torch
from torch import Tensor

from model.config import NORM_EPS, GPTConfig
from model.gpt import GPT, INIT_STD

ACTIVATIONS = {"swiglu": "silu", "gelu": "gelu_pytorch_tanh", "relu2": "relu2"}  # model.mlp -> hidden_act


def architecture(config: GPTConfig) -> str:
    """The class of transformers that computes what a GPT of `config` does; ValueError where there is none."""
    if config.mask is not None:
        raise ValueError(f"model.mask={config.mask} is no mask of transformers; train again with model.mask=null")
    if config.mlp == "swiglu":
        if config.qk_norm:
            return "Qwen3ForCausalLM"
        if config.window is not None:
            return "MistralForCausalLM"
        return "LlamaForCausalLM"
    for key, value, without in (("qk_norm", config.qk_norm, "false"), ("window", config.window, "null")):
        if value:
            raise ValueError(
                f"model.{key}={value} with model.mlp={config.mlp} is no architecture of transformers; "
                f"train again and use model.mlp=swiglu or model.{key}={without}"
            )
    return "ArceeForCausalLM"


def config_json(model: GPT, end_of_text: int | None = None) -> dict[str, Any]:
    """The contents of config.json for `model`; `end_of_text` is the token that begins and ends a document."""
    config, name = model.config, architecture(model.config)
    model_type = name.removesuffix("ForCausalLM").lower()
    contents: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": ACTIVATIONS[config.mlp],
        "max_position_embeddings": model.seq_len,
        "rms_norm_eps": NORM_EPS,
        "initializer_range": INIT_STD,
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_base,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},  # transformers 5
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
    }
    if config.window is not None:
        contents["sliding_window"] = config.window  # tokens that each token sees, itself included, there too
        if model_type == "qwen3":  # its layers below max_window_layers have no window
            contents |= {"use_sliding_window": True, "max_window_layers": 0}
    return contents


def tensors(model: GPT) -> dict[str, Tensor]:
    """The weights of `model` under their names in transformers.

    They share its memory, except the gains of norms, which ours do not have: ones, times qk_gain in q's.
    """
    config = model.config
    own = {name.removesuffix(".weight"): weight.detach() for name, weight in model.named_parameters()}
    heads = [n * config.head_dim for n in (config.num_heads, config.kv_heads, config.kv_heads)]

    def gain(size: int) -> Tensor:
        return torch.ones(size).to(model.embedding.weight)

    # rows beyond the vocabulary are padding
    found = {"model.embed_tokens": own["embedding"][: model.vocab_size], "model.norm": gain(config.n_embd)}
    if model.head is not None:
        found["lm_head"] = own["head"][: model.vocab_size]
    for n in range(config.num_layers):
        ours, theirs = f"blocks.{n}.", f"model.layers.{n}."
        q, k, v = own[f"{ours}attention.qkv"].split(heads)
        *gate, up = own[f"{ours}mlp.up"].split(config.mlp_width)
        layer = {
            "input_layernorm": gain(config.n_embd),
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": own[f"{ours}attention.out"],
            "post_attention_layernorm": gain(config.n_embd),
            "mlp.up_proj": up,
            "mlp.down_proj": own[f"{ours}mlp.down"],
        }
        if gate:
            layer["mlp.gate_proj"] = gate[0]
        if config.qk_norm:
            layer["self_attn.q_norm"] = gain(config.head_dim) * config.qk_gain
            layer["self_attn.k_norm"] = gain(config.head_dim)
        found |= {theirs + name: weight for name, weight in layer.items()}
    return {f"{name}.weight": weight for name, weight in found.items()}
