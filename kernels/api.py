"""The public functions: check the call, unless one with the same key was checked before, then call the operator.

Imports no Triton.
"""

from torch import Tensor

from . import ops
from .block_masks import BlockMask
from .call import autocast_inputs, check_call, key_of, plain_options, unchanged
from .documents import call_packed
from .launch import plan_of, with_positive_scale
from .support import why_not_flash


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    max_seqlen: int | tuple[int, int] | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention `softmax(scale * q k^T) v` in tiles: nothing of size Nq x Nk is ever in memory.

    Args:
        q: (B, Hq, Nq, D), float32, bfloat16 or float16, D from 16 to 256. Any strides; a last dimension that
            is not contiguous costs a copy. Under autocast all three are cast as PyTorch's own attention casts
            them.
        k, v: (B, Hkv, Nk, D) and (B, Hkv, Nk, Dv), q's dtype and device; Hq is a multiple of Hkv and query
            head h reads head `h // (Hq // Hkv)`.
        causal: query i sees key j when `j <= i + Nk - Nq` (aligned bottom-right). A row that sees no key
            gives O = 0, LSE = -inf (the sink's score where there is one) and zero gradients.
        scale: factor on the scores; 1/sqrt(D) by default.
        window: (left, right): query i sees keys `i + Nk - Nq - left` to `i + Nk - Nq + right`; -1 is no bound.
            Costs N x window, forward and backward. With causal, right is 0.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: (Hq,) or (B, Hq): `slope * |i + Nk - Nq - j|` is subtracted from the score, after the
            soft-cap. Constants: they have no gradient.
        dropout_p: probability with which a softmax probability is dropped; the rest is scaled by 1 / (1 - p).
            LSE is computed over the whole row, before dropout.
        dropout_seed: an integer or a () int64 tensor on q's device. The mask depends only on the seed, the batch entry
            and head, the query and key indices and the document's first row. Without a seed, one is drawn from
            PyTorch's generator.
        sinks: (Hq,) one score per head for a key without a value; it joins the softmax's denominator and LSE.
            Differentiable. A sink of +inf, like any infinite score, makes O and LSE NaN in the rows that see it.
            Source: Xiao et al., arXiv:2309.17453, in gpt-oss's learned form.
        cu_seqlens: (documents + 1,) int32 on q's device, for packed documents: B is 1, document d holds the rows from
            cu_seqlens[d] to cu_seqlens[d + 1], tokens see only their own document, and no work is done for other
            pairs. Pass a pair (queries', keys') where they differ. Empty documents are allowed; alibi_slopes may be
            (documents, Hq). On a GPU its values are read once per tensor and version, which waits for the GPU, and
            never while a CUDA graph is captured. A write that PyTorch does not track (`.data`) makes the results wrong,
            but no kernel ever addresses memory outside the call's tensors.
        max_seqlen: an upper bound on a document's length, or a pair; checked with cu_seqlens, N by default. No launch
            depends on it, so a constant bound serves every packing.
        block_mask: any mask, from `kernels.block_mask` or `BlockMask.from_dense`, or torch's BlockMask with blocks of
            128, which is converted once. It alone decides which query sees which key, so it excludes causal, window and
            cu_seqlens. Its batch is 1 or B, its heads 1 or Hq. Only its visible blocks are visited, in both passes.
        return_lse: also return the log of the softmax denominator.
        deterministic: always True; there is no other mode.

    Returns:
        O (B, Hq, Nq, Dv) in q's dtype, stored as (B, Nq, Hq, Dv), so that merging the heads costs no copy.
        With `return_lse`, also LSE (B, Hq, Nq), float32, natural logarithm. Both are differentiable; the
        backward is deterministic.

    Raises:
        ValueError: before any launch, naming the argument, its value and what is allowed.
        RuntimeError: for a derivative under torch.func, in forward mode, or of second order.

    Source: FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.
    """
    q, k, v = autocast_inputs(q, k, v)
    plan = options = plain = None
    dispatched = ops.needs_dispatcher(q, k, v)
    if not dispatched and block_mask is None and deterministic is True:
        plain = plain_options(causal, scale, window, softcap, dropout_p, alibi_slopes, sinks, cu_seqlens, max_seqlen)
        if plain is not None:  # a call of this key may have been checked before
            try:
                plan = plan_of(key_of("forward", plain, q, k, v))
                options = plan.options and plan.options.with_tensors_of(plain)
            except RuntimeError:  # a nested or sparse tensor has no address; the checks name it
                plain = None
    if options is None:
        q, k, v, options = check_call(
            q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes,
            dropout_p=dropout_p, dropout_seed=dropout_seed, sinks=sinks, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
            block_mask=block_mask, deterministic=deterministic,
        )  # fmt: skip
        q, options = with_positive_scale(q, options)
        if plan is None and not dispatched:
            plan = plan_of(key_of("forward", options, q, k, v))
        # a plan that has chosen an engine has already run a call of its key
        if (plan is None or plan.on_hopper is None) and (reason := why_not_flash(q, k, v, options)):
            raise ValueError(reason)
        if plain is not None and unchanged(plain, options):
            plan.options = options.with_tensors_of(None)
    o, lse = ops.attend(q, k, v, options, plan)
    return (o, lse) if return_lse else o


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of packed documents whose tokens lie end to end in three dimensions.

    Args:
        q, k, v: (total_q, Hq, D), (total_k, Hkv, D), (total_k, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: the pairs cu_seqlens and max_seqlen.
        options: as in `flash_attention`.

    Returns:
        O (total_q, Hq, Dv); with `return_lse`, also LSE (Hq, total_q), float32.

    Raises:
        ValueError: before any launch, naming the argument, its value and what is allowed.
    """
    return call_packed(flash_attention, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)
