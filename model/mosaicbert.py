"""Our attention in MosaicBERT's code, which DNABERT-2 ships: ALiBi, padding, bidirectional, in linear memory.

    from model.mosaicbert import patch
    patch(their_model)

That code's own kernel does not compile on Triton 2.0 or later, and its other path needs a bias (B, H, N, N). Here its
self-attention, whose tokens are already unpadded, calls our kernels, and the bias is never built. transformers 5
cannot load such a model, as it builds that bias while tensors have no values; a class can be patched before:

    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    name = "zhihan1996/DNABERT-2-117M"
    their_model = patch(get_class_from_dynamic_module("bert_layers.BertForMaskedLM", name)).from_pretrained(name)
"""

import sys
from functools import lru_cache
from types import MethodType
from typing import TypeVar

import torch
from torch import Tensor, nn

from kernels import flash_attention_varlen, tiled_attention_varlen, why_not

ATTENTION, ENCODER = "BertUnpadSelfAttention", "BertEncoder"
Target = TypeVar("Target", nn.Module, type)


def patch(target: Target) -> Target:
    """Give each layer of a BERT of MosaicBERT's code our attention, in place; returns it.

    The results are those of its PyTorch path up to rounding, in any dtype of ours, with its dropout in training. For a
    class, its module's self-attention and encoder classes are patched, and so every model that is made of them.

    Raises:
        ValueError: a model of other code, or one whose ALiBi slopes are not those of the paper.
    """
    if isinstance(target, type):
        classes = vars(sys.modules[target.__module__])
        attentions, encoders = ([classes[name]] if name in classes else [] for name in (ATTENTION, ENCODER))
    else:
        attentions, encoders = ([m for m in target.modules() if type(m).__name__ == n] for n in (ATTENTION, ENCODER))
    if not attentions or not encoders or not all(hasattr(x, "rebuild_alibi_tensor") for x in encoders):
        name = target.__name__ if isinstance(target, type) else type(target).__name__
        raise ValueError(f"{name} has no {ATTENTION} and {ENCODER} of MosaicBERT's code; give a DNABERT-2")
    if isinstance(target, type):
        attentions[0].forward, encoders[0].rebuild_alibi_tensor = _attention, _no_table
        return target
    for encoder in encoders:
        _refuse_other_slopes(encoder.alibi, encoder.num_attention_heads)
        _no_table(encoder, device=next(encoder.parameters()).device)
    for module in attentions:
        module.forward = MethodType(_attention, module)
    return target


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8 (i + 1) / n) for n heads; where n is no power of two, those of the next lower power and then every second
    one of the next higher power. Source: Press et al., arXiv:2108.12409, section 3 and its code."""
    whole = 1 << heads.bit_length() - 1
    steps = [(i + 1) / whole for i in range(whole)] + [(i + 0.5) / whole for i in range(heads - whole)]
    return [2.0 ** (-8 * step) for step in steps]


def _attention(
    self: nn.Module,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    max_seqlen_in_batch: int,
    indices: Tensor,
    attn_mask: Tensor,
    bias: Tensor,
) -> Tensor:
    """The self-attention's forward: (tokens, C) of all rows end to end, without padding -> (tokens, C)."""
    q, k, v = self.Wqkv(hidden_states).unflatten(-1, (3, self.num_attention_heads, -1)).unbind(1)  # (tokens, H, D)
    bounds = (cu_seqlens, cu_seqlens, max_seqlen_in_batch, max_seqlen_in_batch)
    attend = flash_attention_varlen
    if q.device.type == "cpu" and why_not("flash", q.dtype, device=q.device):  # without the interpreter
        attend = tiled_attention_varlen
    slopes = _slopes_on(q.device, len(cu_seqlens) - 1, self.num_attention_heads)
    dropout = self.dropout.p if self.training else 0.0
    return attend(q, k, v, *bounds, alibi_slopes=slopes, dropout_p=dropout).flatten(1)


def _no_table(self: nn.Module, size: int = 0, device: torch.device | str | None = None) -> None:
    """Replaces the building of the table: one 0, which broadcasts to every length and is never too small."""
    self.alibi, self._current_alibi_size = torch.zeros(1, 1, 1, 1, device=device or "cpu"), 2**62


@lru_cache  # not in the model, whose cast to 16 bits would round them
@torch.inference_mode(False)  # the cached tensors may be used in training later
def _slopes_on(device: torch.device, rows: int, heads: int) -> Tensor:
    """The slopes (rows, heads) as the kernels read them, so that no layer copies them into that form."""
    return torch.tensor(alibi_slopes(heads), device=device).repeat(rows, 1)


def _refuse_other_slopes(table: Tensor, heads: int) -> None:
    """ValueError where a model's own table (1, H, N, N) differs from ours; a table without values is not read."""
    if table.is_meta or table.shape[-1] < 2 or table.shape[1] != heads:
        return
    theirs, ours = -table[0, :, 0, 1].float().cpu(), torch.tensor(alibi_slopes(heads))
    if not torch.allclose(theirs, ours, rtol=1e-2):  # the table may be in 16 bits
        raise ValueError(
            f"this model's ALiBi slopes run from {theirs[0]:.4f} to {theirs[-1]:.4f}, ours from {ours[0]:.4f} "
            f"to {ours[-1]:.4f}: it is no DNABERT-2"
        )
