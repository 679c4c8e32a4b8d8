"""Forward pass for Hopper (sm_90a), in Gluon: TMA, asynchronous wgmma, specialised warps.

Roles. Two (head_dim 128 and 256) or three (64) consumer warpgroups own 64 queries each; one producer warp issues all
loads. A program takes one query tile after another (persistent grid), and the producer runs ahead into the next. The
order keeps few heads' keys and values in L2 at a time; causal tiles are taken in pairs of equal work.

Pipeline of one consumer; S(j) = Q K(j)^T, P(j) = exp2(S(j) - max), keys from right to left:

    tensor cores   S(0)         S(1) P(0)V(0)            S(2) P(1)V(1)
    other units         mask,P(0)         max, exp2: P(1)            max, exp2: P(2)   ...  last P V, store
                        |                 |          |
                        the only masked   after S(1) O is rescaled when P(0)V(0) is done
                        tiles come first  alone is done

A window's left edge is masked too, in the last tiles. Tiles that only other rows of the program see are handed back.
Packed documents: one tile a program, found before the roles part; descriptors clip at the document's end, as well
for the store of O.

Barriers (mbarriers; a stage s of a ring of STAGES):
    q_full[c]   consumer c's 64 queries have arrived        q_empty[c]  c's last S with them is done (256: O is out)
    k_full[s]   a key tile has arrived                      k_empty[s]  every consumer's S with it is done
    v_full[s]   a value tile has arrived                    v_empty[s]  every consumer's P V with it is done
    9 + c       hardware barrier, with PING_PONG: consumer c may issue its products; the others do softmax
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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
from ..portable.prepare import documents_launches
from ..portable.tiles import LN_2, ORIGIN, document_rows, longest_first, program_tile
from ..portable.tiles import LOG2_E as LOG2_E_CONSTANT
from . import tma
from .tma import slot, tile_width

LOG2_E = LOG2_E_CONSTANT.value
L2_SHARE = 1 / 6  # of the keys and values of the heads that are worked on together


@gluon.jit
def _document_tile(cu_seqlens_q, cu_seqlens_k, q_tokens, num_docs, num_heads, heads_per_section, BLOCK: gl.constexpr):
    """What a program owns of packed documents: (1, or 0 where no tile is left, query tile inside its document,
    batch * head, the document's first packed query and key, its number of queries and of keys).

    Found as in the portable kernel, once a program, by the four warps that all have before they specialise.
    """
    ordinal, batch_head = program_tile(q_tokens // BLOCK + num_docs, num_heads, heads_per_section, False)
    lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    document, tile = longest_first(ordinal, cu_seqlens_q, num_docs, BLOCK, lanes)
    turns = gl.where(document < 0, 0, 1)
    document = gl.maximum(document, 0)
    q_row0, num_q = document_rows(document, cu_seqlens_q)
    k_row0, num_k = document_rows(document, cu_seqlens_k)
    return turns, tile, batch_head, q_row0, k_row0, num_q, num_k


@gluon.jit
def _load(descriptor, batch, head, start, row0, num_tokens, barrier, tile):
    """Copy a tile from row `start` on; rows past num_tokens read as 0, also where the next document is (row0 is the
    document's first packed row: see `packed_descriptor` in kernels/launch.py)."""
    shared = tile._reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)
    if len(descriptor.block_type.shape) == 5:
        tma.load(descriptor, [ORIGIN, row0 + num_tokens, head, ORIGIN - num_tokens + start, 0], barrier, shared)
    else:
        tma.load(descriptor, [batch, head, start, 0], barrier, shared)


@gluon.jit
def _store(descriptor, batch, head, start, row0, num_tokens, tile):
    """`_load`'s reverse: the same clipping keeps a ragged last tile out of the next document's rows."""
    shared = tile._reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)
    if len(descriptor.block_type.shape) == 5:
        tma.store(descriptor, [ORIGIN, row0 + num_tokens, head, ORIGIN - num_tokens + start, 0], shared)
    else:
        tma.store(descriptor, [batch, head, start, 0], shared)


@gluon.jit
def _owned_tile(turn, num_tiles, num_heads, heads_per_section, packed, CAUSAL: gl.constexpr, PAIRED: gl.constexpr):
    """The (query tile, batch * head) of this program's turn. Packed documents have one turn, whose tile
    `_document_tile` has found."""
    if packed is not None:
        _turns, tile, batch_head, _q_row0, _k_row0, _q_tokens = packed
        return tile, batch_head
    elif PAIRED:
        return _paired_tile(turn, num_tiles)
    else:
        return _section_tile(turn, num_tiles, num_heads, heads_per_section, CAUSAL)


