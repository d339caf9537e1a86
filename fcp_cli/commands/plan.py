"""`fcp plan`: from a manifest of lengths to a plan file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from fcp_cli.app import app
from fcp_cli.commands.planning_options import (
    BATCHES,
    CLUSTER,
    GlobalBatchSize,
    Headroom,
    LastBatch,
    LengthColumn,
    Manifest,
    MaxLength,
    Overlong,
    Profile,
    Ranks,
    RanksPerNode,
    Seed,
    Shuffle,
    TokensPerRank,
)
from fcp_cli.console import Origins, human, note, print_json, progress
from fcp_cli.errors import UsageError
from fcp_cli.files import refuse_to_overwrite

if TYPE_CHECKING:
    from fcp_cli.plan.step import StepPlan
    from fcp_cli.planning.run import PlanResult
    from fcp_cli.planning.settings import PlanInputs


@app.command()
def plan(
    manifest: Manifest,
    profile: Profile = None,
    ranks: Ranks = None,
    ranks_per_node: RanksPerNode = None,
    tokens_per_rank: TokensPerRank = None,
    headroom: Headroom = 0.0,
    sync: Annotated[
        Literal["iteration", "microbatch"],
        typer.Option(
            metavar="SYNC",
            rich_help_panel=CLUSTER,
            help="Where ranks wait: iteration (DDP, ZeRO-1/2) or microbatch (FSDP).",
        ),
    ] = "iteration",
    global_batch_size: GlobalBatchSize = None,
    seed: Seed = 0,
    shuffle: Shuffle = True,
    epochs: Annotated[int, typer.Option(min=1, metavar="N", rich_help_panel=BATCHES, help="Passes over the data.")] = 1,
    max_length: MaxLength = None,
    overlong: Overlong = "error",
    last_batch: LastBatch = "keep",
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=BATCHES, help="Plan only so many steps (all).")
    ] = None,
    length_column: LengthColumn = "length",
    solver: Annotated[
        str, typer.Option(metavar="NAME", help="fcp, or a published strategy; see 'fcp compare'.")
    ] = "fcp",
    max_groups: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Most distinct rank sets of degree > 1 in the whole plan (no limit)."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Planning processes (as many as pay).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the same plan after an interruption.")] = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The plan to write; - is stdout.")
    ] = Path("plan.parquet"),
    json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document on stdout.")] = False,
) -> None:
    """Decide which ranks run which sequences together, for every global batch, and write it as a plan.

    What is not said comes from fcp.yaml, this folder or a shipped profile; the output tells.
    """
    from fcp_cli.planning.settings import PlanRequest, resolve

    if json and str(output) == "-":
        raise UsageError("--json and -o - both want stdout; write the plan to a file")
    if resume and str(output) == "-":
        raise UsageError("--resume goes on with a file, which -o - is not; write the plan to a file")
    refuse_to_overwrite(output, manifest, profile)
    request = PlanRequest(
        manifest=manifest,
        profile=profile,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        tokens_per_rank=tokens_per_rank,
        headroom=headroom,
        global_batch_size=global_batch_size,
        sync=sync,
        seed=seed,
        shuffle=shuffle,
        epochs=epochs,
        max_length=max_length,
        overlong=overlong,
        last_batch=last_batch,
        length_column=length_column,
        steps=steps,
    )
    origins = Origins()
    inputs = resolve(request, origins)
    origins.report()
    making = _Making(solver=solver, max_groups=max_groups, workers=workers, resume=resume)
    if str(output) == "-":
        _plan_to_stdout(inputs, making)
    else:
        _plan_to_file(inputs, making, output, json, origins)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Making:
    """How the plan is made, beside what is planned."""

    solver: str
    max_groups: int | None
    workers: int | None
    resume: bool


def _plan_to_file(inputs: PlanInputs, making: _Making, output: Path, json: bool, origins: Origins) -> None:
    result, sample = _make(inputs, making, output)
    extra = _extra(result, sample, inputs) | _limit(inputs, making)
    if json:
        print_json(_document(result, output, extra, origins))
    else:
        _show(result, extra)
    note(f"wrote {output}; next: fcp launch --model {inputs.problem.profile.model} --plan {output}")


def _plan_to_stdout(inputs: PlanInputs, making: _Making) -> None:
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.parquet"
        _make(inputs, making, path)
        with path.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _make(inputs: PlanInputs, making: _Making, output: Path) -> tuple[PlanResult, list[StepPlan]]:
    """The plan, and the sample of its steps that the static baseline is compared on."""
    from fcp_cli.planning.baseline import baseline_steps
    from fcp_cli.planning.batches import GlobalBatches
    from fcp_cli.planning.run import make_plan

    total = len(GlobalBatches(inputs.table, inputs.problem, inputs.settings))
    _note_compilation(inputs, making.solver)
    sampled, sample = set(baseline_steps(total)), []
    with progress() as bar:
        task = bar.add_task(f"planning with {making.solver}", total=total)

        def on_step(step: StepPlan) -> None:
            bar.advance(task)
            if step.step in sampled:
                sample.append(step)

        result = make_plan(
            output,
            table=inputs.table,
            problem=inputs.problem,
            settings=inputs.settings,
            solver_name=making.solver,
            max_groups=making.max_groups,
            workers=making.workers,
            resume=making.resume,
            on_step=on_step,
        )
    return result, sample


def _note_compilation(inputs: PlanInputs, solver: str) -> None:
    if solver != "fcp":
        return
    from fcp_cli.planning.fcp.solver import is_compiled

    if not is_compiled(inputs.problem.sync):
        note("compiling the planner: half a minute, once on this machine")


def _limit(inputs: PlanInputs, making: _Making) -> dict[str, Any]:
    """What a limit on rank sets costs."""
    if making.max_groups is None:
        return {}
    from fcp_cli.planning.batches import GlobalBatches
    from fcp_cli.planning.fcp.solver import group_limit_price

    batches = GlobalBatches(inputs.table, inputs.problem, inputs.settings)
    return {"max_groups": making.max_groups, "max_groups_price": group_limit_price(batches, making.max_groups)}


def _extra(result: PlanResult, sample: list[StepPlan], inputs: PlanInputs) -> dict[str, Any]:
    """What only planning knows: the gain over static, and its own time."""
    from fcp_cli.planning.baseline import static_speedup

    found = static_speedup(
        sample,
        inputs.problem,
        longest_tokens=max(int(step.lengths.max()) for step in sample),
        manifest=inputs.table,
    )
    assert found is not None, "the plan's own manifest gives its own times"
    speedup, static = found
    return {
        "speedup_over_static": speedup,
        "static_degree": static.degree,
        "static_sample_steps": len(sample),
        "planning_seconds": result.planning_seconds,
        "planning_milliseconds_per_step": 1e3 * result.planning_seconds / result.summary.steps,
    }


def _show(result: PlanResult, extra: dict[str, Any]) -> None:
    from fcp_cli.report.plan_tables import print_plan, speedup_text

    steps = result.summary.steps
    static = speedup_text(extra["speedup_over_static"], extra["static_degree"], extra["static_sample_steps"], steps)
    planning = f"{extra['planning_milliseconds_per_step']:.3g} ms per step, {extra['planning_seconds']:.3g} s in all"
    lines = {"speed-up": static, "planning": planning}
    if "max_groups" in extra:
        lines["group limit"] = f"{extra['max_groups']} rank sets cost {extra['max_groups_price']:.2%} of the step time"
    print_plan(human(), result.metadata, result.summary, extra=lines)


def _document(result: PlanResult, output: Path, extra: dict[str, Any], origins: Origins) -> dict[str, Any]:
    metadata = result.metadata
    return {
        "output": str(output),
        "plan_hash": metadata.plan_hash,
        "solver": metadata.solver,
        "solver_options": dict(metadata.solver_options),
        "num_ranks": metadata.num_ranks,
        "ranks_per_node": metadata.ranks_per_node,
        "tokens_per_rank": metadata.tokens_per_rank,
        "sync": metadata.sync,
        "global_batch_size": metadata.global_batch_size,
        "distinct_groups": metadata.distinct_groups,
        **cast(dict[str, Any], result.summary.to_json()),
        **extra,
        "assumed": origins.assumed,
    }
