"""Resolution of a `PlanRequest` for the remaining steps of a run; unset fields default to the run's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fcp_cli.console import Assumptions
from fcp_cli.cost.profile import CostProfile, dump_cost_profile, load_cost_profile, parse_cost_profile
from fcp_cli.errors import ManifestError, UsageError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.metadata.mixture import Mixture
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.metadata.refits import refitted
from fcp_cli.plan.pricing.setup import PlanSetup, RankShape
from fcp_cli.planning.batching.mixing import read_mixture
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.settings.budget import continued_recipe
from fcp_cli.planning.settings.continuation import continued_mixture, remaining_steps, settings_of
from fcp_cli.planning.settings.options import PlanRequest
from fcp_cli.planning.settings.problem_settings import whole_budget_of, with_headroom
from fcp_cli.planning.settings.rank_speeds import speeds_of_run
from fcp_cli.planning.settings.ranks import devices_of_rank
from fcp_cli.planning.settings.settings import PlanInputs
from fcp_cli.profiling.computed.forward import forward_profile
from fcp_cli.validation import fields_of
from fcp_cli.words import counted


def resolve_continuation(
    request: PlanRequest, assumptions: Assumptions, *, plan: Path, first_step: int, manifest: Path, length_column: str
) -> PlanInputs:
    """Return the solver's inputs for the remaining steps of a run; unset fields of `request` default to the run's.

    Args:
        request: number of ranks, and other changes; the batches stay those of the run.
        assumptions: recorder of assumptions.
        plan: plan that the run followed.
        first_step: first untrained step.
        manifest, length_column: manifest of the run, and its column of planned lengths.

    Raises:
        ManifestError: the manifest is not the run's.
        UsageError: the request changes a setting that the run must keep.
    """
    reader = PlanReader(plan)
    metadata = reader.metadata
    table, mixture = _table_of_run(request, metadata, manifest, length_column, first_step, plan)
    if mixture is None and table.content_hash() != metadata.manifest.content_hash:
        raise ManifestError(
            f"{manifest} is not the manifest {metadata.manifest.name} that {plan} was made from, or it "
            "was changed since; name the right one: fcp plan MANIFEST --continue-from ..."
        )
    ranks = request.ranks or metadata.num_ranks
    ranks_per_node = request.ranks_per_node or min(metadata.ranks_per_node, ranks)
    if request.ranks_per_node is None:
        assumptions.assume("--ranks-per-node", ranks_per_node, f"the run had {metadata.ranks_per_node}")
    if request.tokens_per_rank is None:
        assumptions.assume("--tokens-per-rank", metadata.tokens_per_rank, "the run's plan")
    tokens, padding = request.tokens_per_rank or metadata.tokens_per_rank, metadata.padding_multiple
    profile = _profile_of_run(request.profile, plan, metadata, first_step, assumptions)
    if profile.recompute_levels and (ranks != metadata.num_ranks or request.recipe.given()):
        raise UsageError(
            f"{plan} recomputes layers as needed, by the memory of its {counted(metadata.num_ranks, 'rank')}; continue "
            "it on the same number with the same recipe, or make a new plan"
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
                "tokens_per_rank": whole_budget_of(with_headroom(tokens, request.headroom), padding, assumptions),
                "encoder_ranks": None,
                "recipe": continued_recipe(request, metadata, profile, shape, assumptions),
            },
            rank_speeds=speeds_of_run(request, metadata, first_step, ranks, ranks_per_node, assumptions),
            profile=profile,
        ),
        settings=settings_of(metadata) if mixture is None else replace(settings_of(metadata), mixture=mixture),
        remaining=remaining_steps(reader, first_step) if mixture is None else None,
        continues=None if mixture is None else continued_mixture(metadata, first_step, len(table)),
    )


def _table_of_run(
    request: PlanRequest, metadata: PlanMetadata, manifest: Path, length_column: str, first_step: int, plan: Path
) -> tuple[LengthTable, Mixture | None]:
    """Read the run's manifest, or the manifests of its mixture with changed weights from `first_step` on."""
    if not request.mix:
        return read_manifest(manifest, length_column=length_column), None
    if metadata.mixture is None:
        raise UsageError(
            f"{plan} is of one manifest, whose batches cannot become a mixture's; start a new run with --mix"
        )
    return read_mixture(request.mix, length_column=length_column, before=metadata.mixture, first_step=first_step)


def _profile_of_run(
    given: Path | None, plan: Path, metadata: PlanMetadata, first_step: int, assumptions: Assumptions
) -> CostProfile:
    if given is not None:
        return load_cost_profile(given)
    profile = parse_cost_profile(metadata.cost_profile, name=f"{plan}: the plan's cost profile")
    assumptions.assume("--profile", f"{profile.model} on {profile.cluster}", "the run's plan")
    refit = metadata.refit_at(first_step)
    profile = refitted(profile, refit)
    return profile if refit is None else replace(profile, text=dump_cost_profile(profile))
