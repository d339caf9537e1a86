"""Atomic file writes, and data files shipped with the package."""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from fcp_cli.errors import FcpError, UsageError
from fcp_cli.util.words import nearest_words

USUAL_MANIFESTS = ("lengths.parquet", "dataset.parquet")
_PARTIAL: Final = ".partial"
_LEFTOVER_SECONDS: Final = 3600.0  # a live writer without a lock (some network file systems) has written more recently
_LOOP: Final = "it is a loop of symbolic links"


def near_file(path: Path) -> str:
    """Return a hint for a missing file from the names beside it: "; did you mean 'data/lengths.parquet'?", or ""."""
    try:
        names = {one.stem: one.name for one in path.parent.iterdir()}
    except OSError:
        return ""
    near = nearest_words(path.stem, names, cutoff=0.75)
    return f"; did you mean '{path.with_name(names[near[0]])}'?" if near else ""


def unused(name: str) -> str:
    """Return a name for a new file in a suggested command: this one, or one with a number if the file is here."""
    path, number = Path(name), 1
    while path.exists():
        number += 1
        path = Path(f"{Path(name).stem}-{number}{path.suffix}")
    return as_word(path)


def as_word(path: Path | str) -> str:
    """Return a path as one word of a suggested command, whatever blanks it has."""
    return shlex.quote(str(path))


def manifest_here() -> Path | None:
    """Return a manifest with a common name in the current folder, for messages; or None."""
    return next((Path(name) for name in USUAL_MANIFESTS if Path(name).is_file()), None)


@contextmanager
def replaced_atomically(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary file next to `path`; rename it to `path` if the block succeeds, else remove it.

    Ctrl-C or a full disk leaves `path` unchanged. A symbolic link remains: its target is replaced and keeps its
    permissions. Nothing can fail after the rename.

    Args:
        path: the file to replace.
        durable: flush to disk before the rename, so that a power failure leaves either the old or the new file. Use
            False for small files that are rewritten often or can be recomputed.
    """
    name, path = path, _resolved(path)  # messages use the path as typed
    if path.exists() and not path.is_file():  # a rename would replace a device by a file
        raise FcpError(f"cannot write {name}: it is not a file")
    if not path.parent.is_dir():
        raise FcpError(f"cannot write {name}: there is no folder {name.parent}")
    if durable:
        _remove_leftovers(path)
    with ExitStack() as stack:
        try:
            temporary, descriptor = _create_temporary(path)
            stack.callback(os.close, descriptor)
            stack.callback(_remove_quietly, temporary)
            yield temporary
            with suppress(FileNotFoundError):
                os.fchmod(descriptor, path.stat().st_mode & 0o777)
            if durable:
                flush_to_disk(temporary)
            temporary.replace(path)
        except OSError as error:
            raise FcpError(f"cannot write {name}: {reason_of(error, name.parent)}") from error
    if durable:
        with suppress(OSError):  # some file systems cannot flush folders
            flush_to_disk(path.parent)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop, before Python 3.13
        raise FcpError(f"cannot write {path}: {_LOOP}") from error


def _create_temporary(path: Path) -> tuple[Path, int]:
    """Create and lock an empty file with a unique name; the lock ends with the process.

    Exclusive creation protects against planted files, in particular symbolic links to other files.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}{_PARTIAL}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with suppress(OSError):  # some network file systems have no locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return temporary, descriptor


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of killed writers of `path`: old ones without a lock."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{_PARTIAL}"):
        with suppress(OSError):
            descriptor = os.open(leftover, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(descriptor).st_mtime > _LEFTOVER_SECONDS:
                    leftover.unlink()
            finally:
                os.close(descriptor)


def _remove_quietly(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def flush_to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason_of(error: OSError, folder: Path) -> str:
    """Return why a file in `folder` cannot be written, with the free space if the disk is full."""
    # pyarrow wraps the system's message in its own words and the temporary file name.
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return reason
    with suppress(OSError):
        reason += f" ({shutil.disk_usage(folder).free:,} bytes free in {folder})"
    return reason


def refuse_to_overwrite(output: Path, *sources: Path | None) -> None:
    """Raise UsageError if the output would overwrite an input file."""
    for source in sources:
        if source is not None and output.exists() and source.exists() and output.samefile(source):
            raise UsageError(f"-o {output} would overwrite the source; name another file with -o")


def write_text_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a small text file atomically."""
    with replaced_atomically(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_atomically(path: Path, document: Mapping[str, Any]) -> None:
    """Write a small JSON file atomically."""
    write_text_atomically(path, json_text(document))


def json_text(document: Mapping[str, Any]) -> str:
    """Return the content of a JSON file that people read, too."""
    return json.dumps(document, indent=2) + "\n"


def shipped(kind: str) -> Path:
    """Return the folder of shipped data: `profiles`, `launchers` or `examples`.

    In a wheel it is inside the package; in a checkout at the top level, where people expect it.
    """
    packaged = Path(__file__).parents[1] / "_data" / kind
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / kind
