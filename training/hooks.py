"""See every tensor of a forward and backward pass, by its module, in the order in which they are computed.

Names of tensors: `x` is the blocks' input; `output` is a module's; `q k v o` are attention's; `loss` is the head's. A
gradient has a d in front (`do`, `doutput`), a parameter's is `dweight`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from model import GPT
from model.attention import attend_with

See = Callable[[str, str, Tensor], None]  # module, tensor, value
Place = tuple[str, str]  # module, tensor


@contextmanager
def watched(model: GPT, see: See) -> Iterator[None]:
    """Inside, `see(module, tensor, value)` is called with each tensor that the model computes, and changes none.

    It works for the model itself, not for its compiled form.
    """

    def show(module: str, tensor: str, value: Tensor | tuple | list) -> None:
        if not isinstance(value, Tensor):  # some layers of transformers return more beside it
            value = value[0]
        see(module, tensor, value.detach())
        if value.requires_grad and tensor != "loss":
            value.register_hook(lambda gradient: see(module, "d" + tensor, gradient.detach()))

    def showing(layer: int, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        module = f"blocks.{layer}.attention"

        def call(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
            for tensor, value in (("q", q), ("k", k), ("v", v)):
                show(module, tensor, value)
            o = attend(q, k, v, **options)
            show(module, "o", o)
            return o

        return call

    hooks = [model.blocks[0].register_forward_pre_hook(lambda _m, inputs: show("embedding", "x", inputs[0]))]
    for name, module in model.named_modules():
        if module in set(model.blocks) or isinstance(module, nn.Linear):
            hooks.append(module.register_forward_hook(lambda _m, _i, out, name=name: show(name, "output", out)))
    hooks.append(model.register_forward_hook(lambda _m, _i, out: show("head", "loss", out)))
    for name, parameter in model.named_parameters():
        module, _, tensor = name.rpartition(".")
        see_one = lambda p, module=module, tensor=tensor: see(module, "d" + tensor, p.grad.detach())  # noqa: E731
        hooks.append(parameter.register_post_accumulate_grad_hook(see_one))
    try:
        with attend_with(model, showing):
            yield
    finally:
        for hook in hooks:
            hook.remove()
