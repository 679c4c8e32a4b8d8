"""Where a run came from: commit, versions, machine, command. Every figure of this project carries these."""

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch
import yaml

PACKAGES = ("torch", "triton", "numpy", "datasets", "tiktoken", "hydra-core", "safetensors", "wandb")


def provenance() -> dict:
    return {
        "commit": git_commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
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


def git_commit() -> str | None:
    """The commit of this checkout, '+changes' appended where tracked files differ; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

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
