"""Opens user-named files and reads their lines with limits: no devices, folders or endless lines.

Failures are OSErrors whose `strerror` is a short reason, like those of the operating system.
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
"""A 256 MiB record holds some 40 million token ids, or a conversation with dozens of images."""

_COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd"}


def open_input(path: Path, *, seekable: bool = False, most_bytes: int | None = None) -> BinaryIO:
    """Open a file for reading bytes: a regular one, or a pipe unless it must be `seekable`.

    Args:
        path: the file; the null device reads as an empty file.
        seekable: whether the reader seeks, which excludes pipes.
        most_bytes: size limit; a pipe's size is unknown, so its reader must count.
    """
    require_input(path, seekable=seekable, most_bytes=most_bytes)
    return path.open("rb")


def head_of(name: str, most_bytes: int) -> bytes:
    """Return the first bytes of a regular file, or b"" if unreadable; twice as fast as `open_input`."""
    descriptor = -1
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK)  # do not wait for a pipe's writer
        return os.read(descriptor, most_bytes) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except (OSError, ValueError):  # ValueError: NUL in the name
        return b""
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def require_input(path: Path, *, seekable: bool = False, most_bytes: int | None = None) -> None:
    """Check that `open_input` would accept a path, for libraries that open files by name."""
    status = path.stat()
    is_pipe = stat.S_ISFIFO(status.st_mode)
    if is_pipe and seekable:
        raise OSError(errno.ESPIPE, "it is a pipe, and this format is not read in order; save it as a file", str(path))
    opened = is_pipe or stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)  # opening a folder fails anyway
    if not opened and not path.samefile(os.devnull):  # '--config /dev/null' names an empty file
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if most_bytes is not None and stat.S_ISREG(status.st_mode) and status.st_size > most_bytes:
        raise too_large(path, most_bytes)


def is_compressed(path: Path) -> bool:
    """Return whether a file name ends in .gz or .zst: such files can only be read sequentially."""
    return path.suffix in _COMPRESSIONS


def inner_suffix(path: Path) -> str:
    """Return the file suffix, ignoring a compression suffix."""
    return Path(path.stem).suffix if is_compressed(path) else path.suffix


class _Unpacked(io.RawIOBase):
    """Decompressed content of the stream `packed`, including all its gzip members or zstd frames."""

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
    """Open a file of records; decompress on the fly if its name ends in `.gz` or `.zst`."""
    stream = open_input(path, seekable=seekable)
    return buffered(_Unpacked(stream, _COMPRESSIONS[path.suffix])) if is_compressed(path) else stream


class _Scratch:
    """Decompressed files, concatenated in an unnamed temporary file."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self.starts: dict[Path, int] = {}
        self.lock = threading.Lock()


@lru_cache(maxsize=1)
def _scratch(process: int) -> _Scratch:
    return _Scratch()


def open_unpacked(path: Path, byte_offset: int) -> BinaryIO:
    """Open a compressed file's content at a byte offset; each process unpacks a file once, to disk."""
    scratch = _scratch(os.getpid())  # forked workers must not share a file position
    with scratch.lock:
        if path not in scratch.starts:
            start = scratch.file.seek(0, os.SEEK_END)
            with open_records(path) as stream:
                shutil.copyfileobj(stream, scratch.file, 1 << 20)
            scratch.file.write(b"\n")  # terminates an unfinished last line
            scratch.file.flush()
            scratch.starts[path] = start
        opened = Path(f"/proc/self/fd/{scratch.file.fileno()}").open("rb")  # noqa: SIM115  returned
    opened.seek(scratch.starts[path] + byte_offset)
    return opened


def stored_bytes_read(stream: IO[bytes]) -> int:
    """Return the position of an `open_records` stream in the stored (compressed) file."""
    raw = getattr(stream, "raw", None)
    return raw.packed.tell() if isinstance(raw, _Unpacked) else stream.tell()


def too_large(path: Path, most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))


def bounded_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream including line ends; raise OSError on a line above the limit."""
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
        read: reads a file; exceptions are not cached.
        maxsize: maximum number of cached files.
    """

    @lru_cache(maxsize=maxsize)
    def read_version(file: Path, version: tuple[int, int, int] | None) -> _Content:
        return read(file)

    def read_cached(file: Path) -> _Content:
        return read_version(file, _version(file))

    return read_cached


def _version(file: Path) -> tuple[int, int, int] | None:
    """Return inode, size and mtime; None if the file is missing, which `read` will report."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
