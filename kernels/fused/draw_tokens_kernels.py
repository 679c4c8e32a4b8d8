"""The Triton kernels of draw_tokens.py: a program draws a row's token.

The bits of floats, inverted for negative ones, are integers in the order of the values. So the logit with a given count
or mass of larger ones is found bit by bit: each pass over the row counts, or adds up, what is at least a candidate.

With a small top_k few logits matter. The row is cut into some thousand groups, whose largest logits fit in registers,
and the k-th largest of these is a threshold: at least k logits reach it, and hardly any others. Those are then compared
with each other: a token's place and the mass before it are sums over the ones that precede it. Where they are more than
the slots, as with many equal logits, the k-th largest is found by passes over the row.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, kernel_inputs, plan_of, run
from .draw_tokens import FEW

# how many leading bits of an fp32 number hold a number of this dtype, rounded up to pairs: the others are zeros
BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}


@triton.jit
def _order(x, BITS: tl.constexpr):
    """Integers in the order of x; -0 and 0 are equal."""
    bits = (x.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (32 - BITS)


@triton.jit
def _gather_from_groups(
    logits, kept, kept_ids, count, V: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Store all logits that are at least as large as the count-th of the groups' largest ones. Group i has the ids i,
    i + GROUPS, ... Returns how many there are, or more than SLOTS where they do not fit."""
    LEAST: tl.constexpr = -(2 ** (BITS - 1))
    groups = tl.arange(0, GROUPS)
    largest = tl.full([GROUPS], LEAST, tl.int32)
    for first in tl.range(0, V, GROUPS, loop_unroll_factor=8):
        inside = first + groups < V
        order = _order(tl.load(logits + first + groups, mask=inside, other=0.0), BITS)
        largest = tl.maximum(largest, tl.where(inside, order, LEAST))
    threshold = tl.full([], LEAST, tl.int32)
    for bit in range(BITS):
        candidate = threshold + (tl.full([], 1, tl.int32) << (BITS - 1 - bit))  # for the sign: 0
        threshold = tl.where(tl.sum((largest >= candidate).to(tl.int32), 0) >= count, candidate, threshold)

    chosen = (largest >= threshold).to(tl.int32)
    num_chosen = tl.sum(chosen, 0)
    place = tl.cumsum(chosen, 0) - 1
    tl.store(kept_ids + place, groups, mask=(chosen > 0) & (place < SLOTS))
    tl.debug_barrier()
    slots = tl.arange(0, SLOTS)
    group = tl.load(kept_ids + slots, mask=slots < num_chosen, other=V)
    tl.debug_barrier()  # before ids are written there
    ids = tl.reshape(group[:, None] + GROUPS * tl.arange(0, MEMBERS)[None, :], [SLOTS * MEMBERS])
    x = tl.load(logits + ids, mask=ids < V, other=0.0)
    keep = ((ids < V) & (_order(x, BITS) >= threshold)).to(tl.int32)
    place = tl.cumsum(keep, 0) - 1
    fits = (keep > 0) & (place < SLOTS)
    tl.store(kept + place, x.to(tl.float32), mask=fits)
    tl.store(kept_ids + place, ids, mask=fits)
    return tl.maximum(num_chosen, tl.sum(keep, 0))


