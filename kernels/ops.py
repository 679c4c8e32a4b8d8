"""The operators' contracts: schemas, fake (shape-only) versions and autograd. Torch only; launchers load when
called.

`flashgpt::flash_fwd(q, k, v, ...) -> (o, lse)` is opaque to torch.compile and to autocast, and its name is what
a selective checkpointing policy compares with. The arguments after v are the fields of `kernels.options.Options`
in order. Outputs that hold tokens and heads are stored as (B, N, H, D). Packed documents are one batch entry.
"""

import torch
from torch import Tensor

from kernels.inputs import check_documents
from kernels.options import Options


def _tokens_first(like: Tensor, head_dim: int) -> Tensor:
    """An uninitialised (B, H, N, head_dim) tensor with `like`'s other sizes, stored as (B, N, H, head_dim)."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)


def _launchers(q: Tensor, v: Tensor, options: Options):
    """(forward, backward): the one place where an implementation is chosen for checked inputs.

    Every implementation keeps one contract: the same inputs, the same (O, LSE), the same gradients.
    """
    from kernels import flash_bwd, flash_fwd

    return flash_fwd.launch_flash_fwd, flash_bwd.launch_flash_bwd


@torch.library.custom_op("flashgpt::flash_fwd", mutates_args=())
def flash_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """O (B, Hq, Nq, Dv) and LSE (B, Hq, Nq), natural logarithm, float32. `scale` is positive.

    Raises ValueError where cu_seqlens do not describe the tokens: their values are first known here.
    """
    options = Options(
        causal, scale, window_left, window_right, softcap, alibi_slopes, sinks, dropout_p, dropout_seed,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    if options.packed:
        check_documents(options, q.shape[2], k.shape[2])
    forward, _ = _launchers(q, v, options)
    return forward(q, k, v, options)


@flash_fwd.register_fake
def _(q, k, v, *args, **kwargs):
    return _tokens_first(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


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
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV in the inputs' shapes and dtype, and dsinks (Hq,) float32, (0,) without sinks.

    `dlse` (B, Hq, Nq) is None when LSE was not used.
    """
    options = Options(
        causal, scale, window_left, window_right, softcap, alibi_slopes, sinks, dropout_p, dropout_seed,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    _, backward = _launchers(q, v, options)
    return backward(do, dlse, q, k, v, o, lse, options)


@flash_bwd.register_fake
def _(do, dlse, q, k, v, o, lse, causal, scale, *args, **kwargs):
    options = Options(causal, scale, *args, **kwargs)
    dsinks = q.new_empty(0 if options.sinks is None else q.shape[1], dtype=torch.float32)
    return _tokens_first(q, q.shape[3]), _tokens_first(k, k.shape[3]), _tokens_first(v, v.shape[3]), dsinks


def _setup_context(ctx, inputs, output):
    q, k, v, *rest = inputs
    options = Options(*rest)
    # an unused LSE then arrives in backward as None and costs nothing
    ctx.set_materialize_grads(False)
    tensors = [x for x in options if isinstance(x, Tensor)]
    ctx.save_for_backward(q, k, v, *output, *tensors)
    ctx.options = [None if isinstance(x, Tensor) else x for x in options]
    ctx.tensor_fields = [i for i, x in enumerate(options) if isinstance(x, Tensor)]


def _backward(ctx, do: Tensor | None, dlse: Tensor | None):
    no_gradients = [None] * len(Options._fields)
    if do is None and dlse is None:
        return None, None, None, *no_gradients
    q, k, v, o, lse, *tensors = ctx.saved_tensors
    values = list(ctx.options)
    for i, x in zip(ctx.tensor_fields, tensors, strict=True):
        values[i] = x
    do = torch.zeros_like(o) if do is None else do
    dq, dk, dv, dsinks = flash_bwd(do, dlse, q, k, v, o, lse, *values)
    gradients = Options(*no_gradients)
    if Options(*values).sinks is not None:
        gradients = gradients._replace(sinks=dsinks)
    return dq, dk, dv, *gradients


flash_fwd.register_autograd(_backward, setup_context=_setup_context)
