"""What a training step holds, byte by byte, without a GPU: fake tensors of device cuda, their storages counted.

Only operators that the model calls are seen: what a kernel of ours allocates inside is its fake version's outputs.
"""

import weakref
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT, GPTConfig, resolve_model
from model.attention import ATTENTION
from training.optimizer import OptimConfig, Optimizer


class LiveMemory(TorchDispatchMode):
    """Bytes of all storages that operators have returned and that still live: `now`, and `peak` since `restart`."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.alive: dict[int, weakref.ref] = {}

    def restart(self) -> None:
        self.peak = self.now

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.alive:
            self.alive[key] = weakref.ref(storage, lambda _: self.forget(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def forget(self, key: int, size: int) -> None:
        del self.alive[key]
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return out


def measured(
    config: GPTConfig, vocab_size: int, seq_len: int, rows: int, dtype: torch.dtype, optim: OptimConfig, device: str
):
    """Bytes of a second step's moments: what is `held` between steps, after `forward`, and at the `peak`."""
    on_cpu, *_ = resolve_model(replace(config, attention="naive"), "cpu", dtype)
    model = GPT(on_cpu, vocab_size, seq_len)
    with ExitStack() as stack:
        # whether a step is taken depends on numbers, which fake tensors do not have
        stack.enter_context(patch("training.optimizer.step_unless", lambda part, skip: part.step()))
        stack.enter_context(FakeTensorMode())
        live = stack.enter_context(LiveMemory())
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(weight.shape, device=device)))
            for name, table in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(table.shape, device=device))
        for block in model.blocks:
            block.attention.attend = ATTENTION[config.attention]
        optimizer = Optimizer(model, optim)
        tokens = torch.zeros(rows, seq_len, dtype=torch.int64, device=device)
        found = {}
        for _ in range(2):
            found["held"] = live.now
            live.restart()
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                loss = model(tokens, tokens) / tokens.numel()
            found["forward"], found["forward_peak"] = live.now, live.peak
            if device == "cuda":
                return found
            live.restart()
            loss.backward()
            del loss
            found["backward_peak"], found["gradients"] = live.peak, live.now
            live.restart()
            optimizer.step()
            found["optimizer_peak"] = live.peak
    return found
