"""How long tests wait for other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

# Many times what any of them needs, on a busy machine too: only one that hangs is waited for in vain.
PATIENCE_SECONDS = 600.0


def wait_until(condition: Callable[[], bool], *, every_seconds: float = 0.1) -> None:
    """Wait for a condition of other processes; fail if it never comes true."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(every_seconds)
