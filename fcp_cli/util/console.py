"""Output routing: results (tables, lines or the JSON document) to stdout, everything else to stderr.

"Everything else" is progress, assumptions, warnings, errors, and written file names. So `fcp plan > file` keeps the
summary, and a command that writes a file's content (`-o -`) or JSON to stdout prints no table there.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final

from fcp_cli.util.words import duration, one_line, short_count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table


_LEAST_COLUMNS: Final = 40  # narrower tables would truncate numbers


@dataclass(slots=True)
class Verbosity:
    """Verbosity level, set once by the root command: -q is -1, -v is 1."""

    level: int = 0


verbosity = Verbosity()


def human() -> Console:
    """Return the console for progress and notes: stderr."""
    from rich.console import Console

    return Console(stderr=True, quiet=verbosity.level < 0, highlight=False)


def results() -> Console:
    """Return the console for results: stdout."""
    from rich.console import Console

    class Results(Console):
        def on_broken_pipe(self) -> None:
            raise

    return Results(quiet=verbosity.level < 0, highlight=False)


def open_closed_streams() -> None:
    """Open standard streams that are closed (`>&-`) on the null device.

    Python sets them to None, and the first file that is opened would get their number and what others print.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def settle_terminal_size(environment: MutableMapping[str, str]) -> None:
    """Drop invalid COLUMNS and LINES, and enforce a minimum: libraries print nothing into 0 columns."""
    for name, least in (("COLUMNS", _LEAST_COLUMNS), ("LINES", 1)):
        value = environment.get(name, "")
        if not value.isdecimal() or len(value) > 5 or not int(value):
            environment.pop(name, None)
        elif int(value) < least:
            environment[name] = str(least)


def new_table(*columns: str, left: Collection[int] = (0,), **settings: Any) -> Table:
    """Return a table with headings; columns at the positions `left` are text, others numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(**{"box": SIMPLE_HEAD, "pad_edge": False, **settings})
    for position, column in enumerate(columns):
        is_text = position > 0 and position in left  # only sentences wrap, not names or numbers
        table.add_column(column, justify="left" if position in left else "right", no_wrap=not is_text)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table with columns of falling importance: columns that do not fit are dropped, none is truncated."""
    wide = console.options.update(max_width=1 << 16)
    for column in table.columns:
        column.no_wrap = True
    while len(table.columns) > 2 and table.__rich_measure__(console, wide).maximum > console.width:
        table.columns.pop()
    console.print(table)


def bar(share: float, columns: int, *, ascii_only: bool = False) -> str:
    """Return a bar of at most `columns` cells, in eighths of a cell; any nonzero share is visible."""
    share = max(0.0, min(share, 1.0))
    eighths = max(round(share * columns * 8), 1 if share > 0 else 0)
    if ascii_only:
        return "#" * -(-eighths // 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def print_result(message: str) -> None:
    """Print a result line on stdout; silent under -q."""
    results().print(one_line(message), markup=False, soft_wrap=True)


def note(message: str) -> None:
    """Print a line about an assumption or choice; silent under -q."""
    human().print(one_line(message), markup=False, soft_wrap=True)


def print_always(message: str) -> None:
    """Print a line that belongs to a prompt, even under -q."""
    console = human()
    console.quiet = False
    console.print(one_line(message), markup=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Print an error line on stderr, even under -q."""
    from rich.text import Text

    console = human()
    console.quiet = False
    # In a single write: ranks and nodes of a job share a terminal.
    console.print(Text.assemble(("error:", "bold red"), f" {one_line(message)}"), soft_wrap=True)


def print_json(document: Mapping[str, Any]) -> None:
    """Print the `--json` document on stdout; NaN and infinity become null."""
    try:
        text = json.dumps(document, indent=2, allow_nan=False)
    except ValueError:
        text = json.dumps(_without_nan(document), indent=2, allow_nan=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_TELL_SECONDS: Final = 10.0
_TOLD: Final = 4  # assumptions that a reader of a terminal is told
_TOLD_FIRST: Final = ("--model", "--cluster", "recipe", "--tokens-per-rank")


def progress(*, transient: bool = True) -> Progress:
    """Return a progress bar on stderr; through a pipe, a line every 10 s; nothing under -q."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            rate = task.finished_speed or task.speed
            return Text("" if rate is None else f"{short_count(rate)}/s")

    class Lines(Progress):
        """Tells from a thread what the unfinished tasks have done: also while none of them advances."""

        def start(self) -> None:
            self._ended = Event()
            Thread(target=self._tell, name="progress", daemon=True).start()

        def stop(self) -> None:
            self._ended.set()

        def _tell(self) -> None:
            while not self._ended.wait(_TELL_SECONDS):
                for task in self.tasks:
                    if not task.finished:
                        done = "" if task.total is None else f": {task.completed:,.0f} of {task.total:,.0f}"
                        note(f"{task.description}{done}, {duration(task.get_time() - (task.start_time or 0.0))}")

    console = human()
    if not console.is_terminal:
        return (Lines if verbosity.level >= 0 else Progress)(disable=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(),
        console=console,
        transient=transient,
        disable=verbosity.level < 0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """Collects assumptions and warnings of a command, for printing."""

    assumed: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def assume(self, name: str, value: object, reason: str) -> None:
        self.assumed[name] = f"{value} ({reason})"

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def report(self) -> None:
        for message in self.warnings:
            note(f"warning: {message}")
        told = list(self.assumed)
        console = human()
        if console.is_terminal and verbosity.level == 0 and len(told) > _TOLD:  # a log has them all
            told = sorted(told, key=lambda name: name not in _TOLD_FIRST)[:_TOLD]
        for name in told:
            line = one_line(f"assumed {name} = {self.assumed[name]}")
            console.print(line, markup=False, soft_wrap=not console.is_terminal)
        if len(told) < len(self.assumed):
            note(f"assumed {len(self.assumed) - len(told)} more settings; -v names them")
