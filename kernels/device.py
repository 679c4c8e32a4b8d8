"""What GPUs can do: the one table of boards, and this machine's capability, SM count and L2 cache."""

import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache

import torch

# Our operators' namespace in PyTorch, global to the process: a copy of this folder by another name has its own.
OPERATORS = "flashgpt" if __package__ == "kernels" else "flashgpt_" + re.sub(r"\W", "_", __package__)

# Triton supports Linux only. Without it, everything that does not need it still runs.
HAS_TRITON = importlib.util.find_spec("triton") is not None

# Shared memory that one block may use, in bytes, by compute capability x 10: CUDA guide, table 30.
SHARED_LIMIT_BYTES = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}


@dataclass(frozen=True)
class GPU:
    """A board, from NVIDIA's data sheets."""

    name: str  # words of the device's name
    arch: int  # compute capability x 10
    dense_flops: float  # 16-bit tensor-core FLOP/s without sparsity, fp32 accumulation; fp16 alone before arch 80
    memory_bytes_per_second: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which arithmetic, not memory, is the limit."""
        return self.dense_flops / self.memory_bytes_per_second


# Matched word by word; the first match wins.
GPUS = (
    GPU("B200", 100, 2250e12, 8.0e12),
    GPU("GH200", 90, 989.4e12, 4.0e12),
    GPU("H200", 90, 989.4e12, 4.8e12),
    GPU("H100 PCIe", 90, 756.0e12, 2.0e12),
    GPU("H100 NVL", 90, 835.5e12, 3.9e12),
    GPU("H100 80GB HBM3", 90, 989.4e12, 3.35e12),  # the SXM5 board's own name
    GPU("A100", 80, 312.0e12, 2.039e12),
    GPU("A10G", 86, 70.0e12, 0.6e12),
    GPU("A10", 86, 125.0e12, 0.6e12),
    GPU("L40S", 89, 362.05e12, 0.864e12),
    GPU("L40", 89, 181.05e12, 0.864e12),
    GPU("L4", 89, 121.0e12, 0.3e12),
    GPU("RTX 3090", 86, 71.0e12, 0.936e12),
    GPU("RTX 4090", 89, 165.2e12, 1.008e12),
    GPU("T4", 75, 65.0e12, 0.32e12),
)


def gpu_named(device_name: str) -> GPU | None:
    """The board with this device name; None when unknown."""
    words = device_name.split()
    for gpu in GPUS:
        wanted = gpu.name.split()
        if any(words[i : i + len(wanted)] == wanted for i in range(len(words))):
            return gpu
        if len(wanted) == 1 and any(word.split("-")[0] == gpu.name for word in words):  # "A100-SXM4-80GB"
            return gpu
    return None


def interpreting() -> bool:
    """True when Triton kernels run in its interpreter, as numpy on the CPU (TRITON_INTERPRET=1)."""
    return HAS_TRITON and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def failure_of_triton() -> str | None:
    """What stops Triton from using this machine's GPU, in its own words, or None.

    Triton compiles a C file before its first kernel. Afterwards, also on other machines with the same home, the file
    comes from its cache.
    """
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except (ImportError, RuntimeError, AssertionError, OSError, subprocess.CalledProcessError) as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return None


def capability(device_index: int) -> tuple[int, int]:
    """Compute capability of a CUDA device, for example (9, 0). PyTorch caches it; Dynamo warns of caches of ours."""
    return torch.cuda.get_device_capability(device_index)


@lru_cache(maxsize=64)
def num_sms(device_index: int | None) -> int:
    """Number of streaming multiprocessors (132 on an H100 SXM or H200); 0 where there is no GPU (None)."""
    if device_index is None:
        return 0
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@lru_cache(maxsize=64)
def l2_bytes(device_index: int | None) -> int:
    """Size of the L2 cache in bytes; 0 where there is no GPU (None)."""
    if device_index is None:
        return 0
    return torch.cuda.get_device_properties(device_index).L2_cache_size
