"""Looking up rows of a table, with a gradient whose bits are the same in every run.

A token that occurs often has many gradients to add up in its row. A compiler adds them with atomics, in whatever order
the threads arrive, and two runs of the same step differ in their last bits (seen with Inductor on a CPU). PyTorch's own
backward sorts the tokens first; behind an operator of ours it also runs under torch.compile.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.support import refuse_torch_func


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` (V, C) for `tokens` (...) int64: (..., C)."""
    refuse_torch_func("a GPT's embedding", "torch.autograd.grad")
    return _Embed.apply(tokens, table)


@torch.library.custom_op("flashgpt::embedding_bwd", mutates_args=())
def embedding_bwd(do: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """The gradient of a table of `rows` rows, (rows, C), from that of the rows looked up, (..., C)."""
    # where few rows are looked up often, PyTorch 2.11 adds with atomics on a GPU too, unless it is told not to
    mode, filled = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        return torch.ops.aten.embedding_dense_backward(do, tokens, rows, -1, False)  # no padding row, no scaling
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = filled


@embedding_bwd.register_fake
def _(do, tokens, rows):
    return do.new_empty(rows, do.size(-1))


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = table.size(0)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx, do: Tensor) -> tuple[None, Tensor]:
        return None, embedding_bwd(do, *ctx.saved_tensors, ctx.rows)
