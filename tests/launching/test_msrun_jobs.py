"""Jobs under msrun, through `fcp launch`: a fake msrun everywhere, and the real one where MindSpore is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fcp_cli.errors import RunError
from fcp_cli.launching.program import is_mindspore_script
from fcp_cli.util.machine import find_machine_without_torch
from tests.forked_ranks import shared_by_scripts
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.ports import own_address, unused_port
from tests.training.small_runs import fcp_command, run_fcp, write_manifest, write_small_plan

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
HOST = socket.gethostname()
REAL = pytest.param(
    "real",
    marks=[
        pytest.mark.mindspore,
        pytest.mark.skipif(
            importlib.util.find_spec("mindspore") is None, reason="mindspore is not installed: make test-msrun"
        ),
    ],
)

_TELL = """
import json, os, sys, pathlib
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "FCP_PLAN")
found = {name: os.environ[name] for name in names} | {"argv": sys.argv[1:], "python": sys.executable}
pathlib.Path(f"told-{found['RANK']}.json").write_text(json.dumps(found))
print("rank", found["RANK"], "speaks")
"""

# As a MindSpore script is: msrun's scheduler runs it, too, and ends long after everything else.
_WITH_SCHEDULER = """
import os, sys, time
if os.environ["MS_ROLE"] == "MS_SCHED":
    time.sleep(3600)
rank = int(os.environ["MS_NODE_ID"])
"""
_RAISES = _WITH_SCHEDULER + "time.sleep(3 if rank == 2 else 3600)\nraise ValueError(f'rank {rank} cannot go on')\n"
_KILLED = _WITH_SCHEDULER + "time.sleep(3 if rank == 2 else 3600)\nos.kill(os.getpid(), 9)\n"
_WAITS = (
    _WITH_SCHEDULER
    + """
import pathlib, signal
def stop(number, frame):
    pathlib.Path(f"stopped-{rank}").touch()
    end = time.monotonic() + 400  # msrun kills the others as soon as one has ended with an error
    while len(list(pathlib.Path().glob("stopped-*"))) < 4 and time.monotonic() < end:
        time.sleep(0.1)
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
pathlib.Path(f"up-{rank}").touch()
time.sleep(3600)
"""
)


@pytest.fixture(params=["fake", REAL])
def msrun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Which msrun is found; PATH has another `python` than the job's first."""
    decoy = tmp_path / "bin"
    decoy.mkdir()
    write_program(decoy / "python", "#!/bin/sh\necho 'the wrong python' >&2; exit 9\n")
    if request.param == "fake":
        write_program(
            decoy / "msrun", f'#!/bin/sh\nPYTHONPATH={ROOT}:$PYTHONPATH exec {sys.executable} -m {_FAKE} "$@"\n'
        )
    monkeypatch.setenv("PATH", f"{decoy}{os.pathsep}{os.environ['PATH']}")
    name: str = request.param
    return name


_FAKE = "tests.launching.fake_msrun"


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("msrun")
    manifest = write_manifest(folder)
    write_small_plan(folder / "plan.parquet", manifest, steps=2, model="qwen3-tiny")
    return folder


@pytest.fixture
def folder(plans: Path, tmp_path: Path) -> Path:
    """An own working directory."""
    (tmp_path / "plan.parquet").write_bytes((plans / "plan.parquet").read_bytes())
    return tmp_path


def write_script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def forked_under(msrun: str) -> dict[str, str]:
    """What has the server of all jobs fork the ranks of the fake, where each would import PyTorch."""
    return shared_by_scripts() if msrun == "fake" else {}


def launch(*words: str) -> tuple[str, ...]:
    return ("launch", "--launcher", "msrun", "--device", "cpu", *words)


