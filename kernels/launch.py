"""From a call to its kernels: launches as data, how they are run and replayed, and what every launcher needs.

Calls of one key (kernels/call.py) differ only in addresses and a few numbers. So the first is checked, goes through
Triton, and leaves its options and `Replay`s (kernels/replay.py) in a `Plan`; the next ones skip the checks and replay
the launches with addresses and numbers of their own.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .call import Options
from .device import interpreting, l2_bytes
from .replay import KEPT, Replay, tensors_in

_LARGEST = 0x7FFF0000  # a tensor dimension that no coordinate here reaches
# Where every document ends in the coordinates of a packed TMA descriptor: a power of two beyond any number of tokens.
PACKED_ORIGIN = 2**30
_FAR = 2**24  # token strides from here on, in elements, overflow 32-bit offsets inside a tile


class Launch(NamedTuple):
    """One launch of a kernel, as data.

    arguments: the kernel's arguments in order, except its constexprs, which `constants` names in their order. Tensors
        appear directly, inside descriptors, or inside tuples.
    how: Triton's options: num_warps, num_stages, maxnreg, launch_cooperative_grid, launch_pdl.
    smaller: called with Triton's error where the GPU's shared memory is too small; returns what to launch instead, or
        None where nothing else is left.
    """

    kernel: object
    grid: int
    arguments: tuple
    constants: dict
    how: dict
    smaller: Callable[[Exception], "Launch | None"] = lambda error: None


@dataclass(slots=True)
class Plan:
    """What the calls of one key share."""

    options: Options | None = None  # of a checked call, in canonical form
    on_hopper: bool | None = None  # the engine, once chosen
    replays: list[Replay] | None = None  # its kernels, once launched


PLANS: dict[tuple, Plan] = {}


def plan_of(key: tuple) -> Plan:
    """The plan of a key, empty where it is new."""
    plan = PLANS.get(key)
    if plan is None:
        if len(PLANS) >= KEPT:
            PLANS.clear()
        plan = PLANS[key] = Plan()
    return plan


def run(
    plan: Plan, tensors: dict[str, Tensor | None], launches: Callable[..., list[Launch]], **numbers: int | tuple
) -> None:
    """Run a call's kernels, on the current stream of its tensors' GPU.

    The first time, `launches(**tensors)` says what to launch, and Triton compiles it. From then on the plan's kernels
    are launched on the tensors of the same names. `launches` may use no other tensors, not even views of these.

    numbers: kernel parameters whose values differ between calls of one key: integers that Triton does not specialize
        on, and `sizes_described` of descriptors.

    A replay needs addresses that are multiples of 16, because Triton compiled the kernels for such addresses.
    """
    device = next(iter(tensors.values())).get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return run(plan, tensors, launches, **numbers)
    all_bits, values = 0, dict(numbers)  # all_bits: the addresses, or-ed
    for name, x in tensors.items():
        if x is not None:
            values[name] = address = x.data_ptr()
            all_bits |= address
    if plan.replays is not None and not all_bits % 16:
        stream = torch._C._cuda_getCurrentRawStream(device)
        for replay in plan.replays:
            replay(stream, values)
        return None
    # new objects, so that a tensor that was passed twice still has two names
    distinct = {name: None if x is None else x.detach() for name, x in tensors.items()}
    names = {id(x): name for name, x in distinct.items()}
    replays = []
    for launch in launches(**distinct):
        launched, compiled = start(launch)
        named = [names.get(id(x)) for x in tensors_in(launched.arguments)]
        assert None not in named, f"{launch.kernel} takes a tensor that the call does not name"
        if compiled is not None:  # None in the interpreter
            replays.append(Replay(compiled, launched, named, numbers.keys()))
    if replays and not all_bits % 16:
        plan.replays = replays
    return None


def start(launch: Launch) -> tuple[Launch, object]:
    """Launch through Triton, which compiles where it must. Returns what was launched and Triton's compiled kernel."""
    from triton.runtime.errors import OutOfResources

    if _RECORD:
        _RECORD[-1].append(launch)
        return launch, None
    while True:
        try:
            with _ONE_THREAD:
                return launch, launch.kernel[(launch.grid,)](*launch.arguments, **launch.constants, **launch.how)
        except OutOfResources as error:
            launch = launch.smaller(error)
            if launch is None:
                raise


