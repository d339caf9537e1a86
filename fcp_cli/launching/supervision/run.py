"""Runs one node's launcher: shows rank 0, forwards Ctrl-C, leaves no process behind, and reports the failed rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Literal, Protocol, TextIO, TypeAlias

from fcp_cli.errors import RunError
from fcp_cli.launching.job.commands import node_argv, node_environment
from fcp_cli.launching.job.job import Job
from fcp_cli.launching.supervision.failure import Failure
from fcp_cli.launching.supervision.full_disk import is_full
from fcp_cli.launching.supervision.guard import guarded
from fcp_cli.launching.supervision.msrun_ranks import NodeRanks, ranks_of
from fcp_cli.launching.supervision.stopped import StoppedRanks
from fcp_cli.machine import processes, started_by
from fcp_cli.reading.verified import verified_variable
from fcp_cli.runs.metrics.follower import FileFollower

_POLL_SECONDS = 0.1
# Output of a rank whose peer is gone: a traceback, the bundled trainer's error, or log lines of torch's C++.
_OF_A_VICTIM = re.compile(
    rb"Traceback \(most recent call last\)|lost the connection to another rank"
    rb"|\[[WE]\d{4} \S+ \w+\.cpp:\d+\].*(recv|send|waitForInput|Broken pipe|(reset|closed) by peer)"
)
# After its ranks have ended, a stopped launcher may wait five minutes for launchers of other nodes, which may be gone.
_ALONE_SECONDS = 60.0
_HELD_SECONDS = 10.0  # longer than a job takes to end after a lost connection


class Process(Protocol):
    """Interface of `subprocess.Popen` that is used here; tests pass their own."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


Start: TypeAlias = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], Process]
"""Starts a program, given its environment and the file for its output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Screen:
    """Where the output of a running job is shown.

    Attributes:
        shows: whether to copy local rank 0's output to fcp's own streams.
        stdout: stream of fcp that receives rank 0's standard output.
        watch: called about ten times a second while the job runs, and once after its end.
        announce: receives one line per event, e.g. after Ctrl-C.
    """

    shows: bool = True
    stdout: Literal["stdout", "stderr"] = "stdout"
    watch: Callable[[], None] = lambda: None
    announce: Callable[[str], None] = lambda message: None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutcome:
    """Outcome of a job on one node.

    Attributes:
        status: exit status of the launcher; 0 is success.
        stopped_by: first signal that fcp received, or None.
        failure: failed rank or launcher, or None.
    """

    status: int
    stopped_by: signal.Signals | None
    failure: Failure | None

    @property
    def agreed_to_stop(self) -> bool:
        """Whether all ranks stopped together because one of them, perhaps on another node, was interrupted."""
        return self.failure is not None and self.failure.status == 128 + signal.SIGINT


def run_job(job: Job, *, node_rank: int = 0, screen: Screen = Screen(), start: Start | None = None) -> JobOutcome:
    """Run this node's part of a job with `log_dir` set; see `run_command`."""
    assert job.log_dir is not None
    return run_command(
        node_argv(job, node_rank=node_rank),
        environment={
            **os.environ,
            **node_environment(job, inherited_path=os.environ.get("PATH", "")),
            **verified_variable(),
        },
        log_dir=job.log_dir,
        screen=screen,
        grace_seconds=job.grace_seconds,
        start=start,
    )


