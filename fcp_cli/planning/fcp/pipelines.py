"""Plans steps of pipelines: equally long micro-batches, rings first, judged by the exact timeline.

A pipeline of P stages waits about P - 1 of its micro-batches per step, a micro-batch on its own takes P times its
seconds, and behind one that is longer than its neighbours all stages wait. So what runs at the same time should take
equally long (ByteScale's PP-Balance puts like with like), and how long is what has to be chosen: short ones make small
bubbles, but each costs its fixed seconds, and a ring its messages. For each of several lengths of a micro-batch:

    a sequence that one rank cannot run in that time, or hold, becomes a ring of the narrowest block of ranks that can
    rings run first, the widest first, each on the block of its width that has least to do
    all else goes, longest first, to the rank that would be ready first, and there into micro-batches of like length

Blocks of ranks lie within each other (halves of halves), so that whoever meets in a ring has met in the same rings
before: no two replicas ever wait for each other in a circle. Whatever else is planned for the same batch competes. Of
the quickest answers, micro-batches on the critical path then change places with their neighbours while that helps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.cost.model import group_seconds
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.step import offsets_of
from fcp_cli.planning.assemble import assignment_prices, makespan_seconds, with_idle_rows
from fcp_cli.planning.compiled.core import Machine
from fcp_cli.planning.fcp.catalogue import tree_blocks
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.work import work_on
from fcp_cli.simulation.pipeline import better_places

# Lengths of micro-batches, as shares of the least that a step can take; no powers, whose last bit differs by machine.
_SHARES = 0.02, 0.026, 0.034, 0.044, 0.057, 0.073, 0.095, 0.12, 0.16, 0.21, 0.27, 0.35, 0.45, 0.6
_BUDGETS = 1.0, 0.7, 0.5, 0.35, 0.25  # parts of the token budget that plainer plans are made for
_NEAR = 1.5  # of the least that a ring can take: wider ones cost more than they save
_NEXT = 3  # lengths: how far from the best to try others
_IMPROVED = 8  # answers, the quickest ones, whose micro-batches then change places
_REACH = 3  # waves: how far away a neighbour may be
_RUNS = 150  # of the timeline for each of those answers


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The groups that rings may use: `of_degree[d]` lists blocks of d ranks, none of which overlap in part."""

    of_degree: dict[int, list[range]]

    @property
    def degrees(self) -> list[int]:
        return sorted(self.of_degree)


