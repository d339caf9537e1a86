"""Planning for pipeline parallelism: micro-batches of equal duration, judged by the exact timeline of `pipeline_of`.

The bubble of a P-stage pipeline is about P - 1 micro-batches per step, and all stages wait behind a micro-batch that is
longer than its neighbours. Micro-batches that run at the same time should therefore take equally long (as in
ByteScale's PP-Balance). The open question is how long. Short ones make small bubbles, but each pays the fixed cost of a
micro-batch, and of its ring's messages. For each of several target durations:

    a sequence that one rank cannot hold or run in that time becomes a ring on the narrowest block of ranks that can
    rings run first, widest first, each on the block of its width that is ready first
    all other sequences go, longest first, to the rank that is ready first, into micro-batches of similar duration

A rank of a long ring waits for it P - 1 times. One variant ignores that, and all ranks run equally many micro-batches.
The other counts it, and counts other work on those ranks by half, since it overlaps with the wait. Blocks are nested
(halves of halves), so replicas that share a ring have run the same rings before, and no wait can form a cycle. Blocks
of three, five, six and seven eighths are tried as well: they keep some replicas out of the longest sequence's ring.
Plans made without stages compete. The fastest answers are then tried with their waves in other orders
(`wave_orders`). Finally, micro-batches on the critical path swap with neighbours while that helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from fcp_cli.cost.levels import RecomputeLevel, seconds_by_stage
from fcp_cli.cost.model import group_seconds
from fcp_cli.cost.profile import CostProfile, dump_cost_profile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.memory.activations import kept_bytes, plain_loss_bytes
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.memory.items import precision_of
from fcp_cli.memory.state import backward_of
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import ModelSpec, known_model
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.setup import Pipeline, Prices
from fcp_cli.plan.simulation.microbatches import AssignedSequences, Replicas, lay
from fcp_cli.plan.simulation.pipeline import Pipelines, better_places, makespan_seconds
from fcp_cli.plan.step import StepPlan, offsets_of, sizes_of
from fcp_cli.planning.assemble import assignment_prices, with_idle_rows
from fcp_cli.planning.compiled.core import PlannerInputs
from fcp_cli.planning.groups import reordered, tree_blocks, wave_orders
from fcp_cli.planning.problem import Assignment, Batch, Problem, work_on
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.console import Assumptions

# Target durations of micro-batches, as shares of the least step time. Literals: powers may differ in the last bit.
_SHARES = 0.02, 0.026, 0.034, 0.044, 0.057, 0.073, 0.095, 0.12, 0.16, 0.21, 0.27, 0.35, 0.45, 0.6
_BUDGETS = 1.0, 0.7, 0.5, 0.35, 0.25  # shares of the token budget for plans without stages
_NEAR = 1.02, 1.1, 1.5  # x a sequence's least seconds: accepted for a ring, since wider ones cost more than they save
_NEXT = 3  # durations tried on either side of the best
_IN_SHADOW = 0.5  # counted share of work on ranks of a long ring: the rest runs while they wait for the ring anyway
_FAR = 1.4  # x the fastest step so far: limit of a layout to be tried in another order
_HOPELESS = 1.03  # x the fastest step so far: limit of an order to be kept
_REORDERED = 10  # fastest answers whose waves are tried in other orders
_IMPROVED = 5  # fastest answers whose micro-batches then swap
_REACH = 3  # waves between micro-batches that may swap
_RUNS, _LEAST_RUNS = 60_000, 20  # micro-batches simulated per improved answer, and fewest simulations of it


def replicas_of(problem: Problem, inputs: PlannerInputs) -> Replicas:
    """Return the replicas and the blocks of them that may be groups: repeated halves.

    If any neighbours may form a group, blocks of three, five, six and seven eighths, from either end, are added.
    """
    n, unit = problem.num_ranks, problem.ranks_per_node if problem.num_ranks > problem.ranks_per_node else 1
    found: dict[int, list[int]] = {1: list(range(n))}
    allowed = set(zip(inputs.group_first.tolist(), inputs.group_degree.tolist(), strict=True))
    for block in tree_blocks(n, problem.ranks_per_node):
        if not allowed or (block.start, len(block)) in allowed:
            found.setdefault(len(block), []).append(block.start)
    if not allowed and not inputs.whole_nodes:
        for eighths in (3, 5, 6, 7):
            degree = n * eighths // 8 // unit * unit
            if degree > 1:
                # From either end, so that the remaining ranks are neighbours, too.
                found.setdefault(degree, [0, n - degree])
    degrees = sorted(found)
    return Replicas(
        num_ranks=n,
        tokens=problem.tokens_per_rank,
        microbatch_seconds=problem.profile.coefficients.microbatch_seconds,
        blocks_of=offsets_of([len(found[degree]) for degree in degrees]),
        degrees=np.array(degrees, dtype=np.int64),
        firsts=np.array([first for degree in degrees for first in found[degree]], dtype=np.int64),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStep:
    """A simulated step: its assignment, with waves if it has any; the prices of its micro-batches; its seconds."""

    made: Assignment
    prices: Prices
    seconds: float

    @classmethod
    def of(cls, made: Assignment, batch: Batch, problem: Problem, limit: float = np.inf) -> PipelineStep:
        """Price and simulate a step."""
        return cls.priced(made, assignment_prices(made, batch, problem), batch, problem, limit)

    @classmethod
    def priced(
        cls, made: Assignment, prices: Prices, batch: Batch, problem: Problem, limit: float = np.inf
    ) -> PipelineStep:
        """Simulate a step; its seconds are infinite if they exceed `limit`."""
        degrees = sizes_of(made.rank_offsets)
        # A replica runs its micro-batches one after the other, so its busy time is a bound: skip the simulation.
        if np.bincount(made.ranks, np.repeat(prices.seconds, degrees)).max() > limit:
            return cls(made=made, prices=prices, seconds=np.inf)
        if problem.sync == "microbatch":
            step = _laid_out(*_in_waves(made, prices, batch, problem), problem)
        else:
            step = _laid_out(made, prices, problem)
        return cls(made=made, prices=prices, seconds=makespan_seconds(step, limit))

    def reordered(self, place: IntArray, batch: Batch, problem: Problem, limit: float = np.inf) -> PipelineStep:
        """Return the step with its micro-batches moved to the waves `place`."""
        prices = self.prices.take(np.argsort(place, kind="stable"))
        return PipelineStep.priced(reordered(self.made, place), prices, batch, problem, limit)

    def answer(self, problem: Problem) -> Assignment:
        """Return the assignment, without waves under `iteration`."""
        if problem.sync == "microbatch":
            return self.made
        return replace(self.made, wave=np.full_like(self.made.wave, -1))


def quickest_of(candidates: Iterable[PipelineStep], batch: Batch, problem: Problem) -> Assignment:
    """Return the candidate with the shortest timeline, after trying other orders and swaps on the fastest ones."""
    found = list(candidates)
    limit = min(one.seconds for one in found)
    for one in _quickest(found, _REORDERED):
        for place in wave_orders(one.made, one.prices.seconds, problem):
            found.append(one.reordered(place, batch, problem, _HOPELESS * limit))
            limit = min(limit, found[-1].seconds)
    found += [_swapped(one, batch, problem) for one in _quickest(found, _IMPROVED)]
    return min(found, key=lambda one: one.seconds).answer(problem)


def _quickest(found: list[PipelineStep], count: int) -> list[PipelineStep]:
    """Return the `count` fastest steps with waves, one per set of micro-batches (identified by its summed seconds)."""
    quickest: dict[float, PipelineStep] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        if one.made.wave[0] >= 0 and np.isfinite(one.seconds):
            quickest.setdefault(round(float(one.prices.seconds.sum()), 6), one)
    return list(quickest.values())[:count]


def _swapped(one: PipelineStep, batch: Batch, problem: Problem) -> PipelineStep:
    """Return the step, in waves again, after swapping micro-batches along its critical path."""
    rows, prices = _in_waves(one.made, one.prices, batch, problem)
    step = _laid_out(rows, prices, problem)
    # Larger steps are simulated fewer times, so that planning time hardly depends on the size.
    places = better_places(step, reach=_REACH, most_runs=max(_RUNS // len(rows), _LEAST_RUNS))[~rows.is_idle]
    return one.reordered(np.unique(places, return_inverse=True)[1], batch, problem)


def _in_waves(made: Assignment, prices: Prices, batch: Batch, problem: Problem) -> tuple[StepPlan, Prices]:
    """Return the step with idle rows, so that every replica has a micro-batch in every wave, and all prices."""
    rows = with_idle_rows(made, batch, problem)
    return rows, prices.spread(~rows.is_idle)


def _laid_out(rows: Assignment | StepPlan, prices: Prices, problem: Problem) -> Pipelines:
    assert problem.pipeline is not None
    return problem.pipeline.laid_out(
        rows.rank_offsets, rows.ranks, prices, stages=problem.pipeline_parallel, num_ranks=problem.num_ranks
    )


class _Lengths:
    """Layouts of one batch by target duration of rings and of other micro-batches, each tried once."""

    def __init__(self, batch: Batch, problem: Problem, replicas: Replicas) -> None:
        self._batch, self._problem, self._replicas = batch, problem, replicas
        self._table = _seconds_by_degree(batch, problem, replicas)
        self.found: dict[tuple[int, int, int], float] = {}
        if not self.is_possible:
            return
        least = float(batch.work.total_seconds.sum()) / problem.num_ranks
        self.lengths = [replicas.microbatch_seconds + least * share for share in _SHARES]
        self._columns = [_ring_columns(self._table, length, near) for near in _NEAR for length in self.lengths]
        known = [columns.tobytes() for columns in self._columns]
        self._same = [known.index(one) for one in known]  # first choice with the same rings

    @property
    def is_possible(self) -> bool:
        """Whether every sequence fits into some block."""
        return bool(np.isfinite(self._table).any(axis=1).all())

    @property
    def rings(self) -> range:
        """Choices of rings: every duration for each rule of `_NEAR`, in the order of widest to narrowest blocks."""
        return range(len(self._columns))

    def tried(self, ring: int, short: int, waits: int) -> Iterator[PipelineStep]:
        """Yield the step of a choice and one reordering of it; nothing if the choice was tried before.

        Args:
            ring: index in `rings`.
            short: index in `lengths`, for micro-batches outside rings.
            waits: 1 to count the waits of ranks for long rings, else 0.
        """
        # Durations that give the same rings are the same choice.
        key = self._same[ring], short, waits
        if key in self.found:
            return
        limit = min(self.found.values(), default=np.inf)
        one = PipelineStep.of(self._laid(*key), self._batch, self._problem, _FAR * limit)
        if one.seconds == np.inf:
            self.found[key] = np.inf
            return
        self.found[key] = one.seconds
        yield one
        for place in islice(wave_orders(one.made, one.prices.seconds, self._problem), 1):
            other = one.reordered(place, self._batch, self._problem, _HOPELESS * limit)
            self.found[key] = min(one.seconds, other.seconds)
            yield other

    def _laid(self, ring: int, short: int, waits: int) -> Assignment:
        work, columns = self._batch.work, self._columns[ring]
        degrees, total = self._replicas.degrees[columns], work.total_seconds
        sequences = AssignedSequences(
            # By falling degree, so that rings come before single ranks.
            order=np.lexsort((-total, -degrees)),
            column=columns,
            seconds=self._table[np.arange(len(columns)), columns],
            work=total,
            tokens=work.tokens,
        )
        wait = float(waits * (self._problem.pipeline_parallel - 1))
        of, wave, first, degree, count = lay(self.lengths[short], wait, _IN_SHADOW, sequences, self._replicas)
        order = np.argsort(wave[:count], kind="stable")
        degree, place = degree[:count][order], np.argsort(order)[of]
        rank_offsets = offsets_of(degree)
        within = np.arange(rank_offsets[-1]) - np.repeat(rank_offsets[:-1], degree)
        return Assignment(
            wave=wave[:count][order].astype(np.int32),
            rank_offsets=rank_offsets,
            ranks=(np.repeat(first[:count][order], degree) + within).astype(np.int32),
            member_offsets=offsets_of(np.bincount(place, minlength=count)),
            members=np.lexsort((-total, place)),
        )


def equal_length_candidates(batch: Batch, problem: Problem, replicas: Replicas) -> Iterator[PipelineStep]:
    """Yield layouts of a batch (see the module), for durations of rings and of other micro-batches.

    First both have the same duration, from long to short. Then each is varied around the best found, with the other
    fixed.
    """
    tries = _Lengths(batch, problem, replicas)
    if not tries.is_possible:
        return
    count = len(tries.lengths)
    for length in reversed(tries.rings):
        for waits in (0, 1):
            yield from tries.tried(length, length % count, waits)
    for _ in range(2):
        ring, short, waits = min(tries.found, key=tries.found.__getitem__)
        yield from tries.tried(ring, short, 1 - waits)
        for length in range(count)[max(short - _NEXT, 0) : short + _NEXT + 1]:
            yield from tries.tried(ring, length, waits)
        ring, short, waits = min(tries.found, key=tries.found.__getitem__)
        for length in tries.rings[max(ring - _NEXT, 0) : ring + _NEXT + 1]:
            yield from tries.tried(length, short, waits)
        # The same duration with the next rule of `_NEAR`.
        yield from tries.tried((ring + count) % len(tries.rings), short, waits)


def _ring_columns(table: FloatArray, ring: float, near: float) -> IntArray:
    """Return [sequences] the column of the narrowest block within `ring` seconds or `near` x the sequence's least."""
    enough = np.maximum(ring, near * table.min(axis=1))
    # Degrees rise, so the first column that is fast enough is the narrowest block.
    return np.asarray(np.argmax(table <= enough[:, None], axis=1))


