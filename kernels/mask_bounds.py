"""Which blocks of a mask are full or hidden, decided from the least and the greatest values in each block.

The function is called once, on tensors that stand for every batch entry, head, query and key. What depends on queries
or on keys alone, as `document[q]` does, is evaluated for each of them. Where both meet, as in
`document[q] == document[k]`, a block keeps the bounds of its values: interval arithmetic, with False below True.
Where an operation has no rule here, all values are possible. So a block that is decided is exact, and the others have
to be evaluated pair by pair.

For example documents of 200 tokens, in blocks of 128: the document is in [0, 1] for the queries of block 1, 1 for those
of block 2, and 0 for the keys of block 0. So block (2, 0) is hidden, and block (1, 0) has to be evaluated.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Undecided(Exception):
    """The function does something that cannot be followed here for all pairs at once."""


class Range(NamedTuple):
    """The least and the greatest value in each block; shapes broadcast to (B, H, blocks of queries, blocks of keys)."""

    low: Tensor
    high: Tensor


class Bounds(Tensor):
    """What the function sees: a () tensor, whose own value means nothing.

    Attributes:
        exact: (B or 1, H or 1, Nq or 1, Nk or 1) the values, unless they depend on both queries and keys: then None.
        axis: 2 where `exact` depends on queries, 3 where on keys; None where on neither, and without `exact`.
        range: the least and the greatest value in each block.
        limit: the largest magnitude that an integer here can have.
    """

    @staticmethod
    def of(
        dtype: torch.dtype, limit: int, bounds: Range, exact: Tensor | None = None, axis: int | None = None
    ) -> "Bounds":
        made = _nothing(dtype, bounds.low.device).as_subclass(Bounds)
        made.exact, made.axis, made.range, made.limit = exact, axis, bounds, limit
        return made


def decided_blocks(mask_mod: Callable, sizes: Sequence[int], block: int, device: torch.device) -> Range:
    """Whether all pairs of a block are seen, and whether any may be: (B, H, blocks of queries, blocks of keys) bool.

    A function that can be followed gives the same result for tensors that broadcast as for their elements one by one.

    sizes: B, H, Nq, Nk. Copies of the last query and of the last key fill the last blocks. Raises Undecided.
    """
    shape, indices = _indices(tuple(sizes), block, device)
    try:
        with _Following(block):
            seen = mask_mod(*indices)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, TypeError, AttributeError) as error:  # evaluation by pairs reports the error
        raise Undecided from error
    if not isinstance(seen, Bounds) or seen.dtype != torch.bool:
        raise Undecided
    device = indices[0].range.low.device  # with its index
    if any(x.dim() and x.device != device for x in seen.range):  # a () bound comes from `_open`, on the CPU
        raise Undecided
    return Range(*(x.to(device).expand(shape) for x in seen.range))


@lru_cache(8)  # for masks of documents, which are made again for each batch
@torch.inference_mode(False)  # the next caller may be outside inference mode
def _indices(sizes: tuple[int, ...], block: int, device: torch.device) -> tuple[list[int], list[Bounds]]:
    """B, H and the numbers of blocks of queries and keys; and the indices that the function is called on."""
    shape = [*sizes[:2], *(-(-size // block) for size in sizes[2:])]
    numbers = torch.arange(max(*shape[:2], *(blocks * block for blocks in shape[2:])), device=device)
    indices = []
    for axis, (size, blocks) in enumerate(zip(sizes, shape, strict=True)):
        each = block if axis > 1 else 1
        values = numbers[: blocks * each]
        if size < len(values):
            values = values.clamp(max=size - 1)
        exact, low, high = (
            x.view([-1 if axis == i else 1 for i in range(4)])
            for x in (values, values[::each], values[each - 1 :: each])
        )
        indices.append(Bounds.of(values.dtype, size, Range(low, high), exact, axis if axis > 1 else None))
    return shape, indices


class _Following(TorchFunctionMode):
    """Operations on `Bounds` give `Bounds`."""

    def __init__(self, block: int):
        super().__init__()
        self.block = block

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.__getitem__:
            function, args = _looked_up, (args[0], *(args[1] if isinstance(args[1], tuple) else (args[1],)))
        own = [x for x in args if isinstance(x, Bounds)]
        if not own or function in _PROPERTIES:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Bounds):  # from keywords or lists, which are not inspected
                raise Undecided
            return result
        name = function.__name__.lstrip("_").removesuffix("__")  # in-place `add_` keeps its "_" and is unknown
        name = _SYNONYMS.get(name, name)
        if kwargs or name not in _KNOWN:
            raise Undecided
        with torch._C.DisableTorchFunctionSubclass():
            return self._followed(name, function, args, own)

    def _followed(self, name: str, function: Callable, args: tuple, own: list[Bounds]) -> Bounds:
        if name == "looked_up":
            if len(args) != 1 + args[0].dim() or any(getattr(x, "dtype", None) not in _INDEX for x in args[1:]):
                raise Undecided
            dtype = args[0].dtype
        # in type promotion a () tensor counts for less beside larger tensors than it does among () tensors
        elif any(
            x.dim() or x.dtype != own[0].dtype for x in args if isinstance(x, Tensor) and not isinstance(x, Bounds)
        ):
            raise Undecided
        elif name in _COMPARED and name != "where":
            dtype = torch.bool
        else:
            kinds = [x.dtype if isinstance(x, Tensor) else type(x) for x in args]
            if not all(isinstance(x, torch.dtype) or x in (bool, int, float) for x in kinds):
                raise Undecided
            dtype = _dtype_of(function, *kinds)
        limit = _limit(name, dtype, args)
        axes = {x.axis for x in own} - {None}
        if len(axes) < 2 and all(x.exact is not None for x in own):
            values = function(*(x.exact if isinstance(x, Bounds) else x for x in args)).to(dtype)
            axis = axes.pop() if axes else None
            return Bounds.of(dtype, limit, _in_blocks(values, axis, self.block), values, axis)
        if (bounds := _bounds(name, dtype, limit, args)) is None:
            bounds, limit = _open(dtype), _largest(dtype)
        return Bounds.of(dtype, limit, bounds)


@cache
def _dtype_of(function: Callable, *kinds: torch.dtype | type) -> torch.dtype:
    """The dtype of the function's result for numbers and () tensors, among which no larger tensor takes precedence."""
    return function(*(torch.ones((), dtype=kind) if isinstance(kind, torch.dtype) else kind(1) for kind in kinds)).dtype


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((), dtype=dtype, device=device)


