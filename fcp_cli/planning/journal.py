"""Journals of plans in progress, from which an interrupted `fcp plan` or a killed job resumes.

A folder next to the plan holds its metadata and a part `000000...` for each start of the process. The records of a part
have digests: first the start's first step, then its windows of steps. A window truncated by a kill is skipped, but a
damaged record is an error. A later start supersedes the steps that earlier starts planned from its first step on.

The plan of a manifest (`PlanJournal`, folder `.NAME.journal`) only records a hash of what determines it. The plan of a
stream (`StreamJournal`, folder `.NAME.online`) records its whole metadata, and each window begins with its sequences,
since no manifest holds them yet.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import pyarrow as pa

from fcp_cli.errors import FcpError, PlanError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import FACTORS, MANIFEST_FORMAT, LengthTable, checked_table, empty_factors
from fcp_cli.plan.file import PlanReader, plan_writer, steps_in_order, steps_to_arrow
from fcp_cli.plan.metadata import (
    METADATA_KEY,
    ManifestReference,
    PlanMetadata,
    ScheduledRefit,
    manifest_of,
    parse_metadata,
)
from fcp_cli.plan.step import StepPlan
from fcp_cli.util.files import replaced_atomically, write_text_atomically
from fcp_cli.util.inputs import DamagedError, decode_json, read_object, read_text
from fcp_cli.util.parquet import open_parquet, parquet_writer
from fcp_cli.util.records import read_records, table_content, table_of_content, write_record
from fcp_cli.util.validation import NonNegativeCount, validated
from fcp_cli.util.words import counted, first_sentence

_PLAN_FORMAT: Final = "fcp-journal/3"
_STREAM_FORMAT: Final = "fcp-online-journal/2"
_NEVER: Final = int(np.iinfo(np.int64).max)
_ROWS_PER_WINDOW = 8_192  # micro-batches; a plan's steps reach the disk in windows of at least so many


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begins:
    """First step and first sequence of a start of the process."""

    first_step: NonNegativeCount
    first_sequence: NonNegativeCount


class Journal:
    """Steps of the plan in progress at `path`.

    Attributes:
        metadata: metadata of the future plan, without totals and hash, but with the refits so far.
    """

    metadata: PlanMetadata
    _FOLDER: ClassVar[str]  # .NAME.FOLDER next to the plan
    _PARTS: ClassVar[str]  # suffix of the parts
    _RECORDS: ClassVar[int]  # records of a window

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.with_name(f".{path.name}.{self._FOLDER}")
        self._begin(0, 0)

    def steps(self, end_step: int | None = None) -> Iterator[StepPlan]:
        """Yield the steps that no later start superseded, in order, up to `end_step` (exclusive)."""
        due = self._recorded().first_step
        for part, begins, ends in self._starts():
            if begins.first_step > due:
                raise self.damaged(f"it begins with step {begins.first_step}, after step {due - 1}", part)
            end = ends.first_step if end_step is None else min(ends.first_step, end_step)
            for _columns, steps in self._windows(part, begins):
                for step in steps:
                    if step.step < end:
                        due = step.step + 1
                        yield step

    def remove(self) -> None:
        """Remove the journal."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder)

    def damaged(self, reason: str, place: Path | None = None) -> FcpError:
        """Return the error of a damaged journal, or of its part or file `place`."""
        raise NotImplementedError

    def _recorded(self) -> PlanMetadata:
        """Return the metadata by which recorded steps are read."""
        raise NotImplementedError

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FcpError(f"cannot write {self.folder}: {error.strerror or error}") from error

    def _begin(self, first_step: int, first_sequence: int) -> None:
        """Make later windows those of a new start, which is recorded with its first window."""
        self._begins = _Begins(first_step=first_step, first_sequence=first_sequence)
        self._part, self._is_recorded = len(self._parts()), False

    def _append(self, *tables: pa.Table) -> None:
        try:
            with (self.folder / f"{self._part:06}.{self._PARTS}").open("ab") as file:
                if not self._is_recorded:
                    write_record(file, json.dumps(asdict(self._begins)).encode())
                    self._is_recorded = True
                for table in tables:
                    write_record(file, table_content(table))
        except OSError as error:
            raise FcpError(f"cannot write {self.folder}: {error.strerror or error}") from error

    def _starts(self) -> list[tuple[Path, _Begins, _Begins]]:
        """Return (part, begin, exclusive end) of each start that planned something; later starts determine the end."""
        found = [(part, begins) for part in self._parts() if (begins := self._begins_of(part)) is not None]
        starts, ends = [], _Begins(first_step=_NEVER, first_sequence=_NEVER)
        for part, begins in reversed(found):
            starts.append((part, begins, ends))
            ends = _Begins(
                first_step=min(begins.first_step, ends.first_step),
                first_sequence=min(begins.first_sequence, ends.first_sequence),
            )
        return starts[::-1]

    def _begins_of(self, part: Path) -> _Begins | None:
        """Return the begin of a start, or None if it was killed before recording it."""
        with self._reading(part):
            content = next(read_records(part), None)
            if content is None:
                return None
            return validated(decode_json(content), _Begins, where=str(part), error=PlanError)

    def _windows(self, part: Path, begins: _Begins) -> Iterator[tuple[list[pa.Table], list[StepPlan]]]:
        """Yield (sequence columns of a stream, steps) of each complete window of a start."""
        due, rows, metadata = begins.first_step, begins.first_sequence, self._recorded()
        with self._reading(part):
            contents = islice(read_records(part), 1, None)
            for *of_columns, of_steps in zip(*[contents] * self._RECORDS, strict=False):
                columns = [_checked_columns(table_of_content(content)) for content in of_columns]
                rows += sum(map(len, columns))
                table = table_of_content(of_steps)
                steps = steps_in_order(table, metadata, rows=metadata.manifest.rows or rows, due=due)
                due += len(steps)
                yield columns, steps

    @contextmanager
    def _reading(self, part: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, DamagedError) as failure:
            raise self.damaged(first_sentence(failure), part) from failure

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob(f"*.{self._PARTS}"))


