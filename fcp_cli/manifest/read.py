"""Lengths read into flat arrays, from tables without a Python object per row or from text, and their statistics."""

from __future__ import annotations

import shlex
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.columnar import ARROW_SUFFIXES, CsvShard, DataFile, open_shard
from fcp_cli.manifest.mask_column import mask_rule
from fcp_cli.manifest.table import (
    FACTORS,
    LINE_SUFFIXES,
    LONGEST_TOKENS,
    NULL,
    TABLE_SUFFIXES,
    USUAL_LENGTHS,
    LengthTable,
    checked_table,
    empty_factors,
    is_list,
    length_column_of,
    manifest_files,
    manifest_source,
    new_column,
    read_footer,
    readable,
    release,
)
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.files import unused
from fcp_cli.util.inputs import bounded_lines, decode_record, open_input
from fcp_cli.util.kinds import another_kind
from fcp_cli.util.masks import MASK_COLUMN, MaskRows
from fcp_cli.util.parquet import open_parquet
from fcp_cli.util.validation import shown
from fcp_cli.util.words import nearest

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
    build = shlex.join(["fcp", "manifest", "build", str(file), "-o", unused("lengths.parquet")])
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


_STDIN: Final = "standard input"


def read_lengths_jsonl(
    stream: Iterable[str],
    *,
    length_column: str = "length",
    place: str = _STDIN,
    name: str = "stdin",
) -> LengthTable:
    """Read a sequence per line: a number of tokens, or an object with `length` and the optional columns.

    Blank lines are skipped. For a list, as the line or under `length_column`, the length is its number of items.

    Args:
        stream: the lines.
        length_column: key of the length; if the first object has no `length`, the default finds a usual name.
        place: source of the lines, for messages.
        name: the name of the table.
    """
    # Arrays of numbers: a list would hold an object for each of possibly millions of lengths.
    lengths, etas = array("q"), array("d")
    vision = {name: array("q") for name in FACTORS if name != "eta"}
    for number, line in _lines(stream, place):
        where = f"line {number} of {place}"
        record = _record(line, where, length_column)
        if not lengths:
            length_column = length_column_of(
                length_column, [key for key, value in record.items() if isinstance(value, int | list)]
            )
        if length_column not in record:
            raise ManifestError(_without_length(record, where, length_column, place))
        lengths.append(_whole(record[length_column], where, length_column))
        etas.append(_number(record.get("eta") or 0, where, "eta"))
        for factor, column in vision.items():
            column.append(_whole(record.get(factor) or 0, where, factor))
    if not lengths:
        raise ManifestError(
            f'{place} has no lines: write one length per line, for example {{"length": 4096}} '
            "(texts: `fcp manifest build`)"
        )
    factors: dict[str, FloatArray | IntArray] = {"eta": np.asarray(etas, np.float64)}
    factors |= {factor: np.asarray(column, np.int64) for factor, column in vision.items()}
    return checked_table(name, length_column, np.asarray(lengths, np.int64), factors)


def _lines(stream: Iterable[str], place: str) -> Iterable[tuple[int, str]]:
    try:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, line
    except UnicodeDecodeError as error:
        raise ManifestError(f"{place} is not UTF-8 text; write one JSON value per line") from error


def _record(line: str, where: str, length_column: str) -> dict[str, Any]:
    try:
        value = decode_record(line)
    except ValueError as error:
        raise ManifestError(
            f"{where} is not JSON: {line.strip()[:60]!r}; write one length per line (texts: `fcp manifest build`)"
        ) from error
    return value if isinstance(value, dict) else {length_column: value}


def _without_length(record: dict[str, Any], where: str, length_column: str, place: str) -> str:
    missing = f"{where} has no {length_column!r}; its keys are {', '.join(record)}; name one with --length-column"
    if place == _STDIN or not any(isinstance(value, str | list) for value in record.values()):
        return missing
    build = shlex.join(["fcp", "manifest", "build", place, "-o", unused("lengths.parquet")])
    return f"{missing}, or count the tokens of texts with `{build}` (and --tokenizer)"


