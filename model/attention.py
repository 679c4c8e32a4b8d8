"""Attention by name: the one place where the model chooses the implementation of softmax(q k^T) v.

Every function takes q (B, Hq, Nq, D), k and v (B, Hkv, Nk, D), where Hq is a multiple of Hkv, and returns
(B, Hq, Nq, D) in q's dtype. The causal mask is aligned bottom-right: query i sees key j when
j <= i + Nk - Nq, so the last query always sees every key. `scale` defaults to 1 / sqrt(D).

`window` (left, right) also hides keys further than that from the diagonal; -1 is no bound. A `block_mask` replaces
`causal` and `window`. With `documents`, a `Documents`, B is 1 and tokens see only their own document. `dropout_p` drops
probabilities by a mask that is a function of a seed drawn from torch's generator and the same in every backend. sdpa
refuses dropout, windows and documents. kernels/support.py lists what each backend can do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels

AttentionFunction = Callable[..., Tensor]
ALL = (-1, -1)  # a window without bounds
SHORT = 256  # tokens, up to which scores take less memory than the rest of what a block keeps for its backward


class Documents(NamedTuple):
    """Documents end to end in one row of tokens."""

    cu_seqlens: Tensor  # (documents + 1,) int32: where each starts, and the number of tokens
    max_seqlen: int  # an upper bound on a document's length


class Part(NamedTuple):
    """Positions and documents of a process's tokens in rows that several processes share (training/context.py)."""

    positions: Tensor  # (N,) int64: each token's position in its row or document
    documents: Any  # as the methods of model/context.py accept them


def _packing(documents: Documents | None) -> dict:
    """The documents as keyword arguments of kernels/."""
    return {} if documents is None else {"cu_seqlens": documents.cu_seqlens, "max_seqlen": documents.max_seqlen}


def flash(q: Tensor, k: Tensor, v: Tensor, *, documents: Documents | None = None, **options) -> Tensor:
    """Our Triton kernels: nothing of size Nq x Nk in memory, forward or backward."""
    return kernels.flash_attention(q, k, v, **_packing(documents), **options)


def naive(q: Tensor, k: Tensor, v: Tensor, *, documents: Documents | None = None, **options) -> Tensor:
    """The formula, with its Nq x Nk matrix in memory: the baseline."""
    return kernels.naive_attention(q, k, v, **_packing(documents), **options)


def tiled(q: Tensor, k: Tensor, v: Tensor, *, documents: Documents | None = None, **options) -> Tensor:
    """Online softmax in plain PyTorch; `block_q` and `block_k` set the tile, whose default is that of kernels/."""
    return kernels.tiled_attention(q, k, v, **_packing(documents), **options)


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = ALL,
    dropout_p: float = 0.0,
    documents: Documents | None = None,
    block_mask: kernels.BlockMask | None = None,
) -> Tensor:
    """PyTorch's scaled_dot_product_attention, which picks its own kernel; ValueError for window, dropout, documents.

    A block mask becomes Nq x Nk booleans in memory. On a CPU short causal sequences run in `_short`, unless
    `sdpa_kernel` excludes PyTorch's own formula (MATH).
    """
    asked = {
        "causal": causal and block_mask is not None, "window": window != ALL, "dropout": dropout_p > 0,
        "varlen": documents is not None, "block_mask": block_mask is not None,
    }  # fmt: skip
    beyond = [name for name, used in asked.items() if used]
    if obstacle := kernels.why_not("sdpa", q.dtype, beyond):
        raise ValueError(obstacle)
    num_queries, num_keys = q.size(2), k.size(2)
    mask = None
    if causal and num_queries != num_keys:
        # is_causal aligns the mask top-left; ours is bottom-right, so unequal lengths need it spelled out.
        # One query (a cached step) sees every key and keeps the fast path without a mask.
        if num_queries > 1:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
            mask = mask.tril(num_keys - num_queries)
        causal = False
    grouped = q.size(1) != k.size(1)
    if block_mask is not None:
        mask = block_mask.dense()
        empty = ~mask.any(-1, keepdim=True)  # a row that sees no key gives 0; PyTorch's kernels differ there
        o = _sdpa(q, k, v, attn_mask=mask | empty, scale=scale, enable_gqa=grouped)
        return o.masked_fill(empty, 0.0)
    return _sdpa(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """PyTorch's attention. On a CPU: `_short`, or float32, whose backward takes a quarter of the time of 16 bits."""
    if q.device.type != "cpu" or q.dtype == torch.float64:
        return F.scaled_dot_product_attention(q, k, v, **given)
    with torch.autocast("cpu", enabled=False):
        is_short = given.get("is_causal") and q.size(2) <= SHORT and q.shape == k.shape == v.shape
        # reading what `sdpa_kernel` allows would break a compiler's graph
        allowed = torch.compiler.is_compiling() or torch.backends.cuda.math_sdp_enabled()
        if is_short and q.dtype != torch.float16 and allowed:
            return _short(q, k, v, given["scale"])
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **given).to(q.dtype)


