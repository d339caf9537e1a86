"""Writes a manifest from a source: streamed, so that memory does not grow with the rows, and whole or not at all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fcp_cli.errors import ManifestError, UsageError
from fcp_cli.files import replaced_atomically
from fcp_cli.manifest.checks import LONGEST_TOKENS
from fcp_cli.manifest.header import LEARNED_COLUMN, MANIFEST_FORMAT, METADATA_KEY, NOT_PARQUET
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.sources.base import RowBatch, Source
from fcp_cli.manifest.table import LengthTable
from fcp_cli.parquet_writer import parquet_writer

_GROUP_ROWS: Final = 1 << 17


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltManifest:
    """A written manifest.

    Attributes:
        path: the manifest.
        table: its lengths and work factors, read back from the file.
        source: its recorded source.
        skipped: dropped sequences, by reason (`empty`: no tokens).
        unlearned: sequences in it of which no token is learned.
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
        path: the manifest; it is replaced only once the new one is whole.
        advance: called with the units of the source (see `Source.units`) that were done since the last call.

    Raises:
        UsageError: `path` has the suffix of another format.
        ManifestError: the source cannot be read, holds no sequence, or one that no plan can hold.
        FcpError: the manifest cannot be written.
    """
    if path.suffix in NOT_PARQUET:
        raise UsageError(f"a manifest is a Parquet file, which {path} would not be read as; name it .parquet with -o")
    skipped: Counter[str] = Counter()
    largest_token, unlearned = -1, 0
    with replaced_atomically(path) as temporary:
        with _Writer(temporary) as writer:
            for batch in source.batches():
                rows = _kept(batch, source)
                skipped.update(batch.skipped)
                skipped["empty"] += batch.rows.num_rows - rows.num_rows
                largest_token = max(largest_token, batch.largest_token)
                if LEARNED_COLUMN in rows.schema.names:
                    unlearned += int((rows.column(LEARNED_COLUMN).to_numpy() == 0).sum())
                writer.add(rows)
                advance(batch.done)
            skipped = +skipped  # without the reasons that never occurred
            description = source.describe()
            if writer.rows == 0:
                reasons = "".join(f"; {count} skipped as {reason}" for reason, count in sorted(skipped.items()))
                raise ManifestError(f"{description['path']} holds no sequence with tokens{reasons}")
            if largest_token >= 0:
                description["vocab_size"] = largest_token + 1
            writer.finish({"format": MANIFEST_FORMAT, "source": description, "skipped": dict(skipped)})
        table = _read_back(temporary, path)
    return BuiltManifest(path=path, table=table, source=description, skipped=dict(skipped), unlearned=unlearned)


def _read_back(temporary: Path, path: Path) -> LengthTable:
    """Read a manifest before it replaces another, as `fcp plan` will: nothing may fail after that."""
    try:
        return replace(read_manifest(temporary), name=path.name)
    except ManifestError as error:
        message = str(error).replace(str(temporary), str(path)).replace(temporary.name, path.name)
        raise ManifestError(f"{message}; {path} is as it was") from error


def _kept(batch: RowBatch, source: Source) -> Any:
    lengths = batch.rows.column("length").to_numpy(zero_copy_only=False)
    bad = np.flatnonzero((lengths < 0) | (lengths > LONGEST_TOKENS))
    if len(bad):
        row = int(bad[0])
        name = batch.rows.column("id")[row].as_py()
        where = f"{source.describe()['path']}: sequence {name}"
        raise ManifestError(f"{where} has {lengths[row]} tokens; a plan holds 1 to {LONGEST_TOKENS}; fix or drop it")
    return batch.rows.filter(pa.array(lengths != 0))


class _Writer:
    """Collects rows into row groups of even size; the schema is that of the first rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self._stack = ExitStack()
        self._pending: list[Any] = []
        self.rows = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def add(self, rows: Any) -> None:
        self._pending.append(rows)
        self.rows += rows.num_rows
        if sum(pending.num_rows for pending in self._pending) >= _GROUP_ROWS:
            self._flush()

    def finish(self, header: dict[str, Any]) -> None:
        self._flush()
        self._file.add_key_value_metadata({METADATA_KEY.decode(): json.dumps(header)})

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._pending)
        self._pending = []
        if self._file is None:
            self._file = self._stack.enter_context(parquet_writer(self._path, table.schema))
        self._file.write_table(table)
