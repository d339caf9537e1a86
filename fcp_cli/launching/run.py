"""Runs one node's command here: shows rank 0, forwards Ctrl-C, leaves no process behind, and says who failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Literal, Protocol, TextIO

from fcp_cli.errors import RunError
from fcp_cli.launching import processes
from fcp_cli.launching.failure import Failure, find_failure, rank_log, torchrun_log
from fcp_cli.launching.spec import LaunchSpec
from fcp_cli.launching.torchrun import torchrun_argv

_POLL_SECONDS = 0.1


class Process(Protocol):
    """The part of subprocess.Popen that is used; tests bring their own."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class Runner(Protocol):
    """Starts a process."""

    def start(self, argv: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes]) -> Process: ...


class SubprocessRunner:
    """In a session of its own: Ctrl-C on the terminal reaches fcp alone, which then asks the ranks to stop, once."""

    def start(self, argv: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes]) -> Process:
        return subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutcome:
    """How a job ended.

    Attributes:
        status: exit status of torchrun; 0 is success.
        stopped_by: the signal that fcp was sent and passed on, or None.
        failure: who failed, where a rank did.
    """

    status: int
    stopped_by: signal.Signals | None
    failure: Failure | None


def run_job(
    spec: LaunchSpec,
    *,
    node_rank: int = 0,
    shows: bool = True,
    watch: Callable[[], None] = lambda: None,
    announce: Callable[[str], None] = lambda message: None,
    stdout: Literal["stdout", "stderr"] = "stdout",
    runner: Runner | None = None,
) -> JobOutcome:
    """Run one node of a job to its end.

    Args:
        spec: with `log_dir` set.
        node_rank: which node this machine is.
        shows: whether what local rank 0 prints is copied to fcp's own streams.
        watch: called about ten times a second while the job runs, and once after its end.
        announce: told what happens after Ctrl-C.
        stdout: which of fcp's streams rank 0's standard output goes to.
        runner: starts the process.

    Raises:
        RunError: the command cannot be started.
    """
    assert spec.log_dir is not None
    spec.log_dir.mkdir(parents=True, exist_ok=True)
    followers = []
    if shows:
        followers = [_Follower(spec.log_dir, "stdout", stdout), _Follower(spec.log_dir, "stderr", "stderr")]

    def look() -> None:
        for follower in followers:
            follower.copy_new()
        watch()

    with torchrun_log(spec.log_dir).open("wb") as output, _received_signals() as received:
        process = _start(runner or SubprocessRunner(), spec, node_rank, output)
        try:
            status = _wait(process, received, look, announce)
        finally:
            if process.poll() is None:
                processes.kill_tree(process.pid)
                process.wait()
        look()
    stopped_by = received[0] if received else None
    failure = find_failure(spec.log_dir, status=status) if status and stopped_by is None else None
    return JobOutcome(status=status, stopped_by=stopped_by, failure=failure)


def _start(runner: Runner, spec: LaunchSpec, node_rank: int, output: IO[bytes]) -> Process:
    argv = torchrun_argv(spec, node_rank=node_rank)
    try:
        return runner.start(argv, environment={**os.environ, **spec.job_environment()}, output=output)
    except OSError as error:
        raise RunError(f"cannot start {argv[0]}: {error.strerror}") from error


def _wait(
    process: Process, received: Sequence[signal.Signals], look: Callable[[], None], announce: Callable[[str], None]
) -> int:
    """Wait for the end; the first signal asks the ranks to stop, the second ends everything."""
    answered = 0
    while (status := process.poll()) is None:
        look()
        if len(received) > answered:
            answered = len(received)
            _stop(process, announce, at_once=answered > 1)
        time.sleep(_POLL_SECONDS)
    return status


def _stop(process: Process, announce: Callable[[str], None], *, at_once: bool) -> None:
    """The ranks are asked directly: torchrun would give them 30 seconds, and a step may take longer."""
    ranks = processes.children(process.pid)
    if at_once or not ranks:  # no ranks: torchrun has not come so far as to start them
        processes.kill_tree(process.pid)
    else:
        announce("stopping at the end of this step; press Ctrl-C again to stop at once")
        processes.send(ranks, signal.SIGINT)


@contextmanager
def _received_signals() -> Iterator[list[signal.Signals]]:
    """Collects SIGINT, SIGTERM (batch systems) and SIGHUP (a closed terminal), which all stop the job the same way."""
    received: list[signal.Signals] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, remember) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Follower:
    """Copies one stream of local rank 0 to one of fcp's own, as it is printed."""

    def __init__(self, log_dir: Path, stream: str, target: str) -> None:
        self._log_dir = log_dir
        self._stream = stream
        self._target = target
        self._path: Path | None = None
        self._offset = 0

    def copy_new(self) -> None:
        self._path = self._path or rank_log(self._log_dir, 0, self._stream)
        if self._path is None:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        if new:
            target: TextIO = getattr(sys, self._target)
            target.write(new.decode("utf-8", errors="replace"))
            target.flush()
