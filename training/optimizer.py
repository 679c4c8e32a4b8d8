"""Optimizers, the learning-rate schedule, and the loss scale of float16.

AdamW (Loshchilov and Hutter 2019), or Muon (training/muon.py) for the hidden matrices with AdamW for the embedding and
the output head. The schedule is a pure function of the step. A step never waits for the host, and the tensors that it
reads and writes keep their addresses, so a CUDA graph can replay it.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from training.hardware import DTYPES, products_dtype
from training.muon import Muon, newton_schulz_flops
from training.parallel import ALONE, World
from training.shard import as_sharded, is_sharded, local_parameters, shard_of, total_norm

OPTIMIZERS = ("adamw", "muon")
MUON_DTYPES = ("auto", "float32", "bfloat16")
SCHEDULES = ("cosine", "wsd", "constant")
FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # good steps until the loss scale is doubled
LARGEST_RATE = 1e6  # far above any use; near float32's largest number AdamW's step size overflows
LARGEST_SCALE = 2.0**127  # of float32
LEAST_SCALE = 1.0  # an overflow at this scale has another cause
# the state that an optimizer holds for a parameter, and whether its values may be below zero
MOMENTS = {
    torch.optim.AdamW: {"step": False, "exp_avg": True, "exp_avg_sq": False},
    Muon: {"momentum_buffer": True},
}


@dataclass
class OptimConfig:
    name: str = "adamw"  # adamw | muon
    lr: float = 6e-4  # peak learning rate of AdamW; Muon's is muon_lr_ratio times as high
    muon_lr_ratio: float = 20 / 3  # Muon's learning rate / lr; Muon's update has singular values near 1
    beta1: float = 0.9  # AdamW's decay rate for the mean of gradients
    beta2: float = 0.95  # AdamW's decay rate for the mean of their squares
    momentum: float = 0.95  # Muon's Nesterov momentum
    muon_dtype: str = "auto"  # of Muon's products: auto (bfloat16 if the device is fast in it) | float32 | bfloat16
    weight_decay: float = 0.1  # decoupled, of AdamW and Muon; norm gains and biases do not decay
    cautious_decay: bool = False  # Muon decays only weights that the step makes smaller (arXiv:2510.12402)
    grad_clip: float = 1.0  # largest global gradient norm; 0: no clipping
    schedule: str = "cosine"  # cosine | wsd (warm-up, stable, linear decay) | constant
    warmup_steps: int = 50  # linear, from lr / warmup_steps; if train.steps <= warmup_steps, a tenth of train.steps
    decay_fraction: float = 0.3  # wsd decays over this last fraction of the steps
    min_lr_ratio: float = 0.1  # fraction of the peak that the schedule would reach after the last step

    def __post_init__(self) -> None:
        for key, choices in (("name", OPTIMIZERS), ("schedule", SCHEDULES), ("muon_dtype", MUON_DTYPES)):
            if getattr(self, key) not in choices:
                raise ValueError(f"optim.{key}={getattr(self, key)} is not one of {', '.join(choices)}")
        for key in ("lr", "muon_lr_ratio"):
            if not 0 < getattr(self, key) <= LARGEST_RATE:
                raise ValueError(
                    f"optim.{key}={getattr(self, key)} must be positive, finite and at most {LARGEST_RATE:g}"
                )
        for key in ("weight_decay", "grad_clip", "warmup_steps"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"optim.{key}={getattr(self, key)} must be at least 0 and finite")
        for key in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"optim.{key}={getattr(self, key)} must lie in [0, 1)")
        for key in ("decay_fraction", "min_lr_ratio"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"optim.{key}={getattr(self, key)} must lie in [0, 1]")

    def resolved(self, device: torch.device) -> tuple["OptimConfig", str]:
        """Return the config with muon_dtype chosen for `device`, and a line that says what will run and why."""
        if self.name != "muon":
            return self, self.name
        if self.muon_dtype != "auto":
            return self, f"muon, Newton-Schulz in {self.muon_dtype} (as configured)"
        dtype, reason = products_dtype(device)
        chosen = replace(self, muon_dtype=str(dtype).removeprefix("torch."))
        return chosen, f"muon, Newton-Schulz in {chosen.muon_dtype} ({reason})"

    def warmup_within(self, steps: int) -> int:
        """Warm-up steps of a run of `steps`: warmup_steps, or a tenth of a run that has no room for them."""
        return self.warmup_steps if self.warmup_steps < steps else steps // 10


def lr_factor(step: int, steps: int, config: OptimConfig) -> float:
    """The learning rate of `step` (0-based, of `steps`) as a fraction of the peak."""
    warmup_steps = config.warmup_within(steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        begin = max(warmup_steps, steps - max(1, round(config.decay_fraction * steps)))  # a long warm-up ends first
        progress = max(0.0, (step - begin) / (steps - begin))
        return 1.0 - (1.0 - config.min_lr_ratio) * progress
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


class LossScale:
    """Dynamic loss scaling for float16, all of it on the device.

    Half precision loses gradients below 6e-8, so the loss is multiplied by a scale before the backward pass and
    gradients are divided by it before the step (Micikevicius et al. 2017, section 3.2). The scale is halved after a
    step whose gradient overflowed and doubled after GROWTH_INTERVAL steps without one, by torch.amp.GradScaler's rule.
    GradScaler itself synchronizes with the host at each step of an optimizer that is not fused (Muon), and its scale
    would move in steps that are not taken (see `Optimizer.step`); this does neither.

    Attributes:
        scale: 0-d float32 on the device, a power of two: multiplying and dividing by it rounds nothing.
        good_steps: 0-d int32 on the device: steps since the scale last changed.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.scale = torch.full((), FIRST_SCALE, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide them by the scale, in place."""
        torch._foreach_mul_(gradients, self.scale.reciprocal())

    def exhausted(self) -> Tensor:
        """Whether the scale cannot fall any further: 0-d bool, on the device."""
        return self.scale <= LEAST_SCALE

    def update(self, overflow: Tensor, held: Tensor) -> None:
        """After a step: `overflow` says that its gradient was not finite, `held` that nothing may change."""
        grown = self.good_steps + 1 >= GROWTH_INTERVAL
        scale = torch.where(grown, (self.scale * 2).clamp(max=LARGEST_SCALE), self.scale)
        scale = torch.where(overflow, (self.scale / 2).clamp(min=LEAST_SCALE), scale)
        good_steps = torch.where(overflow | grown, 0, self.good_steps + 1)
        self.scale.copy_(torch.where(held, self.scale, scale))
        self.good_steps.copy_(torch.where(held, self.good_steps, good_steps))


class Optimizer:
    """One or two torch optimizers that step together, their learning rates scaled by one factor.

    A step whose loss or gradient is not finite is not taken, and neither is any after it, until `release`. So weights
    and moments stay as they were before that step until the host has checked; checking late costs time, but changes no
    number. The device decides, without the host.

    Attributes:
        optimizers: AdamW, and Muon where it is chosen.
        held: 0-d bool on the device: a step was not finite, and nothing has changed since.
        loss_scale: for float16, else None. There, a gradient that overflows lowers the scale and its step is not taken,
            but later steps are, unless the loss itself is not finite or the scale cannot fall any further.
        exchanges: whether a step waits for other processes, which share Muon's work.
    """

    def __init__(
        self, model: nn.Module, config: OptimConfig, dtype: torch.dtype = torch.float32, world: World = ALONE
    ) -> None:
        named = list(local_parameters(model))
        self._global = {local: parameter for _, local, parameter in named}  # DTensors where weights are sharded
        self.optimizers = _build([(name, local) for name, local, _ in named], self._global, config, world)
        self.exchanges = world.size > 1 and len(self.optimizers) > 1
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.parameters = [p for group in groups for p in group["params"]]
        self.grad_clip, self._peak_lr = config.grad_clip, config.lr
        device = self.parameters[0].device
        self.held = torch.zeros((), dtype=torch.bool, device=device)
        self.loss_scale = LossScale(device) if dtype == torch.float16 else None
        self._peaks = torch.tensor([group["peak_lr"] for group in groups], device=device)
        self._rates = self._peaks.clone()
        self._lr_factor = 1.0
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate  # a tensor, read on the device

    def set_lr_factor(self, factor: float) -> None:
        self._lr_factor = factor
        torch.mul(self._peaks, factor, out=self._rates)

    @property
    def lr(self) -> float:
        """AdamW's learning rate now."""
        return self._peak_lr * self._lr_factor

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    def step(self, loss: Tensor) -> Tensor:
        """Clip, step, drop the gradients; return the gradient norm before clipping (a 0-d tensor, not yet read).

        loss: the step's loss, not scaled, on the device; if it is not finite, the step is not taken either.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.loss_scale is not None:
            self.loss_scale.unscale(gradients)
        norm = total_norm(gradients, self._global[self.parameters[0]])
        nn.utils.clip_grads_with_norm_(self.parameters, self.grad_clip or math.inf, norm)
        overflow = ~norm.isfinite()
        bad = overflow if self.loss_scale is None else overflow & self.loss_scale.exhausted()
        self.held |= bad | ~loss.isfinite()
        skip = (self.held | overflow).float()
        for optimizer in self.optimizers:
            optimizer.found_inf = skip  # read by the kernels: torch.amp.GradScaler's convention
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.loss_scale is not None:
            self.loss_scale.update(overflow, self.held)
        return norm

    def release(self) -> None:
        """Take steps again."""
        self.held.zero_()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; the tensors are not copies, and the moments are sharded as the weights are."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            for index, local in enumerate(_parameters(optimizer)):
                if is_sharded(like := self._global[local]):
                    moments = state["state"][index].items()
                    state["state"][index] = {k: v if k == "step" else as_sharded(v, like) for k, v in moments}
        for group in (group for state in states for group in state["param_groups"]):
            group["lr"] = group["peak_lr"] * self._lr_factor
        scale = self.loss_scale and {"scale": self.loss_scale.scale, "good_steps": self.loss_scale.good_steps}
        return {"optimizer": states, "loss_scale": scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load moments and loss scale of `state`; rates, decay and betas stay the configuration's, which may differ.

        Values are copied in place. ValueError, before anything has changed, where they are not this model's. The state
        of an optimizer before its first step may be empty.
        """
        if len(state["optimizer"]) != len(self.optimizers):
            raise ValueError(f"the state of {len(state['optimizer'])} optimizers, expected {len(self.optimizers)}")
        for optimizer, saved in zip(self.optimizers, state["optimizer"], strict=True):
            _refuse_other_moments(optimizer, [self._global[p] for p in _parameters(optimizer)], saved)
        scale = self.loss_scale and state.get("loss_scale")  # None: the run before had another dtype
        if scale is not None:
            for key in ("scale", "good_steps"):
                value = scale.get(key) if isinstance(scale, dict) else None
                _refuse_other_tensor(f"{key} of loss_scale", value, getattr(self.loss_scale, key), below_zero=False)
        for optimizer, saved in zip(self.optimizers, state["optimizer"], strict=True):
            for index, p in enumerate(_parameters(optimizer)):
                for key, value in optimizer.state[p].items():
                    if not saved["state"]:
                        value.zero_()
                    elif key == "step":
                        value.copy_(saved["state"][index][key])
                    else:
                        value.copy_(shard_of(saved["state"][index][key], self._global[p]))
        if scale is not None:
            self.loss_scale.scale.copy_(scale["scale"])
            self.loss_scale.good_steps.copy_(scale["good_steps"])


class NoOpOptimizer:
    """Replaces the optimizer in `training_step` where no weight may change, as when a bad step is run again.

    The gradients of `model` are dropped. `loss_scale` is the real optimizer's.
    """

    def __init__(self, model: nn.Module, loss_scale: LossScale | None) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.loss_scale = loss_scale

    scaled = Optimizer.scaled

    def step(self, loss: Tensor) -> Tensor:
        """Drop the gradients; return 0 in place of their norm."""
        for p in self.parameters:
            p.grad = None
        return torch.zeros_like(loss)


def _refuse_other_moments(optimizer: torch.optim.Optimizer, parameters: list[Tensor], saved: Any) -> None:
    """Raise ValueError unless `saved` is an `optimizer.state_dict()` after some steps on whole `parameters`."""
    moments = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(moments, dict):
        raise ValueError(f"optimizer without moments by parameter: {type(saved).__name__}")
    if moments and moments.keys() != set(range(len(parameters))):
        raise ValueError(f"moments of {len(moments)} parameters, expected {len(parameters)}")
    kinds, places = MOMENTS[type(optimizer)], set()
    for index, values in moments.items():
        if not isinstance(values, dict) or values.keys() != kinds.keys():
            found = ", ".join(map(str, values)) if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"parameter {index} has {found[:80] or 'nothing'}, expected {', '.join(kinds)}")
        for key, value in values.items():
            like = torch.zeros(()) if key == "step" else parameters[index]
            _refuse_other_tensor(f"{key} of parameter {index}", value, like, below_zero=kinds[key])
            places.add(value.data_ptr())
    if len(places) < len(moments) * len(kinds):
        raise ValueError("moments that share their memory")


