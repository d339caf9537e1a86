"""Plans steps of pipelines: equally long micro-batches, judged by the exact timeline.

A pipeline of P stages waits about P - 1 of its micro-batches per step, a micro-batch on its own takes P times its
seconds, and behind one that is longer than its neighbours all stages wait. So micro-batches that run at the same time
should take equally long (ByteScale's PP-Balance puts like with like), and the choice is how long: short ones make small
bubbles, but each costs its fixed seconds, and a ring its messages. For each of several lengths of a micro-batch:

    a sequence that one rank cannot run in that time, or hold, becomes a ring of the narrowest block of ranks that can
    rings run first, the widest first, each on the block of its width that would be ready first
    all else goes, longest first, to the rank that would be ready first, and there into micro-batches of similar length

A rank of a long ring waits for it P - 1 times; either that is forgotten, and all ranks run equally many micro-batches,
or it counts, and other work there counts by half, since it runs in that time. Blocks of ranks lie within each other
(halves of halves), so that replicas that share a ring have shared the same rings before: no two ever wait for each
other in a cycle. Blocks of three eighths and the like, which leave others to replicas outside the longest sequence, are
tried, too. Whatever else is planned for the same batch competes. The quickest answers are tried in other orders
(`wave_orders`); then micro-batches on the critical path change places with their neighbours while that helps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.cost.model import group_seconds
from fcp_cli.plan.metadata.plan_metadata import Sync
from fcp_cli.plan.pricing.prices import Prices
from fcp_cli.plan.step import StepPlan, offsets_of, sizes_of
from fcp_cli.planning.assemble import assignment_prices, with_idle_rows
from fcp_cli.planning.compiled.core import PlannerInputs
from fcp_cli.planning.fcp.catalogue import tree_blocks
from fcp_cli.planning.fcp.wave_orders import reordered, wave_orders
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.work import work_on
from fcp_cli.simulation.layout import AssignedSequences, Replicas, lay
from fcp_cli.simulation.pipeline import Pipelines, better_places, makespan_seconds

# Lengths of micro-batches, as shares of the least that a step can take; no powers, whose last bit differs by machine.
_SHARES = 0.02, 0.026, 0.034, 0.044, 0.057, 0.073, 0.095, 0.12, 0.16, 0.21, 0.27, 0.35, 0.45, 0.6
_BUDGETS = 1.0, 0.7, 0.5, 0.35, 0.25  # parts of the token budget that plainer plans are made for
_NEAR = 1.02, 1.1, 1.5  # of the least that a ring can take: wider ones cost more than they save
_NEXT = 3  # lengths: how far from the best to try others
_IN_SHADOW = 0.5  # of work in parallel to a long ring: the rest runs while the pipeline waits for the ring anyway
_FAR = 1.4  # of the quickest step so far: limit of a layout to be tried in another order
_HOPELESS = 1.03  # of the quickest step so far: limit of an order to be kept
_REORDERED = 10  # answers, the quickest ones, whose waves are tried in other orders
_IMPROVED = 5  # answers, the quickest ones, whose micro-batches then change places
_REACH = 3  # waves: how far away a neighbour may be
_RUNS, _LEAST_RUNS = 60_000, 20  # of micro-batches, in runs of the timeline for each of those answers


def replicas_of(problem: Problem, inputs: PlannerInputs) -> Replicas:
    """Return the ranks, with blocks that halve them repeatedly, the only ones that may be groups.

    If any neighbours may be a group, there are blocks of three, five, six and seven eighths, too, from either end.
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
                # From either end: the ranks beside the block are then neighbours, too.
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
    """A simulated step: its original form, with its waves if any; the costs of its micro-batches; its seconds."""

    made: Assignment
    prices: Prices
    seconds: float

    @classmethod
    def of(cls, made: Assignment, batch: Batch, problem: Problem, limit: float = np.inf) -> PipelineStep:
        """Price and run a step."""
        return cls.priced(made, assignment_prices(made, batch, problem), batch, problem, limit)

    @classmethod
    def priced(
        cls, made: Assignment, prices: Prices, batch: Batch, problem: Problem, limit: float = np.inf
    ) -> PipelineStep:
        """Run a step; one that takes more than `limit` seconds counts as endless."""
        degrees = sizes_of(made.rank_offsets)
        # A replica runs its own micro-batches in turn: one that is busy for longer needs no timeline.
        if np.bincount(made.ranks, np.repeat(prices.seconds, degrees)).max() > limit:
            return cls(made=made, prices=prices, seconds=np.inf)
        if problem.sync == "microbatch":
            step = _laid_out(*_in_waves(made, prices, batch, problem), problem)
        else:
            step = _laid_out(made, prices, problem)
        return cls(made=made, prices=prices, seconds=makespan_seconds(step, limit))

    def reordered(self, place: IntArray, batch: Batch, problem: Problem, limit: float = np.inf) -> PipelineStep:
        """Return the same micro-batches by these places, which become their waves."""
        prices = self.prices.take(np.argsort(place, kind="stable"))
        return PipelineStep.priced(reordered(self.made, place), prices, batch, problem, limit)

    def answer(self, problem: Problem) -> Assignment:
        """Return the step as the sync has it."""
        if problem.sync == "microbatch":
            return self.made
        return replace(self.made, wave=np.full_like(self.made.wave, -1))


