"""The Triton kernel of rotary.py: packed (B, N, Hq + 2 Hkv, D) to q, k, v with rotation, or back with the inverse.

Bound by memory: each element is read once and written once.
"""

import itertools
import math
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from ..device import interpreting
from ..launch import Launch, plan_of, run

TOKENS = 16  # per program
MAX_HEADS = 4  # per program: they share the loads of cosine and sine
MOST_OFFSETS = 2**31  # from a row's first token to its last: what 32 bits hold


@triton.jit(do_not_specialize=["num_tokens"])
def rotary_kernel(
    packed_ptr,  # (B, N, Hq + 2 Hkv, D): read, or written where INVERSE
    q_ptr,  # (B, Hq, N, D): written, or read where INVERSE
    k_ptr,
    v_ptr,  # (B, Hkv, N, D)
    cos_ptr,  # (N, D) fp32
    sin_ptr,  # (N, D) fp32, negative in the first half
    scale_ptr,  # (B, N, Hq + Hkv) fp32: written, or read where INVERSE; None without a norm
    turned_q_ptr,  # (B, Hq, N, D), (B, Hkv, N, D): the forward's q and k, where INVERSE and there is a norm
    turned_k_ptr,
    packed_strides,  # (batch, token, head), elements
    q_strides,  # (batch, head, token)
    k_strides,
    v_strides,
    turned_q_strides,
    turned_k_strides,
    table_stride,  # of a token
    num_tokens,
    norm_eps,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    BLOCK_HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    INVERSE: tl.constexpr,
    IN_PLACE: tl.constexpr,  # q, k and v are views of packed: values stay as they are
):
    """One program handles TOKENS tokens of HEADS heads, which are all query, all key or all value heads."""
    head_blocks: tl.constexpr = (NUM_HEADS + (1 if IN_PLACE else 2) * KV_HEADS) // HEADS
    program = tl.program_id(0)
    first_head = (program % head_blocks) * HEADS
    token_block = program // head_blocks
    token_blocks = tl.cdiv(num_tokens, TOKENS)
    batch = (token_block // token_blocks).to(tl.int64)
    tokens = (token_block % token_blocks) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    heads = tl.arange(0, HEADS)[None, :, None].to(tl.int64)  # a head may span 2^31 elements
    columns = tl.arange(0, BLOCK_HALF)[None, None, :]
    inside = (tokens < num_tokens) & (columns < HALF)

    packed = packed_ptr + batch * packed_strides[0] + tokens * packed_strides[1]
    packed += (first_head + heads) * packed_strides[2] + columns
    turns = first_head < NUM_HEADS + KV_HEADS
    NORM: tl.constexpr = scale_ptr is not None
    turned = packed  # a placeholder where it is not read
    if first_head < NUM_HEADS:
        split = q_ptr + batch * q_strides[0] + (first_head + heads) * q_strides[1] + tokens * q_strides[2]
        if INVERSE and NORM:
            turned = turned_q_ptr + batch * turned_q_strides[0] + tokens * turned_q_strides[2]
            turned += (first_head + heads) * turned_q_strides[1] + columns
    elif turns:
        head = first_head - NUM_HEADS + heads
        split = k_ptr + batch * k_strides[0] + head * k_strides[1] + tokens * k_strides[2]
        if INVERSE and NORM:
            turned = turned_k_ptr + batch * turned_k_strides[0] + tokens * turned_k_strides[2]
            turned += head * turned_k_strides[1] + columns
    else:
        head = first_head - NUM_HEADS - KV_HEADS + heads
        split = v_ptr + batch * v_strides[0] + head * v_strides[1] + tokens * v_strides[2]
    split += columns

    source = split if INVERSE else packed
    target = packed if INVERSE else split
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + HALF, mask=inside, other=0.0)
    if turns:
        table = tokens * table_stride + columns
        cos = tl.load(cos_ptr + table, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + table + HALF, mask=inside, other=0.0)
        if INVERSE:
            sin = -sin
        x, y = low.to(tl.float32), high.to(tl.float32)
        if NORM:
            scale_at = scale_ptr + (batch * num_tokens + tokens) * (NUM_HEADS + KV_HEADS) + first_head + heads
            known = tokens + 0 * heads < num_tokens
            if INVERSE:  # gradient of y = scale * x; a rotation keeps the inner products of whole heads
                u = tl.load(turned, mask=inside, other=0.0).to(tl.float32)
                w = tl.load(turned + HALF, mask=inside, other=0.0).to(tl.float32)
                mean = tl.sum(x * u + y * w, 2, keep_dims=True) / (2 * HALF)
                scale = tl.load(scale_at, mask=known, other=0.0)
                x, y = (x - u * mean) * scale, (y - w * mean) * scale
            else:
                scale = tl.rsqrt(tl.sum(x * x + y * y, 2, keep_dims=True) / (2 * HALF) + norm_eps)
                tl.store(scale_at, scale, mask=known)
                x, y = x * scale, y * scale
        low = (x * cos - y * sin).to(low.dtype)
        high = (y * cos + x * sin).to(high.dtype)
    tl.store(target, low, mask=inside)
    tl.store(target + HALF, high, mask=inside)


