"""`static`: one degree for the whole plan, the best-tuned one, as Megatron-LM and DeepSpeed users run today.

The ranks are cut into contiguous groups of one degree; the sequences of a global batch are packed to what a group may
hold and the packs are shared out over the groups. What a careful user tunes is tuned here too, once for the whole plan
and by the same cost model that judges every other solver: the degree (any divisor of the ranks that holds the longest
sequence) and whether packs are filled up (fewest packs) or evened out (every group gets packs of like size).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fcp_cli.cost.model import group_seconds
from fcp_cli.manifest.table import FloatArray, IntArray
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.packing import first_fit_decreasing, members_by_pack, spread_evenly
from fcp_cli.planning.problem import Assignment, Batch, Problem

Packing = Literal["full", "even"]
_TUNING_STEPS = 32  # evenly spaced steps on which degree and packing are tuned


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticSolver:
    """Plans every step with one degree. `packing`: `full` fills packs up, `even` spreads tokens over like packs."""

    problem: Problem
    degree: int
    packing: Packing = "full"
    name: str = "static"

    @property
    def options(self) -> Mapping[str, Any]:
        return {"degree": self.degree, "packing": self.packing}

    @property
    def num_groups(self) -> int:
        return self.problem.num_ranks // self.degree

    def assign(self, batch: Batch) -> Assignment:
        """Pack, sort the packs by cost, share them out over the groups."""
        pack_of = self._pack(batch.work.tokens)
        offsets, members = members_by_pack(pack_of, int(pack_of.max()) + 1)
        seconds = self._pack_seconds(batch, offsets, members)
        order = np.argsort(-seconds, kind="stable")
        if self.problem.sync == "microbatch":
            wave, group = np.divmod(np.arange(len(order)), self.num_groups)
        else:
            wave, group = np.full(len(order), -1), self._least_loaded(seconds[order])
        sizes = np.diff(offsets)[order]
        return Assignment(
            wave=wave.astype(np.int32),
            rank_offsets=np.arange(len(order) + 1, dtype=np.int64) * self.degree,
            ranks=(group[:, None] * self.degree + np.arange(self.degree)).ravel().astype(np.int32),
            member_offsets=np.concatenate(([0], np.cumsum(sizes))),
            members=np.concatenate([members[offsets[pack] : offsets[pack + 1]] for pack in order.tolist()]),
        )

    def _pack(self, tokens: IntArray) -> IntArray:
        capacity = self.degree * self.problem.tokens_per_rank
        full = first_fit_decreasing(tokens, capacity)
        if self.packing == "full":
            return full
        packs = -(-(int(full.max()) + 1) // self.num_groups) * self.num_groups
        even = np.unique(spread_evenly(tokens, packs), return_inverse=True)[1]
        return full if np.bincount(even, weights=tokens).max() > capacity else even

    def _pack_seconds(self, batch: Batch, offsets: IntArray, members: IntArray) -> FloatArray:
        work, first = batch.work, offsets[:-1]
        return group_seconds(
            self.problem.profile,
            attention_seconds=np.add.reduceat(work.attention_seconds[members], first),
            linear_seconds=np.add.reduceat(work.linear_seconds[members], first),
            tokens=np.add.reduceat(work.tokens[members], first),
            degree=self.degree,
            # Groups of a degree that does not divide a node lie partly across two: rank packs as if all did.
            crosses_nodes=self.problem.ranks_per_node % self.degree != 0,
        )

    def _least_loaded(self, seconds: FloatArray) -> IntArray:
        """[packs] the group of each pack: longest first, each to the group that is free first."""
        heap = [(0.0, group) for group in range(self.num_groups)]
        groups = np.empty(len(seconds), dtype=np.int64)
        for i, duration in enumerate(seconds.tolist()):
            busy, groups[i] = heap[0]
            heapq.heapreplace(heap, (busy + duration, int(groups[i])))
        return groups


def make_solver(batches: GlobalBatches) -> StaticSolver:
    """The static solver with the least predicted time over the plan, or over a sample of its steps."""
    longest = int(batches.table.length_tokens[batches.rows].max())
    sample = [batches.batch(step) for step in spread_steps(len(batches), _TUNING_STEPS)]
    return best_static(batches.problem, longest, sample)[0]


def best_static(problem: Problem, longest_tokens: int, batches: Sequence[Batch]) -> tuple[StaticSolver, float]:
    """The static solver that is quickest on these batches, and its seconds; of many batches only some are tuned on.

    Args:
        problem: what to plan for.
        longest_tokens: the longest sequence that the one degree must hold.
        batches: what to tune and measure on.
    """
    tuned = [batches[i] for i in spread_steps(len(batches), _TUNING_STEPS)]
    candidates = list(static_candidates(problem, longest_tokens))
    best = candidates[int(np.argmin([_total_seconds(solver, tuned) for solver in candidates]))]
    return best, _total_seconds(best, batches)


def spread_steps(steps: int, most: int) -> list[int]:
    """At most `most` of a plan's steps, evenly spaced; all where there are no more."""
    return [i * steps // min(steps, most) for i in range(min(steps, most))]


def _total_seconds(solver: StaticSolver, batches: Sequence[Batch]) -> float:
    return sum(makespan_seconds(solver.assign(batch), batch, solver.problem) for batch in batches)


def static_candidates(problem: Problem, longest_tokens: int) -> Iterator[StaticSolver]:
    """Every degree that divides the ranks and holds the longest sequence, with either packing."""
    for degree in range(1, problem.num_ranks + 1):
        if problem.num_ranks % degree == 0 and degree * problem.tokens_per_rank >= longest_tokens:
            yield StaticSolver(problem=problem, degree=degree, packing="full")
            yield StaticSolver(problem=problem, degree=degree, packing="even")
