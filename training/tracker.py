"""The peak memory of a training step, without a GPU and before anything is allocated: the step on fake tensors.

Fake tensors have storages but no memory; a tracker counts the storages that are alive. The tensors are on the CPU, and
`EmulatedDevice` makes them take the code paths of the run's device. A compiled step is tracked in eager mode, less what
the compiler recomputes. Assumed: `tiled` keeps what `flash` keeps, and packed documents are as long as their row. Not
counted: the CUDA context and the allocator's fragmentation.
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
from training.hardware import DTYPES, Hardware
from training.optimizer import OptimConfig, Optimizer
from training.ordered_sum import PIECE
from training.parallel import ALONE
from training.step import training_step

CUBLAS_BYTES = 2 * 32 * 2**20  # a stream's workspaces, in forward's and in backward's thread, on Hopper; less elsewhere
KINDS = {"": "parameters and batch", "backward": "gradients", "optimizer": "optimizer state"}  # made outside of modules


class Tracker(TorchDispatchMode):
    """Bytes of all storages that operators returned and that are still alive.

    Attributes:
        peaks: for each part of the step (forward, backward, optimizer) what is alive at its peak: (kind, module that
            made it) -> bytes.
    """

    def __init__(self, on_cuda: bool, compiled: bool) -> None:
        super().__init__()
        self.on_cuda, self.compiled = on_cuda, compiled
        self.peaks: dict[str, Counter] = {}
        self._part, self._modules = "", []  # the part of the step; the modules that run, innermost last
        self._held = Counter({("cuBLAS", ""): CUBLAS_BYTES} if on_cuda else {})
        self._alive: dict[int, ref] = {}  # by the storage's address
        self.gathered: set[int] = set()  # addresses of weights that are gathered in the dtype of their products

    @contextmanager
    def region(self, part: str) -> Iterator[None]:
        """Names a part of the step, for `training_step`."""
        self._part = part
        yield

    def follow(self, name: str, module: nn.Module) -> None:
        """Count the tensors that `module` makes under its name."""

        def leave(*_) -> None:
            self._modules.pop()

        module.register_forward_pre_hook(lambda *_: self._modules.append(name))
        module.register_forward_hook(leave, always_call=True)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default:  # two of three calls, which allocate nothing
            return args[0].fake_device
        with torch._C.DisableTorchFunction():  # EmulatedDevice has already acted, before autograd
            return self._counted(function, args, kwargs or {})

    def _counted(self, function, args, kwargs):
        if function is torch.ops.aten._fused_adamw_.tensor_lr:
            return None  # it allocates nothing; PyTorch 2.11 has no fake version of it and would fill real tensors
        out = function(*args, **kwargs)
        if self.compiled and self._part == "backward" and function is torch.ops.flashgpt.rotary_fwd.default:
            return out  # the compiler rotates q and k again after the MLP's backward, where the peak is
        if self._not_kept(function, args, out):
            self._add(out.untyped_storage(), 0)
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._add(x.untyped_storage(), x.untyped_storage().nbytes())
        inside = self._allocated_inside(function, args)
        if self._part not in self.peaks or self._held.total() + inside > self.peaks[self._part].total():
            self.peaks[self._part] = self._held + Counter({("inside an operator", ""): inside})
        return out

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        address = storage._cdata
        if address in self._alive:
            return
        kind = "activations" if self._modules else KINDS.get(self._part, "activations")
        made = kind, self._modules[-1] if self._modules else ""

        def forget(_: ref) -> None:
            del self._alive[address]
            self._held[made] -= size

        self._alive[address] = ref(storage, forget)
        self._held[made] += size

    def _not_kept(self, function, args: tuple, out) -> bool:
        """Whether `out` is a copy of another dtype that takes no memory of its own for long."""
        if function is not torch.ops.aten._to_copy.default:
            return False
        if args[0].untyped_storage()._cdata in self.gathered:
            return True  # not a copy: it is gathered in this dtype, and counted elsewhere
        # Compiled, copies in 8 bits are made again in backward. Those of narrow layers are counted all the same, for
        # the float32 copies that backward then holds: together within 6 % of what an H200 allocates
        in_down = bool(self._modules) and self._modules[-1].endswith(".mlp.down")
        return self.compiled and in_down and out.dtype == torch.float8_e4m3fn

    def _allocated_inside(self, function, args: tuple) -> int:
        """Bytes that an operator allocates and frees again, for the operators that allocate many."""
        if function is torch.ops.aten._softmax_backward_data.default:
            return args[0].nbytes  # gradient times output
        if function is not torch.ops.flashgpt.linear_cross_entropy_fwd.default:
            return 0
        h, weight, _, _, chunk_tokens, _ = args
        a_logit = h.itemsize + (0 if self.on_cuda else 3 * 4)  # on a CPU three times in float32 too
        copy = weight.numel() * h.itemsize if weight.dtype != h.dtype else 0
        return min(chunk_tokens, len(h)) * len(weight) * a_logit + copy


class EmulatedDevice(TorchFunctionMode):
    """Makes fake CPU tensors take the code paths of the run's device."""

    def __init__(self, on_cuda: bool, compiled: bool) -> None:
        super().__init__()
        self.on_cuda, self.compiled = on_cuda, compiled

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__self__", None) is Tensor.is_cuda:
            return self.on_cuda
        if function is F.dropout and self.on_cuda and kwargs["p"]:
            return torch.native_dropout(*args, kwargs["p"], True)[0]  # whose mask has a byte an element
        if function is Tensor.square:
            if self.compiled:
                return args[0] * args[0].detach()  # it keeps nothing in float32
            if self.on_cuda and torch.is_autocast_enabled("cpu"):
                return function(args[0].float())  # as CUDA's autocast does
        if function is F.rms_norm and self.compiled:  # compiled, it keeps its output and one number for each row
            return args[0] * args[0].detach().float().mean(-1, keepdim=True)
        if function in (F.silu, F.relu) and self.compiled:
            return args[0]  # not kept: the compiler computes it again
        if function is Tensor.backward:
            ones = torch.ones_like(args[0])
            with self:  # the mode is off inside its handler, and recomputation in backward needs it
                return _engine_run_backward(
                    args, (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        return function(*args, **kwargs)


def step_peaks(
    config: GPTConfig,
    optim: OptimConfig,
    hardware: Hardware,
    vocab_size: int,
    seq_len: int,
    sequences: int,
    micro_batch: int,
) -> dict[str, Counter]:
    """`Tracker.peaks` of a step. `config`'s attention and loss are resolved."""
    on_cuda = hardware.device.type == "cuda"
    model = GPT(replace(config, attention="naive"), vocab_size, seq_len, device="meta")
    tracker = Tracker(on_cuda, hardware.compile)
    # PyTorch starts the threads for backward once, one for each GPU, and a process that has them cannot be forked.
    # FakeTensorMode pretends that there is a GPU; this backward starts the threads of the real ones first
    torch.zeros((), requires_grad=True).backward()
    with FakeTensorMode(), EmulatedDevice(on_cuda, hardware.compile), tracker:
        for name, module in model.named_modules():
            tracker.follow(name, module)
            for key, weight in module.named_parameters(recurse=False):
                setattr(module, key, nn.Parameter(torch.empty(weight.shape)))
                if hardware.world.shards and name.startswith("blocks."):
                    tracker.gathered.add(getattr(module, key).untyped_storage()._cdata)
            for key, table in module.named_buffers(recurse=False):
                setattr(module, key, torch.empty(table.shape))
        attend = {"naive": naive, "sdpa": flash_operator if on_cuda else sdpa}.get(config.attention, flash_operator)
        for block in model.blocks:
            block.attention.attend = attend
        tokens = torch.empty(4, sequences, seq_len, dtype=torch.int64)  # inputs and targets, the next step's too
        with tracker.region("optimizer"):
            optimizer = Optimizer(model, optim, hardware.dtype)
        tracker.peaks.clear()
        batch = *tokens[:2, : 2 * micro_batch], None
        on_cpu = replace(hardware, device=torch.device("cpu"), world=ALONE)
        training_step(model, optimizer, batch, micro_batch, on_cpu, region=tracker.region)
    weights = model.num_parameters() * 4  # float32, and so are gradients
    sums = max(0, math.ceil(math.log2(sequences / micro_batch)) - 1)  # of pairs, of pairs of pairs (GradientSum)
    for part, held in tracker.peaks.items():
        if part != "optimizer":
            held["sums of gradients", ""] = sums * weights
        if hardware.graphs is not False:  # captured on a stream of their own, after a step without them
            held["cuBLAS", ""] *= 2
    in_blocks = sum(weight.numel() for weight in model.blocks.parameters()) * 4
    if hardware.world.shards:
        _shard_peaks(tracker.peaks, hardware, weights, in_blocks, in_blocks // config.num_layers)
    elif hardware.world.size > 2:  # two add gradients in place; with more, a piece is copied and one received
        tracker.peaks["optimizer"]["sum over processes", ""] = 2 * min(weights, 4 * PIECE)
    if hardware.world.size > 1 and optim.name == "muon":
        tracker.peaks["optimizer"]["matrices exchanged", ""] = _exchanged(optim, hardware, in_blocks)
    return tracker.peaks


def _shard_peaks(peaks: dict[str, Counter], hardware: Hardware, weights: int, in_blocks: int, block: int) -> None:
    """Change the peaks of one process into those of each process that holds a shard of the weights (training/shard.py).

    weights, in_blocks, block: bytes of all weights, of those in blocks and of one block's, in float32.
    """
    size, rest = hardware.world.size, weights - in_blocks  # the rest stays gathered from forward to backward
    gathered = 2 * block * hardware.dtype.itemsize // 4  # a block's, while those of the next one arrive
    peaks["forward"]["gradients", ""] //= size  # of the micro-batch before
    for part, held in peaks.items():
        held["parameters and batch", ""] -= weights - weights // size
        for kind in ("optimizer state", "sums of gradients"):
            held[kind, ""] //= size
        if part != "optimizer":
            held["gathered weights", ""] = rest + gathered
    backward, after = peaks["backward"], peaks["optimizer"]
    made = backward["gradients", ""]  # the rest's gradients come first
    backward["gradients", ""] = min(made, rest) + max(0, made - rest) // size
    backward["gradients exchanged", ""] = gathered + 2 * block
    after["gradients", ""] //= size
    # at the end of backward: what a step keeps, and the rest's gradients three times: computed, sent and received
    end = Counter({key: after[key] for key in after if key[0] in ("parameters and batch", "optimizer state", "cuBLAS")})
    end |= {("gathered weights", ""): rest, ("gradients", ""): weights // size, ("gradients exchanged", ""): 3 * rest}
    end["sums of gradients", ""] = backward["sums of gradients", ""]
    if end.total() > backward.total():
        peaks["backward"] = end


def _exchanged(optim: OptimConfig, hardware: Hardware, matrices: int) -> int:
    """Bytes that Muon's exchanges need (training/owners.py), for `matrices` bytes of weights."""
    if hardware.world.shards:
        return 3 * matrices // hardware.world.size  # directions, and both ends of an exchange
    return matrices * DTYPES[optim.resolved(hardware.device)[0].muon_dtype].itemsize // 4


def flash_operator(
    q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, causal: bool = False, window: tuple = (-1, -1), **_
) -> Tensor:
    """Attention that keeps its output and LSE: the operator itself, whose fake version needs no GPU."""
    seed = torch.empty((), dtype=torch.int64) if dropout_p else None
    options = {"window_left": window[0], "window_right": window[1], "dropout_p": dropout_p, "dropout_seed": seed}
    return torch.ops.flashgpt.flash_fwd(q, k, v, causal, 1.0, **options)[0]
