"""Parquet, Arrow and CSV files as lists of row groups that can be read independently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv

from fcp_cli.arrays import IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.manifest.table.header import readable
from fcp_cli.reading.inputs import bounded_lines, cached_by_file, open_input, require_input
from fcp_cli.reading.parquet import open_footer, open_parquet, require_names
from fcp_cli.reading.remote import RemoteFile, RemotePath

PARQUET_SUFFIXES: Final = (".parquet", ".pq")
ARROW_SUFFIXES: Final = (".arrow", ".feather", ".ipc")
DATA_SUFFIXES: Final = (*PARQUET_SUFFIXES, *ARROW_SUFFIXES)


class DataFile(Protocol):
    """A file of a data set."""

    path: Path
    schema: Any
    is_arrow: bool

    @property
    def group_rows(self) -> IntArray:
        """Number of rows per group: [groups]."""

    def read_group(self, group: int, column: str) -> Any:
        """Read a column of a group as an Arrow array."""

    def batches(self, columns: list[str], rows: int, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Yield record batches of the rows in [`start`, `stop`), with at most `rows` rows each."""


def _groups_of(group_rows: IntArray, start: int, stop: int | None) -> tuple[list[int], int]:
    """Return the groups that overlap rows [`start`, `stop`), and the first row of the first such group."""
    ends = np.cumsum(group_rows, dtype=np.int64)
    begins = ends - group_rows
    held = np.flatnonzero((ends > start) & (begins < (ends[-1:].sum() if stop is None else stop)))
    return held.tolist(), int(begins[held[0]]) if len(held) else start


def _cut(batches: Iterable[Any], first: int, start: int, stop: int | None) -> Iterator[Any]:
    """Yield rows [`start`, `stop`) of consecutive batches whose first row is number `first`."""
    for batch in batches:
        low = max(start - first, 0)
        high = batch.num_rows if stop is None else min(stop - first, batch.num_rows)
        if low < high:
            yield batch.slice(low, high - low)
        first += batch.num_rows


