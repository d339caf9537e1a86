"""References to image and video data: a file, a tar member, a table cell, or bytes in the record.

A reference is small and is sent to the process that decodes; only there is the data read.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources.shards import TableRows
from fcp_cli.reading.inputs import cached_by_file, open_input

Content: TypeAlias = "Path | io.BytesIO"


class Picture(Protocol):
    """A reference to an image or video that has not been read."""

    @property
    def name(self) -> str:
        """The file that holds it, for messages."""

    def content(self, most_bytes: int = -1) -> Content:
        """Return its path or its bytes: all of them, or the first `most_bytes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePicture:
    """An image or video file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def content(self, most_bytes: int = -1) -> Content:
        return self.path


@dataclass(frozen=True, kw_only=True, slots=True)
class TarPicture:
    """A picture in an uncompressed tar, located by byte offset."""

    path: Path
    member: str
    byte_offset: int
    size_bytes: int

    @property
    def name(self) -> str:
        return f"{self.path}: {self.member}"

    def content(self, most_bytes: int = -1) -> Content:
        size = self.size_bytes if most_bytes < 0 else min(most_bytes, self.size_bytes)
        try:
            with open_input(self.path, seekable=True) as stream:
                stream.seek(self.byte_offset)
                return io.BytesIO(stream.read(size))
        except OSError as error:
            raise ManifestError(f"{self.name}: cannot read it: {error.strerror or error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class CellPicture:
    """A picture in a table cell: bytes, `{"bytes", "path"}`, a path, or an item of a list of these."""

    path: Path
    row: int
    column: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.path}, row {self.row}, {self.column!r}"

    def content(self, most_bytes: int = -1) -> Content:
        value = _rows(self.path).record(self.row, (self.column,), self.name)[self.column]
        values = value if isinstance(value, list) else [value]
        if self.number >= len(values):
            raise ManifestError(f"{self.name} has {len(values)} images now; build the manifest again")
        return refer(values[self.number], self.path.parent, self.name).content(most_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPicture:
    """A picture whose bytes are in the record."""

    name: str
    data: bytes = field(repr=False)

    def content(self, most_bytes: int = -1) -> Content:
        return io.BytesIO(self.data)


def refer(value: Any, folder: Path, place: str) -> Picture:
    """Return a reference for a field value: a path, a data URL, bytes, `{"bytes", "path"}`, or a reference already.

    Args:
        value: field value.
        folder: base folder of relative paths.
        place: location of the record, for messages.
    """
    if isinstance(value, FilePicture | TarPicture | CellPicture | HeldPicture):
        return value
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return HeldPicture(name=f"{place}: {value.get('path') or 'a picture'}", data=value["bytes"])
        value = value.get("path") or value.get("url")
    if isinstance(value, bytes):
        return HeldPicture(name=f"{place}: a picture", data=value)
    if not isinstance(value, str):
        raise ManifestError(f"{place}: a picture is {str(value)[:40]!r}; it must be a path or bytes")
    if value.startswith("data:"):
        return HeldPicture(name=f"{place}: a picture", data=_from_data_url(value, place))
    if "://" in value and not value.startswith("file://"):
        raise ManifestError(f"{place}: {value[:80]} is not on this machine; download it and name the file")
    return FilePicture(path=folder / value.removeprefix("file://"))


def _from_data_url(url: str, place: str) -> bytes:
    head, _, data = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise binascii.Error("not base64")
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ManifestError(f"{place}: a picture has the data URL {url[:40]!r}, which is not valid base64") from error


# Keep only two groups: cells hold image data.
_rows = cached_by_file(partial(TableRows, kept_groups=2), maxsize=16)
