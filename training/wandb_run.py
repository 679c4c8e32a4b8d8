"""Weights & Biases if it is enabled: online where a login is found and the server answers, else offline."""

import configparser
import http.client
import importlib.util
import math
import os
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from training.lock import sweep_of
from training.stop import shell_command

WANDB_MODES = ("auto", "online", "offline", "disabled")
WANDB_URL = "https://api.wandb.ai"
# key of metrics.jsonl -> name in wandb, which makes a section of each group; others keep theirs
NAMES = {
    **{key: f"train/{key}" for key in ("loss", "lr", "grad_norm", "loss_scale", "loss_spikes", "bad_steps")},
    **{f"val_{key}": f"val/{key}" for key in ("loss", "perplexity", "bits_per_byte")},
    **{key: f"speed/{key}" for key in ("tokens_per_second", "mfu", "mfu_full", "peak_memory_gib")},
}
_PATIENCE_SECONDS = 5.0  # limit of the one request that decides whether wandb's server is within reach


@dataclass
class LoggerConfig:
    wandb: str = "auto"  # auto (online if a login is found, else offline) | online | offline | disabled
    project: str | None = None  # wandb's project; null: WANDB_PROJECT, or flashgpt
    entity: str | None = None  # wandb's team or user; null: WANDB_ENTITY, or the login's own
    name: str | None = None  # the run's name in wandb; null: WANDB_NAME, or its folder's
    group: str | None = None  # wandb's group of runs to compare; null: WANDB_RUN_GROUP, or the sweep's folder
    tags: list[str] = field(default_factory=list)  # wandb's tags, words to find the run by

    def __post_init__(self) -> None:
        if self.wandb not in WANDB_MODES:
            raise ValueError(f"logger.wandb={self.wandb} is not one of {', '.join(WANDB_MODES)}")
        if not isinstance(self.tags, list) or not all(isinstance(tag, str) for tag in self.tags):
            raise ValueError(f"logger.tags={self.tags} must be words; use logger.tags=[a,b]")


def wandb_mode(config: LoggerConfig) -> tuple[str, str]:
    """(online | offline | disabled, why). Online only if the server has just answered.

    Raises ValueError, one line, if online was requested by name and is not available.
    """
    mode, asked_by = config.wandb, "logger.wandb"
    if mode != "disabled" and importlib.util.find_spec("wandb") is None:
        if mode == "auto":
            return "disabled", "auto: wandb is not installed"
        raise ValueError(f"logger.wandb={mode} but wandb is not installed; install it, or use logger.wandb=disabled")
    if mode == "auto":
        mode, asked_by = os.environ.get("WANDB_MODE"), "WANDB_MODE"
        if mode and mode not in WANDB_MODES[1:]:
            raise ValueError(f"WANDB_MODE={mode} is not one of {', '.join(WANDB_MODES[1:])}; use logger.wandb=offline")
        if not mode:
            mode, asked_by = _setting("mode"), "wandb's settings: mode"
            mode = mode if mode in ("offline", "disabled") else None
        if not mode:
            obstacle = _silence_of_server() if _has_wandb_login() else "no login was found"
            return ("offline", f"auto: {obstacle}") if obstacle else ("online", "auto: a login was found")
    if mode == "online":
        obstacle = _silence_of_server() if _has_wandb_login() else "no login was found (`wandb login`)"
        if obstacle:
            raise ValueError(f"{asked_by}=online but {obstacle}; use logger.wandb=offline and `wandb sync` later")
    return mode, f"{asked_by}={mode}"


def _setting(name: str) -> str | None:
    """What `wandb login --host`, `wandb offline` or `wandb disabled` wrote: for this folder, else for the user."""
    files = configparser.ConfigParser(interpolation=None)
    folder = os.environ.get("WANDB_CONFIG_DIR") or os.path.join(os.path.expanduser("~"), ".config", "wandb")
    try:
        files.read([os.path.join(folder, "settings"), os.path.join("wandb", "settings")])
    except (configparser.Error, OSError, ValueError):  # wandb says what is wrong with them
        return None
    return files.get("default", name, fallback=None)


def _server() -> str:
    return os.environ.get("WANDB_BASE_URL") or _setting("base_url") or WANDB_URL


def _has_wandb_login() -> bool:
    """Whether there is a key, without the network: in the environment, or the netrc file that `wandb login` writes."""
    from requests.utils import get_netrc_auth  # it looks where wandb does

    try:
        return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(_server()))
    except ValueError:  # the server's address is not valid
        return False


