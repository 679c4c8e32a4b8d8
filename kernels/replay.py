"""Replay a launch on other addresses, through Triton's C entry point.

Triton inspects every argument and encodes every TMA descriptor at each launch. That launch path took 29 to 50
microseconds of Python; a replay takes 15 (hopper/NOTES.md, "Launching"). Written for and checked with triton 3.6:
`_c_entry` reads one of its private names.
"""

from collections.abc import Collection, Iterator
from copy import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .launch import Launch

KEPT = 512  # the most plans, and the most addresses of one descriptor, in a cache; beyond it the cache is cleared


def tensors_in(arguments: tuple) -> Iterator[Tensor]:
    """The tensors of a launch in the order of the kernel's parameters."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif hasattr(argument, "block_shape"):
            yield argument.base
        elif isinstance(argument, tuple):
            yield from (x for x in argument if isinstance(x, Tensor))


class Replay:
    """One compiled kernel with the arguments of one launch. Calling it launches it on other addresses and numbers.

    named: the names of the launch's tensors in the order of the kernel's parameters.
    numbers: the kernel's parameters whose values each call gives.
    """

    def __init__(self, compiled, launch: "Launch", named: list[str], numbers: Collection[str] = ()):
        runner = compiled.run
        assert runner.global_scratch_size == 0
        assert runner.profile_scratch_size == 0
        self._entry = _c_entry(runner)
        self._slots = []  # (name, position, place in a tuple or None, descriptor's maps or None) of each
        self._arguments = [
            launch.grid, 1, 1, 0, compiled.function, runner.launch_cooperative_grid, runner.launch_pdl, None, None,
            compiled.packed_metadata, None, None, None,
        ]  # fmt: skip
        names = iter(named)
        descriptions = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        given = (*launch.arguments, *launch.constants.values())
        for parameter, argument in zip(launch.kernel.arg_names, given, strict=True):
            position = len(self._arguments)
            if isinstance(argument, Tensor):
                self._slots.append((next(names), position, None, None))
                self._arguments.append(0)
            elif hasattr(argument, "block_shape"):
                maps = _TensorMaps(argument, next(descriptions), parameter if parameter in numbers else None)
                self._slots.append((next(names), position, None, maps))
                self._arguments += [None, *argument.shape, *argument.strides]
            elif isinstance(argument, tuple):
                inside = [place for place, x in enumerate(argument) if isinstance(x, Tensor)]
                self._slots += [(next(names), position, place, None) for place in inside]
                self._arguments.append(tuple(0 if isinstance(x, Tensor) else x for x in argument))
            else:
                if parameter in numbers:
                    self._slots.append((parameter, position, None, None))
                self._arguments.append(argument)

    def __call__(self, stream: int, values: dict[str, int]) -> None:
        """Launch on a stream of the current device; values: addresses (multiples of 16) and numbers, by name."""
        arguments = self._arguments.copy()
        arguments[3] = stream
        for name, position, place, maps in self._slots:
            value = values[name]
            if maps is not None:
                arguments[position] = maps.of(value, values)
            elif place is None:
                arguments[position] = value
            else:
                inside = list(arguments[position])
                inside[place] = value
                arguments[position] = tuple(inside)
        self._entry(*arguments)


class Repeated:
    """Replays of a call in which only a few tensors change.

    The others, scratch memory among them, are shared: such calls must follow each other on one stream.
    """

    def __init__(self, replays: list[Replay], tensors: dict[str, Tensor | None], numbers: dict[str, int]):
        self._replays, self._kept = replays, [x for x in tensors.values() if x is not None]
        self._values = {name: x.data_ptr() for name, x in tensors.items() if x is not None} | numbers
        self._device = self._kept[0].get_device()
        self._stream = torch._C._cuda_getCurrentRawStream(self._device)

    def __call__(self, **others: Tensor) -> bool:
        """Run the kernels on `others` in place of the first call's tensors. Returns False, with nothing run, where an
        address, the current device or its stream does not allow a replay."""
        values, all_bits = self._values.copy(), 0
        for name, x in others.items():
            values[name] = address = x.data_ptr()
            all_bits |= address
        if all_bits % 16 or torch.cuda.current_device() != self._device:
            return False
        if torch._C._cuda_getCurrentRawStream(self._device) != self._stream:
            return False
        for replay in self._replays:
            replay(self._stream, values)
        return True


class _TensorMaps(dict):
    """(address, sizes) -> encoded TMA descriptor. An encoding depends on nothing else that changes between replays."""

    def __init__(self, descriptor, description, sized: str | None):
        self._descriptor, self._description = copy(descriptor), description
        self._descriptor.base = None  # the tensor is not ours to keep
        self._sized = sized  # name of the number with shape and strides; None: they never change

    def of(self, address: int, values: dict[str, int | tuple]):
        sizes = values[self._sized] if self._sized else None
        return self.get((address, sizes)) or self._encode(address, sizes)

    def _encode(self, address: int, sizes: tuple | None):
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(self) >= KEPT:
            self.clear()
        at = copy(self._descriptor)
        at.base = SimpleNamespace(data_ptr=lambda: address)  # all that the encoder reads of a tensor
        if sizes:
            at.shape, at.strides = map(list, sizes)
        self[address, sizes] = made = make_tensordesc_arg(at, self._description)[0]
        return made


def _c_entry(runner):
    """Triton's compiled launch function. For kernels with descriptors it is wrapped in a Python loop that encodes
    them anew at each launch."""
    launch = runner.launch
    if not hasattr(launch, "__closure__"):
        return launch
    return dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))["launcher"].cell_contents
