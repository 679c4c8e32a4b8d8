"""Our attention in the models of Hugging Face's transformers.

    import model.huggingface
    their_model.set_attn_implementation("gpt_triton")

The import registers two functions under that name: `mask` (huggingface_masks.py), which transformers calls once per
forward pass and kind of layer, and `attention`, called in each layer with what `mask` returned. With padding, windows
and documents neither copies keys or values; only the bounds of documents are waited for, once per forward pass.

Without a mask documents begin where position_ids do not rise by one, as in transformers' flash attention. Its eager and
sdpa attention see that only without a cache: with use_cache at its default they let such documents see each other. So
do we in models that make a mask of ones themselves (BioGPT).
The output of a padding token's query means nothing, and differs from theirs: a prompt that is padded on the right,
about which transformers warns, continues from such an output. Pad on the left.
"""

import warnings
from collections.abc import Callable
from functools import partial
from importlib import metadata

import torch
from torch import Tensor, nn

import kernels
from kernels import KVCacheLayers, flash_attention, flash_attention_with_kvcache, padded_documents
from kernels.call import autocast_inputs

NAME = "gpt_triton"  # transformers treats every name with "flash" in it as a package of its own list
# arguments that some models (T5, DeepSeek-V3.2, MiniMax-M3, Inkling) pass to their attention and that change its result
BEYOND_US = ("position_bias", "indices", "block_indices", "sinks")

for _distribution in metadata.distributions(name="kernels"):
    raise ImportError(
        f"the package kernels {_distribution.version} is installed, and transformers imports it by the name of our "
        "folder kernels/; uninstall it (uv pip uninstall kernels)"
    )

from transformers import AttentionInterface, AttentionMaskInterface, __version__  # noqa: E402


def check_version(version: str) -> None:
    """Raises ImportError for transformers 4, which takes no masks of others; warns of 5.0 to 5.21."""
    message = f"transformers {version} is installed; gpt_triton needs 5.22 or later (uv run --group hf)"
    if version.startswith("4."):
        raise ImportError(message)
    if tuple(map(int, version.split(".")[:2])) < (5, 22):
        warnings.warn(message, stacklevel=2)


check_version(__version__)

from transformers.utils.output_capturing import _active_collector  # noqa: E402

