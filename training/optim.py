"""Optimisers and the learning-rate schedule.

AdamW (Loshchilov and Hutter 2019), or Muon (Jordan 2024; `torch.optim.Muon`) for the hidden matrices with AdamW for
everything else. Weight decay acts on matrices only. The schedule is a pure function of the step.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

OPTIMISERS = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd", "constant")


@dataclass
class OptimConfig:
    name: str = "adamw"  # adamw | muon
    lr: float = 6e-4  # AdamW's peak learning rate
    muon_lr: float = 0.02  # Muon's peak learning rate; its update has singular values near 1
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95  # Muon's
    weight_decay: float = 0.1  # decoupled, on matrices only
    grad_clip: float = 1.0  # largest global gradient norm; 0: no clipping
    schedule: str = "cosine"  # cosine | wsd (warm-up, stable, linear decay) | constant
    warmup_steps: int = 50  # linear, from lr / warmup_steps
    decay_fraction: float = 0.3  # of the steps, at their end: wsd's decay
    min_lr_ratio: float = 0.1  # the schedule ends at this fraction of the peak

    def __post_init__(self) -> None:
        if self.name not in OPTIMISERS:
            raise ValueError(f"optim.name={self.name} is not one of {', '.join(OPTIMISERS)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"optim.schedule={self.schedule} is not one of {', '.join(SCHEDULES)}")
        for key in ("lr", "muon_lr"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"optim.{key}={getattr(self, key)} must be positive and finite")
        for key in ("weight_decay", "grad_clip", "warmup_steps"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"optim.{key}={getattr(self, key)} must be at least 0")
        for key in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"optim.{key}={getattr(self, key)} must lie in [0, 1)")
        for key in ("decay_fraction", "min_lr_ratio"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"optim.{key}={getattr(self, key)} must lie in [0, 1]")


def lr_factor(step: int, steps: int, config: OptimConfig) -> float:
    """The learning rate of `step` (0-based, of `steps`) as a fraction of the peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        decay_steps = max(1, round(config.decay_fraction * steps))
        progress = max(0.0, (step - (steps - decay_steps)) / decay_steps)
        return 1.0 - (1.0 - config.min_lr_ratio) * progress
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


class Optimiser:
    """One or two torch optimisers that step together, their learning rates scaled by one factor."""

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self.parts = _build(model, config)
        self.parameters = [p for part in self.parts for group in part.param_groups for p in group["params"]]
        self.grad_clip = config.grad_clip

    def set_lr_factor(self, factor: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = group["peak_lr"] * factor

    @property
    def lr(self) -> float:
        """AdamW's learning rate now."""
        return self.parts[0].param_groups[0]["lr"]

    def step(self) -> torch.Tensor:
        """Clip, step, drop the gradients; return the gradient norm before clipping (a 0-d tensor, not yet read)."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.grad_clip or math.inf)
        for part in self.parts:
            part.step()
            part.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> list[dict]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        """Take the moments of `states`; learning rates, decay and betas stay the configuration's, which may differ."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state | {"param_groups": part.state_dict()["param_groups"]})


def _build(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """AdamW first; then, for muon, Muon on the matrices inside the blocks."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if p.ndim == 2 and name.startswith("blocks.")]
    muon = hidden if config.name == "muon" else []
    in_muon = {id(p) for p in muon}
    matrices = [p for _, p in named if p.ndim >= 2 and id(p) not in in_muon]
    vectors = [p for _, p in named if p.ndim < 2]
    groups = [
        {"params": params, "weight_decay": decay, "peak_lr": config.lr}
        for params, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        if params
    ]
    on_cuda = named[0][1].is_cuda
    # fused: one kernel for all tensors in place of a loop over them
    parts: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=on_cuda)
    ]
    if muon:
        parts.append(
            torch.optim.Muon(
                [{"params": muon, "peak_lr": config.muon_lr}],
                lr=config.muon_lr,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
            )
        )
    return parts
