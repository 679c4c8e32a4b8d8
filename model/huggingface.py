"""Our attention in the models of Hugging Face's transformers.

    import model.huggingface
    their_model.set_attn_implementation("gpt_triton")

The import registers two functions under that name: `mask`, which they call once a forward and kind of layer, and
`attention`, which they call in each layer. No mask of N x N exists: `mask` says which keys each row of a batch has, on
the device, and neither function waits for the GPU. transformers is imported here only.

What `mask` returns is int32 and always has four dimensions, because their generation passes such a tensor on as it is.
What the host knows stands in its shape, as a tensor's other attributes do not survive compilation:

    (4, 1, kind, B)  of each row the first key, the end of its keys, the first query, the end of its queries
    (4, 1, kind, 0)  no padding
    (1, 1, kind, documents + 1)  cu_seqlens of documents packed end to end

and kind is 1 + causal + 2 * windowed.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from inspect import getclosurevars

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

import kernels
from kernels import flash_attention, flash_attention_with_kvcache, padded_documents, tiled_attention

NAME = "gpt_triton"  # transformers takes every name with "flash" in it for a package of its own list
MAX_QUERIES = 16  # a row, of attention over a cache
INSTEAD = 'use set_attn_implementation("sdpa")'
NO_WEIGHTS = 'output_attentions asks for weights that gpt_triton never has; use set_attn_implementation("eager")'
HOLE = (
    "attention_mask has a hole, a 0 between two 1s of a row, but gpt_triton takes one range of keys a row; "
    f"pad at the ends, or {INSTEAD}"
)

for _distribution in metadata.distributions(name="kernels"):
    raise ImportError(
        f"the package kernels {_distribution.version} is installed, and transformers imports it by the name of our "
        "folder kernels/; uninstall it (uv pip uninstall kernels)"
    )

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers import masking_utils as theirs  # noqa: E402
from transformers.utils.output_capturing import _active_collector  # noqa: E402

# what is derived from a mask or from position_ids, so that all layers of a forward share it
_DERIVED = WeakTensorKeyDictionary()


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = theirs.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_,
) -> Tensor:
    """What the layers of one kind may see, in the form that this module's docstring gives.

    Args:
        q_offset: tokens before the queries, on the device where the cache is static; kv_offset: tokens before the keys.
        mask_function: theirs, built from parts; an unknown part is refused by its name.
        attention_mask: (B, tokens) bool, 1s at real tokens. On a GPU a hole among them is an assertion of the device.
    """
    if "attentions" in (_active_collector.get() or ()):  # GPT-2 and OPT do not tell their layers
        raise ValueError(NO_WEIGHTS)
    causal, windowed, documents = _pattern(mask_function)
    kind = 1 + causal + 2 * windowed
    if documents is not None and (cu_seqlens := _documents_of(documents.diff(dim=-1) != 0)) is not None:
        found = cu_seqlens.view(1, 1, 1, -1).expand(1, 1, kind, -1).contiguous()
        _DERIVED[found] = {"cu_seqlens": cu_seqlens}
        return found
    end = q_offset + q_length - kv_offset if causal else kv_length  # of the keys that the last query may see
    if attention_mask is None:
        decoding = q_length <= MAX_QUERIES and kv_length > q_length
        if not isinstance(end, Tensor) and end == kv_length and not decoding:
            return torch.empty((4, 1, kind, 0), dtype=torch.int32, device=device)
        ranges = torch.zeros((4, 1, kind, batch_size), dtype=torch.int32, device=device)
        ranges[1] = end
        ranges[3] = q_length
        return ranges
    real = theirs.prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset : kv_offset + kv_length]
    keys = torch.arange(kv_length, dtype=torch.int32, device=real.device)
    first = torch.where(real, keys, kv_length).amin(1)
    last = torch.where(real, keys + 1, 0).amax(1).maximum(first)
    _refuse_holes(last - first != real.sum(1))
    beginning = not isinstance(q_offset, Tensor) and q_offset == 0 and kv_length == q_length > MAX_QUERIES
    if beginning if causal else windowed:  # queries and keys are the same tokens: padding has neither
        rows = first, last, first, last
    else:
        end = torch.zeros_like(first) + end if causal else last
        rows = first.minimum(end), end, torch.zeros_like(first), torch.full_like(first, q_length)
    return torch.stack(rows).to(torch.int32)[:, None, None].expand(4, 1, kind, -1).contiguous()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others,
) -> tuple[Tensor, None]:
    """One layer's attention: query (B, Hq, N, D), key and value (B, Hkv, Nk, D) -> (B, N, Hq, D) and no weights.

    attention_mask: from `mask`. cu_seq_lens_q, cu_seq_lens_k: (documents + 1,) int32, of the B * N tokens end to end.
    Raises ValueError for what these kernels do not compute, with the remedy.
    """
    _refuse(attention_mask, others)
    causal, windowed = is_causal, False
    if attention_mask is not None:
        causal, windowed = bool((attention_mask.shape[2] - 1) & 1), attention_mask.shape[2] > 2
    elif causal is None:
        causal = getattr(module, "is_causal", True)
    if windowed and not sliding_window:
        raise ValueError(f"{type(module).__name__} has a window in its mask and hands none to its attention; {INSTEAD}")
    back = sliding_window - 1 if windowed else -1
    options = {
        "causal": causal,
        "scale": scaling,
        "window": (back, 0 if windowed and causal else back),
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    ranges = None
    if attention_mask is not None and attention_mask.shape[0] == 4 and attention_mask.shape[3] > 0:
        ranges = attention_mask[:, 0, 0]  # (4, B)
    watched = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if (
        ranges is not None
        and query.shape[2] <= MAX_QUERIES
        and not (watched or dropout)
        and (causal or not windowed)
        and key.shape == value.shape
        and key.stride() == value.stride()
        and key.stride(3) == 1
    ):
        o = flash_attention_with_kvcache(
            query, key, value, cache_seqlens=ranges[1], cache_leftpad=ranges[0], **options,
            workspace=_shared(attention_mask, query.shape[1], lambda: _workspace(query)),
        )  # fmt: skip
        return o.transpose(1, 2), None
    options["dropout_p"] = dropout
    attend = _engine(query.device, query.dtype, query.shape[3])
    rows, _, queries, _ = query.shape
    cu_seqlens = None
    if cu_seq_lens_q is not None:
        cu_seqlens = (cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k)
        q, k, v = (_end_to_end(x) for x in (query, key, value))
    elif ranges is not None:
        (q, q_pitch), k_pitch = (_end_to_end(query), queries), None if watched else _pitch(key, value)
        k, v = (_end_to_end(x, k_pitch) for x in (key, value))
        sizes = q.shape[2], k.shape[2], q_pitch, k_pitch or key.shape[2]
        cu_seqlens = _shared(attention_mask, sizes, lambda: padded_documents(ranges, *sizes))
    elif (starts := _packing(attention_mask, query, key, position_ids, causal)) is not None:
        cu_seqlens = starts
        q, k, v = (_end_to_end(x) for x in (query, key, value))
    if cu_seqlens is None:
        return attend(query, key, value, **options).transpose(1, 2), None
    o = attend(q, k, v, cu_seqlens=cu_seqlens, **options)  # (1, Hq, B N, D), stored as (B N, Hq, D)
    return o.squeeze(0).transpose(0, 1).unflatten(0, (rows, queries)), None


def _pattern(mask_function: Callable) -> tuple[bool, bool, Tensor | None]:
    """(causal, windowed, the document of each token (B, N) or None) of one of their mask functions."""
    if mask_function is theirs.causal_mask_function:
        return True, False, None
    if mask_function is theirs.bidirectional_mask_function:
        return False, False, None
    return _parts(mask_function)


@torch.compiler.disable
def _parts(mask_function: Callable) -> tuple[bool, bool, Tensor | None]:
    found = {"causal": False, "windowed": False, "documents": None}

    def visit(function: Callable) -> None:
        inside = getclosurevars(function).nonlocals
        if function.__module__ == theirs.__name__:
            name = function.__qualname__.partition(".<locals>")[0]
        else:
            name = f"{function.__name__} of {function.__module__}"
        if name == "causal_mask_function":
            found["causal"] = True
        elif name in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
            found["windowed"] = True
        elif name == "packed_sequence_mask_function":
            found["documents"] = inside["packed_sequence_mask"]
        elif name == "and_masks":
            for part in inside["mask_functions"]:
                visit(part)
        elif name == "remap_positions_for_packed_sequence":
            visit(inside["mask_function"])
        elif name != "bidirectional_mask_function":
            raise ValueError(f"the model's mask is built with {name}, which gpt_triton does not compute; {INSTEAD}")

    visit(mask_function)
    return found["causal"], found["windowed"], found["documents"]


@torch.compiler.disable
def _documents_of(breaks: Tensor) -> Tensor | None:
    """cu_seqlens of documents that begin in each row and after each break (B, N - 1); None for one document a row.

    Waits for the GPU, once a forward: the number of documents must be known to the host.
    """
    found = breaks.cpu()
    if not found.any():
        return None
    starts = torch.nn.functional.pad(found, (1, 0), value=True).flatten().nonzero().flatten()
    cu_seqlens = torch.cat((starts, torch.tensor([breaks.shape[0] * (breaks.shape[1] + 1)]))).to(torch.int32)
    return kernels.place_documents(cu_seqlens, int(cu_seqlens[-1]), breaks.device)


def _packing(
    attention_mask: Tensor | None, query: Tensor, key: Tensor, position_ids: Tensor | None, causal: bool
) -> Tensor | None:
    """cu_seqlens of documents packed end to end, told by the mask or, where a model keeps them from it, by position_ids
    that do not go up by one."""
    if attention_mask is not None and attention_mask.shape[0] == 1:
        return _shared(attention_mask, "cu_seqlens", lambda: attention_mask[0, 0, 0].clone())
    if position_ids is None or position_ids.dim() != 2 or not causal or torch.compiler.is_compiling():
        return None
    if not 1 < query.shape[2] == key.shape[2] == position_ids.shape[1]:
        return None
    breaks = lambda: position_ids.diff(dim=-1).expand(query.shape[0], -1) != 1  # noqa: E731
    version = 0 if position_ids.is_inference() else position_ids._version
    return _shared(position_ids, version, lambda: _documents_of(breaks()))


def _shared(owner: Tensor, name: object, make: Callable):
    """`make()`, once for `owner`: layers share what costs launches. A compiler shares by itself."""
    if torch.compiler.is_compiling():
        return make()
    derived = _DERIVED.setdefault(owner, {})
    if name not in derived:
        derived[name] = make()
    return derived[name]


def _workspace(query: Tensor) -> Tensor | None:
    if torch.compiler.is_compiling():  # one that is written to would have to be copied
        return None
    return kernels.kvcache_workspace(query.shape[0], query.shape[1], query.device)


def _pitch(key: Tensor, value: Tensor) -> int | None:
    """Tokens from a row's start to the next one's in memory, where both tensors have such a number.

    A cache (B, H, N, D) has one, H * N: its rows are documents, and nobody reads the other heads' tokens between.
    """
    if torch.compiler.is_compiling():  # which decides on strides after this
        return None
    pitches = {x.stride(0) / x.stride(2) if x.stride(2) else 0.5 for x in (key, value)}
    pitch = pitches.pop()
    return int(pitch) if not pitches and pitch.is_integer() and pitch >= key.shape[2] else None


def _end_to_end(x: Tensor, pitch: int | None = None) -> Tensor:
    """(B, H, N, D) as one row of tokens (1, H, tokens, D): a view, but for a tensor whose heads are further apart than
    its tokens, and that has no pitch."""
    rows, heads, tokens, head_dim = x.shape
    if pitch is None:
        return x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)
    shape, strides = (1, heads, (rows - 1) * pitch + tokens, head_dim), (0, *x.stride()[1:])
    return x.as_strided(shape, strides)


@lru_cache
def _engine(device: torch.device, dtype: torch.dtype, head_dim: int) -> Callable:
    """Our kernels; on a CPU without Triton's interpreter their mathematics in PyTorch."""
    reason = kernels.why_not("flash", dtype, device=device, head_dim=head_dim)
    if reason is None:
        return flash_attention
    if device.type == "cpu":
        return tiled_attention
    raise ValueError(f"{reason.partition(';')[0]}; {INSTEAD}")


def _refuse_holes(hole: Tensor) -> None:
    if hole.is_cuda or torch.compiler.is_compiling():  # nobody waits: the GPU stops by itself
        torch._assert_async(~hole.any(), HOLE)
    elif hole.any():
        raise ValueError(HOLE)


def _refuse(attention_mask: Tensor | None, others: dict) -> None:
    """ValueError for what the kernels do not compute."""
    if attention_mask is not None:
        shape = tuple(attention_mask.shape)
        if getattr(attention_mask, "dtype", None) != torch.int32 or shape[:2] not in ((1, 1), (4, 1)) or shape[2] > 4:
            raise ValueError(
                f"attention_mask is a {type(attention_mask).__name__} of shape {shape}; gpt_triton takes (B, tokens) "
                f"of 1s and 0s, or None; for a mask of pairs {INSTEAD}"
            )
    if others.get("position_bias") is not None:
        raise ValueError(f"position_bias is added to the scores, which gpt_triton does not compute; {INSTEAD}")
    if others.get("output_attentions"):
        raise ValueError(NO_WEIGHTS)
    if others.get("cache") is not None:
        raise ValueError(f"a paged cache (continuous batching) is not gpt_triton's; {INSTEAD}")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
