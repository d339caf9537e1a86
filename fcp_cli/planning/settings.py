"""Resolution of a `PlanRequest`: what planning needs, with an assumption recorded for each option not given.

Profiles take precedence in this order: flags (or environment, fcp.yaml), `profile.yaml` in the current folder, one
computed for the given model and cluster, or for the accelerators of this machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from fcp_cli.cost.profile import CostProfile, dump_cost_profile, load_cost_profile
from fcp_cli.cost.recipe import SplitAttention
from fcp_cli.errors import FcpError, ProfileError, UsageError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import LengthTable, manifest_source
from fcp_cli.memory.fitting import FittedRecipe, JobRanks, all_fits
from fcp_cli.memory.items import RESERVE_FRACTION
from fcp_cli.models.cluster import DEFAULT_MODEL, EXAMPLE_CLUSTER, ClusterSpec, cluster_of, load_cluster
from fcp_cli.models.model import ModelSpec, known_model, load_model
from fcp_cli.plan.metadata import Batching, Continuation, Mixture
from fcp_cli.plan.setup import RankShape, padding_multiple
from fcp_cli.planning.batches import (
    BatchSettings,
    ChangedMixture,
    GlobalBatches,
    RemainingBatches,
    RemainingSteps,
    read_mixture,
)
from fcp_cli.planning.encoder_balance import balanced_encoder, with_encoder_ranks
from fcp_cli.planning.fcp_solver import compile_missing
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.pipelines import pipeline_of, say_what_stages_recompute, with_recomputation
from fcp_cli.planning.problem import Problem, whole_budget
from fcp_cli.planning.recipe import (
    Budget,
    RecipeCandidate,
    RecipeData,
    choose_fit,
    computed_budget,
    options_that_hold,
    profiled_budget,
    quickest_recipe,
    require_room,
    sampled_seconds,
    say_what_is_recomputed,
    say_what_offloading_costs,
)
from fcp_cli.planning.speeds import requested_speeds
from fcp_cli.profiling.computed import analytic_profile, as_needed_profile, with_level_tokens
from fcp_cli.profiling.forward import forward_profile
from fcp_cli.util.console import Assumptions
from fcp_cli.util.files import manifest_here, unused
from fcp_cli.util.machine import find_accelerators
from fcp_cli.util.options import MOST_RANKS
from fcp_cli.util.validation import fields_of, shown
from fcp_cli.util.words import counted

ASSUMED_GLOBAL_BATCH_SIZE: Final = 512
FOLDER_PROFILE: Final = Path("profile.yaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """Resolved options of a plan: all that planning needs, so that nothing below reads files or options.

    Attributes:
        request: options that were resolved.
        files: files that were read, which the plan must not overwrite.
        assumptions: values assumed for options that were not given, and warnings.
        remaining: steps of a run to replan with their batches unchanged, or None.
        continues: run that a changed mixture continues, or None.
        budget: token budget and recipe; None for a continued run.
        data: data for recipe searches; None for a continued run.
    """

    table: LengthTable
    problem: Problem
    settings: BatchSettings
    request: PlanRequest = field(default_factory=PlanRequest)
    files: Sequence[Path] = ()
    assumptions: Assumptions = field(default_factory=Assumptions)
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


def resolve(request: PlanRequest, assumptions: Assumptions) -> PlanInputs:
    """Resolve a request, recording every assumption."""
    if request.manifest is None and not request.mix and (here := manifest_here()) is not None:
        assumptions.assume("MANIFEST", here, "it is in this folder")
        request = replace(request, manifest=here)
    request = with_counted_model(request, assumptions)
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
    data = RecipeData(table=table, settings=settings, max_degree=request.max_degree)
    problem, budget = resolve_problem(request, assumptions, data=data)
    if table.vision_patches is not None and not problem.profile.prices_vision:
        assumptions.warn(
            f"{table.name} has images, but the cost profile of {problem.profile.model} has no vision encoder: encoding "
            "them is not priced; plan with the --model or --profile of a vision-language model"
        )
    inputs = PlanInputs(
        table=table,
        problem=problem,
        settings=settings,
        request=request,
        files=request.files,
        assumptions=assumptions,
        budget=budget,
        data=data,
    )
    if request.encoder_balance == "ring" and request.encoder_ranks is None:
        return inputs
    batches = inputs.batches()
    problem = balanced_encoder(batches, request.encoder_balance, assumptions)
    if request.encoder_ranks is not None:
        problem = with_encoder_ranks(batches, request.encoder_ranks, assumptions)
    return replace(inputs, problem=problem)


def with_counted_model(request: PlanRequest, assumptions: Assumptions) -> PlanRequest:
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


# Settings that all steps of a plan share: cost profile, ranks, recipe, token budget and sync.


def resolve_problem(
    request: PlanRequest, assumptions: Assumptions, *, data: RecipeData | None = None
) -> tuple[Problem, Budget]:
    """Resolve the settings that all steps of a plan share: ranks, recipe, token budget, sync, profile.

    Args:
        request, assumptions: see `resolve`.
        data: data for the recipe search; None: use the first recipe of the fixed order that fits.
    """
    profile = _profile_at_hand(request, assumptions)
    if profile is None:
        profile, ranks, budget = computed_basis(request, assumptions, data=data)
    else:
        ranks = _ranks_under(profile, request, assumptions)
        ranks = ranks.that_share(request.attention, prices_heads=profile.heads is not None)
        ranks = _with_quickest_stages(profile, request, ranks, data)
        budget = profiled_budget(request, profile, ranks, assumptions)
        if budget.level_tokens:
            profile = with_level_tokens(profile, budget.level_tokens)
        tiers: Any = profile.measurement.get("transfers") or {}
        is_of_one_node = profile.measurement.get("device") == "cuda" and set(tiers) == {"intra_node"}
        if is_of_one_node and ranks.num_ranks > ranks.ranks_per_node:
            assumptions.warn(
                f"the profile of {profile.model} was measured on one node, where NCCL gives a message up to 32 "
                "channels; on several nodes messages are slower inside them, too: measure with 'fcp profile --nodes 2'"
            )
    say_what_offloading_costs(budget, profile, assumptions)
    say_what_is_recomputed(profile, assumptions)
    return problem_from(request, profile, ranks, budget, assumptions), budget


def problem_from(
    request: PlanRequest, profile: CostProfile, ranks: JobRanks, budget: Budget, assumptions: Assumptions
) -> Problem:
    """Return the problem of a plan with resolved profile, ranks and budget."""
    profile = _in_phase(request, profile)
    padding = padding_multiple(ranks.tensor_parallel) if request.padded_rings else None
    tokens = whole_budget_of(budget.tokens_per_rank, padding, assumptions)
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
    """Return the given profile, else the current folder's if it is of the requested model and cluster, else None.

    An analytic one that merely lies there gives way to `--model` and `--cluster`: it can be computed again, under the
    recipe that suits the lengths.
    """
    path = request.profile
    if path is None and not FOLDER_PROFILE.is_file():
        return None
    profile = load_cost_profile(path or FOLDER_PROFILE)
    model, cluster = request.model, request.cluster
    is_meant = model is None or profile.model in (model, load_model(model).name)
    is_meant = is_meant and (cluster is None or profile.cluster in (cluster, load_cluster(cluster).name))
    what = f"{profile.model} on {profile.cluster}"
    if path is not None and not is_meant:
        raise UsageError(
            f"{path} is of {what}; drop --model and --cluster to use it, or --profile to have one computed"
        )
    if path is None and profile.origin == "analytic" and model is not None and cluster is not None:
        is_meant = False
    if path is None:
        assumptions.assume("--profile", FOLDER_PROFILE if is_meant else f"not {FOLDER_PROFILE}", f"found here: {what}")
    return profile if is_meant else None


def computed_basis(
    request: PlanRequest,
    assumptions: Assumptions,
    *,
    cluster: ClusterSpec | None = None,
    data: RecipeData | None = None,
) -> tuple[CostProfile, JobRanks, Budget]:
    """Return an analytic profile for the request's model and cluster, with the plan's ranks and budget.

    Args:
        request, assumptions, data: see `resolve_problem`.
        cluster: overrides the request's cluster.
    """
    spec = load_model(request.model or DEFAULT_MODEL)
    if request.model is None:
        assumptions.assume("--model", spec.name, "and what 'fcp launch' trains under the plan; name yours")
    cluster = given = cluster or _cluster_to_plan_for(request, assumptions)
    tensor_parallel, pipeline_parallel = request.tensor_parallel or 1, request.pipeline_parallel or 1
    _require_pipelines(request, pipeline_parallel)
    ranks = _ranks_on(request, cluster, tensor_parallel, pipeline_parallel, assumptions)
    ranks = ranks.that_share(request.attention, prices_heads=bool(cluster.message_seconds))
    if cluster.is_host:  # ranks share the host's memory
        cluster = replace(cluster, memory_bytes=cluster.memory_bytes * cluster.num_devices / ranks.num_ranks)
    capacity = cluster.memory_bytes * (1 - RESERVE_FRACTION)
    ranks = replace(ranks, capacity_bytes=capacity, on_cpu=cluster.is_host)
    fit = choose_fit(spec, request, ranks)
    require_room(spec, request, ranks, fit)
    choice = None
    if data is not None:
        choice = quickest_recipe(_recipes_to_try(request, spec, cluster, ranks, fit, data.as_needed), fit, data)
    if choice is None:
        budget = computed_budget(spec, request, ranks, assumptions, fit)
    else:
        ranks = replace(ranks, virtual_stages=choice.fit.virtual_stages)
        fit = choice.fit.in_forward(ranks) if request.phase == "forward" else choice.fit
        budget = computed_budget(spec, request, ranks, assumptions, fit, choice.reason())
        budget = replace(budget, tried=choice.tried, for_rivals=choice.for_rivals)
    profile = _computed_profile(spec, cluster, ranks, fit)
    assumptions.assume(
        "--profile", f"{spec.name} on {cluster.name}", "estimated from data sheets; run 'fcp profile' to measure"
    )
    return replace(profile, text=dump_cost_profile(profile)), ranks, replace(budget, cluster=given)


def _computed_profile(spec: ModelSpec, cluster: ClusterSpec, ranks: JobRanks, fit: FittedRecipe) -> CostProfile:
    """Return the analytic cost profile of a recipe."""
    of = partial(
        analytic_profile, spec, cluster, sync=fit.sync, ranks=ranks.num_ranks, cut=ranks.cut, peers=ranks.peers
    )
    if fit.level_tokens:
        return as_needed_profile(fit.recipe, fit.level_tokens, lambda recipe: of(recipe=recipe))
    return of(recipe=fit.recipe)


def _recipes_to_try(
    request: PlanRequest,
    spec: ModelSpec,
    cluster: ClusterSpec,
    ranks: JobRanks,
    usual: FittedRecipe,
    as_needed: bool,
) -> list[RecipeCandidate]:
    """Return the recipes that the request allows and the ranks can hold, with the plan's problem under each.

    Args:
        usual: first recipe of the fixed order that fits.
        as_needed: whether to try as-needed recomputation.
    """
    # Forward passes use the recipe of training. Rank speeds slow all recipes alike, but take several times as long to
    # plan for.
    least = None if request.phase == "forward" else request.tokens_per_rank
    alike = replace(request, phase="training", tokens_per_rank=least, rank_speeds=None)
    fits = [
        (place, fit)
        for place in (ranks, *_interleaved(request, spec, ranks))
        for fit in all_fits(spec, request.recipe, place, sync=request.sync)
    ]
    if cluster.links_per_node is None:  # gathers are not priced here, so keep the usual sharding
        gathering = attrgetter("sync", "recipe.zero_stage", "recipe.shard_ranks", "recipe.reduce")
        fits = [(place, fit) for place, fit in fits if gathering(fit) == gathering(usual)]
    candidates = []
    for place, fit in fits:
        if fit.tokens < (least or 1) or (fit.level_tokens and not as_needed):
            continue
        with suppress(FcpError):  # skip recipes that do not fit the padding or the stages
            budget = Budget(tokens_per_rank=least or fit.tokens, sync=fit.sync, recipe=fit.recipe)
            profile = _computed_profile(spec, cluster, place, fit)
            problem = problem_from(alike, profile, place, budget, Assumptions())
            candidates.append(RecipeCandidate(fit=fit, problem=problem))
    return candidates


def _interleaved(request: PlanRequest, spec: ModelSpec, ranks: JobRanks) -> Iterable[JobRanks]:
    """Return the ranks with each number of virtual stages to try, unless the request has one or needs others.

    Experts and Megatron-FSDP are not run with virtual stages (`integrations.megatron.checks`).
    """
    recipe = request.recipe
    is_possible = request.sync != "iteration" and recipe.recompute != "as-needed" and recipe.zero != "3"
    is_open = request.virtual_stages is None and is_possible and spec.experts is None
    return ranks.interleaved(spec) if is_open else ()


def _with_quickest_stages(
    profile: CostProfile, request: PlanRequest, ranks: JobRanks, data: RecipeData | None
) -> JobRanks:
    """Return the ranks with the number of virtual stages whose sampled steps are quickest under a given profile."""
    spec = known_model(profile.model)
    if spec is None or data is None or not (others := list(_interleaved(request, spec, ranks))):
        return ranks
    problems = {}
    for place in (ranks, *others):
        with suppress(FcpError):  # skip stages without room
            budget = profiled_budget(request, profile, place, Assumptions())
            problem = problem_from(replace(request, rank_speeds=None), profile, place, budget, Assumptions())
            if data.fits_into(problem):
                problems[place] = problem
    if len(problems) < 2:
        return next(iter(problems), ranks)
    compile_missing(problems.values())
    sample = data.sample(max(problems.values(), key=lambda problem: problem.tokens_per_rank))
    return min(problems, key=lambda place: sampled_seconds(problems[place], sample, is_draft=True))


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


# Ranks: their number, ranks per node, and devices per rank.


def _ranks_under(profile: CostProfile, request: PlanRequest, assumptions: Assumptions) -> JobRanks:
    """Return the ranks of a plan under a given profile, whose devices and cluster are the defaults."""
    tensor_parallel, pipeline_parallel = devices_of_rank(
        profile, request.tensor_parallel, request.pipeline_parallel, assumptions
    )
    _require_pipelines(request, pipeline_parallel)
    cluster = None if request.ranks and request.ranks_per_node else _cluster_of(profile, request)
    ranks = _ranks_on(request, cluster, tensor_parallel, pipeline_parallel, assumptions)
    return replace(ranks, expert_parallel=profile.expert_parallel)


def _require_pipelines(request: PlanRequest, pipeline_parallel: int) -> None:
    """Raise UsageError for virtual stages without a pipeline, or if ranks may run unequal numbers of micro-batches."""
    if request.virtual_stages in (None, 1):
        return
    if pipeline_parallel == 1:
        raise UsageError(
            f"--virtual-stages is {request.virtual_stages}, but there is no pipeline: --pipeline-parallel is 1"
        )
    if request.sync == "iteration":
        raise UsageError(
            f"--virtual-stages is {request.virtual_stages}, whose ranks must run equally many micro-batches; add "
            "--sync microbatch"
        )


def devices_of_rank(
    profile: CostProfile, tensor_parallel: int | None, pipeline_parallel: int | None, assumptions: Assumptions
) -> tuple[int, int]:
    """Return (tensor-parallel size, pipeline-parallel size) of a rank: as given, else the cost profile's."""
    given = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    # The block `measurement` is free-form, so entries that are not integers are ignored.
    known = {name: value for name in given if isinstance(value := profile.measurement.get(name), int)}
    for name, value in known.items():
        if not 1 <= value <= MOST_RANKS:
            raise UsageError(
                f"the cost profile of {profile.model} on {profile.cluster} has {name} {shown(value)} in its block "
                f"measurement; it must be from 1 to {MOST_RANKS}"
            )
    wanted = {name: value or known.get(name, 1) for name, value in given.items()}
    if any(known.get(name, value) != value for name, value in wanted.items()):
        cut = " ".join(f"{_flag(name)} {value}" for name, value in wanted.items())
        raise UsageError(
            f"the plan is for {_cut_text(wanted)}, but the cost profile of {profile.model} on {profile.cluster} is for "
            f"{_cut_text({**wanted, **known})}; make one with: fcp profile --analytic --model {profile.model} "
            f"--cluster {profile.cluster} {cut} -o {unused('profile.yaml')}"
        )
    for name, value in wanted.items():
        if given[name] is None and value > 1:
            assumptions.assume(_flag(name), value, "the cost profile")
    devices = math.prod(wanted.values())
    if devices > 1 and not known:
        assumptions.assume("devices of a rank", devices, "the cost profile does not say; its times must be of so many")
    return wanted["tensor_parallel"], wanted["pipeline_parallel"]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _cut_text(cut: Mapping[str, int]) -> str:
    return f"tensor parallel {cut['tensor_parallel']} and pipeline parallel {cut['pipeline_parallel']}"


