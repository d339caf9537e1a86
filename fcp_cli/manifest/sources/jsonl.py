"""JSON lines: one record is one sequence, its text or its token ids under one field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from fcp_cli.arrays import IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources.base import WHOLE, Part, RowBatch, grouped
from fcp_cli.manifest.tokenizer import Tokenizer, utf8
from fcp_cli.reading.documents import decode_record
from fcp_cli.reading.inputs import bounded_lines, open_input

_USUAL_FIELDS: Final = ("text", "input_ids", "tokens", "token_ids", "content")
_BATCH_LINES: Final = 16_384
_BATCH_BYTES: Final = 32 << 20
_PART_BYTES: Final = 8 << 20


class JsonLine(NamedTuple):
    """A line that is not blank.

    Attributes:
        place: of the line, for messages: FILE:NUMBER, or FILE at byte N if lines before it were not read.
        byte_offset: where it begins in its file.
        content: of the line, with its end.
    """

    place: str
    byte_offset: int
    content: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonLines:
    """Records of one or several `.jsonl` files.

    Attributes:
        path: the file, or the folder that holds `files`.
        files: the files, absolute, in the order of their rows.
        column: the field with a text (tokenized) or with a list of token ids (read unchanged).
        mask_column: the field that goes along as `mask`; "" for none.
        part: the lines that begin in this part of the bytes of all files; ids count from its first line.
    """

    path: Path
    files: tuple[Path, ...]
    column: str
    tokenizer: Tokenizer
    mask_column: str = ""
    part: Part = WHOLE

    @property
    def units(self) -> int | None:
        start, stop = self.part.span(sum(map(size_of, self.files)))
        return stop - start

    @property
    def parts(self) -> int:
        return -(-(self.units or 1) // _PART_BYTES)

    def only(self, part: Part) -> JsonLines:
        return replace(self, part=part)

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
        for span in self.part.files([size_of(file) for file in self.files]):
            sized = ((line, len(line.content)) for line in json_lines(self.files[span.file], span.start, span.stop))
            for lines in grouped(sized, most_items=_BATCH_LINES, most_bytes=_BATCH_BYTES):
                yield self._count(span.file, start, lines)
                start += len(lines)

    def _count(self, shard: int, start: int, lines: list[JsonLine]) -> RowBatch:
        values = [token_value(line.content, self.column, line.place) for line in lines]
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
            "byte_offset": pa.array([line.byte_offset for line in lines], pa.int64()),
        }
        if self.mask_column:
            columns["mask"] = self._masks(shard, lines)
        rows = pa.record_batch(columns)
        largest = max([*ids, -1])
        if is_text.any():
            largest = max(largest, self.tokenizer.vocab_size - 1)
        return RowBatch(
            rows=rows,
            done=sum(len(line.content) for line in lines),
            largest_token=largest,
            counted_ids=len(lines),
            places=[line.place for line in lines],
        )

    def _masks(self, shard: int, lines: list[JsonLine]) -> Any:
        values = [json_record(line.content, line.place).get(self.mask_column) for line in lines]
        try:
            return pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:  # numbers past 64 bits, halves of surrogates
            raise ManifestError(
                f"{self.files[shard]}: field {self.mask_column!r} holds values of several kinds, or none of a mask "
                f"({error}); correct the data"
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
    with suppress(ManifestError, StopIteration):  # counting the lines reports unreadable ones
        line = next(json_lines(file))
        record = json_record(line.content, line.place)
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
    """Parse the JSON object of one line; `place` names it in messages.

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


def json_lines(file: Path, start: int = 0, stop: int | None = None) -> Iterator[JsonLine]:
    """Yield every line that is not blank and begins at byte `start` or later, and before `stop`.

    Raises:
        ManifestError: the file cannot be read.
    """
    try:
        with open_input(file, seekable=start > 0) as stream:
            offset = start
            if start:  # the line that began before belongs to the part before
                stream.seek(start - 1)
                offset += len(next(bounded_lines(stream), b"")) - 1
            for number, line in enumerate(bounded_lines(stream), start=1):
                if stop is not None and offset >= stop:
                    break
                if line.strip():
                    yield JsonLine(f"{file} at byte {offset}" if start else f"{file}:{number}", offset, line)
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
