"""Runs one node's launcher: shows rank 0, forwards Ctrl-C, leaves no process behind, and reports the failed rank."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import IO, Final, Literal, Protocol, TextIO, TypeAlias

from fcp_cli.errors import RunError
from fcp_cli.launching.commands import node_argv, node_environment
from fcp_cli.launching.failure import Failure, NodeRanks, TorchrunRanks, ranks_of
from fcp_cli.launching.guard import guarded
from fcp_cli.launching.job import Job
from fcp_cli.runs.checkpoints import checkpoints
from fcp_cli.runs.metrics_reader import FileFollower, MetricsTail, RunSummary
from fcp_cli.runs.run_dir import RunPaths, from_here
from fcp_cli.training.progress import TrainingProgress
from fcp_cli.util import processes
from fcp_cli.util.network import listens
from fcp_cli.util.records import verified_variable

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

    def stop_signal(self, *, bundled: bool) -> signal.Signals | None:
        """Return the signal that ended the job early, or None; a stopped script, unlike ours, may exit with 0."""
        if self.failure is not None and self.failure.status == 128 + signal.SIGINT:  # agreed, perhaps on another node
            return self.stopped_by or signal.SIGINT
        return self.stopped_by if self.status or not bundled else None


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
    mark = processes.mark_of(os.getpid())
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
        process = _started(start or _start, argv, {**environment, processes.VARIABLE: mark}, log)
        watch_over(process.pid)
        try:
            status = _wait(process, ranks, stopped, received, refresh, screen.announce, grace_seconds)
        finally:
            if process.poll() is None:  # an exception in the loop: the ranks must not outlive it
                processes.kill_tree(process.pid)
                process.wait()
        if status < 0:  # a killed launcher leaves its ranks behind, reparented
            processes.end_marked(mark)
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
    """Wait for the launcher. The first signal stops the ranks; the second, or the grace time, kills them."""
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


# What follows from the signal that ranks handle.
_STOPPING: Final = {
    processes.STOP: "stopping at the end of this step",
    signal.SIGTERM: "the script handles SIGTERM, which was passed on to it",
    signal.SIGINT: "interrupting the script: it never asks fcp.stopping(), so steps since its last checkpoint are lost",
}


def _stop(process: Process, ranks: NodeRanks, announce: Callable[[str], None], *, at_once: bool) -> None:
    """Signal the ranks directly: torchrun would kill them after 30 seconds, msrun at once, within a step."""
    running = ranks.ranks(process.pid)
    if at_once or not running:  # none running: the launcher has not started them yet
        processes.kill_tree(process.pid)
    else:
        number, asked = processes.stop_signal(running)
        announce(f"{_STOPPING[number]}; press Ctrl-C again to stop at once")
        processes.send(asked, number)


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


# Announces once which nodes are missing at the rendezvous, during which a launcher is silent for minutes.

_PATIENCE_SECONDS: Final = 20.0  # importing torch takes a launcher several seconds
_PROBE_SECONDS: Final = 2.0


@dataclass(kw_only=True, slots=True)
class NodeMeeting:
    """Rendezvous as seen by one node; `check` is called repeatedly while the job runs.

    Attributes:
        job: job with `log_dir` set.
        announce: receives the line.
        clock: time in seconds.
    """

    job: Job
    node_rank: int
    announce: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _check_at: float | None = field(init=False)

    def __post_init__(self) -> None:
        waits = self.job.num_nodes > 1 and self.job.join_timeout_seconds is not None
        # msrun starts ranks at once and they wait inside, so only a missing node 0 can be detected.
        can_see = self.node_rank > 0 or self.job.launcher == "torchrun"
        self._check_at = self.clock() + self._pause_seconds() if waits and can_see else None

    def check(self) -> None:
        """Announce the nodes that this one waits for, once and after `_PATIENCE_SECONDS`."""
        if self._check_at is None or self.clock() < self._check_at:
            return
        self._check_at = self.clock() + self._pause_seconds()
        host, port = self.job.master_addr, self.job.master_port
        assert self.job.log_dir is not None
        # torchrun starts ranks only after the rendezvous.
        if self.job.launcher == "torchrun" and TorchrunRanks(self.job.log_dir).rank_0("stdout") is not None:
            self._check_at = None
        elif listens(host, port, seconds=_PROBE_SECONDS):
            if self.node_rank:
                self._check_at = None  # node 0 is up, and announces missing nodes itself
            else:
                self._announce(f"waiting for the other nodes to come to {host}:{port}; run 'fcp launch' on each")
        elif self.node_rank:  # node 0 itself may still be importing torch
            self._announce(f"waiting for node 0: nothing listens at {host}:{port} yet; run 'fcp launch' there")

    def _announce(self, state: str) -> None:
        self._check_at = None
        self.announce(f"{state}; gives up after {self.job.join_timeout_seconds} s (--join-timeout)")

    def _pause_seconds(self) -> float:
        return min(_PATIENCE_SECONDS, (self.job.join_timeout_seconds or 0) / 3)


# Progress of a running job, from its metrics.


class RunProgress:
    """Follower of a run's metrics, from now on.

    Args:
        paths: paths of the run.
        progress: prints new steps; None: only the totals are kept.

    Attributes:
        paths: paths of the run.
        summary: totals of this start.
    """

    def __init__(self, paths: RunPaths, progress: TrainingProgress | None) -> None:
        self.summary = RunSummary()
        self.paths, self._progress = paths, progress
        self._tail = MetricsTail(paths.metrics, since=datetime.now(timezone.utc).isoformat())

    def poll(self) -> None:
        """Read and print new steps; call it repeatedly."""
        for record in self._tail.poll():
            self.summary.feed(record)
            if self._progress is not None:
                self._progress.feed(record)

    def close(self) -> None:
        """Print the remaining steps, and release the terminal."""
        self.poll()
        if self._progress is not None:
            self._progress.close()


# Detects ranks suspended by SIGSTOP: they stay alive, and all other ranks wait for them until a time-out.

_LOOK_SECONDS: Final = 2.0  # each poll scans /proc
_SUSPENDED_SECONDS: Final = 10.0  # a longer gap between polls: fcp itself was suspended, so times are void
_MOST_SECONDS: Final = 30.0  # time for SIGCONT before the job is killed
_RANK: Final = ("RANK", "MS_NODE_ID")


class StoppedRanks:
    """Suspended ranks of one node.

    The job is killed after a rank has been suspended for half a minute, unless all ranks of the node are.

    Args:
        announce: receives one line per suspended rank.
        clock: time in seconds.

    Attributes:
        overdue: rank (None: the launcher) for which the job was killed, its pid, and its suspended time in seconds.
    """

    def __init__(self, announce: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.overdue: tuple[int | None, int, float] | None = None
        self._announce = announce
        self._clock = clock
        self._looked = clock()
        self._since: dict[int, float] = {}
        self._most = 0

    @property
    def are_seen(self) -> bool:
        """Whether a rank or the launcher was suspended at the last poll."""
        return bool(self._since)

    def must_end(self, launcher: int, ranks: Callable[[int], Sequence[int]]) -> bool:
        """Poll for suspended ranks; return True if the job must be killed. Call it repeatedly.

        Args:
            launcher: pid of the launcher.
            ranks: returns the pids of its ranks.
        """
        now = self._clock()
        if now - self._looked < _LOOK_SECONDS:
            return False
        if now - self._looked > _SUSPENDED_SECONDS:
            self._since.clear()
        self._looked = now
        running = ranks(launcher)
        stopped = [pid for pid in (launcher, *running) if processes.is_stopped(pid)]
        for pid in stopped:
            if pid not in self._since:
                who = "the launcher" if pid == launcher else f"rank {_rank(pid)}"
                self._announce(f"{who} is stopped (SIGSTOP); let it continue with: kill -CONT {pid}")
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        self._most = max(self._most, len(running))  # ranks that failed by time-out meanwhile are gone
        # If all ranks are suspended, so is the node, and no rank waits for another.
        if not stopped or sum(pid != launcher for pid in stopped) == self._most:
            return False
        first = min(stopped, key=self._since.__getitem__)
        if now - self._since[first] < _MOST_SECONDS:
            return False
        self.overdue = (None if first == launcher else _rank(first), first, now - self._since[first])
        return True

    def failure(self, log: Path) -> Failure | None:
        """Return the failure of a job that was killed because of a suspended rank, or None."""
        if self.overdue is None:
            return None
        rank, pid, seconds = self.overdue
        launcher = log.stem  # torchrun.log, msrun.log
        who = launcher if rank is None else f"rank {rank}"
        message = (
            f"{who} on {socket.gethostname()} (process {pid}) was stopped by SIGSTOP for {seconds:.0f} s while the "
            f"other ranks waited for it, so the job was ended; all output is in {log.parent}"
        )
        return Failure(rank=rank, status=-signal.SIGSTOP, message=message, last_lines=(), log=log, launcher=launcher)


def _rank(pid: int) -> int | None:
    environment = processes.environment_of(pid)
    found = next((environment[name] for name in _RANK if environment.get(name, "").isdecimal()), None)
    return None if found is None else int(found)


# Detects a full disk after a failure: ranks cannot log the reason then, so their last lines are misleading.

_PROBE_BYTES: Final = 1 << 16
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def is_full(folder: Path) -> bool:
    """Return whether the disk of a folder, or the user's quota on it, is full."""
    try:
        with TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * _PROBE_BYTES)
            probe.flush()
    except OSError as error:
        return error.errno in _FULL
    return False


def full_disk_line(run_dir: Path, resume: str) -> str:
    """Return the final error line of a job whose disk is full: the files kept, and how to continue.

    Args:
        run_dir: the run directory.
        resume: command that resumes the run; "" if it is restarted by other means.
    """
    saved = checkpoints(RunPaths(run_dir=run_dir).checkpoints)
    kept = f"{saved[-1].name} and the metrics are kept" if saved else "no checkpoint was saved, the metrics are kept"
    remedy = f"free some space, then continue with: {resume}" if resume else "free some space and start again"
    return f"the disk of {from_here(run_dir)} is full; {kept}; {remedy}"
