"""Each of W processes holds 1/W of weights, gradients and moments, by rows: FSDP2, applied to the model from outside.

`parallel.data=shard`. A block's weights are gathered for its forward and again for its backward, and its gradients are
summed and scattered after each micro-batch; the embedding table and the head stay gathered for a whole micro-batch.
Blocks are gathered in the dtype of their products: autocast would round them in the same way. They are compiled one by
one, as no graph can contain the gathers between them.

Gradients are summed over ranks in the order of a binary tree (training/ordered_sum.py): where each process has one
micro-batch, they have the bits of `replicate`. Checkpoints on disk are whole, so any number of processes, of either
kind, can resume from them.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from model import GPT
from training.hardware import Hardware
from training.ordered_sum import reduce_scatter


def parallelize(model: GPT, hardware: Hardware) -> nn.Module:
    """What to call in place of `model`: itself, or its compiled form.

    With parallel.data=shard `model` then holds this process's rows alone, and every process has to call it.
    """
    world = hardware.world
    if hardware.compile:
        from training.compiler import compiled  # the import takes a second, so only where it is used

        # in a sweep earlier runs' graphs would count towards PyTorch's limit of eight, and the fifth run would be eager
        torch.compiler.reset()
    if not world.shards:
        return compiled(model) if hardware.compile else model
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # the import takes half a second

    mesh = world.flat_mesh(hardware.device)
    rounded = MixedPrecisionPolicy(hardware.dtype, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        if hardware.compile:
            block.forward = compiled(block.forward)
        fully_shard(block, mesh=mesh, mp_policy=rounded)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a loss is already a share of the whole step's mean
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_reduce_scatter(OrderedReduceScatter())
    return model


class OrderedReduceScatter:
    """What FSDP2 calls to sum gradients, in the order of a binary tree over ranks."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        reduce_scatter(output_tensor, input_tensor, group)


# --- shards and whole tensors: a sharded tensor is a DTensor, and these return any other tensor as it is


def is_sharded(x: Any) -> bool:
    return hasattr(x, "to_local")  # a DTensor, whose import takes half a second


def shard_of(value: Tensor, like: Tensor) -> Tensor:
    """This process's rows of a whole `value`, sharded as `like` is."""
    if not is_sharded(like):
        return value
    rows = -(-len(value) // like.device_mesh.size())
    return value[like.device_mesh.get_local_rank() * rows :][:rows]


def local_shard(x: Tensor) -> Tensor:
    """This process's shard of x; it shares the memory."""
    return x.to_local() if is_sharded(x) else x


def as_sharded(rows: Tensor, like: Tensor) -> Tensor:
    """`rows` as this process's shard of a tensor of the shape of `like`."""
    from torch.distributed.tensor import DTensor

    place = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return DTensor.from_local(rows, like.device_mesh, like.placements, **place)


def full_tensor(x: Tensor) -> Tensor:
    """x with the rows of all processes, each of which must call this."""
    return x.full_tensor() if is_sharded(x) else x


def full_on_host(values: Any) -> Any:
    """Nested values with sharded tensors whole, in the first process's host memory; in the others these are None."""

    def gathered(x: Any) -> Any:
        if not is_sharded(x):
            return x
        found = full_tensor(x)
        return found.cpu() if x.device_mesh.get_rank() == 0 else None

    return tree_map(gathered, values)


def full_model(model: GPT) -> GPT:
    """`model`, or where it is sharded a copy with whole weights in the first process; each process must call this.

    In processes other than the first it is `model` in any case.
    """
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    sharded = [value for value in weights.values() if is_sharded(value)]
    if not sharded:
        return model
    is_first = sharded[0].device_mesh.get_rank() == 0
    for name in weights:
        found = full_tensor(weights[name])
        weights[name] = found if is_first else None
    if not is_first:
        return model
    made = GPT(model.config, model.vocab_size, model.seq_len, device="meta")
    for block, theirs in zip(made.blocks, model.blocks, strict=True):
        block.attention.attend, block.attention.pattern = theirs.attention.attend, theirs.attention.pattern
    made.load_state_dict(weights, assign=True)  # with a mask already there, none is made
    return made.train(model.training)


def local_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """(name, this process's shard, the parameter itself) for each that is trained.

    The shard shares the parameter's memory, and gets its gradients.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not is_sharded(parameter):
            yield name, parameter, parameter
            continue
        local = nn.Parameter(parameter.detach().to_local())

        def move_gradient(parameter: Tensor, local: nn.Parameter = local) -> None:
            gradient, parameter.grad = parameter.grad.to_local(), None
            local.grad = gradient if local.grad is None else local.grad.add_(gradient)

        parameter.register_post_accumulate_grad_hook(move_gradient)
        yield name, local, parameter


def total_norm(gradients: list[Tensor], like: Tensor) -> Tensor:
    """The norm of all `gradients`, with the rows of other processes where `like`, a parameter, is sharded."""
    norm = nn.utils.get_total_norm(gradients)
    if not is_sharded(like):
        return norm
    norms = norm.new_empty(like.device_mesh.size())
    dist.all_gather_into_tensor(norms, norm[None], group=like.device_mesh.get_group())
    return torch.linalg.vector_norm(norms)
