"""`fcp-paper`: the algorithm of the FCP and DHP papers, in both sync modes.

A global batch is cut into waves (the papers' micro-batches); the sequences of a wave are packed best-fit decreasing, a
pack that opens with sequence k needs d_min = ceil(tokens_k / budget) ranks; then every pack of the wave gets the degree
that makes the wave's slowest pack fastest (`degree_allocation`).

How a batch is cut, the papers leave open ("micro-batch planner"), and it decides most of the result. So three ways are
tried, each with several numbers of waves, and the candidate with the least predicted step time is kept:

arrival   consecutive sequences, cut as soon as the tokens reach an equal share
sorted    the same after sorting by length, longest first
balanced  longest first, each to the wave with the fewest tokens so far

Under `sync: iteration` the waves stay the unit of planning, as in the papers, but their micro-batches start as soon as
their ranks are free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.cost.model import group_seconds, joined
from fcp_cli.plan.step import offsets_of
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.baselines.packing import best_fit_decreasing, members_by_pack, spread_evenly
from fcp_cli.planning.baselines.placement import place_groups
from fcp_cli.planning.batching.batches import GlobalBatches
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.published.degree_allocation import allocate_by_threshold, at_most_table, degrees_used
from fcp_cli.planning.work import pack_work

_CUTS = ("arrival", "sorted", "balanced")
_WAVE_COUNTS = 4  # numbers of waves tried for each cut, from the least that holds the tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wave:
    """The packs of one wave with their ranks; `members` are positions in the batch."""

    rank_offsets: IntArray
    ranks: np.ndarray[tuple[int], np.dtype[np.int32]]
    member_offsets: IntArray
    members: IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class FcpPaperSolver:
    """Plans each step on its own, without randomness; with one cut and one number of waves, nothing is swept."""

    problem: Problem
    name: str = "fcp-paper"
    cuts: Sequence[str] = _CUTS
    wave_counts: int = _WAVE_COUNTS

    @property
    def options(self) -> Mapping[str, Any]:
        return {"cuts": list(self.cuts), "wave_counts": self.wave_counts}

    def assign(self, batch: Batch) -> Assignment:
        """Return the best candidate of the sweep over cuts and numbers of waves."""
        candidates = list(self._candidates(batch))
        seconds = [makespan_seconds(candidate, batch, self.problem) for candidate in candidates]
        return candidates[int(np.argmin(seconds))]

    def _candidates(self, batch: Batch) -> Iterator[Assignment]:
        fewest = -(-int(batch.work.tokens.sum()) // (self.problem.num_ranks * self.problem.tokens_per_rank))
        for cut in self.cuts:
            feasible = 0
            # With as many waves as sequences every cut is feasible: each wave then holds one sequence.
            for waves in range(fewest, max(fewest + self.wave_counts, len(batch.rows) + 1)):
                assignment = self._plan_waves(batch, cut_waves(cut, batch.work.tokens, waves))
                if assignment is not None:
                    feasible += 1
                    yield assignment
                if feasible and waves >= fewest + self.wave_counts - 1:
                    break

    def _plan_waves(self, batch: Batch, wave_of: IntArray) -> Assignment | None:
        planned: list[_Wave] = []
        for wave in np.unique(wave_of).tolist():
            one = self._plan_wave(batch, np.flatnonzero(wave_of == wave))
            if one is None:
                return None
            planned.append(one)
        return _join(planned, with_waves=self.problem.sync == "microbatch")

    def _plan_wave(self, batch: Batch, positions: IntArray) -> _Wave | None:
        """Pack, allocate degrees, place; None if the packs need more ranks than there are."""
        n = self.problem.num_ranks
        pack_of, least = best_fit_decreasing(
            batch.work.tokens[positions], self.problem.tokens_per_rank, padding_multiple=self.problem.padding_multiple
        )
        if least.sum() > n:
            return None
        offsets, members = members_by_pack(pack_of, len(least))
        seconds = self._seconds_by_degree(batch, offsets, positions[members], least)
        degrees = degrees_used(seconds, allocate_by_threshold(at_most_table(seconds), n))
        rank_offsets, ranks = place_groups(degrees, num_ranks=n, ranks_per_node=self.problem.ranks_per_node)
        return _Wave(rank_offsets=rank_offsets, ranks=ranks, member_offsets=offsets, members=positions[members])

    def _seconds_by_degree(self, batch: Batch, offsets: IntArray, members: IntArray, least: IntArray) -> FloatArray:
        """[packs, num_ranks] seconds of each pack on exactly d ranks; only the degree decides the bandwidth here."""
        degree = np.arange(1, self.problem.num_ranks + 1)
        # Without padding, a pack's work does not depend on its group.
        degrees = [1] if self.problem.padding_multiple is None else degree.tolist()
        works = [pack_work(batch.work, members, offsets, d, self.problem) for d in degrees]
        seconds = group_seconds(
            self.problem.profile,
            joined(works, partial(np.stack, axis=1)),
            degree=degree,
            crosses_nodes=degree > self.problem.ranks_per_node,
        )
        return np.where(degree < least[:, None], np.inf, seconds)


def make_solver(batches: GlobalBatches) -> FcpPaperSolver:
    return FcpPaperSolver(problem=batches.problem)


def cut_waves(cut: str, tokens: IntArray, waves: int) -> IntArray:
    """[n] the wave of each sequence; some waves may stay empty."""
    if cut == "balanced":
        return spread_evenly(tokens, waves)
    order = np.arange(len(tokens)) if cut == "arrival" else np.argsort(-tokens, kind="stable")
    middle = np.cumsum(tokens[order]) - tokens[order] / 2
    wave_of = np.empty(len(tokens), dtype=np.int64)
    wave_of[order] = np.minimum(middle * waves / tokens.sum(), waves - 1)
    return wave_of


def _join(waves: list[_Wave], *, with_waves: bool) -> Assignment:
    counts = [len(wave.member_offsets) - 1 for wave in waves]
    numbers = np.arange(len(waves)) if with_waves else np.full(len(waves), -1)
    return Assignment(
        wave=np.repeat(numbers, counts).astype(np.int32),
        rank_offsets=_join_offsets([wave.rank_offsets for wave in waves]),
        ranks=np.concatenate([wave.ranks for wave in waves]),
        member_offsets=_join_offsets([wave.member_offsets for wave in waves]),
        members=np.concatenate([wave.members for wave in waves]),
    )


def _join_offsets(offsets: list[IntArray]) -> IntArray:
    return offsets_of(np.concatenate([np.diff(part) for part in offsets]))
