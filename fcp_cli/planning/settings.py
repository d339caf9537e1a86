"""Resolution of a `PlanRequest` to the inputs of a solver, with an assumption recorded for each option not given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from fcp_cli.cost.levels import RecomputeLevel, seconds_by_stage
from fcp_cli.cost.profile import CostProfile, dump_cost_profile, load_cost_profile, parse_cost_profile
from fcp_cli.cost.recipe import Recipe, SplitAttention
from fcp_cli.errors import FcpError, ManifestError, ProfileError, UsageError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import LengthTable, manifest_source
from fcp_cli.memory.activations import kept_bytes, plain_loss_bytes
from fcp_cli.memory.fitting import FittedRecipe, JobRanks, all_fits
from fcp_cli.memory.items import RESERVE_FRACTION, precision_of
from fcp_cli.memory.state import backward_of
from fcp_cli.models.cluster import DEFAULT_MODEL, EXAMPLE_CLUSTER, ClusterSpec, cluster_of, load_cluster
from fcp_cli.models.model import ModelSpec, known_model, load_model
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Batching, Continuation, Mixture, PlanMetadata, refitted
from fcp_cli.plan.setup import Pipeline, PlanSetup, RankShape, padding_multiple
from fcp_cli.planning.batches import BatchSettings, GlobalBatches, read_mixture
from fcp_cli.planning.continuation import (
    ChangedMixture,
    RemainingBatches,
    RemainingSteps,
    continued_mixture,
    remaining_steps,
    settings_of,
)
from fcp_cli.planning.encoder_balance import balanced_encoder, with_encoder_ranks
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem, whole_budget
from fcp_cli.planning.ranks import (
    devices_of_rank,
    ranks_on,
    ranks_under,
    requested_speeds,
    require_pipelines,
    speeds_of_run,
)
from fcp_cli.planning.recipe import (
    Budget,
    RecipeCandidate,
    RecipeChoice,
    RecipeData,
    choose_fit,
    computed_budget,
    continued_recipe,
    options_that_hold,
    profiled_budget,
    quickest_recipe,
    require_room,
    say_what_is_recomputed,
    say_what_offloading_costs,
)
from fcp_cli.profiling.computed import analytic_profile, as_needed_profile, with_level_tokens
from fcp_cli.profiling.forward import forward_profile
from fcp_cli.util.console import Assumptions
from fcp_cli.util.machine import find_accelerators
from fcp_cli.util.validation import fields_of
from fcp_cli.util.words import counted

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


# Resolution of the settings that all steps of a plan share: cost profile, ranks, recipe, token budget and sync.
#
# Precedence of profiles: flags (or environment, fcp.yaml), then `profile.yaml` in the current folder, then a profile
# computed for the given model and cluster, or for the accelerators of this machine.

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


# Pipeline settings that a cost profile lacks, derived from model and cluster if known.
#
# Forward and backward split a block's seconds by their matrix products. The loss head gets its share of the model's
# matrix parameters (22 % of Qwen3-1.7B's, 8 % of Qwen3-8B's). A stage sends hidden states, sharded by tensor
# parallelism, over the slower of the profile's links, since Megatron places stages as far apart as it can.


def pipeline_of(profile: CostProfile, ranks: JobRanks, recipe: Recipe | None, *, tokens: int = 0) -> Pipeline | None:
    """Return the pipeline of a rank, or None without pipeline parallelism.

    Args:
        profile: source of model, cluster and bandwidths, and of the recipe if `recipe` is None.
        ranks: source of stages and virtual stages.
        recipe: recipe of the plan.
        tokens: token budget, for as-needed recomputation by stage.

    Raises:
        UsageError: there are more blocks than layers.
    """
    if ranks.pipeline_parallel == 1:
        return None
    recipe = recipe or profile.recipe or Recipe()
    recomputes = recipe.recomputes_matrices
    spec = known_model(profile.model)
    if spec is None:
        # A backward has twice the matrix products of a forward, plus a forward if layers recompute.
        unknown = 1 / 4 if recomputes else 1 / 3
        return Pipeline(
            virtual_stages=ranks.virtual_stages, forward_share=1.0 if profile.phase == "forward" else unknown
        )
    blocks = ranks.pipeline_parallel * ranks.virtual_stages
    if blocks > spec.num_layers:
        raise UsageError(
            f"{ranks.pipeline_parallel} stages of {ranks.virtual_stages} blocks of layers each exceed the "
            f"{spec.num_layers} layers of {spec.name}; give fewer --virtual-stages"
        )
    sent_bytes = precision_of(recipe).activation * spec.hidden_size / ranks.tensor_parallel
    passes = 1.0 if profile.phase == "forward" else backward_of(spec, recipe).language.total(recomputes=recomputes)
    levels = profile.recompute_levels if profile.phase is None else ()
    held = _tokens_in_flight(spec, recipe, ranks, tokens, levels) if levels else []
    return Pipeline(
        virtual_stages=ranks.virtual_stages,
        recompute_seconds_per_token=seconds_by_stage(levels, held),
        forward_share=1 / passes,
        head_share=spec.embedding_parameters / spec.matrix_parameters,
        send_seconds=_message_seconds(profile.cluster),
        send_seconds_per_token=sent_bytes / min(profile.bandwidth.intra_node, profile.bandwidth.inter_node),
    )


def _tokens_in_flight(
    spec: ModelSpec, recipe: Recipe, ranks: JobRanks, tokens: int, levels: Sequence[RecomputeLevel]
) -> list[float]:
    """Return [stages] the tokens in flight with full micro-batches, times the stage's share of the layers.

    Stage s of P has 1 / P of the layers and at most P - s micro-batches in flight. The last stage also holds all
    logits, which Megatron's loss materializes.
    """
    stages, precision = ranks.pipeline_parallel, precision_of(recipe)
    held = [tokens * (stages - stage) / stages for stage in range(stages)]
    last = replace(recipe, recompute=levels[-1].recompute)
    kept = sum(count * kept_bytes(spec, kind, last, precision) for kind, count in spec.kinds.items())
    left = 1.0 - plain_loss_bytes(spec, precision) * tokens / (kept * levels[-1].tokens)
    # If the logits fill the memory, all layers recompute.
    held[-1] = held[-1] / left if left > 0 else math.inf
    return held


def with_recomputation(profile: CostProfile, pipeline: Pipeline | None) -> CostProfile:
    """Return the profile with the stages' mean recomputation added to the linear seconds."""
    if pipeline is None or not pipeline.recompute_seconds_per_token:
        return profile
    coefficients = profile.coefficients
    # `Pipeline.block_seconds` replaces the mean by each stage's own seconds.
    linear = coefficients.linear_seconds_per_token + pipeline.mean_recompute_seconds
    found = replace(profile, coefficients=replace(coefficients, linear_seconds_per_token=linear))
    return replace(found, text=dump_cost_profile(found))


def say_what_stages_recompute(profile: CostProfile, pipeline: Pipeline, assumptions: Assumptions) -> None:
    """Record the share of layers that each stage recomputes as an assumption."""
    again = pipeline.recompute_seconds_per_token
    if again:
        shares = [one / profile.recompute_levels[-1].seconds_per_token for one in again]
        assumptions.assume(
            "recomputation",
            f"{', '.join(f'{share:.0%}' for share in shares)} of the layers of each stage",
            "later stages have fewer micro-batches in flight",
        )


def _message_seconds(cluster: str) -> float:
    try:
        return load_cluster(cluster).message_seconds
    except ProfileError:
        return 0.0


# Resolution of a `PlanRequest` for the remaining steps of a run; unset fields default to the run's.


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
