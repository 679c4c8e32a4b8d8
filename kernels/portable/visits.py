"""A block mask in a kernel: the blocks that a tile visits, and the bits of a partial one."""

import triton
import triton.language as tl
from torch import Tensor

from ..call import Options
from ..device import interpreting
from ..launch import grid_tiles
from ..mask_visits import BLOCK, GROUP
from .record import record
from .tiles import owned_tile, section_tile, visible_keys

MASK_BLOCK = tl.constexpr(BLOCK)
MASK_GROUP = tl.constexpr(GROUP)
PACKED = tl.constexpr(not interpreting())


def select_by_bit(hidden: str) -> str:
    """PTX that keeps a float32 where a word has a bit set, else returns `hidden`, in PTX's spelling. ptxas makes one
    instruction for two tests and a select for each, while LLVM would gather the bits in vectors."""
    return f"{{.reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.b32 p, t, 0; selp.f32 $0, $1, {hidden}, p;}}"


MINUS_INFINITY = tl.constexpr(select_by_bit("0fFF800000"))


@record
class Visits:
    """The blocks that a row of blocks visits: first the full ones, then the partial ones. A visit spans 128 positions
    of a loop."""

    entries: tl.tensor  # pointer to (block, pattern) of the first; None without a block mask
    full: tl.tensor  # the positions where the full ones end
    end: tl.tensor
    bits: tl.tensor  # pointer to the patterns
    SIDE: tl.constexpr  # 0: rows are queries, 1: rows are keys


@record
class Tables:
    """A call's block mask, if any, and what its rows of blocks are found by."""

    switches: tuple  # Switches: `mask_starts` is None without a block mask
    num_heads: tl.tensor
    q_tokens: tl.tensor
    k_tokens: tl.tensor
    OF_BATCH: tl.constexpr  # dimensions of the mask
    OF_HEAD: tl.constexpr


