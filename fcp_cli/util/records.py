"""Append-only record files with digests, which tell a truncated tail from damage, and content hashes of other files.

A job's launcher passes the hashes of the files it has read, so that its ranks on this node need not read them again. A
rank trusts a hash only for the same inode, size and times; it reads all other files itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa

from fcp_cli.util.inputs import DamagedError, decode_json, open_input
from fcp_cli.util.parquet import FAILURES, require_names
from fcp_cli.util.words import first_sentence

_STATED: Final = struct.Struct("<Q16s")  # content size and digest
_HEADER_BYTES: Final = _STATED.size + 8  # plus a digest of these two


def write_record(file: IO[bytes], content: bytes) -> None:
    """Append a record."""
    stated = _STATED.pack(len(content), _digest(content, 16))
    file.write(stated + _digest(stated, 8))
    file.write(content)
    file.flush()


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the content of complete records; a truncated record at the end of the file is skipped."""
    size = path.stat().st_size
    with open_input(path, seekable=True) as file:
        number = 0
        while len(header := file.read(_HEADER_BYTES)) == _HEADER_BYTES:
            number += 1
            stated = header[: _STATED.size]
            if header[_STATED.size :] != _digest(stated, 8):
                raise DamagedError(f"its record {number} is damaged")
            num_bytes, digest = _STATED.unpack(stated)
            if num_bytes > size - file.tell():
                return
            content = file.read(num_bytes)
            if _digest(content, 16) != digest:
                raise DamagedError(f"its record {number} is damaged")
            yield content


def table_content(table: pa.Table) -> bytes:
    """Serialize an Arrow table as record content."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def table_of_content(content: bytes) -> Any:
    """Deserialize and validate an Arrow table; null values are rejected."""
    try:
        with pa.ipc.open_stream(pa.py_buffer(content)) as reader:
            table = reader.read_all()
        require_names(table.schema)
        table.validate(full=True)
    except FAILURES as failure:
        raise DamagedError(first_sentence(failure)) from failure
    for column in table.columns:
        lists = pa.types.is_list(column.type)
        if column.null_count or (lists and column.combine_chunks().flatten().null_count):
            raise DamagedError("a column has nulls")
    return table


def _digest(content: bytes, size: int) -> bytes:
    return hashlib.blake2b(content, digest_size=size).digest()


VARIABLE: Final = "FCP_VERIFIED"

_read_here: dict[str, str] = {}


def content_hash_of(path: Path, compute: Callable[[], str], *, column: str = "") -> str:
    """Return the content hash of a file; compute it unless this rank's launcher did.

    Args:
        path: the file.
        compute: reads the file and returns its hash.
        column: hashed column, if the hash covers only one.
    """
    if not path.is_file():  # missing, which `compute` reports, or a pipe
        return compute()
    facts = path.stat()  # before reading: a file that changes meanwhile gets another key
    key = f"{path.absolute()} {column} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}"
    known = None
    with suppress(ValueError, AttributeError):
        known = decode_json(os.environ.get(VARIABLE, "{}")).get(key)
    if isinstance(known, str):
        return known
    found = compute()
    _read_here[key] = found
    return found


def verified_variable() -> dict[str, str]:
    """Return the environment variable that passes the hashes computed here to ranks started by this process."""
    return {VARIABLE: json.dumps(_read_here)} if _read_here else {}
