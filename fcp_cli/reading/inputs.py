"""Opens files that a user named, and reads their lines, with bounds: no device, no folder, no endless line.

Failures are OSErrors whose `strerror` is the reason in a few words, as those of the system are.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, TypeVar

from fcp_cli.reading.remote import buffered

_Content = TypeVar("_Content")

MOST_LINE_BYTES: Final = 1 << 28
"""A record of 256 MiB holds some 40 million token ids, or a conversation with dozens of pictures."""

_COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd"}


def open_input(path: Path, *, seekable: bool = False, most_bytes: int | None = None) -> BinaryIO:
    """Open a file for reading bytes: a regular one, or a pipe unless it must be `seekable`.

    Args:
        path: the file; the null device is an empty one.
        seekable: whether the format is read from its end, or twice.
        most_bytes: larger files are refused; a pipe's size is unknown, so its reader counts.
    """
    require_input(path, seekable=seekable, most_bytes=most_bytes)
    return path.open("rb")


def head_of(name: str, most_bytes: int) -> bytes:
    """Return the first bytes of a regular file, in half the time of `open_input`; nothing if it cannot be read."""
    descriptor = -1
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK)  # do not wait for a pipe's writer
        return os.read(descriptor, most_bytes) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except (OSError, ValueError):  # of a NUL in the name
        return b""
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def require_input(path: Path, *, seekable: bool = False, most_bytes: int | None = None) -> None:
    """Check that `open_input` would open a path, for libraries that open files by name."""
    status = path.stat()
    is_pipe = stat.S_ISFIFO(status.st_mode)
    if is_pipe and seekable:
        raise OSError(errno.ESPIPE, "it is a pipe, and this format is not read in order; save it as a file", str(path))
    opened = is_pipe or stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)  # the system refuses folders
    if not opened and not path.samefile(os.devnull):  # '--config /dev/null' names an empty file
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if most_bytes is not None and stat.S_ISREG(status.st_mode) and status.st_size > most_bytes:
        raise too_large(path, most_bytes)


def is_compressed(path: Path) -> bool:
    """Return whether a file is compressed with gzip or zstd, by its name: it can only be read in order."""
    return path.suffix in _COMPRESSIONS


def inner_suffix(path: Path) -> str:
    """Return the suffix of a file, or if it is compressed, the one before."""
    return Path(path.stem).suffix if is_compressed(path) else path.suffix


class _Unpacked(io.RawIOBase):
    """Content of a compressed stream; `packed` is that stream. All members or frames of it are read."""

    def __init__(self, packed: BinaryIO, compression: str) -> None:
        import pyarrow as pa

        self.packed = packed
        self._content = pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), compression)
        self.name = getattr(packed, "name", None)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._content.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self.packed.close()
        super().close()


def open_records(path: Path, *, seekable: bool = False) -> BinaryIO:
    """Open a file of records, and decompress it while reading if its name ends in `.gz` or `.zst`."""
    stream = open_input(path, seekable=seekable)
    return buffered(_Unpacked(stream, _COMPRESSIONS[path.suffix])) if is_compressed(path) else stream


class _Scratch:
    """Contents of compressed files, one after another in a nameless temporary file."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        self.starts: dict[Path, int] = {}
        self.lock = threading.Lock()


@lru_cache(maxsize=1)
def _scratch(process: int) -> _Scratch:
    return _Scratch()


def open_unpacked(path: Path, byte_offset: int) -> BinaryIO:
    """Open the content of a compressed file at a byte. A process unpacks each file once, to disk."""
    scratch = _scratch(os.getpid())  # forked workers share no position
    with scratch.lock:
        if path not in scratch.starts:
            start = scratch.file.seek(0, os.SEEK_END)
            with open_records(path) as stream:
                shutil.copyfileobj(stream, scratch.file, 1 << 20)
            scratch.file.write(b"\n")  # ends a last line without an end
            scratch.file.flush()
            scratch.starts[path] = start
        opened = Path(f"/proc/self/fd/{scratch.file.fileno()}").open("rb")  # noqa: SIM115  returned
    opened.seek(scratch.starts[path] + byte_offset)
    return opened


def stored_bytes_read(stream: IO[bytes]) -> int:
    """Return the position in the file that a stream of `open_records` reads."""
    raw = getattr(stream, "raw", None)
    return raw.packed.tell() if isinstance(raw, _Unpacked) else stream.tell()


def too_large(path: Path, most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))


def bounded_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream, each with its end; the last may have none."""
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
