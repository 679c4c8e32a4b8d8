"""Any mask as data: which blocks of 128 x 128 pairs to visit, which of them are partial, and the bits of those.

A mask is built once, without a compiler and without Nq x Nk booleans in memory, and is then read by the kernels forward
and backward: FlexAttention's idea (arXiv:2412.05496) with tables in place of generated code.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .mask_bounds import Undecided, decided_blocks
from .mask_visits import BLOCK, GROUP, packed, visits_and_bits

MOST_TOKENS = 2**15 * BLOCK  # one int32 packs a block's number and the count of larger ones
HIDDEN, FULL = -2, -1  # entries of `block_table`; the other entries are pattern numbers
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_PAIRS = 2**25  # pairs evaluated at a time: 32 MiB of booleans


def _outside_graphs(build: Callable) -> Callable:
    """`build`, where torch.compile breaks its graph: a mask is made from values, by numpy."""

    @wraps(build)
    def built(*arguments, **options):
        run = torch.compiler.disable(build) if torch.compiler.is_compiling() else build
        return run(*arguments, **options)

    return built


class BlockMask(NamedTuple):
    """Which query sees which key, for a batch of 1 or B and for 1 or Hq heads; made by `block_mask` or `from_dense`.

    The kernels trust the tensors without checks: never change a mask, make another one.
    """

    starts: Tensor  # (batch, heads, blocks of queries, then of keys, then groups of 192 queries, 4) int32: first visit
    # of a full block, first of a partial one, end; and, in row n, the row of the same kind with the n-th most visits
    visits: Tensor  # (1 + all, 4) int32: block, pattern. The first shows nothing and serves rows without visits; then
    # come those of the queries, the keys and the groups. For keys, columns 2 and 3 hold the row's n-th visit in block
    # order: block + 2^16 * (how many larger blocks of keys visit that block), pattern. A group lies in two rows of
    # blocks and has two patterns; its full blocks are those where both are full
    bits: Tensor  # (patterns, 256, 4) int32: rows of queries over keys, then rows of keys over queries. Word i has
    # columns 2 i and 2 i + 1 of every eight, which one thread holds in a tensor-core product. Pattern 0 is that of a
    # full block, pattern 1 shows nothing
    num_q: int
    num_k: int

    @staticmethod
    @_outside_graphs
    def from_dense(visible: Tensor) -> "BlockMask":
        """The mask of booleans (Nq, Nk), (H, Nq, Nk) or (B, H, Nq, Nk), True where a query sees a key.

        Raises ValueError where visible is something else.
        """
        if not isinstance(visible, Tensor):
            raise ValueError(f"visible has type {type(visible).__name__}; expected a tensor of booleans")
        if visible.dtype != torch.bool or visible.dim() not in (2, 3, 4):
            raise ValueError(
                f"visible has dtype {visible.dtype} and shape {tuple(visible.shape)}; "
                "expected booleans (Nq, Nk), (H, Nq, Nk) or (B, H, Nq, Nk)"
            )
        _with_values(visible.device)
        visible = visible[(None,) * (4 - visible.dim())]
        _check_sizes(**dict(zip(("B", "H", "Nq", "Nk"), visible.shape, strict=True)))
        return _of_booleans(visible)

    @staticmethod
    def from_torch(mask: object, num_q: int | None = None, num_k: int | None = None) -> "BlockMask":
        """Convert torch's BlockMask with blocks of 128. Its lists say which blocks are visited. Its mask_mod is
        evaluated once inside partial blocks: a later change of what it reads does not change the result. A call of
        attention converts such a mask by itself, once per mask, but not inside one graph of torch.compile.

        num_q, num_k: tokens, where the mask's own lengths are these padded to whole blocks; None: the mask's own.

        Raises ValueError where mask is not torch's BlockMask, or its blocks have another size or number.
        """
        if not hasattr(mask, "kv_num_blocks"):
            raise ValueError(f"mask has type {type(mask).__name__}; expected torch's BlockMask")
        return _from_torch(mask, num_q or mask.seq_lengths[0], num_k or mask.seq_lengths[1])

    def to(self, device: torch.device | str) -> "BlockMask":
        """The same mask on a device. Raises ValueError on a dtype: it has none."""
        if isinstance(device, torch.dtype):
            raise ValueError(f"a block mask has no dtype; give a device in place of {device}")
        return BlockMask(*(x.to(device) for x in self[:3]), self.num_q, self.num_k)

    def dense(self) -> Tensor:
        """The mask as booleans (batch, heads, Nq, Nk)."""
        rows, cols = (torch.arange(n, device=self.bits.device) for n in (self.num_q, self.num_k))
        return pairs_of(*self[:3], rows[:, None], cols[None, :], self.num_q, self.num_k)

    def counts(self) -> dict[str, int]:
        """Blocks in all, visited and partial, over the mask's batch and heads. Waits for the GPU."""
        table = block_table(self.starts, self.visits, self.num_q, self.num_k)
        return {"blocks": table.numel(), "visited": int((table != HIDDEN).sum()), "partial": int((table >= 0).sum())}


