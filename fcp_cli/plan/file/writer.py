"""Streaming writer of a plan file, in constant memory; the file appears atomically."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pyarrow.parquet as pq

from fcp_cli.errors import PlanError
from fcp_cli.files import replaced_atomically
from fcp_cli.parquet_writer import parquet_writer
from fcp_cli.plan.file.schema import schema_of, steps_to_arrow
from fcp_cli.plan.file.stored import MOST_SECONDS
from fcp_cli.plan.metadata.hashing import PlanHasher
from fcp_cli.plan.metadata.plan_metadata import METADATA_KEY, PlanMetadata
from fcp_cli.plan.step import RingGroup, StepPlan

# Row groups hold whole steps, so that a reader can start at any step without reading earlier ones.
_ROWS_PER_ROW_GROUP = 32_768
# Delta-encoded: ascending, or so many distinct values that a dictionary would be nearly as long as the column.
_DELTAS = ("order", "wave", "ranks", "sequences")


class PlanWriter:
    """Writer of steps in order; `metadata` has its totals and hash once the block of `plan_writer` ends."""

    def __init__(self, parquet: pq.ParquetWriter, metadata: PlanMetadata) -> None:
        self.metadata = metadata
        self._parquet = parquet
        self._hasher = PlanHasher()
        self._pending: list[StepPlan] = []
        self._pending_rows = 0
        self._steps = 0
        self._groups: set[RingGroup] = set()
        self._most_sequences = 1

    def append(self, step: StepPlan) -> None:
        """Append the next step.

        Raises:
            PlanError: the step takes longer than a plan can hold.
        """
        due = self.metadata.first_step + self._steps
        if step.step != due:
            raise ValueError(f"step {step.step} appended where step {due} is due")
        if not step.makespan_seconds <= MOST_SECONDS:
            raise PlanError(
                f"step {step.step} takes {step.makespan_seconds:.3g} s by its cost profile; a plan holds times of at "
                f"most {MOST_SECONDS:g} s. See the profile's coefficients with 'fcp profile show'"
            )
        self._steps += 1
        self._pending.append(step)
        self._pending_rows += len(step)
        self._groups.update(step.ring_groups())
        self._most_sequences = max(self._most_sequences, len(step.sequences))
        if self._pending_rows >= _ROWS_PER_ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        table = steps_to_arrow(self._pending).combine_chunks()
        self._hasher.update(table)
        self._parquet.write_table(table, row_group_size=max(len(table), 1))  # one group; pyarrow rejects a size of 0
        self._pending, self._pending_rows = [], 0

    def finish(self) -> None:
        """Flush pending steps, then write the totals and the hash to the file's footer."""
        self._flush()
        metadata = replace(self.metadata, steps=self._steps, distinct_groups=len(self._groups))
        if not metadata.has_equal_batches:
            metadata = replace(metadata, global_batch_size=self._most_sequences)
        self.metadata = replace(
            metadata,
            plan_hash=self._hasher.hexdigest(metadata),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        self._parquet.add_key_value_metadata({METADATA_KEY: self.metadata.to_json().encode()})


@contextmanager
def plan_writer(path: Path, metadata: PlanMetadata) -> Iterator[PlanWriter]:
    """Write a plan to `path`; if the block raises, no file is left.

    Raises:
        FcpError: the file cannot be written.
    """
    with (
        replaced_atomically(path) as temporary,
        parquet_writer(temporary, schema_of(splits_heads=metadata.attention is not None), deltas=_DELTAS) as parquet,
    ):
        writer = PlanWriter(parquet, metadata)
        yield writer
        writer.finish()
