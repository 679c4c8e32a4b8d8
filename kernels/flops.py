"""FLOP formulas of our operators for PyTorch's FlopCounterMode. As for PyTorch's own, masked pairs count too."""

import operator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .call import Options
from .device import OPERATORS


def register_flop_formulas() -> None:
    """Register our formulas with the active FLOP counters.

    Registering them once, by `register_flop_formula`, would import torch.utils.flop_counter and with it Triton.
    """
    if torch.compiler.is_compiling():
        return
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if registry is not None:
            ours = getattr(torch.ops, OPERATORS)
            attention = {ours.flash_fwd: _forward, ours.flash_bwd: _backward, ours.flash_kvcache: _kvcache}
            registry |= attention | {ours.linear_cross_entropy_fwd: _head}


def _forward(q: Tensor, k: Tensor, v: Tensor, *options, out_val) -> int:
    return 2 * _pairs(q, k, *options) * (q.shape[3] + v.shape[3])


def _backward(do, dlse, q: Tensor, k: Tensor, v: Tensor, o, lse, *options, out_val) -> int:
    """The scores again, dP, dV, dQ and dK."""
    return 2 * _pairs(q, k, *options) * (3 * q.shape[3] + 2 * v.shape[3])


def _pairs(q: Tensor, k: Tensor, *options) -> int:
    batch, heads, num_q, _ = q.shape
    options = Options(*options)
    if options.packed:
        from torch.utils.flop_counter import _offsets_to_lengths  # also for fake documents of unknown lengths

        lengths_q = _offsets_to_lengths(options.cu_seqlens_q, options.max_seqlen_q)
        lengths_k = _offsets_to_lengths(options.cu_seqlens_k, options.max_seqlen_k)
        return heads * sum(map(operator.mul, lengths_q, lengths_k))
    return batch * heads * num_q * k.shape[2]


def _kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k_new, v_new, seqlens: Tensor, leftpad: Tensor | None = None, *others,
    out_val,
) -> int:  # fmt: skip
    """Counts the keys that each row has, not its capacity, so reading the lengths waits for the GPU."""
    no_values = isinstance(seqlens, FakeTensor) or seqlens.is_meta
    if no_values or (seqlens.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise ValueError(
            "FLOPs of attention over a cache follow from the values of cache_seqlens, which a fake tensor, the meta "
            "device and a CUDA graph's capture do not have; count a call that has them"
        )
    _, heads, num_q, head_dim = q.shape
    new = 0 if k_new is None else num_q
    pads = [0] * len(seqlens) if leftpad is None else leftpad.tolist()
    num_k = sum(length + new - pad for length, pad in zip(seqlens.tolist(), pads, strict=True) if length >= 0)
    return 2 * heads * num_q * num_k * 2 * head_dim


def _head(h: Tensor, weight: Tensor, targets, vocab_size, chunk_tokens, with_gradient: bool, out_val) -> int:
    """The logits, and with gradients also dh and dW."""
    return 2 * (3 if with_gradient else 1) * h.shape[0] * weight.numel()
