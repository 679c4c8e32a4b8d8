"""Write new tokens to any rows or pages and slots of a key/value cache, rounded as the operator rounds, and read them.

This file is the contract (torch only); the kernel loads when a CUDA tensor needs it.
"""

import torch
from torch import Tensor

from ..ops import mark_written, needs_dispatcher

EIGHT_BITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # dtype of a cache -> its largest number
_SMALLEST_SCALE = 2.0**-60  # of a token of zeros


def write_kvcache(
    caches: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | tuple[None, None],
    places: tuple,
    new: tuple[Tensor, Tensor],
) -> None:
    """Write new keys and values (Hkv, N, D) to `places` of their caches.

    caches: of keys and of values, (rows or pages, Hkv, slots, D) of one shape and dtype.
    scales: of 8-bit caches, fp32, (Hkv,) or (rows or pages, Hkv, slots); the latter are written too.
    places: (rows or pages (N,), slice(None), slots (N,)), both int64, on the caches' device. That they lie inside of
        the caches is the caller's to see to.

    Raises ValueError, before anything is written, where shapes, dtypes or devices are otherwise or an input requires a
    gradient.
    """
    _check(caches, scales, places, new)
    k, v = (_stored(*each, places) for each in zip(caches, scales, new, strict=True))  # (N, Hkv, D) each
    all_four = *caches, k, v
    if k.is_cuda and all(x.stride(-1) == 1 for x in all_four) and not needs_dispatcher(*all_four):
        from .write_kvcache_kernel import launch_write_kvcache

        launch_write_kvcache(*caches, places[0].contiguous(), places[2].contiguous(), k, v)
        mark_written(*caches)
    else:
        for cache, x in zip(caches, (k, v), strict=True):
            cache[places] = x


def _check(caches: tuple, scales: tuple, places: tuple, new: tuple) -> None:
    """Raises ValueError as `write_kvcache` says."""
    if caches[0].shape != caches[1].shape or caches[0].dtype != caches[1].dtype:
        told = " and ".join(f"{tuple(cache.shape)} of {cache.dtype}" for cache in caches)
        raise ValueError(f"caches have shapes {told}; expected one shape and dtype")
    for cache, scale, x in zip(caches, scales, new, strict=True):
        if x.dim() != 3 or x.shape[::2] != cache.shape[1::2]:
            raise ValueError(
                f"new tokens have shape {tuple(x.shape)} and their cache {tuple(cache.shape)}; expected (Hkv, N, D) "
                "and (rows or pages, Hkv, slots, D)"
            )
        check_scale("its scale", cache, scale)
        if torch.is_grad_enabled() and (x.requires_grad or cache.requires_grad):
            raise ValueError("new tokens ask for a gradient, and a cache's attention has none; use torch.no_grad()")
    for number in (places[0], places[2]):
        if not isinstance(number, Tensor):
            raise ValueError(f"places have {number!r}; expected tensors (N,) of torch.int64")
        if number.device != caches[0].device:
            raise ValueError(f"places are on {number.device} but the caches on {caches[0].device}; move them there")
        if number.shape != new[0].shape[1:2] or number.shape != new[1].shape[1:2] or number.dtype != torch.int64:
            raise ValueError(
                f"places have {tuple(number.shape)} of {number.dtype} for new tokens of shapes {tuple(new[0].shape)} "
                f"and {tuple(new[1].shape)}; expected (N,) of torch.int64 and (Hkv, N, D)"
            )


def _stored(cache: Tensor, scale: Tensor | None, new: Tensor, places: tuple) -> Tensor:
    """Return new (Hkv, N, D) as the cache stores them, (N, Hkv, D). Scales per token and head are written."""
    values = new.transpose(0, 1)
    if scale is not None:
        largest = EIGHT_BITS[cache.dtype]
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        if scale.dim() == 1:
            factor = scale[None, :].expand(values.shape[:2])
        else:
            factor = scale[places] = (values.abs().amax(-1).float() / largest).clamp(min=_SMALLEST_SCALE)
        values = (values / factor[..., None]).clamp(-largest, largest)
        values = values.round() if cache.dtype == torch.int8 else values
    return values.to(cache.dtype)


def read_kvcache(cache: Tensor, scale: Tensor | None, places: tuple, dtype: torch.dtype = torch.float32) -> Tensor:
    """The keys or values (1, Hkv, N, D) in `places` of a cache; those of 8 bits in float32, or wider `dtype`."""
    check_scale("its scale", cache, scale)
    values = cache[places]  # (N, Hkv, D)
    if scale is not None:
        values = values.to(torch.promote_types(dtype, torch.float32))
        values = values * (scale[None, :, None] if scale.dim() == 1 else scale[places][..., None])
    return values.transpose(0, 1)[None]


def check_scale(name: str, cache: Tensor, scale: Tensor | None) -> None:
    """Raises ValueError unless an 8-bit cache, and no other, has a scale, fp32 and of one of two shapes."""
    shapes = tuple(cache.shape[1:2]), tuple(cache.shape[:3])
    if cache.dtype not in EIGHT_BITS:
        if scale is not None:
            raise ValueError(f"{name} is given but the cache is in {cache.dtype}; scales are for 8 bits")
    elif scale is None or scale.dtype != torch.float32 or tuple(scale.shape) not in shapes:
        told = None if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
        raise ValueError(f"{name} is {told}; a cache in 8 bits needs torch.float32 {shapes[0]} or {shapes[1]}")
