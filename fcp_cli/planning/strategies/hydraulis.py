"""`hydraulis`: groups of several degrees, fixed for a batch, with sequences spread over them, from Hydraulis (2024).

Written from the published code (lhy101/Hydraulis at 4489487e, April 2025). A dynamic programme over ranks and length
intervals proposes the number of groups of each degree, for each maximum length of a batch ("strategy proposal"). For
every batch, sequences in random order each go to the group that minimizes the end of the step, and the best of 50
orders is kept ("dynamic strategy"). Each group then packs its own sequences. Choices that the paper leaves open:

- The degrees of the original are of tensor parallelism; here they are powers of two of ranks in rings.
- A batch uses the fastest proposal that holds its longest sequence, by the cost model. The original compares the same
  quantity between its 50 orders. A proposal that leaves a group empty is allowed here, but rejected there.
- A group runs the fewest packs that hold its sequences, with similar work; the original spends half a second of integer
  programming on that.
- There are sixteen intervals with equally many sequences each; those of the original have a fixed width in tokens.
- Its pipelines are not modelled: every group has one stage.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, partial
from typing import Final

import numpy as np

from fcp_cli.cost.model import clocks
from fcp_cli.planning.batches import GlobalBatches, spread_steps
from fcp_cli.planning.drafts import Draft, FunctionSolver, assignment_of, place_groups, quickest, require_power_of_two
from fcp_cli.planning.problem import Assignment, Batch, Problem, work_on
from fcp_cli.planning.strategies.wlb_llm import packs_of_groups
from fcp_cli.util.arrays import FloatArray, IntArray

_ORDERS: Final = 50
_INTERVALS: Final = 16
_SAMPLED_STEPS: Final = 4


def make_solver(batches: GlobalBatches) -> FunctionSolver:
    """Make the solver, with proposals made from a sample of the steps."""
    problem = batches.problem
    sample = [batches.batch(step) for step in spread_steps(len(batches), _SAMPLED_STEPS)]
    tokens = np.concatenate([batch.work.tokens for batch in sample])
    seconds = np.concatenate([seconds_by_degree(batch, problem) for batch in sample], axis=1)
    proposed = proposals(tokens, seconds, problem, batches.longest_tokens)
    return FunctionSolver(
        name="hydraulis",
        problem=problem,
        rule=partial(_quickest, proposed=proposed),
        options={"proposals": [list(degrees) for degrees in proposed]},
    )


def _quickest(batch: Batch, problem: Problem, *, proposed: Sequence[tuple[int, ...]]) -> Assignment:
    """Spread a batch over the groups of each feasible proposal, and return the fastest assignment."""
    longest = int(batch.work.tokens.max())
    require_power_of_two("hydraulis", longest, problem)
    seconds = seconds_by_degree(batch, problem)
    able = [one for one in proposed if one[0] * problem.tokens_per_rank >= longest]
    return quickest((_packed(batch, degrees, seconds, problem) for degrees in able), batch, problem)


def _packed(batch: Batch, degrees: tuple[int, ...], seconds: FloatArray, problem: Problem) -> Assignment:
    of_groups = seconds[[degree.bit_length() - 1 for degree in degrees]]
    limits = np.array(degrees) * problem.tokens_per_rank
    group_of = spread(batch.work.tokens, of_groups, limits, orders=_ORDERS)
    offsets, ranks = place_groups(list(degrees), num_ranks=problem.num_ranks, ranks_per_node=problem.ranks_per_node)
    drafts: list[tuple[float, Draft]] = []
    for group, degree in enumerate(degrees):
        mine = np.flatnonzero(group_of == group)
        tokens = work_on(batch.work, degree, problem).tokens[mine]
        packs = packs_of_groups(tokens, of_groups[group, mine], groups=1, limit=int(limits[group]))
        on = ranks[offsets[group] : offsets[group + 1]].tolist()
        packs = [mine[pack].tolist() for pack in packs]
        drafts += [(float(of_groups[group, pack].sum()), Draft(on, pack)) for pack in packs]
    return assignment_of([draft for _, draft in sorted(drafts, key=lambda one: -one[0])], problem.sync)


def seconds_by_degree(batch: Batch, problem: Problem) -> FloatArray:
    """Return [powers of two, sequences] the seconds of each alone without the fixed ones; infinite if too long."""
    rows = []
    for power in range(problem.num_ranks.bit_length()):
        degree = 1 << power
        work = work_on(batch.work, degree, problem)
        seconds, _host = clocks(problem.profile, work, degree=degree, crosses_nodes=degree > problem.ranks_per_node)
        seconds = seconds - problem.profile.coefficients.microbatch_seconds
        rows.append(np.where(work.tokens > degree * problem.tokens_per_rank, np.inf, seconds))
    return np.array(rows)


def spread(lengths: IntArray, seconds: FloatArray, limits: IntArray, *, orders: int) -> IntArray:
    """Return [sequences] the group of each, from the random order in which the last group ends first.

    Args:
        lengths: [sequences] tokens.
        seconds: [groups, sequences] seconds of each sequence alone.
        limits: [groups] longest sequence of each group in tokens, falling.
        orders: number of random orders tried.
    """
    best, found = np.inf, np.zeros(len(lengths), dtype=np.int64)
    fits = lengths[None, :] <= limits[:, None]
    forced = fits[0] & ~fits[1] if len(limits) > 1 else fits[0]  # only the widest group, 0, holds them
    for trial in range(orders):
        order = list(range(len(lengths)))
        random.Random(trial).shuffle(order)
        total, group_of = np.zeros(len(limits)), np.zeros(len(lengths), dtype=np.int64)
        total[0] = sum(seconds[0, i] for i in order if forced[i])
        latest = float(total[0])
        for i in order:
            if forced[i]:
                continue
            ends = np.where(fits[:, i], np.maximum(latest, total + seconds[:, i]), np.inf)
            latest = float(ends.min())
            # On ties prefer the narrowest empty group, which leaves the wide ones to longer sequences.
            idle = np.flatnonzero((ends == latest) & (total == 0.0))
            group = int(idle[-1]) if len(idle) else int(ends.argmin())
            total[group] += seconds[group, i]
            group_of[i] = group
        if latest < best:
            best, found = latest, group_of
    return found


def proposals(tokens: IntArray, seconds: FloatArray, problem: Problem, longest: int) -> list[tuple[int, ...]]:
    """Return the proposals: tuples of group degrees, falling, one for each interval as the longest of a batch.

    Let t[n][s] be the least time in which n ranks run all sequences of the first s length intervals. It is the minimum
    of max(t[n - d k][s'], (seconds of intervals s' to s on degree k) / d) over s' < s and d groups of degree k.
    """
    n, powers = problem.num_ranks, seconds.shape[0]
    edges = np.unique(np.quantile(tokens, np.arange(1, _INTERVALS + 1) / _INTERVALS).astype(np.int64))
    edges[-1] = max(longest, int(tokens.max()))
    interval = np.searchsorted(edges, tokens)
    count = len(edges)
    sums = np.zeros((powers, count + 1))
    for power in range(powers):
        sums[power, 1:] = np.cumsum(np.bincount(interval, seconds[power], count))

    @cache
    def best(ranks: int, upto: int) -> tuple[float, tuple[int, ...]]:
        if upto == 0:
            return 0.0, ()
        found: tuple[float, tuple[int, ...]] = (np.inf, ())
        for power in range(powers):
            degree = 1 << power
            if degree > ranks or degree * problem.tokens_per_rank < edges[upto - 1]:
                continue
            for first in range(upto):
                work = sums[power, upto] - sums[power, first]
                for groups in range(1, ranks // degree + 1):
                    if work / groups >= found[0]:
                        continue
                    seconds_before, before = best(ranks - groups * degree, first)
                    if max(seconds_before, work / groups) < found[0]:
                        found = max(seconds_before, work / groups), (degree,) * groups + before
                    if seconds_before >= work / groups:
                        break  # further groups would only take ranks from the shorter sequences
        return found

    made = {tuple(sorted(best(n, upto)[1], reverse=True)) for upto in range(1, count + 1)}
    return sorted(made - {()}, reverse=True)
