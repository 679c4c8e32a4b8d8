"""The attention masks of transformers' models: `mask` is called once per forward pass and kind of layer.

Causal or not, windows, padding and packed documents need no N x N mask: each row of a batch has a range of keys, found
on the device without synchronization. Every other mask is a mask of pairs, a user's or made by transformers' own mask
functions. The first layer builds its blocks (kernels/block_masks.py) for all layers, which waits for the GPU.

What `mask` returns always has four dimensions, because transformers' generation passes such a tensor through unchanged.
What the host knows is in its shape, as a tensor's other attributes do not survive compilation:

    (4, Nk, kind, B) int32  for each row the first key, the end of its keys, the first query, the end of its queries
    (4, 1, kind, 0) int32  no padding
    (1, 1, kind, documents + 1) int32  cu_seqlens of documents packed end to end
    (B, 1, N, Nk) bool  pairs

and kind is 1 + causal + 2 * window, where window is 0 for none, else a place in `REACHES`, from 1.
"""

from collections.abc import Callable
from inspect import getclosurevars

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig
from transformers import masking_utils as theirs

from kernels import BlockMask, place_documents
from kernels.block_masks import version_of
from kernels.decode import MAX_QUERIES

HIDDEN = -1e4  # this or less, added to a score, hides a pair: exp(-1e4) is 0
INSTEAD = 'use set_attn_implementation("sdpa"), or "eager" where the model has no sdpa'
FORMS = (
    "gpt_triton takes (B, tokens) of 1s and 0s, or pairs (B, 1, N, Nk) as booleans or as 0 and -inf; else " + INSTEAD
)
HOLE = (
    "attention_mask has a hole, a 0 between two 1s of a row, which gpt_triton cannot see on a GPU without waiting; "
    f"pad at the ends, pass booleans (B, 1, N, N), or {INSTEAD}"
)

# without an attention_mask, a model being compiled looks for packed documents, whether there are any or not
PACKED = "gpt_triton looks for packed documents outside of graphs; compile without fullgraph, or pass an attention_mask"

# model_type of models whose layers compute with the mask: they add numbers of the tokens to it, or choose keys by it
COMPUTE_WITH_MASKS = (
    "axk2", "bigbird_pegasus", "deepseek_v32", "deepseek_v4", "doge", "git", "glm_moe_dsa", "hy_v4", "mistral_large4",
    "mistral_large4_text", "pp_doclayout_v2", "qwen4_exp", "qwen4_exp_text",
)  # fmt: skip
# parts of their mask functions that ranges of keys can express
CAUSAL = {"causal_mask_function"}
# how many tokens fewer than its number each reaches back; the first says nothing of what lies ahead
WINDOWS = {"sliding_window_overlay": 1, "sliding_window_bidirectional_overlay": 0}
OTHERS = {
    "and_masks", "bidirectional_mask_function", "packed_sequence_mask_function", "remap_positions_for_packed_sequence",
}  # fmt: skip

