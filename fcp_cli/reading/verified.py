"""Content hashes of files that a job's launcher has already read, so that its ranks on this node need not.

A rank trusts a hash only for the same inode, size and times; it reads all other files itself.
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
    """Return the content hash of a file; compute it unless this rank's launcher did.

    Args:
        path: the file.
        compute: reads the file and returns its hash.
        column: hashed column, if the hash covers only one.
    """
    if not path.is_file():  # missing, which `compute` reports, or a pipe
        return compute()
    key = _key(path, column)  # taken before reading: a file that changes meanwhile gets another key
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


def _key(path: Path, column: str) -> str:
    facts = path.stat()
    return f"{path.absolute()} {column} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}"
