"""Recipes that fit the memory of a job's ranks, and the cheapest of them that reaches a token budget.

`fitting_recipe` chooses by memory alone, if no lengths are known; `planning.recipe` prices the recipes of
`all_fits` on the lengths of a plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fcp_cli.cost.recipe import (
    LayerRecompute,
    Loss,
    Offload,
    Recipe,
    RecipeRequest,
    Recompute,
    Reduce,
    SplitAttention,
    ZeroStage,
    check_recipe,
)
from fcp_cli.errors import UsageError
from fcp_cli.memory.activations import kept_bytes, vision_bytes
from fcp_cli.memory.items import RankMemory, precision_of
from fcp_cli.memory.rank import rank_memory
from fcp_cli.memory.state import Cut, check_trained
from fcp_cli.models.model import ModelSpec
from fcp_cli.plan.setup import RankShape, Sync

LEAST_TOKENS: Final = 16_384
"""Tokens a rank that a recipe should leave room for: below that, rings of long sequences wait for their messages."""

# Fastest first.
_OFFLOADS: Final[tuple[Offload, ...]] = ("none", "activations")
_RECOMPUTATIONS: Final[tuple[Recompute, ...]] = ("none", "activation", "elementwise", "selective", "full", "as-needed")
_LEVELS: Final[tuple[LayerRecompute, ...]] = ("none", "activation", "elementwise", "selective")  # of as-needed
KEEP_PRODUCTS: Final[tuple[Recompute, ...]] = ("activation", "elementwise")
"""Kinds of recomputation that keep products, which tensor parallelism sums in place: ranks of one device alone do."""
_SYNCS: Final[tuple[Sync, ...]] = ("iteration", "microbatch")
_REDUCES: Final[tuple[Reduce, ...]] = ("wave", "step")
_LEAST_BLOCK_LAYERS: Final = 2  # of a virtual stage: shorter blocks have little to hide their messages behind
_STAGE_BUDGETS: Final = 5  # token budgets of pipelines whose stages recompute as needed

# Most peers of a rank if groups are contiguous, as fcp's are. Pure rings are counted over all possible groups
# (planning.groups); plans with Ulysses degrees had at most 14 on nodes of eight.
RING_PEERS: Final = 8
_SHARED_HEADS_PEERS: Final = 22


def sharing_ranks(attention: SplitAttention | None, shape: RankShape) -> int:
    """Return the largest Ulysses degree of a plan; a node under `2d`, whose Ulysses groups never span nodes."""
    if attention is None:
        return 1
    return shape.num_ranks if attention == "ulysses" else shape.ranks_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRanks(RankShape):
    """Ranks of a job, and the memory of their devices.

    Attributes:
        virtual_stages: blocks of layers per pipeline stage.
        expert_parallel: expert-parallel size.
        most_peers: peer limit of a rank; None: as many as contiguous groups need.
        sharing: largest Ulysses degree.
        capacity_bytes: memory of a device, after the reserve for allocator and back ends.
        on_cpu: whether the ranks run on CPUs.
        measured_bytes_per_token: measured bytes per token; None: use the memory model.
    """

    virtual_stages: int = 1
    expert_parallel: int = 1
    most_peers: int | None = None
    sharing: int = 1
    capacity_bytes: float = 0.0
    on_cpu: bool = False
    measured_bytes_per_token: float | None = None

    @property
    def cut(self) -> Cut:
        """Sharding of the model over the devices of a rank, and of its experts over ranks."""
        return Cut(
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            expert_parallel=self.expert_parallel,
        )

    def that_share(self, asked: str, *, prices_heads: bool) -> JobRanks:
        """Return the ranks with `sharing` set by an `--attention`; unchanged for rings or without prices for heads."""
        if asked == "ring" or not prices_heads:
            return self
        return replace(self, sharing=sharing_ranks("ulysses" if asked == "ulysses" else "2d", self))

    @property
    def peers(self) -> int:
        """Upper estimate of a rank's peers, for use before there is a plan."""
        expected = RING_PEERS if self.sharing == 1 else min(RING_PEERS + self.sharing, _SHARED_HEADS_PEERS)
        return min(expected if self.most_peers is None else self.most_peers, self.num_ranks - 1)

    def interleaved(self, spec: ModelSpec) -> Iterator[JobRanks]:
        """Yield the ranks with each number of virtual stages worth trying: equal blocks of several layers."""
        layers, rest = divmod(spec.num_layers, self.pipeline_parallel)
        if self.pipeline_parallel > 1 and not rest:  # Megatron's stages and blocks have equally many layers
            for stages in range(2, layers // _LEAST_BLOCK_LAYERS + 1):
                if layers % stages == 0:
                    yield replace(self, virtual_stages=stages)

    def memory(self, spec: ModelSpec, recipe: Recipe, sync: Sync) -> RankMemory:
        """Return the memory of a rank."""
        return rank_memory(
            spec,
            recipe,
            sync=sync,
            ranks=self.num_ranks,
            cut=self.cut,
            on_cpu=self.on_cpu,
            peers=self.peers,
            sharing=self.sharing,
        )

    def _bytes_per_token(self, memory: RankMemory, spec: ModelSpec, recipe: Recipe, sync: Sync) -> float:
        """Return the bytes per token by the memory model, or as measured plus the model's increment for Ulysses."""
        slope = memory.as_profile_memory(self.capacity_bytes).bytes_per_token
        if not self.measured_bytes_per_token:
            return slope
        ring = replace(self, sharing=1).memory(spec, recipe, sync).as_profile_memory(self.capacity_bytes)
        return self.measured_bytes_per_token + max(0.0, slope - ring.bytes_per_token)

    def fit(self, spec: ModelSpec, recipe: Recipe, sync: Sync, *, wanted_tokens: int = LEAST_TOKENS) -> FittedRecipe:
        """Return a recipe with its memory and token budget.

        Raises:
            UsageError: the recipe recomputes as needed, but the model's layers differ in memory.
        """
        if recipe.recompute == "as-needed":
            return self._fit_as_needed(spec, recipe, sync, wanted_tokens=wanted_tokens)
        memory = self.memory(spec, recipe, sync)
        tokens, per_token = memory.tokens(self.capacity_bytes), self._bytes_per_token(memory, spec, recipe, sync)
        if self.measured_bytes_per_token:
            room = self.capacity_bytes - memory.binding(self.capacity_bytes).fixed_bytes
            tokens = max(0, math.floor(room / per_token))
        if self.virtual_stages > 1:  # the first stage holds P V + P - 1 blocks in flight
            tokens = int(tokens / (1 + (self.pipeline_parallel - 1) / (self.pipeline_parallel * self.virtual_stages)))
        return FittedRecipe(
            recipe=recipe,
            sync=sync,
            memory=memory,
            tokens=tokens,
            wanted_tokens=wanted_tokens,
            bytes_per_token=per_token,
            virtual_stages=self.virtual_stages,
        )

    def _fit_as_needed(self, spec: ModelSpec, recipe: Recipe, sync: Sync, *, wanted_tokens: int) -> FittedRecipe:
        """Return the fit with all layers at the last level, with the token budget of each level."""
        levels = self.levels_of(spec, recipe)
        if not levels:
            raise UsageError(
                f"--recompute as-needed takes layers one by one, and those of {spec.name} differ in what they keep; "
                "give --recompute selective"
            )
        fits = {
            kind: self.fit(spec, replace(recipe, recompute=kind), sync, wanted_tokens=wanted_tokens) for kind in levels
        }
        held = {kind: max(1, fit.tokens) for kind, fit in fits.items() if fit.tokens or kind == levels[-1]}
        return replace(fits[levels[-1]], recipe=recipe, level_tokens=held)

    def budgets(self, spec: ModelSpec, fit: FittedRecipe) -> Iterator[FittedRecipe]:
        """Yield a fit at the token budgets to compare, several if pipeline stages recompute as needed.

        `level_tokens` then counts tokens in flight whose kept activations fit next to the working memory of a
        micro-batch.
        """
        if self.pipeline_parallel == 1 or len(fit.level_tokens) != 2:
            yield fit
            return
        few, most = fit.level_tokens.values()
        recipes = {kind: replace(fit.recipe, recompute=kind) for kind in fit.level_tokens}
        kept = {kind: self.memory(spec, one, fit.sync).kept_bytes_per_token for kind, one in recipes.items()}
        working = fit.bytes_per_token - min(kept.values())
        for part in range(_STAGE_BUDGETS):
            budget = round(few * (most / few) ** (part / (_STAGE_BUDGETS - 1)))
            room = fit.bytes_per_token * most - working * budget
            yield replace(fit, tokens=budget, level_tokens={kind: int(room / size) for kind, size in kept.items()})

    def levels_of(self, spec: ModelSpec, recipe: Recipe) -> tuple[LayerRecompute, ...]:
        """Return the recomputation levels that a model's layers may mix, or () if its layers differ in kept bytes.

        With a trained vision encoder, which recomputes all layers or none, only levels that recompute layers qualify.
        """
        precision = precision_of(recipe)
        encodes = vision_bytes(spec, recipe, precision) > 0
        levels = tuple(
            kind
            for kind in _LEVELS
            if (not encodes or replace(recipe, recompute=kind).recomputes_layers)
            and (not self.runs_megatron or kind not in KEEP_PRODUCTS)
        )
        alike = all(
            len({kept_bytes(spec, kind, replace(recipe, recompute=level), precision) for kind in spec.kinds}) == 1
            for level in levels
        )
        return levels if alike else ()

    @property
    def runs_megatron(self) -> bool:
        """Whether tensor, pipeline or expert parallelism requires Megatron."""
        return self.tensor_parallel * self.pipeline_parallel * self.expert_parallel > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedRecipe:
    """A recipe with its memory and token budget.

    Attributes:
        tokens: token budget of a rank; 0 if not even the model fits.
        wanted_tokens: requested token budget.
        bytes_per_token: bytes per token at the budget, by the memory model or as measured.
        level_tokens: token budget with all layers at each level, if they recompute as needed.
        virtual_stages: see `JobRanks`.
    """

    recipe: Recipe
    sync: Sync
    memory: RankMemory
    tokens: int
    wanted_tokens: int
    bytes_per_token: float
    level_tokens: Mapping[LayerRecompute, int] = field(default_factory=dict)
    virtual_stages: int = 1

    @property
    def is_enough(self) -> bool:
        return self.tokens >= self.wanted_tokens

    def in_forward(self, place: JobRanks) -> FittedRecipe:
        """Return the fit of the same recipe for forward passes only."""
        memory = self.memory.in_forward()
        per_token = memory.as_profile_memory(place.capacity_bytes).bytes_per_token
        return replace(self, memory=memory, tokens=memory.tokens(place.capacity_bytes), bytes_per_token=per_token)

    @property
    def key(self) -> tuple[Recipe, Sync, int]:
        """Key that identifies the fit among those of the same ranks."""
        return self.recipe, self.sync, self.virtual_stages

    @property
    def roominess(self) -> tuple[int, float]:
        """Sort key by token budget; if budgets are 0, by the missing memory."""
        return self.tokens, -self.memory.total_bytes(self.wanted_tokens)

    def flags(self) -> list[str]:
        """Return the `fcp plan` options that request this recipe and sync."""
        return [*self.recipe.flags(), "--sync", self.sync]


def fitting_recipe(
    spec: ModelSpec,
    request: RecipeRequest,
    place: JobRanks,
    *,
    sync: Sync | None = None,
    wanted_tokens: int = LEAST_TOKENS,
) -> FittedRecipe:
    """Return the first recipe of a fixed order that reaches `wanted_tokens`, or else the one with the largest budget.

    The order follows the cost in time. Recomputation costs most: none, then selective, then full. At equal
    recomputation, weights gathered once per step precede weights gathered in every micro-batch, each with its sync, and
    sharding within a node precedes sharding over all ranks. Gathering weights across nodes in every micro-batch comes
    after all of these, since computation cannot hide it. Offloading activations comes last.

    Args:
        request: settings given by the user; only the others are chosen.
        place: ranks and devices.
        sync: sync of the plan; None: choose it, too.
        wanted_tokens: requested token budget of a rank.

    Raises:
        UsageError: the given settings contradict each other, or do not suit the model or the ranks.
    """
    check_trained(spec, request.applied_to(Recipe()))
    best: FittedRecipe | None = None
    for recipe, its_sync in _candidates(request, place, sync):
        fit = place.fit(spec, recipe, its_sync, wanted_tokens=wanted_tokens)
        if fit.is_enough:
            return fit
        if best is None or fit.roominess > best.roominess:
            best = fit
    if best is None:
        raise _contradiction(request, sync)
    return best


def all_fits(
    spec: ModelSpec, request: RecipeRequest, place: JobRanks, *, sync: Sync | None = None
) -> list[FittedRecipe]:
    """Return all possible recipes with their token budgets, in the order of `fitting_recipe`.

    In addition to its candidates, weights may be sharded over several but not all nodes, and ZeRO-3 may reduce
    gradients once per step. Offloading is only tried if the recipe without it fits fewer than `LEAST_TOKENS` tokens:
    more tokens gain little, and host memory may not suffice.
    """
    found: dict[tuple[Recipe, Sync], FittedRecipe] = {}
    fits: list[FittedRecipe] = []
    for recipe, its_sync in _candidates(request, place, sync, extents=_extents(place)):
        if recipe.recompute == "as-needed" and "recompute" not in request.given() and not place.levels_of(spec, recipe):
            continue
        resident = found.get((replace(recipe, offload="none"), its_sync))
        if resident is None or not resident.is_enough:
            found[recipe, its_sync] = fit = place.fit(spec, recipe, its_sync)
            fits.extend(place.budgets(spec, fit))
    return fits


def _extents(place: JobRanks) -> tuple[int | None, ...]:
    """Return sharding extents in whole nodes, doubling up to all ranks (None)."""
    found, extent = [], place.ranks_per_node
    while 1 < extent < place.num_ranks and place.num_ranks % extent == 0:
        found.append(extent)
        extent *= 2
    return (*found, None)


def _candidates(
    request: RecipeRequest, place: JobRanks, sync: Sync | None, *, extents: tuple[int | None, ...] = ()
) -> list[tuple[Recipe, Sync]]:
    """Return the possible recipes in the fixed order.

    Args:
        request, place, sync: see `fitting_recipe`.
        extents: sharding extents to try for weights and gradients; (): a node and all ranks.
    """
    given = request.given()
    if (shard_ranks := given.get("shard_ranks")) and place.num_ranks % min(shard_ranks, place.num_ranks):
        raise UsageError(f"--shard-ranks is {shard_ranks}; it must divide the {place.num_ranks} ranks")
    # Megatron's loss materializes all logits of its vocabulary shard.
    loss: Loss = "plain" if place.runs_megatron else "chunked"
    base = request.applied_to(Recipe(precision="fp32" if place.on_cpu else "bf16", loss=loss))
    if base.recompute in KEEP_PRODUCTS and place.runs_megatron:
        raise UsageError(
            f"--recompute {base.recompute} keeps the products of layers that fcp runs, and Megatron runs ranks of "
            "several devices; give --recompute selective"
        )
    if base.recompute == "as-needed" and place.virtual_stages * place.expert_parallel > 1:
        raise UsageError(
            "--recompute as-needed has not been made to work with virtual stages, nor with ranks that share experts; "
            "give --recompute selective"
        )
    computing = itertools.product(
        _choices(given, "offload", *_OFFLOADS),
        _choices(given, "recompute", *_recomputations(place, searches=bool(extents))),
    )
    reduces = _REDUCES if extents and "reduce" not in given else (base.reduce,)
    found = [
        (recipe, its_sync)
        for (offload, recompute), its_sync in itertools.product(computing, _syncs(place, sync))
        for stage, shards in _shardings(given, place, its_sync, extents or _usual_extents(place))
        for reduce in (reduces if stage == 3 else reduces[:1])
        if _is_possible(
            recipe := replace(
                base, offload=offload, recompute=recompute, zero_stage=stage, shard_ranks=shards, reduce=reduce
            ),
            its_sync,
        )
        and not (
            recompute == "as-needed" and stage == 3 and place.pipeline_parallel > 1
        )  # the wave floor hides the difference
    ]
    return sorted(found, key=lambda one: _cost(one[0], one[1], place))  # stable: keeps the order of shardings


def _recomputations(place: JobRanks, *, searches: bool) -> tuple[Recompute, ...]:
    """Return the recomputations to try; those that keep products need a search that prices their gain."""
    keeps_products = searches and not place.runs_megatron
    return tuple(kind for kind in _RECOMPUTATIONS if keeps_products or kind not in (*KEEP_PRODUCTS, "as-needed"))


def _cost(recipe: Recipe, sync: Sync, place: JobRanks) -> tuple[int, ...]:
    """Return the sort key of recipes by cost in time, most expensive setting first."""
    gathers_from_afar = recipe.zero_stage == 3 and recipe.shards(place.num_ranks) > place.ranks_per_node
    return (
        _OFFLOADS.index(recipe.offload),
        int(gathers_from_afar),
        _RECOMPUTATIONS.index(recipe.recompute),
        _SYNCS.index(sync),
    )


def _syncs(place: JobRanks, sync: Sync | None) -> tuple[Sync, ...]:
    if sync is not None:
        return (sync,)
    return _SYNCS if place.virtual_stages == 1 else ("microbatch",)


def _usual_extents(place: JobRanks) -> tuple[int | None, ...]:
    is_cut = place.num_ranks > place.ranks_per_node > 1 and place.num_ranks % place.ranks_per_node == 0
    return (place.ranks_per_node, None) if is_cut else (None,)


def _shardings(
    given: Mapping[str, Any], place: JobRanks, sync: Sync, extents: tuple[int | None, ...]
) -> Iterator[tuple[ZeroStage, int | None]]:
    for stage in _choices(given, "zero_stage", *_stages(place, sync)):
        for shard_ranks in _choices(given, "shard_ranks", *(extents if stage >= 2 else (None,))):
            yield stage, shard_ranks


def _stages(place: JobRanks, sync: Sync) -> tuple[ZeroStage, ...]:
    """Return the ZeRO stages to try, by communication volume per step.

    Stage 2 sends less than 0 and 1: like FSDP2 it reduce-scatters gradients and all-gathers bf16 weights. Ranks of
    several devices run Megatron, which only shards its optimizer. Its weights are only sharded by Megatron-FSDP, which
    the script has to enable, so stage 3 must be requested with --zero 3.
    """
    if place.tensor_parallel * place.pipeline_parallel > 1:
        return (1,)
    if sync == "microbatch":
        return (3,)
    return (0, 2) if place.on_cpu or place.num_ranks == 1 else (2,)


def _choices(given: Mapping[str, Any], name: str, *usual: Any) -> tuple[Any, ...]:
    return (given[name],) if name in given else usual


def _is_possible(recipe: Recipe, sync: Sync) -> bool:
    try:
        check_recipe(recipe, sync=sync)
    except UsageError:
        return False
    return True


def _contradiction(request: RecipeRequest, sync: Sync | None) -> UsageError:
    """Return the error for given settings that contradict each other."""
    recipe = request.applied_to(Recipe(zero_stage=2))
    try:
        check_recipe(recipe, sync=sync or "iteration")
    except UsageError as error:
        return error
    return UsageError(f"{' '.join(recipe.flags())} cannot run under sync {sync}")
