"""The Triton kernel of `write_kvcache` (kernels/decode.py): new tokens to their places of a cache, in one launch.

Bound by memory: each element is read once and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, plan_of, run

TOKENS = 32  # of a program, of one head


@triton.jit(do_not_specialize=["num_tokens", "num_lines", "num_slots"])
def write_kvcache_kernel(
    new,  # (HEADS, num_tokens, HEAD_DIM)
    cache,  # (num_lines, HEADS, num_slots, HEAD_DIM)
    lines,  # (num_tokens,) int64: of each token its row or page
    slots,  # (num_tokens,) int64
    new_strides,  # (head, token), elements
    cache_strides,  # (line, head, slot)
    num_tokens,
    num_lines,
    num_slots,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program: TOKENS tokens of a head. Tokens whose place the cache does not have are left out."""
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) // HEADS * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, BLOCK_D)[None, :]
    line = tl.load(lines + tokens, mask=tokens < num_tokens, other=-1)
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=-1)
    inside = ((line >= 0) & (line < num_lines) & (slot >= 0) & (slot < num_slots))[:, None] & (columns < HEAD_DIM)
    x = tl.load(new + head * new_strides[0] + tokens[:, None] * new_strides[1] + columns, mask=inside)
    at = cache + head * cache_strides[1] + line[:, None] * cache_strides[0] + slot[:, None] * cache_strides[2] + columns
    tl.store(at, x, mask=inside)


def launch_write_kvcache(cache: Tensor, lines: Tensor, slots: Tensor, new: Tensor) -> None:
    """new (Hkv, N, D), of the cache's dtype, to (lines[i], :, slots[i]) of the cache (lines, Hkv, slots, D)."""
    if new.numel() == 0:
        return
    if cache.dtype.itemsize == 1:  # of 8 bits bytes are copied: not every GPU knows the dtypes
        cache, new = cache.view(torch.uint8), new.view(torch.uint8)
    tensors = {"new": new, "cache": cache, "lines": lines, "slots": slots}
    described = [(x.shape, x.stride(), x.dtype) for x in tensors.values()]
    run(plan_of(("write_kvcache", cache.device, *described)), tensors, _launches)


def _launches(new: Tensor, cache: Tensor, lines: Tensor, slots: Tensor) -> list[Launch]:
    heads, num_tokens, head_dim = new.shape
    arguments = (
        new, cache, lines, slots, new.stride()[:2], cache.stride()[:3], num_tokens, cache.shape[0], cache.shape[2]
    )  # fmt: skip
    constants = {"HEADS": heads, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "TOKENS": TOKENS}
    grid = heads * triton.cdiv(num_tokens, TOKENS)
    return [Launch(write_kvcache_kernel, grid, arguments, constants, {"num_warps": 4})]
