"""One thread per process: the tests' tensors are tiny, and several threads on few cores wait for each other."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _one_thread_per_process() -> None:
    if "torch" in sys.modules:  # imported here, it would be imported for tests that need none of it
        sys.modules["torch"].set_num_threads(1)
