"""How long tests wait for other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

# Many times what any of them needs, on a busy machine too: only one that hangs is waited for in vain.
PATIENCE_SECONDS = 600.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Look ten times a second; fail if it never comes true."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
