"""Walks through tars that anybody may have written."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fcp_cli.errors import FcpError
from fcp_cli.words import first_sentence


def tar_files(
    path: Path, stream: IO[bytes], *, error: type[FcpError]
) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the files in a tar that is not compressed, each with the open archive.

    Args:
        path: for messages.
        stream: the tar, read from where it stands; the files can be read until it is closed.
        error: the class to raise.
    """
    before = -1
    try:
        # Without compression, so that a seek passes over the content.
        archive = tarfile.open(path, "r:", fileobj=stream)  # noqa: SIM115  the stream is the caller's, who may read on
        for member in archive:
            if member.size < 0 or member.offset <= before:
                raise tarfile.ReadError(f"the header at byte {member.offset} has an impossible size")
            before = member.offset
            if member.isfile():
                yield archive, member
    except _FAILURES as failure:
        raise error(f"{path} cannot be read as an uncompressed tar: {first_sentence(failure)}") from failure


def tar_content(
    archive: tarfile.TarFile, member: tarfile.TarInfo, *, error: type[FcpError], most_bytes: int = 1 << 26
) -> bytes:
    """Return the beginning of a file in a tar."""
    try:
        if member.issparse() or archive.fileobj is None:
            opened = archive.extractfile(member)
            assert opened is not None  # only files are asked for
            return opened.read(most_bytes)
        size = min(member.size, most_bytes)
        archive.fileobj.seek(member.offset_data)
        content = archive.fileobj.read(size)
        if len(content) < size:
            raise tarfile.ReadError("unexpected end of data")
        return content
    except _FAILURES as failure:
        raise error(f"{archive.name!s}: {member.name} cannot be read: {first_sentence(failure)}") from failure


# Headers are parsed by hand there: a torn one may fail in any of these ways.
_FAILURES = (OSError, tarfile.TarError, ValueError, EOFError, OverflowError, IndexError, KeyError, RecursionError)
