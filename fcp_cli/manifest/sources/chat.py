"""Chat data: records of conversations in JSON, JSON lines, Parquet or Arrow, encoded by a checkpoint's own template."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from fcp_cli.arrays import IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources.base import WHOLE, Part, RowBatch, grouped, names_below
from fcp_cli.manifest.sources.jsonl import json_lines, json_record, line_at, size_of
from fcp_cli.manifest.sources.shards import ARROW_SUFFIXES, PARQUET_SUFFIXES, DataFile, open_shard, python_rows
from fcp_cli.manifest.table.header import LEARNED_COLUMN
from fcp_cli.manifest.tokenizing.chat import ChatEncoder, Encoded
from fcp_cli.reading.documents import read_records
from fcp_cli.reading.inputs import cached_by_file, is_compressed

_BATCH_RECORDS: Final = 1 << 10
_BATCH_BYTES: Final = 8 << 20
_PART_RECORDS: Final = 1 << 12
_PART_BYTES: Final = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRecord:
    """One record of a file.

    Attributes:
        record: its fields.
        place: the place where it is, for messages.
        at: the at where to find it again: the byte of its line in JSON lines, else its number in the file, from 0.
        done: units of the source that it took.
    """

    record: dict[str, Any]
    place: str
    at: int
    done: int


class RecordGroup(NamedTuple):
    """Consecutive records of file number `shard`; the first is number `start` of the part."""

    shard: int
    start: int
    records: list[ChatRecord]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatData:
    """Files of chat records.

    Attributes:
        path: the file, or the folder that holds `files`, absolute.
        files: the files in the order of their rows.
        part: the records that begin in this part of the units of all files; ids count from its first record.
    """

    path: Path
    files: tuple[Path, ...]
    encoder: ChatEncoder
    part: Part = WHOLE

    @property
    def units(self) -> int | None:
        start, stop = self.part.span(sum(map(_units, self.files)))
        return stop - start

    @property
    def parts(self) -> int:
        if any(file.suffix == ".json" for file in self.files):
            return 1
        size = _PART_BYTES if _is_lines(self.files[0]) else _PART_RECORDS
        return -(-(self.units or 1) // size)

    def only(self, part: Part) -> ChatData:
        return replace(self, part=part)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "chat",
            "path": str(self.path),
            "files": names_below(self.path, self.files),
            "tokenizer": str(self.encoder.folder),
            "train_on": self.encoder.train_on,
        }

    @property
    def is_streamed(self) -> bool:
        return any(not _is_lines(file) or is_compressed(file) for file in self.files)

    def batches(self) -> Iterator[RowBatch]:
        return map(self.count, self.groups())

    def groups(self) -> Iterator[RecordGroup]:
        start = 0
        for shard, *span in self.part.files([_units(file) for file in self.files]):
            sized = ((found, found.done) for found in chat_records(self.files[shard], *span))
            for group in grouped(sized, most_items=_BATCH_RECORDS, most_bytes=_BATCH_BYTES):
                yield RecordGroup(shard, start, group)
                start += len(group)

    def count(self, group: RecordGroup) -> RowBatch:
        records = group.records
        encoded = self.encoder.many([found.record for found in records], [found.place for found in records])
        return RowBatch(
            rows=_rows(records, encoded, group.shard, group.start),
            done=sum(found.done for found in records),
            largest_token=max((int(one.tokens.max()) for one in encoded if len(one.tokens)), default=-1),
            counted_ids=len(records),
            places=[found.place for found in records],
        )


def _rows(group: list[ChatRecord], encoded: list[Encoded], shard: int, start: int) -> Any:
    columns = {
        "id": np.arange(start, start + len(group)),
        "length": np.array([len(one.tokens) for one in encoded], np.int64),
        LEARNED_COLUMN: np.array([one.learned_tokens for one in encoded], np.int64),
        "shard": np.full(len(group), shard, np.int32),
        "record": np.array([found.at for found in group], np.int64),
    }
    return pa.record_batch({name: pa.array(values) for name, values in columns.items()})


class ChatTokens:
    """Random access to the records by manifest row; gives tokens and labels."""

    def __init__(self, source: ChatData, shards: IntArray, records: IntArray, vocab_size: int) -> None:
        self._source = source
        self._shards = shards
        self._records = records
        self._lock = threading.Lock()
        self.vocab_size = vocab_size

    def __call__(self, row: int) -> tuple[IntArray, IntArray]:
        file, at = self._source.files[self._shards[row]], int(self._records[row])
        with self._lock:  # the tokenizer is none of several threads
            encoded = self._source.encoder(record_at(file, at, self.place(row)), self.place(row))
        return encoded.tokens, encoded.labels

    def place(self, row: int) -> str:
        file = self._source.files[self._shards[row]]
        return f"{file} at {'byte' if _is_lines(file) else 'record'} {self._records[row]}"


def chat_records(file: Path, start: int = 0, stop: int | None = None) -> Iterator[ChatRecord]:
    """Yield the records of one file that begin at its unit `start` or later, and before `stop`."""
    if _is_lines(file):
        for line in json_lines(file, start, stop):
            record = json_record(line.content, line.place)
            yield ChatRecord(record=record, place=line.place, at=line.byte_offset, done=line.done)
        return
    if file.suffix == ".json":  # one list, read whole: no part of it begins elsewhere
        records = _json_list(file)
        share, rest = divmod(size_of(file), max(len(records), 1))
        for number, record in enumerate(records):
            done = share + (rest if number == 0 else 0)
            yield ChatRecord(record=record, place=f"{file}, record {number + 1}", at=number, done=done)
        return
    shard, number = open_shard(file), start
    for batch in shard.batches(list(shard.schema.names), _BATCH_RECORDS, start, stop):
        for record in python_rows(batch, file):
            yield ChatRecord(record=record, place=f"{file}, row {number}", at=number, done=1)
            number += 1


def _is_lines(file: Path) -> bool:
    return file.suffix not in (*PARQUET_SUFFIXES, *ARROW_SUFFIXES, ".json")


def _units(file: Path) -> int:
    if file.suffix in (*PARQUET_SUFFIXES, *ARROW_SUFFIXES):
        return int(open_shard(file).group_rows.sum())
    return size_of(file)


def record_at(file: Path, at: int, place: str) -> dict[str, Any]:
    """Read one record again, from where `ChatRecord.at` says."""
    if _is_lines(file):
        return json_record(line_at(file, at), place)
    if file.suffix == ".json":
        records = _cached_list(file)
        if at >= len(records):
            raise ManifestError(f"{place} is gone: {file} has {len(records)} records; build the manifest again")
        return records[at]
    return _cached_table(file).record(at, place)


def _json_list(file: Path) -> list[dict[str, Any]]:
    return read_records(file, error=ManifestError)


class _Table:
    """Rows of a Parquet or Arrow file, a group at a time."""

    def __init__(self, file: Path) -> None:
        self._shard: DataFile = open_shard(file)
        self._group = lru_cache(maxsize=4)(self._read)

    @cached_property
    def _ends(self) -> IntArray:
        return np.cumsum(self._shard.group_rows, dtype=np.int64)

    def record(self, at: int, place: str) -> dict[str, Any]:
        group = int(np.searchsorted(self._ends, at, side="right"))
        if group == len(self._ends):
            raise ManifestError(f"{place} is gone: the file has {self._ends[-1]} rows; build the manifest again")
        columns = self._group(group)
        # Groups are known by where they end, so the row counts from the end of its group.
        return {name: values[at - int(self._ends[group]) + len(values)].as_py() for name, values in columns.items()}

    def _read(self, group: int) -> dict[str, Any]:
        return {name: self._shard.read_group(group, name) for name in self._shard.schema.names}


# One process reads the files of one data set; callers hold a lock.
_cached_list = cached_by_file(_json_list, maxsize=4)
_cached_table = cached_by_file(_Table, maxsize=64)
