"""Weights & Biases where it is wanted: online where a login is found and the server answers, else offline."""

import http.client
import math
import os
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.stop import shell_command

WANDB_MODES = ("auto", "online", "offline", "disabled")
WANDB_URL = "https://api.wandb.ai"
# key of metrics.jsonl -> name in wandb, which makes a section of each group; others keep theirs
NAMES = {
    **{key: f"train/{key}" for key in ("loss", "lr", "grad_norm", "loss_scale", "loss_spikes", "bad_steps")},
    **{f"val_{key}": f"val/{key}" for key in ("loss", "perplexity", "bits_per_byte")},
    **{key: f"speed/{key}" for key in ("tokens_per_second", "mfu", "mfu_full", "peak_memory_gib")},
}
_PATIENCE_SECONDS = 5.0  # for the one question that decides whether wandb's server is within reach


@dataclass
class LoggerConfig:
    wandb: str = "auto"  # auto (online where a login is found, else offline) | online | offline | disabled
    project: str = "flashgpt"  # wandb's, as entity, name, group and tags are
    entity: str | None = None  # team or user; null: the login's own
    name: str | None = None  # of the run; null: its folder's
    group: str | None = None  # runs to be compared; null: of a sweep's runs, its folder
    tags: list[str] = field(default_factory=list)  # words to find the run by

    def __post_init__(self) -> None:
        if self.wandb not in WANDB_MODES:
            raise ValueError(f"logger.wandb={self.wandb} is not one of {', '.join(WANDB_MODES)}")
        if not isinstance(self.tags, list) or not all(isinstance(tag, str) for tag in self.tags):
            raise ValueError(f"logger.tags={self.tags} must be words; use logger.tags=[a,b]")


def wandb_mode(config: LoggerConfig) -> tuple[str, str]:
    """(online | offline | disabled, why). Online only if the server has just answered.

    Raises ValueError, one line, where online was asked for by name and cannot be had.
    """
    mode, asked_by = config.wandb, "logger.wandb"
    if mode == "auto":
        mode, asked_by = os.environ.get("WANDB_MODE"), "WANDB_MODE"
        if mode and mode not in WANDB_MODES[1:]:
            raise ValueError(f"WANDB_MODE={mode} is not one of {', '.join(WANDB_MODES[1:])}; unset it")
        if not mode:
            obstacle = _silence_of_server() if _has_wandb_login() else "no login was found"
            return ("offline", f"auto: {obstacle}") if obstacle else ("online", "auto: a login was found")
    if mode == "online":
        obstacle = _silence_of_server() if _has_wandb_login() else "no login was found (`wandb login`)"
        if obstacle:
            raise ValueError(f"{asked_by}=online but {obstacle}; use logger.wandb=offline and `wandb sync` later")
    return mode, f"{asked_by}={mode}"


def _has_wandb_login() -> bool:
    """Whether there is a key, without the network: in the environment, or the netrc file that `wandb login` writes."""
    from requests.utils import get_netrc_auth  # it looks where wandb does

    try:
        return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(os.environ.get("WANDB_BASE_URL", WANDB_URL)))
    except ValueError:  # WANDB_BASE_URL is no address
        return False


def _silence_of_server() -> str | None:
    """Why wandb's server cannot be used, or None. wandb itself would ask for half a minute."""
    url = os.environ.get("WANDB_BASE_URL", WANDB_URL)
    try:
        urllib.request.urlopen(url, timeout=_PATIENCE_SECONDS).close()
    except urllib.error.HTTPError:
        return None  # an answer, whatever it is
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{url} does not answer ({getattr(error, 'reason', None) or error or type(error).__name__})"
    return None


def start_wandb(
    run_dir: Path,
    config: LoggerConfig,
    mode: str,
    why: str,
    description: Mapping[str, Any],
    *,
    resume: bool,
) -> tuple[Any, str]:
    """Start a wandb run, without prompts or long waits; returns (the run or None, a sentence).

    It records settings and commit of `description`. Its own use of git is off: a remote's address may name its user.

    ValueError where wandb was asked for by name and does not start.
    """
    if mode == "disabled":
        return None, "wandb off"
    import wandb  # half a second, so only where it is used

    # one id for each run folder, so that a resumed run is the same wandb run; half an id, after a power cut, is none
    id_file = run_dir / "wandb_id"
    written = id_file.read_text(errors="replace").strip() if id_file.exists() else ""
    run_id = written if re.fullmatch(r"[\w-]+", written, flags=re.ASCII) else secrets.token_hex(4)
    id_file.write_text(run_id + "\n")
    # its process would print its own log on the console
    if not os.environ.get("WANDB_CACHE_DIR") and not _can_write_below_home():
        os.environ["WANDB_CACHE_DIR"] = str(run_dir.resolve())
    try:
        if resume and mode == "offline":  # the new folder will hold the whole run: the old ones are not to be synced
            for earlier in run_dir.glob(f"wandb/offline-run-*-{run_id}"):
                earlier.rename(earlier.with_name(f"superseded-{earlier.name}"))
        folder = run_dir.resolve()
        is_of_a_sweep = (folder.parent / "multirun.yaml").is_file()  # Hydra's
        run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group or ("/".join(folder.parent.parts[-2:]) if is_of_a_sweep else None),
            tags=config.tags or None,
            name=config.name or "/".join(folder.parts[-2:]),
            id=run_id,
            resume="allow" if resume and mode == "online" else None,
            dir=run_dir,
            mode=mode,
            config=description["settings"],
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=30,
                x_disable_stats=True,
                disable_git=True,
                git_commit=description["provenance"]["commit"],
            ),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
    except Exception as error:  # it may fail in any way it likes
        reason = f"wandb failed to start ({brief(error)})"
        if config.wandb == "online":
            raise ValueError(f"logger.wandb=online but {reason}; use logger.wandb=offline") from error
        return None, f"{reason}; going on without it"  # a logger does not stop a run
    note = f"wandb {mode} ({why}), without console output, system metrics and git remote"
    if mode == "offline":
        note += f"; later: {shell_command('wandb', 'sync', str(Path(run.dir).parent))}"
    return run, note


def _can_write_below_home() -> bool:
    """Whether wandb has a place for its logs, where it looks for one unless WANDB_CACHE_DIR names another."""
    home = os.environ.get("HOME")
    logs = Path(os.environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache") or "", "wandb", "logs")
    if not logs.is_absolute():
        return False
    try:
        logs.mkdir(parents=True, exist_ok=True)  # as wandb does; what may be asked of another user's folder varies
    except OSError:
        return False
    return os.access(logs, os.W_OK | os.X_OK)


def send(run: Any, step: int, values: Mapping[str, Any]) -> None:
    """Hand a step to wandb, on its own step axis; one that it already has from before a crash it drops."""
    numbers = {key: math.nan if value is None else value for key, value in named(values).items()}
    run.log({"step": step, **numbers}, step=step)


def named(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` under their names in wandb."""
    return {NAMES.get(key, key): value for key, value in values.items()}


def brief(error: Exception) -> str:
    lines = str(error).splitlines()  # none where wandb's service has died
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
