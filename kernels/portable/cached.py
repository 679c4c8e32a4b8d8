"""Where a row's keys and values lie in a cache, contiguous or in pages, and how new ones are written."""

import triton
import triton.language as tl

from .record import record

APPENDED = tl.constexpr(16)  # new tokens that are written together


@record
class Cached:
    """One head of one row of the cache, whose key j lies in slot `pad` + j."""

    pages: tl.tensor  # the row's line of the block table; read only where PAGE
    row: tl.tensor
    head: tl.tensor
    pad: tl.tensor
    strides: tuple  # (row or page, head, slot), elements
    scale_strides: tuple
    HEAD_DIM: tl.constexpr
    BLOCK_D: tl.constexpr
    PAGE: tl.constexpr  # slots of a page; 0: contiguous
    PADDED: tl.constexpr  # `pad` may be other than 0


@triton.jit
def key_pointers(tensor, strides, first, end, cache, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Return pointers to the keys first .. first + COUNT. Those from `end` on may not be read or written.

    TILE: `first` is a multiple of COUNT.
    """
    lanes = tl.arange(0, COUNT)
    base = tensor + cache.head.to(tl.int64) * strides[1]
    if cache.PAGE == 0:
        base += cache.row.to(tl.int64) * strides[0] + (cache.pad + first).to(tl.int64) * strides[2]
        return base + lanes * strides[2]
    elif TILE and not cache.PADDED and cache.PAGE % COUNT == 0:  # all in one page
        page = tl.load(cache.pages + first // cache.PAGE, mask=first < end, other=0)
        base += page.to(tl.int64) * strides[0] + (first % cache.PAGE) * strides[2]
        return base + lanes * strides[2]
    else:
        slots = cache.pad + first + lanes
        page = tl.load(cache.pages + slots // cache.PAGE, mask=first + lanes < end, other=0)
        return base + (page.to(tl.int64) * strides[0] + (slots % cache.PAGE) * strides[2])


@triton.jit
def kept_keys(inside, cache):
    """Return the mask of a tile of keys, which excludes padded columns too."""
    if cache.HEAD_DIM == cache.BLOCK_D:
        return inside[:, None]
    else:
        return inside[:, None] & (tl.arange(0, cache.BLOCK_D) < cache.HEAD_DIM)[None, :]


@triton.jit
def bad_pages(begin, end, num_pages, cache, MOST: tl.constexpr):
    """Whether any page of the keys begin .. end, at most MOST pages, is not in the pool."""
    first, last = (cache.pad + begin) // cache.PAGE, (cache.pad + end - 1) // cache.PAGE
    numbers = first + tl.arange(0, MOST)
    page = tl.load(cache.pages + numbers, mask=(numbers <= last) & (begin < end), other=0)
    return tl.max(((page < 0) | (page >= num_pages)).to(tl.int32), 0) > 0


@triton.constexpr_function
def _largest(stored):
    """Return the largest magnitude that tokens are scaled to in an 8-bit dtype."""
    return 127.0 if stored == tl.int8 else 448.0


@triton.jit
def magnitude(values):
    """Return |values|, fp32, as integers of the same order. NaN is the largest; a maximum of floats would drop it."""
    return tl.abs(values).to(tl.int32, bitcast=True)


@triton.jit
def factor_of(largest, stored: tl.constexpr):
    """Return the scale of a token whose largest `magnitude` is `largest`."""
    factor = tl.math.div_rn(largest.to(tl.float32, bitcast=True), _largest(stored))
    return tl.where(factor < 2.0**-60, 2.0**-60, factor)


@triton.jit
def rounded(values, factor, stored: tl.constexpr):
    """Return values / factor, both fp32 and of one shape, rounded to the nearest numbers of an 8-bit dtype."""
    limit: tl.constexpr = _largest(stored)
    values = tl.math.div_rn(values, factor)
    values = tl.minimum(tl.maximum(values, -limit), limit)
    if stored == tl.int8:
        values = (values + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest integer, ties to even
    return values.to(stored)


@triton.jit
def append(new, tensor, scale, new_strides, first, begin, end, cache, SCALES: tl.constexpr):
    """Write the new tokens of the keys begin .. end to the cache, rounded to its dtype; key `first` is the first new
    one."""
    columns = tl.arange(0, cache.BLOCK_D)
    base = new + cache.row.to(tl.int64) * new_strides[0] + cache.head.to(tl.int64) * new_strides[1]
    for start in range(begin, end, APPENDED):
        keys = start + tl.arange(0, APPENDED)
        inside = keys < end
        keep = kept_keys(inside, cache)
        values = tl.load(base + (keys - first)[:, None] * new_strides[2] + columns[None, :], mask=keep, other=0.0)
        if SCALES > 0:
            values = values.to(tl.float32)
            if SCALES == 2:
                factor = factor_of(tl.max(magnitude(values), 1), tensor.dtype.element_ty)
                tl.store(
                    key_pointers(scale, cache.scale_strides, start, end, cache, APPENDED, False), factor, mask=inside
                )
                values = rounded(values, tl.broadcast_to(factor[:, None], values.shape), tensor.dtype.element_ty)
            else:
                factor = tl.full(values.shape, tl.load(scale + cache.head), tl.float32)
                values = rounded(values, factor, tensor.dtype.element_ty)
        pointers = key_pointers(tensor, cache.strides, start, end, cache, APPENDED, False)
        tl.store(pointers[:, None] + columns[None, :], values.to(tensor.dtype.element_ty), mask=keep)
