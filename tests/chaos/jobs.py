"""A job of the bundled trainer that can be looked at and struck, and every process of it found."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from fcp_cli.util import processes
from tests.chaos.checker import whole_checkpoints
from tests.training.small_runs import fcp_command

_MARK = "FCP_CHAOS_JOB"
_POLL_SECONDS = 0.004
_TORCHRUN = b"torch.distributed.run"
_PLANNER = b"fcp_cli.planning"


class Job:
    """`fcp launch ...`, started; its processes are those whose environment has its mark.

    Args:
        words: of `fcp launch`.
        folder: current folder.
        mark: of its processes.
        preexec: called in the process of fcp before its program.
    """

    def __init__(
        self, *words: str, folder: Path, run_dir: Path, mark: str, preexec: Callable[[], None] | None = None
    ) -> None:
        self.run_dir = run_dir
        self._entry = f"{_MARK}={mark}".encode()
        self._printed = folder / f"stderr-{mark}"
        environment = {**os.environ, _MARK: mark}
        self.began = time.monotonic()
        with self._printed.open("wb") as stderr:
            self.fcp = subprocess.Popen(
                fcp_command("launch", *words),
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                preexec_fn=preexec,
            )

    def is_running(self) -> bool:
        return self.fcp.poll() is None

    @property
    def status(self) -> int:
        status = self.fcp.poll()
        assert status is not None
        return status

    @property
    def lines(self) -> list[str]:
        """What fcp printed."""
        return self._printed.read_text(encoding="utf-8", errors="replace").splitlines()

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(self.lines) if line.strip()), "")

    def processes(self) -> list[int]:
        """Return every live process of the job, whoever is its parent by now."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self._entry in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return [pid for pid in found if not _is_zombie(pid)]

    def ranks(self) -> dict[int, int]:
        """Return rank -> process."""
        found = {}
        for pid in self.processes():
            rank = processes.environment_of(pid).get("RANK")
            if rank is not None:
                found[int(rank)] = pid
        return found

    def name_of(self, pid: int) -> str:
        """Return what a process of the job is, in words."""
        rank = processes.environment_of(pid).get("RANK")
        return (
            "fcp"
            if pid == self.fcp.pid
            else f"rank {rank}"
            if rank
            else "torchrun"
            if pid == self.torchrun()
            else "a helper"
        )

    def torchrun(self) -> int | None:
        """Return torchrun's process."""
        return _running(_TORCHRUN, processes.children(self.fcp.pid))

    def planner(self) -> int | None:
        """Return the process that plans for rank 0."""
        return _running(_PLANNER, self.processes())

    def steps(self) -> int:
        """Return how many steps are recorded."""
        with suppress(OSError):
            return (self.run_dir / "metrics.jsonl").read_bytes().count(b'"kind":"step"')
        return 0

    def reported_steps(self) -> int:
        """Return the last step that fcp has told of."""
        found = [int(at[1]) for line in self.lines if (at := re.match(r"step (\d+)/", line))]
        return max(found, default=0)

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for something to be true while the job runs; return whether it came true."""
        end = time.monotonic() + seconds
        while not condition():
            if not self.is_running() or time.monotonic() > end:
                return condition()
            time.sleep(_POLL_SECONDS)
        return True

    def wait_gone(self, seconds: float) -> list[int]:
        """Wait until fcp has ended and no process of the job is left; return those that are, at last."""
        end = time.monotonic() + seconds
        while (self.is_running() or self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return self.processes()

    def kill(self) -> None:
        """End everything that is left of it, stopped or not."""
        while left := self.processes():
            processes.send(left, signal.SIGKILL)
            time.sleep(0.05)
            self.fcp.poll()
        self.fcp.wait()

    def tell_stacks(self) -> None:
        """Have every process that is left, if it was forked, print where it is to its standard error."""
        for pid in self.processes():
            with suppress(OSError):
                if b"\0-m\0" in (Path("/proc") / str(pid) / "cmdline").read_bytes() and _catches(pid, signal.SIGUSR2):
                    os.kill(pid, signal.SIGUSR2)
        time.sleep(1.0)

    def is_saving(self) -> bool:
        return any((self.run_dir / "checkpoints").glob(".*.partial/*"))

    def newest(self) -> int:
        """Return the step of the newest whole checkpoint; 0 without one."""
        return max((int(path.name.rpartition("-")[2]) for path in whole_checkpoints(self.run_dir)), default=0)


def _running(module: bytes, pids: Iterable[int]) -> int | None:
    """Return the process that runs a module."""
    for pid in pids:
        with suppress(OSError):
            if module in (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0"):
                return pid
    return None


def _catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _is_zombie(pid: int) -> bool:
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True
