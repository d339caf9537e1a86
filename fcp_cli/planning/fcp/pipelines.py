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
    """Yield what the module's description makes of a batch, for each length of a micro-batch and in each round."""
    assert problem.pipeline is not None
    seconds = _seconds_by_degree(batch, problem, blocks)
    if not np.isfinite(seconds).any(axis=1).all():
        return  # some sequence fits in no block
    least = float(batch.work.total_seconds.sum()) / problem.num_ranks
    beta = problem.profile.coefficients.microbatch_seconds
    for length in (beta + least * share for share in _SHARES):
        rings = _rings(seconds, length, blocks)
        plan = _Layout(batch=batch, problem=problem, blocks=blocks, length=length, rings=rings)
        late = np.zeros(problem.num_ranks)
        for _ in range(_ROUNDS):
            assignment, loads = plan.lay(late)
            yield assignment
            ends = rank_ends(assignment, batch, problem)
            late = np.maximum(ends - loads, 0.0)


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


def _rings(seconds: FloatArray, length: float, blocks: Blocks) -> list[int]:
    """Return [sequences] the degree of each: the narrowest that runs it in `length`, or near its least if none does."""
    enough = np.maximum(length, 1.1 * seconds.min(axis=1))
    return [blocks.degrees[at] for at in np.argmax(seconds <= enough[:, None], axis=1).tolist()]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Micro-batches of one length: `rings` is the degree of each sequence."""

    batch: Batch
    problem: Problem
    blocks: Blocks
    length: float
    rings: list[int]

    def lay(self, late: FloatArray) -> tuple[Assignment, FloatArray]:
        """Return everything laid out, and [num_ranks] the seconds that each rank computes; `late` counts before."""
        computing, loads = np.zeros(self.problem.num_ranks), late.copy()
        groups: list[tuple[range, list[int]]] = []
        total = self.batch.work.total_seconds
        by_width = sorted(
            (k for k, degree in enumerate(self.rings) if degree > 1), key=lambda k: (-self.rings[k], -total[k], k)
        )
        for k in by_width:
            degree = self.rings[k]
            block = min(self.blocks.of_degree[degree], key=lambda one: loads[one.start : one.stop].max())
            seconds = self._seconds([k], degree)
            loads[block.start : block.stop] = loads[block.start : block.stop].max() + seconds
            computing[block.start : block.stop] += seconds
            groups.append((block, [k]))
        for rank, members in enumerate(self._share_out(loads)):
            packs = self._packs(members)
            computing[rank] += sum(self._seconds(pack, 1) for pack in packs)
            groups += [(range(rank, rank + 1), pack) for pack in packs]
        return assignment_of(groups, self.problem), computing

    def _share_out(self, loads: FloatArray) -> list[list[int]]:
        """Return the sequences of each rank that run without a ring."""
        total, beta = self.batch.work.total_seconds, self.problem.profile.coefficients.microbatch_seconds
        short = sorted((k for k, degree in enumerate(self.rings) if degree == 1), key=lambda k: (-total[k], k))
        overhead = 1.0 + beta / max(self.length - beta, 1e-12)  # of a second of work, its part of a micro-batch's
        of_rank: list[list[int]] = [[] for _ in loads]
        heap = [(load, rank) for rank, load in enumerate(loads.tolist())]
        heapq.heapify(heap)
        for k in short:
            load, rank = heap[0]
            heapq.heapreplace(heap, (load + float(total[k]) * overhead, rank))
            of_rank[rank].append(k)
        return of_rank

    def _packs(self, members: list[int]) -> list[list[int]]:
        """Return a rank's sequences, longest first, as micro-batches of like length within the token budget."""
        if not members:
            return []
        total, tokens = self.batch.work.total_seconds, self.batch.work.tokens
        most, room = self.length - self.problem.profile.coefficients.microbatch_seconds, self.problem.tokens_per_rank
        work = float(total[members].sum())
        count = max(1, round(work / most), -(-int(tokens[members].sum()) // room))
        packs: list[list[int]] = [[] for _ in range(count)]
        work_of, tokens_of = [0.0] * count, [0] * count
        for k in members:
            with_room = [i for i in range(len(packs)) if tokens_of[i] + int(tokens[k]) <= room]
            if not with_room:
                with_room = [len(packs)]
                packs.append([])
                work_of.append(0.0)
                tokens_of.append(0)
            at = min(with_room, key=work_of.__getitem__)
            packs[at].append(k)
            work_of[at] += float(total[k])
            tokens_of[at] += int(tokens[k])
        order = sorted((i for i in range(len(packs)) if packs[i]), key=lambda i: -work_of[i])
        return [packs[i] for i in order]

    def _seconds(self, members: list[int], degree: int) -> float:
        work = work_on(self.batch.work.take(np.array(members)), degree, self.problem)
        return float(
            group_seconds(
                self.problem.profile,
                attention_seconds=work.attention_seconds.sum(),
                linear_seconds=work.linear_seconds.sum(),
                tokens=work.tokens.sum(),
                degree=degree,
                crosses_nodes=degree > self.problem.ranks_per_node,
            )
        )


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


def plain_problems(problem: Problem, longest_tokens: int) -> Iterator[Problem]:
    """Yield what the step may be planned as without pipelines: at parts of the token budget, as waves or timelines."""
    multiple = problem.padding_multiple or 1
    syncs: tuple[Sync, ...] = ("microbatch", "iteration")
    for part in _BUDGETS:
        tokens = int(problem.tokens_per_rank * part) // multiple * multiple
        if tokens * problem.num_ranks >= longest_tokens:
            for sync in syncs if problem.sync == "iteration" else syncs[:1]:
                yield replace(problem, pipeline=None, sync=sync, tokens_per_rank=tokens)
