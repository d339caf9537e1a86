"""Reads small JSON files of a run directory into validated values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from fcp_cli.errors import RunError
from fcp_cli.reading.documents import read_object
from fcp_cli.reading.inputs import require_input
from fcp_cli.validation import shown, validated
from fcp_cli.words import first_sentence

T = TypeVar("T")


def read_state(path: Path, kind: type[T], *, format_name: str, remedy: str = "") -> T | None:
    """Read a state file, or return None if it is missing.

    Args:
        path: the file.
        kind: dataclass of its content without `format`.
        format_name: expected format.
        remedy: appended to messages: the command that fixes it.
    """
    ending = remedy and f"; {remedy}"
    if not os.path.lexists(path):
        return None
    try:
        require_input(path, seekable=True)  # excludes pipes, which would block
    except OSError as error:
        raise RunError(f"cannot read {path}: {first_sentence(error)}{ending}") from error
    try:
        document = read_object(path, error=RunError)
    except RunError as error:
        raise RunError(f"{error}{ending}") from error
    found = document.pop("format", None)
    if found != format_name:
        raise RunError(f"{path} has format {shown(found)}; this fcp reads {format_name!r}")
    return validated(document, kind, where=f"{path} is damaged", error=RunError, remedy=remedy)
