"""A rank that SIGSTOP has stopped is named, and after half a minute the job is ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fcp_cli.launching.supervise import StoppedRanks
from fcp_cli.util import processes
from tests.patience import wait_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found through /proc"),
]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ranks() -> Iterator[list[int]]:
    started = [
        subprocess.Popen(["sleep", "600"], env={**os.environ, "RANK": str(rank)}, start_new_session=True)
        for rank in range(3)
    ]
    yield [process.pid for process in started]
    for process in started:
        process.kill()
        process.wait()


def stop(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda pid=pid: processes.is_stopped(pid), every_seconds=0.01)  # type: ignore[misc]


def looks(stopped: StoppedRanks, clock: Clock, ranks: list[int], *, seconds: int) -> bool:
    """Look every other second for a while; return whether the job must end."""
    for _ in range(0, seconds, 2):
        clock.now += 2
        if stopped.must_end(os.getpid(), lambda launcher: ranks):
            return True
    return False


def test_a_stopped_rank_is_announced_and_after_half_a_minute_the_job_is_ended_in_its_name(ranks: list[int]) -> None:
    said: list[str] = []
    clock = Clock()
    stopped = StoppedRanks(said.append, clock=clock)
    assert not looks(stopped, clock, ranks, seconds=40)
    stop(ranks[1])
    assert not looks(stopped, clock, ranks, seconds=30)
    assert stopped.are_seen
    assert said == [f"rank 1 is stopped (SIGSTOP); let it continue with: kill -CONT {ranks[1]}"]
    assert looks(stopped, clock, ranks, seconds=4)
    failure = stopped.failure(Path("/run/logs/start-001/torchrun.log"))
    assert failure is not None
    assert failure.report(rank_0_is_shown=True) == (
        (),
        f"rank 1 on {socket.gethostname()} (process {ranks[1]}) was stopped by SIGSTOP for 30 s while the other ranks "
        "waited for it, so the job was ended; all output is in /run/logs/start-001",
    )


def test_a_stopped_rank_is_to_blame_although_the_others_have_failed_meanwhile(ranks: list[int]) -> None:
    clock = Clock()
    stopped = StoppedRanks(lambda line: None, clock=clock)
    stop(ranks[1])
    assert not looks(stopped, clock, ranks, seconds=20)
    assert looks(stopped, clock, ranks[1:2], seconds=20)
    assert stopped.overdue is not None
    assert stopped.overdue[0] == 1


def test_a_rank_that_continues_in_time_ends_nothing(ranks: list[int]) -> None:
    clock = Clock()
    stopped = StoppedRanks(lambda line: None, clock=clock)
    stop(ranks[2])
    assert not looks(stopped, clock, ranks, seconds=20)
    os.kill(ranks[2], signal.SIGCONT)
    wait_until(lambda: not processes.is_stopped(ranks[2]), every_seconds=0.01)
    assert not looks(stopped, clock, ranks, seconds=60)
    assert stopped.failure(Path("torchrun.log")) is None


def test_a_job_that_is_suspended_as_a_whole_is_left_alone(ranks: list[int]) -> None:
    clock = Clock()
    stopped = StoppedRanks(lambda line: None, clock=clock)
    stop(*ranks)
    assert not looks(stopped, clock, ranks, seconds=100)


def test_the_time_in_which_fcp_itself_was_stopped_does_not_count(ranks: list[int]) -> None:
    clock = Clock()
    stopped = StoppedRanks(lambda line: None, clock=clock)
    stop(ranks[0])
    assert not looks(stopped, clock, ranks, seconds=20)
    clock.now += 1000
    assert not looks(stopped, clock, ranks, seconds=20)
