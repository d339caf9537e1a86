"""`fcp compare`: every strategy on the same sequences and cost profile, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fcp_cli.commands.planning_options import (
    BATCHES,
    CLUSTER,
    GlobalBatchSize,
    Headroom,
    LengthColumn,
    Manifest,
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
from fcp_cli.words import counted

if TYPE_CHECKING:
    from fcp_cli.plan.metadata import Sync
    from fcp_cli.planning.comparison import Contender
    from fcp_cli.planning.settings import PlanInputs

_STEPS = 4
_MILP_SECONDS = 5.0  # as FlexSP itself
_ASKED_FOR_ONLY = ("flexsp",)  # takes minutes a step


def compare(
    manifest: Manifest,
    profile: Profile = None,
    ranks: Ranks = None,
    ranks_per_node: RanksPerNode = None,
    tensor_parallel: TensorParallel = None,
    pipeline_parallel: PipelineParallel = None,
    tokens_per_rank: TokensPerRank = None,
    padded_rings: PaddedRings = False,
    headroom: Headroom = 0.0,
    sync: Annotated[
        Literal["iteration", "microbatch"] | None,
        typer.Option(rich_help_panel=CLUSTER, help="Compare under one sync only (each strategy under its better one)."),
    ] = None,
    global_batch_size: GlobalBatchSize = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, rich_help_panel=BATCHES, help="How many steps to plan, from the first.")
    ] = _STEPS,
    seed: Seed = 0,
    shuffle: Shuffle = True,
    max_length: MaxLength = None,
    overlong: Overlong = "error",
    length_column: LengthColumn = "length",
    solvers: Annotated[str | None, typer.Option(help="Strategies, as fcp,static, or all (all but flexsp).")] = None,
    milp_seconds: Annotated[
        float, typer.Option(min=0.01, help="Time limit of each of flexsp's integer programs.")
    ] = _MILP_SECONDS,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document on stdout.")] = False,
) -> None:
    """Compare every strategy on the same sequences and cost profile, each in its best setting."""
    from fcp_cli.planning.comparison import SYNCS
    from fcp_cli.planning.settings import PlanRequest, resolve
    from fcp_cli.report.compare_table import comparison_document, print_comparison

    names = _names(solvers)
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
        sync=sync or "microbatch",  # which a pipeline needs; without one, both are compared
        seed=seed,
        shuffle=shuffle,
        max_length=max_length,
        overlong=overlong,
        length_column=length_column,
        steps=steps,
    )
    origins = Origins()
    inputs = resolve(request, origins)
    origins.report()
    syncs = SYNCS if sync is None and inputs.problem.pipeline_parallel == 1 else (inputs.problem.sync,)
    if inputs.problem.profile.common_ground is not None:
        note("strategies are compared under the profile's common_ground, without exposed_ring_share; fcp plan uses all")
        inputs = replace(inputs, problem=replace(inputs.problem, profile=inputs.problem.profile.on_common_ground()))
    contenders, compared_steps = _run(inputs, names, syncs, milp_seconds)
    if json:
        print_json(comparison_document(contenders, inputs.problem, steps=compared_steps))
        return
    human().print(_headline(inputs, compared_steps), markup=False, soft_wrap=True)
    print_comparison(human(), contenders, syncs)
    if "flexsp" in names:
        note(f"flexsp stops each integer program after {milp_seconds:g} s (--milp-seconds): its row depends on speed")
    elif solvers is None:
        note("flexsp is left out, since it takes minutes a step; --solvers all adds it")


def _names(solvers: str | None) -> list[str]:
    from fcp_cli.planning.solvers import solver_names

    if solvers is None:
        return [name for name in solver_names() if name not in _ASKED_FOR_ONLY]
    if solvers == "all":
        return solver_names()
    names = [name.strip() for name in solvers.split(",") if name.strip()]
    unknown = [name for name in names if name not in solver_names()]
    if unknown or not names:
        raise UsageError(f"--solvers {solvers!r}: choose from {','.join(solver_names())}, or all")
    return list(dict.fromkeys(names))


def _run(
    inputs: PlanInputs, names: list[str], syncs: Sequence[Sync], milp_seconds: float
) -> tuple[list[Contender], int]:
    """The outcome of each strategy, and how many steps were compared."""
    from fcp_cli.planning.batches import GlobalBatches
    from fcp_cli.planning.comparison import compare as run_comparison

    steps = len(GlobalBatches(inputs.table, inputs.problem, inputs.settings))
    note_compilation(names, syncs)
    with progress() as bar:
        task = bar.add_task("planning", total=steps * len(names) * len(syncs))
        contenders = list(
            run_comparison(
                inputs.table,
                inputs.problem,
                inputs.settings,
                names=names,
                syncs=syncs,
                milp_seconds=milp_seconds,
                on_step=lambda name: bar.update(task, advance=1, description=f"planning: {name}"),
            )
        )
    return contenders, steps


def _headline(inputs: PlanInputs, steps: int) -> str:
    problem = inputs.problem
    return (
        f"{counted(problem.num_ranks, 'rank')}, {problem.ranks_per_node} per node, "
        f"{counted(problem.tokens_per_rank, 'token')} each"
        f"{'' if problem.padding_multiple is None else f', padded to {problem.padding_multiple} per rank'}; "
        f"{counted(inputs.settings.global_batch_size, 'sequence')} a step, {counted(steps, 'step')}; "
        f"{problem.profile.model} on {problem.profile.cluster} ({problem.profile.origin})"
    )
