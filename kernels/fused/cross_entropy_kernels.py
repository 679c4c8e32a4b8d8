"""The Triton kernels of cross_entropy.py.

    lse_t  = log sum_j exp(x_tj)          over the columns j < vocab_size
    loss_t = lse_t - x_t,target           0 where the target does not count
    dx_tj  = dloss_t * (exp(x_tj - lse_t) - [j = target])

All are bound by memory: 50,304 bf16 columns are 100 kB a row, read once forward, read and written once backward; where
both are done at once, in place, read and written once in all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import kernel_inputs
from ..portable.tiles import LN_2, LOG2_E

LOWEST = tl.constexpr(-3.0e38)  # a maximum over nothing that stays finite: LOWEST - LOWEST is 0, not NaN


@triton.jit
def _add_columns(x, row_max, row_sum):
    """Add (UNROLL, BLOCK) more base-2 scores to BLOCK running maxima and sums, with one exp2 per score."""
    new_max = tl.maximum(row_max, tl.max(x, 0))
    row_sum = row_sum * tl.exp2(row_max - new_max) + tl.sum(tl.exp2(x - new_max[None, :]), 0)
    return new_max, row_sum


@triton.jit
def _loss_of_row(logits_ptr, target, columns, vocab_size, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """Loss and LSE of the row at `logits_ptr`. Every lane keeps its own online softmax; all are joined at the end.

    UNROLL rows of columns share one rescaling, so that it costs 1 / UNROLL exp2 per score.
    """
    lanes = tl.arange(0, UNROLL)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    lane_max = tl.full([BLOCK], LOWEST, tl.float32)
    lane_sum = tl.zeros([BLOCK], tl.float32)
    counts = target >= 0
    x_target = tl.load(logits_ptr + target, mask=counts & (target < vocab_size), other=float("nan")).to(tl.float32)
    whole = vocab_size // (UNROLL * BLOCK) * (UNROLL * BLOCK)
    for start in range(0, whole, UNROLL * BLOCK):
        x = tl.load(logits_ptr + start + lanes).to(tl.float32) * LOG2_E
        lane_max, lane_sum = _add_columns(x, lane_max, lane_sum)
    # padded columns are read and dropped: a mask at an odd vocabulary size would split the vector loads
    x = tl.load(logits_ptr + whole + lanes, mask=whole + lanes < columns, other=-float("inf"))
    x = tl.where(whole + lanes < vocab_size, x, -float("inf"))
    lane_max, lane_sum = _add_columns(x.to(tl.float32) * LOG2_E, lane_max, lane_sum)

    row_max = tl.max(lane_max, 0)
    row_sum = tl.sum(lane_sum * tl.exp2(lane_max - row_max), 0)
    lse = (row_max + tl.log2(row_sum)) * LN_2
    return tl.where(counts, lse - x_target, 0.0), lse


@triton.jit
def _gradient_of(x, column, target, lse_log2, vocab_size):
    """softmax(x) - [column = target] of one row, fp32; columns from `vocab_size` on get 0."""
    p = tl.where(column < vocab_size, tl.exp2(x.to(tl.float32) * LOG2_E - lse_log2), 0.0)
    return tl.where(column == target, p - 1.0, p)


@triton.jit(do_not_specialize=["vocab_size"])
def cross_entropy_fwd_kernel(
    logits_ptr,  # (T, columns)
    targets_ptr,  # (T,) int64
    loss_ptr,  # (T,) fp32
    lse_ptr,  # (T,) fp32
    row_stride,  # elements
    columns,
    vocab_size,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    loss, lse = _loss_of_row(logits_ptr + row * row_stride, target, columns, vocab_size, BLOCK, UNROLL)
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


@triton.jit(do_not_specialize=["vocab_size"])
def cross_entropy_in_place_kernel(
    logits_ptr,  # (T, columns): read, then overwritten by their gradient
    targets_ptr,  # (T,) int64
    loss_ptr,  # (T,) fp32
    row_stride,  # elements
    columns,
    vocab_size,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One program per row: its loss and LSE, then its gradient for a dloss of 1.

    The second read comes from the L2 cache, which holds the rows of all programs that run together: memory sees one
    read and one write. The sums over the row synchronize all threads before the first write, and afterwards each thread
    writes only where it alone has read.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(targets_ptr + row)
    loss, lse = _loss_of_row(logits_ptr, target, columns, vocab_size, BLOCK, UNROLL)
    tl.store(loss_ptr + row, loss)
    worth = tl.where(target >= 0, 1.0, 0.0)
    lanes = tl.arange(0, UNROLL)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for start in range(0, columns, UNROLL * BLOCK):
        column = start + lanes
        x = tl.load(logits_ptr + column, mask=column < columns, other=0.0)
        dx = worth * _gradient_of(x, column, target, lse * LOG2_E, vocab_size)
        tl.store(logits_ptr + column, dx.to(logits_ptr.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["vocab_size"])
def cross_entropy_bwd_kernel(
    dloss_ptr,  # (T,) fp32
    logits_ptr,  # (T, columns)
    targets_ptr,  # (T,) int64
    lse_ptr,  # (T,) fp32
    dlogits_ptr,  # (T, columns) contiguous
    row_stride,  # of logits, elements
    columns,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """One program per row and BLOCK columns; columns from `vocab_size` on get 0."""
    blocks = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    dloss = tl.where(target >= 0, tl.load(dloss_ptr + row), 0.0)
    lse = tl.load(lse_ptr + row) * LOG2_E
    inside = column < columns
    x = tl.load(logits_ptr + row * row_stride + column, mask=inside, other=-float("inf"))
    dx = dloss * _gradient_of(x, column, target, lse, vocab_size)
    tl.store(dlogits_ptr + row * columns + column, dx.to(dlogits_ptr.dtype.element_ty), mask=inside)


def launch_cross_entropy_fwd(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Loss and LSE of each row, (T,) fp32."""
    (logits,) = kernel_inputs(logits)
    rows = logits.shape[0]
    loss = logits.new_empty(rows, dtype=torch.float32)
    lse = torch.empty_like(loss)
    if rows:
        with torch.cuda.device_of(logits):
            cross_entropy_fwd_kernel[(rows,)](
                logits, targets.contiguous(), loss, lse, logits.stride(0), logits.shape[1], vocab_size,
                BLOCK=1024, UNROLL=4, num_warps=4,
            )  # fmt: skip
    return loss, lse


