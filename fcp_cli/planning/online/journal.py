"""Keeps what was planned beside the plan until the run is over, so that a run that was killed loses nothing.

A folder `.NAME.online` holds `metadata.json` and, for each start of the job, `000000.steps` and `000000.lengths`: Arrow
streams that grow with every window. One that ends in its midst is read up to there. A later start begins with a step
of its own, and what earlier ones planned from that step on no longer counts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fcp_cli.errors import FcpError, PlanError
from fcp_cli.files import replaced_atomically, write_text_atomically
from fcp_cli.manifest.checks import FACTORS, checked_table, empty_factors
from fcp_cli.manifest.header import MANIFEST_FORMAT
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import METADATA_KEY, ManifestReference, PlanMetadata, parse_metadata
from fcp_cli.plan.online import manifest_of
from fcp_cli.plan.reader import PlanReader
from fcp_cli.plan.refits import Refit
from fcp_cli.plan.schema import steps_from_arrow, steps_to_arrow
from fcp_cli.plan.step import StepPlan
from fcp_cli.plan.writer import plan_writer
from fcp_cli.reading.documents import decode_json
from fcp_cli.reading.parquet import open_parquet

_BEGINS: Final = b"fcp-begins"


class OnlineJournal:
    """The journal of the plan at `path`. Messages name the plan.

    Attributes:
        metadata: of the plan that is to be, once it has begun.
        planned_to: one more than the last step that an earlier start planned: what was counted for those is known.
    """

    metadata: PlanMetadata

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.with_name(f".{path.name}.online")
        self.planned_to = 0
        self._files: list[Any] = []

    @property
    def exists(self) -> bool:
        return (self.folder / "metadata.json").is_file()

    def begin(self, metadata: PlanMetadata, first_step: int) -> pa.Table:
        """Keep the steps before `first_step`, and begin to take those from it on.

        Returns:
            Lengths and factors of the sequences that these steps train.

        Raises:
            FcpError: there are not so many steps, they were planned for something else, or nothing can be written.
        """
        if first_step == 0:
            self.remove()
        elif not self.exists:
            self._take_over_plan()
        kept = self._kept_rows(metadata, first_step) if first_step else None
        if first_step:
            metadata = replace(metadata, refits=self._metadata().refits)
            self.planned_to = sum(1 for _ in self.steps())
        self.metadata = metadata
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FcpError(f"cannot write {self.folder}: {error.strerror or error}") from error
        write_text_atomically(self.folder / "metadata.json", metadata.to_json())
        self._begins = {"first_step": first_step, "first_sequence": 0 if kept is None else len(kept)}
        self._part = len(self._parts("steps"))
        return kept

    def note_refit(self, refit: Refit) -> None:
        """Keep what is counted from a step on.

        Raises:
            FcpError: it cannot be written.
        """
        self.metadata = replace(self.metadata, refits=(*(self.metadata.refits or ()), refit))
        write_text_atomically(self.folder / "metadata.json", self.metadata.to_json())

    def append(self, lengths: pa.Table, steps: list[StepPlan]) -> None:
        """Add a window: the sequences that follow, and their steps.

        Raises:
            FcpError: it cannot be written.
        """
        try:
            tables = lengths, steps_to_arrow(steps)
            if not self._files:
                self._files = [
                    self._open(name, table.schema) for name, table in zip(("lengths", "steps"), tables, strict=True)
                ]
            for (sink, writer), table in zip(self._files, tables, strict=True):
                writer.write_table(table)
                sink.flush()
        except (OSError, pa.ArrowException) as error:
            raise FcpError(f"cannot write {self.folder}: {error}") from error

    def finish(self, end_step: int | None = None) -> PlanMetadata:
        """Write the plan and its manifest from what was kept, and remove the journal.

        Args:
            end_step: keep only the steps before it; None: all.

        Returns:
            The plan's metadata, with totals and hash.

        Raises:
            FcpError: nothing was planned, or the files cannot be written.
        """
        self.close()
        metadata = self._metadata()
        if metadata.batching is not None and metadata.batching.reorder_window and end_step is not None:
            end_step = -(-end_step // metadata.batching.reorder_window) * metadata.batching.reorder_window
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
        self.remove()
        return writer.metadata

    def steps(self, end_step: int | None = None) -> Iterator[StepPlan]:
        """Yield the steps that count, in order, up to `end_step`."""
        parts = [(part, _begins_of(part)) for part in self._parts("steps")]
        for place, (part, _begins) in enumerate(parts):
            later = [begins["first_step"] for _, begins in parts[place + 1 :]]
            end = min([*later, *([] if end_step is None else [end_step])], default=None)
            for batch in _batches(part):
                for step in steps_from_arrow(pa.Table.from_batches([batch])):
                    if end is not None and step.step >= end:
                        break
                    yield step

    def close(self) -> None:
        """Let go of the files."""
        for sink, writer in self._files:
            with suppress(OSError, pa.ArrowException):
                writer.close()
                sink.close()
        self._files = []

    def remove(self) -> None:
        """Remove the journal."""
        self.close()
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder)

    def _kept_rows(self, metadata: PlanMetadata, first_step: int) -> pa.Table:
        before = self._metadata()
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
                "where the run's own plan lies"
            )
        return self._rows(rows)

    def _take_over_plan(self) -> None:
        """Make a journal of a plan that is whole: its run was over, and goes on."""
        reader = PlanReader(self.path)  # its message says that there is none
        manifest = read_manifest(manifest_of(self.path))
        ids = open_parquet(manifest_of(self.path)).read()
        self.folder.mkdir(parents=True, exist_ok=True)
        metadata = replace(
            reader.metadata,
            manifest=ManifestReference(name=manifest.name, rows=0, content_hash=""),
            steps=0,
            distinct_groups=0,
            plan_hash="",
            created="",
        )
        write_text_atomically(self.folder / "metadata.json", metadata.to_json())
        self._begins, self._part = {"first_step": 0, "first_sequence": 0}, 0
        columns = length_columns(manifest)
        if "id" in ids.schema.names:
            columns = columns.append_column("id", ids.column("id"))
        self.append(columns, list(reader.steps()))
        self.close()

    def _metadata(self) -> PlanMetadata:
        try:
            text = (self.folder / "metadata.json").read_bytes()
        except OSError as error:
            raise PlanError(f"there is no {self.folder}: no run plans for {self.path}") from error
        return parse_metadata({METADATA_KEY: text}, name=str(self.folder))

    def _rows(self, count: int) -> pa.Table:
        parts = [(part, _begins_of(part)) for part in self._parts("lengths")]
        tables = []
        for place, (part, begins) in enumerate(parts):
            end = min([count, *(later["first_sequence"] for _, later in parts[place + 1 :])])
            tables.append(pa.Table.from_batches(list(_batches(part))).slice(0, max(0, end - begins["first_sequence"])))
        return pa.concat_tables(tables).replace_schema_metadata(None).slice(0, count)

    def _parts(self, kind: str) -> list[Path]:
        return sorted(self.folder.glob(f"*.{kind}"))

    def _open(self, kind: str, schema: pa.Schema) -> tuple[Any, Any]:
        sink = pa.OSFile(str(self.folder / f"{self._part:06}.{kind}"), "wb")
        return sink, pa.ipc.new_stream(sink, schema.with_metadata({_BEGINS: json.dumps(self._begins)}))


def length_columns(table: LengthTable) -> pa.Table:
    """Return the columns that a journal keeps of sequences."""
    given = empty_factors(len(table)) | {
        name: values for name in FACTORS if (values := getattr(table, name)) is not None
    }
    return pa.table({"length": table.length_tokens, **given})


def table_of_columns(columns: pa.Table, *, name: str) -> LengthTable:
    """Return what `length_columns` made columns of.

    Raises:
        ManifestError: a value that no sequence can have.
    """
    factors = {factor: columns.column(factor).to_numpy() for factor in FACTORS if factor in columns.schema.names}
    return checked_table(name, "length", columns.column("length").to_numpy(), factors)


def _write_manifest(path: Path, columns: pa.Table) -> LengthTable:
    table = table_of_columns(columns, name=path.name)
    unused = [name for name in FACTORS if getattr(table, name) is None]
    header = {"format": MANIFEST_FORMAT}
    with (
        replaced_atomically(path) as temporary,
        pq.ParquetWriter(
            temporary, columns.drop_columns(unused).schema, compression="zstd", store_schema=False
        ) as file,
    ):
        file.write_table(columns.drop_columns(unused))
        file.add_key_value_metadata({METADATA_KEY.decode(): json.dumps(header)})
    return table


def _batches(part: Path) -> Iterator[pa.RecordBatch]:
    """Yield what a file holds, up to where its writer was stopped."""
    with suppress(pa.ArrowInvalid, OSError, StopIteration), pa.memory_map(str(part)) as source:
        reader = pa.ipc.open_stream(source)
        while True:
            yield reader.read_next_batch()


def _begins_of(part: Path) -> dict[str, int]:
    """Return the step and the sequence that a file begins with; beyond all others where it has none."""
    with suppress(ValueError, KeyError, OSError), pa.memory_map(str(part)) as source:
        found: dict[str, int] = decode_json(pa.ipc.open_stream(source).schema.metadata[_BEGINS])
        return found
    return {"first_step": np.iinfo(np.int64).max, "first_sequence": np.iinfo(np.int64).max}


def _what(metadata: PlanMetadata) -> bytes:
    """Return all of the metadata that does not change while a run plans."""
    batch_size = metadata.global_batch_size if metadata.has_equal_batches else 1
    same = ManifestReference(name="", rows=0, content_hash="")
    return replace(metadata, refits=None, manifest=same, global_batch_size=batch_size, fcp_version="").hashed_json()
