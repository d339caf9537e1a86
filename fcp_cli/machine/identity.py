"""Identity of a process: PID, start time, boot and host. A PID alone may be reused."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from fcp_cli.machine import processes
from fcp_cli.validation import NonEmptyText, NonNegativeCount

MOST_PROCESSES: Final = 1 << 22  # Linux's PID_MAX_LIMIT
INIT: Final = 1

ProcessNumber = Annotated[int, Meta(ge=INIT, le=MOST_PROCESSES, description="the number of a process")]
BootId = Annotated[str, Meta(pattern=r"^[0-9a-f-]{36}\Z", description="the boot id of a machine")]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """Unique identity of a process.

    Attributes:
        host: host name.
        boot_id: kernel boot id, new at each boot.
        pid: process id.
        started_ticks: clock ticks from boot to its start.
    """

    host: NonEmptyText
    boot_id: BootId
    pid: ProcessNumber
    started_ticks: NonNegativeCount

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the identity of a local process, or None if it has ended or there is no /proc."""
        boot_id, started = current_boot_id(), processes.started_ticks(pid)
        if not boot_id or started is None:
            return None
        return cls(host=socket.gethostname(), boot_id=boot_id, pid=pid, started_ticks=started)

    @property
    def is_local(self) -> bool:
        """Whether the process belongs to this machine and its current boot."""
        return self.host == socket.gethostname() and self.boot_id == current_boot_id()

    def is_running(self) -> bool:
        """Return whether this process runs on this machine; False for other machines."""
        return self.is_local and processes.started_ticks(self.pid) == self.started_ticks

    def send(self, number: signal.Signals) -> bool:
        """Signal the process if it is running on this machine; return whether it was.

        Raises:
            PermissionError: the process is init, or of another user.
        """
        if self.pid == INIT:
            raise PermissionError(f"process {INIT} is never signalled")
        if not hasattr(os, "pidfd_open"):
            if running := self.is_running():
                os.kill(self.pid, number)
            return running
        try:
            handle = os.pidfd_open(self.pid)
        except OSError as error:
            if not isinstance(error, ProcessLookupError):
                raise
            return False
        try:
            # Check after opening the handle, which keeps referring to the same process even if the PID is reused.
            if not self.is_running():
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True


def current_boot_id() -> str:
    """Return this machine's boot id, or "" if there is none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
