"""Read records of JSON lines, JSON lists, Parquet, Arrow and WebDataset tars, in order or by position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.columnar import DATA_SUFFIXES, open_shard, python_rows, table_rows
from fcp_cli.manifest.sources import LinePlace
from fcp_cli.manifest.text import json_lines, json_record, line_at, size_of
from fcp_cli.util.inputs import cached_by_file, open_input, read_records
from fcp_cli.util.tar import TarMember, tar_files

BATCH_RECORDS = 1 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRecord:
    """A record of a file.

    Attributes:
        record: its fields.
        place: location for messages.
        at: where to read it again: byte offset of its line in JSON lines, else its index in the file.
        done: source units read for it.
    """

    record: dict[str, Any]
    place: str
    at: int
    done: int


def records_of(
    file: Path, start: int = 0, stop: int | None = None, *, batch_rows: int = BATCH_RECORDS
) -> Iterator[SourceRecord]:
    """Yield the records of a file that begin in the range [`start`, `stop`) of its units.

    Args:
        file: JSON lines, one JSON list, Parquet or Arrow.
        start, stop: in bytes for lines, in rows for tables; ignored for a JSON list.
        batch_rows: rows of a table in memory at once.
    """
    if has_lines(file):
        for line in json_lines(file, start, stop):
            record = json_record(line.content, line.place)
            yield SourceRecord(record=record, place=line.place, at=line.byte_offset, done=line.done)
        return
    if file.suffix == ".json":  # a JSON list cannot be split
        records = read_records(file, error=ManifestError)
        share, rest = divmod(size_of(file), max(len(records), 1))
        for number, record in enumerate(records):
            done = share + (rest if number == 0 else 0)
            yield SourceRecord(record=record, place=place_of(file, number), at=number, done=done)
        return
    shard, number = open_shard(file), start
    for batch in shard.batches(list(shard.schema.names), batch_rows, start, stop):
        for record in python_rows(batch, file):
            yield SourceRecord(record=record, place=place_of(file, number), at=number, done=1)
            number += 1


def has_lines(file: Path) -> bool:
    """Return whether a file holds JSON lines, not a table or a JSON list."""
    return file.suffix not in (*DATA_SUFFIXES, ".json")


def place_of(file: Path, at: int) -> str:
    """Return the place of the record at `SourceRecord.at`, for messages."""
    if has_lines(file):
        return LinePlace(file, at)
    return f"{file}, record {at + 1}" if file.suffix == ".json" else f"{file}, row {at}"


def units_of(file: Path) -> int:
    """Return the units of a file, the total of `SourceRecord.done`: rows of a table, else bytes."""
    return int(open_shard(file).group_rows.sum()) if file.suffix in DATA_SUFFIXES else size_of(file)


def record_at(file: Path, at: int, place: str) -> dict[str, Any]:
    """Read a record again by its `SourceRecord.at`."""
    if has_lines(file):
        return json_record(line_at(file, at), place)
    if file.suffix == ".json":
        records = _cached_list(file)
        if at >= len(records):
            raise ManifestError(f"{place} is gone: {file} has {len(records)} records; build the manifest again")
        return records[at]
    rows = table_rows(file)
    return rows.record(at, rows.columns, place)


# Callers hold a lock.
_cached_list = cached_by_file(partial(read_records, error=ManifestError), maxsize=4)


def split_member(name: str) -> tuple[str, str]:
    """Split a member name into WebDataset's (key, suffix), at the first dot of the file name."""
    folder, _, file = name.rpartition("/")
    stem, dot, suffix = file.partition(".")
    return f"{folder}/{stem}" if folder else stem, f"{dot}{suffix}".lower()


def tar_samples(
    path: Path, start: int, add: Callable[[dict[str, Any], IO[bytes], TarMember, str], None]
) -> Iterator[tuple[dict[str, Any], str, int, int]]:
    """Yield the samples of a WebDataset tar: runs of files whose names agree up to the first dot.

    Args:
        path: the tar.
        start: byte offset of the first sample to read.
        add: adds a file to the fields of its sample.

    Yields:
        Fields, key, byte offset, and number of bytes up to the next sample.
    """
    key, sample, begun = "", dict[str, Any](), start
    try:
        with open_input(path, seekable=True) as stream:
            stream.seek(start)
            for member in tar_files(path, stream, error=ManifestError):
                name, suffix = split_member(member.name)
                if name != key and sample:
                    yield sample, key, begun, member.offset - begun
                    sample, begun = {}, member.offset
                key = name
                add(sample, stream, member, suffix)
            if sample:
                yield sample, key, begun, size_of(path) - begun
    except OSError as error:
        raise ManifestError(f"cannot read {path}: {error.strerror or error}") from error
