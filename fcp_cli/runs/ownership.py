"""Exclusive ownership of a run directory: a file system lock, and a file that names the owner.

The lock (flock on the directory) ends with its process. Network file systems may lack it or confine it to a machine, so
an owner file is needed, too. It is created exclusively, touched every few seconds, and void once its process is gone:
after a kill, a reboot, or two minutes without a heartbeat from another machine.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Final

from fcp_cli.errors import FcpError
from fcp_cli.files import write_text_atomically
from fcp_cli.machine import started_by
from fcp_cli.runs.folder import RunPaths
from fcp_cli.runs.owner import BEAT_SECONDS, End, Owner, in_use, is_alive, readable_owner

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
            if found is not None and found.mark == started_by.mark_of(os.getpid()):
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
    if found is not None and found.mark == os.environ.get(started_by.VARIABLE):
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
