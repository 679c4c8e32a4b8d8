"""The frame of every benchmark: rows of figures as a table, files with their provenance, a picture, a last line.

A benchmark makes `Report(name, folder, hardware)`, calls `add` for each row, and `finish`. A row is a dictionary; one
with a key `error` says in a few words why it has no figures. A row is in the folder's file once it is added.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from string import Formatter
from textwrap import shorten
from typing import Any

import torch
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.table import Table as ConsoleTable
from rich.text import Text

from conf.mistakes import fail
from kernels.device import HAS_TRITON, interpreting
from training.checkpoint_files import without_nan
from training.curves import picture
from training.hardware import Hardware, HardwareConfig, set_up
from training.provenance import provenance

Row = dict[str, Any]
Columns = dict[str, str]  # heading -> what a row has there, as a format string over the row's keys

# an attention has the same colour in every picture; lines of other things take OTHER_COLOURS in turn
COLOURS = {
    "naive": "black", "flash": "C0", "sdpa_flash": "C1", "sdpa_cudnn": "C2", "flex": "C5",
    "flash4": "C3", "flash4_deterministic": "C4", "tiled": "C6", "sdpa": "C8",
}  # fmt: skip
OTHER_COLOURS = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#666666")
LARGEST = 2**24  # that a typed number may be, so that products of several stay finite
STYLES = ("-", "--", ":", "-.")  # of lines of one colour


def colour(attention: str, number: int) -> str:
    """The colour of `attention`; of a line that is no attention, by its `number` in the picture."""
    return COLOURS.get(attention, OTHER_COLOURS[number % len(OTHER_COLOURS)])


def refuse_unknown(group: str, config: Any, **known: Iterable[Any]) -> None:
    """Raise ValueError where a value of `config`, alone or in a list, is not among the known ones of its field, or is
    twice in its list; None is allowed.

    group: what a user types before the names: "bench.", or "" for keys without a group.
    """
    for name, allowed in known.items():
        found = getattr(config, name)
        values = found if isinstance(found, list) else [found]
        for value in values:
            if value is not None and value not in allowed:
                raise ValueError(f"{group}{name}={value} is not one of {', '.join(map(str, allowed))}")
            if values.count(value) > 1:
                raise ValueError(f"{group}{name} has {value} twice; name each once")


def refuse_out_of_range(group: str, config: Any, *names: str) -> None:
    """Raise ValueError where a number of `config`, alone or in a list, is below 1 or above LARGEST; None is allowed.

    group: as for `refuse_unknown`.
    """
    for name in names:
        value = getattr(config, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not number >= 1:
                raise ValueError(f"{group}{name}={value} must be at least 1")
            if number is not None and number > LARGEST:
                raise ValueError(f"{group}{name}={value} must be at most {LARGEST}")


def refuse_without_gpu(what: str, hardware: HardwareConfig, smoke: str, *, needs: str = "an NVIDIA GPU") -> None:
    """Raise ValueError where a benchmark's default sizes, a GPU's, would run on a CPU for hours and show nothing.

    With TRITON_INTERPRET=1 it is a smoke test and may run. Call this before `set_up` and before any process is started.

    what: what is measured, in words that begin a sentence. smoke: arguments with which a smoke test takes seconds.
    """
    has_gpu = torch.cuda.is_available()
    if interpreting() or (has_gpu and hardware.device not in ("cpu", "mps")):
        return
    found, remedy = "PyTorch sees none", "use another machine"
    if has_gpu:
        found, remedy = f"hardware.device={hardware.device} is none", "leave it out"
    smoke_test = f", or for a smoke test TRITON_INTERPRET=1 with {smoke}" if HAS_TRITON else ""
    raise ValueError(f"{what} is measured on {needs} and {found}; {remedy}{smoke_test}")


def set_up_gpu(what: str, config: HardwareConfig, smoke: str) -> Hardware:
    """`set_up` for a benchmark that runs in this process, `not_compiled`, with `refuse_without_gpu` before it."""
    refuse_without_gpu(what, config, smoke)
    return set_up(not_compiled(config))


def not_compiled(config: HardwareConfig) -> HardwareConfig:
    """Return `config` with compile=False, for a benchmark that compiles nothing of ours. Raises ValueError for true."""
    if config.compile:
        raise ValueError("hardware.compile=true: nothing of ours is compiled here; leave it out")
    return replace(config, compile=False)


@dataclass
class Table:
    """Lines of text cells, of which the first `named` are names and stand on the left.

    On a console that is too narrow, the figures that do not fit follow below, with the names beside them again.
    """

    named: int
    headings: list[str]
    lines: list[list[str]]
    title: str = ""
    caption: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[ConsoleTable | Text]:
        widths = [max(map(cell_len, column)) + 2 for column in zip(self.headings, *self.lines, strict=True)]
        room = options.max_width - 1 - sum(widths[: self.named])
        begin, title = self.named, self.title
        for end in range(self.named, len(widths)):
            if end > begin and sum(widths[begin : end + 1]) > room:
                yield self._part(begin, end, title)
                begin, title = end, ""
        yield self._part(begin, len(widths), title)
        if self.caption:
            yield Text(self.caption)

    def _part(self, begin: int, end: int, title: str) -> ConsoleTable:
        """The names, and the figures from `begin` up to `end`."""
        shown = ConsoleTable(title=title or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        places = [*range(self.named), *range(begin, end)]
        for place in places:
            justify = "left" if place < self.named else "right"
            shown.add_column(escape(self.headings[place]), justify=justify, overflow="fold")
        for cells in self.lines:
            shown.add_row(*(escape(cells[place]) for place in places))
        return shown

    def markdown(self) -> str:
        rule = ["---"] * self.named + ["---:"] * (len(self.headings) - self.named)
        lines = "\n".join("| " + " | ".join(cells) + " |" for cells in (self.headings, rule, *self.lines))
        return "\n\n".join(part for part in (self.title, lines, self.caption) if part)


def table(rows: Iterable[Row], names: Columns, figures: Columns, title: str = "", caption: str = "") -> Table:
    """A line for each row: the columns `names`, then those of `figures` that at least one row has."""
    rows = list(rows)
    figures = {h: form for h, form in figures.items() if any(cell(form, row) != "-" for row in rows)} or figures
    lines = []
    for row in rows:
        if row.get("error"):
            shown = [shorten(row["error"], 60, placeholder=" ..."), *[""] * (len(figures) - 1)]
        else:
            shown = [cell(form, row) for form in figures.values()]
        lines.append([cell(form, row) for form in names.values()] + shown)
    return Table(len(names), [*names, *figures], lines, title, caption)


def pivot(rows: Iterable[Row], names: Columns, across: str, figure: str, title: str = "", caption: str = "") -> Table:
    """A line for each value of `names`, a column for each value of `across`, and `figure` in the cells."""
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault(tuple(cell(form, row) for form in names.values()), {})
        line[cell(across, row)] = row.get("error") or cell(figure, row)
    columns = list(dict.fromkeys(column for line in lines.values() for column in line))
    shown = [[*name, *(line.get(column, "-") for column in columns)] for name, line in lines.items()]
    return Table(len(names), [*names, *columns], shown, title, caption)


class _Cell(Formatter):
    """`str.format` of a row, with "-" in place of what the row does not have."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except LookupError:
            return None, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return "-" if value is None else super().format_field(value, format_spec)


