"""The public functions: check meaning, cast under autocast, then call the operator; import no Triton."""

import torch
from torch import Tensor

from . import ops
from .device import capability, interpreting
from .inputs import check_call, check_varlen_call
from .options import Options
from .support import IMPLEMENTATIONS, features_of, refusal

_MIN_HEAD_DIM = 16  # the smallest inner dimension of a tensor-core product
_MAX_HEAD_DIM = 256  # beyond it the accumulators of one tile no longer fit the register file


def unsupported_reason(device: torch.device | str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why `flash_attention` cannot run here, in one sentence with the remedy; None when it can."""
    device = device if isinstance(device, torch.device) else torch.device(device)
    if head_dim < _MIN_HEAD_DIM or head_dim > _MAX_HEAD_DIM:
        return (
            f"head_dim {head_dim} is not supported by flash attention "
            f"({_MIN_HEAD_DIM} to {_MAX_HEAD_DIM}); use attention=sdpa"
        )
    if dtype not in IMPLEMENTATIONS["flash"].dtypes:
        return f"dtype {dtype} is not supported by flash attention (float32, bfloat16, float16); use attention=naive"
    if device.type == "cuda":
        major, minor = capability(torch.cuda.current_device() if device.index is None else device.index)
        if major < 8:
            return (
                f"compute capability {major}.{minor} is not supported by flash attention (8.0 or newer); "
                "use attention=sdpa"
            )
        return None
    if device.type != "cpu":
        return f"device type {device.type} is not supported by flash attention (cuda); use attention=sdpa"
    if not interpreting():
        return (
            "flash attention needs an NVIDIA GPU; use attention=sdpa, "
            "or set TRITON_INTERPRET=1 before the start to test it on a CPU"
        )
    return None


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
            gives 0, LSE -inf (its sink's score where it has one) and zero gradients.
        scale: factor on the scores; 1/sqrt(D) by default.
        window: (left, right): query i sees keys `i + Nk - Nq - left` to `i + Nk - Nq + right`; -1 is no bound.
            Costs N x window, forward and backward. With causal, right is 0.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is off.
        alibi_slopes: (Hq,) or (B, Hq): `slope * |i + Nk - Nq - j|` is taken off the score, after the
            soft-cap. Constants: they have no gradient.
        dropout_p: probability with which a softmax probability is dropped; the rest is scaled by 1 / (1 - p).
            LSE is that of the whole row.
        dropout_seed: an integer or a () int64 tensor on q's device. The mask is a function of it, of the head
            and of the two token numbers alone. Without it, one is drawn from PyTorch's generator.
        sinks: (Hq,) a score per head, of a key without a value, that joins the softmax's denominator and LSE;
            differentiable. Source: Xiao et al., arXiv:2309.17453, in gpt-oss's learned form.
        return_lse: also return the log of the softmax denominator.
        deterministic: stated for the reader; the backward has no other mode.

    Returns:
        O (B, Hq, Nq, Dv) in q's dtype, stored as (B, Nq, Hq, Dv), so that merging the heads costs no copy.
        With `return_lse`, also LSE (B, Hq, Nq), float32, natural logarithm. Both are differentiable; the
        backward is deterministic.

    Raises:
        ValueError: before any launch, naming the argument, its value and what is allowed.

    Source: FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.
    """
    plain = softcap == dropout_p == 0.0 and alibi_slopes is sinks is None
    call = _description(q, k, v, causal, scale, window) if plain else None
    options = None if call is None else _FOUND_RIGHT.get(call)
    if options is None:
        q, k, v, options = check_call(
            q, k, v, causal, scale, window, softcap, alibi_slopes, dropout_p, dropout_seed, sinks
        )
        q, options = _supported(q, k, v, options)
        if call is not None:
            _FOUND_RIGHT[call] = options
    o, lse = ops.attend(q, k, v, options)
    return (o, lse) if return_lse else o


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` over packed documents: tokens see only their own document, and no work is done for
    other pairs.

    Args:
        q, k, v: (total_q, Hq, D), (total_k, Hkv, D), (total_k, Hkv, Dv): the documents' tokens end to end.
        cu_seqlens_q, cu_seqlens_k: (documents + 1,) int32 on q's device: document d holds the rows from
            cu_seqlens[d] to cu_seqlens[d + 1]. Empty documents are allowed. Their values are read once a
            tensor, which waits for the GPU, and not inside a CUDA graph.
        max_seqlen_q, max_seqlen_k: upper bounds on a document's length, checked with cu_seqlens. No launch
            depends on them, so a constant bound serves every packing.
        alibi_slopes: (Hq,) or (documents, Hq).
        others: as in `flash_attention`, inside each document.

    Returns:
        O (total_q, Hq, Dv); with `return_lse`, also LSE (Hq, total_q), float32.

    Raises:
        ValueError: before any launch, naming the argument, its value and what is allowed.
    """
    q, k, v, options = check_varlen_call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        causal, scale, window, softcap, alibi_slopes, dropout_p, dropout_seed, sinks,
    )  # fmt: skip
    # one batch entry that holds all documents: the operator's layout, by views
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    q, options = _supported(q, k, v, options)
    o, lse = ops.attend(q, k, v, options)
    # not o[0]: the gradient of an index is a tensor of zeros with a part filled in
    o = o.squeeze(0).transpose(0, 1)
    return (o, lse.squeeze(0)) if return_lse else o


def _supported(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Options]:
    """Refuse what cannot run on these (B, H, N, D) tensors. Returns q and options with a positive scale."""
    for head_dim in {q.shape[3], v.shape[3]}:
        reason = unsupported_reason(q.device, q.dtype, head_dim)
        if reason is not None:
            raise ValueError(reason)
    features = features_of(options, q.shape[1], k.shape[1], q.shape[3], v.shape[3])
    reason = refusal("flash", features, q.dtype)
    if reason is not None:
        raise ValueError(reason)
    if options.scale <= 0.0:  # the kernels scale the row maximum instead of every score, which needs scale > 0
        q, scale = (-q, -options.scale) if options.scale < 0.0 else (q * 0.0, 1.0)
        options = options._replace(scale=scale)
    return q, options


class _FoundRight(dict):
    """Descriptions of calls that passed all checks -> their options: a model repeats a few calls for ever."""

    def __setitem__(self, call: tuple, options: Options) -> None:
        if len(self) >= 512:
            self.clear()
        super().__setitem__(call, options)


_FOUND_RIGHT = _FoundRight()


def _description(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, window: tuple) -> tuple | None:
    """All that the checks of a call without other options look at; None where a call is not worth remembering."""
    if torch.compiler.is_compiling() or type(window) is not tuple:
        return None
    if scale is not None and not (type(scale) is float and scale > 0.0):
        return None
    if torch.is_autocast_enabled(q.device.type) and torch.get_autocast_dtype(q.device.type) != q.dtype:
        return None
    tensors = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    return *tensors, bool(causal), scale, window