from model.huggingface_masks import (  # noqa: E402
    FORMS,
    INSTEAD,
    MAX_QUERIES,
    REACHES,
    blocks_of,
    documents_of,
    mask,
    nan_at_holes,
    refuse_found_holes,
    shared,
)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others,
) -> tuple[Tensor, None]:
    """One layer's attention: query (B, Hq, N, D), key and value (B, Hkv, Nk, D) -> (B, N, Hq, D) and no weights.

    The result is contiguous, as some models need (`view`): our kernels store it so; on a CPU it is copied.

    attention_mask: from `mask`, or a user's mask of pairs, which alone decides what a query sees (`blocks_of`).
    cu_seq_lens_q, cu_seq_lens_k: (documents + 1,) int32, of the B * N tokens end to end.

    Raises:
        ValueError: what these kernels do not compute, with the remedy.
    """
    _refuse(attention_mask, others)
    refuse_found_holes()
    # cast here: a cast of the views below would copy a cache once for each head, and RoPE leaves keys in float32
    query, key, value = autocast_inputs(query, key, value)
    options = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if attention_mask is not None and getattr(attention_mask, "dtype", None) != torch.int32:
        attend, blocks = _engine(query), blocks_of(attention_mask, query.shape[2])
        o = attend(query, key, value, block_mask=blocks, cu_seqlens=cu_seq_lens_q, dropout_p=dropout, **options)
        return o.transpose(1, 2).contiguous(), None
    causal, window = _bounds(module, attention_mask, is_causal)
    options |= {"causal": causal, "window": window}
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    padded = attention_mask is not None and attention_mask.shape[0] == 4 and attention_mask.shape[3] > 0
    if padded:
        if attention_mask.shape[1] != key.shape[2]:
            columns, keys = attention_mask.shape[1], key.shape[2]
            raise ValueError(
                f"attention_mask has {columns} columns and there are {keys} keys; give one for each; where the "
                f"model's own cache counts them otherwise, {INSTEAD}"
            )
        query = nan_at_holes(query, attention_mask)
        if not (needs_grad or dropout or (window[0] >= 0 and not causal)) and _readable_as_cache(query, key, value):
            sinks = None if torch.compiler.is_compiling() else id(s_aux)  # Dynamo cannot trace id(None)
            kind = query.shape[1], scaling, softcap, window[0], causal, sinks
            attend = shared(attention_mask, kind, lambda: _over_caches(query, attention_mask, options))
            return attend(query, key, value).transpose(1, 2), None
    attend = partial(_engine(query), dropout_p=dropout, **options)
    # documents, and padded rows, lie end to end in one row of tokens
    pitch = None
    if cu_seq_lens_q is not None:
        cu_seqlens = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    elif padded:
        pitch = None if needs_grad else _pitch(key, value)
        cu_seqlens = _documents_of_padded(attention_mask, query.shape, key.shape, pitch)
    else:
        cu_seqlens = _packing(attention_mask, query, key, position_ids, causal)
    if cu_seqlens is None:
        return attend(query, key, value).transpose(1, 2).contiguous(), None
    o = attend(_end_to_end(query), _end_to_end(key, pitch), _end_to_end(value, pitch), cu_seqlens=cu_seqlens)
    return o.squeeze(0).transpose(0, 1).contiguous().unflatten(0, (query.shape[0], query.shape[2])), None


def _bounds(module: nn.Module, attention_mask: Tensor | None, is_causal: bool | None) -> tuple[bool, tuple[int, int]]:
    """`causal` and `window` of our calls: from the mask, which has them in its shape, else from the layer alone."""
    if attention_mask is None:
        return getattr(module, "is_causal", True) if is_causal is None else is_causal, (-1, -1)
    window, causal = divmod(attention_mask.shape[2] - 1, 2)
    if not window:
        return bool(causal), (-1, -1)
    reach = REACHES[window - 1]
    return bool(causal), (reach, 0 if causal else reach)


