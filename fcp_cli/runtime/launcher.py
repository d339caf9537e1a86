"""A rank and its launcher, torchrun or msrun: variables, rendezvous, error file, and the end of both. Imports no torch.

A killed torchrun does not stop its ranks, which would train on unnoticed, so a rank ends with its launcher.
PR_SET_PDEATHSIG will not do: it fires when the thread that forked the rank exits, which may be long before its process.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Final

from fcp_cli.errors import FcpError, RunError
from fcp_cli.util import processes
from fcp_cli.util.network import listens
from fcp_cli.util.processes import ProcessIdentity

_TORCHRUN, _MSRUN = "TORCHELASTIC_RUN_ID", "MS_ROLE"  # set for ranks, but not for the launcher itself
DIFFERENCE_VARIABLE: Final = "FCP_NODES_DIFFER"  # set by `launching.rendezvous` for the ranks of node 0
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
        report_difference()
        Thread(target=_watch, args=(launcher,), name="launcher", daemon=True).start()


def report_difference() -> None:
    """Print on rank 0 that a node has other software than node 0, which torchrun's rendezvous found."""
    if os.environ.get("RANK") == "0" and (difference := os.environ.get(DIFFERENCE_VARIABLE)):
        print(f"fcp: warning: {difference}", file=sys.stderr, flush=True)


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


# Wait for node 0's store, the rendezvous of torchrun's nodes, no longer than the join timeout.
#
# The store of another job may have let a node start its ranks, and be gone when they connect. torch would then retry
# for as long as ranks wait for each other: half an hour on CPUs.

_JOIN_VARIABLE: Final = "FCP_JOIN_TIMEOUT"  # `fcp launch --join-timeout` sets it for several nodes
_PROBE_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.2


def await_store(environment: Mapping[str, str]) -> None:
    """Wait until the store of node 0's launcher accepts connections.

    Raises:
        RunError: it does not within the join timeout.
    """
    text = environment.get(_JOIN_VARIABLE, "")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not text.isdecimal():
        return
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    end = time.monotonic() + int(text)
    while not listens(host, port, seconds=_PROBE_SECONDS):
        if time.monotonic() > end:
            raise RunError(
                f"node 0 does not answer at {host}:{port} any more, in {text} s (--join-timeout): its job has ended, "
                "or another job had this port; start all nodes again, with another --master-port"
            )
        time.sleep(_PAUSE_SECONDS)


# Translate msrun's environment variables to torch's, so that a process started by msrun knows its rank.

_ROLE = "MS_ROLE"
_SCHEDULER, _WORKER = "MS_SCHED", "MS_WORKER"
# torch's variable -> msrun's, as set for workers by MindSpore 2.10.
_FROM_MSRUN = {
    "RANK": "MS_NODE_ID",
    "WORLD_SIZE": "MS_WORKER_NUM",
    "LOCAL_RANK": "DEVICE_ID",
    "MASTER_ADDR": "MS_SCHED_HOST",
    "MASTER_PORT": "MS_SCHED_PORT",
}


def is_scheduler(environment: Mapping[str, str]) -> bool:
    """Return whether this is msrun's scheduler: an extra process with the ranks' command that coordinates their start.

    torch needs none, so it must exit immediately with status 0.
    """
    return environment.get(_ROLE) == _SCHEDULER


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch.distributed's variables for a worker of msrun; empty for any other process.

    The rendezvous uses the port after the scheduler's, which is taken.
    """
    if environment.get(_ROLE) != _WORKER:
        return {}
    missing = [name for name in _FROM_MSRUN.values() if not environment.get(name)]
    if missing:
        raise RunError(
            f"msrun started this process without {missing[0]}, so its rank is not known; on several nodes msrun needs "
            "--node_rank"
        )
    found = {name: environment[source] for name, source in _FROM_MSRUN.items()}
    return {**found, "MASTER_PORT": str(_port(found["MASTER_PORT"]) + 1)}


def _port(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RunError(f"MS_SCHED_PORT is {text!r}, not a port; give msrun another --master_port") from None


# Write the error of a failed rank to torchrun's error file, like TorchElastic's `@record`, but without torch.

_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun for every rank


def record_error(error: BaseException) -> None:
    """Write this rank's error to its error file, if the launcher named one.

    torchrun reports the earliest error file of a job as the root cause. An existing file is kept: the script's own
    `@record` was closer to the error.
    """
    path = os.environ.get(_VARIABLE)
    if not path or Path(path).exists():
        return
    is_ours = isinstance(error, FcpError)  # its message is written for the user and needs no traceback
    line = str(error) if is_ours else f"{type(error).__name__}: {error}"
    stack = line if is_ours else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    with suppress(OSError):  # the error itself is on stderr, and must not be masked by another
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8")
