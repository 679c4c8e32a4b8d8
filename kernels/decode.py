"""Attention over a cache of keys and values, for generation: the public functions, their definition, the operator.

`flash_attention_with_kvcache` appends new tokens to the cache and attends over it, in one launch. Imports no Triton.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .call import Options, autocast_inputs, check_call, check_tensor, key_of, plain_options
from .device import OPERATORS, interpreting
from .flops import register_flop_formulas
from .fused.write_kvcache import EIGHT_BITS, check_scale, read_kvcache, write_kvcache
from .launch import Plan, plan_of, tokens_first, with_positive_scale
from .ops import mark_written, needs_dispatcher
from .reference import naive_attention
from .support import has_forward_mode, refuse_forward_mode, refuse_torch_func, takes_hopper_kvcache, why_not_kvcache

MAX_QUERIES = 16  # per row; more tokens are a prompt, which `flash_attention` reads
SMALLEST_PAGE = 16
# Limits of kernels/portable/decode.py: the most spans that a launch cuts into tiles, the most groups of a row's spans.
MAX_SPANS, MAX_GROUPS = 512, 16


class Call(NamedTuple):
    """A call's tensors, in the order of the operator's schema."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_new: Tensor | None
    v_new: Tensor | None
    cache_seqlens: Tensor
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    workspace: Tensor | None


