"""Numbers that are not finite: no step is taken with them, and float16's scale falls where a gradient overflows."""

import copy

import pytest
import torch
from torch import nn

from tests.test_training import Net
from training.hardware import HardwareConfig, choose_hardware
from training.optimizer import (
    FIRST_SCALE,
    GROWTH_INTERVAL,
    LARGEST_SCALE,
    LossScale,
    OptimConfig,
    Optimizer,
)

INF = float("inf")


def backward(net, factor=1.0):
    loss = nn.functional.cross_entropy(net(torch.arange(11)), torch.arange(11))
    (loss * factor).backward()
    return loss.detach() * factor


def bits(net, optimizer):
    state = [part.state_dict()["state"] for part in optimizer.optimizers]
    return copy.deepcopy([net.state_dict(), state])


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return all(same(a, b) for a, b in zip(one, other, strict=True))


# --- steps that are not taken


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_bad_step_and_those_after_it_change_nothing(name, steps_before):
    torch.manual_seed(0)
    net = Net()
    optimizer = Optimizer(net, OptimConfig(name=name))
    for _ in range(steps_before):
        optimizer.step(backward(net))
    before = bits(net, optimizer)
    backward(net, INF)
    assert not optimizer.step(torch.tensor(2.0)).isfinite()
    optimizer.step(backward(net))  # a good one: not taken either, or nobody could say what state was before the bad one
    assert optimizer.held
    assert same(bits(net, optimizer), before)
    optimizer.release()
    optimizer.step(backward(net))
    assert not same(bits(net, optimizer), before)


def test_a_loss_that_is_not_finite_is_enough():
    net = Net()
    optimizer = Optimizer(net, OptimConfig())
    before = bits(net, optimizer)
    backward(net)
    optimizer.step(torch.tensor(INF))
    assert same(bits(net, optimizer), before)


# --- float16


def test_the_scale_falls_and_grows():
    scale, no, yes = LossScale("cpu"), torch.tensor(False), torch.tensor(True)
    scale.update(yes, no)
    assert scale.scale == FIRST_SCALE / 2
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(no, no)
    assert scale.scale == FIRST_SCALE / 2
    scale.update(no, yes)  # held: as if it had not been
    scale.update(no, no)
    assert (scale.scale, scale.good_steps) == (FIRST_SCALE, 0)
    for _ in range(30):
        assert not scale.exhausted() or scale.scale == 1
        scale.update(yes, no)
    assert scale.exhausted()
    assert scale.scale == 1
    scale.scale.fill_(LARGEST_SCALE)
    scale.good_steps.fill_(GROWTH_INTERVAL - 1)
    scale.update(no, no)
    assert scale.scale == LARGEST_SCALE, "twice as much is inf"


def test_the_scale_follows_pytorchs_own():
    """Beside torch.amp.GradScaler over overflows at random."""
    torch.manual_seed(0)
    ours, weight = LossScale("cpu"), nn.Parameter(torch.zeros(1))
    theirs, sgd = torch.amp.GradScaler("cpu", growth_interval=GROWTH_INTERVAL), torch.optim.SGD([weight])
    for overflow in (torch.rand(5000) < 0.0005).tolist():
        theirs.scale(weight.sum() * (INF if overflow else 1.0)).backward()
        theirs.step(sgd)
        theirs.update()
        sgd.zero_grad()
        ours.update(torch.tensor(overflow), torch.tensor(False))
        assert ours.scale == theirs.get_scale()
    assert ours.scale not in (FIRST_SCALE, FIRST_SCALE / 2)


def test_an_overflow_costs_a_step_and_holds_nothing():
    """The gradient of the scaled loss is inf, that of the loss is not: the scale is halved and the run goes on."""
    torch.manual_seed(0)
    net, half = Net(), OptimConfig(grad_clip=0.0)
    optimizer, plain_net = Optimizer(net, half, torch.float16), copy.deepcopy(net)
    before = bits(net, optimizer)
    optimizer.scaled(nn.functional.cross_entropy(net(torch.arange(11)), torch.arange(11))).backward()
    net.embedding.weight.grad[3, 1] = INF
    assert optimizer.step(torch.tensor(2.0)).isinf()
    assert not optimizer.held
    assert same(bits(net, optimizer), before)
    assert optimizer.loss_scale.scale == FIRST_SCALE / 2
    # the next one is the step that float32 takes: a power of two rounds nothing
    optimizer.scaled(nn.functional.cross_entropy(net(torch.arange(11)), torch.arange(11))).backward()
    norm = optimizer.step(torch.tensor(2.0))
    plain = Optimizer(plain_net, half)
    assert torch.equal(plain.step(backward(plain_net)), norm)
    assert same(bits(net, optimizer), bits(plain_net, plain))


def test_an_overflow_at_the_least_scale_is_a_bad_step():
    net = Net()
    optimizer = Optimizer(net, OptimConfig(), torch.float16)
    for _ in range(16):
        backward(net, INF)
        optimizer.step(torch.tensor(2.0))
        assert not optimizer.held
    backward(net, INF)
    optimizer.step(torch.tensor(2.0))
    assert optimizer.held
    assert optimizer.loss_scale.scale == 1


def test_a_gpu_without_bfloat16_takes_float16(monkeypatch):
    for name, value in {
        "is_available": True,
        "is_bf16_supported": False,
        "device_count": 1,
        "get_device_name": "Tesla T4",
        "get_device_capability": (7, 5),
        "reset_peak_memory_stats": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    chosen = choose_hardware(HardwareConfig(device="cuda"))
    assert chosen.dtype == torch.float16
    assert "float16, loss scaled" in chosen.description
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (6, 1))
    assert choose_hardware(HardwareConfig(device="cuda")).dtype == torch.float32


def test_a_gpu_that_is_named_is_the_current_one(monkeypatch):
    """CUDA graphs and streams are of that, wherever the tensors are."""
    known = {"is_available": True, "is_bf16_supported": True, "device_count": 2, "get_device_name": "H100"}
    for name, value in (known | {"reset_peak_memory_stats": None}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_hardware(HardwareConfig(device="cuda:1", compile=False)).device == torch.device("cuda:1")
    assert chosen == [torch.device("cuda:1")]
    choose_hardware(HardwareConfig(device="cuda", compile=False))  # the one that is current
    assert len(chosen) == 1
