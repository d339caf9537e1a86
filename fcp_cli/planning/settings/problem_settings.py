"""Resolution of the settings that all steps of a plan share: cost profile, ranks, recipe, token budget and sync.

Precedence of profiles: flags (or environment, fcp.yaml), then `profile.yaml` in the current folder, then a profile
computed for the given model and cluster, or for the accelerators of this machine.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from fcp_cli.console import Assumptions
from fcp_cli.cost.profile import (
    CostProfile,
    dump_cost_profile,
    load_cost_profile,
)
from fcp_cli.errors import FcpError, UsageError
from fcp_cli.machine.accelerators import find_accelerators
from fcp_cli.manifest.table.header import manifest_source
from fcp_cli.memory.fitting import FittedRecipe, JobRanks, all_fits
from fcp_cli.memory.table import RESERVE_FRACTION
from fcp_cli.models.cluster import EXAMPLE_CLUSTER, ClusterSpec, cluster_of, load_cluster
from fcp_cli.models.model import ModelSpec, load_model
from fcp_cli.models.shipped import DEFAULT_MODEL
from fcp_cli.plan.pricing.padding import padding_multiple
from fcp_cli.plan.pricing.setup import RankShape
from fcp_cli.planning.problem import Problem, whole_budget
from fcp_cli.planning.settings.budget import (
    Budget,
    choose_fit,
    computed_budget,
    profiled_budget,
    require_room,
    say_what_is_recomputed,
    say_what_offloading_costs,
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
Request = TypeVar("Request", bound=PlanRequest)


def with_counted_model(request: Request, assumptions: Assumptions) -> Request:
    """Return the request with the checkpoint whose tokenizer counted its manifest, unless it has a model or profile."""
    if request.model or request.profile or request.manifest is None or FOLDER_PROFILE.is_file():
        return request
    with suppress(FcpError):  # a faulty manifest is reported when it is read for planning
        tokenizer = (manifest_source(request.manifest) or {}).get("tokenizer")
        folder = Path(tokenizer or "bytes")
        folder = folder if folder.is_dir() else folder.parent
        # "bytes" is not a checkpoint but the byte-level tokenizer.
        if tokenizer not in (None, "bytes") and load_model(str(folder)):
            assumptions.assume("--model", folder, f"the checkpoint by which {request.manifest} was counted")
            return replace(request, model=str(folder))
    return request


def resolve_problem(
    request: PlanRequest, assumptions: Assumptions, *, most_peers: int | None = None, data: RecipeData | None = None
) -> tuple[Problem, Budget]:
    """Resolve the settings that all steps of a plan share: ranks, recipe, token budget, sync, profile.

    Args:
        request, assumptions, most_peers: see `resolve`.
        data: data for the recipe search; None: use the first recipe of the fixed order that fits.
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
    return problem_from(request, profile, ranks, budget, assumptions), budget


def problem_from(
    request: PlanRequest, profile: CostProfile, ranks: JobRanks, budget: Budget, assumptions: Assumptions
) -> Problem:
    """Return the problem of a plan with resolved profile, ranks and budget."""
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
    """Return the attention split of groups under a profile; None for pure rings."""
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
    """Return the profile for the request's phase; raise UsageError if a forward profile is used for training."""
    if request.phase == "forward":
        return forward_profile(profile)
    if profile.phase == "forward":
        raise UsageError(
            f"the cost profile of {profile.model} on {profile.cluster} is of forward passes; add --phase forward, or "
            "give one of training with --profile"
        )
    return profile


