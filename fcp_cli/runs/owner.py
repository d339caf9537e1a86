"""The owner of a run directory: the only job that may write to it, named in `owner.json`, and whether it is alive.

A running owner touches the file every few seconds, and at the end records how the job ended. If it is killed, the file
goes stale. A slow step does not make it stale.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Final, Literal

from fcp_cli.errors import FcpError, RunError
from fcp_cli.runs.metrics_reader import summary_of
from fcp_cli.runs.run_dir import RunPaths, from_here, note_links, read_state, require_own_links
from fcp_cli.util import processes
from fcp_cli.util.files import json_text, write_text_atomically
from fcp_cli.util.processes import ProcessIdentity, ProcessNumber
from fcp_cli.util.validation import NonEmptyText, NonNegative

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
            mark=processes.mark_of(os.getpid()),
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
        return sorted(one.pid for one in processes.marked_processes(self.mark))

    def text(self) -> str:
        """Return the content of the owner file."""
        stored = {name: value for name, value in asdict(self).items() if name != "age_seconds"}
        return json_text({"format": FORMAT, **stored})


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


# Exclusive ownership of a run directory: a file system lock, and a file that names the owner.
#
# The lock (flock on the directory) ends with its process. Network file systems may lack it or confine it to a
# machine, so an owner file is needed, too. It is created exclusively, touched every few seconds, and void once its
# process is gone: after a kill, a reboot, or two minutes without a heartbeat from another machine.

_SETTLE_SECONDS: Final = 1.0  # covers a race between two processes that take over a directory
_RETRY_SECONDS: Final = 5.0
_held: dict[Path, int | None] = {}  # directories that this process owns -> lock handle


@dataclass(kw_only=True, slots=True)
class Ownership:
    """A run directory owned by this process; a context manager that releases it.

    Attributes:
        run_dir: the run directory.
        is_new: whether `own` created it.
        ended: how the job ended, recorded for later readers; None if no job ran.
    """

    run_dir: Path
    is_new: bool
    ended: End | None = None
    _path: Path
    _made: list[Path]
    _before: Owner | None
    _stopped: Event = field(default_factory=Event)

    def __enter__(self) -> Ownership:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Release the directory; remove it if it was created for this job and is empty."""
        self._stopped.set()
        found = readable_owner(self._path)
        with suppress(OSError, FcpError):  # a full disk, which the job itself reports
            if found is not None and found.mark == processes.mark_of(os.getpid()):
                latest = self._before if self.ended is None else replace(found, ended=self.ended)
                if latest is None:
                    self._path.unlink()
                else:
                    write_text_atomically(self._path, latest.text())
            for folder in self._made:
                folder.rmdir()
        _unlock(_held.pop(self._path.absolute(), None))

    def beat(self) -> None:
        """Touch the owner file until released; disk errors must not end the job."""
        while not self._stopped.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._path)


def own(
    run_dir: Path,
    *,
    node: int = 0,
    job: str = "",
    restarts: bool = False,
    must_be_new: bool = False,
    patience_seconds: float = 0.0,
    announce: Callable[[str], None] = lambda line: None,
) -> Ownership:
    """Take ownership of a run directory before reading or changing anything in it; create it if missing.

    Args:
        run_dir: the run directory.
        node: index of this node; each node has its own owner file.
        job: identifier common to all nodes of a job.
        restarts: whether the scheduler restarts `job` only after its earlier start has ended.
        must_be_new: raise FileExistsError if the directory exists.
        patience_seconds: how long to wait for an owner on another machine to end.
        announce: called with a line before a wait of several seconds.
    """
    made = _make(run_dir, must_be_new=must_be_new)
    if node == 0:
        require_own_links(run_dir)
    path = RunPaths(run_dir=run_dir).owner_of(node)
    owner, before = Owner.this_process(job), readable_owner(path)
    end = time.monotonic() + patience_seconds
    while True:
        handle = _lock(run_dir) if node == 0 else None
        try:
            if handle != _TAKEN and _take(path, owner, announce, restarts=restarts, is_locked=handle is not None):
                break
        except OSError as error:
            _unlock(handle)
            raise _cannot_write(run_dir, error) from error
        except BaseException:
            _unlock(handle)
            raise
        _unlock(handle)
        other = readable_owner(path) or readable_owner(RunPaths(run_dir=path.parent).owner_of(0))
        is_certain = other is not None and other.process is not None and other.process.is_local
        if is_certain or time.monotonic() >= end:
            raise in_use(run_dir, other)
        time.sleep(_RETRY_SECONDS)
    _held[path.absolute()] = handle
    if node == 0:
        note_links(run_dir)
    if before is not None and before.ended is None:
        before = None
    taken = Ownership(run_dir=run_dir, is_new=bool(made), _path=path, _made=made, _before=before)
    Thread(target=taken.beat, name="run-owner", daemon=True).start()
    return taken