def cell(form: str, row: Row) -> str:
    return _Cell().vformat(form, (), row)


@dataclass
class Report:
    """What a benchmark found.

    Attributes:
        name: of its files in `folder`: <name>.json, <name>.md, and pictures.
        hardware: where it ran, in words.
        more: facts beside the rows, which go into the JSON.
    """

    name: str
    folder: Path
    hardware: str
    rows: list[Row] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def origin(self) -> dict[str, Any]:
        driver = next((gpu["driver_version"] for gpu in installed_gpus()), None)
        libraries = {"driver": driver, "cudnn": torch.backends.cudnn.version()}
        return {"hardware": self.hardware, "provenance": provenance() | libraries}

    def add(self, *rows: Row) -> None:
        """Add what was measured and write it to the file, so that it outlives a benchmark that is stopped.

        A terminal gets a line, because the tables come at the end.
        """
        self.rows += rows
        if rows:
            self.keep()
            if sys.stderr.isatty():
                what = ", ".join(value for value in rows[-1].values() if isinstance(value, str))
                print(f"{len(self.rows)} measured: {shorten(what, 100)}", file=sys.stderr)

    def keep(self, *, unfinished: bool = True) -> dict[str, Any]:
        """Write what was found so far to the folder's JSON file, and return it."""
        found = without_nan(self.origin | self.more | ({"unfinished": True} if unfinished else {}))
        text = json.dumps(found, indent=2)
        if self.rows:
            found["rows"] = without_nan(self.rows)
            rows = ",\n".join(json.dumps(row) for row in found["rows"])  # a line each
            text = text.removesuffix("\n}") + f',\n  "rows": [\n{rows}\n  ]\n}}'
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{self.name}.json").write_text(text + "\n")
        return found

    def finish(self, *tables: Table, last: dict[str, Any] | None = None, expects_figures: bool = True) -> None:
        """Print the tables, write the files, print one JSON object as the last line: `last`, or all that was found.

        Raises ValueError where there is no row: even what could not be measured has a row, with an `error`. Where all
        rows have an `error` and `expects_figures`, the program exits as for a user's mistake.
        """
        if not self.rows and not any(shown.lines for shown in tables):
            raise ValueError("nothing was measured: a list that says what is empty; name something in it or drop it")
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
        console.print(self.hardware, markup=False)
        for shown in tables:
            console.print(shown)
        found = self.keep(unfinished=False)
        page = [origin_line(found), *(shown.markdown() for shown in tables)]
        (self.folder / f"{self.name}.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
        print(json.dumps(without_nan(last or found) | {"folder": str(self.folder)}), flush=True)
        if expects_figures and self.rows and all(row.get("error") for row in self.rows):
            first, *others = dict.fromkeys(row.get("why") or row["error"] for row in self.rows)
            more = f"; {len(others)} more reasons above" if others else ""
            sys.exit(fail(f"nothing could be measured: {first}{more}"))


def origin_line(report: dict[str, Any]) -> str:
    """Machine, versions, commit and command of a report."""
    source = report["provenance"]
    peers = ("flash-attn-4", "transformers")  # where they are installed
    names = ["torch", "triton", *(name for name in peers if source["versions"].get(name))]
    versions = ", ".join(f"{name} {source['versions'].get(name)}" for name in names)
    libraries = "".join(f", {name} {source[name]}" for name in ("cudnn", "driver") if source.get(name))
    return f"{report['hardware']}; {versions}{libraries}; commit {source['commit']}; `{source['command']}`"


def installed_gpus() -> list[dict[str, str]]:
    """Name and driver of each GPU that NVIDIA's driver lists, seen by PyTorch or not; [] without a driver."""
    keys = ("name", "driver_version")
    command = ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(keys, line.split(", "), strict=True)) for line in lines]