def blocks_of(problem: Problem, machine: Machine) -> Blocks:
    """Return blocks that halve the ranks again and again; those alone that the machine allows to be groups."""
    found: dict[int, list[range]] = {1: [range(rank, rank + 1) for rank in range(problem.num_ranks)]}
    firsts = machine.group_ranks[machine.group_first[:-1]].tolist()
    allowed = set(zip(firsts, np.diff(machine.group_first).tolist(), strict=True))
    for block in tree_blocks(problem.num_ranks, problem.ranks_per_node):
        if not allowed or (block.start, len(block)) in allowed:
            found.setdefault(len(block), []).append(block)
    return Blocks(of_degree=found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A step that was run: as it was made, with waves where it has any; the answer for the sync; its seconds."""

    made: Assignment
    answer: Assignment
    seconds: float

    @classmethod
    def of(cls, made: Assignment, batch: Batch, problem: Problem) -> Candidate:
        """Run a step."""
        answer = made if problem.sync == "microbatch" else replace(made, wave=np.full_like(made.wave, -1))
        return cls(made=made, answer=answer, seconds=makespan_seconds(answer, batch, problem))


def quickest_of(candidates: Iterable[Candidate], batch: Batch, problem: Problem) -> Assignment:
    """Return the candidate that the timeline ends first, or the best that swaps make of one of the quickest."""
    found = sorted(candidates, key=lambda one: one.seconds)
    of_seconds = {one.seconds: one for one in reversed(found) if one.made.wave[0] >= 0 and np.isfinite(one.seconds)}
    quickest = [of_seconds[seconds] for seconds in sorted(of_seconds)[:_IMPROVED]]
    swapped = [Candidate.of(_neighbours_swapped(one.made, batch, problem), batch, problem) for one in quickest]
    return min([*found, *swapped], key=lambda one: one.seconds).answer


def _neighbours_swapped(waves: Assignment, batch: Batch, problem: Problem) -> Assignment:
    """Return the best order of micro-batches that swaps along the critical path find, as waves again."""
    assert problem.pipeline is not None
    rows = with_idle_rows(waves, batch, problem)
    prices = assignment_prices(waves, batch, problem).spread(~rows.is_idle)
    step = problem.pipeline.laid_out(
        rows.rank_offsets, rows.ranks, prices, stages=problem.pipeline_parallel, num_ranks=problem.num_ranks
    )
    places = better_places(step, reach=_REACH, most_runs=_RUNS)[~rows.is_idle]
    return _reordered(waves, np.unique(places, return_inverse=True)[1])


def like_lengths(batch: Batch, problem: Problem, blocks: Blocks) -> Iterator[Candidate]:
    """Yield what the module's description makes of a batch, for each length of rings and of other micro-batches.

    First rings and the rest get one length, then each of the two another near the best beside the other.
    """
    table = _seconds_by_degree(batch, problem, blocks)
    if not np.isfinite(table).any(axis=1).all():
        return  # some sequence fits in no block
    least = float(batch.work.total_seconds.sum()) / problem.num_ranks
    beta = problem.profile.coefficients.microbatch_seconds
    lengths = [beta + least * share for share in _SHARES]
    columns = [_ring_columns(table, length) for length in lengths]
    rings = [columns.index(one) for one in columns]  # the first of the lengths that give the same rings
    found: dict[tuple[int, int], float] = {}

    def tried(ring: int, short: int) -> Iterator[Candidate]:
        if (rings[ring], short) in found:
            return
        layout = _Layout.of(batch, problem, blocks, table, columns[ring], lengths[short])
        one = Candidate.of(layout.lay(), batch, problem)
        found[rings[ring], short] = one.seconds
        yield one

    every = range(len(lengths))
    for length in every:
        yield from tried(length, length)
    for _ in range(2):
        ring, short = min(found, key=found.__getitem__)
        for length in every[max(short - _NEXT, 0) : short + _NEXT + 1]:
            yield from tried(ring, length)
        ring, short = min(found, key=found.__getitem__)
        for length in every[max(ring - _NEXT, 0) : ring + _NEXT + 1]:
            yield from tried(length, short)


def _ring_columns(table: FloatArray, ring: float) -> list[int]:
    """Return [sequences] the column of the narrowest block that takes no longer than `ring`, or near its least."""
    enough = np.maximum(ring, _NEAR * table.min(axis=1))
    return [int(column) for column in np.argmax(table <= enough[:, None], axis=1)]


def _seconds_by_degree(batch: Batch, problem: Problem, blocks: Blocks) -> FloatArray:
    """Return [sequences, degrees] the seconds of each sequence alone on a block; infinite where it does not fit."""
    columns = []
    for degree in blocks.degrees:
        work = work_on(batch.work, degree, problem)
        alone = group_seconds(
            problem.profile,
            attention_seconds=work.attention_seconds,
            linear_seconds=work.linear_seconds,
            tokens=work.tokens,
            degree=degree,
            crosses_nodes=degree > problem.ranks_per_node,
        )
        columns.append(np.where(work.tokens <= degree * problem.tokens_per_rank, alone, np.inf))
    return np.stack(columns, axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """A batch whose micro-batches outside rings take about `length` seconds.

    Attributes:
        degrees, seconds: [sequences] of the ring of each, and its seconds there; degree 1 is none.
        work, tokens: [sequences] on one rank.
    """

    problem: Problem
    blocks: Blocks
    length: float
    degrees: list[int]
    seconds: list[float]
    work: list[float]
    tokens: list[int]

    @classmethod
    def of(
        cls, batch: Batch, problem: Problem, blocks: Blocks, table: FloatArray, at: list[int], length: float
    ) -> _Layout:
        """Lay out with rings as wide as these columns of the table say."""
        return cls(
            problem=problem,
            blocks=blocks,
            length=length,
            degrees=[blocks.degrees[i] for i in at],
            seconds=table[np.arange(len(table)), at].tolist(),
            work=batch.work.total_seconds.tolist(),
            tokens=batch.work.tokens.tolist(),
        )

    def lay(self) -> Assignment:
        """Return everything laid out, in waves."""
        loads = [0.0] * self.problem.num_ranks
        groups: list[tuple[range, list[int]]] = []
        rings = [k for k, degree in enumerate(self.degrees) if degree > 1]
        for k in sorted(rings, key=lambda k: (-self.degrees[k], -self.work[k], k)):
            block = min(self.blocks.of_degree[self.degrees[k]], key=lambda one: max(loads[one.start : one.stop]))
            end = max(loads[block.start : block.stop]) + self.seconds[k]
            loads[block.start : block.stop] = [end] * len(block)
            groups.append((block, [k]))
        for rank, members in enumerate(self._share_out(loads)):
            groups += [(range(rank, rank + 1), pack) for pack in self._packs(members)]
        return assignment_of(groups, self.problem)

    def _share_out(self, loads: list[float]) -> list[list[int]]:
        """Return the sequences of each rank that run without a ring."""
        beta = self.problem.profile.coefficients.microbatch_seconds
        short = sorted((k for k, degree in enumerate(self.degrees) if degree == 1), key=lambda k: (-self.work[k], k))
        overhead = 1.0 + beta / max(self.length - beta, 1e-12)  # of a second of work, its part of a micro-batch's
        of_rank: list[list[int]] = [[] for _ in loads]
        heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(heap)
        for k in short:
            load, rank = heap[0]
            heapq.heapreplace(heap, (load + self.work[k] * overhead, rank))
            of_rank[rank].append(k)
        return of_rank

    def _packs(self, members: list[int]) -> list[list[int]]:
        """Return a rank's sequences, longest first, as micro-batches of like length within the token budget."""
        if not members:
            return []
        most, room = self.length - self.problem.profile.coefficients.microbatch_seconds, self.problem.tokens_per_rank
        count = max(
            1, round(sum(self.work[k] for k in members) / most), -(-sum(self.tokens[k] for k in members) // room)
        )
        packs: list[list[int]] = [[] for _ in range(count)]
        work, tokens = [0.0] * count, [0] * count
        for k in members:
            least, at = np.inf, len(packs)
            for i, held in enumerate(tokens):
                if work[i] < least and held + self.tokens[k] <= room:
                    least, at = work[i], i
            if at == len(packs):
                packs.append([])
                work.append(0.0)
                tokens.append(0)
            packs[at].append(k)
            work[at] += self.work[k]
            tokens[at] += self.tokens[k]
        order = sorted((i for i, pack in enumerate(packs) if pack), key=lambda i: -work[i])
        return [packs[i] for i in order]


def assignment_of(groups: Sequence[tuple[range, list[int]]], problem: Problem) -> Assignment:
    """Write micro-batches in the order that each rank runs them, each rank's k-th in wave k at the earliest."""
    turn = [0] * problem.num_ranks
    waves = []
    for block, _ in groups:
        wave = max(turn[block.start : block.stop])
        turn[block.start : block.stop] = [wave + 1] * len(block)
        waves.append(wave)
    order: IntArray = np.argsort(waves, kind="stable")
    groups = [groups[i] for i in order.tolist()]
    return Assignment(
        wave=np.array(waves, dtype=np.int32)[order],
        rank_offsets=offsets_of([len(block) for block, _ in groups]),
        ranks=np.array([rank for block, _ in groups for rank in block], dtype=np.int32),
        member_offsets=offsets_of([len(members) for _, members in groups]),
        members=np.array([k for _, members in groups for k in members], dtype=np.int64),
    )


def wave_orders(waves: Assignment, batch: Batch, problem: Problem) -> Iterator[Assignment]:
    """Yield the same waves in other orders by length: as found, rising, longest in the middle, and at both ends."""
    seconds = assignment_prices(waves, batch, problem).seconds
    lasts = np.zeros(int(waves.wave.max()) + 1)
    np.maximum.at(lasts, waves.wave, seconds)
    rising = np.argsort(lasts, kind="stable").tolist()
    middle = rising[0::2] + rising[1::2][::-1]
    falling = rising[::-1]
    ends = falling[0::2] + falling[1::2][::-1]
    for order in (list(range(len(lasts))), rising, middle, ends):
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        yield _reordered(waves, place[waves.wave])


def _reordered(assignment: Assignment, place: IntArray) -> Assignment:
    """Return the micro-batches by these places, which become their waves."""
    order = np.argsort(place, kind="stable").tolist()
    ranks = np.split(assignment.ranks, assignment.rank_offsets[1:-1])
    members = np.split(assignment.members, assignment.member_offsets[1:-1])
    return Assignment(
        wave=place[order].astype(np.int32),
        rank_offsets=offsets_of([len(ranks[i]) for i in order]),
        ranks=np.concatenate([ranks[i] for i in order]),
        member_offsets=offsets_of([len(members[i]) for i in order]),
        members=np.concatenate([members[i] for i in order]),
    )


def plain_problems(problem: Problem, longest_tokens: int) -> Iterator[Problem]:
    """Yield what the step may be planned as without pipelines: at parts of the token budget, as waves or timelines."""
    multiple = problem.padding_multiple or 1
    syncs: tuple[Sync, ...] = ("microbatch", "iteration")
    for part in _BUDGETS:
        tokens = int(problem.tokens_per_rank * part) // multiple * multiple
        if tokens * problem.num_ranks >= longest_tokens:
            for sync in syncs if problem.sync == "iteration" else syncs[:1]:
                yield replace(problem, pipeline=None, sync=sync, tokens_per_rank=tokens)
