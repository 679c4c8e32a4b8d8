"""Muon: the iteration is the best there is, held steps change nothing, and a CUDA graph could replay a step."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

from tests.test_bad_numbers import bits, same
from training import muon
from training.hardware import HardwareConfig, products_dtype, set_up
from training.muon import orthogonalize, stacked
from training.optimizer import OptimConfig, Optimizer

SHAPES = {"qkv": (24, 8), "out": (8, 8), "up": (32, 8), "down": (8, 32)}


class Blocks(nn.Module):
    """The matrices of a GPT's blocks, and something beside them; an output that moves them all."""

    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape[::-1], bias=False) for name, shape in SHAPES.items()})
            for _ in range(layers)
        )

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block["out"](block["qkv"](x)[..., :8].tanh()) + block["down"](block["up"](x).relu())
        return x.square().mean()


def built(device="cpu", **config):
    torch.manual_seed(0)
    net = Blocks().to(device)
    return net, Optimizer(net, OptimConfig(name="muon", **config))


def take_step(net, optimizer, factor=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (64,), generator=generator).to(net.embedding.weight.device)
    loss = net(tokens)
    (loss * factor).backward()
    return optimizer.step(loss.detach())


def moments_of(optimizer):
    return [value for part in optimizer.optimizers for state in part.state.values() for value in state.values()]


# --- Newton-Schulz


@pytest.mark.parametrize(
    ("dtype", "least", "left"), [(torch.bfloat16, 5e-3, (0.917, 1.083)), (torch.float32, 3e-3, (0.354, 1.646))]
)
def test_each_quintic_is_the_best_on_what_those_before_it_leave(dtype, least, left):
    """The largest error is reached with alternating signs at four points: no other odd quintic has a smaller one."""
    low, high = least, 1.0
    for a, b, c in muon.QUINTICS[dtype]:
        inner = np.sqrt(np.roots([5 * c, 3 * b, a]).real)  # where the slope is zero
        points = np.array([low, *sorted(inner), high])
        errors = 1 - (a * points + b * points**3 + c * points**5)
        assert np.ptp(errors * [1, -1, 1, -1]) < 2e-5
        low, high = 1 - errors[0], 1 + errors[0]
    assert (low, high) == pytest.approx(left, abs=1e-3)


def test_singular_values_go_where_the_quintics_say():
    """All but the last are evaluated a little further in, from where rounding cannot carry a value beyond the end."""
    x = torch.tensor([1.0, 0.5, 0.1, 0.02], dtype=torch.float64)
    *first, last = muon.QUINTICS[torch.float32]
    expected = x / x.pow(4).sum() ** 0.25 / muon.SAFETY
    for (a, b, c), safety in (*((quintic, muon.SAFETY) for quintic in first), (last, 1.0)):
        expected = expected / safety
        expected = a * expected + b * expected**3 + c * expected**5
    for wider in (0, 3):  # by both ways
        found = orthogonalize(torch.nn.functional.pad(x.diag(), (0, wider))[None].float(), torch.float32)[0]
        torch.testing.assert_close(found.diagonal().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 48), (32, 96), (96, 32)])
def test_orthogonalized_matrices_keep_directions_and_lose_lengths(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(2, *shape, generator=generator), full_matrices=False)
    lengths = torch.logspace(0, -2, min(shape))  # the least is 0.006 of what all are divided by
    found = orthogonalize(u * lengths @ vh, dtype)
    assert found.dtype == dtype
    inside = u.mT @ found.float() @ vh.mT  # diagonal, if the directions are kept
    noise, error = (5e-3, 0.65) if dtype == torch.float32 else (0.06, 0.1)
    assert inside.diagonal(dim1=1, dim2=2).sub(1).abs().max() < error + noise
    assert (inside - torch.diag_embed(inside.diagonal(dim1=1, dim2=2))).abs().max() < noise
    assert not orthogonalize(torch.zeros(1, *shape), dtype).any()


def test_rounding_beyond_the_largest_length_does_not_grow():
    """Of a matrix of rank one the norm is the largest singular value itself, and bfloat16 rounds to either side."""
    generator = torch.Generator().manual_seed(0)
    column, row = torch.randn(64, 48, 1, generator=generator), torch.randn(64, 1, 96, generator=generator)
    found = orthogonalize(column @ row, torch.bfloat16).float()
    assert torch.linalg.matrix_norm(found, 2).max() < 1.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (8, 8), (8, 12), (13, 8)])
def test_its_flops_are_those_of_its_products(shape, dtype):
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(3, *shape), dtype)
    assert counter.get_total_flops() == muon.newton_schulz_flops([torch.Size(shape)] * 3, dtype)


