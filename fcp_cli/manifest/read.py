"""Reading a length manifest: Parquet columns to flat arrays, batch by batch, without a Python object per row.

Measured with `python -m benchmarks.manifest`: 10 M rows need about 80 MB for the lengths and one batch beside them.
"""

from __future__ import annotations

import difflib
import json
import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.table import FloatArray, IntArray, LengthTable

METADATA_KEY: Final = b"fcp"
MANIFEST_FORMAT: Final = "fcp-manifest/1"

_NULL: Final = int(np.iinfo(np.int64).min)  # stands for a null length until the check has named its row
_LONGEST: Final = 2**31 - 1  # a plan holds lengths as int32
_FACTORS: Final = ("eta", "vision_patches", "vision_patch_pairs")
_BATCH_ROWS: Final = 1 << 17
_LIST_BATCH_ROWS: Final = 1 << 10  # rows of token lists are heavy: 1024 rows of 100 k tokens are 400 MB already
_USUAL_NAMES: Final = ("length", "lengths", "num_tokens", "n_tokens", "token_count", "seq_len", "input_ids", "tokens")


def read_manifest(path: str | Path, *, length_column: str = "length") -> LengthTable:
    """Read lengths and work factors of a Parquet file, or of a folder of Parquet files in name order.

    Args:
        path: the manifest; `-` reads JSON lines from standard input (see `read_lengths_jsonl`).
        length_column: an integer column of tokens, or a list column that is measured by its list lengths.

    Returns:
        One entry per row; a null `eta` or vision column counts as 0, and one that is 0 throughout is left out.

    Raises:
        ManifestError: the file is missing, damaged or empty, the column is missing or of a wrong type, or a row holds
            a value that no sequence can have.
    """
    path = Path(path)
    if str(path) == "-":
        return read_lengths_jsonl(sys.stdin, length_column=length_column)
    footers = {file: _footer(file) for file in parquet_files(path)}
    rows = sum(footer.num_rows for footer in footers.values())
    if rows == 0:
        raise ManifestError(f"{path} has no rows: a manifest needs one row per sequence; see `fcp manifest build`")
    lengths = np.empty(rows, np.int64)
    factors: dict[str, FloatArray | IntArray] = {
        name: np.zeros(rows, np.float64 if name == "eta" else np.int64) for name in _FACTORS
    }
    start = 0
    for file, footer in footers.items():
        for batch in _batches(file, footer, length_column):
            rows_here = slice(start, start + batch.num_rows)
            lengths[rows_here] = _lengths(batch.column(length_column), file, length_column, start)
            for name in set(batch.schema.names) & set(factors):
                factors[name][rows_here] = _factor(batch.column(name), file, name)
            start = rows_here.stop
    return _checked(path.name, length_column, lengths, factors)


def read_lengths_jsonl(stream: Iterable[str], *, length_column: str = "length") -> LengthTable:
    """Read one sequence per line: a whole number of tokens, or an object with `length` and the optional columns.

    Raises:
        ManifestError: a line is not JSON, has no length, or holds a value that no sequence can have.
    """
    lengths = array("q")
    etas = array("d")
    vision = {name: array("q") for name in _FACTORS[1:]}
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        record = _record(line, number, length_column)
        lengths.append(_whole(record[length_column], number, length_column))
        etas.append(_number(record.get("eta") or 0, number, "eta"))
        for name, column in vision.items():
            column.append(_whole(record.get(name) or 0, number, name))
    if not lengths:
        raise ManifestError('standard input has no lines: write one length per line, for example {"length": 4096}')
    factors: dict[str, FloatArray | IntArray] = {"eta": np.asarray(etas, np.float64)}
    factors |= {name: np.asarray(column, np.int64) for name, column in vision.items()}
    return _checked("stdin", length_column, np.asarray(lengths, np.int64), factors)


