"""The Hopper building blocks under one set of names: TMA copies, barriers, turns.

Gluon renames its TMA functions between Triton releases, and what it lacks is written in PTX. Both are confined to this
file, which is written for and checked with triton 3.6.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import launch

load = tma.async_copy_global_to_shared  # (descriptor, coordinates, mbarrier, shared tile)
store = tma.async_copy_shared_to_global  # (descriptor, coordinates, shared tile)
store_wait = tma.store_wait  # until all but n stores of this thread have READ their shared tile
let_next_begin = gdc_launch_dependents  # lets the next kernel start (launch_pdl) once all programs have called it
wait_for_previous = gdc_wait  # until the kernel before has ended, where this one started sooner (launch_pdl)


@gluon.jit
def slot(step, STAGES: gl.constexpr):
    """Stage of a ring and phase of its barriers at the step-th use."""
    if STAGES == 1:
        return 0, step & 1
    elif STAGES == 2:
        return step & 1, (step >> 1) & 1
    else:
        return step % STAGES, (step // STAGES) & 1


@gluon.constexpr_function
def _barrier_asm(instruction, threads):
    return f"{instruction} $1, {threads}; mov.b32 $0, $1;"


@gluon.jit
def named_barrier(INSTRUCTION: gl.constexpr, identifier, THREADS: gl.constexpr, WARPS: gl.constexpr = 4):
    """`bar.sync` or `bar.arrive` on a hardware barrier of THREADS threads, by all of a partition of WARPS warps.

    What a thread wrote before it arrived is visible to the threads that the barrier releases. Triton uses identifiers
    from 0 up for its own barriers; 9 to 15 are free in our kernels.
    """
    lane_layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    identifiers = gl.full([32 * WARPS], identifier, gl.int32, lane_layout)
    gl.inline_asm_elementwise(
        _barrier_asm(INSTRUCTION, THREADS), "=r,r", [identifiers], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _by_warps(ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, address, value, WARPS: gl.constexpr = 1):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lanes = gl.arange(0, 32 * WARPS, layout=layout)
    gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [address + lanes * 0, value + lanes * 0], dtype=gl.int32, is_pure=False, pack=1
    )


def spin(test: str) -> str:
    """PTX that reads the int32 at $1 until `test`, which compares it (now) with $2, no longer sets the predicate waits.
    What was written and added before the int32 was set is then visible."""
    return f"""{{
        .reg .pred waits;
        .reg .u32 now;
        AGAIN:
        ld.acquire.gpu.global.u32 now, [$1];
        {test}
        @waits bra AGAIN;
        mov.u32 $0, now;
        }}"""


_UNTIL_EQUAL = gl.constexpr(spin("setp.ne.u32 waits, now, $2;"))
_UNTIL_COUNT_OR_0 = gl.constexpr(spin("sub.u32 now, now, 1; setp.lt.u32 waits, now, $2;"))


@gluon.jit
def wait_turn(address, turn):
    """Wait, in a partition of one warp, until the int32 at `address` is `turn`. Threads that this warp then releases by
    a barrier see what it sees."""
    _by_warps(_UNTIL_EQUAL, "=r,l,r", address, turn)


@gluon.jit
def wait_count(address, count):
    """Wait until the int32 at `address` is at least `count`, or 0 because it was reset after that. Otherwise as
    `wait_turn`, but called by a partition of four warps."""
    _by_warps(_UNTIL_COUNT_OR_0, "=r,l,r", address, count - 1, 4)


@gluon.jit
def pass_turn(address):
    """Add 1 to the int32 at `address`, after all adds by this warp and by the threads it met at a barrier. Called by
    one warp."""
    _by_warps(
        """{
        .reg .pred first;
        .reg .u32 lane;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first red.release.gpu.global.add.u32 [$1], $2;
        mov.u32 $0, lane;
        }""",
        "=r,l,r", address, 1,
    )  # fmt: skip


@gluon.jit
def fence_async_global():
    """Make this warp's stores to global memory visible to the TMA copies that it issues next. Called by one warp."""
    _by_warps("fence.proxy.async.global; bar.warp.sync 0xffffffff; mov.u32 $0, $2;", "=r,r,r", 0, 0)


@gluon.jit
def gather(pointers, keep, shared):
    """Start an asynchronous copy of elements by pointer, zeros where not kept. It takes no register per element."""
    async_copy.async_copy_global_to_shared(shared, pointers, mask=keep)


@gluon.jit
def wait_for_gathers():
    """Wait for this warp's gathers, and make them visible to products in the roles that it then signals. Called by one
    warp."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    _by_warps("fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; mov.u32 $0, $2;", "=r,r,r", 0, 0)


@gluon.jit
def arrive_when_gathered(barrier):
    """Let the mbarrier's phase, in which another arrival is still due, end only when this warp's gathers are done."""
    async_copy.mbarrier_arrive(barrier)


_GLUON_DTYPE = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
}


def tile_width(head_dim: int) -> int:
    """Return the columns of a tile for this head_dim. Those past head_dim read as 0 and are not written."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def descriptor(x: Tensor, rows: int, columns: int, *, packed: bool = False) -> TensorDescriptor:
    """`descriptor` or `packed_descriptor` of kernels/launch.py as Gluon's, which also holds a tile's layout in shared
    memory. `tma_ready` has checked x."""
    plain = (launch.packed_descriptor if packed else launch.descriptor)(x, rows, columns)
    layout = gl.NVMMASharedLayout.get_default_for(plain.block_shape, _GLUON_DTYPE[plain.base.dtype])
    return TensorDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape, layout)
