"""Counts a source in parts: in worker processes, or on several nodes into files that are merged later.

The manifest is byte-identical to the one that a single process writes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta

from fcp_cli.errors import ManifestError, UsageError
from fcp_cli.files import replaced_atomically
from fcp_cli.kinds import another_kind
from fcp_cli.machine.host import usable_cores
from fcp_cli.machine.pool import in_order
from fcp_cli.manifest.build import NO_ROWS, RowWriter, counted_batches
from fcp_cli.manifest.sources.base import DivisibleSource, Part, RowBatch, Source
from fcp_cli.manifest.table.header import read_header, readable
from fcp_cli.manifest.versions import differing, file_versions, require_unchanged
from fcp_cli.reading.inputs import open_input
from fcp_cli.reading.parquet import open_footer, open_parquet
from fcp_cli.validation import Count, NonNegativeCount, validated

PART_FORMAT: Final[Literal["fcp-manifest-part/1"]] = "fcp-manifest-part/1"
_MOST_PARTS: Final = 1_000_000
_MOST_NAMED: Final = 5
_BATCH_ROWS: Final = 1 << 16
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")

# Set once in every worker process.
_source: DivisibleSource | None = None


def parse_part(text: str) -> Part:
    """Parse `--shard I/N`; I counts from 1."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count) <= _MOST_PARTS):
        raise UsageError(f"--shard {text} is not of the form I/N with 1 <= I <= N, for example 3/16")
    return Part(int(index) - 1, int(count))


def divisible(source: Source) -> DivisibleSource:
    """Return `source` if it can be split into parts, else raise UsageError."""
    if not isinstance(source, DivisibleSource):
        kind = source.describe()["kind"]
        raise UsageError(f"--shard is for JSON lines, conversations, Parquet and Arrow; {kind} cannot be read in parts")
    return source


def default_workers(source: Source) -> int:
    """Return one process per usable core, but at most one per two parts: fewer would not repay its start-up."""
    parts = source.parts if isinstance(source, DivisibleSource) else 1
    return max(1, min(usable_cores(), parts // 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedByWorkers:
    """A source that worker processes count, part by part.

    Attributes:
        source: the source, or a part of it.
        reopen: picklable function that opens the complete source in a worker.
        workers: number of processes.
        part: which part of the complete source `source` is.
    """

    source: DivisibleSource
    reopen: Callable[[], Source]
    workers: int
    part: Part

    @property
    def units(self) -> int | None:
        return self.source.units

    @property
    def files(self) -> tuple[Path, ...]:
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


def part_identity(source: DivisibleSource, part: Part) -> PartHeader:
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


def write_part(source: DivisibleSource, rows: Source, part: Part, path: Path, *, advance: Callable[[int], None]) -> int:
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


class MergedParts:
    """All parts of a source, read back as one source.

    Args:
        paths: files of `write_part`, in any order.
    """

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
        raise ManifestError(f"there is no part {path}; `fcp manifest build SOURCE --shard I/N -o {path}` makes one")
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
