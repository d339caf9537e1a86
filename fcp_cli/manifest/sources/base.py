"""The interfaces that every kind of source has for the builder and for training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

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
    """

    rows: Any
    done: int
    largest_token: int = -1
    skipped: Mapping[str, int] = field(default_factory=dict)


class Source(Protocol):
    """Sequences to be counted, in an order that is the same on every run."""

    @property
    def units(self) -> int | None:
        """The sum that `done` will reach; None where it is unknown before the end."""

    def describe(self) -> dict[str, Any]:
        """Return the JSON `source` of the manifest: `kind`, absolute `path`, and the settings that read the tokens."""

    def batches(self) -> Iterator[RowBatch]:
        """Count the sequences, some at a time.

        Raises:
            ManifestError: a part of the source cannot be read; the message names it.
        """


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
