"""Columns of manifests of any size: in memory, or above `ROWS_IN_MEMORY` rows in a temporary file."""

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
"""Rows of the largest manifest that is held in memory, as its permutation is: part of the meaning of a seed."""
_CHUNK_ROWS: Final = 1 << 22


def new_column(rows: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a column of zeros, which a large manifest has in a file of the folder for temporary files (`TMPDIR`)."""
    if rows <= ROWS_IN_MEMORY:
        return np.zeros(rows, dtype)
    try:
        with tempfile.TemporaryFile(prefix="fcp-column-") as file:  # without a name: it ends with its last user
            os.posix_fallocate(file.fileno(), 0, rows * np.dtype(dtype).itemsize)  # no room is an error now, not later
            return np.memmap(file, dtype=dtype, mode="w+", shape=(rows,))
    except OSError as error:
        gigabytes = rows * np.dtype(dtype).itemsize / 1e9
        raise ManifestError(
            f"a column of {rows} rows needs {gigabytes:.1f} GB in {tempfile.gettempdir()}: {error.strerror or error}; "
            "name a folder with room in TMPDIR"
        ) from error


def chunked(column: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield a column in pieces, each with its first row; pages of a file leave memory after their piece."""
    for first in range(0, max(len(column), 1), _CHUNK_ROWS):
        yield first, column[first : first + _CHUNK_ROWS]
        release(column)


def release(column: npt.NDArray[Any]) -> None:
    """Release the pages of a column in a file; reading loads them again."""
    mapped = getattr(column, "_mmap", None)
    if isinstance(mapped, mmap.mmap):
        mapped.madvise(mmap.MADV_DONTNEED)
