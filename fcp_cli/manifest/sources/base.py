"""Interfaces that each source implements, for manifest builds and for training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from fcp_cli.arrays import IntArray

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


class FileSpan(NamedTuple):
    """Units `start` to `stop` of file number `file`."""

    file: int
    start: int
    stop: int


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

    def files(self, sizes: Sequence[int]) -> Iterator[FileSpan]:
        """Yield the file spans of the part, given the number of units of each file."""
        start, stop = self.span(sum(sizes))
        for index, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
            first, last = max(start - (end - size), 0), min(stop - (end - size), size)
            if first < last:
                yield FileSpan(index, first, last)


WHOLE = Part()


class Source(Protocol):
    """Sequences to count, in the same order on every run."""

    @property
    def units(self) -> int | None:
        """Total of all `RowBatch.done`; None if unknown before the end."""

    def describe(self) -> dict[str, Any]:
        """Return the `source` entry of the header: `kind`, absolute `path`, and the settings for reading the tokens."""

    def batches(self) -> Iterator[RowBatch]:
        """Count the sequences, batch by batch."""


@runtime_checkable
class DivisibleSource(Source, Protocol):
    """A source whose parts can be counted independently, in several processes or on several nodes."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the complete source, in row order."""

    @property
    def parts(self) -> int:
        """Useful number of parts; 1 if the source cannot be split."""

    @property
    def is_streamed(self) -> bool:
        """Whether a single process reads for all counting processes, as seeking into a file would repeat work."""

    def only(self, part: Part) -> DivisibleSource:
        """Return the sequences of a part; `describe` is unchanged, and counted ids start at 0."""

    def groups(self) -> Iterator[Any]:
        """Read the sequences in order, in picklable groups for the counting processes."""

    def count(self, group: Any) -> RowBatch:
        """Count the sequences of one group."""


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


class ItemGroup(NamedTuple):
    """Consecutive lines or records of file number `shard`; the first one has index `start` in the part."""

    shard: int
    start: int
    items: list[Any]


def item_groups(
    part: Part,
    sizes: Sequence[int],
    read: Callable[[FileSpan], Iterable[tuple[Any, int]]],
    *,
    most_items: int,
    most_bytes: int,
) -> Iterator[ItemGroup]:
    """Yield the items of a part of several files in groups (see `grouped`).

    Args:
        part: the part.
        sizes: number of units of each file.
        read: yields the items of a span with their sizes in bytes.
        most_items, most_bytes: limits of a group.
    """
    start = 0
    for span in part.files(sizes):
        for items in grouped(read(span), most_items=most_items, most_bytes=most_bytes):
            yield ItemGroup(span.file, start, items)
            start += len(items)


def names_below(path: Path, files: Sequence[Path]) -> list[str]:
    """Return the names of source files, relative to the source's folder."""
    return [file.name if file == path else str(file.relative_to(path)) for file in files]
