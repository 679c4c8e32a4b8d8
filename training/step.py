"""One optimizer step: forward and backward over micro-batches, then the update."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from data import Batch
from kernels import place_documents
from training.gradient_sum import GradientSum
from training.graph import StepGraphs
from training.hardware import Hardware
from training.optimizer import Optimizer
from training.profile import region
from training.random_states import micro_batch_streams


class Step(NamedTuple):
    """A finished step, as `train(on_step=...)` receives it."""

    number: int  # from 1
    batch: Batch
    loss: Tensor  # nats a token, a mean over the step; on the device
    grad_norm: Tensor  # on the device
    optimizer: Optimizer


def training_step(
    forward: Callable[..., Tensor],
    optimizer: Optimizer,
    batch: Batch,
    micro_batch: int,
    hardware: Hardware,
    *,
    graphs: StepGraphs | None = None,
    dropout: bool = False,
    region: Callable[[str], AbstractContextManager] = region,
) -> tuple[Tensor, Tensor]:
    """One optimizer step over the (sequences, seq_len) tokens of `batch`, `micro_batch` sequences at a time.

    `forward` returns a sum over tokens, so dividing by the tokens of the whole step gives the same gradient however
    the step is split. Each process of `hardware.world` computes equally many rows of the step; where several share
    rows, `forward` computes its part of them (training/context.py). `graphs` must be of the same network, optimizer and
    sizes; a step with documents, whose number changes, has none. With `dropout` each micro-batch draws from a stream of
    its own. `region` names the parts of the step for a profiler. Returns the mean loss (nats a token) and the gradient
    norm of the whole step, both still on the device.
    """
    inputs, targets, starts = batch
    world = hardware.world
    micro_batches = -(-len(inputs) // micro_batch)
    tokens = targets.numel() * world.data_size
    compute = graphs.compute if graphs else partial(compute_gradients, forward, optimizer, hardware, tokens)
    gradients = GradientSum(optimizer.parameters, world, micro_batches, copied=graphs is not None)
    world.begin_step(hardware.device)
    with micro_batch_streams(hardware.device) if dropout else nullcontext(lambda number: None) as use_stream:
        for number in range(micro_batches):
            part = slice(number * micro_batch, (number + 1) * micro_batch)
            documents = packed_rows(starts, part.start, *inputs[part].shape, hardware.device)
            # processes that share rows draw different masks, each for its own tokens
            use_stream((world.data_rank * micro_batches + number) * world.context + world.rank % world.context)
            gradients.add(compute(inputs[part], targets[part], **documents, region=region))
    with region("optimizer"):
        step_loss = gradients.total()
        grad_norm = graphs.update(step_loss) if graphs else optimizer.step(step_loss)
    return step_loss, grad_norm


def compute_gradients(
    forward: Callable[..., Tensor],
    optimizer: Optimizer,
    hardware: Hardware,
    batch_tokens: int,
    inputs: Tensor,
    targets: Tensor,
    region: Callable[[str], AbstractContextManager] = region,
    **documents: Tensor,
) -> Tensor:
    """Forward and backward of a micro-batch; returns its share of the step's mean loss."""
    with region("forward"), hardware.autocast():
        loss = forward(inputs, targets, **documents) / batch_tokens
    with region("backward"):
        optimizer.scaled(loss).backward()
    return loss.detach()


def packed_rows(
    starts: Tensor | None, first_row: int, num_rows: int, seq_len: int, device: torch.device
) -> dict[str, Tensor]:
    """The argument `cu_seqlens` of the model for rows first_row .. first_row + num_rows - 1; {} where starts is None.

    starts: `data.document_starts` of a whole (rows, seq_len) batch. Every row begins a document, so any rows
    can be cut out.
    """
    if starts is None:
        return {}
    first, end = first_row * seq_len, (first_row + num_rows) * seq_len
    inside = starts[(starts >= first) & (starts < end)] - first
    cu_seqlens = place_documents(torch.cat([inside, inside.new_tensor([end - first])]), seq_len, device)
    torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)  # their number changes; one compiled model runs them all
    return {"cu_seqlens": cu_seqlens}
