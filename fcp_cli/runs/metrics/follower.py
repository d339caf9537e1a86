"""Follows a file that another process appends to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fcp_cli.reading.inputs import bounded_lines, open_input


class FileFollower:
    """Reads a file that grows: each call returns what was appended since the last one.

    Attributes:
        path: the file.
        offset: bytes read so far; reset to 0 if the file was replaced or truncated, as a resumed run does with its
            metrics.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._inode = -1

    def read(self) -> bytes:
        """Return the bytes appended since the last call; b"" if the file does not exist."""
        with self._open() as file:
            new = file.read() if file else b""
            self.offset += len(new)
            return new

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines appended since the last call, including line ends.

        Reads line by line, since the file may have many gigabytes.
        """
        with self._open() as file:
            for line in bounded_lines(file) if file is not None else ():
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)  # before the yield: the caller may stop iterating
                yield line

    @contextmanager
    def _open(self) -> Iterator[BinaryIO | None]:
        try:
            file = open_input(self.path, seekable=True)
        except FileNotFoundError:
            yield None
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self.offset:
                self._inode, self.offset = status.st_ino, 0
            file.seek(self.offset)
            yield file
