"""Forward pass for Hopper (sm_90a), in Gluon: TMA, asynchronous wgmma, specialised warps.

Roles. Two or three consumer warpgroups own 64 queries each; one producer warp issues all loads. A program computes one
query tile (a plain grid) or one after another (a persistent grid, whose producer runs ahead into the next tile);
`plan_for` says which. Order of the tiles and key ranges: schedule.py; barriers: pipeline.py; arithmetic: softmax.py.

Pipeline of one consumer; S(j) = Q K(j)^T, P(j) = exp2(S(j) - max), keys from right to left:

    tensor cores   S(0)         S(1) P(0)V(0)                                  S(2) P(1)V(1)
    other units         mask,P(0)         max, 1/4 of P(1)  3/4 of P(1), O rescaled          max, ...   last P V, store
                        |                 |                 |
                        the only masked   after S(1)        when P(0)V(0) is done, under products of the other
                        tiles come first  alone is done     consumers

A window's left edge is masked too, in the last tiles. Tiles that only the program's other consumers need are handed
back unread. Packed documents: descriptors clip at the document's end, for loads and for the store of O.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..call import Options, key_of
from ..device import num_sms
from ..launch import (
    Launch,
    Plan,
    grid_tiles,
    heads_per_section,
    option_tensors,
    plan_of,
    run,
    tokens_first,
    window_bounds,
)
from ..portable.prepare import document_tiles, document_tiles_launch, documents_launches
from ..portable.record import record
from ..portable.tiles import LN_2, LOG2_E, NOT_SPECIALIZED, Mask
from ..portable.visits import mask_constants
from . import tma
from .masked import Masked, announce_patterns, first_key, masked_by, program_tiles, row_tiles
from .pipeline import Barriers, Build, Tiles, hand_back, load_rows, pass_baton, ready_barriers, store_rows
from .schedule import Document, Sizes, batch_and_head, document_turn, first_rows, lse_row, num_turns, turn_tile
from .softmax import add_p_v, log2_factor, slope_at, softmax_step
from .tma import slot, tile_width

L2_SHARE = 1 / 6  # for the keys and values of the heads that are worked on together


@record
class Call:
    """What all roles share."""

    tiles: Tiles
    barriers: Barriers
    sizes: Sizes
    window: tuple  # (left, right), read only where LOCAL
    document: Document  # or None
    masked: Masked  # or None
    alibi_slopes: gl.tensor  # pointer, or None


@gluon.jit
def _of_turn(turn, call):
    """Return the call with the sizes of the document of this program's turn."""
    if call.document is not None:
        document, sizes = document_turn(turn, call.sizes, call.document)
        return Call(call.tiles, call.barriers, sizes, call.window, document, call.masked, call.alibi_slopes)
    else:
        return call


