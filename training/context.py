"""Context parallelism: several processes share each row of tokens, and each runs the model on its part of them.

How attention exchanges what a part lacks is in model/context.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from kernels import place_documents, why_not
from model import GPT, GPTConfig, attend_with
from model.attention import Documents, Part
from model.context import METHODS, documents_of_chunks, part_of
from model.positions import positions_in
from training.parallel import ParallelConfig, World


class ContextParallel:
    """One of the W processes of `group`, which share each row of N = `seq_len` tokens by `method`."""

    def __init__(self, group: dist.ProcessGroup, method: str, seq_len: int, device: torch.device) -> None:
        self.group, self.method, self.seq_len = group, method, seq_len
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.positions = self.part(torch.arange(seq_len)[None])[0].to(device)
        # disabled here and not by a decorator, which would import the compiler at the start of every program
        exchange = torch.compiler.disable(METHODS[method]) if method == "ring" else METHODS[method]
        # the same object at each step, or a compiled model would be traced again
        self._attention = cache(lambda own: partial(exchange, own, group=group))

    def part(self, x: Tensor) -> Tensor:
        """This process's tokens of x (B, N)."""
        return part_of(x, self.rank, self.world_size, self.method)

    @contextmanager
    def applied_to(self, model: GPT, forward: Callable[..., Tensor]) -> Iterator["ContextParallelModel"]:
        """A model that is called with whole rows and runs `forward`, `model` or its compiled form, on parts of them.

        Inside, the attention of `model` exchanges what the parts lack. The backward pass must run inside too, as it may
        recompute blocks.
        """
        with attend_with(model, lambda layer, own: self._attention(own)):
            yield ContextParallelModel(forward, self)

    def place(self, cu_seqlens: Tensor | None) -> Part:
        """The positions of this process's tokens, in rows whose documents begin at cu_seqlens."""
        if cu_seqlens is None:
            return Part(self.positions, None)
        positions = self.part(positions_in(cu_seqlens, self.seq_len)[None])[0]
        if self.method == "heads":
            return Part(positions, Documents(cu_seqlens, self.seq_len))
        starts = cu_seqlens.cpu()  # waits for the GPU, once
        chunks = documents_of_chunks(starts, self.seq_len, self.rank, self.world_size)
        return Part(positions, tuple(Documents(self._placed(*chunk), chunk.max_seqlen) for chunk in chunks))

    def _placed(self, cu_seqlens: tuple[Tensor, Tensor], max_seqlen: tuple[int, int]) -> tuple[Tensor, ...]:
        device = self.positions.device
        placed = [place_documents(x, bound, device) for x, bound in zip(cu_seqlens, max_seqlen, strict=True)]
        for x in placed:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        return tuple(placed)


class ContextParallelModel(nn.Module):
    """Called with whole rows, computes this process's part of them.

    With autograd on, loss and gradients are those of the part: the training step sums them over the processes. Without
    it, the loss is that of the whole rows, summed in the order of ranks.
    """

    def __init__(self, forward: Callable[..., Tensor], context: ContextParallel) -> None:
        super().__init__()
        self.inner, self._context = forward, context
        self.training = forward.training

    def forward(self, inputs: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        context = self._context
        loss = self.inner(context.part(inputs), context.part(targets), part=context.place(cu_seqlens))
        if torch.is_grad_enabled():
            return loss
        return collectives.wait_tensor(collectives.all_gather_tensor(loss[None], 0, context.group)).sum()


@contextmanager
def context_parallel(
    context: ContextParallel | None, model: GPT, forward: nn.Module, world: World
) -> Iterator[nn.Module]:
    """What to call with whole rows: `forward` itself, or its context-parallel form where `context` is given."""
    if context is None:
        with world.communicating() if world.shards else nullcontext():
            yield forward
        return
    with context.applied_to(model, forward) as applied, world.communicating():
        yield applied


def resolve_method(
    parallel: ParallelConfig, model: GPTConfig, dtype: torch.dtype, seq_len: int, micro_batch: int, document_mask: bool
) -> tuple[str, str]:
    """The method that a run will use, and why, in a sentence. `model` has a resolved attention, which runs in `dtype`.

    Raises:
        ValueError: options that cannot be combined; one line gives the value, the limit and the remedy.
    """
    size, asked = parallel.context, parallel.context_method
    if model.mask is not None:
        raise ValueError(f"model.mask={model.mask} needs whole rows and parallel.context={size} cuts them; use 1")
    method, reason = asked, "asked for by name"
    if asked == "auto" and model.kv_heads % size == 0:
        method, reason = "heads", f"auto: {size} divides the {model.kv_heads} KV heads"
    elif asked == "auto":
        method, reason = "gather", f"auto: {size} does not divide the {model.kv_heads} KV heads"
    pieces = size if method == "heads" else 2 * size
    if seq_len % pieces:
        nearest = max(pieces, round(seq_len / pieces) * pieces)
        raise ValueError(
            f"data.seq_len={seq_len} cannot be cut into {pieces} equal pieces, as parallel.context={size} with "
            f"parallel.context_method={method} does; use data.seq_len={nearest}"
        )
    if method == "heads" and model.kv_heads % size:
        raise ValueError(
            f"parallel.context_method=heads needs parallel.context={size} to divide the model's {model.kv_heads} KV "
            "heads; use parallel.context_method=gather"
        )
    if document_mask and micro_batch > 1:
        raise ValueError(
            f"train.micro_batch={micro_batch} is more than one row, which data.document_mask with parallel.context="
            f"{size} cannot share; use train.micro_batch=1"
        )
    if method == "ring":
        beyond = {
            "model.window": model.window is not None,
            "data.document_mask": document_mask,
            "model.attention_dropout": model.attention_dropout > 0,
        }
        for key in (key for key, used in beyond.items() if used):
            raise ValueError(f"parallel.context_method=ring takes no {key}; use parallel.context_method=gather")
        if obstacle := why_not(model.attention, dtype, ("lse",)):
            reason = obstacle.partition(";")[0]
            remedy = "use model.attention=flash, or on a CPU naive or tiled"
            raise ValueError(f"parallel.context_method=ring cannot run: {reason}; {remedy}")
    return method, reason
