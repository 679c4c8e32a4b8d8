"""Documents of some rows of a batch, as the model takes them."""

import torch
from torch import Tensor

from kernels import place_documents


def packed_rows(
    starts: Tensor | None, first_row: int, num_rows: int, seq_len: int, device: torch.device
) -> dict[str, Tensor]:
    """The argument `cu_seqlens` of the model for rows first_row .. first_row + num_rows - 1; {} where starts is None.

    starts: `data.document_starts` of a whole (rows, seq_len) batch. Every row begins a document, so rows can be taken
    out.
    """
    if starts is None:
        return {}
    first, end = first_row * seq_len, (first_row + num_rows) * seq_len
    inside = starts[(starts >= first) & (starts < end)] - first
    cu_seqlens = place_documents(torch.cat([inside, inside.new_tensor([end - first])]), seq_len, device)
    torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)  # their number changes; a compiled model serves them all
    return {"cu_seqlens": cu_seqlens}
