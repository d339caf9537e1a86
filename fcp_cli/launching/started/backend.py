"""Programs of schedulers, and processes of this machine, that are asked about jobs."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence

from fcp_cli.errors import RunError
from fcp_cli.machine.identity import ProcessIdentity


class JobBackend:
    """Back ends that run jobs and report their state: schedulers by their programs, and processes of this machine.

    Attributes:
        host: this machine's name.
    """

    def __init__(self) -> None:
        self.host = socket.gethostname()

    def run(self, argv: Sequence[str]) -> str:
        """Return a program's output."""
        if shutil.which(argv[0]) is None:
            raise RunError(f"there is no {argv[0]} on this machine; ask where the job was submitted from")
        result = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        if result.returncode:
            words = (result.stderr.strip() or result.stdout.strip() or f"status {result.returncode}").splitlines()
            raise RunError(f"{argv[0]}: {words[-1]}")
        return result.stdout

    def stop(self, process: ProcessIdentity) -> bool:
        """Ask a process of this machine to end; return False if it no longer runs."""
        return process.send(signal.SIGTERM)
