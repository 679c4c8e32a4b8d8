"""V^T for the FP8 forward: (B, Hkv, D, Nk), its keys in the order in which the kernel's P has them (fp8_kernel.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import Options, key_of
from ..launch import Launch, plan_of, run

VALUES_BLOCK = 128  # keys that a program transposes


@triton.jit(do_not_specialize=["num_heads", "num_k"])
def hopper_fp8_values_kernel(
    v_ptr,  # (B, Hkv, Nk, D), e4m3 seen as int8
    out_ptr,  # (B, Hkv, D, num_columns), contiguous
    batch_stride,
    head_stride,
    token_stride,
    num_heads,
    num_k,
    num_columns,  # num_k rounded up to a multiple of 16
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Transpose a tile of keys, in the order that P has them; columns past the last key become 0."""
    tiles = (num_columns + BLOCK_K - 1) // BLOCK_K
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    batch = batch_head // num_heads
    head = batch_head - batch * num_heads
    column = (tl.program_id(0) % tiles) * BLOCK_K + tl.arange(0, BLOCK_K)
    # bits of the column 4t + 2h + i: t t h i; of the key 8h + 2t + i: h t t i
    key = (column & ~15) | ((column & 2) << 2) | ((column & 12) >> 1) | (column & 1)
    dims = tl.arange(0, HEAD_DIM)
    start = v_ptr + batch * batch_stride + head * head_stride
    tile = tl.load(start + key[:, None].to(tl.int64) * token_stride + dims[None, :], mask=key[:, None] < num_k, other=0)
    out = out_ptr + batch_head * HEAD_DIM * num_columns + dims[:, None] * num_columns + column[None, :]
    tl.store(out, tl.trans(tile), mask=column[None, :] < num_columns)


def launch_values(v: Tensor, out: Tensor) -> None:
    """Write e4m3 v (B, Hkv, Nk, D) to out (B, Hkv, D, Nk rounded up to 16) as `hopper_fp8_kernel` reads it."""

    def launches(v: Tensor, out: Tensor) -> list[Launch]:
        batch, num_heads, num_k, head_dim = v.shape
        programs = -(-out.shape[3] // VALUES_BLOCK) * batch * num_heads
        arguments = (v, out, *v.stride()[:3], num_heads, num_k, out.shape[3])
        constants = {"HEAD_DIM": head_dim, "BLOCK_K": VALUES_BLOCK}
        return [Launch(hopper_fp8_values_kernel, programs, arguments, constants, {"num_warps": 4})]

    plan = plan_of(key_of("fp8 values", Options(False, 1.0), v, out))
    run(plan, {"v": v.view(torch.int8), "out": out.view(torch.int8)}, launches)
