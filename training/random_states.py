"""The random streams a run may draw from, as plain values that a checkpoint can hold without pickled code."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed every stream, also those that nothing draws from today."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # every device's too


@contextmanager
def micro_batch_streams(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Yields a function; call it with a micro-batch's number in the step before the micro-batch draws dropout masks.

    The masks then depend on one number drawn for the step and on the micro-batch's number, not on the process that
    computes it or on the order. Afterwards the streams are as after that one draw, in every process.
    """
    step_seed = int(torch.randint(2**62, ()))  # of the CPU's stream, which is the same in all processes
    after = torch.get_rng_state()
    yield lambda micro_batch: _seed(device, step_seed + 1 + micro_batch)
    _seed(device, step_seed)
    torch.set_rng_state(after)


def _seed(device: torch.device, seed: int) -> None:
    """Seed the stream that `device` draws from, and no other."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


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
    """Set every generator to `states`. A run that moves between CPU and GPU keeps the freshly seeded stream there.

    ValueError, before anything changes, where Python's or NumPy's are invalid: NumPy would read past the array's end.
    """
    match states["python"]:
        case (3, tuple() as words, None | float()) if _is_twister(words[:-1], words[-1:]):
            pass
        case _:
            raise ValueError("random.python is no state of Python's generator")
    match states["numpy"]:
        case ("MT19937", list() as words, position, 0 | 1, float()) if _is_twister(words, [position]):
            pass
        case _:
            raise ValueError("random.numpy is no state of NumPy's generator")
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "mps" in states and torch.device(device).type == "mps":
        torch.mps.set_rng_state(states["mps"])


def _is_twister(words: Sequence[Any], position: Sequence[Any]) -> bool:
    """Whether these are the 624 words of a Mersenne Twister and the place of the next one, as plain numbers."""
    plain = all(type(number) is int and 0 <= number < 2**32 for number in (*words, *position))
    return plain and len(words) == 624 and len(position) == 1 and position[0] <= 624