def test_in_float32_whichever_way_is_fewer_flops(monkeypatch):
    for shape in map(torch.Size, [(8, 8), (8, 12), (8, 13), (13, 8), (8, 32)]):
        chosen, either = muon.newton_schulz_flops([shape], torch.float32), []
        for by_gram in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr(muon, "_by_gram", lambda *_, by_gram=by_gram: by_gram)
                either.append(muon.newton_schulz_flops([shape], torch.float32))
        assert chosen == min(either), shape


def test_what_products_run_in_follows_from_the_device(monkeypatch):
    for capabilities, dtype, word in (
        ({"avx512_bf16": True, "amx_bf16": True}, torch.bfloat16, "amx_bf16"),
        ({"avx512_bf16": True, "amx_bf16": False, "cpu_name": "AMD EPYC 9R14"}, torch.bfloat16, "avx512_bf16"),
        ({"avx512_bf16": True, "amx_bf16": False, "cpu_name": "Intel Xeon"}, torch.float32, "no fast bfloat16 units"),
        ({"avx512_f": True, "avx512_bf16": False, "cpu_name": "AMD EPYC"}, torch.float32, "no fast bfloat16 units"),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capabilities=capabilities: capabilities)
        assert products_dtype(torch.device("cpu"))[0] == dtype
        config, said = OptimConfig(name="muon").resolved(torch.device("cpu"))
        assert config.muon_dtype in said
        assert word in said
        assert built()[1].optimizers[1].dtype == dtype  # what the line says is what runs
    assert built(muon_dtype="bfloat16")[1].optimizers[1].dtype == torch.bfloat16


# --- steps


def test_it_is_pytorchs_muon_but_for_newton_schulz(monkeypatch):
    """With the same iteration the weights are torch.optim.Muon's, and its checkpoints are taken."""

    def theirs_of_each(x, dtype):
        return torch.stack([_zeropower_via_newtonschulz(one, (3.4445, -4.7750, 2.0315), 5, 1e-7) for one in x])

    monkeypatch.setattr(muon, "orthogonalize", theirs_of_each)
    own = {"momentum": 0.9, "beta1": 0.8, "beta2": 0.98, "weight_decay": 0.3}  # none of them a default
    net, optimizer = built(grad_clip=0.0, muon_dtype="bfloat16", lr=0.01, muon_lr_ratio=2.0, **own)
    assert optimizer.optimizers[0].defaults["betas"] == (0.8, 0.98)  # four steps say little of them
    peer, start = copy.deepcopy(net), copy.deepcopy(list(net.parameters()))
    matrices = [p for name, p in peer.named_parameters() if name.startswith("blocks.")]
    theirs = torch.optim.Muon(matrices, lr=0.02, momentum=0.9, weight_decay=0.3)
    rest = torch.optim.AdamW([peer.embedding.weight], lr=0.01, betas=(0.8, 0.98), weight_decay=0.3)
    for step in range(4):
        tokens = torch.randint(11, (64,), generator=torch.Generator().manual_seed(step))
        (peer(tokens) * (-1) ** step).backward()  # or Nesterov's look ahead is none
        for part in (theirs, rest):
            part.step()
            part.zero_grad()
        take_step(net, optimizer, (-1) ** step, seed=step)
    for ours, p, before in zip(net.parameters(), peer.parameters(), start, strict=True):
        assert (ours - p).norm() < 0.15 * (p - before).norm()
    other = built()[1]
    other.load_state_dict({"optimizer": [rest.state_dict(), theirs.state_dict()]})
    for p, q in zip(matrices, other.optimizers[1].param_groups[0]["params"], strict=True):
        assert torch.equal(theirs.state[p]["momentum_buffer"], other.optimizers[1].state[q]["momentum_buffer"])


