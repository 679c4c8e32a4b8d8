"""The Triton kernel of `write_kvcache`: it writes new keys and values to their places in a cache, in one launch.

Bound by memory: each element is read once and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, plan_of, run

TOKENS = 32  # per program, of one head


@triton.jit
def _write(new, cache, line, slot, head, tokens, columns, inside, new_strides, cache_strides):
    x = tl.load(new + tokens * new_strides[0] + head * new_strides[1] + columns, mask=inside)
    at = cache + line * cache_strides[0] + head * cache_strides[1] + slot * cache_strides[2] + columns
    tl.store(at, x, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_lines", "num_slots"])
def write_kvcache_kernel(
    k,  # (num_tokens, HEADS, HEAD_DIM)
    v,
    k_cache,  # (num_lines, HEADS, num_slots, HEAD_DIM)
    v_cache,
    lines,  # (num_tokens,) int64: the row or page of each token
    slots,  # (num_tokens,) int64
    k_strides,  # (token, head), elements
    v_strides,
    k_cache_strides,  # (line, head, slot)
    v_cache_strides,
    num_tokens,
    num_lines,
    num_slots,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program writes the keys or the values of TOKENS tokens of a head. Tokens whose place is outside the cache are
    skipped."""
    head = (tl.program_id(0) // 2 % HEADS).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) // (2 * HEADS) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, BLOCK_D)[None, :]
    line = tl.load(lines + tokens, mask=tokens < num_tokens, other=-1)
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=-1)
    inside = ((line >= 0) & (line < num_lines) & (slot >= 0) & (slot < num_slots))[:, None] & (columns < HEAD_DIM)
    tokens, line, slot = tokens[:, None], line[:, None], slot[:, None]
    if tl.program_id(0) % 2 == 0:
        _write(k, k_cache, line, slot, head, tokens, columns, inside, k_strides, k_cache_strides)
    else:
        _write(v, v_cache, line, slot, head, tokens, columns, inside, v_strides, v_cache_strides)


def launch_write_kvcache(k_cache: Tensor, v_cache: Tensor, lines: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """k, v (N, Hkv, D), of the caches' dtype, to (lines[i], :, slots[i]) of the caches (lines, Hkv, slots, D)."""
    if k.numel() == 0:
        return
    tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    if k_cache.dtype.itemsize == 1:  # numbers of 8 bits are copied as bytes: not every GPU has the dtypes
        tensors = {name: x.view(torch.uint8) for name, x in tensors.items()}
    tensors |= {"lines": lines, "slots": slots}
    described = [(x.shape, x.stride(), x.dtype, x.device) for x in tensors.values()]
    run(plan_of(("write_kvcache", *described)), tensors, _launches)


def _launches(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lines: Tensor, slots: Tensor) -> list[Launch]:
    num_tokens, heads, head_dim = k.shape
    arguments = (
        k, v, k_cache, v_cache, lines, slots, k.stride()[:2], v.stride()[:2], k_cache.stride()[:3],
        v_cache.stride()[:3], num_tokens, k_cache.shape[0], k_cache.shape[2],
    )  # fmt: skip
    constants = {"HEADS": heads, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "TOKENS": TOKENS}
    grid = 2 * heads * triton.cdiv(num_tokens, TOKENS)
    return [Launch(write_kvcache_kernel, grid, arguments, constants, {"num_warps": 4})]
