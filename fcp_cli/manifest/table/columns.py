"""Columns of manifests of any size: in memory, or in a temporary file above `ROWS_IN_MEMORY` rows."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fcp_cli.errors import ManifestError

ROWS_IN_MEMORY: Final = 1 << 25
"""Limit of rows in memory; it also decides how a seed permutes rows, so changing it changes plans."""
_CHUNK_ROWS: Final = 1 << 22


def new_column(rows: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a zero-filled column; above `ROWS_IN_MEMORY` rows, map it from a temporary file in `TMPDIR`."""
    if rows <= ROWS_IN_MEMORY:
        return np.zeros(rows, dtype)
    try:
        with tempfile.TemporaryFile(prefix="fcp-column-") as file:  # unnamed: it vanishes when unmapped
            os.posix_fallocate(file.fileno(), 0, rows * np.dtype(dtype).itemsize)  # detect a full disk now
            return np.memmap(file, dtype=dtype, mode="w+", shape=(rows,))
    except OSError as error:
        gigabytes = rows * np.dtype(dtype).itemsize / 1e9
        raise ManifestError(
            f"a column of {rows} rows needs {gigabytes:.1f} GB in {tempfile.gettempdir()}: {error.strerror or error}; "
            "name a folder with room in TMPDIR"
        ) from error


def chunked(column: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield (first row, piece) of a column; pages of a mapped file are released after each piece."""
    for first in range(0, max(len(column), 1), _CHUNK_ROWS):
        yield first, column[first : first + _CHUNK_ROWS]
        release(column)


def release(column: npt.NDArray[Any]) -> None:
    """Release the resident pages of a mapped column; reading loads them again."""
    mapped = getattr(column, "_mmap", None)
    if isinstance(mapped, mmap.mmap):
        mapped.madvise(mmap.MADV_DONTNEED)
