"""Follows a file that another process appends to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fcp_cli.reading.inputs import bounded_lines, open_input


class FileFollower:
    """Reads what others append to a file; each call returns what came since the last one.

    Attributes:
        path: the file.
        offset: bytes read so far. It goes back to 0, to read all again, if the file was replaced or cut short, as a
            resumed run does with its metrics.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._inode = -1

    def read(self) -> bytes:
        """Return the bytes appended since the last call; none while the file does not exist."""
        with self._open() as file:
            new = file.read() if file else b""
            self.offset += len(new)
            return new

    def lines(self) -> Iterator[bytes]:
        """Yield the whole lines appended since the last call, each with its end; one still being written comes later.

        The file may be many gigabytes: it is read line by line.
        """
        with self._open() as file:
            for line in bounded_lines(file) if file is not None else ():
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)  # before it is given: the caller may not come back
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