def flash_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    workspace: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of 1 to 16 new queries a row over that row's cached keys; appends k and v to the cache first.

    The bits of a row do not depend on the other rows, on the cache's capacity, or on the size and order of its pages.
    Lengths are read on the device: calls that differ only in lengths compile nothing, wait for nothing, and can share
    one CUDA graph. Inference only.

    Args:
        q: (B, Hq, Nq, D) float32, bfloat16 or float16, Nq from 1 to 16, D from 16 to 256.
        k_cache, v_cache: (B, Hkv, S, D), or pages (P, Hkv, page, D) with `block_table`; q's dtype, int8 or,
            from compute capability 8.9 on, float8_e4m3fn, whose NaN a GPU reads as 480, or in keys as NaN (Triton's
            interpreter rounds to it without the carry, so a value that rounds up to a power of two becomes half of
            that). Both have the same strides, the last one 1. Hq is a multiple of Hkv.
        k, v: (B, Hkv, Nq, D), q's dtype: the same tokens' keys and values, written after each row's last key.
        cache_seqlens: (B,) int32 on q's device: the slots in use before the call. A negative length marks an absent
            row, which attends to nothing and writes nothing.
        cache_leftpad: (B,) int32: the slots before a row's first key.
        block_table: (B, pages of a row) int32: the page numbers of each row. `page` is a power of two from 16. With a
            window, pages that end 128 slots or more before the first key that a query sees may be gone; their table
            entries may have any value.
        k_scale, v_scale: scales of an 8-bit cache, float32: one per head, (Hkv,), or one per token and head,
            (B, Hkv, S) or (P, Hkv, page). Keys are `k_cache * k_scale`. Scales per token are written for the new
            tokens: the largest magnitude divided by 127 (int8) or 448 (float8).
        causal, scale, window, softcap, alibi_slopes, sinks: as in `flash_attention`. The last query is aligned with
            the row's last key.
        return_lse: also return the log of the softmax denominator.
        workspace: from `kvcache_workspace`; calls that may run at the same time need one each. Without it each call
            clears a new one, which is one more launch.

    Returns:
        O (B, Hq, Nq, D) in q's dtype, stored as (B, Nq, Hq, D). With `return_lse`, also LSE (B, Hq, Nq), float32.
        On a GPU, which is not waited for, a row longer than the capacity, with more padding than tokens, or with a page
        outside the pool gives NaN: nothing outside the cache is read or written, a row of such a length or padding
        writes nothing at all, and the workspace's first word becomes 1. On a CPU, except in Triton's interpreter, such
        a row raises ValueError, and nothing is written to any row.

    Raises:
        ValueError: before any launch, naming the argument, its value and what is allowed.

    Source: Flash-Decoding (Dao et al., 2023). On a CPU `naive_attention_with_kvcache` runs instead, which also
    accepts any D and float64.
    """
    call = Call(q, k_cache, v_cache, k, v, cache_seqlens, cache_leftpad, block_table, k_scale, v_scale, workspace)
    o, lse = attend(*checked(call, causal, scale, window, softcap, alibi_slopes, sinks))
    return (o, lse) if return_lse else o


def checked(call: Call, causal, scale, window, softcap, alibi_slopes, sinks) -> tuple[Call, Options, Plan | None]:
    """The call and its options, checked unless one of the same key was; its plan, None if checks cannot be skipped."""
    plan = options = plain = None
    if alibi_slopes is sinks is None and may_skip_checks(call):
        plain = plain_options(causal, scale, window, softcap, 0.0)
        if plain is not None:
            try:
                plan = plan_of(decode_key(call, plain))
                options = plan.options
            except RuntimeError:  # a nested or sparse tensor has no address; the checks name it
                plain = None
    if options is None:
        call, options = check_kvcache_call(
            call, causal=causal, scale=scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks
        )
        q, options = with_positive_scale(call.q, options)
        call = call._replace(q=q)
        if reason := why_not_kvcache(call.q, call.k_cache, options):
            raise ValueError(reason)
        if plain is not None:
            plan.options = options
    return call, options, plan


def attend(call: Call, options: Options, plan: Plan | None) -> tuple[Tensor, Tensor]:
    """O and LSE of a checked call."""
    if plan is not None or not needs_dispatcher(call.q, call.k_cache):  # the dispatcher costs the host time
        return _run(call, options, plan)
    refuse_torch_func("attention over a cache", "a batch of rows")
    register_flop_formulas()
    numbers = (options.causal, options.scale, options.window_left, options.window_right, options.softcap)
    return flash_kvcache(*call, *numbers, options.alibi_slopes, options.sinks)


def may_skip_checks(call: Call) -> bool:
    """Whether the checks of a call of the same key hold for this one: no derivative, tracer or autocast is active."""
    if torch.is_grad_enabled() or has_forward_mode() or needs_dispatcher(*[x for x in call if x is not None]):
        return False
    if call.q is None or call.k_cache is None or call.v_cache is None:
        return False
    kind = call.q.device.type
    return kind != "meta" and not torch.is_autocast_enabled(kind)  # no autocast on meta


def decode_key(call: Call, options: Options, tile: object = None) -> tuple:
    """`key_of` a call; `tile` overrides the table's. A contiguous cache without scales has one key at any length, so
    that growing it by a copy keeps the key."""
    given = tuple([x is not None for x in call])
    k, v = call.k_cache, call.v_cache
    if k.dim() != 4 or call.block_table is not None or call.k_scale is not None:
        return key_of(("decode", tile, given), options, *[x for x in call if x is not None])
    strides, together = k.stride(), 0
    for stride in strides[:3]:
        together |= stride
    # what the checks and the launch depend on in its shape and strides
    shape = k.shape[:2], k.shape[3:], k.shape[2] > 0, k.shape == v.shape, strides == v.stride(), strides[3:]
    repeated = 0 in strides, strides[2] == 0 and k.shape[2] > 1
    alike = together * k.itemsize % 16, together < 2**31, repeated, k.data_ptr() % 16 == v.data_ptr() % 16 == 0
    kind = "decode", tile, given, shape, alike, k.dtype, v.dtype, k.device, v.device
    return key_of(kind, options, call.q, *[x for x in call[3:] if x is not None])


def naive_attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, **options
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition of attention over a cache: `naive_attention` of each row's keys, one row after the other.

    Arguments, result and errors as in `flash_attention_with_kvcache`, but any device, float64, and any head_dim. Reads
    the lengths on the host, which waits for the GPU. An 8-bit cache is read as float32.
    """
    return_lse = options.pop("return_lse", False)
    tensors = [options.pop(name, None) for name in Call._fields[5:]]  # before the others are passed on
    call, options = check_kvcache_call(Call(q, k_cache, v_cache, k, v, *tensors), **options)
    o, lse = _naive(call, options)
    return (o, lse) if return_lse else o


def kvcache_workspace(batch_size: int, num_heads: int, device: torch.device | str) -> Tensor:
    """(words,) int32 zeros for calls of up to `batch_size` rows and `num_heads` query heads. Calls leave them zero,
    except the first word, which becomes 1 once a call had a length or page that does not fit."""
    return torch.zeros(_words(batch_size, num_heads), dtype=torch.int32, device=device)


def _words(batch_size: int, num_heads: int) -> int:
    return 2 + MAX_SPANS + batch_size * num_heads * (MAX_GROUPS + 1)


