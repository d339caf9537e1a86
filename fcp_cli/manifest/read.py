"""Read lengths into flat arrays: table columns batch by batch without a Python object per row, or lines of text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.kinds import another_kind
from fcp_cli.manifest.sources.masks import mask_rule
from fcp_cli.manifest.sources.shards import ARROW_SUFFIXES, CsvShard, DataFile, open_shard
from fcp_cli.manifest.table.checks import (
    FACTORS,
    LONGEST_TOKENS,
    NULL,
    USUAL_LENGTHS,
    checked_table,
    empty_factors,
    is_list,
    length_column_of,
)
from fcp_cli.manifest.table.columns import new_column, release
from fcp_cli.manifest.table.header import (
    LINE_SUFFIXES,
    TABLE_SUFFIXES,
    manifest_files,
    manifest_source,
    read_footer,
    readable,
)
from fcp_cli.manifest.table.lines import read_lengths_jsonl
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.masks import MASK_COLUMN, MaskRows
from fcp_cli.reading.inputs import bounded_lines, open_input
from fcp_cli.reading.parquet import open_parquet
from fcp_cli.words import nearest

__all__ = ["read_lengths_jsonl", "read_manifest", "remarks"]

_BATCH_ROWS: Final = 1 << 17
_LIST_BATCH_ROWS: Final = 1 << 10  # rows of token lists are heavy: 1024 rows of 100 k int32 tokens are 400 MB already


def read_manifest(path: str | Path, *, length_column: str = "length") -> LengthTable:
    """Read lengths and work factors of a manifest, or of data with a column of lengths.

    Args:
        path: a Parquet or Arrow file, or a folder of them in name order; `.jsonl`, `.csv`, `.tsv` or `.txt` with a
            length per line; `-` reads JSON lines from standard input (see `read_lengths_jsonl`).
        length_column: an integer column of tokens, or a list column that is measured by its list lengths. Where there
            is no `length`, the default finds a column of a usual name; the table records it.

    Returns:
        One entry per row; a null `eta` or vision column counts as 0, and a column of zeros is dropped.

    Raises:
        ManifestError: the file is missing, damaged or empty, the column is missing or of a wrong type, or a row holds
            a value that no sequence can have.
    """
    path = Path(path)
    if str(path) == "-":
        return read_lengths_jsonl(_text_lines(sys.stdin.buffer), length_column=length_column)
    files = manifest_files(path)
    if files[0].suffix in LINE_SUFFIXES or path.is_fifo():  # `fcp plan <(...)`
        if mistaken := another_kind(files[0], "manifest", may_be_text=True):
            raise ManifestError(mistaken)
        try:
            with open_input(files[0]) as stream:
                return read_lengths_jsonl(
                    _text_lines(stream),
                    length_column=length_column,
                    place=str(path),
                    name=path.name,
                )
        except OSError as error:
            raise ManifestError(f"cannot read {path}: {error.strerror or error}") from error
    table = _of_columns(path, [_open(file) for file in files], length_column)
    return table if table.eta is None else replace(table, masks=_masks(path))


def _text_lines(stream: IO[bytes]) -> Iterator[str]:
    return (line.decode() for line in bounded_lines(stream))


def _masks(path: Path) -> MaskRows | None:
    """Return the masks of a manifest, or None if it was built without masks."""
    rule = (manifest_source(path) or {}).get("mask")
    if rule is None:
        return None
    kind = mask_rule(rule).kind
    if kind == "full":
        return MaskRows(kind, np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64))
    with readable(path):
        column = open_parquet(path).read(columns=[MASK_COLUMN]).column(MASK_COLUMN).combine_chunks()
    if not pa.types.is_list(column.type) or column.null_count or column.flatten().null_count:
        raise ManifestError(f"{path}: the column {MASK_COLUMN} must hold lists of whole numbers without nulls")
    sizes = pc.list_value_length(column).to_numpy()
    return MaskRows(kind, np.concatenate(([0], np.cumsum(sizes))), column.flatten().to_numpy().astype(np.int64))


def _of_columns(path: Path, shards: Sequence[DataFile], length_column: str) -> LengthTable:
    """Read all shards of a table; the first determines the column of lengths."""
    rows = sum(int(shard.group_rows.sum()) for shard in shards)
    if rows == 0:
        raise ManifestError(f"{path} has no rows: a manifest needs one row per sequence; see `fcp manifest build`")
    schema = shards[0].schema
    column = length_column_of(length_column, [field.name for field in schema if _can_be_length(field.type)])
    # Allocate only existing columns: in a large manifest, zeros take as much memory as other values.
    there = [name for name in FACTORS if any(field.name == name for shard in shards for field in shard.schema)]
    lengths, factors = new_column(rows, np.int64), empty_factors(rows, there)
    start = 0
    for shard in shards:
        for batch in _batches(shard, column):
            rows_here = slice(start, start + batch.num_rows)
            lengths[rows_here] = _lengths(batch.column(column), shard.path, column, start)
            for name in set(batch.schema.names) & set(factors):
                factors[name][rows_here] = _factor(batch.column(name), shard.path, name)
            start = rows_here.stop
            for filled in (lengths, *factors.values()):
                release(filled)
    return checked_table(path.name, column, lengths, factors)


def _open(file: Path) -> DataFile:
    if file.suffix in TABLE_SUFFIXES:
        return CsvShard(file)
    if file.suffix not in ARROW_SUFFIXES:
        read_footer(file)  # rejects a plan and manifests of newer formats
    return open_shard(file)


def remarks(table: LengthTable) -> list[str]:
    """Return warnings about a manifest, one line each."""
    first = int(table.length_tokens[0])
    if len(table) < 2 or bool((table.length_tokens != first).any()):
        return []
    return [f"{table.name}: all {len(table)} sequences have {first} tokens; were they packed or padded already?"]


def _can_be_length(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or is_list(kind))


def _batches(shard: DataFile, length_column: str) -> Iterator[Any]:
    schema = shard.schema
    if length_column not in schema.names:
        raise ManifestError(_missing_column(shard.path, schema, length_column))
    wanted = [length_column, *(name for name in FACTORS if name in schema.names and name != length_column)]
    yield from shard.batches(wanted, _LIST_BATCH_ROWS if is_list(schema.field(length_column).type) else _BATCH_ROWS)


def _missing_column(file: Path, schema: Any, length_column: str) -> str:
    usable = [field.name for field in schema if pa.types.is_integer(field.type) or is_list(field.type)]
    close = nearest(length_column, usable) or next((name for name in USUAL_LENGTHS if name in usable), None)
    build = shlex.join(["fcp", "manifest", "build", str(file), "-o", "lengths.parquet"])
    hint = f"pass --length-column {close}" if close else "name one with --length-column"
    if not close and not usable:
        hint = f"count the tokens of texts with `{build}` (and --tokenizer)"
        if file.suffix in TABLE_SUFFIXES:
            hint = "write texts as JSON lines, and count their tokens with `fcp manifest build`"
    return f"{file} has no column {length_column!r}; its columns are {', '.join(schema.names)}; {hint}"


def _lengths(column: Any, file: Path, name: str, start: int) -> IntArray:
    kind = column.type
    if is_list(kind):
        column = pc.list_value_length(column)
    elif pa.types.is_floating(kind):
        column = _whole_floats(column, file, name, start)
    elif not pa.types.is_integer(kind):
        raise ManifestError(
            f"{file}: column {name!r} is {kind}, not a length; name an integer or list column with --length-column, "
            "or run `fcp manifest build` to count tokens"
        )
    return _int64(pc.fill_null(column.cast(pa.int64(), safe=False), NULL))


def _whole_floats(column: Any, file: Path, name: str, start: int) -> Any:
    """Convert floats to integers, with NaN as null: pandas stores integers with missing values as floats."""
    values = column.to_numpy(zero_copy_only=False).astype(np.float64)
    gap = np.isnan(values)
    broken = np.flatnonzero(~gap & ((values != np.floor(values)) | (np.abs(values) > LONGEST_TOKENS)))
    if len(broken):
        row = int(broken[0])
        raise ManifestError(
            f"{file}: row {start + row} of column {name!r} is {values[row]}; lengths must be whole numbers of tokens; "
            "round them or name another column with --length-column"
        )
    return pa.array(np.where(gap, 0, values).astype(np.int64), mask=gap)


def _factor(column: Any, file: Path, name: str) -> FloatArray | IntArray:
    kind = column.type
    if pa.types.is_null(kind):
        return np.zeros(len(column), np.int64)
    if name == "eta" and (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        floats: FloatArray = pc.fill_null(column.cast(pa.float64(), safe=False), 0.0).to_numpy(zero_copy_only=False)
        return floats
    if name != "eta" and pa.types.is_integer(kind):
        return _int64(pc.fill_null(column.cast(pa.int64(), safe=False), 0))
    raise ManifestError(
        f"{file}: column {name!r} is {kind}; it must be {'a number' if name == 'eta' else 'an integer'}"
    )


def _int64(column: Any) -> IntArray:
    values: IntArray = column.to_numpy(zero_copy_only=False)
    return values
