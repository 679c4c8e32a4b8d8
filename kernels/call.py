"""A call of attention: its options, every check of them, and the key by which calls of one kind are cached.

All implementations share the checks, and so the messages.
"""

import math
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from .block_masks import BlockMask, check_block_mask

# Scales and soft-caps are multiplied and divided in float32, whose range is 1e-38 to 3e38.
_SMALLEST, _LARGEST = 1e-30, 1e30


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
    sinks: Tensor | None = None  # (Hq,) float32: a score per head, without a key
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None  # () int64
    cu_seqlens_q: Tensor | None = None  # (documents + 1,) int32: where each document's queries start
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0  # an upper bound on a document's length; 0 without documents
    max_seqlen_k: int = 0
    mask_starts: Tensor | None = None  # the three tensors of a BlockMask
    mask_visits: Tensor | None = None
    mask_bits: Tensor | None = None

    @property
    def local(self) -> bool:
        """A window with bounds of its own, not the causal one."""
        return self.window_left >= 0 or self.window_right >= 0

    @property
    def without_tensors(self) -> bool:
        return self.alibi_slopes is self.sinks is self.dropout_seed is self.cu_seqlens_q is self.mask_starts is None

    def with_tensors_of(self, other: "Options | None") -> "Options":
        """The same numbers with the slopes, sinks and documents of other options; None removes them."""
        if other is None:
            other = _NO_TENSORS
        elif other.without_tensors:
            return self
        return self._replace(
            alibi_slopes=other.alibi_slopes, sinks=other.sinks, cu_seqlens_q=other.cu_seqlens_q,
            cu_seqlens_k=other.cu_seqlens_k,
        )  # fmt: skip

    @property
    def packed(self) -> bool:
        """Documents end to end in one row of tokens."""
        return self.cu_seqlens_q is not None

    @property
    def masked(self) -> bool:
        """A block mask decides which query sees which key."""
        return self.mask_starts is not None

    @property
    def crowded(self) -> bool:
        """Whether the block mask, of about as many queries as keys, visits about 0.3 of its blocks or more."""
        batch, heads, rows, _ = self.mask_starts.shape  # n x n blocks: 8/3 n rows; a visited block is in 8/3 lists
        return 9 * self.mask_visits.shape[0] > batch * heads * rows**2


_NO_TENSORS = Options(False, 1.0)


def key_of(kind: object, options: Options, *tensors: Tensor) -> tuple:
    """Everything that the checks, the choice of kernels and their launches depend on, but for addresses and stream.

    Calls of equal keys may replay each other's launches. `kind` distinguishes passes and overrides. For each tensor the
    key has its shape, strides, dtype, device and whether its address is a multiple of 16, which TMA needs.
    """
    described = []
    for x in tensors:
        described += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0)
    if options.masked:  # the numbers of visits and patterns may vary: no launch depends on more than `crowded`
        options = options._replace(mask_visits=options.crowded, mask_bits=None)
    if not options.without_tensors:
        options = tuple([(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in options])
    return kind, options, *described


_PLAIN_TYPES = {bool, int, float, type(None)}
_NO_PACKING = (None, None, 0, 0)


def plain_options(
    causal, scale, window, softcap, dropout_p, alibi_slopes=None, sinks=None, cu_seqlens=None, max_seqlen=None
) -> Options | None:
    """A call's options as given, where they can be part of a key; None otherwise.

    They can if they are plain numbers (anything else may change its value) and tensors that no check would change,
    without dropout (whose seed is new at each call) and with a positive scale (another one changes q).
    """
    if type(window) is not tuple or len(window) != 2:
        return None
    if type(window[0]) is not int or type(window[1]) is not int:  # in a key True equals 1
        return None
    if not _PLAIN_TYPES.issuperset(map(type, (causal, scale, softcap, dropout_p))):
        return None
    if dropout_p != 0.0 or (scale is not None and not scale > 0.0):
        return None
    packing = _NO_PACKING
    if cu_seqlens is not None or max_seqlen is not None:
        packing = (*_pair(cu_seqlens), *_pair(max_seqlen))
        if len(packing) != 4 or packing[0] is None or type(packing[2]) is not int or type(packing[3]) is not int:
            return None
    for x in (alibi_slopes, sinks, *packing[:2]):
        if x is not None and not (isinstance(x, Tensor) and x.is_contiguous()):
            return None
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        return None
    return Options(causal, scale, *window, softcap, alibi_slopes, sinks, 0.0, None, *packing)


def unchanged(given: Options, checked: Options) -> bool:
    """Whether the checks left the tensors of `plain_options` as they were given."""
    pairs = [(x, y) for x, y in zip(given, checked, strict=True) if isinstance(x, Tensor)]
    return all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)


