"""The operator as PyTorch sees it: schema, fake, autograd, compile, checkpointing, autocast, imports."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from kernels import (
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
    linear_cross_entropy,
    naive_attention,
    ops,
    tiled_attention,
)
from kernels.call import Options
from tests.attention_checks import make_packed, make_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("grouped", [False, True])
def test_opcheck_forward(grouped):
    q, k, v = make_qkv(1, 2, 1 if grouped else 2, 20, 24, 16, device=DEVICE, layout="bnhd")
    torch.library.opcheck(ops.flash_fwd, (q, k, v, True, 0.25))


@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_backward(with_dlse):
    q, k, v = (x.detach() for x in make_qkv(1, 2, 1, 20, 24, 16, device=DEVICE))
    o, lse = ops.flash_fwd(q, k, v, True, 0.25)
    dlse = torch.randn_like(lse) if with_dlse else None
    torch.library.opcheck(ops.flash_bwd, (torch.randn_like(o), dlse, q, k, v, o, lse, True, 0.25))


ALL_OPTIONS = {
    "window": (9, 3),
    "softcap": 4.0,
    "alibi_slopes": torch.tensor([0.3, 0.1]),
    "dropout_p": 0.2,
    "dropout_seed": 5,
}


def _operator_inputs(packed: bool):
    """The operator's arguments as the public function would pass them, every option on."""
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in ALL_OPTIONS.items()}
    options["sinks"] = torch.tensor([0.5, -0.5], device=DEVICE, requires_grad=True)
    seen = []

    def record(q, k, v, options, plan):
        seen.append((q, k, v, *options))
        return attend(q, k, v, options, plan)

    attend = ops.attend
    if packed:
        (q, k, v), arguments = make_packed([9, 0, 12], [12, 5, 0], 2, 1, 16, device=DEVICE)
        call = (flash_attention_varlen, (q, k, v), options | arguments)
    else:
        call = (flash_attention, make_qkv(1, 2, 1, 20, 24, 16, head_dim_v=32, device=DEVICE), options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "attend", record)
        call[0](*call[1], **call[2])
    return [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in seen[0]]


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_with_every_option(packed):
    arguments = _operator_inputs(packed)
    torch.library.opcheck(ops.flash_fwd, arguments)
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    o, lse = ops.flash_fwd(*arguments)
    torch.library.opcheck(
        ops.flash_bwd, (torch.randn_like(o), torch.randn_like(lse), *arguments[:3], o, lse, *arguments[3:])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_fake_agrees_with_real(dtype, layout):
    q, k, v = (x.detach() for x in make_qkv(2, 4, 2, 20, 24, 16, device=DEVICE, dtype=dtype, layout=layout))
    real = ops.flash_fwd(q, k, v, True, 0.25)
    real += ops.flash_bwd(torch.randn_like(q), None, q, k, v, *real, True, 0.25)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fq, fk, fv = (mode.from_tensor(x) for x in (q, k, v))
        fake = ops.flash_fwd(fq, fk, fv, True, 0.25)
        fake += ops.flash_bwd(torch.randn_like(fq), None, fq, fk, fv, *fake, True, 0.25)
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)


def _loss(q, k, v):
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    return o.square().sum() + lse.sum()


def _eager(q, k, v):
    return torch.autograd.grad(_loss(q, k, v), (q, k, v))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic):
    torch.compiler.reset()
    graphs, first = [], 0

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(_loss, fullgraph=True, dynamic=dynamic, backend=backend)
    for num_tokens in (20, 33, 47):
        q, k, v = make_qkv(1, 2, 1, num_tokens, num_tokens, 16, device=DEVICE)
        expected = _eager(q, k, v)
        for grad, value in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), expected, strict=True):
            assert torch.equal(grad, value)
        first = first or len(graphs)  # a first call may trace twice, to learn that a default float is a constant
    if dynamic:
        assert len(graphs) == first


def test_compiles_with_every_option():
    torch.compiler.reset()
    q, k, v = make_qkv(1, 2, 1, 20, 24, 16, device=DEVICE)
    slopes = ALL_OPTIONS["alibi_slopes"].to(DEVICE)
    sinks = torch.tensor([0.5, -0.5], device=DEVICE, requires_grad=True)

    def loss(q, k, v, sinks):
        return flash_attention(q, k, v, **(ALL_OPTIONS | {"alibi_slopes": slopes}), sinks=sinks).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    inputs = (q, k, v, sinks)
    for grad, value in zip(
        torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(loss(*inputs), inputs), strict=True
    ):
        assert torch.equal(grad, value)


