"""The only table of the portable kernels' tiles: which each uses on which GPU, head dimension and dtype, and why.

Registers, spills and shared memory in the reasons come from `python -m scripts.bench.compile_kernels`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..call import Options
from ..decode import MAX_SPANS
from ..device import capability, interpreting, num_sms
from ..launch import Launch, descriptor, next_power_of_2, packed_descriptor, tma_ready


@dataclass(frozen=True)
class Tile:
    """One configuration: queries and keys in a tile, warps, pipeline stages, loads by TMA or pointers."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False

    @property
    def how(self) -> dict[str, int]:
        """The options of Triton's launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def smaller(self) -> "Tile | None":
        """The next tile that needs less shared memory: fewer stages first, then fewer keys, then queries."""
        if self.num_stages > 1:
            return replace(self, num_stages=self.num_stages - 1)
        if self.block_k > 16:
            return replace(self, block_k=self.block_k // 2)
        if self.block_q > 16:
            return replace(self, block_q=self.block_q // 2)
        return None


# Small, so that test shapes of 30 to 160 tokens cross tile borders; unequal, so that the diagonal of a key
# tile spans more than one query tile.
INTERPRETER = Tile(block_q=16, block_k=32, num_warps=4, num_stages=1)
INTERPRETER_MASKED = Tile(block_q=64, block_k=64, num_warps=4, num_stages=1)  # parts of a mask's blocks of 128

_MASKED = "full causal varlen block_mask"


def _table(rows: dict[tuple[str, str, str], Tile]) -> dict[tuple[str, int, str], Tile]:
    """(kernel, head_dim padded to a power of two, variant) -> tile, from rows of several head_dims and variants.

    A variant is "dropout" or "softcap", whose arithmetic takes registers, then "varlen", else the mask: "block_mask",
    "window", "causal" or "full"; or "any", for what has no row of its own.
    """
    return {
        (kernel, int(width), variant): tile
        for (kernel, widths, variants), tile in rows.items()
        for width in widths.split()
        for variant in variants.split()
    }


# 16-bit inputs on Hopper and data-center Blackwell (227 KB of shared memory). TMA everywhere: pointer arithmetic costs
# 26 to 50 registers in the same kernel.
_HOPPER = _table({
    # at 64 159 registers, and with 4 warps wgmma is serialized; at 32 150; few use 16
    ("fwd", "16 32 64", "any"): Tile(128, 128, 8, 3, True),
    ("fwd", "128", "any"): Tile(128, 128, 8, 2, True),  # 194 registers, 161 KB
    ("fwd", "256", "any"): Tile(128, 64, 8, 2, True),  # 227 registers, 192 KB
    # plain masks at 64 and 128: the fastest of 12 to 20 tiles at 1,024 to 16,384 tokens (H200, torch 2.11.0, triton
    # 3.6.0, 2026-11-21); "any" above came from the compiler's registers and is 1.05 to 1.7 times slower there. Packed
    # documents: 16 of unequal length, causal, the same machine and day; for dQ at 128 the dense calls' tile takes 548
    # us instead of 416. A block mask: the dense calls' tiles, all of which divide 128
    ("fwd", "64", "causal varlen"): Tile(64, 64, 4, 2, True),
    ("fwd", "64", "full block_mask"): Tile(64, 128, 4, 2, True),
    ("fwd", "128", _MASKED): Tile(64, 64, 4, 3, True),
    ("dkdv", "64", _MASKED): Tile(32, 64, 4, 3, True),
    ("dkdv", "128", _MASKED): Tile(64, 64, 4, 2, True),
    ("dq", "64", _MASKED): Tile(64, 64, 4, 2, True),
    ("dq", "128", "full causal"): Tile(128, 32, 8, 3, True),
    ("dq", "128", "varlen block_mask"): Tile(64, 64, 4, 2, True),
    # dropout, causal: the fastest of 3 to 7 tiles at 256 to 4,096 tokens (at 16 none was timed), or within 4 % of it
    # (H200, torch 2.11.0, triton 3.6.0, 2026-11-28)
    ("fwd", "16 32 64 128", "dropout"): Tile(64, 64, 4, 2, True),
    ("fwd", "256", "dropout"): Tile(64, 32, 4, 2, True),
    # at 64 causal 207 registers, with 2 stages 255; at 128 no spill at 162 KB, with 2 stages causal spills 176 bytes
    ("dkdv", "16 32 64 128", "any"): Tile(64, 128, 8, 3, True),
    ("dkdv", "256", "any"): Tile(32, 64, 8, 2, True),  # 255 registers, 16 bytes spilled
    ("dkdv", "16 32 64", "dropout"): Tile(32, 64, 4, 2, True),
    ("dkdv", "128", "dropout"): Tile(32, 64, 4, 3, True),
    ("dkdv", "256", "dropout"): Tile(32, 64, 8, 2, True),  # spills 128 bytes; with 16 queries 1.2 times as long
    ("dkdv", "256", "softcap"): Tile(16, 64, 8, 2, True),  # 244 registers
    ("dkdv", "128", "softcap"): Tile(32, 128, 8, 2, True),  # 255 registers; 64 queries spill 120 bytes
    ("dq", "16 32", "any"): Tile(128, 64, 8, 3, True),
    ("dq", "64", "any"): Tile(128, 128, 8, 2, True),  # 181 registers
    ("dq", "128", "any"): Tile(128, 64, 8, 2, True),  # 161 registers, 128 KB
    ("dq", "256", "any"): Tile(64, 32, 8, 2, True),  # 182 registers, 128 KB
    ("dq", "16 32 64 128", "dropout"): Tile(64, 64, 4, 2, True),
    ("dq", "256", "dropout"): Tile(64, 32, 4, 2, True),  # spills 64 bytes; with 8 warps 1.2 times as long
})  # fmt: skip

# 16-bit inputs elsewhere from Ampere on. Every entry fits the 99 KB of sm_86, sm_89 and sm_120; loads by
# pointers.
_PORTABLE = _table({
    ("fwd", "16 32", "any"): Tile(128, 64, 4, 2),
    # 197 and 210 registers, at 128 64 KB; with 4 warps sm_120 spills 72 bytes at 64
    ("fwd", "64 128", "any"): Tile(128, 64, 8, 2),
    ("fwd", "256", "any"): Tile(64, 64, 8, 1),  # 243 registers, 72 KB; with 4 warps it spills
    ("dkdv", "16 32", "any"): Tile(64, 128, 8, 2),
    ("dkdv", "64", "any"): Tile(32, 128, 8, 2),  # 242 registers; 64 queries spill 16 to 48 bytes
    ("dkdv", "128", "any"): Tile(64, 64, 8, 1),  # 172 registers, 80 KB
    ("dkdv", "256", "any"): Tile(16, 64, 8, 1),  # 255 registers, 88 KB
    ("dq", "16 32 64", "any"): Tile(128, 64, 8, 2),  # at 64 187 registers, 48 KB
    ("dq", "128", "any"): Tile(128, 32, 8, 2),  # 202 registers, 80 KB
    ("dq", "256", "any"): Tile(64, 32, 8, 1),  # 208 registers, 96 KB
    ("dq", "256", "dropout"): Tile(32, 32, 8, 1),  # 174 registers; 64 queries spill 184 bytes
})  # fmt: skip

# float32 on every GPU: exact products run on the FP32 lanes as unrolled multiply-adds, so tiles are small;
# larger ones spill kilobytes (fwd 64x32 with 4 warps at D = 128: 6,760 bytes).
_FLOAT32 = _table({
    ("fwd", "16 32 64", "any"): Tile(64, 32, 8, 1),  # at 64 168 registers
    ("fwd", "128", "any"): Tile(32, 16, 8, 1),
    ("fwd", "256", "any"): Tile(16, 16, 8, 1),
    ("dkdv", "16 32 64", "any"): Tile(32, 32, 8, 1),  # at 64 128 registers
    ("dkdv", "128", "any"): Tile(16, 32, 8, 1),  # 110 registers
    ("dkdv", "256", "any"): Tile(16, 16, 8, 1),
    ("dq", "16 32 64", "any"): Tile(32, 16, 8, 1),
    ("dq", "128 256", "any"): Tile(16, 16, 8, 1),  # at 256 it spills 184 bytes, the least of the shapes tried
})  # fmt: skip


@dataclass(frozen=True)
class DecodeTile:
    """How the kernels over a cache cut a row's keys. The first three, `groups` and `quad` decide a result's bits."""

    block_k: int  # keys in a tile
    span: int  # tiles in a span, the largest item of work
    num_warps: int
    num_stages: int
    per_sm: int  # programs for each multiprocessor
    max_registers: int | None = None  # of a thread
    groups: int = 16  # of a row's spans, at most: with 128 spans the last program folds 8, and then 16 groups
    least_rows: int = 16  # of queries in a tile
    few: float = 0.25  # spans per multiprocessor, below which items are quads, or tiles below half as many quads
    quad: int | None = None  # tiles in a quad, and quads in a span, which is its square; None: there are no quads

    def __post_init__(self) -> None:
        if self.quad is not None and self.span != self.quad**2:
            raise ValueError(
                f"a span of {self.span} tiles is not {self.quad} quads of {self.quad}: a row's bits would follow from "
                f"how its batch is cut; use span={self.quad**2}, or quad=None"
            )

    @property
    def how(self) -> dict[str, int | bool | None]:
        """The options of Triton's launch."""
        how = {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}
        return how | {"enable_fp_fusion": False}

    def smaller(self) -> "DecodeTile | None":
        """The next tile that needs less shared memory and gives the same bits."""
        return replace(self, num_stages=self.num_stages - 1) if self.num_stages > 1 else None