_RECORD: list[list[Launch]] = []
_ONE_THREAD = threading.Lock()  # Triton's interpreter keeps its place in the grid in globals


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, launches are appended to the list and nothing runs: for calls on meta tensors, which have no memory."""
    _RECORD.append([])
    try:
        yield _RECORD[-1]
    finally:
        _RECORD.pop()


def kernel_inputs(*tensors: Tensor) -> list[Tensor]:
    """Give each tensor a contiguous last dimension and tokens that are not too far apart; in the interpreter also turn
    bfloat16 into float32.

    Triton's interpreter keeps bfloat16 as 16-bit integers and multiplies those. With float32 inside and one
    rounding by PyTorch at the end, bfloat16 calls are right there too.
    """
    if tensors[0].dtype == torch.bfloat16 and interpreting():
        tensors = [x.float() for x in tensors]
    return [x if x.stride(-1) == 1 and x.stride(-2) < _FAR else x.contiguous() for x in tensors]


def with_positive_scale(q: Tensor, options: Options) -> tuple[Tensor, Options]:
    """q and options that give the same scores with a scale > 0: kernels scale a row's maximum instead of its scores."""
    if options.scale <= 0.0:
        q, scale = (-q, -options.scale) if options.scale < 0.0 else (q * 0.0, 1.0)
        options = options._replace(scale=scale)
    return q, options


def dot_precision(q: Tensor) -> str:
    """float32 products are exact ("ieee"), as PyTorch's are by default; other dtypes ignore this."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def tokens_first(like: Tensor, head_dim: int) -> Tensor:
    """An uninitialised (B, H, N, head_dim) tensor with `like`'s other sizes, stored as (B, N, H, head_dim)."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)


class Switches(NamedTuple):
    """The kernels' view of the options. A field that is None is a compile-time None: its code disappears.

    Integers are no fields: Triton would compile again for 1 and for multiples of 16. (No kernel argument may be
    called `options`: Triton's generated binder uses that name.)
    """

    softcap: float | None = None
    alibi_slopes: Tensor | None = None  # (B or documents, Hq) fp32, contiguous
    sinks: Tensor | None = None  # (Hq,) fp32
    dropout_seed: Tensor | None = None  # one int64
    dropout_p: float | None = None
    cu_seqlens_q: Tensor | None = None  # (documents + 1,) int32
    cu_seqlens_k: Tensor | None = None
    mask_starts: Tensor | None = None  # of a BlockMask, all int32
    mask_visits: Tensor | None = None
    mask_bits: Tensor | None = None


_TENSORS = tuple(name for name in Switches._fields if name not in ("softcap", "dropout_p"))


def option_tensors(options: Options) -> dict[str, Tensor]:
    """The options' tensors by name, for `run`; with documents also memory for their `starts_q` and `starts_k`."""
    if options.without_tensors:
        return {}
    given = {name: x.contiguous() for name in _TENSORS if (x := getattr(options, name)) is not None}
    if options.packed:
        given |= {f"starts_{which}": torch.empty_like(given[f"cu_seqlens_{which}"]) for which in "qk"}
    return given


def switches_of(options: Options, given: dict[str, Tensor]) -> Switches:
    """Translate the options of a call, with the tensors of `option_tensors`. Kernels read the checked `starts`."""
    given = given | {f"cu_seqlens_{which}": given.get(f"starts_{which}") for which in "qk"}
    tensors = {name: given.get(name) for name in _TENSORS}
    return Switches(options.softcap or None, dropout_p=options.dropout_p or None, **tensors)


def window_bounds(options: Options, num_q: int, num_k: int) -> tuple[int, int]:
    """(left, right); a missing bound becomes a distance that no pair of tokens has."""
    unbounded = num_q + num_k
    return (
        unbounded if options.window_left < 0 else min(options.window_left, unbounded),
        unbounded if options.window_right < 0 else min(options.window_right, unbounded),
    )


