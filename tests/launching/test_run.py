"""Running a job, with a fake in place of torchrun, and the process tree for real."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from fcp_cli.errors import RunError
from fcp_cli.launching import supervise as run_module
from fcp_cli.launching.job import Job
from fcp_cli.launching.supervise import Screen, run_job
from fcp_cli.util import processes
from tests.launching.jobs import local_job
from tests.launching.test_failure import SUMMARY
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.training.small_runs import ranks_in


class FakeRunner:
    """Stands for torchrun: ends with `status` after `polls` looks, and lets local rank 0 print a line on each."""

    def __init__(self, *, status: int = 0, polls: int = 2, log_dir: Path) -> None:
        self.pid = 2**22 + 1  # beyond what Linux gives out
        self.argv: list[str] = []
        self.environment: dict[str, str] = {}
        self._status = status
        self._left = polls
        self._rank_0 = log_dir / "id_x" / "attempt_0" / "0"

    def start(self, argv: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> FakeRunner:
        self.argv, self.environment = list(argv), dict(environment)
        self._rank_0.mkdir(parents=True)
        (self._rank_0 / "stdout.log").write_text("")
        (self._rank_0 / "stderr.log").write_text("")
        return self

    def poll(self) -> int | None:
        if self._left:
            self._left -= 1
            with (self._rank_0 / "stdout.log").open("a") as log:
                log.write(f"{self._left} to go\n")
            return None
        return self._status

    def wait(self) -> int:
        self._left = 0
        return self._status


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return local_job(
        plan=tmp_path / "plan.parquet",
        run_dir=tmp_path,
        processes_per_node=2,
        program=("train.py",),
        arguments=(),
        log_dir=tmp_path / "logs",
        python="python",
    )


def fake_for(job: Job, **how: int) -> FakeRunner:
    assert job.log_dir is not None
    return FakeRunner(log_dir=job.log_dir, **how)


def test_a_job_gets_its_environment_and_rank_0_is_shown(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_USER", "kept")
    runner = fake_for(job)
    outcome = run_job(job, start=runner.start)
    assert outcome.status == 0
    assert outcome.failure is None
    assert runner.argv[:3] == ["python", "-m", "torch.distributed.run"]
    assert runner.environment["FCP_PLAN"] == str(job.plan)
    assert runner.environment["OF_THE_USER"] == "kept"
    assert capsys.readouterr().out == "1 to go\n0 to go\n"


def test_standard_output_can_be_kept_free_for_a_json_document(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    run_job(job, start=fake_for(job).start, screen=Screen(stdout="stderr"))
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "1 to go\n0 to go\n")


def test_other_nodes_can_be_silent(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    run_job(job, start=fake_for(job).start, node_rank=1, screen=Screen(shows=False))
    assert capsys.readouterr().out == ""


def test_a_failed_job_says_who(job: Job) -> None:
    outcome = run_job(job, start=fake_for(job, status=3).start)
    assert outcome.failure is not None
    assert outcome.failure.summary().startswith("torchrun failed with status 3")


class Victim(FakeRunner):
    """Local rank 0 loses its peer, which torchrun and the peer's own output name."""

    lost = ""

    def start(self, argv: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> FakeRunner:
        super().start(argv, environment, output)
        output.write(SUMMARY.format(status=1).encode())
        output.flush()
        (self._rank_0 / "stderr.log").write_text(f"before\n{self.lost}\n")
        peer = self._rank_0.with_name("1")
        peer.mkdir()
        (peer / "stderr.log").write_text("error: row 7 of the data has 3 tokens\n")
        return self


@pytest.mark.parametrize(
    "lost",
    [
        "lost the connection to another rank: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error",
        "[W1125 19:20:00.123456789 socket.cpp:460] [c10d] waitForInput: poll for socket failed\nframe #0: c10::Error",
        "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: Connection closed by peer",
    ],
)
def test_a_victims_lines_do_not_stand_above_the_cause(job: Job, capsys: pytest.CaptureFixture[str], lost: str) -> None:
    runner = Victim(status=1, log_dir=job.run_dir / "logs")
    runner.lost = lost
    outcome = run_job(job, start=runner.start)
    assert outcome.failure is not None
    assert outcome.failure.summary() == f"rank 5 on {socket.gethostname()}: row 7 of the data has 3 tokens"
    assert capsys.readouterr().err == "before\n"


def test_ctrl_c_asks_the_ranks_and_then_ends_everything(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(processes, "children", lambda pid: [pid + 1, pid + 2])
    monkeypatch.setattr(processes, "send", lambda pids, number: done.append((pids, number)))
    monkeypatch.setattr(processes, "kill_tree", lambda pid: done.append(("kill", pid)))
    runner = fake_for(job, status=1, polls=3)
    before = signal.getsignal(signal.SIGINT)
    outcome = run_job(
        job, start=runner.start, screen=Screen(watch=lambda: os.kill(os.getpid(), signal.SIGINT), announce=done.append)
    )
    assert outcome.stopped_by == signal.SIGINT
    assert outcome.failure is None
    assert done[:3] == [
        "interrupting the script: it never asks fcp.stopping(), so steps since its last checkpoint are lost; "
        "press Ctrl-C again to stop at once",
        ([runner.pid + 1, runner.pid + 2], signal.SIGINT),
        ("kill", runner.pid),
    ]
    assert signal.getsignal(signal.SIGINT) == before


def test_a_stopped_launcher_that_waits_for_others_after_its_ranks_have_ended_is_ended(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    ranks = [1, 2]
    monkeypatch.setattr(run_module, "_ALONE_SECONDS", 0.0)
    monkeypatch.setattr(processes, "children", lambda pid: ranks)
    monkeypatch.setattr(processes, "send", lambda pids, number: ranks.clear())
    monkeypatch.setattr(processes, "kill_tree", done.append)
    runner = fake_for(job, status=-9, polls=3)
    signals = [signal.SIGTERM]

    def ask_once() -> None:
        if signals:
            os.kill(os.getpid(), signals.pop())

    outcome = run_job(job, start=runner.start, screen=Screen(watch=ask_once))
    assert outcome.stopped_by == signal.SIGTERM and outcome.failure is None
    assert set(done) == {runner.pid}


def test_ctrl_c_before_any_rank_is_there_ends_torchrun(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(processes, "kill_tree", killed.append)
    runner = fake_for(job, status=-9, polls=1)
    outcome = run_job(job, start=runner.start, screen=Screen(watch=lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert outcome.stopped_by == signal.SIGTERM
    assert killed == [runner.pid]


@pytest.mark.processes
def test_an_interpreter_that_is_not_there_is_one_line(job: Job) -> None:
    from dataclasses import replace

    with pytest.raises(RunError, match="cannot start /no/python: No such file"):
        run_job(replace(job, python="/no/python"))


_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(3600)"],
                         start_new_session=True)
time.sleep(3600)
"""


@pytest.mark.processes
def test_a_tree_of_sessions_is_killed_to_the_last_leaf() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        below = processes.descendants(parent.pid)
        assert processes.children(parent.pid) == below
        assert len(below) == 1
        processes.kill_tree(parent.pid)
        assert parent.stdout.read() == ""  # both ends of the pipe are gone
        assert parent.wait(timeout=PATIENCE_SECONDS) == -signal.SIGKILL


_BREEDER = """
import subprocess
children = [subprocess.Popen(["sleep", "3600"])]
print("up", flush=True)
while len(children) < 300:
    children.append(subprocess.Popen(["sleep", "3600"]))
"""


@pytest.mark.processes
def test_what_a_process_starts_while_it_is_being_ended_is_ended_too(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _BREEDER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FCP_PLAN": str(tmp_path)},
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        processes.kill_tree(parent.pid)
    wait_until(lambda: ranks_in(tmp_path) == [])


@pytest.mark.processes
def test_how_a_child_of_another_process_ended_is_seen_before_that_one_asks() -> None:
    parent_of_dead = (
        "import subprocess, time; p = subprocess.Popen(['sh', '-c', 'exit 7']); print(p.pid); time.sleep(3600)"
    )
    with subprocess.Popen([sys.executable, "-u", "-c", parent_of_dead], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert processes.exit_status(parent.pid) is None
        try:
            wait_until(lambda: processes.exit_status(child) is not None, every_seconds=0.01)
            assert processes.exit_status(child) == 7
        finally:
            parent.kill()
