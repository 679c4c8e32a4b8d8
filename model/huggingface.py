"""A GPT in the terms of Hugging Face's transformers: the class that computes the same, its config.json, its tensors.

    mlp           qk_norm   window   class
    swiglu        false     null     LlamaForCausalLM
    swiglu        false     set      MistralForCausalLM
    swiglu        true      any      Qwen3ForCausalLM
    gelu, relu2   false     null     ArceeForCausalLM

Each class has one table, from its tensors' names to ours, which can be read in both directions. transformers is not
imported: these are names and shapes.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.config import GPTConfig
from model.gpt import GPT, INIT_STD, NORM_EPS

ACTIVATIONS = {"swiglu": "silu", "gelu": "gelu_pytorch_tanh", "relu2": "relu2"}  # model.mlp -> hidden_act

Size = Callable[[GPT], int]


class Rows(NamedTuple):
    """A matrix of theirs: rows of one of ours, those that follow the rows of the line before it in the table."""

    theirs: str
    ours: str
    size: Size


class Gain(NamedTuple):
    """The gain of a norm of theirs, which ours have not: ones.

    `ours` is the matrix that follows the norm, into whose columns a gain other than ones can be multiplied; None where
    none follows at once.
    """

    theirs: str
    ours: str | None
    size: Size


def _width(model: GPT) -> int:
    return model.config.n_embd


def _mlp_width(model: GPT) -> int:
    return model.config.mlp_width


def _head_dim(model: GPT) -> int:
    return model.config.head_dim


def _q_rows(model: GPT) -> int:
    return model.config.num_heads * model.config.head_dim


def _kv_rows(model: GPT) -> int:
    return model.config.kv_heads * model.config.head_dim


def _vocab_size(model: GPT) -> int:  # our tables have more rows, which no token uses
    return model.vocab_size


Table = tuple[Rows | Gain, ...]
ENDS: Table = (
    Rows("model.embed_tokens.weight", "embedding.weight", _vocab_size),
    Gain("model.norm.weight", "head.weight", _width),
    Rows("lm_head.weight", "head.weight", _vocab_size),  # absent from both where embeddings are tied
)
# of each layer, after "model.layers.N." of theirs and "blocks.N." of ours
UNGATED: Table = (
    Gain("input_layernorm.weight", "attention.qkv.weight", _width),
    Rows("self_attn.q_proj.weight", "attention.qkv.weight", _q_rows),
    Rows("self_attn.k_proj.weight", "attention.qkv.weight", _kv_rows),
    Rows("self_attn.v_proj.weight", "attention.qkv.weight", _kv_rows),
    Rows("self_attn.o_proj.weight", "attention.out.weight", _width),
    Gain("post_attention_layernorm.weight", "mlp.up.weight", _width),
    Rows("mlp.up_proj.weight", "mlp.up.weight", _mlp_width),
    Rows("mlp.down_proj.weight", "mlp.down.weight", _width),
)
GATED: Table = (*UNGATED[:-2], Rows("mlp.gate_proj.weight", "mlp.up.weight", _mlp_width), *UNGATED[-2:])
QK_NORM: Table = (
    Gain("self_attn.q_norm.weight", None, _head_dim),
    Gain("self_attn.k_norm.weight", None, _head_dim),
)


class Architecture(NamedTuple):
    """A class of transformers, the name of its configuration, and the tensors of a layer."""

    name: str
    model_type: str
    layer: Table


LLAMA = Architecture("LlamaForCausalLM", "llama", GATED)
MISTRAL = Architecture("MistralForCausalLM", "mistral", GATED)
QWEN3 = Architecture("Qwen3ForCausalLM", "qwen3", GATED + QK_NORM)
ARCEE = Architecture("ArceeForCausalLM", "arcee", UNGATED)


def architecture(config: GPTConfig) -> Architecture:
    """The class of transformers that computes what a GPT of `config` does; ValueError where there is none."""
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


def table(model: GPT) -> list[Rows | Gain]:
    """The lines of all tensors that `model` has in transformers, with the names in full."""
    ends = [part for part in ENDS if part.theirs != "lm_head.weight" or not model.config.tie_embeddings]
    layers = [
        part._replace(theirs=f"model.layers.{n}.{part.theirs}", ours=part.ours and f"blocks.{n}.{part.ours}")
        for n in range(model.config.num_layers)
        for part in architecture(model.config).layer
    ]
    return [*ends, *layers]


def tensors(model: GPT) -> dict[str, Tensor]:
    """The weights of `model` under their names in transformers; they share its memory, all but the gains."""
    own = {name: weight.detach() for name, weight in model.named_parameters()}
    taken: Counter[str] = Counter()  # rows, by our names
    found = {}
    for part in table(model):
        size = part.size(model)
        if isinstance(part, Gain):
            found[part.theirs] = torch.ones(size).to(model.embedding.weight)
        else:
            first = taken[part.ours]
            found[part.theirs] = own[part.ours][first : first + size]
            taken[part.ours] += size
    padded = {"embedding.weight", "head.weight"}
    assert all(taken[name] == len(weight) or name in padded for name, weight in own.items()), taken
    return found
