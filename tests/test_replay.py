"""Launching again: each address in its place, descriptors encoded once, and the same results as the first launch."""

from types import SimpleNamespace

import pytest
import torch

from kernels import flash_attention, flash_attention_varlen, replay
from kernels.options import Options
from tests.attention_checks import make_packed, make_qkv

PLAIN = Options(causal=True, scale=0.5)


class Entry:
    """Stands for Triton's C entry point and keeps what it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, *arguments):
        self.calls.append(arguments)


@pytest.fixture
def entry(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77 + index, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(replay, "_REPLAYS", {})
    return Entry()


def compiled(entry):
    """What Triton's compiler returns, as far as a replay reads it."""
    runner = SimpleNamespace(
        launch=entry, global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=0, launch_pdl=0
    )
    metadata = SimpleNamespace(tensordesc_meta=["how to encode"])
    return SimpleNamespace(run=runner, function="kernel", packed_metadata="warps", metadata=metadata)


def described_tensor(x):
    return SimpleNamespace(base=x, shape=[4, 8], strides=[8, 1], block_shape=[2, 8], padding="zero")


def test_each_address_goes_to_its_place(entry, monkeypatch):
    encoded = []
    monkeypatch.setattr(
        "triton.backends.nvidia.driver.make_tensordesc_arg",
        lambda at, how: encoded.append((at.base.data_ptr(), how)) or [f"map of {at.base.data_ptr()}"],
    )
    x = torch.zeros(4, 8)
    again = replay.Replay(compiled(entry), 12, (described_tensor(x), x, (1, 2), 3, (None, x, 0.5, x), "constexpr"))
    for addresses in ((16, 32, 48, 64), (16, 96, 112, 128), (160, 32, 48, 64)):
        again(1, *addresses)
    head = (12, 1, 1, 78, "kernel", 0, 0, None, None, "warps", None, None, None)
    assert entry.calls == [
        (*head, f"map of {a}", 4, 8, 8, 1, b, (1, 2), 3, (None, c, 0.5, d), "constexpr")
        for a, b, c, d in ((16, 32, 48, 64), (16, 96, 112, 128), (160, 32, 48, 64))
    ]
    assert encoded == [(16, "how to encode"), (160, "how to encode")]


def test_an_unaligned_address_is_not_replayed(entry):
    again = replay.Replay(compiled(entry), 1, (torch.zeros(4), torch.zeros(4)))
    described = (PLAIN, None, torch.float32, 0)
    assert not replay.known(described)
    replay.remember(described, again, again)
    assert replay.known(described)
    assert not replay.replay(described, [16, 32], [16, 40])
    assert entry.calls == []
    assert replay.replay(described, [16, 32], [16, 48])
    assert [call[-2:] for call in entry.calls] == [(16, 32), (16, 48)]


def test_what_the_interpreter_ran_is_not_remembered(entry):
    replay.remember(("call",), None)
    replay.remember(None, replay.Replay(compiled(entry), 1, ()))
    assert not replay.known(("call",))
    assert not replay.known(None)


def test_descriptions_tell_apart_what_compiles_or_runs_differently():
    class OnGPU(torch.Tensor):
        is_cuda = True

    def tensor(*shape):
        return torch.zeros(*shape, dtype=torch.bfloat16).as_subclass(OnGPU)

    x = tensor(1, 2, 8, 16)
    calls = [
        replay.description(PLAIN, None, x, x),
        replay.description(PLAIN._replace(causal=False), None, x, x),
        replay.description(PLAIN._replace(scale=0.25), None, x, x),
        replay.description(PLAIN._replace(sinks=torch.zeros(2)), None, x, x),
        replay.description(PLAIN, "tile", x, x),
        replay.description(PLAIN, None, x, tensor(1, 1, 8, 16)),
        replay.description(PLAIN, None, x, tensor(1, 8, 2, 16).transpose(1, 2)),
        replay.description(PLAIN, None, x.half(), x),
    ]
    assert len(set(calls)) == len(calls)
    assert replay.description(PLAIN, None, tensor(1, 2, 16, 8).transpose(2, 3), x) is None
    assert replay.description(PLAIN, None, torch.zeros(1, 2, 8, 16), x) is None


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_gpu_a_replay_gives_what_the_first_launch_gives(packed):
    """Other inputs of the same description, then the first ones again: the same bits as the first time."""
    options = {"causal": True, "dropout_p": 0.1, "dropout_seed": 3, "sinks": torch.tensor([0.5, -0.5], device="cuda")}

    def run(seed):
        kind = {"dtype": torch.bfloat16, "device": "cuda", "seed": seed}
        if packed:
            qkv, arguments = make_packed([90, 0, 38], [90, 0, 38], 2, 1, 64, **kind)
            o, lse = flash_attention_varlen(*qkv, **arguments, **options, return_lse=True)
        else:
            qkv = make_qkv(1, 2, 1, 100, 130, 64, **kind)
            o, lse = flash_attention(*qkv, **options, return_lse=True)
        return o, lse, *torch.autograd.grad(o.float().square().sum() + lse[lse > -1e9].sum(), qkv)

    replay._REPLAYS.clear()
    first = run(0)
    assert len(replay._REPLAYS) == 2
    run(1)
    assert len(replay._REPLAYS) == 2
    for a, b in zip(first, run(0), strict=True):
        assert torch.equal(a, b)
    replay._REPLAYS.clear()
    for a, b in zip(first, run(0), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_gpu_an_unaligned_view_after_an_aligned_one():
    whole = torch.randn(1, 2, 65, 64, dtype=torch.bfloat16, device="cuda").flatten()
    aligned, odd = (whole[i : i + 2 * 64 * 64].view(1, 2, 64, 64) for i in (0, 1))
    flash_attention(aligned, aligned, aligned)
    o = flash_attention(odd, odd, odd)
    assert torch.equal(o, flash_attention(*[odd.clone()] * 3))