def remarks(table: LengthTable) -> list[str]:
    """What a reader of this manifest should know but that is no error, one line each."""
    first = int(table.length_tokens[0])
    if len(table) > 1 and bool((table.length_tokens == first).all()):
        return [
            f"{table.name}: all {len(table)} sequences have {first} tokens (packed or padded?); nothing is left to balance"
        ]
    return []


def source_metadata(path: str | Path) -> dict[str, Any] | None:
    """The `source` that `fcp manifest build` wrote into the file's schema metadata; None for a foreign manifest.

    Raises:
        ManifestError: the file is missing or damaged, or its manifest format is one that this version cannot read.
    """
    path = Path(path)
    if path.is_dir():
        return None
    header = _header(_footer(path))
    if header is None:
        return None
    if header.get("format") != MANIFEST_FORMAT:
        raise ManifestError(f"{path} has the format {header.get('format')!r}; this version reads {MANIFEST_FORMAT}")
    source = header.get("source")
    return source if isinstance(source, dict) else None


def parquet_files(path: Path) -> list[Path]:
    """The file itself, or the `.parquet` files of a folder in name order.

    Raises:
        ManifestError: there is no such file, or the folder holds no Parquet file.
    """
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise ManifestError(f"{path} is a folder without .parquet files; `fcp manifest build {path}` reads text")
        return files
    if not path.exists():
        raise ManifestError(f"{path} does not exist; `fcp manifest build SOURCE -o {path}` makes a manifest")
    return [path]


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn every way in which a data file can be unreadable into one line.

    Raises:
        ManifestError: the block met a damaged, truncated or unreadable file.
    """
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).split("\n", 1)[0]
        raise ManifestError(
            f"{path} cannot be read as Parquet (truncated, damaged or another format): {reason}"
        ) from error


def _footer(file: Path) -> Any:
    with readable(file):
        footer = pq.read_metadata(file)
    header = _header(footer)
    if header is not None and str(header.get("format", "")).startswith("fcp-plan/"):
        raise ManifestError(f"{file} is a plan, not a length manifest; `fcp inspect {file}` shows it")
    return footer


def _header(footer: Any) -> dict[str, Any] | None:
    text = (footer.metadata or {}).get(METADATA_KEY)
    try:
        header = None if text is None else json.loads(text)
    except ValueError:
        return None
    return header if isinstance(header, dict) else None


def _batches(file: Path, footer: Any, length_column: str) -> Iterator[Any]:
    schema = footer.schema.to_arrow_schema()
    if length_column not in schema.names:
        raise ManifestError(_missing_column(file, schema, length_column))
    wanted = [length_column, *(name for name in _FACTORS if name in schema.names and name != length_column)]
    batch_rows = _LIST_BATCH_ROWS if _is_list(schema.field(length_column).type) else _BATCH_ROWS
    with readable(file), pq.ParquetFile(file, metadata=footer) as parquet:
        yield from parquet.iter_batches(batch_size=batch_rows, columns=wanted)


def _missing_column(file: Path, schema: Any, length_column: str) -> str:
    usable = [
        field.name for field in schema if pa.types.is_integer(field.type) or _is_list(field.type)
    ]  # text columns need a tokenizer, thus `fcp manifest build`
    close = difflib.get_close_matches(length_column, usable, n=1) or [name for name in _USUAL_NAMES if name in usable]
    hint = f"pass --length-column {close[0]}" if close else "name one with --length-column, or run `fcp manifest build`"
    return f"{file} has no column {length_column!r}; its columns are {', '.join(schema.names)}; {hint}"


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _lengths(column: Any, file: Path, name: str, start: int) -> IntArray:
    kind = column.type
    if _is_list(kind):
        column = pc.list_value_length(column)
    elif pa.types.is_floating(kind):
        column = _whole_floats(column, file, name, start)
    elif not pa.types.is_integer(kind):
        raise ManifestError(
            f"{file}: column {name!r} is {kind}, not a length; name an integer or list column with --length-column, "
            "or run `fcp manifest build` to count tokens"
        )
    return _int64(pc.fill_null(column.cast(pa.int64(), safe=False), _NULL))


def _whole_floats(column: Any, file: Path, name: str, start: int) -> Any:
    """A float column that holds whole numbers, as pandas writes integers with gaps; NaN is a gap."""
    values = column.to_numpy(zero_copy_only=False).astype(np.float64)
    broken = np.flatnonzero(~np.isnan(values) & ((values != np.floor(values)) | (np.abs(values) > _LONGEST)))
    if len(broken):
        row = int(broken[0])
        raise ManifestError(
            f"{file}: row {start + row} of column {name!r} is {values[row]}, not a whole number of tokens"
        )
    return pa.array(np.where(np.isnan(values), 0, values).astype(np.int64), mask=np.isnan(values))


def _factor(column: Any, file: Path, name: str) -> FloatArray | IntArray:
    kind = column.type
    if name == "eta" and (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        floats: FloatArray = pc.fill_null(column.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
        return floats
    if name != "eta" and pa.types.is_integer(kind):
        return _int64(pc.fill_null(column.cast(pa.int64(), safe=False), 0))
    if pa.types.is_null(kind):
        return np.zeros(len(column), np.int64)
    raise ManifestError(
        f"{file}: column {name!r} is {kind}; it must be {'a number' if name == 'eta' else 'an integer'}"
    )


def _int64(column: Any) -> IntArray:
    values: IntArray = column.to_numpy(zero_copy_only=False)
    return values


def _record(line: str, number: int, length_column: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ManifestError(f"line {number} of standard input is not JSON: {line.strip()[:60]!r}") from error
    record = value if isinstance(value, dict) else {length_column: value}
    if length_column not in record:
        raise ManifestError(
            f"line {number} of standard input has no {length_column!r}; its keys are {', '.join(record)}; "
            "name one with --length-column"
        )
    return record


def _whole(value: Any, number: int, name: str) -> int:
    if isinstance(value, list):
        return len(value)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not whole or isinstance(value, bool) or abs(value) >= 2**63:
        raise ManifestError(f"line {number} of standard input: {name} is {value!r}, not a whole number of 64 bits")
    return int(value)


def _number(value: Any, number: int, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ManifestError(f"line {number} of standard input: {name} is {value!r}, not a number")
    return float(value)


def _checked(
    name: str, length_column: str, lengths: IntArray, factors: dict[str, FloatArray | IntArray]
) -> LengthTable:
    bad = np.flatnonzero((lengths <= 0) | (lengths > _LONGEST))
    if len(bad):
        raise ManifestError(_bad_length(name, length_column, lengths, bad))
    for column, values in factors.items():
        broken = np.flatnonzero(~((values >= 0) & np.isfinite(values)))
        if len(broken):
            row = int(broken[0])
            raise ManifestError(
                f"{name}: row {row} of column {column!r} is {values[row]}; it must be a finite number >= 0 "
                f"({_rows(len(broken))} in all)"
            )
    kept: dict[str, Any] = {column: values if values.any() else None for column, values in factors.items()}
    return LengthTable(name=name, length_tokens=lengths, **kept)


def _bad_length(name: str, length_column: str, lengths: IntArray, bad: IntArray) -> str:
    row, value = int(bad[0]), int(lengths[bad[0]])
    shown = "null" if value == _NULL else str(value)
    allowed = "lengths must be > 0 tokens" if value <= 0 else f"lengths must be at most {_LONGEST} tokens"
    every = "every row is such" if len(bad) == len(lengths) else f"{_rows(len(bad))} in all"
    return (
        f"{name}: row {row} of column {length_column!r} is {shown}; {allowed} ({every}); "
        "drop such rows or name another column with --length-column"
    )


def _rows(count: int) -> str:
    return f"{count} such row" + ("" if count == 1 else "s")
