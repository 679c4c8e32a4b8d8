"""A step of the Hopper backward's consumers: 64 keys and a query tile, under the call's options and its mask; and an
item's steps, one after the other.

What a step does, and when, is in backward_kernel.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_roles import S_LAYOUT, add_in_turn, product, wait_for_turn
from .backward_schedule import BLOCK_Q, KEYS
from .masked import announced_pattern, by_bits, own_bits
from .softmax import biased, from_eights, in_eights, log2_factor, logits, slope_at
from .tma import slot


@gluon.jit
def slope_of(member, batch, kv_head, sizes, scale_log2, softcap):
    """The ALiBi slope of a KV head's query head, in the unit of `logits`."""
    batch_head = batch * sizes.num_heads + kv_head * (sizes.num_heads // sizes.num_kv_heads) + member
    return slope_at(sizes.alibi_slopes, sizes.item, batch_head, sizes.num_heads, log2_factor(scale_log2, softcap))


@gluon.jit
def probabilities(scores, lse, key, position, bits, sizes, scoring, MASKED: gl.constexpr):
    """P^T (KEYS, BLOCK_Q) of the keys from `key` on and the query tile at a position; and the factor of dP^T - delta in
    dS^T: P^T too, under a soft-cap times the cap's derivative.

    Where the mask has edges on both sides of what a program visits, each step checks whether it is at one.
    """
    scale_log2, softcap, slope = scoring
    capped = logits(scores, scale_log2, softcap)
    exponents = capped
    if sizes.alibi_slopes is not None:
        exponents = biased(capped, slope, key, position * BLOCK_Q + (sizes.num_k - sizes.num_q), BLOCK_Q)
    p = gl.exp2(exponents * log2_factor(scale_log2, softcap) - lse[None, :])
    if MASKED:
        keys = key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))[:, None]
        columns: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
        diagonal = position * BLOCK_Q + (sizes.num_k - sizes.num_q)
        if sizes.masked is not None:
            pattern, words = bits
            if softcap is None or pattern > 0:
                p = by_bits(p, words, BLOCK_Q, "0f00000000")
        elif sizes.window is not None:
            left, right = sizes.window
            end = gl.minimum(diagonal + right + 1, sizes.num_k)  # of the keys that the first query sees
            if (key + KEYS > end) | (key < diagonal + BLOCK_Q - 1 - left):
                p = _in_window(p, key, diagonal, sizes)
        elif sizes.CAUSAL:
            last_seen = diagonal + gl.arange(0, BLOCK_Q, layout=columns)[None, :]
            p = gl.where(keys <= last_seen, p, 0.0)
        else:
            p = gl.where(keys < sizes.num_k, p, 0.0)
    if softcap is not None:
        return p, p * (1.0 - 4.0 * capped * capped)
    else:
        return p, p


@gluon.jit
def _in_window(p, key, diagonal, sizes):
    """P^T with zeros outside the window: key and diagonal are where the first key and the first query stand."""
    left, right = sizes.window
    blocks, keys, block, offset = in_eights(p, key, BLOCK_Q)
    first = gl.where(keys < sizes.num_k, keys - diagonal - right, BLOCK_Q) - offset  # query that sees the key
    last = keys - diagonal + left - offset
    return from_eights(gl.where((block >= first) & (block <= last), blocks, 0.0), p)


@gluon.jit
def pattern_bits(stage, position, key, sizes):
    """The pattern of a block mask that the query tile in a stage has, 0 where all is shown, and `own_bits` of the 64
    keys from `key` on under the tile's 64 queries."""
    if sizes.masked is not None:
        pattern = announced_pattern(stage, sizes.masked)
        of_keys = sizes.masked.bits + (pattern.to(gl.int64) * 2 + 1) * 512
        return pattern, own_bits(of_keys, key, position % 2 * BLOCK_Q, S_LAYOUT, BLOCK_Q)
    else:
        return 0, 0


@gluon.jit
def awaited_pattern(full, step, sizes):
    """Wait for a step's query tile. Returns its pattern under a block mask."""
    stage, phase = slot(step, sizes.STAGES)
    mbarrier.wait(full.index(stage), phase)
    return announced_pattern(stage, sizes.masked)


@gluon.jit
def _next_pattern(stage, sizes):
    """The pattern of the step after the one whose tile a stage holds; 0 without a block mask."""
    if sizes.masked is not None:
        return announced_pattern(stage, sizes.masked, 1)
    else:
        return 0


