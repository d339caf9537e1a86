"""Completes a `PlanRequest` to a whole planning problem, and records its assumptions for options that were not given.

Order: flags (or environment, fcp.yaml), then the folder (`profile.yaml`), then a profile that is
computed for the model and the cluster that were named, or for the accelerators of this machine.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import numpy as np

from fcp_cli.console import Assumptions
from fcp_cli.cost.profile import (
    CostProfile,
    dump_cost_profile,
    load_cost_profile,
)
from fcp_cli.errors import FcpError, UsageError
from fcp_cli.machine.accelerators import find_accelerators
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.memory.fitting import FittedRecipe, JobRanks, all_fits
from fcp_cli.memory.table import RESERVE_FRACTION
from fcp_cli.models.cluster import EXAMPLE_CLUSTER, ClusterSpec, cluster_of, load_cluster
from fcp_cli.models.model import ModelSpec, load_model
from fcp_cli.models.shipped import DEFAULT_MODEL
from fcp_cli.plan.metadata.mixture import Mixture
from fcp_cli.plan.metadata.plan_metadata import Batching, Continuation
from fcp_cli.plan.pricing.padding import padding_multiple
from fcp_cli.plan.pricing.setup import RankShape
from fcp_cli.planning.batching.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.batching.mixing import read_mixture
from fcp_cli.planning.encoder_balance import balanced_encoder, with_cached_embeddings, with_encoder_ranks
from fcp_cli.planning.problem import Problem, whole_budget
from fcp_cli.planning.settings.budget import (
    Budget,
    choose_fit,
    computed_budget,
    options_that_hold,
    profiled_budget,
    require_room,
    say_what_is_recomputed,
    say_what_offloading_costs,
)
from fcp_cli.planning.settings.continuation import (
    ChangedMixture,
    RemainingBatches,
    RemainingSteps,
)
from fcp_cli.planning.settings.options import PlanRequest
from fcp_cli.planning.settings.pipelines import pipeline_of, say_what_stages_recompute, with_recomputation
from fcp_cli.planning.settings.rank_speeds import requested_speeds
from fcp_cli.planning.settings.ranks import ranks_on, ranks_under, require_pipelines
from fcp_cli.planning.settings.recipe_search import RecipeCandidate, RecipeChoice, RecipeData, quickest_recipe
from fcp_cli.profiling.computed.analytic import analytic_profile
from fcp_cli.profiling.computed.as_needed import as_needed_profile, with_level_tokens
from fcp_cli.profiling.computed.forward import forward_profile
from fcp_cli.recipe import Recipe, SplitAttention
from fcp_cli.validation import fields_of
from fcp_cli.words import counted

FOLDER_PROFILE = Path("profile.yaml")
ASSUMED_GLOBAL_BATCH_SIZE = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """Everything that a solver needs.

    Attributes:
        remaining: steps of a run that are planned anew, batch by batch.
        continues: the run that a changed mixture continues.
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
    """Complete the request; every assumption is recorded.

    Args:
        assumptions: collects them.
        most_peers: ring peers that a rank may have, whose connections take memory; None: no limit.
        max_degree: 1 forbids rings, so that a rank must hold every sequence; None: no limit.
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
        shuffle=request.shuffle and request.step_column is None,
        epochs=request.epochs,
        last_batch=request.last_batch,
        max_length=request.max_length,
        overlong=request.overlong,
        step_limit=_step_limit(request.steps),
        batching=_batching(request),
        mixture=mixture,
    )
    data = RecipeData(table=table, settings=settings, max_degree=max_degree, as_needed=as_needed)
    problem, budget = resolve_problem(request, assumptions, most_peers=most_peers, data=data)
    _warn_of_unpriced_vision(table, problem.profile, assumptions)
    inputs = PlanInputs(table=table, problem=problem, settings=settings, budget=budget, data=data)
    if request.encoder_balance == "ring" and request.encoder_ranks is None and not request.embeddings_cached:
        return inputs
    batches = inputs.batches()
    problem = balanced_encoder(batches, request.encoder_balance, assumptions)
    if request.encoder_ranks is not None:
        problem = with_encoder_ranks(batches, request.encoder_ranks, assumptions)
    if request.embeddings_cached:
        problem = with_cached_embeddings(problem, batches.steps_per_epoch)
    return replace(inputs, problem=problem)


def _table(request: PlanRequest) -> tuple[LengthTable, Mixture | None]:
    """Read the manifest, or the manifests that are mixed."""
    if request.mix:
        if request.manifest is not None:
            raise UsageError(
                f"--mix names its manifests; leave {request.manifest} out, or add --mix {request.manifest}:1"
            )
        for flag, given in (
            ("--step-column", request.step_column),
            ("--global-batch-tokens", request.global_batch_tokens),
        ):
            if given is not None:
                raise UsageError(
                    f"--mix counts sequences of a step, which {flag} does not fix; give --global-batch-size"
                )
        return read_mixture(request.mix, length_column=request.length_column)
    if request.manifest is None:
        raise UsageError("name the MANIFEST to plan, like 'fcp plan dataset.parquet', or a run with --continue-from")
    return read_manifest(request.manifest, length_column=request.length_column, step_column=request.step_column), None


def _step_limit(steps: int | str | None) -> int | None:
    """Return the steps of the whole plan; a part A:B has those of a plan without a limit."""
    if steps is None or ":" in str(steps):
        return None
    if not str(steps).isdecimal() or not int(steps):
        raise UsageError(f"--steps is {steps}; it must be at least 1, the first N steps, or a part A:B of the plan")
    return int(steps)


def resolve_problem(
    request: PlanRequest, assumptions: Assumptions, *, most_peers: int | None = None, data: RecipeData | None = None
) -> tuple[Problem, Budget]:
    """Complete the settings that all steps of a plan share: ranks, recipe, token budget, sync, profile.

    Args:
        request, assumptions, most_peers: see `resolve`.
        data: the data whose steps recipes are compared on; None: the first of a fixed order that leaves room enough.
    """
    profile = _profile_at_hand(request, assumptions)
    if profile is None:
        profile, ranks, budget = computed_basis(request, assumptions, most_peers=most_peers, data=data)
    else:
        ranks = replace(ranks_under(profile, request, assumptions), most_peers=most_peers)
        ranks = ranks.that_share(request.attention, prices_heads=profile.heads is not None)
        budget = profiled_budget(request, profile, ranks, assumptions)
        if budget.level_tokens:
            profile = with_level_tokens(profile, budget.level_tokens)
    say_what_offloading_costs(budget, profile, assumptions)
    say_what_is_recomputed(profile, assumptions)
    return _problem(request, profile, ranks, budget, assumptions), budget


def problem_under(request: PlanRequest, inputs: PlanInputs) -> Problem:
    """Return the problem of the same ranks under another request: other recipe, sync or token budget.

    Without a profile, the recipe is the quickest that the request allows on the plan's own data.

    Args:
        request: the request with the changes.
        inputs: the inputs of the plan, which `resolve` made.
    """
    now, assumptions = inputs.problem, Assumptions()
    known = inputs.budget
    most_peers = known.room.place.most_peers if known and known.room else None
    ranks = JobRanks(**fields_of(RankShape, now), virtual_stages=now.virtual_stages, most_peers=most_peers)
    if known is None or known.cluster is None:
        ranks = ranks.that_share(request.attention, prices_heads=now.profile.heads is not None)
        return _problem(
            request, now.profile, ranks, profiled_budget(request, now.profile, ranks, assumptions), assumptions
        )
    request = replace(
        request,
        ranks=ranks.num_ranks,
        ranks_per_node=ranks.ranks_per_node,
        tensor_parallel=ranks.tensor_parallel,
        pipeline_parallel=ranks.pipeline_parallel,
        virtual_stages=ranks.virtual_stages,
    )
    basis = computed_basis(request, assumptions, cluster=known.cluster, most_peers=ranks.most_peers, data=inputs.data)
    return _problem(request, *basis, assumptions)


def _problem(
    request: PlanRequest, profile: CostProfile, ranks: JobRanks, budget: Budget, assumptions: Assumptions
) -> Problem:
    profile = _in_phase(request, profile)
    padding = padding_multiple(ranks.tensor_parallel) if request.padded_rings else None
    tokens = whole_budget_of(with_headroom(budget.tokens_per_rank, request.headroom), padding, assumptions)
    pipeline = pipeline_of(profile, ranks, budget.recipe, tokens=tokens)
    profile = with_recomputation(profile, pipeline)
    if pipeline is not None:
        say_what_stages_recompute(profile, pipeline, assumptions)
    return Problem(
        **fields_of(RankShape, ranks),
        pipeline=pipeline,
        tokens_per_rank=tokens,
        padding_multiple=padding,
        attention=split_attention(request, profile),
        rank_speeds=requested_speeds(request, ranks.num_ranks, ranks.ranks_per_node),
        sync=budget.sync,
        profile=profile,
        recipe=budget.recipe,
    )


def split_attention(request: PlanRequest, profile: CostProfile) -> SplitAttention | None:
    """Return how groups may split heads under this profile; None if they are rings."""
    if request.attention == "ring" or (request.attention == "auto" and profile.heads is None):
        return None
    if profile.heads is None:
        raise UsageError(
            f"--attention {request.attention} needs a cost profile with the block heads, which says what exchanging "
            f"tokens for heads takes; that of {profile.model} on {profile.cluster} has none; 'fcp profile' measures it "
            "on two ranks or more, and with --analytic --cluster NAME computes it for clusters such as h100-8x8"
        )
    return "ulysses" if request.attention == "ulysses" else "2d"


def _in_phase(request: PlanRequest, profile: CostProfile) -> CostProfile:
    """Return the profile of the passes that are planned."""
    if request.phase == "forward":
        return forward_profile(profile)
    if profile.phase == "forward":
        raise UsageError(
            f"the cost profile of {profile.model} on {profile.cluster} is of forward passes; add --phase forward, or "
            "give one of training with --profile"
        )
    return profile


def _warn_of_unpriced_vision(table: LengthTable, profile: CostProfile, assumptions: Assumptions) -> None:
    if table.vision_patches is not None and not profile.prices_vision:
        assumptions.warn(
            f"{table.name} has images, but the cost profile of {profile.model} has no vision encoder: encoding them "
            "is not priced; plan with the --model or --profile of a vision-language model"
        )


def _profile_at_hand(request: PlanRequest, assumptions: Assumptions) -> CostProfile | None:
    """Return the named profile, else a profile in this folder of the named model and cluster, else None."""
    path = request.profile
    if path is None and not FOLDER_PROFILE.is_file():
        return None
    profile = load_cost_profile(path or FOLDER_PROFILE)
    kernel = f" with attention kernel {profile.attention_kernel}" if request.attention_kernel != "auto" else ""
    what = f"{profile.model} on {profile.cluster}{kernel}"
    is_meant = _is_meant(profile, request)
    if path is not None and not is_meant:
        options = "--model, --cluster and --attention-kernel"
        raise UsageError(f"{path} is of {what}; drop {options} to use it, or --profile to have one computed")
    if path is None:
        assumptions.assume("--profile", FOLDER_PROFILE if is_meant else f"not {FOLDER_PROFILE}", f"found here: {what}")
    return profile if is_meant else None


def _is_meant(profile: CostProfile, request: PlanRequest) -> bool:
    same_model = request.model is None or profile.model in (request.model, load_model(request.model).name)
    same_cluster = request.cluster is None or profile.cluster in (request.cluster, load_cluster(request.cluster).name)
    return same_model and same_cluster and request.attention_kernel in ("auto", profile.attention_kernel)


def computed_basis(
    request: PlanRequest,
    assumptions: Assumptions,
    *,
    cluster: ClusterSpec | None = None,
    most_peers: int | None = None,
    data: RecipeData | None = None,
) -> tuple[CostProfile, JobRanks, Budget]:
    """Compute a profile for a model and a cluster from their figures, for ranks there and the recipe of the plan.

    Args:
        request, assumptions, most_peers, data: see `resolve_problem`.
        cluster: replaces the request's cluster.
    """
    spec = load_model(request.model or DEFAULT_MODEL)
    if request.model is None:
        assumptions.assume("--model", spec.name, "and what 'fcp launch' trains under the plan; name yours")
    cluster = given = (cluster or _cluster_to_plan_for(request, assumptions)).running(request.attention_kernel)
    tensor_parallel, pipeline_parallel = request.tensor_parallel or 1, request.pipeline_parallel or 1
    require_pipelines(request, pipeline_parallel)
    ranks = replace(ranks_on(request, cluster, tensor_parallel, pipeline_parallel, assumptions), most_peers=most_peers)
    ranks = ranks.that_share(request.attention, prices_heads=bool(cluster.message_seconds))
    if cluster.is_host:  # whose cores share one memory, however many ranks run on them
        cluster = replace(cluster, memory_bytes=cluster.memory_bytes * cluster.num_devices / ranks.num_ranks)
    capacity = cluster.memory_bytes * (1 - RESERVE_FRACTION)
    ranks = replace(ranks, capacity_bytes=capacity, on_cpu=cluster.is_host)
    is_forward = request.phase == "forward"
    # Forward passes run under the recipe of their training.
    searched = replace(request, phase="training", tokens_per_rank=None) if is_forward else request
    basis = _Basis(request=searched, spec=spec, cluster=cluster, ranks=ranks)
    fit = choose_fit(spec, request, ranks)
    require_room(spec, request, ranks, fit)
    choice = None if data is None else basis.quickest(fit, data)
    if choice is None:
        budget = computed_budget(spec, request, ranks, assumptions, fit)
    else:
        fit = choice.fit.in_forward(ranks) if is_forward else choice.fit
        budget = computed_budget(spec, request, ranks, assumptions, fit, choice.reason())
        budget = replace(budget, tried=choice.tried, for_rivals=choice.for_rivals)
    profile = basis.profile(fit)
    assumptions.assume(
        "--profile", f"{spec.name} on {cluster.name}", "estimated from data sheets; run 'fcp profile' to measure"
    )
    return replace(profile, text=dump_cost_profile(profile)), ranks, replace(budget, cluster=given)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Basis:
    """A model on ranks of a cluster, before the recipe is chosen."""

    request: PlanRequest
    spec: ModelSpec
    cluster: ClusterSpec
    ranks: JobRanks

    def profile(self, fit: FittedRecipe) -> CostProfile:
        """Compute the cost profile of a recipe."""
        if fit.level_tokens:
            return as_needed_profile(fit.recipe, fit.level_tokens, lambda one: self._profile(one, fit))
        return self._profile(fit.recipe, fit)

    def _profile(self, recipe: Recipe, fit: FittedRecipe) -> CostProfile:
        return analytic_profile(
            self.spec,
            self.cluster,
            recipe=recipe,
            sync=fit.sync,
            ranks=self.ranks.num_ranks,
            cut=self.ranks.cut,
            peers=self.ranks.peers,
        )

    def quickest(self, usual: FittedRecipe, data: RecipeData) -> RecipeChoice | None:
        """Return the quickest recipe that the request allows; None if there is no choice.

        Args:
            usual: recipe of the fixed order.
            data: steps to compare on.
        """
        fits = all_fits(self.spec, self.request.recipe, self.ranks, sync=self.request.sync)
        if self.cluster.links_per_node is None:  # gathering weights has no price: as much of it as usual
            gathering = attrgetter("sync", "recipe.zero_stage", "recipe.shard_ranks", "recipe.reduce")
            fits = [fit for fit in fits if gathering(fit) == gathering(usual)]
        if not data.as_needed:
            fits = [fit for fit in fits if not fit.level_tokens]
        candidates = []
        for fit in fits:
            with suppress(FcpError):  # no room for this padding, these stages
                if fit.tokens >= (self.request.tokens_per_rank or 1):
                    candidates.append(RecipeCandidate(fit=fit, problem=self._problem(fit)))
        return quickest_recipe(candidates, usual, data)

    def _problem(self, fit: FittedRecipe) -> Problem:
        tokens = self.request.tokens_per_rank or fit.tokens
        budget = Budget(tokens_per_rank=tokens, sync=fit.sync, recipe=fit.recipe)
        # Ranks of other speeds slow all recipes alike, and take several times as long to plan for.
        alike = replace(self.request, rank_speeds=None)
        return _problem(alike, self.profile(fit), self.ranks, budget, Assumptions())


def _cluster_to_plan_for(request: PlanRequest, assumptions: Assumptions) -> ClusterSpec:
    """Return the cluster that was named, else the accelerators of this machine, else the example."""
    if request.cluster is not None:
        return load_cluster(request.cluster)
    found = find_accelerators()
    if found is None:
        assumptions.assume("--cluster", EXAMPLE_CLUSTER, "no accelerator on this machine; name yours")
        return load_cluster(EXAMPLE_CLUSTER)
    cluster = cluster_of(found)
    assumptions.assume("--cluster", found.describe(), f"found on this machine; rates of {cluster.name}")
    return cluster


def with_headroom(tokens: int, headroom: float) -> int:
    """Return a token budget with a fraction of it left free."""
    if not 0 <= headroom < 1:
        raise UsageError(f"--headroom is {headroom}; it must be a fraction from 0 to below 1")
    return max(1, math.floor(tokens * (1.0 - headroom)))


def whole_budget_of(tokens: int, padding: int | None, assumptions: Assumptions) -> int:
    """Return the token budget, or the part of it that padded sequences can fill."""
    whole = whole_budget(tokens, padding)
    if not whole:
        raise UsageError(f"a rank may hold {counted(tokens, 'token')}, but sequences are padded to {padding} on it")
    if whole != tokens:
        assumptions.assume(
            "--tokens-per-rank", whole, f"of {tokens}, since sequences are padded to multiples of {padding}"
        )
    return whole


def _batching(request: PlanRequest) -> Batching | None:
    """Return how batches are cut that are not of so many sequences."""
    rules = {
        "--step-column": request.step_column is not None,
        "--global-batch-tokens": request.global_batch_tokens is not None,
        "--global-batch-size": request.global_batch_size is not None,
    }
    named = [flag for flag, is_given in rules.items() if is_given]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} both say what a step trains; give one of them")
    if not named or named == ["--global-batch-size"]:
        return None
    for flag, given in (("--epochs", request.epochs > 1), ("--last-batch drop", request.last_batch == "drop")):
        if given:
            raise UsageError(f"{named[0]} plans one epoch and all of it; leave {flag} out")
    if request.global_batch_tokens is None:
        return Batching(by="given")
    return Batching(by="tokens", tokens=request.global_batch_tokens)


def _global_batch_size(request: PlanRequest, table: LengthTable, assumptions: Assumptions) -> int:
    rows = len(table)
    if table.steps is not None:
        return int(np.unique(table.steps, return_counts=True)[1].max())
    if request.global_batch_tokens is not None:  # about; the plan's metadata records the maximum
        return max(1, round(request.global_batch_tokens / float(table.length_tokens.mean())))
    if (given := request.global_batch_size) is not None:
        if given > rows:
            reason = f"the manifest has no more, but --global-batch-size is {given}"
            assumptions.assume("sequences of a step", rows, reason)
        return given
    size = min(ASSUMED_GLOBAL_BATCH_SIZE, rows)
    assumptions.assume("--global-batch-size", size, "the papers' 512" if size < rows else "all sequences")
    return size
