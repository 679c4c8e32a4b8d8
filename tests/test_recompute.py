"""Activation checkpointing: every mode has the gradients of `none`, bit for bit, with dropout, eager and compiled."""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import why_not
from model import GPT, GPTConfig
from model.recompute import MODES

VOCAB, SEQ_LEN = 20, 16
RECOMPUTING = [mode for mode in MODES if mode != "none"]


@pytest.fixture(autouse=True)
def _compiled_anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(
    mode: str,
    attention: str,
    *,
    backend: str | None = None,
    seed: int = 7,
    watch: AbstractContextManager | None = None,
    **changes,
) -> dict[str, torch.Tensor]:
    """Loss, gradients and what is left of the random stream after a forward and backward with both kinds of dropout.

    `watch` is around the backward: nothing is compiled under a dispatch mode.
    """
    sizes = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "n_embd": 32, "mlp": "swiglu", "qk_norm": True}
    # sdpa has no attention dropout
    rates = {"dropout": 0.2, "attention_dropout": 0.0 if attention == "sdpa" else 0.3}
    config = GPTConfig(**(sizes | rates | changes), attention=attention, loss="plain", activation_checkpointing=mode)
    model = GPT(config, VOCAB, SEQ_LEN, generator=torch.Generator().manual_seed(0)).train()
    forward = model if backend is None else torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    tokens = torch.randint(VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(seed)
    loss = forward(tokens, tokens.roll(-1, 1))
    with watch or nullcontext():
        loss.backward()
    found = {"loss": loss.detach(), "random stream": torch.get_rng_state()}
    return found | {name: weight.grad for name, weight in model.named_parameters()}


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("attention", ["naive", "tiled", "sdpa", "flash"])
def test_no_bit_of_a_gradient_changes(attention):
    if attention == "flash" and (reason := why_not("flash", torch.float32, device="cpu", head_dim=16)):
        pytest.skip(reason)
    layers = 1 if attention == "flash" else 2  # Triton's interpreter is slow
    expected = step("none", attention, num_layers=layers)
    other_masks = step("none", attention, num_layers=layers, seed=8)
    assert len(different(other_masks, expected)) == len(expected)
    for mode in RECOMPUTING:
        assert different(step(mode, attention, num_layers=layers), expected) == [], mode


@pytest.mark.parametrize("dropout", ["dropout", "attention_dropout"])
def test_each_dropout_alone_draws_its_masks_again(dropout):
    rates = {"dropout": 0.0, "attention_dropout": 0.0, dropout: 0.3}
    expected = step("none", "naive", **rates)
    assert "loss" in different(step("none", "naive", seed=8, **rates), expected)
    for mode in RECOMPUTING:
        assert different(step(mode, "naive", **rates), expected) == [], mode


@pytest.mark.parametrize("mode", RECOMPUTING)
def test_without_gradients_nothing_is_checkpointed(monkeypatch, mode):
    """It would read the random state for every block and token that is sampled."""
    monkeypatch.setattr("model.recompute.checkpoint", lambda *_, **__: pytest.fail("checkpointed"))
    config = GPTConfig(2, 2, n_embd=32, attention="sdpa", loss="plain", activation_checkpointing=mode)
    model = GPT(config, VOCAB, SEQ_LEN)
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    with torch.no_grad():
        model(tokens, tokens)
    with pytest.raises(pytest.fail.Exception, match="checkpointed"):
        model(tokens, tokens)


# aot_eager traces forward and backward as inductor would, and needs no C++ compiler
@pytest.mark.parametrize(
    ("backend", "attention"),
    [
        ("aot_eager", "naive"),
        *(
            pytest.param(backend, attention, marks=pytest.mark.slow)
            for backend in ("aot_eager", "inductor")
            for attention in ("naive", "tiled", "sdpa", "flash")
            if (backend, attention) not in (("aot_eager", "naive"), ("inductor", "tiled"))  # tiled: minutes of C++
        ),
    ],
)
def test_compiled_no_bit_of_a_gradient_changes(backend, attention):
    if attention == "flash" and (reason := why_not("flash", torch.float32, device="cpu", head_dim=16)):
        pytest.skip(reason)
    options = {"backend": backend, "num_layers": 1}  # one block takes half as long to trace
    expected = step("none", attention, **options)
    undrawn = torch.Generator().manual_seed(7).get_state()
    assert not torch.equal(expected["random stream"], undrawn)  # the masks were drawn
    for mode in RECOMPUTING:
        assert different(step(mode, attention, **options), expected) == [], mode


class Products(TorchDispatchMode):
    """Counts matrix products by the shapes of their two factors."""

    supports_higher_order_operators = True  # compiled CPU attention is run by one

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default):
            self.count[tuple(args[0].shape), tuple(args[1].shape)] += 1
        return function(*args, **(kwargs or {}))


# the second is what inductor's partitioner makes of the policy
@pytest.mark.parametrize(("backend", "fp8"), [(None, "none"), ("aot_eager_decomp_partition", "none"), (None, "all")])
def test_only_products_that_are_not_kept_are_done_again(backend, fp8):
    """By the shapes of the four weights. What `down` returns, no backward reads, but a product in 8 bits is done before
    what it keeps is known."""
    done = {}
    for mode in MODES if backend is None else ("none", "full", "selective"):
        torch.compiler.reset()
        products = Products()
        step(mode, "sdpa", backend=backend, num_layers=1, dropout=0.0, fp8=fp8, watch=products)
        done[mode] = products.count
    qkv, out, up = (((32, 32), (32, columns)) for columns in (64, 32, 256))
    down = [((32, 128), (128, 32))] if fp8 == "all" else []
    again = {mode: count - done["none"] for mode, count in done.items()}
    for mode, count in again.items():
        expected = {"full": [qkv, out, up, *down], "selective": [up, *down], "pointwise": down}.get(mode, [])
        assert count == Counter(expected), mode


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "launches"), [("none", 1), ("pointwise", 1), ("full", 2), ("selective", 1)])
def test_compiled_selective_keeps_what_our_operator_returned(monkeypatch, mode, launches):
    """The save list names our operator; the partitioner of a compiled graph has to follow it."""
    if reason := why_not("flash", torch.float32, device="cpu", head_dim=16):
        pytest.skip(reason)
    from kernels.portable import forward as flash_fwd

    seen, launch = [], flash_fwd.launch_flash_fwd
    monkeypatch.setattr(flash_fwd, "launch_flash_fwd", lambda *args: seen.append(1) or launch(*args))
    step(mode, "flash", backend="aot_eager", num_layers=1)
    assert len(seen) == launches
