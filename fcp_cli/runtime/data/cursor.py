"""Follow a plan file from one rank's view: per step, the micro-batches that include the rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.errors import RunError
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.ring_order import ring_order
from fcp_cli.plan.step import MicroBatch, StepPlan
from fcp_cli.runtime.data.followed_plans import note_follower
from fcp_cli.runtime.data.prefetch import Prefetched

_STEPS_AHEAD = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """One step from one rank's view.

    Attributes:
        step: optimizer step.
        rows: this rank's micro-batches in the step's global order, with ranks in ring order; at least one, which may be
            idle.
        makespan_seconds, bound_seconds: predicted duration and lower bound of the whole step.
        tokens: number of tokens of the global batch.
        loss_tokens: number of tokens with a loss in the global batch: all but the last token of each sequence.
        sequences: number of sequences of the global batch.
        waves: for each of `rows`, all micro-batches of its wave if their ranks balance the encoder's work; else empty.
    """

    step: int
    rows: tuple[MicroBatch, ...]
    makespan_seconds: float
    bound_seconds: float
    tokens: int
    loss_tokens: int
    sequences: int
    waves: tuple[tuple[MicroBatch, ...], ...] = ()


def orders_of_rank(plan: StepPlan, rank: int) -> IntArray:
    """Return the indices of the micro-batches that include a rank, in the step's order."""
    # `ranks` concatenates all rows: an entry belongs to the last row that starts at or before it.
    orders: IntArray = np.searchsorted(plan.rank_offsets, np.flatnonzero(plan.ranks == rank), side="right") - 1
    return orders


@dataclass(frozen=True, kw_only=True, slots=True)
class RankView:
    """Converts planned steps to one rank's view.

    Attributes:
        path, metadata: path and metadata of the plan.
        rank: global rank.
        ascending: keep the ranks of groups ascending, as in torch's process groups, instead of in ring order.
    """

    path: Path
    metadata: PlanMetadata
    rank: int
    ascending: bool = False

    def step(self, plan: StepPlan) -> RankStep:
        """Return the rank's view of a planned step; raise RunError if the rank has no micro-batch."""
        rows = orders_of_rank(plan, self.rank)
        if not len(rows):
            raise RunError(
                f"{self.path}: step {plan.step} has no micro-batch for rank {self.rank}; see 'fcp check {self.path}'"
            )
        tokens = int(plan.lengths.sum(dtype=np.int64))
        return RankStep(
            step=plan.step,
            rows=tuple(self._row(plan, int(i)) for i in rows),
            makespan_seconds=plan.makespan_seconds,
            bound_seconds=plan.bound_seconds,
            tokens=tokens,
            loss_tokens=tokens - len(plan.lengths),
            sequences=len(plan.lengths),
            waves=self._waves(plan, rows),
        )

    def _waves(self, plan: StepPlan, rows: IntArray) -> tuple[tuple[MicroBatch, ...], ...]:
        if self.metadata.encoder_balance is None:
            return ()
        wanted = plan.wave[rows]
        return tuple(tuple(self._row(plan, i) for i in np.flatnonzero(plan.wave == wave).tolist()) for wave in wanted)

    def _row(self, plan: StepPlan, order: int) -> MicroBatch:
        row = plan.microbatch(order)
        if self.ascending:
            return row
        return replace(row, ranks=ring_order(row.ranks, self.metadata.ranks_per_node, row.heads_degree))


class PlanCursor:
    """Iterator over this rank's steps from `first_step` on, read ahead in a background thread.

    Memory does not grow with the plan: it holds one row group of the file and a few steps.

    Args:
        path: a plan file.
        rank: global rank.
        first_step: optimizer step to start at, for a resumed run.
        ahead: number of steps to read ahead; 0 reads in the calling thread.
        ascending: see `RankView`; for rings that run in a process group.
    """

    def __init__(
        self, path: Path, rank: int, *, first_step: int = 0, ahead: int = _STEPS_AHEAD, ascending: bool = False
    ) -> None:
        self._reader = PlanReader(path)
        self._view = RankView(path=path, metadata=self._reader.metadata, rank=rank, ascending=ascending)
        note_follower(path)
        self.path = path
        self.rank = rank
        if first_step < self.metadata.first_step:
            raise RunError(
                f"step {first_step} is not in {path}, which continues from step {self.metadata.first_step} of a run; "
                f"load its checkpoint and pass first_step={self.metadata.first_step}"
            )
        if first_step > self.metadata.end_step:
            raise RunError(
                f"step {first_step} is not in {path}, which ends after {self.metadata.end_step} steps; "
                "plan more with 'fcp plan --epochs'"
            )
        self._steps = Prefetched(self._read(first_step), depth=ahead, name="fcp-plan-cursor")

    @property
    def metadata(self) -> PlanMetadata:
        return self._reader.metadata

    def __iter__(self) -> Iterator[RankStep]:
        return iter(self._steps)

    def close(self) -> None:
        """Stop reading."""
        self._steps.close()

    def _read(self, first_step: int) -> Iterator[RankStep]:
        return map(self._view.step, self._reader.steps(first_step))
