"""What tests/hopper_simulator.py computes with: numbers, tiles, pieces of shared memory, pointers, TMA descriptors."""

from types import SimpleNamespace

import numpy as np
from torch import Tensor


class Int(int):
    """An integer of a kernel. It divides only where hardware and Python round alike."""

    def to(self, _dtype):
        return self


def _arithmetic(name: str):
    def operate(self, other):
        result = getattr(int, name)(self, other)
        assert name not in ("__floordiv__", "__mod__") or self >= 0, "hardware rounds towards zero, Python down"
        return result if result is NotImplemented else Int(result)

    return operate


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "xor", "rshift", "lshift"):
    setattr(Int, f"__{_name}__", _arithmetic(f"__{_name}__"))


class Tile(np.ndarray):
    """numpy's array with what kernels ask of a tensor."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        if bitcast:
            return self.astype(np.int32 if dtype == "float32" else np.float32).view(dtype)
        if self.dtype == bool:
            return self.astype(np.int64)
        if dtype == "float16":
            return self.astype(np.float16).astype(np.float32)
        return self.astype(np.float32) if dtype == "float32" else self


def as_value(x):
    x = np.asarray(x)
    if x.ndim:
        return x.view(Tile)
    return float(x) if x.dtype.kind == "f" else Int(x)


def flat(x: Tensor) -> np.ndarray:
    """All of the memory that x is a view of."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).numpy()


class Pointer:
    def __init__(self, memory: np.ndarray, offset):
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty="int8" if memory.dtype == np.int8 else None)

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)

    def __getitem__(self, place):
        return Pointer(self.memory, self.offset[place])


def load_by_pointer(pointer, mask=True, other=0, cache_modifier=None):
    inside = np.where(mask, pointer.offset, 0)
    assert (inside >= 0).all()
    return as_value(np.where(mask, pointer.memory[inside], other))


def write_rows(tile, rows):
    for source, target in zip(tile, rows, strict=True):
        if target is not None:
            target[:] = source[: len(target)]


class Shared:
    """A piece of shared memory, NaN at first."""

    dtype = None

    def __init__(self, array: np.ndarray, element_bytes: int, in_pieces: bool = False):
        self.array, self.element_bytes, self.in_pieces = array, element_bytes, in_pieces

    def index(self, i):
        return Shared(self.array[i], self.element_bytes)

    def slice(self, start, length, dim):
        part = self.array[(slice(None),) * dim + (slice(start, start + length),)]
        # swizzled rows are 128 bytes long: a wider tile is stored in columns of such rows, one behind the other
        return Shared(part, self.element_bytes, dim == 0 and part.shape[-1] * self.element_bytes > 128)

    def permute(self, order):
        return Shared(self.array.transpose(order), self.element_bytes)

    def _reinterpret(self, _dtype, shape, _layout):
        assert not self.in_pieces, "some rows of a wide tile are no tile of their own"
        if self.array.ndim == 3 and shape[-1] < self.array.shape[-1]:
            assert shape[-1] * self.element_bytes == 128, "the columns that one swizzle takes"
            return _Columns(self, *shape[1:])
        if np.prod(shape) == 2 * self.array.size:  # words of two
            shape = [*shape[:-1], shape[-1] // 2]
        same = self.array.view()
        same.shape = shape  # never a copy
        return Shared(same, self.element_bytes)

    def load(self, _layout):
        return self.array.copy().view(Tile)

    def store(self, value):
        self.array[...] = value


class _Columns:
    """Wide tiles as memory has them: columns of swizzled rows, one behind the other; by pieces of so many rows."""

    def __init__(self, tiles: Shared, rows: int, width: int):
        self._tiles, self._rows, self._width = tiles, rows, width

    def index(self, i):
        _, rows, width = self._tiles.array.shape
        rest, piece = divmod(i, rows // self._rows)
        tile, column = divmod(rest, width // self._width)
        part = self._tiles.array[tile, piece * self._rows :, column * self._width :]
        return Shared(part[: self._rows, : self._width], self._tiles.element_bytes)


class Descriptor:
    """A TMA descriptor as the device sees it."""

    dtype = layout = None

    def __init__(self, host):
        self.block_type = SimpleNamespace(shape=host.block_shape)
        self._memory, self._start = flat(host.base), host.base.storage_offset()
        self._shape, self._strides = host.shape, host.strides

    def rows(self, coordinates):
        """The piece of memory of each row of the box, as far as it reaches; None where the hardware clips."""
        *outer, first_row, first_column = coordinates
        last_column = min(first_column + self.block_type.shape[-1], self._shape[-1])
        for row in range(first_row, first_row + self.block_type.shape[-2]):
            place = [*outer, row]
            if not all(0 <= c < n for c, n in zip(place, self._shape[:-1], strict=True)):
                yield None
                continue
            size = self._memory.itemsize
            address = sum(c * stride * size for c, stride in zip(place, self._strides[:-1], strict=True)) % 2**64
            start = self._start + address // size
            yield self._memory[start + first_column : start + last_column]
