"""Launching a kernel again at little cost.

Triton looks at every argument and encodes every TMA descriptor at each launch: 30 microseconds here, and our own
arithmetic on shapes costs as much. Calls of one description (shapes, strides, dtypes, options) differ in nothing but
addresses. So the first goes through Triton and leaves a `Replay`; the next ones hand their addresses to Triton's C
entry point. Written for and checked with triton 3.6: `_c_entry` reads a private name of it.
"""

from copy import copy

import torch
from torch import Tensor

from .options import Options

_KEPT = 512  # descriptions, and addresses of one tensor: beyond it a cache starts anew


class Replay:
    """One compiled kernel with the arguments of one launch. Calling it launches it on other addresses.

    The addresses are those of the launch's tensors in the order of the kernel's parameters, a descriptor's tensor
    and those inside tuples among them; all are multiples of 16 bytes.
    """

    def __init__(self, compiled, grid: int, arguments: tuple):
        runner = compiled.run
        assert runner.global_scratch_size == 0
        assert runner.profile_scratch_size == 0
        self._entry = _c_entry(runner)
        self._slots = []  # (position, place in a tuple or None, descriptor with its maps or None) of each address
        self._arguments = [
            grid, 1, 1, 0, compiled.function, runner.launch_cooperative_grid, runner.launch_pdl, None, None,
            compiled.packed_metadata, None, None, None,
        ]  # fmt: skip
        descriptions = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for argument in arguments:
            position = len(self._arguments)
            if isinstance(argument, Tensor):
                self._slots.append((position, None, None))
                self._arguments.append(0)
            elif hasattr(argument, "block_shape"):
                maps = _TensorMaps(argument, next(descriptions))
                self._slots.append((position, None, maps))
                self._arguments += [None, *argument.shape, *argument.strides]
            elif isinstance(argument, tuple):
                inside = [place for place, x in enumerate(argument) if isinstance(x, Tensor)]
                self._slots += [(position, place, None) for place in inside]
                self._arguments.append(tuple(0 if isinstance(x, Tensor) else x for x in argument))
            else:
                self._arguments.append(argument)

    def __call__(self, device_index: int, *addresses: int) -> None:
        """Launch on the current stream of the device, which is the current one."""
        arguments = self._arguments.copy()
        arguments[3] = torch._C._cuda_getCurrentRawStream(device_index)
        for address, (position, place, maps) in zip(addresses, self._slots, strict=True):
            if maps is not None:
                arguments[position] = maps.get(address) or maps.encode(address)
            elif place is None:
                arguments[position] = address
            else:
                values = list(arguments[position])
                values[place] = address
                arguments[position] = tuple(values)
        self._entry(*arguments)


class _TensorMaps(dict):
    """Address -> encoded TMA descriptor. An encoding depends on nothing else that changes between replays."""

    def __init__(self, descriptor, description):
        self._descriptor, self._description = copy(descriptor), description
        self._descriptor.base = None  # the tensor is not ours to keep

    def encode(self, address: int):
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(self) >= _KEPT:
            self.clear()
        at = copy(self._descriptor)
        at.base = _Address(address)
        self[address] = make_tensordesc_arg(at, self._description)[0]
        return self[address]


class _Address:
    """What Triton's encoder asks of a tensor."""

    def __init__(self, address: int):
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def _c_entry(runner):
    """Triton's compiled launch function. For kernels with descriptors it stands behind a Python loop that encodes
    them anew at each launch."""
    launch = runner.launch
    if not hasattr(launch, "__closure__"):
        return launch
    return dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))["launcher"].cell_contents


def description(options: Options, tile, q: Tensor, *others: Tensor) -> tuple | None:
    """What launches depend on besides addresses: calls of equal description may replay each other's kernels.

    None where nothing can be replayed: off the GPU, and where a tensor must be copied first.
    """
    if not q.is_cuda or q.stride(-1) != 1:
        return None
    layout = [q.shape, q.stride()]
    for x in others:
        strides = x.stride()
        if strides[-1] != 1:
            return None
        layout += (x.shape, strides)
    if options.tensors():
        options = tuple([x.shape if isinstance(x, Tensor) else x for x in options])
    return options, tile, q.dtype, q.device.index, *layout


_REPLAYS: dict[tuple, tuple[Replay, ...]] = {}


def known(described: tuple | None) -> bool:
    """Whether a call of this description has left replays."""
    return described in _REPLAYS


def replay(described: tuple, *addresses: list[int]) -> bool:
    """Launch what a known description launched, in the same order, on these addresses of each kernel's tensors.

    Returns False, with nothing launched, where an address is no multiple of 16: Triton compiles for alignment.
    """
    together = 0
    for its_addresses in addresses:
        for address in its_addresses:
            together |= address
    if together % 16:
        return False
    index = described[3]
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return replay(described, *addresses)
    for kernel, its_addresses in zip(_REPLAYS[described], addresses, strict=True):
        kernel(index, *its_addresses)
    return True


def remember(described: tuple | None, *replays: Replay | None) -> None:
    """Keep what launches a call's kernels again, unless there is nothing to keep: a description of None, a kernel that
    ran in the interpreter or on tensors that Triton found unaligned."""
    if described is None or None in replays:
        return
    if len(_REPLAYS) >= _KEPT:
        _REPLAYS.clear()
    _REPLAYS[described] = replays