def grid_tiles(num_tokens: int, block: int, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """(documents, tiles to launch over num_tokens rows): see `longest_first` in kernels/portable/tiles.py."""
    if cu_seqlens is None:
        return 0, -(-num_tokens // block)
    num_docs = cu_seqlens.shape[0] - 1
    return num_docs, num_tokens // block + num_docs


def heads_per_section(
    q: Tensor, k: Tensor, l2_share: float = 1 / 3, bytes_per_kv_head: int | None = None, *, uneven: bool = False
) -> int:
    """How many query heads to process together: the largest power of two of KV heads whose K and V (or
    `bytes_per_kv_head`) fill at most this share of the L2 cache, times the group size, and at most all. `uneven`: all
    heads where the cache holds their K and V, so that the longest tiles of all heads come first.

    flash-attention fills nearly the whole cache. But what a multiprocessor reads from its far half is kept in both
    halves: with a share of 5/6 an H200 read up to 11 times the bytes of a call's tensors (kernels/hopper/NOTES.md).
    """
    group, heads = q.shape[1] // k.shape[1], q.shape[0] * q.shape[1]
    if bytes_per_kv_head is None:
        # in a padded cache viewed as one row (kernels/documents.py) other heads lie between a head's tokens
        span = 1 + sum((size - 1) * stride for size, stride in zip(k.shape, k.stride(), strict=True))
        # keys that all heads share may come to less than a byte per head
        bytes_per_kv_head = max(1, 2 * min(k.numel(), span) * k.element_size() // (k.shape[0] * k.shape[1]))
    cache = l2_bytes(q.device.index)
    if uneven and bytes_per_kv_head * k.shape[0] * k.shape[1] <= cache:
        return heads
    fitting = int(cache * l2_share) // bytes_per_kv_head
    return min(group << max(fitting.bit_length() - 1, 0), heads)


def tma_ready(x: Tensor) -> bool:
    """Whether TMA can address x (B, H, N, D): 16-byte aligned start and strides, the last one 1, none 0."""
    unit = 16 // x.element_size()
    if x.data_ptr() % 16 or x.stride(-1) != 1:
        return False
    return all(
        size == 1 or (stride > 0 and stride % unit == 0)  # a dimension of size 1 may carry any stride
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )


def descriptor(x: Tensor, rows: int, columns: int):
    """A TMA descriptor of x (..., N, D) that loads tiles of (rows, columns). Elements outside x read as 0 and are not
    written."""
    shape, strides = sizes_described(x)
    return _descriptor(x, [*shape], [*strides], [1] * (x.dim() - 2) + [rows, columns])


def sizes_described(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and strides in a TMA descriptor of x. A dimension of size 1 may have any stride in x; the hardware
    requires a multiple of 16 bytes."""
    strides = [16 if n == 1 else stride for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return tuple(x.shape), (*strides, 1)


def packed_descriptor(x: Tensor, rows: int, columns: int):
    """A TMA descriptor of packed rows x (1, H, N, D) that reads 0 past the end of any document.

    The hardware clips at the tensor's edges only, so the edge is moved: the row coordinate runs up to
    PACKED_ORIGIN, where every document ends, and two more coordinates in front place that end. They are
    (PACKED_ORIGIN, end of the document) with strides (2^34 - s, s) for row stride s, and the row is
    PACKED_ORIGIN - length + i. The address is PACKED_ORIGIN * 2^34 + (start + i) * s elements, whose first
    term is a multiple of 2^64 bytes: 64-bit addresses drop it. Triton's tools/ragged_tma.py has the same trick.
    """
    _, heads, tokens, head_dim = x.shape
    # a dimension of size 1 may have any stride, as in `sizes_described`
    head_stride = 16 if heads == 1 else x.stride(1)
    row_stride = next_power_of_2(max(head_dim, 16)) if tokens == 1 else x.stride(2)
    return _descriptor(
        x,
        [_LARGEST, _LARGEST, heads, PACKED_ORIGIN, head_dim],
        [2**34 - row_stride, row_stride, head_stride, row_stride, 1],
        [1, 1, 1, rows, columns],
    )


def next_power_of_2(size: int) -> int:
    """The least power of two from `size` on: tile sides are powers of two."""
    return 1 << (size - 1).bit_length()


def _descriptor(x: Tensor, shape: list[int], strides: list[int], block_shape: list[int]):
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, shape, strides, block_shape)
