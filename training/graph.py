"""The training step as CUDA graphs: one launch in place of one for each kernel.

A step of a small model is a thousand kernels, and Python takes longer to launch them than a GPU to run them. So forward
and backward of a micro-batch are one graph (one for a step's first micro-batch, one for those that add to its
gradients), and the optimizer's step is another. They are captured from the code that runs without graphs, and give the
same bits.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor

from training.optimizer import Optimizer

BEFORE_REPLAY = 2  # calls of a `Captured` that are slow: the first compiles, the second captures


class Captured:
    """A function of tensors as a CUDA graph, for calls that all have the shapes of the first.

    The first call runs the function, so that everything is compiled; the second captures it. What the function reads
    besides its arguments must keep its address.

    function: never synchronizes with the host, and returns a tensor.
    waits: whether it waits for other processes; it is then called without a graph.
    """

    def __init__(self, function: Callable[..., Tensor], *, waits: bool = False) -> None:
        self._function, self._waits = function, waits
        self._arguments: list[Tensor] = []  # where the graph reads them
        self._result: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None  # None until the second call

    def __call__(self, *arguments: Tensor) -> Tensor:
        if self._waits:
            return self._function(*arguments)
        if not self._arguments:
            self._arguments = [x.clone() for x in arguments]
            return self._function(*self._arguments)
        for place, x in zip(self._arguments, arguments, strict=True):
            place.copy_(x)
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            stream = capture_stream(self._arguments[0].device)
            # other threads save checkpoints and fetch batches meanwhile
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._result = self._function(*self._arguments)
            self.graph = graph
        self.graph.replay()
        return self._result.clone()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The capture stream of `device`. PyTorch's default is on a process's first GPU, whichever is current; with a new
    stream for each graph, cuBLAS would keep a workspace for each."""
    return torch.cuda.Stream(device)


class StepGraphs:
    """The work of `training_step` on the device, as graphs.

    compute: (inputs, targets) -> loss of a micro-batch; adds its gradients to the `grad` of the optimizer's parameters.
    """

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], optimizer: Optimizer) -> None:
        self._parameters = optimizer.parameters
        self._gradients: list[Tensor] = []  # where the graphs of `compute` write
        self._read: list[int] = []  # addresses where the graph of `update` reads
        self._first, self._later = Captured(compute), Captured(compute)
        self._update = Captured(optimizer.step, waits=optimizer.exchanges)

    def compute(self, inputs: Tensor, targets: Tensor, region: Callable[[str], AbstractContextManager]) -> Tensor:
        """Return the loss of a micro-batch; its gradients are added to `grad`, valid until the next step's."""
        captured = self._first if self._parameters[0].grad is None else self._later
        with region("forward and backward"):
            loss = captured(inputs, targets)
        if self._first.graph and not self._gradients:
            self._gradients = [p.grad for p in self._parameters]
        for p, place in zip(self._parameters, self._gradients, strict=False):
            p.grad = place
        return loss

    def update(self, loss: Tensor) -> Tensor:
        """`Optimizer.step` with the gradients in `grad`, which are at the addresses of the step before."""
        places = [p.grad.data_ptr() for p in self._parameters]
        assert self._update.graph is None or places == self._read, "the graph would read other gradients"
        self._read = places
        norm = self._update(loss)
        for p in self._parameters:
            p.grad = None
        return norm