# how many tokens back the windows reach that masks have had: a shape cannot hold such a number, as moving a mask to
# another GPU would make it as large as its shape says
REACHES: list[int] = []
# mask or position_ids -> (its version, what is derived from it), which all layers of a forward pass share
_DERIVED = WeakTensorKeyDictionary()
# (event, flags) of padding masks on a GPU: which rows have a hole, once the event has happened; oldest first
_CHECKS: list[tuple[torch.cuda.Event, Tensor]] = []


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = theirs.causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: PreTrainedConfig | None = None,
    **_,
) -> Tensor:
    """What the layers of one kind may see, in one of the forms that this module's docstring gives.

    q_offset: tokens before the queries, on the device where the cache is static; kv_offset: tokens before the keys.
    mask_function: transformers' function, a composition of parts.
    attention_mask: (B, tokens) bool, True at real tokens. With a hole among them the result on a CPU is a mask of
        pairs. A GPU is not waited for: the logits of that row become NaN, and a later call raises.
    use_vmap: whether mask_function must be called for one pair at a time.

    Raises:
        ValueError: a model that adds numbers to its mask, a mask of another number of dimensions or of other rows
            than the batch's, or a hole that a GPU has found.
    """
    if (model := getattr(config, "model_type", None)) in COMPUTE_WITH_MASKS:
        raise ValueError(f"layers of {model} compute with their mask, of which gpt_triton makes none; {INSTEAD}")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"attention_mask has {attention_mask.dim()} dimensions; {FORMS}")
    if attention_mask is not None and len(attention_mask) != batch_size:
        raise ValueError(f"attention_mask has {len(attention_mask)} rows and the batch {batch_size}; give one for each")
    refuse_found_holes()

    def pairs() -> Tensor:
        made = theirs.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        shared(made, "copy", lambda: None)  # it is ours alone: no copy is needed
        return made

    if (parsed := _parsed(mask_function)) is None:
        return pairs()
    causal, window, documents = parsed
    kind = 1 + causal + 2 * window
    if documents is not None and (cu_seqlens := documents_of(documents.diff(dim=-1) != 0)) is not None:
        packed = cu_seqlens.view(1, 1, 1, -1).expand(1, 1, kind, -1).contiguous()
        shared(packed, "cu_seqlens", lambda: cu_seqlens)
        return packed
    end = q_offset + q_length - kv_offset if causal else kv_length  # of the keys that the last query may see
    if attention_mask is None:
        decoding = q_length <= MAX_QUERIES and kv_length > q_length
        if not isinstance(end, Tensor) and end == kv_length and not decoding:
            return torch.empty((4, 1, kind, 0), dtype=torch.int32, device=device)
        ranges = torch.zeros((4, 1, kind, batch_size), dtype=torch.int32, device=device)
        ranges[1] = end
        ranges[3] = q_length
        return ranges.expand(-1, kv_length, -1, -1)
    real = theirs.prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset : kv_offset + kv_length]
    keys = torch.arange(kv_length, dtype=torch.int32, device=real.device)
    first = torch.where(real, keys, kv_length).amin(1)
    last = torch.where(real, keys + 1, 0).amax(1).maximum(first)
    hole = last - first != real.sum(1)  # (B,)
    seen = not (hole.is_cuda or torch.compiler.is_compiling())
    if seen and hole.any():
        return pairs()
    beginning = not isinstance(q_offset, Tensor) and q_offset == 0 and kv_length == q_length > MAX_QUERIES
    if causal and not beginning:
        first, last = first.clamp(max=end), end
    ranges = first.new_zeros(4, 1, kind, first.shape[0])
    ranges[0], ranges[1] = first, last
    if beginning if causal else window:  # queries and keys are the same tokens: padding has neither
        ranges[2:] = ranges[:2]
    else:
        ranges[3] = q_length
    ranges = ranges.expand(-1, kv_length, -1, -1)
    if not seen:
        _check_later(hole, ranges)
    return ranges


# ---- their mask functions


def _parsed(mask_function: Callable) -> tuple[bool, int, Tensor | None] | None:
    """(causal, window, the document of each token (B, N) or None); None where ranges of keys cannot express it."""
    if mask_function is theirs.causal_mask_function:
        return True, 0, None
    if mask_function is theirs.bidirectional_mask_function:
        return False, 0, None
    return _parsed_parts(mask_function)


@torch.compiler.disable(reason=PACKED)
def _parsed_parts(mask_function: Callable) -> tuple[bool, int, Tensor | None] | None:
    names, reaches, documents, functions = set(), [], None, [mask_function]
    while functions:
        function = functions.pop()
        name = function.__qualname__.partition(".<locals>")[0]
        if function.__module__ != theirs.__name__ or name not in CAUSAL | WINDOWS.keys() | OTHERS:
            return None
        names.add(name)
        inside = getclosurevars(function).nonlocals
        if name in WINDOWS:
            reaches.append(inside["sliding_window"] - WINDOWS[name])
        documents = inside.get("packed_sequence_mask", documents)
        functions += inside.get("mask_functions", [inside[key] for key in ("mask_function",) if key in inside])
    causal, reach = bool(names & CAUSAL), min(reaches, default=None)
    if reach is None:
        return causal, 0, documents
    if reach < 0 or (not causal and "sliding_window_overlay" in names):
        return None
    if reach not in REACHES:
        REACHES.append(reach)
    return causal, 1 + REACHES.index(reach), documents


