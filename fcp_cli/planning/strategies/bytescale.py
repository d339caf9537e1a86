"""`bytescale`: hybrid data parallelism with DP-Balance, from the description of ByteScale (SIGCOMM 2025).

No training code is public; this is written from the paper's description and from accounts of it. A sequence is cut into
as many chunks as it needs ranks, in any number. Short sequences stay whole and are packed. Sequences are assigned in
descending order to the ranks with the least estimated time so far, and ranks may run different numbers of
micro-batches. Choices that the paper leaves open:

- Times are those of the cost profile, including a share of the fixed cost per micro-batch.
- A chunk holds the token budget or its half, quarter or eighth, whichever gives the fastest step. The paper's selective
  offloading, which changes how much a rank holds, is not modelled.
- A long sequence runs on the least loaded ranks of a single node if it fits into one.
- PP-Balance, for pipelines: sequences, longest first, are dealt in buckets of equal time, each bucket to separate
  ranks, so that consecutive micro-batches of a pipeline take about equally long. Buckets of short sequences have more
  micro-batches. The faster of PP-Balance and DP-Balance counts.
- Under `microbatch`, all ranks must run equally many micro-batches. Either the same micro-batches are put into waves,
  longest first, each into the first wave with enough free ranks (as PP-Balance groups micro-batches of equal time), or
  they keep their ranks and order. The faster of the two counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from fcp_cli.cost.model import group_seconds
from fcp_cli.planning.assemble import assignment_seconds
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.drafts import Draft, FunctionSolver, assignment_of, packs_of, place_waves, quickest, shard_sizes
from fcp_cli.planning.problem import Assignment, Batch, Problem, work_on


def make_solver(batches: GlobalBatches) -> FunctionSolver:
    """Make the solver for these batches."""
    return FunctionSolver(name="bytescale", problem=batches.problem, rule=_balanced)


def _balanced(batch: Batch, problem: Problem) -> Assignment:
    """Balance one batch with chunks of each size, and return the fastest assignment."""
    return quickest(_candidates(batch, problem), batch, problem)


def _candidates(batch: Batch, problem: Problem) -> Iterator[Assignment]:
    longest = int(batch.lengths.max())
    for tokens_per_rank in shard_sizes(problem.tokens_per_rank):
        if -(-longest // tokens_per_rank) <= problem.num_ranks:
            for balanced in (balance,) if problem.pipeline is None else (balance, balance_pipelines):
                drafts = balanced(batch, problem, tokens_per_rank)
                yield assignment_of(drafts, problem.sync)
                if problem.sync == "microbatch":
                    yield in_waves_of_like_time(drafts, batch, problem)


def balance(batch: Batch, problem: Problem, tokens_per_rank: int) -> list[Draft]:
    """Balance by DP-Balance: long sequences on the least loaded ranks, then short ones one by one, packed per rank."""
    lengths = batch.lengths.tolist()
    order = sorted(range(len(lengths)), key=lambda member: -lengths[member])
    long = [member for member in order if lengths[member] > tokens_per_rank]
    loads = [0.0] * problem.num_ranks
    drafts = _place_long(long, batch, problem, tokens_per_rank, loads)
    short_of_rank = _place_short(order[len(long) :], batch, problem, loads)
    packs = [
        Draft([rank], pack) for rank, members in enumerate(short_of_rank) for pack in packs_of(members, batch, problem)
    ]
    return drafts + packs


def balance_pipelines(batch: Batch, problem: Problem, tokens_per_rank: int) -> list[Draft]:
    """Balance by PP-Balance: longest first to one set of ranks after the other, each up to its share of the time."""
    lengths, total = batch.lengths.tolist(), batch.work.total_seconds
    order = sorted(range(len(lengths)), key=lambda member: -lengths[member])
    share = float(total.sum()) / problem.num_ranks
    loads, drafts = [0.0] * problem.num_ranks, []
    of_rank: list[list[int]] = [[] for _ in loads]
    ranks: list[int] = []
    for member in order:
        degree = -(-lengths[member] // tokens_per_rank)
        seconds = _seconds(member, range(degree), batch, problem)
        is_full = bool(ranks) and loads[ranks[0]] + seconds / 2 > share
        if len(ranks) != degree or is_full:  # start a new bucket
            ranks = _emptiest(loads, degree, problem.ranks_per_node)
        for rank in ranks:
            loads[rank] += seconds
        if degree > 1:
            drafts.append(Draft(ranks, [member]))
        else:
            of_rank[ranks[0]].append(member)
    packs = [Draft([rank], pack) for rank, members in enumerate(of_rank) for pack in packs_of(members, batch, problem)]
    return drafts + packs


def _emptiest(loads: Sequence[float], degree: int, ranks_per_node: int) -> list[int]:
    """Return the block of neighbouring ranks with the smallest maximum load, aligned to its degree or to nodes."""
    step = degree if degree <= ranks_per_node else ranks_per_node
    firsts = [
        first
        for first in range(0, len(loads) - degree + 1, step)
        if degree > ranks_per_node or first // ranks_per_node == (first + degree - 1) // ranks_per_node
    ]
    first = min(firsts or [len(loads) - degree], key=lambda first: max(loads[first : first + degree]))
    return list(range(first, first + degree))


def in_waves_of_like_time(drafts: Sequence[Draft], batch: Batch, problem: Problem) -> Assignment:
    """Put the packs, longest first, each into the first wave with enough free ranks; keep their degrees, not ranks."""
    seconds = assignment_seconds(assignment_of(drafts, "iteration"), batch, problem)
    waves: list[list[Draft]] = []
    free: list[int] = []
    for i in np.argsort(-seconds, kind="stable").tolist():
        degree = len(drafts[i].ranks)
        wave = next((wave for wave, ranks in enumerate(free) if ranks >= degree), len(waves))
        if wave == len(waves):
            waves.append([])
            free.append(problem.num_ranks)
        waves[wave].append(drafts[i])
        free[wave] -= degree
    return place_waves([[(len(draft.ranks), draft.members) for draft in wave] for wave in waves], problem)


def _place_long(
    members: Sequence[int], batch: Batch, problem: Problem, tokens_per_rank: int, loads: list[float]
) -> list[Draft]:
    drafts = []
    for member in members:
        degree = -(-int(batch.lengths[member]) // tokens_per_rank)
        ranks = _least_loaded(loads, degree, problem.ranks_per_node)
        end = max(loads[rank] for rank in ranks) + _seconds(member, ranks, batch, problem)
        for rank in ranks:
            loads[rank] = end
        drafts.append(Draft(ranks, [member]))
    return drafts


def _seconds(member: int, ranks: Sequence[int], batch: Batch, problem: Problem) -> float:
    """Predict the seconds of a sequence alone on ascending ranks."""
    work = work_on(batch.work.take(member), len(ranks), problem)
    seconds = group_seconds(
        problem.profile,
        work,
        degree=len(ranks),
        crosses_nodes=ranks[0] // problem.ranks_per_node != ranks[-1] // problem.ranks_per_node,
    )
    return float(seconds)


def _least_loaded(loads: Sequence[float], degree: int, ranks_per_node: int) -> list[int]:
    """Return the least loaded ranks, ascending: of the node where the group can start first, or of all if none fits."""
    size = ranks_per_node if degree <= ranks_per_node else len(loads)
    best: list[int] = []
    best_start = float("inf")
    for first in range(0, len(loads), size):
        ranks = sorted(range(first, min(first + size, len(loads))), key=loads.__getitem__)[:degree]
        if len(ranks) == degree and loads[ranks[-1]] < best_start:
            best, best_start = ranks, loads[ranks[-1]]
    return sorted(best) if best else _least_loaded(loads, degree, len(loads))


def _place_short(members: Sequence[int], batch: Batch, problem: Problem, loads: Sequence[float]) -> list[list[int]]:
    """Return the short sequences of each rank, longest first; each goes to the least loaded rank."""
    microbatch_seconds = problem.profile.coefficients.microbatch_seconds
    seconds = batch.work.total_seconds + microbatch_seconds * batch.work.tokens / problem.tokens_per_rank
    of_rank: list[list[int]] = [[] for _ in loads]
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for member in members:
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + float(seconds[member]), rank))
        of_rank[rank].append(member)
    return of_rank
