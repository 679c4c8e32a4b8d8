"""What `scripts.doctor` checks besides the run: GPU, driver, versions, compiler, room on the disk.

A question returns a Finding, or raises a ValueError "what is wrong; what to do about it", the form of a run's own
refusals. Nothing is written except a temporary file, deleted at once, that shows whether a folder is writable.
"""

import os
import platform
import shutil
import tempfile
import tomllib
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from kernels.device import interpreting
from scripts.bench.report import installed_gpus
from training.hardware import Hardware, gpu_number, refuse_without_compiler
from training.lock import holder
from training.run import TrainConfig

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
CROWDED_BYTES = 2**30  # more of a GPU's memory than a desktop uses: other programs hold it


@dataclass(frozen=True)
class Finding:
    """The answer to one question."""

    text: str
    fix: str | None = None  # what to type or do about it
    facts: dict[str, Any] = field(default_factory=dict)  # JSON-able
    value: Any = None  # what later questions build on
    wrong: bool = False  # the run would not start, or would be wrong

    @property
    def status(self) -> str:
        """ok, note (worth knowing) or FIX."""
        return "FIX" if self.wrong else "note" if self.fix else "ok"


def gpu(device: str) -> Finding:
    """The GPU that hardware.device names, or the first."""
    installed = installed_gpus()
    if not torch.cuda.is_available():
        if not installed:
            return Finding(f"none; {os.cpu_count()} CPU cores")
        unseen = f"{installed[0]['name']} (driver {installed[0]['driver_version']}), which PyTorch does not see"
        if torch.version.cuda is None:
            raise ValueError(f"{unseen}: this PyTorch was built for the CPU; uv sync, for the CUDA build")
        if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            raise ValueError(f"{unseen}: CUDA_VISIBLE_DEVICES={visible} hides it; unset CUDA_VISIBLE_DEVICES")
        raise ValueError(f"{unseen}; install a driver for CUDA {torch.version.cuda} or newer")
    if interpreting():
        raise ValueError("TRITON_INTERPRET is set: kernels would run on the CPU; unset TRITON_INTERPRET")
    number = gpu_number(device)
    if number >= torch.cuda.device_count():  # the question about hardware refuses it
        number = 0
    properties = torch.cuda.get_device_properties(number)
    driver = installed[0]["driver_version"] if installed else "unknown"
    free, total = torch.cuda.mem_get_info(number)
    text = (
        f"{torch.cuda.device_count()} x {properties.name}, capability {properties.major}.{properties.minor}, "
        f"{total / 2**30:.1f} GiB, driver {driver}"
    )
    facts = {"name": properties.name, "driver": driver, "free_bytes": free, "total_bytes": total}
    if total - free > CROWDED_BYTES:
        held = f"{(total - free) / 2**30:.1f} GiB of it are held by others"
        return Finding(f"{text}; {held}", "end them, or hardware.device=cuda:N for another GPU", facts)
    return Finding(text, facts=facts)


def versions() -> Finding:
    """Installed packages compared with what pyproject.toml requires."""
    names = {(d.metadata.get("Name") or "").lower() for d in metadata.distributions()}  # a damaged package has none
    if "kernels" in names:  # `pip install .` installs ours as flashgpt, without modules
        raise ValueError("an installed package is called kernels, as ours is; uv pip uninstall kernels")
    found, wrong = {"python": platform.python_version()}, []
    for requirement in map(Requirement, tomllib.loads(PROJECT.read_text())["project"]["dependencies"]):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            found[requirement.name] = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement} is not installed")
            continue
        if not requirement.specifier.contains(found[requirement.name].split("+")[0], prereleases=True):
            wrong.append(f"{requirement.name} {found[requirement.name]} is not {requirement.specifier}")
    if wrong:
        raise ValueError(f"{', '.join(wrong)} (python {found['python']}); uv sync, or pip install .")
    shown = ", ".join(f"{name} {found[name]}" for name in ("python", "torch", "triton", "numpy") if name in found)
    return Finding(shown, facts=found)


def compiler(hardware: Hardware) -> Finding:
    """The compiler of torch.compile on a CPU, of Triton on a GPU."""
    refuse_without_compiler(hardware)
    return Finding("it works" if hardware.compile or hardware.device.type == "cuda" else "none is needed")


def disk(train: TrainConfig, folder: Path, *, parameters: int | None) -> Finding:
    """Whether the run's folder is unused, writable and has room for all checkpoints that it will hold at once."""
    if other := holder(folder):
        raise ValueError(f"{folder} is in use by {other}; wait for its end, stop it, or hydra.run.dir=FOLDER")
    if obstacle := not_writable(folder):
        raise ValueError(f"{folder} {obstacle}; hydra.run.dir=FOLDER")
    free = shutil.disk_usage(existing(folder)).free
    if parameters is None:
        return Finding(f"{free / 1e9:,.1f} GB free in {folder}", facts={"free_bytes": free})
    # weights and AdamW's two moments in float32, an upper bound for Muon's one
    size = 12 * parameters
    milestones = train.steps // train.keep_every if train.keep_every and train.save_every else 0
    saves = train.steps // train.save_every + 2 if train.save_every else 2  # the last and the best are always saved
    count = min(train.keep_last + 1, saves) + milestones + 1  # and the one being written
    text = (
        f"{count} checkpoints of at most {size / 1e9:,.2f} GB are {size * count / 1e9:,.2f} GB, {free / 1e9:,.1f} GB "
        f"free in {folder}"
    )
    if size * count > free:
        raise ValueError(f"{text}; train.keep_last=1 train.keep_every=0, or hydra.run.dir=FOLDER on another disk")
    facts = {"free_bytes": free, "checkpoint_bytes": size, "checkpoints": count, "needed_bytes": size * count}
    return Finding(text, facts=facts)


def not_writable(folder: Path) -> str | None:
    """Why nothing can be written there, or None."""
    place = existing(folder)
    if not place.is_dir():
        return f"cannot be made: {place} is a {'file' if place.exists() else 'link to nothing'}"
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"cannot be written ({error.strerror})"


def existing(folder: Path) -> Path:
    """`folder`, or the nearest parent that exists; a link to nothing counts, as no folder can be made below it."""
    folder = Path(os.path.abspath(folder.expanduser()))
    return next(place for place in (folder, *folder.parents) if os.path.lexists(place))
