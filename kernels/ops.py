"""The operators' contracts: schemas, fake (shape-only) versions and autograd. Torch only; launchers load when
called.

`flashgpt::flash_fwd(q, k, v, causal, scale) -> (o, lse)` is opaque to torch.compile and to autocast, and its
name is what a selective checkpointing policy compares with. Outputs that hold tokens and heads are stored as
(B, N, H, D).
"""

import torch
from torch import Tensor


def _tokens_first(like: Tensor) -> Tensor:
    """An uninitialised (B, H, N, D) tensor of `like`'s shape, stored as (B, N, H, D)."""
    batch, heads, tokens, head_dim = like.shape
    return like.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)


@torch.library.custom_op("flashgpt::flash_fwd", mutates_args=())
def flash_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """O (B, Hq, Nq, D) and LSE (B, Hq, Nq), natural logarithm, float32. `scale` is positive."""
    from kernels.flash_fwd import launch_flash_fwd

    return launch_flash_fwd(q, k, v, causal, scale)


@flash_fwd.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _tokens_first(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("flashgpt::flash_bwd", mutates_args=())
def flash_bwd(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the inputs' shapes and dtype. `dlse` (B, Hq, Nq) is None when LSE was not used."""
    from kernels.flash_bwd import launch_flash_bwd

    return launch_flash_bwd(do, dlse, q, k, v, o, lse, causal, scale)


@flash_bwd.register_fake
def _(do, dlse, q, k, v, o, lse, causal, scale):
    return _tokens_first(q), _tokens_first(k), _tokens_first(v)


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.scale = inputs
    # an unused LSE then arrives in backward as None and costs nothing
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx, do: Tensor | None, dlse: Tensor | None):
    if do is None and dlse is None:
        return None, None, None, None, None
    q, k, v, o, lse = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    dq, dk, dv = flash_bwd(do, dlse, q, k, v, o, lse, ctx.causal, ctx.scale)
    return dq, dk, dv, None, None


flash_fwd.register_autograd(_backward, setup_context=_setup_context)
