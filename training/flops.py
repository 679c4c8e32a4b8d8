"""FLOPs of a GPT, and what share of the chip's peak a run reaches (MFU).

A matrix product with a weight of P entries costs 2P FLOPs a token forward and 4P backward. Attention's two products
cost 4 * num_heads * head_dim FLOPs for each (query, key) pair forward and 2.5x that backward in FlashAttention's own
count (the scores are computed again); MFU counts the 2x that the mathematics needs, as PaLM does, for every backend
alike. Two conventions for the pairs of a causal mask are in use and differ by 2x in the attention term:
`causal` counts the pairs that are visible, (N + 1) / 2 a token; `full` counts all N (PaLM, appendix B; nanoGPT).
"""

import torch

from kernels.device import dense_bf16_peak_flops
from model import GPT


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense FLOP/s of the chip's tensor cores in bfloat16; None for other formats and for chips that are not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return dense_bf16_peak_flops(torch.cuda.get_device_name(device))


def attention_flops(pairs: float, head_dim: int) -> float:
    """Forward FLOPs of attention's two products over `pairs` of (query, key), all heads counted."""
    return 4 * pairs * head_dim


def flops_per_token(
    *,
    matmul_parameters: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    seq_len: int,
    window: int | None = None,
) -> dict[str, float]:
    """Forward and backward FLOPs a token, under both conventions.

    matmul_parameters: entries of all weights that multiply activations (the output projection included, tied or not;
    the embedding look-up not).
    window: keys that a token sees, itself included; None: all before it. Document masks are not taken off: with them
    the true figure is lower, and so is the MFU.
    """
    dense = 6 * matmul_parameters
    pair = 3 * num_layers * attention_flops(num_heads, head_dim)
    seen = seq_len if window is None else min(window, seq_len)
    visible = seen - seen * (seen - 1) / (2 * seq_len)  # the mean of min(i, seen) over i = 1 .. seq_len
    return {"causal": dense + pair * visible, "full": dense + pair * seen}


def model_flops(model: GPT) -> dict[str, float]:
    """`flops_per_token` of a model at its full context."""
    return flops_per_token(
        matmul_parameters=model.num_matmul_parameters(),
        num_layers=model.config.num_layers,
        num_heads=model.config.num_heads,
        head_dim=model.config.head_dim,
        seq_len=model.seq_len,
        window=model.config.window,
    )


def mfu(flops_a_token: float, tokens_per_second: float | None, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation in [0, 1]; None where the chip's dense peak or the speed is not known."""
    if tokens_per_second is None or peak_flops is None:
        return None
    return flops_a_token * tokens_per_second / peak_flops
