"""Where a figure came from: every one of this project carries commit, versions, machine and command."""

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    *("torch", "triton", "numpy", "datasets", "tiktoken", "hydra-core", "safetensors", "wandb"),
    *("transformers", "flash-attn-4"),
)


def provenance() -> dict[str, Any]:
    """Commit, command, versions and machine of this process."""
    return {
        "commit": git_commit(),
        "command": command(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "cpu_threads": torch.get_num_threads(),
    }


def command() -> str:
    """The command line, quoted for a shell, without hydra.run.dir."""
    program = Path(sys.argv[0]).resolve()
    if program.is_relative_to(ROOT) and program.parent != ROOT:
        typed = f"python -m {'.'.join(program.relative_to(ROOT).with_suffix('').parts)}"
    else:
        typed = f"python {program.name}"
    return " ".join([typed, *(shlex.quote(a) for a in sys.argv[1:] if not a.startswith("hydra.run.dir="))])


def git_commit() -> str | None:
    """The commit of this checkout, '+changes' appended where tracked files differ; None outside a checkout.

    The environment variable GIT_COMMIT stands in for it where the code was copied without its history.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, errors="replace", check=True
        ).stdout.strip()

    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
