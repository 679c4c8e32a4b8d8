"""Watch every tensor of a forward and backward pass, by the module it belongs to, in the order in which it is made.

Names of tensors: `x` is what the blocks begin with; `output` is a module's; `q k v o` are attention's; the loss is the
head's. A gradient has a d before it (`do`, `doutput`), a parameter's is `dweight`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from model import GPT
from model.attention import attend_with

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

    with _forward_watched(model, show), _gradients_watched(model, see):
        yield


@contextmanager
def watched_compiled(model: GPT, see: Callable[[str, str, int, int], None]) -> Iterator[Callable[..., Tensor]]:
    """A network to call in place of the one compiled from `model`: compiled once more, with the same dropout masks.

    (The model called as it is draws other masks.) `see(module, tensor, bad, size)` is told how many values of a tensor
    are not finite: of the forward pass after each call, of the parameters' gradients before the next call and at the
    end. These come all at once; the last module's, whose gradients are made first, are shown first.

    Raises (when called):
        torch._dynamo.exc.TorchDynamoException: this model cannot be watched so (with activation checkpointing).
    """
    values: dict[Place, tuple[Tensor, int]] = {}
    gradients: dict[Place, tuple[Tensor, int]] = {}

    def count(module: str, tensor: str, value: Tensor) -> None:
        values[module, tensor] = (~value.detach().isfinite()).sum(), value.numel()

    def count_gradient(module: str, tensor: str, gradient: Tensor) -> None:
        gradients[module, tensor] = (~gradient.isfinite()).sum(), gradient.numel()  # now: clipping changes it

    def counted(*arguments, **options):
        values.clear()
        loss = model(*arguments, **options)
        return loss, dict(values)

    def show(found: dict[Place, tuple[Tensor, int]]) -> None:
        for (module, tensor), (bad, size) in found.items():
            see(module, tensor, int(bad), size)

    def show_gradients() -> None:
        places = [(name.rpartition(".")[0], "dweight") for name, _ in model.named_parameters()]
        show({place: gradients.pop(place) for place in reversed(places) if place in gradients})

    # one graph, or its random numbers would be those of other ones
    compiled = torch.compile(counted, dynamic=False, fullgraph=True)

    def forward(*arguments, **options) -> Tensor:
        show_gradients()  # before the next micro-batch's are added to them
        loss, found = compiled(*arguments, **options)
        show(found)
        return loss

    with _forward_watched(model, count), _gradients_watched(model, count_gradient):
        yield forward
    show_gradients()


@contextmanager
def _forward_watched(model: GPT, show: See) -> Iterator[None]:
    """As `watched`, for the forward pass; `show` gets the tensors as they are, part of autograd's graph."""

    def showing(layer: int, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        module = f"blocks.{layer}.attention"

        def call(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
            for tensor, value in (("q", q), ("k", k), ("v", v)):
                show(module, tensor, value)
            o = attend(q, k, v, **options)
            show(module, "o", o)
            return o

        return call

    with ExitStack() as stack:
        hooks = [model.blocks[0].register_forward_pre_hook(lambda _m, inputs: show("embedding", "x", inputs[0]))]
        for name, module in model.named_modules():
            if module in set(model.blocks) or isinstance(module, nn.Linear):
                hooks.append(module.register_forward_hook(lambda _m, _i, out, name=name: show(name, "output", out)))
        hooks.append(model.register_forward_hook(lambda _m, _i, out: show("head", "loss", out)))
        for hook in hooks:
            stack.callback(hook.remove)
        stack.enter_context(attend_with(model, showing))
        yield


@contextmanager
def _gradients_watched(model: nn.Module, see: See) -> Iterator[None]:
    """As `watched`, for the parameters' gradients alone: a compiled model shows those too."""
    with ExitStack() as stack:
        for name, parameter in model.named_parameters():
            module, _, tensor = name.rpartition(".")
            see_one = lambda p, module=module, tensor=tensor: see(module, "d" + tensor, p.grad.detach())  # noqa: E731
            stack.callback(parameter.register_post_accumulate_grad_hook(see_one).remove)
        yield
