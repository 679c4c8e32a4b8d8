"""Attention of a few new queries over a cache of keys and values: one Triton kernel, one launch, and its launcher.

The keys of a row are cut into tiles of BLOCK_K keys. SPAN consecutive tiles make a span, and equally many spans make
each of at most GROUPS groups. A row's result is the fold of its groups' results, each the fold of its spans', each the
fold of its tiles', from first to last, so its bits depend on its own keys alone. Which program computes which tile
depends on the batch: a work item is one tile where the batch has few spans, else one span. Results that are not folded
in registers are folded from memory by the last program to arrive, in the same order and by the same instructions. For
this, products and sums are never contracted to fused multiply-adds (`enable_fp_fusion`): a value from a register would
be rounded differently from one that went through memory.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import Options
from ..decode import Call, decode_key, kvcache_workspace
from ..device import interpreting
from ..launch import Launch, Plan, Switches, dot_precision, next_power_of_2, plan_of, run, tokens_first
from ..replay import Repeated
from .cached import Cached, append, bad_pages, kept_keys, key_pointers
from .scores import Scoring, logits_of, slope_of
from .split import ROWS_BLOCK, Batch, Item, Parts, cut, extent, fold, fold_row, row_of, store_row
from .tiles import LOG2_E, NOT_SPECIALIZED, Mask, mask_scores
from .tuning import DecodeTile, cut_for, decode_memory, decode_rows, decode_tile, fitting
from .widen import widened

NEVER = 2**30  # a window's bound that no distance reaches
IN_FLIGHT = tl.constexpr(4)
NOT_SPECIALIZED_OVER_A_CACHE = (
    *NOT_SPECIALIZED,
    "q_batch", "q_head", "q_token", "cache_row", "cache_head", "cache_slot", "new_batch", "new_head", "new_token",
    "scale_row", "scale_head", "scale_slot", "table_row", "num_rows", "capacity", "num_pages", "slot_rows",
    "min_span_items",
)  # fmt: skip


@triton.jit
def _attend(
    q_tile, q_odd, query, start, num_keys, k, v, k_scale, v_scale, cache, scoring, BLOCK_K: tl.constexpr,
    SCALES: tl.constexpr, WORDS: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of keys by itself. Returns (sum of p V, its odd columns, maximum of the logits, sum of p).

    WORDS: a word of k and v is two columns of STORED, 8 bits each. A (..., D) tensor then holds the even columns, and a
    second tensor holds the odd ones. Without WORDS the second tensor is unused.
    """
    keys = start + tl.arange(0, BLOCK_K)
    inside = keys < num_keys
    keep = kept_keys(inside, cache)
    columns = tl.arange(0, cache.BLOCK_D)
    k_rows = key_pointers(k, cache.strides, start, num_keys, cache, BLOCK_K, True)
    v_rows = key_pointers(v, cache.strides, start, num_keys, cache, BLOCK_K, True)
    # slots past the last key read as 0, because 0 * NaN is NaN
    k_tile = tl.load(k_rows[:, None] + columns[None, :], mask=keep, other=0.0, eviction_policy="evict_first")
    v_tile = tl.load(v_rows[:, None] + columns[None, :], mask=keep, other=0.0, eviction_policy="evict_first")
    if WORDS:
        k_even, k_odd = widened(k_tile, q_tile.dtype, STORED)
        scores = tl.dot(q_tile, k_even.T, input_precision=scoring.PRECISION)
        scores = tl.dot(q_odd, k_odd.T, scores, input_precision=scoring.PRECISION)
    else:
        scores = tl.dot(q_tile, k_tile.to(q_tile.dtype).T, input_precision=scoring.PRECISION)
    if SCALES == 2:
        rows = key_pointers(k_scale, cache.scale_strides, start, num_keys, cache, BLOCK_K, True)
        scores *= tl.load(rows, mask=inside, other=0.0)[None, :]
    elif SCALES == 1:
        scores *= tl.load(k_scale + cache.head)
    logits, factor, _ = logits_of(scores, query[:, None], keys[None, :], scoring)
    logits = mask_scores(logits, query[:, None], keys[None, :], scoring.mask)
    maximum = tl.max(logits, 1) * factor
    base = tl.where(maximum == -float("inf"), 0.0, maximum)
    probs = tl.exp2(logits * factor - base[:, None])
    total = tl.sum(probs, 1)
    if SCALES == 2:
        rows = key_pointers(v_scale, cache.scale_strides, start, num_keys, cache, BLOCK_K, True)
        probs *= tl.load(rows, mask=inside, other=0.0)[None, :]
    probs = probs.to(q_tile.dtype)
    if WORDS:
        v_even, v_odd = widened(v_tile, q_tile.dtype, STORED)
        acc = tl.dot(probs, v_even, input_precision=scoring.PRECISION)
        odd = tl.dot(probs, v_odd, input_precision=scoring.PRECISION)
    else:
        acc = tl.dot(probs, v_tile.to(q_tile.dtype), input_precision=scoring.PRECISION)
        odd = acc
    return acc, odd, maximum, total


