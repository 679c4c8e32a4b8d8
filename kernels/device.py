"""What the machine can do: capability, shared memory, SM count, dense peak (None when unknown)."""

import os
from functools import lru_cache

import torch

# Dense bf16 tensor-core peaks in FLOP/s, from NVIDIA's data sheets (the figures without sparsity), matched
# against the device name in this order: the longer name stands before the shorter one it contains.
_DENSE_BF16_PEAK = (
    ("GH200", 989.4e12),
    ("H200", 989.4e12),
    ("H100 PCIe", 756.0e12),
    ("H100 NVL", 835.5e12),
    ("H100 80GB HBM3", 989.4e12),  # the SXM5 board's own name
    ("A100", 312.0e12),
    ("A10G", 70.0e12),
    ("A10", 125.0e12),
    ("L40S", 362.05e12),
    ("L40", 181.05e12),
    ("L4", 121.0e12),
    ("RTX 3090", 71.0e12),
    ("RTX 4090", 165.2e12),
)


def dense_bf16_peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of the GPU with this name in FLOP/s (fp32 accumulation); None when unknown."""
    words = device_name.split()
    for name, peak in _DENSE_BF16_PEAK:
        wanted = name.split()
        if any(words[i : i + len(wanted)] == wanted for i in range(len(words))):
            return peak
        if len(wanted) == 1 and any(word.split("-")[0] == name for word in words):  # "A100-SXM4-80GB"
            return peak
    return None


def interpreting() -> bool:
    """True when Triton kernels run in its interpreter, as numpy on the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def capability(device_index: int) -> tuple[int, int]:
    """Compute capability of a CUDA device, for example (9, 0). PyTorch caches it; Dynamo warns of caches of ours."""
    return torch.cuda.get_device_capability(device_index)


@lru_cache(maxsize=64)
def shared_memory_bytes(device_index: int) -> int:
    """Shared memory that one thread block may use, in bytes (232,448 on an H100 or H200)."""
    return torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin


@lru_cache(maxsize=64)
def num_sms(device_index: int) -> int:
    """Number of streaming multiprocessors (132 on an H100 SXM or H200)."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@lru_cache(maxsize=64)
def l2_bytes(device_index: int | None) -> int:
    """Size of the L2 cache in bytes; 0 where there is no GPU (None)."""
    if device_index is None:
        return 0
    return torch.cuda.get_device_properties(device_index).L2_cache_size