def _in_blocks(x: Tensor, axis: int | None, block: int) -> Range:
    if axis is None:
        return Range(x, x)
    return Range(*torch.aminmax(x.unflatten(axis, (-1, block)), dim=axis + 1))


def _looked_up(table: Tensor, *index: Tensor) -> Tensor:
    return table[index]


def _eq(a: Range, b: Range) -> Range:
    return Range((a.low == b.high) & (a.high == b.low), (a.low <= b.high) & (b.low <= a.high))


def _not(a: Range) -> Range:
    return Range(~a.high, ~a.low)


def _where(when: Range, a: Range, b: Range) -> Range:
    least, most = torch.minimum(a.low, b.low), torch.maximum(a.high, b.high)
    return Range(
        torch.where(when.low, a.low, torch.where(when.high, least, b.low)),
        torch.where(when.low, a.high, torch.where(when.high, most, b.high)),
    )


def _remainder(a: Range, n: int) -> Range:
    one = a.low // n == a.high // n
    return Range(torch.where(one, a.low % n, 0), torch.where(one, a.high % n, n - 1))


_INDEX = (torch.int64, torch.int32)
_PROPERTIES = (Tensor.device.__get__, Tensor.dtype.__get__)
# Rules by the operation's name: for any dtype, for booleans, for integers, for an integer and a number above 0.
_COMPARED = {
    "lt": lambda a, b: Range(a.high < b.low, a.low < b.high),
    "le": lambda a, b: Range(a.high <= b.low, a.low <= b.high),
    "gt": lambda a, b: Range(a.low > b.high, a.high > b.low),
    "ge": lambda a, b: Range(a.low >= b.high, a.high >= b.low),
    "eq": _eq,
    "ne": lambda a, b: _not(_eq(a, b)),
    "where": _where,
}
_LOGIC = {
    "and": lambda a, b: Range(a.low & b.low, a.high & b.high),
    "or": lambda a, b: Range(a.low | b.low, a.high | b.high),
    "xor": lambda a, b: _not(_eq(a, b)),
    "invert": _not,
}
_ARITHMETIC = {
    "add": lambda a, b: Range(a.low + b.low, a.high + b.high),
    "sub": lambda a, b: Range(a.low - b.high, a.high - b.low),
    "rsub": lambda a, b: Range(b.low - a.high, b.high - a.low),
    "neg": lambda a: Range(-a.high, -a.low),
    "abs": lambda a: Range(torch.maximum(a.low, -a.high), torch.maximum(-a.low, a.high)),
}
_BY_A_NUMBER = {
    "floordiv": lambda a, n: Range(a.low // n, a.high // n),
    "remainder": _remainder,
}
# Operations without a rule above are exact where they depend on queries or on keys alone.
_KNOWN = {
    *_COMPARED,
    *_LOGIC,
    *_ARITHMETIC,
    *_BY_A_NUMBER,
    "mul",
    "lshift",
    "rshift",
    "minimum",
    "maximum",
    "looked_up",
}
_SYNONYMS = {"floor_divide": "floordiv", "not": "invert"} | {
    f"{kind}_{name}": to for kind in ("bitwise", "logical")
    for name, to in (("and", "and"), ("or", "or"), ("xor", "xor"), ("not", "invert"))
}  # fmt: skip


def _bounds(name: str, dtype: torch.dtype, limit: int, args: tuple) -> Range | None:
    """The bounds of a result; None where there is no rule."""
    if name == "looked_up":
        return _of_table(*args)
    dtypes = {x.dtype for x in args if isinstance(x, Tensor)}
    if any(x.is_floating_point for x in dtypes) or any(isinstance(x, float) for x in args):
        return None
    if name in _BY_A_NUMBER:
        if torch.bool in dtypes or not isinstance(args[1], int) or args[1] <= 0:
            return None
        ranges = [_range(args[0])]
        result = _BY_A_NUMBER[name](*ranges, args[1])
    else:
        logic = dtypes == {dtype} == {torch.bool}  # a boolean beside a number, `seen ^ 2`, is an integer
        rules = _COMPARED | (_LOGIC if logic else {} if torch.bool in dtypes else _ARITHMETIC)
        if name not in rules:
            return None
        # in type promotion a () tensor, as of `_open`, counts for less than a larger one of fewer bits
        widest = reduce(torch.promote_types, dtypes - {torch.bool}, torch.bool)
        ranges = [_range(x) for x in args]
        if widest != torch.bool:
            ranges = [x if x.low.dtype in (torch.bool, widest) else Range(*(y.to(widest) for y in x)) for x in ranges]
        result = rules[name](*ranges)
    if name in _COMPARED or name in _LOGIC or limit < _largest(dtype):
        return result
    wild, most = torch.tensor(False), _largest(dtype) // 4  # beyond it integers may wrap around
    for low, high in ranges:
        wild = wild | (low < -most) | (high > most)
    return Range(*(torch.where(wild, x, y) for x, y in zip(_open(dtype), result, strict=True)))


def _range(x: Tensor | int) -> Range:
    if isinstance(x, Bounds):
        return x.range
    x = torch.as_tensor(x)  # a number stays on the CPU: a launch passes it as a number
    return Range(x, x)


def _open(dtype: torch.dtype) -> Range:
    """Bounds that allow any value; those of floats are never read."""
    if dtype == torch.bool or dtype.is_floating_point:
        return Range(torch.tensor(False, dtype=dtype), torch.tensor(True, dtype=dtype))
    return Range(*(torch.tensor(x, dtype=dtype) for x in (torch.iinfo(dtype).min, torch.iinfo(dtype).max)))


def _of_table(table: Tensor, *index: Tensor) -> Range | None:
    """The value looked up where a block has one index; the table's bounds elsewhere."""
    if isinstance(table, Bounds) or table.is_floating_point():
        return None
    one, places = torch.tensor(True), []
    for (low, high), size in zip(map(_range, index), table.shape, strict=True):
        one = one & (low == high) & (low >= 0) & (low < size)
        places.append(low.clamp(0, size - 1).to(table.device))
    value = table[tuple(places)]
    return Range(torch.where(one, value, table.amin()), torch.where(one, value, table.amax()))


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool or dtype.is_floating_point else torch.iinfo(dtype).max


def _limit(name: str, dtype: torch.dtype, args: tuple) -> int:
    """The largest magnitude that a result can have, from those of its operands."""
    largest = _largest(dtype)
    if name == "looked_up" or any(isinstance(x, float) for x in args):
        return largest
    each = [
        x.limit if isinstance(x, Bounds) else _largest(x.dtype) if isinstance(x, Tensor) else abs(int(x)) for x in args
    ]
    if name == "mul":
        return min(largest, each[0] * each[1])
    if name in _ARITHMETIC:
        return min(largest, sum(each))
    return min(largest, max(each)) if name in _BY_A_NUMBER else largest
