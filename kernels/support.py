"""The support matrix, and `why_not`: the one place that decides what cannot run here, and why.

It is the one source of the refusals at run time, of the choice between the engines, of the tests' parametrization and
of the table in kernels/README.md. Every answer is one sentence with the remedy, or None.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .call import Options
from .device import HAS_TRITON, capability, interpreting
from .launch import tma_ready

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# feature, as in messages and in tests -> its meaning, for the README
FEATURES = {
    "full": "every query sees every key, Nq and Nk of any length",
    "causal": "aligned bottom-right where Nq and Nk differ",
    "gqa": "grouped and multi-query heads: Hq a multiple of Hkv",
    "head_dim_v": "V's head_dim differs from Q's",
    "lse": "log-sum-exp output, differentiable",
    "window": "sliding window (left, right), cost N x window",
    "softcap": "scores capped by softcap * tanh(score / softcap)",
    "alibi_slopes": "ALiBi bias, slopes (H,) or (B, H), constants",
    "sinks": "attention sinks (H,) with their gradient",
    "dropout": "counter-based: the seed alone decides the mask, in every implementation",
    "varlen": "packed documents that do not see each other",
    "block_mask": "any mask, in blocks of 128 x 128 for 1 or B rows and 1 or Hq heads; not with causal, window, varlen",
}
# A block mask includes these itself, so no call may have both.
IN_THE_MASK = ("causal", "window", "varlen")

_ALL_DTYPES = frozenset(DTYPES)
# What the tiled implementations support. Each by name: a row newly added to FEATURES is supported by "naive" alone.
_IN_TILES = frozenset(
    {
        "full", "causal", "gqa", "head_dim_v", "lse", "window", "softcap", "alibi_slopes", "sinks", "dropout",
        "varlen", "block_mask",
    }
)  # fmt: skip
# Remedies, each as a function and as a key of the configuration.
NAIVE, TILED, FLASH = (f"{name}_attention (model.attention={name})" for name in ("naive", "tiled", "flash"))
SDPA = "PyTorch's scaled_dot_product_attention (model.attention=sdpa)"


@dataclass(frozen=True)
class Implementation:
    """What one implementation can do: every feature named here, in every dtype named here, in both passes
    ("kvcache", attention over a cache, has no backward)."""

    features: frozenset[str]
    dtypes: frozenset[torch.dtype]
    instead: str  # the remedy that its refusals name

    def supports(self, feature: str, dtype: torch.dtype) -> bool:
        """One cell of the matrix."""
        return feature in self.features and dtype in self.dtypes


IMPLEMENTATIONS = {
    "naive": Implementation(frozenset(FEATURES), _ALL_DTYPES, instead=TILED),
    "tiled": Implementation(_IN_TILES, _ALL_DTYPES, instead=NAIVE),
    "flash": Implementation(_IN_TILES, _ALL_DTYPES - {torch.float64}, instead=NAIVE),
    # PyTorch's own, as the model calls it; its dropout draws from another random stream
    "sdpa": Implementation(
        frozenset({"full", "causal", "gqa", "head_dim_v", "block_mask"}), _ALL_DTYPES, instead=f"{FLASH} or {NAIVE}"
    ),
}

_HALVES = frozenset({torch.float16, torch.bfloat16})

# "hopper" are the kernels that "flash" uses where `takes_hopper` allows it, "kvcache" is attention over a cache.
KERNELS = {
    "hopper": Implementation(
        frozenset({"full", "causal", "gqa", "lse", "window", "softcap", "alibi_slopes", "varlen", "block_mask"}),
        _HALVES,
        instead="the portable kernels",
    ),
    "kvcache": Implementation(
        frozenset({"full", "causal", "gqa", "lse", "window", "softcap", "alibi_slopes", "sinks"}),
        _ALL_DTYPES - {torch.float64},
        instead="naive_attention_with_kvcache",
    ),
}

# The smallest inner dimension of a tensor-core product; beyond 256 the accumulators of one tile no longer fit the
# register file.
FLASH_HEAD_DIMS = range(16, 257)
# TMA strides are multiples of 16 bytes. Tiles are 64, 128 or 256 columns wide, the rest is padding. At head_dim 32 this
# is still faster than the portable kernels' narrower tiles; below 32 it was not measured.
HOPPER_HEAD_DIMS = range(32, 257, 8)
HOPPER_BACKWARD_HEAD_DIMS = range(32, 129, 8)  # dK and dV (64, 256) in fp32 would take 256 registers of each thread
# For the forward alone. Below these the portable forward is faster for documents and block masks (hopper/NOTES.md);
# above 128, tiles are 64 keys wide, half a block of a mask.
HOPPER_PACKED_HEAD_DIMS = range(64, 257, 8)
HOPPER_MASKED_HEAD_DIMS = range(72, 129, 8)
# Attention over a cache: below these the tiles of 64 columns would be half empty, above them stages would not fit.
HOPPER_KVCACHE_HEAD_DIMS = range(40, 129, 8)
HOPPER_KVCACHE_ROWS = 64  # queries that share a KV head: the rows of one wgmma
# In 8 bits a column of a tile holds two of the cache's: below these, half of wgmma's 64 rows of values would be empty.
# Queries are columns.
HOPPER_KVCACHE_8_BIT_HEAD_DIMS = range(80, 129, 16)  # rows of whole 16 bytes, for TMA
HOPPER_KVCACHE_8_BIT_ROWS = 16
TRITON_RELEASE = "3.6"  # the one whose private names kernels/hopper/tma.py uses


def why_not(
    implementation: str,
    dtype: torch.dtype,
    features: Iterable[str] = (),
    *,
    device: torch.device | str | None = None,
    head_dim: int | None = None,
) -> str | None:
    """Why an implementation cannot run these features together in this dtype and, where given, on this device and with
    this head_dim; None where it can.

    implementation: a name of IMPLEMENTATIONS or KERNELS.
    features: names of FEATURES; none for a plain call.

    "window with dropout in float32 is not supported by NAME; use OTHER"

    Raises:
        ValueError: an unknown implementation, feature, dtype or kind of device.
    """
    if isinstance(features, str):
        raise ValueError(f"features is {features!r}; expected names in a list, as [{features!r}]")
    features = tuple(features) or ("full",)
    known = IMPLEMENTATIONS | KERNELS
    if implementation not in known:
        raise ValueError(f"implementation={implementation} is unknown; use one of {', '.join(known)}")
    if unknown := [f for f in features if f not in FEATURES]:
        raise ValueError(f"features has {unknown[0]!r}, which is unknown; use names of {', '.join(FEATURES)}")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={dtype!r} is unknown; use one of PyTorch's, as torch.bfloat16")
    if "block_mask" in features and (twice := [f for f in features if f in IN_THE_MASK]):
        return f"block_mask with {' and '.join(twice)} is not supported; put all of it into the mask"
    reason = head_dim is not None and _head_dim_reason(implementation, head_dim, features, dtype)
    try:
        device = device if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is unknown: {error}") from None
    reason = reason or (device is not None and _device_reason(implementation, device, features, dtype))
    if reason:
        return reason
    chosen = known[implementation]
    missing = [f for f in features if not chosen.supports(f, dtype)]
    if not missing:
        return None
    return f"{' with '.join(missing)} in {_short(dtype)} is not supported by {implementation}; use {chosen.instead}"


def refuse_second_derivative(name: str, instead: str) -> None:
    """RuntimeError in a backward that is to be differentiated again (create_graph): it would silently be a constant.

    PyTorch itself refuses a compiled one.
    """
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise RuntimeError(f"{name} has no second derivative: use {instead}")


def refuse_torch_func(name: str, instead: str, *, maps: bool = False) -> None:
    """RuntimeError inside of torch.func's transforms, whose own message is for authors of an autograd.Function.

    maps: vmap is allowed.
    """
    if torch.compiler.is_compiling():
        return
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and not (maps and transform.key() == torch._C._functorch.TransformType.Vmap):
        known = "grad, vjp, jvp" if maps else "vmap, grad, jvp"
        raise RuntimeError(f"{name} is not for torch.func ({known}): use {instead}")


def has_forward_mode() -> bool:
    """Whether a level of torch.autograd.forward_ad is open, outside of which no tensor has a tangent."""
    return forward_ad._current_level >= 0


def refuse_forward_mode(name: str, instead: str, *tensors: Tensor) -> None:
    """RuntimeError where forward-mode derivatives (jvp) of a tensor are requested: they would silently be zeros."""
    if torch.compiler.is_compiling() or not has_forward_mode():
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(f"{name} has no forward-mode derivative (jvp): use {instead} for it")


def _head_dim_reason(implementation: str, head_dim: int, features: Collection[str], dtype: torch.dtype) -> str | None:
    allowed = HOPPER_HEAD_DIMS if implementation == "hopper" else FLASH_HEAD_DIMS
    # not `in`: under Dynamo head_dim may be a symbol
    fits = allowed.start <= head_dim < allowed.stop and (head_dim - allowed.start) % allowed.step == 0
    if fits or implementation not in ("flash", *KERNELS):
        return None
    if implementation in KERNELS:
        name, instead = implementation, KERNELS[implementation].instead
    else:
        name, instead = "flash attention", _instead_of_flash(features, dtype)
    return f"head_dim {head_dim} is not supported by {name} ({_listed(allowed)}); use {instead}"


def _instead_of_flash(features: Collection[str], dtype: torch.dtype) -> str:
    """The remedy where flash has no kernel: SDPA, which is faster, if it can do what is asked."""
    return SDPA if all(IMPLEMENTATIONS["sdpa"].supports(feature, dtype) for feature in features) else TILED


def _device_reason(
    implementation: str, device: torch.device, features: Collection[str], dtype: torch.dtype
) -> str | None:
    if implementation == "flash":
        return _flash_device_reason(device, features, dtype)
    if implementation == "kvcache":
        return _kvcache_device_reason(device, dtype)
    if implementation == "hopper" and (reason := _no_hopper_device_reason(device)):
        return f"{reason}; use {KERNELS['hopper'].instead}"
    return None


def _flash_device_reason(device: torch.device, features: Collection[str], dtype: torch.dtype) -> str | None:
    instead = _instead_of_flash(features, dtype)
    if dtype not in IMPLEMENTATIONS["flash"].dtypes:
        return f"dtype {dtype} is not supported by flash attention (float32, bfloat16, float16); use {NAIVE}"
    if device.type not in ("cuda", "cpu"):
        return f"device type {device.type} is not supported by flash attention (cuda); use {instead}"
    if _is_elsewhere(device) or (device.type == "cpu" and interpreting()):
        return None
    if not HAS_TRITON:
        return f"flash attention needs Triton, which is not installed and is made for Linux; use {instead}"
    if device.type == "cpu":
        return (
            f"flash attention needs an NVIDIA GPU; use {instead}, "
            "or set TRITON_INTERPRET=1 before the start to test it on a CPU"
        )
    major, minor = capability(device.index)
    if major >= 8:
        return None
    return f"compute capability {major}.{minor} is not supported by flash attention (8.0 or newer); use {instead}"


def _is_elsewhere(device: torch.device) -> bool:
    """Whether a GPU is only planned for, from a machine that has none."""
    return device.type == "cuda" and not torch.cuda.is_available()


def _kvcache_device_reason(device: torch.device, cache_dtype: torch.dtype) -> str | None:
    """Other devices are accepted: where no kernel runs, the definition does."""
    if device.type == "meta":
        return "kvcache reads lengths, which tensors on meta have not; use tensors with values, or FakeTensorMode"
    if device.type != "cuda" or _is_elsewhere(device):
        return None
    needed = (8, 9) if cache_dtype == torch.float8_e4m3fn else (8, 0)
    found = capability(device.index)
    if found >= needed:
        return None
    what = "a cache in float8_e4m3fn" if needed == (8, 9) else "kvcache"
    return (
        f"{what} needs compute capability {needed[0]}.{needed[1]}; this device has {found[0]}.{found[1]}; "
        f"use {KERNELS['kvcache'].instead}"
    )


def why_not_flash(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why `flash_attention` cannot run this checked call."""
    features = features_of(options, q.shape[1], k.shape[1], q.shape[3], v.shape[3])
    reason = why_not("flash", q.dtype, features, device=q.device, head_dim=q.shape[3])
    return reason or _head_dim_reason("flash", v.shape[3], features, q.dtype)