def quickest_of(candidates: Iterable[PipelineStep], batch: Batch, problem: Problem) -> Assignment:
    """Return the candidate that the timeline ends first, in the best order that other ones and swaps make of it."""
    found = list(candidates)
    limit = min(one.seconds for one in found)
    for one in _quickest(found, _REORDERED):
        for place in wave_orders(one.made, one.prices.seconds, problem):
            found.append(one.reordered(place, batch, problem, _HOPELESS * limit))
            limit = min(limit, found[-1].seconds)
    found += [_swapped(one, batch, problem) for one in _quickest(found, _IMPROVED)]
    return min(found, key=lambda one: one.seconds).answer(problem)


def _quickest(found: list[PipelineStep], count: int) -> list[PipelineStep]:
    """Return the quickest that have waves, one of each time, and of each set of micro-batches."""
    quickest: dict[float, PipelineStep] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        if one.made.wave[0] >= 0 and np.isfinite(one.seconds):
            quickest.setdefault(round(float(one.prices.seconds.sum()), 6), one)
    return list(quickest.values())[:count]


def _swapped(one: PipelineStep, batch: Batch, problem: Problem) -> PipelineStep:
    """Return the best order of micro-batches that swaps along the critical path find, as waves again."""
    rows, prices = _in_waves(one.made, one.prices, batch, problem)
    step = _laid_out(rows, prices, problem)
    # Fewer runs of larger steps, so that a step takes about as long to improve whatever its size.
    places = better_places(step, reach=_REACH, most_runs=max(_RUNS // len(rows), _LEAST_RUNS))[~rows.is_idle]
    return one.reordered(np.unique(places, return_inverse=True)[1], batch, problem)


def _in_waves(made: Assignment, prices: Prices, batch: Batch, problem: Problem) -> tuple[StepPlan, Prices]:
    """Return the step with idle rows, so that every replica has work in every wave, and their prices."""
    rows = with_idle_rows(made, batch, problem)
    return rows, prices.spread(~rows.is_idle)


def _laid_out(rows: Assignment | StepPlan, prices: Prices, problem: Problem) -> Pipelines:
    assert problem.pipeline is not None
    return problem.pipeline.laid_out(
        rows.rank_offsets, rows.ranks, prices, stages=problem.pipeline_parallel, num_ranks=problem.num_ranks
    )


class _Lengths:
    """Lays one batch out for lengths of rings and of other micro-batches, each choice once."""

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
        self._same = [known.index(one) for one in known]  # the first choice that gives the same rings

    @property
    def is_possible(self) -> bool:
        """Whether every sequence fits in some block."""
        return bool(np.isfinite(self._table).any(axis=1).all())

    @property
    def rings(self) -> range:
        """Choices of rings: every length, with the widest blocks first, then with narrower ones."""
        return range(len(self._columns))

    def tried(self, ring: int, short: int, waits: int) -> Iterator[PipelineStep]:
        """Yield the step, and with its longest waves between the others, unless it was tried.

        Args:
            ring: the ring of `rings`.
            short: those of `lengths`, for micro-batches outside rings.
            waits: 1 if waits of ranks for long rings count; else 0.
        """
        # Lengths that give the same rings count as one.
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
            # Rings by falling degree, which stand before the rest, of degree 1.
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
    """Yield the layouts of a batch by the module's description, for each length of rings and of other micro-batches.

    First rings and the rest get one length, from long to short, then each of the two another near the best with the
    other.
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
        # The same length, with the next rule of how wide its rings may be.
        yield from tries.tried((ring + count) % len(tries.rings), short, waits)


def _ring_columns(table: FloatArray, ring: float, near: float) -> IntArray:
    """Return [sequences] the column of the narrowest block that takes no longer than `ring`, or near its least."""
    enough = np.maximum(ring, near * table.min(axis=1))
    # Degrees rise, so the first column that is quick enough is the narrowest block.
    return np.asarray(np.argmax(table <= enough[:, None], axis=1))


def _seconds_by_degree(batch: Batch, problem: Problem, replicas: Replicas) -> FloatArray:
    """Return [sequences, degrees] the seconds of each sequence by itself on a block; infinite if it does not fit."""
    columns = []
    for degree in replicas.degrees.tolist():
        work = work_on(batch.work, degree, problem)
        alone = group_seconds(
            problem.profile,
            work,
            degree=degree,
            # The tree halves nodes, so its blocks that are no wider than a node lie inside one.
            crosses_nodes=degree > problem.ranks_per_node,
        )
        columns.append(np.where(work.tokens <= degree * problem.tokens_per_rank, alone, np.inf))
    return np.stack(columns, axis=1)


def plain_problems(problem: Problem, longest_tokens: int) -> Iterator[Problem]:
    """Yield the step's plans without pipelines: as waves at parts of the token budget, or timelines."""
    multiple = problem.padding_multiple or 1
    syncs: tuple[Sync, ...] = ("microbatch", "iteration")
    for part in _BUDGETS:
        tokens = int(problem.tokens_per_rank * part) // multiple * multiple
        if tokens * problem.num_ranks >= longest_tokens:
            for sync in syncs if problem.sync == "iteration" and part == _BUDGETS[0] else syncs[:1]:
                yield replace(problem, pipeline=None, sync=sync, tokens_per_rank=tokens)
