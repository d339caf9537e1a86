"""The interfaces that every kind of source has for the builder and for training."""

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
    """Manifest rows of a part of a source.

    Attributes:
        rows: Arrow record batch with `id`, `length` and the columns that find the tokens again.
        done: units of the source that this batch covers, for the progress bar.
        largest_token: largest token id seen in a source that holds token ids.
        skipped: sequences dropped before they were counted, by reason.
        counted_ids: sequences, dropped ones included, if ids count from the beginning of a part; 0 if they are those of
            the whole source.
        places: the places of the rows, for messages; empty if their ids name them.
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
    """One of `count` contiguous parts of a source, equal in units; the whole source by default.

    Attributes:
        index: the index of the part, from 0.
        count: number of parts.
    """

    index: int = 0
    count: int = 1

    def span(self, units: int) -> tuple[int, int]:
        """Return the first unit of the part, and the one after its last."""
        return units * self.index // self.count, units * (self.index + 1) // self.count

    def files(self, sizes: Sequence[int]) -> Iterator[FileSpan]:
        """Yield the spans of the part in files of so many units each."""
        start, stop = self.span(sum(sizes))
        for index, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
            first, last = max(start - (end - size), 0), min(stop - (end - size), size)
            if first < last:
                yield FileSpan(index, first, last)


WHOLE = Part()


class Source(Protocol):
    """Sequences to be counted, in an order that is the same on every run."""

    @property
    def units(self) -> int | None:
        """The sum that `done` will reach; None if it is unknown before the end."""

    def describe(self) -> dict[str, Any]:
        """Return the JSON `source` of the manifest: `kind`, absolute `path`, and the settings that read the tokens."""

    def batches(self) -> Iterator[RowBatch]:
        """Count the sequences, some at a time."""


@runtime_checkable
class DivisibleSource(Source, Protocol):
    """A source whose parts can be counted apart from each other, by several processes or on several nodes."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the whole source, in the order of their rows."""

    @property
    def parts(self) -> int:
        """Number of parts that are worth a task each; 1 if the source is read whole."""

    @property
    def is_streamed(self) -> bool:
        """Whether one process reads for all that count: reading from the middle of a file would repeat work."""

    def only(self, part: Part) -> DivisibleSource:
        """Return the sequences of one part; `describe` stays the same, and ids that are counted begin at 0."""

    def groups(self) -> Iterator[Any]:
        """Read the sequences in order, some at a time, in a form that travels to the processes that count."""

    def count(self, group: Any) -> RowBatch:
        """Count one of `groups`."""


def place_of(source: Source, batch: RowBatch, row: int) -> str:
    """Name the place of a row of a batch, for messages."""
    if batch.places:
        return batch.places[row]
    return f"{source.describe()['path']}: sequence {batch.rows.column('id')[row].as_py()}"


class SourceTokens(Protocol):
    """Random access to the tokens of the sequences of a source, by manifest row. Any number of threads may call."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    def __call__(self, row: int) -> IntArray | tuple[IntArray, IntArray]:
        """Return [tokens] int64, as the source holds them now, or (tokens, labels) if it marks the trained tokens."""

    def place(self, row: int) -> str:
        """Name the place of a sequence, for messages."""


def grouped(items: Iterable[tuple[Item, int]], *, most_items: int, most_bytes: int) -> Iterator[list[Item]]:
    """Group consecutive items into lists bounded in number and in bytes; each item comes with its size in bytes."""
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
    """Consecutive lines or records of file number `shard`; the first is number `start` of the part."""

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
    """Yield the items of a part of several files in groups, as `grouped` makes them.

    Args:
        part: the part.
        sizes: units of each file.
        read: yields the items of a span with their sizes in bytes.
        most_items, most_bytes: of a group.
    """
    start = 0
    for span in part.files(sizes):
        for items in grouped(read(span), most_items=most_items, most_bytes=most_bytes):
            yield ItemGroup(span.file, start, items)
            start += len(items)


def names_below(path: Path, files: Sequence[Path]) -> list[str]:
    """Return the names of the files of a source: below its folder, or of the file itself."""
    return [file.name if file == path else str(file.relative_to(path)) for file in files]
