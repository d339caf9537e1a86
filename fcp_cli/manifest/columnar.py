"""Tabular data sets of token ids, texts or lengths, and their Parquet, Arrow and CSV files, read by row group."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources import WHOLE, Part, RowBatch, Source, names_below
from fcp_cli.manifest.table import FACTORS, is_list, readable
from fcp_cli.manifest.tokenizer import Tokenizer
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.inputs import bounded_lines, cached_by_file, open_input, require_input
from fcp_cli.util.parquet import open_footer, open_parquet, require_names
from fcp_cli.util.remote import RemoteFile, RemotePath
from fcp_cli.util.words import first_sentence

_USUAL_COLUMNS: Final = ("input_ids", "tokens", "text", "content", "length", "num_tokens")
_BATCH_ROWS: Final = 1 << 10
_LENGTH_BATCH_ROWS: Final = 1 << 17
_PART_ROWS: Final = 1 << 12
_CACHE_BYTES: Final = 256 << 20


class ColumnGroup(NamedTuple):
    """Consecutive rows of file number `shard`, starting at `row`.

    Attributes:
        first_id: id of the first row.
        values: tokens, texts or lengths.
        copied: columns that the manifest takes over from the file.
    """

    shard: int
    row: int
    first_id: int
    values: Any
    copied: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Columnar(Source):
    """One column of a data set in shards; the manifest copies its `eta` and vision columns.

    Attributes:
        path: the file, or the folder that holds the shards.
        shards: opened files, in row order.
        column: column with token ids (lists), texts (string or binary) or lengths (integers).
        content: kind of that column: `tokens`, `text` or `lengths`.
        mask_column: column copied as `mask`; "" for none.
        part: the part of all rows to read.
    """

    is_divisible = True
    path: Path
    shards: tuple[DataFile, ...]
    column: str
    content: str
    tokenizer: Tokenizer
    mask_column: str = ""
    part: Part = WHOLE

    @property
    def units(self) -> int | None:
        start, stop = self.part.span(sum(self._rows))
        return stop - start

    @property
    def files(self) -> tuple[Path, ...]:  # type: ignore[override]
        return tuple(shard.path for shard in self.shards)

    @property
    def _rows(self) -> list[int]:
        return [int(shard.group_rows.sum()) for shard in self.shards]

    @property
    def parts(self) -> int:
        # Arrow counts lists and copies lengths faster than a process starts.
        return -(-(self.units or 1) // _PART_ROWS) if self.content == "text" else 1

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "arrow" if self.shards[0].is_arrow else "parquet",
            "path": str(self.path),
            "files": names_below(self.path, self.files),
            "column": self.column,
            "content": self.content,
            "tokenizer": self.tokenizer.name if self.content == "text" else None,
        }

    @property
    def is_streamed(self) -> bool:
        return True  # each part of a row group would read the entire group

    def groups(self) -> Iterator[ColumnGroup]:
        row_counts = self._rows
        masks = {"mask": self.mask_column} if self.mask_column else {}
        batch_rows = _LENGTH_BATCH_ROWS if self.content == "lengths" else _BATCH_ROWS
        for index, row, stop in self.part.files(row_counts):
            shard, before = self.shards[index], sum(row_counts[:index])
            factors = [name for name in FACTORS if name in shard.schema.names and name != self.column]
            for batch in shard.batches([self.column, *factors, *masks.values()], batch_rows, row, stop):
                copied = {name: _own(batch.column(name)) for name in factors}
                copied |= {name: _own(batch.column(column)) for name, column in masks.items()}
                yield ColumnGroup(index, row, before + row, _own(batch.column(self.column)), copied)
                row += batch.num_rows

    def count(self, group: ColumnGroup) -> RowBatch:
        lengths, largest = self._count(self.shards[group.shard], group.values, row=group.row)
        rows = {"id": np.arange(group.first_id, group.first_id + len(lengths)), "length": lengths} | group.copied
        return RowBatch(rows=pa.record_batch(rows), done=len(lengths), largest_token=largest)

    def _count(self, shard: DataFile, column: Any, *, row: int) -> tuple[Any, int]:
        """Return the lengths and the largest token of rows from `row` on."""
        if self.content == "lengths":
            try:
                lengths = pc.fill_null(column.cast(pa.int64()), 0)
            except pa.ArrowInvalid as error:  # uint64 values may overflow int64
                where = f"{shard.path}: column {self.column!r}"
                raise ManifestError(f"{where}: {first_sentence(error)}; correct or drop that row") from error
            negative = pc.index(pc.less(lengths, 0), True).as_py()
            if negative >= 0:
                where = f"{shard.path}: row {row + negative} of column {self.column!r}"
                raise ManifestError(f"{where} is {lengths[negative]}; a length is at least 0; correct or drop that row")
            return lengths, -1
        if self.content == "text":
            return self.tokenizer.count(column), self.tokenizer.vocab_size - 1
        tokens = column.flatten()
        if tokens.null_count:
            raise ManifestError(
                f"{shard.path}: column {self.column!r} holds {tokens.null_count} null tokens; correct the data"
            )
        largest = pc.max(tokens).as_py()
        # A null list counts as an empty sequence, which the manifest drops.
        return pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64()), -1 if largest is None else int(largest)


class ColumnarTokens:
    """Random access by row of the data set, through a cache of row groups.

    Decoded row groups stay cached up to a total of 256 MiB. Shuffled reads from a Parquet file with huge row groups are
    therefore slow; Arrow files are memory-mapped and stay fast.
    """

    def __init__(self, source: Columnar, rows: IntArray, vocab_size: int | None) -> None:
        self._source = source
        self._rows = rows
        self._vocab_size = vocab_size
        groups = [(shard, group, int(n)) for shard in source.shards for group, n in enumerate(shard.group_rows)]
        self._groups = [(shard, group) for shard, group, _ in groups]
        self._group_ends = np.cumsum([n for _, _, n in groups], dtype=np.int64)
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def vocab_size(self) -> int:
        """Exact; if the manifest does not record it, the first access reads the entire column."""
        if self._vocab_size is None:
            self._vocab_size = 1 + max((batch.largest_token for batch in self._source.batches()), default=-1)
        return self._vocab_size

    def __call__(self, row: int) -> IntArray:
        source_row = int(self._rows[row])
        index = int(np.searchsorted(self._group_ends, source_row, side="right"))
        if index == len(self._groups):
            raise ManifestError(f"{self._source.path} has no row {source_row} any more")
        column = self._column(index)
        # The row is counted from the end of its group, since only group ends are stored.
        value = column[source_row - int(self._group_ends[index]) + len(column)]
        if self._source.content == "text":
            text = value.as_py() or b""
            return self._source.tokenizer.encode(text)
        tokens = value.values
        return np.empty(0, np.int64) if tokens is None else tokens.to_numpy(zero_copy_only=False).astype(np.int64)

    def place(self, row: int) -> str:
        return f"{self._source.path} (row {self._rows[row]}, column {self._source.column})"

    def _column(self, index: int) -> Any:
        with self._lock:
            if index not in self._cache:
                shard, group = self._groups[index]
                column = shard.read_group(group, self._source.column)
                self._cache[index] = column.cast(pa.large_binary()) if self._source.content == "text" else column
                while len(self._cache) > 1 and sum(held.nbytes for held in self._cache.values()) > _CACHE_BYTES:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(index)
            return self._cache[index]


def columnar(
    path: Path, shards: Sequence[DataFile], column: str | None, tokenizer: Tokenizer, *, mask_column: str = ""
) -> Columnar:
    """Open the source; without `column`, use a column with a common name."""
    schema = shards[0].schema
    usual = next((name for name in _USUAL_COLUMNS if name in schema.names and _content(schema.field(name).type)), None)
    column = column or usual
    if column is None or column not in schema.names:
        missing = f"no column {column!r}" if column else "no column of a usual name"
        raise ManifestError(f"{path} has {missing}; its columns are {', '.join(schema.names)}; name one with --column")
    content = _content(schema.field(column).type)
    if content is None:
        raise ManifestError(
            f"{path}: column {column!r} is {schema.field(column).type}; it must hold lists of integer tokens, texts or "
            "integer lengths; name another with --column"
        )
    if mask_column and mask_column not in schema.names:
        raise ManifestError(
            f"{path} has no column {mask_column!r} for --mask; its columns are {', '.join(schema.names)}"
        )
    for shard in shards:
        if column not in shard.schema.names or _content(shard.schema.field(column).type) != content:
            raise ManifestError(f"{shard.path} has no column {column!r} of {content}, unlike {shards[0].path.name}")
    return Columnar(
        path=path,
        shards=tuple(shards),
        column=column,
        content=content,
        tokenizer=tokenizer,
        mask_column=mask_column,
    )


def _own(values: Any) -> Any:
    """Copy values into separate buffers: pickling a slice would send the entire buffer."""
    return pa.concat_arrays([values, values.slice(0, 0)])


def _content(kind: Any) -> str | None:
    if pa.types.is_integer(kind):
        return "lengths"
    if is_list(kind):
        return "tokens" if pa.types.is_integer(kind.value_type) else None
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return "text" if any(matches(kind) for matches in texts) else None


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
    """A `.csv` or `.tsv` file, read into memory as one group; a single column without a header is `length`.

    Columns end at commas, semicolons or tabs, whichever the first line has most of.
    """

    is_arrow = False

    def __init__(self, path: Path) -> None:
        self.path = path
        with readable(path, kind="CSV"), open_input(path, seekable=True) as file:
            header = next(bounded_lines(file), b"").strip()
            file.seek(0)
            read = csv.ReadOptions(column_names=["length"] if header.isdigit() else None)
            parse = csv.ParseOptions(delimiter=max(",;\t", key=lambda one: header.count(one.encode())))
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
