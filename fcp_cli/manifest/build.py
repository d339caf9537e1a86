"""Manifest builds: by one process, by worker processes, or in parts on several nodes that are merged later.

Rows are streamed, so memory stays constant, and files are replaced atomically. However it was counted, the manifest has
the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta

from fcp_cli.errors import ManifestError, UsageError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.sources import (
    Part,
    RowBatch,
    Source,
    differing,
    file_versions,
    place_of,
    require_unchanged,
)
from fcp_cli.manifest.table import (
    LEARNED_COLUMN,
    LONGEST_TOKENS,
    MANIFEST_FORMAT,
    METADATA_KEY,
    NOT_PARQUET,
    LengthTable,
    read_header,
    readable,
)
from fcp_cli.util.files import as_word, replaced_atomically
from fcp_cli.util.inputs import open_input
from fcp_cli.util.kinds import another_kind
from fcp_cli.util.machine import usable_cores
from fcp_cli.util.parquet import open_footer, open_parquet, parquet_writer
from fcp_cli.util.pool import in_order
from fcp_cli.util.validation import Count, NonNegativeCount, validated

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


PART_FORMAT: Final[Literal["fcp-manifest-part/1"]] = "fcp-manifest-part/1"
_MOST_PARTS: Final = 1_000_000
_MOST_NAMED: Final = 5
_BATCH_ROWS: Final = 1 << 16
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")

# Set once in every worker process.
_source: Source | None = None


def parse_part(text: str) -> Part:
    """Parse `--shard I/N`; I counts from 1."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count) <= _MOST_PARTS):
        raise UsageError(f"--shard {text} is not of the form I/N with 1 <= I <= N, for example 3/16")
    return Part(int(index) - 1, int(count))


def divisible(source: Source) -> Source:
    """Return `source` if it can be split into parts, else raise UsageError."""
    if not source.is_divisible:
        kind = source.describe()["kind"]
        raise UsageError(f"--shard is for JSON lines, conversations, Parquet and Arrow; {kind} cannot be read in parts")
    return source


