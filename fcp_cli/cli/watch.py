"""`fcp watch`: a run while it trains, from another terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcp_cli.cli.command import takes
from fcp_cli.errors import RunError
from fcp_cli.util.console import note, print_json, print_result, results
from fcp_cli.util.kinds import another_kind
from fcp_cli.util.options import MOST_WAIT, Arg, Opt
from fcp_cli.util.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from fcp_cli.report.watch import RunState, Standing
    from fcp_cli.runs.metrics import MetricsRecord
    from fcp_cli.runs.metrics_reader import MetricsTail


@takes("fcp watch", "fcp watch runs/qwen3-tiny-001 --once")
def watch(
    *,
    run_dir: Annotated[
        Path | None, Arg("The run's folder, or its metrics.jsonl.", unset="the run that was launched last")
    ] = None,
    every: Annotated[int, Opt("Steps between lines, if the output is piped.", min=1)] = 1,
    interval: Annotated[float, Opt("Seconds between updates.", min=0.1, max=MOST_WAIT, metavar="SECONDS")] = 1.0,
    once: Annotated[bool, Opt("Show the current state and exit.")] = False,
    json: Annotated[bool, Opt("Print the current state as one JSON document on stdout.")] = False,
) -> None:
    """Follow a run: loss, tokens/s, step time against plan, idle time.

    Ends when the run ends: exit status 0 if it finished, 1 if it was interrupted, failed, or died.
    If the output is piped, it prints plain lines.
    """
    from fcp_cli.report.watch import WINDOW_STEPS, RunState
    from fcp_cli.runs.metrics_reader import MetricsTail

    run_dir = run_dir or _latest()
    console = results()
    watched = _Watched(
        tail=MetricsTail(_metrics(run_dir), joins_with=WINDOW_STEPS),
        state=RunState(),
        ascii_only=console.options.ascii_only,
    )
    if once or json:
        _show_once(watched, console, json=json)
        return
    try:
        if console.is_terminal:
            _follow_live(watched, console, interval)
        else:
            _follow_lines(watched, console, interval, every)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None  # no message: only the watcher ends, not the run
    watched.note_damage()
    if watched.standing != "finished":
        raise RunError(f"{run_dir}: {watched.remark()}")
    _note_finished(watched)


def _latest() -> Path:
    """Return the most recently launched run below `runs`, and print its name."""
    from fcp_cli.runs.run_dir import RUNS

    launches = RUNS.glob("*/launch.json")
    newest = max(launches, key=lambda path: (path.lstat().st_mtime_ns, path.parent.name), default=None)
    if newest is None:
        raise RunError(f"found no run in {RUNS}; name the folder that 'fcp launch' printed")
    note(f"assumed RUN_DIR = {newest.parent} (launched last)")
    return newest.parent


def _metrics(run_dir: Path) -> Path:
    """Return the path of a run's metrics, which need not exist yet if the launch is known."""
    if not run_dir.is_dir():
        if mistaken := another_kind(run_dir, "metrics"):
            raise RunError(mistaken)
        if run_dir.is_file():
            return run_dir
        raise RunError(f"there is no run {run_dir}; name the folder that 'fcp launch' printed")
    if not (run_dir / "metrics.jsonl").is_file() and not (run_dir / "launch.json").is_file():
        raise RunError(f"{run_dir} is not the folder of a run: it has neither metrics.jsonl nor launch.json")
    return run_dir / "metrics.jsonl"


@dataclass(kw_only=True)
class _Watched:
    """A run and its state as of the last `update`."""

    tail: MetricsTail
    state: RunState
    ascii_only: bool
    quiet_seconds: float = field(init=False, default=0.0)
    _damaged: int = field(init=False, default=0)

    def update(self, show: Callable[[MetricsRecord], None] = lambda record: None) -> Standing:
        """Read new records, passing each to `show`, and return the standing of the run.

        The owner is read first: if the run had ended by then, the records read after it are complete.
        """
        from fcp_cli.runs.owner import read_owner
        from fcp_cli.runs.run_dir import RunPaths

        paths = RunPaths(run_dir=self.tail.path.parent)
        self.owner = read_owner(paths.owner_of(0))
        for record in self.tail.poll():
            self.state.feed(record)
            show(record)
        self.quiet_seconds = _quiet_seconds(self.tail.path, paths.launch)
        self.standing = self.state.standing(self.owner, quiet_seconds=self.quiet_seconds)
        return self.standing

    def note_damage(self) -> None:
        """Print a warning if damaged lines of the metrics were skipped since the last call."""
        if self.tail.damaged > self._damaged:
            self._damaged = self.tail.damaged
            note(f"warning: {self.tail.path}: {counted(self._damaged, 'line')} damaged; skipped")

    def remark(self) -> str | None:
        return self.state.remark(self.standing, self.owner, quiet_seconds=self.quiet_seconds)


def _show_once(watched: _Watched, console: Console, *, json: bool) -> None:
    from fcp_cli.report.watch import run_view

    standing = watched.update()
    watched.note_damage()
    if json:
        print_json(watched.state.to_json(standing))
        return
    if watched.state.run is None and standing == "running":
        raise RunError(f"{watched.tail.path} has no metrics yet")
    console.print(run_view(watched.state, watched.remark(), ascii_only=watched.ascii_only))
    if standing == "finished":
        _note_finished(watched)


def _note_finished(watched: _Watched) -> None:
    """Print the totals of a finished run, summed over all starts."""
    from fcp_cli.runs.metrics_reader import summary_of

    print_result(f"finished: {summary_of(watched.tail.path).line()}")


def _follow_live(watched: _Watched, console: Console, interval: float) -> None:
    from rich.live import Live

    from fcp_cli.report.watch import run_view

    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            standing = watched.update()
            remark = watched.remark() if standing == "running" else None  # the end of a run is reported below the view
            live.update(run_view(watched.state, remark, ascii_only=watched.ascii_only), refresh=True)
            if standing != "running":
                return
            time.sleep(interval)


def _follow_lines(watched: _Watched, console: Console, interval: float, every: int) -> None:
    from fcp_cli.training.progress import TrainingProgress

    lines, waits = TrainingProgress(console, every=every), False
    while watched.update(lines.feed) == "running":
        watched.note_damage()
        if watched.state.run is None and not waits:
            note(f"waiting for {watched.tail.path}")
            waits = True
        time.sleep(interval)


def _quiet_seconds(*paths: Path) -> float:
    """Return the seconds since the last write to the first of the files that exists."""
    for path in paths:
        if path.is_file():
            return max(0.0, time.time() - path.stat().st_mtime)
    return 0.0
