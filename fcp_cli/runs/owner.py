"""The owner of a run directory: the only job that may write to it, named in `owner.json`, and whether it is alive.

A running owner touches the file every few seconds, and at the end records how the job ended. If it is killed, the file
goes stale. A slow step does not make it stale.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, Literal

from fcp_cli.errors import RunError
from fcp_cli.machine import started_by
from fcp_cli.machine.identity import ProcessIdentity, ProcessNumber
from fcp_cli.runs.folder import RunPaths, from_here
from fcp_cli.runs.state_file import read_state
from fcp_cli.runs.summary import summary_of
from fcp_cli.validation import NonEmptyText, NonNegative

FORMAT = "fcp-owner/1"
End = Literal["finished", "interrupted", "failed"]
BEAT_SECONDS: Final = 5.0
STALE_SECONDS: Final = 120.0  # shared file systems may show times a minute late
_STALE_HERE_SECONDS: Final = 15.0  # on the owner's machine, if its process is gone
_WATCH_SECONDS = 2 * BEAT_SECONDS + 1
_LOOK_SECONDS: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The process that owns a run directory, or owned it last.

    Attributes:
        host, pid: of the launcher, or of rank 0 if fcp did not start the job.
        process: process identity, or None on systems without /proc.
        since: ISO time at which it took the directory.
        job: common to all nodes of a job and all starts of a batch job; may be "".
        mark: marker in the environment of its child processes; see `machine.started_by`.
        ended: how its job ended, or None if it has not.
        age_seconds: time since its last heartbeat; not stored.
    """

    host: NonEmptyText
    pid: ProcessNumber
    process: ProcessIdentity | None
    since: NonEmptyText
    job: str
    mark: NonEmptyText
    ended: End | None = None
    age_seconds: NonNegative = field(default=0.0, compare=False)

    @classmethod
    def this_process(cls, job: str) -> Owner:
        """Return an owner that stands for this process."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            process=ProcessIdentity.of(os.getpid()),
            since=datetime.now(timezone.utc).isoformat(),
            job=job,
            mark=started_by.mark_of(os.getpid()),
        )

    @property
    def is_gone(self) -> bool:
        """Whether it vanished without recording an end: it was killed, or its machine went down."""
        if self.ended is not None:
            return False
        if self.process is None or not self.process.is_local:
            return self.age_seconds > STALE_SECONDS
        return self.age_seconds > _STALE_HERE_SECONDS and not self.process.is_running()

    def survivors(self) -> list[int]:
        """Return its child processes on this machine that still run, for at most --grace seconds after it died."""
        return sorted(one.pid for one in started_by.marked_processes(self.mark))

    def text(self) -> str:
        """Return the content of the owner file."""
        stored = {name: value for name, value in asdict(self).items() if name != "age_seconds"}
        return json.dumps({"format": FORMAT, **stored}, indent=2) + "\n"


def read_owner(path: Path) -> Owner | None:
    """Read an owner file; return None if it is missing, or empty because it is being written.

    Raises:
        RunError: the file is damaged.
    """
    is_begun = path.is_file() and not path.stat().st_size
    found = None if is_begun else read_state(path, Owner, format_name=FORMAT)
    if found is None:
        return None
    try:
        touched = path.stat().st_mtime
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    return replace(found, age_seconds=max(0.0, time.time() - touched))


def readable_owner(path: Path) -> Owner | None:
    """Read an owner file, or return None if it is missing, damaged, or being written."""
    with suppress(RunError):
        return read_owner(path)
    return None


def is_alive(owner: Owner | None, path: Path, announce: Callable[[str], None] = lambda line: None) -> bool:
    """Return whether an owner is alive: here by its process identity, on other machines by its heartbeat.

    A stale heartbeat is observed for a while before it counts as dead: clocks of machines differ and jump.

    Args:
        owner: owner read from `path`; None if unreadable, perhaps because it is being written.
        path: the owner file.
        announce: called with a line before a wait of several seconds.
    """
    if owner is not None and owner.ended is not None:
        return False
    process = None if owner is None else owner.process
    if owner is not None and process is not None and process.is_local:
        return process.is_running() or bool(owner.survivors())
    has_rebooted = owner is not None and owner.host == socket.gethostname()
    if not has_rebooted and time.time() - _latest_sign(path) < STALE_SECONDS:
        return True
    host = "another machine" if owner is None else owner.host
    announce(f"watching {from_here(path)} for {_WATCH_SECONDS:.0f} s: its owner on {host} seems to be gone")
    return _beats(path)


def _latest_sign(path: Path) -> float:
    """Return the latest modification time of the job's files; 0 if there are none."""
    paths = RunPaths(run_dir=path.parent)
    times = [0.0]
    for file in (path, paths.metrics):
        # Network file systems revalidate on open, and otherwise trust their cache.
        with suppress(OSError):
            opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # do not block on a pipe
            times.append(os.fstat(opened).st_mtime)
            os.close(opened)
    return max(times)


def _beats(path: Path) -> bool:
    """Return whether the job writes within two heartbeats."""
    before, end = _latest_sign(path), time.monotonic() + _WATCH_SECONDS
    while time.monotonic() < end:
        if _latest_sign(path) != before:
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def refuse_running(run_dir: Path) -> None:
    """Raise RunError if a job is still training in a run directory."""
    path = RunPaths(run_dir=run_dir).owner_of(0)
    owner = readable_owner(path)
    if path.exists() and is_alive(owner, path):
        raise in_use(run_dir, owner, or_else="wait until it has ended: its next checkpoint would not fit the plan")


def in_use(run_dir: Path, owner: Owner | None, *, or_else: str = "choose another --run-dir") -> RunError:
    """Return the error for a run directory that another job owns."""
    run_dir = from_here(run_dir)
    if owner is None:
        return RunError(f"{run_dir} is in use by a job that has just begun; watch it with 'fcp watch {run_dir}'")
    since = owner.since[:19].replace("T", " ")
    if owner.process is not None and owner.process.is_local and not owner.process.is_running():
        pids = ", ".join(map(str, owner.survivors()))
        return RunError(
            f"{run_dir} is in use: the job that began at {since} UTC lost its launcher (process {owner.pid} on "
            f"{owner.host}), and its ranks still end their step (processes {pids}); try again in a minute"
        )
    last = None
    with suppress(RunError):
        last = summary_of(RunPaths(run_dir=run_dir).metrics).last
    step = "" if last is None else f", and is at step {last['step'] + 1}"
    return RunError(
        f"{run_dir} is in use by a job on {owner.host} (process {owner.pid}), which began at {since} UTC{step}; watch "
        f"it with 'fcp watch {run_dir}', end it there with 'kill {owner.pid}', or {or_else}"
    )
