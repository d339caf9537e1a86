"""The place of a line of which a manifest keeps the byte, for messages."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fcp_cli.reading.inputs import open_records
from fcp_cli.reading.remote import RemotePath

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
