"""Detects whether source files changed while they were read, or between parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources.base import Source
from fcp_cli.reading.remote import RemotePath, each, remembered_size, version_of

Versions: TypeAlias = Sequence[tuple[str, int, int]]
"""Name, size in bytes and mtime in ns per file; for remote objects, a digest of entity tag and time replaces mtime."""


def file_versions(source: Source) -> tuple[tuple[str, int, int], ...]:
    """Return the versions of a source's files; () for a text tree, which has no file list."""
    files: Sequence[Path] = getattr(source, "files", ())
    return tuple((file.name, *version) for file, version in zip(files, each(_version, files), strict=True))


def _version(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError as error:
        raise ManifestError(f"cannot read {file}: {error.strerror or error}") from error
    if isinstance(file, RemotePath) and remembered_size(file) != status.st_size:
        raise ManifestError(f"{file} changed while it was read; build again")
    return version_of(status)


def differing(before: Versions, now: Versions) -> str:
    """Return the name of the first file whose version differs, or ""."""
    return next((one[0] for one, other in zip_longest(before, now, fillvalue=("", 0, 0)) if one != other), "")


def require_unchanged(source: Source, before: Versions) -> None:
    """Raise ManifestError if a source file changed since `before`."""
    if changed := differing(before, file_versions(source)):
        raise ManifestError(f"{source.describe()['path']}: {changed} changed while it was read; build again")