def _ranks_on(
    request: PlanRequest,
    cluster: ClusterSpec | None,
    tensor_parallel: int,
    pipeline_parallel: int,
    assumptions: Assumptions,
) -> JobRanks:
    """Return the ranks of the job; if `cluster` is None, the request must have ranks and ranks per node.

    In Megatron's process order, tensor-parallel processes are adjacent and pipeline stages are furthest apart. The ring
    of a stage thus has as many ranks per node as the node has tensor-parallel groups.
    """
    ranks = request.ranks
    if ranks is None:
        assert cluster is not None
        devices = tensor_parallel * pipeline_parallel
        ranks = cluster.num_devices // devices
        if not ranks:
            raise UsageError(
                f"a rank has {devices} devices, but the cluster {cluster.name} has {cluster.num_devices}; give --ranks"
            )
        each = "one device" if devices == 1 else f"{devices} devices"
        assumptions.assume("--ranks", ranks, f"the cluster {cluster.name}, {each} per rank")
    ranks_per_node = request.ranks_per_node
    if ranks_per_node is None:
        assert cluster is not None
        per_node = ranks if cluster.is_host else cluster.devices_per_node // tensor_parallel  # a host is one node
        ranks_per_node = max(1, min(per_node, ranks))
        assumptions.assume("--ranks-per-node", ranks_per_node, f"the cluster {cluster.name}")
    return JobRanks(
        num_ranks=ranks,
        ranks_per_node=ranks_per_node,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        virtual_stages=request.virtual_stages or 1,
        most_peers=request.max_peers,
    )


def _cluster_of(profile: CostProfile, request: PlanRequest) -> ClusterSpec:
    """Return the profile's cluster, or the example if it is unknown; raise UsageError if ranks are not given either."""
    try:
        return load_cluster(profile.cluster)
    except ProfileError:
        if request.ranks is None:
            raise UsageError(f"the profile's cluster {profile.cluster!r} is not known here; give --ranks") from None
        return load_cluster(EXAMPLE_CLUSTER)
