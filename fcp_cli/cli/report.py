"""`fcp report`: a plan, and the run that followed it, as one page."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fcp_cli.cli.command import takes
from fcp_cli.errors import FcpError, RunError, UsageError
from fcp_cli.util.console import note, print_json, progress
from fcp_cli.util.files import as_word, refuse_to_overwrite, write_text_atomically
from fcp_cli.util.options import Arg, Opt
from fcp_cli.util.words import counted

if TYPE_CHECKING:
    from fcp_cli.manifest.table import LengthTable
    from fcp_cli.plan.step import StepPlan
    from fcp_cli.report.charts import Speedup
    from fcp_cli.report.page_data import PlanPicture, RunPicture
    from fcp_cli.report.plan_tables import PlanFile
    from fcp_cli.runs.metrics_reader import RunFile

_METRICS_BYTES = 200_000_000  # larger metrics are sampled: every k-th measured step


@takes("fcp report", "fcp report runs/qwen3-tiny-001 -o run.html")
def report(
    *,
    plan: Annotated[Path, Arg("The plan to show, or the folder of a run.", metavar="PLAN|RUN_DIR")] = Path(
        "plan.parquet"
    ),
    metrics: Annotated[
        Path | None, Opt("metrics.jsonl of a run that followed the plan, or its folder.", metavar="RUN_DIR")
    ] = None,
    output: Annotated[Path, Opt("The page to write.", flags=("--output", "-o"), trust="writes")] = Path("report.html"),
    manifest: Annotated[
        tuple[Path, ...], Opt("The plan's manifest, if it has mask or vision columns; once per source of a mixture.")
    ] = (),
    json: Annotated[bool, Opt("Print its figures as one JSON document on stdout.")] = False,
) -> None:
    """Show a plan or run as one page: gain, Gantt charts, idle, memory.

    For a run, it also shows the loss, and compares measured with planned times.
    """
    from fcp_cli.report.page import PageContent, javascript_bundle
    from fcp_cli.report.plan_tables import open_plan

    if plan.is_dir():
        if metrics is not None:
            raise UsageError(f"{plan} is a folder of a run, which has its own metrics; drop --metrics")
        metrics = plan
        plan, manifest = _of_a_run(metrics, manifest)
    if not output.parent.is_dir():
        raise FcpError(f"cannot write {output}: there is no folder {output.parent}")
    refuse_to_overwrite(output, plan, metrics, *manifest)
    file = open_plan(plan)
    table = file.manifest(manifest)
    javascript_bundle()  # fail early if it is missing
    picture, sample = _draw_plan(file)
    run, measured, problems = _draw_run(metrics, file, picture)
    page = PageContent(
        metadata=file.metadata,
        plan=picture,
        run=measured,
        run_name=run.path.resolve().parent.name if run is not None else "",
        run_facts=run.run if run is not None else None,
        speedup=_speedup(file, sample, table),
        warnings=[*file.problems, *problems],
    )
    text = page.html()
    write_text_atomically(output, text)
    size = len(text.encode())
    if json:
        written = {"report": str(output), "bytes": size, "plan": str(plan)}
        print_json({**written, "metrics": str(run.path) if run is not None else None, **page.figures()})
    for warning in page.warnings:
        note(f"warning: {warning}")
    note(f"{output}: {size / 1e6:.1f} MB, {picture.summary.steps:,} of {counted(file.metadata.steps, 'step')}")


def _of_a_run(folder: Path, manifest: tuple[Path, ...]) -> tuple[Path, tuple[Path, ...]]:
    """Return the plan of a run and its manifests, which default to those of its launch record."""
    from fcp_cli.runs.run_dir import RunPaths, followed_plan, read_launch

    plan = RunPaths(run_dir=folder).plan
    with suppress(RunError):  # a job that was started without `fcp launch` has no record
        launched = read_launch(folder)
        plan = followed_plan(folder, launched)
        if not manifest and all(path.is_file() for path in launched.manifests):
            manifest = launched.manifests
    if not plan.is_file():
        raise RunError(f"{folder} has no plan.parquet; name the plan: fcp report PLAN --metrics {as_word(folder)}")
    return plan, manifest


def _draw_plan(file: PlanFile) -> tuple[PlanPicture, list[StepPlan]]:
    """Return the chart data of a plan, and a sample of its steps to compare with a static plan."""
    from fcp_cli.report.page_data import PlanPicture

    meta = file.metadata
    picture, sample = PlanPicture(metadata=meta), []
    sampled = set() if meta.baselines is None else set(meta.baselines.steps)
    with progress() as bar:
        task = bar.add_task("reading the plan", total=meta.steps)
        for step in file.steps():
            picture.compare(step)
            if picture.wants(step.step):
                picture.add(step)
            if step.step in sampled:
                sample.append(step)
            bar.advance(task)
    if not picture.summary.steps:
        raise file.nothing_to_show()
    return picture, sample


def _draw_run(
    metrics: Path | None, file: PlanFile, picture: PlanPicture
) -> tuple[RunFile | None, RunPicture | None, list[str]]:
    """Return the run, its chart data, and warnings about unusable input."""
    from fcp_cli.report.page_data import RunPicture
    from fcp_cli.runs.metrics_reader import open_run

    if metrics is None:
        return None, None, []
    try:
        run = open_run(metrics, plan=file.metadata)
    except RunError as error:
        return None, None, [f"{error}; the page shows only the plan"]
    chosen = frozenset(picture.chosen_steps())
    measured = RunPicture(plan=file.metadata, chosen=chosen)
    every = max(1, run.path.stat().st_size // _METRICS_BYTES)
    for step in run.steps(every=every):
        measured.add(step)
    measured.evaluations = run.evaluations
    warnings = list(run.problems)
    if every > 1:
        warnings.append(f"{run.path} is large: each {every}th measured step is shown")
    return run, measured if measured.steps else None, warnings


def _speedup(file: PlanFile, sample: list[StepPlan], table: LengthTable | None) -> Speedup:
    """Return the predicted gain over the best static plan."""
    from fcp_cli.planning.problem import problem_of
    from fcp_cli.planning.verdict import static_speedup, typical_pair
    from fcp_cli.report.charts import Speedup
    from fcp_cli.report.plan_tables import speedup_text

    factor = static_speedup(file.metadata, {step.step: step.makespan_seconds for step in sample})
    if factor is None:
        return Speedup(factor=None, remark=speedup_text(file.metadata, None))
    pair = typical_pair(sample, problem_of(file.metadata, name=str(file.path)), manifest=table)
    if pair is None:
        return Speedup(factor=factor, remark="the steps' times depend on more than lengths: give --manifest")
    ours, drawn = pair
    return Speedup(factor=factor, remark=speedup_text(file.metadata, factor), ours=ours, static=drawn)