def launch_cross_entropy_bwd(dloss: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, vocab_size: int) -> Tensor:
    """Gradient of the logits, in their dtype, contiguous."""
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    (logits,) = kernel_inputs(logits)
    # in the interpreter the kernel sees bfloat16 as float32: a copy
    out = dlogits if logits.dtype == dlogits.dtype else torch.empty_like(logits)
    rows, columns = logits.shape
    if rows:
        block = 4096
        with torch.cuda.device_of(logits):
            cross_entropy_bwd_kernel[(rows * triton.cdiv(columns, block),)](
                dloss.contiguous(), logits, targets.contiguous(), lse, out,
                logits.stride(0), columns, vocab_size, BLOCK=block, num_warps=4,
            )  # fmt: skip
    return dlogits if out is dlogits else dlogits.copy_(out)


def launch_cross_entropy_in_place(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Loss of each row, (T,) fp32. Its gradient overwrites the logits, whose rows are contiguous."""
    given, (logits,) = logits, kernel_inputs(logits)  # in the interpreter a copy of bfloat16, as float32
    rows, columns = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(4096, triton.next_power_of_2(columns))
        with torch.cuda.device_of(logits):
            cross_entropy_in_place_kernel[(rows,)](
                logits, targets.contiguous(), loss, logits.stride(0), columns, vocab_size,
                BLOCK=block, UNROLL=2, num_warps=max(1, block // 256),
            )  # fmt: skip
    if logits is not given:
        given.copy_(logits)
    return loss
