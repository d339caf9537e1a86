"""Plans steps of pipelines: equally long micro-batches, rings first, judged by the exact timeline.

A pipeline of P stages waits about P - 1 of its micro-batches per step, a micro-batch on its own takes P times its
seconds, and behind one that is longer than its neighbours all stages wait. So what runs at the same time should take
equally long (ByteScale's PP-Balance puts like with like), and how long is what has to be chosen: short ones make small
bubbles, but each costs its fixed seconds, and a ring its messages. For each of several lengths of a micro-batch:

    a sequence that one rank cannot run in that time, or hold, becomes a ring of the narrowest block of ranks that can
    rings run first, the widest first, each on the block of its width that has least to do
    all else goes, longest first, to the rank that would be ready first, and there into micro-batches of like length
    the timeline says how long each rank really takes; what it takes longer counts at its start, and all is laid again

Blocks of ranks lie within each other (halves of halves), so that whoever meets in a ring has met in the same rings
before: no two replicas ever wait for each other in a circle. Whatever else is planned for the same batch competes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.cost.model import group_seconds
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.step import offsets_of
from fcp_cli.planning.assemble import assignment_prices, makespan_seconds
from fcp_cli.planning.compiled.core import Machine
from fcp_cli.planning.fcp.catalogue import tree_blocks
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.work import work_on

# Lengths of micro-batches, as shares of the least that a step can take; no powers, whose last bit differs by machine.
_SHARES = 0.02, 0.026, 0.034, 0.044, 0.057, 0.073, 0.095, 0.12, 0.16, 0.21, 0.27, 0.35, 0.45, 0.6
_BUDGETS = 1.0, 0.7, 0.5, 0.35, 0.25  # parts of the token budget that plainer plans are made for
_NEAR = 1.5  # of the least that a ring can take: wider ones cost more than they save
_ROUNDS = 3  # of laying everything again with what the timeline found


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


def quickest_of(candidates: Iterator[Assignment], batch: Batch, problem: Problem) -> Assignment:
    """Return the candidate that the timeline ends first; the first of equals."""
    return min(candidates, key=lambda one: makespan_seconds(one, batch, problem))


def like_lengths(batch: Batch, problem: Problem, blocks: Blocks) -> Iterator[Assignment]:
    """Yield what the module's description makes of a batch, for each length of rings and of other micro-batches.

    First rings and the rest get one length, then each of the two another beside the best of the other.
    """
    table = _seconds_by_degree(batch, problem, blocks)
    if not np.isfinite(table).any(axis=1).all():
        return  # some sequence fits in no block
    least = float(batch.work.total_seconds.sum()) / problem.num_ranks
    beta = problem.profile.coefficients.microbatch_seconds
    lengths = [beta + least * share for share in _SHARES]
    found: dict[tuple[float, float], float] = {}

    def tried(ring: float, short: float) -> Iterator[Assignment]:
        if (ring, short) in found:
            return
        layout = _Layout.of(batch, problem, blocks, table, ring, short)
        late, best = [0.0] * problem.num_ranks, np.inf
        for _ in range(_ROUNDS):
            assignment, loads = layout.lay(late)
            yield assignment
            ends = rank_ends(assignment, batch, problem)
            best = min(best, float(ends.max()))
            late = np.maximum(ends - np.array(loads), 0.0).tolist()
        found[ring, short] = best

    for length in lengths:
        yield from tried(length, length)
    for _ in range(2):
        ring, short = min(found, key=found.__getitem__)
        for length in lengths:
            yield from tried(ring, length)
        ring, short = min(found, key=found.__getitem__)
        for length in lengths:
            yield from tried(length, short)


def rank_ends(assignment: Assignment, batch: Batch, problem: Problem) -> FloatArray:
    """Return [num_ranks] when each rank has ended its step; 0 where it has nothing to do."""
    assert problem.pipeline is not None
    prices = assignment_prices(assignment, batch, problem)
    run = problem.pipeline.run(
        assignment.rank_offsets,
        assignment.ranks,
        prices,
        stages=problem.pipeline_parallel,
        num_ranks=problem.num_ranks,
    )
    _forward, backward, _sends = problem.pipeline.block_seconds(prices, problem.pipeline_parallel)
    ends = np.zeros(problem.num_ranks)
    last = (run.backward_start + backward).max(axis=1)
    np.maximum.at(ends, assignment.ranks, np.repeat(last, np.diff(assignment.rank_offsets)))
    return ends


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
        cls, batch: Batch, problem: Problem, blocks: Blocks, table: FloatArray, ring: float, length: float
    ) -> _Layout:
        """Lay out with rings of about `ring` seconds: the narrowest that take no longer, or near their least."""
        enough = np.maximum(ring, _NEAR * table.min(axis=1))
        at = np.argmax(table <= enough[:, None], axis=1)
        return cls(
            problem=problem,
            blocks=blocks,
            length=length,
            degrees=[blocks.degrees[i] for i in at.tolist()],
            seconds=table[np.arange(len(table)), at].tolist(),
            work=batch.work.total_seconds.tolist(),
            tokens=batch.work.tokens.tolist(),
        )

    def lay(self, late: list[float]) -> tuple[Assignment, list[float]]:
        """Return everything laid out, and [num_ranks] the seconds that each rank computes; `late` counts before."""
        computing, loads = [0.0] * self.problem.num_ranks, list(late)
        groups: list[tuple[range, list[int]]] = []
        rings = [k for k, degree in enumerate(self.degrees) if degree > 1]
        for k in sorted(rings, key=lambda k: (-self.degrees[k], -self.work[k], k)):
            block = min(self.blocks.of_degree[self.degrees[k]], key=lambda one: max(loads[one.start : one.stop]))
            end = max(loads[block.start : block.stop]) + self.seconds[k]
            for rank in block:
                loads[rank] = end
                computing[rank] += self.seconds[k]
            groups.append((block, [k]))
        beta = self.problem.profile.coefficients.microbatch_seconds
        for rank, members in enumerate(self._share_out(loads)):
            packs = self._packs(members)
            computing[rank] += sum(self.work[k] for k in members) + beta * len(packs)
            groups += [(range(rank, rank + 1), pack) for pack in packs]
        return assignment_of(groups, self.problem), computing

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
            with_room = [i for i, held in enumerate(tokens) if held + self.tokens[k] <= room]
            if not with_room:
                with_room = [len(packs)]
                packs.append([])
                work.append(0.0)
                tokens.append(0)
            at = min(with_room, key=work.__getitem__)
            packs[at].append(k)
            work[at] += self.work[k]
            tokens[at] += self.tokens[k]
        order = sorted((i for i, pack in enumerate(packs) if pack), key=lambda i: -work[i])
        return [packs[i] for i in order]


def assignment_of(groups: Sequence[tuple[range, list[int]]], problem: Problem) -> Assignment:
    """Write micro-batches in the order that each rank runs them; under `microbatch`, each rank's k-th in wave k."""
    turn = np.zeros(problem.num_ranks, dtype=np.int64)
    waves = []
    for block, _ in groups:
        wave = int(turn[block.start : block.stop].max())
        turn[block.start : block.stop] = wave + 1
        waves.append(wave)
    order: IntArray = np.argsort(waves, kind="stable")
    if problem.sync == "iteration":
        waves = [-1] * len(waves)
    groups = [groups[i] for i in order.tolist()]
    return Assignment(
        wave=np.array(waves, dtype=np.int32)[order],
        rank_offsets=offsets_of([len(block) for block, _ in groups]),
        ranks=np.array([rank for block, _ in groups for rank in block], dtype=np.int32),
        member_offsets=offsets_of([len(members) for _, members in groups]),
        members=np.array([k for _, members in groups for k in members], dtype=np.int64),
    )


def wave_orders(waves: Assignment, batch: Batch, problem: Problem) -> Iterator[Assignment]:
    """Yield the same waves in other orders by their length: as found, rising, longest in the middle, and at both ends.

    Without waves in the answer (`iteration`), each rank keeps to the order that they gave it.
    """
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
        yield _reordered(waves, place[waves.wave], keeps_waves=problem.sync == "microbatch")


def _reordered(assignment: Assignment, place: IntArray, *, keeps_waves: bool) -> Assignment:
    """Return the micro-batches by these places, which become their waves."""
    order = np.argsort(place, kind="stable").tolist()
    ranks = np.split(assignment.ranks, assignment.rank_offsets[1:-1])
    members = np.split(assignment.members, assignment.member_offsets[1:-1])
    return Assignment(
        wave=(place[order] if keeps_waves else np.full(len(order), -1)).astype(np.int32),
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
