"""Chat data: records of conversations in JSON, JSON lines, Parquet or Arrow, encoded by a checkpoint's own template."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fcp_cli.arrays import IntArray
from fcp_cli.manifest.sources.base import WHOLE, FileSpan, ItemGroup, Part, RowBatch, item_groups, names_below
from fcp_cli.manifest.sources.records import (
    BATCH_RECORDS,
    SourceRecord,
    has_lines,
    place_of,
    record_at,
    records_of,
    units_of,
)
from fcp_cli.manifest.table.header import LEARNED_COLUMN
from fcp_cli.manifest.tokenizing.chat import ChatEncoder, Encoded
from fcp_cli.reading.inputs import is_compressed

_BATCH_BYTES: Final = 8 << 20
_PART_RECORDS: Final = 1 << 12
_PART_BYTES: Final = 8 << 20


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
        start, stop = self.part.span(sum(map(units_of, self.files)))
        return stop - start

    @property
    def parts(self) -> int:
        if any(file.suffix == ".json" for file in self.files):
            return 1
        size = _PART_BYTES if has_lines(self.files[0]) else _PART_RECORDS
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
        return any(not has_lines(file) or is_compressed(file) for file in self.files)

    def batches(self) -> Iterator[RowBatch]:
        return map(self.count, self.groups())

    def groups(self) -> Iterator[ItemGroup]:
        def read(span: FileSpan) -> Iterator[tuple[SourceRecord, int]]:
            return ((found, found.done) for found in records_of(self.files[span.file], span.start, span.stop))

        sizes = [units_of(file) for file in self.files]
        return item_groups(self.part, sizes, read, most_items=BATCH_RECORDS, most_bytes=_BATCH_BYTES)

    def count(self, group: ItemGroup) -> RowBatch:
        records = group.items
        encoded = self.encoder.many([found.record for found in records], [found.place for found in records])
        return RowBatch(
            rows=_rows(records, encoded, group.shard, group.start),
            done=sum(found.done for found in records),
            largest_token=max((int(one.tokens.max()) for one in encoded if len(one.tokens)), default=-1),
            counted_ids=len(records),
            places=[found.place for found in records],
        )


def _rows(group: list[SourceRecord], encoded: list[Encoded], shard: int, start: int) -> Any:
    columns = {
        "id": np.arange(start, start + len(group)),
        "length": np.array([len(one.tokens) for one in encoded], np.int64),
        LEARNED_COLUMN: np.array([one.learned_tokens for one in encoded], np.int64),
        "shard": np.full(len(group), shard, np.int32),
        "record": np.array([found.at for found in group], np.int64),
    }
    return pa.record_batch({name: pa.array(values) for name, values in columns.items()})


class ChatTokens:
    """Random access to (tokens, labels) by manifest row."""

    def __init__(self, source: ChatData, shards: IntArray, records: IntArray, vocab_size: int) -> None:
        self._source = source
        self._shards = shards
        self._records = records
        self._lock = threading.Lock()
        self.vocab_size = vocab_size

    def __call__(self, row: int) -> tuple[IntArray, IntArray]:
        file, at = self._source.files[self._shards[row]], int(self._records[row])
        with self._lock:  # the tokenizer is not thread-safe
            encoded = self._source.encoder(record_at(file, at, self.place(row)), self.place(row))
        return encoded.tokens, encoded.labels

    def place(self, row: int) -> str:
        return place_of(self._source.files[self._shards[row]], int(self._records[row]))
