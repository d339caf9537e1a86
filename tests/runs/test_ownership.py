"""A run folder has one owner, on file systems with locks and without, and none once its process is gone."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import pytest

from fcp_cli.errors import FcpError, RunError
from fcp_cli.runs import owner
from fcp_cli.runs import owner as owners
from fcp_cli.runs.owner import Owner, own, own_unless_launched, read_owner
from fcp_cli.runtime.metrics_message import begin_metrics
from fcp_cli.util import processes
from fcp_cli.util.processes import ProcessIdentity
from tests.patience import wait_until
from tests.runs.records import write_steps

NO_PROC = not Path("/proc/self/stat").exists()
OTHER_BOOT = "00000000-0000-4000-8000-000000000000"


@pytest.fixture(params=["flock", "no flock"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """File systems with locks, and NFS without a lock daemon."""
    if request.param == "no flock":

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", refuse)
        monkeypatch.setattr(owner, "_SETTLE_SECONDS", 0.01)
    return str(request.param)


@pytest.fixture(autouse=True)
def _quick_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "_WATCH_SECONDS", 0.3)
    monkeypatch.setattr(owners, "_LOOK_SECONDS", 0.02)


# Owns a folder as its arguments say, and stays until it is killed.
PROGRAM = """
import errno, fcntl, os, sys, time
from pathlib import Path
from fcp_cli.errors import FcpError
from fcp_cli.runs.owner import own
def refuse(*_):
    raise OSError(errno.ENOLCK, "")
if "without-locks" in sys.argv:
    fcntl.flock = refuse
while "waits" in sys.argv and not Path("go").exists():
    time.sleep(0.001)
try:
    owned = own(Path(sys.argv[1]))
except FcpError as error:
    print(f"refused: {error}", flush=True)
    sys.exit(1)
word = "owns"
if "forks" in sys.argv and not os.fork():
    word = f"forked {os.getpid()}"