def test_a_script_gets_torch_s_words_for_msrun_s_variables(msrun: str, folder: Path) -> None:
    script = write_script(folder, _TELL)
    done = run_fcp(*launch("--", script, "two words", "$x --join=False"), folder=folder)
    assert done.returncode == 0, done.stderr
    told = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(4)]
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in told] == [
        (str(rank), str(rank), "4") for rank in range(4)
    ]
    assert {one["MASTER_ADDR"] for one in told} == {"127.0.0.1"}
    assert len({one["MASTER_PORT"] for one in told}) == 1
    assert {one["python"] for one in told} == {sys.executable}
    assert told[3]["argv"] == ["two words", "$x --join=False"]
    assert "rank 0 speaks\n" in done.stdout
    assert "rank 1 speaks" not in done.stdout
    logs = sorted(path.name for path in folder.glob("runs/script-001/logs/*/*.log"))
    assert logs == ["msrun.log", "scheduler.log", *(f"worker_{rank}.log" for rank in range(4))]


@pytest.mark.torch
def test_the_bundled_trainer_runs_on_four_gloo_ranks(msrun: str, plans: Path) -> None:
    done = run_fcp(*launch("--run-dir", f"runs/{msrun}"), folder=plans, **forked_under(msrun))
    assert done.returncode == 0, done.stderr
    assert "done: steps 1 to 2" in done.stderr
    lines = (plans / "runs" / msrun / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["run", "step", "step"]
    assert len(json.loads(lines[-1])["ranks"]) == 4


def test_two_emulated_nodes_number_their_ranks_through(msrun: str, folder: Path) -> None:
    script = write_script(folder, _TELL)
    run_two_nodes(folder, folder / "run", "--", script)
    told = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(4)]
    assert [(one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in told] == [("0", "4"), ("1", "4")] * 2
    assert {one["MASTER_ADDR"] for one in told} == {own_address()}
    assert len({one["MASTER_PORT"] for one in told}) == 1


@pytest.mark.torch
@pytest.mark.parametrize("msrun", [REAL], indirect=True)
def test_two_emulated_nodes_train_together(msrun: str, plans: Path) -> None:
    run_dir = plans / "runs" / "nodes"
    run_two_nodes(plans, run_dir)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [len(record["ranks"]) for record in records if record["kind"] == "step"] == [4, 4]


def run_two_nodes(folder: Path, run_dir: Path, *program: str) -> None:
    """Both have the master's address here, so both start a scheduler: torch's ranks do not mind."""
    where = ("--nodes", "2", "--master-addr", own_address(), "--master-port", str(unused_port(count=2)))
    jobs = [
        subprocess.Popen(
            fcp_command(*launch(*where, "--node-rank", str(node), "--run-dir", str(run_dir), *program)),
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    said = [job.communicate(timeout=PATIENCE_SECONDS)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (_RAISES, f"error: rank 2 on {HOST} failed: ValueError: rank 2 cannot go on; its whole output is in "),
        (_KILLED, f"error: rank 2 on {HOST} was ended by signal 9 (out of memory?); its whole output is in "),
    ],
    ids=["raises", "is killed"],
)
def test_the_rank_that_fails_first_is_named_and_nobody_waits_for_the_scheduler(
    msrun: str, folder: Path, script: str, line: str
) -> None:
    done = run_fcp(*launch("--inject", "none", "--", write_script(folder, script)), folder=folder)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(line)
    assert last.endswith("worker_2.log")
    if script == _RAISES:
        assert "  ValueError: rank 2 cannot go on" in done.stderr
    wait_until(lambda: processes_in(folder) == [])


_TRAINS = "from fcp_cli import runtime\nruntime.start(fetch=lambda row: [1] * 4096)\n"


@pytest.mark.torch
def test_a_master_that_does_not_answer_is_named_in_time(msrun: str, folder: Path) -> None:
    where = ("--nodes", "2", "--node-rank", "1", "--master-addr", "198.51.100.1", "--run-dir", "run")
    script = write_script(folder, _TRAINS)
    done = run_fcp(*launch(*where, "--join-timeout", "3", "--", script), folder=folder, **forked_under(msrun))
    assert done.returncode == 1
    rank = "3" if "error: rank 3" in done.stderr else "2"  # which one gives up first
    assert done.stderr.splitlines()[-1] == (
        f"error: rank {rank} on {HOST}: the ranks did not come together at 198.51.100.1:29501 within 3 s; start all "
        "nodes with the same plan, make sure that --master-addr and --master-port are node 0's own, or wait longer "
        "with --join-timeout"
    )
    wait_until(lambda: processes_in(folder) == [])


def processes_in(folder: Path) -> list[int]:
    """What still runs with the folder as its working directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve(strict=True) == folder.resolve():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_to_fcp_asks_the_ranks_and_leaves_no_orphan(msrun: str, folder: Path, number: signal.Signals) -> None:
    """msrun itself would kill its ranks on SIGINT, and leave them running on SIGTERM."""
    words = launch("--grace", "500", "--inject", "none", "--", write_script(folder, _WAITS))
    job = subprocess.Popen(fcp_command(*words), cwd=folder, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(folder.glob("up-*"))) == 4 or job.poll() is not None)
    job.send_signal(number)
    said = job.communicate(timeout=PATIENCE_SECONDS)[1]
    assert job.returncode == 128 + number, said
    assert sorted(path.name for path in folder.glob("stopped-*")) == [f"stopped-{rank}" for rank in range(4)]
    wait_until(lambda: processes_in(folder) == [])


def test_when_fcp_is_killed_its_ranks_stop_and_msrun_ends(msrun: str, folder: Path) -> None:
    words = launch("--grace", "500", "--inject", "none", "--", write_script(folder, _WAITS))
    job = subprocess.Popen(fcp_command(*words), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(folder.glob("up-*"))) == 4 or job.poll() is not None)
    job.kill()
    job.wait()
    wait_until(lambda: processes_in(folder) == [])
    assert sorted(path.name for path in folder.glob("stopped-*")) == [f"stopped-{rank}" for rank in range(4)]


def test_a_script_of_mindspore_s_runs_in_the_scheduler_too(folder: Path) -> None:
    script = write_script(folder, "from mindspore import ops\n")
    done = run_fcp(*launch("--dry-run", "--", script, "--lr", "1"), folder=folder)
    assert "assumed --inject = none (script.py imports mindspore, and msrun's scheduler has to run it, too)" in (
        done.stderr
    )
    assert done.stdout.rstrip().endswith(" script.py --lr 1")
    assert "fcp_cli.runtime" not in done.stdout


@pytest.mark.parametrize(
    ("text", "is_mindspore"),
    [
        ("import mindspore", True),
        ("def f():\n    from mindspore.nn import Cell\n", True),
        ("import numpy\nfrom . import mindspore\n", False),
        ("import torch\nimport mindspore\n", False),  # torch on MindSpore, or a script that looks for both
        ("import mindspore as", False),
    ],
)
def test_what_a_script_of_mindspore_s_is(tmp_path: Path, text: str, is_mindspore: bool) -> None:
    (tmp_path / "script.py").write_text(text)
    assert is_mindspore_script(tmp_path / "script.py") is is_mindspore


def test_mindspore_finds_npus_without_torch_or_says_that_there_are_none() -> None:
    here = find_machine_without_torch()
    assert here.device == ("npu" if here.num_devices else "cpu")
    with pytest.raises(RunError, match="no cuda device here that MindSpore could use"):
        find_machine_without_torch("cuda")


def test_a_script_of_mindspore_s_needs_msrun(folder: Path) -> None:
    script = write_script(folder, "import mindspore as ms\n")
    done = run_fcp("launch", "--dry-run", "--", script, folder=folder)
    assert done.returncode == 2
    assert "script.py imports mindspore, whose ranks meet only under msrun; add --launcher msrun" in done.stderr


def test_the_printed_command_brings_its_python_along(folder: Path) -> None:
    done = run_fcp(*launch("--dry-run", "--", write_script(folder, _TELL)), folder=folder)
    assert f'PATH={Path(sys.executable).parent}:"$PATH" msrun --worker_num=4 ' in done.stdout
