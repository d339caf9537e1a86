"""One run folder, several launches: one runs, the others are told who does, and change nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fcp_cli.cli.launch import owned_job
from fcp_cli.launching.job import Job
from fcp_cli.launching.request import LaunchRequest
from fcp_cli.launching.resolve import Claim
from fcp_cli.runs.owner import Ownership, own, read_owner
from fcp_cli.runs.run_dir import next_run_dir
from tests.launching.jobs import local_job
from tests.patience import wait_until
from tests.training.small_runs import fcp_command, ranks_in, run_fcp, write_manifest, write_small_plan

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found through /proc"),
]

SCRIPT = """
import os, signal, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.SIG_IGN)
Path(f"up-{os.getpid()}").touch()
while not Path("go").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=1, num_ranks=1)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture
def launch(folder: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start `fcp launch` of the script."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        command = fcp_command("launch", "--inject", "none", "--grace", "1", *words, "--", "script.py")
        with (folder / f"printed-{len(started)}").open("w") as printed:
            started.append(subprocess.Popen(command, cwd=folder, stderr=printed))
        return started[-1]

    yield start
    (folder / "go").touch()
    for process in started:
        process.wait()
    wait_until(lambda: ranks_in(folder) == [])


def up(folder: Path) -> int:
    return len(list(folder.glob("up-*")))


def contents(run_dir: Path) -> dict[str, bytes]:
    files = (path for path in run_dir.rglob("*") if path.is_file())
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}


def test_a_running_run_is_neither_resumed_nor_launched_into_until_its_launcher_and_ranks_are_gone(
    folder: Path, launch: Callable[..., subprocess.Popen[bytes]]
) -> None:
    first = launch("--run-dir", "run")
    wait_until(lambda: up(folder) == 1)
    before = contents(folder / "run")
    for words in (("--resume",), ("--", "script.py")):
        refused = run_fcp("launch", "--run-dir", "run", *words, folder=folder)
        assert refused.returncode == 1
        last = refused.stderr.splitlines()[-1]
        assert last.startswith("error: run is in use by a job on ")
        assert f" (process {first.pid}), which began at " in last
        assert last.endswith(
            f"watch it with 'fcp watch run', end it there with 'kill {first.pid}', or choose another --run-dir"
        )
    assert contents(folder / "run") == before
    first.kill()
    first.wait()
    wait_until(lambda: ranks_in(folder) == [])
    (folder / "go").touch()
    assert run_fcp("launch", "--inject", "none", "--run-dir", "run", "--", "script.py", folder=folder).returncode == 0
    ended = read_owner(folder / "run" / "owner.json")
    assert ended is not None and ended.ended == "finished"


@pytest.mark.examples(1)
@pytest.mark.parametrize("words", [("--run-dir", "run"), ()])
def test_of_two_launches_at_once_one_runs_in_a_folder_and_the_other_is_refused_or_gets_another(
    folder: Path, launch: Callable[..., subprocess.Popen[bytes]], words: tuple[str, ...]
) -> None:
    both = [launch(*words) for _ in range(2)]
    runs = 1 if words else 2
    wait_until(lambda: up(folder) == runs and sum(job.poll() is not None for job in both) == 2 - runs)
    (folder / "go").touch()
    assert sorted(job.wait() for job in both) == ([0, 1] if words else [0, 0])
    assert up(folder) == runs
    if words:
        printed = "".join(path.read_text() for path in folder.glob("printed-*"))
        assert "error: run is in use by a job on " in printed
    else:
        assert sorted(path.name for path in (folder / "runs").iterdir()) == ["script-001", "script-002"]


def test_a_job_that_its_own_launcher_started_owns_the_folder_of_its_trainer(folder: Path) -> None:
    """`torchrun -m fcp_cli.training.train`, without fcp: rank 0 is the owner, and a second job is refused."""
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    (folder / "run").mkdir()
    holder = subprocess.Popen(
        [fcp_command()[0], "-c", HOLDER], cwd=folder, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "owns\n"
    words = ("--plan", "plan.parquet", "--model", "qwen3-tiny", "--run-dir", "run")
    trainer = [fcp_command()[0], "-m", "fcp_cli.training.train", *words]
    refused = subprocess.run(trainer, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("error: run is in use by a job on ")
    assert contents(folder / "run").keys() == {"owner.json"}


HOLDER = """
import time
from pathlib import Path
from fcp_cli.runs.owner import own
owned = own(Path("run"))
print("owns", flush=True)
time.sleep(600)
"""


def test_a_launch_whose_number_another_has_just_taken_gets_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    others: list[Ownership] = []

    def next_but_taken(name: str) -> Path:
        found = next_run_dir(name)
        if not others:  # another launch, between the choice of the number and its use
            others.append(own(found))
        return found

    def resolve(options: LaunchRequest, claim: Claim) -> Job:
        return local_job(run_dir=claim(None, "script").absolute())

    monkeypatch.setattr("fcp_cli.runs.run_dir.next_run_dir", next_but_taken)
    with owned_job(LaunchRequest(program=("script.py",)), resolve) as (job, _):
        assert job.run_dir.name == "script-002"
        assert (job.run_dir / "owner.json").is_file()
    others[0].release()
    assert list((tmp_path / "runs").glob("*")) == []


def test_a_named_folder_is_owned_before_it_is_read(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    owned: list[bool] = []

    def resolve(options: LaunchRequest, claim: Claim) -> Job:
        owned.append((claim(options.run_dir, "") / "owner.json").is_file())
        return local_job(run_dir=run_dir)

    with owned_job(LaunchRequest(run_dir=run_dir), resolve):
        assert owned == [True]
    assert not run_dir.exists()