def is_begun(plan: Path) -> bool:
    """Return whether the plan of a manifest is in progress or was interrupted."""
    return (plan.with_name(f".{plan.name}.{PlanJournal._FOLDER}") / "key").is_file()


class PlanJournal(Journal):
    """Journal of the plan of a manifest.

    Args:
        path: plan file in progress.
        metadata: metadata of the plan, without totals and hash.
    """

    _FOLDER, _PARTS, _RECORDS = "journal", "steps", 1

    def __init__(self, path: Path, metadata: PlanMetadata) -> None:
        super().__init__(path)
        self.metadata = metadata
        asked = replace(metadata, refits=None)  # refits only arise during training
        self._key = f"{_PLAN_FORMAT} {hashlib.sha256(asked.hashed_json()).hexdigest()}"
        self._pending: list[StepPlan] = []
        self._rows = 0

    @property
    def steps_kept(self) -> bool:
        """Whether the journal has steps to resume from.

        Checks the disk, since Ctrl-C may arrive between writing a window and counting it.
        """
        return bool(self._parts())

    def start(self) -> None:
        """Start an empty journal, removing an older one."""
        self.remove()
        self._make_folder()
        write_text_atomically(self.folder / "key", self._key)
        self._begin(self.metadata.first_step, 0)

    def resume(self) -> Iterator[StepPlan]:
        """Return the steps of an interrupted run of the same plan; `append` then continues after the last of them.

        Raises:
            FcpError: there is no journal, or it belongs to another plan; while iterating, a part is damaged.
        """
        if not is_begun(self.path):
            raise FcpError(f"nothing to resume: there is no {self.folder}; run without --resume")
        if read_text(self.folder / "key", error=FcpError, label="the journal ") != self._key:
            raise FcpError(
                f"cannot resume: {self.folder} was begun with another manifest, cost profile or options, or by another "
                "version of fcp; give the same ones, or run without --resume to start over"
            )
        return self._resumed()

    def _resumed(self) -> Iterator[StepPlan]:
        due = self.metadata.first_step
        for step in self.steps():
            due = step.step + 1
            yield step
        self._begin(due, 0)

    def append(self, step: StepPlan) -> None:
        """Append the next step; it is only written to disk once its window is full."""
        self._pending.append(step)
        self._rows += len(step)
        if self._rows >= _ROWS_PER_WINDOW:
            self._append(steps_to_arrow(self._pending))
            self._pending, self._rows = [], 0

    def all_steps(self) -> Iterator[StepPlan]:
        """Yield all steps from the first on: those on disk, then pending ones."""
        yield from self.steps()
        yield from self._pending

    def note_refit(self, refit: ScheduledRefit) -> None:
        """Record the refit of the following steps, before any of them is planned."""
        self.metadata = replace(self.metadata, refits=(refit,))
        write_text_atomically(self.folder / "refit.json", json.dumps(asdict(refit)))

    def read_refit(self) -> None:
        """Load the refit of an interrupted run, if any, into the metadata."""
        path = self.folder / "refit.json"
        if path.is_file():
            kept = validated(read_object(path, error=FcpError), ScheduledRefit, where=str(path), error=FcpError)
            self.metadata = replace(self.metadata, refits=(kept,))

    def remove(self) -> None:
        """Remove the journal, ignoring errors; `start` fails if it could not be removed."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def damaged(self, reason: str, place: Path | None = None) -> FcpError:
        """Return the error of a damaged journal, or of its part `place`."""
        return FcpError(
            f"cannot resume: {place or self.folder} is damaged: {reason}; run without --resume to start over"
        )

    def _recorded(self) -> PlanMetadata:
        return self.metadata


class StreamJournal(Journal):
    """Journal of the plan of a stream.

    Attributes:
        planned_to: one more than the last step planned by earlier starts, whose refits are known.
    """

    _FOLDER, _PARTS, _RECORDS = "online", "windows", 2

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.planned_to = 0

    @property
    def exists(self) -> bool:
        return (self.folder / "metadata.json").is_file()

    def begin(self, metadata: PlanMetadata, first_step: int) -> pa.Table:
        """Begin a start of the job at `first_step`, keeping the steps before it.

        Returns:
            Lengths and factors of the kept steps' sequences, or None if `first_step` is 0.

        Raises:
            PlanError, FcpError: the journal lacks steps before `first_step`, is of another plan, damaged or unwritable.
        """
        if first_step == 0:
            self.remove()
        elif not self.exists:
            self._take_over_plan()
        kept = self._kept_rows(metadata, first_step) if first_step else None
        if first_step:
            metadata = replace(metadata, refits=self._recorded().refits)
            self.planned_to = sum(1 for _ in self.steps())
        self.metadata = metadata
        self._make_folder()
        self._write_metadata()
        self._begin(first_step, 0 if kept is None else len(kept))
        return kept

    def note_refit(self, refit: ScheduledRefit) -> None:
        """Record a refit in the metadata."""
        self.metadata = replace(self.metadata, refits=(*(self.metadata.refits or ()), refit))
        self._write_metadata()

    def append(self, lengths: pa.Table, steps: list[StepPlan]) -> None:
        """Append a window: the next sequences and their steps."""
        self._append(lengths, steps_to_arrow(steps))

    def finish(self, end_step: int | None = None) -> PlanMetadata:
        """Write the plan and its manifest from the journal, and remove the journal.

        Args:
            end_step: exclusive end of the steps to keep; None: all.

        Returns:
            Metadata of the plan, with totals and hash.

        Raises:
            PlanError: nothing was planned, or the journal is damaged.
        """
        metadata = self._recorded()
        sizes = [len(step.sequences) for step in self.steps(end_step)]
        if not (rows := sum(sizes)):
            raise PlanError(f"nothing was planned for {self.path} yet")
        manifest = manifest_of(self.path)
        table = _write_manifest(manifest, self._rows(rows))
        metadata = replace(
            metadata,
            manifest=ManifestReference(name=manifest.name, rows=rows, content_hash=table.content_hash()),
            refits=tuple(refit for refit in metadata.refits or () if refit.first_step < len(sizes)) or None,
        )
        with plan_writer(self.path, metadata) as writer:
            for step in self.steps(end_step):
                writer.append(step)
        with suppress(OSError):  # the plan is complete, so a leftover journal is harmless
            self.remove()
        return writer.metadata

    def _kept_rows(self, metadata: PlanMetadata, first_step: int) -> pa.Table:
        before = self._recorded()
        if _what(before) != _what(metadata):
            raise PlanError(
                f"{self.path} was begun for other ranks, another cost profile or other batches than this run's planner "
                "has; resume with the same ones, or name another plan file"
            )
        steps = rows = 0
        for step in self.steps(first_step):
            steps, rows = steps + 1, rows + len(step.sequences)
        if steps < first_step:
            raise PlanError(
                f"{self.path} has {steps} of the {first_step} steps before the one that this run resumes with; resume "
                "in the folder of the run's own plan"
            )
        return self._rows(rows)

    def _take_over_plan(self) -> None:
        """Create a journal from a complete plan, to continue its finished run."""
        reader = PlanReader(self.path)  # it reports a missing plan
        manifest = read_manifest(manifest_of(self.path))
        ids = open_parquet(manifest_of(self.path)).read()
        self._make_folder()
        self.metadata = replace(
            reader.metadata,
            manifest=ManifestReference(name=manifest.name, rows=0, content_hash=""),
            steps=0,
            distinct_groups=0,
            plan_hash="",
            created="",
        )
        self._write_metadata()
        self._begin(0, 0)
        columns = length_columns(manifest)
        if "id" in ids.schema.names:
            columns = columns.append_column("id", ids.column("id"))
        self.append(columns, list(reader.steps()))

    def _write_metadata(self) -> None:
        document = decode_json(self.metadata.to_json())
        text = json.dumps({"format": _STREAM_FORMAT, "digest": _digest(self.metadata), "metadata": document})
        write_text_atomically(self.folder / "metadata.json", text)

    def _recorded(self) -> PlanMetadata:
        if not self.exists:
            raise PlanError(f"there is no {self.folder}: no run plans for {self.path}")
        file = self.folder / "metadata.json"
        document = read_object(file, error=PlanError, label="the journal ")
        content = json.dumps(document.get("metadata")).encode()
        metadata = parse_metadata({METADATA_KEY: content}, name=str(file))
        if document.get("format") != _STREAM_FORMAT or document.get("digest") != _digest(metadata):
            raise self.damaged("it is not as it was written", file)
        return metadata

    def _rows(self, count: int) -> pa.Table:
        """Return the first `count` sequences, without those superseded by later starts."""
        tables, rows = [], 0
        for part, begins, ends in self._starts():
            if begins.first_sequence > rows:
                raise self.damaged(f"it begins with sequence {begins.first_sequence}, after {rows}", part)
            found = [columns for (columns,), _steps in self._windows(part, begins)]
            kept = min(count, ends.first_sequence) - begins.first_sequence
            if found and kept > 0:
                tables.append(pa.concat_tables(found).slice(0, kept))
                rows += len(tables[-1])
        if rows < count:
            raise self.damaged(f"it has {rows} of the {counted(count, 'sequence')} of its steps")
        return pa.concat_tables(tables, promote_options="default").replace_schema_metadata(None).slice(0, count)

    def damaged(self, reason: str, place: Path | None = None) -> PlanError:
        """Return the error of a damaged journal, or of its part or file `place`."""
        return PlanError(
            f"{place or self.folder} is damaged: {reason}; restore it from a copy, or remove {self.folder} and plan "
            "from the beginning"
        )


def _checked_columns(columns: pa.Table) -> pa.Table:
    """Return a window's sequence columns; raise DamagedError if one is missing or of another type."""
    types = {name: pa.from_numpy_dtype(values.dtype) for name, values in empty_factors(0).items()}
    for name, kind in (("length", pa.int64()), *types.items()):
        if name not in columns.schema.names or columns.schema.field(name).type != kind:
            raise DamagedError(f"its sequences have no column {name} of {kind}")
    return columns


