"""End a rank whose launcher is gone: a killed torchrun does not stop its ranks, which would train on unnoticed.

PR_SET_PDEATHSIG will not do: it fires when the thread that forked the rank exits, which may be long before its process.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping
from itertools import pairwise
from threading import Thread

from fcp_cli.machine import processes
from fcp_cli.machine.identity import ProcessIdentity

_TORCHRUN, _MSRUN = "TORCHELASTIC_RUN_ID", "MS_ROLE"  # set for ranks, but not for the launcher itself
_POLL_SECONDS = 1.0
_watched: list[ProcessIdentity] = []


def end_with_launcher() -> None:
    """End this process within a second of its launcher's end, for whatever reason. Call it as early as possible.

    Only torchrun and `msrun --join=True` are watched, since they outlive healthy ranks. Other parents (a shell, srun)
    may end first.
    """
    launcher = None if _watched else find_launcher(os.environ)
    if launcher is not None:
        _watched.append(launcher)
        Thread(target=_watch, args=(launcher,), name="launcher", daemon=True).start()


def find_launcher(environment: Mapping[str, str]) -> ProcessIdentity | None:
    """Return the launcher that waits for this process: the nearest ancestor without a rank's variables, or None.

    There may be wrappers in between, e.g. a shell or numactl.
    """
    name = next((name for name in (_TORCHRUN, _MSRUN) if name in environment), None)
    if name is None:
        return None
    pid = os.getppid()
    while name in processes.environment_of(pid):
        pid = processes.parent(pid)
    is_waited_for = name == _TORCHRUN or _joins(processes.command_of(pid))
    return ProcessIdentity.of(pid) if pid and is_waited_for else None


def _joins(argv: list[str]) -> bool:
    """Return whether msrun waits for its ranks; by default it does not."""
    words = " ".join(argv).replace("=", " ").split()
    given = [value for word, value in pairwise(words) if word == "--join"]
    return bool(given) and given[-1].lower() in ("true", "1")


def _watch(launcher: ProcessIdentity) -> None:
    _wait_for_end(launcher)
    line = f"fcp: the launcher (process {launcher.pid}) is gone, so this rank (process {os.getpid()}) ends\n"
    os.write(2, line.encode())
    os._exit(1)  # skip exit handlers: one with a collective would wait for the other ranks


def _wait_for_end(process: ProcessIdentity) -> None:
    try:
        handle = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # an old kernel, a sandbox, or a process that is already gone
        while process.is_running():
            time.sleep(_POLL_SECONDS)
        return
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    # Also check the process: its pid may have been reused before the handle was opened, which then never polls as
    # ended.
    while process.is_running() and not ended.poll():
        pass
