"""The heartbeat of a run: whether its launcher is at work, seen from any machine that shares the run's folder.

While a job runs, its launcher touches one small file every few seconds, and at the end it writes there how it ended. A
process that was killed writes nothing: then the file goes stale, which a slow step does not make it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from fcp_cli.errors import FcpError, RunError
from fcp_cli.files import write_text_atomically
from fcp_cli.machine import processes
from fcp_cli.machine.identity import BootId, ProcessIdentity, ProcessNumber, current_boot_id
from fcp_cli.runs.state_file import read_state
from fcp_cli.validation import NonEmptyText, NonNegative, NonNegativeCount

FORMAT = "fcp-heartbeat/1"
End = Literal["finished", "interrupted", "failed"]

_BEAT_SECONDS = 5.0
_STALE_HERE_SECONDS = 15.0  # on the launcher's machine, where its process is known to have gone
_STALE_SECONDS = 120.0  # elsewhere: shared file systems show times up to a minute late


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """The launcher's latest sign of life, and how long ago it was.

    Attributes:
        host, pid, process_started, boot_id: identify the launcher. The last two are None if its system has no /proc,
            and the boot id in files of earlier versions, too.
        started: ISO time of the launch.
        ended: how the job ended, or None.
        age_seconds: since the last sign of life.
    """

    host: NonEmptyText
    pid: ProcessNumber
    process_started: NonNegativeCount | None
    boot_id: BootId | None = None
    started: str
    ended: End | None
    age_seconds: NonNegative = 0.0

    @property
    def launcher(self) -> ProcessIdentity | None:
        """The process that launched the run, or None if nothing distinguishes it from others of its number."""
        if self.process_started is None or self.boot_id is None:
            return None
        return ProcessIdentity(host=self.host, boot_id=self.boot_id, pid=self.pid, started_ticks=self.process_started)

    @property
    def is_gone(self) -> bool:
        """Whether the launcher ended without a word: it was killed, or its machine was."""
        if self.ended is not None:
            return False
        launcher = self.launcher
        if self.host != socket.gethostname() or (launcher is not None and not launcher.is_local):
            return self.age_seconds > _STALE_SECONDS
        return self.age_seconds > _STALE_HERE_SECONDS and not self._lives_here()

    def _lives_here(self) -> bool:
        if self.process_started is not None:
            return processes.started_ticks(self.pid) == self.process_started
        try:
            os.kill(self.pid, 0)  # sends nothing, and fails if there is no such process
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's, and alive
        return True


class Pulse:
    """Given to the launcher while its job runs: `beat` often, and set `ended` before leaving."""

    def __init__(self, path: Path | None) -> None:
        self.ended: End = "failed"
        self._path = path
        self._last = time.monotonic()

    def beat(self) -> None:
        """Touch the file, at most every few seconds; a full or lost disk must not end the job."""
        if self._path is None or time.monotonic() - self._last < _BEAT_SECONDS:
            return
        self._last = time.monotonic()
        with suppress(OSError):
            os.utime(self._path)


@contextmanager
def beating(path: Path | None) -> Iterator[Pulse]:
    """Keep a heartbeat file for the length of a job; None keeps none. A job left by an exception has failed."""
    pulse = Pulse(path)
    if path is None:
        yield pulse
        return
    launcher = {
        "format": FORMAT,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": processes.started_ticks(os.getpid()),
        "boot_id": current_boot_id() or None,
        "started": datetime.now(timezone.utc).isoformat(),
    }
    write_text_atomically(path, json.dumps({**launcher, "ended": None}) + "\n")
    try:
        yield pulse
    finally:
        with suppress(FcpError):  # a full disk, of which the job's own last line tells
            write_text_atomically(path, json.dumps({**launcher, "ended": pulse.ended}) + "\n")


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Read the heartbeat of a run, or return None if there is none, as for a job that `fcp launch` did not start."""
    found = read_state(path, Heartbeat, format_name=FORMAT)
    if found is None:
        return None
    try:
        touched = path.stat().st_mtime
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    return replace(found, age_seconds=max(0.0, time.time() - touched))
