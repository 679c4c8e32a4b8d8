"""From raw scores to logits, and the dropout mask: the options' arithmetic, shared by forward and backward.

Each option is switched by None at compile time and costs nothing when it is off.
"""

import triton
import triton.language as tl

from ..philox import ROUNDS
from .record import record
from .tiles import LOG2_E, Mask

PHILOX_ROUNDS = tl.constexpr(ROUNDS)


@record
class Scoring:
    """What turns the raw scores of one query head into probabilities."""

    mask: Mask
    scale_log2: tl.tensor  # scale * log2(e), positive
    slope_log2: tl.tensor  # from `slope_of`
    switches: tuple  # Switches: what is None is compiled away
    batch_head: tl.tensor  # the query head, counted through the batch
    q_row0: tl.tensor  # the first packed query of the document; 0 without documents
    PRECISION: tl.constexpr  # of the products


@triton.jit
def half_tanh(y, reciprocal):
    """tanh(x) / 2 to a few float32 ulp, from y = 2 x log2(e) and reciprocal = 1 / (1 + 2^y).

    1/2 - reciprocal is as accurate except for small x: there its absolute error of 2^-25 is large beside the result,
    and a soft-cap multiplies it. An odd polynomial takes its place: the best of three terms for x^2 < 0.05, with a
    relative error of 2e-7.
    """
    square = y * y
    polynomial = y * (0.17328676 + square * (-0.0069365963 + square * 0.00032382685))
    return tl.where(square < 0.4, polynomial, 0.5 - reciprocal)


@triton.jit
def logits_of(scores, rows, cols, scoring):
    """Soft-cap, then ALiBi: returns (logits, factor, cap_gradient).

    logits * factor are the scaled scores in base 2. Without a soft-cap the factor is scale_log2, so that scaling stays
    inside one fused multiply-add with the row maximum. rows and cols are query and key indices that broadcast against
    scores; cap_gradient is d(capped)/d(uncapped), to be used only with softcap.
    """
    switches = scoring.switches
    scale_log2 = scoring.scale_log2
    diagonal = scoring.mask.num_k - scoring.mask.num_q
    if switches.softcap is not None:
        y = scores * (2.0 * scale_log2 / switches.softcap)
        root = tl.rsqrt(1.0 + tl.exp2(y))  # squared it costs four instructions less than a division
        half = half_tanh(y, root * root)
        logits = half * (2.0 * switches.softcap * LOG2_E)
        cap_gradient = 1.0 - 4.0 * half * half
        factor = 1.0
    else:
        logits = scores
        cap_gradient = 1.0
        factor = scale_log2
    if switches.alibi_slopes is not None:
        # float32 holds token positions exactly up to 2^24
        distance = tl.abs((rows + diagonal).to(tl.float32) - cols.to(tl.float32))
        logits = logits - (scoring.slope_log2 / factor) * distance
    return logits, factor, cap_gradient


@triton.jit
def slope_of(row, head, num_heads, switches):
    """The ALiBi slope of a head in base 2; `row` is the batch entry or the document. 0 without ALiBi."""
    if switches.alibi_slopes is not None:
        return tl.load(switches.alibi_slopes + row * num_heads + head) * LOG2_E
    else:
        return 0.0


@triton.jit
def kept(q_start, in_q, k_start, in_k, scoring):
    """Which probabilities of a tile dropout keeps: kernels/philox.py's function of seed, head, document, query and key,
    so that the backward and other implementations find the same.

    q_start + in_q, k_start + in_k: query and key index, one along each side of the tile; starts are multiples of 16.
    A draw's four words are queries i and i + 8 of keys j and j + 8. A thread holds these four of a tensor core's
    result, transposed or not, and bit 3 of in_q and in_k is a constant there, so the compiler draws once for all four.
    """
    # the four counters must have one type; 32-bit ones choose the 32-bit generator
    head = tl.cast(scoring.batch_head, tl.int32)
    document = tl.cast(scoring.q_row0, tl.int32)
    seed = tl.load(scoring.switches.dropout_seed)
    drawn = tl.philox(seed, k_start + (in_k - (in_k & 8)), q_start + (in_q - (in_q & 8)), head, document, PHILOX_ROUNDS)
    first_q, first_k = (in_q & 8) == 0, (in_k & 8) == 0
    bits = tl.where(first_q, tl.where(first_k, drawn[0], drawn[1]), tl.where(first_k, drawn[2], drawn[3]))
    # bits >= 2^32 p, with p in 24 bits: no word is converted to a float
    return bits >= (tl.ceil(scoring.switches.dropout_p * 16777216).to(tl.uint32) << 8)
