"""What torch.compile is told: graphs as it gets them, here on tensors of a GPU that need not be there."""

import logging
from collections import Counter
from functools import partial

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch._logging import warning_once
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from model import GPT, GPTConfig
from model.recompute import recompute
from training.compiler import CONVERT, PRODUCT, FewerConversions, compiled
from training.hardware import Hardware, HardwareConfig, set_up
from training.shard import parallelize


def operators(function, *shapes) -> Counter:
    """What is left of `function` after the pass, which must be a graph that can run."""
    with FakeTensorMode():
        graph = make_fx(function)(*(torch.empty(shape, device="cuda") for shape in shapes)).graph
    FewerConversions()(graph)
    graph.lint()
    return Counter(node.target for node in graph.nodes if node.op == "call_function")


def test_weights_become_16_bit_in_one_operator():
    def product(x, first, second):
        first, second = (torch.ops.prims.convert_element_type(w, torch.bfloat16) for w in (first, second))
        x = torch.ops.prims.convert_element_type(x * 2, torch.bfloat16)  # no input: not a weight
        return torch.mm(torch.mm(x, first), second)

    left = operators(product, (4, 8), (8, 8), (8, 2))
    assert (left[torch.ops.aten._foreach_copy.default], left[CONVERT], left[PRODUCT]) == (1, 1, 2)


@pytest.mark.parametrize("used_twice", [False, True])
def test_a_gradient_that_becomes_fp32_leaves_its_product_so(used_twice):
    def gradient(x, dy):
        x, dy = (torch.ops.prims.convert_element_type(t + 1, torch.bfloat16) for t in (x, dy))
        rounded = torch.mm(dy.T, x)
        wide = torch.ops.prims.convert_element_type(rounded, torch.float32)
        return (wide, rounded) if used_twice else wide

    left = operators(gradient, (8, 4), (8, 2))
    assert left[torch.ops.aten.mm.dtype] == (not used_twice)
    assert left[PRODUCT] == used_twice
    assert left[CONVERT] == 2 + used_twice


def test_every_graph_has_the_choices_and_an_opponents_has_none(monkeypatch):
    """Dynamo undid one for all graphs after a process's first; as global settings they held for an opponent's too."""
    seen, names = [], ("deterministic", "fallback_random", "reorder_for_peak_memory", "post_grad_custom_pre_pass")
    monkeypatch.setattr(FewerConversions, "__call__", lambda self, graph: seen.append(now()))

    def now():
        return [getattr(inductor, name) for name in names]

    by_itself = now()
    with inductor.patch(fx_graph_cache=False):  # a graph from the cache sees no pass
        for size in (2, 3):
            function = compiled(lambda x: torch.mm(x, x))
            function(torch.ones(size, size, requires_grad=True)).sum().backward()
            assert now() == by_itself
    assert by_itself == [False, False, True, None]
    assert [choices[:3] for choices in seen] == [[True, True, False]] * 4  # forward and backward of both


def test_each_run_of_a_sweep_is_compiled(monkeypatch):
    """PyTorch compiles a function of ours for so many models of a process, and runs it as it is for all after them."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    hardware, tokens = (
        Hardware(torch.device("cpu"), torch.float32, True, "compiled"),
        torch.zeros(1, 8, dtype=torch.int64),
    )
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for n_embd in (16, 32):
            model = GPT(GPTConfig(num_layers=1, num_heads=1, n_embd=n_embd, attention="naive", loss="plain"), 20, 8)
            parallelize(model, hardware)(tokens, tokens).backward()


@pytest.mark.gpu
def test_on_the_gpu_gradients_are_nearer_to_the_exact_ones():
    """Two layers under autocast: the same result, gradients without a rounding, the same bits twice."""
    set_up(HardwareConfig(device="cuda", compile=True))
    generator = torch.Generator("cuda").manual_seed(0)
    x, first, second = (torch.randn(512, 256, device="cuda", generator=generator) / 16 for _ in range(3))
    first, second = first.requires_grad_(), second.requires_grad_()

    def loss(x, first, second):
        return F.linear(F.linear(x, first), second.T).float().square().sum()

    def gradients(function):
        with torch.autocast("cuda", torch.bfloat16):
            value = function(x, first, second)
        return value, *torch.autograd.grad(value, (first, second))

    function = compiled(loss)
    plain, ours, again = gradients(loss), gradients(function), gradients(function)
    exact = torch.autograd.grad(loss(x.double(), first.double(), second.double()), (first, second))
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-3, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    for mine, theirs, right in zip(ours[1:], plain[1:], exact, strict=True):
        assert (mine - right).norm() <= 1.01 * (theirs - right).norm()


def test_the_console_keeps_quiet_about_what_is_computed_again(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)
    warning_once.cache_clear()
    block = torch.nn.Linear(2, 2)
    torch.compile(partial(recompute, block, keep=()), backend="aot_eager")(torch.ones(1, 2)).sum().backward()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
