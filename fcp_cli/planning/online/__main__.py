"""The planner process of a training: `python -m fcp_cli.planning.online`, which is driven through its pipes.

With the argument `early` it loads the planner before its first request, while the job imports its own libraries.
"""

from __future__ import annotations

import signal
import sys
from typing import IO


def main(received: IO[bytes], answers: IO[bytes]) -> None:
    # Ctrl-C and a stop of the job reach the ranks, which close the pipe when they have saved.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # pyarrow and numba ask these for their types: a third of this process's start, and nothing here needs them.
    sys.modules.update(dict.fromkeys(("pandas", "scipy.linalg")))  # type: ignore[arg-type]
    if sys.argv[1:] == ["early"]:
        from fcp_cli.planning.online.warm_up import load_planner

        load_planner()
    from fcp_cli.planning.online.serving import serve

    serve(received, answers)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
