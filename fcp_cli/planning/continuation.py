"""Global batches of the remaining steps of a run, to be planned for another number of ranks.

The global batches of the old plan stay unchanged, so that the run has the same batches, steps and learning-rate
schedule. Only the assignment to ranks changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fcp_cli.errors import ManifestError, OverlongError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Continuation, OverlongReport, PlanMetadata, pack_rows, unpack_rows
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Batch, Problem
from fcp_cli.util.arrays import Int32Array, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class RemainingSteps:
    """Untrained steps of a plan.

    Attributes:
        continues: the run up to these steps.
        offsets: [steps + 1] offsets of each step's sequences.
        rows, lengths: manifest row and planned tokens of each sequence.
        overlong: policy of the plan for overlong sequences.
    """

    continues: Continuation
    offsets: IntArray
    rows: IntArray
    lengths: Int32Array
    overlong: OverlongReport


def remaining_steps(reader: PlanReader, first_step: int) -> RemainingSteps:
    """Read a plan's steps from `first_step` on, and the rows trained earlier in that epoch."""
    metadata = reader.metadata
    trained = _trained_before(reader, first_step)
    steps = list(reader.steps(first_step))
    return RemainingSteps(
        continues=Continuation(
            plan_hash=metadata.plan_hash,
            num_ranks=metadata.num_ranks,
            first_step=first_step,
            trained=pack_rows(trained),
        ),
        offsets=np.cumsum([0, *(len(step.sequences) for step in steps)], dtype=np.int64),
        rows=np.concatenate([step.sequences for step in steps]),
        lengths=np.concatenate([step.lengths for step in steps]),
        overlong=metadata.overlong,
    )


def _trained_before(reader: PlanReader, first_step: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return [manifest rows] whether a row was trained earlier in the epoch of `first_step`."""
    metadata = reader.metadata
    # Batches never span epochs and each epoch has all rows, so only steps of this epoch count.
    epoch_start = first_step - first_step % max(metadata.steps_per_epoch, 1)
    trained = np.zeros(metadata.manifest.rows, dtype=np.bool_)
    # If this plan continues a run, the epoch's earlier steps are only in that run.
    if metadata.continues is not None and epoch_start < metadata.first_step:
        trained |= unpack_rows(metadata.continues.trained, metadata.manifest.rows)
    for step in reader.steps(epoch_start):
        if step.step >= first_step:
            break
        trained[step.sequences] = True
    return trained


def settings_of(metadata: PlanMetadata) -> BatchSettings:
    """Return the batch settings of a plan."""
    return BatchSettings(
        global_batch_size=metadata.global_batch_size,
        seed=metadata.seed,
        shuffle=metadata.shuffle,
        epochs=metadata.epochs,
        last_batch=metadata.last_batch,
        max_length=metadata.overlong.max_length,
        overlong=metadata.overlong.policy,
        step_limit=metadata.step_limit,
        batching=metadata.batching,
        mixture=metadata.mixture,
    )


class RemainingBatches(GlobalBatches):
    """Global batches of `remaining`; `batch(0)` is the first untrained one.

    Raises:
        OverlongError: the ranks cannot hold the longest remaining sequence.
    """

    def __init__(
        self, table: LengthTable, problem: Problem, settings: BatchSettings, remaining: RemainingSteps
    ) -> None:
        _require_room(table, problem, remaining)
        self.problem = problem
        self.settings = settings
        self.overlong = remaining.overlong
        # Planned lengths, since overlong sequences may have been truncated.
        lengths = table.length_tokens.copy()
        lengths[remaining.rows] = remaining.lengths
        self.table = replace(table, length_tokens=lengths)
        self.continues = remaining.continues
        self._remaining = remaining
        self._offsets = None
        self.sequences = len(self.rows)

    @property
    def rows(self) -> IntArray:
        """[rows] remaining manifest rows, ascending."""
        return np.unique(self._remaining.rows)

    @property
    def longest_tokens(self) -> int:
        """Most tokens of a remaining sequence."""
        return int(self._remaining.lengths.max())

    def __len__(self) -> int:
        return len(self._remaining.offsets) - 1

    def batch(self, step: int) -> Batch:
        """Return the global batch of a remaining step, counted from 0."""
        members = slice(self._remaining.offsets[step], self._remaining.offsets[step + 1])
        rows = self._remaining.rows[members]
        number = self._remaining.continues.first_step + step
        batch = self._batch_of(number, rows, self.table.take(rows))
        return replace(batch, lengths=self._remaining.lengths[members])


class ChangedMixture(GlobalBatches):
    """Global batches of a mixture that continues a run with changed weights; `batch(0)` is the first untrained one.

    Raises:
        OverlongError, ManifestError: as in `GlobalBatches`, or no step remains.
    """

    def __init__(
        self,
        table: LengthTable,
        problem: Problem,
        settings: BatchSettings,
        continues: Continuation,
        options_that_hold: Callable[[int], str] | None = None,
    ) -> None:
        super().__init__(table, problem, settings, options_that_hold)
        self.continues = continues
        if len(self) < 1:
            raise ManifestError(f"{table.name}: step {self.first_step} is beyond its last; the run is complete")

    def __len__(self) -> int:
        return super().__len__() - self.first_step

    def batch(self, step: int) -> Batch:
        """Return the global batch of a remaining step, counted from 0."""
        return super().batch(self.first_step + step)


def continued_mixture(metadata: PlanMetadata, first_step: int, rows: int) -> Continuation:
    """Return the run that a changed mixture continues; trained rows are not recorded, since a mixture repeats rows."""
    return Continuation(
        plan_hash=metadata.plan_hash,
        num_ranks=metadata.num_ranks,
        first_step=first_step,
        trained=pack_rows(np.zeros(rows, dtype=np.bool_)),
    )


def _require_room(table: LengthTable, problem: Problem, remaining: RemainingSteps) -> None:
    most = problem.num_ranks * problem.tokens_per_rank
    longest = int(np.argmax(remaining.lengths))
    tokens = int(remaining.lengths[longest])
    if tokens > most:
        raise OverlongError(
            f"{table.name}: row {remaining.rows[longest]} ({tokens} tokens) is still to be trained, but "
            f"{problem.num_ranks} ranks of {problem.tokens_per_rank} tokens hold at most {most}; give "
            f"--tokens-per-rank {-(-tokens // problem.num_ranks)}, or at least "
            f"{-(-tokens // problem.tokens_per_rank)} --ranks"
        )
