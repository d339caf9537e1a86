"""Streaming reader of a plan file, one step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.errors import PlanError
from fcp_cli.kinds import another_kind
from fcp_cli.plan.file.schema import schema_of
from fcp_cli.plan.file.stored import broken_seconds, stored_steps
from fcp_cli.plan.layout import BrokenRule, first_of
from fcp_cli.plan.metadata.hashing import PlanHasher
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata, parse_metadata
from fcp_cli.plan.step import StepPlan
from fcp_cli.reading.parquet import FAILURES, open_parquet, reason_of


class PlanReader:
    """An open plan file: its `metadata`, and its steps in order from any step on.

    Raises:
        PlanError: the file is missing, damaged, foreign, or has columns of another type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = Path(path)  # scripts pass FCP_PLAN as a string
        if mistaken := another_kind(path, "plan"):
            raise PlanError(mistaken)
        try:
            self._file = open_parquet(path)
        except FileNotFoundError as error:
            raise PlanError(f"there is no plan {path}; make one with 'fcp plan MANIFEST -o {path}'") from error
        except FAILURES as error:
            if path.is_dir():
                raise PlanError(f"{path} is a folder, not a plan; name the plan file in it") from error
            raise PlanError(
                f"{path} cannot be read as Parquet ({reason_of(error)}): it is truncated, damaged or not a plan; "
                "make one with 'fcp plan MANIFEST'"
            ) from error
        self.metadata: PlanMetadata = parse_metadata(self._file.metadata.metadata, name=str(path))
        self._schema = schema_of(splits_heads=self.metadata.attention is not None)
        self._check_columns()

    def _check_columns(self) -> None:
        found = self._file.schema_arrow
        for field in self._schema:
            index = found.get_field_index(field.name)
            if index < 0:
                raise PlanError(f"{self.path}: the column {field.name} is missing")
            if not _same_type(found.field(index).type, field.type):
                raise PlanError(f"{self.path}: the column {field.name} is {found.field(index).type}, not {field.type}")

    def steps(self, first: int = 0) -> Iterator[StepPlan]:
        """Yield the steps from `first` on, skipping row groups that end before it.

        Raises:
            PlanError: the file is damaged, a step is missing, or a step holds an invalid value.
        """
        due = max(first, self.metadata.first_step)
        for step, fault in self.stored_steps(first):
            if fault is None and step.step != due:
                fault = BrokenRule(step=due, message=f"it is missing: step {step.step} stands in its place")
            if fault is not None:
                raise PlanError(f"{self.path}: {fault}; see 'fcp check {self.path}'")
            yield step
            due += 1

    def stored_steps(self, first: int = 0) -> Iterator[tuple[StepPlan, BrokenRule | None]]:
        """Yield the steps from `first` on as stored, each with its first invalid value, or None.

        For callers that report faults or display damaged plans; all others use `steps`.
        """
        limits = self.metadata.num_ranks, self.metadata.manifest.rows
        held: pa.Table | None = None
        for table in self.tables(first):
            table = table if held is None else pa.concat_tables([held, table])
            # The last step of a row group may continue in the next (foreign writers split anywhere): hold it back.
            steps = table.column("step").to_numpy()
            last_start = int((steps != steps[-1]).sum())
            held = table.slice(last_start)
            yield from (found for found in stored_steps(table.slice(0, last_start), *limits) if found[0].step >= first)
        if held is not None:
            yield from (found for found in stored_steps(held, *limits) if found[0].step >= first)

    def predicted_seconds(self) -> tuple[IntArray, FloatArray]:
        """Return [steps] optimizer step numbers and [steps] makespans, reading only two columns."""
        try:
            table = self._without_nulls(self._file.read(columns=["step", "step_seconds"]))
        except FAILURES as error:
            raise PlanError(f"{self.path} is damaged ({reason_of(error)})") from error
        steps, rows = np.unique(table.column("step").to_numpy(), return_index=True)
        seconds = table.column("step_seconds").to_numpy()[rows]
        wrong = broken_seconds(seconds)
        if wrong.any():
            found = f"step {steps[first_of(wrong)]}: step_seconds is {seconds[first_of(wrong)]}"
            raise PlanError(f"{self.path}: {found}; see 'fcp check {self.path}'")
        return steps, seconds

    def planned_lengths(self) -> IntArray:
        """Return [manifest rows] the planned tokens of each row, 0 for dropped rows."""
        lengths = np.zeros(self.metadata.manifest.rows, dtype=np.int64)
        for step in self.steps():
            lengths[step.sequences] = step.lengths
        return lengths

    def tables(self, first: int = 0) -> Iterator[pa.Table]:
        """Yield the row groups in stored order, skipping those that end before step `first`."""
        try:
            for group in range(self._file.num_row_groups):
                meta: Any = self._file.metadata.row_group(group)
                statistics = meta.column(0).statistics
                # Statistics are optional in Parquet: a group without them has to be read.
                skippable = statistics is not None and statistics.has_min_max and statistics.max < first
                if meta.num_rows and not skippable:
                    yield self._without_nulls(self._file.read_row_group(group, columns=self._schema.names))
        except FAILURES as error:
            raise PlanError(
                f"{self.path} is damaged ({reason_of(error)}); make it again with 'fcp plan' or copy it again"
            ) from error

    def _without_nulls(self, table: pa.Table) -> pa.Table:
        # Another writer may declare columns nullable, and NumPy would read the undefined value behind a null.
        for name in table.schema.names:
            column = table.column(name)
            values = column.combine_chunks().flatten() if pa.types.is_list(column.type) else column
            if column.null_count or values.null_count:
                raise PlanError(f"{self.path} is damaged: the column {name} has nulls")
        return table

    def content_hash(self) -> str:
        """Return the hash of the file's actual content; it differs from `metadata.plan_hash` if the file was edited."""
        hasher = PlanHasher()
        for table in self.tables():
            hasher.update(table)
        return hasher.hexdigest(self.metadata)


def _same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    # Arrow list types also compare the nullability of their items, which is up to the writer.
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(found) and found.value_type == wanted.value_type)
    return bool(found == wanted)
