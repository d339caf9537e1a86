"""`fcp inspect`: a plan, or one of its steps, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fcp_cli.cli.command import takes
from fcp_cli.errors import UsageError
from fcp_cli.util.console import note, print_json, results
from fcp_cli.util.options import Arg, Opt

if TYPE_CHECKING:
    from fcp_cli.plan.step import StepPlan
    from fcp_cli.report.plan_tables import PlanFile


@takes("fcp inspect", "fcp inspect plan.parquet --step 3 --why 0")
def inspect(
    *,
    plan: Annotated[Path, Arg("The plan to show.")] = Path("plan.parquet"),
    step: Annotated[int | None, Opt("Show this step instead of the whole plan.", min=0)] = None,
    why: Annotated[
        int | None, Opt("With --step: explain the degree of this micro-batch.", min=0, metavar="MICROBATCH")
    ] = None,
    manifest: Annotated[
        tuple[Path, ...], Opt("The plan's manifest, if it has mask or vision columns; once per source of a mixture.")
    ] = (),
    json: Annotated[bool, Opt("Print one JSON document on stdout.")] = False,
) -> None:
    """Show a plan's summary, or one step: groups, seconds, idle time."""
    from fcp_cli.report.plan_tables import open_plan

    file = open_plan(plan, quickly=step is not None)
    if step is None and why is not None:
        raise UsageError("--why names a micro-batch of one step; give --step too")
    if step is None:
        file.manifest(manifest)  # of another plan: refused, though the summary needs none
        _inspect_plan(file, json)
    elif why is not None:
        _inspect_degree(file, step, why, manifest, json)
    else:
        _inspect_step(file, step, json)
    for problem in file.problems:
        note(f"warning: {problem}")


def _step(file: PlanFile, wanted: int) -> StepPlan:
    metadata = file.metadata
    if not metadata.first_step <= wanted < metadata.end_step:
        raise UsageError(f"{file.path} has steps {metadata.first_step} to {metadata.end_step - 1}, not --step {wanted}")
    return file.step(wanted)


def _inspect_degree(file: PlanFile, wanted: int, order: int, manifest: Sequence[Path], json: bool) -> None:
    from fcp_cli.planning.fcp_solver import winner_of
    from fcp_cli.planning.problem import problem_of
    from fcp_cli.report.why import explain_degree, print_why

    step = _step(file, wanted)
    if order >= len(step):
        raise UsageError(f"step {wanted} has micro-batches 0 to {len(step) - 1}, not --why {order}")
    if step.microbatch(order).is_idle:
        raise UsageError(f"--why {order}: micro-batch {order} of step {wanted} is idle; it has no sequences")
    table = file.manifest(manifest)
    problem = problem_of(file.metadata, name=str(file.path), step=wanted)
    explanation = explain_degree(step, order, problem, manifest=table, metadata=file.metadata)
    if file.metadata.solver == "fcp":
        candidate = winner_of(step, problem, file.metadata.solver_options, manifest=table)
        explanation = replace(explanation, candidate=candidate)
    if json:
        print_json({**explanation.to_json(), "warnings": file.problems})
    else:
        print_why(results(), explanation)


def _inspect_step(file: PlanFile, wanted: int, json: bool) -> None:
    from fcp_cli.report.plan_tables import print_step, step_document

    step = _step(file, wanted)
    if json:
        print_json({**step_document(step, file.metadata.num_ranks), "warnings": file.problems})
    else:
        print_step(results(), file.metadata, step)


def _inspect_plan(file: PlanFile, json: bool) -> None:
    from fcp_cli.plan.summary import PlanSummary
    from fcp_cli.planning.verdict import static_speedup
    from fcp_cli.report.plan_tables import print_plan, speedup_text

    metadata, seconds = file.metadata, dict[int, float]()
    summary = PlanSummary.of(metadata)
    for step in file.steps():
        summary.add(step)
        seconds[step.step] = step.makespan_seconds
    if not seconds:
        raise file.nothing_to_show()
    speedup = static_speedup(metadata, seconds)
    if json:
        document: dict[str, Any] = {"plan": str(file.path), "plan_hash": metadata.plan_hash, **summary.to_json()}
        document |= {"solver": metadata.solver, "sync": metadata.sync, "num_ranks": metadata.num_ranks}
        document |= {"recipe": metadata.recipe and asdict(metadata.recipe), "warnings": file.problems}
        document |= {"distinct_groups": metadata.distinct_groups, "speedup_over_static": speedup}
        print_json(document)
        return
    print_plan(results(), metadata, summary, extra={"speed-up": speedup_text(metadata, speedup)})
