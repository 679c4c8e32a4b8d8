"""Packed documents: what their cu_seqlens must hold, and the layout of the `..._varlen` functions."""

import itertools

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .block_masks import version_of
from .call import Options, check_cu_seqlens, check_tensor, integer
from .device import OPERATORS

# The checked GPU tensors, each with the version of its memory, total and bound: reading one waits for the GPU, and a
# model's layers all pass the same one.
_CHECKED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def check_documents(options: Options, total_q: int, total_k: int) -> None:
    """Check that cu_seqlens start at 0, never fall, end at the total, and hold no document beyond the bound.

    A tensor on the CPU is read at every call, one on a GPU once for each version of its memory (an inference tensor,
    which has no versions, once), and not at all while a CUDA graph is being captured, which must not wait for the GPU.
    A write that PyTorch does not count (`.data`) is therefore not seen; the kernels then use the nearest valid packing,
    and never address memory outside the call's tensors. Raises ValueError.
    """
    for name, cu_seqlens, total, bound in (
        ("q", options.cu_seqlens_q, total_q, options.max_seqlen_q),
        ("k", options.cu_seqlens_k, total_k, options.max_seqlen_k),
    ):
        if not cu_seqlens.is_cuda:
            _check_starts(f"_{name}", cu_seqlens.tolist(), total, bound)
            continue
        described = (version_of(cu_seqlens), total, bound)
        if _CHECKED.get(cu_seqlens) == described or torch.cuda.is_current_stream_capturing():
            continue
        _check_starts(f"_{name}", cu_seqlens.tolist(), total, bound)
        _CHECKED[cu_seqlens] = described


def _check_starts(of: str, starts: list[int], total: int, bound: int) -> None:
    """of: "_q" or "_k", or empty where queries and keys have the same starts."""
    if starts[0] != 0:
        raise ValueError(f"cu_seqlens{of} starts at {starts[0]}; it must start at 0")
    if starts[-1] != total:
        raise ValueError(f"cu_seqlens{of} ends at {starts[-1]}; it must end at {of[1:]}'s {total} tokens")
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    if min(lengths) < 0:
        raise ValueError(f"cu_seqlens{of} falls at document {lengths.index(min(lengths))}; it must not fall")
    if max(lengths) > bound:
        raise ValueError(
            f"max_seqlen{of} is {bound} but document {lengths.index(max(lengths))} has {max(lengths)} tokens; "
            "it must be at least the longest document's length"
        )


def place_documents(cu_seqlens: Tensor, max_seqlen: int, device: torch.device | str) -> Tensor:
    """cu_seqlens for self-attention, checked on the CPU and then copied to `device`.

    The copy counts as checked, so that a call with it does not wait for the GPU to read it back.

    cu_seqlens: (documents + 1,) int32 on the CPU; it ends at the number of tokens.
    max_seqlen: the bound that the calls will name.

    Raises ValueError as `flash_attention` does.
    """
    check_cu_seqlens("cu_seqlens", cu_seqlens)
    max_seqlen = integer("max_seqlen", max_seqlen)
    device, starts = torch.device(device), cu_seqlens.tolist()
    _check_starts("", starts, starts[-1], max_seqlen)
    if device.type != "cuda":
        return cu_seqlens.to(device)
    cu_seqlens = cu_seqlens.pin_memory().to(device, non_blocking=True)
    _CHECKED[cu_seqlens] = (version_of(cu_seqlens), starts[-1], max_seqlen)
    return cu_seqlens


@torch.library.custom_op(f"{OPERATORS}::padded_documents", mutates_args=())
def padded_documents(ranges: Tensor, q_tokens: int, k_tokens: int, q_pitch: int, k_pitch: int) -> tuple[Tensor, Tensor]:
    """cu_seqlens (queries', keys') of a padded batch whose rows lie in one row of tokens, one document per row.

    Built on the device and valid by construction, so nothing waits for the GPU, not even under torch.compile. Tokens
    outside the ranges lie in documents without keys or without queries: such queries give 0 and cost nothing.

    ranges: (4, rows) int32; for each row the first key, the keys' end, the first query, the queries' end.
    q_tokens, k_tokens: the sizes of the one row.
    q_pitch, k_pitch: tokens from the start of a row to the next one's.
    """
    rows = torch.arange(ranges.shape[1], dtype=torch.int32, device=ranges.device)
    first_k, end_k = ranges[0] + rows * k_pitch, ranges[1] + rows * k_pitch
    first_q, end_q = ranges[2] + rows * q_pitch, ranges[3] + rows * q_pitch
    zero = ranges.new_zeros(1)
    # three documents per row: the queries before it, the keys before it, the row; two more for tokens after the last
    starts_q = torch.stack((first_q, first_q, end_q), dim=1).flatten()
    starts_k = torch.stack((torch.cat((zero, end_k[:-1])), first_k, end_k), dim=1).flatten()
    cu_seqlens_q = torch.cat((zero, starts_q, ranges.new_full((2,), q_tokens)))
    cu_seqlens_k = torch.cat((zero, starts_k, end_k[-1:], ranges.new_full((1,), k_tokens)))
    for cu_seqlens, tokens in ((cu_seqlens_q, q_tokens), (cu_seqlens_k, k_tokens)):
        if cu_seqlens.is_cuda:
            _CHECKED[cu_seqlens] = (version_of(cu_seqlens), tokens, tokens)
    return cu_seqlens_q, cu_seqlens_k


@padded_documents.register_fake
def _(ranges, q_tokens, k_tokens, q_pitch, k_pitch):
    documents = 3 * ranges.shape[1] + 2
    return ranges.new_empty(documents + 1), ranges.new_empty(documents + 1)


def call_packed(
    attention, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_lse: bool = False, **options
):
    """`attention` on (tokens, heads, head_dim) tensors, by views: the body of the `..._varlen` functions."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        check_tensor(name, x, "tokens, heads, head_dim")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"v has shape {tuple(v.shape)} but k has {tuple(k.shape)}; all but head_dim must be equal")
    packing = {"cu_seqlens": (cu_seqlens_q, cu_seqlens_k), "max_seqlen": (max_seqlen_q, max_seqlen_k)}
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    result = attention(q, k, v, **packing, return_lse=return_lse, **options)
    # not o[0]: the gradient of an index is a tensor of zeros with a part filled in
    o = (result[0] if return_lse else result).squeeze(0).transpose(0, 1)
    return (o, result[1].squeeze(0)) if return_lse else o