def takes_hopper(q: Tensor, k: Tensor, v: Tensor, options: Options, *, backward: bool = False) -> bool:
    """Whether the Hopper forward (or backward) runs this checked call."""
    head_dim, masked = q.shape[3], options.masked
    features = features_of(options, q.shape[1], k.shape[1], head_dim, v.shape[3])
    if why_not("hopper", q.dtype, features, device=q.device, head_dim=head_dim) or not _loadable(q, k, v):
        return False
    if masked and options.alibi_slopes is not None:
        return False
    if backward:  # it walks a group's heads together: a block mask may not tell them apart
        together = not masked or options.mask_starts.shape[1] == 1 or "gqa" not in features
        return head_dim in HOPPER_BACKWARD_HEAD_DIMS and together
    if masked:
        return head_dim in HOPPER_MASKED_HEAD_DIMS or (head_dim == 64 and options.crowded and not options.softcap)
    return not options.packed or head_dim in HOPPER_PACKED_HEAD_DIMS


def why_not_kvcache(q: Tensor, k_cache: Tensor, options: Options) -> str | None:
    """Why `flash_attention_with_kvcache` cannot run this checked call; where no kernel runs, its definition does."""
    if q.device.type == "cpu" and not interpreting():
        return None
    features = features_of(options, q.shape[1], k_cache.shape[1], q.shape[3], k_cache.shape[3])
    reason = why_not("kvcache", q.dtype, features, head_dim=q.shape[3])
    return reason or _kvcache_device_reason(q.device, k_cache.dtype)


