"""`fcp trace`: a plan, a run, or both as a trace for Perfetto."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from fcp_cli.app import app
from fcp_cli.console import note
from fcp_cli.errors import FcpError, RunError, UsageError
from fcp_cli.files import refuse_to_overwrite

if TYPE_CHECKING:
    from fcp_cli.plan.reader import PlanReader
    from fcp_cli.plan.step import StepPlan
    from fcp_cli.report.run_file import RunFile, RunStep
    from fcp_cli.report.trace import Kind


@app.command()
def trace(
    inputs: Annotated[
        list[Path], typer.Argument(metavar="PLAN|RUN.jsonl...", help="A plan, the metrics of a run, or both.")
    ],
    steps: Annotated[str | None, typer.Option(metavar="A:B", help="Only steps A to before B. [default: all]")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace; .gz compresses it, - is stdout.")] = Path(
        "trace.json"
    ),
) -> None:
    """Write a trace for ui.perfetto.dev: a track per rank, an event per micro-batch, arrows between a ring's ranks.

    Given a plan and the run that followed it, planned and measured tracks stand side by side. Times are microseconds.
    """
    from fcp_cli.report.step_range import parse_steps

    refuse_to_overwrite(output, *inputs)
    wanted = parse_steps(steps)
    reader, run = _open(inputs)
    if reader is not None and wanted.start >= reader.metadata.steps:
        raise UsageError(f"{reader.path} has steps 0 to {reader.metadata.steps - 1}, not --steps {steps}")
    count, seconds = _write(output, _Source(reader, run, wanted))
    for problem in run.problems if run is not None else ():
        note(f"warning: {problem}")
    if str(output) != "-":
        note(f"{output}: {count:,} events over {seconds:,.1f} s; open it at https://ui.perfetto.dev")


def _open(inputs: list[Path]) -> tuple[PlanReader | None, RunFile | None]:
    """The plan and the run among what was named; a run that does not fit the plan is said and left out."""
    from fcp_cli.plan.reader import PlanReader
    from fcp_cli.report.run_file import open_run

    plans = [path for path in inputs if _is_parquet(path)]
    runs = [path for path in inputs if path not in plans]
    if len(plans) > 1 or len(runs) > 1:
        raise UsageError("give one plan, the metrics of one run, or one of each")
    reader = PlanReader(plans[0]) if plans else None
    if not runs:
        return reader, None
    try:
        return reader, open_run(runs[0], plan_hash=reader.metadata.plan_hash if reader is not None else None)
    except RunError as error:
        if reader is None:
            raise
        note(f"warning: {error}; the trace shows the plan alone")
        return reader, None


def _is_parquet(path: Path) -> bool:
    """By what it holds, else by its name: a missing plan should be missed as a plan."""
    if not path.is_file():
        return path.suffix == ".parquet"
    with path.open("rb") as file:
        return file.read(4) == b"PAR1" or path.suffix == ".parquet"


class _Source:
    """Pairs planned and measured steps, and makes their events."""

    def __init__(self, reader: PlanReader | None, run: RunFile | None, wanted: range) -> None:
        from fcp_cli.report.trace import TraceBuilder

        self.reader, self.run, self.wanted = reader, run, wanted
        shape = reader.metadata if reader is not None else run
        assert shape is not None
        self.builder = TraceBuilder(num_ranks=shape.num_ranks, ranks_per_node=shape.ranks_per_node)
        self.kinds: list[Kind] = []
        if reader is not None:
            self.kinds.append("planned")
        if run is not None:
            self.kinds.append("measured")

    def description(self) -> dict[str, Any]:
        document: dict[str, Any] = {"format": "fcp-trace/1"}
        if self.reader is not None:
            document |= {"plan": str(self.reader.path), "plan_hash": self.reader.metadata.plan_hash}
        if self.run is not None:
            document |= {"metrics": str(self.run.path), "run": self.run.run}
        return document

    def events(self) -> Iterator[dict[str, Any]]:
        yield from self.builder.names(self.kinds)
        for planned, measured in self._pairs():
            yield from self.builder.step(planned, measured)
        if not self.builder.clock_seconds:
            raise RunError("there are no steps to draw; see --steps, and whether the run has finished one")

    def _pairs(self) -> Iterator[tuple[StepPlan | None, RunStep | None]]:
        measured = self._measured()
        if self.reader is None:
            yield from ((None, step) for step in measured)
            return
        ahead = next(measured, None)
        for planned in self._planned():
            while ahead is not None and ahead.step < planned.step:
                ahead = next(measured, None)
            yield planned, ahead if ahead is not None and ahead.step == planned.step else None
        for _ in measured:
            pass  # to the end of the file: only then is it known what was left out

    def _planned(self) -> Iterator[StepPlan]:
        assert self.reader is not None
        for step in self.reader.steps(self.wanted.start):
            if step.step not in self.wanted:
                return
            yield step

    def _measured(self) -> Iterator[RunStep]:
        return (step for step in (self.run.steps() if self.run is not None else ()) if step.step in self.wanted)


def _write(output: Path, source: _Source) -> tuple[int, float]:
    """Events written, and seconds that the trace covers."""
    import gzip

    from fcp_cli.files import replaced_atomically

    if str(output) == "-":
        return _write_to(sys.stdout, source)
    if not output.parent.is_dir():
        raise FcpError(f"cannot write {output}: there is no folder {output.parent}")
    with replaced_atomically(output) as temporary:
        if output.suffix == ".gz":
            with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=5) as packed:
                return _write_to(packed, source)
        with temporary.open("w", encoding="utf-8") as file:
            return _write_to(file, source)


def _write_to(file: TextIO, source: _Source) -> tuple[int, float]:
    from fcp_cli.report.trace import write_trace

    count = write_trace(file, source.events(), source=source.description())
    return count, source.builder.clock_seconds
