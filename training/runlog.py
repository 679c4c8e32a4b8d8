"""The run's log: `metrics.jsonl` always, a console line or progress bar, Weights & Biases where it is wanted.

Logging watches the run and never changes it: it draws no random number, and a failing wandb is reported once and
switched off.
"""

import http.client
import json
import math
import netrc
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from training.metrics import MetricsFile

WANDB_MODES = ("auto", "online", "offline", "disabled")
WANDB_URL = "https://api.wandb.ai"
_PATIENCE_SECONDS = 5.0  # for the one question that decides whether wandb's server is within reach

# what a console line shows of a record, in this order
TRAINING_FORMS = {
    "loss": "loss {:.4f}",
    "lr": "lr {:.2e}",
    "grad_norm": "norm {:.2f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "mfu {:.1%}",
    "mfu_full": "({:.1%} full)",
    "peak_memory_gib": "{:.1f} GiB",
}
EVALUATION_FORMS = {
    "val_loss": "held-out loss {:.4f}",
    "val_perplexity": "perplexity {:.2f}",
    "val_bits_per_byte": "{:.3f} bits a byte",
}


@dataclass
class LoggerConfig:
    wandb: str = "auto"  # auto (online where a login is found, else offline) | online | offline | disabled
    project: str = "flashgpt"
    group: str | None = None  # runs to be compared
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.wandb not in WANDB_MODES:
            raise ValueError(f"logger.wandb={self.wandb} is not one of {', '.join(WANDB_MODES)}")


class RunLog:
    """Open with `with`; `metrics` records a step, `say` prints a line above the progress bar."""

    def __init__(
        self,
        run_dir: Path,
        config: LoggerConfig,
        settings: Mapping[str, Any],
        *,
        first_step: int,
        steps: int,
        resumes: bool = False,
        wandb: tuple[str, str] | None = None,  # mode and why, where `wandb_mode` was asked before
    ):
        mode = wandb or wandb_mode(config)  # refuses before anything is written
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.console = Console(highlight=False)
        self._file = MetricsFile(run_dir / "metrics.jsonl", first_step, resumes=resumes, say=self.say)
        self._wandb, self.wandb_note = _start_wandb(run_dir, config, settings, *mode, resumed=resumes)
        if self._wandb:
            # what a process that died had not sent; offline, where nobody knows what was sent, the whole run
            self._guarded(lambda run: [_log(run, record.pop("step"), record) for record in self._file.read()])
        # a bar that nobody sees would still lock, copy and time itself at every step
        self._bar = _progress_bar(self.console, first_step, steps) if self.console.is_terminal else None

    def __enter__(self) -> "RunLog":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._file.close()
        if self._wandb:
            self._guarded(lambda run: run.finish(exit_code=0 if exc_info[0] is None else 1))

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        """Move the bar to `step` steps done; nothing where there is no terminal to show one."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """Record `values` at `step` steps done; None means not known here and is left out."""
        known = {key: value for key, value in values.items() if value is not None}
        self._file.append(step, known)
        if self._wandb:
            self._guarded(lambda run: _log(run, step, known))
        for forms in (TRAINING_FORMS, EVALUATION_FORMS):
            if line := _console_line(known, forms):
                self.say(f"step {step:>6}  {line}")

    def summary(self, values: Mapping[str, Any]) -> None:
        try:
            (self.run_dir / "summary.json").write_text(json.dumps(values, indent=2) + "\n")
        except OSError as error:
            self.say(f"not written: {self.run_dir / 'summary.json'}: {error}")
        if self._wandb:
            self._guarded(lambda run: run.summary.update(dict(values)))

    def _guarded(self, call) -> None:
        try:
            call(self._wandb)
        except Exception as error:  # wandb may fail in any way it likes; the run goes on without it
            self._wandb = None
            self.say(f"wandb failed ({type(error).__name__}: {str(error).splitlines()[0]}); the run goes on without it")


def _progress_bar(console: Console, first_step: int, steps: int) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn(), TextColumn("gone,"))
    bar = Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=console, transient=True)
    bar.add_task("", total=steps, completed=first_step)
    return bar


def _log(run: Any, step: int, values: Mapping[str, Any]) -> None:
    """Hand a step to wandb, on its own step axis; one that it already has from before a crash it drops."""
    numbers = {key: math.nan if value is None else value for key, value in values.items()}
    run.log({"step": step, **numbers}, step=step)


def _console_line(values: Mapping[str, float], forms: Mapping[str, str]) -> str:
    return "  ".join(form.format(values[key]) for key, form in forms.items() if key in values)


def _has_wandb_login() -> bool:
    """Whether a key is at hand, found without the network: the environment, or the netrc file `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", WANDB_URL).split("//")[-1].split("/")[0].split(":")[0]
    files = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    for file in (Path(f).expanduser() for f in files if f):
        try:
            if netrc.netrc(file).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def wandb_mode(config: LoggerConfig) -> tuple[str, str]:
    """(online | offline | disabled, why). Online is only said of a server that has just answered.

    Raises ValueError, one line, where online was asked for by name and cannot be had.
    """
    mode, asked_by = config.wandb, "logger.wandb"
    if mode == "auto":
        mode, asked_by = os.environ.get("WANDB_MODE"), "WANDB_MODE"
        if mode and mode not in WANDB_MODES[1:]:
            raise ValueError(f"WANDB_MODE={mode} is not one of {', '.join(WANDB_MODES[1:])}; unset it")
        if not mode:
            if not _has_wandb_login():
                return "offline", "auto: no login was found"
            if silence := _silence_of_server():
                return "offline", f"auto: {silence}"
            return "online", "auto: a login was found"
    if mode == "online":
        obstacle = _silence_of_server() if _has_wandb_login() else "no login was found (`wandb login`)"
        if obstacle:
            raise ValueError(f"{asked_by}=online but {obstacle}; use logger.wandb=offline and `wandb sync` later")
    return mode, f"{asked_by}={mode}"


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


def _start_wandb(
    run_dir: Path, config: LoggerConfig, settings: Mapping[str, Any], mode: str, why: str, *, resumed: bool
):
    """Start a wandb run that never asks and never waits long; return (run or None, a sentence)."""
    if mode == "disabled":
        return None, "wandb off"
    import wandb  # half a second, so only where it is used

    # one id a run folder, so that a resumed run goes on in the same wandb run
    id_file = run_dir / "wandb_id"
    run_id = (id_file.read_text().strip() if id_file.exists() else "") or secrets.token_hex(4)
    id_file.write_text(run_id + "\n")
    try:
        if resumed and mode == "offline":  # the new folder will hold the whole run: the old ones are not to be synced
            for earlier in run_dir.glob(f"wandb/offline-run-*-{run_id}"):
                earlier.rename(earlier.with_name(f"superseded-{earlier.name}"))
        run = wandb.init(
            project=config.project,
            group=config.group,
            tags=config.tags or None,
            name="/".join(run_dir.resolve().parts[-2:]),
            id=run_id,
            resume="allow" if resumed and mode == "online" else None,
            dir=run_dir,
            mode=mode,
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off", init_timeout=30, x_disable_stats=True),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
    except Exception as error:  # it may fail in any way it likes
        reason = f"wandb failed to start ({type(error).__name__}: {str(error).splitlines()[0]})"
        if config.wandb == "online":
            raise ValueError(f"logger.wandb=online but {reason}; use logger.wandb=offline") from error
        return None, f"{reason}; going on without it"  # as in _guarded: a logger does not stop a run
    note = f"wandb {mode} ({why})"
    if mode == "offline":
        note += f"; later: wandb sync {Path(run.dir).parent}"
    return run, note