def _short(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention as matrix products, a CPU's widest operations, with the scores in memory.

    Forward and backward in ms, here and in `scaled_dot_product_attention`: in bfloat16 3.0 and 8.9 for 32 x 128 tokens,
    4 heads of 32; 23 and 76 for 4 x 512, 12 heads of 64; 98 and 97 for 2 x 1,024. In float32 0.8 and 6.9 for 16 x 64,
    4 heads of 32; 5.6 and 28 for 32 x 128; 4.8 and 9.7 for 8 x 256; 35 and 20 for 2 x 1,024, heads of 64
    (two cores of an AMD EPYC of family 26, torch 2.11.0, 2026-11-27).
    """
    scale = q.size(3) ** -0.5 if scale is None else scale
    hidden = q.new_full(q.shape[2:3] * 2, -torch.inf).triu(1)
    heads = [x.flatten(0, 1) for x in (q, k, v)]
    scores = torch.baddbmm(hidden.expand(heads[0].size(0), -1, -1), heads[0], heads[1].mT, alpha=scale)
    return (scores.softmax(-1) @ heads[2]).view(v.shape)


ATTENTION: dict[str, AttentionFunction] = {"flash": flash, "naive": naive, "tiled": tiled, "sdpa": sdpa}


@contextmanager
def attend_with(model: nn.Module, wrap: Callable[[int, AttentionFunction], AttentionFunction]) -> Iterator[None]:
    """Inside, each layer of `model` calls `wrap(layer, attend)` in place of its own `attend`.

    The one way to watch or to replace a GPT's attention. Enter it before the model is compiled: a compiled model keeps
    the function that it was traced with.
    """
    # layers of a model of transformers have no `attend`
    modules = [block.attention for block in model.blocks if hasattr(getattr(block, "attention", None), "attend")]
    own = [module.attend for module in modules]
    try:
        for layer, module in enumerate(modules):
            module.attend = wrap(layer, own[layer])
        yield
    finally:
        for module, attend in zip(modules, own, strict=True):
            module.attend = attend


def resolve_attention(
    name: str, device: torch.device | str, dtype: torch.dtype, head_dim: int, features: tuple[str, ...] = ()
) -> tuple[str, str]:
    """Turn a configured name into the name of a backend that will run, and say why.

    Args:
        name: "auto" or a key of ATTENTION.
        device: where attention will run.
        dtype: of q, k and v, that is the autocast type where autocast is on.
        head_dim: D, in elements.
        features: what it must support, names of FEATURES in kernels/support.py.

    Returns:
        (resolved name, reason): a key of ATTENTION and one sentence for the first lines of the run.

    Raises:
        ValueError: a backend given by name cannot run here. Only "auto" may choose another.
    """
    device = torch.device(device)
    if name not in ("auto", *ATTENTION):
        raise ValueError(f"model.attention={name} is not known; use one of auto, {', '.join(ATTENTION)}")
    if name != "auto":
        obstacle = kernels.why_not(name, dtype, features, device=device, head_dim=head_dim)
        if obstacle is not None:
            raise ValueError(f"model.attention={name} cannot run: {obstacle}")
        if name == "flash" and device.type == "cpu":
            return name, "asked for by name; on the CPU in Triton's interpreter, which is right and very slow"
        return name, "asked for by name"

    if device.type == "cuda":
        obstacle = kernels.why_not("flash", dtype, features, device=device, head_dim=head_dim)
        if obstacle is None:
            return "flash", "auto: the device is cuda"
        reason = f"auto: flash cannot run: {obstacle}"
    else:
        reason = f"auto: the device is {device.type}, flash is for CUDA"
    if obstacle := kernels.why_not("sdpa", dtype, features):
        return "naive", f"{reason}; {obstacle.partition(';')[0]}"
    return "sdpa", reason
