"""`fcp watch`: a run while it trains, from another terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcp_cli.app import app
from fcp_cli.console import human, note, print_json
from fcp_cli.errors import RunError

if TYPE_CHECKING:
    from rich.console import Console

    from fcp_cli.report.watch import RunState, RunTail


@app.command()
def watch(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's folder, or its metrics.jsonl.")],
    every: Annotated[int, typer.Option(min=1, help="Through a pipe: steps between two lines.")] = 10,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the state now and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the state now as one JSON document on stdout.")] = False,
) -> None:
    """Follow a run: loss, tokens/s, measured against planned time, idle time per rank, time left.

    Ends when the run ends. Through a pipe it prints plain lines.
    """
    from fcp_cli.report.watch import RunState, RunTail

    tail, state, console = RunTail(_metrics(run_dir)), RunState(), human()
    if once or json:
        _show_once(tail, state, console, json=json)
        return
    try:
        if console.is_terminal:
            _follow_live(tail, state, console, interval)
        else:
            _follow_lines(tail, state, console, interval, every)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None  # nothing of the watcher's was lost; the run goes on


def _metrics(run_dir: Path) -> Path:
    """The metrics of a run; they need not exist yet where a launch is known."""
    if not run_dir.is_dir():
        if run_dir.is_file():
            return run_dir
        raise RunError(f"there is no run {run_dir}; name the folder that 'fcp launch' printed")
    if not (run_dir / "metrics.jsonl").is_file() and not (run_dir / "launch.json").is_file():
        raise RunError(f"{run_dir} is not the folder of a run: it has neither metrics.jsonl nor launch.json")
    return run_dir / "metrics.jsonl"


def _show_once(tail: RunTail, state: RunState, console: Console, *, json: bool) -> None:
    from fcp_cli.report.watch import run_view

    for record in tail.poll():
        state.feed(record)
    if json:
        print_json(state.to_json())
    elif not state.run:
        raise RunError(f"{tail.path} has no metrics yet")
    else:
        console.print(run_view(state, quiet_seconds=_quiet_seconds(tail), ascii_only=console.options.ascii_only))


def _follow_live(tail: RunTail, state: RunState, console: Console, interval: float) -> None:
    from rich.live import Live

    from fcp_cli.report.watch import run_view

    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            for record in tail.poll():
                state.feed(record)
            quiet = 0.0 if state.finished else _quiet_seconds(tail)
            live.update(run_view(state, quiet_seconds=quiet, ascii_only=console.options.ascii_only), refresh=True)
            if state.finished:
                return
            time.sleep(interval)


def _follow_lines(tail: RunTail, state: RunState, console: Console, interval: float, every: int) -> None:
    from fcp_cli.training.progress import TrainingProgress

    lines = TrainingProgress(console, every=every)
    while True:
        for record in tail.poll():
            state.feed(record)
            lines.feed(record)
        if state.finished:
            return
        if not state.run:
            note(f"waiting for {tail.path}")
            _wait_for(tail.path, interval)
        time.sleep(interval)


def _wait_for(path: Path, interval: float) -> None:
    while not path.is_file() or not path.stat().st_size:
        time.sleep(interval)


def _quiet_seconds(tail: RunTail) -> float:
    """Seconds since the run wrote last."""
    try:
        return max(0.0, time.time() - tail.path.stat().st_mtime)
    except FileNotFoundError:
        return 0.0
