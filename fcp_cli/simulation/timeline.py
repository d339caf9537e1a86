"""What a simulated step answers: when each micro-batch ran, and how long each of its ranks had waited for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fcp_cli.plan.step import FloatArray, Int32Array, Int64Array


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpan:
    """One micro-batch as one of its ranks saw it: free from `arrival`, waiting until `start`, computing until `end`."""

    rank: int
    order: int
    arrival_seconds: float
    start_seconds: float
    end_seconds: float

    @property
    def waiting_seconds(self) -> float:
        return self.start_seconds - self.arrival_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One step as it was executed. All times are seconds from the start of the step.

    Attributes:
        step: optimizer step.
        rank_offsets, ranks: the groups, as in the `StepPlan`: micro-batch i ran on
            `ranks[rank_offsets[i]:rank_offsets[i + 1]]`.
        start_seconds, end_seconds: [microbatches] from the arrival of the last rank to the end.
        arrival_seconds: [len(ranks)] when each rank of a group had finished what it had before.
        num_ranks: ranks of the job, those without work included.
    """

    step: int
    rank_offsets: Int64Array
    ranks: Int32Array
    start_seconds: FloatArray
    end_seconds: FloatArray
    arrival_seconds: FloatArray
    num_ranks: int

    @property
    def makespan_seconds(self) -> float:
        return float(self.end_seconds.max(initial=0.0))

    def busy_seconds(self) -> FloatArray:
        """[num_ranks] seconds in which each rank had a micro-batch running."""
        busy = np.zeros(self.num_ranks)
        np.add.at(busy, self.ranks, np.repeat(self.end_seconds - self.start_seconds, np.diff(self.rank_offsets)))
        return busy

    def waiting_seconds(self) -> FloatArray:
        """[num_ranks] the rest of the step: waits for peers, for the wave, and for the step's slowest rank."""
        return np.asarray(self.makespan_seconds - self.busy_seconds(), dtype=np.float64)

    @property
    def idle_fraction(self) -> float:
        """Share of rank-seconds of the step in which ranks wait; 0 for a step without work."""
        total = self.num_ranks * self.makespan_seconds
        return float(self.waiting_seconds().sum()) / total if total else 0.0

    def spans(self) -> Iterator[RankSpan]:
        """Every micro-batch on every of its ranks, in the step's global order; for pictures and traces."""
        owner = np.repeat(np.arange(len(self.start_seconds)), np.diff(self.rank_offsets))
        columns = (self.ranks, owner, self.arrival_seconds, self.start_seconds[owner], self.end_seconds[owner])
        for rank, order, arrival, start, end in zip(*(column.tolist() for column in columns), strict=True):
            yield RankSpan(rank=rank, order=order, arrival_seconds=arrival, start_seconds=start, end_seconds=end)
