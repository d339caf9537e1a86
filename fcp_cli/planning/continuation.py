"""Resolution of the remaining steps of a run, to be planned for another number of ranks (`--continue-from`).

The global batches of the old plan stay unchanged, so that the run has the same batches, steps and learning-rate
schedule. Only the assignment to ranks changes. Options not given default to the run's settings.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fcp_cli.cost.profile import CostProfile, dump_cost_profile, load_cost_profile, parse_cost_profile
from fcp_cli.cost.recipe import Recipe, check_recipe
from fcp_cli.errors import ManifestError, UsageError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import LengthTable
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.models.model import known_model
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Continuation, Mixture, PlanMetadata, pack_rows, refitted, unpack_rows
from fcp_cli.plan.setup import PlanSetup, RankShape, Speeds, named_speeds, speeds_text
from fcp_cli.planning.batches import RemainingSteps, read_mixture, settings_of
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.recipe import on_devices, room_text
from fcp_cli.planning.settings import PlanInputs, devices_of_rank, whole_budget_of
from fcp_cli.planning.speeds import requested_speeds
from fcp_cli.profiling.forward import forward_profile
from fcp_cli.runs.trained_run import TrainedRun
from fcp_cli.util.console import Assumptions
from fcp_cli.util.validation import fields_of
from fcp_cli.util.words import counted


def resolve_continuation(request: PlanRequest, run: TrainedRun, assumptions: Assumptions) -> PlanInputs:
    """Return the solver's inputs for the remaining steps of a run; unset fields of `request` default to the run's.

    Args:
        request: number of ranks, and other changes; the batches stay those of the run.
        run: the stopped run.
        assumptions: recorder of assumptions.

    Raises:
        ManifestError: the manifest is not the run's.
        UsageError: the request changes a setting that the run must keep.
    """
    reader, first_step = PlanReader(run.plan), run.first_step
    metadata = reader.metadata
    table, mixture = _table_of_run(request, metadata, run)
    if mixture is None and table.content_hash() != metadata.manifest.content_hash:
        raise ManifestError(
            f"{run.manifest} is not the manifest {metadata.manifest.name} that {run.plan} was made from, or it "
            "was changed since; name the right one: fcp plan MANIFEST --continue-from ..."
        )
    ranks = request.ranks or metadata.num_ranks
    ranks_per_node = request.ranks_per_node or min(metadata.ranks_per_node, ranks)
    if request.ranks_per_node is None:
        assumptions.assume("--ranks-per-node", ranks_per_node, f"the run had {metadata.ranks_per_node}")
    if request.tokens_per_rank is None:
        assumptions.assume("--tokens-per-rank", metadata.tokens_per_rank, "the run's plan")
    tokens, padding = request.tokens_per_rank or metadata.tokens_per_rank, metadata.padding_multiple
    profile = _profile_of_run(request.profile, metadata, run, assumptions)
    if profile.recompute_levels and (ranks != metadata.num_ranks or request.recipe.given()):
        raise UsageError(
            f"{run.plan} recomputes layers as needed, by the memory of its {counted(metadata.num_ranks, 'rank')}; "
            "continue it on the same number with the same recipe, or make a new plan"
        )
    if metadata.phase == "forward":
        profile = forward_profile(profile)
    if metadata.encoder_ranks is not None:
        assumptions.assume("--encoder-ranks", "none", f"the run had {metadata.encoder_ranks}; now all ranks encode")
    tensor, pipeline = devices_of_rank(profile, metadata.tensor_parallel, metadata.pipeline_parallel, assumptions)
    shape = JobRanks(num_ranks=ranks, ranks_per_node=ranks_per_node, tensor_parallel=tensor, pipeline_parallel=pipeline)
    return PlanInputs(
        table=table,
        problem=Problem(
            **{
                **fields_of(PlanSetup, metadata),
                **fields_of(RankShape, shape),
                "tokens_per_rank": whole_budget_of(tokens, padding, assumptions),
                "encoder_ranks": None,
                "recipe": continued_recipe(request, metadata, profile, shape, assumptions),
            },
            rank_speeds=_speeds_of_run(request, metadata, first_step, ranks, ranks_per_node, assumptions),
            profile=profile,
        ),
        request=request,
        files=(run.plan, run.manifest, *request.files),
        assumptions=assumptions,
        settings=settings_of(metadata) if mixture is None else replace(settings_of(metadata), mixture=mixture),
        remaining=remaining_steps(reader, first_step) if mixture is None else None,
        continues=None if mixture is None else continued_mixture(metadata, first_step, len(table)),
    )


def _table_of_run(request: PlanRequest, metadata: PlanMetadata, run: TrainedRun) -> tuple[LengthTable, Mixture | None]:
    """Read the run's manifest, or the manifests of its mixture with changed weights from now on."""
    if not request.mix:
        return read_manifest(run.manifest, length_column=run.length_column), None
    if metadata.mixture is None:
        raise UsageError(
            f"{run.plan} is of one manifest, whose batches cannot become a mixture's; start a new run with --mix"
        )
    return read_mixture(
        request.mix, length_column=run.length_column, before=metadata.mixture, first_step=run.first_step
    )


