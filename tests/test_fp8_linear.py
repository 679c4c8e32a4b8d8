"""Linear layers in 8 bits: against the same products in float32, what is refused, what they leave alone."""

from dataclasses import asdict

import pytest
import torch
from torch import nn

from model import GPT, GPTConfig, resolve_model
from model.fp8 import E4M3, E5M2, Linear8, Products8, quantized, why_no_fp8
from tests.runs import small_run
from train import train
from training.checkpoint import open_checkpoint
from training.hardware import Hardware
from training.optimizer import OptimConfig
from training.resume import refuse_unless_same
from training.run import resolve
from training.tracker import step_peaks
from training.trained import load_trained

SIZES = {"num_layers": 2, "num_heads": 2, "n_embd": 32, "attention": "sdpa", "loss": "plain"}


def rounded(x, dtype):
    q, scale = quantized(x, dtype)
    return q.float() * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_three_products_are_those_of_rounded_tensors(dtype):
    torch.manual_seed(0)
    x = torch.randn(32, 48, dtype=dtype, requires_grad=True)
    weight = torch.randn(64, 48, requires_grad=True)
    dy = 1e-6 * torch.randn(32, 64, dtype=dtype)  # gradients are small: without a scale they would be zero
    y = Products8.apply(x, weight)
    y.backward(dy)
    x8, w8, dy8 = rounded(x.detach(), E4M3), rounded(weight.detach(), E4M3), rounded(dy, E5M2)
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (dtype, dtype, torch.float32)
    close = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5, "check_dtype": False}
    torch.testing.assert_close(y, x8 @ w8.t(), atol=1e-3, **close)
    torch.testing.assert_close(x.grad, dy8 @ w8, atol=1e-9, **close)
    torch.testing.assert_close(weight.grad, dy8.t() @ x8, atol=1e-9, **close)


@pytest.mark.parametrize(("dtype", "bits"), [(E4M3, 3), (E5M2, 2)])
def test_quantized_rounds_to_the_format_and_keeps_what_is_not_finite(dtype, bits):
    x = torch.cat([torch.logspace(-2, 2, 100), -torch.logspace(-2, 2, 100)])
    q, scale = quantized(x, dtype)
    assert q.float().abs().max() == torch.finfo(dtype).max
    assert ((q.float() * scale - x).abs() <= x.abs() * 2.0 ** -(bits + 1) * 1.0001).all()
    assert quantized(torch.zeros(4), dtype)[0].float().eq(0).all()
    for bad in (torch.nan, torch.inf):
        assert not quantized(torch.tensor([1.0, bad]), dtype)[0].float().isfinite().all()


def test_only_training_is_in_8_bits_and_the_weights_keep_names_and_numbers():
    plain, eight, mlp = (
        GPT(GPTConfig(**SIZES, fp8=fp8), 50, 32, generator=torch.Generator().manual_seed(0))
        for fp8 in ("none", "all", "mlp")
    )
    for (name, weight), (other, same) in zip(plain.named_parameters(), eight.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(weight, same)
    assert [type(m) for m in mlp.blocks[0].modules() if isinstance(m, nn.Linear)] == [nn.Linear] * 2 + [Linear8] * 2
    tokens = torch.randint(50, (2, 32), generator=torch.Generator().manual_seed(1))
    losses = [model(tokens, tokens) for model in (plain, eight)]
    for loss in losses:
        loss.backward()
    assert losses[0] != losses[1]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=0)
    for weight, same in zip(plain.parameters(), eight.parameters(), strict=True):
        assert (weight.grad - same.grad).norm() < 0.15 * weight.grad.norm()
    assert torch.equal(plain.eval()(tokens), eight.eval()(tokens))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"model.fp8=mlp needs products in 8 bits: a CPU has none; use model.fp8=none"):
        resolve_model(GPTConfig(**SIZES, fp8="mlp"), "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"multiples of 16: model.n_embd=24, the MLP's 96, and 72 of q, k and v"):
        GPTConfig(num_heads=2, n_embd=24, fp8="all")
    with pytest.raises(ValueError, match=r"model.fp8=e4m3 is unknown; use one of none, mlp, all"):
        GPTConfig(fp8="e4m3")
    model = GPT(GPTConfig(**SIZES, fp8="all"), 50, 9)
    with pytest.raises(ValueError, match="multiple of 16 tokens in a micro-batch, not 9"):
        model(torch.zeros(1, 9, dtype=torch.long), torch.zeros(1, 9, dtype=torch.long))


def test_a_run_in_8_bits_is_sampled_anywhere_and_an_earlier_one_goes_on(tmp_path):
    chosen = small_run(tmp_path, "train.steps=1")
    train(chosen, tmp_path / "run")
    checkpoint = open_checkpoint(str(tmp_path / "run"))
    model = checkpoint.meta["settings"]["model"]
    model["fp8"] = "all"
    load_trained(checkpoint, "cpu", torch.float32, attention="auto")
    del model["fp8"]  # as it was before there was such a key
    tokenizer, size = checkpoint.meta["tokenizer"], checkpoint.meta["vocab_size"]
    refuse_unless_same(checkpoint, checkpoint.meta["settings"] | {"model": asdict(chosen.model)}, tokenizer, size)


def test_an_older_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    assert why_no_fp8("cuda") == "A100 is older than sm_89"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert why_no_fp8("cuda") is None


def test_a_step_in_8_bits_has_a_forecast():
    hardware = Hardware(torch.device("cuda"), torch.bfloat16, True, "")
    sizes = SIZES | {"n_embd": 256, "attention": "flash"}
    peaks = []
    for fp8 in ("none", "all"):
        moments = step_peaks(GPTConfig(**sizes, fp8=fp8), OptimConfig(), hardware, 50, 256, 8, 8)
        peaks.append(max(held.total() for held in moments.values()))
    assert 0.7 * peaks[0] < peaks[1] < 1.1 * peaks[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_run_in_8_bits_ends_near_one_without(tmp_path):
    chosen = ("hardware.device=cuda", "hardware.compile=true", "model.n_embd=64", "train.steps=60")
    losses = [
        train(small_run(tmp_path, *chosen, f"model.fp8={fp8}"), tmp_path / fp8)["val_loss"] for fp8 in ("none", "all")
    ]
    assert abs(losses[0] - losses[1]) < 0.1
    assert resolve(small_run(tmp_path, *chosen, "model.fp8=all")).graphs
