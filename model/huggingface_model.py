"""A causal language model of transformers in our training loop, wrapped in the interface of `model.GPT`.

`python train.py model=huggingface model.name=FOLDER_OR_ID`. Attention is ours (model/huggingface.py) or, by
model.attention, theirs; batches, documents, loss and optimizer are those of any run.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn

from model import huggingface  # isort: skip  (it refuses another package `kernels`, before transformers imports that)
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, masking_utils
from transformers.utils import logging

from kernels import cross_entropy, linear_cross_entropy
from model.config import GPTConfig
from model.generation import Continuation, Drawn
from model.huggingface_masks import COMPUTE_WITH_MASKS
from model.inference import in_eval_mode
from model.positions import positions_in

IMPLEMENTATIONS = {"flash": huggingface.NAME, "tiled": huggingface.NAME, "sdpa": "sdpa", "naive": "eager"}
# fields of GPTConfig and their names in transformers; a model that is loaded has its own sizes
SIZES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "n_embd": "hidden_size",
}
OURS = ("mlp", "mlp_hidden", "qk_norm", "qk_gain", "tie_embeddings", "window", "mask", "rope_base")
MODES = ("none", "full")
# what their code raises for a config.json whose values do not fit each other or the weights
MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError)
# keys of a generation_config.json that only sampling reads
OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
# keys that describe files, versions and memory, and not the model
NOT_DESCRIBED = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_KEPT: dict[str, dict[str, Any]] = {}  # name -> `described`, as a checkpoint has it


@contextmanager
def as_described(name: str, values: dict[str, Any]) -> Iterator[None]:
    """Inside, a model of that name is what `values` describe: no folder or hub is read, and its weights are random."""
    head_dim.cache_clear()
    _KEPT[name] = values
    try:
        yield
    finally:
        del _KEPT[name]
        head_dim.cache_clear()


@cache
def described(name: str) -> dict[str, Any]:
    """Its configuration in transformers as JSON, without dropout, which is ours, and without NOT_DESCRIBED."""
    values = json.loads(_their_own(name).to_json_string())
    return {key: value for key, value in values.items() if key not in NOT_DESCRIBED and not _is_dropout(key)}


def sized(config: GPTConfig) -> GPTConfig:
    """`config` with the sizes of the model that it names.

    Raises ValueError where there is no such model, and for a key that describes a GPT of ours.
    """
    theirs = their_config(config)
    found = {key: getattr(theirs, name, None) for key, name in SIZES.items()}
    for key in (*SIZES, *OURS):
        value = getattr(config, key)
        if value not in (getattr(GPTConfig, key), found.get(key)):
            raise ValueError(f"model.{key}={value} describes a GPT of ours and {config.name} has its own; leave it out")
    for key in ("num_layers", "num_heads", "n_embd"):
        if type(found[key]) is not int:
            raise ValueError(
                f"model.name={config.name}: its config.json has {SIZES[key]}={found[key]}, which must be a whole "
                "number; use a model whose layers have attention"
            )
    if config.activation_checkpointing not in MODES:
        raise ValueError(
            f"model.activation_checkpointing={config.activation_checkpointing} is for a GPT of ours; "
            f"with model.name use {' or '.join(MODES)}"
        )
    return replace(config, **found)


def their_config(config: GPTConfig) -> Any:
    """Its configuration in transformers, with our dropout in the place of theirs. Raises ValueError."""
    theirs, found = _their_own(config.name), set()
    for part in _with_parts(theirs):
        for key, value in vars(part).items():
            if type(value) in (int, float) and _is_dropout(key):  # some files say 0 for 0.0
                found.add(ours := "attention_dropout" if "att" in key else "dropout")
                setattr(part, key, getattr(config, ours))
    if missing := [key for key in ("attention_dropout", "dropout") if key not in found and getattr(config, key)]:
        key = missing[0]
        raise ValueError(f"{config.name} has no such dropout as model.{key}={getattr(config, key)}; use model.{key}=0")
    return theirs


def _is_dropout(key: str) -> bool:
    return "dropout" in key or key.endswith("pdrop")


def _their_own(name: str) -> Any:
    try:
        if name in _KEPT:
            return AutoConfig.for_model(**_KEPT[name])
        folder = name
        if not Path(folder).is_dir():
            # without the hub transformers retries for 23 s and prints two dozen lines before it reads the cache
            folder = snapshot_download(folder, allow_patterns="config.json")
        return AutoConfig.from_pretrained(folder).get_text_config()
    except HFValidationError as error:  # a name that cannot be the hub's
        raise ValueError(f"model.name={name} is no folder; give one that save_pretrained wrote") from error
    except (OSError, StrictDataclassError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"model.name={name} is no model of transformers ({reason}); give a folder that "
            "save_pretrained wrote, or OWNER/NAME of the hub"
        ) from error
    except MISFITS as error:
        raise misfit(name, error) from error


def _with_parts(config: Any) -> list[Any]:
    """`config` and those inside it: DBRX and MPT have one for attention."""
    inside = (getattr(config, key, None) for key in config.sub_configs)
    return [config, *(part for part in inside if isinstance(part, PreTrainedConfig))]


def in_place_of(config: GPTConfig, attention: str) -> str | None:
    """The attention to use where transformers has no `attention` for the model of `config`; None where it has."""
    theirs = their_config(config)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(theirs), None)
    if kind is None:  # which `_loaded` refuses
        return None
    ours = theirs.model_type not in COMPUTE_WITH_MASKS and kind._can_set_attn_implementation()
    has = {"eager": True, "sdpa": kind._supports_sdpa, huggingface.NAME: ours}
    return None if has[IMPLEMENTATIONS[attention]] else "sdpa" if kind._supports_sdpa else "naive"


def no_such_attention(name: str, attention: str, instead: str, document_mask: bool) -> ValueError:
    return ValueError(
        f"model.attention={attention} cannot be {name}'s: transformers has none such for it; "
        f"use model.attention={instead}{' and data.document_mask=false' if document_mask else ''}"
    )


@cache
def head_dim(name: str) -> int:
    """The head_dim of a model's attention; a start reads it several times, and the hub once."""
    config = GPTConfig(name=name)
    found = sized(config)
    return getattr(their_config(config), "head_dim", None) or found.n_embd // found.num_heads


