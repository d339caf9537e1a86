"""The owner of a run folder: the one job that may write into it, named in `owner.json`, and whether it still runs.

While a job runs, its owner touches the file every few seconds, and at the end it writes there how the job ended. An
owner that was killed writes nothing: then the file goes stale, which a slow step does not make it.
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
STALE_SECONDS: Final = 120.0  # shared file systems show times up to a minute late
_STALE_HERE_SECONDS: Final = 15.0  # on the owner's machine, where its process is known to have gone
_WATCH_SECONDS = 2 * BEAT_SECONDS + 1
_LOOK_SECONDS: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The process that owns a run folder, or that ended the latest job there.

    Attributes:
        host, pid: the host and pid of the launcher, or of rank 0 if fcp did not start the job.
        process: its identity, or None on systems without /proc.
        since: ISO time at which it took the folder.
        job: the same for all nodes of a job and all starts of a batch job; may be "".
        mark: the mark in the environment of the processes that it starts; see `machine.started_by`.
        ended: how its job ended, or None.
        age_seconds: since its last sign of life; not in the file.
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
        """Return this process as an owner from now on."""
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
        """Whether it ended without a word: it was killed, or its machine was."""
        if self.ended is not None:
            return False
        if self.process is None or not self.process.is_local:
            return self.age_seconds > STALE_SECONDS
        return self.age_seconds > _STALE_HERE_SECONDS and not self.process.is_running()

    def survivors(self) -> list[int]:
        """Return the processes of this machine that it started and that outlive it, for at most --grace seconds."""
        return sorted(one.pid for one in started_by.marked_processes(self.mark))

    def text(self) -> str:
        """Return the text of its file."""
        stored = {name: value for name, value in asdict(self).items() if name != "age_seconds"}
        return json.dumps({"format": FORMAT, **stored}, indent=2) + "\n"


def read_owner(path: Path) -> Owner | None:
    """Read an owner file, or return None if there is none, or an empty one, which is being written.

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
    """Return whether an owner still runs: on this machine by the identity of its process, elsewhere by its heartbeat.

    A heartbeat that looks stale is watched for a while first: clocks of machines differ, and jump.

    Args:
        owner: the owner that `path` names; None: it cannot be read, perhaps because it is being written.
        path: the path of the owner file.
        announce: receives a line before a wait of several seconds.
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
    """Return the latest time at which the job wrote to its folder; 0 if it holds nothing of a job."""
    paths = RunPaths(run_dir=path.parent)
    times = [0.0]
    for file in (path, paths.metrics):
        # Network file systems ask the server on open, and otherwise trust their cache.
        with suppress(OSError):
            opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # without waiting for the writer of a pipe
            times.append(os.fstat(opened).st_mtime)
            os.close(opened)
    return max(times)


def _beats(path: Path) -> bool:
    """Return whether the job writes to its folder within two beats."""
    before, end = _latest_sign(path), time.monotonic() + _WATCH_SECONDS
    while time.monotonic() < end:
        if _latest_sign(path) != before:
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def refuse_running(run_dir: Path) -> None:
    """Refuse a run folder whose job still trains."""
    path = RunPaths(run_dir=run_dir).owner_of(0)
    owner = readable_owner(path)
    if path.exists() and is_alive(owner, path):
        raise in_use(run_dir, owner, or_else="wait until it has ended: its next checkpoint would not fit the plan")


def in_use(run_dir: Path, owner: Owner | None, *, or_else: str = "choose another --run-dir") -> RunError:
    """Return the error of a command that needs a folder which a job owns."""
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
