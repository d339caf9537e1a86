"""`fcp compare`: every strategy on the same sequences and cost profile, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from fcp_cli.cli.command import takes
from fcp_cli.cost.recipe import RecipeRequest
from fcp_cli.errors import UsageError
from fcp_cli.planning.options import PlanRequest
from fcp_cli.util.console import Assumptions, note, print_json, print_result, progress, results
from fcp_cli.util.options import Arg, Opt
from fcp_cli.util.words import counted, did_you_mean

if TYPE_CHECKING:
    from fcp_cli.cost.profile import CostProfile
    from fcp_cli.plan.metadata import Sync
    from fcp_cli.planning.compare import Contender
    from fcp_cli.planning.settings import PlanInputs
    from fcp_cli.planning.verdict import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions(PlanRequest):
    """The options of `fcp compare`."""

    manifest: Annotated[Path, Arg("Lengths: Parquet, Arrow, JSON lines, CSV, numbers; - is stdin.")]
    sync: Annotated[
        Literal["iteration", "microbatch"] | None,
        Opt("Compare under one sync only.", unset="each strategy's better one", common=True, group="Cluster and model"),
    ] = None
    steps: Annotated[
        int | None,
        Opt(
            "How many steps to plan, spread over the data.",
            min=1,
            unset="as the verdict of fcp plan, at most 4",
            common=True,
            group="Global batches",
        ),
    ] = None
    solvers: Annotated[
        str | None,
        Opt(
            "Strategies, e.g. fcp,static, or all.",
            group="Strategies",
            metavar="NAME,...",
            unset="all but flexsp, hydraulis and executions without rings",
            common=True,
        ),
    ] = None
    milp_seconds: Annotated[
        float, Opt("Time limit of each integer program of flexsp, as set by its authors.", min=0.01)
    ] = 5.0
    json: Annotated[bool, Opt("Print the result as one JSON document.", common=True, group="Output")] = False

    # No options here: the recipe is the profile's, or else searched.
    recipe: RecipeRequest = field(default_factory=RecipeRequest)
    epochs: int = 1
    last_batch: Literal["keep", "drop"] = "keep"
    encoder_balance: Literal["ring", "wave", "auto"] = "ring"


@takes(
    "fcp compare lengths.parquet --ranks 64",
    "fcp compare lengths.parquet --solvers fcp,static --sync iteration --steps 8",
)
def compare(options: CompareOptions) -> None:
    """Compare every strategy, each in its best setting, on your lengths."""
    options.require_inputs()
    from fcp_cli.planning.compare import encoder_placements
    from fcp_cli.planning.settings import resolve
    from fcp_cli.planning.verdict import compared_steps, compared_syncs
    from fcp_cli.report.verdict import comparison_document, print_comparison, verdict_lines

    assumptions = Assumptions()
    _names(options.solvers)  # validate the names before reading files
    with progress() as bar:
        bar.add_task("reading lengths and choosing the recipe", total=None)
        inputs = resolve(replace(options, steps=None), assumptions)
    names = _names(options.solvers, inputs.problem.profile)
    assumptions.report()
    syncs = compared_syncs(inputs, options.sync)
    if inputs.problem.profile.common_ground is not None:
        note("strategies are compared under the profile's common_ground, without exposed_ring_share; fcp plan uses all")
        inputs = replace(inputs, problem=replace(inputs.problem, profile=inputs.problem.profile.on_common_ground()))
    batches = inputs.batches()
    steps = compared_steps(batches, options.steps)
    contenders = _run(inputs, steps, names, syncs, options.milp_seconds)
    verdict = _verdict(contenders, inputs, steps)
    contenders += list(encoder_placements(inputs, steps))
    if options.json:
        document = comparison_document(contenders, inputs.problem, steps=steps)
        print_json({**document, "verdict": verdict and verdict.to_json()})
        return
    print_result(_headline(inputs, steps, len(batches)))
    print_comparison(results(), contenders, syncs)
    for line in verdict_lines(verdict) if verdict is not None else ():
        print_result(line)
    if "flexsp" in names:
        limit = f"{options.milp_seconds:g} s (--milp-seconds)"
        note(f"flexsp stops each integer program after {limit}: its row depends on this machine's speed")
    elif options.solvers is None:
        note("flexsp (minutes per step), hydraulis and executions without rings are skipped; --solvers all adds them")


def _names(solvers: str | None, profile: CostProfile | None = None) -> list[str]:
    from fcp_cli.planning.solvers import compared_names, strategy, works_under

    known = [name for name in compared_names() if profile is None or works_under(name, profile)]
    if solvers is None:
        return [name for name in known if strategy(name).is_quick]
    if solvers == "all":
        return known
    names = [name.strip() for name in solvers.split(",") if name.strip()]
    unknown = [name for name in names if name not in compared_names()]
    if unknown or not names:
        hint = did_you_mean(unknown[0], compared_names()) if unknown else ""
        raise UsageError(f"--solvers {solvers!r}: choose from {','.join(compared_names())}, or all{hint}")
    return list(dict.fromkeys(names))


def _run(
    inputs: PlanInputs, steps: Sequence[int], names: list[str], syncs: Sequence[Sync], milp_seconds: float
) -> list[Contender]:
    """Return the result of each strategy."""
    from fcp_cli.planning.compare import compare_recipes
    from fcp_cli.planning.fcp_solver import compile_missing

    with progress() as bar:
        task = bar.add_task("planning", total=len(names) * len(syncs))
        compile_missing(replace(inputs.problem, sync=sync) for sync in syncs if "fcp" in names)
        found = compare_recipes(
            inputs,
            steps,
            names=names,
            syncs=syncs,
            milp_seconds=milp_seconds,
            on_step=lambda name: bar.update(task, advance=1, description=f"planning: {name}"),
        )
        return list(found)


def _verdict(contenders: Sequence[Contender], inputs: PlanInputs, steps: Sequence[int]) -> Verdict | None:
    """Return the verdict on fcp against the strategies that can be used today, or None if either was not compared."""
    from fcp_cli.planning.compare import USABLE
    from fcp_cli.planning.solvers import DEFAULT
    from fcp_cli.planning.verdict import baselines_of, verdict_on

    ours = next((one.outcomes.get(inputs.problem.sync) for one in contenders if one.name == DEFAULT), None)
    baselines = baselines_of((one for one in contenders if one.name in USABLE), steps, 0)
    if ours is None or baselines is None:
        return None
    return verdict_on(DEFAULT, dict(zip(steps, ours.seconds, strict=True)), baselines, inputs)


def _headline(inputs: PlanInputs, steps: Sequence[int], of: int) -> str:
    problem = inputs.problem
    return (
        f"{counted(problem.num_ranks, 'rank')}, {problem.ranks_per_node} per node, "
        f"{counted(problem.tokens_per_rank, 'token')} each"
        f"{'' if problem.padding_multiple is None else f', padded to {problem.padding_multiple} per rank'}; "
        f"{'' if inputs.settings.batching is None else 'up to '}"
        f"{counted(inputs.settings.global_batch_size, 'sequence')} a step, {len(steps)} of {counted(of, 'step')}; "
        f"{problem.profile.model} on {problem.profile.cluster} ({problem.profile.origin})"
    )
