"""What a valid attention call is: checks shared by all implementations, with the same words."""

import itertools

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .options import (
    Options,
    canonical_window,
    check_dropout,
    check_scale,
    check_sinks,
    check_slopes,
    check_softcap,
)


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Options]:
    """Check a dense call; return q, k, v, cast where autocast is on, and the options in canonical form.

    q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv). Raises ValueError, naming the argument, its value
    and what is allowed.
    """
    q, k, v = autocast_inputs(q, k, v)
    _check_tensors(q, k, v, rank=4, layout="batch, heads, tokens, head_dim")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch size {tensor.shape[0]} but q has {q.shape[0]}; they must be equal")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"v has shape {tuple(v.shape)} but k has {tuple(k.shape)}; all but head_dim must be equal")
    _check_heads(q.shape[1], k.shape[1])
    batch, heads, device = q.shape[0], q.shape[1], q.device
    causal, left, right = canonical_window(causal, window)
    options = Options(
        causal,
        check_scale(scale, q.shape[3]),
        left,
        right,
        check_softcap(softcap),
        check_slopes(alibi_slopes, batch, heads, device),
        check_sinks(sinks, heads, device, q.dtype),
        *check_dropout(dropout_p, dropout_seed, device),
    )
    return q, k, v, options


def check_varlen_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float | None,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Options]:
    """Check a packed call; return q, k, v, cast where autocast is on, and the options in canonical form.

    q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv). What cu_seqlens hold is checked later, by
    `check_documents`. Raises ValueError.
    """
    q, k, v = autocast_inputs(q, k, v)
    _check_tensors(q, k, v, rank=3, layout="tokens, heads, head_dim")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"v has shape {tuple(v.shape)} but k has {tuple(k.shape)}; all but head_dim must be equal")
    _check_heads(q.shape[1], k.shape[1])
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(
                f"{name} has dtype {cu_seqlens.dtype} and shape {tuple(cu_seqlens.shape)}; "
                "expected int32 and (documents + 1,) with at least one document"
            )
        if cu_seqlens.device != q.device:
            raise ValueError(f"{name} is on {cu_seqlens.device} but q is on {q.device}; move them to one device")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k has {cu_seqlens_k.shape[0] - 1} documents but cu_seqlens_q has "
            f"{cu_seqlens_q.shape[0] - 1}; they must be equal"
        )
    for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if bound < 0:
            raise ValueError(f"{name} is {bound}; it must be at least the longest document's length")
    heads, device = q.shape[1], q.device
    causal, left, right = canonical_window(causal, window)
    options = Options(
        causal,
        check_scale(scale, q.shape[2]),
        left,
        right,
        check_softcap(softcap),
        check_slopes(alibi_slopes, cu_seqlens_q.shape[0] - 1, heads, device),
        check_sinks(sinks, heads, device, q.dtype),
        *check_dropout(dropout_p, dropout_seed, device),
        cu_seqlens_q.contiguous(),
        cu_seqlens_k.contiguous(),
        max_seqlen_q,
        max_seqlen_k,
    )
    return q, k, v, options


