"""What ranks do with the signals of schedulers and of torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.processes

RANK = """
import os, sys, time
from fcp_cli.runtime.stop_request import StopRequest
stop = StopRequest().install()
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print("ready", flush=True)
while not stop:
    time.sleep(0.01)
time.sleep(float(sys.argv[1]))  # the rest of the step
print("saved", flush=True)
"""


class Ranks:
    """Two processes as torchrun starts them; a step of theirs takes `seconds` from the signal on."""

    def __init__(self, seconds: float) -> None:
        environment = {**os.environ, "LOCAL_WORLD_SIZE": "2"}
        self.all = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(seconds)],
                env={**environment, "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for rank in range(2)
        ]
        for rank in self.all:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"

    def end(self) -> None:
        for rank in self.all:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()


@pytest.fixture
def quick() -> Iterator[Ranks]:
    ranks = Ranks(0.3)
    yield ranks
    ranks.end()


@pytest.fixture
def endless() -> Iterator[Ranks]:
    ranks = Ranks(60)
    yield ranks
    ranks.end()


def test_a_scheduler_may_repeat_its_sigterm_and_ranks_end_their_step(quick: Ranks) -> None:
    for _ in range(3):
        for rank in quick.all:
            rank.send_signal(signal.SIGTERM)
    for rank in quick.all:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "saved\n"
        assert rank.wait(PATIENCE_SECONDS) == 0


def test_ranks_that_wait_for_one_that_is_gone_end_at_once(endless: Ranks) -> None:
    failed, waiting = endless.all
    failed.kill()
    failed.wait()
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(30) == -signal.SIGTERM
