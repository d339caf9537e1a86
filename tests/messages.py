"""Whole messages of errors, as snapshots hold them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# The folder of all temporary folders of this run; the conftest names it.
base_folder = Path("/nowhere")


def settled(text: str) -> str:
    """Return a text that reads the same in every run: a test's temporary folder is called FOLDER."""
    return re.sub(re.escape(str(base_folder)) + r"/[^/\s']+", "FOLDER", text)


@contextmanager
def raises(message: str) -> Iterator[None]:
    """Expect an exception whose type and whole message read `Type: message`."""
    with pytest.raises(Exception) as raised:
        yield
    assert settled(f"{type(raised.value).__name__}: {raised.value}") == message