def _silence_of_server() -> str | None:
    """Why wandb's server cannot be used, or None. wandb itself would try for half a minute."""
    url = _server()
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
    recorded: int = 0,
) -> tuple[Any, str, int]:
    """Start a wandb run, without prompts or long waits; returns (the run or None, a sentence, steps not to send).

    It records settings and commit of `description`. Its own use of git is off: a remote's address may name its user.
    Offline, a resumed run's folder begins with step 1 and replaces the earlier folders. If `wandb sync` or an online
    run has sent those, it begins after their last step instead: the server keeps what it has and appends.

    recorded: the last step that the run has recorded, whatever it resumes from.

    ValueError if wandb was requested by name and does not start.
    """
    if mode == "disabled":
        return None, f"wandb off ({why})", 0
    run_id, sent, unsent = _earlier_lives(run_dir, recorded)
    # else wandb's process would print its own log on the console
    if not os.environ.get("WANDB_CACHE_DIR") and not _can_write_below_home():
        os.environ["WANDB_CACHE_DIR"] = str(run_dir.resolve())
    try:
        import wandb  # half a second, so only where it is used

        folder = run_dir.resolve()
        sweep = sweep_of(folder)
        run = wandb.init(
            project=config.project or os.environ.get("WANDB_PROJECT") or "flashgpt",
            entity=config.entity,
            group=config.group or os.environ.get("WANDB_RUN_GROUP") or (sweep and "/".join(sweep.parts[-2:])),
            tags=config.tags or None,
            name=config.name or os.environ.get("WANDB_NAME") or "/".join(folder.parts[-2:]),
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
        for earlier in unsent:  # the new run repeats what they have, so they must not be synced
            earlier.rename(earlier.with_name(f"superseded-{earlier.name}"))
    except Exception as error:  # it may fail in any way it likes
        reason = f"wandb failed to start ({brief(error)})"
        if config.wandb in ("online", "offline"):
            other = "offline" if config.wandb == "online" else "disabled"
            raise ValueError(
                f"logger.wandb={config.wandb} but {reason}; correct logger, or use logger.wandb={other}"
            ) from error
        return None, f"{reason}; going on without it", 0  # a logger does not stop a run
    note = f"wandb {mode} ({why}), without console output, system metrics and git remote"
    if mode == "offline":
        note += f"; later: {shell_command('wandb', 'sync', str(Path(run.dir).parent))}"
    return run, note, sent if mode == "offline" else 0


def _earlier_lives(run_dir: Path, recorded: int) -> tuple[str, int, list[Path]]:
    """The run's id in wandb, the last step that the server may have, and the offline folders that were not sent to it.

    A folder has one id, so that a resumed run is the same wandb run. Half an id, after a power cut, counts as none. A
    copy of a folder gets an id of its own if the original is still there.
    """
    id_file = run_dir / "wandb_id"
    text = id_file.read_text(errors="surrogateescape") if id_file.exists() else ""
    written = re.fullmatch(r"([\w-]+)(?: (\d+)(?: (.+))?)?", text.strip(), flags=re.ASCII | re.DOTALL)
    if written and written[3] and _is_a_copy(id_file, Path(written[3], id_file.name), written[1]):
        written = None
    run_id, sent = (written[1], int(written[2] or 0)) if written else (secrets.token_hex(4), 0)
    # wandb adds a number to the second of two that begin in one second
    offline = list(run_dir.glob(f"wandb/offline-run-*-{run_id}*"))
    unsent = [folder for folder in offline if not list(folder.glob("*.synced"))]
    lives = [*offline, *run_dir.glob(f"wandb/run-*-{run_id}*")]  # their names tell when each began
    if lives and max(lives, key=lambda folder: folder.name.removeprefix("offline-")) not in unsent:
        sent = recorded
    id_file.write_text(f"{run_id} {sent} {run_dir.resolve()}\n", errors="surrogateescape")
    return run_id, sent, unsent


def _is_a_copy(id_file: Path, first: Path, run_id: str) -> bool:
    """Whether the file in which the id was first written still exists, is another file, and has this id."""
    try:
        return not first.samefile(id_file) and first.read_text(errors="replace").split()[:1] == [run_id]
    except (OSError, ValueError):  # a path that a power cut damaged
        return False


def _can_write_below_home() -> bool:
    """Whether wandb can write its logs to the folder that it uses unless WANDB_CACHE_DIR names another."""
    home = os.environ.get("HOME")
    logs = Path(os.environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache") or "", "wandb", "logs")
    if not logs.is_absolute():
        return False
    try:
        logs.mkdir(parents=True, exist_ok=True)  # as wandb does; what another user's folder permits varies
    except OSError:
        return False
    return os.access(logs, os.W_OK | os.X_OK)


def send(run: Any, record: Mapping[str, Any]) -> None:
    """Log a step to wandb, on its own step axis; wandb drops a step that it already has from before a crash."""
    numbers = {key: math.nan if value is None else value for key, value in named(record).items()}
    run.log(numbers, step=record["step"])


def named(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` under their names in wandb."""
    return {NAMES.get(key, key): value for key, value in values.items()}


def brief(error: Exception) -> str:
    said = shorten(str(error), 200, placeholder="...")  # empty if wandb's service has died
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
