"""What a training step holds, without a GPU and before anything is allocated: the run's own step on fake tensors.

Fake tensors have storages but no memory; a tracker counts those that live. They lie on the CPU and claim to be on the
run's device. A compiled step is tracked in eager mode, less what the compiler computes again. Assumed: `tiled` keeps
what `flash` keeps, and packed documents are as long as their row. Not counted: the CUDA context and the allocator's
fragments.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT, GPTConfig
from model.attention import naive, sdpa
from training.hardware import Hardware
from training.optimizer import OptimConfig, Optimizer
from training.parallel import ALONE
from training.step import training_step

CUBLAS_BYTES = 2 * 32 * 2**20  # workspaces of the forward's and of the backward's thread on Hopper; less elsewhere
KINDS = {"": "parameters and batch", "backward": "gradients", "optimizer": "optimizer state"}  # made outside of modules


class Tracker(TorchDispatchMode):
    """Bytes of all storages that operators returned and that still live.

    Attributes:
        moments: for each part of the step what is held at its fullest: (kind, module that made it) -> bytes.
    """

    def __init__(self, on_cuda: bool, compiled: bool) -> None:
        super().__init__()
        self.on_cuda, self.compiled = on_cuda, compiled
        self.moments: dict[str, Counter] = {}
        self._part, self._modules = "", []  # of the step; those that run, the innermost last
        self._held = Counter({("cuBLAS", ""): CUBLAS_BYTES} if on_cuda else {})
        self._alive: dict[int, ref] = {}  # by the storage's address

    @contextmanager
    def region(self, part: str) -> Iterator[None]:
        """Names a part of the step, for `training_step`."""
        self._part = part
        yield

    def follow(self, name: str, module: nn.Module) -> None:
        """Note by name what `module` makes."""

        def leave(*_) -> None:
            self._modules.pop()

        module.register_forward_pre_hook(lambda *_: self._modules.append(name))
        module.register_forward_hook(leave, always_call=True)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._fused_adamw_.tensor_lr:
            return None  # it makes nothing; PyTorch 2.11 has no form of it for fake tensors and would fill real ones
        out = function(*args, **(kwargs or {}))
        if self.compiled and self._part == "backward" and function is torch.ops.flashgpt.rotary_fwd.default:
            return out  # the compiler turns q and k again after the MLP's backward, which is the fullest
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        inside = self._allocated_inside(function, args)
        if self._part not in self.moments or self._held.total() + inside > self.moments[self._part].total():
            self.moments[self._part] = self._held + Counter({("inside an operator", ""): inside})
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._alive:
            return
        kind = "activations" if self._modules else KINDS.get(self._part, "activations")
        made = kind, self._modules[-1] if self._modules else ""

        def forget(_: ref) -> None:
            del self._alive[address]
            self._held[made] -= size

        self._alive[address] = ref(storage, forget)
        self._held[made] += size

    def _allocated_inside(self, function, args: tuple) -> int:
        """Bytes that an operator allocates and frees again, for those where they are many."""
        if function is torch.ops.aten._softmax_backward_data.default:
            return args[0].nbytes  # gradient times output
        if function is not torch.ops.flashgpt.linear_cross_entropy_fwd.default:
            return 0
        h, weight, _, _, chunk_tokens, _ = args
        a_logit = h.itemsize + (0 if self.on_cuda else 3 * 4)  # on a CPU three times in float32 too
        copy = weight.numel() * h.itemsize if weight.dtype != h.dtype else 0
        return min(chunk_tokens, len(h)) * len(weight) * a_logit + copy


class Claims(TorchFunctionMode):
    """Sends fake CPU tensors the ways that tensors of the run's device go."""

    def __init__(self, on_cuda: bool, compiled: bool) -> None:
        super().__init__()
        self.on_cuda, self.compiled = on_cuda, compiled

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__self__", None) is Tensor.is_cuda:
            return self.on_cuda
        if function is F.dropout and self.on_cuda and kwargs["p"]:
            return torch.native_dropout(*args, kwargs["p"], True)[0]  # whose mask has a byte an element
        if function is Tensor.square and self.on_cuda and torch.is_autocast_enabled("cpu"):
            return function(args[0].float())  # as CUDA's autocast does
        if function is F.silu and self.compiled:
            return args[0]  # not kept: the compiler computes it again
        if function is Tensor.backward:
            ones = torch.ones_like(args[0])
            with self:  # which a handler is without, and what is computed again in backward needs
                return _engine_run_backward(
                    args, (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        return function(*args, **kwargs)


def held_by_step(
    config: GPTConfig,
    optim: OptimConfig,
    hardware: Hardware,
    vocab_size: int,
    seq_len: int,
    sequences: int,
    micro_batch: int,
) -> dict[str, Counter]:
    """`Tracker.moments` of a step. `config`'s attention and loss are resolved."""
    on_cuda = hardware.device.type == "cuda"
    model = GPT(replace(config, attention="naive"), vocab_size, seq_len, device="meta")
    tracker = Tracker(on_cuda, hardware.compile)
    # PyTorch starts backward's threads once, one a GPU, and a process that has them cannot be forked. FakeTensorMode
    # pretends that there is a GPU; this starts those of the real ones before
    torch.zeros((), requires_grad=True).backward()
    with FakeTensorMode(), Claims(on_cuda, hardware.compile), tracker:
        for name, module in model.named_modules():
            tracker.follow(name, module)
            for key, weight in module.named_parameters(recurse=False):
                setattr(module, key, nn.Parameter(torch.empty(weight.shape)))
            for key, table in module.named_buffers(recurse=False):
                setattr(module, key, torch.empty(table.shape))
        attend = {"naive": naive, "sdpa": flash_operator if on_cuda else sdpa}.get(config.attention, flash_operator)
        for block in model.blocks:
            block.attention.attend = attend
        tokens = torch.empty(4, sequences, seq_len, dtype=torch.int64)  # inputs and targets, the next step's too
        with tracker.region("optimizer"):
            optimizer = Optimizer(model, optim, hardware.dtype)
        tracker.moments.clear()
        inputs, targets = tokens[:2, : 2 * micro_batch]
        on_cpu = replace(hardware, device=torch.device("cpu"), world=ALONE)
        training_step(model, optimizer, inputs, targets, micro_batch, on_cpu, region=tracker.region)
    gradients = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    sums = max(0, math.ceil(math.log2(sequences / micro_batch)) - 1)  # of pairs, of pairs of pairs (GradientSum)
    for part in ("forward", "backward"):
        tracker.moments[part]["sums of gradients", ""] = sums * gradients
    if hardware.world.size > 1:  # where they are summed; then what is received for it
        for part in tracker.moments:
            tracker.moments[part]["sum over processes", ""] = gradients
    return tracker.moments


def flash_operator(
    q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, causal: bool = False, window: tuple = (-1, -1), **_
) -> Tensor:
    """Attention that keeps an output and a log-sum-exp: the operator itself, which asks for no GPU."""
    seed = torch.empty((), dtype=torch.int64) if dropout_p else None
    options = {"window_left": window[0], "window_right": window[1], "dropout_p": dropout_p, "dropout_seed": seed}
    return torch.ops.flashgpt.flash_fwd(q, k, v, causal, 1.0, **options)[0]
