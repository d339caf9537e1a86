"""Reads the small JSON files of a run folder, each into the one validated value that it holds."""

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
    """Read a file of a run, or return None if there is none.

    Args:
        path: the file.
        kind: dataclass of everything that it holds besides its format.
        format_name: the format that this fcp reads.
        remedy: ends messages; the command that helps.
    """
    ending = remedy and f"; {remedy}"
    if not os.path.lexists(path):
        return None
    try:
        require_input(path, seekable=True)  # no pipe, which would be waited for
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