@triton.jit
def _kth_of_row(logits, count, V: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """The order of the count-th largest logit, and how many are larger."""
    threshold = tl.full([], -(2 ** (BITS - 1)), tl.int32)
    larger = tl.full([], 0, tl.int32)
    for bit in range(BITS):
        candidate = threshold + (tl.full([], 1, tl.int32) << (BITS - 1 - bit))  # for the sign: 0
        found = tl.zeros([GROUPS], tl.int32)
        for first in range(0, V, GROUPS):
            ids = first + tl.arange(0, GROUPS)
            order = _order(tl.load(logits + ids, mask=ids < V, other=0.0), BITS)
            found += ((order >= candidate) & (ids < V)).to(tl.int32)
        at_least = tl.sum(found, 0)
        threshold = tl.where(at_least >= count, candidate, threshold)
        # the last candidate that too few reach is the next order above the threshold: its count is of larger logits
        larger = tl.where(at_least >= count, larger, at_least)
    return threshold, larger


@triton.jit
def _gather_from_row(
    logits, kept, kept_ids, count, V: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Store the count largest logits; of those equal to the last one, the ones with the smallest ids."""
    threshold, num_larger = _kth_of_row(logits, count, V, BITS, GROUPS)
    larger, equal = tl.full([], 0, tl.int32), num_larger
    for first in range(0, V, GROUPS):
        ids = first + tl.arange(0, GROUPS)
        x = tl.load(logits + ids, mask=ids < V, other=0.0)
        order = _order(x, BITS)
        is_larger = ((order > threshold) & (ids < V)).to(tl.int32)
        is_equal = ((order == threshold) & (ids < V)).to(tl.int32)
        place = tl.where(is_larger > 0, larger + tl.cumsum(is_larger, 0), equal + tl.cumsum(is_equal, 0)) - 1
        keep = (is_larger + is_equal > 0) & (place < count)
        tl.store(kept + place, x.to(tl.float32), mask=keep)
        tl.store(kept_ids + place, ids, mask=keep)
        larger += tl.sum(is_larger, 0)
        equal += tl.sum(is_equal, 0)


@triton.jit
def draw_few_kernel(
    logits_ptr, uniform_ptr, out_ptr, kept_ptr, ids_ptr, mass_ptr, row_stride, count, temperature: tl.float64,
    top_p: tl.float64,
    V: tl.constexpr, BITS: tl.constexpr, TOP_P: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
    SLOTS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_stride
    kept_ptr += row * SLOTS  # scratch memory of this program
    ids_ptr += row * SLOTS
    mass_ptr += row * SLOTS

    found = _gather_from_groups(logits, kept_ptr, ids_ptr, count, V, BITS, GROUPS, MEMBERS, SLOTS)
    if found > SLOTS:
        tl.debug_barrier()
        _gather_from_row(logits, kept_ptr, ids_ptr, count, V, BITS, GROUPS)
        found = count
    tl.debug_barrier()

    slots = tl.arange(0, SLOTS)
    x = tl.load(kept_ptr + slots, mask=slots < found, other=-float("inf"))
    ids = tl.load(ids_ptr + slots, mask=slots < found, other=V)  # after all others
    largest = tl.max(x, 0).to(tl.float64)
    mass = tl.where(slots < found, tl.exp((x.to(tl.float64) - largest) / temperature), 0.0)
    tl.store(mass_ptr + slots, mass)
    tl.debug_barrier()
    place = tl.zeros([SLOTS, OTHERS], tl.int32)
    before = tl.zeros([SLOTS, OTHERS], tl.float64)
    for first in range(0, SLOTS, OTHERS):
        others = first + tl.arange(0, OTHERS)
        other_x = tl.load(kept_ptr + others, mask=others < found, other=-float("inf"))[None, :]
        other_id = tl.load(ids_ptr + others, mask=others < found, other=V)[None, :]
        other_mass = tl.load(mass_ptr + others)[None, :]
        precedes = (other_x > x[:, None]) | ((other_x == x[:, None]) & (other_id < ids[:, None]))
        place += precedes.to(tl.int32)
        before += tl.where(precedes, other_mass, 0.0)
    place, before = tl.sum(place, 1), tl.sum(before, 1)

    drawable = (place < count) & (mass > 0)
    total = tl.sum(tl.where(drawable, mass, 0.0), 0)
    if TOP_P:
        drawable = drawable & (before < top_p * total)
        total = tl.sum(tl.where(drawable, mass, 0.0), 0)
    # the last in order whose preceding mass is at most the drawn one
    drawable = drawable & (before <= tl.load(uniform_ptr + row) * total)
    least = tl.min(tl.where(drawable, x, float("inf")), 0)
    token = tl.max(tl.where(drawable & (x == least), ids, 0), 0)  # 0 where logits are NaN
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def _masses_from(logits, masses, one, two, three, V: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr):
    """The mass of the logits whose order is at least `one`, at least `two`, at least `three`."""
    from_one = tl.zeros([LANES], tl.float64)
    from_two = tl.zeros([LANES], tl.float64)
    from_three = tl.zeros([LANES], tl.float64)
    for first in range(0, V, LANES):
        ids = first + tl.arange(0, LANES)
        order = _order(tl.load(logits + ids, mask=ids < V, other=0.0), BITS)
        mass = tl.load(masses + ids, mask=ids < V, other=0.0)
        from_one += tl.where(order >= one, mass, 0.0)
        from_two += tl.where(order >= two, mass, 0.0)
        from_three += tl.where(order >= three, mass, 0.0)
    return tl.sum(from_one, 0), tl.sum(from_two, 0), tl.sum(from_three, 0)


@triton.jit
def _mass_of(order, largest, temperature, BITS: tl.constexpr):
    """The mass of a logit of this order."""
    bits = order << (32 - BITS)
    bits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) & (-1 << (32 - BITS))
    return tl.exp((bits.to(tl.float32, bitcast=True).to(tl.float64) - largest) / temperature)


@triton.jit
def _last_before(
    logits, masses, target, V: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, STRICT: tl.constexpr
):
    """The order of the last logit whose preceding mass is at most (STRICT: less than) the target, and the mass of all
    larger logits."""
    order = tl.full([], -(2 ** (BITS - 1)), tl.int32)
    larger = tl.full([], 0.0, tl.float64)
    for pair in range(BITS // 2):  # two bits a pass, because a pass mostly waits for memory
        step = tl.full([], 1, tl.int32) << (BITS - 2 - 2 * pair)
        first, second, third = _masses_from(
            logits, masses, order + step, order + 2 * step, order + 3 * step, V, BITS, LANES
        )  # fmt: skip
        if STRICT:
            reached = (first >= target).to(tl.int32) + (second >= target).to(tl.int32) + (third >= target).to(tl.int32)
        else:
            reached = (first > target).to(tl.int32) + (second > target).to(tl.int32) + (third > target).to(tl.int32)
        # in the end the mass from the next order above on, that of all larger logits, as in _kth_of_row
        above = tl.where(reached == 0, first, tl.where(reached == 1, second, third))
        larger = tl.where(reached == 3, larger, above)
        order += reached * step
    return order, larger


@triton.jit
def draw_any_kernel(
    logits_ptr, uniform_ptr, out_ptr, masses_ptr, row_stride, count, temperature: tl.float64, top_p: tl.float64,
    V: tl.constexpr, BITS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_stride
    masses = masses_ptr + row * V  # scratch memory of this program
    lanes = tl.arange(0, LANES)
    largest = tl.full([LANES], -float("inf"), tl.float32)
    for first in range(0, V, LANES):
        x = tl.load(logits + first + lanes, mask=first + lanes < V, other=-float("inf"))
        largest = tl.maximum(largest, x.to(tl.float32))
    largest = tl.max(largest, 0).to(tl.float64)
    total = tl.zeros([LANES], tl.float64)
    for first in range(0, V, LANES):
        x = tl.load(logits + first + lanes, mask=first + lanes < V, other=-float("inf"))
        mass = tl.exp((x.to(tl.float64) - largest) / temperature)
        tl.store(masses + first + lanes, mass, mask=first + lanes < V)
        total += mass
    total = tl.sum(total, 0)
    tl.debug_barrier()

    if TOP_K:
        kth, num_larger = _kth_of_row(logits, count, V, BITS, LANES)
        total, _, _ = _masses_from(logits, masses, kth + 1, kth + 1, kth + 1, V, BITS, LANES)
        total += (count - num_larger) * _mass_of(kth, largest, temperature, BITS)
    if TOP_P:
        order, larger = _last_before(logits, masses, top_p * total, V, BITS, LANES, True)
        mass = _mass_of(order, largest, temperature, BITS)
        # all whose preceding mass is below the share; with top_p = 1 the quotient may round up, past the last token
        total = tl.minimum(total, larger + tl.ceil((top_p * total - larger) / mass) * mass)
    # a number next to 1 may round up to the total itself, which lies past the last token
    target = tl.minimum(tl.load(uniform_ptr + row) * total, total * (1.0 - 2.0**-52))
    order, larger = _last_before(logits, masses, target, V, BITS, LANES, False)
    most = tl.floor((target - larger) / _mass_of(order, largest, temperature, BITS)).to(tl.int32)
    seen = tl.full([], 0, tl.int32)
    token = tl.full([], 0, tl.int32)
    for first in range(0, V, LANES):
        ids = first + lanes
        equal = (_order(tl.load(logits + ids, mask=ids < V, other=0.0), BITS) == order) & (ids < V)
        place = seen + tl.cumsum(equal.to(tl.int32), 0) - 1
        token = tl.maximum(token, tl.max(tl.where(equal & (place <= most), ids, 0), 0))
        seen += tl.sum(equal.to(tl.int32), 0)
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def likeliest_kernel(logits_ptr, out_ptr, row_stride, V: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr):
    logits = logits_ptr + tl.program_id(0).to(tl.int64) * row_stride
    lanes = tl.arange(0, LANES)
    largest = tl.full([LANES], -(2 ** (BITS - 1)), tl.int32)
    ids = lanes
    for first in tl.range(0, V, LANES, loop_unroll_factor=8):
        inside = first + lanes < V
        order = _order(tl.load(logits + first + lanes, mask=inside, other=-float("inf")), BITS)
        larger = inside & (order > largest)  # of equals the first stays
        largest = tl.where(larger, order, largest)
        ids = tl.where(larger, first + lanes, ids)
    token = tl.min(tl.where(largest == tl.max(largest, 0), ids, V), 0)
    tl.store(out_ptr + tl.program_id(0), token.to(tl.int64))


def launch_draw_tokens(
    logits: Tensor, uniform: Tensor | None, temperature: float, top_k: int | None, top_p: float | None, out: Tensor
) -> Tensor:
    """`draw_tokens` with checked arguments."""
    num_rows, vocab_size = logits.shape
    bits = BITS[logits.dtype]
    if num_rows == 0:
        return out
    (logits,) = kernel_inputs(logits)
    tensors = {"logits": logits, "uniform": uniform, "out": out}
    count = vocab_size if top_k is None else top_k
    kernel, num_warps = draw_few_kernel if count <= FEW else draw_any_kernel, 32
    constants = {"V": vocab_size, "BITS": bits}
    numbers = logits.stride(0), count, temperature, 1.0 if top_p is None else top_p
    if uniform is None:
        del tensors["uniform"]
        kernel, num_warps, numbers = likeliest_kernel, 16, numbers[:1]
        constants["LANES"] = 4096
    elif count <= FEW:
        # more slots than k: for logits equal to the last one, and for those that are second in their group
        slots = triton.next_power_of_2(count + count // 8 + 16)
        for name, dtype in (("kept", torch.float32), ("ids", torch.int32), ("mass", torch.float64)):
            tensors[name] = logits.new_empty(num_rows, slots, dtype=dtype)
        # groups and warps are the fastest of a sweep on an H200 with 50,304 logits; many warps wait for each other
        groups, num_warps = min(8192, max(2048, 16 * slots)), 8 if slots <= 256 else 32
        constants |= {
            "TOP_P": top_p is not None, "GROUPS": groups,
            "MEMBERS": triton.next_power_of_2(triton.cdiv(vocab_size, groups)), "SLOTS": slots,
            "OTHERS": min(slots, 8192 // slots),
        }  # fmt: skip
    else:
        tensors["masses"] = logits.new_empty(num_rows, vocab_size, dtype=torch.float64)
        constants |= {"TOP_K": count < vocab_size, "TOP_P": top_p is not None, "LANES": 4096}
    key = "draw_tokens", logits.device, num_rows, logits.dtype, kernel.__name__, *numbers, *constants.values()
    run(plan_of(key), tensors, partial(_launches, kernel, num_rows, num_warps, numbers, constants))
    return out


def _launches(
    kernel: object, num_rows: int, num_warps: int, numbers: tuple, constants: dict, **tensors: Tensor
) -> list[Launch]:
    how = {"num_warps": num_warps, "num_stages": 1}
    return [Launch(kernel, num_rows, (*tensors.values(), *numbers), constants, how)]
