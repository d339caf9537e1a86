"""The planner process of a training: `python -m fcp_cli.planning.online`, which is driven through its pipes."""

from __future__ import annotations

import signal
import sys
from typing import IO

from fcp_cli.planning.online.serving import serve


def main(received: IO[bytes], answers: IO[bytes]) -> None:
    # Ctrl-C and a stop of the job reach the ranks, which close the pipe when they have saved.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    serve(received, answers)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