os.write(1, f"{word}\\n".encode())  # in one piece
time.sleep(600)
"""


@pytest.fixture
def owning(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started = []

    def start(*words: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, "run", *words]
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write_owner(run_dir: Path, **facts: Any) -> Path:
    """Leave an owner file as a job of another machine would; returns it."""
    run_dir.mkdir(exist_ok=True)
    path = run_dir / "owner.json"
    process = ProcessIdentity(host="elsewhere", boot_id=OTHER_BOOT, pid=7, started_ticks=7)
    owner = replace(Owner.this_process("job"), host="elsewhere", pid=7, process=process, mark="7-7")
    path.write_text(replace(owner, **facts).text())
    return path


@pytest.mark.processes
@pytest.mark.skipif(NO_PROC, reason="processes are found through /proc")
def test_a_second_job_is_told_who_runs_there_and_changes_nothing(
    tmp_path: Path, locks: str, owning: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = owning(*(["without-locks"] if locks == "no flock" else []))
    assert line_of(first) == "owns"
    write_steps(tmp_path / "run" / "metrics.jsonl", 7)
    before = (tmp_path / "run" / "owner.json").read_bytes()
    found = read_owner(tmp_path / "run" / "owner.json")
    assert found is not None
    with pytest.raises(RunError) as refused:
        own(tmp_path / "run")
    assert str(refused.value) == (
        f"run is in use by a job on {found.host} (process {first.pid}), which began at "
        f"{found.since[:19].replace('T', ' ')} UTC, and is at step 7; watch it with 'fcp watch run', end it there "
        f"with 'kill {first.pid}', or choose another --run-dir"
    )
    assert (tmp_path / "run" / "owner.json").read_bytes() == before


@pytest.mark.processes
@pytest.mark.skipif(NO_PROC, reason="processes are found through /proc")
def test_a_killed_owner_owns_nothing(tmp_path: Path, locks: str, owning: Callable[..., subprocess.Popen[str]]) -> None:
    first = owning(*(["without-locks"] if locks == "no flock" else []))
    assert line_of(first) == "owns"
    first.kill()
    first.wait()
    with own(tmp_path / "run"):
        found = read_owner(tmp_path / "run" / "owner.json")
        assert found is not None
        assert found.pid == os.getpid()


@pytest.mark.processes
@pytest.mark.skipif(NO_PROC, reason="processes are found through /proc")
def test_a_lock_keeps_the_folder_for_an_owner_that_cannot_be_seen(
    tmp_path: Path, owning: Callable[..., subprocess.Popen[str]]
) -> None:
    """As one in a container of this machine, which has numbers of processes of its own."""
    assert line_of(owning()) == "owns"
    here = Owner.this_process("").process
    assert here is not None
    write_owner(tmp_path / "run", process=replace(here, started_ticks=1))
    with pytest.raises(RunError, match="is in use"):
        own(tmp_path / "run")


@pytest.mark.processes
@pytest.mark.skipif(NO_PROC, reason="processes are found through /proc")
def test_a_lock_does_not_outlive_its_process_in_one_that_it_forked(
    tmp_path: Path, owning: Callable[..., subprocess.Popen[str]]
) -> None:
    first = owning("forks")
    lines = {line_of(first), line_of(first)}
    (forked,) = (int(line.split()[1]) for line in lines - {"owns"})
    try:
        first.kill()
        first.wait()
        own(tmp_path / "run").release()
    finally:
        os.kill(forked, signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.skipif(NO_PROC, reason="processes are found through /proc")
def test_ranks_that_outlive_their_launcher_keep_the_folder(
    tmp_path: Path, owning: Callable[..., subprocess.Popen[str]]
) -> None:
    first = owning()
    assert line_of(first) == "owns"
    rank = [sys.executable, "-c", "import time; time.sleep(600)"]
    mark = processes.mark_of(first.pid)
    with subprocess.Popen(rank, env={**os.environ, processes.VARIABLE: mark}) as left:
        try:
            first.kill()
            first.wait()
            with pytest.raises(RunError, match=rf"lost its launcher .* still end their step \(processes {left.pid}\)"):
                own(tmp_path / "run")
        finally:
            left.kill()
    own(tmp_path / "run").release()


@pytest.mark.processes
@pytest.mark.skipif(NO_PROC, reason="processes are found through /proc")
def test_of_several_that_find_a_stale_owner_without_locks_one_takes_over(
    tmp_path: Path, owning: Callable[..., subprocess.Popen[str]]
) -> None:
    dead = owning("without-locks")
    assert line_of(dead) == "owns"
    dead.kill()
    dead.wait()
    racers = [owning("without-locks", "waits") for _ in range(3)]
    (tmp_path / "go").touch()
    assert sorted(line_of(racer).partition(":")[0] for racer in racers) == ["owns", "refused", "refused"]


def test_of_jobs_that_begin_in_a_new_folder_at_once_one_owns_it(tmp_path: Path, locks: str) -> None:
    barrier = Barrier(8)

    def take(_: int) -> object:
        barrier.wait()
        try:
            return own(tmp_path / "run")
        except RunError:
            return None

    with ThreadPoolExecutor(8) as pool:
        taken = [found for found in pool.map(take, range(8)) if found is not None]
    assert len(taken) == 1


def test_an_owner_of_another_machine_keeps_the_folder_while_it_gives_signs_of_life(tmp_path: Path, locks: str) -> None:
    path = write_owner(tmp_path / "run")
    with pytest.raises(RunError, match=r"is in use by a job on elsewhere \(process 7\)"):
        own(tmp_path / "run")
    silent = time.time() - 1000
    os.utime(path, (silent, silent))
    (tmp_path / "run" / "metrics.jsonl").write_text("")  # its ranks write
    with pytest.raises(RunError, match="in use"):
        own(tmp_path / "run")
    os.utime(tmp_path / "run" / "metrics.jsonl", (silent, silent))
    said: list[str] = []
    own(tmp_path / "run", announce=said.append).release()
    assert "its owner on elsewhere seems to be gone" in said[0]


def test_an_owner_whose_clock_is_behind_is_seen_to_beat(tmp_path: Path) -> None:
    path = write_owner(tmp_path / "run")
    silent = time.time() - 1000
    os.utime(path, (silent, silent))

    ended = Event()

    def beat() -> None:
        beats = 0
        while not ended.wait(0.01):
            beats += 1
            os.utime(path, (silent + beats, silent + beats))

    beating = Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(RunError, match="in use"):
            own(tmp_path / "run")
    finally:
        ended.set()
        beating.join()


@pytest.mark.skipif(NO_PROC, reason="without /proc every owner is one of another machine")
def test_an_owner_of_this_machine_before_its_boot_is_watched_and_then_gone(tmp_path: Path, locks: str) -> None:
    here = Owner.this_process("")
    assert here.process is not None
    process = replace(here.process, boot_id=OTHER_BOOT)  # the same number and start, which may come again
    write_owner(tmp_path / "run", host=here.host, pid=here.pid, process=process)
    own(tmp_path / "run").release()


def test_a_damaged_owner_file_keeps_the_folder_only_while_it_is_new(tmp_path: Path) -> None:
    path = write_owner(tmp_path / "run")
    path.write_text("{")
    with pytest.raises(RunError, match="in use by a job that has just begun"):
        own(tmp_path / "run")
    os.utime(path, (1, 1))
    own(tmp_path / "run").release()


def test_a_batch_job_that_is_started_again_takes_over_from_its_earlier_start(tmp_path: Path) -> None:
    write_owner(tmp_path / "run", job="slurm 12")
    with pytest.raises(RunError, match="in use"):
        own(tmp_path / "run", job="slurm 13", restarts=True)
    own(tmp_path / "run", job="slurm 12", restarts=True).release()


def test_nodes_of_one_job_are_admitted_each_once_and_those_of_another_are_not(tmp_path: Path) -> None:
    with own(tmp_path / "run", job="one"), own(tmp_path / "run", node=1, job="one"):
        with pytest.raises(RunError, match="in use"):
            own(tmp_path / "run", node=1, job="one")
        with pytest.raises(RunError, match="in use"):
            own(tmp_path / "run", node=2, job="another")
        own(tmp_path / "run", node=2, job="one").release()


def test_a_folder_made_for_a_job_that_left_nothing_is_removed_and_any_other_stays(tmp_path: Path) -> None:
    with own(tmp_path / "runs" / "new") as owned:
        assert owned.is_new
    assert not (tmp_path / "runs").exists()
    with own(tmp_path / "run"):
        (tmp_path / "run" / "metrics.jsonl").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    with own(tmp_path / "run") as owned:
        assert not owned.is_new
    with pytest.raises(FileExistsError):
        own(tmp_path / "run", must_be_new=True)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FcpError, match=r"cannot write the run directory .*/file/run: Not a directory; choose another"):
        own(tmp_path / "file" / "run")


def test_rank_0_owns_the_folder_unless_its_launcher_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_owner(tmp_path / "run", mark="launcher")
    monkeypatch.setenv(processes.VARIABLE, "another")
    with pytest.raises(RunError, match="in use"):
        own_unless_launched(tmp_path / "run")
    monkeypatch.setenv(processes.VARIABLE, "launcher")
    assert own_unless_launched(tmp_path / "run") is None


def test_metrics_are_written_into_no_run_folder_of_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_owner(tmp_path / "run")
    begin_metrics(tmp_path / "run" / "metrics.jsonl", 0)  # a file that a script named: nobody's run folder
    monkeypatch.setenv("FCP_RUN_DIR", str(tmp_path / "run"))
    begin_metrics(tmp_path / "metrics.jsonl", 0)
    with pytest.raises(RunError, match="in use"):
        begin_metrics(tmp_path / "run" / "metrics.jsonl", 0)


def test_an_owner_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.01)
    with own(tmp_path / "run"):
        path = tmp_path / "run" / "owner.json"
        os.utime(path, (1, 1))
        wait_until(lambda: path.stat().st_mtime > 1, every_seconds=0.01)


def test_how_a_job_ended_stays_in_its_folder_until_the_next_one_runs(tmp_path: Path, locks: str) -> None:
    path = tmp_path / "run" / "owner.json"
    with own(tmp_path / "run") as owned:
        alive = read_owner(path)
        assert alive is not None and alive.ended is None and not alive.is_gone
        owned.ended = "interrupted"
    for _ in range(2):  # a launch that is refused before it runs anything changes nothing
        found = read_owner(path)
        assert found is not None and (found.ended, found.pid) == ("interrupted", os.getpid())
        own(tmp_path / "run").release()
    with own(tmp_path / "run") as owned:
        assert read_owner(path) == replace(Owner.this_process(""), since=owner_since(path))
        owned.ended = "finished"
    found = read_owner(path)
    assert found is not None and found.ended == "finished"


def owner_since(path: Path) -> str:
    found = read_owner(path)
    assert found is not None
    return found.since


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "owner.json is not JSON"),
        ("[]", "owner.json is not a JSON object but a list"),
        ('{"format":"fcp-owner/1"}', "owner.json is damaged: host is missing"),
        ('{"format":"other/1"}', "owner.json has format 'other/1'; this fcp reads 'fcp-owner/1'"),
    ],
)
def test_a_damaged_owner_file_is_one_line_to_those_who_look(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "owner.json").write_text(text)
    with pytest.raises(RunError, match=re.escape(message)):
        read_owner(tmp_path / "owner.json")
    (tmp_path / "owner.json").write_text("")  # being written
    assert read_owner(tmp_path / "owner.json") is None
    assert read_owner(tmp_path / "none.json") is None
