"""The identity of a process, and signals that reach that process alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fcp_cli.errors import RunError
from fcp_cli.util import processes
from fcp_cli.util.processes import ProcessIdentity
from fcp_cli.util.validation import validated
from tests.patience import wait_until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def of(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    found = ProcessIdentity.of(process.pid)
    assert found is not None
    return found


@pytest.mark.processes
def test_a_signal_reaches_the_process_of_the_identity(sleeper: subprocess.Popen[bytes]) -> None:
    found = of(sleeper)
    assert found.is_running()
    assert found.send(signal.SIGTERM)
    assert sleeper.wait() == -signal.SIGTERM
    assert not found.is_running()
    assert not found.send(signal.SIGTERM)
    assert ProcessIdentity.of(sleeper.pid) is None


@pytest.mark.processes
@pytest.mark.parametrize("has_pidfd", [True, False])
@pytest.mark.parametrize(
    "change",
    [{"started_ticks": 1}, {"boot_id": "0" * 36}, {"host": "another"}],
    ids=["another start", "another boot", "another host"],
)
def test_nothing_is_sent_to_a_process_that_only_has_the_number(
    sleeper: subprocess.Popen[bytes],
    change: dict[str, Any],
    has_pidfd: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    other = replace(of(sleeper), **change)
    assert not other.is_running()
    assert not other.send(signal.SIGKILL)
    assert sleeper.poll() is None


@pytest.mark.processes
def test_a_zombie_runs_no_more(sleeper: subprocess.Popen[bytes]) -> None:
    found = of(sleeper)
    sleeper.kill()
    wait_until(lambda: not found.is_running())  # it is only asked for its status by the fixture
    assert ProcessIdentity.of(sleeper.pid) is None


def test_the_first_process_is_never_signalled() -> None:
    first = ProcessIdentity(host="here", boot_id="0" * 36, pid=1, started_ticks=0)
    with pytest.raises(PermissionError, match="process 1 is never signalled"):
        first.send(signal.SIGTERM)


def test_without_a_boot_id_there_is_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "current_boot_id", lambda: "")
    assert ProcessIdentity.of(os.getpid()) is None


@pytest.mark.parametrize("pid", [0, -1, -4711, 2**22 + 1, 2**40, True, "4711", None])
def test_numbers_that_no_process_has_are_refused(pid: object) -> None:
    document = {"host": "here", "boot_id": "0" * 36, "pid": pid, "started_ticks": 5}
    with pytest.raises(RunError, match=r"^f: pid is .*; it must be the number of a process"):
        validated(document, ProcessIdentity, where="f", error=RunError)
