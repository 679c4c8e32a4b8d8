"""A token for each row of logits, drawn in one launch and without a sort.

In a step of generation PyTorch's way, some thirty kernels around a top-k or a sort of the whole vocabulary, took from a
fifth to half of the time. This file is the contract (torch only); the kernels load when a CUDA tensor, or the
interpreter, needs them.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..call import check_tensor
from ..device import interpreting
from ..ops import mark_written

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FEW = 896  # the top_k up to which tokens are compared with each other: 20 to 100 us, however many rows there are
ROWS = 8  # a larger top_k takes 140 to 360 us, from 8 rows on less than PyTorch's sort: 160 for one row, 700 for 64


def takes_draw_tokens(logits: Tensor, top_k: int | None) -> bool:
    """Whether to use `draw_tokens` for these logits: on CUDA, not in float64, with a small top_k or many rows."""
    few = (logits.size(1) if top_k is None else top_k) <= FEW
    return logits.is_cuda and logits.dtype in DTYPES and (few or len(logits) >= ROWS)


def draw_tokens(
    logits: Tensor,
    uniform: Tensor | None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return in each row the first token at which the cumulative mass exceeds uniform times the mass of all.

    A token's mass is exp(logit / temperature). Tokens are ordered by falling logit, equal ones by rising id.
    Only the first top_k count, and of those the ones preceded by less than top_p of their mass. Computed in float64.

    Args:
        logits: (S, V), bf16, fp16 or fp32, on CUDA or in the interpreter.
        uniform: (S,) float64 in [0, 1), on logits' device. At temperature 0 it is not read and may be None.
        temperature: 0 for the largest logit, of equal ones the smallest id.
        top_k: 1 to V; None: V.
        top_p: in (0, 1]; None: all.
        out: (S,) int64, contiguous, on logits' device: where to write the ids; None: into a new tensor.

    Returns:
        (S,) int64: ids, an arbitrary one where a logit of the row is NaN or inf.

    Raises:
        ValueError: a shape, dtype, device or number that is not allowed.
        RuntimeError: a tracer or transform (torch.compile, torch.func, fake tensors), which sees no operator here.
    """
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if transformed or isinstance(logits, FakeTensor):
        raise RuntimeError("draw_tokens is not for torch.compile, torch.func or fake tensors: call it outside of them")
    for name, x in (("logits", logits), ("uniform", uniform), ("out", out)):
        if x is not None:
            check_tensor(name, x)
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be 0 or a positive number")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1, or None")
    fits = logits.dim() == 2 and logits.size(1) > 0
    if temperature == 0:
        uniform = None
    elif uniform is None:
        raise ValueError(f"uniform=None decides nothing at temperature={temperature}; give (S,) numbers")
    else:
        fits = fits and uniform.shape == logits.shape[:1] and uniform.device == logits.device
    if not fits or (uniform is not None and uniform.dtype != torch.float64):
        raise ValueError(
            f"logits has shape {tuple(logits.shape)} on {logits.device}"
            + ("" if uniform is None else f" and uniform {tuple(uniform.shape)} of {uniform.dtype} on {uniform.device}")
            + "; expected (S, V) and (S,) float64 on one device"
        )
    if logits.dtype not in DTYPES or not (logits.is_cuda or interpreting()):
        raise ValueError(f"logits are {logits.dtype} on {logits.device}; expected bf16, fp16 or fp32 on CUDA")
    if top_k is not None and not (1 <= top_k <= logits.size(1) and top_k == int(top_k)):
        raise ValueError(f"top_k={top_k} must be a whole number, 1 to the {logits.size(1)} logits of a row")
    if out is None:
        out = logits.new_empty(len(logits), dtype=torch.int64)
    elif not (out.shape == logits.shape[:1] and out.dtype == torch.int64 and out.device == logits.device):
        raise ValueError(
            f"out has shape {tuple(out.shape)} and dtype {out.dtype} on {out.device}; expected ({len(logits)},) int64 "
            f"on {logits.device}"
        )
    elif not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}; expected a contiguous tensor")
    else:
        mark_written(out)
    from .draw_tokens_kernels import launch_draw_tokens

    if uniform is None:
        return launch_draw_tokens(logits, None, 0.0, None, None, out)
    top_k, top_p = None if top_k is None else int(top_k), None if top_p is None else float(top_p)
    uniform = uniform.contiguous()  # the kernels read it without a stride
    return launch_draw_tokens(logits, uniform, float(temperature), top_k, top_p, out)