def _refuse_other_tensor(name: str, value: Any, like: Tensor, *, below_zero: bool) -> None:
    """Raise ValueError unless `value` is a plain tensor with the shape and dtype of `like`, without NaN, and without
    negatives unless `below_zero`."""
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_meta:
        raise ValueError(f"{name} is a {type(value).__name__}, expected a tensor with values")
    if value.shape != like.shape or value.dtype != like.dtype:
        found, expected = (f"{tuple(tensor.shape)} in {tensor.dtype}" for tensor in (value, like))
        raise ValueError(f"{name} is {found}, expected {expected}")
    if not value.is_contiguous() or value.requires_grad:
        raise ValueError(f"{name} is a view or has a gradient, expected values alone")
    if value.isnan().any() or (not below_zero and (value < 0).any()):
        raise ValueError(f"{name} holds {'NaN' if below_zero else 'what is below zero or NaN'}, expected numbers")


def flops_of_muon(model: nn.Module, config: OptimConfig) -> float:
    """FLOPs of Muon's matrix products in a step, in its resolved muon_dtype; 0 for AdamW."""
    matrices = _matrices_of_muon(list(model.named_parameters()), config)
    return newton_schulz_flops([p.shape for p in matrices], DTYPES[config.muon_dtype]) if matrices else 0.0


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _matrices_of_muon(named: list[tuple[str, nn.Parameter]], config: OptimConfig) -> list[nn.Parameter]:
    """The trained matrices inside the blocks where `config` chooses Muon, else none."""
    if config.name != "muon":
        return []
    return [p for name, p in named if p.requires_grad and p.ndim == 2 and name.startswith("blocks.")]