def run_command(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    log_dir: Path,
    screen: Screen,
    grace_seconds: float,
    stop_file: Path | None = None,
    start: Start | None = None,
) -> JobOutcome:
    """Run one node's command to its end.

    Args:
        argv: command of the launcher, which writes the ranks' output to `log_dir`.
        environment: complete environment of the launcher.
        log_dir: folder of the logs, created if missing.
        screen: where the output is shown.
        grace_seconds: time from SIGTERM or SIGHUP until everything is killed.
        stop_file: file whose appearance stops the job like SIGTERM; None: disabled.
        start: starts the launcher, instead of `Popen`; such a launcher has no guard.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    # Environment variable that marks all processes of the job, to find them even if reparented.
    mark = started_by.mark_of(os.getpid())
    ranks = ranks_of(argv, log_dir)
    targets = {"stdout": screen.stdout, "stderr": "stderr"}
    stopped = StoppedRanks(screen.announce)
    outputs = [_RankOutput(ranks, stream, targets[stream]) for stream in ranks.streams if screen.shows]

    def refresh() -> None:
        screen.watch()  # first, so that steps are printed before an error of rank 0
        for output in outputs:
            output.copy_new(holds=stopped.are_seen)
        if stop_file is not None and not received and stop_file.exists():
            received.append(signal.SIGTERM)

    unguarded: AbstractContextManager[Callable[[int], None]] = nullcontext(lambda pid: None)
    guard = guarded(argv, log_dir=log_dir, grace_seconds=grace_seconds) if start is None else unguarded
    with ranks.log.open("wb") as log, _received_signals() as received, guard as watch_over:
        process = _started(start or _start, argv, {**environment, started_by.VARIABLE: mark}, log)
        watch_over(process.pid)
        try:
            status = _wait(process, ranks, stopped, received, refresh, screen.announce, grace_seconds)
        finally:
            if process.poll() is None:  # an exception in the loop: the ranks must not outlive it
                processes.kill_tree(process.pid)
                process.wait()
        if status < 0:  # a killed launcher leaves its ranks behind, reparented
            started_by.end_marked(mark)
        refresh()
    stopped_by = received[0] if received else None
    is_failed = status != 0 and stopped_by is None
    # A suspended rank takes precedence: the others only report that they waited.
    failure = stopped.failure(ranks.log) or ranks.find_failure(status) if is_failed else None
    # If another rank failed, rank 0's traceback is only about the lost connection.
    another_failed = failure is not None and failure.rank is not None and not failure.is_local_rank_0
    for output in outputs:
        output.finish(hides_traceback=another_failed or (is_failed and is_full(log_dir)))
    return JobOutcome(status=status, stopped_by=stopped_by, failure=failure)


def _start(argv: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> Process:
    """Start a launcher in a new session, so that Ctrl-C reaches only fcp, which forwards it once."""
    return subprocess.Popen(
        argv,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _started(start: Start, argv: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> Process:
    try:
        return start(argv, environment, output)
    except OSError as error:
        raise RunError(f"cannot start {argv[0]}: {error.strerror}") from error


def _wait(
    process: Process,
    ranks: NodeRanks,
    stopped: StoppedRanks,
    received: Sequence[signal.Signals],
    refresh: Callable[[], None],
    announce: Callable[[str], None],
    grace_seconds: float,
) -> int:
    """Wait for the launcher. The first signal interrupts the ranks; the second, or the grace time, kills them."""
    answered, asked_at, ranks_seen_at = 0, 0.0, 0.0
    while (status := process.poll()) is None:
        refresh()
        if len(received) > answered:
            answered = len(received)
            asked_at = ranks_seen_at = time.monotonic()
            _stop(process, ranks, announce, at_once=answered > 1)
        # No grace time after Ctrl-C: the user decides, by pressing it again.
        elif answered and received[0] != signal.SIGINT and time.monotonic() - asked_at > grace_seconds:
            announce(f"the step did not end within {grace_seconds:.0f} s: stopping at once (see --grace)")
            processes.kill_tree(process.pid)
        if answered and ranks.ranks(process.pid):
            ranks_seen_at = time.monotonic()
        elif answered and time.monotonic() - ranks_seen_at > _ALONE_SECONDS:
            processes.kill_tree(process.pid)
        if ranks.must_end(process.pid) or stopped.must_end(process.pid, ranks.ranks):
            processes.kill_tree(process.pid)
        time.sleep(_POLL_SECONDS)
    return status


def _stop(process: Process, ranks: NodeRanks, announce: Callable[[str], None], *, at_once: bool) -> None:
    """Interrupt the ranks directly: torchrun would kill them after 30 seconds, msrun at once, within a step."""
    running = ranks.ranks(process.pid)
    if at_once or not running:  # none running: the launcher has not started them yet
        processes.kill_tree(process.pid)
    else:
        announce("stopping at the end of this step; press Ctrl-C again to stop at once")
        processes.send(running, signal.SIGINT)


@contextmanager
def _received_signals() -> Iterator[list[signal.Signals]]:
    """Collect SIGINT, SIGTERM (batch systems) and SIGHUP (a closed terminal), which all stop the job the same way."""
    received: list[signal.Signals] = []

    def note_signal(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, note_signal) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _RankOutput:
    """Copies one output stream of local rank 0 to a stream of fcp.

    A traceback or a lost-connection line is held back for `_HELD_SECONDS`: if another rank failed, it is only a
    consequence, and would bury the error of that rank.
    """

    def __init__(self, ranks: NodeRanks, stream: str, target: str) -> None:
        self._ranks = ranks
        self._stream = stream
        self._target = target
        self._file: FileFollower | None = None
        self._held = b""
        self._held_since = 0.0

    def copy_new(self, *, holds: bool = False) -> None:
        """Copy new output; with `holds` (a rank is suspended), do not release what is held back."""
        if self._file is None:
            path = self._ranks.rank_0(self._stream)
            if path is None:
                return
            self._file = FileFollower(path)
        new = self._file.read()
        if not self._held and (found := _OF_A_VICTIM.search(new)):
            start = new.rfind(b"\n", 0, found.start()) + 1  # include torch's [rank0]: prefix
            self._write(new[:start])
            self._held, self._held_since = new[start:], time.monotonic()
        elif self._held:
            self._held += new
        else:
            self._write(new)
        if self._held and not holds and time.monotonic() - self._held_since > _HELD_SECONDS:
            self._release()

    def finish(self, *, hides_traceback: bool) -> None:
        """Print the held-back output after the end of the job, unless it is a victim's traceback."""
        if not hides_traceback:
            self._release()

    def _release(self) -> None:
        self._write(self._held)
        self._held = b""

    def _write(self, text: bytes) -> None:
        if text:
            target: TextIO = getattr(sys, self._target)
            target.write(text.decode("utf-8", errors="replace"))
            target.flush()
