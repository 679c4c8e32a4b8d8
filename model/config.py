"""A GPT's configuration: sizes and options, and their valid values."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, get_args

import torch
from torch import nn

from model.attention import ATTENTION, resolve_attention
from model.fp8 import FP8, MULTIPLE, why_no_fp8
from model.masks import parse_mask
from model.recompute import MODES

MLPS = ("gelu", "swiglu", "relu2")
LOSSES = ("auto", "chunked", "plain")
KINDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}
NORM_EPS = 1e-6  # small beside the mean square of a fresh embedding, 0.02 ** 2 = 4e-4
# no network is larger; beyond them sizes in bytes pass 2^63, and building the forecast's model takes minutes
LARGEST = {"num_layers": 4096, "n_embd": 2**20, "mlp_hidden": 2**22, "window": 2**31 - 1}


@dataclass
class GPTConfig:
    """What the network is. The defaults are GPT-2 124M's sizes; vocabulary and context come from the data.

    Raises:
        ValueError: an impossible value, naming the key, the value and the remedy.
    """

    num_layers: int = 12  # blocks of attention and MLP
    num_heads: int = 12  # query heads; head_dim is n_embd / num_heads
    num_kv_heads: int | None = None  # key and value heads, each shared by a group of query heads; null: num_heads
    n_embd: int = 768  # width of the residual stream
    mlp: str = "gelu"  # activation of the MLP: gelu | swiglu | relu2
    mlp_hidden: int | None = None  # width of the MLP; null: 4 n_embd, with swiglu 8/3 n_embd, which has as many weights
    qk_norm: bool = False  # RMSNorm on each head of q and k, which bounds the scores
    qk_gain: float = 1.0  # with qk_norm: factor of the scores, which lie within +-qk_gain sqrt(head_dim)
    tie_embeddings: bool = True  # the output head is the embedding table
    dropout: float = 0.0  # on the embedding and on what each branch adds to the residual stream
    attention_dropout: float = 0.0  # on the softmax's probabilities; the same mask in all backends; not with sdpa
    window: int | None = None  # tokens that each token sees, itself included; null: all before it
    mask: str | None = None  # prefix:N | bigbird:N | dilated:N, see model/masks.py; null: causal, within the window
    rope_base: float = 10000.0  # of RoPE, whose wavelengths are all below 2 pi rope_base tokens
    attention: str = "auto"  # auto | flash | naive | tiled | sdpa
    loss: str = "auto"  # auto | chunked (logits of a few thousand tokens at a time) | plain (of all at once)
    activation_checkpointing: str = "none"  # none | pointwise (only the MLP's non-linearity) | full | selective
    fp8: str = "none"  # none | mlp | all: which of the blocks' products run in 8 bits in training (sm_89 and newer)
    name: str | None = None  # a causal LM of transformers, a folder or OWNER/NAME; null: a GPT of these sizes

    def __post_init__(self):
        self.validate()

    @property
    def head_dim(self) -> int:
        if self.name is not None:  # it may differ from n_embd / num_heads
            return _of_transformers().head_dim(self.name)
        return self.n_embd // self.num_heads

    @property
    def theirs(self) -> dict[str, Any] | None:
        """The configuration in transformers, as JSON, of a model that `name` gives; None without a name."""
        return None if self.name is None else _of_transformers().described(self.name)

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def draws(self) -> bool:
        """Whether a forward pass in training draws random numbers."""
        return self.dropout + self.attention_dropout > 0

    def attention_features(self, document_mask: bool = False) -> tuple[str, ...]:
        """The features that the network needs of attention, by their names in kernels/support.py."""
        used = {
            "gqa": self.kv_heads != self.num_heads,
            "window": self.window is not None and self.mask is None,  # a mask holds the window
            "dropout": self.attention_dropout > 0,
            "varlen": document_mask,
        }
        seen = "causal" if self.mask is None else "block_mask"
        return (seen, *(name for name, is_used in used.items() if is_used))

    @property
    def mlp_width(self) -> int:
        if self.mlp_hidden is not None:
            return self.mlp_hidden
        if self.mlp == "swiglu":
            return round_up(8 * self.n_embd / 3, 64)
        return 4 * self.n_embd

    def validate(self) -> None:
        """Raise ValueError on the first invalid key; call it again after changing a field."""
        self._check_types()
        self._check_values()
        if self.name is None:  # a named model has its own sizes
            self._check_sizes()

    def _check_types(self) -> None:
        for field in fields(self):
            kinds, value = get_args(field.type) or (field.type,), getattr(self, field.name)
            if isinstance(value, bool):
                fits = bool in kinds
            elif isinstance(value, Integral):  # NumPy's too
                fits = int in kinds or float in kinds
            else:
                fits = isinstance(value, kinds)
            if not fits:
                raise ValueError(f"model.{field.name}={value!r} must be {' or '.join(KINDS[kind] for kind in kinds)}")

    def _check_values(self) -> None:
        """Each key by itself, and those that need another one."""
        for key in ("num_layers", "num_heads", "num_kv_heads", "n_embd", "mlp_hidden", "window"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"model.{key}={value} must be at least 1")
            if value is not None and value > LARGEST.get(key, value):
                raise ValueError(f"model.{key}={value} must be at most {LARGEST[key]}")
        for key, allowed in (
            ("mlp", MLPS),
            ("attention", ("auto", *ATTENTION)),
            ("loss", LOSSES),
            ("activation_checkpointing", MODES),
            ("fp8", FP8),
        ):
            value = getattr(self, key)
            if value not in allowed:
                raise ValueError(f"model.{key}={value} is unknown; use one of {', '.join(allowed)}")
        if self.mask is not None and parse_mask(self.mask)[0] == "bigbird" and self.window is None:
            raise ValueError(
                f"model.mask={self.mask} hides nothing without a window; set model.window, below data.seq_len"
            )
        for key in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"model.{key}={getattr(self, key)} must be at least 0 and below 1")
        if not (self.rope_base > 1 and math.isfinite(self.rope_base)):
            raise ValueError(f"model.rope_base={self.rope_base} must be a number above 1; 10000 is usual")
        if not 1e-20 <= self.qk_gain <= 1e20:  # attention's scale has limits
            raise ValueError(f"model.qk_gain={self.qk_gain} must be from 1e-20 to 1e20; 1 leaves scores as they are")
        if self.qk_gain != 1 and not self.qk_norm:
            raise ValueError(f"model.qk_gain={self.qk_gain} needs model.qk_norm=true; set that, or use model.qk_gain=1")

    def _check_sizes(self) -> None:
        """Widths and heads that divide each other."""
        if self.n_embd % self.num_heads:
            raise ValueError(
                f"model.n_embd={self.n_embd} is not a multiple of model.num_heads={self.num_heads}; "
                f"use n_embd={round_up(self.n_embd, 2 * self.num_heads)} or another number of heads"
            )
        if self.num_heads % self.kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}; "
                f"use one of {', '.join(map(str, divisors))}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.n_embd={self.n_embd} over model.num_heads={self.num_heads} gives an odd head_dim "
                f"{self.head_dim}, and RoPE turns pairs; use n_embd={(self.head_dim + 1) * self.num_heads}"
            )
        qkv = (self.num_heads + 2 * self.kv_heads) * self.head_dim
        if self.fp8 != "none" and any(size % MULTIPLE for size in (self.n_embd, self.mlp_width, qkv)):
            raise ValueError(
                f"model.fp8={self.fp8} needs widths that are multiples of {MULTIPLE}: model.n_embd={self.n_embd}, the "
                f"MLP's {self.mlp_width}, and {qkv} of q, k and v; use others, or model.fp8=none"
            )


def resolve_model(
    config: GPTConfig, device: torch.device | str, dtype: torch.dtype, *, document_mask: bool = False
) -> tuple[GPTConfig, str, str]:
    """Resolve `config` for `device`: a copy whose attention and loss name what will run.

    Args:
        dtype: what attention will run in, that is the autocast type where autocast is on.
        document_mask: whether attention must keep packed documents apart.

    Returns:
        (the copy, why this attention, why this loss); the reasons are one sentence each.

    Raises:
        ValueError: an attention given by name that cannot run, a mask with packed documents, or fp8 that cannot run.
    """
    if config.mask is not None and document_mask:
        raise ValueError(f"model.mask={config.mask} keeps no documents apart; use data.document_mask=false")
    if config.fp8 != "none":
        reason = why_no_fp8(device) if config.name is None else "a model of transformers keeps its own layers"
        if reason:
            raise ValueError(f"model.fp8={config.fp8} needs products in 8 bits: {reason}; use model.fp8=none")
    if config.name is not None:
        config = _of_transformers().sized(config)
    features = config.attention_features(document_mask)
    attention, why_attention = resolve_attention(config.attention, device, dtype, config.head_dim, features)
    if config.name is not None and document_mask and attention in ("naive", "sdpa"):
        if config.attention != "auto":
            raise ValueError(
                f"model.attention={attention} with model.name is transformers' own, which keeps documents apart in "
                "some models only; use model.attention=flash, or tiled on a CPU"
            )
        if torch.device(device).type != "cpu":
            raise ValueError(
                f"{why_attention.partition(';')[0]}, and transformers' own keeps documents apart in some "
                "models only; use data.document_mask=false"
            )
        attention, why_attention = "tiled", "auto: transformers' own keeps documents apart in some models only"
    if config.name is not None and (instead := _of_transformers().in_place_of(config, attention)):
        if config.attention != "auto" or document_mask:
            raise _of_transformers().no_such_attention(config.name, attention, instead, document_mask)
        attention, why_attention = instead, f"auto: transformers has no {attention} for this model"
    loss, why_loss = resolve_loss(config.loss, torch.device(device).type)
    return replace(config, attention=attention, loss=loss), why_attention, why_loss


def build_model(
    config: GPTConfig, vocab_size: int, seq_len: int, *, device: torch.device | str, document_mask: bool = False
) -> nn.Module:
    """The network of a resolved `config`: a `GPT`, or the named model of transformers with the interface of one."""
    if config.name is not None:
        return _of_transformers().PretrainedLM(config, vocab_size, seq_len, device=device, document_mask=document_mask)
    from model.gpt import GPT

    return GPT(config, vocab_size, seq_len, device=device)


def as_described(name: str, theirs: dict[str, Any]) -> AbstractContextManager[None]:
    """Inside, models of that name are built from `theirs` without a folder; their weights are loaded later."""
    return _of_transformers().as_described(name, theirs)


def _of_transformers():
    try:
        from model import huggingface_model
    except ModuleNotFoundError as error:
        raise ValueError(f"model.name needs transformers ({error}); `uv run --group hf` brings it") from error
    except ImportError as error:
        raise ValueError(f"model.name needs transformers: {error}") from error
    return huggingface_model


def resolve_loss(name: str, device: str) -> tuple[str, str]:
    """Turn a configured model.loss into "chunked" or "plain", and say why; `device` is "cuda", "cpu" or the like."""
    if name != "auto":
        return name, "asked for by name"
    if device == "cuda":
        return "chunked", "auto: the device is cuda, where logits of all tokens are the largest tensors of a step"
    return "plain", f"auto: the device is {device}"


def round_up(size: float, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple
