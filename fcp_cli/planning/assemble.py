"""A solver's answer to a planned step: times from the cost model and the sync, idle rows, makespan, bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fcp_cli.cost.model import group_seconds
from fcp_cli.plan.pricing import crosses_nodes
from fcp_cli.plan.step import FloatArray, Int32Array, Int64Array, StepPlan
from fcp_cli.plan.timeline import start_times
from fcp_cli.planning.bounds import lower_bound_seconds
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.work import pack_tokens, pack_work


class BrokenAssignmentError(RuntimeError):
    """A solver broke its contract: a defect of fcp, never of the user's input."""


def assemble(assignment: Assignment, batch: Batch, problem: Problem, bound_seconds: float | None = None) -> StepPlan:
    """Turn an assignment into a step of a plan.

    Args:
        assignment: groups and packs in the step's global order, without idle rows; waves ascend under `microbatch`.
        batch: the global batch that was assigned.
        problem: ranks, budget, sync and cost profile.
        bound_seconds: a lower bound that the caller has already; computed where None.

    Raises:
        BrokenAssignmentError: the assignment breaks budget, coverage, rank or wave rules.
    """
    _check(assignment, batch, problem)
    start, seconds = predicted_times(assignment, batch, problem)
    rows = _with_idle_rows(assignment, start, seconds, problem)
    return StepPlan(
        step=batch.step,
        wave=rows.wave,
        rank_offsets=rows.rank_offsets,
        ranks=rows.ranks,
        sequence_offsets=rows.member_offsets,
        sequences=batch.rows[assignment.members],
        lengths=batch.lengths[assignment.members],
        start_seconds=rows.start_seconds,
        seconds=rows.seconds,
        makespan_seconds=float((start + seconds).max()),
        bound_seconds=lower_bound_seconds(batch.work, problem) if bound_seconds is None else bound_seconds,
    )


def makespan_seconds(assignment: Assignment, batch: Batch, problem: Problem) -> float:
    """Predicted seconds of the step, unchecked: for solvers that compare their own candidates."""
    start, seconds = predicted_times(assignment, batch, problem)
    return float((start + seconds).max())


def predicted_times(assignment: Assignment, batch: Batch, problem: Problem) -> tuple[FloatArray, FloatArray]:
    """[microbatches] start, from the start of the step, and duration of each micro-batch, in seconds."""
    seconds = microbatch_seconds(assignment, batch, problem)
    start = start_times(
        problem.sync,
        wave=assignment.wave,
        rank_offsets=assignment.rank_offsets,
        ranks=assignment.ranks,
        seconds=seconds,
        num_ranks=problem.num_ranks,
    )
    return start, seconds


def microbatch_seconds(assignment: Assignment, batch: Batch, problem: Problem) -> FloatArray:
    """[microbatches] predicted seconds of each micro-batch of an assignment."""
    degrees = np.diff(assignment.rank_offsets)
    work = pack_work(batch.work, assignment.members, assignment.member_offsets, degrees, problem)
    return group_seconds(
        problem.profile,
        attention_seconds=work.attention_seconds,
        linear_seconds=work.linear_seconds,
        tokens=work.tokens,
        degree=degrees,
        crosses_nodes=crosses_nodes(assignment.rank_offsets, assignment.ranks, problem.ranks_per_node),
    )


def _check(assignment: Assignment, batch: Batch, problem: Problem) -> None:
    degrees, sizes = np.diff(assignment.rank_offsets), np.diff(assignment.member_offsets)
    _require(len(assignment.wave) == len(degrees) == len(sizes) > 0, "arrays of different lengths")
    _require(bool((degrees > 0).all() and (sizes > 0).all()), "a micro-batch without ranks or sequences")
    _require(_ends(assignment.rank_offsets, assignment.ranks), "rank offsets do not span the ranks")
    _require(_ends(assignment.member_offsets, assignment.members), "member offsets do not span the members")
    counts = np.bincount(assignment.members, minlength=len(batch.rows))
    _require(len(counts) == len(batch.rows) and bool((counts == 1).all()), "a sequence is missing or repeated")
    inside = (assignment.ranks >= 0) & (assignment.ranks < problem.num_ranks)
    _require(bool(inside.all()), "a rank out of range")
    ascends = np.diff(assignment.ranks) > 0
    ascends[assignment.rank_offsets[1:-1] - 1] = True
    _require(bool(ascends.all()), "ranks of a group do not ascend")
    tokens = pack_tokens(batch.work, assignment.members, assignment.member_offsets, degrees, problem)
    _require(bool((tokens <= problem.tokens_per_rank * degrees).all()), "a pack over the token budget")
    _check_waves(assignment, degrees, problem)


def _check_waves(assignment: Assignment, degrees: Int64Array, problem: Problem) -> None:
    if problem.sync == "iteration":
        _require(bool((assignment.wave == -1).all()), "waves under sync iteration")
        return
    wave = assignment.wave
    _require(wave[0] == 0 and bool(np.isin(np.diff(wave), (0, 1)).all()), "waves do not count up from 0")
    uses = np.repeat(wave.astype(np.int64), degrees) * problem.num_ranks + assignment.ranks
    _require(len(np.unique(uses)) == len(uses), "a wave uses a rank twice")


def _ends(offsets: Int64Array, values: Int32Array | Int64Array) -> bool:
    return bool(offsets[0] == 0 and offsets[-1] == len(values))


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BrokenAssignmentError(f"defect in a solver: {otherwise}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    wave: Int32Array
    rank_offsets: Int64Array
    ranks: Int32Array
    member_offsets: Int64Array
    start_seconds: FloatArray
    seconds: FloatArray


def _with_idle_rows(assignment: Assignment, start: FloatArray, seconds: FloatArray, problem: Problem) -> _Rows:
    """Insert a row of no sequences for every rank without work: per wave, or once per step under `iteration`."""
    idle_wave, idle_rank, idle_start = _idle(assignment, start, problem)
    degrees = np.diff(assignment.rank_offsets)
    is_idle = np.repeat([False, True], [len(degrees), len(idle_wave)])
    wave = np.concatenate((assignment.wave, idle_wave))
    order = np.lexsort((is_idle, wave)) if problem.sync == "microbatch" else np.arange(len(wave))
    all_degrees = np.concatenate((degrees, np.ones(len(idle_wave), dtype=np.int64)))
    sizes = np.concatenate((np.diff(assignment.member_offsets), np.zeros(len(idle_wave), dtype=np.int64)))
    return _Rows(
        wave=wave[order],
        rank_offsets=_offsets(all_degrees[order]),
        ranks=_gather(np.concatenate((assignment.ranks, idle_rank)), all_degrees, order),
        # Sequences keep their order: idle rows have none, and the others are not reordered among themselves.
        member_offsets=_offsets(sizes[order]),
        start_seconds=np.concatenate((start, idle_start))[order],
        seconds=np.concatenate((seconds, np.zeros(len(idle_wave))))[order],
    )


def _idle(assignment: Assignment, start: FloatArray, problem: Problem) -> tuple[Int32Array, Int32Array, FloatArray]:
    """Wave, rank and start of every idle row, ordered by wave and rank."""
    waves = int(assignment.wave[-1]) + 1 if problem.sync == "microbatch" else 1
    used = np.zeros((waves, problem.num_ranks), dtype=np.bool_)
    used[np.maximum(np.repeat(assignment.wave, np.diff(assignment.rank_offsets)), 0), assignment.ranks] = True
    wave, rank = np.nonzero(~used)
    if problem.sync == "iteration":
        return np.full(len(rank), -1, dtype=np.int32), rank.astype(np.int32), np.zeros(len(rank))
    wave_start = start[np.searchsorted(assignment.wave, np.arange(waves))]
    return wave.astype(np.int32), rank.astype(np.int32), wave_start[wave]


def _offsets(sizes: Int64Array) -> Int64Array:
    return np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))


def _gather(values: Int32Array, sizes: Int64Array, order: Int64Array) -> Int32Array:
    """The lists that `values` holds back to back, in another order."""
    first, wanted = _offsets(sizes)[:-1][order], sizes[order]
    within = np.arange(wanted.sum()) - np.repeat(_offsets(wanted)[:-1], wanted)
    return np.asarray(values[np.repeat(first, wanted) + within], dtype=np.int32)
