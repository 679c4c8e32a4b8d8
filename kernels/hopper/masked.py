"""Block masks in the Hopper kernels. In the forward a program's 128 queries are one row of the mask's blocks, or its
192 are a group that spans two such rows, and a visit is one key tile.

Visits go from a row's last to its first, so that the partial ones come before the full ones: the order in which a dense
call visits its masked and its other tiles. One schedule serves both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.record import record
from ..portable.visits import MASK_GROUP, first_line, select_by_bit
from .schedule import key_tiles, tile_rows


@record
class Masked:
    """A block mask as the roles read it; None instead where there is none."""

    starts: gl.tensor  # of BlockMask
    visits: gl.tensor
    bits: gl.tensor
    patterns: gl.shared_memory_descriptor  # (STAGES * ROWS, 1) int32: the patterns of the tile in a stage
    OF_BATCH: gl.constexpr
    OF_HEAD: gl.constexpr
    ROWS: gl.constexpr  # patterns per stage: 2 for a group's two rows of blocks, or for a step and the next; else 1


@gluon.jit
def masked_by(
    starts, visits, bits, OF_BATCH: gl.constexpr, OF_HEAD: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """`Masked` of a mask's tensors, with memory for the patterns."""
    patterns = gl.allocate_shared_memory(gl.int32, [STAGES * ROWS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    return Masked(starts, visits, bits, patterns, OF_BATCH, OF_HEAD, ROWS)


@gluon.jit
def heads_together(masked, heads_per_section, num_heads, num_q, num_k):
    """How many heads a section has: heads_per_section, or all of them where one block of keys of the mask's first head
    is seen by more than four times as many blocks of queries as the average one.

    An item with so many visits ends long after the others of its head, and the items that add to dQ after it wait.
    Items of other heads hide both. Where all rows are alike, fewer heads at a time keep what they read in L2.
    """
    if masked is not None:
        k_blocks = (num_k + 127) // 128
        rows = masked.starts + (num_q + 127) // 128 * 4
        visits = gl.load(rows + (k_blocks * 4 - 2)) - gl.load(rows)
        longest = rows + gl.load(rows + 3) * 4
        most = gl.load(longest + 2) - gl.load(longest)
        return gl.where(most * k_blocks > 4 * visits, num_heads, heads_per_section)
    else:
        return heads_per_section


@gluon.jit
def program_tiles(tile, batch_head, num_tiles, mask, call, build):
    """(first row, first, end, full_end) of a program's query tile: the key tiles that it visits.

    With a block mask these are places in `visits`, partial from full_end on; else they are tiles of keys. At least one
    is visited: for a row of blocks without visits it is the first of the list, which shows nothing.
    """
    if call.masked is not None:
        batch = batch_head // call.sizes.num_heads
        head = batch_head - batch * call.sizes.num_heads
        masked = call.masked
        line = first_line(
            masked.starts, batch, head, call.sizes.num_heads, call.sizes.num_q, call.sizes.num_k,
            masked.OF_BATCH, masked.OF_HEAD,
        )  # fmt: skip
        if masked.ROWS == 2:
            line += ((call.sizes.num_q + 127) // 128 + (call.sizes.num_k + 127) // 128) * 4
        block = gl.load(line + tile * 4 + 3)  # those with the most visits first
        first = gl.load(line + block * 4)
        end = gl.load(line + block * 4 + 2)
        full_end = gl.load(line + block * 4 + 1)
        empty = first == end
        first, end, full_end = gl.where(empty, 0, first), gl.where(empty, 1, end), gl.where(empty, 0, full_end)
        return block * (64 * build.CONSUMERS), first, end, full_end
    else:
        row, end_row = tile_rows(tile, num_tiles, call.sizes.num_q, build.CONSUMERS)
        first, end, _, _ = key_tiles(gl.maximum(row, 0), end_row, mask, build.BLOCK_K)
        return row, first, end, first


@gluon.jit
def row_tiles(rows, loaded, mask, call, build):
    """`key_tiles` of a consumer's 64 rows, where the program loads the tiles `loaded` (first, end, full_end)."""
    if call.masked is not None:
        first, end, full_end = loaded
        return first, end, first, full_end
    else:
        return key_tiles(rows, rows + 64, mask, build.BLOCK_K)


@gluon.jit
def first_key(place, masked, BLOCK_K: gl.constexpr):
    """The first key of the tile at a place, and its patterns for each row of blocks."""
    if masked is not None:
        visit = masked.visits + place * 4
        return gl.load(visit) * 128, gl.load(visit + 1), gl.load(visit + masked.ROWS)
    else:
        return place * BLOCK_K, 0, 0


@gluon.jit
def announce_patterns(pattern, below, stage, masked):
    """Store the pattern of the tile that a stage is about to hold, and a second one, of a group or of the next step.
    This saves the consumers a load from global memory before they load the bits. Called by the producer's one warp."""
    if masked is not None:
        one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        masked.patterns.index(stage * masked.ROWS).store(gl.full([1], pattern, gl.int32, one))
        if masked.ROWS == 2:
            masked.patterns.index(stage * 2 + 1).store(gl.full([1], below, gl.int32, one))


@gluon.jit
def announced_pattern(stage, masked, row=0):
    """Read the pattern of the tile in a stage, as a consumer. row: 0, or 1 for the second one of the stage."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(masked.patterns.index(stage * masked.ROWS + row).load(one), 0)


@gluon.jit
def own_bits(pattern, row, col, s_layout: gl.constexpr, COLS: gl.constexpr):
    """Load the words of `BlockMask.bits` for 64 rows from `row` on, (64, 4) int32, one of each row for a thread. Its
    columns from `col` on begin at bit 0. `pattern`: pointer to the pattern's rows."""
    # scores as (row, eight columns, pair of the eight, column of the pair): a thread holds one pair of each eight
    scores = gl.reshape(gl.zeros([64, COLS], gl.float32, s_layout), [64, COLS // 8, 4, 2])
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, scores.type.layout))  # (row, pair)
    rows = row % 128 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    pair = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))
    return gl.load(pattern + (rows[:, None] * 4 + pair[None, :])) >> (col // 4)


@gluon.jit
def pattern_words(row, stage, masked, s_layout: gl.constexpr):
    """`own_bits` of 64 rows from `row` on under the key tile of a stage; in a full block all are 1."""
    of_group = 0
    if masked.ROWS == 2:
        of_group = row // 128 - row // MASK_GROUP * MASK_GROUP // 128
    pattern = announced_pattern(stage, masked, of_group)
    return own_bits(masked.bits + pattern.to(gl.int64) * 1024, row, 0, s_layout, 128)


_select_asm = gluon.constexpr_function(select_by_bit)


@gluon.jit
def where_bit(values, words, bits, HIDDEN: gl.constexpr):
    """values where a word has the bit, else HIDDEN: see `select_by_bit`."""
    return gl.inline_asm_elementwise(
        _select_asm(HIDDEN), "=f,f,r,r", [values, words, bits], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def by_bits(values, words, COLS: gl.constexpr, HIDDEN: gl.constexpr):
    """values (64, COLS) where a thread's bit of `own_bits` is 1, else HIDDEN as in `where_bit`. The compiler knows
    which bit each register tests."""
    seen = gl.reshape(values, [64, COLS // 8, 4, 2])
    layout: gl.constexpr = seen.type.layout
    eight = gl.arange(0, COLS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    column = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    bits = 1 << ((2 * eight)[None, :, None, None] + column[None, None, None, :])
    shown = where_bit(seen, words[:, None, :, None], bits, HIDDEN)
    return gl.convert_layout(gl.reshape(shown, [64, COLS]), values.type.layout)