def check_kvcache_call(call: Call, *, causal: bool = True, **options) -> tuple[Call, Options]:
    """Check a call; return it, cast where autocast is on, and its options in canonical form.

    Raises ValueError, naming the argument, its value and what is allowed.
    """
    q, k_cache, v_cache, k, v, cache_seqlens, cache_leftpad, block_table, k_scale, v_scale, workspace = call
    for field, x in (*call._asdict().items(), ("sinks", options.get("sinks"))):
        name = field.removesuffix("_new")  # the caller's name
        if x is not None or name in ("q", "k_cache", "v_cache", "cache_seqlens"):
            check_tensor(name, x)
            if x.device != q.device:
                raise ValueError(f"{name} is on {x.device} but q is on {q.device}; move them to one device")
            refuse_forward_mode("attention over a cache", "naive_attention", x)
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{name} asks for a gradient, and a cache's attention has none; use torch.no_grad()")
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None; pass k and v, or neither")
    new_k, new_v = (q, q) if k is None else (k, v)
    given = q.dtype
    q, new_k, new_v = autocast_inputs(q, new_k, new_v)
    if k_cache.dtype == given != q.dtype:
        raise ValueError(
            f"autocast makes q {q.dtype} and k_cache has dtype {given}, which would be copied at each call; make the "
            f"cache {q.dtype}, or call without autocast"
        )
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected 4 dimensions")
    (batch, num_heads, num_q, head_dim), (rows, num_kv_heads, slots, _) = q.shape, k_cache.shape
    if not 1 <= num_q <= MAX_QUERIES:
        raise ValueError(
            f"q has {num_q} tokens a row; attention over a cache takes 1 to {MAX_QUERIES}: "
            "read a prompt by flash_attention"
        )
    like = q[:, :1].expand(-1, num_kv_heads, -1, -1)
    q, _, _, options = check_call(q, like, like, causal=causal, **options)
    if options.packed or options.dropout_p or options.masked:
        raise ValueError("attention over a cache takes no cu_seqlens, dropout_p or block_mask; use flash_attention")
    _check_cache(q, k_cache, v_cache, k_scale, v_scale)
    if k is not None:
        for name, x in (("k_cache", k_cache), ("k_scale", k_scale)):
            written = x is not None and x.dim() > 1  # scales per head are only read
            if written and any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True)):
                raise ValueError(f"{name} has strides {x.stride()}: tokens that share memory cannot be appended to")
        for name, x in (("k", new_k), ("v", new_v)):
            if tuple(x.shape) != (batch, num_kv_heads, num_q, head_dim) or x.dtype != q.dtype:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}; expected "
                    f"{(batch, num_kv_heads, num_q, head_dim)}, the tokens of q, and {q.dtype}"
                )
    for name, x in (("cache_seqlens", cache_seqlens), ("cache_leftpad", cache_leftpad)):
        if x is not None and (x.dtype != torch.int32 or tuple(x.shape) != (batch,)):
            raise ValueError(f"{name} has dtype {x.dtype} and shape {tuple(x.shape)}; expected int32 and ({batch},)")
    if block_table is None:
        if rows != batch:
            raise ValueError(f"k_cache has batch size {rows} but q has {batch}; they must be equal without block_table")
    elif block_table.dtype != torch.int32 or block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(
            f"block_table has dtype {block_table.dtype} and shape {tuple(block_table.shape)}; "
            f"expected int32 and ({batch}, pages of a row)"
        )
    elif slots < SMALLEST_PAGE or slots & (slots - 1):
        raise ValueError(f"k_cache has pages of {slots} tokens; expected a power of two from {SMALLEST_PAGE} on")
    words = _words(batch, num_heads)
    if workspace is not None and (
        workspace.dtype != torch.int32 or workspace.numel() < words or not workspace.is_contiguous()
    ):
        raise ValueError(
            f"workspace has dtype {workspace.dtype} and {workspace.numel()} elements, strides {workspace.stride()}; "
            f"expected int32 and {words} or more in a row: make it by kvcache_workspace({batch}, {num_heads}, device)"
        )
    return call._replace(q=q, k_new=None if k is None else new_k, v_new=None if v is None else new_v), options


def _check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    if k_cache.dtype != q.dtype and k_cache.dtype not in EIGHT_BITS:
        raise ValueError(
            f"k_cache has dtype {k_cache.dtype} but q has {q.dtype}; expected that, torch.int8 or torch.float8_e4m3fn"
        )
    if k_cache.shape[3] != q.shape[3]:
        raise ValueError(f"k_cache has head_dim {k_cache.shape[3]} but q has {q.shape[3]}; they must be equal")
    for what in ("shape", "dtype", "stride"):
        ours, theirs = (getattr(x, what) for x in (v_cache, k_cache))
        ours, theirs = (x() if what == "stride" else x for x in (ours, theirs))
        if ours != theirs:
            raise ValueError(f"v_cache has {what} {ours} but k_cache has {theirs}; they must be equal")
    if k_cache.stride(3) != 1:
        raise ValueError(
            f"k_cache has strides {k_cache.stride()}; the last one must be 1: a copy could not be appended to"
        )
    check_scale("k_scale", k_cache, k_scale)
    check_scale("v_scale", k_cache, v_scale)
    if k_scale is not None and (k_scale.shape != v_scale.shape or k_scale.stride() != v_scale.stride()):
        raise ValueError("v_scale has another shape or other strides than k_scale; they must be equal")


