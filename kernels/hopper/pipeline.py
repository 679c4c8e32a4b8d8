"""How the Hopper kernels' roles hand tiles to one another: barriers, copies, turns at the tensor cores.

Barriers (mbarriers; a stage s of a ring of STAGES):
    q_full[c]   consumer c's 64 queries have arrived        q_empty[c]  c's last S with them is done (256: O is stored)
    k_full[s]   a key tile has arrived                      k_empty[s]  every consumer's S with it is done
    v_full[s]   a value tile has arrived                    v_empty[s]  every consumer's P V with it is done
    9 + c       hardware barrier, with PING_PONG: consumer c may issue its products; the others do softmax
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..portable.record import record
from ..portable.tiles import ORIGIN
from . import tma
from .tma import slot


@record
class Barriers:
    """Arrays of mbarriers, as in the table above."""

    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor


@record
class Tiles:
    """Arrays of tiles in shared memory: one for each consumer, or for each stage."""

    q: gl.shared_memory_descriptor  # (CONSUMERS, 64, HEAD_DIM)
    k: gl.shared_memory_descriptor  # (STAGES, BLOCK_K, HEAD_DIM)
    v: gl.shared_memory_descriptor  # as k
    o: gl.shared_memory_descriptor  # (CONSUMERS, 64, HEAD_DIM)


@record
class Build:
    """A kernel's constants, as its parameters name them."""

    HEAD_DIM: gl.constexpr
    BLOCK_K: gl.constexpr
    CONSUMERS: gl.constexpr
    STAGES: gl.constexpr
    CAUSAL: gl.constexpr
    LOCAL: gl.constexpr
    PING_PONG: gl.constexpr
    PAIRED: gl.constexpr


@gluon.jit
def ready_barriers(CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Allocate and initialize the `Barriers`, for all roles."""
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    return Barriers(q_full, q_empty, k_full, k_empty, v_full, v_empty)


@gluon.jit
def load_rows(descriptor, batch, head, start, row0, num_tokens, barrier, tile):
    """Copy a tile from row `start` on; rows past num_tokens read as 0, even those of the next document (row0 is the
    document's first packed row: see `packed_descriptor` in kernels/launch.py)."""
    shared = tile._reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)
    if len(descriptor.block_type.shape) == 5:
        tma.load(descriptor, [ORIGIN, row0 + num_tokens, head, ORIGIN - num_tokens + start, 0], barrier, shared)
    else:
        tma.load(descriptor, [batch, head, start, 0], barrier, shared)


@gluon.jit
def store_rows(descriptor, batch, head, start, row0, num_tokens, tile):
    """`load_rows`'s reverse: the same clipping keeps a ragged last tile out of the next document's rows."""
    shared = tile._reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)
    if len(descriptor.block_type.shape) == 5:
        tma.store(descriptor, [ORIGIN, row0 + num_tokens, head, ORIGIN - num_tokens + start, 0], shared)
    else:
        tma.store(descriptor, [batch, head, start, 0], shared)


@gluon.jit
def take_baton(build, CONSUMER: gl.constexpr):
    """Wait until this consumer may issue its products."""
    if build.PING_PONG:
        tma.named_barrier("bar.sync", 9 + CONSUMER, 256)


@gluon.jit
def pass_baton(build, CONSUMER: gl.constexpr):
    """Let the next consumer issue its products."""
    if build.PING_PONG:
        tma.named_barrier("bar.arrive", 9 + (CONSUMER + 1) % build.CONSUMERS, 256)


@gluon.jit
def hand_back(step, num_tiles, barriers, build, CONSUMER: gl.constexpr):
    """Release the next key tiles unread: only other rows of the program see them. Returns the step after them."""
    for _ in range(num_tiles):
        stage, phase = slot(step, build.STAGES)
        mbarrier.wait(barriers.k_full.index(stage), phase)
        take_baton(build, CONSUMER)
        pass_baton(build, CONSUMER)
        mbarrier.arrive(barriers.k_empty.index(stage), count=1)
        mbarrier.wait(barriers.v_full.index(stage), phase)
        mbarrier.arrive(barriers.v_empty.index(stage), count=1)
        step += 1
    return step
