"""The operators' contracts: schemas, fake (shape-only) versions and autograd. Torch only; launchers load when
called.

`flashgpt::flash_fwd(q, k, v, ...) -> (o, lse)` is opaque to torch.compile and to autocast, and its name is what
a selective checkpointing policy compares with. The arguments after v are the fields of `kernels.call.Options`
in order. Outputs that hold tokens and heads are stored as (B, N, H, D). Packed documents are one batch entry.

They are defined through `torch.library.Library`, not `custom_op`: the latter's autograd fills in the defaults of
19 arguments at each call.
"""

import torch
from torch import Tensor

from .call import Options, key_of
from .device import OPERATORS
from .documents import check_documents
from .flops import register_flop_formulas
from .launch import Plan, plan_of, tokens_first
from .support import refuse_forward_mode, takes_hopper

_LIBRARY = torch.library.Library(OPERATORS, "FRAGMENT")
_OPTIONS = (
    "bool causal, float scale, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, "
    "Tensor? alibi_slopes=None, Tensor? sinks=None, float dropout_p=0.0, Tensor? dropout_seed=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, "
    "Tensor? mask_starts=None, Tensor? mask_visits=None, Tensor? mask_bits=None"
)
_LIBRARY.define(f"flash_fwd(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor o, Tensor lse)")
_LIBRARY.define(
    f"flash_bwd(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_OPTIONS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)

# O (B, Hq, Nq, Dv) and LSE (B, Hq, Nq), natural logarithm, float32. `scale` is positive. Raises ValueError where
# cu_seqlens do not describe the tokens: their values are first known when the operator runs.
flash_fwd = getattr(torch.ops, OPERATORS).flash_fwd.default
# dQ, dK, dV in the inputs' shapes and dtype, and dsinks (Hq,) float32, (0,) without sinks. `dlse` (B, Hq, Nq) is
# None when LSE was not used.
flash_bwd = getattr(torch.ops, OPERATORS).flash_bwd.default


def _run_forward(q: Tensor, k: Tensor, v: Tensor, *options, plan: Plan | None = None) -> tuple[Tensor, Tensor]:
    options = Options(*options)
    plan = plan or plan_of(key_of("forward", options, q, k, v))
    if options.packed:
        check_documents(options, q.shape[2], k.shape[2])
    if _on_hopper(plan, q, k, v, options, backward=False):
        from .hopper.forward import launch_hopper_fwd

        return launch_hopper_fwd(q, k, v, options, None, plan)
    from .portable.forward import launch_flash_fwd

    return launch_flash_fwd(q, k, v, options, None, plan)


def _run_backward(do, dlse, q, k, v, o, lse, *options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = Options(*options)
    plan = plan_of(key_of(("backward", dlse is None), options, q, k, v, o, do))
    if _on_hopper(plan, q, k, v, options, backward=True):
        from .hopper.backward import launch_hopper_bwd

        return launch_hopper_bwd(do, dlse, q, k, v, o, lse, options, plan)
    from .portable.backward import launch_flash_bwd

    return launch_flash_bwd(do, dlse, q, k, v, o, lse, options, None, None, plan)


def _on_hopper(plan: Plan, q: Tensor, k: Tensor, v: Tensor, options: Options, *, backward: bool) -> bool:
    """The one place where an engine is chosen for checked inputs.

    Every engine keeps one contract: it has the same arguments, returns the same (O, LSE), and repeats its own bits on
    every run. The backward accepts O and LSE from either.
    """
    if plan.on_hopper is None:
        plan.on_hopper = takes_hopper(q, k, v, options, backward=backward)
    return plan.on_hopper


@torch.library.register_fake(f"{OPERATORS}::flash_fwd", lib=_LIBRARY)
def _(q, k, v, *options):
    return tokens_first(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake(f"{OPERATORS}::flash_bwd", lib=_LIBRARY)
def _(do, dlse, q, k, v, o, lse, *options):
    dsinks = q.new_empty(0 if Options(*options).sinks is None else q.shape[1], dtype=torch.float32)
    return tokens_first(q, q.shape[3]), tokens_first(k, k.shape[3]), tokens_first(v, v.shape[3]), dsinks


class _Flash(torch.autograd.Function):
    """The operator's derivative. It stands below the dispatcher, so that every tracer sees the operator only."""

    @staticmethod
    def forward(ctx, plan, *inputs):
        o, lse = _forward(plan, inputs)
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
            return None, None, None, None, *no_gradients
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        options = list(ctx.options)
        for i, x in zip(ctx.tensor_options, tensors, strict=True):
            options[i] = x
        # gradients of is_grads_batched, which the dispatcher unbatches, look like plain tensors except for this
        batched = any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in (do, dlse))
        do = torch.zeros_like(o) if do is None else do
        run = flash_bwd if batched or needs_dispatcher(q, k, v) else _backward_with_autograd  # as in `attend`
        dq, dk, dv, dsinks = run(do, dlse, q, k, v, o, lse, *options)
        sinks = Options._fields.index("sinks")
        if sinks in ctx.tensor_options:
            no_gradients[sinks] = dsinks
        return None, dq, dk, dv, *no_gradients


class _FlashBackward(torch.autograd.Function):
    """The backward's own derivative does not exist. Asking for it is an error, never a silent zero."""

    @staticmethod
    def forward(ctx, *inputs):
        return _backward(inputs)

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError("flash_bwd has no derivative: use naive_attention where second derivatives are needed")


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, plan: Plan | None) -> tuple[Tensor, Tensor]:
    """`flash_fwd`; with a plan, which no call that `needs_dispatcher` has, the dispatcher is skipped."""
    if plan is None:
        register_flop_formulas()
        return flash_fwd(q, k, v, *options)
    return _forward_with_autograd(q, k, v, *options, plan=plan)


def needs_dispatcher(*tensors: Tensor) -> bool:
    """Whether something must see the operator in the dispatcher: a tracer, a dispatch mode (fake tensors, selective
    checkpointing, counting FLOPs), a functorch transform, a tensor subclass."""
    if torch.compiler.is_compiling():  # checked first: what follows cannot be traced
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return True
    if torch._C._get_tracing_state():  # torch.jit.trace, where sizes are tensors
        return True
    return any(type(x) not in _PLAIN for x in tensors)


_PLAIN = (Tensor, torch.nn.Parameter)


def mark_written(*tensors: Tensor) -> None:
    """Tell autograd what a kernel writes to, which it cannot see: a backward that kept their old values is refused."""
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


def _forward(plan: Plan | None, inputs: tuple) -> tuple[Tensor, Tensor]:
    """The kernels, through the dispatcher where something must see the operator."""
    if plan is not None or not needs_dispatcher(*inputs[:3]):
        return _run_forward(*inputs, plan=plan)
    with torch._C._AutoDispatchBelowAutograd():
        return flash_fwd(*inputs)


def _backward(inputs: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not needs_dispatcher(*inputs[2:5]):
        return _run_backward(*inputs)
    register_flop_formulas()
    with torch._C._AutoDispatchBelowAutograd():
        return flash_bwd(*inputs)


def _wants_gradient(inputs: tuple) -> bool:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    refuse_forward_mode("flash attention", "naive_attention", *tensors)
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _forward_with_autograd(*inputs, plan: Plan | None = None):
    if not _wants_gradient(inputs):
        return _forward(plan, inputs)
    try:
        return _Flash.apply(plan, *inputs)
    except RuntimeError as error:
        if "setup_context" not in str(error):  # which torch.func's transforms require
            raise
        raise RuntimeError(
            "flash attention has no derivative under torch.func (grad, vjp, jacrev): use torch.autograd.grad, or "
            "naive_attention"
        ) from error


def _backward_with_autograd(*inputs):
    return _FlashBackward.apply(*inputs) if _wants_gradient(inputs) else _backward(inputs)


_LIBRARY.impl("flash_fwd", _run_forward, "CompositeExplicitAutograd")
_LIBRARY.impl("flash_bwd", _run_backward, "CompositeExplicitAutograd")
_LIBRARY.impl("flash_fwd", _forward_with_autograd, "Autograd")
_LIBRARY.impl("flash_bwd", _backward_with_autograd, "Autograd")
