"""The world outside that is asked about jobs: other programs, and processes of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import Protocol

from fcp_cli.errors import RunError


class Outside(Protocol):
    """What schedulers and this machine are asked; tests bring their own."""

    @property
    def host(self) -> str: ...

    def run(self, argv: Sequence[str]) -> str:
        """Return what a program printed.

        Raises:
            RunError: it is not there, or fails; its own words are passed on.
        """
        ...

    def stop(self, pid: int) -> None:
        """Ask a process of this machine to end."""
        ...


class ThisMachine:
    """The programs and processes that there are."""

    @property
    def host(self) -> str:
        return socket.gethostname()

    def run(self, argv: Sequence[str]) -> str:
        if shutil.which(argv[0]) is None:
            raise RunError(f"there is no {argv[0]} on this machine; ask where the job was submitted from")
        result = subprocess.run(argv, capture_output=True, text=True, check=False)
        if result.returncode:
            words = (result.stderr.strip() or result.stdout.strip() or f"status {result.returncode}").splitlines()
            raise RunError(f"{argv[0]}: {words[-1]}")
        return result.stdout

    def stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
