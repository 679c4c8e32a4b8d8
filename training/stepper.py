"""What a run computes: its steps, evaluations and samples, as `resolve` chose to compute them."""

from collections.abc import Callable
from functools import partial

import tiktoken
from torch import Tensor, nn

from data import Batch
from training.bad_steps import NumberCheck
from training.context import ContextParallel, context_parallel
from training.evaluate import EvaluationSet, evaluate, sample
from training.graph import StepGraphs
from training.hardware import Hardware
from training.optimizer import NoOpOptimizer, Optimizer
from training.run import Run
from training.shard import full_model
from training.step import compute_gradients, training_step


class Stepper:
    """Computes steps as `chosen` says (CUDA graphs, context parallelism). `forward` is `model` or its compiled form."""

    def __init__(self, chosen: Run, model: nn.Module, forward: nn.Module, optimizer: Optimizer) -> None:
        self._chosen, self._model, self._forward, self._optimizer = chosen, model, forward, optimizer
        hardware, self._context, self._graphs = chosen.hardware, None, None
        if chosen.context:
            group = hardware.world.mesh(hardware.device).get_group("context")
            self._context = ContextParallel(group, chosen.context[0], chosen.seq_len, hardware.device)
        if chosen.graphs:
            batch_tokens = chosen.settings["train"]["batch_tokens"]
            self._graphs = StepGraphs(partial(compute_gradients, forward, optimizer, hardware, batch_tokens), optimizer)

    def step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute a step of the run and update the weights; (loss, gradient norm) as `training_step` returns them."""
        hardware = self._chosen.hardware
        with context_parallel(self._context, self._model, self._forward, hardware.world) as network:
            return self.compute_step(network, batch, self._optimizer, hardware, self._graphs)

    def compute_step(
        self,
        forward: Callable[..., Tensor],
        batch: Batch,
        optimizer: Optimizer | NoOpOptimizer,
        hardware: Hardware,
        graphs: StepGraphs | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A step with this network, optimizer and hardware; bad_steps.py passes others to run a bad step again."""
        micro_batch, dropout = self._chosen.micro_batch, self._chosen.model.draws
        return training_step(forward, optimizer, batch, micro_batch, hardware, graphs=graphs, dropout=dropout)

    def evaluate(self, windows: EvaluationSet) -> dict[str, float]:
        """Validation loss (nats a token), perplexity and bits per byte of the weights as they are now."""
        hardware = self._chosen.hardware
        with context_parallel(self._context, self._model, self._forward, hardware.world) as network:
            return evaluate(network, windows, self._chosen.micro_batch, hardware, self._chosen.end_of_text)

    def sample(self, tokenizer: tiktoken.Encoding) -> str:
        """The model's continuation of the run's prompt, in the first process; the others send it their shards."""
        hardware, config = self._chosen.hardware, self._chosen.settings["train"]
        hardware.world.suspend_timeout()
        with hardware.world.communicating():
            model = full_model(self._model)
        new_tokens, seed = config["sample_tokens"], config["seed"]
        return hardware.world.on_first(sample)(model, self._chosen.prompt, new_tokens, seed, tokenizer, hardware)


def step_record(loss: Tensor, grad_norm: Tensor, optimizer: Optimizer, check: NumberCheck) -> dict[str, float | None]:
    """The numbers of one step that `RunLog.metrics` records; reading them waits for the device."""
    return {
        "loss": loss.item(),
        "lr": optimizer.lr,
        "grad_norm": grad_norm.item(),
        "loss_scale": optimizer.loss_scale.scale.item() if optimizer.loss_scale else None,
        "loss_spikes": check.spikes or None,
        "bad_steps": check.bad_steps or None,
    }