def _pair(given: object) -> tuple:
    """(the queries', the keys') values of an argument that may be a single one for both."""
    return given if isinstance(given, tuple) else (given, given)


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    max_seqlen: int | tuple[int, int] | None = None,
    block_mask: BlockMask | None = None,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Options]:
    """Check a call; return q, k, v, cast where autocast is on, and the options in canonical form.

    q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv), options as in `flash_attention`. What cu_seqlens hold is
    checked later, by `check_documents`. Raises ValueError, naming the argument, its value and what is allowed.
    """
    q, k, v = autocast_inputs(q, k, v)
    _check_tensors(q, k, v)
    if not deterministic:
        raise ValueError(f"deterministic is {deterministic}; every result here is deterministic: leave it True")
    batch, heads, device = q.shape[0], q.shape[1], q.device
    causal, *window = canonical_window(causal, window)
    packing = _check_packing(q, k, cu_seqlens, max_seqlen)
    rows = batch if packing[0] is None else packing[0].shape[0] - 1
    scale = _check_scale(scale, q.shape[3])
    options = Options(
        causal,
        scale,
        *window,
        _check_softcap(softcap, scale),
        _check_slopes(alibi_slopes, rows, q),
        _check_sinks(sinks, q),
        *_check_dropout(dropout_p, dropout_seed, device),
        *packing,
        *(() if block_mask is None else check_block_mask(block_mask, batch, heads, q.shape[2], k.shape[2], device)),
    )
    return q, k, v, options


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast casts x to. PyTorch never autocasts float64, and the meta device has no autocast."""
    kind = x.device.type
    cast = x.is_floating_point() and x.dtype != torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if cast else x.dtype


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in autocast's dtype where it is on, as in PyTorch's own attention. ValueError for a non-tensor."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    if (kind := q.device.type) == "meta" or not torch.is_autocast_enabled(kind):  # checked once: host time matters
        return q, k, v
    return tuple(x.to(autocast_dtype(x)) for x in (q, k, v))


def canonical_window(causal: bool, window: tuple[int, int]) -> tuple[bool, int, int]:
    """(causal, left, right) with causal folded into a bounded window. Raises ValueError on a bad window."""
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"window is {window!r}; expected two integers (left, right), -1 for no bound")
    if type(causal) is not bool and (isinstance(causal, Tensor) or causal not in (True, False)):
        raise ValueError(f"causal is {causal!r}; it must be True or False")
    left, right = integer("window's left bound", window[0]), integer("window's right bound", window[1])
    for name, bound in (("left", left), ("right", right)):
        if bound < -1:
            raise ValueError(f"window has {name} bound {bound}; it must be at least 0, or -1 for no bound")
    if causal:
        right = 0
    if left == -1 and right in (-1, 0):
        return right == 0, -1, -1
    return False, left, right


def integer(name: str, value: object) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{name} is {value}; it must be an integer")
    if isinstance(value, int | torch.SymInt):
        return value
    try:
        return operator.index(int(value) if isinstance(value, float) and value.is_integer() else value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be an integer") from None


def _number(name: str, value: object) -> float:
    if isinstance(value, int | float):
        return value
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} asks for a gradient and is a constant here; pass {name}.detach() (a learned scale can multiply q)"
        )
    if hasattr(value, "__float__"):  # NumPy's numbers, tensors of one element
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            pass
    raise ValueError(f"{name} has type {type(value).__name__}; it must be a number")


def check_tensor(name: str, x: object, axes: str = "") -> None:
    """Raise ValueError unless x is a dense tensor of as many dimensions as axes, if any: "tokens, heads, head_dim"."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} has type {type(x).__name__}; expected a torch.Tensor")
    if x.is_nested or x.layout != torch.strided:
        raise ValueError(f"{name} is nested or sparse; expected a dense tensor (documents end to end, with cu_seqlens)")
    if axes and x.dim() != (number := axes.count(",") + 1):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {number} dimensions ({axes})")


def check_cu_seqlens(name: str, x: object) -> None:
    """Raise ValueError where x does not have the dtype and shape of cu_seqlens, int32 (documents + 1,)."""
    check_tensor(name, x)
    if x.dtype != torch.int32 or x.dim() != 1 or x.shape[0] < 2:
        raise ValueError(
            f"{name} has dtype {x.dtype} and shape {tuple(x.shape)}; "
            "expected int32 and (documents + 1,) with at least one document"
        )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor, "batch, heads, tokens, head_dim")
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ValueError(f"{name} has dtype {tensor.dtype}; expected a floating point dtype of 16 bits or more")
        if tensor.shape[-1] == 0:
            raise ValueError(f"{name} has head_dim 0; it must be at least 1")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype} but q has {q.dtype}; cast them to one dtype")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} but q is on {q.device}; move them to one device")
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch size {tensor.shape[0]} but q has {q.shape[0]}; they must be equal")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]} but q has {q.shape[-1]}; they must be equal")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"v has shape {tuple(v.shape)} but k has {tuple(k.shape)}; all but head_dim must be equal")
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads != 0:
        raise ValueError(f"q has {num_heads} heads; it must be a multiple of k's {num_kv_heads} heads")


