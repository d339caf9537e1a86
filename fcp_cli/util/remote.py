"""Paths and files in object stores, given by URL and read in ranges, with retries and bounded memory.

Any store that fsspec supports works. A `RemotePath` is a `Path`, so sources need not know where their files are.
Credentials come from the store's driver: environment variables, configuration files, machine roles.
"""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import os
import random
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, Final, TypeVar

from fcp_cli.errors import FcpError
from fcp_cli.util.plugins import pip_install_module
from fcp_cli.util.words import first_sentence

_Answer = TypeVar("_Answer")

_WAITS_SECONDS: Final = (0.25, 1.0, 4.0, 16.0)  # before each retry; throttling stores ask for seconds
_LEAST_WINDOW: Final = 1 << 17  # covers an image header or a single record
_MOST_WINDOW: Final = 1 << 23
_QUESTIONS: Final = 32
_BUFFER_BYTES: Final = 1 << 16
# Version fields (entity tags, times) in the drivers of S3, Google, Azure, the hub and HTTP.
_VERSION_FIELDS: Final = (
    *("ETag", "etag", "VersionId", "generation", "md5Hash", "content_md5", "blob_id", "Content-MD5", "Digest"),
    *("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created"),
)
_TRANSIENT_STATUS: Final = (408, 409, 425, 429)
_DEFINITE: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)


class StoreError(FcpError, OSError):
    """A store failed to answer; `strerror` is the reason and `filename` the URL."""

    def __str__(self) -> str:
        return f"cannot read {self.filename}: {self.strerror}"


