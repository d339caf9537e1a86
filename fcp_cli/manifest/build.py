"""Write a manifest from a source: rows are streamed, so memory stays constant, and the file is replaced atomically."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fcp_cli.errors import ManifestError, UsageError
from fcp_cli.files import replaced_atomically
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.sources.base import RowBatch, Source, place_of
from fcp_cli.manifest.table.checks import LONGEST_TOKENS
from fcp_cli.manifest.table.header import LEARNED_COLUMN, MANIFEST_FORMAT, METADATA_KEY, NOT_PARQUET
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.manifest.versions import file_versions, require_unchanged
from fcp_cli.parquet_writer import parquet_writer

_GROUP_ROWS: Final = 1 << 17
NO_ROWS: Final = pa.record_batch({"id": pa.array([], pa.int64()), "length": pa.array([], pa.int64())})


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltManifest:
    """A written manifest.

    Attributes:
        path: the manifest.
        table: lengths and work factors, read back from the file.
        source: the `source` entry of its header.
        skipped: number of dropped sequences by reason (`empty`: no tokens).
        unlearned: number of sequences without a trained token.
    """

    path: Path
    table: LengthTable
    source: dict[str, Any]
    skipped: dict[str, int]
    unlearned: int = 0

    @property
    def rows(self) -> int:
        """Return the number of sequences."""
        return len(self.table)


def build_manifest(source: Source, path: Path, *, advance: Callable[[int], None] = lambda done: None) -> BuiltManifest:
    """Count the sequences of `source` and write them to `path`.

    Args:
        source: sequences to count.
        path: the manifest; an existing one is replaced only once the new one is complete.
        advance: called with the number of source units (see `Source.units`) completed since the last call.

    Raises:
        UsageError: `path` has the suffix of another format.
        ManifestError: the source is unreadable or empty, a sequence is too long, or a file changed during the build.
        FcpError: the manifest cannot be written.
    """
    with replaced_atomically(_parquet(path)) as temporary:
        before = file_versions(source)
        with RowWriter(temporary) as writer:
            writer.add_all(source, advance)
            require_unchanged(source, before)
            description = source.describe()
            skipped = dict(+writer.skipped)  # without the reasons that never occurred
            if writer.rows == 0:
                reasons = "".join(f"; {count} skipped as {reason}" for reason, count in sorted(skipped.items()))
                raise ManifestError(f"{description['path']} holds no sequence with tokens{reasons}")
            if writer.largest_token >= 0:
                description["vocab_size"] = writer.largest_token + 1
            writer.finish({"format": MANIFEST_FORMAT, "source": description, "skipped": skipped})
        table = _read_back(temporary, path)
    return BuiltManifest(path=path, table=table, source=description, skipped=skipped, unlearned=writer.unlearned)


def _parquet(path: Path) -> Path:
    if path.suffix in NOT_PARQUET:
        raise UsageError(f"a manifest is a Parquet file, but {path} is read as another format: name it .parquet")
    return path


def _read_back(temporary: Path, path: Path) -> LengthTable:
    """Read the new manifest as `fcp plan` will, before it replaces the old one: after that, nothing may fail."""
    try:
        return replace(read_manifest(temporary), name=path.name)
    except ManifestError as error:
        message = str(error).replace(str(temporary), str(path)).replace(temporary.name, path.name)
        raise ManifestError(f"{message}; {path} is as it was") from error


def counted_batches(batches: Iterable[RowBatch], source: Source) -> Iterator[RowBatch]:
    """Yield the batches of a source without empty sequences, which are counted as skipped."""
    for batch in batches:
        lengths = batch.rows.column("length").to_numpy(zero_copy_only=False)
        bad = np.flatnonzero((lengths < 0) | (lengths > LONGEST_TOKENS))
        if len(bad):
            where = place_of(source, batch, int(bad[0]))
            tokens = lengths[bad[0]]
            raise ManifestError(f"{where} has {tokens} tokens; a plan holds 1 to {LONGEST_TOKENS}; fix or drop it")
        empty = int((lengths == 0).sum())
        if empty:
            skipped = {**batch.skipped, "empty": batch.skipped.get("empty", 0) + empty}
            batch = replace(batch, rows=batch.rows.filter(pa.array(lengths != 0)), skipped=skipped, places=())
        yield batch


class RowWriter:
    """Writes row groups of fixed size, however rows arrive, so that equal rows give equal bytes.

    Attributes:
        rows: number of rows written so far.
        skipped: number of dropped sequences by reason.
        largest_token: largest token id seen, or -1.
        unlearned: number of sequences without a trained token.
        counted_ids: sum of `RowBatch.counted_ids`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self._stack = ExitStack()
        self._pending: list[Any] = []
        self.rows = 0
        self.skipped: Counter[str] = Counter()
        self.largest_token = -1
        self.unlearned = 0
        self.counted_ids = 0

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def add_all(self, source: Source, advance: Callable[[int], None]) -> None:
        for batch in counted_batches(source.batches(), source):
            self.skipped.update(batch.skipped)
            self.largest_token = max(self.largest_token, batch.largest_token)
            self.counted_ids += batch.counted_ids
            if LEARNED_COLUMN in batch.rows.schema.names:
                self.unlearned += int((batch.rows.column(LEARNED_COLUMN).to_numpy() == 0).sum())
            self._add(batch.rows)
            advance(batch.done)

    def _add(self, rows: Any) -> None:
        while rows.num_rows:
            taken = rows.slice(0, _GROUP_ROWS - self.rows % _GROUP_ROWS)
            self._pending.append(taken)
            self.rows += taken.num_rows
            if self.rows % _GROUP_ROWS == 0:
                self._flush()
            rows = rows.slice(taken.num_rows)

    def finish(self, header: dict[str, Any]) -> None:
        if self._pending or self._file is None:
            self._flush()
        self._file.add_key_value_metadata({METADATA_KEY.decode(): json.dumps(header)})

    def _flush(self) -> None:
        # A single chunk per column: the writer ends a page where a chunk ends.
        table = pa.Table.from_batches(self._pending or [NO_ROWS]).combine_chunks()
        self._pending = []
        if self._file is None:
            self._file = self._stack.enter_context(parquet_writer(self._path, table.schema))
        self._file.write_table(table)