class ParquetShard:
    """A Parquet file; its groups are its row groups."""

    is_arrow = False

    def __init__(self, path: Path) -> None:
        self.path = path
        with readable(path):
            self._footer = open_footer(path)
        self.schema = self._footer.schema.to_arrow_schema()

    @cached_property
    def group_rows(self) -> IntArray:
        return np.array([self._footer.row_group(i).num_rows for i in range(self._footer.num_row_groups)], np.int64)

    def read_group(self, group: int, column: str) -> Any:
        with readable(self.path), open_parquet(self.path, self._footer) as file:
            return file.read_row_group(group, columns=[column]).column(column).combine_chunks()

    def batches(self, columns: list[str], rows: int, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        groups, first = _groups_of(self.group_rows, start, stop)
        with readable(self.path), open_parquet(self.path, self._footer) as file:
            read = file.iter_batches(batch_size=rows, columns=columns, row_groups=groups)
            yield from _cut(read, first, start, stop)


class ArrowShard:
    """An Arrow IPC file, or an IPC stream as the `datasets` library writes; its groups are its record batches.

    Local files are memory-mapped, without copies unless compressed. From an object store, ranges of batches are read.
    """

    is_arrow = True

    def __init__(self, path: Path) -> None:
        self.path = path
        with readable(path, kind="Arrow"):
            require_input(path, seekable=True)
            ranges = RemoteFile(path, reads_ahead=False) if isinstance(path, RemotePath) else None
            mapped = pa.memory_map(str(path)) if ranges is None else pa.PythonFile(ranges, mode="r")
            try:
                file = pa.ipc.open_file(mapped)
                self.schema, self._count, self._batch = file.schema, file.num_record_batches, file.get_batch
            except pa.ArrowInvalid:
                mapped.seek(0)
                if ranges is not None:
                    why = "an Arrow stream has no index of its batches; copy it here, or store a file or Parquet"
                    raise ManifestError(f"cannot read {path} remotely: {why}") from None
                # A stream has no index of its batches, but listing them is cheap: their data stays mapped.
                batches = list(pa.ipc.open_stream(mapped))
                if not batches:
                    raise ManifestError(f"{path} has no rows") from None
                self.schema, self._count, self._batch = batches[0].schema, len(batches), batches.__getitem__
            require_names(self.schema)

    @cached_property
    def group_rows(self) -> IntArray:
        return np.array([self._read(group).num_rows for group in range(self._count)], np.int64)

    def read_group(self, group: int, column: str) -> Any:
        return self._checked(group, [column]).column(column)

    def batches(self, columns: list[str], rows: int, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        groups, first = _groups_of(self.group_rows, start, stop)
        for batch in _cut((self._checked(group, columns) for group in groups), first, start, stop):
            for row in range(0, batch.num_rows, rows):
                yield batch.slice(row, rows)

    def _checked(self, group: int, columns: list[str]) -> Any:
        batch = self._read(group).select(columns)
        with readable(self.path, kind="Arrow"):
            batch.validate(full=True)  # Arrow trusts the offsets in a file, even if they point outside its memory
        return batch

    def _read(self, group: int) -> Any:
        with readable(self.path, kind="Arrow"):
            return self._batch(group)


class CsvShard:
    """A `.csv` or `.tsv` file, read into memory as one group; a single column without a header is `length`."""

    is_arrow = False

    def __init__(self, path: Path) -> None:
        self.path = path
        parse = csv.ParseOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
        with readable(path, kind="CSV"), open_input(path, seekable=True) as file:
            is_number = next(bounded_lines(file), b"").strip().isdigit()
            file.seek(0)
            read = csv.ReadOptions(column_names=["length"] if is_number else None)
            self._table = csv.read_csv(file, read_options=read, parse_options=parse)
            require_names(self._table.schema)
        self.schema = self._table.schema

    @cached_property
    def group_rows(self) -> IntArray:
        return np.array([self._table.num_rows], np.int64)

    def read_group(self, group: int, column: str) -> Any:
        return self._table.column(column).combine_chunks()

    def batches(self, columns: list[str], rows: int, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        yield from _cut(self._table.select(columns).to_batches(max_chunksize=rows), 0, start, stop)


def open_shard(path: Path) -> DataFile:
    """Open a file by its suffix."""
    return ArrowShard(path) if path.suffix in ARROW_SUFFIXES else ParquetShard(path)


def python_rows(batch: Any, path: Path) -> list[dict[str, Any]]:
    """Return rows as Python values; times and dates become strings: Python's types are narrower and coarser."""
    with readable(path, kind="rows"):
        columns = [column.cast(pa.string()) if _is_time(column.type) else column for column in batch.columns]
        rows: list[dict[str, Any]] = pa.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()
        return rows


def _is_time(kind: Any) -> bool:
    return bool(pa.types.is_temporal(kind) and not pa.types.is_interval(kind))


class TableRows:
    """Random access to rows of a Parquet or Arrow file, with a cache of row groups.

    Attributes:
        columns: names of all columns.
    """

    def __init__(self, file: Path, *, kept_groups: int = 4) -> None:
        self._shard = open_shard(file)
        self._ends = np.cumsum(self._shard.group_rows, dtype=np.int64)
        self._group = lru_cache(maxsize=kept_groups)(self._read)
        self.columns: tuple[str, ...] = tuple(self._shard.schema.names)

    def record(self, row: int, columns: Sequence[str], place: str) -> dict[str, Any]:
        """Return columns of a row; `place` is its location, for messages."""
        group = int(np.searchsorted(self._ends, row, side="right"))
        if row < 0 or group == len(self._ends):
            rows = int(self._ends[-1:].sum())
            raise ManifestError(f"{place} is gone: the file has {rows} rows; build the manifest again")
        # The row is counted from the end of its group, since only group ends are stored.
        back = row - int(self._ends[group])
        return {name: cells[back + len(cells)].as_py() for name, cells in self._group(group, tuple(columns)).items()}

    def _read(self, group: int, columns: tuple[str, ...]) -> dict[str, Any]:
        return {name: self._shard.read_group(group, name) for name in columns}


table_rows = cached_by_file(TableRows, maxsize=64)