def num_parameters(config: GPTConfig) -> int:
    theirs = their_config(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(theirs).num_parameters()
    except MISFITS as error:
        raise misfit(config.name, error) from error


def misfit(name: str, error: Exception) -> ValueError:
    """The error that explains one of MISFITS."""
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return ValueError(f"model.name={name} has a config.json that does not fit it ({reason}); correct it")


class PretrainedLM(nn.Module):
    """A model of transformers with the interface that the training loop needs, that of `model.GPT`.

    Args:
        config: `name` says which model; its attention and loss are resolved names, its sizes the model's (`sized`).
        vocab_size: of the tokenizer; the model may have more rows.
        seq_len: the longest context, in tokens.
        document_mask: whether it will be given packed documents.

    Raises:
        ValueError: a model that lacks weights, is not causal or is not on transformers' attention interface, or an
            argument that does not fit it.
    """

    def __init__(
        self,
        config: GPTConfig,
        vocab_size: int,
        seq_len: int,
        *,
        device: torch.device | str = "cpu",
        document_mask: bool = False,
    ):
        super().__init__()
        self.config, self.vocab_size, self.seq_len = config, vocab_size, seq_len
        theirs = their_config(config)
        self.longest = getattr(theirs, "max_position_embeddings", None) or seq_len
        if seq_len > self.longest:
            raise ValueError(
                f"data.seq_len={seq_len} is longer than the {self.longest} tokens of {config.name}; shorten it"
            )
        if vocab_size > theirs.vocab_size:
            raise ValueError(
                f"the tokenizer has {vocab_size} tokens, {config.name} {theirs.vocab_size}; use tokenizer={config.name}"
            )
        if config.attention == "tiled" and torch.device(device).type != "cpu":
            raise ValueError("model.attention=tiled with model.name is for a CPU; use model.attention=flash")
        logging.disable_progress_bar()  # the console is the run's
        if config.attention == "naive":  # some, such as Falcon, keep the attention they were made with
            theirs._attn_implementation = "eager"
        self.inner = _loaded(config.name, theirs)
        with suppress(ValueError):  # its message is about issues of transformers
            self.inner.set_attn_implementation(IMPLEMENTATIONS[config.attention])
        self.is_ours = self.inner.config._attn_implementation == huggingface.NAME
        if (its_own := self.inner.config._attn_implementation) != IMPLEMENTATIONS[config.attention]:
            instead = "sdpa" if its_own == "sdpa" else "naive"
            raise no_such_attention(config.name, config.attention, instead, document_mask)
        self._refuse_what_the_loop_is_not_for()
        self.keeps_documents_apart = self.is_ours and self._keeps_documents_apart()
        if document_mask:
            self._refuse_documents_that_meet()
        if config.activation_checkpointing == "full":
            self.inner.gradient_checkpointing_enable({"use_reentrant": False})
        self.to(device)
        self.train()
        self._shared: dict[tuple, dict[str, Any]] = {}

    @property
    def blocks(self) -> list[nn.Module]:
        """The model's layers."""
        return list(max((m for m in self.inner.modules() if isinstance(m, nn.ModuleList)), key=len))

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, kv_cache: Any = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """As `GPT.forward`, without our cache: logits (B, N, columns), or the loss summed over tokens that count."""
        assert kv_cache is None, "their cache is another; see `continued`"
        asked: dict[str, Any] = {"input_ids": tokens, "use_cache": False, **self._of_shape(tokens)}
        if cu_seqlens is not None:
            self._refuse_documents_that_meet()
            asked["position_ids"] = positions_in(cu_seqlens, tokens.numel()).view(tokens.shape)
            asked |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        if targets is not None and self.config.loss == "chunked":
            h, table = self.inner.base_model(**asked).last_hidden_state, self.inner.get_output_embeddings().weight
            return linear_cross_entropy(h.flatten(0, 1), table, targets.flatten(), len(table))
        logits = self.inner(**asked).logits
        if targets is None:
            return logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), logits.size(-1))

    def continued(
        self, sequences: Iterable[Continuation], uniform: Tensor, choose: Callable, stop_token: int | None
    ) -> Iterator[Drawn]:
        """Yields what `model.generate` does, over transformers' cache, one text after the other.

        uniform: (num_samples, max_new_tokens) float64; choose: (logits (1, V), a number (1,) of uniform) -> token.
        """
        kind = next(self.parameters()).device.type
        now = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        return self._continued(sequences, uniform, choose, stop_token, now)

    @torch.no_grad()
    def _continued(
        self, sequences: Iterable[Continuation], uniform: Tensor, choose: Callable, stop_token: int | None,
        autocast: Callable[[], torch.autocast],
    ) -> Iterator[Drawn]:  # fmt: skip
        for sequence in sequences:
            text, given, cache = list(sequence.context), [], None
            for number in uniform[sequence.sample]:
                if len(text) > self.longest:  # its last half is read again
                    text, cache = text[-max(1, self.longest // 2) :], None
                # a model that returns no cache, such as OpenAI's first GPT or RecurrentGemma, reads all of it each time
                tokens = torch.tensor([text if cache is None else given], device=next(self.parameters()).device)
                with in_eval_mode(self), autocast():
                    found = self.inner(input_ids=tokens, past_key_values=cache, use_cache=True)
                logits, cache = found.logits[:, -1], getattr(found, "past_key_values", None)
                given = [int(choose(logits[:, : self.vocab_size], number[None]))]
                text = text + given
                yield [(sequence.number, *given)]
                if given == [stop_token]:
                    break

    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.parameters())

    def num_matmul_parameters(self) -> int:
        """All but tables for look-ups only; of experts, as many as a token is routed to, if their config says it."""
        head, config = self.inner.get_output_embeddings().weight, self.inner.config.get_text_config()
        names = "num_experts_per_tok", "top_k_experts", "moe_top_k"
        found = (getattr(part, name, None) for name in names for part in _with_parts(config))
        chosen = next(filter(None, found), None)
        idle = 0
        for module in self.modules():
            if isinstance(module, nn.Embedding) and module.weight is not head:
                idle += module.weight.numel()
            flat = getattr(module, "moe_num_experts", 0)  # DBRX concatenates experts' rows; all others stack matrices
            if chosen and (experts := flat or getattr(module, "num_experts", 0)):
                own = sum(x.numel() for x in module.parameters(recurse=False) if flat or x.dim() == 3)
                idle += own // experts * (experts - chosen)
        return self.num_parameters() - idle

    def save(self, folder: Path) -> None:
        """A folder that transformers opens, without the tokenizer."""
        generation = self.inner.generation_config
        for name in () if generation.do_sample else OF_SAMPLING:  # transformers saves none that it would not read
            setattr(generation, name, None)
        self.inner.save_pretrained(folder)

    @torch.compiler.disable
    @torch.inference_mode(False)  # they are kept, and a gradient may read them
    def _of_shape(self, tokens: Tensor) -> dict[str, Any]:
        """Positions and masks, made once for each shape, so that transformers need not inspect them on the GPU."""
        key = (*tokens.shape, tokens.device)
        if key not in self._shared:
            positions = torch.arange(tokens.size(1), device=tokens.device).expand(tokens.shape)
            self._shared[key] = {"position_ids": positions}
            if self.is_ours:
                hidden = torch.empty((*tokens.shape, 0), device=tokens.device)
                masks = masking_utils.create_masks_for_generate(self.inner.config, hidden, None, None)
                self._shared[key]["attention_mask"] = masks
        return self._shared[key]

    @torch.no_grad()
    def _refuse_what_the_loop_is_not_for(self) -> None:
        """ValueError where tokens see later ones, which the loss has them predict, and, with model.loss=chunked, where
        the logits are not the head's product alone, as that loss assumes."""
        head, ids = self.inner.get_output_embeddings(), torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0]])
        few = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        self.inner.eval()
        logits = self.inner(**few).logits

        if not _alike(logits[0, :3], logits[1, :3], logits):
            raise ValueError(
                f"model.name={self.config.name} is not causal: tokens see those after them; give a model that "
                "generates text, or set is_decoder in its config.json"
            )
        if self.config.loss != "chunked":
            return
        h = getattr(self.inner.base_model(**few), "last_hidden_state", None)  # Llama 4 is its own base
        product = None if h is None else nn.functional.linear(h, head.weight)
        if product is None or getattr(head, "bias", None) is not None or not _alike(logits, product, logits):
            raise ValueError(f"the logits of {self.config.name} are not its head's product alone; use model.loss=plain")

    def _refuse_documents_that_meet(self) -> None:
        if not self.keeps_documents_apart:
            raise ValueError(
                f"{self.config.name} has layers in which packed documents see each other, as convolutions, recurrences "
                "and chunks of attention; use data.document_mask=false"
            )

    @torch.no_grad()
    def _keeps_documents_apart(self) -> bool:
        """Whether a document has the same logits when packed after one document as after another."""
        starts = torch.tensor([0, 2, 4, 6, 8], dtype=torch.int32)
        asked = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "use_cache": False}
        asked |= {"position_ids": torch.tensor([[0, 1, 0, 1]]).expand(2, -1)}
        try:
            logits = self.inner(input_ids=torch.tensor([[0, 1, 2, 3], [1, 0, 2, 3]]), **asked).logits
        except (TypeError, ValueError):  # it accepts no documents, or has a mask of pairs
            return False
        return _alike(logits[0, 2:], logits[1, 2:], logits)


def _alike(a: Tensor, b: Tensor, logits: Tensor) -> bool:
    return float((a - b).abs().max()) <= 1e-4 * float(logits.abs().max())


def _loaded(name: str, config: Any) -> nn.Module:
    """Their model with all of its weights; ValueError where some are missing, as those would be random."""
    asked = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    if name in _KEPT:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    try:
        try:  # first without the hub: `their_config` has already asked it which version is newest
            model, found = AutoModelForCausalLM.from_pretrained(name, local_files_only=True, **asked)
        except OSError:
            model, found = AutoModelForCausalLM.from_pretrained(name, **asked)
    except (ImportError, OSError, SafetensorError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"model.name={name} cannot be loaded ({reason}); give a causal model that save_pretrained wrote whole"
        ) from error
    except MISFITS as error:
        raise misfit(name, error) from error
    if lacking := sorted(found["missing_keys"]):
        raise ValueError(
            f"model.name={name} lacks {len(lacking)} weights of {type(model).__name__}, such as {lacking[0]}; give one "
            "that was saved as that class"
        )
    return model