@dataclass(frozen=True)
class Panel:
    """One part of a picture over `seq_len`: which figure of which rows."""

    title: str
    key: str
    of: Callable[[Row], bool] = lambda row: True
    may_be_log: bool = False  # of the y axis, where figures differ by more than ten times


def draw_lengths(path: Path, rows: list[Row], panels: list[Panel], label: Callable[[Row], str], title: str) -> None:
    """Figures against the length of a sequence, a curve a label; a cross at the first length where memory ran out.

    The colour is the row's attention; labels that share one differ in their lines.
    """
    from matplotlib.ticker import NullLocator

    panels = [panel for panel in panels if any(row.get(panel.key) for row in rows)]  # a CPU has no memory to show
    if not panels:  # nothing could be measured; the table says why
        return
    lengths, attention = sorted({row["seq_len"] for row in rows}), {label(row): row["attention"] for row in rows}
    alike = {label: [name for name in attention if attention[name] == attention[label]] for label in attention}
    with picture(path, 1, len(panels), size=(4.8 * len(panels), 4.2), title=title) as all_axes:
        for axes, panel in zip(all_axes, panels, strict=True):
            ends = []
            for number, name in enumerate(attention):
                style = {"color": colour(attention[name], number), "markersize": 4, "label": name}
                style["zorder"] = 3 - number / len(attention)  # the first, ours, is drawn on top
                style["linestyle"] = STYLES[alike[name].index(name) % len(STYLES)]
                part = [row for row in rows if label(row) == name and panel.of(row)]
                done = [(row["seq_len"], row[panel.key]) for row in part if row.get(panel.key)]
                if not done:
                    continue
                axes.plot(*zip(*done, strict=True), marker="o", **style)
                if full := [row["seq_len"] for row in part if row.get("error") == "out of memory"]:
                    ends.append((min(full), done[-1][1], style["color"]))
            for length, height, shade in ends:  # after the curves, so that the legend ends with it
                axes.scatter(length, height, marker="x", color=shade, s=40, label="out of memory")
            is_wide = panel.may_be_log and axes.dataLim.y1 > 10 * axes.dataLim.y0
            height = {"yscale": "log"} if is_wide else {"ylim": (0, 1.1 * axes.dataLim.y1)}
            axes.set(xscale="log", xlabel="N, tokens", **height)
            axes.set_title(panel.title, fontsize=10)
            axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else n for n in lengths], fontsize=8)
            axes.xaxis.set_minor_locator(NullLocator())
            axes.margins(x=0.1, y=0.12)
