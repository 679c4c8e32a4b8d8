"""What a call asks for beyond q, k and v: checked once, in one form for every implementation."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Options(NamedTuple):
    """The options of one call in canonical form; the operator's schema lists the same fields in this order.

    `causal` and a window exclude each other: causal is the window (-1, 0), and a bounded window with causal
    has 0 on its right.
    """

    causal: bool
    scale: float
    window_left: int = -1  # how far back a query sees from its diagonal key; -1: to the first key
    window_right: int = -1  # how far ahead; -1: to the last key
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: off
    alibi_slopes: Tensor | None = None  # (B or documents, Hq) float32
    sinks: Tensor | None = None  # (Hq,) float32: a score per head that has no key
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None  # () int64
    cu_seqlens_q: Tensor | None = None  # (documents + 1,) int32: where each document's queries start
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0  # an upper bound on a document's length; 0 without documents
    max_seqlen_k: int = 0

    @property
    def local(self) -> bool:
        """A window with bounds of its own, not the causal one."""
        return self.window_left >= 0 or self.window_right >= 0

    def tensors(self) -> bool:
        """Whether any of them is a tensor."""
        return not (
            self.alibi_slopes is self.sinks is self.dropout_seed is self.cu_seqlens_q is self.cu_seqlens_k is None
        )

    @property
    def packed(self) -> bool:
        """Documents end to end in one row of tokens."""
        return self.cu_seqlens_q is not None


def canonical_window(causal: bool, window: tuple[int, int]) -> tuple[bool, int, int]:
    """(causal, left, right) with causal folded into a bounded window. Raises ValueError on a bad window."""
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"window is {window!r}; expected two integers (left, right), -1 for no bound")
    left, right = window
    for name, bound in (("left", left), ("right", right)):
        if bound < -1:
            raise ValueError(f"window has {name} bound {bound}; it must be at least 0, or -1 for no bound")
    if causal:
        right = 0
    if left == -1 and right in (-1, 0):
        return right == 0, -1, -1
    return False, left, right


def check_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale, 1/sqrt(head_dim) by default. Raises ValueError where it is not a finite number."""
    if scale is None:
        return head_dim**-0.5
    if not -math.inf < scale < math.inf:  # comparisons: torch.compile cannot trace isfinite of a symbolic float
        raise ValueError(f"scale is {scale}; it must be a finite number")
    return float(scale)


def check_softcap(softcap: float) -> float:
    """Raises ValueError where softcap is negative or not finite; 0 is off."""
    if softcap == 0.0:  # asked first: torch.compile then takes the default as a constant, and compiles once
        return 0.0
    if not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; it must be a positive number, or 0 for none")
    return float(softcap)


def check_slopes(slopes: Tensor | None, rows: int, heads: int, device: torch.device) -> Tensor | None:
    """ALiBi slopes as (rows, heads) float32, where a row is a batch entry or a document.

    Raises ValueError on a wrong shape, dtype or device, and where they ask for a gradient, which they have not.
    """
    if slopes is None:
        return None
    if tuple(slopes.shape) not in ((heads,), (rows, heads)):
        raise ValueError(f"alibi_slopes has shape {tuple(slopes.shape)}; expected ({heads},) or ({rows}, {heads})")
    _check_per_head("alibi_slopes", slopes, device)
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes asks for a gradient; slopes are constants here, pass alibi_slopes.detach()")
    return slopes.detach().to(torch.float32).expand(rows, heads)


def check_sinks(sinks: Tensor | None, heads: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """Sinks as (heads,) float32, or float64 beside float64 inputs. Raises ValueError on a wrong shape, dtype or
    device."""
    if sinks is None:
        return None
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; expected ({heads},), one for each head of q")
    _check_per_head("sinks", sinks, device)
    return sinks.to(torch.promote_types(dtype, torch.float32))


def _check_per_head(name: str, tensor: Tensor, device: torch.device) -> None:
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"{name} has dtype {tensor.dtype}; expected a floating point dtype")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but q is on {device}; move them to one device")


def check_dropout(p: float, seed: int | Tensor | None, device: torch.device) -> tuple[float, Tensor | None]:
    """(p, seed as a () int64 tensor on the device, None where p is 0).

    Without a seed one is drawn from the device's default generator, so `torch.manual_seed` decides it.
    Raises ValueError where p is outside [0, 1) or the seed is not one 64-bit integer.
    """
    if p == 0.0:
        return 0.0, None
    if not 0.0 < p < 1.0:
        raise ValueError(f"dropout_p is {p}; it must be at least 0 and less than 1")
    if seed is None:
        return float(p), torch.randint(2**62, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"dropout_seed has dtype {seed.dtype} and shape {tuple(seed.shape)}; expected an integer or one int64"
            )
        if seed.device != device:
            raise ValueError(f"dropout_seed is on {seed.device} but q is on {device}; move them to one device")
        return float(p), seed.reshape(())
    return float(p), torch.full((), seed, dtype=torch.int64, device=device)
