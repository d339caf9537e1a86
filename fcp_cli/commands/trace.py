"""`fcp trace`: a plan, a run, or both as a trace for Perfetto."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from fcp_cli.command_line.command import takes
from fcp_cli.console import note, print_json
from fcp_cli.errors import FcpError, RunError, UsageError
from fcp_cli.files import refuse_to_overwrite
from fcp_cli.options import Arg, Opt
from fcp_cli.words import counted

if TYPE_CHECKING:
    from fcp_cli.plan.step import StepPlan
    from fcp_cli.report.plan_file import PlanFile
    from fcp_cli.report.trace import Kind
    from fcp_cli.runs.metrics.metrics_reader import RunFile, RunStep


@takes(
    "fcp trace plan.parquet",
    "fcp trace plan.parquet runs/tiny/metrics.jsonl --steps 0:9 -o trace.json.gz",
)
def trace(
    *,
    inputs: Annotated[tuple[Path, ...], Arg("A plan, the metrics of a run, or both.", metavar="PLAN|RUN.jsonl")],
    steps: Annotated[str | None, Opt("Only steps A to B - 1.", metavar="A:B", unset="all")] = None,
    output: Annotated[
        Path, Opt("The trace to write; .gz compresses it, - is stdout.", flags=("--output", "-o"), trust="writes")
    ] = Path("trace.json"),
    json: Annotated[bool, Opt("Print the names of the written files as one JSON document.")] = False,
) -> None:
    """Write a trace of a plan or run for ui.perfetto.dev.

    It has a track per rank, an event per micro-batch, and arrows between the ranks of a ring. Plans with pipelines have
    a track per stage, with an event per forward and backward.
    Given a plan and the run that followed it, planned and measured tracks are side by side. Times are microseconds.
    """
    refuse_to_overwrite(output, *inputs)
    wanted = _steps_of(steps)
    if json and str(output) == "-":
        raise UsageError("--json and -o - both want stdout; name a file with -o")
    plan, run, problems = _open(inputs)
    if plan is not None and not (wanted.start < plan.metadata.end_step and wanted.stop > plan.metadata.first_step):
        first, end = plan.metadata.first_step, plan.metadata.end_step
        raise UsageError(f"{plan.path} has steps {first} to {end - 1}, not --steps {steps}")
    source = _Source(plan, run, wanted)
    events = _write(output, source)
    problems += [*(plan.problems if plan is not None else ()), *(run.problems if run is not None else ())]
    if json:
        print_json(_document(output, source, events, problems))
    for problem in problems:
        note(f"warning: {problem}")
    if str(output) != "-":
        seconds = source.builder.clock_seconds
        note(f"{output}: {counted(events, 'event')} over {seconds:,.1f} s; open it at https://ui.perfetto.dev")


def _document(output: Path, source: _Source, events: int, problems: list[str]) -> dict[str, Any]:
    plan, run = source.plan, source.run
    return {
        "trace": str(output),
        "bytes": output.stat().st_size,
        "plan": str(plan.path) if plan is not None else None,
        "metrics": str(run.path) if run is not None else None,
        "plan_hash": plan.metadata.plan_hash if plan is not None else run.run.get("plan_hash") if run else None,
        "steps": source.steps,
        "events": events,
        "seconds": source.builder.clock_seconds,
        "warnings": problems,
    }


def _steps_of(text: str | None) -> range:
    """Parse `A:B` as steps A to B - 1; `A:` and `:B` are open, `A` is one step, None is all."""
    if text is None:
        return range(2**63 - 1)
    first, colon, last = text.partition(":")
    try:
        start = int(first or 0)
        stop = int(last) if last else 2**63 - 1 if colon else start + 1
    except ValueError:
        start, stop = 0, 0
    if start < 0 or stop <= start:
        raise UsageError(f"--steps is {text!r}; write A:B for the steps from A to before B, or one step")
    return range(start, stop)


def _open(inputs: Sequence[Path]) -> tuple[PlanFile | None, RunFile | None, list[str]]:
    """Return the plan, the run, and a line if the run does not fit the plan and is skipped."""
    from fcp_cli.report.plan_file import open_plan
    from fcp_cli.runs.metrics.metrics_reader import open_run

    plans = [path for path in inputs if _is_parquet(path)]
    runs = [path for path in inputs if path not in plans]
    if len(plans) > 1 or len(runs) > 1:
        raise UsageError("give one plan, the metrics of one run, or one of each")
    plan = open_plan(plans[0]) if plans else None
    if not runs:
        return plan, None, []
    try:
        return plan, open_run(runs[0], plan=plan.metadata if plan is not None else None), []
    except RunError as error:
        if plan is None:
            raise
        return plan, None, [f"{error}; the trace shows the plan alone"]


def _is_parquet(path: Path) -> bool:
    """Recognize a plan by its content, else by its name, so that the error for a missing plan says so."""
    if not path.is_file():
        return path.suffix == ".parquet"
    with path.open("rb") as file:
        return file.read(4) == b"PAR1" or path.suffix == ".parquet"


class _Source:
    """Pairs planned and measured steps, and makes their events."""

    def __init__(self, plan: PlanFile | None, run: RunFile | None, wanted: range) -> None:
        from fcp_cli.report.trace import TraceBuilder

        self.plan, self.run, self.wanted, self.steps = plan, run, wanted, 0
        shape = plan.metadata if plan is not None else run
        assert shape is not None
        self.builder = TraceBuilder(
            num_ranks=shape.num_ranks,
            ranks_per_node=shape.ranks_per_node,
            metadata=plan.metadata if plan is not None else None,
        )
        self.kinds: list[Kind] = []
        if plan is not None:
            self.kinds.append("planned")
        if run is not None:
            self.kinds.append("measured")

    def description(self) -> dict[str, Any]:
        document: dict[str, Any] = {"format": "fcp-trace/1"}
        if self.plan is not None:
            document |= {"plan": str(self.plan.path), "plan_hash": self.plan.metadata.plan_hash}
        if self.run is not None:
            document |= {"metrics": str(self.run.path), "run": self.run.run}
        return document

    def events(self) -> Iterator[dict[str, Any]]:
        yield from self.builder.names(self.kinds)
        for planned, measured in self._pairs():
            self.steps += 1
            yield from self.builder.step(planned, measured)
        if not self.builder.clock_seconds:
            if self.plan is not None:
                raise self.plan.nothing_to_show()
            why = "; ".join(self.run.problems) if self.run is not None and self.run.problems else "see --steps"
            raise RunError(f"there are no steps to draw: {why}")

    def _pairs(self) -> Iterator[tuple[StepPlan | None, RunStep | None]]:
        found = self.run.steps() if self.run is not None else ()
        measured = (step for step in found if step.step in self.wanted)
        if self.plan is None:
            yield from ((None, step) for step in measured)
            return
        ahead = next(measured, None)
        for planned in takewhile(lambda step: step.step in self.wanted, self.plan.steps(self.wanted.start)):
            while ahead is not None and ahead.step < planned.step:
                ahead = next(measured, None)
            yield planned, ahead if ahead is not None and ahead.step == planned.step else None
        for _ in measured:
            pass  # to the end of the file: only then the skipped steps are known


def _write(output: Path, source: _Source) -> int:
    """Write the trace and return how many events it has."""
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


def _write_to(file: TextIO, source: _Source) -> int:
    from fcp_cli.report.trace import write_trace

    return write_trace(file, source.events(), source=source.description())
