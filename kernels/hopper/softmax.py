"""One step of the Hopper forward: a consumer's 64 rows meet a key tile. Masking, online softmax, packing of P."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..portable.scores import half_tanh
from ..portable.tiles import LOG2_E
from .masked import by_bits, pattern_words
from .pipeline import pass_baton, take_baton
from .tma import slot


@gluon.jit
def in_eights(scores, row, COLUMNS: gl.constexpr):
    """Scores (64, COLUMNS) as (64, COLUMNS / 8, 8), their rows from `row` on, and their columns as block + offset.

    block is 8 * a register's number and offset a thread's own: comparing the first with (limit - offset) leaves one
    comparison with a constant for each score and no index in a register.
    """
    blocks = gl.reshape(scores, [64, COLUMNS // 8, 8])
    layout: gl.constexpr = blocks.type.layout
    block = 8 * gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    offset = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    return blocks, rows, block, offset


@gluon.jit
def from_eights(blocks, like):
    """Undo `in_eights`, in the shape and layout of `like`."""
    return gl.convert_layout(gl.reshape(blocks, like.shape), like.type.layout)


@gluon.jit
def hide(scores, row, key, mask, BLOCK_K: gl.constexpr):
    """-inf where the key lies past the end or, causal, to the right of the diagonal or, LOCAL, outside the window."""
    blocks, rows, block, offset = in_eights(scores, row, BLOCK_K)
    if mask.LOCAL:
        left, right = mask.window
        limit = gl.minimum(rows + (mask.num_k - mask.num_q + 1 + right), mask.num_k) - key
        start = rows + (mask.num_k - mask.num_q - left) - key
        hidden = gl.where((block < limit - offset) & (block >= start - offset), blocks, -float("inf"))
    elif mask.CAUSAL:
        limit = gl.minimum(rows + (mask.num_k - mask.num_q + 1), mask.num_k) - key
        hidden = gl.where(block < limit - offset, blocks, -float("inf"))
    else:
        limit = mask.num_k - key
        hidden = gl.where(block < limit - offset, blocks, -float("inf"))
    return from_eights(hidden, scores)


@gluon.jit
def logits(scores, scale_log2, softcap):
    """Return logits that, times `log2_factor`, are the scaled scores in base 2.

    With a soft-cap they are tanh(x / softcap) / 2, from one exp2 and one reciprocal per score. tanh.approx would be one
    instruction, but its error of 2^-11 becomes softcap * 2^-11 in a score and in LSE.
    """
    if softcap is not None:
        y = scores * (2.0 * scale_log2 / softcap)
        reciprocal = gl.inline_asm_elementwise(  # a division would also scale its operands
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(y)], dtype=gl.float32, is_pure=True, pack=1
        )
        return half_tanh(y, reciprocal)
    else:
        return scores


@gluon.jit
def slope_at(slopes, document, batch_head, num_heads, factor):
    """A head's ALiBi slope in the unit of `logits`, which `factor` turns into exponents of 2; 0 without slopes."""
    if slopes is not None:
        if document is not None:
            batch_head += document.number * num_heads
        return gl.load(slopes + batch_head) * (LOG2_E / factor)
    else:
        return 0.0


@gluon.jit
def biased(scores, slope, row, column, COLUMNS: gl.constexpr):
    """Subtract ALiBi's slope * |row - column|. row, column: the first of the tile."""
    blocks, rows, block, offset = in_eights(scores, row - column, COLUMNS)
    distance = gl.abs((rows - offset).to(gl.float32) - block.to(gl.float32))
    return from_eights(blocks - slope * distance, scores)


@gluon.jit
def log2_factor(scale_log2, softcap):
    """Return the factor that turns `logits`, and their maximum, into exponents of 2."""
    if softcap is not None:
        return softcap * (2.0 * LOG2_E)
    else:
        return scale_log2


