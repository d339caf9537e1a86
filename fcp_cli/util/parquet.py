"""Opens untrusted Parquet files and reads their footers.

Checksums are verified if present: Parquet's own per page, and fcp's of the footer, which Parquet does not protect. The
latter precedes the footer, in bytes that Parquet leaves unused: see `footer_mark`.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from fcp_cli.errors import refuse_missing_thread
from fcp_cli.util.inputs import decode_json, require_input
from fcp_cli.util.remote import RemotePath
from fcp_cli.util.words import first_sentence

FOOTER_KEY: Final = b"fcp"
FAILURES: Final = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError)
"""Exceptions that pyarrow raises on damaged files; FcpError is not among them."""
_MOST_VALUES: Final = 1_000_000
END_BYTES: Final = 8  # the length of the footer, and the magic bytes
_MARK: Final = b"fcp-crc\0"
_MARK_BYTES: Final = len(_MARK) + 4


def open_parquet(path: Path, footer: Any = None) -> Any:
    """Open a Parquet file with valid column names; verify the footer unless `footer` is given."""
    require_input(path, seekable=True)
    if footer is None:
        _verify_footer(path)
    file = pq.ParquetFile(_by_ranges(path), metadata=footer, page_checksum_verification=True)
    require_names(file.schema_arrow)
    return file


def open_footer(path: Path) -> Any:
    """Read and verify the footer of a Parquet file with valid column names."""
    require_input(path, seekable=True)
    _verify_footer(path)
    footer = pq.read_metadata(_by_ranges(path))
    require_names(footer.schema.to_arrow_schema())
    return footer


def _by_ranges(path: Path) -> Any:
    """Return an input for pyarrow; for remote objects, one that fetches only requested ranges."""
    return path.open("rb", 0) if isinstance(path, RemotePath) else path


def numpy_of(column: Any) -> npt.NDArray[Any]:
    """Return [rows] a view of an Arrow column of numbers without nulls; Arrow's own conversions import pandas."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    dtype = np.dtype(array.type.to_pandas_dtype())
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, count=len(array), offset=array.offset * dtype.itemsize)


def footer_size(end: bytes) -> int:
    """Return the size of the footer including its 8-byte trailer, which states it."""
    return int.from_bytes(end[-END_BYTES:-4], "little") + END_BYTES


def footer_mark(footer: bytes) -> bytes:
    """Return the checksum mark that precedes a footer; `footer` extends to the end of the file."""
    return _MARK + zlib.crc32(footer).to_bytes(4, "little")


def _verify_footer(path: Path) -> None:
    """Verify the footer checksum, if the file has one: other writers add none."""
    with path.open("rb", 0 if isinstance(path, RemotePath) else -1) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - END_BYTES))
        before = size - footer_size(file.read()) - _MARK_BYTES
        if before < 0:  # truncated: pyarrow reports it
            return
        file.seek(before)
        mark = file.read(_MARK_BYTES)
        if mark.startswith(_MARK) and mark != footer_mark(file.read()):
            raise ValueError("its footer does not match its checksum")


def footer_document(pairs: Mapping[bytes, bytes] | None) -> Any:
    """Parse the JSON that fcp stored in a footer's key-value pairs, or return None."""
    text = (pairs or {}).get(FOOTER_KEY)
    return None if text is None else decode_json(text, most_values=_MOST_VALUES)


def reason_of(failure: BaseException) -> str:
    """Return a short reason why a file could not be read.

    Raises:
        FcpError: no thread could be started, for which the file is not at fault.
    """
    refuse_missing_thread(failure)
    if isinstance(failure, UnicodeError):
        return "a name in it, or its own, is not UTF-8"
    return "it states more than fits into memory" if isinstance(failure, MemoryError) else first_sentence(failure)


def require_names(schema: Any) -> None:
    """Check that column names are valid UTF-8 and unique: pyarrow decodes them lazily and allows duplicates."""
    name = next((name for name, count in Counter(schema.names).items() if count > 1), None)
    if name is not None:
        raise ValueError(f"it has two columns named {name!r}")


@contextmanager
def parquet_writer(temporary: Path, schema: pa.Schema, *, deltas: Collection[str] = ()) -> Iterator[pq.ParquetWriter]:
    """Write a Parquet file to a temporary path from `replaced_atomically`.

    `deltas` are integer (list) columns stored delta-encoded; others are dictionary-encoded.
    """
    leaf_of = {
        field.name: f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name for field in schema
    }
    others = [leaf for name, leaf in leaf_of.items() if name not in deltas]
    encodings = {leaf_of[name]: "DELTA_BINARY_PACKED" for name in deltas}
    # Without Arrow's copy of the schema, readers take the footer's key-value metadata as schema metadata. So a plan's
    # totals and hash, known only at the end, can be schema metadata of a streamed file.
    with (
        pa.OSFile(str(temporary), "wb") as sink,
        pq.ParquetWriter(
            sink,
            schema,
            compression="zstd",
            store_schema=False,
            write_page_checksum=True,
            use_dictionary=others,
            column_encoding=encodings or None,
        ) as writer,
    ):
        yield writer
    with temporary.open("r+b") as file:
        file.seek(-END_BYTES, os.SEEK_END)
        size = footer_size(file.read())
        file.seek(-size, os.SEEK_END)
        footer = file.read()
        file.seek(-size, os.SEEK_END)
        file.write(footer_mark(footer) + footer)