def own_unless_launched(run_dir: Path) -> Ownership | None:
    """Take ownership for rank 0; return None if this process or its launcher has it already."""
    path = RunPaths(run_dir=run_dir).owner_of(0)
    if path.absolute() in _held:
        return None
    found = readable_owner(path)
    if found is not None and found.mark == os.environ.get(processes.VARIABLE):
        return None
    return own(run_dir)


def _make(run_dir: Path, *, must_be_new: bool) -> list[Path]:
    """Create a directory; return the created directories, innermost first."""
    made: list[Path] = []
    try:
        for folder in reversed((run_dir, *run_dir.parents)):
            if not folder.exists():
                with suppress(FileExistsError):  # another job just created it
                    folder.mkdir()
                    made.insert(0, folder)
        if must_be_new and run_dir not in made:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(run_dir))
    except FileExistsError:
        raise
    except OSError as error:
        raise _cannot_write(run_dir, error) from error
    return made


_TAKEN: Final = -1


def _lock(run_dir: Path) -> int | None:
    """Lock a directory; return a handle, `_TAKEN`, or None if the file system lacks such locks."""
    try:
        handle = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _cannot_write(run_dir, error) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return _TAKEN
    except OSError:  # ENOLCK, ENOSYS, EOPNOTSUPP; EBADF on NFS, which needs a writable handle
        os.close(handle)
        return None
    return handle


def _unlock(handle: int | None) -> None:
    if handle is not None and handle != _TAKEN:
        os.close(handle)


def _forget_locks() -> None:
    """Close a forked child's copies of the locks, which would outlive this process."""
    for handle in _held.values():
        _unlock(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def _take(path: Path, owner: Owner, announce: Callable[[str], None], *, restarts: bool, is_locked: bool) -> bool:
    """Write the owner file unless its owner is alive; return whether it now names this process."""
    if _blocking_job(path, owner) is not None:
        return False
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(owner.text())
        return True
    except FileExistsError:
        found = readable_owner(path)
    is_earlier_start = restarts and found is not None and found.job == owner.job
    if not is_earlier_start and is_alive(found, path, announce):
        return False
    write_text_atomically(path, owner.text())
    if not is_locked or found is None or found.process is None or not found.process.is_local:
        time.sleep(_SETTLE_SECONDS)  # without a shared lock, another process may also take over: the last one wins
    return readable_owner(path) == owner


def _blocking_job(path: Path, owner: Owner) -> Owner | None:
    """Return node 0's owner if it is alive and belongs to another job."""
    first = RunPaths(run_dir=path.parent).owner_of(0)
    found = None if path == first else readable_owner(first)
    return found if found is not None and found.job != owner.job and is_alive(found, first) else None


def _cannot_write(run_dir: Path, error: OSError) -> FcpError:
    return FcpError(f"cannot write the run directory {run_dir}: {error.strerror}; choose another --run-dir")
