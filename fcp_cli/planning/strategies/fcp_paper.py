"""`fcp-paper`: the algorithm of the FCP and DHP papers, under both syncs.

A global batch is cut into waves (the papers' micro-batches). The sequences of a wave are packed best-fit decreasing; a
pack opened by sequence k needs d_min = ceil(tokens_k / budget) ranks. Then the packs of the wave get the degrees that
minimize the time of the slowest pack (`allocate_by_threshold`).

The papers leave open how a batch is cut ("micro-batch planner"), although it decides most of the result. So three ways
are tried, each with several numbers of waves, and the candidate with the least predicted step time wins:

arrival   consecutive sequences, cut as soon as the tokens reach an equal share
sorted    the same after sorting by length, longest first
balanced  longest first, each to the wave with the fewest tokens so far

Under `sync: iteration` waves remain the unit of planning, as in the papers, but micro-batches start as soon as their
ranks are free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from fcp_cli.cost.model import group_seconds, joined
from fcp_cli.plan.pricing import pack_work
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.drafts import (
    FunctionSolver,
    Packs,
    best_fit_decreasing,
    members_by_pack,
    place_waves,
    quickest,
    spread_evenly,
)
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.util.arrays import FloatArray, IntArray

_CUTS = ("arrival", "sorted", "balanced")
_WAVE_COUNTS = 4  # numbers of waves tried for each cut, from the least that holds the tokens


def make_solver(
    batches: GlobalBatches, *, cuts: Sequence[str] = _CUTS, wave_counts: int = _WAVE_COUNTS
) -> FunctionSolver:
    """Make the solver, which sweeps these cuts and `wave_counts` numbers of waves."""
    options = {"cuts": list(cuts), "wave_counts": wave_counts}
    return FunctionSolver(
        name="fcp-paper",
        problem=batches.problem,
        rule=partial(_planned, cuts=cuts, wave_counts=wave_counts),
        options=options,
    )


def _planned(batch: Batch, problem: Problem, *, cuts: Sequence[str], wave_counts: int) -> Assignment:
    """Return the best candidate of the sweep over cuts and numbers of waves."""
    return quickest(_candidates(batch, problem, cuts, wave_counts), batch, problem)


def _candidates(batch: Batch, problem: Problem, cuts: Sequence[str], wave_counts: int) -> Iterator[Assignment]:
    fewest = -(-int(batch.work.tokens.sum()) // (problem.num_ranks * problem.tokens_per_rank))
    for cut in cuts:
        feasible = 0
        # Terminates: with as many waves as sequences, each wave holds one sequence and every cut is feasible.
        for waves in range(fewest, max(fewest + wave_counts, len(batch.rows) + 1)):
            assignment = _plan_waves(batch, cut_waves(cut, batch.work.tokens, waves), problem)
            if assignment is not None:
                feasible += 1
                yield assignment
            if feasible and waves >= fewest + wave_counts - 1:
                break


def _plan_waves(batch: Batch, wave_of: IntArray, problem: Problem) -> Assignment | None:
    waves: list[Packs] = []
    for wave in np.unique(wave_of).tolist():
        packs = _plan_wave(batch, np.flatnonzero(wave_of == wave), problem)
        if packs is None:
            return None
        waves.append(packs)
    return place_waves(waves, problem)


def _plan_wave(batch: Batch, positions: IntArray, problem: Problem) -> Packs | None:
    """Pack a wave and allocate degrees; return None if the packs need too many ranks."""
    pack_of, least = best_fit_decreasing(
        batch.work.tokens[positions], problem.tokens_per_rank, padding_multiple=problem.padding_multiple
    )
    if least.sum() > problem.num_ranks:
        return None
    offsets, members = members_by_pack(pack_of, len(least))
    seconds = _seconds_by_degree(batch, offsets, positions[members], least, problem)
    degrees = degrees_used(seconds, allocate_by_threshold(at_most_table(seconds), problem.num_ranks))
    return list(zip(degrees.tolist(), np.split(positions[members], offsets[1:-1]), strict=True))


def _seconds_by_degree(
    batch: Batch, offsets: IntArray, members: IntArray, least: IntArray, problem: Problem
) -> FloatArray:
    """Return [packs, num_ranks] the seconds of each pack on exactly d ranks; across nodes only if d exceeds a node."""
    degree = np.arange(1, problem.num_ranks + 1)
    # Without padding, a pack's work does not depend on its group.
    degrees = [1] if problem.padding_multiple is None else degree.tolist()
    work = batch.work.take(members)
    works = [pack_work(work, offsets, d, problem.profile, problem.padding_multiple) for d in degrees]
    seconds = group_seconds(
        problem.profile,
        joined(works, partial(np.stack, axis=1)),
        degree=degree,
        crosses_nodes=degree > problem.ranks_per_node,
    )
    return np.where(degree < least[:, None], np.inf, seconds)


def cut_waves(cut: str, tokens: IntArray, waves: int) -> IntArray:
    """Return [n] the wave of each sequence; some waves may be empty."""
    if cut == "balanced":
        return spread_evenly(tokens, waves)
    order = np.arange(len(tokens)) if cut == "arrival" else np.argsort(-tokens, kind="stable")
    middle = np.cumsum(tokens[order]) - tokens[order] / 2
    wave_of = np.empty(len(tokens), dtype=np.int64)
    wave_of[order] = np.minimum(middle * waves / tokens.sum(), waves - 1)
    return wave_of


# Optimal degrees for the packs of a wave (stage 2 of the FCP paper), faster than its dynamic programme.
#
# Tests compare it with the paper's recurrence and Algorithm 1: the makespans are equal.
#
# The input is a table of seconds [packs, num_ranks]: entry [i, d - 1] is the time of pack i on a group of at most d
# ranks, infinite below its least degree. "At most" makes the rows non-increasing. It also resolves an inconsistency
# of the paper, whose condition (6) allows ranks to idle while Algorithm 1 hands out exactly N. `degrees_used` maps
# "at most" back to the degree that attains the time.


def at_most_table(seconds: FloatArray) -> FloatArray:
    """Return the least time on at most d ranks from the time on exactly d ranks; both [packs, num_ranks]."""
    return np.asarray(np.minimum.accumulate(seconds, axis=1))


def degrees_used(seconds: FloatArray, allocated: IntArray) -> IntArray:
    """Return [packs] the least degree that attains the time of each allocation; `seconds` is for exactly d ranks."""
    allowed = np.arange(seconds.shape[1]) < allocated[:, None]
    return np.asarray(np.argmin(np.where(allowed, seconds, np.inf), axis=1) + 1)


def allocate_by_threshold(table: FloatArray, num_ranks: int) -> IntArray:
    """Return [packs] the degrees with the least makespan, by bisection over the times in the table.

    A makespan T is feasible if and only if the least degrees that finish every pack within T sum to at most
    `num_ranks`. Each step, in O(packs * num_ranks), halves the interval and moves its ends to times in the table, so
    the answer is exact.
    """
    lowest = float(table[:, -1].max())
    degrees = _degrees_for(table, lowest)
    if degrees.sum() <= num_ranks:
        return degrees
    least = np.isinf(table).sum(axis=1) + 1
    assert least.sum() <= num_ranks, "the packs need more ranks than there are"
    degrees, highest = least, _attained(table, least)
    while lowest < highest:
        middle = min((lowest + highest) / 2, np.nextafter(highest, lowest))  # below `highest` even when rounded
        tried = _degrees_for(table, middle)
        if tried.sum() <= num_ranks:
            degrees, highest = tried, _attained(table, tried)
        else:
            lowest = float(table[table > middle].min())
    return degrees


def _degrees_for(table: FloatArray, seconds: float) -> IntArray:
    """Return [packs] the least degree that finishes each pack within `seconds`."""
    return np.asarray((table > seconds).sum(axis=1) + 1)


def _attained(table: FloatArray, degrees: IntArray) -> float:
    return float(table[np.arange(len(table)), degrees - 1].max())
