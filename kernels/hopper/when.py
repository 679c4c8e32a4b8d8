"""When the Hopper kernels run: read by the operator for every new kind of call, before their modules are loaded."""

from functools import lru_cache
from importlib.metadata import version

from torch import Tensor

from ..device import capability
from ..options import Options
from ..support import features_of, refusal

# TMA strides are multiples of 16 bytes. Tiles are 64, 128 or 256 columns wide, the rest is padding; with 32 this is
# still faster than the portable kernels' narrower tiles, with less it was not measured.
HEAD_DIMS = range(32, 257, 8)
BACKWARD_HEAD_DIMS = range(32, 129, 8)  # dK and dV (64, 256) in fp32 would take 256 registers of each thread
PACKED_HEAD_DIMS = range(72, 257, 8)  # below, the portable forward is the faster one for documents (NOTES.md)
FP8_HEAD_DIMS = (64, 128)
TRITON_RELEASE = "3.6"  # the one whose private names kernels/hopper/tma.py uses


def hopper_unsupported_reason(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *, backward: bool = False
) -> str | None:
    """Why the Hopper forward (or backward) does not take this call, in one sentence; None when it does."""
    features = features_of(options, q.shape[1], k.shape[1], q.shape[3], v.shape[3])
    reason = refusal("hopper", features, q.dtype, backward=backward)
    if reason is not None:
        return reason
    if q.shape[3] not in HEAD_DIMS:
        return f"head_dim {q.shape[3]} is not supported by hopper ({_listed(HEAD_DIMS)})"
    if backward and q.shape[3] not in BACKWARD_HEAD_DIMS:
        return (
            f"head_dim {q.shape[3]} is not supported by the hopper backward ({_listed(BACKWARD_HEAD_DIMS)}): "
            "wider dK and dV do not fit in registers"
        )
    reason = _no_place_reason(q, k)
    if reason is not None:
        return reason
    if options.packed and q.shape[3] not in PACKED_HEAD_DIMS:
        return f"the portable kernels are faster for packed documents with head_dim {q.shape[3]}"
    return _unaddressable_reason(q, k, v)


def hopper_fp8_unsupported_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the FP8 forward does not take these e4m3 tensors, in one sentence with the remedy; None when it does."""
    if q.shape[3] not in FP8_HEAD_DIMS:
        reason = f"head_dim {q.shape[3]} is not supported in FP8 ({' or '.join(map(str, FP8_HEAD_DIMS))})"
    else:
        reason = _no_place_reason(q, k) or _unaddressable_reason(q, k, v)
    return None if reason is None else f"{reason}; use flash_attention in bfloat16"


def tile_width(head_dim: int) -> int:
    """Columns of the tiles that hold head_dim of them: those beyond read as 0 and are not written."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def _listed(head_dims: range) -> str:
    return f"multiples of {head_dims.step} from {head_dims[0]} to {head_dims[-1]}"


def _no_place_reason(q: Tensor, k: Tensor) -> str | None:
    """What keeps every Hopper kernel from running: the device, the Triton, nothing to do."""
    if q.device.type != "cuda":
        return f"hopper needs a CUDA device; q is on {q.device.type}"
    major, minor = capability(q.device.index)
    if (major, minor) != (9, 0):
        return f"hopper needs compute capability 9.0; this device has {major}.{minor}"
    installed = _triton_release()
    if not installed.startswith(f"{TRITON_RELEASE}."):
        return f"hopper is written for Triton {TRITON_RELEASE}; {installed} is installed"
    if q.numel() == 0 or k.numel() == 0:
        return "hopper takes no empty tensors"
    return None


@lru_cache(maxsize=1)
def _triton_release() -> str:
    return version("triton")  # reads a file: 0.3 ms


def _unaddressable_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not addressable(tensor):
            return (
                f"hopper needs {name} 16-byte aligned with strides that are multiples of 16 bytes; "
                f"it has strides {tuple(tensor.stride())}"
            )
    return None


def addressable(x: Tensor) -> bool:
    """Whether TMA can address x (B, H, N, D): 16-byte aligned start and strides, the last one 1, none 0."""
    unit = 16 // x.element_size()
    if x.data_ptr() % 16 or x.stride(-1) != 1:
        return False
    return all(
        size == 1 or (stride > 0 and stride % unit == 0)
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )
