"""JSON lines: one record is one sequence, its text or its token ids under one field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fcp_cli.arrays import IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources.base import RowBatch, grouped
from fcp_cli.manifest.tokenizer import Tokenizer, utf8
from fcp_cli.reading.documents import decode_record
from fcp_cli.reading.inputs import bounded_lines, open_input

_USUAL_FIELDS: Final = ("text", "input_ids", "tokens", "token_ids", "content")
_BATCH_LINES: Final = 16_384
_BATCH_BYTES: Final = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonLines:
    """Records of one or several `.jsonl` files.

    Attributes:
        path: the file, or the folder that holds `files`.
        files: the files, absolute, in the order of their rows.
        column: the field with a text (tokenized) or with a list of token ids (read unchanged).
        mask_column: the field that goes along as `mask`; "" for none.
    """

    path: Path
    files: tuple[Path, ...]
    column: str
    tokenizer: Tokenizer
    mask_column: str = ""

    @property
    def units(self) -> int | None:
        return sum(size_of(file) for file in self.files)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "jsonl",
            "path": str(self.path),
            "files": [file.name for file in self.files],
            "column": self.column,
            "tokenizer": self.tokenizer.name,
        }

    def batches(self) -> Iterator[RowBatch]:
        start = 0
        for shard, file in enumerate(self.files):
            for lines in grouped(json_lines(file), most_items=_BATCH_LINES, most_bytes=_BATCH_BYTES):
                yield self._count(file, shard, start, lines)
                start += len(lines)

    def _count(self, file: Path, shard: int, start: int, lines: list[tuple[int, int, bytes]]) -> RowBatch:
        values = [token_value(line, self.column, f"{file}:{number}") for number, _, line in lines]
        is_text = np.array([isinstance(value, bytes) for value in values])
        lengths = np.zeros(len(values), np.int64)
        lengths[~is_text] = [len(value) for value in values if not isinstance(value, bytes)]
        lengths[is_text] = self.tokenizer.count(
            pa.array([value for value in values if isinstance(value, bytes)], pa.large_binary())
        )
        ids = [int(value.max()) for value in values if not isinstance(value, bytes) and len(value)]
        columns = {
            "id": pa.array(range(start, start + len(lines)), pa.int64()),
            "length": pa.array(lengths),
            "shard": pa.array([shard] * len(lines), pa.int32()),
            "byte_offset": pa.array([offset for _, offset, _ in lines], pa.int64()),
        }
        if self.mask_column:
            columns["mask"] = self._masks(file, lines)
        rows = pa.record_batch(columns)
        largest = max([*ids, -1])
        if is_text.any():
            largest = max(largest, self.tokenizer.vocab_size - 1)
        return RowBatch(rows=rows, done=sum(len(line) for _, _, line in lines), largest_token=largest)

    def _masks(self, file: Path, lines: list[tuple[int, int, bytes]]) -> Any:
        values = [json_record(line, f"{file}:{number}").get(self.mask_column) for number, _, line in lines]
        try:
            return pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:  # numbers past 64 bits, halves of surrogates
            raise ManifestError(
                f"{file}: field {self.mask_column!r} holds values of several kinds, or none of a mask ({error}); "
                "correct the data"
            ) from error


class JsonLinesTokens:
    """Reads one line again by its byte offset."""

    def __init__(self, source: JsonLines, shards: IntArray, byte_offsets: IntArray, vocab_size: int) -> None:
        self._source = source
        self._shards = shards
        self._byte_offsets = byte_offsets
        self.vocab_size = vocab_size

    def __call__(self, row: int) -> IntArray:
        line = line_at(self._source.files[self._shards[row]], int(self._byte_offsets[row]))
        value = token_value(line, self._source.column, self.place(row))
        return self._source.tokenizer.encode(value) if isinstance(value, bytes) else value

    def place(self, row: int) -> str:
        return f"{self._source.files[self._shards[row]]} at byte {self._byte_offsets[row]}"


def usual_field(file: Path) -> str:
    """Return the field of the first record with token ids or a text under a usual name, else `text`."""
    with suppress(ManifestError, StopIteration):  # counting the lines reports what cannot be read
        (number, _, line), _ = next(json_lines(file))
        record = json_record(line, f"{file}:{number}")
        return next((name for name in _USUAL_FIELDS if isinstance(record.get(name), str | list)), _USUAL_FIELDS[0])
    return _USUAL_FIELDS[0]


def token_value(line: bytes, column: str, place: str) -> bytes | IntArray:
    """Return the text of a record as UTF-8 bytes, or its token ids; a null is an empty text.

    Raises:
        ManifestError: the line is not a JSON object, or the field is missing or holds something else.
    """
    record = json_record(line, place)
    if column not in record:
        raise ManifestError(
            f"{place} has no field {column!r}; its fields are {', '.join(record)}; name one with --column"
        )
    value = record[column]
    if value is None or isinstance(value, str):
        return utf8(value or "")
    tokens = _token_ids(value)
    if tokens is None:
        raise ManifestError(
            f"{place}: field {column!r} holds neither a text nor a flat list of token ids but {str(value)[:40]!r}; "
            "name another with --column"
        )
    return tokens


def _token_ids(value: Any) -> IntArray | None:
    if not isinstance(value, list):
        return None
    try:
        tokens = np.asarray(value or np.empty(0, np.int64))
    except ValueError:  # lists of several lengths inside
        return None
    return tokens.astype(np.int64) if tokens.ndim == 1 and tokens.dtype.kind in "iu" else None


def json_record(line: bytes, place: str) -> dict[str, Any]:
    """Parse the JSON object of one line.

    Raises:
        ManifestError: it is none.
    """
    try:
        record = decode_record(line)
    except ValueError as error:
        raise ManifestError(f"{place} is not JSON: {line.strip()[:60]!r}") from error
    if not isinstance(record, dict):
        raise ManifestError(f"{place} is not a JSON object but a {type(record).__name__}")
    return record


def json_lines(file: Path) -> Iterator[tuple[tuple[int, int, bytes], int]]:
    """Yield line number, byte offset and content of every line that is not blank, with its size."""
    offset = 0
    try:
        with open_input(file) as stream:
            for number, line in enumerate(bounded_lines(stream), start=1):
                if line.strip():
                    yield (number, offset, line), len(line)
                offset += len(line)
    except OSError as error:
        raise ManifestError(f"cannot read {file}: {error.strerror or error}") from error


def line_at(file: Path, byte_offset: int) -> bytes:
    """Read the line that begins at a byte.

    Raises:
        ManifestError: the file cannot be read.
    """
    try:
        with open_input(file, seekable=True) as stream:
            stream.seek(byte_offset)
            return next(bounded_lines(stream), b"")
    except OSError as error:
        raise ManifestError(f"cannot read {file}: {error.strerror or error}") from error


def size_of(file: Path) -> int:
    """Return the bytes of a file.

    Raises:
        ManifestError: it cannot be read.
    """
    try:
        return file.stat().st_size
    except OSError as error:
        raise ManifestError(f"cannot read {file}: {error.strerror or error}") from error