def _profile_of_run(
    given: Path | None, metadata: PlanMetadata, run: TrainedRun, assumptions: Assumptions
) -> CostProfile:
    if given is not None:
        return load_cost_profile(given)
    profile = parse_cost_profile(metadata.cost_profile, name=f"{run.plan}: the plan's cost profile")
    assumptions.assume("--profile", f"{profile.model} on {profile.cluster}", "the run's plan")
    refit = metadata.refit_at(run.first_step)
    profile = refitted(profile, refit)
    return profile if refit is None else replace(profile, text=dump_cost_profile(profile))


def continued_recipe(
    request: PlanRequest, metadata: PlanMetadata, profile: CostProfile, ranks: JobRanks, assumptions: Assumptions
) -> Recipe | None:
    """Return the recipe of a continued run: the run's, overridden by the request."""
    planned, asked = metadata.recipe, request.recipe
    if planned is None:
        if asked.given():
            flag = f"--{next(iter(asked.given())).removesuffix('_stage').replace('_', '-')}"
            raise UsageError(f"the run's plan records no recipe; give {flag} to 'fcp launch --resume' instead")
        return None
    recipe = asked.applied_to(planned)
    if ranks.num_ranks % recipe.shards(ranks.num_ranks):
        if asked.shard_ranks is not None:
            raise UsageError(f"--shard-ranks is {asked.shard_ranks}; it must divide the {ranks.num_ranks} ranks")
        recipe = replace(recipe, shard_ranks=None)
        assumptions.assume("--shard-ranks", "all", f"{planned.shard_ranks} do not divide {ranks.num_ranks} ranks")
    check_recipe(recipe, sync=metadata.sync)
    spec = known_model(profile.model)
    if spec is not None and profile.memory.capacity_bytes:
        place = on_devices(ranks, profile)
        fit, tokens = place.fit(spec, recipe, metadata.sync), request.tokens_per_rank or metadata.tokens_per_rank
        if tokens > fit.tokens:
            assumptions.warn(
                f"--tokens-per-rank is {tokens:,}, but a rank holds {fit.tokens:,}: {room_text(place, fit)}"
            )
    return recipe


def _speeds_of_run(
    request: PlanRequest,
    metadata: PlanMetadata,
    step: int,
    num_ranks: int,
    ranks_per_node: int,
    assumptions: Assumptions,
) -> Speeds | None:
    """Return the rank speeds of a continued run: as given, else the run's if the number of ranks is unchanged."""
    if request.rank_speeds is not None:
        return requested_speeds(request, num_ranks, ranks_per_node)
    before = metadata.speeds_at(step)
    if before is None or num_ranks != metadata.num_ranks:
        return None
    assumptions.assume("--rank-speeds", speeds_text(named_speeds(before) or {}), "the run's plan")
    return before


def remaining_steps(reader: PlanReader, first_step: int) -> RemainingSteps:
    """Read a plan's steps from `first_step` on, and the rows trained earlier in that epoch."""
    metadata = reader.metadata
    trained = _trained_before(reader, first_step)
    steps = list(reader.steps(first_step))
    return RemainingSteps(
        continues=Continuation(
            plan_hash=metadata.plan_hash,
            num_ranks=metadata.num_ranks,
            first_step=first_step,
            trained=pack_rows(trained),
        ),
        offsets=np.cumsum([0, *(len(step.sequences) for step in steps)], dtype=np.int64),
        rows=np.concatenate([step.sequences for step in steps]),
        lengths=np.concatenate([step.lengths for step in steps]),
        overlong=metadata.overlong,
    )


def _trained_before(reader: PlanReader, first_step: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return [manifest rows] whether a row was trained earlier in the epoch of `first_step`."""
    metadata = reader.metadata
    # Batches never span epochs and each epoch has all rows, so only steps of this epoch count.
    epoch_start = first_step - first_step % max(metadata.steps_per_epoch, 1)
    trained = np.zeros(metadata.manifest.rows, dtype=np.bool_)
    # If this plan continues a run, the epoch's earlier steps are only in that run.
    if metadata.continues is not None and epoch_start < metadata.first_step:
        trained |= unpack_rows(metadata.continues.trained, metadata.manifest.rows)
    for step in reader.steps(epoch_start):
        if step.step >= first_step:
            break
        trained[step.sequences] = True
    return trained


def continued_mixture(metadata: PlanMetadata, first_step: int, rows: int) -> Continuation:
    """Return the run that a changed mixture continues; trained rows are not recorded, since a mixture repeats rows."""
    return Continuation(
        plan_hash=metadata.plan_hash,
        num_ranks=metadata.num_ranks,
        first_step=first_step,
        trained=pack_rows(np.zeros(rows, dtype=np.bool_)),
    )
