"""What a valid attention call is: checks shared by all implementations, with the same words."""

import math

import torch
from torch import Tensor


def check_inputs(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> float:
    """Check q (B, Hq, Nq, D) against k and v (B, Hkv, Nk, D) and return the softmax scale.

    The default is 1/sqrt(D).

    Raises ValueError, naming the argument, its value and what is allowed.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; expected 4 dimensions (batch, heads, tokens, head_dim)"
            )
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name} has dtype {tensor.dtype}; expected a floating point dtype")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype} but q has {q.dtype}; cast them to one dtype")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} but q is on {q.device}; move them to one device")
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch size {tensor.shape[0]} but q has {q.shape[0]}; they must be equal")
        if tensor.shape[3] != q.shape[3]:
            raise ValueError(f"{name} has head_dim {tensor.shape[3]} but q has {q.shape[3]}; they must be equal")
    if k.shape != v.shape:
        raise ValueError(f"v has shape {tuple(v.shape)} but k has {tuple(k.shape)}; they must be equal")
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads != 0:
        raise ValueError(f"q has {num_heads} heads; it must be a multiple of k's {num_kv_heads} heads")
    if q.shape[3] == 0:
        raise ValueError("q has head_dim 0; it must be at least 1")
    if scale is None:
        return q.shape[3] ** -0.5
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be a finite number")
    return float(scale)


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k, v to autocast's dtype where autocast is on, as PyTorch's own attention does."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    # float64 stays as it is: autocast leaves it alone everywhere in PyTorch
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