class RemotePath(PosixPath):
    """URL of an object or prefix in a store: `scheme://container/key`."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        return str(self)

    def absolute(self) -> RemotePath:
        return self

    def resolve(self, strict: bool = False) -> RemotePath:
        return self

    def store(self) -> tuple[Any, str]:
        """Return the fsspec file system and the name in it."""
        url = str(self)
        try:
            from fsspec.core import url_to_fs

            system, name = url_to_fs(url, use_listings_cache=False)
            return system, name
        except ImportError as error:
            cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
            module = (cause.name or "fsspec").partition(".")[0]
            command = pip_install_module(module) or f"pip install {module}"
            raise StoreError(errno.ENOSYS, f"its store needs {module}: {command}", url) from error
        except ValueError as error:
            raise StoreError(errno.EINVAL, first_sentence(error), url) from error

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return size and kind; a digest of version fields replaces inode and mtime."""
        system, name = self.store()
        info: Mapping[str, Any] = retried(lambda: system.info(name), str(self))
        if info["type"] == "directory":
            return os.stat_result((stat.S_IFDIR, 0, 0, 1, 0, 0, 0, 0, 0, 0))
        if info.get("size") is None:
            raise StoreError(errno.ENOTSUP, "the server does not state its size", str(self))
        facts = repr([str(info.get(field)) for field in _VERSION_FIELDS])
        version = int.from_bytes(hashlib.sha256(facts.encode()).digest()[:7], "big")
        times = {"st_mtime_ns": version}
        return os.stat_result((stat.S_IFREG, version, 0, 1, 0, 0, info["size"], 0, 0, 0), times)

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self.exists() and stat.S_ISDIR(self.stat().st_mode)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self.exists() and stat.S_ISREG(self.stat().st_mode)

    def iterdir(self) -> Iterator[RemotePath]:  # type: ignore[override]
        system, name = self.store()
        for child in retried(lambda: system.ls(name, detail=False), str(self)):
            if child.rstrip("/") != name.rstrip("/"):
                yield self._named(child)

    def glob(self, pattern: str, **options: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        system, name = self.store()
        for found in sorted(retried(lambda: system.glob(f"{name}/{pattern}"), str(self))):
            yield self._named(found)

    def _named(self, name: str) -> RemotePath:
        """Return the URL of a listed name with the user's scheme: a driver may have several."""
        return RemotePath(name if "://" in name else f"{str(self).partition('://')[0]}://{name}")

    def open(self, mode: str = "rb", buffering: int = -1, *args: Any, **options: Any) -> Any:
        """Open for binary reading, with growing read-ahead; with `buffering` 0, read only requested ranges."""
        if mode != "rb":
            raise StoreError(errno.EROFS, f"stores are read-only; mode {mode!r} is not supported", str(self))
        return RemoteFile(self, reads_ahead=False) if buffering == 0 else buffered(RemoteFile(self))


class RemoteFile(io.RawIOBase):
    """Bytes of an object, fetched in ranges; an incomplete range is fetched again.

    Args:
        path: the object.
        reads_ahead: whether sequential reads prefetch up to 8 MiB.
    """

    def __init__(self, path: RemotePath, *, reads_ahead: bool = True) -> None:
        self._path, self._status = path, path.stat()
        if stat.S_ISDIR(self._status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        system, name = path.store()
        self._file: BinaryIO = retried(lambda: system.open(name, "rb", cache_type="none"), str(path))
        self._reads_ahead, self._window = reads_ahead, _LEAST_WINDOW // 2
        self._at = 0
        self._held, self._held_at = memoryview(b""), 0
        self.name = str(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._status.st_size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._status.st_size - self._at)
        if wanted <= 0:
            return 0
        skipped = self._at - self._held_at
        if not 0 <= skipped < len(self._held):
            self._hold(wanted)
            skipped = 0
        piece = self._held[skipped : skipped + wanted]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
            self._held = memoryview(b"")
        super().close()

    def _hold(self, wanted: int) -> None:
        follows = self._at == self._held_at + len(self._held)
        self._window = min(2 * self._window, _MOST_WINDOW) if follows else _LEAST_WINDOW
        self._held = memoryview(b"")  # free the old window first
        size = min(max(wanted, self._window if self._reads_ahead else 0), self._status.st_size - self._at)
        try:
            self._held, self._held_at = memoryview(retried(lambda: self._range(size), self.name)), self._at
        except OSError as error:
            if version_of(self._path.stat()) != version_of(self._status):
                raise StoreError(errno.ESTALE, "it changed while it was read; build again", self.name) from error
            raise

    def _range(self, size: int) -> bytes:
        self._file.seek(self._at)
        found = self._file.read(size)
        if len(found) != size:
            raise ConnectionError(f"the connection ended after {len(found):,} of {size:,} bytes")
        return found


def buffered(raw: io.RawIOBase) -> io.BufferedReader:
    return io.BufferedReader(raw, _BUFFER_BYTES)


def version_of(status: os.stat_result) -> tuple[int, int]:
    """Return size and mtime in ns, or the digest that replaces mtime."""
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=1 << 20)
def remembered_size(path: RemotePath) -> int:
    """Return the size of an object when first queried, since a build queries it repeatedly."""
    return path.stat().st_size


def each(ask: Callable[[Path], _Answer], files: Sequence[Path]) -> list[_Answer]:
    """Apply `ask` to each file, in order; concurrently if any file is remote."""
    if not any(isinstance(file, RemotePath) for file in files):
        return [ask(file) for file in files]
    with ThreadPoolExecutor(_QUESTIONS) as pool:
        return list(pool.map(ask, files))


def data_path(text: str | Path) -> Path:
    """Convert a path or URL to a path."""
    scheme, mark, rest = str(text).partition("://")
    if isinstance(text, Path) or not mark:
        return Path(text)
    return Path(f"/{rest.lstrip('/')}") if scheme == "file" else RemotePath(text)


def retried(ask: Callable[[], _Answer], url: str) -> _Answer:
    """Query a store; retry transient failures with growing delays."""
    for attempt in itertools.count():
        try:
            return ask()
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url) from error
        except Exception as error:  # drivers raise the exceptions of their HTTP clients
            is_transient = _is_transient(error)
            if attempt == len(_WAITS_SECONDS) or not is_transient:
                reason = first_sentence(error) or type(error).__name__
                attempts = f" ({attempt + 1} attempts)" if is_transient else ""
                raise StoreError(getattr(error, "errno", None) or errno.EIO, f"{reason}{attempts}", url) from error
        time.sleep(_WAITS_SECONDS[attempt] * random.uniform(0.5, 1.0))  # jitter, so that clients do not retry together
    raise AssertionError("unreachable: the last attempt returns or raises")


def _is_transient(error: Exception) -> bool:
    """Return whether a retry may succeed: network failures, throttling, server errors."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 600:
        return status >= 500 or status in _TRANSIENT_STATUS
    if isinstance(error, _DEFINITE) or type(error).__name__ == "FileExpired":
        return False
    # HTTP clients derive errors from these or define them in their modules; other errors are permanent.
    return isinstance(error, OSError | TimeoutError) or type(error).__module__.startswith(
        ("aiohttp", "asyncio", "httpx")
    )