def _profile_at_hand(request: PlanRequest, assumptions: Assumptions) -> CostProfile | None:
    """Return the given profile, else the current folder's if it matches the request, else None."""
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
    """Return an analytic profile for the request's model and cluster, with the plan's ranks and budget.

    Args:
        request, assumptions, most_peers, data: see `resolve_problem`.
        cluster: overrides the request's cluster.
    """
    spec = load_model(request.model or DEFAULT_MODEL)
    if request.model is None:
        assumptions.assume("--model", spec.name, "and what 'fcp launch' trains under the plan; name yours")
    cluster = given = (cluster or _cluster_to_plan_for(request, assumptions)).running(request.attention_kernel)
    tensor_parallel, pipeline_parallel = request.tensor_parallel or 1, request.pipeline_parallel or 1
    require_pipelines(request, pipeline_parallel)
    ranks = replace(ranks_on(request, cluster, tensor_parallel, pipeline_parallel, assumptions), most_peers=most_peers)
    ranks = ranks.that_share(request.attention, prices_heads=bool(cluster.message_seconds))
    if cluster.is_host:  # ranks share the host's memory
        cluster = replace(cluster, memory_bytes=cluster.memory_bytes * cluster.num_devices / ranks.num_ranks)
    capacity = cluster.memory_bytes * (1 - RESERVE_FRACTION)
    ranks = replace(ranks, capacity_bytes=capacity, on_cpu=cluster.is_host)
    is_forward = request.phase == "forward"
    # Forward passes use the recipe of training.
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
    """Inputs of the recipe search: request, model, cluster and ranks."""

    request: PlanRequest
    spec: ModelSpec
    cluster: ClusterSpec
    ranks: JobRanks

    def profile(self, fit: FittedRecipe) -> CostProfile:
        """Return the analytic cost profile of a recipe."""
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
        """Return the fastest recipe that the request allows, or None with fewer than two candidates.

        Args:
            usual: first recipe of the fixed order that fits.
            data: lengths to hold, and steps to compare on.
        """
        fits = all_fits(self.spec, self.request.recipe, self.ranks, sync=self.request.sync)
        if self.cluster.links_per_node is None:  # gathers are not priced here, so keep the usual sharding
            gathering = attrgetter("sync", "recipe.zero_stage", "recipe.shard_ranks", "recipe.reduce")
            fits = [fit for fit in fits if gathering(fit) == gathering(usual)]
        if not data.as_needed:
            fits = [fit for fit in fits if not fit.level_tokens]
        candidates = []
        for fit in fits:
            with suppress(FcpError):  # skip recipes that do not fit the padding or the stages
                if fit.tokens >= (self.request.tokens_per_rank or 1):
                    candidates.append(RecipeCandidate(fit=fit, problem=self._problem(fit)))
        return quickest_recipe(candidates, usual, data)

    def _problem(self, fit: FittedRecipe) -> Problem:
        tokens = self.request.tokens_per_rank or fit.tokens
        budget = Budget(tokens_per_rank=tokens, sync=fit.sync, recipe=fit.recipe)
        # Ignored for speed: rank speeds slow all recipes alike, but take several times as long to plan for.
        alike = replace(self.request, rank_speeds=None)
        return problem_from(alike, self.profile(fit), self.ranks, budget, Assumptions())


def _cluster_to_plan_for(request: PlanRequest, assumptions: Assumptions) -> ClusterSpec:
    """Return the requested cluster, else this machine's accelerators, else the example."""
    if request.cluster is not None:
        return load_cluster(request.cluster)
    found = find_accelerators()
    if found is None:
        assumptions.assume(
            "--cluster", EXAMPLE_CLUSTER, "no accelerator here; name yours, or this-machine for CPU cores"
        )
        return load_cluster(EXAMPLE_CLUSTER)
    cluster = cluster_of(found)
    assumptions.assume("--cluster", found.describe(), f"found on this machine; rates of {cluster.name}")
    return cluster


def with_headroom(tokens: int, headroom: float) -> int:
    """Return the token budget reduced by a fraction `headroom`, at least 1."""
    if not 0 <= headroom < 1:
        raise UsageError(f"--headroom is {headroom}; it must be a fraction from 0 to below 1")
    return max(1, math.floor(tokens * (1.0 - headroom)))


def whole_budget_of(tokens: int, padding: int | None, assumptions: Assumptions) -> int:
    """Return the token budget rounded down to the padding multiple; raise UsageError if that is 0."""
    whole = whole_budget(tokens, padding)
    if not whole:
        raise UsageError(f"a rank may hold {counted(tokens, 'token')}, but sequences are padded to {padding} on it")
    if whole != tokens:
        assumptions.assume(
            "--tokens-per-rank", whole, f"of {tokens}, since sequences are padded to multiples of {padding}"
        )
    return whole
