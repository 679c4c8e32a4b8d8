"""The operators' contracts: schemas, fake (shape-only) versions and autograd. Torch only; launchers load when
called.

`flashgpt::flash_fwd(q, k, v, ...) -> (o, lse)` is opaque to torch.compile and to autocast, and its name is what
a selective checkpointing policy compares with. The arguments after v are the fields of `kernels.options.Options`
in order. Outputs that hold tokens and heads are stored as (B, N, H, D). Packed documents are one batch entry.

They are defined through `torch.library.Library`, not `custom_op`: with 16 arguments the latter's autograd spends 65
microseconds a call in filling in defaults, here all of it takes 10.
"""

import torch
from torch import Tensor

from .hopper.when import hopper_unsupported_reason
from .inputs import check_documents
from .options import Options
from .replay import description

_LIBRARY = torch.library.Library("flashgpt", "FRAGMENT")
_OPTIONS = (
    "bool causal, float scale, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, "
    "Tensor? alibi_slopes=None, Tensor? sinks=None, float dropout_p=0.0, Tensor? dropout_seed=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0"
)
_LIBRARY.define(f"flash_fwd(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor o, Tensor lse)")
_LIBRARY.define(
    f"flash_bwd(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)

# O (B, Hq, Nq, Dv) and LSE (B, Hq, Nq), natural logarithm, float32. `scale` is positive. Raises ValueError where
# cu_seqlens do not describe the tokens: their values are first known when the operator runs.
flash_fwd = torch.ops.flashgpt.flash_fwd.default
# dQ, dK, dV in the inputs' shapes and dtype, and dsinks (Hq,) float32, (0,) without sinks. `dlse` (B, Hq, Nq) is
# None when LSE was not used.
flash_bwd = torch.ops.flashgpt.flash_bwd.default


_HOPPER: dict[tuple, bool] = {}  # (description of a call, backward) -> whether the Hopper kernels take it


def _on_hopper(q: Tensor, k: Tensor, v: Tensor, options: Options, *, backward: bool) -> bool:
    """The one place where an implementation is chosen for checked inputs.

    Every implementation keeps one contract: the same inputs, the same (O, LSE), the same bits each time. The backward
    takes O and LSE from either.
    """
    call = description(options, backward, q, k, v)
    if call is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return False
    chosen = _HOPPER.get(call)
    if chosen is None:
        if len(_HOPPER) >= 1024:
            _HOPPER.clear()
        chosen = _HOPPER[call] = hopper_unsupported_reason(q, k, v, options, backward=backward) is None
    return chosen


def _forward_launcher(q: Tensor, k: Tensor, v: Tensor, options: Options):
    if _on_hopper(q, k, v, options, backward=False):
        from .hopper import forward as hopper

        return hopper.launch_hopper_fwd
    from .portable import forward as portable

    return portable.launch_flash_fwd


def _run_forward(q: Tensor, k: Tensor, v: Tensor, *options) -> tuple[Tensor, Tensor]:
    options = Options(*options)
    if options.packed:
        check_documents(options, q.shape[2], k.shape[2])
    return _forward_launcher(q, k, v, options)(q, k, v, options)


def _run_backward(do, dlse, q, k, v, o, lse, *options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = Options(*options)
    if _on_hopper(q, k, v, options, backward=True):
        from .hopper.backward import launch_hopper_bwd

        return launch_hopper_bwd(do, dlse, q, k, v, o, lse, options)
    from .portable.backward import launch_flash_bwd

    return launch_flash_bwd(do, dlse, q, k, v, o, lse, options)


def _tokens_first(like: Tensor, head_dim: int) -> Tensor:
    """An uninitialised (B, H, N, head_dim) tensor with `like`'s other sizes, stored as (B, N, H, head_dim)."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)


@torch.library.register_fake("flashgpt::flash_fwd", lib=_LIBRARY)
def _(q, k, v, *options):
    return _tokens_first(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("flashgpt::flash_bwd", lib=_LIBRARY)
def _(do, dlse, q, k, v, o, lse, *options):
    dsinks = q.new_empty(0 if Options(*options).sinks is None else q.shape[1], dtype=torch.float32)
    return _tokens_first(q, q.shape[3]), _tokens_first(k, k.shape[3]), _tokens_first(v, v.shape[3]), dsinks


class _Flash(torch.autograd.Function):
    """The operator's derivative. It stands below the dispatcher, so that every tracer sees the operator only."""

    @staticmethod
    def forward(ctx, *inputs):
        o, lse = _below_autograd(flash_fwd, _run_forward, inputs)
        # an unused LSE then arrives in backward as None and costs nothing
        ctx.set_materialize_grads(False)
        # the dispatcher leaves out trailing defaults, so options may be fewer than the fields
        ctx.options = [None if isinstance(x, Tensor) else x for x in inputs[3:]]
        ctx.tensor_options = [i for i, x in enumerate(inputs[3:]) if isinstance(x, Tensor)]
        ctx.save_for_backward(*inputs[:3], o, lse, *(inputs[3 + i] for i in ctx.tensor_options))
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        no_gradients = [None] * len(ctx.options)
        if do is None and dlse is None:
            return None, None, None, *no_gradients
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        options = list(ctx.options)
        for i, x in zip(ctx.tensor_options, tensors, strict=True):
            options[i] = x
        do = torch.zeros_like(o) if do is None else do
        dq, dk, dv, dsinks = flash_bwd(do, dlse, q, k, v, o, lse, *options)
        sinks = Options._fields.index("sinks")
        if sinks in ctx.tensor_options:
            no_gradients[sinks] = dsinks
        return dq, dk, dv, *no_gradients


class _FlashBackward(torch.autograd.Function):
    """The backward's own derivative does not exist. Asking for it is an error, never a silent zero."""

    @staticmethod
    def forward(ctx, *inputs):
        return _below_autograd(flash_bwd, _run_backward, inputs)

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError("flash_bwd has no derivative: use naive_attention where second derivatives are needed")


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """`flash_fwd`, but with autograd entered at once where nobody watches: the dispatcher takes 10 us a call."""
    if torch.compiler.is_compiling() or _watched(q, k, v):
        return flash_fwd(q, k, v, *options)
    return _forward_with_autograd(q, k, v, *options)


def _watched(*tensors: Tensor) -> bool:
    """Whether something waits for operators to pass by: a dispatch mode (tracing, selective checkpointing, counting
    FLOPs), a functorch transform, a tensor subclass."""
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return True
    return any(type(x) not in _PLAIN for x in tensors)


_PLAIN = (Tensor, torch.nn.Parameter)


def _below_autograd(operator, run, inputs):
    """The kernels, through the dispatcher where it has a watcher to tell."""
    if not _watched(*inputs[:3]):
        return run(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*inputs)


def _wants_gradient(inputs) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def _forward_with_autograd(*inputs):
    return _Flash.apply(*inputs) if _wants_gradient(inputs) else _below_autograd(flash_fwd, _run_forward, inputs)


def _backward_with_autograd(*inputs):
    return (
        _FlashBackward.apply(*inputs) if _wants_gradient(inputs) else _below_autograd(flash_bwd, _run_backward, inputs)
    )


_LIBRARY.impl("flash_fwd", _run_forward, "CompositeExplicitAutograd")
_LIBRARY.impl("flash_bwd", _run_backward, "CompositeExplicitAutograd")
_LIBRARY.impl("flash_fwd", _forward_with_autograd, "Autograd")
_LIBRARY.impl("flash_bwd", _backward_with_autograd, "Autograd")
