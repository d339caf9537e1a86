"""Conversion of a solver's answer into a planned step: idle rows, times by cost model and sync, makespan, bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fcp_cli.errors import PlanError
from fcp_cli.plan.pricing import (
    PlacedPacks,
    beside_language,
    encoder_shares,
    microbatch_prices,
    priced_times,
    quickest_heads,
    wave_encoder_seconds,
)
from fcp_cli.plan.rings import check_layout
from fcp_cli.plan.setup import Prices
from fcp_cli.plan.step import StepPlan, offsets_of, sizes_of
from fcp_cli.planning.bounds import lower_bound_seconds
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.util.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.util.words import counted


class BrokenAssignmentError(RuntimeError):
    """A solver violated its contract: a defect of the solver, never of the user's input."""


class StuckError(PlanError):
    """The rings of a strategy would deadlock its pipelines; waves never do."""


def assemble(assignment: Assignment, batch: Batch, problem: Problem, bound_seconds: float | None = None) -> StepPlan:
    """Turn an assignment into a step of a plan.

    Args:
        assignment: groups and packs in the step's global order, without idle rows; waves ascend under `microbatch`.
        batch: the global batch that was assigned.
        problem: ranks, token budget, sync, pipelines and cost profile.
        bound_seconds: lower bound of the step; None: computed here.

    Raises:
        BrokenAssignmentError: the assignment violates a rule of plans.
        StuckError: pipelines would deadlock.
    """
    assignment, step = _checked(assignment, batch, problem)
    if bound_seconds is None:
        bound_seconds = step_bound_seconds(batch, problem)
    prices = assignment_prices(assignment, batch, problem).spread(~step.is_idle)
    times = priced_times(
        problem, prices, problem.profile.step, wave=step.wave, rank_offsets=step.rank_offsets, ranks=step.ranks
    )
    if times.stuck:
        raise StuckError(
            f"step {step.step}: the pipelines of {len(times.stuck)} micro-batches would wait for each other in a "
            "circle, since between two rings some ranks have more micro-batches than others; add --sync microbatch"
        )
    return replace(
        step,
        start_seconds=times.start_seconds,
        seconds=prices.seconds,
        makespan_seconds=times.makespan_seconds,
        bound_seconds=bound_seconds,
    )


def step_bound_seconds(batch: Batch, problem: Problem) -> float:
    """Return a lower bound of the step's seconds, including encoder work that all ranks of a wave share."""
    shares = encoder_shares(problem, problem.profile)
    # Shared evenly in every wave, whatever else the wave runs.
    work = batch.encoder_seconds
    shared = 0.0 if work is None or shares is None else float(work.sum()) / shares.ranks
    ahead = shares is not None and shares.runs_ahead
    return max(lower_bound_seconds(batch.work, problem, extra_seconds=0.0 if ahead else shared), shared)


def check_assignment(assignment: Assignment, batch: Batch, problem: Problem) -> None:
    """Raise BrokenAssignmentError if an assignment violates a rule of plans."""
    _checked(assignment, batch, problem)


def _checked(assignment: Assignment, batch: Batch, problem: Problem) -> tuple[Assignment, StepPlan]:
    """Check an assignment; return it with its heads degrees, and the step without times."""
    _require_whole(assignment, batch, problem)
    assignment = with_heads(assignment, batch, problem)
    step = with_idle_rows(assignment, batch, problem)
    for finding in check_layout(step, replace(problem, num_ranks=problem.all_ranks)):
        raise BrokenAssignmentError(f"defect in a solver: {finding}")
    return assignment, step


def makespan_seconds(assignment: Assignment, batch: Batch, problem: Problem) -> float:
    """Predict the seconds of the step without checking the assignment, for solvers that compare candidates.

    The result is infinite if pipelines would deadlock.
    """
    prices = assignment_prices(assignment, batch, problem)
    rows: Assignment | StepPlan = assignment
    if problem.pipeline is not None and problem.sync == "microbatch":  # idle rows keep replicas in step
        rows = with_idle_rows(assignment, batch, problem)
        prices = prices.spread(~rows.is_idle)
    return priced_times(
        problem, prices, problem.profile.step, wave=rows.wave, rank_offsets=rows.rank_offsets, ranks=rows.ranks
    ).makespan_seconds


def assignment_prices(assignment: Assignment, batch: Batch, problem: Problem) -> Prices:
    """Price the micro-batches of an assignment."""
    heads = problem.attention if assignment.heads_degree is None else assignment.heads_degree
    price = microbatch_prices(_packs(assignment, batch), problem, problem.profile, heads=heads).at_speeds(
        problem.rank_speeds, assignment.rank_offsets, assignment.ranks
    )
    if batch.encoder_seconds is None:
        return price
    members = batch.encoder_seconds[assignment.members]
    shared = wave_encoder_seconds(members, assignment.member_offsets, assignment.wave)
    shares = encoder_shares(problem, problem.profile)
    assert shares is not None
    # All ranks of a wave share encoder work evenly, so none waits for a slower encoder.
    return Prices(price.seconds + beside_language(shares, shared, price.seconds, assignment.wave))


