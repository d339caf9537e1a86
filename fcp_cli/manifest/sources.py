"""Data sources: sequences counted in batches and parts, their files and their places in messages."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from fcp_cli.errors import ManifestError, UsageError
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.files import near_file
from fcp_cli.util.inputs import open_records
from fcp_cli.util.remote import RemotePath, data_path, each, remembered_size, retried, version_of

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """A batch of manifest rows.

    Attributes:
        rows: Arrow record batch with `id`, `length` and the columns that locate the tokens.
        done: source units that this batch covers, for the progress bar.
        largest_token: largest token id seen, or -1 if unknown.
        skipped: number of sequences dropped before counting, by reason.
        counted_ids: number of sequences, including dropped ones, if ids count from the start of the part; 0 if ids are
            unique in the complete source.
        places: location of each row for messages; empty if the ids suffice.
    """

    rows: Any
    done: int
    largest_token: int = -1
    skipped: Mapping[str, int] = field(default_factory=dict)
    counted_ids: int = 0
    places: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One of `count` contiguous parts of equal numbers of units; by default the complete source.

    Attributes:
        index: part index, from 0.
        count: number of parts.
    """

    index: int = 0
    count: int = 1

    def span(self, units: int) -> tuple[int, int]:
        """Return the half-open range of units of the part."""
        return units * self.index // self.count, units * (self.index + 1) // self.count

    def files(self, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield (file, start, stop) of the units of each file in the part, given the number of units of all files."""
        start, stop = self.span(sum(sizes))
        for index, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
            first, last = max(start - (end - size), 0), min(stop - (end - size), size)
            if first < last:
                yield index, first, last


WHOLE = Part()


class Source:
    """Sequences to count, in the same order on every run.

    A divisible source is counted in parts, in several processes or on several nodes: it has a dataclass field `part`,
    and defines `groups` and `count`. Any other source defines `batches`.
    """

    is_divisible: bool = False
    files: tuple[Path, ...]
    """The files of the complete source, in row order; () for a text tree, which has no file list."""

    @property
    def units(self) -> int | None:
        """Total of all `RowBatch.done`; None if unknown before the end."""
        return None

    @property
    def parts(self) -> int:
        """Useful number of parts; 1 if the source cannot be split."""
        return 1

    @property
    def is_streamed(self) -> bool:
        """Whether a single process reads for all counting processes, as seeking into a file would repeat work."""
        return False

    def describe(self) -> dict[str, Any]:
        """Return the `source` entry of the header: `kind`, absolute `path`, and the settings for reading the tokens."""
        raise NotImplementedError

    def only(self, part: Part) -> Source:
        """Return the sequences of a part; `describe` is unchanged, and counted ids start at 0."""
        return replace(self, part=part)  # type: ignore[type-var, unused-ignore]

    def batches(self) -> Iterator[RowBatch]:
        """Count the sequences, batch by batch."""
        return map(self.count, self.groups())

    def groups(self) -> Iterator[Any]:
        """Read the sequences in order, in picklable groups for the counting processes."""
        raise NotImplementedError

    def count(self, group: Any) -> RowBatch:
        """Count the sequences of one group."""
        raise NotImplementedError


def place_of(source: Source, batch: RowBatch, row: int) -> str:
    """Return the location of a row of a batch, for messages."""
    if batch.places:
        return batch.places[row]
    return f"{source.describe()['path']}: sequence {batch.rows.column('id')[row].as_py()}"


class SourceTokens(Protocol):
    """Random access to token sequences by manifest row. Thread-safe."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    def __call__(self, row: int) -> IntArray | tuple[IntArray, IntArray]:
        """Return the current tokens, [tokens] int64, or (tokens, labels) if the source marks trained tokens."""

    def place(self, row: int) -> str:
        """Return the location of a sequence, for messages."""


def grouped(items: Iterable[tuple[Item, int]], *, most_items: int, most_bytes: int) -> Iterator[list[Item]]:
    """Group consecutive (item, size in bytes) pairs into lists of bounded length and size."""
    group: list[Item] = []
    group_bytes = 0
    for item, item_bytes in items:
        group.append(item)
        group_bytes += item_bytes
        if len(group) >= most_items or group_bytes >= most_bytes:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group


def item_groups(
    part: Part,
    sizes: Sequence[int],
    read: Callable[[int, int, int], Iterable[tuple[Any, int]]],
    *,
    most_items: int,
    most_bytes: int,
) -> Iterator[tuple[int, int, list[Any]]]:
    """Yield the items of a part of several files in groups (see `grouped`).

    A group has the number of its file, the index of its first item in the part, and its items.

    Args:
        part: the part.
        sizes: number of units of each file.
        read: yields the items of a file from a start to a stop in its units, with their sizes in bytes.
        most_items, most_bytes: limits of a group.
    """
    start = 0
    for file, first, stop in part.files(sizes):
        for items in grouped(read(file, first, stop), most_items=most_items, most_bytes=most_bytes):
            yield file, start, items
            start += len(items)


def names_below(path: Path, files: Sequence[Path]) -> list[str]:
    """Return the names of source files, relative to the source's folder."""
    return [file.name if file == path else str(file.relative_to(path)) for file in files]


# Resolve command-line arguments that name data: paths, URLs, and globs of either.


def named_source(words: Sequence[str]) -> tuple[Path, tuple[Path, ...]]:
    """Return the path of a source, and its files if several were named or a glob was used.

    Args:
        words: one file, folder or prefix; or any number of files and globs, in row order. Files that match a glob are
            in name order.
    """
    if len(words) == 1 and not _is_glob(words[0]):
        return data_path(words[0]), ()
    files = [file for word in words for file in _matching(word)]
    seen: set[Path] = set()
    for file in files:
        if file in seen:
            raise UsageError(f"{file} is named twice: its sequences would be counted twice; name it once")
        seen.add(file)
    return (files[0], ()) if len(files) == 1 else (_folder_of(files), tuple(files))


def _matching(word: str) -> Iterator[Path]:
    path = data_path(word)
    if not _is_glob(word):
        if path.is_dir():
            raise UsageError(
                f"{word} is a folder among several sources; name its files, as '{word.rstrip('/')}/*.jsonl'"
            )
        if not path.exists():
            raise ManifestError(f"there is no source {word}{near_file(path)}")
        yield path.absolute()
        return
    found: list[Path]
    if isinstance(path, RemotePath):
        system, name = path.store()
        found = [RemotePath(system.unstrip_protocol(one)) for one in retried(lambda: system.glob(name), word)]
    else:
        found = [Path(one).absolute() for one in glob.glob(word, recursive=True) if Path(one).is_file()]  # noqa: PTH207  the glob may be absolute
    if not found:
        raise ManifestError(f"no file matches {word}")
    yield from sorted(found)


def _is_glob(word: str) -> bool:
    path = data_path(word)
    if isinstance(path, RemotePath):
        return "*" in word or "[" in word  # in a URL, ? begins the query
    return glob.has_magic(word) and not path.exists()


def _folder_of(files: Sequence[Path]) -> Path:
    common = files[0].parent
    while not all(type(file) is type(common) and common in file.parents for file in files):
        if common in (common.parent, common.parent.parent):
            raise UsageError(f"{files[0]} and {files[-1]} have no folder in common; build a manifest of each")
        common = common.parent
    return common


# The place of a line of which a manifest keeps the byte, for messages.

_CHUNK_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 1 << 30  # half a second of reading, for each row that training skips


class LinePlace(str):
    """FILE:LINE in a message. Its line is counted when the message is formatted: few places are ever shown.

    As a plain text it is FILE at byte N, and in messages where lines cannot be counted (members of tars, objects of
    stores), or only far into a file.
    """

    file: Path
    byte_offset: int

    def __new__(cls, file: Path, byte_offset: int) -> LinePlace:
        place = super().__new__(cls, f"{file} at byte {byte_offset}")
        place.file, place.byte_offset = file, byte_offset
        return place

    def __getnewargs__(self) -> tuple[Path, int]:  # type: ignore[override]  # places travel between processes
        return self.file, self.byte_offset

    def __str__(self) -> str:
        line = _line_number(self.file, self.byte_offset)
        return super().__str__() if line is None else f"{self.file}:{line}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def _line_number(file: Path, byte_offset: int) -> int | None:
    """Return the number of the line that begins at a byte, from 1; None if none does, or it is not counted."""
    if file.suffix == ".tar" or isinstance(file, RemotePath) or byte_offset > _MOST_BYTES:
        return None
    found, left, before = 1, byte_offset, b"\n"
    try:
        with open_records(file) as stream:
            while left and (chunk := stream.read(min(left, _CHUNK_BYTES))):
                found += chunk.count(b"\n")
                left -= len(chunk)
                before = chunk[-1:]
    except OSError:
        return None
    return found if not left and before == b"\n" else None


# Detects whether source files changed while they were read, or between parts.

Versions: TypeAlias = Sequence[tuple[str, int, int]]
"""Name, size in bytes and mtime in ns per file; for remote objects, a digest of entity tag and time replaces mtime."""


def file_versions(source: Source) -> tuple[tuple[str, int, int], ...]:
    """Return the versions of a source's files."""
    return tuple(
        (file.name, *version) for file, version in zip(source.files, each(_version, source.files), strict=True)
    )


def _version(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError as error:
        raise ManifestError(f"cannot read {file}: {error.strerror or error}") from error
    if isinstance(file, RemotePath) and remembered_size(file) != status.st_size:
        raise ManifestError(f"{file} changed while it was read; build again")
    return version_of(status)


def differing(before: Versions, now: Versions) -> str:
    """Return the name of the first file whose version differs, or ""."""
    return next((one[0] for one, other in zip_longest(before, now, fillvalue=("", 0, 0)) if one != other), "")


def require_unchanged(source: Source, before: Versions) -> None:
    """Raise ManifestError if a source file changed since `before`."""
    if changed := differing(before, file_versions(source)):
        raise ManifestError(f"{source.describe()['path']}: {changed} changed while it was read; build again")
