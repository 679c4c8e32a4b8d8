"""nanoGPT as an opponent: its own model.py and optimizer in the recipe that its train.py and config files state.

The file is not ours and is not stored here: whoever measures fetches it (`FETCH`). Batches are rows that begin anywhere
in the text; our Prefetcher reads them ahead on a GPU, where nanoGPT's own loop waits for them. Its network is compiled
where our run is, with PyTorch's own choices.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data import Prefetcher
from data.shards import Tokens
from model.config import GPTConfig, round_up
from scripts.bench.report import refuse_below_one
from training.hardware import Hardware

FETCH = "git clone https://github.com/karpathy/nanoGPT .cache/nanoGPT"
LEAST_RATE = 0.1  # of the peak, where the cosine ends
WEIGHT_DECAY = 0.1
BETA1 = 0.9
GRAD_CLIP = 1.0


@dataclass
class NanoGPTConfig:
    """What nanoGPT's recipe says; the defaults are those of its CPU recipe for tinyshakespeare."""

    folder: str = ".cache/nanoGPT"  # where its model.py is
    lr: list[float] = field(default_factory=lambda: [1e-3])  # peak rates: the recipe's, and others to tune it
    steps: int = 2000  # optimizer steps of its schedule
    batch_tokens: int = 768  # tokens of one optimizer step
    warmup_steps: int = 100  # linear
    beta2: float = 0.99  # AdamW's, of the mean of squared gradients

    def __post_init__(self) -> None:
        refuse_below_one("nanogpt.", self, "steps", "batch_tokens")
        if not self.lr:
            raise ValueError("nanogpt.lr=[] trains nothing; name a rate, or leave nanoGPT out by bench.nanogpt=false")
        if any(not 0 < rate < math.inf for rate in self.lr):
            raise ValueError(f"nanogpt.lr={self.lr} must be positive and finite; 1e-3 is the recipe's")
        if self.warmup_steps < 0:
            raise ValueError(f"nanogpt.warmup_steps={self.warmup_steps} must be at least 0")
        if not 0 <= self.beta2 < 1:
            raise ValueError(f"nanogpt.beta2={self.beta2} must lie in [0, 1)")

    def load(self) -> ModuleType:
        """Its model.py as a module. ValueError, with the command that fetches it, where it is not there."""
        path = Path(self.folder) / "model.py"
        if not path.is_file():
            raise ValueError(f"nanogpt.folder={self.folder} has no model.py; fetch it: {FETCH}")
        spec = spec_from_file_location("nanogpt_model", path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    @property
    def sha256(self) -> str:
        """Of its model.py: which nanoGPT this is."""
        return sha256((Path(self.folder) / "model.py").read_bytes()).hexdigest()

    def rows(self, seq_len: int) -> int:
        """Of a step. ValueError where its tokens are no whole number of them."""
        rows, rest = divmod(self.batch_tokens, seq_len)
        if rest:
            raise ValueError(
                f"nanogpt.batch_tokens={self.batch_tokens} is not a multiple of data.seq_len={seq_len}; "
                f"use {max(1, rows) * seq_len}"
            )
        return rows

    def lr_factor(self, step: int) -> float:
        """The rate of `step`, from 0, as a fraction of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


class RandomRows:
    """Rows of `seq_len` tokens that begin anywhere, drawn with replacement; what Prefetcher reads.

    Args:
        tokens: one split, 1-D; it is held in memory.
    """

    def __init__(self, tokens: Tokens, seq_len: int, batch_size: int, seed: int) -> None:
        self._tokens, self._places = tokens[:].astype(np.int64), np.arange(seq_len + 1)
        self._batch_size, self._random = batch_size, np.random.default_rng(seed)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The next inputs and targets, (batch_size, seq_len) int64 on the CPU; `step` is not asked."""
        starts = self._random.integers(len(self._tokens) - len(self._places) + 1, size=self._batch_size)
        rows = torch.from_numpy(self._tokens[starts[:, None] + self._places])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Summed(nn.Module):
    """Its network in the interface of ours: the loss is a sum over the tokens that count."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        _, mean = self.net(tokens, targets)
        return mean * (targets != -1).sum()


def train_nanogpt(
    config: NanoGPTConfig,
    lr: float,
    model: GPTConfig,
    seq_len: int,
    vocab_size: int,
    tokens: Tokens,
    hardware: Hardware,
    seed: int,
    after_step: Callable[[int, nn.Module], bool],
) -> None:
    """Train nanoGPT's network of `model`'s sizes.

    Args:
        lr: the peak rate.
        after_step: called after each step, from 1, with the network in our interface; True ends the training.
    """
    torch.manual_seed(seed)
    module = config.load()
    sizes: dict[str, Any] = {"n_layer": model.num_layers, "n_head": model.num_heads, "n_embd": model.n_embd}
    padded = vocab_size if vocab_size < 2**15 else round_up(vocab_size, 64)  # as its own data sets have it
    its_config = module.GPTConfig(**sizes, block_size=seq_len, vocab_size=padded, dropout=model.dropout, bias=False)
    net = module.GPT(its_config).to(hardware.device)
    optimizer = net.configure_optimizers(WEIGHT_DECAY, lr, (BETA1, config.beta2), hardware.device.type)
    forward = torch.compile(net) if hardware.compile else net
    summed = Summed(forward)
    rows = RandomRows(tokens, seq_len, config.rows(seq_len), seed)
    with its_own_choices(hardware), Prefetcher(rows, 0, hardware.device) as batches:
        for step in range(config.steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * config.lr_factor(step)
            inputs, targets, _ = next(batches)
            with hardware.autocast():
                _, loss = forward(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), GRAD_CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if after_step(step + 1, summed):
                break


def its_own_choices(hardware: Hardware) -> AbstractContextManager:
    """torch.compile as it is by itself; our runs hold it to choices that are the same in any process."""
    if not hardware.compile:
        return nullcontext()
    from torch._inductor import config as inductor

    return inductor.patch(deterministic=False)