def default_workers(source: Source) -> int:
    """Return one process per usable core, but at most one per two parts: fewer would not repay its start-up."""
    return max(1, min(usable_cores(), source.parts // 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedByWorkers(Source):
    """A source that worker processes count, part by part.

    Attributes:
        source: the source, or a part of it.
        reopen: picklable function that opens the complete source in a worker.
        workers: number of processes.
        part: which part of the complete source `source` is.
    """

    source: Source
    reopen: Callable[[], Source]
    workers: int
    part: Part

    @property
    def units(self) -> int | None:
        return self.source.units

    @property
    def files(self) -> tuple[Path, ...]:  # type: ignore[override]
        return self.source.files

    def describe(self) -> dict[str, Any]:
        return self.source.describe()

    def batches(self) -> Iterator[RowBatch]:
        count = max(self.source.parts, self.workers)
        parts = (Part(self.part.index * count + index, self.part.count * count) for index in range(count))
        count_on = partial(in_order, workers=self.workers, initializer=_open, noun="counting process")
        if self.source.is_streamed:
            with closing(count_on(_count_group, self.source.groups(), arguments=(self.reopen,))) as groups:
                for batches in groups:
                    yield from batches
            return
        with closing(count_on(_count_part, parts, arguments=(self.reopen,))) as found:
            yield from _renumbered(found)


def _open(reopen: Callable[[], Source]) -> None:
    global _source
    os.environ["RAYON_NUM_THREADS"] = "1"  # one tokenizer thread: there is already a process per core
    _source = divisible(reopen())


def _count_part(part: Part) -> list[RowBatch]:
    assert _source is not None
    return [replace(batch, places=()) for batch in counted_batches(_source.only(part).batches(), _source)]


def _count_group(group: Any) -> list[RowBatch]:
    assert _source is not None
    return [replace(batch, places=()) for batch in counted_batches([_source.count(group)], _source)]


def _renumbered(parts: Iterable[Iterable[RowBatch]]) -> Iterator[RowBatch]:
    """Yield the batches of consecutive parts, with ids counted from the first part."""
    before = 0
    for batches in parts:
        counted_ids = 0
        for batch in batches:
            yield _shifted(batch, before)
            counted_ids += batch.counted_ids
        before += counted_ids


def _shifted(batch: RowBatch, by: int) -> RowBatch:
    if by == 0 or batch.rows.num_rows == 0:
        return batch
    at = batch.rows.schema.get_field_index("id")
    ids = pc.add(batch.rows.column(at), pa.scalar(by, pa.int64()))
    return replace(batch, rows=batch.rows.set_column(at, "id", ids))


@dataclass(frozen=True, kw_only=True, slots=True)
class PartHeader:
    """Header of a part file, stored as JSON under the metadata key of manifests.

    Attributes:
        format: `PART_FORMAT`.
        source: the `source` entry of the complete manifest, without `vocab_size`.
        index: part index, from 0.
        count: number of parts.
        files: name, size in bytes and modification time of each source file.
        tokenizer: digest of the tokenizer files; "" if no tokenizer file is used.
        skipped: number of dropped sequences by reason.
        counted_ids: see `RowBatch`.
        largest_token: largest token id seen, or -1.
    """

    format: Literal["fcp-manifest-part/1"]
    source: dict[str, Any]
    index: NonNegativeCount
    count: Count
    files: tuple[tuple[str, NonNegativeCount, int], ...]
    tokenizer: str
    skipped: dict[str, Count]
    counted_ids: NonNegativeCount
    largest_token: Annotated[int, Meta(ge=-1, le=2**63 - 2, description="a token id, or -1")]


def part_identity(source: Source, part: Part) -> PartHeader:
    """Return the header of a part before it is counted; parts with equal headers have equal content."""
    description = source.describe()
    return PartHeader(
        format=PART_FORMAT,
        source=description,
        index=part.index,
        count=part.count,
        files=file_versions(source),
        tokenizer=_tokenizer_digest(description),
        skipped={},
        counted_ids=0,
        largest_token=-1,
    )


def counted_rows(path: Path, identity: PartHeader) -> int | None:
    """Return the rows of a file that holds a part of this content; None if it does not.

    Args:
        path: the file, which need not be there.
        identity: that of the part.
    """
    with suppress(ManifestError), readable(path):
        if path.exists() and replace(_part_header(path), skipped={}, counted_ids=0, largest_token=-1) == identity:
            return int(open_footer(path).num_rows)
    return None


def _tokenizer_digest(description: dict[str, Any]) -> str:
    """Return a digest of the tokenizer files, or "" if there are none."""
    name = description.get("tokenizer")
    if name in (None, "bytes"):
        return ""
    path, digest = Path(name), hashlib.sha256()
    for file in [path / one for one in _TOKENIZER_FILES] if path.is_dir() else [path]:
        with suppress(FileNotFoundError), open_input(file) as stream:
            digest.update(file.name.encode() + stream.read())
    return digest.hexdigest()


def write_part(source: Source, rows: Source, part: Part, path: Path, *, advance: Callable[[int], None]) -> int:
    """Write the rows of a part to a file for `MergedParts`; return the number of rows.

    Args:
        source: the complete source.
        rows: the rows of the part.
        part: which part it is.
        path: the file to write.
        advance: called with the number of units completed since the last call.
    """
    identity = part_identity(source, part)
    with replaced_atomically(path) as temporary, RowWriter(temporary) as writer:
        writer.add_all(rows, advance)
        require_unchanged(source, identity.files)
        header = replace(
            identity,
            skipped=dict(+writer.skipped),
            counted_ids=writer.counted_ids,
            largest_token=writer.largest_token,
        )
        writer.finish(asdict(header))
    return writer.rows


class MergedParts(Source):
    """All parts of a source, read back as one source.

    Args:
        paths: files of `write_part`, in any order.
    """

    files = ()

    def __init__(self, paths: Sequence[Path]) -> None:
        self._parts = sorted(((path, _part_header(path)) for path in paths), key=lambda part: part[1].index)
        _require_all(self._parts)

    @property
    def units(self) -> int | None:
        return self._parts[0][1].count

    def describe(self) -> dict[str, Any]:
        return dict(self._parts[0][1].source)

    def batches(self) -> Iterator[RowBatch]:
        schema: Any = None
        for batch in _renumbered(_part_batches(path, header) for path, header in self._parts):
            if batch.rows.num_rows:
                schema = schema or batch.rows.schema
                if batch.rows.schema != schema or not {"id", "length"} <= set(schema.names):
                    raise ManifestError(f"{self._parts[0][0]} and the other parts differ in columns; build them again")
            yield batch


def _part_header(path: Path) -> PartHeader:
    if not path.exists():
        raise ManifestError(f"there is no {path}; make it: fcp manifest build SOURCE --shard I/N -o {as_word(path)}")
    with readable(path):
        document = read_header(open_footer(path))
    if document.get("format") != PART_FORMAT:
        raise ManifestError(another_kind(path, "manifest part") or f"{path} is not a part of a manifest")
    return validated(document, PartHeader, where=f"{path} is damaged", error=ManifestError, remedy="build it again")


def _require_all(parts: Sequence[tuple[Path, PartHeader]]) -> None:
    first_path, first = parts[0]
    for path, header in parts[1:]:
        if header.source != first.source or header.count != first.count:
            raise ManifestError(
                f"{path} is {_named(header)}, but {first_path} is {_named(first)}; merge the parts of one build"
            )
        if header.tokenizer != first.tokenizer:
            raise ManifestError(
                f"{path} and {first_path} were counted by different versions of {first.source['tokenizer']}; build the "
                "parts again"
            )
        if changed := differing(first.files, header.files):
            raise ManifestError(f"{changed} changed between {first_path} and {path}; build the parts again")
    for (path, header), (following, other) in pairwise(parts):
        if header.index == other.index:
            raise ManifestError(f"{path} and {following} are both part {header.index + 1}/{header.count}; name one")
    missing = sorted(set(range(first.count)) - {header.index for _, header in parts})
    if missing:
        names = ", ".join(f"{index + 1}/{first.count}" for index in missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise ManifestError(f"missing: part {names}{more}; build it with --shard, and name all {first.count}")


def _named(header: PartHeader) -> str:
    settings = [f"{name} {header.source[name]}" for name in ("column", "tokenizer", "mask") if header.source.get(name)]
    return " ".join([f"part {header.index + 1}/{header.count} of {header.source.get('path')}", *settings])


def _part_batches(path: Path, header: PartHeader) -> Iterator[RowBatch]:
    yield RowBatch(
        rows=NO_ROWS,
        done=1,
        largest_token=header.largest_token,
        skipped=header.skipped,
        counted_ids=header.counted_ids,
    )
    with readable(path), open_parquet(path) as file:
        for rows in file.iter_batches(batch_size=_BATCH_ROWS):
            yield RowBatch(rows=rows, done=0)