def _naive(call: Call, options: Options) -> tuple[Tensor, Tensor]:
    """The definition, on a checked call."""
    q, pages = call.q, call.block_table
    batch, _, num_q, head_dim = q.shape
    page = call.k_cache.shape[2]
    capacity = page if pages is None else page * pages.shape[1]
    new = 0 if call.k_new is None else num_q
    o, lse = tokens_first(q, head_dim), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    caches, scales = (call.k_cache, call.v_cache), (call.k_scale, call.v_scale)
    pads = [0] * batch if call.cache_leftpad is None else call.cache_leftpad.tolist()
    lengths, places = call.cache_seqlens.tolist(), []  # places of each row's keys, checked before any write
    for row, (length, pad) in enumerate(zip(lengths, pads, strict=True)):
        if length >= 0 and not 0 <= pad <= length <= capacity - new:
            raise ValueError(
                f"row {row} has {length} tokens in the cache, {pad} of them padding, and {new} new ones; "
                f"the cache has room for {capacity}"
            )
        end = length + new if length >= 0 else pad
        first = pad if options.window_left < 0 else max(pad, end - num_q - options.window_left)  # first visible key
        slots = torch.arange(first, max(first, end), device=q.device)
        line = torch.full_like(slots, row) if pages is None else pages[row].long()[slots // page]
        if pages is not None and not bool(((line >= 0) & (line < call.k_cache.shape[0])).all()):
            raise ValueError(
                f"row {row} of block_table has a page that is not from 0 to {call.k_cache.shape[0] - 1}; "
                "every page of its tokens must be the pool's"
            )
        places.append((line, slice(None), slots % page if pages is not None else slots))
    for row, where in enumerate(places):
        if new and lengths[row] >= 0:
            behind = (where[0][-new:], slice(None), where[2][-new:])
            write_kvcache(caches, scales, behind, (call.k_new[row], call.v_new[row]))
        k, v = (read_kvcache(*stored, where, q.dtype) for stored in zip(caches, scales, strict=True))
        slopes = None if options.alibi_slopes is None else options.alibi_slopes[row : row + 1]
        result = naive_attention(
            q[row : row + 1].to(k.dtype), k, v, causal=options.causal, scale=options.scale,
            window=(options.window_left, options.window_right), softcap=options.softcap, alibi_slopes=slopes,
            sinks=options.sinks, return_lse=True,
        )  # fmt: skip
        o[row], lse[row] = result[0][0].to(q.dtype), result[1][0].to(lse.dtype)
    return o, lse


_LIBRARY = torch.library.Library(OPERATORS, "FRAGMENT")
_LIBRARY.define(
    "flash_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k_new, Tensor? v_new, "
    "Tensor cache_seqlens, Tensor? cache_leftpad, Tensor? block_table, Tensor(c!)? k_scale, Tensor(d!)? v_scale, "
    "Tensor(e!)? workspace, bool causal, float scale, SymInt window_left=-1, SymInt window_right=-1, "
    "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None) -> (Tensor o, Tensor lse)"
)
flash_kvcache = getattr(torch.ops, OPERATORS).flash_kvcache.default


def _run(call: Call, options: Options, plan: Plan | None) -> tuple[Tensor, Tensor]:
    if not call.q.is_cuda and not interpreting():
        return _naive(call, options)
    if call.k_new is not None:
        mark_written(call.k_cache, call.v_cache)
        if call.k_scale is not None and call.k_scale.dim() == 3:
            mark_written(call.k_scale, call.v_scale)
    plan = plan or plan_of(decode_key(call, options))
    if plan.on_hopper is None:
        tensors = call.k_cache, call.v_cache, call.k_new, call.v_new, call.cache_leftpad, call.block_table
        plan.on_hopper = takes_hopper_kvcache(call.q, *tensors)
    if plan.on_hopper:
        from .hopper.decode import launch_hopper_decode

        return launch_hopper_decode(call, options, None, plan)
    from .portable.decode import launch_flash_decode

    return launch_flash_decode(call, options, None, plan)


def _run_operator(*arguments) -> tuple[Tensor, Tensor]:
    return _run(Call(*arguments[: len(Call._fields)]), Options(*arguments[len(Call._fields) :]), None)


@torch.library.register_fake(f"{OPERATORS}::flash_kvcache", lib=_LIBRARY)
def _(q, *others):
    return tokens_first(q, q.shape[3]), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


_LIBRARY.impl("flash_kvcache", _run_operator, "CompositeExplicitAutograd")
