"""`fcp plan`: from a manifest of lengths to a plan file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from fcp_cli.cli.command import takes
from fcp_cli.errors import UsageError
from fcp_cli.planning.options import PlanRequest
from fcp_cli.util.console import Assumptions, note, print_json, print_result, progress, results
from fcp_cli.util.files import as_word, refuse_to_overwrite
from fcp_cli.util.options import MOST_RANKS, MOST_WORKERS, Opt, Typed, options_of
from fcp_cli.util.words import counted, duration

if TYPE_CHECKING:
    from fcp_cli.plan.metadata import Baselines, PlanMetadata
    from fcp_cli.plan.step import StepPlan
    from fcp_cli.planning.make_plan import PlanResult
    from fcp_cli.planning.settings import PlanInputs

_PLAN: Final = Path("plan.parquet")
_WORTH_SAYING_SECONDS: Final = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions(PlanRequest):
    """The options of `fcp plan`."""

    output: Annotated[
        Path | None,
        Opt(
            "The plan to write; - is stdout.",
            group="Output",
            flags=("--output", "-o"),
            unset=f"{_PLAN}",
            common=True,
            trust="writes",
        ),
    ] = None
    steps: Annotated[
        int | None, Opt("Plan only the first N steps.", min=1, unset="all", common=True, group="Global batches")
    ] = None
    mix: Annotated[
        tuple[str, ...],
        Opt(
            "Mix manifests: a source and its weight, in sequences, from a step on; repeatable.",
            metavar="FILE:WEIGHT@STEP",
            group="Sequences",
        ),
    ] = ()
    solver: Annotated[str, Opt("Strategy; see 'fcp list solvers'.", common=True, group="Search")] = "fcp"
    resume: Annotated[bool, Opt("Continue the same plan after an interruption.", group="Interrupted work")] = False
    continue_from: Annotated[
        Path | None,
        Opt(
            "Plan the remaining batches of a stopped run for other --ranks.",
            metavar="RUN_DIR",
            group="Interrupted work",
        ),
    ] = None
    max_degree: Annotated[
        int | None,
        Opt("1: no rings, each sequence on one rank.", min=1, max=MOST_RANKS, unset="no limit", group="Rings"),
    ] = None
    max_groups: Annotated[
        int | None, Opt("Maximum number of distinct groups of degree > 1 in the whole plan.", min=1, unset="no limit")
    ] = None
    max_peers: Annotated[
        int | None, Opt("Maximum number of distinct ring neighbours per rank.", min=1, max=MOST_RANKS, unset="no limit")
    ] = None
    workers: Annotated[
        int | None, Opt("Planning processes.", min=1, max=MOST_WORKERS, unset="automatic", group="Search")
    ] = None
    json: Annotated[bool, Opt("Print the summary as one JSON document.", common=True, group="Output")] = False
    typed: Annotated[frozenset[str], Typed()] = frozenset()


@takes(
    "fcp plan lengths.parquet --ranks 64 --ranks-per-node 8",
    "fcp plan lengths.parquet --model qwen3-8b --cluster h100-8x8 --recompute full",
)
def plan(options: PlanOptions) -> None:
    """Plan which ranks run which sequences together in every batch.

    Settings without an option come from fcp.yaml, this folder or this machine; the output names each source.
    """
    options.require_inputs()
    from fcp_cli.planning.settings import resolve
    from fcp_cli.planning.solvers import require_planning_solver

    # Validate the name before reading files and searching a recipe, which are slow.
    require_planning_solver(options.solver, **options.limits)
    if options.continue_from is not None:
        _continue(options, options.continue_from)
        return
    output, assumptions = options.output or _PLAN, Assumptions()
    if options.manifest is None and options.resume and not options.mix:
        _finish(output, options)
        return
    if options.manifest is not None and str(output) == "-":
        if options.json:
            raise UsageError("--json and -o - both want stdout; write the plan to a file")
        if options.resume:
            raise UsageError("--resume cannot continue a plan on stdout; write the plan to a file")
    with progress() as bar:
        bar.add_task("reading lengths and choosing the recipe", total=None)
        inputs = resolve(_with_its_attention(options, assumptions), assumptions)
    # Only now, since a plan given as the manifest must fail as a wrong kind of file.
    refuse_to_overwrite(output, *inputs.files)
    assumptions.report()
    if str(output) == "-":
        _plan_to_stdout(inputs, options)
    else:
        _plan_to_file(inputs, options, output)


def _with_its_attention(options: PlanOptions, assumptions: Assumptions) -> PlanOptions:
    """Return the options with the `--attention` that the strategy requires, unless one was given."""
    from fcp_cli.planning.solvers import strategy

    attention = strategy(options.solver).attention
    if attention is None or "attention" in options.typed:
        return options
    assumptions.assume("--attention", attention, f"--solver {options.solver} requires this")
    return replace(options, attention=attention)


def _finish(output: Path, options: PlanOptions) -> None:
    """Write the plan file of a killed online run from its journal."""
    from fcp_cli.plan.metadata import manifest_of
    from fcp_cli.planning.journal import StreamJournal

    journal = StreamJournal(output)
    if not journal.exists:
        raise UsageError(
            f"{output} has no journal of a run that planned while training; name the MANIFEST to resume planning"
        )
    metadata = journal.finish()
    if options.json:
        print_json({"plan": str(output), "plan_hash": metadata.plan_hash, "steps": metadata.steps})
    made = f"{output} of {counted(metadata.steps, 'step')}, and {manifest_of(output)}"
    note(f"wrote {made}; next: fcp check {as_word(output)}")


# Options that may change within a run; batches and training settings may not.
_MAY_CHANGE: Final = {
    *("manifest", "mix", "profile", "ranks", "ranks_per_node", "tokens_per_rank", "device_hour_price"),
    *("rank_speeds", "zero", "shard_ranks", "reduce", "recompute", "loss", "offload"),
}


def _continue(options: PlanOptions, run_dir: Path) -> None:
    """Plan the remaining steps of a run (--continue-from)."""
    from fcp_cli.planning.continuation import resolve_continuation
    from fcp_cli.runs.trained_run import plan_at_step, read_trained_run

    for name in ("steps", *(option.name for option in options_of(PlanRequest))):
        if name in options.typed and name not in _MAY_CHANGE:
            raise UsageError(f"--{name.replace('_', '-')} cannot change within a run; drop it")
    if options.ranks is None and not options.mix:
        raise UsageError("--continue-from needs --ranks (how many continue the run) or --mix (the new weights)")
    if options.mix and options.manifest is not None:
        raise UsageError(f"--mix names its manifests; drop {options.manifest}")
    manifest = next(iter(options.manifests), None)
    run = plan_at_step(run_dir, manifest, options.length_column) or read_trained_run(run_dir, manifest=manifest)
    output = options.output or Path(f"plan-from-step-{run.first_step}.parquet")
    if str(output) == "-":
        raise UsageError("--continue-from cannot write to stdout; name a file with -o")
    inputs = resolve_continuation(options, run, Assumptions())
    refuse_to_overwrite(output, *inputs.files)
    inputs.assumptions.report()
    launch = f"fcp launch --run-dir {as_word(run_dir)} --resume --plan {as_word(output)}"
    if not run.model:
        launch = f"resume your loop under it at its first step, {run.first_step}"
    _plan_to_file(inputs, options, output, next_command=launch)


def _plan_to_file(inputs: PlanInputs, options: PlanOptions, output: Path, *, next_command: str | None = None) -> None:
    from fcp_cli.launching.job import planned_nodes
    from fcp_cli.planning.fcp_solver import compile_missing
    from fcp_cli.planning.verdict import compared_syncs, priced_baselines, verdict_on
    from fcp_cli.report.verdict import verdict_lines

    with progress() as bar:
        bar.add_task("pricing what could be used instead", total=None)
        compile_missing([inputs.problem] if options.solver == "fcp" else [])
        baselines = priced_baselines(inputs, options.solver, compared_syncs(inputs, options.sync))
    result, seconds = _make_with_progress(inputs, options, output, baselines)
    verdict = None if baselines is None else verdict_on(options.solver, seconds, baselines, inputs)
    extra = _gain_and_time(result, seconds) | _price_of_limit(result, inputs)
    if options.json:
        told = {"assumed": inputs.assumptions.assumed, "warnings": inputs.assumptions.warnings}
        written = {"output": str(output), **result.to_json(), **extra}
        print_json({**written, "verdict": verdict and verdict.to_json(), **told})
    else:
        _show(result, extra)
        for line in () if verdict is None else verdict_lines(verdict):
            print_result(line)
    arguments = [f"{flag} {size}" for flag, size in _arguments_of_megatron(result.metadata)]
    nodes = planned_nodes(result.metadata)
    followed = f"--plan {as_word(output)}{f' --nodes {nodes} --dry-run' if nodes > 1 else ''}"
    # The bundled trainer uses one device per rank.
    trains = " ".join((followed, "-- SCRIPT", *arguments, "ARGS"))
    # Suggest the bundled trainer only if the model was not merely assumed.
    model = inputs.request.model
    is_named = model is not None or "--model" not in inputs.assumptions.assumed
    if result.metadata.devices_per_rank == 1 and result.metadata.phase is None and is_named:
        # A path in place of its name, which alone would not locate it.
        found = inputs.problem.profile.model if model is None or not Path(model).exists() else as_word(model)
        trains = f"--model {found} {followed}"
    where = "" if nodes == 1 else f" for {nodes} nodes (--target slurm submits the job)"
    note(f"wrote {output}{where}; next: {next_command or f'fcp launch {trains}'}")


def _arguments_of_megatron(metadata: PlanMetadata) -> Iterable[tuple[str, int]]:
    """Yield (flag, size) of the Megatron arguments that must match the plan's parallel sizes and global batch."""
    from fcp_cli.launching.software import PARALLEL_ARGUMENTS

    if metadata.devices_per_rank > 1:
        for flag, key in PARALLEL_ARGUMENTS.items():
            if key != "virtual_stages" or metadata.virtual_stages > 1:
                yield flag, getattr(metadata, key)
        if metadata.has_equal_batches:
            yield "--global-batch-size", metadata.global_batch_size


