"""Token budget of a plan's ranks and the recipe that it assumes: the first that fits, or the fastest of a search."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from fcp_cli.cost.model import profiled_offload_cost
from fcp_cli.cost.profile import CostProfile
from fcp_cli.cost.recipe import LayerRecompute, Recipe, RecipeRequest, check_recipe, flag_words
from fcp_cli.errors import UsageError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.memory.fitting import LEAST_TOKENS, FittedRecipe, JobRanks, fitting_recipe
from fcp_cli.memory.items import precision_of
from fcp_cli.models.cluster import THIS_MACHINE, ClusterSpec
from fcp_cli.models.model import ModelSpec, known_model
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches, batch_of, sampled_steps
from fcp_cli.planning.bounds import lower_bound_seconds
from fcp_cli.planning.fcp_solver import compile_missing, solver_of
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem
from fcp_cli.util.console import Assumptions
from fcp_cli.util.files import unused
from fcp_cli.util.words import duration

ASSUMED_TOKENS_PER_RANK: Final = 16_384
# Recipe settings that affect the times of micro-batches, and thus must match the profile's.
_TIMED: Final = ("precision", "recompute", "loss", "offload", "freeze_vision", "lora", "freeze")
_FEWEST_READINGS: Final = 2  # memory readings needed to determine the bytes per token


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Token budget of a rank, with the settings that it assumes.

    Attributes:
        tokens_per_rank: token budget before head-room.
        sync: sync of the plan.
        recipe: recipe that the budget assumes; None if the profile names none.
        room: inputs for the budget under other recipes; None if model or device are unknown, and for forward-only
            plans, whose recipe is that of training.
        cluster: cluster that the profile was computed for; None if a profile was given.
        tried: number of recipes compared by predicted time; 0 if the recipe was not chosen by time.
        for_rivals: see `RecipeChoice.for_rivals`.
        level_tokens: token budget at each as-needed recomputation level, under a given profile.
    """

    tokens_per_rank: int
    sync: Sync
    recipe: Recipe | None = None
    room: Room | None = None
    cluster: ClusterSpec | None = None
    tried: int = 0
    for_rivals: tuple[Problem, ...] = ()
    level_tokens: Mapping[LayerRecompute, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """A model on its ranks, and the recipe settings that may change.

    Attributes:
        given_tokens: token budget of `--tokens-per-rank`, which caps the budget of every recipe, or None.
    """

    spec: ModelSpec
    place: JobRanks
    open_request: RecipeRequest
    given_tokens: int | None = None


def choose_fit(
    spec: ModelSpec, request: PlanRequest, place: JobRanks, *, own: CostProfile | None = None
) -> FittedRecipe:
    """Return the recipe of a plan; the recipe that profile `own` was timed with takes precedence if it fits."""
    is_forward = request.phase == "forward"
    # Forward passes use the recipe of training.
    wanted = LEAST_TOKENS if is_forward else request.tokens_per_rank or LEAST_TOKENS
    asked = request.recipe
    if own is not None and own.recipe is not None:
        asked = with_timed_settings(asked, own)
        recipe, sync = asked.applied_to(own.recipe), request.sync or own.sync or "iteration"
        if _can_run(recipe, sync, place):
            fit = place.fit(spec, recipe, sync, wanted_tokens=wanted)
            if fit.is_enough:
                return fit.in_forward(place) if is_forward else fit
    fit = fitting_recipe(spec, asked, place, sync=request.sync, wanted_tokens=wanted)
    return fit.in_forward(place) if is_forward else fit


def with_timed_settings(asked: RecipeRequest, profile: CostProfile) -> RecipeRequest:
    """Return the request with all timed settings taken from the profile; raise UsageError if it asks for others."""
    assert profile.recipe is not None
    given, timed = asked.given(), {name: getattr(profile.recipe, name) for name in _TIMED}
    if any(given.get(name, timed[name]) != timed[name] for name in _TIMED):
        wanted = shlex.join(word for name in _TIMED if name in given for word in flag_words(name, given[name]))
        how = f"--analytic --cluster {profile.cluster} " if profile.origin == "analytic" else ""
        raise UsageError(
            f"the cost profile of {profile.model} on {profile.cluster} has times of {profile.recipe.describe()}; "
            f"make another with: fcp profile {how}--model {profile.model} {wanted} -o {unused('profile.yaml')}"
        )
    return replace(asked, **timed)


def _can_run(recipe: Recipe, sync: Sync, place: JobRanks) -> bool:
    try:
        check_recipe(recipe, sync=sync)
    except UsageError:
        return False
    return (sync == "microbatch" or place.virtual_stages == 1) and not place.num_ranks % recipe.shards(place.num_ranks)


def computed_budget(
    spec: ModelSpec,
    request: PlanRequest,
    place: JobRanks,
    assumptions: Assumptions,
    fit: FittedRecipe,
    reason: str | None = None,
) -> Budget:
    """Return the budget of a plan without a given profile.

    Args:
        spec, request, place: model, request and ranks of the plan.
        assumptions: recorder of assumptions.
        fit: chosen recipe.
        reason: reason for the choice; None: it is the first of the fixed order.
    """
    if reason is None:
        reason = f"the first that leaves {fit.wanted_tokens:,} tokens a rank"
        if not fit.is_enough:
            reason = f"none leaves {fit.wanted_tokens:,} tokens a rank; this one leaves most"
    budget = _said(request, place, fit, assumptions, reason)
    if request.phase == "forward":
        return budget
    room = Room(
        spec=spec,
        place=place,
        open_request=unfixed_request(request.recipe),
        given_tokens=request.tokens_per_rank,
    )
    return replace(budget, room=room)


def profiled_budget(request: PlanRequest, profile: CostProfile, ranks: JobRanks, assumptions: Assumptions) -> Budget:
    """Return the budget of a plan under a given cost profile.

    If the profile names its recipe or the request does, memory is recomputed for the plan's ranks, sync and recipe,
    since the share of the model state depends on the number of ranks.

    Raises:
        UsageError: the profile does not suit the request, or the model does not fit.
    """
    if profile.recompute_levels and ranks.pipeline_parallel > 1:
        raise UsageError(
            f"the cost profile of {profile.model} on {profile.cluster} recomputes as needed, and the stages of a "
            "pipeline do so by their own memory; remove --profile, so that 'fcp plan' computes one"
        )
    if request.recipe.recompute == "as-needed" and not profile.recompute_levels:
        raise UsageError(
            f"the cost profile of {profile.model} on {profile.cluster} has no recompute_levels, by which "
            "--recompute as-needed chooses; remove --profile, or use another folder: 'fcp plan' computes them for "
            "--model and --cluster"
        )
    sync: Sync = request.sync or ("iteration" if ranks.virtual_stages == 1 else "microbatch")
    spec = known_model(profile.model)
    if profile.recipe is None and not request.recipe.given():
        return Budget(tokens_per_rank=_tokens_of_block(request, profile, ranks, assumptions), sync=sync)
    if spec is None or not profile.memory.capacity_bytes:
        recipe = None if profile.recipe is None else request.recipe.applied_to(profile.recipe)
        reason = "is not a shipped model" if spec is None else "has no capacity of a device in its profile"
        assumptions.assume("memory", "as the cost profile has it", f"{profile.model} {reason}")
        tokens = _tokens_of_block(request, profile, ranks, assumptions)
        return Budget(tokens_per_rank=tokens, sync=sync, recipe=recipe)
    place = on_devices(ranks, profile, is_measured=request.phase == "training")
    fit = choose_fit(spec, request, place, own=profile)
    require_room(spec, request, place, fit)
    if profile.recipe is None:
        reason = "the cost profile does not say of which its times are"
    elif fit.recipe == profile.recipe:
        reason = "the cost profile's"
    else:
        reason = f"the cost profile's, shared out for {place.num_ranks} ranks"
    budget = replace(_said(request, place, fit, assumptions, reason), level_tokens=fit.level_tokens)
    if request.phase == "forward":
        return budget
    open_request = unfixed_request(request.recipe)
    if profile.recipe is not None:
        open_request = with_timed_settings(open_request, profile)
    room = Room(spec=spec, place=place, open_request=open_request, given_tokens=request.tokens_per_rank)
    return replace(budget, room=room)


def unfixed_request(asked: RecipeRequest) -> RecipeRequest:
    """Return the request reduced to settings that affect training results and precision, leaving the others open."""
    return RecipeRequest.to_train_as(asked, precision=asked.precision)


def on_devices(ranks: JobRanks, profile: CostProfile, *, is_measured: bool = True) -> JobRanks:
    """Return the ranks with the profile's device memory and, for training, its measured bytes per token."""
    readings: Any = profile.measurement.get("memory_readings") or ()
    is_measured = is_measured and profile.is_measured and len(readings) >= _FEWEST_READINGS
    return replace(
        ranks,
        capacity_bytes=profile.memory.capacity_bytes,
        on_cpu=profile.cluster == THIS_MACHINE,
        measured_bytes_per_token=profile.memory.bytes_per_token or None if is_measured else None,
    )


def _said(request: PlanRequest, place: JobRanks, fit: FittedRecipe, assumptions: Assumptions, reason: str) -> Budget:
    """Return the token budget under a recipe, and record its assumptions."""
    chosen = {name for name, value in asdict(fit.recipe).items() if value != request.recipe.given().get(name)}
    if chosen:
        assumptions.assume("recipe", fit.recipe.describe(), reason)
    if request.sync is None:
        assumptions.assume("--sync", fit.sync, "chosen with the recipe")
    if request.virtual_stages is None and fit.virtual_stages > 1:
        reason = "chosen with the recipe; Megatron's --num-virtual-stages-per-pipeline-rank"
        assumptions.assume("--virtual-stages", fit.virtual_stages, reason)
    tokens = request.tokens_per_rank
    if tokens is None:
        assumptions.assume("--tokens-per-rank", tokens := fit.tokens, room_text(place, fit))
    elif tokens > fit.tokens:
        assumptions.warn(f"--tokens-per-rank is {tokens:,}, but a rank holds {fit.tokens:,}: {room_text(place, fit)}")
    return Budget(tokens_per_rank=tokens, sync=fit.sync, recipe=fit.recipe)


def room_text(place: JobRanks, fit: FittedRecipe) -> str:
    memory = fit.memory.as_profile_memory(place.capacity_bytes)
    measured = ", measured" if place.measured_bytes_per_token else ""
    return (
        f"the model takes {memory.model_state_bytes / 1e9:.1f} of {place.capacity_bytes / 1e9:.1f} GB on each of "
        f"{place.num_ranks} ranks, and a token {fit.bytes_per_token / 1e6:.2f} MB{measured}"
    )


def require_room(spec: ModelSpec, request: PlanRequest, place: JobRanks, fit: FittedRecipe) -> None:
    """Raise UsageError if ranks cannot hold a single token and no token budget was given."""
    if fit.tokens >= 1 or request.tokens_per_rank is not None:  # a given budget only causes a warning
        return
    needed = fit.memory.total_bytes(1) / 1e9
    open_ = fitting_recipe(spec, unfixed_request(request.recipe), place)
    remedy = "plan for more --ranks, a smaller --model, or cut it with --tensor-parallel"
    if open_.tokens < 1 and place.runs_megatron:
        open_ = fitting_recipe(spec, replace(unfixed_request(request.recipe), zero="3"), place)
        remedy = "plan for more --ranks, a smaller --model, or cut it into more devices with --tensor-parallel"
    if open_.tokens >= 1:
        sharded = " under Megatron-FSDP" if place.runs_megatron and open_.recipe.zero_stage == 3 else ""
        remedy = f"{shlex.join(open_.flags())} leave room for {open_.tokens:,} tokens{sharded}"
    raise UsageError(
        f"{spec.name} needs {needed:.1f} of the {place.capacity_bytes / 1e9:.1f} GB that each of {place.num_ranks} "
        f"ranks may use, under {fit.recipe.describe()}, sync {fit.sync}; {remedy}"
    )


def _tokens_of_block(request: PlanRequest, profile: CostProfile, ranks: JobRanks, assumptions: Assumptions) -> int:
    """Return the token budget from the memory block of a profile."""
    tokens, memory, heads = request.tokens_per_rank, profile.memory, profile.heads
    if heads is not None and memory.bytes_per_token:
        # Replicated keys and values are kept as exchanged; half of the exchange's bytes are forward.
        most = max(heads.degrees(ranks.sharing), default=1)
        kept = max(0.0, most / heads.key_value_heads - 1.0) * heads.key_value_exchange_bytes_per_token / 2
        memory = replace(memory, bytes_per_token=memory.bytes_per_token + kept)
    room = memory.tokens_per_rank()
    if tokens is not None and room is not None and tokens > room:
        assumptions.warn(f"--tokens-per-rank is {tokens:,}, but by the profile's memory a rank holds {max(room, 0):,}")
    if tokens is not None:
        return tokens
    if room is None:
        assumptions.assume("--tokens-per-rank", ASSUMED_TOKENS_PER_RANK, "the profile's memory figures are missing")
        return ASSUMED_TOKENS_PER_RANK
    if room < 1:
        raise UsageError("the profile's memory leaves no room for tokens; give --tokens-per-rank")
    assumptions.assume("--tokens-per-rank", room, "the profile's memory")
    return room


def say_what_offloading_costs(budget: Budget, profile: CostProfile, assumptions: Assumptions) -> None:
    """Record the offloaded bytes and extra time of a micro-batch at the full token budget, if the recipe offloads."""
    recipe, room = budget.recipe, budget.room
    if recipe is None or room is None or recipe.offload != "activations":
        return
    width = precision_of(recipe).residual * room.spec.hidden_size / room.place.tensor_parallel
    cost = profiled_offload_cost(
        profile, tokens=budget.tokens_per_rank, layers=room.spec.num_layers, input_bytes_per_token=width
    )
    assumptions.assume(
        "offloading",
        f"{cost.moved_bytes / 1e9:.1f} GB for a micro-batch of {budget.tokens_per_rank:,} tokens",
        f"{duration(cost.visible_seconds)} longer at 25 GB/s each way; smaller ones that fit stay on the device",
    )


def say_what_is_recomputed(profile: CostProfile, assumptions: Assumptions) -> None:
    """Record the levels of as-needed recomputation as an assumption, if the profile has any."""
    if not profile.priced_levels:
        return
    steps = [f"{level.recompute} up to {level.tokens:,}" for level in profile.priced_levels]
    assumptions.assume(
        "recomputation",
        f"{', '.join(steps)} tokens of a rank in a micro-batch",
        "in as many layers as its own tokens need",
    )


def options_that_hold(longest_tokens: int, budget: Budget, ranks: int) -> str:
    """Return the `fcp plan` options under which the ranks can hold a sequence that is too long for them now, or "".

    Args:
        longest_tokens: tokens of the sequence.
        budget: budget of the plan; if its model is unknown, only more ranks are sure to help.
        ranks: number of ranks.
    """
    if budget.room is not None:
        room, wanted = budget.room, -(-longest_tokens // ranks)
        roomier = fitting_recipe(room.spec, room.open_request, room.place, wanted_tokens=wanted)
        if roomier.is_enough:
            tokens = [] if room.given_tokens is None else ["--tokens-per-rank", str(wanted)]
            flags = [] if tokens and roomier.recipe == budget.recipe else roomier.flags()
            return shlex.join([*tokens, *flags])
    return ""


# Search for the recipe with the least predicted time on a sample of the plan's steps.
#
# Every recipe that fits has a proven lower bound of the sampled steps. Recipes are planned in draft by ascending
# bound until the next bound is no less than the fastest draft, and only the fastest drafts are planned in full.
# Offloading activations must gain 1 %. The search limits its work by counts, not by time, so that the same data, seed
# and profile give the same recipe on every machine.

_MANY_RANKS: Final = 256  # with more ranks, or pipelines, planning is slow and the sample is one step
_MOST_DRAFTED: Final = 12  # limit of drafted recipes
_FOR_RUNNER_UP: Final = 6  # until so many drafts, the second-fastest is the limit, too, to find a runner-up
_MOST_PLANNED: Final = 3  # drafts to plan in full, since a draft is up to 1.5 % slower than its plan
_LEAST_GAIN: Final = 0.01  # least gain of offloading over the fastest recipe without it
_UNKNOWN_SEQUENCES: Final = 512  # sequences of the synthetic step if lengths are unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeData:
    """Data that recipes are compared on.

    Attributes:
        table: sequence lengths.
        settings: batch settings of the plan; its step limit is ignored, so that a short plan gets the same recipe.
        max_degree: 1 forbids rings; None: no limit.
        least_tokens: least token budget of a recipe, if sequences may exceed those of the table.
        as_needed: whether to try as-needed recomputation; False if lengths are only known at run time, or if compared
            strategies do not account for it.
    """

    table: LengthTable
    settings: BatchSettings
    max_degree: int | None = None
    least_tokens: int = 1
    as_needed: bool = True

    def fits_into(self, problem: Problem) -> bool:
        """Return whether the ranks can hold the longest sequence."""
        heads, ranks = problem.profile.heads, problem.num_ranks
        if self.max_degree == 1:
            ranks = 1
        elif problem.attention == "ulysses" and heads is not None:
            ranks = max((1, *heads.degrees(ranks)))
        longest = min(int(self.table.length_tokens.max()), self.settings.max_length or 1 << 62)
        return problem.tokens_per_rank >= max(self.least_tokens, -(-longest // ranks))

    def sample(self, problem: Problem) -> list[LengthTable]:
        """Return the sequences of a few steps, evenly spaced over an epoch, or of the first if planning is slow."""
        batches = GlobalBatches(self.table, problem, replace(self.settings, step_limit=None))
        is_slow = problem.pipeline is not None or problem.num_ranks > _MANY_RANKS
        few = [] if is_slow else sampled_steps(batches.steps_per_epoch, self.settings.global_batch_size)
        return [batches.table.take(batches.batch(step).rows) for step in few or [0]]


def unknown_lengths(max_degree: int | None = None) -> RecipeData:
    """Return sample data for lengths only known at run time, log-spaced from 128 to 32,768 tokens.

    Longer ones may occur, so recipes must have a token budget of at least `LEAST_TOKENS`.
    """
    last = _UNKNOWN_SEQUENCES - 1
    lengths = [round(128 * 256 ** (rank / last)) for rank in range(_UNKNOWN_SEQUENCES)]
    return RecipeData(
        table=LengthTable(name="unknown lengths", length_tokens=np.array(lengths, dtype=np.int64)),
        settings=BatchSettings(global_batch_size=_UNKNOWN_SEQUENCES, shuffle=False),
        max_degree=max_degree,
        least_tokens=LEAST_TOKENS,
        as_needed=False,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeCandidate:
    """A recipe that fits, and the plan's problem under it."""

    fit: FittedRecipe
    problem: Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeChoice:
    """Result of a recipe search.

    Attributes:
        fit: fastest recipe, or one without offloading that is less than 1 % slower.
        seconds: predicted mean seconds of a sampled step.
        others: (candidate, seconds) of the other drafted or planned ones, fastest first.
        tried: number of recipes that were planned or pruned by their bound.
    """

    fit: FittedRecipe
    seconds: float
    others: tuple[tuple[RecipeCandidate, float], ...]
    tried: int

    @property
    def for_rivals(self) -> tuple[Problem, ...]:
        """Problems under the other recipes, which may be faster for a rival strategy."""
        return tuple(other.problem for other, _seconds in self.others)

    def reason(self) -> str:
        """Return the reason of an assumption: comparison with the runner-up."""
        (other, seconds), *_rest = self.others
        second = f"{other.fit.recipe.describe()}, sync {other.fit.sync}"
        if other.fit.virtual_stages != self.fit.virtual_stages:
            second += f", {other.fit.virtual_stages} virtual stages"
        return f"the quickest of {self.tried} that fit; the second, {second}, takes {seconds / self.seconds - 1:+.1%}"


def quickest_recipe(
    candidates: Sequence[RecipeCandidate], usual: FittedRecipe, data: RecipeData
) -> RecipeChoice | None:
    """Return the recipe with the least predicted time of the sampled steps, or None with fewer than two candidates.

    Args:
        candidates: recipes that fit, in the fixed order, which breaks ties.
        usual: recipe of `fitting_recipe`, which is always planned as well.
        data: lengths to hold, and steps to compare on.
    """
    held = [one for one in candidates if data.fits_into(one.problem)]
    if len(held) < 2:
        return None
    compile_missing(one.problem for one in held)
    sample = data.sample(max((one.problem for one in held), key=lambda problem: problem.tokens_per_rank))
    bounds = [
        sum(lower_bound_seconds(batch_of(each, one.problem).work, one.problem) for each in sample) / len(sample)
        for one in held
    ]
    drafts: dict[int, float] = {}
    first = [index for index, one in enumerate(held) if one.fit.key == usual.key]
    by_bound = sorted(range(len(held)), key=lambda index: bounds[index])
    # Plan one for each pair of settings that only some strategies support, whatever its bound: rivals are priced under
    # it, too. Reversed, so that the dict keeps the one with the least bound.
    kinds = [(one.problem.sync, bool(one.fit.level_tokens)) for one in held]
    anyway = [*first, *{kinds[index]: index for index in reversed(by_bound)}.values()]
    for index in [*anyway, *by_bound]:
        if index in drafts:
            continue
        if index not in anyway and bounds[index] >= _limit(list(drafts.values())):
            break
        drafts[index] = sampled_seconds(held[index].problem, sample, max_degree=data.max_degree, is_draft=True)
    by_draft = sorted(drafts, key=lambda index: (drafts[index], index))
    offloads_nothing = [index for index in by_draft if held[index].fit.recipe.offload == "none"]
    planned = {
        index: sampled_seconds(held[index].problem, sample, max_degree=data.max_degree)
        for index in {*by_draft[:_MOST_PLANNED], *offloads_nothing[:1], *first}
    }
    found = {**drafts, **planned}
    order = sorted(found, key=lambda index: (found[index], index))
    # Offloading risks running out of host memory, so it must gain at least _LEAST_GAIN.
    resident = next((index for index in order if index in planned and index in offloads_nothing), order[0])
    best = resident if found[resident] <= (1.0 + _LEAST_GAIN) * found[order[0]] else order[0]
    order.remove(best)
    return RecipeChoice(
        fit=held[best].fit,
        seconds=found[best],
        others=tuple((held[index], found[index]) for index in order),
        tried=len(held),
    )


def _limit(found: Sequence[float]) -> float:
    """Return the lower bound from which a recipe is not worth drafting, given the seconds of the drafts so far."""
    if len(found) >= _MOST_DRAFTED:
        return 0.0
    return math.inf if len(found) < 2 else sorted(found)[1 if len(found) < _FOR_RUNNER_UP else 0]


def sampled_seconds(
    problem: Problem, sample: Sequence[LengthTable], *, max_degree: int | None = None, is_draft: bool = False
) -> float:
    """Return the predicted mean seconds of the sampled steps; drafts are faster to plan and slightly slower to run."""
    solver = solver_of(problem, max_degree=max_degree)
    assign = solver.draft if is_draft else solver.assign
    batches = [batch_of(each, problem) for each in sample]
    return sum(makespan_seconds(assign(batch), batch, problem) for batch in batches) / len(batches)