def _seconds_by_degree(batch: Batch, problem: Problem, replicas: Replicas) -> FloatArray:
    """Return [sequences, degrees] the seconds of each sequence alone on a block; infinite if it does not fit."""
    columns = []
    for degree in replicas.degrees.tolist():
        work = work_on(batch.work, degree, problem)
        alone = group_seconds(
            problem.profile,
            work,
            degree=degree,
            # Blocks are aligned to nodes, so those no wider than a node lie inside one.
            crosses_nodes=degree > problem.ranks_per_node,
        )
        columns.append(np.where(work.tokens <= degree * problem.tokens_per_rank, alone, np.inf))
    return np.stack(columns, axis=1)


def plain_problems(problem: Problem, longest_tokens: int, widest: int) -> Iterator[Problem]:
    """Yield problems without stages: waves at shares of the token budget, and timelines at the full one.

    Shares are dropped at which `widest` ranks cannot hold the longest sequence.
    """
    multiple = problem.padding_multiple or 1
    syncs: tuple[Sync, ...] = ("microbatch", "iteration")
    for part in _BUDGETS:
        tokens = int(problem.tokens_per_rank * part) // multiple * multiple
        if tokens * widest >= longest_tokens:
            for sync in syncs if problem.sync == "iteration" and part == _BUDGETS[0] else syncs[:1]:
                yield replace(problem, pipeline=None, sync=sync, tokens_per_rank=tokens)


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
