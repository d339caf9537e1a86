"""Text sources: folders whose files are sequences, in name order, and JSON lines whose records are sequences."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import pyarrow as pa

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources import (
    WHOLE,
    LinePlace,
    Part,
    RowBatch,
    Source,
    grouped,
    item_groups,
    names_below,
)
from fcp_cli.manifest.tokenizer import ByteTokenizer, Tokenizer, utf8
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.inputs import (
    bounded_lines,
    cached_by_file,
    decode_record,
    is_compressed,
    open_input,
    open_records,
    open_unpacked,
    stored_bytes_read,
)
from fcp_cli.util.remote import RemotePath, remembered_size
from fcp_cli.util.tar import tar_files

_SNIFF_BYTES: Final = 8192  # a NUL byte in here marks a binary file, as in git and grep
_BATCH_FILES: Final = 1024
_FILES_BATCH_BYTES: Final = 32 << 20
_MOST_TEXT_BYTES: Final = 1 << 31  # a sequence length has 32 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTree(Source):
    """Text files under `root`; skips hidden names, binary files and links to folders.

    Attributes:
        include: globs of files to read; one with a slash is matched with the path below `root`, else with the name.
        exclude: globs of files and folders to skip, matched in the same way.
        output: absolute path of the manifest being written, which is skipped.
    """

    files = ()
    root: Path
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    tokenizer: Tokenizer
    output: Path | None = None

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "text",
            "path": str(self.root),
            "tokenizer": self.tokenizer.name,
            "include": list(self.include),
            "exclude": list(self.exclude),
            "vocab_size": self.tokenizer.vocab_size,
        }

    def batches(self) -> Iterator[RowBatch]:
        for names in grouped(self._files(self.root, ""), most_items=_BATCH_FILES, most_bytes=_FILES_BATCH_BYTES):
            yield self._count(names)

    def _count(self, names: list[str]) -> RowBatch:
        if isinstance(self.tokenizer, ByteTokenizer):
            sizes = [(name, _text_bytes(self.root / name)) for name in names]
            kept = [(name, size) for name, size in sizes if size >= 0]
            lengths = pa.array([size for _, size in kept], pa.int64())
        else:
            texts = [(name, _read(self.root / name)) for name in names]
            kept = [(name, len(text)) for name, text in texts if not _is_binary(text)]
            contents = pa.array([text for _, text in texts if not _is_binary(text)], pa.large_binary())
            lengths = pa.array(self.tokenizer.count(contents))
        ids = pa.array([name for name, _ in kept], pa.string())
        rows = pa.record_batch({"id": ids, "length": lengths})
        return RowBatch(rows=rows, done=len(names), skipped={"binary": len(names) - len(kept)})

    def _files(self, folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield paths below `root`, with file sizes in bytes."""
        with _naming(folder):
            found: Iterable[Any] = folder.iterdir() if isinstance(folder, RemotePath) else os.scandir(folder)
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            name, path = prefix + entry.name, folder / entry.name
            if entry.name.startswith(".") or path == self.output or _matches(name, self.exclude):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._files(path, f"{name}/")
            elif entry.is_file() and _matches(name, self.include):
                with _naming(path):
                    name.encode("utf-8")  # raises if the name is not UTF-8: the manifest could not store it
                    yield name, entry.stat().st_size


class TextTokens:
    """Random access to the tokens of text files; `ids` are paths below `root`."""

    def __init__(self, root: Path, ids: Any, tokenizer: Tokenizer) -> None:
        self._root = root
        self._ids = ids
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size

    def __call__(self, row: int) -> IntArray:
        return self._tokenizer.encode(_read(self._root / self._ids[int(row)].as_py()))

    def place(self, row: int) -> str:
        return str(self._root / self._ids[int(row)].as_py())


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    base = name.rsplit("/", 1)[-1]
    return any(fnmatch(name if "/" in glob else base, glob) for glob in globs)


def _text_bytes(path: Path) -> int:
    """Return the size of a text file, or -1 for a binary one, reading only its first bytes."""
    with _naming(path), open_input(path) as file:
        return -1 if _is_binary(file.read(_SNIFF_BYTES)) else path.stat().st_size


