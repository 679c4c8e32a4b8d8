"""The random streams a run may draw from, as plain values that a checkpoint can hold without pickled code."""

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Start every stream from `seed`, those that nothing draws from today as well: a run is then one state."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # every device's too


def random_states(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The states of Python's, NumPy's and PyTorch's generators; with a GPU as `device`, of that as well."""
    kind, keys, position, has_gauss, cached_gauss = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), position, has_gauss, cached_gauss),
        "cpu": torch.get_rng_state(),
    }
    if torch.device(device).type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if torch.device(device).type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any], device: torch.device | str = "cpu") -> None:
    """Set every generator to `states`. A run that moves between CPU and GPU keeps the seed's own stream there."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "mps" in states and torch.device(device).type == "mps":
        torch.mps.set_rng_state(states["mps"])
