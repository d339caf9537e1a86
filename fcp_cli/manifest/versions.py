"""Versions of the files of a source: whether one changed while it was read, or between parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.sources.base import Source
from fcp_cli.reading.remote import RemotePath, each, remembered_size, version_of

Versions: TypeAlias = Sequence[tuple[str, int, int]]
"""Name, bytes and time of the last change in ns of each file; of an object, a digest of entity tag and time."""


def file_versions(source: Source) -> tuple[tuple[str, int, int], ...]:
    """Return the versions of the files of a source, if it knows them: a folder of texts does not."""
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
    """Return the name of the first file of another version, or ""."""
    return next((one[0] for one, other in zip_longest(before, now, fillvalue=("", 0, 0)) if one != other), "")


def require_unchanged(source: Source, before: Versions) -> None:
    """Check that the files of a source are those that were read."""
    if changed := differing(before, file_versions(source)):
        raise ManifestError(f"{source.describe()['path']}: {changed} changed while it was read; build again")