def _build(
    named: list[tuple[str, nn.Parameter]], global_of: dict[nn.Parameter, Tensor], config: OptimConfig, world: World
) -> list[torch.optim.Optimizer]:
    """AdamW first; then, for muon, Muon on the matrices inside the blocks."""
    muon = _matrices_of_muon(named, config)
    in_muon = {id(p) for p in muon}
    adamw = [p for _, p in named if id(p) not in in_muon]
    # in a model of transformers, experts are one tensor of many matrices, and their biases one of many vectors
    decays = {id(p) for name, p in named if p.ndim >= 2 and not name.endswith("bias")}
    groups = [{"params": [p for p in adamw if id(p) in decays], "peak_lr": config.lr}]
    # gains of norms and biases do not decay
    if others := [p for p in adamw if id(p) not in decays]:
        groups.append({"params": others, "peak_lr": config.lr, "weight_decay": 0.0})
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            groups,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,  # one kernel for all tensors, which reads the rate and found_inf itself
            capturable=True,
        )
    ]
    for p in adamw:  # its first step would make these, but a graph needs them at their addresses before
        zeros = {key: torch.zeros_like(p, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
        optimizers[0].state[p] = {"step": torch.zeros((), device=p.device)} | zeros
    if muon:
        dtype = DTYPES[config.resolved(muon[0].device)[0].muon_dtype]
        group = {"params": muon, "peak_lr": config.lr * config.muon_lr_ratio}
        group["cautious"] = config.cautious_decay
        how = {"momentum": config.momentum, "weight_decay": config.weight_decay, "dtype": dtype, "world": world}
        optimizers.append(Muon(group, **how, shapes=[global_of[p].shape for p in muon]))
    return optimizers