def _plan_to_stdout(inputs: PlanInputs, options: PlanOptions) -> None:
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.parquet"
        _make_with_progress(inputs, options, path, None)
        with path.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _make_with_progress(
    inputs: PlanInputs, options: PlanOptions, output: Path, baselines: Baselines | None
) -> tuple[PlanResult, dict[int, float]]:
    """Make the plan; return it and its step times, by step."""
    from fcp_cli.planning.make_plan import make_plan

    seconds: dict[int, float] = {}
    with progress() as bar:
        task = bar.add_task(f"planning with {options.solver}", total=len(inputs.batches()))

        def on_step(step: StepPlan) -> None:
            bar.advance(task)
            seconds[step.step] = step.makespan_seconds

        result = make_plan(
            output, inputs, baselines=baselines, workers=options.workers, resume=options.resume, on_step=on_step
        )
    return result, seconds


def _price_of_limit(result: PlanResult, inputs: PlanInputs) -> dict[str, Any]:
    """Return the limit on rings and its share of the step time; {} without a limit."""
    from fcp_cli.planning.fcp_solver import FcpSolver, limit_price

    name = next((name for name in inputs.request.limits if name in result.solver.options), None)
    if name is None or not isinstance(result.solver, FcpSolver):
        return {}
    return {name: result.solver.options[name], f"{name}_price": limit_price(result.solver, inputs.batches())}


