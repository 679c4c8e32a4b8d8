"""A GPT in the terms of Hugging Face's transformers: the class that computes the same, its config.json, its tensors.

    mlp           qk_norm   window   class
    swiglu        false     null     LlamaForCausalLM
    swiglu        false     set      MistralForCausalLM
    swiglu        true      any      Qwen3ForCausalLM
    gelu, relu2   false     null     ArceeForCausalLM

Each class has one table, from the names of its weights to ours, that can be read in both directions. transformers is
not imported: these are names and shapes.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.config import GPTConfig
from model.gpt import GPT, INIT_STD, NORM_EPS

ACTIVATIONS = {"swiglu": "silu", "gelu": "gelu_pytorch_tanh", "relu2": "relu2"}  # model.mlp -> hidden_act
GAINS = "gain", "head_gain"


class Part(NamedTuple):
    """A weight of theirs, one of ours, and how they belong together, a key of `sizes`.

    gain, head_gain: theirs is the gain of a norm. Ours have none, so it is ones. `ours` is the matrix after that norm,
        into whose columns another gain could be multiplied; "" where something stands between.
    any other: theirs is so many rows of ours, those that follow the rows of the table's lines before it.
    """

    theirs: str
    ours: str
    how: str


def sizes(model: GPT) -> dict[str, int]:
    """Rows of a weight of theirs, by `Part.how`."""
    config = model.config
    return {
        "vocabulary": model.vocab_size,  # our tables have more rows, which no token uses
        "width": config.n_embd,
        "mlp_width": config.mlp_width,
        "heads": config.num_heads * config.head_dim,
        "kv_heads": config.kv_heads * config.head_dim,
        "gain": config.n_embd,
        "head_gain": config.head_dim,
    }


HEAD = Part("lm_head", "head", "vocabulary")  # neither of us has it where embeddings are tied
ENDS = (Part("model.embed_tokens", "embedding", "vocabulary"), Part("model.norm", "head", "gain"), HEAD)
# of each layer, after "model.layers.N." of theirs and "blocks.N." of ours
ATTENTION = (
    Part("input_layernorm", "attention.qkv", "gain"),
    Part("self_attn.q_proj", "attention.qkv", "heads"),
    Part("self_attn.k_proj", "attention.qkv", "kv_heads"),
    Part("self_attn.v_proj", "attention.qkv", "kv_heads"),
    Part("self_attn.o_proj", "attention.out", "width"),
    Part("post_attention_layernorm", "mlp.up", "gain"),
)
QK_NORM = (Part("self_attn.q_norm", "", "head_gain"), Part("self_attn.k_norm", "", "head_gain"))
GATE = (Part("mlp.gate_proj", "mlp.up", "mlp_width"),)
MLP = (Part("mlp.up_proj", "mlp.up", "mlp_width"), Part("mlp.down_proj", "mlp.down", "width"))


class Architecture(NamedTuple):
    """A class of transformers, the name of its configuration, and the tensors of a layer."""

    name: str
    model_type: str
    layer: tuple[Part, ...]


LLAMA = Architecture("LlamaForCausalLM", "llama", ATTENTION + GATE + MLP)
MISTRAL = Architecture("MistralForCausalLM", "mistral", ATTENTION + GATE + MLP)
QWEN3 = Architecture("Qwen3ForCausalLM", "qwen3", ATTENTION + QK_NORM + GATE + MLP)
ARCEE = Architecture("ArceeForCausalLM", "arcee", ATTENTION + MLP)


def architecture(config: GPTConfig) -> Architecture:
    """The class of transformers that computes what a GPT of `config` does; ValueError where there is none."""
    if config.mask is not None:
        raise ValueError(f"model.mask={config.mask} is no mask of transformers; train again with model.mask=null")
    if config.mlp == "swiglu":
        if config.qk_norm:
            return QWEN3
        return LLAMA if config.window is None else MISTRAL
    for key, value, without in (("qk_norm", config.qk_norm, "false"), ("window", config.window, "null")):
        if value:
            raise ValueError(
                f"model.{key}={value} with model.mlp={config.mlp} is no architecture of transformers; "
                f"train again and use model.mlp=swiglu or model.{key}={without}"
            )
    return ARCEE


def config_json(model: GPT, end_of_text: int | None = None) -> dict[str, Any]:
    """What config.json says of `model`; `end_of_text` is the token that begins and ends a document."""
    config, found = model.config, architecture(model.config)
    contents: dict[str, Any] = {
        "architectures": [found.name],
        "model_type": found.model_type,
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
        if found is QWEN3:  # which has layers without a window below max_window_layers
            contents |= {"use_sliding_window": True, "max_window_layers": 0}
    return contents


def table(model: GPT) -> list[Part]:
    """All weights that `model` has in transformers, with the names in full."""
    parts = [part for part in ENDS if part is not HEAD or model.head is not None]
    for n in range(model.config.num_layers):
        for theirs, ours, how in architecture(model.config).layer:
            parts.append(Part(f"model.layers.{n}.{theirs}", ours and f"blocks.{n}.{ours}", how))
    return parts


def tensors(model: GPT) -> dict[str, Tensor]:
    """The weights of `model` under their names in transformers; they share its memory, all but the gains."""
    own = {name.removesuffix(".weight"): weight.detach() for name, weight in model.named_parameters()}
    size, taken, found = sizes(model), Counter[str](), {}
    for theirs, ours, how in table(model):
        if how in GAINS:
            found[f"{theirs}.weight"] = torch.ones(size[how]).to(model.embedding.weight)
        else:
            found[f"{theirs}.weight"] = own[ours][taken[ours] : taken[ours] + size[how]]
            taken[ours] += size[how]
    return found