def test_checkpointing_redraws_the_same_dropout():
    """No seed given: it comes from PyTorch's generator, whose state checkpointing keeps."""
    q, k, v = make_qkv(1, 1, 1, 20, 20, 16, device=DEVICE)

    def loss(q, k, v):
        return flash_attention(q, k, v, dropout_p=0.5).square().sum()

    torch.manual_seed(7)
    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    torch.manual_seed(7)
    recomputed = checkpoint(loss, q, k, v, use_reentrant=False)
    torch.manual_seed(8)  # what happens in between must not matter
    for grad, value in zip(torch.autograd.grad(recomputed, (q, k, v)), expected, strict=True):
        assert torch.equal(grad, value)


def test_checkpointing_recomputes_to_the_same_gradients():
    q, k, v = make_qkv(1, 2, 2, 33, 33, 16, device=DEVICE)
    loss = checkpoint(_loss, q, k, v, use_reentrant=False)
    for grad, value in zip(torch.autograd.grad(loss, (q, k, v)), _eager(q, k, v), strict=True):
        assert torch.equal(grad, value)


@pytest.mark.parametrize(("save", "forward_runs"), [(True, 1), (False, 2)])
def test_selective_checkpointing_can_save_our_output(monkeypatch, save, forward_runs):
    from kernels.portable import forward as flash_fwd

    launches = []
    launch = flash_fwd.launch_flash_fwd
    monkeypatch.setattr(flash_fwd, "launch_flash_fwd", lambda *args: launches.append(1) or launch(*args))

    def policy(ctx, op, *args, **kwargs):
        wanted = save and op == torch.ops.flashgpt.flash_fwd.default
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = make_qkv(1, 2, 2, 33, 33, 16, device=DEVICE)
    expected = _eager(q, k, v)
    launches.clear()
    loss = checkpoint(
        _loss, q, k, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )
    for grad, value in zip(torch.autograd.grad(loss, (q, k, v)), expected, strict=True):
        assert torch.equal(grad, value)
    assert len(launches) == forward_runs


def test_nothing_is_saved_without_gradients():
    q, k, v = make_qkv(1, 2, 2, 20, 20, 16, device=DEVICE)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        with torch.no_grad():
            assert not flash_attention(q, k, v).requires_grad
        flash_attention(*(x.detach() for x in (q, k, v)))
        assert saved == []
        flash_attention(q, k, v)
    assert len(saved) == 5  # q, k, v, o, lse


def test_autocast_casts_as_pytorch_does():
    q, k, v = make_qkv(1, 2, 2, 20, 20, 16, device=DEVICE)

    def forward(q, k, v):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return flash_attention(q, k.half(), v)

    o = forward(q, k, v)
    assert o.dtype == torch.bfloat16
    torch.compiler.reset()
    assert torch.equal(torch.compile(forward, fullgraph=True, backend="aot_eager")(q, k, v), o)
    (grad,) = torch.autograd.grad(o.float().sum(), q)
    assert grad.dtype == torch.float32


def test_what_is_right_under_autocast_is_not_remembered_without_it():
    q, k, v = make_qkv(1, 2, 2, 20, 20, 16, device=DEVICE)
    q = q.bfloat16()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        first, second = (flash_attention(q, k, v, causal=True) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, flash_attention(q, k.bfloat16(), v.bfloat16(), causal=True))
    with pytest.raises(ValueError, match=r"k has dtype torch.float32 but q has torch.bfloat16"):
        flash_attention(q, k, v, causal=True)


def test_derivatives_of_torch_func_are_refused_in_our_words():
    q, k, v = (x.detach() for x in make_qkv(1, 1, 1, 20, 20, 16, device=DEVICE))
    with pytest.raises(RuntimeError, match=r"flash attention has no derivative under torch.func .* or naive_attention"):
        torch.func.grad(lambda q: flash_attention(q, k, v).sum())(q)


