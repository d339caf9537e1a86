"""Answer Ctrl-C during training: finish the step, save, leave."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """A flag that the first SIGINT sets; a second one ends the process at once.

    The ranks agree on it at the end of each step, since the signal may reach them in different steps. SIGTERM keeps
    its ordinary effect: it is how torchrun ends the ranks that wait for one that failed.
    """

    def __init__(self) -> None:
        self._made = False

    def __bool__(self) -> bool:
        return self._made

    def install(self) -> StopRequest:
        signal.signal(signal.SIGINT, self._request_stop)
        return self

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self._made = True
        signal.signal(number, signal.SIG_DFL)