@gluon.jit
def _paired_tile(turn, num_tiles):
    """Head after head; a program takes two tiles of one at a time, the longest that is left and the shortest, so that
    all pairs are equally long. Of an odd number of tiles the middle one makes a pair with that of the next head."""
    index = ((turn // 2) * gl.num_programs(0) + gl.program_id(0)) * 2 + turn % 2
    head = index // num_tiles
    rank = index - head * num_tiles
    if num_tiles % 2 == 1 and head % 2 == 1:
        rank = gl.where(rank == 0, num_tiles - 1, rank - 1)
    return gl.where(rank % 2 == 0, num_tiles - 1 - rank // 2, rank // 2), head


@gluon.jit
def _section_tile(turn, num_tiles, num_heads, heads_per_section, CAUSAL: gl.constexpr):
    """Section after section of heads whose K and V stay in L2 together; in one, the longest tiles first."""
    index = turn * gl.num_programs(0) + gl.program_id(0)
    section = index // (num_tiles * heads_per_section)
    first_head = section * heads_per_section
    rest = index - first_head * num_tiles
    heads_here = gl.minimum(heads_per_section, num_heads - first_head)
    tile = rest // heads_here
    head = first_head + rest - tile * heads_here
    if CAUSAL:
        tile = num_tiles - 1 - tile
    return tile, head


@gluon.jit
def _num_turns(num_tiles, num_heads, packed, PAIRED: gl.constexpr):
    if packed is not None:
        turns, _tile, _batch_head, _q_row0, _k_row0, _q_tokens = packed
        return turns
    else:
        at_a_time: gl.constexpr = 2 if PAIRED else 1
        total = num_tiles * num_heads
        shares = (total + at_a_time - 1) // at_a_time
        own = (shares - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
        last = gl.program_id(0) + (own - 1) * gl.num_programs(0)  # the last share may be half a pair
        return own * at_a_time - gl.where(last * at_a_time + at_a_time > total, 1, 0)


@gluon.jit
def _batch_and_head(batch_head, num_heads, packed):
    if packed is not None:
        return 0, batch_head
    else:
        batch = batch_head // num_heads
        return batch, batch_head - batch * num_heads


@gluon.jit
def _first_rows(packed):
    """The first packed row of the program's document, as (query, key); (0, 0) where nothing is packed."""
    if packed is not None:
        _turns, _tile, _batch_head, q_row0, k_row0, _q_tokens = packed
        return q_row0, k_row0
    else:
        return 0, 0


@gluon.jit
def _key_tiles(
    row, end_row, num_q, num_k, window, CAUSAL: gl.constexpr, LOCAL: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """Key tiles of rows row .. end_row: (first, end) of those visited, (full_first, full_end) of those among them that
    need no mask; full_end <= full_first where none is.

    At least one is visited: its mask then gives the rows that see nothing their zeros. 0 <= row < num_q.
    """
    if LOCAL:
        first_row = row + num_k - num_q  # in keys: where the query stands
        last_row = gl.minimum(end_row, num_q) - 1 + num_k - num_q
        left, right = window
        first = gl.maximum(first_row - left, 0) // BLOCK_K
        full_first = (gl.maximum(last_row - left, 0) + BLOCK_K - 1) // BLOCK_K
        seen_by_first = gl.minimum(gl.maximum(first_row + right + 1, 0), num_k)
        seen_by_last = gl.minimum(gl.maximum(last_row + right + 1, 0), num_k)
    elif CAUSAL:
        first = 0
        full_first = 0
        seen_by_first = gl.minimum(gl.maximum(row + 1 + num_k - num_q, 0), num_k)
        seen_by_last = gl.minimum(gl.maximum(gl.minimum(end_row, num_q) + num_k - num_q, 0), num_k)
    else:
        first = 0
        full_first = 0
        seen_by_first = num_k
        seen_by_last = num_k
    end = gl.maximum((seen_by_last + BLOCK_K - 1) // BLOCK_K, first + 1)
    return first, end, full_first, seen_by_first // BLOCK_K


@gluon.jit
def _rows(tile, num_tiles, num_q, CONSUMERS: gl.constexpr):
    """Rows (first, end) of a query tile. Where 64 * CONSUMERS does not divide Nq it is the first tile that is smaller,
    its row negative: under the causal mask the first sees the fewest keys."""
    end = (tile - num_tiles) * (64 * CONSUMERS) + (num_q + 63) // 64 * 64 + 64 * CONSUMERS
    return end - 64 * CONSUMERS, end


@gluon.jit
def _barriers(CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """(q_full, q_empty, k_full, k_empty, v_full, v_empty), ready for every role."""
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    return q_full, q_empty, k_full, k_empty, v_full, v_empty


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, tiles, barriers, sizes, window, packed,
    HEAD_DIM: gl.constexpr, BLOCK_K: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, LOCAL: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    q_smem, k_smem, v_smem, _o_smem = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    num_heads, group_size, num_batch_heads, num_q, num_k, heads_per_section = sizes
    q_bytes: gl.constexpr = 64 * HEAD_DIM * 2
    k_bytes: gl.constexpr = BLOCK_K * HEAD_DIM * 2
    q_row0, k_row0 = _first_rows(packed)
    num_tiles = (num_q + 64 * CONSUMERS - 1) // (64 * CONSUMERS)
    step = 0
    for turn in range(_num_turns(num_tiles, num_batch_heads, packed, PAIRED)):
        tile, batch_head = _owned_tile(turn, num_tiles, num_batch_heads, heads_per_section, packed, CAUSAL, PAIRED)
        batch, head = _batch_and_head(batch_head, num_heads, packed)
        kv_head = head // group_size
        row, end_row = _rows(tile, num_tiles, num_q, CONSUMERS)
        first, end, _, _ = _key_tiles(gl.maximum(row, 0), end_row, num_q, num_k, window, CAUSAL, LOCAL, BLOCK_K)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
            if row + 64 * c >= 0:
                mbarrier.expect(q_full.index(c), q_bytes)
                _load(q_desc, batch, head, row + 64 * c, q_row0, num_q, q_full.index(c), q_smem.index(c))
            else:
                mbarrier.arrive(q_full.index(c), count=1)
        for i in range(end - first):
            key = (end - 1 - i) * BLOCK_K
            stage, phase = slot(step, STAGES)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_bytes)
            _load(k_desc, batch, kv_head, key, k_row0, num_k, k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), k_bytes)
            _load(v_desc, batch, kv_head, key, k_row0, num_k, v_full.index(stage), v_smem.index(stage))
            step += 1


@gluon.jit
def _take_baton(CONSUMER: gl.constexpr, PING_PONG: gl.constexpr):
    if PING_PONG:
        tma.named_barrier("bar.sync", 9 + CONSUMER, 256)


@gluon.jit
def _pass_baton(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr):
    if PING_PONG:
        tma.named_barrier("bar.arrive", 9 + (CONSUMER + 1) % CONSUMERS, 256)


@gluon.jit
def _hand_back(
    step, tiles, barriers, STAGES: gl.constexpr, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr,
    PING_PONG: gl.constexpr,
):  # fmt: skip
    """Let go of the next key tiles, which only other rows of the program see. Returns the step after them."""
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty = barriers
    for _ in range(tiles):
        stage, phase = slot(step, STAGES)
        mbarrier.wait(k_full.index(stage), phase)
        _take_baton(CONSUMER, PING_PONG)
        _pass_baton(CONSUMER, CONSUMERS, PING_PONG)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def _hide(
    scores, row, key, num_q, num_k, window, CAUSAL: gl.constexpr, LOCAL: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """-inf where the key lies past the end or, causal, to the right of the diagonal or, LOCAL, outside the window.

    Seen as (64, BLOCK_K / 8, 8), a column is 8 * a register's number + a thread's own offset: comparing the first
    with (limit - offset) leaves one comparison with a constant for each score and no index in a register.
    """
    blocks = gl.reshape(scores, [64, BLOCK_K // 8, 8])
    layout: gl.constexpr = blocks.type.layout
    block = 8 * gl.arange(0, BLOCK_K // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    offset = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    if CAUSAL or LOCAL:
        rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    if LOCAL:
        left, right = window
        limit = gl.minimum(rows + (num_k - num_q + 1 + right), num_k) - key
        start = rows + (num_k - num_q - left) - key
        hidden = gl.where((block < limit - offset) & (block >= start - offset), blocks, -float("inf"))
    elif CAUSAL:
        limit = gl.minimum(rows + (num_k - num_q + 1), num_k) - key
        hidden = gl.where(block < limit - offset, blocks, -float("inf"))
    else:
        limit = num_k - key
        hidden = gl.where(block < limit - offset, blocks, -float("inf"))
    return gl.convert_layout(gl.reshape(hidden, [64, BLOCK_K]), scores.type.layout)


@gluon.jit
def _logits(scores, scale_log2, softcap):
    """Times `_log2_factor` these are the scaled scores in base 2, with a soft-cap less softcap * log2(e).

    softcap * tanh(x / softcap) = softcap - 2 softcap / (1 + exp(2 x / softcap)). The first term is the same for all
    keys, so softmax does not see it and LSE adds it at the end; the factor 2 softcap goes into the multiply-add with
    the row maximum. That leaves an exp2 and a reciprocal for a score. tanh.approx would be one instruction, but its
    error of 2^-11 is softcap * 2^-11 in a score and in LSE; this has the portable kernel's, softcap * 2^-23.
    """
    if softcap is not None:
        exponentials = gl.exp2(scores * (2.0 * scale_log2 / softcap))
        return gl.inline_asm_elementwise(  # -1 / (1 + e); a quotient would cost the scaling of its operands
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [-1.0 - exponentials], dtype=gl.float32, is_pure=True, pack=1
        )
    else:
        return scores


@gluon.jit
def _log2_factor(scale_log2, softcap):
    """What makes `_logits`, and their maximum, exponents of 2."""
    if softcap is not None:
        return softcap * (2.0 * LOG2_E_CONSTANT)
    else:
        return scale_log2


@gluon.jit
def _thread_sums(probs, BLOCK_K: gl.constexpr):
    """Sum probs (64, BLOCK_K) over the columns that one thread holds: (64, 4), no shuffle."""
    return gl.sum(gl.sum(gl.reshape(probs, [64, BLOCK_K // 8, 4, 2]), 1), 2)


@gluon.jit
def _row_max(scores, CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, s_layout: gl.constexpr):
    """The maximum of each row of scores (64, BLOCK_K).

    A thread has 32 values of a row. One after the other, each maximum waits for the one before: 400 cycles in which
    the warp does nothing else. Three consumers gain 4 % when eight sequences overlap; two lose, up to 6 % (measured).
    """
    if CONSUMERS == 3:
        parts = gl.max(gl.reshape(scores, [64, 4, BLOCK_K // 32, 8]), 2)
        return gl.convert_layout(gl.max(gl.max(parts, 1), 1), gl.SliceLayout(1, s_layout))
    else:
        return gl.max(scores, 1)


@gluon.jit
def _pack(probs, dtype: gl.constexpr, BLOCK_K: gl.constexpr):
    """Round pairs of neighbouring columns into one int32: (64, BLOCK_K) fp32 -> (64, BLOCK_K / 2).

    Carried around the loop as 16-bit values, P costs a move for every register twice an iteration.
    """
    even, odd = gl.split(gl.reshape(probs, [64, BLOCK_K // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def _unpack(packed, dtype: gl.constexpr, BLOCK_K: gl.constexpr, p_layout: gl.constexpr):
    """The (64, BLOCK_K) left operand of P V from `_pack`'s integers: no instruction, only names."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    probs = gl.reshape(gl.join(even, odd), [64, BLOCK_K]).to(dtype, bitcast=True)
    return gl.convert_layout(probs, p_layout)


@gluon.jit
def _add_p_v(probs, v_tile, acc, BLOCK_K: gl.constexpr):
    """acc + P V: started, to be waited for."""
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(_unpack(probs, v_tile.dtype, BLOCK_K, p_layout), v_tile, acc, is_async=True)


@gluon.jit
def _softmax_step(
    q_tile, k_smem, v_smem, barriers, step, end, acc, probs, running_max, running_sum,
    row, from_step_0, num_q, num_k, window, scale_log2, softcap,
    FIRST: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, LOCAL: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr, s_layout: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of key tile `step` while the tensor cores add the previous tile's P V to acc.

    At a query tile's FIRST key tile nothing is added, and maximum and sum begin.
    """
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty = barriers
    stage, _ = slot(step, STAGES)
    _take_baton(CONSUMER, PING_PONG)
    scores = warpgroup_mma(
        q_tile, k_smem.index(stage).permute((1, 0)), gl.zeros([64, BLOCK_K], gl.float32, s_layout),
        use_acc=False, is_async=True,
    )  # fmt: skip
    if not FIRST:
        last_stage, last_phase = slot(step - 1, STAGES)
        mbarrier.wait(v_full.index(last_stage), last_phase)
        acc = _add_p_v(probs, v_smem.index(last_stage), acc, BLOCK_K)
    _pass_baton(CONSUMER, CONSUMERS, PING_PONG)
    scores = warpgroup_mma_wait(0 if FIRST else 1, deps=(scores,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    scores = _logits(scores, scale_log2, softcap)
    factor = _log2_factor(scale_log2, softcap)
    if MASKED:
        key = from_step_0 - step * BLOCK_K
        scores = _hide(scores, row, key, num_q, num_k, window, CAUSAL, LOCAL, BLOCK_K)
    new_max = _row_max(scores, CONSUMERS, BLOCK_K, s_layout)
    if not FIRST:
        new_max = gl.maximum(running_max, new_max)
    if MASKED:
        # a row that has seen no key keeps -inf, and -inf - -inf would be NaN: subtract 0 there
        base_log2 = gl.where(new_max == -float("inf"), 0.0, new_max) * factor
    else:
        base_log2 = new_max * factor
    p = gl.exp2(scores * factor - base_log2[:, None])
    if FIRST:
        running_sum = _thread_sums(p, BLOCK_K)
    else:
        rescale = gl.exp2(running_max * factor - base_log2)
        sum_layout: gl.constexpr = gl.SliceLayout(1, running_sum.type.layout)
        running_sum = running_sum * gl.convert_layout(rescale, sum_layout)[:, None] + _thread_sums(p, BLOCK_K)
    # waiting here for the next keys (they have long arrived) also ends a basic block: without it ptxas moves
    # the wait for P V in front of the exponentials, and they no longer overlap
    next_stage, next_phase = slot(step + 1, STAGES)
    mbarrier.wait(k_full.index(next_stage), next_phase, pred=step + 1 < end)
    if not FIRST:
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(last_stage), count=1)
    probs = _pack(p, v_smem.dtype, BLOCK_K)  # not earlier: the old P's registers are free only now
    if not FIRST:
        acc_rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        acc = acc * gl.convert_layout(rescale, acc_rows)[:, None]
    return acc, probs, new_max, running_sum


@gluon.jit
def _lse_row(lse_ptr, batch_head, num_q, packed):
    """Where the LSE of row 0 is."""
    if packed is not None:
        _turns, _tile, _batch_head, q_row0, _k_row0, q_tokens = packed
        return lse_ptr + batch_head.to(gl.int64) * q_tokens + q_row0
    else:
        return lse_ptr + batch_head.to(gl.int64) * num_q


@gluon.jit
def _query_tile(
    o_desc, lse_ptr, tiles, barriers, sizes, window, packed, scale_log2, softcap, step, rows, loaded, batch_head,
    HEAD_DIM: gl.constexpr, BLOCK_K: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, LOCAL: gl.constexpr, PING_PONG: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """O and LSE of a consumer's 64 queries, from row `rows` on; the program loads the key tiles `loaded` (first, end).

    Returns the step after them.
    """
    q_smem, k_smem, v_smem, o_smem = tiles
    _q_full, q_empty, k_full, _k_empty, v_full, v_empty = barriers
    num_heads, _group_size, _num_batch_heads, num_q, num_k, _heads_per_section = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    q_tile = q_smem.index(CONSUMER)
    o_tile = o_smem.index(CONSUMER)
    loaded_first, loaded_end = loaded
    key_first, key_end, full_first, full_end = _key_tiles(rows, rows + 64, num_q, num_k, window, CAUSAL, LOCAL, BLOCK_K)
    step = _hand_back(step, loaded_end - key_end, barriers, STAGES, CONSUMER, CONSUMERS, PING_PONG)

    end = step + key_end - key_first
    from_step_0 = (key_end - 1 + step) * BLOCK_K  # step s has the keys from here - s * BLOCK_K on
    stage, phase = slot(step, STAGES)
    mbarrier.wait(k_full.index(stage), phase)
    acc, probs, running_max, running_sum = _softmax_step(
        q_tile, k_smem, v_smem, barriers, step, end, gl.zeros([64, HEAD_DIM], gl.float32, o_layout), 0, 0, 0,
        rows, from_step_0, num_q, num_k, window, scale_log2, softcap,
        True, True, CAUSAL, LOCAL, BLOCK_K, STAGES, CONSUMER, CONSUMERS, PING_PONG, s_layout,
    )  # fmt: skip
    first = step + 1
    full_from = end - gl.minimum(full_end - key_first, key_end - key_first - 1)
    if CAUSAL or LOCAL:
        for step in range(first, full_from):
            acc, probs, running_max, running_sum = _softmax_step(
                q_tile, k_smem, v_smem, barriers, step, end, acc, probs, running_max, running_sum,
                rows, from_step_0, num_q, num_k, window, scale_log2, softcap,
                False, True, CAUSAL, LOCAL, BLOCK_K, STAGES, CONSUMER, CONSUMERS, PING_PONG, s_layout,
            )  # fmt: skip
    if LOCAL:
        full_until = gl.maximum(end - (full_first - key_first), full_from)
    else:
        full_until = end
    for step in range(full_from, full_until):
        acc, probs, running_max, running_sum = _softmax_step(
            q_tile, k_smem, v_smem, barriers, step, end, acc, probs, running_max, running_sum,
            rows, from_step_0, num_q, num_k, window, scale_log2, softcap,
            False, False, CAUSAL, LOCAL, BLOCK_K, STAGES, CONSUMER, CONSUMERS, PING_PONG, s_layout,
        )  # fmt: skip
    if LOCAL:
        for step in range(full_until, end):
            acc, probs, running_max, running_sum = _softmax_step(
                q_tile, k_smem, v_smem, barriers, step, end, acc, probs, running_max, running_sum,
                rows, from_step_0, num_q, num_k, window, scale_log2, softcap,
                False, True, CAUSAL, LOCAL, BLOCK_K, STAGES, CONSUMER, CONSUMERS, PING_PONG, s_layout,
            )  # fmt: skip
    if HEAD_DIM != 256:
        mbarrier.arrive(q_empty.index(CONSUMER), count=1)

    last_stage, last_phase = slot(end - 1, STAGES)
    mbarrier.wait(v_full.index(last_stage), last_phase)
    acc = _add_p_v(probs, v_smem.index(last_stage), acc, BLOCK_K)
    # a row without a visible key has sum 0 and max -inf: O = 0 / 1 and LSE = -inf + log2(1) = -inf
    row_sum = gl.convert_layout(gl.sum(running_sum, 1), gl.SliceLayout(1, s_layout))
    row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
    lse_log2 = running_max * _log2_factor(scale_log2, softcap) + gl.log2(row_sum)
    if softcap is not None:
        lse_log2 += softcap * LOG2_E_CONSTANT
    inverse = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, o_layout))
    row = rows + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
    gl.store(_lse_row(lse_ptr, batch_head, num_q, packed) + row, lse_log2 * LN_2, mask=row < num_q)
    tma.store_wait(0)  # the previous tile's O has left its buffer
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(last_stage), count=1)
    end = _hand_back(end, key_first - loaded_first, barriers, STAGES, CONSUMER, CONSUMERS, PING_PONG)
    o_tile.store((acc * inverse[:, None]).to(o_desc.dtype))
    fence_async_shared()
    batch, head = _batch_and_head(batch_head, num_heads, packed)
    _store(o_desc, batch, head, rows, _first_rows(packed)[0], num_q, o_tile)
    if HEAD_DIM == 256:
        tma.store_wait(0)  # O stands where the next tile's Q is loaded
        mbarrier.arrive(q_empty.index(CONSUMER), count=1)
    return end


@gluon.jit
def _consumer(
    o_desc, lse_ptr, tiles, barriers, sizes, window, packed, scale_log2, softcap,
    HEAD_DIM: gl.constexpr, BLOCK_K: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, LOCAL: gl.constexpr, PING_PONG: gl.constexpr, PAIRED: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    q_full, q_empty, _k_full, _k_empty, _v_full, _v_empty = barriers
    _num_heads, _group_size, num_batch_heads, num_q, num_k, heads_per_section = sizes
    num_tiles = (num_q + 64 * CONSUMERS - 1) // (64 * CONSUMERS)
    if PING_PONG and CONSUMER == CONSUMERS - 1:
        _pass_baton(CONSUMER, CONSUMERS, True)  # the first consumer begins
    step = 0
    for turn in range(_num_turns(num_tiles, num_batch_heads, packed, PAIRED)):
        tile, batch_head = _owned_tile(turn, num_tiles, num_batch_heads, heads_per_section, packed, CAUSAL, PAIRED)
        row, end_row = _rows(tile, num_tiles, num_q, CONSUMERS)
        first, end, _, _ = _key_tiles(gl.maximum(row, 0), end_row, num_q, num_k, window, CAUSAL, LOCAL, BLOCK_K)
        rows = row + 64 * CONSUMER
        mbarrier.wait(q_full.index(CONSUMER), turn & 1)
        if rows >= 0:
            step = _query_tile(
                o_desc, lse_ptr, tiles, barriers, sizes, window, packed, scale_log2, softcap,
                step, rows, (first, end), batch_head,
                HEAD_DIM, BLOCK_K, CONSUMERS, STAGES, CAUSAL, LOCAL, PING_PONG, CONSUMER,
            )  # fmt: skip
        else:  # none of its rows exist
            step = _hand_back(step, end - first, barriers, STAGES, CONSUMER, CONSUMERS, PING_PONG)
            mbarrier.arrive(q_empty.index(CONSUMER), count=1)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "num_heads", "group_size", "num_batch_heads", "num_q", "num_k", "heads_per_section", "window_left",
        "window_right", "num_docs",
    ]
)  # fmt: skip
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
    cu_seqlens_q,  # (documents + 1,) int32, or None
    cu_seqlens_k,
    num_docs,
    HEAD_DIM: gl.constexpr,  # of the tiles: 64, 128 or 256
    BLOCK_K: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    LOCAL: gl.constexpr,  # a window (left, right) in place of CAUSAL
    PING_PONG: gl.constexpr,
    PAIRED: gl.constexpr,  # `_paired_tile` in place of `_section_tile`
):
    if cu_seqlens_q is not None:
        turns, tile, batch_head, q_row0, k_row0, its_num_q, its_num_k = _document_tile(
            cu_seqlens_q, cu_seqlens_k, num_q, num_docs, num_batch_heads, heads_per_section, 64 * CONSUMERS
        )
        # of documents: what the partitions need beyond a dense call's sizes
        packed = (turns, tile, batch_head, q_row0, k_row0, num_q)
        sizes = (num_heads, group_size, num_batch_heads, its_num_q, its_num_k, heads_per_section)
    else:
        packed: gl.constexpr = None
        sizes = (num_heads, group_size, num_batch_heads, num_q, num_k, heads_per_section)
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, HEAD_DIM], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, HEAD_DIM], k_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, HEAD_DIM], k_layout)
    if HEAD_DIM == 256:
        o_smem = q_smem  # Q, K and V leave no room: a tile's O goes out through its Q
    else:
        o_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, HEAD_DIM], q_layout)
    barriers = _barriers(CONSUMERS, STAGES)

    tiles = (q_smem, k_smem, v_smem, o_smem)
    window = (window_left, window_right)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (o_desc, lse_ptr, tiles, barriers, sizes, window, packed, scale_log2, softcap,
                             HEAD_DIM, BLOCK_K, CONSUMERS, STAGES, CAUSAL, LOCAL, PING_PONG, PAIRED, 0)),
                (_consumer, (o_desc, lse_ptr, tiles, barriers, sizes, window, packed, scale_log2, softcap,
                             HEAD_DIM, BLOCK_K, CONSUMERS, STAGES, CAUSAL, LOCAL, PING_PONG, PAIRED, 1)),
                (_producer, (q_desc, k_desc, v_desc, tiles, barriers, sizes, window, packed,
                             HEAD_DIM, BLOCK_K, CONSUMERS, STAGES, CAUSAL, LOCAL, PAIRED)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (o_desc, lse_ptr, tiles, barriers, sizes, window, packed, scale_log2, softcap,
                             HEAD_DIM, BLOCK_K, CONSUMERS, STAGES, CAUSAL, LOCAL, PING_PONG, PAIRED, 0)),
                (_consumer, (o_desc, lse_ptr, tiles, barriers, sizes, window, packed, scale_log2, softcap,
                             HEAD_DIM, BLOCK_K, CONSUMERS, STAGES, CAUSAL, LOCAL, PING_PONG, PAIRED, 1)),
                (_consumer, (o_desc, lse_ptr, tiles, barriers, sizes, window, packed, scale_log2, softcap,
                             HEAD_DIM, BLOCK_K, CONSUMERS, STAGES, CAUSAL, LOCAL, PING_PONG, PAIRED, 2)),
                (_producer, (q_desc, k_desc, v_desc, tiles, barriers, sizes, window, packed,
                             HEAD_DIM, BLOCK_K, CONSUMERS, STAGES, CAUSAL, LOCAL, PAIRED)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip


@dataclass(frozen=True)
class ForwardPlan:
    """How the forward runs: consumer warpgroups of 64 queries, K/V stages, ping-pong, persistent grid."""

    consumers: int
    stages: int = 2
    ping_pong: bool = False
    persistent: bool = True
    block_k: int = 128


def plan_for(head_dim: int, options: Options, num_q: int) -> ForwardPlan:
    """The fastest of those tried at 1,024 to 32,768 tokens, or within 1 % of it: one H200, torch 2.11.0, triton 3.6.0,
    2026-11-21, 16,384 tokens a call, hidden size 2,048 (NOTES.md).

    With a window, a soft-cap or documents at 16,384 tokens: one of four. head_dim is the tiles'; 256 leaves room for
    key tiles of 64 and two stages.
    """
    causal = options.causal
    if head_dim == 256:
        return ForwardPlan(consumers=2, block_k=64)
    if head_dim == 64 and options.local and not options.softcap:
        return ForwardPlan(consumers=3)
    if options.softcap or options.local or options.packed:
        return ForwardPlan(consumers=2, stages=2 if head_dim == 128 else 3, persistent=not causal or num_q <= 1024)
    if head_dim == 128:
        return ForwardPlan(consumers=2, ping_pong=causal, persistent=not causal or num_q <= 8192)
    if not causal:
        return ForwardPlan(consumers=3, ping_pong=num_q <= 4096)
    if num_q <= 1024:
        return ForwardPlan(consumers=2, ping_pong=True)
    return ForwardPlan(consumers=3, ping_pong=True, persistent=num_q <= 4096)


def grid_of(plan: ForwardPlan, tiles: int, options: Options, device_index: int | None) -> tuple[int, bool]:
    """How many programs take these query tiles, and whether in pairs: only where there are more tiles than programs."""
    if not plan.persistent or options.packed or tiles <= num_sms(device_index):
        return tiles, False
    return num_sms(device_index), options.causal


def launch_hopper_fwd(
    q: Tensor, k: Tensor, v: Tensor, options: Options, schedule: ForwardPlan | None = None, plan: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel. q (B, Hq, Nq, D), k and v (B, Hkv, Nk, D), not refused by `why_not_hopper`;
    options.scale > 0; packed documents have B = 1.

    Returns O (B, Hq, Nq, D), stored as (B, Nq, Hq, D), and LSE (B, Hq, Nq) float32, natural logarithm. `schedule`
    overrides the choice; `plan` is the call's where it is known.
    """
    plan = plan or plan_of(key_of(("hopper forward", schedule), options, q, k, v))
    o, lse = tokens_first(q, q.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, **option_tensors(options)}
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
    num_docs, num_tiles = grid_tiles(num_q, 64 * schedule.consumers, options.cu_seqlens_q)
    programs, paired = grid_of(schedule, num_tiles * batch * num_heads, options, q.device.index)
    describe = tma.packed_descriptor if options.packed else tma.descriptor
    arguments = (
        describe(q, 64, tile), describe(k, schedule.block_k, tile), describe(v, schedule.block_k, tile),
        describe(o, 64, tile), lse,
        num_heads, num_heads // num_kv_heads, batch * num_heads, num_q, num_k, heads_per_section(q, k, L2_SHARE),
        options.scale * LOG2_E, options.softcap or None, *window_bounds(options, num_q, num_k),
        given.get("starts_q"), given.get("starts_k"), num_docs,
    )  # fmt: skip
    constants = {
        "HEAD_DIM": tile, "BLOCK_K": schedule.block_k, "CONSUMERS": schedule.consumers, "STAGES": schedule.stages,
        "CAUSAL": options.causal, "LOCAL": options.local, "PING_PONG": schedule.ping_pong, "PAIRED": paired,
    }  # fmt: skip
    return [
        *documents_launches(q, k, **given), Launch(hopper_fwd_kernel, programs, arguments, constants, {"num_warps": 4})
    ]  # fmt: skip