def test_an_error_in_a_kernel_is_its_own(monkeypatch):
    """A GPU that is out of memory has nothing to do with torch.func, and a run has an answer to it."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ops, "_forward", full)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        flash_attention(*make_qkv(1, 1, 1, 20, 20, 16, device=DEVICE))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_forward_mode_derivatives_are_refused(which):
    """They would be zero in silence."""
    qkv = [x.detach() for x in make_qkv(1, 1, 1, 20, 20, 16, device=DEVICE)]
    call = lambda x: flash_attention(*qkv[:which], x, *qkv[which + 1 :])  # noqa: E731
    with pytest.raises(RuntimeError, match="flash attention has no forward-mode derivative"):
        torch.func.jvp(call, (qkv[which],), (torch.ones_like(qkv[which]),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(qkv[which], torch.ones_like(qkv[which]))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="flash attention has no forward-mode derivative"):
                call(dual)
        assert torch.equal(call(qkv[which]), flash_attention(*qkv))


@pytest.mark.parametrize("which", ["o", "lse"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batched_gradients_are_those_of_each(which):
    q, k, v = make_qkv(1, 2, 1, 20, 20, 16, device=DEVICE)
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    each = (o.sum((2, 3)) if which == "o" else lse.sum(2)).flatten()
    together = torch.autograd.grad(each, (q, k, v), torch.eye(2, device=DEVICE), True, is_grads_batched=True)
    for i, one in enumerate(each):
        alone = torch.autograd.grad(one, (q, k, v), retain_graph=True)
        assert all(torch.equal(x[i], y) for x, y in zip(together, alone, strict=True))


def test_second_derivatives_are_refused():
    q, k, v = make_qkv(1, 1, 1, 20, 20, 16, device=DEVICE)
    (grad,) = torch.autograd.grad(flash_attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="flash_bwd has no derivative"):
        torch.autograd.grad(grad.sum(), q)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_of_tiles_is_refused():
    q = torch.randn(1, 2, 20, 16)
    with pytest.raises(RuntimeError, match=r"tiled_attention is not for torch\.jit\.trace: use naive_attention"):
        torch.jit.trace(lambda q: tiled_attention(q, q, q, causal=True), (q,), check_trace=False)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (3, 2), "scale": -0.3}], ids=str)
def test_jit_trace_records_the_operator(options):
    q, k, v = make_qkv(1, 2, 1, 20, 20, 16, device=DEVICE)
    traced = torch.jit.trace(lambda *qkv: flash_attention(*qkv, **options), (q, k, v))
    q, k, v = make_qkv(2, 2, 1, 20, 33, 16, device=DEVICE)
    o, expected = traced(q, k, v), flash_attention(q, k, v, **options)
    assert torch.equal(o, expected)
    for gradient, value in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (o, expected)), strict=True):
        assert torch.equal(gradient, value)


def _counted(call) -> dict:
    with FlopCounterMode(display=False) as counter:
        call()
    return {str(operator): count for operator, count in counter.get_flop_counts().get("Global", {}).items()}


def test_flops_are_counted_as_those_of_pytorchs_own_attention():
    q, k, v = make_qkv(2, 4, 2, 20, 24, 16, head_dim_v=32, device=DEVICE)
    wide = (q.shape, *(x.repeat_interleave(2, dim=1).shape for x in (k, v)))
    forward, backward = sdpa_flop_count(*wide), sdpa_backward_flop_count((2, 4, 20, 32), *wide)
    for options in ({}, {"causal": True}):
        counted = _counted(lambda: flash_attention(q, k, v, **options).sum().backward())  # noqa: B023
        assert counted == {"flashgpt.flash_fwd": forward, "flashgpt.flash_bwd": backward}
    with torch.inference_mode():
        assert _counted(lambda: flash_attention(q, k, v)) == {"flashgpt.flash_fwd": forward}


def test_flops_of_documents_are_those_of_each():
    (q, k, v), packed = make_packed([9, 0, 12], [12, 5, 3], 2, 1, 16, device=DEVICE)
    each = 4 * 16 * 2
    counted = _counted(lambda: flash_attention_varlen(q, k, v, **packed))
    assert counted == {"flashgpt.flash_fwd": each * (9 * 12 + 12 * 3)}
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:  # whose lengths nobody knows
        fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in packed.items()}
        counted = _counted(lambda: flash_attention_varlen(*map(mode.from_tensor, (q, k, v)), **fake))
    assert counted == {"flashgpt.flash_fwd": each * 3 * packed["max_seqlen_q"] * packed["max_seqlen_k"]}


def test_flops_over_a_cache_are_those_of_the_keys_that_each_row_has():
    """Of the capacity they would be an upper bound, many times too high."""
    q, *new = make_qkv(4, 4, 2, 2, 2, 16, device=DEVICE)
    caches = torch.zeros(2, 4, 2, 96, 16, device=DEVICE)
    lengths, pads = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([40, -1, 9, 0], [5, 0, 0, 0]))
    each = 4 * 16 * 4 * 2  # FLOPs of a key for all heads and both queries
    with torch.no_grad():
        attend = lambda *k_and_v, **x: flash_attention_with_kvcache(q, *caches, *k_and_v, cache_seqlens=lengths, **x)  # noqa: E731
        assert _counted(attend) == {"flashgpt.flash_kvcache": each * (40 + 9)}
        counted = _counted(lambda: attend(*new, cache_leftpad=pads))
        assert counted == {"flashgpt.flash_kvcache": each * (40 + 2 - 5 + 9 + 2 + 2)}
    fakes = torch._subclasses.FakeTensorMode()
    fake = [fakes.from_tensor(x.detach()) for x in (q, *caches, lengths)]
    meta = [x.detach().to("meta") for x in (q, *caches, lengths)]
    unknown = "FLOPs of attention over a cache follow from the va"
    cases = (fake, fakes, unknown), (meta, nullcontext(), "kvcache reads lengths, which tensors on meta have not")
    for (*qkv, seqlens), mode, said in cases:
        with mode, torch.no_grad(), pytest.raises(ValueError, match=said):
            _counted(lambda qkv=qkv, seqlens=seqlens: flash_attention_with_kvcache(*qkv, cache_seqlens=seqlens))


def test_flops_of_the_head_with_its_loss_are_counted():
    h, weight = (torch.randn(size, 8, device=DEVICE, requires_grad=True) for size in (10, 16))
    targets = torch.zeros(10, dtype=torch.int64, device=DEVICE)
    product = 2 * 10 * 16 * 8
    counted = _counted(lambda: linear_cross_entropy(h, weight, targets, 16).backward())
    assert counted == {"flashgpt.linear_cross_entropy_fwd": 3 * product}
    with torch.no_grad():
        assert _counted(lambda: linear_cross_entropy(h, weight, targets, 16)) == {
            "flashgpt.linear_cross_entropy_fwd": product
        }


def test_the_schema_has_the_options():
    names = [argument.name for argument in ops.flash_fwd._schema.arguments]
    said = "_OPTIONS of kernels/ops.py has the fields of kernels/call.py's Options, in their order"
    assert names == ["q", "k", "v", *Options._fields], said


def test_importing_kernels_imports_no_triton():
    program = (
        "import sys, torch; before = {m for m in sys.modules if m.split('.')[0] == 'triton'}; import kernels;"
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'triton' and m not in before))"
    )
    answer = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "[]"


_BIND = """
import re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class NoGPU:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(NoGPU())
from kernels.hopper.backward import _after_kernel
from kernels.hopper.backward_kernel import hopper_bwd_kernel
from kernels.hopper.forward import hopper_fwd_kernel
from kernels.portable.dkdv import flash_dkdv_kernel
from kernels.portable.dq import flash_dq_kernel
from kernels.portable.forward import flash_fwd_kernel
from kernels.portable.prepare import _delta_kernel, _document_tiles_kernel, _documents_kernel
of_hopper = hopper_fwd_kernel, hopper_bwd_kernel, _after_kernel, _document_tiles_kernel
compiled_again_for = {
    parameter.name
    for kernel in (flash_fwd_kernel, flash_dkdv_kernel, flash_dq_kernel, _delta_kernel, _documents_kernel, *of_hopper)
    for parameter in kernel.device_caches[0] and kernel.params
    if re.search("tokens|num_docs|num_[qk]$", parameter.name)
    and not (parameter.is_constexpr or parameter.do_not_specialize)
}
print("bound", *compiled_again_for)
"""


def test_triton_can_bind_the_kernels_arguments():
    """The interpreter never builds the function that a GPU launch goes through, where some names are taken. And no
    kernel is compiled again for another number of tokens or documents."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _BIND]
    answer = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert answer.stdout.strip() == "bound", answer.stderr[-500:]


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as DTensor; keeps the names of the operators that it met."""

    seen = ()

    @staticmethod
    def __new__(cls, inner):
        how = {"strides": inner.stride(), "dtype": inner.dtype, "device": inner.device}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **how)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        cls.seen.append(str(function))
        return function(*(x.inner if isinstance(x, cls) else x for x in arguments), **(options or {}))


def test_a_tensor_subclass_meets_the_operator(monkeypatch):
    monkeypatch.setattr(Wrapped, "seen", [])
    q, k, v = (x.detach() for x in make_qkv(1, 2, 1, 20, 20, 16, device=DEVICE))
    o = flash_attention(*map(Wrapped, (q, k, v)), causal=True)
    assert torch.equal(o, flash_attention(q, k, v, causal=True))
    assert "flashgpt.flash_fwd.default" in Wrapped.seen


def test_sinks_are_trained_where_nothing_else_is():
    q, k, v = (x.detach() for x in make_qkv(1, 2, 1, 20, 20, 16, device=DEVICE))
    gradients = []
    for attention in (flash_attention, naive_attention):
        sinks = torch.zeros(2, device=DEVICE, requires_grad=True)
        attention(q, k, v, sinks=sinks).square().sum().backward()
        gradients.append(sinks.grad)
    torch.testing.assert_close(*gradients)