@triton.jit
def first_line(starts, batch, head, num_heads, q_tokens, k_tokens, OF_BATCH: tl.constexpr, OF_HEAD: tl.constexpr):
    """Pointer to the rows of blocks of a query head in `starts`."""
    which = 0
    if OF_HEAD:
        which = batch * num_heads + head if OF_BATCH else head
    elif OF_BATCH:
        which = batch
    blocks = (q_tokens + MASK_BLOCK - 1) // MASK_BLOCK + (k_tokens + MASK_BLOCK - 1) // MASK_BLOCK
    return starts + which * (blocks + (q_tokens + MASK_GROUP - 1) // MASK_GROUP) * 4


@triton.jit
def _block_row(number, tables, batch, head, SIDE: tl.constexpr):
    """Pointer to the number-th row of blocks of queries, or of keys with SIDE 1, of a query head in `mask_starts`."""
    line = first_line(
        tables.switches.mask_starts, batch, head, tables.num_heads, tables.q_tokens, tables.k_tokens,
        tables.OF_BATCH, tables.OF_HEAD,
    )  # fmt: skip
    if SIDE:
        number += tl.cdiv(tables.q_tokens, MASK_BLOCK)
    return line + number * 4


@triton.jit
def busiest_first(
    tables, group_size, num_batch_heads, heads_per_section, SIDE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """What this program owns, as (tile, batch * head): tiles of ROWS rows whose blocks have the most visits first.

    group_size: query heads for each of the heads that are counted; the first of them decides the order.
    """
    num_tokens = tables.k_tokens if SIDE else tables.q_tokens
    parts: tl.constexpr = MASK_BLOCK // ROWS
    num_tiles = tl.cdiv(num_tokens, MASK_BLOCK) * parts
    ordinal, batch_head = section_tile(tl.program_id(0), num_tiles, num_batch_heads, heads_per_section, False)
    heads = tables.num_heads // group_size
    batch = batch_head // heads
    head = (batch_head - batch * heads) * group_size
    block = tl.load(_block_row(ordinal // parts, tables, batch, head, SIDE) + 3)
    return block * parts + ordinal % parts, batch_head


@triton.jit
def visits_of(start, tables, batch, head, SIDE: tl.constexpr):
    """The visits of the rows from `start` on, which lie in one block."""
    switches = tables.switches
    entry = _block_row(start // MASK_BLOCK, tables, batch, head, SIDE)
    first = tl.load(entry)
    full, end = (tl.load(entry + 1) - first) * MASK_BLOCK, (tl.load(entry + 2) - first) * MASK_BLOCK
    return Visits(switches.mask_visits + first.to(tl.int64) * 4, full, end, switches.mask_bits, SIDE)


@triton.jit
def owned_queries(
    tables, num_docs, num_batch_heads, heads_per_section, BLOCK_Q: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """What a program of queries owns, as (document, tile inside it, batch * head): see `owned_tile`."""
    if tables.switches.mask_starts is not None:
        tile, batch_head = busiest_first(tables, 1, num_batch_heads, heads_per_section, 0, BLOCK_Q)
        return 0, tile, batch_head
    else:
        starts = tables.switches.cu_seqlens_q
        return owned_tile(tables.q_tokens, starts, num_docs, num_batch_heads, heads_per_section, BLOCK_Q, CAUSAL)


@triton.jit
def keys_met(q_start, mask, tables, batch, head, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """A query tile's visits, without entries where there is no block mask; and the bounds of its key loops, as in
    `visible_keys`."""
    if tables.switches.mask_starts is not None:
        visits = visits_of(q_start, tables, batch, head, 0)
        return visits, 0, visits.full, visits.full, visits.end
    else:
        full_start, full_end, masked_start, masked_end = visible_keys(q_start, mask, BLOCK_Q, BLOCK_K)
        return Visits(None, 0, 0, None, 0), full_start, full_end, masked_start, masked_end


@triton.jit
def visited(position, visits):
    """The first token of the tile at a position; without a block mask the position itself."""
    if visits.entries is None:
        return position
    else:
        place = position // MASK_BLOCK
        return tl.load(visits.entries + place * 4) * MASK_BLOCK + (position - place * MASK_BLOCK)


@triton.jit
def bits_at(position, visits):
    """Where the pattern of the partial block at a position begins."""
    pattern = tl.load(visits.entries + position // MASK_BLOCK * 4 + 1)
    return visits.bits + (pattern.to(tl.int64) * 2 + visits.SIDE) * (MASK_BLOCK * 4)


@triton.jit
def where_shown(logits, bits, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """logits (ROWS, COLS) of the pairs that a pattern shows from (row, col) on, -inf in place of the others.

    In the layout of a product a thread has the same two columns of each eight. So its bits of a row are one word, and
    which of them a register tests is known to the compiler.
    """
    rows = row % MASK_BLOCK + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    pair = cols % 8 // 2
    words = bits.to(tl.pointer_type(tl.int64)) + rows * 2  # two words in one load
    word = tl.where(pair < 2, tl.load(words), tl.load(words + 1)) >> (pair % 2 * 32 + col % MASK_BLOCK // 4)
    bit = cols // 8 * 2 + cols % 2
    if PACKED:
        code: tl.constexpr = MINUS_INFINITY
        return tl.inline_asm_elementwise(
            code, "=f,f,r,r", [logits, word.to(tl.int32), 1 << bit], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.where(((word >> bit) & 1) != 0, logits, -float("inf"))


def mask_constants(options: Options) -> dict[str, bool]:
    """Which dimensions a block mask has; none without a block mask."""
    batch, heads = options.mask_starts.shape[:2] if options.masked else (1, 1)
    return {"MASK_OF_BATCH": batch > 1, "MASK_OF_HEAD": heads > 1}


def tiles_of(options: Options, num_tokens: int, block: int, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """`grid_tiles` of a call; under a block mask the tiles of whole blocks."""
    if options.masked:
        assert BLOCK % block == 0
        return 0, -(-num_tokens // BLOCK) * (BLOCK // block)
    return grid_tiles(num_tokens, block, cu_seqlens)


def is_even(options: Options, num_tokens: int, block: int) -> bool:
    """Whether no loop over tiles of `block` tokens meets a ragged one; under a block mask it visits whole blocks."""
    return not options.packed and num_tokens % (BLOCK if options.masked else block) == 0
