"""Dynamic loss scaling for float16, all of it on the device.

Half precision loses gradients below 6e-8, so the loss is multiplied by a scale before the backward pass and gradients
are divided by it before the step (Micikevicius et al. 2017, section 3.2). Rule and constants are those of
torch.amp.GradScaler. That class itself asks the host about each step of an optimizer that is not fused (Muon), and its
scale would move in steps that are held (see `Optimizer.step`); ours does neither.
"""

import torch
from torch import Tensor

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # good steps until the scale is doubled
LEAST_SCALE = 1.0  # an overflow without any scaling is no matter of scale


class LossScale:
    """Halved after a step whose gradient overflowed, doubled after GROWTH_INTERVAL steps without one.

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
        """After a step: `overflow` says whether its gradient was not finite, `held` that nothing may change."""
        grown = self.good_steps + 1 >= GROWTH_INTERVAL
        scale = torch.where(grown, self.scale * 2, self.scale)
        scale = torch.where(overflow, (self.scale / 2).clamp(min=LEAST_SCALE), scale)
        good_steps = torch.where(overflow | grown, 0, self.good_steps + 1)
        self.scale.copy_(torch.where(held, self.scale, scale))
        self.good_steps.copy_(torch.where(held, self.good_steps, good_steps))

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.scale.copy_(state["scale"])
        self.good_steps.copy_(state["good_steps"])
