"""Memory, FLOPs and HBM traffic of attention, counted by hand: the formulas that `scripts.explain` prints.

Sizes: B batch, H query heads, N tokens (queries and keys alike), D head dimension, `element` bytes of a number.
Standard attention writes the scores S and the probabilities P, N x N for each head, to memory; flash attention keeps
only the log-sum-exp of each row. Sources: FlashAttention, arXiv:2205.14135, theorem 2; FlashAttention-2,
arXiv:2307.08691, section 3; the roofline of Williams et al. 2009.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from training.speed import attention_flops

STATISTIC = 4  # bytes of a row's log-sum-exp, maximum or sum: float32


@dataclass(frozen=True)
class Shape:
    """One attention layer; causal halves the pairs that need computing, not those that standard attention stores."""

    batch: int = 1
    num_heads: int = 32
    seq_len: int = 4096
    head_dim: int = 128
    element: int = 2
    causal: bool = False

    @property
    def rows(self) -> int:
        return self.batch * self.num_heads * self.seq_len

    @property
    def tensor_bytes(self) -> int:
        """One of Q, K, V, O."""
        return self.rows * self.head_dim * self.element

    @property
    def matrix_bytes(self) -> int:
        """One of S and P, in the inputs' precision."""
        return self.rows * self.seq_len * self.element

    @property
    def pairs(self) -> float:
        """(query, key) pairs over all heads."""
        return self.rows * self.seq_len * (0.5 if self.causal else 1.0)


def memory(shape: Shape) -> dict[str, dict[str, int]]:
    """Bytes that one layer keeps for its backward: 4BHND + 2BHN^2 elements, or 4BHND elements and BHN statistics."""
    tensors = dict.fromkeys("QKVO", shape.tensor_bytes)
    return {
        "standard": tensors | {"S": shape.matrix_bytes, "P": shape.matrix_bytes},
        "flash": tensors | {"LSE": shape.rows * STATISTIC},
    }


def flops(shape: Shape) -> dict[str, float]:
    """FLOPs by pass. A product over the pairs costs 2 D a pair: forward has 2 of them, standard backward 4 (dV, dP, dQ,
    dK), recomputing backward 5 (S again)."""
    product = attention_flops(shape.pairs, shape.head_dim) / 2
    return {"forward": 2 * product, "standard backward": 4 * product, "recomputing backward": 5 * product}


def recomputation_share(shape: Shape) -> dict[str, float]:
    """What computing S again costs, three ways to say it. The often quoted 33 % is one product of three: the forward's
    two and the one that is done again, the backward's own four left out."""
    counted = flops(shape)
    extra = counted["recomputing backward"] - counted["standard backward"]
    return {
        "of forward and standard backward": extra / (counted["forward"] + counted["standard backward"]),
        "of the standard backward": extra / counted["standard backward"],
        "of the forward and itself: the often quoted third, which leaves the backward out": extra
        / (counted["forward"] + extra),
    }


def hbm_bytes(shape: Shape, *, block_q: int = 128) -> dict[str, float]:
    """Forward traffic between HBM and chip.

    standard: Q, K, V in, O out, and S and P each written once and read once. flash: Q and O once, K and V once for each
    tile of block_q queries (half as often with a causal mask), LSE once; what the L2 cache catches is not taken off.
    """
    passes = -(-shape.seq_len // block_q) * (0.5 if shape.causal else 1.0)
    return {
        "standard": 4 * shape.tensor_bytes + 4 * shape.matrix_bytes,
        "flash": 2 * shape.tensor_bytes + 2 * shape.tensor_bytes * max(passes, 1.0) + shape.rows * STATISTIC,
        "flash, K and V caught by L2": 4 * shape.tensor_bytes + shape.rows * STATISTIC,
    }


def loop_order_bytes(shape: Shape, *, block_q: int = 128, block_k: int = 128) -> dict[str, dict[str, float]]:
    """HBM traffic of the two loop orders, forward.

    FlashAttention-1 has keys outside: for each tile of keys every query's O, maximum and sum are read and written
    again. FlashAttention-2 has queries outside: the row state stays on the chip, K and V are read for each tile of
    queries.
    """
    q_tiles, k_tiles = -(-shape.seq_len // block_q), -(-shape.seq_len // block_k)
    state = shape.tensor_bytes + 2 * shape.rows * STATISTIC
    return {
        "keys outside (FA1)": {
            "Q": k_tiles * shape.tensor_bytes,
            "K, V": 2 * shape.tensor_bytes,
            "O, maximum, sum": (2 * k_tiles - 1) * state,
        },
        "queries outside (FA2)": {
            "Q": shape.tensor_bytes,
            "K, V": 2 * q_tiles * shape.tensor_bytes,
            "O, LSE": shape.tensor_bytes + shape.rows * STATISTIC,
        },
    }


def tile_loads(pairs: Iterable[tuple[object, object]]) -> tuple[int, int]:
    """How often a loop over (query tile, key tile) takes up another tile of queries, and another tile of keys."""
    counts, held = [0, 0], [None, None]
    for pair in pairs:
        for side in (0, 1):
            counts[side] += pair[side] != held[side]
            held[side] = pair[side]
    return counts[0], counts[1]


@dataclass(frozen=True)
class GPU:
    """Data-sheet figures: dense 16-bit tensor FLOP/s, HBM bytes/s, shared memory that one block may use."""

    name: str
    flops: float
    bandwidth: float
    shared_bytes: int

    @property
    def ridge(self) -> float:
        """FLOPs a byte above which the arithmetic, not the memory, is the limit."""
        return self.flops / self.bandwidth


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("t4", 65e12, 320e9, 64 * 1024),
        GPU("a100", 312e12, 2.039e12, 163 * 1024),
        GPU("h100", 989.4e12, 3.35e12, 227 * 1024),
        GPU("h200", 989.4e12, 4.8e12, 227 * 1024),
        GPU("b200", 2250e12, 8.0e12, 227 * 1024),
        GPU("rtx4090", 165.2e12, 1.008e12, 99 * 1024),
    )
}


def intensity(shape: Shape) -> dict[str, float]:
    """FLOPs a byte of HBM traffic, forward; what the softmax needs is not counted."""
    return {name: flops(shape)["forward"] / moved for name, moved in hbm_bytes(shape).items()}


def predicted_seconds(shape: Shape, gpu: GPU) -> dict[str, float]:
    """The roofline's least time of a forward: the longer of arithmetic and memory traffic."""
    arithmetic = flops(shape)["forward"] / gpu.flops
    return {name: max(arithmetic, moved / gpu.bandwidth) for name, moved in hbm_bytes(shape).items()}


def tile_bytes(block_q: int, block_k: int, head_dim: int, element: int = 2, stages: int = 2) -> dict[str, int]:
    """Shared memory of a forward tile: Q, `stages` tiles of K and of V, S in fp32 where it does not stay in registers,
    O's tile for the store, and the row statistics."""
    return {
        "Q": block_q * head_dim * element,
        "K": stages * block_k * head_dim * element,
        "V": stages * block_k * head_dim * element,
        "S": block_q * block_k * 4,
        "O": block_q * head_dim * element,
        "maximum, sum": 2 * block_q * STATISTIC,
    }
