"""`fcp plan`: from a manifest of lengths to a plan file."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from fcp_cli.commands.planning_options import (
    BATCHES,
    CLUSTER,
    GlobalBatchSize,
    Headroom,
    LastBatch,
    LengthColumn,
    MaxLength,
    Overlong,
    PaddedRings,
    PipelineParallel,
    Profile,
    Ranks,
    RanksPerNode,
    Seed,
    Shuffle,
    TensorParallel,
    TokensPerRank,
    note_compilation,
)
from fcp_cli.console import Origins, human, note, print_json, progress
from fcp_cli.errors import UsageError
from fcp_cli.files import refuse_to_overwrite
from fcp_cli.words import duration

if TYPE_CHECKING:
    from fcp_cli.plan.step import StepPlan
    from fcp_cli.planning.run import PlanResult
    from fcp_cli.planning.settings import PlanInputs


def plan(
    context: typer.Context,
    manifest: Annotated[
        Path | None, typer.Argument(metavar="MANIFEST", help="Parquet with lengths; - reads JSON lines from stdin.")
    ] = None,
    profile: Profile = None,
    ranks: Ranks = None,
    ranks_per_node: RanksPerNode = None,
    tensor_parallel: TensorParallel = None,
    pipeline_parallel: PipelineParallel = None,
    tokens_per_rank: TokensPerRank = None,
    padded_rings: PaddedRings = False,
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
    continue_from: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR", help="Plan what a stopped run has left, in the same batches, for other --ranks."
        ),
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

    making = _Making(solver=solver, max_groups=max_groups, workers=workers, resume=resume)
    if continue_from is not None:
        _refuse_settings_of_the_run(context)
        _continue(
            continue_from,
            _Changes(
                manifest=manifest,
                profile=profile,
                ranks=ranks,
                ranks_per_node=ranks_per_node,
                tokens_per_rank=tokens_per_rank,
                headroom=headroom,
            ),
            making,
            None if _is_default(context, "output") else output,
            json=json,
        )
        return
    if manifest is None:
        raise UsageError("name the MANIFEST to plan, like 'fcp plan dataset.parquet', or a run with --continue-from")
    if json and str(output) == "-":
        raise UsageError("--json and -o - both want stdout; write the plan to a file")
    if resume and str(output) == "-":
        raise UsageError("--resume goes on with a file, which -o - is not; write the plan to a file")
    request = PlanRequest(
        manifest=manifest,
        profile=profile,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        tokens_per_rank=tokens_per_rank,
        padded_rings=padded_rings,
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
    inputs = resolve(request, origins)  # first: a plan that is given as the manifest is no source to be kept
    refuse_to_overwrite(output, manifest, profile)
    origins.report()
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Changes:
    """What may differ between a run and its continuation; None is as it was."""

    manifest: Path | None
    profile: Path | None
    ranks: int | None
    ranks_per_node: int | None
    tokens_per_rank: int | None
    headroom: float


# What makes a run's batches and its way of training; it goes on as it began.
_OF_THE_RUN = (
    "tensor_parallel",
    "pipeline_parallel",
    "padded_rings",
    "sync",
    "global_batch_size",
    "seed",
    "shuffle",
    "epochs",
    "max_length",
    "overlong",
    "last_batch",
    "length_column",
    "steps",
)


def _is_default(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"


def _refuse_settings_of_the_run(context: typer.Context) -> None:
    for name in _OF_THE_RUN:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{name.replace('_', '-')} cannot change within a run; leave it out of --continue-from")


def _continue(run_dir: Path, changes: _Changes, making: _Making, output: Path | None, *, json: bool) -> None:
    """Plan what a run has left."""
    from fcp_cli.planning.settings import ContinuationRequest, resolve_continuation
    from fcp_cli.runs.trained_run import read_trained_run

    if changes.ranks is None:
        raise UsageError("--continue-from needs --ranks: how many go on with the run")
    run = read_trained_run(run_dir, manifest=changes.manifest)
    output = output or Path(f"plan-from-step-{run.first_step}.parquet")
    if str(output) == "-":
        raise UsageError("--continue-from writes a file, not to stdout; name one with -o")
    refuse_to_overwrite(output, run.plan, run.manifest, changes.profile)
    origins = Origins()
    inputs = resolve_continuation(
        ContinuationRequest(
            plan=run.plan,
            first_step=run.first_step,
            manifest=run.manifest,
            length_column=run.length_column,
            ranks=changes.ranks,
            ranks_per_node=changes.ranks_per_node,
            tokens_per_rank=changes.tokens_per_rank,
            headroom=changes.headroom,
            profile=changes.profile,
        ),
        origins,
    )
    origins.report()
    go_on = f"fcp launch --run-dir {shlex.quote(str(run_dir))} --resume --plan {shlex.quote(str(output))}"
    _plan_to_file(inputs, making, output, json, origins, go_on=go_on)


def _plan_to_file(
    inputs: PlanInputs, making: _Making, output: Path, json: bool, origins: Origins, *, go_on: str | None = None
) -> None:
    result, sample = _make(inputs, making, output)
    extra = _extra(result, sample, inputs) | _limit(result, inputs)
    if json:
        print_json(_document(result, output, extra, origins))
    else:
        _show(result, extra)
    trains = f"--plan {output} -- SCRIPT ARGS"  # the bundled trainer's ranks are of one device
    if result.metadata.devices_per_rank == 1:
        trains = f"--model {inputs.problem.profile.model} --plan {output}"
    go_on = go_on or f"fcp launch {trains}"
    note(f"wrote {output}; next: {go_on}")


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
    from fcp_cli.planning.run import make_plan

    batches = inputs.batches()
    total, first_step = len(batches), batches.first_step
    note_compilation([making.solver], [inputs.problem.sync])
    sampled, sample = set(baseline_steps(total, first_step=first_step)), []
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
            remaining=inputs.remaining,
        )
    return result, sample


def _limit(result: PlanResult, inputs: PlanInputs) -> dict[str, Any]:
    """What a limit on rank sets costs."""
    if "max_groups" not in result.solver.options:
        return {}
    from fcp_cli.planning.fcp.solver import FcpSolver, group_limit_price

    assert isinstance(result.solver, FcpSolver), "no other solver limits its groups"
    limit = result.solver.options["max_groups"]
    return {"max_groups": limit, "max_groups_price": group_limit_price(result.solver, inputs.batches())}


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
    per_step = duration(extra["planning_milliseconds_per_step"] / 1e3)
    planning = f"{per_step} per step, {duration(extra['planning_seconds'])} in all"
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
        "tensor_parallel": metadata.tensor_parallel,
        "pipeline_parallel": metadata.pipeline_parallel,
        "tokens_per_rank": metadata.tokens_per_rank,
        "padding_multiple": metadata.padding_multiple,
        "sync": metadata.sync,
        "global_batch_size": metadata.global_batch_size,
        "distinct_groups": metadata.distinct_groups,
        **cast(dict[str, Any], result.summary.to_json()),
        **extra,
        "assumed": origins.assumed,
        "warnings": origins.warnings,
    }
