"""Resolution of a `PlanRequest` to the inputs of a solver, with an assumption recorded for each option not given."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fcp_cli.console import Assumptions
from fcp_cli.cost.profile import (
    CostProfile,
)
from fcp_cli.errors import UsageError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.plan.metadata.mixture import Mixture
from fcp_cli.plan.metadata.plan_metadata import Batching, Continuation
from fcp_cli.planning.batching.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.batching.mixing import read_mixture
from fcp_cli.planning.encoder_balance import balanced_encoder, with_encoder_ranks
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.settings.budget import (
    Budget,
    options_that_hold,
)
from fcp_cli.planning.settings.continuation import (
    ChangedMixture,
    RemainingBatches,
    RemainingSteps,
)
from fcp_cli.planning.settings.options import PlanRequest
from fcp_cli.planning.settings.problem_settings import resolve_problem
from fcp_cli.planning.settings.recipe_search import RecipeData

ASSUMED_GLOBAL_BATCH_SIZE = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """Inputs of a solver.

    Attributes:
        remaining: steps of a run to replan with their batches unchanged, or None.
        continues: run that a changed mixture continues, or None.
        budget: token budget and recipe; None for a continued run.
        data: data for recipe searches; None for a continued run.
    """

    table: LengthTable
    problem: Problem
    settings: BatchSettings
    remaining: RemainingSteps | None = None
    continues: Continuation | None = None
    budget: Budget | None = None
    data: RecipeData | None = None

    def batches(self) -> GlobalBatches:
        """Return the global batches to plan."""
        if self.continues is not None:
            return ChangedMixture(
                self.table, self.problem, self.settings, self.continues, options_that_hold=self._options_that_hold
            )
        if self.remaining is not None:
            return RemainingBatches(self.table, self.problem, self.settings, self.remaining)
        return GlobalBatches(self.table, self.problem, self.settings, self._options_that_hold)

    def _options_that_hold(self, longest_tokens: int) -> str:
        budget = self.budget or Budget(tokens_per_rank=self.problem.tokens_per_rank, sync=self.problem.sync)
        return options_that_hold(longest_tokens, budget, self.problem.num_ranks)


def resolve(
    request: PlanRequest,
    assumptions: Assumptions,
    *,
    most_peers: int | None = None,
    max_degree: int | None = None,
    as_needed: bool = True,
) -> PlanInputs:
    """Resolve a request, recording every assumption.

    Args:
        assumptions: recorder of assumptions.
        most_peers: peer limit of a rank, which bounds the memory of its connections; None: no limit.
        max_degree: 1 forbids rings, so that each sequence must fit one rank; None: no limit.
        as_needed: see `RecipeData.as_needed`.
    """
    table, mixture = _table(request)
    if table.column != request.length_column:
        assumptions.assume(
            "--length-column", table.column, f"{request.manifest or table.name} has no column {request.length_column}"
        )
    settings = BatchSettings(
        global_batch_size=_global_batch_size(request, table, assumptions),
        seed=request.seed,
        shuffle=request.shuffle,
        epochs=request.epochs,
        last_batch=request.last_batch,
        max_length=request.max_length,
        overlong=request.overlong,
        step_limit=request.steps,
        batching=_batching(request),
        mixture=mixture,
    )
    data = RecipeData(table=table, settings=settings, max_degree=max_degree, as_needed=as_needed)
    problem, budget = resolve_problem(request, assumptions, most_peers=most_peers, data=data)
    _warn_of_unpriced_vision(table, problem.profile, assumptions)
    inputs = PlanInputs(table=table, problem=problem, settings=settings, budget=budget, data=data)
    if request.encoder_balance == "ring" and request.encoder_ranks is None:
        return inputs
    batches = inputs.batches()
    problem = balanced_encoder(batches, request.encoder_balance, assumptions)
    if request.encoder_ranks is not None:
        problem = with_encoder_ranks(batches, request.encoder_ranks, assumptions)
    return replace(inputs, problem=problem)


def _table(request: PlanRequest) -> tuple[LengthTable, Mixture | None]:
    """Read the manifest, or the manifests of a mixture."""
    if request.mix:
        if request.manifest is not None:
            raise UsageError(f"--mix names its manifests; remove {request.manifest}, or add --mix {request.manifest}:1")
        if request.global_batch_tokens is not None:
            raise UsageError(
                "--mix counts sequences of a step, which --global-batch-tokens does not fix; give --global-batch-size"
            )
        return read_mixture(request.mix, length_column=request.length_column)
    if request.manifest is None:
        raise UsageError("name the MANIFEST to plan, like 'fcp plan dataset.parquet', or a run with --continue-from")
    return read_manifest(request.manifest, length_column=request.length_column), None


def _warn_of_unpriced_vision(table: LengthTable, profile: CostProfile, assumptions: Assumptions) -> None:
    if table.vision_patches is not None and not profile.prices_vision:
        assumptions.warn(
            f"{table.name} has images, but the cost profile of {profile.model} has no vision encoder: encoding them "
            "is not priced; plan with the --model or --profile of a vision-language model"
        )


def _batching(request: PlanRequest) -> Batching | None:
    """Return the batching rule by tokens, or None for batches by number of sequences."""
    if request.global_batch_tokens is None:
        return None
    if request.global_batch_size is not None:
        raise UsageError("--global-batch-tokens and --global-batch-size both say what a step trains; give one of them")
    for flag, given in (("--epochs", request.epochs > 1), ("--last-batch drop", request.last_batch == "drop")):
        if given:
            raise UsageError(f"--global-batch-tokens plans one epoch and all of it; remove {flag}")
    return Batching(by="tokens", tokens=request.global_batch_tokens)


def _global_batch_size(request: PlanRequest, table: LengthTable, assumptions: Assumptions) -> int:
    rows = len(table)
    if request.global_batch_tokens is not None:  # an estimate; the plan's metadata records the actual maximum
        return max(1, round(request.global_batch_tokens / float(table.length_tokens.mean())))
    if (given := request.global_batch_size) is not None:
        if given > rows:
            reason = f"the manifest has no more, but --global-batch-size is {given}"
            assumptions.assume("sequences of a step", rows, reason)
        return given
    size = min(ASSUMED_GLOBAL_BATCH_SIZE, rows)
    assumptions.assume("--global-batch-size", size, "the papers' 512" if size < rows else "all sequences")
    return size