def launch_rotary(
    packed: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor | None = None,
    norm_eps: float | None = None,
    *,
    turned: tuple[Tensor | None, Tensor | None] = (None, None),
    inverse: bool = False,
    in_place: bool = False,
) -> None:
    """Fill q, k, v and, with a norm, scale from `packed`; or `packed` from gradients of them where `inverse`.

    turned: the forward's q and k, where there was a norm and `inverse`.
    in_place: q, k and v are views of `packed`; not with `inverse`.
    """
    if interpreting() and packed.dtype.itemsize == 2:
        return _launch_in_float32(packed, q, k, v, cos, sin, scale, norm_eps, turned, inverse)
    if packed.numel() == 0:
        return None
    by_head = [x for x in (q, k, v, *turned) if x is not None]
    most = MOST_OFFSETS // max(packed.stride(1), *(x.stride(2) for x in by_head))
    if packed.shape[1] > most:
        for row, start in itertools.product(range(packed.shape[0]), range(0, packed.shape[1], most)):
            rows, some = slice(row, row + 1), slice(start, start + most)
            q_part, k_part, v_part, *turned_part = (None if x is None else x[rows, :, some] for x in (q, k, v, *turned))
            launch_rotary(
                packed[rows, some], q_part, k_part, v_part, cos[some], sin[some],
                None if scale is None else scale[rows, some], norm_eps, turned=turned_part, inverse=inverse,
                in_place=in_place,
            )  # fmt: skip
        return None
    if inverse:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    elif packed.stride(-1) != 1:
        packed = packed.contiguous()
    normed = turned[0] is not None if inverse else norm_eps is not None
    cos, sin = cos.contiguous(), sin.contiguous()
    tensors = {"packed": packed, "q": q, "k": k, "v": v, "cos": cos, "sin": sin, "scale": scale if normed else None}
    tensors |= dict(zip(("turned_q", "turned_k"), turned, strict=True))
    described = [(x.shape, x.stride(), x.dtype, x.device) if x is not None else None for x in tensors.values()]
    plan = plan_of(("rotary", norm_eps, inverse, in_place, *described))
    run(plan, tensors, partial(_launches, norm_eps, inverse, in_place))
    return None


def _launches(norm_eps: float | None, inverse: bool, in_place: bool, **given: Tensor | None) -> list[Launch]:
    packed, q, k, v, cos, *_ = given.values()
    batch, tokens, _, head_dim = packed.shape
    num_heads, kv_heads = q.shape[1], k.shape[1]
    heads = math.gcd(num_heads, kv_heads, MAX_HEADS)
    by_head = q, k, v, given["turned_q"], given["turned_k"]
    strides = [x.stride()[:3] if x is not None else (0, 0, 0) for x in (packed, *by_head)]
    arguments = *given.values(), *strides, cos.stride(0), tokens, norm_eps or 0.0
    constants = {
        "NUM_HEADS": num_heads, "KV_HEADS": kv_heads, "HALF": head_dim // 2,
        "BLOCK_HALF": triton.next_power_of_2(head_dim // 2), "TOKENS": TOKENS, "HEADS": heads, "INVERSE": inverse,
        "IN_PLACE": in_place,
    }  # fmt: skip
    grid = batch * triton.cdiv(tokens, TOKENS) * ((num_heads + (1 if in_place else 2) * kv_heads) // heads)
    return [Launch(rotary_kernel, grid, arguments, constants, {"num_warps": 4})]


def _launch_in_float32(packed, q, k, v, cos, sin, scale, norm_eps, turned, inverse) -> None:
    """The interpreter keeps bfloat16 as integers: run it in float32 and round once."""
    wide = [x.float() for x in (packed, q, k, v)]
    turned = tuple(None if x is None else x.float() for x in turned)
    launch_rotary(*wide, cos, sin, scale, norm_eps, turned=turned, inverse=inverse)
    for narrow, result in zip((packed,) if inverse else (q, k, v), wide[:1] if inverse else wide[1:], strict=True):
        narrow.copy_(result)