@gluon.jit
def _producer(q_desc, k_desc, v_desc, packed, build):
    barriers = packed.barriers
    tiles = packed.tiles
    q_bytes: gl.constexpr = 64 * build.HEAD_DIM * 2
    k_bytes: gl.constexpr = build.BLOCK_K * build.HEAD_DIM * 2
    num_tiles = (packed.sizes.num_q + 64 * build.CONSUMERS - 1) // (64 * build.CONSUMERS)
    step = 0
    for turn in range(num_turns(num_tiles, packed.sizes, packed.document, build)):
        call = _of_turn(turn, packed)
        sizes = call.sizes
        mask = Mask(sizes.num_q, sizes.num_k, call.window, build.CAUSAL, build.LOCAL)
        q_row0, k_row0 = first_rows(call.document)
        num_tiles = (sizes.num_q + 64 * build.CONSUMERS - 1) // (64 * build.CONSUMERS)
        tile, batch_head = turn_tile(turn, num_tiles, sizes, call.document, build)
        batch, head = batch_and_head(batch_head, sizes.num_heads, call.document)
        kv_head = head // sizes.group_size
        row, first, end, _ = program_tiles(tile, batch_head, num_tiles, mask, call, build)
        for c in gl.static_range(build.CONSUMERS):
            mbarrier.wait(barriers.q_empty.index(c), (turn & 1) ^ 1)
            if row + 64 * c >= 0:
                full = barriers.q_full.index(c)
                mbarrier.expect(full, q_bytes)
                load_rows(q_desc, batch, head, row + 64 * c, q_row0, sizes.num_q, full, tiles.q.index(c))
            else:
                mbarrier.arrive(barriers.q_full.index(c), count=1)
        for i in range(end - first):
            key, pattern, below = first_key(end - 1 - i, call.masked, build.BLOCK_K)
            stage, phase = slot(step, build.STAGES)
            mbarrier.wait(barriers.k_empty.index(stage), phase ^ 1)
            full = barriers.k_full.index(stage)
            announce_patterns(pattern, below, stage, call.masked)
            mbarrier.expect(full, k_bytes)
            load_rows(k_desc, batch, kv_head, key, k_row0, sizes.num_k, full, tiles.k.index(stage))
            mbarrier.wait(barriers.v_empty.index(stage), phase ^ 1)
            full = barriers.v_full.index(stage)
            mbarrier.expect(full, k_bytes)
            load_rows(v_desc, batch, kv_head, key, k_row0, sizes.num_k, full, tiles.v.index(stage))
            step += 1


@gluon.jit
def _query_tile(
    o_desc, lse_ptr, call, scale_log2, softcap, build, CONSUMER: gl.constexpr, step, rows, loaded, batch_head
):  # fmt: skip
    """Compute and store O and LSE of a consumer's 64 queries, from row `rows` on. The program loads the key tiles
    `loaded` (first, end, and where a block mask's full ones end).

    Returns the step after them.
    """
    barriers = call.barriers
    sizes = call.sizes
    mask = Mask(sizes.num_q, sizes.num_k, call.window, build.CAUSAL, build.LOCAL)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, build.BLOCK_K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, build.HEAD_DIM, 16])
    q_tile = call.tiles.q.index(CONSUMER)
    o_tile = call.tiles.o.index(CONSUMER)
    factor = log2_factor(scale_log2, softcap)
    slope = slope_at(call.alibi_slopes, call.document, batch_head, sizes.num_heads, factor)
    loaded_first, loaded_end, _ = loaded
    key_first, key_end, full_first, full_end = row_tiles(rows, loaded, mask, call, build)
    step = hand_back(step, loaded_end - key_end, barriers, build, CONSUMER)

    end = step + key_end - key_first
    from_step_0 = (key_end - 1 + step) * (1 if call.masked is not None else build.BLOCK_K)
    stage, phase = slot(step, build.STAGES)
    mbarrier.wait(barriers.k_full.index(stage), phase)
    of_tile = q_tile, mask, scale_log2, softcap, slope, rows, from_step_0, end
    acc = gl.zeros([64, build.HEAD_DIM], gl.float32, o_layout)
    acc, probs, running_max, running_sum = softmax_step(call, of_tile, step, acc, 0, 0, 0, build, CONSUMER, True, True)
    first = step + 1
    full_from = end - gl.minimum(full_end - key_first, key_end - key_first - 1)
    if build.CAUSAL or build.LOCAL or call.masked is not None:
        for step in range(first, full_from):
            acc, probs, running_max, running_sum = softmax_step(
                call, of_tile, step, acc, probs, running_max, running_sum, build, CONSUMER, False, True
            )
    if build.LOCAL:
        full_until = gl.maximum(end - (full_first - key_first), full_from)
    else:
        full_until = end
    for step in range(full_from, full_until):
        acc, probs, running_max, running_sum = softmax_step(
            call, of_tile, step, acc, probs, running_max, running_sum, build, CONSUMER, False, False
        )
    if build.LOCAL:
        for step in range(full_until, end):
            acc, probs, running_max, running_sum = softmax_step(
                call, of_tile, step, acc, probs, running_max, running_sum, build, CONSUMER, False, True
            )
    if build.HEAD_DIM != 256:
        mbarrier.arrive(barriers.q_empty.index(CONSUMER), count=1)

    last_stage, last_phase = slot(end - 1, build.STAGES)
    mbarrier.wait(barriers.v_full.index(last_stage), last_phase)
    acc = add_p_v(probs, call.tiles.v.index(last_stage), acc, build.BLOCK_K)
    # a row without a visible key has sum 0 and max -inf: O = 0 / 1 and LSE = -inf + log2(1) = -inf
    row_sum = gl.convert_layout(gl.sum(running_sum, 1), gl.SliceLayout(1, s_layout))
    row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
    # not (running_max * factor + ...) * LN_2: the loop has that product too and would carry it around (NOTES.md)
    lse = running_max * (factor * LN_2) + gl.log2(row_sum) * LN_2
    inverse = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, o_layout))
    row = rows + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
    gl.store(lse_row(lse_ptr, batch_head, sizes.num_q, call.document) + row, lse, mask=row < sizes.num_q)
    tma.store_wait(0)  # the previous tile's O has left its buffer
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(barriers.v_empty.index(last_stage), count=1)
    end = hand_back(end, key_first - loaded_first, barriers, build, CONSUMER)
    o_tile.store((acc * inverse[:, None]).to(o_desc.dtype))
    fence_async_shared()
    batch, head = batch_and_head(batch_head, sizes.num_heads, call.document)
    store_rows(o_desc, batch, head, rows, first_rows(call.document)[0], sizes.num_q, o_tile)
    if build.HEAD_DIM == 256:
        tma.store_wait(0)  # the next tile's Q is loaded into O's buffer
        mbarrier.arrive(barriers.q_empty.index(CONSUMER), count=1)
    return end


