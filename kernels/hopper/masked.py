"""Block masks in the Hopper kernels. In the forward a program's 128 queries are one row of the mask's blocks, and a
visit is one key tile.

Visits are walked from a row's last to its first, so that the partial ones come before the full ones: the order in which
a dense call meets its masked and its other tiles. One schedule serves both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.record import record
from .schedule import key_tiles, tile_rows


@record
class Masked:
    """A block mask as the roles see it; None in its place where there is none."""

    starts: gl.tensor  # of BlockMask
    visits: gl.tensor
    bits: gl.tensor
    patterns: gl.shared_memory_descriptor  # (STAGES, 1) int32: a key tile's pattern, in the forward
    OF_BATCH: gl.constexpr
    OF_HEAD: gl.constexpr


@gluon.jit
def first_line(masked, batch, head, num_heads, num_q, num_k):
    """Where the rows of blocks of a head of queries begin in `starts`."""
    which = 0
    if masked.OF_HEAD:
        which = batch * num_heads + head if masked.OF_BATCH else head
    elif masked.OF_BATCH:
        which = batch
    return masked.starts + which * ((num_q + 127) // 128 + (num_k + 127) // 128) * 4


@gluon.jit
def program_tiles(tile, batch_head, num_tiles, mask, call, build):
    """(first row, first, end, full_end) of a program's query tile: the key tiles that it visits.

    Of a block mask they are places in `visits`, of which those from full_end on are partial, else tiles of keys. One
    is visited at least: where a row of blocks has no visit, the first of the list, which shows nothing.
    """
    if call.masked is not None:
        batch = batch_head // call.sizes.num_heads
        head = batch_head - batch * call.sizes.num_heads
        line = first_line(call.masked, batch, head, call.sizes.num_heads, call.sizes.num_q, call.sizes.num_k)
        block = gl.load(line + tile * 4 + 3)  # those with the most visits first
        first = gl.load(line + block * 4)
        end = gl.load(line + block * 4 + 2)
        full_end = gl.load(line + block * 4 + 1)
        empty = first == end
        return (
            block * 128, gl.where(empty, 0, first), gl.where(empty, 1, end), gl.where(empty, 0, full_end),
        )  # fmt: skip
    else:
        row, end_row = tile_rows(tile, num_tiles, call.sizes.num_q, build.CONSUMERS)
        first, end, _, _ = key_tiles(gl.maximum(row, 0), end_row, mask, build.BLOCK_K)
        return row, first, end, first


@gluon.jit
def row_tiles(rows, loaded, mask, call, build):
    """`key_tiles` of a consumer's 64 rows, of which the program loads `loaded` (first, end, full_end)."""
    if call.masked is not None:
        first, end, full_end = loaded
        return first, end, first, full_end
    else:
        return key_tiles(rows, rows + 64, mask, build.BLOCK_K)


@gluon.jit
def first_key(place, masked, BLOCK_K: gl.constexpr):
    """The first key of the tile at a place."""
    if masked is not None:
        return gl.load(masked.visits + place * 4) * 128
    else:
        return place * BLOCK_K


@gluon.jit
def announce_pattern(place, stage, masked):
    """Tell the consumers which pattern the key tile has that a stage is about to hold: one load from global memory less
    between them and its bits. By the producer's one warp."""
    if masked is not None:
        one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        pattern = gl.load(masked.visits + place * 4 + 1)
        masked.patterns.index(stage).store(gl.full([1], pattern, gl.int32, one))


@gluon.jit
def seen_scores(s_layout: gl.constexpr):
    """The layout of scores (64, 128) as (row, word of 32 columns, block of 8 in it, column in the block)."""
    return gl.reshape(gl.zeros([64, 128], gl.float32, s_layout), [64, 4, 4, 8])


@gluon.jit
def pattern_words(row, stage, masked, s_layout: gl.constexpr):
    """The bits of 64 rows from `row` on under the key tile of a stage, (64, 4) int32; of a full block all are 1."""
    layout: gl.constexpr = seen_scores(s_layout).type.layout
    words: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, layout))
    rows = row % 128 + gl.arange(0, 64, layout=gl.SliceLayout(1, words))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, words))
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    pattern = gl.max(masked.patterns.index(stage).load(one), 0)
    return gl.load(masked.bits + pattern.to(gl.int64) * 1024 + (rows[:, None] * 4 + word[None, :]))


@gluon.jit
def hide_by_bits(scores, words):
    """-inf where a row's bit is 0. A word is shifted by a thread's own offset once; what is left are tests of bits that
    the compiler knows."""
    seen = gl.reshape(scores, [64, 4, 4, 8])
    layout: gl.constexpr = seen.type.layout
    offset = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    block = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    shifted = words[:, :, None, None] >> offset[None, None, None, :]
    shown = (shifted >> (8 * block)[None, None, :, None]) & 1
    hidden = gl.where(shown != 0, seen, -float("inf"))
    return gl.convert_layout(gl.reshape(hidden, [64, 128]), scores.type.layout)