@triton.jit(do_not_specialize=NOT_SPECIALIZED_OVER_A_CACHE)
def flash_decode_kernel(
    # inputs; k_cache, v_cache and, with one scale per token, the scales are written where APPEND
    q,  # (B, Hq, Nq, D) fp16 | bf16 | fp32
    k_cache,  # (B, Hkv, S, D), or pages (P, Hkv, PAGE, D): q's dtype, int8 or e4m3
    v_cache,
    k_new,  # (B, Hkv, Nq, D), q's dtype, or None
    v_new,
    k_scale,  # fp32 (Hkv,), or (B, Hkv, S) as the cache, or None
    v_scale,
    seqlens,  # (B,) int32
    leftpad,  # (B,) int32 or None
    block_table,  # (B, pages of a row) int32 or None
    # outputs
    o,  # (B, Nq, Hq, D), q's dtype, contiguous
    lse,  # (B, Hq, Nq) fp32, contiguous, natural logarithm
    # scratch memory of the launch
    sums,  # (slots, slot_rows, BLOCK_D) fp32
    maxima,  # (slots, 2, BLOCK_M) fp32
    workspace,  # int32: fault, ticket, arrival counters of spans, of rows; all but the fault are 0 before and after
    # layout, in units of UNIT elements (of CACHE_UNIT those of the cache); the last stride is 1
    q_batch, q_head, q_token,
    cache_row, cache_head, cache_slot,
    new_batch, new_head, new_token,
    scale_row, scale_head, scale_slot,  # elements
    table_row,
    # sizes
    num_rows,  # B
    num_heads,  # Hq
    num_kv_heads,  # Hkv
    num_q,  # Nq
    capacity,  # S, or PAGE times the width of the block table
    num_pages,
    slot_rows,  # min(BLOCK_M, Nq * Hq // Hkv)
    min_span_items,  # from this many spans on an item is a span; fewer spans have at most SPAN times as many parts
    window_left,  # NEVER without a window
    window_right,  # read only where LOCAL
    scale_log2,  # scale * log2(e), positive
    switches,  # Switches: what is None is compiled away
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM padded to a power of two
    BLOCK_M: tl.constexpr,  # queries times heads of a group that share a tile
    BLOCK_K: tl.constexpr,
    QUAD: tl.constexpr,  # SPAN: there are no quads
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,  # of a row's spans, at most
    PAGE: tl.constexpr,  # 0: contiguous
    SCALES: tl.constexpr,  # 0: none, 1: per head, 2: per token and head
    UNIT: tl.constexpr,
    CACHE_UNIT: tl.constexpr,
    WORDS: tl.constexpr,  # two columns of 8 bits are read as one word
    APPEND: tl.constexpr,
    CAUSAL: tl.constexpr,
    LOCAL: tl.constexpr,  # a window (left, right) in place of CAUSAL
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program computes work items, a tile or a span of keys for BLOCK_M rows of one KV head, until none is left.

    Grid:     any number of programs; item i goes to program i, later spans by ticket and later tiles in turn. No
              program waits for another.
    Math:     O = softmax(scale * Q K^T + mask) V over the keys of each row, the new ones included.
    Numerics: scores, maxima, sums and accumulators fp32; P rounded to q's dtype before P V.
    Needs:    head dimensions 16 to 256, scale > 0, at least one row; the launcher sees to it.
    Source:   Flash-Decoding (Dao et al., 2023); the order of the sums is our own.
    """
    padded: tl.constexpr = leftpad is not None
    pads = leftpad if padded else seqlens
    lanes = tl.arange(0, ROWS_BLOCK)
    batch = Batch(seqlens, pads, num_rows, num_q, capacity, window_left, lanes, BLOCK_K, QUAD, SPAN, APPEND, padded)
    group = num_heads // num_kv_heads
    row_blocks = tl.cdiv(group * num_q, BLOCK_M)
    width = num_kv_heads * row_blocks  # items per tile, or per span, of keys
    size, num_items = cut(width, min_span_items, batch)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK_D)
    parts = Parts(
        sums, maxima, slot_rows, workspace, min_span_items, tl.arange(0, BLOCK_M), columns, BLOCK_M, BLOCK_D, QUAD,
        SPAN, GROUPS, False, IN_FLIGHT,
    )  # fmt: skip

    item = tl.program_id(0)
    while item < num_items:
        unit = item // width
        inner = item - unit * width
        row, place, spans_before = row_of(unit, size, batch)
        keys, first_tile, tiles, pad, fault = extent(row, batch)
        begin = first_tile + place * size
        end = tl.minimum(begin + size, first_tile + tiles)

        kv_head = inner // row_blocks
        packed = (inner - kv_head * row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
        query = packed // group
        head = kv_head * group + packed - query * group
        real = query < num_q
        strides = (cache_row * CACHE_UNIT, cache_head * CACHE_UNIT, cache_slot * CACHE_UNIT)
        pages = seqlens
        if PAGE > 0:
            pages = block_table + row.to(tl.int64) * table_row
        scale_strides = (scale_row, scale_head, scale_slot)
        cache = Cached(pages, row, kv_head, pad, strides, scale_strides, HEAD_DIM, BLOCK_D, PAGE, padded)
        end_key = tl.minimum(end * BLOCK_K, keys)
        if PAGE > 0:
            most: tl.constexpr = triton.next_power_of_2(SPAN * BLOCK_K // PAGE + 2)
            fault = fault | bad_pages(begin * BLOCK_K, end_key, num_pages, cache, most)
        if fault:
            tl.store(workspace, 1)
            end, end_key = begin, 0
        if APPEND:
            first_new = keys - num_q
            begin_new = tl.maximum(first_new, begin * BLOCK_K)
            if begin_new < end_key:
                new_strides = (new_batch * UNIT, new_head * UNIT, new_token * UNIT)
                append(k_new, k_cache, k_scale, new_strides, first_new, begin_new, end_key, cache, SCALES)
                append(v_new, v_cache, v_scale, new_strides, first_new, begin_new, end_key, cache, SCALES)
                tl.debug_barrier()  # other threads of this program read them below; other programs do not

        q_rows = q + row.to(tl.int64) * (q_batch * UNIT) + head * (q_head * UNIT) + query * (q_token * UNIT)
        if WORDS:
            even = 2 * tl.arange(0, BLOCK_D // 2)
            q_keep = real[:, None] & (even < HEAD_DIM)[None, :]
            q_tile = tl.load(q_rows[:, None] + even[None, :], mask=q_keep, other=0.0)
            q_odd = tl.load(q_rows[:, None] + even[None, :] + 1, mask=q_keep, other=0.0)
            k_read = k_cache.to(tl.pointer_type(tl.int16), bitcast=True)
            v_read = v_cache.to(tl.pointer_type(tl.int16), bitcast=True)
            HALF: tl.constexpr = CACHE_UNIT // 2
            halves = (cache_row * HALF, cache_head * HALF, cache_slot * HALF)
            cache = Cached(pages, row, kv_head, pad, halves, scale_strides, HEAD_DIM // 2, BLOCK_D // 2, PAGE, padded)
        else:
            k_read, v_read = k_cache, v_cache
            q_keep = real[:, None] & (columns < HEAD_DIM)[None, :]
            q_tile = tl.load(q_rows[:, None] + columns[None, :], mask=q_keep, other=0.0)
            q_odd = q_tile
        slope = 0.0
        if switches.alibi_slopes is not None:
            slope = slope_of(row, head, num_heads, switches)[:, None]
        mask = Mask(num_q, keys, (window_left, window_right), CAUSAL, LOCAL)
        scoring = Scoring(mask, scale_log2, slope, switches, 0, 0, PRECISION)
        acc = tl.zeros([BLOCK_M, BLOCK_D // 2 if WORDS else BLOCK_D], tl.float32)
        odd = acc
        maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for tile in range(begin, end):
            part, part_odd, part_maximum, part_total = _attend(
                q_tile, q_odd, query, tile * BLOCK_K, keys, k_read, v_read, k_scale, v_scale, cache, scoring, BLOCK_K,
                SCALES, WORDS, k_cache.dtype.element_ty,
            )  # fmt: skip
            if WORDS:
                odd, _, _ = fold(odd, maximum, total, part_odd, part_maximum, part_total)
            acc, maximum, total = fold(acc, maximum, total, part, part_maximum, part_total)
        if WORDS:
            acc = tl.join(acc, odd).reshape(BLOCK_M, BLOCK_D)
        total = tl.where(fault, float("nan"), total)

        taken = Item(item, size, row, inner, width, tiles, place, spans_before)
        done, acc, maximum, total = fold_row(acc, maximum, total, taken, parts)
        if done:
            store_row(
                acc, maximum, total, o, lse, switches.sinks, v_scale + kv_head if SCALES == 1 else None, row, query,
                head, num_q, num_heads, parts, HEAD_DIM,
            )  # fmt: skip

        if (num_items > programs) & (size == SPAN):  # spans take long, and not all equally
            drawn = tl.atomic_add(workspace + 1, 1, sem="relaxed")
            if drawn == num_items - 1:  # the last ticket: one per item past the first ones, and one more per program
                tl.store(workspace + 1, 0)
            item = programs + drawn
        else:
            item += programs


def launch_flash_decode(
    call: Call, options: Options, tile: DecodeTile | None = None, plan: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """Append the new tokens and attend. The call is checked; options.scale > 0. `tile` overrides the table.

    Returns O (B, Hq, Nq, D), stored as (B, Nq, Hq, D), and LSE (B, Hq, Nq) float32.
    """
    q = call.q
    plan = plan or plan_of(decode_key(call, options, tile))
    if interpreting() and q.dtype == torch.bfloat16:
        wide = [x.float() if x is not None and x.dtype == q.dtype else x for x in call]
        o, lse = launch_flash_decode(Call(*wide), options, tile, plan)
        for narrow, result in zip(call[1:3], wide[1:3], strict=True):
            if result is not narrow:
                narrow.copy_(result)
        return o.to(q.dtype), lse
    tile, tensors, cache = given_tensors(call, options, tile)
    if q.numel():
        run(plan, tensors, partial(decode_launches, options, tile, cache), **cache)
    return tensors["o"], tensors["lse"]


def repeated_decode(
    call: Call, options: Options, plan: Plan, tile: DecodeTile | None = None, **numbers: tuple
) -> Repeated | None:
    """Return a launched call to repeat with other q, k_cache, v_cache and o; None where its plan has no replays."""
    if not plan.replays or call.q.stride(3) != 1:
        return None
    _, tensors, cache = given_tensors(call, options, tile)
    return Repeated(plan.replays, tensors | dict.fromkeys(("q", "k_cache", "v_cache", "o")), cache | numbers)


def given_tensors(call: Call, options: Options, tile: DecodeTile | None) -> tuple[DecodeTile, dict, dict[str, int]]:
    """Return a call's tile, its tensors with O, LSE and the scratch memory, and the numbers of `_of_cache`."""
    q = call.q
    paged = call.block_table is not None
    block_m = decode_rows(q.shape, call.k_cache.shape[1])[1]
    tile = tile or decode_tile(call.k_cache.dtype, q.shape[3], block_m, paged)
    tensors = call._asdict() | {"alibi_slopes": options.alibi_slopes, "sinks": options.sinks}
    tensors["q"] = q if q.stride(3) == 1 else q.contiguous()
    if call.k_new is not None and (call.k_new.stride() != call.v_new.stride() or call.k_new.stride(3) != 1):
        tensors |= {"k_new": call.k_new.contiguous(), "v_new": call.v_new.contiguous()}
    read = ["cache_seqlens", "cache_leftpad", "block_table", "alibi_slopes", "sinks"]
    if call.k_scale is not None and call.k_scale.dim() == 1:  # scales per token are written, and have strides
        read += ["k_scale", "v_scale"]
    for name in read:
        if tensors[name] is not None:
            tensors[name] = tensors[name].contiguous()
    if call.workspace is None:
        tensors["workspace"] = kvcache_workspace(q.shape[0], q.shape[1], q.device)
    pages_of_row = call.block_table.shape[1] if paged else 1
    shapes = decode_memory(q.shape, call.k_cache.shape, pages_of_row, tile, cut_for(q.device, tile)[1])
    tensors["o"] = tokens_first(q, q.shape[3])
    for name, shape in zip(("lse", "sums", "maxima"), (q.shape[:3], *shapes), strict=True):
        tensors[name] = q.new_empty(shape, dtype=torch.float32)
    return tile, tensors, _of_cache(call.k_cache, pages_of_row)


def _of_cache(k_cache: Tensor, pages_of_row: int) -> dict[str, int]:
    """Return the arguments that differ between the launches for a cache and for a longer one."""
    row, head, slot, _ = k_cache.stride()
    unit = _unit(k_cache)
    row, head, slot = row // unit, head // unit, slot // unit
    return {"cache_row": row, "cache_head": head, "cache_slot": slot, "capacity": k_cache.shape[2] * pages_of_row}


def decode_launches(options: Options, tile: DecodeTile, cache: dict[str, int], **given: Tensor | None) -> list[Launch]:
    q, k_cache, k_new, k_scale = given["q"], given["k_cache"], given["k_new"], given["k_scale"]
    (batch, num_heads, num_q, head_dim), (_, num_kv_heads, page, _) = q.shape, k_cache.shape
    table = given["block_table"]
    unit, cache_unit = _unit(q, k_new, given["v_new"]), _unit(k_cache)
    programs, min_span_items = cut_for(q.device, tile)
    # each product then runs over half of the columns, which must be at least 16
    words = k_cache.element_size() == 1 and q.element_size() == 2 and head_dim > 16 and head_dim % 2 == 0
    words &= cache_unit > 1 and all(given[name].data_ptr() % 16 == 0 for name in ("k_cache", "v_cache"))
    scales = 0 if k_scale is None else 1 if k_scale.dim() == 1 else 2
    strides = [stride // unit for stride in q.stride()[:3]]
    *cache_strides, capacity = cache.values()
    strides += cache_strides
    strides += [0] * 3 if k_new is None else [stride // unit for stride in k_new.stride()[:3]]
    strides += k_scale.stride() if scales == 2 else [0] * 3
    left, right = (NEVER if bound < 0 else min(bound, NEVER) for bound in (options.window_left, options.window_right))
    switches = Switches(options.softcap or None, given["alibi_slopes"], given["sinks"])
    tensors = [given[name] for name in _ORDER]
    arguments = (
        *tensors, *strides, 0 if table is None else table.stride(0),
        batch, num_heads, num_kv_heads, num_q, capacity, k_cache.shape[0],
        given["sums"].shape[1], min_span_items, left, right, options.scale * LOG2_E.value, switches,
    )  # fmt: skip
    constants = {
        "HEAD_DIM": head_dim, "BLOCK_D": next_power_of_2(head_dim),
        "BLOCK_M": decode_rows(q.shape, num_kv_heads, tile.least_rows)[1],
        "BLOCK_K": tile.block_k, "QUAD": tile.quad or tile.span, "SPAN": tile.span, "GROUPS": tile.groups,
        "PAGE": 0 if table is None else page, "SCALES": scales, "UNIT": unit, "CACHE_UNIT": cache_unit,
        "WORDS": words, "APPEND": k_new is not None, "CAUSAL": options.causal, "LOCAL": options.local,
        "PRECISION": dot_precision(q),
    }  # fmt: skip
    return [fitting(tile, lambda tile: Launch(flash_decode_kernel, programs, arguments, constants, tile.how))]


_ORDER = (
    "q", "k_cache", "v_cache", "k_new", "v_new", "k_scale", "v_scale", "cache_seqlens", "cache_leftpad", "block_table",
    "o", "lse", "sums", "maxima", "workspace",
)  # fmt: skip


def _unit(*tensors: Tensor | None) -> int:
    """Return the elements in 16 bytes where all strides are multiples of that, else 1. Strides are passed in this unit,
    so that the compiler, which knows no stride, loads 16 bytes at a time. Also 1 where a stride has more than 31 bits:
    its quotient would be passed as a 32-bit integer."""
    unit, together = 16 // tensors[0].itemsize, 0
    for x in tensors:
        if x is not None:
            row, head, token, _ = x.stride()
            together |= row | head | token
    return 1 if together % unit or together >= 2**31 else unit