@torch.compiler.disable(reason=PACKED)
def documents_of(breaks: Tensor) -> Tensor | None:
    """cu_seqlens of documents that begin in each row and after each break (B, N - 1); None for one document a row.

    Waits for the GPU, once per forward pass: the number of documents must be known to the host.
    """
    found = breaks.cpu()
    if not found.any():
        return None
    starts = torch.nn.functional.pad(found, (1, 0), value=True).flatten().nonzero().flatten()
    cu_seqlens = torch.cat((starts, torch.tensor([breaks.shape[0] * (breaks.shape[1] + 1)]))).to(torch.int32)
    return place_documents(cu_seqlens, int(cu_seqlens[-1]), breaks.device)


# ---- masks of pairs


@torch.compiler.disable(reason="gpt_triton builds a mask of pairs outside of graphs; compile without fullgraph")
def blocks_of(pairs: Tensor, queries: int) -> BlockMask:
    """A mask of pairs for our kernels, built once for all layers, which waits for the GPU.

    pairs: (B or 1, Hq or 1, N or 1, Nk), True where a query sees a key, or 0 there and `HIDDEN` or less elsewhere.
        Or torch's BlockMask, returned as it is: the kernels convert it at its first call.

    Raises ValueError for other numbers.
    """

    def build() -> BlockMask:
        visible = pairs.expand(-1, -1, queries if pairs.shape[2] == 1 else -1, -1)
        if visible.is_floating_point():
            visible = visible == 0
            if not (visible | (pairs <= HIDDEN)).all():
                raise ValueError(
                    f"attention_mask adds other numbers than 0 and {HIDDEN:.0f} or less to the scores, which "
                    f"gpt_triton does not compute; {INSTEAD}"
                )
        return BlockMask.from_dense(visible)

    if not isinstance(pairs, Tensor):
        return pairs
    copy = shared(pairs, "copy", lambda: pairs.clone() if pairs.is_inference() else None)
    captured = pairs.is_cuda and torch.cuda.is_current_stream_capturing()  # which must not wait
    if copy is not None and not captured and not torch.equal(copy, pairs):
        del _DERIVED[pairs]  # written to in inference mode, which counts no versions
        shared(pairs, "copy", pairs.clone)
    return shared(pairs, ("blocks", queries), build)


# ---- holes


def _check_later(hole: Tensor, ranges: Tensor) -> None:
    """Copy to the host, without waiting, which rows have a hole (B,); `refuse_found_holes` reads it later."""
    if (
        torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()
    ):  # a graph cannot check later: it fails now
        torch._assert_async(~hole.any(), HOLE)
        return
    flags, event = torch.empty(hole.shape, dtype=torch.bool, pin_memory=True), torch.cuda.Event()
    flags.copy_(hole, non_blocking=True)
    event.record(torch.cuda.current_stream(hole.device))
    _CHECKS.append((event, flags))
    shared(ranges, "holes", lambda: [hole])


def refuse_found_holes() -> None:
    """ValueError for a hole in an earlier mask that a GPU has found by now."""
    if torch.compiler.is_compiling() or not _CHECKS or torch.cuda.is_current_stream_capturing():
        return
    while _CHECKS and _CHECKS[0][0].query():
        if _CHECKS.pop(0)[1].any():
            _CHECKS.clear()
            raise ValueError(HOLE)


def nan_at_holes(query: Tensor, ranges: Tensor) -> Tensor:
    """The query with NaN in rows with a hole, in the first layer that gets `ranges`. The NaN reaches the logits even if
    no later call raises."""
    if torch.compiler.is_compiling() or not (holes := shared(ranges, "holes", list)):
        return query
    return query.masked_fill(holes.pop()[:, None, None, None], torch.nan)


def shared(owner: Tensor, name: object, make: Callable):
    """`make()`, once for each version of `owner`, so that layers share its result. A compiler shares it by itself."""
    if torch.compiler.is_compiling():
        return make()
    version = version_of(owner)
    kept = _DERIVED.get(owner)
    if kept is None or kept[0] != version:
        kept = _DERIVED[owner] = version, {}
    if name not in kept[1]:
        kept[1][name] = make()
    return kept[1][name]
