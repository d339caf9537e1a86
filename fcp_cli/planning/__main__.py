"""Planner process of a training job: `python -m fcp_cli.planning`, controlled through stdin and stdout.

With the argument `early` it warms up before its first request, while the job imports its own libraries.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from types import ModuleType
from typing import IO


class Unneeded:
    """Import hook that hides optional libraries of pyarrow and numba, which take a third of the start-up time.

    This process does not use them, and plans do not depend on them. Setting `sys.modules[name]` to None does not work,
    since pyarrow's extension modules take it for the library.
    """

    _NAMES = ("pandas", "scipy.linalg")

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Raise ModuleNotFoundError for the hidden libraries; return None for others to try the next finder."""
        if name in cls._NAMES:
            raise ModuleNotFoundError(f"{name} is not used by this process", name=name)


def end_with_rank(pipe: int) -> None:
    """End this process once its rank closes the pipe or ends, even while it compiles; the journal keeps its steps."""
    ended = select.poll()
    ended.register(pipe, 0)  # only the hang-up, which is always polled
    with suppress(AttributeError, OSError):  # forked children of a rank may hold its end of the pipe
        ended.register(os.pidfd_open(os.getppid()), select.POLLIN)
    ended.poll()
    os._exit(0)


def main(received: IO[bytes], answers: IO[bytes]) -> None:
    # Signals to the job also reach its ranks, which close the pipe after saving; this process must outlive them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Thread(target=end_with_rank, args=(received.fileno(),), name="rank", daemon=True).start()
    sys.meta_path.insert(0, Unneeded)
    if sys.argv[1:] == ["early"]:
        from fcp_cli.planning.online import load_planner

        load_planner()
    from fcp_cli.planning.online import serve

    serve(received, answers)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
