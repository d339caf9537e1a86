"""The planner process of a training: `python -m fcp_cli.planning.online`, which is driven through its pipes.

With the argument `early` it loads the planner before its first request, while the job imports its own libraries.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import IO


class Unneeded:
    """Hides libraries that pyarrow and numba import to ask for their types: a third of this process's start.

    Nothing here needs them, and no plan depends on whether they are installed. None in `sys.modules` would not do:
    pyarrow's extension modules take it for the library.
    """

    _NAMES = ("pandas", "scipy.linalg")

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Refuse these libraries, and leave others to the next finder."""
        if name in cls._NAMES:
            raise ModuleNotFoundError(f"{name} is not used by this process", name=name)


def main(received: IO[bytes], answers: IO[bytes]) -> None:
    # Ctrl-C and a stop of the job reach the ranks, which close the pipe when they have saved.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.meta_path.insert(0, Unneeded)
    if sys.argv[1:] == ["early"]:
        from fcp_cli.planning.online.warm_up import load_planner

        load_planner()
    from fcp_cli.planning.online.serving import serve

    serve(received, answers)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
