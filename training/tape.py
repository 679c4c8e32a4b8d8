"""Every tensor of a forward and backward pass, by the module it belongs to, in the order in which it is made.

Names of tensors: `x` is what the blocks begin with; `output` is a module's; `q k v o` are attention's; the loss is the
head's. A gradient has a d before it (`do`, `doutput`), a parameter's is `dweight`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from model import GPT, attend_with

See = Callable[[str, str, Tensor], None]  # module, tensor, value
Place = tuple[str, str]  # module, tensor


@contextmanager
def watched(model: GPT, see: See) -> Iterator[None]:
    """For the duration, `see(module, tensor, value)` is called with each tensor that the model makes.

    Only the model called as it is shows them, not one compiled from it. Nothing that is computed changes.
    """

    def show(module: str, tensor: str, value: Tensor) -> None:
        see(module, tensor, value.detach())
        if value.requires_grad and tensor != "loss":
            value.register_hook(lambda gradient: see(module, "d" + tensor, gradient.detach()))

    with forward_watched(model, show), gradients_watched(model, see):
        yield


@contextmanager
def watched_compiled(model: GPT, see: Callable[[str, str, int, int], None]) -> Iterator[Callable[..., Tensor]]:
    """A network to call in place of the one that was compiled from `model`, which it is, compiled once more.

    It draws the same dropout masks, which the model called as it is does not, and gives the same loss. After each call
    `see(module, tensor, bad, size)` is told of each tensor of the forward pass how many of its values are not finite.

    Raises (when called):
        torch._dynamo.exc.TorchDynamoException: this model cannot be watched so (with activation checkpointing).
    """
    counts: dict[Place, tuple[Tensor, int]] = {}

    def note(module: str, tensor: str, value: Tensor) -> None:
        counts[module, tensor] = (~value.detach().isfinite()).sum(), value.numel()

    def counted(*arguments, **options):
        counts.clear()
        loss = model(*arguments, **options)
        return loss, dict(counts)

    # one graph, or its random numbers would be those of other ones
    compiled = torch.compile(counted, dynamic=False, fullgraph=True)

    def forward(*arguments, **options) -> Tensor:
        loss, found = compiled(*arguments, **options)
        for (module, tensor), (bad, size) in found.items():
            see(module, tensor, int(bad), size)
        return loss

    with forward_watched(model, note):
        yield forward


@contextmanager
def forward_watched(model: GPT, show: See) -> Iterator[None]:
    """As `watched`, for the forward pass; `show` gets the tensors as they are, part of autograd's graph."""
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def showing(layer: int, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        module = f"blocks.{layer}.attention"

        def call(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
            for tensor, value in (("q", q), ("k", k), ("v", v)):
                show(module, tensor, value)
            o = attend(q, k, v, **options)
            show(module, "o", o)
            return o

        return call

    first, blocks = model.blocks[0], set(model.blocks)
    for name, module in model.named_modules():
        if module in blocks or isinstance(module, nn.Linear):
            handles.append(module.register_forward_hook(lambda _m, _i, out, name=name: show(name, "output", out)))
    handles.append(first.register_forward_pre_hook(lambda _m, inputs: show("embedding", "x", inputs[0])))
    handles.append(model.register_forward_hook(lambda _m, _i, out: show("head", "loss", out)))
    try:
        with attend_with(model, showing):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def gradients_watched(model: nn.Module, see: See) -> Iterator[None]:
    """As `watched`, for the parameters' gradients alone: a compiled model shows those too."""
    handles = []
    for name, parameter in model.named_parameters():
        module, _, tensor = name.rpartition(".")
        handles.append(
            parameter.register_post_accumulate_grad_hook(
                lambda p, module=module, tensor=tensor: see(module, "d" + tensor, p.grad.detach())
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def how_bad(value: Tensor) -> str | None:
    """'3 of 64 values are not finite, the first at (0, 5)'; None where all are."""
    finite = value.isfinite()
    if finite.all():
        return None
    places = (~finite).nonzero()
    place = tuple(places[0].tolist())
    first = value[place].item()
    return f"{len(places):,} of {value.numel():,} values are not finite, the first {first} at {place}"


class FirstBad:
    """A `See` that keeps the first tensor which is not finite.

    Attributes:
        found: {"module", "tensor", "how", "micro_batch"}, None as long as all were finite.
    """

    def __init__(self) -> None:
        self.found: dict[str, str | int] | None = None
        self._losses = 0

    def __call__(self, module: str, tensor: str, value: Tensor) -> None:
        self._note(module, tensor, None if self.found else how_bad(value))

    def counted(self, module: str, tensor: str, bad: int, size: int) -> None:
        """As a call, of a tensor of which only that is known."""
        self._note(module, tensor, f"{bad:,} of {size:,} values are not finite" if bad else None)

    def _note(self, module: str, tensor: str, how: str | None) -> None:
        if self.found is None and how:
            # a micro-batch's gradients come after its loss
            micro_batch = self._losses - (1 if tensor.startswith("d") else 0)
            self.found = {"module": module, "tensor": tensor, "how": how, "micro_batch": micro_batch}
        self._losses += tensor == "loss"

    def weights(self, model: nn.Module) -> None:
        """Look at what the step begins with."""
        for name, parameter in model.named_parameters():
            module, _, tensor = name.rpartition(".")
            self(module, tensor, parameter.detach())
