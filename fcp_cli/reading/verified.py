"""Content hashes of files that a job's launcher has read whole, so that its ranks on this machine need not read them.

A rank trusts one for the very file that the launcher read: the same inode, size and times. It reads all others itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from fcp_cli.reading.documents import decode_json

VARIABLE: Final = "FCP_VERIFIED"

_read_here: dict[str, str] = {}


def content_hash_of(path: Path, compute: Callable[[], str], *, column: str = "") -> str:
    """Return the content hash of a file, computed unless the launcher of this rank has read the same file.

    Args:
        path: the file.
        compute: reads it, and returns the hash.
        column: the column that the hash is of, if the file has others.
    """
    if not path.is_file():  # reading it reports why, or it is a pipe, of which nothing is known before
        return compute()
    key = _key(path, column)  # before it is read: a file that changes meanwhile is another one
    known = None
    with suppress(ValueError, AttributeError):
        known = decode_json(os.environ.get(VARIABLE, "{}")).get(key)
    if isinstance(known, str):
        return known
    found = compute()
    _read_here[key] = found
    return found


def verified_variable() -> dict[str, str]:
    """Return the variable by which ranks that this process starts learn the hashes that it computed."""
    return {VARIABLE: json.dumps(_read_here)} if _read_here else {}


def _key(path: Path, column: str) -> str:
    facts = path.stat()
    return f"{path.absolute()} {column} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}"
