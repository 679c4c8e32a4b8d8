"""The output head and its loss, two ways: `python -m scripts.bench.loss` times forward and backward of each.

`plain` has the logits of all tokens at once, `chunked N` those of N tokens (`kernels.linear_cross_entropy`). Beside
time and memory: the error of the loss and of both gradients against float64, on the first `exact_tokens` tokens. The
last line is one JSON object.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from conf.program import program
from kernels import cross_entropy, linear_cross_entropy
from scripts.bench.clock import failures_as_rows, measure, peak_gib
from scripts.bench.report import Columns, Report, Row, refuse_out_of_range, set_up_gpu, table
from training.hardware import Hardware, HardwareConfig

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
SMOKE = "tokens=64 n_embd=16 vocab_size=50 padded_vocab=64 chunk_tokens=[16] exact_tokens=16"


@dataclass
class LossBenchSettings:
    tokens: int = 65536  # rows of hidden states
    n_embd: int = 768  # their width
    vocab_size: int = 50257  # GPT-2's
    padded_vocab: int = 50304  # rows of the table
    chunk_tokens: list[int] = field(default_factory=lambda: [2048, 4096, 8192, 16384])  # tokens at a time
    exact_tokens: int = 2048  # float64 logits of all tokens would not fit
    budget_ms: float = 1000.0  # of measuring, each
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        sizes = "tokens", "n_embd", "vocab_size", "padded_vocab", "exact_tokens", "chunk_tokens", "budget_ms"
        refuse_out_of_range("", self, *sizes)
        if self.padded_vocab < self.vocab_size:
            raise ValueError(f"padded_vocab={self.padded_vocab} must be at least vocab_size={self.vocab_size}")


@program("tool", LossBenchSettings, run_dir="runs/bench_loss")
def main(settings: LossBenchSettings, run_dir: Path) -> None:
    hardware = set_up_gpu("the head's loss", settings.hardware, SMOKE)
    report = Report("bench_loss", run_dir, hardware.description, more={"tokens": settings.tokens})
    inputs = make(settings, hardware.device)
    exact = exact_results(settings, *inputs)
    for name, loss in implementations(settings).items():
        row = {"name": name}
        with failures_as_rows(row):
            row |= measured(settings, loss, hardware, exact, *inputs)
        report.add(row)
    report.finish(table(report.rows, NAMES, FIGURES, TITLE.format_map(report.more), CAPTION))


TITLE = "head and loss of {tokens:,} tokens, forward and backward"
CAPTION = "errors relative to float64, by norm"
NAMES: Columns = {"head and loss": "{name}"}
FIGURES: Columns = {
    "ms": "{ms:.2f}",
    "GiB beyond inputs": "{extra_gib:.2f}",
    "loss error": "{loss_error:.1e}",
    "dh error": "{dh_error:.1e}",
    "dweight error": "{dweight_error:.1e}",
}


def make(settings: LossBenchSettings, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What a network after some training gives: h of RMS 1 (T, C), a table of GPT-2's scale, targets (T,)."""
    generator = torch.Generator(device).manual_seed(0)
    h = torch.randn(settings.tokens, settings.n_embd, generator=generator, device=device)
    weight = 0.02 * torch.randn(settings.padded_vocab, settings.n_embd, generator=generator, device=device)
    targets = torch.randint(settings.vocab_size, (settings.tokens,), generator=generator, device=device)
    return h.requires_grad_(), weight.requires_grad_(), targets


def implementations(settings: LossBenchSettings) -> dict[str, Loss]:
    """Name -> loss(h, table, targets), which returns a sum in nats."""
    vocab = {"vocab_size": settings.vocab_size}
    chunked = {f"chunked {n:,}": partial(linear_cross_entropy, **vocab, chunk_tokens=n) for n in settings.chunk_tokens}
    return {"plain": lambda h, w, t: cross_entropy(torch.nn.functional.linear(h, w), t, **vocab)} | chunked


def gradients(loss: Loss, hardware: Hardware, h: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Mean loss, dh, dweight: what a training step computes."""
    with hardware.autocast():
        mean = loss(h.to(hardware.dtype), weight, targets) / len(targets)
    return mean, *torch.autograd.grad(mean, (h, weight))


def exact_results(settings: LossBenchSettings, h: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    few = settings.exact_tokens
    h, weight = h.detach()[:few].double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = (h @ weight.T)[:, : settings.vocab_size]
    mean = torch.nn.functional.cross_entropy(logits, targets[:few])
    return mean.detach(), *torch.autograd.grad(mean, (h, weight))


def measured(
    settings: LossBenchSettings, loss: Loss, hardware: Hardware, exact: tuple[Tensor, ...], h, weight, targets
) -> Row:
    few = settings.exact_tokens
    found = gradients(loss, hardware, h[:few], weight, targets[:few])
    errors = [((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in zip(found, exact, strict=True)]
    del found
    whole = lambda: gradients(loss, hardware, h, weight, targets)  # noqa: E731
    peak = peak_gib(whole, hardware.device)
    times = measure(whole, hardware.device, budget_ms=settings.budget_ms)
    row = {"ms": times.p50, "extra_gib": peak}
    return row | dict(zip(("loss_error", "dh_error", "dweight_error"), errors, strict=True))


if __name__ == "__main__":
    main()