def _readable_as_cache(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether keys and values can be read as `flash_attention_with_kvcache` reads a cache, by few queries."""
    alike = (key.shape, key.stride(), key.dtype) == (value.shape, value.stride(), value.dtype)
    return query.shape[2] <= MAX_QUERIES and alike and key.stride(3) == 1


def _documents_of_padded(ranges: Tensor, of_q: torch.Size, of_k: torch.Size, pitch: int | None) -> tuple:
    """cu_seqlens of padded rows that lie end to end, one document each; `pitch` is that of keys, from row to row."""
    rows, _, queries, _ = of_q
    keys = rows * of_k[2] if pitch is None else (rows - 1) * pitch + of_k[2]
    sizes = rows * queries, keys, queries, pitch or of_k[2]
    return shared(ranges, sizes, lambda: padded_documents(ranges[:, 0, 0], *sizes))


def _packing(
    attention_mask: Tensor | None, query: Tensor, key: Tensor, position_ids: Tensor | None, causal: bool
) -> Tensor | None:
    """cu_seqlens of documents packed end to end, from the mask or, where a model does not pass them to it, from
    position_ids that do not increase by one."""
    if attention_mask is not None and attention_mask.shape[0] == 1:
        return shared(attention_mask, "cu_seqlens", lambda: attention_mask[0, 0, 0].clone())
    if position_ids is None or position_ids.dim() != 2 or not causal or torch.compiler.is_compiling():
        return None
    if not 1 < query.shape[2] == key.shape[2] == position_ids.shape[1]:
        return None
    rows = query.shape[0]  # position_ids of one row are those of all rows, and may serve another batch
    breaks = lambda: position_ids.diff(dim=-1).expand(rows, -1) != 1  # noqa: E731
    return shared(position_ids, ("cu_seqlens", rows), lambda: documents_of(breaks()))


def _over_caches(query: Tensor, ranges: Tensor, options: dict) -> Callable:
    """Attention over caches for the layers of a forward pass that share `ranges` and options."""
    _engine(query)  # refuses, in transformers' terms, what no kernel takes
    bounds = {"cache_leftpad": ranges[0, 0, 0], "cache_seqlens": ranges[1, 0, 0].clone()}  # 16-byte aligned
    if torch.compiler.is_compiling():  # a workspace, which is written to, would have to be copied
        return partial(flash_attention_with_kvcache, **bounds, **options)
    return KVCacheLayers(**bounds, workspace=kernels.kvcache_workspace(*query.shape[:2], query.device), **options)


def _pitch(key: Tensor, value: Tensor) -> int | None:
    """Tokens from a row's start to the next one's in memory; None where the two tensors have no such number in common.

    A cache (B, H, N, D) has one, H * N: its rows are documents, and the other heads' tokens between are not read.
    """
    if torch.compiler.is_compiling():  # a compiler decides on strides later
        return None
    pitches = {x.stride(0) / x.stride(2) if x.stride(2) else 0.5 for x in (key, value)}
    pitch = pitches.pop()
    return int(pitch) if not pitches and pitch.is_integer() and pitch >= key.shape[2] else None


def _end_to_end(x: Tensor, pitch: int | None = None) -> Tensor:
    """(B, H, N, D) as one row of tokens (1, H, tokens, D): a view, except for a tensor without a pitch whose heads are
    further apart than its tokens."""
    rows, heads, tokens, head_dim = x.shape
    if pitch is None:
        return x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)
    shape, strides = (1, heads, (rows - 1) * pitch + tokens, head_dim), (0, *x.stride()[1:])
    return x.as_strided(shape, strides)


def _engine(query: Tensor) -> Callable:
    """Our kernels; on a CPU without Triton's interpreter their mathematics in PyTorch."""
    reason = kernels.why_not("flash", query.dtype, device=query.device, head_dim=query.shape[3])
    if reason is None:
        return flash_attention
    if query.device.type == "cpu":  # with dynamic shapes a compiler cannot unroll the loop over tiles
        return kernels.naive_attention if torch.compiler.is_compiling() else kernels.tiled_attention
    raise ValueError(f"{reason.partition(';')[0]}; {INSTEAD}")


def _refuse(attention_mask: object, others: dict) -> None:
    """ValueError for what the kernels do not compute."""
    if isinstance(attention_mask, Tensor):
        shape, dtype = attention_mask.shape, attention_mask.dtype
        pairs = dtype == torch.bool or dtype.is_floating_point
        kinds = 2 + 2 * len(REACHES)
        ours = dtype == torch.int32 and len(shape) == 4 and (shape[0] == 4 or shape[:2] == (1, 1)) and shape[2] <= kinds
        if not (ours or (len(shape) == 4 and pairs)):
            raise ValueError(f"attention_mask reached a layer with shape {tuple(shape)} and {dtype}; {FORMS}")
    for name in BEYOND_US:
        if others.get(name) is not None:
            raise ValueError(f"the model hands {name} to its attention, which gpt_triton does not compute; {INSTEAD}")
    # with GPT-2, OPT and SigLIP only the collector shows the request
    if others.get("output_attentions") or "attentions" in (_active_collector.get() or ()):
        raise ValueError(
            'output_attentions asks for weights that gpt_triton never has; use set_attn_implementation("eager")'
        )
    if others.get("cache") is not None:
        raise ValueError(f"a paged cache (continuous batching) is not gpt_triton's; {INSTEAD}")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