def _check_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale, 1/sqrt(head_dim) by default."""
    if scale is None:
        return head_dim**-0.5
    scale = _number("scale", scale)
    if not -math.inf < scale < math.inf:  # comparisons: torch.compile cannot trace isfinite of a symbolic float
        raise ValueError(f"scale is {scale}; it must be a finite number")
    if scale != 0.0 and not _SMALLEST <= abs(scale) <= _LARGEST:
        raise ValueError(f"scale is {scale}; it must be 0 or, without its sign, from {_SMALLEST} to {_LARGEST}")
    return float(scale)


def _check_softcap(softcap: float, scale: float) -> float:
    softcap = _number("softcap", softcap)
    if softcap == 0.0:  # checked first: for torch.compile the default is then a constant, compiled once
        return 0.0
    if not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; it must be a positive number, or 0 for none")
    if not _SMALLEST <= softcap <= _LARGEST:
        raise ValueError(f"softcap is {softcap}; it must be 0 or from {_SMALLEST} to {_LARGEST}")
    if abs(scale) > softcap * _LARGEST:  # 0 times their quotient would be NaN
        raise ValueError(f"softcap is {softcap} and scale {scale}; scale may be at most {_LARGEST} times as large")
    return float(softcap)


def _check_slopes(slopes: Tensor | None, rows: int, q: Tensor) -> Tensor | None:
    """ALiBi slopes as (rows, Hq) float32, or float64 beside float64 inputs; a row is a batch entry or a document."""
    if slopes is None:
        return None
    _check_per_head("alibi_slopes", slopes, q.device)
    heads = q.shape[1]
    if tuple(slopes.shape) not in ((heads,), (rows, heads)):
        raise ValueError(f"alibi_slopes has shape {tuple(slopes.shape)}; expected ({heads},) or ({rows}, {heads})")
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes asks for a gradient; slopes are constants here, pass alibi_slopes.detach()")
    return slopes.detach().to(torch.promote_types(q.dtype, torch.float32)).expand(rows, heads)


def _check_sinks(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """Sinks as (Hq,) float32, or float64 beside float64 inputs."""
    if sinks is None:
        return None
    _check_per_head("sinks", sinks, q.device)
    if tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; expected ({q.shape[1]},), one for each head of q")
    return sinks.to(torch.promote_types(q.dtype, torch.float32))


def _check_per_head(name: str, tensor: object, device: torch.device) -> None:
    check_tensor(name, tensor)
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"{name} has dtype {tensor.dtype}; expected a floating point dtype")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but q is on {device}; move them to one device")


def _check_dropout(p: float, seed: int | Tensor | None, device: torch.device) -> tuple[float, Tensor | None]:
    """(p, seed as a () int64 tensor on the device, None where p is 0).

    Without a seed one is drawn from the device's default generator, so `torch.manual_seed` decides it.
    """
    p = _number("dropout_p", p)
    if p == 0.0:
        return 0.0, None
    if not 0.0 < p <= 1.0 - 2.0**-24:  # float32 rounds values in between to 1
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
    seed = integer("dropout_seed", seed)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"dropout_seed is {seed}; it must be from -2^63 to 2^63 - 1")
    return float(p), torch.full((), seed, dtype=torch.int64, device=device)


def _check_packing(q: Tensor, k: Tensor, cu_seqlens, max_seqlen) -> tuple[Tensor | None, Tensor | None, int, int]:
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k); a missing bound is the number of tokens."""
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen is {max_seqlen}, which needs cu_seqlens; pass both or neither")
        return None, None, 0, 0
    if q.shape[0] != 1:
        raise ValueError(f"q has batch size {q.shape[0]}; documents lie end to end in a batch of 1")
    tensors, bounds = _pair(cu_seqlens), _pair(max_seqlen)
    for name, given in (("cu_seqlens", tensors), ("max_seqlen", bounds)):
        if len(given) != 2:
            raise ValueError(f"{name} is a tuple of {len(given)}; it must be one for all or a pair, the queries' first")
    for name, x in zip(("cu_seqlens_q", "cu_seqlens_k"), tensors, strict=True):
        check_cu_seqlens(name, x)
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}; move them to one device")
    cu_seqlens_q, cu_seqlens_k = tensors
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k has {cu_seqlens_k.shape[0] - 1} documents but cu_seqlens_q has "
            f"{cu_seqlens_q.shape[0] - 1}; they must be equal"
        )
    lengths = []
    for name, bound, tokens in zip(("max_seqlen_q", "max_seqlen_k"), bounds, (q.shape[2], k.shape[2]), strict=True):
        lengths.append(tokens if bound is None else integer(name, bound))
        if lengths[-1] < 0:
            raise ValueError(f"{name} is {bound}; it must be at least 0, and the longest document's length")
    return cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), *lengths
