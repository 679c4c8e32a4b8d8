"""What the launchers share: tensors and options fit for a kernel, TMA descriptors, L2 sections, precision."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from .device import interpreting, l2_bytes
from .options import Options
from .portable.tuning import PACKED_ORIGIN, Tile
from .replay import Replay

_LARGEST = 0x7FFF0000  # a tensor dimension that no coordinate here reaches


def kernel_inputs(*tensors: Tensor) -> list[Tensor]:
    """Give each tensor a contiguous last dimension; in the interpreter also turn bfloat16 into float32.

    Triton's interpreter keeps bfloat16 as 16-bit integers and multiplies those. With float32 inside and one
    rounding by PyTorch at the end, bfloat16 calls are right there too.
    """
    if tensors[0].dtype == torch.bfloat16 and interpreting():
        tensors = [x.float() for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def padded(head_dim: int) -> int:
    """The next power of two: tile sides are powers of two."""
    return 1 << (head_dim - 1).bit_length()


def dot_precision(q: Tensor) -> str:
    """float32 products are exact ("ieee"), as PyTorch's are by default; other dtypes ignore this."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def on_device(q: Tensor):
    """Context that makes q's GPU current; entering one costs time, so only when another is."""
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        return torch.cuda.device(q.device)
    return nullcontext()


def launch(kernel, grid: int, arguments: tuple, constants: dict, **how: int) -> Replay | None:
    """Launch through Triton, which compiles where it must. Returns what launches it again.

    None in the interpreter, and where an address is no multiple of 16: Triton has then compiled for that.

    arguments: the kernel's parameters in order, but for its constexprs, which `constants` names in their order.
    how: num_warps, num_stages, launch_cooperative_grid.
    """
    compiled = kernel[(grid,)](*arguments, **constants, **how)
    tensors = [x.base if hasattr(x, "base") else x for x in _flat(arguments)]
    if compiled is None or any(x.data_ptr() % 16 for x in tensors if isinstance(x, Tensor)):
        return None
    return Replay(compiled, grid, (*arguments, *constants.values()))


def _flat(arguments: tuple):
    for x in arguments:
        if isinstance(x, tuple):
            yield from x
        else:
            yield x


def addresses_of(*tensors: Tensor | None) -> list[int]:
    """Where the tensors begin; None has no address."""
    return [x.data_ptr() for x in tensors if x is not None]


def heads_per_section(q: Tensor, k: Tensor, l2_share: float = 1 / 3) -> int:
    """How many query heads are worked on together: those whose K and V fill at most this share of the L2 cache, a power
    of two of KV heads, times the group size.

    flash-attention fills nearly all of it. But what a multiprocessor reads from the far half of the cache is kept in
    both halves: with 5/6 an H200 read up to 11 times what a call's tensors have (kernels/hopper/NOTES.md).
    """
    group = q.shape[1] // k.shape[1]
    bytes_per_head = 2 * k.shape[2] * k.shape[3] * k.element_size()
    fitting = int(l2_bytes(q.device.index) * l2_share) // bytes_per_head
    return min(group << max(fitting.bit_length() - 1, 0), q.shape[0] * q.shape[1])


def tma_ready(x: Tensor) -> bool:
    """Whether TMA can address x (B, H, N, D): 16-byte aligned start and strides, none of them 0."""
    if x.data_ptr() % 16:
        return False
    unit = 16 // x.element_size()
    batch, heads, tokens, _ = x.stride()
    if batch > 0 and heads > 0 and tokens > 0 and not (batch | heads | tokens) & (unit - 1):
        return True
    # a dimension of size 1 may carry any stride
    return all(
        n == 1 or (stride > 0 and stride % unit == 0) for n, stride in zip(x.shape[:3], x.stride(), strict=False)
    )