def _is_binary(text: bytes) -> bool:
    return b"\0" in text[:_SNIFF_BYTES]


def _read(path: Path) -> bytes:
    with _naming(path), open_input(path, most_bytes=_MOST_TEXT_BYTES) as file:
        return file.read()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeEncodeError as error:
        raise ManifestError(
            f"{str(path)!a} has a name that is not UTF-8; rename it or exclude it with --exclude"
        ) from error


_USUAL_FIELDS: Final = ("text", "input_ids", "tokens", "token_ids", "content")
LINE_SUFFIXES: Final = (".jsonl", ".ndjson")
_BATCH_LINES: Final = 16_384
_LINES_BATCH_BYTES: Final = 4 << 20
_PART_BYTES: Final = 8 << 20


class JsonLine(NamedTuple):
    """A line that is not blank.

    Attributes:
        place: the place of the line, for messages: FILE:NUMBER, or FILE at byte N in a tar.
        byte_offset: its byte offset in its file, or in the content of a compressed one.
        content: the bytes of the line, with its end.
        done: bytes of the file that were read for it.
    """

    place: str
    byte_offset: int
    content: bytes
    done: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonLines(Source):
    """Records of one or several `.jsonl` files, compressed or not, or of the `.jsonl` members of tars.

    Attributes:
        path: the file, or the folder that holds `files`.
        files: absolute paths, in row order.
        column: field with a text (tokenized) or a list of token ids (used as is).
        mask_column: field copied as `mask`; "" for none.
        part: lines that begin in this part of the bytes of all files; ids count from its first line.
    """

    is_divisible = True
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

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "jsonl",
            "path": str(self.path),
            "files": names_below(self.path, self.files),
            "column": self.column,
            "tokenizer": self.tokenizer.name,
        }

    @property
    def is_streamed(self) -> bool:
        return any(map(is_compressed, self.files))

    def groups(self) -> Iterator[tuple[int, int, list[JsonLine]]]:
        def read(file: int, start: int, stop: int) -> Iterator[tuple[JsonLine, int]]:
            return ((line, len(line.content)) for line in json_lines(self.files[file], start, stop))

        sizes = [size_of(file) for file in self.files]
        return item_groups(self.part, sizes, read, most_items=_BATCH_LINES, most_bytes=_LINES_BATCH_BYTES)

    def count(self, group: tuple[int, int, list[JsonLine]]) -> RowBatch:
        shard, start, lines = group
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
            done=sum(line.done for line in lines),
            largest_token=largest,
            counted_ids=len(lines),
            places=[line.place for line in lines],
        )

    def _masks(self, shard: int, lines: list[JsonLine]) -> Any:
        values = [json_record(line.content, line.place).get(self.mask_column) for line in lines]
        try:
            return pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:  # integers beyond 64 bits, lone surrogates
            raise ManifestError(
                f"{self.files[shard]}: field {self.mask_column!r} holds values of several kinds, or none of a mask "
                f"({error}); correct the data"
            ) from error


class JsonLinesTokens:
    """Random access to tokens, by the byte offset of each line."""

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
        return LinePlace(self._source.files[self._shards[row]], int(self._byte_offsets[row]))


def usual_field(file: Path) -> str:
    """Return the common field name under which the first record has token ids or a text, else `text`."""
    with suppress(ManifestError, StopIteration):  # errors are reported when the lines are counted
        line = next(json_lines(file))
        record = json_record(line.content, line.place)
        return next((name for name in _USUAL_FIELDS if isinstance(record.get(name), str | list)), _USUAL_FIELDS[0])
    return _USUAL_FIELDS[0]


