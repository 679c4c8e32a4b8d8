"""The Hopper building blocks by one set of names: TMA copies, TMA reduce-add, named barriers.

Gluon renames its TMA functions between Triton releases, and Triton 3.6 has the reduce-add in its builder but
not in its public language. Both facts end in this file; it is written for and checked with triton 3.6.
"""

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

TRITON_RELEASE = "3.6"

load = tma.async_copy_global_to_shared  # (descriptor, coordinates, mbarrier, shared tile)
store = tma.async_copy_shared_to_global  # (descriptor, coordinates, shared tile)
store_wait = tma.store_wait  # until all but n stores and adds of this thread have READ their shared tile


def triton_release_supported() -> bool:
    """Whether the installed Triton is the release whose private names this file uses."""
    return ".".join(triton.__version__.split(".")[:2]) == TRITON_RELEASE


@builtin
def reduce_add(descriptor, coordinates, tile, _semantic=None):
    """Add a shared tile to global memory: one bulk instruction (UTMAREDG), no order among programs.

    Complete like `store`: see `store_wait`.
    """
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle
    )


@gluon.constexpr_function
def _barrier_asm(instruction, identifier, threads):
    return f"{instruction} {identifier}, {threads}; mov.b32 $0, $1;"


@gluon.jit
def named_barrier(INSTRUCTION: gl.constexpr, IDENTIFIER: gl.constexpr, THREADS: gl.constexpr):
    """`bar.sync` or `bar.arrive` on a hardware barrier, by all 128 threads of a 4-warp partition.

    Triton takes identifiers from 0 up for its own barriers; 9 to 15 are free in our kernels.
    """
    lane_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    threads = gl.arange(0, 128, layout=lane_layout)
    gl.inline_asm_elementwise(
        _barrier_asm(INSTRUCTION, IDENTIFIER, THREADS), "=r,r", [threads], dtype=gl.int32, is_pure=False, pack=1
    )