def _gain_and_time(result: PlanResult, seconds: Mapping[int, float]) -> dict[str, Any]:
    """Return the speed-up over the static baseline and the planning time, which the plan file does not store."""
    from fcp_cli.planning.verdict import static_speedup

    return {
        "speedup_over_static": static_speedup(result.metadata, seconds),
        "planning_seconds": result.planning_seconds,
        "loading_seconds": result.loading_seconds,
        "planning_milliseconds_per_step": 1e3 * result.planning_seconds / result.summary.steps,
    }


def _show(result: PlanResult, extra: dict[str, Any]) -> None:
    from fcp_cli.report.plan_tables import print_plan, speedup_text

    per_step = duration(extra["planning_milliseconds_per_step"] / 1e3)
    planning = f"{per_step} per step, {duration(extra['planning_seconds'])} in all"
    if extra["loading_seconds"] > _WORTH_SAYING_SECONDS:
        planning += f", and {duration(extra['loading_seconds'])} to load or compile the planner"
    lines = {"speed-up": speedup_text(result.metadata, extra["speedup_over_static"]), "planning": planning}
    limits = {"degree": "no rings, which costs", "groups": "{} groups cost", "peers": "{} peers cost"}
    for kind, cost in limits.items():
        if (name := f"max_{kind}") in extra:
            price = f"{extra[f'{name}_price']:.2%} of the step time"
            lines[f"{kind.removesuffix('s')} limit"] = f"{cost.format(extra[name])} {price}"
    print_plan(results(), result.metadata, result.summary, extra=lines)