@gluon.jit
def _consumer(o_desc, lse_ptr, packed, scale_log2, softcap, build, CONSUMER: gl.constexpr):
    barriers = packed.barriers
    num_tiles = (packed.sizes.num_q + 64 * build.CONSUMERS - 1) // (64 * build.CONSUMERS)
    if build.PING_PONG and CONSUMER == build.CONSUMERS - 1:
        pass_baton(build, CONSUMER)  # the first consumer begins
    step = 0
    for turn in range(num_turns(num_tiles, packed.sizes, packed.document, build)):
        call = _of_turn(turn, packed)
        sizes = call.sizes
        mask = Mask(sizes.num_q, sizes.num_k, call.window, build.CAUSAL, build.LOCAL)
        num_tiles = (sizes.num_q + 64 * build.CONSUMERS - 1) // (64 * build.CONSUMERS)
        tile, batch_head = turn_tile(turn, num_tiles, sizes, call.document, build)
        row, first, end, full_end = program_tiles(tile, batch_head, num_tiles, mask, call, build)
        rows = row + 64 * CONSUMER
        mbarrier.wait(barriers.q_full.index(CONSUMER), turn & 1)
        if rows >= 0:
            loaded = (first, end, full_end)
            step = _query_tile(
                o_desc, lse_ptr, call, scale_log2, softcap, build, CONSUMER, step, rows, loaded, batch_head
            )
        else:  # none of its rows exist
            step = hand_back(step, end - first, barriers, build, CONSUMER)
            mbarrier.arrive(barriers.q_empty.index(CONSUMER), count=1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "group_size", "num_batch_heads"])
