"""Streaming reader of a plan file, one step at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fcp_cli.errors import PlanError
from fcp_cli.plan.metadata import METADATA_KEY, PlanHasher, PlanMetadata, parse_metadata
from fcp_cli.plan.replan_command import plan_again
from fcp_cli.plan.rings import BrokenRule, broken_heads, broken_ranks, first_of
from fcp_cli.plan.step import RingGroup, StepPlan
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.files import as_word, near_file, replaced_atomically
from fcp_cli.util.inputs import DamagedError
from fcp_cli.util.kinds import another_kind
from fcp_cli.util.parquet import FAILURES, numpy_of, open_parquet, parquet_writer, reason_of
from fcp_cli.util.records import content_hash_of
from fcp_cli.util.words import counted


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
            mend = near_file(path) or f"; make one with 'fcp plan MANIFEST -o {as_word(path)}'"
            raise PlanError(f"there is no plan {path}{mend}") from error
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
                raise PlanError(f"{self.path}: {fault}; see 'fcp check {as_word(self.path)}'")
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
            steps = numpy_of(table.column("step"))
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
        steps, rows = np.unique(numpy_of(table.column("step")), return_index=True)
        seconds = numpy_of(table.column("step_seconds"))[rows]
        wrong = broken_seconds(seconds)
        if wrong.any():
            found = f"step {steps[first_of(wrong)]}: step_seconds is {seconds[first_of(wrong)]}"
            raise PlanError(f"{self.path}: {found}; see 'fcp check {as_word(self.path)}'")
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


# Streaming writer of a plan file, in constant memory; the file appears atomically.

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


# Columns of a plan file (format `fcp-plan/1`), and conversion of steps to and from Arrow.

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
    steps = numpy_of(table.column("step"))
    if not len(steps):
        return
    starts = np.flatnonzero(np.concatenate(([True], steps[1:] != steps[:-1])))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(steps)], strict=True):
        yield _step_from_rows(int(steps[start]), table.slice(start, stop - start))


def _step_from_rows(step: int, rows: pa.Table) -> StepPlan:
    def scalars(name: str) -> Any:
        return numpy_of(rows.column(name))

    def lists(name: str) -> tuple[Any, Any]:
        column = rows.column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0)
        # A slice keeps the offsets of the whole array, whose values `flatten` drops.
        offsets = numpy_of(column.offsets).astype(np.int64)
        return offsets - offsets[0], numpy_of(column.flatten())

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


# Validation of plan rows at the trust boundary: steps as stored, each with its first invalid value.
#
# Values that pass here are safe to index with, divide by and sum; no reader behind it checks again. Further rules of
# a valid plan (budget, coverage, times that follow from the profile) are checked by `plan.check`.

MOST_SECONDS: Final = 1e15
"""Thirty million years; sums over the steps of a plan stay exact to the second."""


def stored_steps(table: pa.Table, num_ranks: int, rows: int) -> Iterator[tuple[StepPlan, BrokenRule | None]]:
    """Yield the steps of a table sorted by step, each with its first fault, or None.

    Args:
        table: the columns of a plan, without nulls and with whole steps only.
        num_ranks, rows: ranks of the job and rows of the manifest, the bounds of a step's indices.
    """
    order = numpy_of(table.column("order"))
    unpaired = list_sizes(table, "sequences") != list_sizes(table, "lengths")
    start = 0
    for step in steps_from_arrow(table):
        here = slice(start, start + len(step))
        yield step, _broken_rows(step, order[here], unpaired[here]) or broken_values(step, num_ranks, rows)
        start = here.stop


def steps_in_order(table: pa.Table, metadata: PlanMetadata, *, rows: int, due: int) -> list[StepPlan]:
    """Return the consecutive steps of a table from a journal; the first must be step `due`.

    Raises:
        DamagedError: the columns are not those of the plan, or a step is invalid or out of order.
    """
    if not table.schema.equals(schema_of(splits_heads=metadata.attention is not None)):
        raise DamagedError("it does not have the columns of steps")
    steps: list[StepPlan] = []
    for step, fault in stored_steps(table, metadata.num_ranks, rows):
        if fault is not None or step.step != due + len(steps):
            raise DamagedError(str(fault or f"step {step.step} stands in place of step {due + len(steps)}"))
        steps.append(step)
    return steps


def broken_values(step: StepPlan, num_ranks: int, rows: int) -> BrokenRule | None:
    """Return the first invalid value of a step, or None."""
    return (
        broken_ranks(step, num_ranks)
        or broken_heads(step)
        or _broken_sequences(step, rows)
        or _broken_waves(step)
        or _broken_times(step)
    )


def broken_seconds(values: FloatArray) -> npt.NDArray[np.bool_]:
    """Return a mask of the seconds that are negative, NaN or above `MOST_SECONDS`."""
    return ~((values >= 0) & (values <= MOST_SECONDS))  # negated, because NaN fails every comparison


def list_sizes(table: pa.Table, column: str) -> npt.NDArray[np.int64]:
    """Return [rows] the length of each list of a column."""
    return np.asarray(numpy_of(pc.list_value_length(table.column(column))), dtype=np.int64)


def _broken_rows(step: StepPlan, order: npt.NDArray[np.int32], unpaired: npt.NDArray[np.bool_]) -> BrokenRule | None:
    wrong = np.flatnonzero(order != np.arange(len(step)))
    if len(wrong):
        return BrokenRule(step=step.step, message=f"rows out of order: order {order[wrong[0]]} in place {wrong[0]}")
    if unpaired.any():
        message = "as many sequences as lengths are needed"
        return BrokenRule(step=step.step, order=first_of(unpaired), message=message)
    return None


def _broken_sequences(step: StepPlan, rows: int) -> BrokenRule | None:
    outside = (step.sequences < 0) | (step.sequences >= rows)
    if outside.any():
        row = step.sequences[first_of(outside)]
        return BrokenRule(step=step.step, message=f"sequence {row} of a manifest of {counted(rows, 'row')}")
    empty = step.lengths < 1
    if empty.any():
        at = first_of(empty)
        message = f"sequence {step.sequences[at]} has {step.lengths[at]} tokens"
        return BrokenRule(step=step.step, message=message)
    return None


def _broken_waves(step: StepPlan) -> BrokenRule | None:
    outside = (step.wave < -1) | (step.wave >= len(step))
    if not outside.any():
        return None
    order = first_of(outside)
    return BrokenRule(step=step.step, order=order, message=f"wave {step.wave[order]} of {counted(len(step), 'row')}")


def _broken_times(step: StepPlan) -> BrokenRule | None:
    for name, values in (("start_seconds", step.start_seconds), ("seconds", step.seconds)):
        wrong = broken_seconds(values)
        if wrong.any():
            order = first_of(wrong)
            return BrokenRule(step=step.step, order=order, message=f"{name} is {values[order]}")
    for name, value in (("step_seconds", step.makespan_seconds), ("step_bound_seconds", step.bound_seconds)):
        if not 0 <= value <= MOST_SECONDS:
            return BrokenRule(step=step.step, message=f"{name} is {value}")
    return None


# Messages between a training job and its planner process: a line of JSON followed by an Arrow table.


class Message(NamedTuple):
    """One message: `kind` and other facts, and the bytes of a table, empty if it has none."""

    facts: Mapping[str, Any]
    table: bytes

    @property
    def kind(self) -> str:
        return str(self.facts["kind"])


def write_message(pipe: IO[bytes], facts: Mapping[str, Any], table: bytes = b"") -> None:
    """Write one message and flush the pipe."""
    pipe.write(json.dumps({**facts, "bytes": len(table)}).encode() + b"\n")
    pipe.write(table)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> Message | None:
    """Return the next message, or None at the end of the pipe or if the message is truncated."""
    line = pipe.readline()
    if not line.endswith(b"\n"):
        return None
    facts = json.loads(line)
    table = pipe.read(facts["bytes"])
    return Message(facts, table) if len(table) == facts["bytes"] else None


def table_bytes(table: pa.Table) -> bytes:
    """Serialize an Arrow table."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def table_of(message: bytes) -> pa.Table:
    """Deserialize the output of `table_bytes`."""
    with pa.ipc.open_stream(pa.py_buffer(message)) as reader:
        return reader.read_all()


def steps_bytes(steps: Sequence[StepPlan]) -> bytes:
    """Serialize planned steps as the rows of a plan file."""
    return table_bytes(steps_to_arrow(steps))


def steps_of(message: bytes) -> list[StepPlan]:
    """Deserialize the output of `steps_bytes`."""
    return list(steps_from_arrow(table_of(message)))


# Reading of a plan's metadata with its hash verified.


def read_proven(path: Path) -> PlanMetadata:
    """Return a plan's metadata after verifying the file's content against its plan hash.

    Raises:
        PlanError: the plan is missing, damaged or was edited.
    """
    reader = PlanReader(path)
    if content_hash_of(path, reader.content_hash) != reader.metadata.plan_hash:
        raise PlanError(
            f"{path} was edited: its content does not match its plan hash; make it again with: "
            f"{plan_again(reader.metadata, path)}"
        )
    return reader.metadata