def with_heads(assignment: Assignment, batch: Batch, problem: Problem) -> Assignment:
    """Return the assignment with the fastest heads degrees, unless it has its own or all groups are rings."""
    if problem.attention is None or assignment.heads_degree is not None:
        return assignment
    heads = quickest_heads(problem.attention, _packs(assignment, batch), problem, problem.profile)
    return replace(assignment, heads_degree=heads)


def _packs(assignment: Assignment, batch: Batch) -> PlacedPacks:
    return PlacedPacks(
        work=batch.work.take(assignment.members),
        offsets=assignment.member_offsets,
        rank_offsets=assignment.rank_offsets,
        ranks=assignment.ranks,
    )


def assignment_seconds(assignment: Assignment, batch: Batch, problem: Problem) -> FloatArray:
    """Predict [microbatches] the seconds of each micro-batch of an assignment."""
    return assignment_prices(assignment, batch, problem).seconds


def _require_whole(assignment: Assignment, batch: Batch, problem: Problem) -> None:
    """Check the arrays before they are turned into rows; `check_layout` checks the other rules."""
    degrees, sizes = sizes_of(assignment.rank_offsets), sizes_of(assignment.member_offsets)
    _require(len(assignment.wave) == len(degrees) == len(sizes) > 0, "arrays of different lengths")
    _require(bool((degrees > 0).all() and (sizes > 0).all()), "a micro-batch without ranks or sequences")
    _require(_span(assignment.rank_offsets, assignment.ranks), "rank offsets do not span the ranks")
    _require(_span(assignment.member_offsets, assignment.members), "member offsets do not span the members")
    sequences = len(batch.rows)
    counts = np.bincount(assignment.members, minlength=sequences)
    _require(len(counts) == sequences, f"member {len(counts) - 1} of {sequences}: members are positions in the batch")
    if len(odd := np.flatnonzero(counts != 1)):
        at = int(odd[0])
        which = f"member {at} (manifest row {batch.rows[at]}, {counted(batch.lengths[at], 'token')})"
        _require(False, f"{which} occurs {counts[at]} times, not once ({len(odd):,} of {sequences:,} do not)")
    if len(outside := assignment.ranks[(assignment.ranks < 0) | (assignment.ranks >= problem.num_ranks)]):
        _require(False, f"rank {outside[0]} of a job of {problem.num_ranks}")
    _require(bool((assignment.wave[1:] >= assignment.wave[:-1]).all()), "waves do not count up")


def _span(offsets: IntArray, values: Int32Array | IntArray) -> bool:
    return bool(offsets[0] == 0 and offsets[-1] == len(values))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BrokenAssignmentError(f"defect in a solver: {otherwise}")


def with_idle_rows(assignment: Assignment, batch: Batch, problem: Problem) -> StepPlan:
    """Make the rows of a step, with an idle row for every rank without work in a wave (or the step); times are 0.

    The idle rows of a wave come last, by rank. With interleaved pipelines, whole waves of idle rows are added until the
    number of waves is a multiple of the stages.
    """
    degrees = sizes_of(assignment.rank_offsets)
    begins = np.concatenate(([True], assignment.wave[1:] != assignment.wave[:-1]))
    waves, wave_of = assignment.wave[begins], np.cumsum(begins) - 1  # under `iteration` a single wave, -1
    if problem.pipeline is not None:
        missing = problem.pipeline.missing_waves(len(waves), problem.pipeline_parallel)
        waves = np.append(waves, waves[-1] + 1 + np.arange(missing, dtype=np.int32))
    used = np.zeros((len(waves), problem.all_ranks), dtype=np.bool_)
    used[np.repeat(wave_of, degrees), assignment.ranks] = True
    idle_wave, idle_rank = np.nonzero(~used)
    wave = np.concatenate((assignment.wave, waves[idle_wave])).astype(np.int32)
    order = np.argsort(wave, kind="stable")
    ranks: IntArray = np.concatenate((assignment.ranks, idle_rank))
    all_degrees = np.concatenate((degrees, np.ones_like(idle_rank)))
    sizes = np.concatenate((sizes_of(assignment.member_offsets), np.zeros_like(idle_rank)))
    heads = assignment.heads_degree
    if heads is not None:
        heads = np.concatenate((heads, np.ones_like(idle_rank))).astype(np.int32)[order]
    return StepPlan(
        step=batch.step,
        wave=wave[order],
        rank_offsets=offsets_of(all_degrees[order]),
        # A single wave needs no reordering: its idle rows are already last.
        ranks=_reordered(ranks, all_degrees, order) if len(waves) > 1 else ranks.astype(np.int32),
        # Sequences need no reordering: idle rows have none, and the sort is stable.
        sequence_offsets=offsets_of(sizes[order]),
        sequences=batch.rows[assignment.members],
        lengths=batch.lengths[assignment.members],
        start_seconds=np.zeros(len(wave)),
        seconds=np.zeros(len(wave)),
        makespan_seconds=0.0,
        bound_seconds=0.0,
        heads_degree=heads,
    )


def _reordered(values: IntArray, sizes: IntArray, order: IntArray) -> Int32Array:
    """Return back-to-back lists of these sizes in another order."""
    first, wanted = offsets_of(sizes)[:-1][order], sizes[order]
    within = np.arange(wanted.sum()) - np.repeat(offsets_of(wanted)[:-1], wanted)
    return np.asarray(values[np.repeat(first, wanted) + within], dtype=np.int32)
