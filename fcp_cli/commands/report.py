"""`fcp report`: a plan, and the run that followed it, as one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcp_cli.app import app
from fcp_cli.console import note, progress
from fcp_cli.errors import FcpError, PlanError, RunError

if TYPE_CHECKING:
    from fcp_cli.manifest.table import LengthTable
    from fcp_cli.plan.reader import PlanReader
    from fcp_cli.plan.step import StepPlan
    from fcp_cli.report.page_data import PlanPicture
    from fcp_cli.report.run_file import RunFile
    from fcp_cli.report.run_picture import RunPicture

_SPEEDUP_SEQUENCES = 16_384  # planned anew to find the best static plan
_METRICS_BYTES = 200_000_000  # beyond this only each k-th measured step is read


@app.command()
def report(
    plan: Annotated[Path, typer.Argument(metavar="[PLAN]", help="The plan to show.")] = Path("plan.parquet"),
    metrics: Annotated[
        Path | None, typer.Option(help="metrics.jsonl of a run that followed it, or the run's folder.")
    ] = None,
    manifest: Annotated[
        Path | None, typer.Option(help="The plan's manifest, where it has mask or vision columns.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """Show a plan as one page that opens anywhere: figures, Gantt charts, idle time, lengths, degrees, memory.

    With the metrics of a run also predicted against measured time, drift and the slowest ranks.
    """
    from fcp_cli.files import refuse_to_overwrite, write_text_atomically
    from fcp_cli.manifest.read import read_manifest
    from fcp_cli.plan.reader import PlanReader
    from fcp_cli.report.page import Report, javascript_bundle

    if not output.parent.is_dir():
        raise FcpError(f"cannot write {output}: there is no folder {output.parent}")
    refuse_to_overwrite(output, plan, metrics, manifest)
    reader, table = PlanReader(plan), read_manifest(manifest) if manifest is not None else None
    javascript_bundle()  # before the work: it may be missing
    picture, sample = _look_at_plan(reader)
    run, measured, warnings = _look_at_run(metrics, reader, picture)
    page = Report(
        name=plan.name,
        metadata=reader.metadata,
        plan=picture,
        run=measured,
        run_name=str(run.path) if run is not None else "",
        speedup=_speedup(reader, sample, picture.longest_tokens, table),
        warnings=warnings,
    ).html()
    write_text_atomically(output, page)
    for warning in warnings:
        note(f"warning: {warning}")
    note(f"{output}: {len(page.encode()) / 1e6:.1f} MB, {picture.summary.steps:,} of {reader.metadata.steps:,} steps")


def _look_at_plan(reader: PlanReader) -> tuple[PlanPicture, list[StepPlan]]:
    """The pictures of a plan, and the steps to compare with a static plan."""
    from fcp_cli.report.page_data import PlanPicture, evenly_spaced

    meta = reader.metadata
    if not meta.steps:
        raise PlanError(f"{reader.path} has no steps to show")
    picture, sample = PlanPicture(metadata=meta), []
    compared = max(2, min(32, _SPEEDUP_SEQUENCES // meta.global_batch_size))
    looked_at = -(-meta.steps // picture.every)
    sampled = {i * picture.every for i in evenly_spaced(looked_at, compared)}
    with progress() as bar:
        task = bar.add_task("reading the plan", total=meta.steps)
        for step in reader.steps():
            picture.glance(step)
            if picture.wants(step.step):
                picture.add(step)
            if step.step in sampled:
                sample.append(step)
            bar.advance(task)
    return picture, sample


def _look_at_run(
    metrics: Path | None, reader: PlanReader, picture: PlanPicture
) -> tuple[RunFile | None, RunPicture | None, list[str]]:
    """The run, its pictures, and a line for whatever could not be used."""
    from fcp_cli.report.run_file import open_run
    from fcp_cli.report.run_picture import RunPicture

    if metrics is None:
        return None, None, []
    try:
        run = open_run(metrics, plan_hash=reader.metadata.plan_hash)
    except RunError as error:
        return None, None, [f"{error}; the page shows the plan alone"]
    chosen = frozenset(picture.chosen_steps())
    measured = RunPicture(num_ranks=reader.metadata.num_ranks, chosen=chosen)
    every = max(1, run.path.stat().st_size // _METRICS_BYTES)
    for step in run.steps(every=every):
        measured.add(step)
    warnings = list(run.problems)
    if every > 1:
        warnings.append(f"{run.path} is large: each {every}th measured step is shown")
    return run, measured if measured.steps else None, warnings


def _speedup(reader: PlanReader, sample: list[StepPlan], longest: int, table: LengthTable | None) -> tuple[str, str]:
    """The predicted gain over the best static plan, and its remark."""
    from fcp_cli.planning.baseline import static_speedup
    from fcp_cli.planning.problem import problem_of

    problem = problem_of(reader.metadata, name=str(reader.path))
    found = static_speedup(sample, problem, longest_tokens=longest, manifest=table)
    if found is None:
        return "not known", "times depend on more than lengths: give --manifest"
    speedup, solver = found
    where = "" if len(sample) == reader.metadata.steps else f", on {len(sample)} of {reader.metadata.steps:,} steps"
    return f"{speedup:.2f}x", f"over the best static plan, degree {solver.degree}{where}"
