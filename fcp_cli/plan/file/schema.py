"""Columns of a plan file (format `fcp-plan/1`), and conversion of steps to and from Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from fcp_cli.plan.step import StepPlan

SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("order", pa.int32(), nullable=False),
        pa.field("wave", pa.int32(), nullable=False),
        pa.field("ranks", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("sequences", pa.list_(pa.field("element", pa.int64(), nullable=False)), nullable=False),
        pa.field("lengths", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("start_seconds", pa.float64(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
        pa.field("step_seconds", pa.float64(), nullable=False),
        pa.field("step_bound_seconds", pa.float64(), nullable=False),
    ]
)
_HEADS_DEGREE = pa.field("heads_degree", pa.int32(), nullable=False)


def schema_of(*, splits_heads: bool) -> pa.Schema:
    """Return the columns of a plan, including `heads_degree` if its metadata has the key `attention`."""
    return SCHEMA.append(_HEADS_DEGREE) if splits_heads else SCHEMA


def steps_to_arrow(steps: Sequence[StepPlan]) -> pa.Table:
    """Convert steps to rows, in order, without a Python object per row."""
    schema = schema_of(splits_heads=bool(steps) and steps[0].heads_degree is not None)
    return pa.Table.from_batches([_step_to_batch(step, schema) for step in steps], schema=schema)


def _step_to_batch(step: StepPlan, schema: pa.Schema) -> pa.RecordBatch:
    n = len(step)
    sequence_offsets = step.sequence_offsets.astype(np.int32)
    columns = [
        pa.array(np.full(n, step.step, dtype=np.int64)),
        pa.array(np.arange(n, dtype=np.int32)),
        pa.array(step.wave),
        _lists(step.rank_offsets.astype(np.int32), step.ranks, "ranks"),
        _lists(sequence_offsets, step.sequences, "sequences"),
        _lists(sequence_offsets, step.lengths, "lengths"),
        pa.array(step.start_seconds),
        pa.array(step.seconds),
        pa.array(np.full(n, step.makespan_seconds)),
        pa.array(np.full(n, step.bound_seconds)),
        *([] if step.heads_degree is None else [pa.array(step.heads_degree, pa.int32())]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _lists(offsets: Any, values: Any, column: str) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=SCHEMA.field(column).type)


def steps_from_arrow(table: pa.Table) -> Iterator[StepPlan]:
    """Yield the steps of a table of whole steps, with rows ordered by (step, order)."""
    table = table.combine_chunks()
    steps = table.column("step").to_numpy()
    if not len(steps):
        return
    starts = np.flatnonzero(np.concatenate(([True], steps[1:] != steps[:-1])))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(steps)], strict=True):
        yield _step_from_rows(int(steps[start]), table.slice(start, stop - start))


def _step_from_rows(step: int, rows: pa.Table) -> StepPlan:
    def scalars(name: str) -> Any:
        return rows.column(name).to_numpy()

    def lists(name: str) -> tuple[Any, Any]:
        column = rows.column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0)
        # A slice keeps the offsets of the whole array, whose values `flatten` drops.
        offsets = column.offsets.to_numpy().astype(np.int64)
        return offsets - offsets[0], column.flatten().to_numpy()

    rank_offsets, ranks = lists("ranks")
    sequence_offsets, sequences = lists("sequences")
    return StepPlan(
        step=step,
        wave=scalars("wave"),
        rank_offsets=rank_offsets,
        ranks=ranks,
        sequence_offsets=sequence_offsets,
        sequences=sequences,
        lengths=lists("lengths")[1],
        start_seconds=scalars("start_seconds"),
        seconds=scalars("seconds"),
        makespan_seconds=float(scalars("step_seconds")[0]),
        bound_seconds=float(scalars("step_bound_seconds")[0]),
        heads_degree=scalars(_HEADS_DEGREE.name) if _HEADS_DEGREE.name in rows.schema.names else None,
    )