torch.serialization.add_safe_globals([BlockMask])  # tensors and two numbers, so torch.load may accept it


@_outside_graphs
def block_mask(
    mask_mod: MaskMod, B: int | None, H: int | None, Nq: int, Nk: int, device: torch.device | str = "cuda"
) -> BlockMask:
    """Build the mask of a function, with FlexAttention's signature.

    Args:
        mask_mod: mask_mod(b, h, q, k) -> () bool, whether query q sees key k, for () int64 tensors on `device`. It is
            called for many pairs at once, under `torch.vmap` unless mask_bounds.py can follow it. What it reads must be
            on `device`.
        B, H: batch size and number of query heads; None or 1 where the mask does not depend on them.
        Nq, Nk: numbers of queries and keys, both counted from 0.
        device: where the mask is evaluated and kept.

    Raises ValueError where mask_mod does not return booleans or cannot be evaluated, for sizes below 1 or too large,
    and for a device that is not present or holds no values. torch.compile breaks its graph at a mask that is built.
    """
    sizes = 1 if B is None else B, 1 if H is None else H, Nq, Nk
    _check_sizes(**dict(zip(("B", "H", "Nq", "Nk"), sizes, strict=True)))
    device = _with_values(device)
    each = mask_mod
    try:
        full, some = torch.stack(decided_blocks(mask_mod, sizes, BLOCK, device)).cpu().numpy()
    except Undecided:
        each = _vmapped(mask_mod)
        blocks = [*sizes[:2], -(-Nq // BLOCK), -(-Nk // BLOCK)]
        full, some = np.zeros(blocks, bool), np.ones(blocks, bool)
    return _evaluate_partial_blocks(each, full, some & ~full, Nq, Nk, device)


def check_block_mask(given: object, batch: int, heads: int, num_q: int, num_k: int, device: torch.device) -> tuple:
    """(starts, visits, bits) of a mask, ours or torch's, for a call of these sizes. Raises ValueError."""
    if isinstance(given, BlockMask):
        mask = given
    elif hasattr(given, "kv_num_blocks"):
        if torch.compiler.is_compiling():
            raise ValueError(
                "block_mask is torch's; outside of torch.compile make it kernels.BlockMask.from_torch(block_mask)"
            )
        mask = _from_torch(given, num_q, num_k)
    else:
        raise ValueError(
            f"block_mask has type {type(given).__name__}; expected a kernels.BlockMask, as kernels.block_mask and "
            "BlockMask.from_dense make it, or torch's BlockMask"
        )
    if (mask.num_q, mask.num_k) != (num_q, num_k):
        raise ValueError(f"block_mask is of {mask.num_q} x {mask.num_k} tokens; q and k have {num_q} x {num_k}")
    for name, found, allowed in (("batch", mask.starts.shape[0], batch), ("heads", mask.starts.shape[1], heads)):
        if found not in (1, allowed):
            raise ValueError(f"block_mask has a {name} dimension of {found}; it must be 1 or q's {allowed}")
    lines = -(-num_q // BLOCK) - (-num_k // BLOCK) - (-num_q // GROUP)
    if mask.starts.shape[2] != lines or mask.bits.shape[1:] != (2 * BLOCK, 4):
        raise ValueError("block_mask was saved by another version of these kernels; make it again")
    if mask.starts.device != device:
        raise ValueError(f"block_mask is on {mask.starts.device} but q is on {device}; move them to one device")
    return mask[:3]


def block_table(starts: Tensor, visits: Tensor, num_q: int, num_k: int) -> Tensor:
    """(batch, heads, blocks of queries, blocks of keys) int64: HIDDEN, FULL or the number of the block's pattern."""
    q_blocks, k_blocks = -(-num_q // BLOCK), -(-num_k // BLOCK)
    first, first_partial, end = starts[:, :, :q_blocks, :3].flatten(0, 2).unbind(1)
    place = torch.arange(visits.shape[0], device=visits.device, dtype=torch.int32)
    row = torch.searchsorted(first.contiguous(), place, right=True) - 1  # of rows that begin there, the last owns it
    entry = torch.where(place < first_partial[row], FULL, visits[:, 1].long())
    pairs = first.numel() * k_blocks
    at = torch.where((place > 0) & (place < end[-1]), row * k_blocks + visits[:, 0], pairs)  # others: past the end
    table = torch.full((pairs + 1,), HIDDEN, device=visits.device).scatter(0, at, entry)
    return table[:pairs].view(*starts.shape[:2], q_blocks, k_blocks)


def pairs_of(
    starts: Tensor, visits: Tensor, bits: Tensor, rows: Tensor, cols: Tensor, num_q: int, num_k: int
) -> Tensor:
    """Booleans (batch, heads, rows, cols) of queries (rows, 1) and keys (1, cols): the definition of the mask."""
    entry = block_table(starts, visits, num_q, num_k)[:, :, rows // BLOCK, cols // BLOCK]
    word = bits.flatten()[(entry.clamp(min=0) * 2 * BLOCK + rows % BLOCK) * 4 + cols % 8 // 2]
    bit = word >> (cols % BLOCK // 8 * 2 + cols % 2).to(torch.int32) & 1
    return (entry == FULL) | (entry >= 0) & (bit == 1)


# ---- building


def _of_booleans(visible: Tensor) -> BlockMask:
    """visible (B, H, Nq, Nk). Rows past Nq repeat the last one, so that they make no block partial."""
    batch, heads, num_q, num_k = visible.shape
    q_blocks, k_blocks = -(-num_q // BLOCK), -(-num_k // BLOCK)
    lines = batch * heads * q_blocks  # of blocks
    step = max(1, _PAIRS // (BLOCK * BLOCK * k_blocks))
    full, partial, bits = [], [], []
    for first in range(0, lines, step):
        row = torch.arange(first * BLOCK, min(first + step, lines) * BLOCK, device=visible.device)
        of_head, q = row // (q_blocks * BLOCK), row % (q_blocks * BLOCK)
        seen = visible[of_head // heads, of_head % heads, q.clamp(max=num_q - 1)]
        seen = torch.nn.functional.pad(seen, (0, -num_k % BLOCK)).contiguous()
        eights = seen.view(torch.int64).view(-1, BLOCK, k_blocks, BLOCK // 8)  # booleans as bytes of 0 or 1
        # each byte counts 128 rows
        count = eights.sum(1).view(torch.uint8).view(-1, k_blocks, BLOCK).sum(-1)
        full.append(count == BLOCK * BLOCK)
        partial.append((count > 0) & ~full[-1])
        bits.append(packed(eights.transpose(1, 2)[partial[-1]].view(torch.bool)))
    tables = (torch.cat(x).view(batch, heads, q_blocks, k_blocks).cpu().numpy() for x in (full, partial))
    return BlockMask(*visits_and_bits(*tables, bits, num_q, visible.device), num_q, num_k)


def _evaluate_partial_blocks(
    each: MaskMod, full: np.ndarray, asked: np.ndarray, num_q: int, num_k: int, device: torch.device
) -> BlockMask:
    """The mask with the `full` blocks, the `asked` blocks as `each` evaluates them, and nothing visible elsewhere.

    each: mask_mod for tensors that broadcast.
    full, asked: (B, H, blocks of queries, blocks of keys) bool.
    """
    if num_k % BLOCK:  # keys past Nk are hidden, so full blocks of the last column become partial
        asked = asked.copy()
        asked[..., -1] |= full[..., -1]
    # numpy finds them three times as fast in one dimension as in four
    places = np.array(np.unravel_index(np.flatnonzero(asked), asked.shape))
    places[2:] *= BLOCK
    if num_k % BLOCK:
        places = np.concatenate((places, full[asked][None]))
    at, within, step = torch.from_numpy(places).to(device), _within(device), max(1, _PAIRS // BLOCK**2)
    bits = []
    for first in range(0, at.shape[1], step):
        part = at[:, first : first + step]
        rows, cols = part[2:4, :, None] + within
        if num_q % BLOCK:
            rows = rows.clamp(max=num_q - 1)
        keys = cols.clamp(max=num_k - 1) if num_k % BLOCK else cols
        try:
            seen = each(*part[:2, :, None, None], rows[:, :, None], keys[:, None]).expand(-1, BLOCK, BLOCK)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:  # of vmap, which supports neither `if` nor `and`
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"mask_mod cannot be evaluated ({reason}); use &, | and torch.where of tensors where it has if, and, "
                f"or, and read what is on {within.device}"
            ) from error
        except (IndexError, TypeError) as error:
            raise ValueError(
                f"mask_mod cannot be evaluated ({error}); it must be a function of (b, h, q, k), for q up to "
                f"{num_q - 1} and k up to {num_k - 1}"
            ) from error
        if seen.dtype != torch.bool or seen.device != within.device:
            raise ValueError(
                f"mask_mod returned {seen.dtype} on {seen.device}; it must return a boolean, True where the query sees "
                f"the key, and read what is on {within.device}"
            )
        if num_k % BLOCK:
            seen = (seen | part[4].bool()[:, None, None]) & (cols < num_k)[:, None, :]
        bits.append(packed(seen))
    return BlockMask(*visits_and_bits(full & ~asked, asked, bits, num_q, within.device), num_q, num_k)


def _vmapped(mask_mod: MaskMod) -> MaskMod:
    """mask_mod for b and h (n, 1, 1), q (n, rows, 1) and k (n, 1, cols), called with () tensors only."""
    each = torch.vmap(torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None)))
    return lambda b, h, q, k: each(b[:, 0, 0], h[:, 0, 0], q[:, :, 0], k[:, 0])


@cache
@torch.inference_mode(False)  # the next caller may be outside inference mode
def _within(device: torch.device) -> Tensor:
    return torch.arange(BLOCK, device=device)


# ---- torch's BlockMask

# the attribute of torch's mask that holds ours, for all layers of a model, with what it was made of; a table would keep
# masks alive whose mask_mod references them
_CONVERSION = "_converted_for_flash_attention"


class _Conversion(tuple):
    """Not copied or pickled with torch's mask: a copied tensor counts its versions anew."""

    def __reduce__(self):
        return tuple, ()


def version_of(x: Tensor) -> int:
    """How often x was written to; 0 for inference tensors, which do not count writes."""
    return 0 if x.is_inference() else x._version


@_outside_graphs
def _from_torch(given, num_q: int, num_k: int) -> BlockMask:
    """Convert torch's mask once for each version of its lists, which waits for the GPU."""
    lists = [(given.kv_num_blocks, given.kv_indices), (given.full_kv_num_blocks, given.full_kv_indices)]
    parts = given.mask_mod, *sum(lists, ())
    versions = num_q, num_k, *(x if x is None else version_of(x) for x in parts[1:])
    kept = getattr(given, _CONVERSION, None)
    if kept and kept[0] == versions and all(a is b for a, b in zip(kept[1], parts, strict=True)):
        return kept[2]
    if tuple(given.BLOCK_SIZE) != (BLOCK, BLOCK):
        raise ValueError(f"block_mask has BLOCK_SIZE {given.BLOCK_SIZE}; make it with BLOCK_SIZE={BLOCK}")
    _check_sizes(Nq=num_q, Nk=num_k)
    q_blocks, k_blocks = -(-num_q // BLOCK), -(-num_k // BLOCK)
    numbers = given.kv_num_blocks
    if any(
        not small <= long <= BLOCK * blocks
        for small, long, blocks in zip((num_q, num_k), given.seq_lengths, (q_blocks, k_blocks), strict=True)
    ):
        raise ValueError(f"block_mask is torch's of {tuple(given.shape)}; q and k have {num_q} x {num_k} tokens")
    if numbers.dim() != 3 or numbers.shape[2] != q_blocks:  # sliced: its seq_lengths stay
        raise ValueError(
            f"block_mask has kv_num_blocks {tuple(numbers.shape)}; {num_q} queries have {q_blocks} blocks: (B, H, "
            f"{q_blocks})"
        )
    partial = _listed(*lists[0], k_blocks)
    full = torch.zeros_like(partial) if lists[1][0] is None else _listed(*lists[1], k_blocks)
    full, partial = full.cpu().numpy(), partial.cpu().numpy()
    mask = _evaluate_partial_blocks(
        _vmapped(given.mask_mod), full, partial & ~full, num_q, num_k, given.kv_num_blocks.device
    )
    setattr(given, _CONVERSION, _Conversion((versions, parts, mask)))
    return mask


def _listed(numbers: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """Which blocks (batch, heads, blocks of queries, blocks of keys) torch's lists name."""
    named = torch.arange(indices.shape[-1], device=indices.device) < numbers[..., None]
    table = torch.zeros(*numbers.shape, blocks + 1, dtype=torch.bool, device=indices.device)
    return table.scatter_(-1, torch.where(named, indices, blocks).long(), True)[..., :blocks]


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; it must be an integer of at least 1")
        if name in ("Nq", "Nk") and size > MOST_TOKENS:
            raise ValueError(f"{name} is {size:,}; a block mask takes at most {MOST_TOKENS:,} tokens")


def _with_values(device: torch.device | str) -> torch.device:
    """Check that PyTorch has the device here and that it holds values, which a mask is made from; return it.

    Raises ValueError.
    """
    with suppress(RuntimeError, AssertionError):
        if isinstance(empty := torch.empty(0, device=device), FakeTensor):
            raise ValueError("a mask is made from values, which FakeTensorMode has not; make it before")
        if empty.device.type != "meta":
            return empty.device  # with its index: what is cached for it stays on one GPU
    raise ValueError(f"device={device} is not there or keeps no values; give device='cpu'")