@gluon.jit
def gradient_step_64(
    k, v, streamed, ds_smem, barriers, step, key, position, sizes, scoring, dk, dv,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Add one query tile's share to dK and dV, and store its dS^T. Returns dK, dV and the next tile's pattern. k and v
    are in registers."""
    full, empty, ds_full, ds_empty = barriers
    q_smem, do_smem, lse_smem, delta_smem = streamed
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    columns: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    stage, phase = slot(step, sizes.STAGES)
    place, use = slot(step, 2)
    mbarrier.wait(full.index(stage), phase)
    scores = product(k, q_smem.index(stage).permute((1, 0)))
    dp = product(v, do_smem.index(stage).permute((1, 0)))
    lse = lse_smem.index(stage).load(columns)
    following = _next_pattern(stage, sizes)  # after the products, where its wait costs nothing
    bits = pattern_bits(stage, position, key, sizes)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    p, weight = probabilities(scores, lse, key, position, bits, sizes, scoring, MASKED)
    operand = gl.convert_layout(p.to(q_smem.dtype), gl.DotOperandLayout(0, dk_layout, 2))
    dv = warpgroup_mma(operand, do_smem.index(stage), dv, is_async=True)
    delta = delta_smem.index(stage).load(columns)
    dp = warpgroup_mma_wait(1, deps=(dp,)) - delta[None, :]
    ds = (weight * dp).to(q_smem.dtype)
    mbarrier.wait(ds_empty.index(place), use ^ 1)
    ds_smem.index(place).slice(KEYS * CONSUMER, KEYS, 0).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(place), count=1)
    operand = gl.convert_layout(ds, gl.DotOperandLayout(0, dk_layout, 2))
    dk = warpgroup_mma(operand, q_smem.index(stage), dk, is_async=True)
    dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
    mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv, following


@gluon.jit
def late_products(k_tile, q_smem, ds_smem, ds_full, step, dk, sizes, CONSUMER: gl.constexpr):
    """Issue a step's dQ, of which this consumer has half of the columns, and dK += dS^T Q asynchronously.

    dQ comes first, so that its adds run under dK. dK reads dS^T from shared memory, so that it holds no registers."""
    place, use = slot(step, 2)
    stage, _phase = slot(step, sizes.STAGES)
    ds = ds_smem.index(place)
    mbarrier.wait(ds_full.index(place), use)
    dq = product(ds.permute((1, 0)), k_tile.slice(64 * CONSUMER, 64, 1))
    dk = warpgroup_mma(ds.slice(KEYS * CONSUMER, KEYS, 0), q_smem.index(stage), dk, is_async=True)
    return dq, dk


@gluon.jit
def gradient_step_128(
    k_smem, v_smem, streamed, ds_smem, dq_ptr, turns, barriers, step, key, position, sizes, scoring, dk, dv,
    FIRST: gl.constexpr, MASKED: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Add one query tile's share to dV and store its dS^T. Unless this is the FIRST step, also add the shares of the
    step before to dK and dQ."""
    full, empty, ds_full, _ds_empty = barriers
    q_smem, do_smem, lse_smem, delta_smem = streamed
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    columns: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    stage, phase = slot(step, sizes.STAGES)
    place, _use = slot(step, 2)
    mbarrier.wait(full.index(stage), phase)
    # 0, but ptxas cannot know. Otherwise it keeps the descriptors of all pieces of K and V, the same in every step, in
    # more than 20 of the scarce registers, and moves each to the uniform registers (R2UR) where it is needed
    nought = step >> 30
    k_tile = k_smem.index(nought)
    v = v_smem.index(nought).slice(KEYS * CONSUMER, KEYS, 0)
    lse = lse_smem.index(stage).load(columns)
    scores = product(k_tile.slice(KEYS * CONSUMER, KEYS, 0), q_smem.index(stage).permute((1, 0)))
    if FIRST:
        bits = pattern_bits(stage, position, key, sizes)
        scores = warpgroup_mma_wait(0, deps=(scores,))
    else:
        dq, dk = late_products(k_tile, q_smem, ds_smem, ds_full, step - 1, dk, sizes, CONSUMER)
        bits = pattern_bits(stage, position, key, sizes)  # not earlier: no product may wait for this load
        scores = warpgroup_mma_wait(2, deps=(scores,))
    p, weight = probabilities(scores, lse, key, position, bits, sizes, scoring, MASKED)
    if not FIRST:
        turn = wait_for_turn(turns, step - 1)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        add_in_turn(dq, dq_ptr, turn, step - 1, CONSUMER, 128)
    # registers are scarce: delta is not kept beside dP; instead the sum begins at -delta
    dp = gl.zeros([KEYS, BLOCK_Q], gl.float32, S_LAYOUT) - delta_smem.index(stage).load(columns)[None, :]
    dp = warpgroup_mma(v, do_smem.index(stage).permute((1, 0)), dp, is_async=True)
    operand = gl.convert_layout(p.to(q_smem.dtype), gl.DotOperandLayout(0, dk_layout, 2))
    dv = warpgroup_mma(operand, do_smem.index(stage), dv, is_async=True)
    if not FIRST:
        dk = warpgroup_mma_wait(2, deps=(dk,))
        last_stage, _phase = slot(step - 1, sizes.STAGES)
        mbarrier.arrive(empty.index(last_stage), count=1)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    # a consumer gets here only after the other one has written the dS of the step before, and so has read the dS of
    # the one before that: two places are enough
    ds_smem.index(place).slice(KEYS * CONSUMER, KEYS, 0).store((weight * dp).to(q_smem.dtype))
    fence_async_shared()
    mbarrier.arrive(ds_full.index(place), count=1)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    return dk, dv


@gluon.jit
def _steps(
    operands, begin, end, to_step, to_tile, sign, key, sizes, scoring, dk, dv,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """dK and dV after the steps begin + to_step .. end + to_step: step i + to_step has query tile to_tile + sign i."""
    for i in range(begin, end):
        if sizes.HEAD_DIM == 64:
            dk, dv, _ = gradient_step_64(
                *operands, to_step + i, key, to_tile + sign * i, sizes, scoring, dk, dv, MASKED, CONSUMER
            )
        else:
            dk, dv = gradient_step_128(
                *operands, to_step + i, key, to_tile + sign * i, sizes, scoring, dk, dv, False, MASKED, CONSUMER
            )
    return dk, dv


@gluon.jit
def steps_of_item(
    operands, step, begun, key, query_tiles, from_last, batch, kv_head, sizes, scoring, dk, dv, CONSUMER: gl.constexpr
):  # fmt: skip
    """Run all steps of an item but the first `begun`. Returns (dK, dV, the number of the step after them).

    query_tiles: first, the first that needs no mask, end. Walked from the last, those that need one are a head's last.
    scoring: the first head's. The slope of each later one is loaded a head ahead, for the reason in `visit_at`.
    """
    first, unmasked, end = query_tiles
    scale_log2, softcap, slope = scoring
    group_size = sizes.num_heads // sizes.num_kv_heads
    if sizes.CAUSAL and sizes.window is None and sizes.masked is None and sizes.item is None:
        # a turn is masked steps and then others; walked from the last, the masked ones belong to the head before
        late = gl.where(from_last, 1, 0)
        sign = 1 - 2 * late
        masked_end = step + gl.where(from_last, 0, unmasked - first)
        item_end = step + group_size * (end - first)
        step += begun
        # below, masked_slope is a new value by gl.where: Triton does not carry another name's old value around a loop
        turn, masked_slope = 0, slope
        while step < item_end:
            next_slope = slope_of(gl.minimum(turn + 1, group_size - 1), batch, kv_head, sizes, scale_log2, softcap)
            scoring = (scale_log2, softcap, masked_slope)
            dk, dv = _steps(
                operands, step, masked_end, 0, gl.where(from_last, first - 1, unmasked) - sign * masked_end, sign,
                key, sizes, scoring, dk, dv, True, CONSUMER,
            )  # fmt: skip
            step = gl.maximum(step, masked_end)
            scoring = (scale_log2, softcap, slope)
            turn_end = gl.minimum(masked_end + end - unmasked, item_end)
            dk, dv = _steps(
                operands, step, turn_end, 0, gl.where(from_last, end - 1, unmasked) - sign * masked_end, sign,
                key, sizes, scoring, dk, dv, False, CONSUMER,
            )  # fmt: skip
            step = gl.maximum(step, turn_end)
            masked_end += end - first
            turn += 1
            masked_slope = gl.where(from_last, slope, next_slope)
            slope = next_slope
    else:
        begun += first
        for head in range(group_size):
            next_slope = slope_of(gl.minimum(head + 1, group_size - 1), batch, kv_head, sizes, scale_log2, softcap)
            scoring = (scale_log2, softcap, slope)
            dk, dv = _steps(operands, begun, unmasked, step - first, 0, 1, key, sizes, scoring, dk, dv, True, CONSUMER)
            if sizes.window is None and sizes.masked is None:
                begun = gl.maximum(begun, unmasked)
                dk, dv = _steps(operands, begun, end, step - first, 0, 1, key, sizes, scoring, dk, dv, False, CONSUMER)
            begun = first
            step += end - first
            slope = next_slope
    return dk, dv, step
