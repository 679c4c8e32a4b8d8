"""What a program of the Hopper kernels owns, and which key tiles its rows see.

Dense calls: tiles of 64 * CONSUMERS queries, section after section of heads whose K and V stay in L2 together, or, with
PAIRED, two tiles at a time that make causal pairs of equal work. Packed documents: the tiles of a list, longest first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..portable.record import record
from ..portable.tiles import end_key, end_window_key, first_window_key, section_tile


@record
class Sizes:
    """The sizes of a call, which every role reads."""

    num_heads: gl.tensor  # Hq
    group_size: gl.tensor  # Hq // Hkv
    num_batch_heads: gl.tensor  # B * Hq
    num_q: gl.tensor  # of the program's document, where documents are packed
    num_k: gl.tensor
    heads_per_section: gl.tensor


@record
class Document:
    """Packed documents and the tile of a program's turn, beyond `Sizes`. None is passed instead where nothing is
    packed."""

    tiles: gl.tensor  # pointer to the list of `_document_tiles_kernel`
    count: gl.tensor  # of its tiles
    q_tokens: gl.tensor  # of all documents
    tile: gl.tensor  # the turn's query tile, inside its document
    batch_head: gl.tensor
    q_row0: gl.tensor  # the document's first packed query
    k_row0: gl.tensor
    number: gl.tensor  # of the document


@gluon.jit
def document_turn(turn, sizes, packed):
    """(the document of this program's turn, its sizes). Every second section goes from its shortest tile to its
    longest, so that all programs get the same share of long tiles, however many a section has."""
    ordinal = turn * gl.num_programs(0) + gl.program_id(0)
    number, batch_head = section_tile(ordinal, packed.count, sizes.num_batch_heads, sizes.heads_per_section, False)
    section = batch_head // sizes.heads_per_section
    number = gl.where(section % 2 == 0, number, packed.count - 1 - number)
    row = packed.tiles + (1 + number) * 8
    document = Document(
        packed.tiles, packed.count, packed.q_tokens, gl.load(row), batch_head, gl.load(row + 1), gl.load(row + 3),
        gl.load(row + 5),
    )  # fmt: skip
    its_sizes = Sizes(
        sizes.num_heads, sizes.group_size, sizes.num_batch_heads, gl.load(row + 2), gl.load(row + 4),
        sizes.heads_per_section,
    )  # fmt: skip
    return document, its_sizes


@gluon.jit
def turn_tile(turn, num_tiles, sizes, document, build):
    """The (query tile, batch * head) of this program's turn. With packed documents `document_turn` has already
    found it."""
    if document is not None:
        return document.tile, document.batch_head
    elif build.PAIRED:
        return _paired_tile(turn, num_tiles)
    else:
        ordinal = turn * gl.num_programs(0) + gl.program_id(0)
        return section_tile(ordinal, num_tiles, sizes.num_batch_heads, sizes.heads_per_section, build.CAUSAL)


@gluon.jit
def _paired_tile(turn, num_tiles):
    """Heads come one after the other. A program gets two tiles of a head at a time, the longest and the shortest that
    are left, so that all pairs are equally long. The middle one of an odd number is paired with the next head's."""
    index = ((turn // 2) * gl.num_programs(0) + gl.program_id(0)) * 2 + turn % 2
    head = index // num_tiles
    rank = index - head * num_tiles
    if num_tiles % 2 == 1 and head % 2 == 1:
        rank = gl.where(rank == 0, num_tiles - 1, rank - 1)
    return gl.where(rank % 2 == 0, num_tiles - 1 - rank // 2, rank // 2), head


@gluon.jit
def num_turns(num_tiles, sizes, document, build):
    """How many tiles this program works on, of num_tiles for each head."""
    if document is not None:
        total = document.count * sizes.num_batch_heads
        return (total - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    else:
        at_a_time: gl.constexpr = 2 if build.PAIRED else 1
        total = num_tiles * sizes.num_batch_heads
        shares = (total + at_a_time - 1) // at_a_time
        own = (shares - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
        last = gl.program_id(0) + (own - 1) * gl.num_programs(0)  # the last share may be half a pair
        return own * at_a_time - gl.where(last * at_a_time + at_a_time > total, 1, 0)


@gluon.jit
def batch_and_head(batch_head, num_heads, document):
    """The coordinates of a head; packed documents have B = 1."""
    if document is not None:
        return 0, batch_head
    else:
        batch = batch_head // num_heads
        return batch, batch_head - batch * num_heads


@gluon.jit
def first_rows(document):
    """The first packed row of the program's document, as (query, key); (0, 0) where nothing is packed."""
    if document is not None:
        return document.q_row0, document.k_row0
    else:
        return 0, 0


@gluon.jit
def lse_row(lse_ptr, batch_head, num_q, document):
    """Where the LSE of row 0 is."""
    if document is not None:
        return lse_ptr + batch_head.to(gl.int64) * document.q_tokens + document.q_row0
    else:
        return lse_ptr + batch_head.to(gl.int64) * num_q


@gluon.jit
def tile_rows(tile, num_tiles, num_q, CONSUMERS: gl.constexpr):
    """Rows (first, end) of a query tile. Where 64 * CONSUMERS does not divide Nq the first tile is the smaller one, and
    its first row is negative: under the causal mask the first tile sees the fewest keys."""
    end = (tile - num_tiles) * (64 * CONSUMERS) + (num_q + 63) // 64 * 64 + 64 * CONSUMERS
    return end - 64 * CONSUMERS, end


@gluon.jit
def key_tiles(row, end_row, mask, BLOCK_K: gl.constexpr):
    """Key tiles of rows row .. end_row: (first, end) of those visited, (full_first, full_end) of those among them that
    need no mask; full_end <= full_first where none is.

    At least one is visited: its mask then gives the rows that see nothing their zeros. 0 <= row < num_q.
    """
    if mask.LOCAL:
        first_row = row + mask.num_k - mask.num_q  # in keys: where the query stands
        last_row = gl.minimum(end_row, mask.num_q) - 1 + mask.num_k - mask.num_q
        first = first_window_key(first_row, mask) // BLOCK_K
        full_first = (first_window_key(last_row, mask) + BLOCK_K - 1) // BLOCK_K
        seen_by_first = end_window_key(first_row, mask)
        seen_by_last = end_window_key(last_row, mask)
    else:
        first = 0
        full_first = 0
        seen_by_first = end_key(row + 1, mask)
        seen_by_last = end_key(gl.minimum(end_row, mask.num_q), mask)
    end = gl.maximum((seen_by_last + BLOCK_K - 1) // BLOCK_K, first + 1)
    return first, end, full_first, seen_by_first // BLOCK_K