def hopper_fwd_kernel(
    # descriptors of rank 4 or, packed, 5, whose D is at most HEAD_DIM
    q_desc,  # (B, Hq, Nq, D) bf16 | fp16, tiles of 64 rows
    k_desc,  # (B, Hkv, Nk, D), tiles of BLOCK_K rows
    v_desc,  # (B, Hkv, Nk, D), tiles of BLOCK_K rows
    o_desc,  # (B, Hq, Nq, D), tiles of 64 rows
    lse_ptr,  # (B, Hq, Nq) fp32, contiguous, natural logarithm
    num_heads,  # Hq
    group_size,  # Hq // Hkv
    num_batch_heads,  # B * Hq
    num_q,  # Nq; all documents together where packed
    num_k,
    heads_per_section,
    scale_log2,  # scale * log2(e), positive
    softcap,  # fp32, or None: its code is compiled away
    window_left,  # read only where LOCAL
    window_right,
    alibi_slopes,  # (B or documents, Hq) fp32, or None
    document_tiles,  # of `_document_tiles_kernel`, or None
    mask_starts,  # of a BlockMask, or None
    mask_visits,
    mask_bits,
    HEAD_DIM: gl.constexpr,  # of the tiles: 64, 128 or 256
    BLOCK_K: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    LOCAL: gl.constexpr,  # a window (left, right) in place of CAUSAL
    PING_PONG: gl.constexpr,
    PAIRED: gl.constexpr,  # causal tiles two at a time, in pairs of equal work
    MASK_OF_BATCH: gl.constexpr,  # dimensions of the block mask
    MASK_OF_HEAD: gl.constexpr,
):
    if document_tiles is not None:
        document = Document(document_tiles, gl.load(document_tiles), num_q, 0, 0, 0, 0, 0)
    else:
        document: gl.constexpr = None
    sizes = Sizes(num_heads, group_size, num_batch_heads, num_q, num_k, heads_per_section)
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, HEAD_DIM], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, HEAD_DIM], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, HEAD_DIM], k_layout)
    if HEAD_DIM == 256:
        o_smem = q_smem  # Q, K and V leave no room: a tile's O is stored through the buffer of its Q
    else:
        o_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, HEAD_DIM], q_layout)
    tiles = Tiles(q_smem, k_smem, v_smem, o_smem)
    barriers = ready_barriers(CONSUMERS, STAGES)

    if mask_starts is not None:
        rows: gl.constexpr = 2 if CONSUMERS == 3 else 1
        masked = masked_by(mask_starts, mask_visits, mask_bits, MASK_OF_BATCH, MASK_OF_HEAD, STAGES, rows)
    else:
        masked: gl.constexpr = None
    call = Call(tiles, barriers, sizes, (window_left, window_right), document, masked, alibi_slopes)
    build = Build(HEAD_DIM, BLOCK_K, CONSUMERS, STAGES, CAUSAL, LOCAL, PING_PONG, PAIRED)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (o_desc, lse_ptr, call, scale_log2, softcap, build, 0)),
                (_consumer, (o_desc, lse_ptr, call, scale_log2, softcap, build, 1)),
                (_producer, (q_desc, k_desc, v_desc, call, build)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (o_desc, lse_ptr, call, scale_log2, softcap, build, 0)),
                (_consumer, (o_desc, lse_ptr, call, scale_log2, softcap, build, 1)),
                (_consumer, (o_desc, lse_ptr, call, scale_log2, softcap, build, 2)),
                (_producer, (q_desc, k_desc, v_desc, call, build)),
            ],
            # the first consumer has what is left of the registers: 160 as well, 168 under a window, which needs them
            [4, 4, 1], [160, 160, 24 if LOCAL else 32],
        )  # fmt: skip


@dataclass(frozen=True)
class ForwardPlan:
    """How the forward runs: consumer warpgroups of 64 queries, K/V stages, and constants of the kernel."""

    consumers: int
    stages: int = 2
    ping_pong: bool = False
    persistent: bool = True
    block_k: int = 128


