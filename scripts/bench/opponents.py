"""Other people's networks and optimizers as opponents, each in the recipe that its own training script states.

Their files are not ours and are not stored here: fetch them before measuring. Both read rows that begin anywhere in the
text; our Prefetcher reads them ahead on a GPU. A network is compiled where our run is, with PyTorch's defaults.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data import Prefetcher
from data.shards import Tokens
from model.config import round_up
from scripts.bench.report import refuse_out_of_range
from training.run import Run


class Contender(nn.Module):
    """A network with its optimizer, in the interface of ours: the loss is a sum over the targets that are not -1.

    Attributes:
        mean_loss: of inputs and targets (rows, seq_len), which a step differentiates.
        update: called with the step's number, from 0; updates the weights by the gradients and clears them.
    """

    def __init__(
        self, net: nn.Module, mean_loss: Callable[[Tensor, Tensor], Tensor], update: Callable[[int], None]
    ) -> None:
        super().__init__()
        self.net, self.mean_loss, self.update = net, mean_loss, update

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.mean_loss(tokens, targets) * (targets != -1).sum()


@dataclass
class Opponent:
    """Where an opponent's code is, and the settings that every recipe has."""

    NAME, FILES = "", ()  # the repository's name, and which of its files in `folder` are read

    folder: str
    lr: list[float]
    steps: int
    batch_tokens: int
    warmup_steps: int

    def __post_init__(self) -> None:
        refuse_out_of_range(self.group, self, "batch_tokens")
        if self.steps < 2:
            raise ValueError(
                f"{self.group}steps={self.steps} must be at least 2: the first one, which compiles, is not timed"
            )
        if not self.lr:
            raise ValueError(
                f"{self.group}lr=[] trains nothing; name a rate, or leave {self.NAME} out of bench.opponents"
            )
        if any(not 0 < rate < math.inf for rate in self.lr):
            raise ValueError(f"{self.group}lr={self.lr} must be positive and finite")
        if self.warmup_steps < 0:
            raise ValueError(f"{self.group}warmup_steps={self.warmup_steps} must be at least 0")

    @property
    def group(self) -> str:
        return f"{self.NAME.lower()}."

    @property
    def sha256(self) -> str:
        """SHA-256 of its files: the version. Raises ValueError with the command to fetch them where one is missing."""
        paths = [Path(self.folder) / name for name in self.FILES]
        if missing := next((path for path in paths if not path.is_file()), None):
            fetch = f"git clone https://github.com/karpathy/{self.NAME} .cache/{self.NAME}"
            raise ValueError(
                f"{self.group}folder={self.folder} has no {missing.relative_to(self.folder)}; fetch it: {fetch}"
            )
        return sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()

    def rows(self, seq_len: int) -> int:
        """Rows of a step. Raises ValueError where its tokens are no whole number of rows."""
        rows, rest = divmod(self.batch_tokens, seq_len)
        if rest:
            raise ValueError(
                f"{self.group}batch_tokens={self.batch_tokens} is not a multiple of data.seq_len={seq_len}; "
                f"use {max(1, rows) * seq_len}"
            )
        return rows

    def contender(self, lr: float, run: Run) -> Contender:
        """Its network with new weights and the sizes of our `run`, trained at the peak rate `lr`."""
        raise NotImplementedError


