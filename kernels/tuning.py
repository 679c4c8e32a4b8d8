"""The only table of tile sizes: which tile each kernel uses on which GPU, head dimension and dtype, and why."""

from dataclasses import dataclass

import torch

from kernels.device import capability, interpreting


@dataclass(frozen=True)
class Tile:
    """One kernel configuration: rows of Q and of K a program holds, warps, pipeline stages, loads by TMA or pointers."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False


INTERPRETER = Tile(16, 32, 4, 1)
_TABLE = {
    ("fwd", 90, 64): Tile(128, 128, 8, 3, True),
    ("fwd", 90, 128): Tile(128, 128, 8, 2, True),
    ("dkdv", 90, 64): Tile(64, 128, 8, 2, True),
    ("dkdv", 90, 128): Tile(32, 128, 8, 2, True),
    ("dq", 90, 64): Tile(128, 64, 8, 3, True),
    ("dq", 90, 128): Tile(128, 64, 8, 2, True),
}


def table_tile(kernel: str, arch, element_bytes: int, head_dim: int, causal: bool) -> Tile:
    return _TABLE[kernel, 90, head_dim]


def tile_for(kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int, causal: bool) -> Tile:
    if interpreting():
        return INTERPRETER
    return table_tile(kernel, capability(device.index), dtype.itemsize, head_dim, causal)