def token_value(line: bytes, column: str, place: str) -> bytes | IntArray:
    """Return the text of a record as UTF-8 bytes, or its token ids; null is an empty text.

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
    except ValueError:  # ragged nested lists
        return None
    return tokens.astype(np.int64) if tokens.ndim == 1 and tokens.dtype.kind in "iu" else None


def json_record(line: bytes, place: str) -> dict[str, Any]:
    """Parse the JSON object of one line; `place` names it in messages.

    Raises:
        ManifestError: the line is not a JSON object.
    """
    try:
        record = decode_record(line)
    except ValueError as error:
        raise ManifestError(f"{place} is not JSON: {line.strip()[:60]!r}") from error
    if not isinstance(record, dict):
        raise ManifestError(f"{place} is not a JSON object but a {type(record).__name__}")
    return record


def json_lines(file: Path, start: int = 0, stop: int | None = None) -> Iterator[JsonLine]:
    """Yield each non-blank line that begins in the byte range [`start`, `stop`).

    Lines of a compressed file all count as beginning at byte 0. Of a tar, only members with JSON lines are read.

    Raises:
        ManifestError: the file cannot be read.
    """
    if is_compressed(file):
        if start:
            return
        stop = None
    try:
        with open_records(file, seekable=start > 0) as stream:
            if file.suffix != ".tar":
                yield from _lines_between(file, stream, start, stop)
                return
            for first, end in line_members(file):
                if end > start and (stop is None or first < stop):
                    stream.seek(first)
                    yield from _lines_between(file, stream, start, stop, member=(first, end))
    except OSError as error:
        raise ManifestError(f"cannot read {file}: {error.strerror or error}") from error


def _lines_between(
    file: Path, stream: BinaryIO, start: int, stop: int | None, *, member: tuple[int, int] | None = None
) -> Iterator[JsonLine]:
    offset, end = member or (0, None)
    if start > offset:  # a line that began earlier belongs to the preceding part
        stream.seek(start - 1)
        offset = start + len(next(bounded_lines(stream), b"")) - 1
    is_packed = is_compressed(file)
    packed = stored_bytes_read(stream) if is_packed else 0
    for number, line in enumerate(bounded_lines(stream), start=1):
        if (stop is not None and offset >= stop) or (end is not None and offset >= end):
            break
        content = line if end is None else line[: end - offset]
        done = len(content)
        if is_packed:
            done = stored_bytes_read(stream) - packed
            packed += done
        if content.strip():
            place = LinePlace(file, offset) if start or member else f"{file}:{number}"
            yield JsonLine(place, offset, content, done)
        offset += len(content)


def _line_members(tar: Path) -> list[tuple[int, int]]:
    with open_input(tar, seekable=True) as stream:
        members = list(tar_files(tar, stream, error=ManifestError))
    lines = [member for member in members if member.name.endswith(LINE_SUFFIXES)]
    return [(member.offset_data, member.offset_data + member.size) for member in lines]


# Byte spans of a tar's JSON-lines members, cached: each part of the tar needs them.
line_members = cached_by_file(_line_members, maxsize=1024)


def holds_lines(tar: Path) -> bool:
    """Return whether the first file of a tar holds JSON lines; False if the tar is unreadable."""
    with suppress(OSError, ManifestError), open_input(tar, seekable=True) as stream:
        return next((m.name.endswith(LINE_SUFFIXES) for m in tar_files(tar, stream, error=ManifestError)), False)
    return False


def line_at(file: Path, byte_offset: int) -> bytes:
    """Read the line at a byte offset.

    Raises:
        ManifestError: the file cannot be read.
    """
    try:
        with open_unpacked(file, byte_offset) if is_compressed(file) else open_input(file, seekable=True) as stream:
            if not is_compressed(file):
                stream.seek(byte_offset)
            line = next(bounded_lines(stream), b"")
        if file.suffix == ".tar":
            stop = next((stop for start, stop in line_members(file) if start <= byte_offset < stop), byte_offset)
            return line[: stop - byte_offset]
        return line
    except OSError as error:
        raise ManifestError(f"cannot read {file}: {error.strerror or error}") from error


def size_of(file: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        ManifestError: the file cannot be read.
    """
    try:
        return remembered_size(file) if isinstance(file, RemotePath) else file.stat().st_size
    except OSError as error:
        raise ManifestError(f"cannot read {file}: {error.strerror or error}") from error