def decode_tile(dtype: torch.dtype, head_dim: int, block_m: int, paged: bool) -> DecodeTile:
    """The tile for a cache of this dtype; small ones in the interpreter.

    A tile has 16 KB of keys and 16 KB of values, so that two are in flight for each of three programs. With spans of 16
    tiles instead of 8 a row of 8,192 keys takes 24.8 us instead of 21.8, and 16 such rows 137.6 instead of 142.0 (one
    H200, 32/8 heads of 128, torch 2.11.0). Registers and shared memory are the compiler's. In pages Triton loads a
    page's number as many stages before the keys as the keys before their use, so two tiles in flight take twice the
    stages.
    """
    if interpreting():
        return DecodeTile(block_k=16, span=3, num_warps=4, num_stages=1, per_sm=1, groups=2)
    width = next_power_of_2(max(16, head_dim))
    if dtype == torch.float32:  # exact products are unrolled: more keys spill
        return DecodeTile(max(16, 2048 // width), 8, 4, 1, 2)
    block_k = min(128, 16384 // (width * dtype.itemsize))
    stages = 5 if paged else 3
    if block_m > 32:
        return DecodeTile(block_k, 8, 8, stages, 1)  # 255 registers, 16 bytes spilled, 112 KB
    if block_m > 16 or width > 128 or (dtype.itemsize == 1 and paged):
        return DecodeTile(block_k, 8, 4, stages, 2)  # 255 registers
    return DecodeTile(block_k, 8, 4, stages, 3, max_registers=168)  # 70 KB, at most 8 bytes spilled


def cut_for(device: torch.device, tile: DecodeTile) -> tuple[int, int]:
    """(programs to launch, the number of spans from which on items are whole spans) on this device."""
    if interpreting():
        return 3, 5  # few, so that tests meet both kinds of items and tickets
    sms = num_sms(device.index)
    return tile.per_sm * sms, min(int(sms * tile.few), MAX_SPANS)


def decode_rows(q_shape: torch.Size, num_kv_heads: int, least: int = 16) -> tuple[int, int]:
    """(rows of q that share a KV head, BLOCK_M)."""
    rows = q_shape[1] // num_kv_heads * q_shape[2]
    return rows, min(max(least, next_power_of_2(rows)), 64)


@lru_cache(maxsize=64)
def decode_memory(
    q_shape: torch.Size, cache_shape: torch.Size, pages_of_row: int, tile: DecodeTile, few: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of sums and maxima, with room for the partial results of any lengths: of the tiles of `few` spans, then
    of all spans."""
    rows, block_m = decode_rows(q_shape, cache_shape[1], tile.least_rows)
    # a window may begin inside a tile, so that a row has a tile more than its keys would fill
    spans = q_shape[0] * -(-(cache_shape[2] * pages_of_row // tile.block_k + 2) // tile.span)
    slots = few * tile.span + spans * cache_shape[1] * -(-rows // block_m)
    return (slots, min(rows, block_m), next_power_of_2(q_shape[3])), (slots, 2, block_m)


def variant_of(options: Options) -> str:
    """The table's variant for a call: the options that need registers come before the masks."""
    if options.dropout_p > 0.0:
        return "dropout"
    if options.softcap > 0.0:
        return "softcap"
    if options.packed:
        return "varlen"
    if options.masked:
        return "block_mask"
    if options.local:
        return "window"
    return "causal" if options.causal else "full"


def table_for(arch: tuple[int, int], element_bytes: int) -> dict[tuple[str, int, str], Tile]:
    """(kernel, head_dim padded to a power of two, variant) -> tile, for compute capability `arch`."""
    if element_bytes == 4:
        return _FLOAT32
    # sm_90 and sm_10x have the large shared memory; sm_12x, although newer, has not
    return _HOPPER if arch[0] in (9, 10, 11) else _PORTABLE


def table_tile(kernel: str, arch: tuple[int, int], element_bytes: int, head_dim: int, variant: str) -> Tile:
    """The table's tile for a kernel ("fwd", "dkdv" or "dq") on compute capability `arch`."""
    table = table_for(arch, element_bytes)
    width = next_power_of_2(max(16, head_dim))
    tile = table.get((kernel, width, variant)) or table.get((kernel, width, "any"))
    assert tile is not None, f"no tile for {kernel} at head_dim {head_dim}"
    return tile


def tile_for(kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int, options: Options) -> Tile:
    """The tile to launch with on this device; small ones in the interpreter."""
    if interpreting():
        return INTERPRETER_MASKED if options.masked else INTERPRETER
    return table_tile(kernel, capability(device.index), dtype.itemsize, head_dim, variant_of(options))


def kernel_operands(
    tile: Tile, options: Options, *operands: tuple[Tensor, int, int]
) -> tuple[list, list[tuple[int, int, int]], bool]:
    """A kernel's argument for each (tensor, rows and columns of its tile), the strides, and whether TMA is used.

    The arguments are descriptors where the tile uses TMA and every tensor allows it, plain tensors otherwise.
    """
    strides = [x.stride()[:3] for x, _, _ in operands]
    if not tile.tma or not all(tma_ready(x) for x, _, _ in operands):
        return [x for x, _, _ in operands], strides, False
    describe = packed_descriptor if options.packed else descriptor
    return [describe(*operand) for operand in operands], strides, True


def fitting(tile: Tile, make: Callable[[Tile], Launch]) -> Launch:
    """make(tile); where the GPU has too little shared memory for it, make() of a smaller one, with a warning."""

    def smaller(error: Exception) -> Launch | None:
        less = tile.smaller()
        if less is None:
            return None
        logging.getLogger(__name__).warning("%s does not fit (%s); trying %s", tile, error, less)
        return fitting(less, make)

    return make(tile)._replace(smaller=smaller)