@gluon.jit
def thread_sums(probs, BLOCK_K: gl.constexpr):
    """Sum probs (64, BLOCK_K) over the columns that one thread holds: (64, 4), no shuffle."""
    return gl.sum(gl.sum(gl.reshape(probs, [64, BLOCK_K // 8, 4, 2]), 1), 2)


@gluon.jit
def row_max(scores, CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, s_layout: gl.constexpr):
    """The maximum of each row of scores (64, BLOCK_K).

    A thread has 32 values of a row. In one sequence, each maximum waits for the one before: 400 cycles in which
    the warp does nothing else. Three consumers gain 4 % when eight sequences overlap; two lose, up to 6 % (measured).
    """
    if CONSUMERS == 3:
        parts = gl.max(gl.reshape(scores, [64, 4, BLOCK_K // 32, 8]), 2)
        return gl.convert_layout(gl.max(gl.max(parts, 1), 1), gl.SliceLayout(1, s_layout))
    else:
        return gl.max(scores, 1)


@gluon.jit
def pack(probs, dtype: gl.constexpr, BLOCK_K: gl.constexpr):
    """Round pairs of neighbouring columns into one int32: (64, BLOCK_K) fp32 -> (64, BLOCK_K / 2).

    Carried around the loop as 16-bit values, P would cost two moves for every register in each iteration.
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
def unpack(packed, dtype: gl.constexpr, BLOCK_K: gl.constexpr, p_layout: gl.constexpr):
    """The (64, BLOCK_K) left operand of P V from `pack`'s integers: registers are renamed, at no instruction."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    probs = gl.reshape(gl.join(even, odd), [64, BLOCK_K]).to(dtype, bitcast=True)
    return gl.convert_layout(probs, p_layout)


@gluon.jit
def add_p_v(probs, v_tile, acc, BLOCK_K: gl.constexpr):
    """Issue acc + P V asynchronously. The caller waits for it."""
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(unpack(probs, v_tile.dtype, BLOCK_K, p_layout), v_tile, acc, is_async=True)


@gluon.jit
def halves(x):
    """The left and the right half of x's columns: registers are renamed, at no instruction."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def whole(left, right, like):
    """Join what `halves` split, in the shape and layout of `like`."""
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), like.shape), like.type.layout)


@gluon.jit
def softmax_step(
    call, of_tile, step, acc, probs, running_max, running_sum, build,
    CONSUMER: gl.constexpr, FIRST: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of key tile `step` while the tensor cores add the previous tile's P V to acc.

    At a query tile's FIRST key tile nothing is added, and maximum and sum begin. Step s has the keys from
    from_step_0 - s * BLOCK_K on, or of a block mask visit from_step_0 - s. The query tile ends with step end - 1.
    """
    q_tile, mask, scale_log2, softcap, slope, row, from_step_0, end = of_tile
    barriers = call.barriers
    tiles = call.tiles
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, build.BLOCK_K, 16])
    hidden_by_bits: gl.constexpr = MASKED and call.masked is not None
    stage, _ = slot(step, build.STAGES)
    take_baton(build, CONSUMER)
    scores = warpgroup_mma(
        q_tile, tiles.k.index(stage).permute((1, 0)), gl.zeros([64, build.BLOCK_K], gl.float32, s_layout),
        use_acc=False, is_async=True,
    )  # fmt: skip
    if not FIRST:
        last_stage, last_phase = slot(step - 1, build.STAGES)
        mbarrier.wait(barriers.v_full.index(last_stage), last_phase)
        acc = add_p_v(probs, tiles.v.index(last_stage), acc, build.BLOCK_K)
    pass_baton(build, CONSUMER)
    if hidden_by_bits:  # loaded while the product runs
        words = pattern_words(row, stage, call.masked, s_layout)
    scores = warpgroup_mma_wait(0 if FIRST else 1, deps=(scores,))
    mbarrier.arrive(barriers.k_empty.index(stage), count=1)
    scores = logits(scores, scale_log2, softcap)
    factor = log2_factor(scale_log2, softcap)
    if call.alibi_slopes is not None:
        key = from_step_0 - step * build.BLOCK_K
        scores = biased(scores, slope, row + (mask.num_k - mask.num_q), key, build.BLOCK_K)
    if hidden_by_bits:
        scores = by_bits(scores, words, build.BLOCK_K, "0fFF800000")
    elif MASKED:
        key = from_step_0 - step * build.BLOCK_K
        scores = hide(scores, row, key, mask, build.BLOCK_K)
    new_max = row_max(scores, build.CONSUMERS, build.BLOCK_K, s_layout)
    if not FIRST:
        new_max = gl.maximum(running_max, new_max)
    if MASKED:
        # a row that has seen no key keeps -inf, and -inf - -inf would be NaN: subtract 0 there
        base_log2 = gl.where(new_max == -float("inf"), 0.0, new_max) * factor
    else:
        base_log2 = new_max * factor
    exponents = scores * factor - base_log2[:, None]
    next_stage, next_phase = slot(step + 1, build.STAGES)
    if FIRST:
        p = gl.exp2(exponents)
        running_sum = thread_sums(p, build.BLOCK_K)
        mbarrier.wait(barriers.k_full.index(next_stage), next_phase, pred=step + 1 < end)
        return acc, pack(p, tiles.v.dtype, build.BLOCK_K), new_max, running_sum
    else:
        rescale = gl.exp2(running_max * factor - base_log2)
        # The wait for the next keys, which arrived long ago, ends a basic block, and ptxas moves no exponential across
        # it. So a quarter of the exponentials run beside P V, the others beside the rescaling of O and the packing of
        # P. All of them before the wait for P V would need more registers than three consumers have, and with none P V
        # would run alone. But where bits hide scores, none is faster by a tenth (NOTES.md).
        if not hidden_by_bits:
            left, right = halves(exponents)
            first, second = halves(left)
            first = gl.exp2(first)
        mbarrier.wait(barriers.k_full.index(next_stage), next_phase, pred=step + 1 < end)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(barriers.v_empty.index(last_stage), count=1)
        if hidden_by_bits:
            p = gl.exp2(exponents)
        else:
            p = whole(whole(first, gl.exp2(second), left), gl.exp2(right), exponents)
        sums = thread_sums(p, build.BLOCK_K)
        next_probs = pack(p, tiles.v.dtype, build.BLOCK_K)  # not earlier: the old P's registers are free only now
        running_sum = running_sum * gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
        acc *= gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
        return acc, next_probs, new_max, running_sum