class Switches(NamedTuple):
    """The kernels' view of the options. A field that is None is a compile-time None: its code disappears.

    Integers are no fields: Triton would compile again for 1 and for multiples of 16. (No kernel argument may be
    called `options`: Triton's generated binder has a name like that.)
    """

    softcap: float | None = None
    alibi_slopes: Tensor | None = None  # (B or documents, Hq) fp32, contiguous
    sinks: Tensor | None = None  # (Hq,) fp32
    dropout_seed: Tensor | None = None  # one int64
    dropout_p: float | None = None
    cu_seqlens_q: Tensor | None = None  # (documents + 1,) int32
    cu_seqlens_k: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Those that are on, in order."""
        return [x for x in self if isinstance(x, Tensor)]


_PLAIN = Switches()
_PLAIN_OPTIONS = Options(causal=True, scale=1.0)[4:]  # softcap and all after it


def switches_of(options: Options) -> Switches:
    """Translate the options of a call; one shared constant where all are off."""
    if options[4:] == _PLAIN_OPTIONS:
        return _PLAIN
    dropped = options.dropout_p > 0.0
    return Switches(
        softcap=options.softcap or None,
        alibi_slopes=None if options.alibi_slopes is None else options.alibi_slopes.contiguous(),
        sinks=None if options.sinks is None else options.sinks.contiguous(),
        dropout_seed=options.dropout_seed if dropped else None,
        dropout_p=options.dropout_p if dropped else None,
        cu_seqlens_q=options.cu_seqlens_q,
        cu_seqlens_k=options.cu_seqlens_k,
    )


def window_bounds(options: Options, num_q: int, num_k: int) -> tuple[int, int]:
    """(left, right) where no bound is a distance that no pair of tokens has."""
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


def kernel_operands(
    tile: Tile, options: Options, *operands: tuple[Tensor, int, int]
) -> tuple[list, list[tuple[int, int, int]], bool]:
    """What a kernel takes for each (tensor, rows and columns of its tile), the strides, whether by descriptors.

    Descriptors where the tile wants TMA and every tensor allows it, plain tensors otherwise.
    """
    strides = [x.stride()[:3] for x, _, _ in operands]
    if not tile.tma or not all(tma_ready(x) for x, _, _ in operands):
        return [x for x, _, _ in operands], strides, False
    describe = packed_descriptor if options.packed else dense_descriptor
    return [describe(*operand) for operand in operands], strides, True


def dense_descriptor(x: Tensor, rows: int, columns: int):
    """A TMA descriptor of x (B, H, N, D) that loads tiles of (rows, columns); what is outside x reads as 0."""
    shape, strides = list(x.shape), list(x.stride())
    for i in range(3):
        if shape[i] == 1:  # may carry any stride, and the hardware wants a multiple of 16 bytes
            strides[i] = 16
    return _descriptor(x, shape, strides, [1, 1, rows, columns])


def packed_descriptor(x: Tensor, rows: int, columns: int):
    """A TMA descriptor of packed rows x (1, H, N, D) that reads 0 past the end of a document, wherever it lies.

    The hardware clips at the tensor's edges only, so the edge is moved: the row coordinate runs up to
    PACKED_ORIGIN, where every document ends, and two more coordinates in front place that end. They are
    (PACKED_ORIGIN, end of the document) with strides (2^34 - s, s) for row stride s, and the row is
    PACKED_ORIGIN - length + i. The address is PACKED_ORIGIN * 2^34 + (start + i) * s elements, whose first
    term is a multiple of 2^64 bytes: 64-bit addresses drop it. Triton's tools/ragged_tma.py has the same trick.
    """
    _, heads, tokens, head_dim = x.shape
    # as above, for a single head and for a single row
    head_stride = 16 if heads == 1 else x.stride(1)
    row_stride = padded(max(head_dim, 16)) if tokens == 1 else x.stride(2)
    return _descriptor(
        x,
        [_LARGEST, _LARGEST, heads, PACKED_ORIGIN, head_dim],
        [2**34 - row_stride, row_stride, head_stride, row_stride, 1],
        [1, 1, 1, rows, columns],
    )


def _descriptor(x: Tensor, shape: list[int], strides: list[int], block_shape: list[int]):
    """Triton's host descriptor. `tma_ready` has checked what its constructor would check again, for 4 us each."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = x, shape, strides
    descriptor.block_shape, descriptor.padding = block_shape, "zero"
    return descriptor