def test_a_stack_is_no_larger_than_fills_a_gpu(monkeypatch):
    parameters = [nn.Parameter(torch.empty(shape)) for _ in range(3) for shape in SHAPES.values()]
    assert [tuple(stack.momentum.shape) for stack in stacked(parameters)] == [(3, *s) for s in SHAPES.values()]
    monkeypatch.setattr(muon, "STACK_ENTRIES", 2 * 8 * 8)
    sizes = [len(stack.parameters) for stack in stacked(parameters)]
    assert sizes == [2, 1] * 4
    assert [p for stack in stacked(parameters) for p in stack.parameters] == sorted(
        parameters, key=lambda p: list(SHAPES.values()).index(tuple(p.shape))
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_stacks_that_are_dealt_to_ranks_give_the_same_bits(monkeypatch, ranks):
    """Each rank computes every ranks-th stack; together they are what one process computes, in every bit."""
    monkeypatch.setattr(muon, "STACK_ENTRIES", 2 * 8 * 8)
    alone, dealt = built(), built()

    def deal(directions):
        directions = list(directions)
        parts = {}
        for rank in reversed(range(ranks)):
            for i in range(rank, len(directions), ranks):
                parts[i] = orthogonalize(directions[i], dealt[1].optimizers[1].dtype)
        return [parts[i] for i in range(len(directions))]

    monkeypatch.setattr(dealt[1].optimizers[1], "orthogonalized", deal)
    for step in range(3):
        take_step(*alone, seed=step)
        take_step(*dealt, seed=step)
    assert same(bits(*alone), bits(*dealt))


@pytest.mark.parametrize("cautious_decay", [False, True])
def test_held_steps_keep_even_the_sign_of_a_zero(cautious_decay):
    net, optimizer = built(cautious_decay=cautious_decay)
    take_step(net, optimizer)
    with torch.no_grad():
        for p in net.parameters():
            p[0, :2] = torch.tensor([0.0, -0.0])
    kept = [
        *net.parameters(),
        *(v for part in optimizer.optimizers for state in part.state.values() for v in state.values()),
    ]
    before = [value.detach().clone() for value in kept]
    take_step(net, optimizer, math.nan)
    take_step(net, optimizer)
    assert optimizer.held
    for value, old in zip(kept, before, strict=True):
        assert torch.equal(value.detach().view(torch.int32), old.view(torch.int32))


def test_whatever_a_graph_would_read_or_write_stays_where_it_is():
    net, optimizer = built()

    def places():
        rates = [group["lr"] for part in optimizer.optimizers for group in part.param_groups]
        return [value.data_ptr() for value in (*moments_of(optimizer), *rates, optimizer.held, *net.parameters())]

    before = places()
    optimizer.set_lr_factor(0.5)
    take_step(net, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    take_step(net, optimizer, math.nan)
    optimizer.release()
    take_step(net, optimizer)
    optimizer.load_state_dict(saved)
    assert places() == before
    assert same(optimizer.state_dict()["optimizer"][1]["state"], saved["optimizer"][1]["state"])


def test_cautious_decay_spares_the_weights_that_the_step_makes_larger():
    nets, optimizers = zip(
        *(built(cautious_decay=cautious, weight_decay=2.0) for cautious in (False, True)), strict=True
    )
    undecayed = built(weight_decay=0.0)
    before = nets[0].blocks[1]["qkv"].weight.detach().clone()
    for net, optimizer in (*zip(nets, optimizers, strict=True), undecayed):
        take_step(net, optimizer)
    all_decay, some, none = (net.blocks[1]["qkv"].weight.detach() for net in (*nets, undecayed[0]))
    smaller = (none - before) * before < 0
    assert 0.1 < smaller.float().mean() < 0.8
    torch.testing.assert_close(some, torch.where(smaller, all_decay, none), atol=1e-7, rtol=1e-6)
    assert (all_decay - none).abs().max() > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_captured_step_has_the_bits_of_one_that_is_not(name):
    """Rates that move, a step that is not finite and what follows it, replayed and launched."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    hardware = set_up(HardwareConfig(device="cuda", compile=False))
    nets = [Blocks().to(hardware.device) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [Optimizer(net, OptimConfig(name=name)) for net in nets]
    tokens, factor = torch.arange(64, device="cuda") % 11, torch.ones((), device="cuda")

    def step(net, optimizer):
        loss = net(tokens) * factor
        loss.backward()
        return optimizer.step(loss.detach())

    first = [bits(net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(nets[1], optimizers[1])  # what cuBLAS allocates once
    torch.cuda.synchronize()
    nets[1].load_state_dict(first[1][0])
    optimizers[1].load_state_dict({"optimizer": [{"state": state} for state in first[1][1]], "loss_scale": None})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(nets[1], optimizers[1])
    for number in range(8):
        factor.fill_(math.nan if number == 4 else 1.0)
        tokens.copy_(torch.randint(11, (64,)))
        for optimizer in optimizers:
            optimizer.set_lr_factor((number + 1) / 8)
            if number == 6:
                optimizer.release()
        step(nets[0], optimizers[0])
        graph.replay()
        assert optimizers[1].held == (number in (4, 5))
        assert same(bits(nets[0], optimizers[0]), bits(nets[1], optimizers[1]))
    assert not same(bits(nets[0], optimizers[0]), first[0])
