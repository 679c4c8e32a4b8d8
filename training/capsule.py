"""A capsule: one training step that went wrong, with all that is needed to run it again.

    <run>/capsules/step_000123/
        model.safetensors    the weights before the step
        state.safetensors    the optimizer's tensors before it, the batch, PyTorch's random states
        capsule.json         step, settings, what was not finite and where, other random states, commit, versions

Safetensors and JSON: nothing that could hold code. As checkpoints, it is written under a hidden name and renamed.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data import Batch
from training.checkpoint import Checkpoint, weights_of
from training.optimizer import Optimizer

FORMAT = 1
WEIGHTS, STATE, META = "model.safetensors", "state.safetensors", "capsule.json"


@dataclass
class Capsule:
    """A capsule that was opened.

    meta: what `write` was given, and "format". batch: on the CPU. random: as `random_states` made it.
    """

    path: Path
    meta: dict[str, Any]
    batch: Batch
    random: dict[str, Any]
    _optimizer: dict[str, Tensor]  # "part.parameter.key" -> value

    def load_weights(self, model: nn.Module) -> None:
        """Copy the weights into `model`; ValueError names a tensor that does not fit."""
        Checkpoint(self.path, self.meta).load_weights(model)

    def load_optimizer(self, optimizer: Optimizer) -> None:
        """Give it the moments, and in float16 the scale, that it had before the step."""
        states: list[dict] = [{} for _ in optimizer.parts]
        for name, value in self._optimizer.items():
            part, parameter, key = name.split(".")
            states[int(part)].setdefault(int(parameter), {})[key] = value
        optimizer.load_state_dict([{"state": state} for state in states])
        if optimizer.loss_scale and self.meta["loss_scale"]:
            scale = {key: torch.tensor(value) for key, value in self.meta["loss_scale"].items()}
            optimizer.loss_scale.load_state_dict(scale)


def write(
    folder: Path, model: nn.Module, optimizer: Optimizer, batch: Batch, random: dict[str, Any], meta: dict[str, Any]
) -> Path:
    """Write `folder/step_NNNNNN` from the state before the step, and return its path.

    meta: JSON; must hold "step".

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    final = folder / f"step_{meta['step']:06d}"
    temporary = folder / f".{final.name}.{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        tensors = {f"batch.{key}": value for key, value in zip(("inputs", "targets", "starts"), batch, strict=True)}
        tensors |= {f"random.{key}": value for key, value in random.items() if isinstance(value, Tensor)}
        for number, part in enumerate(optimizer.parts):
            for parameter, values in part.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{parameter}.{key}": value for key, value in values.items()}
        scale = optimizer.loss_scale.state_dict() if optimizer.loss_scale else {}
        meta = {"format": FORMAT, **meta, "loss_scale": {key: value.item() for key, value in scale.items()}}
        meta["random"] = {key: value for key, value in random.items() if not isinstance(value, Tensor)}
        for name, part in ((WEIGHTS, weights_of(model)), (STATE, tensors)):
            save_file({key: value.contiguous() for key, value in part.items() if value is not None}, temporary / name)
        (temporary / META).write_text(json.dumps(meta, indent=2) + "\n")
        shutil.rmtree(final, ignore_errors=True)  # the same step of an earlier life of the run
        temporary.rename(final)
    except SafetensorError as error:  # how that library reports a full disk
        raise OSError(f"{temporary}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def open_capsule(path: str | Path) -> Capsule:
    """Open a capsule's folder; ValueError says in one line what is wrong."""
    path = Path(path)
    for file in (META, WEIGHTS, STATE):
        if not (path / file).is_file():
            raise ValueError(f"capsule {path} has no {file}; give a folder such as runs/.../capsules/step_000123")
    try:
        meta = json.loads((path / META).read_text())
        tensors = load_file(path / STATE)
        if meta["format"] != FORMAT:
            raise ValueError(f"its format is {meta['format']}, this version reads {FORMAT}")
        groups: dict[str, dict[str, Tensor]] = {"batch": {}, "random": {}, "optimizer": {}}
        for name, value in tensors.items():
            group, _, rest = name.partition(".")
            groups[group][rest] = value
        batch = groups["batch"]["inputs"], groups["batch"]["targets"], groups["batch"].get("starts")
        # JSON has no tuples, and Python's generator takes nothing else
        version, keys, cached = meta["random"]["python"]
        random = groups["random"] | {"python": (version, tuple(keys), cached), "numpy": tuple(meta["random"]["numpy"])}
    except (ValueError, LookupError, TypeError, SafetensorError) as error:
        raise ValueError(f"capsule {path} cannot be read ({error}); give another one") from error
    return Capsule(path, meta, batch, random, groups["optimizer"])
