"""Checksums of checkpoint files: CRC-32 per chunk, so that ranks can share the verification of a file.

CRC-32 detects corruption by disks and copies at several GB/s per core. It does not protect against tampering.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from fcp_cli.machine.host import usable_cores
from fcp_cli.reading.inputs import open_input
from fcp_cli.validation import NonNegativeCount

CHUNK_BYTES: Final = 64 << 20
_READ_BYTES: Final = 4 << 20
_MOST_THREADS: Final = 8  # more threads would outrun any disk or network


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSums:
    """Size and checksums of a file.

    Attributes:
        bytes: size of the file.
        crc32: CRC-32 of each chunk of `CHUNK_BYTES`; the last chunk may be shorter.
    """

    bytes: NonNegativeCount
    crc32: tuple[NonNegativeCount, ...]


def sums_of(pieces: Iterable[memoryview]) -> FileSums:
    """Return the checksums of a file whose content is the concatenation of `pieces`."""
    size, found, running = 0, [], 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            part = piece[start : start + CHUNK_BYTES - size % CHUNK_BYTES]
            running = zlib.crc32(part, running)
            start, size = start + len(part), size + len(part)
            if size % CHUNK_BYTES == 0:
                found.append(running)
                running = 0
    if size % CHUNK_BYTES:
        found.append(running)
    return FileSums(bytes=size, crc32=tuple(found))


def wrong_size(folder: Path, files: Mapping[str, FileSums]) -> str | None:
    """Describe the first file that is missing or has another size, or return None."""
    for name, sums in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{folder / name} is missing or unreadable: {error.strerror or error}"
        if size != sums.bytes:
            return f"{folder / name} has {size:,} bytes, but {sums.bytes:,} were saved"
    return None


def damage(folder: Path, files: Mapping[str, FileSums], *, index: int = 0, count: int = 1) -> str | None:
    """Verify a share of the chunks; describe the first corrupt or missing file, or return None.

    Args:
        folder: the folder of the files.
        files: checksums by file name.
        index, count: verify share `index` of `count`, so that ranks divide the work.
    """
    if (wrong := wrong_size(folder, files)) is not None:
        return wrong
    chunks = [(folder / name, chunk, saved) for name, sums in files.items() for chunk, saved in enumerate(sums.crc32)]
    threads = usable_cores() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with ThreadPoolExecutor(max(1, min(_MOST_THREADS, threads))) as pool:
        found = pool.map(_damaged_chunk, *zip(*islice(chunks, index, None, count), strict=True)) if chunks else ()
        return next((line for line in found if line is not None), None)


def _damaged_chunk(path: Path, chunk: int, saved: int) -> str | None:
    start = chunk * CHUNK_BYTES
    try:
        found, size = _chunk_sum(path, start)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if found == saved:
        return None
    place = f"bytes {start:,} to {start + size:,} of {path}"
    return f"{place} have the checksum {found:08x}, but were saved with {saved:08x}"


def _chunk_sum(path: Path, start: int) -> tuple[int, int]:
    running, left = 0, CHUNK_BYTES
    with open_input(path) as file:
        file.seek(start)
        while left and (piece := file.read(min(left, _READ_BYTES))):
            running, left = zlib.crc32(piece, running), left - len(piece)
    return running, CHUNK_BYTES - left
