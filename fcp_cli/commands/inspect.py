"""`fcp inspect`: a plan, or one of its steps, as tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcp_cli.app import app
from fcp_cli.console import human, print_json
from fcp_cli.errors import UsageError

if TYPE_CHECKING:
    from fcp_cli.plan.reader import PlanReader
    from fcp_cli.plan.step import StepPlan
    from fcp_cli.plan.summary import PlanSummary


@app.command()
def inspect(
    plan: Annotated[Path, typer.Argument(metavar="[PLAN]", help="The plan to look at.")] = Path("plan.parquet"),
    step: Annotated[int | None, typer.Option(min=0, help="Show this step instead of the whole plan.")] = None,
    why: Annotated[
        int | None, typer.Option(min=0, metavar="GROUP", help="With --step: why this micro-batch has its degree.")
    ] = None,
    manifest: Annotated[
        Path | None, typer.Option(help="The plan's manifest, where it has mask or vision columns.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Show a plan: its summary, or one step with groups, degrees, ranks, tokens, seconds and idle time."""
    from fcp_cli.plan.reader import PlanReader

    reader = PlanReader(plan)
    if step is None and why is not None:
        raise UsageError("--why names a micro-batch of one step; give --step too")
    if step is None:
        _inspect_plan(reader, manifest, json)
    elif why is not None:
        _inspect_degree(reader, step, why, manifest, json)
    else:
        _inspect_step(reader, step, json)


def _step(reader: PlanReader, wanted: int) -> StepPlan:
    if wanted >= reader.metadata.steps:
        raise UsageError(f"{reader.path} has steps 0 to {reader.metadata.steps - 1}, not --step {wanted}")
    return next(reader.steps(wanted))


def _inspect_degree(reader: PlanReader, wanted: int, order: int, manifest: Path | None, json: bool) -> None:
    from fcp_cli.manifest.read import read_manifest
    from fcp_cli.planning.problem import problem_of
    from fcp_cli.report.why import explain_degree, print_why

    step = _step(reader, wanted)
    if order >= len(step):
        raise UsageError(f"step {wanted} has micro-batches 0 to {len(step) - 1}, not --why {order}")
    if step.micro_batch(order).is_idle:
        raise UsageError(f"--why {order}: micro-batch {order} of step {wanted} is idle; it has no sequences")
    table = read_manifest(manifest) if manifest is not None else None
    explanation = explain_degree(step, order, problem_of(reader.metadata, name=str(reader.path)), manifest=table)
    if json:
        print_json(explanation.to_json())
    else:
        print_why(human(), explanation)


def _inspect_step(reader: PlanReader, wanted: int, json: bool) -> None:
    from fcp_cli.report.plan_tables import print_step, step_document

    step = _step(reader, wanted)
    if json:
        print_json(step_document(step, reader.metadata.num_ranks))
    else:
        print_step(human(), reader.metadata, step)


def _inspect_plan(reader: PlanReader, manifest: Path | None, json: bool) -> None:
    from fcp_cli.report.plan_tables import print_plan, speedup_text

    summary, sample, longest = _summarise(reader)
    found = _speedup(reader, sample, longest, manifest)
    metadata = reader.metadata
    if json:
        document: dict[str, Any] = {"plan": str(reader.path), "plan_hash": metadata.plan_hash, **summary.to_json()}
        document |= {"solver": metadata.solver, "sync": metadata.sync, "num_ranks": metadata.num_ranks}
        document |= {"distinct_groups": metadata.distinct_groups, "speedup_over_static": found and found[0]}
        print_json(document)
        return
    text = "not known without --manifest, for the plan's times depend on more than lengths"
    if found is not None:
        text = speedup_text(found[0], found[1], len(sample), summary.steps)
    print_plan(human(), metadata, summary, extra={"speed-up": text})


def _summarise(reader: PlanReader) -> tuple[PlanSummary, list[StepPlan], int]:
    """Totals, a sample of steps for the static baseline, and the longest sequence."""
    from fcp_cli.plan.summary import PlanSummary
    from fcp_cli.planning.baseline import baseline_steps

    summary, sampled = PlanSummary(num_ranks=reader.metadata.num_ranks), set(baseline_steps(reader.metadata.steps))
    sample, longest = [], 0
    for step in reader.steps():
        summary.add(step)
        longest = max(longest, int(step.lengths.max()))
        if step.step in sampled:
            sample.append(step)
    return summary, sample, longest


def _speedup(
    reader: PlanReader, sample: list[StepPlan], longest: int, manifest: Path | None
) -> tuple[float, int] | None:
    from fcp_cli.manifest.read import read_manifest
    from fcp_cli.planning.baseline import static_speedup
    from fcp_cli.planning.problem import problem_of

    found = static_speedup(
        sample,
        problem_of(reader.metadata, name=str(reader.path)),
        longest_tokens=longest,
        manifest=read_manifest(manifest) if manifest is not None else None,
    )
    return None if found is None else (found[0], found[1].degree)
