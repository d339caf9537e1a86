"""Ends a rank whose launcher is gone: a killed torchrun does not stop its ranks, and they would train on unnoticed.

PR_SET_PDEATHSIG does not serve: it hangs on the thread that forked the rank, which may end long before its process.
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

_TORCHRUN, _MSRUN = "TORCHELASTIC_RUN_ID", "MS_ROLE"  # set for ranks, and not for the launcher itself
_POLL_SECONDS = 1.0
_watched: list[ProcessIdentity] = []


def end_with_launcher() -> None:
    """End this process within a second of its launcher's end, however that ends. Call it as early as possible.

    torchrun and `msrun --join=True` outlive their ranks, so only a death of theirs is seen. Anything else that may have
    started this process (a shell, srun) may end before it.
    """
    launcher = None if _watched else find_launcher(os.environ)
    if launcher is not None:
        _watched.append(launcher)
        Thread(target=_watch, args=(launcher,), name="launcher", daemon=True).start()


def find_launcher(environment: Mapping[str, str]) -> ProcessIdentity | None:
    """Return the launcher that waits for this process, or None: the nearest ancestor without the variables of a rank.

    There may be a wrapper between them, e.g. a shell or numactl.
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
    """Return whether msrun waits for its ranks; by default it leaves them to themselves."""
    words = " ".join(argv).replace("=", " ").split()
    given = [value for word, value in pairwise(words) if word == "--join"]
    return bool(given) and given[-1].lower() in ("true", "1")


def _watch(launcher: ProcessIdentity) -> None:
    _wait_for_end(launcher)
    line = f"fcp: the launcher (process {launcher.pid}) is gone, so this rank (process {os.getpid()}) ends\n"
    os.write(2, line.encode())
    os._exit(1)  # no exit handler runs: one that meets the other ranks would wait for them


def _wait_for_end(process: ProcessIdentity) -> None:
    try:
        handle = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # an old kernel or a sandbox, or it is gone already
        while process.is_running():
            time.sleep(_POLL_SECONDS)
        return
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    # Its number may have gone to another process before the handle was opened, which would never end for us.
    while process.is_running() and not ended.poll():
        pass
