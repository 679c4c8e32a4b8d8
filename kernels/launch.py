"""What the launchers share: tensors fit for a kernel, TMA descriptors, L2 sections, precision."""

from contextlib import nullcontext

import torch
from torch import Tensor

from kernels.device import interpreting, l2_bytes
from kernels.tuning import Tile


def kernel_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Give each tensor a contiguous last dimension; in the interpreter also turn bfloat16 into float32.

    Triton's interpreter keeps bfloat16 as 16-bit integers and multiplies those. With float32 inside and one
    rounding by PyTorch at the end, bfloat16 calls are right there too.
    """
    if tensors[0].dtype == torch.bfloat16 and interpreting():
        tensors = tuple(x.float() for x in tensors)
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def dot_precision(q: Tensor) -> str:
    """float32 products are exact ("ieee"), as PyTorch's are by default; other dtypes ignore this."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def on_device(q: Tensor):
    """Context that makes q's GPU current; entering one costs time, so only when another is."""
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        return torch.cuda.device(q.device)
    return nullcontext()


def heads_per_section(q: Tensor, k: Tensor) -> int:
    """How many query heads' K and V stay in L2 together: a power of two of KV heads, times the group size.

    The rule is flash-attention's: 2^floor(log2(L2 / bytes of one head's K and V)), with a sixth of the cache
    left for what streams through.
    """
    group = q.shape[1] // k.shape[1]
    if not q.is_cuda:
        return group
    kv_bytes = 2 * k.shape[2] * k.shape[3] * k.element_size()
    fitting = l2_bytes(q.device.index) * 5 // 6 // kv_bytes
    return group << max(fitting.bit_length() - 1, 0)


def tma_ready(x: Tensor) -> bool:
    """Whether TMA can address x (B, H, N, D): 16-byte aligned start and strides, none of them 0."""
    unit = 16 // x.element_size()
    if x.data_ptr() % 16:
        return False
    for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True):
        if size != 1 and (stride == 0 or stride % unit):
            return False
    return True


def kernel_operands(
    tile: Tile, block_d: int, *operands: tuple[Tensor, int]
) -> tuple[list, list[tuple[int, int, int]], bool]:
    """What a kernel takes for each (tensor, rows of its tile), the strides, and whether by descriptors.

    Descriptors where the tile wants TMA and every tensor allows it, plain tensors otherwise.
    """
    strides = [x.stride()[:3] for x, _ in operands]
    if not tile.tma or not all(tma_ready(x) for x, _ in operands):
        return [x for x, _ in operands], strides, False
    from triton.tools.tensor_descriptor import TensorDescriptor

    descriptors = []
    for (x, rows), x_strides in zip(operands, strides, strict=True):
        shape = list(x.shape)
        # a dimension of size 1 may carry any stride; the hardware wants a multiple of 16 bytes
        legal = [16 if n == 1 else stride for n, stride in zip(shape, x_strides, strict=False)]
        descriptors.append(TensorDescriptor(x, shape, [*legal, 1], [1, 1, rows, block_d]))
    return descriptors, strides, True