def plan_for(head_dim: int, options: Options, num_q: int) -> ForwardPlan:
    """The fastest of those tried at 1,024 to 32,768 tokens, or within 2 % of it: one H100, torch 2.11.0, triton 3.6.0,
    2026-11-27, 16,384 tokens a call, hidden size 2,048 (NOTES.md). With a window, a soft-cap, documents or a block mask
    at 16,384 tokens: one of four to six on an H200, 2026-11-23. At 256, key tiles of 64 in two stages fit."""
    causal = options.causal
    if options.masked:
        return ForwardPlan(2 if head_dim == 128 else 3, ping_pong=head_dim == 64, persistent=False)
    if head_dim == 256:
        return ForwardPlan(consumers=2, block_k=64)
    if head_dim == 64 and (options.local or options.packed) and not options.softcap:
        return ForwardPlan(consumers=3, ping_pong=not options.local)
    if options.softcap or options.local or options.packed:
        persistent = not causal or options.packed or num_q <= 1024
        return ForwardPlan(consumers=2, stages=2 if head_dim == 128 else 3, persistent=persistent)
    if head_dim == 64 and causal and num_q <= 1024:
        return ForwardPlan(consumers=2, ping_pong=True)
    persistent = not causal or num_q <= 4096
    if head_dim == 64:
        return ForwardPlan(consumers=3, ping_pong=True, persistent=persistent)
    return ForwardPlan(consumers=2, ping_pong=causal, persistent=persistent)


def grid_of(plan: ForwardPlan, tiles: int, options: Options, device_index: int | None) -> tuple[int, bool]:
    """How many programs work on these query tiles, and whether in pairs, which needs more tiles than programs."""
    if not plan.persistent or tiles <= num_sms(device_index):
        return tiles, False
    return num_sms(device_index), options.causal and not options.packed


def launch_hopper_fwd(
    q: Tensor, k: Tensor, v: Tensor, options: Options, schedule: ForwardPlan | None = None, plan: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel. q (B, Hq, Nq, D), k and v (B, Hkv, Nk, D), for which `takes_hopper`;
    options.scale > 0; packed documents have B = 1.

    Returns O (B, Hq, Nq, D), stored as (B, Nq, Hq, D), and LSE (B, Hq, Nq) float32, natural logarithm. `schedule`
    overrides the choice; `plan` is the call's where it is known.
    """
    plan = plan or plan_of(key_of(("hopper forward", schedule), options, q, k, v))
    o, lse = tokens_first(q, q.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, **option_tensors(options)}
    if options.packed:  # enough for any plan: no tile is smaller than 64 rows
        tensors["tiles"] = document_tiles(q, 64, options.cu_seqlens_q)
    run(plan, tensors, partial(_launches, options, schedule))
    return o, lse


def _launches(
    options: Options, schedule: ForwardPlan | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    **given: Tensor,
) -> list[Launch]:  # fmt: skip
    batch, num_heads, num_q, head_dim = q.shape
    num_kv_heads, num_k = k.shape[1], k.shape[2]
    tile = tile_width(head_dim)
    schedule = schedule or plan_for(tile, options, num_q)
    _, num_tiles = grid_tiles(num_q, 64 * schedule.consumers, options.cu_seqlens_q)
    programs, paired = grid_of(schedule, num_tiles * batch * num_heads, options, q.device.index)
    describe = partial(tma.descriptor, packed=options.packed)
    arguments = (
        describe(q, 64, tile), describe(k, schedule.block_k, tile), describe(v, schedule.block_k, tile),
        describe(o, 64, tile), lse, num_heads, num_heads // num_kv_heads, batch * num_heads, num_q, num_k,
        heads_per_section(q, k, L2_SHARE, uneven=options.packed),
        options.scale * LOG2_E.value, options.softcap or None, *window_bounds(options, num_q, num_k),
        *map(given.get, ("alibi_slopes", "tiles", "mask_starts", "mask_visits", "mask_bits")),
    )  # fmt: skip
    constants = {
        "HEAD_DIM": tile, "BLOCK_K": schedule.block_k, "CONSUMERS": schedule.consumers, "STAGES": schedule.stages,
        "CAUSAL": options.causal, "LOCAL": options.local, "PING_PONG": schedule.ping_pong, "PAIRED": paired,
        **mask_constants(options),
    }  # fmt: skip
    launches = documents_launches(q, k, given)
    if options.packed:
        starts = given["starts_q"], given["starts_k"]
        launches.append(document_tiles_launch(q, k, 64 * schedule.consumers, *starts, given["tiles"]))
    return [*launches, Launch(hopper_fwd_kernel, programs, arguments, constants, {"num_warps": 4})]
