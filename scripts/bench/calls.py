"""Attention as benchmarks call it: tensors as a model has them, PyTorch's kernels by name, one pass of a call."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

PASSES = ("forward", "backward")
SDPA = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}


def refuse_uneven_heads(bench: Any) -> None:
    """Raise ValueError unless `bench.hidden` columns are a whole number of heads for each of `bench.head_dim`."""
    for head_dim in bench.head_dim:
        if bench.hidden % head_dim:
            raise ValueError(f"bench.hidden={bench.hidden} is no multiple of bench.head_dim={head_dim}; use one")


def held_to(attention: str) -> AbstractContextManager:
    """Restrict PyTorch's attention to one kernel, where the name is in SDPA."""
    return sdpa_kernel(SDPA[attention]) if attention in SDPA else nullcontext()


def sdpa(name: str, q: Tensor, k: Tensor, v: Tensor, **options: bool) -> Tensor:
    """PyTorch's attention by the kernel of that name. q (B, Hq, Nq, D), k and v (B, Hkv, Nk, D) -> (B, Hq, Nq, D)."""
    with held_to(name):
        return F.scaled_dot_product_attention(q, k, v, **options)


def refusal(name: str) -> tuple[type[Exception], ...]:
    """The exceptions that PyTorch raises where its kernel of that name does not support a call."""
    return (RuntimeError,) if name in SDPA else ()


def tensors(
    batch: int, seq_len: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """q, k, v and dO as a model has them: (B, N, H, D) in memory, seen as (B, H, N, D). They are the same each time."""
    made = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": dtype}
    heads = num_heads, num_kv_heads, num_kv_heads, num_heads
    return [torch.randn(batch, seq_len, number, head_dim, **made).transpose(1, 2) for number in heads]


def one_pass(call: Callable, which: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Callable[[], object]:
    """One pass of call(q, k, v), as a call without arguments. For the backward, the forward runs here."""
    if which == "forward":
        return torch.no_grad()(partial(call, q, k, v))
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return partial(torch.autograd.grad, call(*inputs), inputs, do, retain_graph=True)
