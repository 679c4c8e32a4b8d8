"""Where a run came from: commit, versions, machine, command. Every figure of this project carries these."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "numpy", "datasets", "tiktoken", "hydra-core", "safetensors", "wandb")


def provenance() -> dict:
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


def write_description(run_dir: Path, settings: dict, manifest: dict, protocol: dict) -> None:
    """Write the run's `config.yaml` (every setting, resolved) and `run.json` (provenance, data, evaluation)."""
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    description = {"provenance": provenance(), "data": manifest, "evaluation": protocol}
    (run_dir / "run.json").write_text(json.dumps(description, indent=2) + "\n")


def command() -> str:
    """What was typed, without where its output went."""
    program = Path(sys.argv[0]).resolve()
    typed = f"python {program.name}"
    if ROOT in program.parent.parents:
        typed = "python -m " + ".".join(program.relative_to(ROOT).with_suffix("").parts)
    return " ".join([typed, *(a for a in sys.argv[1:] if not a.startswith("hydra.run.dir="))])


def git_commit() -> str | None:
    """The commit of this checkout, '+changes' appended where tracked files differ; None outside a checkout.

    The environment variable GIT_COMMIT stands in for it where the code was copied without its history.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
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