@dataclass
class NanoGPTConfig(Opponent):
    """nanoGPT; the defaults are its CPU recipe for tinyshakespeare, config/train_shakespeare_char.py."""

    NAME = "nanoGPT"
    FILES = ("model.py",)
    LEAST_RATE = 0.1  # of the peak, where the cosine ends
    WEIGHT_DECAY = 0.1
    BETA1 = 0.9
    GRAD_CLIP = 1.0

    folder: str = ".cache/nanoGPT"  # where its model.py is
    lr: list[float] = field(default_factory=lambda: [1e-3])  # peak rates: the recipe's, and others to tune it
    steps: int = 2000  # optimizer steps of its schedule
    batch_tokens: int = 768  # tokens of one optimizer step
    warmup_steps: int = 100  # linear
    beta2: float = 0.99  # AdamW's, of the mean of squared gradients

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta2 < 1:
            raise ValueError(f"nanogpt.beta2={self.beta2} must lie in [0, 1)")

    def lr_factor(self, step: int) -> float:
        """The rate of `step`, from 0, as a fraction of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.LEAST_RATE + (1 - self.LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))

    def contender(self, lr: float, run: Run) -> Contender:
        spec = spec_from_file_location("nanogpt_model", Path(self.folder) / "model.py")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        model, vocab, hardware = run.model, run.vocab_size, run.hardware
        shape: dict[str, Any] = {"n_layer": model.num_layers, "n_head": model.num_heads, "n_embd": model.n_embd}
        padded = vocab if vocab < 2**15 else round_up(vocab, 64)  # as its own data sets have it
        config = module.GPTConfig(**shape, block_size=run.seq_len, vocab_size=padded, dropout=model.dropout, bias=False)
        net = module.GPT(config).to(hardware.device)
        optimizer = net.configure_optimizers(self.WEIGHT_DECAY, lr, (self.BETA1, self.beta2), hardware.device.type)
        forward = torch.compile(net) if hardware.compile else net

        def mean_loss(inputs: Tensor, targets: Tensor) -> Tensor:
            with hardware.autocast():
                return forward(inputs, targets)[1]

        def update(step: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = lr * self.lr_factor(step)
            nn.utils.clip_grad_norm_(net.parameters(), self.GRAD_CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return Contender(forward, mean_loss, update)


@dataclass
class NanochatConfig(Opponent):
    """nanochat's base model and its MuonAdamW at the width of ours, by the rules and numbers of its base_train.py.

    Rates grow with the square root of a step's tokens, weight decay with that root over the model's size. Attention is
    PyTorch's, which it uses without FlashAttention-3, and has no windows, as it then advises.
    """

    NAME = "nanochat"
    FILES = ("nanochat/gpt.py", "nanochat/optim.py")
    MATRIX_LR = 0.02  # `lr` replaces it, and scales the other rates by the same factor
    WEIGHT_DECAY = 0.28
    LAYERS, TOKENS = 12, 2**19  # of the model that it was tuned on, with 64 columns for each layer, and of its step
    WARMDOWN, LEAST_RATE = 0.65, 0.05  # the share of the steps in which the rate falls, and of the rate at their end

    folder: str = ".cache/nanochat"  # the clone
    lr: list[float] = field(default_factory=lambda: [0.02])  # peak rates of its matrices: the recipe's, and others
    steps: int = 600  # optimizer steps of its schedule
    batch_tokens: int = 65536  # tokens of one optimizer step
    warmup_steps: int = 40  # linear

    def lr_factor(self, step: int) -> float:
        """The rate of `step`, from 0, as a fraction of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        left = self._left(step)
        return left + (1 - left) * self.LEAST_RATE

    def momentum(self, step: int) -> float:
        """Muon's: up to 0.97 in 400 steps, down to 0.90 while the rate falls."""
        if step < 400:
            return 0.85 + 0.12 * step / 400
        left = self._left(step)
        return 0.97 * left + 0.90 * (1 - left)

    def _left(self, step: int) -> float:
        """The share that is left of the steps in which the rate falls."""
        return min(1.0, (self.steps - step) / max(1, round(self.WARMDOWN * self.steps)))

    def contender(self, lr: float, run: Run) -> Contender:
        if self.folder not in sys.path:
            sys.path.append(self.folder)
        module, model, hardware = import_module("nanochat.gpt"), run.model, run.hardware

        def network(layers: int, heads: int, width: int) -> nn.Module:
            shape = {"n_layer": layers, "n_head": heads, "n_kv_head": heads, "n_embd": width, "window_pattern": "L"}
            with torch.device("meta"):  # as its own script does
                return module.GPT(module.GPTConfig(sequence_len=run.seq_len, vocab_size=run.vocab_size, **shape))

        net = network(model.num_layers, model.num_heads, model.n_embd)
        reference = network(self.LAYERS, self.LAYERS // 2, 64 * self.LAYERS)
        smaller = _matrices(reference) / _matrices(net)
        net.to_empty(device=hardware.device)
        net.init_weights()
        with_batch = math.sqrt(self.batch_tokens / self.TOKENS)
        decay = self.WEIGHT_DECAY * with_batch * smaller
        moved = with_batch * lr / self.MATRIX_LR
        rates = {"matrix_lr": self.MATRIX_LR, "embedding_lr": 0.3, "unembedding_lr": 0.008, "scalar_lr": 0.5}
        rates = {name: rate * moved for name, rate in rates.items()}
        optimizer = net.setup_optimizer(weight_decay=decay, **rates)
        forward = torch.compile(net, dynamic=False) if hardware.compile else net

        def mean_loss(inputs: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast(hardware.device.type, enabled=False):  # it casts its weights itself
                return forward(inputs, targets)

        def update(step: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self.lr_factor(step)
                if group["kind"] == "muon":
                    group["momentum"] = self.momentum(step)
                    group["weight_decay"] = decay * 0.5 * (1 + math.cos(math.pi * step / self.steps))
            optimizer.step()
            net.zero_grad(set_to_none=True)

        return Contender(forward, mean_loss, update)


OPPONENTS = tuple(config.NAME.lower() for config in (NanoGPTConfig, NanochatConfig))


class RandomRows:
    """Rows of `seq_len` tokens that begin anywhere, drawn with replacement; what Prefetcher reads.

    Args:
        tokens: one split, 1-D; it is held in memory.
    """

    def __init__(self, tokens: Tokens, seq_len: int, batch_size: int, seed: int) -> None:
        self._tokens, self._places = tokens[:].astype(np.int64), np.arange(seq_len + 1)
        self._batch_size, self._random = batch_size, np.random.default_rng(seed)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The next inputs and targets, (batch_size, seq_len) int64 on the CPU; `step` is ignored."""
        starts = self._random.integers(len(self._tokens) - len(self._places) + 1, size=self._batch_size)
        rows = torch.from_numpy(self._tokens[starts[:, None] + self._places])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train_opponent(config: Opponent, lr: float, run: Run, seed: int) -> Iterator[Contender]:
    """Train an opponent's network at the peak rate `lr` on the text of our `run`; yields it after each step."""
    torch.manual_seed(seed)
    contender = config.contender(lr, run)
    rows = RandomRows(run.dataset.train, run.seq_len, config.rows(run.seq_len), seed)
    with Prefetcher(rows, 0, run.hardware.device) as batches:
        for step in range(config.steps):
            inputs, targets, _ = next(batches)
            contender.mean_loss(inputs, targets).backward()
            contender.update(step)
            yield contender


def _matrices(net: nn.Module) -> int:
    """The number of weights that nanochat counts as a model's size."""
    counts = net.num_scaling_params()
    return counts["transformer_matrices"] + counts["lm_head"]