def _whole(value: Any, where: str, name: str) -> int:
    if isinstance(value, list):
        return len(value)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not whole or isinstance(value, bool) or abs(value) >= 2**63:
        raise ManifestError(f"{where}: {name} is {shown(value)}, not a whole number of 64 bits")
    return int(value)


def _number(value: Any, where: str, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ManifestError(f"{where}: {name} is {shown(value)}, not a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ManifestError(f"{where}: {name} is {shown(value)}, too large a number") from error


# Columns that count what a row has of pictures -> noun of what is counted.
PICTURE_COUNTS: Final = {"num_images": "image", "num_videos": "video", "vision_patches": "patch"}
PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Sequences with `from_tokens` <= length < `to_tokens`; bounds are consecutive powers of two."""

    from_tokens: int
    to_tokens: int
    sequences: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestSummary:
    """Statistics of a manifest.

    Attributes:
        percentiles: length in tokens at each of `PERCENTILES`, as an actual length of the manifest (nearest rank).
        longest_percent_token_share: share of tokens in the longest 1 % of sequences (at least one sequence).
        bins: histogram from the shortest to the longest length, without gaps.
    """

    rows: int
    tokens: int
    min_tokens: int
    mean_tokens: float
    max_tokens: int
    percentiles: dict[float, int]
    longest_percent_token_share: float
    bins: tuple[Bin, ...]

    def as_json(self) -> dict[str, Any]:
        """Return a flat document for `--json`."""
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "length_tokens": {"min": self.min_tokens, "mean": self.mean_tokens, "max": self.max_tokens}
            | {f"p{percentile:g}": length for percentile, length in self.percentiles.items()},
            "longest_percent_token_share": self.longest_percent_token_share,
            "histogram": [
                {"from_tokens": b.from_tokens, "to_tokens": b.to_tokens, "sequences": b.sequences, "tokens": b.tokens}
                for b in self.bins
            ],
        }


def summarize(table: LengthTable) -> ManifestSummary:
    """Summarize all rows; sorts a copy of the lengths."""
    lengths = np.sort(table.length_tokens)
    rows, tokens = len(lengths), int(lengths.sum())
    longest = lengths[rows - max(1, rows // 100) :]
    return ManifestSummary(
        rows=rows,
        tokens=tokens,
        min_tokens=int(lengths[0]),
        mean_tokens=tokens / rows,
        max_tokens=int(lengths[-1]),
        percentiles={p: int(lengths[max(0, int(np.ceil(p / 100 * rows)) - 1)]) for p in PERCENTILES},
        longest_percent_token_share=int(longest.sum()) / tokens,
        bins=_bins(lengths),
    )


def count_pictures(path: Path) -> dict[str, int]:
    """Return the images, videos and patches of all rows of a manifest; empty if it was built without them."""
    if path.suffix != ".parquet" or not path.is_file():
        return {}
    with readable(path):
        file = open_parquet(path)
        names = [name for name in PICTURE_COUNTS if name in file.schema_arrow.names]
        if "num_images" not in names:
            return {}
        counts = dict.fromkeys(names, 0)
        for batch in file.iter_batches(columns=names):  # all rows at once would take memory that grows with the data
            for name in names:
                counts[name] += int(pc.sum(batch.column(name)).as_py() or 0)
        return counts


def _bins(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[Bin, ...]:
    """Histogram ascending lengths over powers of two."""
    first, last = int(lengths[0]).bit_length() - 1, int(lengths[-1]).bit_length()
    edges = [1 << power for power in range(first, last + 1)]
    cuts = np.searchsorted(lengths, edges)
    return tuple(
        Bin(
            from_tokens=edges[i],
            to_tokens=edges[i + 1],
            sequences=int(cuts[i + 1] - cuts[i]),
            tokens=int(lengths[cuts[i] : cuts[i + 1]].sum()),
        )
        for i in range(len(edges) - 1)
    )
