"""What a run records: `metrics.jsonl` and `loss.png` always, console lines, Weights & Biases if it is enabled.

Logging watches the run and never changes it: it draws no random number, and a failing wandb is reported once and
switched off.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data.shards import flush
from training.bad_steps import NumberCheck
from training.checkpoint import Checkpoint
from training.checkpoint_files import without_nan
from training.comparison import forked_from
from training.curves import LossPicture
from training.saver import EXIT_UNSAVED
from training.stop import StopRequest, resume_command
from training.wandb_run import brief, named, send, start_wandb

# what a console line shows of a record, in this order
TRAINING_FORMS = {
    "loss": "loss {:.4f}",
    "lr": "lr {:.2e}",
    "grad_norm": "grad norm {:.2f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "mfu {:.1%}",
    "mfu_full": "({:.1%} full)",
    "peak_memory_gib": "{:.1f} GiB",
}
EVALUATION_FORMS = {
    "val_loss": "validation loss {:.4f}",
    "val_perplexity": "perplexity {:.2f}",
    "val_bits_per_byte": "{:.3f} bits per byte",
}


# other files of a run: in a folder that the user names, they may be the user's own
REPLACED = ("config.yaml", "run.json", "summary.json", "loss.png")


class RunLog:
    """Open with `with`; `metrics` records a step, `say` prints a line above the progress bar.

    settings: the run's; the folder may already hold a run only if they resume one.
    wandb: its mode and why (`wandb_mode`).
    description: the run's, as its checkpoints record it (`Run.description`), with its provenance.
    checkpoint: what the run resumes from, if it resumes.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: Any,
        wandb: tuple[str, str],
        description: Mapping[str, Any],
        checkpoint: Checkpoint | None = None,
    ):
        resume, steps = settings.resume is not None, settings.train.steps
        first_step = checkpoint.step if checkpoint else 0
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.console = Console(highlight=False, markup=False, emoji=False)  # [key] and :key: in a sample are text
        own = checkpoint is not None and checkpoint.is_in(run_dir / "checkpoints")
        expected = checkpoint.meta["metric_lines"] if own else None  # another run's counts the lines of another file
        # if it is not the same run, the folder's files are the user's own, or another run's
        unsaved = checkpoint is None or forked_from(run_dir) == description["settings"]["resume"]
        same_run = resume and (own or (unsaved and (run_dir / "run.json").exists()))
        self._file = MetricsFile(
            run_dir / "metrics.jsonl", first_step, resume=same_run, say=self.say, expected=expected
        )
        others = [f"checkpoints/{path.name}" for path in sorted(run_dir.glob("checkpoints/step_*"))]
        for name in () if same_run else (*REPLACED, *others):
            if os.path.lexists(run_dir / name):
                raise ValueError(
                    f"run folder {run_dir} has a {name}, which a new run would replace; give another hydra.run.dir, or "
                    "go on with the run that wrote it (resume=auto)"
                )
        self.picture = LossPicture(run_dir, self.say)
        self._description, self._first_step, self._steps = description, first_step, steps
        self._paced_from: tuple[int, float] | None = None  # step and time of the first line, before which it compiled
        self._wandb, self.wandb_note, self._sent = start_wandb(
            run_dir, settings.logger, *wandb, description, resume=resume, recorded=self._file.last
        )
        self._send(*self._file.before())  # what a killed process had not sent
        # an invisible bar would still lock, copy and time itself at every step
        self._bar = _progress_bar(self.console, first_step, steps) if self.console.is_terminal else None

    def __enter__(self) -> "RunLog":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._file.close()
        self._with_wandb(lambda run: run.finish(exit_code=0 if exc_info[0] is None else 1))

    @property
    def lines(self) -> int:
        """Number of lines of `metrics.jsonl` so far, including those that a full disk refuses."""
        return self._file.lines

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def describe(self, manifest: Mapping[str, Any], protocol: Mapping[str, int]) -> None:
        """Write the run's `config.yaml` (every setting, resolved) and `run.json` (provenance, data by its `manifest`,
        evaluation by its `protocol`). Those of the lines before stay until there is a new line."""
        known = {key: self._description[key] for key in ("provenance", "left_open")}
        known |= {"data": manifest, "evaluation": protocol}
        contents = {  # in this order: run.json alone marks a run that was killed here
            "run.json": json.dumps(known, indent=2) + "\n",
            "config.yaml": yaml.safe_dump(self._description["settings"], sort_keys=False),
        }
        for name, content in contents.items():  # a run that was killed before its first checkpoint resumes from them
            if self._file.last and (self.run_dir / name).exists():
                self._file.described[name] = content
            else:
                _write_whole(self.run_dir / name, content)

    def advance(self, step: int) -> None:
        """Move the bar to `step` steps done; without a terminal, do nothing."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """Record `values` at `step` steps done; None means not known here and is left out."""
        known = {key: value for key, value in values.items() if value is not None}
        self._file.append(step, known)
        self._send({"step": step, **known})
        for forms in (TRAINING_FORMS, EVALUATION_FORMS):
            if line := "  ".join(form.format(known[key]) for key, form in forms.items() if key in known):
                self.say(f"step {step:>6}  {line}" + (self._time(step, known) if forms is TRAINING_FORMS else ""))
        if "val_loss" in known and step < self._steps:  # after the last step `finish` draws
            self.picture.draw()

    def _time(self, step: int, known: Mapping[str, Any]) -> str:
        """The run's time so far, and what remains at the pace since this process's first line."""
        if "seconds" not in known:
            return ""
        elapsed, now = f"  elapsed {_clock(known['seconds'])}", time.perf_counter()
        if self._paced_from is None:
            self._paced_from = step, now
            return elapsed
        began_at, began = self._paced_from
        return f"{elapsed}  ETA {_clock((now - began) / (step - began_at) * (self._steps - step))}"

    def finish(
        self, results: Mapping[str, Any], check: NumberCheck, stop: StopRequest | None, checkpoint: Path | None,
        unsaved: OSError | ValueError | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Write `summary.json`, log it to wandb, print the run's last lines, return the summary.

        results: "steps", "seconds" and whatever else is known; its evaluation, unless the run was stopped.
        stop: why it was stopped. checkpoint: the last one saved. unsaved: why its end was not saved.
        """
        summary = {
            **without_nan(results),
            "bad_steps": check.bad_steps,
            "loss_spikes": check.spikes,
            "stopped": stop.reason if stop else None,
            "unsaved": str(unsaved) if unsaved else None,
            "exit_code": EXIT_UNSAVED if unsaved else stop.exit_code if stop else 0,
            "checkpoint": str(checkpoint) if checkpoint else None,
        }
        idle = stop is None and self._first_step == results["steps"] < self._file.last  # the later lines' files stay
        try:
            if not idle:
                self._file.flush()
                _write_whole(self.run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            self.say(f"not written: {self.run_dir / 'summary.json'}: {error}")
        # to send a None wandb imports pandas, which takes a second
        texts = {key: summary[key] or "" for key in ("stopped", "unsaved", "checkpoint")}
        self._with_wandb(lambda run: run.summary.update(named(summary) | texts))
        if self.lines:  # a run that stopped before its first line has nothing to draw
            self.picture.draw(last=True)
        if stop and checkpoint is None:
            self.say(f"stopped by {stop.reason}; nothing was saved to go on from: begin anew, with its cause mended")
        elif stop:
            self.say(f"stopped by {stop.reason}; {stop.purpose}:\n  {resume_command(self.run_dir, *stop.overrides)}")
        else:
            self.say(
                f"validation loss {results['val_loss']:.4f} ({results['val_bits_per_byte']:.3f} bits per byte); "
                f"a unigram model of the same text: {results['unigram_val_loss']:.4f}"
            )
        self.say(f"{results['steps']} steps in {results['seconds']:.0f} s; everything is in {self.run_dir}")
        if self.picture.drawn:
            self.say(f"the curves are in {self.picture.path}")
        return summary

    def _send(self, *records: dict[str, Any]) -> None:
        unsent = [record for record in records if record["step"] > self._sent]
        self._with_wandb(lambda run: [send(run, record) for record in unsent])

    def _with_wandb(self, call: Callable[[Any], Any]) -> None:
        if self._wandb is None:
            return
        try:
            call(self._wandb)
        except Exception as error:  # wandb may fail in any way it likes; the run goes on without it
            self._wandb = None
            self.say(f"wandb failed ({brief(error)}); the run goes on without it")


class MetricsFile:
    """One JSON object a line, each step once, whole lines only, whatever happens to disk or run.

    Lines that a full disk refuses are kept in memory and written when there is room again; a line says when writing
    fails and when it works again. Lines past `first_step` were written after the checkpoint that is resumed: they are
    dropped with the first new line, so a run that does not get there changes nothing.

    expected: lines that the file had up to `first_step` when that was saved; missing ones are reported. Extra ones
        are an earlier process's, which went further: a later one was killed between its checkpoint and first line.

    Raises:
        ValueError: the file exists and the run is a new one, or it is damaged.
    """

    def __init__(
        self, path: Path, first_step: int, *, resume: bool, say: Callable[[str], None], expected: int | None = None
    ) -> None:
        if path.exists() and not resume:
            raise ValueError(
                f"run folder {path.parent} already holds a run; give another hydra.run.dir, or resume=auto"
            )
        self.path, self._say = path, say
        self._waiting: list[str] = []
        self.described: dict[str, str] = {}  # files beside it that are written with the first new line
        self._failed = False
        found = _lines(path) if path.exists() else []
        self.last = max((step for step, _ in found), default=0)
        self._kept = [line for step, line in found if step <= first_step][:expected]  # until the rest is cut
        self.lines = len(self._kept)
        self._file: FileIO | None = None
        if expected is not None and self.lines < expected:
            say(
                f"metrics    {path} has lost {expected - self.lines} of its {expected} lines up to step {first_step} "
                "(a power cut, an edit, or another branch of the run); it goes on without them"
            )

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        self._waiting.append(json.dumps({"step": step, **without_nan(values)}) + "\n")
        self.lines += 1
        self.flush()

    def before(self) -> list[dict[str, Any]]:
        """The records up to `first_step`: each has "step"; None stands for what was not finite."""
        return [json.loads(line) for line in self._kept]

    def close(self) -> None:
        if self._failed:
            self.flush()
        if self._waiting:
            self._say(f"not written: the last {len(self._waiting)} lines of {self.path}")
        if self._file is not None:
            self._file.close()

    def flush(self) -> None:
        """Write the waiting lines; the first time, drop those past the checkpoint."""
        try:
            if self._file is None:
                self._file = self._cut()
            end = os.fstat(self._file.fileno()).st_size
            content = memoryview("".join(self._waiting).encode())
            try:
                while content:
                    content = content[self._file.write(content) :]
            except OSError:
                self._file.truncate(end)  # no half lines
                raise
        except OSError as error:
            if not self._failed:
                self._say(f"not written: {self.path}: {error}; its lines wait in memory, the run goes on; free space")
            self._failed = True
            return
        self._waiting.clear()
        if self._failed:
            self._say(f"written again: {self.path}")
        self._failed = False

    def _cut(self) -> FileIO:
        """Return the file, cut to the lines that are kept and open for appending."""
        with suppress(OSError):  # the previous process's, which ended at another step; no reason to lose these lines
            self.path.with_name("summary.json").unlink()
        for name, content in self.described.items() if self._waiting else ():
            _write_whole(self.path.with_name(name), content)
        if self.path.exists():
            _write_whole(self.path, "".join(line + "\n" for line in self._kept))
        file = self.path.open("ab", buffering=0)
        self._kept = []  # only now: if it does not open, this is done again
        return file


def _lines(path: Path) -> list[tuple[int, str]]:
    """(step, line) of each. A last line without an end was being written when the machine stopped: it is dropped."""
    *lines, _ = path.read_bytes().split(b"\n")
    try:
        return [(int(json.loads(line)["step"]), line.decode()) for line in lines]
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{path} is damaged ({error}); move it away to resume without the earlier metrics") from error


def _clock(seconds: float) -> str:
    """m:ss, or h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _progress_bar(console: Console, first_step: int, steps: int) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps  elapsed"), TimeElapsedColumn(), TextColumn("ETA"))
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    bar.add_task("", total=steps, completed=first_step)
    return bar


def _write_whole(path: Path, content: str) -> None:
    """Write a file whole or not at all: a run with half a file could not be compared or exported."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(content)
        flush(temporary)  # or a power cut may leave the new name without its content
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