def takes_hopper_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, leftpad: Tensor | None,
    block_table: Tensor | None,
) -> bool:  # fmt: skip
    """Whether the Hopper kernel runs this checked call over a cache; never by its batch size or lengths."""
    if _no_hopper_device_reason(q.device) or not _loadable(q, k_cache, v_cache, k, v):
        return False
    if leftpad is not None and block_table is not None:  # keys in pages would begin inside a copy
        return False
    rows, head_dims, most = q.shape[1] // k_cache.shape[1] * q.shape[2], HOPPER_KVCACHE_HEAD_DIMS, HOPPER_KVCACHE_ROWS
    if k_cache.itemsize == 1:
        head_dims, most = HOPPER_KVCACHE_8_BIT_HEAD_DIMS, HOPPER_KVCACHE_8_BIT_ROWS
    return q.dtype in _HALVES and k_cache.dtype.itemsize < 4 and q.shape[3] in head_dims and rows <= most


def _listed(head_dims: range) -> str:
    steps = "" if head_dims.step == 1 else f"multiples of {head_dims.step} from "
    return f"{steps}{head_dims[0]} to {head_dims[-1]}"


def _no_hopper_device_reason(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"hopper needs a CUDA device; q is on {device.type}"
    if _is_elsewhere(device):
        return None
    major, minor = capability(device.index)
    if (major, minor) != (9, 0):
        return f"hopper needs compute capability 9.0; this device has {major}.{minor}"
    installed = _triton_release()
    if not installed.startswith(f"{TRITON_RELEASE}."):
        return f"hopper is written for Triton {TRITON_RELEASE}; {installed} is installed"
    return None


@lru_cache(maxsize=1)
def _triton_release() -> str:
    return version("triton")  # reads a file


def _loadable(*tensors: Tensor | None) -> bool:
    """Whether TMA can load the tensors, none of which may be empty."""
    return all(x is None or (x.numel() > 0 and tma_ready(x)) for x in tensors)


def features_of(options: Options, num_heads: int, num_kv_heads: int, head_dim: int, head_dim_v: int) -> list[str]:
    """The features that a checked call uses, in the matrix's order."""
    used = {
        "full": not options.causal and not options.local and not options.masked,
        "causal": options.causal,
        "gqa": num_heads != num_kv_heads,
        "head_dim_v": head_dim != head_dim_v,
        "lse": False,  # every implementation here computes it; only the caller knows whether it is returned
        "window": options.local,
        "softcap": options.softcap > 0.0,
        "alibi_slopes": options.alibi_slopes is not None,
        "sinks": options.sinks is not None,
        "dropout": options.dropout_p > 0.0,
        "varlen": options.packed,
        "block_mask": options.masked,
    }
    return [name for name in FEATURES if used[name]]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