def check_fp8_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor], Options]:
    """Check a call on e4m3 tensors; return q, k, v, the scales as contiguous (B, Hq), (B, Hkv), (B, Hkv), options.

    Raises ValueError, naming the argument, its value and what is allowed.
    """
    named = {"q": q, "k": k, "v": v, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    for name, tensor in named.items():
        wanted = torch.float32 if name.endswith("scale") else torch.float8_e4m3fn
        if tensor.dtype != wanted:
            raise ValueError(f"{name} has dtype {tensor.dtype}; expected {wanted}, as quantize_per_head returns it")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} asks for a gradient, and FP8 attention has none; use torch.no_grad()")
    with torch.autocast(q.device.type, enabled=False):  # it would turn e4m3 into bfloat16
        q, k, v, options = check_call(q, k, v, causal, scale, (-1, -1), 0.0, None, 0.0, None, None)
    if v.shape[3] != q.shape[3]:
        raise ValueError(f"v has head_dim {v.shape[3]} but q has {q.shape[3]}; they must be equal in FP8 attention")
    if options.scale <= 0.0:
        raise ValueError(f"scale is {options.scale}; it must be positive in FP8 attention")
    scales = []
    for name, factor, tensor in (("q_scale", q_scale, q), ("k_scale", k_scale, k), ("v_scale", v_scale, v)):
        heads = tensor.shape[:2]
        if factor.dim() > 2 or any(
            a not in (1, b) for a, b in zip(reversed(factor.shape), reversed(heads), strict=False)
        ):
            raise ValueError(f"{name} has shape {tuple(factor.shape)}; expected {tuple(heads)}, or one that broadcasts")
        if factor.device != q.device:
            raise ValueError(f"{name} is on {factor.device} but q is on {q.device}; move them to one device")
        scales.append(factor.expand(heads).contiguous())
    return q, k, v, tuple(scales), options


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, rank: int, layout: str) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != rank:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {rank} dimensions ({layout})")
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name} has dtype {tensor.dtype}; expected a floating point dtype")
        if tensor.shape[-1] == 0:
            raise ValueError(f"{name} has head_dim 0; it must be at least 1")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype} but q has {q.dtype}; cast them to one dtype")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} but q is on {q.device}; move them to one device")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]} but q has {q.shape[-1]}; they must be equal")


def _check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads == 0 or num_heads % num_kv_heads != 0:
        raise ValueError(f"q has {num_heads} heads; it must be a multiple of k's {num_kv_heads} heads")


# Which tensors were found right, for which version of their memory, total and bound: reading a GPU tensor
# waits for the GPU, and a model's layers all pass the same one.
_CHECKED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def check_documents(options: Options, total_q: int, total_k: int) -> None:
    """Check that cu_seqlens start at 0, never fall, end at the total, and hold no document beyond the bound.

    Looks once at each tensor; not at all while a CUDA graph is being captured, which must not wait for the GPU.
    Raises ValueError.
    """
    for name, cu_seqlens, total, bound in (
        ("q", options.cu_seqlens_q, total_q, options.max_seqlen_q),
        ("k", options.cu_seqlens_k, total_k, options.max_seqlen_k),
    ):
        described = (cu_seqlens._version, total, bound)
        if _CHECKED.get(cu_seqlens) == described:
            continue
        if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
            continue
        _check_starts(name, cu_seqlens.tolist(), total, bound)
        _CHECKED[cu_seqlens] = described


def _check_starts(name: str, starts: list[int], total: int, bound: int) -> None:
    if starts[0] != 0:
        raise ValueError(f"cu_seqlens_{name} starts at {starts[0]}; it must start at 0")
    if starts[-1] != total:
        raise ValueError(f"cu_seqlens_{name} ends at {starts[-1]}; it must end at {name}'s {total} tokens")
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    if min(lengths) < 0:
        raise ValueError(f"cu_seqlens_{name} falls at document {lengths.index(min(lengths))}; it must not fall")
    if max(lengths) > bound:
        raise ValueError(
            f"max_seqlen_{name} is {bound} but document {lengths.index(max(lengths))} has {max(lengths)} tokens; "
            "it must be at least the longest document's length"
        )


def place_documents(cu_seqlens: Tensor, max_seqlen: int, device: torch.device) -> Tensor:
    """cu_seqlens for self-attention, checked on the CPU and then copied to `device`.

    The copy is known to be right, so that a call which takes it does not wait for the GPU to read it back.

    Args:
        cu_seqlens: (documents + 1,) int32 on the CPU; it ends at the number of tokens.
        max_seqlen: the bound that the calls will name.

    Raises ValueError as `flash_attention_varlen` does.
    """
    starts = cu_seqlens.tolist()
    _check_starts("q", starts, starts[-1], max_seqlen)
    if device.type == "cuda":
        cu_seqlens = cu_seqlens.pin_memory().to(device, non_blocking=True)
    _CHECKED[cu_seqlens] = (cu_seqlens._version, starts[-1], max_seqlen)
    return cu_seqlens


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k, v to autocast's dtype where autocast is on, as PyTorch's own attention does."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    # float64 stays as it is: autocast leaves it alone everywhere in PyTorch
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
