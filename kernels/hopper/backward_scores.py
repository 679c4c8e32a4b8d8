"""The Hopper backward's probabilities: a consumer's 64 keys and a query tile, the call's options and its mask."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_roles import S_LAYOUT
from .backward_schedule import BLOCK_Q, KEYS
from .masked import announced_pattern, by_bits, own_bits
from .softmax import biased, log2_factor, logits, slope_at


@gluon.jit
def slope_of(member, batch, kv_head, sizes, scale_log2, softcap):
    """The ALiBi slope of a KV head's query head, in the unit of `logits`."""
    batch_head = batch * sizes.num_heads + kv_head * (sizes.num_heads // sizes.num_kv_heads) + member
    return slope_at(sizes.alibi_slopes, sizes.item, batch_head, sizes.num_heads, log2_factor(scale_log2, softcap))


@gluon.jit
def probabilities(
    scores, lse, key, position, bits, sizes, scoring, MASKED: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """P^T (KEYS, BLOCK_Q) of the keys from `key` on and the query tile at a position; and what dP^T - delta is
    multiplied by for dS^T: P^T too, under a soft-cap times the cap's derivative.

    Where the mask has edges on both sides of what a program visits, a step finds out by itself whether it is at one.
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
            if pattern > 0:
                p = by_bits(p, words, 2, "0f00000000")
        elif sizes.window is not None:
            left, right = sizes.window
            end = gl.minimum(diagonal + right + 1, sizes.num_k)  # of the keys that the first query sees
            if (key + KEYS > end) | (key < diagonal + BLOCK_Q - 1 - left):
                p = _in_window(p, key, diagonal, sizes)
        elif CAUSAL:
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
    """P^T with zeros outside the window: key and diagonal are where the first key and the first query stand.

    Seen as (KEYS, BLOCK_Q / 8, 8), as in `hide`: one comparison with a constant for each bound and no index in a
    register.
    """
    left, right = sizes.window
    blocks = gl.reshape(p, [KEYS, BLOCK_Q // 8, 8])
    layout: gl.constexpr = blocks.type.layout
    block = 8 * gl.arange(0, BLOCK_Q // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    offset = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    keys = key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    first = gl.where(keys < sizes.num_k, keys - diagonal - right, BLOCK_Q) - offset  # query that sees the key
    last = keys - diagonal + left - offset
    return gl.convert_layout(
        gl.reshape(gl.where((block >= first) & (block <= last), blocks, 0.0), [KEYS, BLOCK_Q]), p.type.layout
    )


@gluon.jit
def pattern_bits(stage, position, key, sizes):
    """The pattern of a block mask that the query tile in a stage has, 0 where all is shown, and `own_bits` of the 64
    keys from `key` on under the tile's 64 queries."""
    if sizes.masked is not None:
        pattern = announced_pattern(stage, sizes.masked)
        of_keys = sizes.masked.bits + (pattern.to(gl.int64) * 2 + 1) * 512
        return pattern, own_bits(of_keys, key, position % 2 * 2, S_LAYOUT, 2)
    else:
        return 0, 0
