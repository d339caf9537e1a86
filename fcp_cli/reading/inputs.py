"""Opens files that a user named, and reads their lines, with bounds: no device, no folder, no endless line.

Failures are OSErrors whose `strerror` is the reason in a few words, as those of the system are.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, BinaryIO, Final, TypeVar

_Content = TypeVar("_Content")

MOST_LINE_BYTES: Final = 1 << 28
"""A record of 256 MiB holds some 40 million token ids, or a conversation with dozens of pictures."""


def open_input(path: Path, *, seekable: bool = False, most_bytes: int | None = None) -> BinaryIO:
    """Open a file for reading bytes: a regular one, or a pipe unless it must be `seekable`.

    Args:
        path: the file; the null device is an empty one.
        seekable: whether the format is read from its end, or twice.
        most_bytes: larger files are refused; a pipe's size is unknown, so its reader counts.

    Raises:
        OSError: it cannot be opened, is a device, a socket or a folder, is larger, or is a pipe and must be seekable.
    """
    require_input(path, seekable=seekable, most_bytes=most_bytes)
    return path.open("rb")


def require_input(path: Path, *, seekable: bool = False, most_bytes: int | None = None) -> None:
    """Check that `open_input` would open a path, for libraries that open files by name.

    Raises:
        OSError: see `open_input`.
    """
    status = path.stat()
    is_pipe = stat.S_ISFIFO(status.st_mode)
    if is_pipe and seekable:
        raise OSError(errno.ESPIPE, "it is a pipe, and this format is not read in order; save it as a file", str(path))
    opened = is_pipe or stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)  # the system refuses folders
    if not opened and not path.samefile(os.devnull):  # '--config /dev/null' names an empty file
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if most_bytes is not None and stat.S_ISREG(status.st_mode) and status.st_size > most_bytes:
        raise too_large(path, most_bytes)


def too_large(path: Path, most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))


def bounded_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream, each with its end; the last may have none.

    Raises:
        OSError: the stream cannot be read, or a line is longer.
    """
    number = 1
    while line := stream.readline(MOST_LINE_BYTES + 1):
        if len(line) > MOST_LINE_BYTES:
            reason = f"line {number} is longer than {MOST_LINE_BYTES >> 20} MiB"
            raise OSError(errno.EFBIG, reason, getattr(stream, "name", None))
        yield line
        number += 1


def cached_by_file(read: Callable[[Path], _Content], *, maxsize: int) -> Callable[[Path], _Content]:
    """Cache the contents of files until they change.

    Args:
        read: reads a file; its exceptions are not cached.
        maxsize: files cached at most.
    """

    @lru_cache(maxsize=maxsize)
    def read_version(file: Path, version: tuple[int, int, int] | None) -> _Content:
        return read(file)

    def read_cached(file: Path) -> _Content:
        return read_version(file, _version(file))

    return read_cached


def _version(file: Path) -> tuple[int, int, int] | None:
    """Inode, size and time of the last change; None if the file is missing, which `read` reports in its own words."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