def _digest(metadata: PlanMetadata) -> str:
    return hashlib.sha256(metadata.hashed_json()).hexdigest()


def length_columns(table: LengthTable) -> pa.Table:
    """Return the journal columns of sequences: lengths and work factors."""
    given = empty_factors(len(table)) | {
        name: values for name in FACTORS if (values := getattr(table, name)) is not None
    }
    return pa.table({"length": table.length_tokens, **given})


def table_of_columns(columns: pa.Table, *, name: str) -> LengthTable:
    """Return the table encoded by `length_columns`; `name` identifies it in messages."""
    factors = {factor: columns.column(factor).to_numpy() for factor in FACTORS if factor in columns.schema.names}
    return checked_table(name, "length", columns.column("length").to_numpy(), factors)


def _write_manifest(path: Path, columns: pa.Table) -> LengthTable:
    table = table_of_columns(columns, name=path.name)
    unused = [name for name in FACTORS if getattr(table, name) is None]
    header = {"format": MANIFEST_FORMAT}
    with (
        replaced_atomically(path) as temporary,
        parquet_writer(temporary, columns.drop_columns(unused).schema) as file,
    ):
        file.write_table(columns.drop_columns(unused))
        file.add_key_value_metadata({METADATA_KEY.decode(): json.dumps(header)})
    return table


def _what(metadata: PlanMetadata) -> bytes:
    """Return the part of the metadata that stays fixed during a run, as bytes for comparison."""
    batch_size = metadata.global_batch_size if metadata.has_equal_batches else 1
    same = ManifestReference(name="", rows=0, content_hash="")
    return replace(metadata, refits=None, manifest=same, global_batch_size=batch_size, fcp_version="").hashed_json()
