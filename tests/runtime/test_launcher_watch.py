"""Ranks end when their launcher is killed, whoever started it; a launcher that leaves its ranks to themselves may end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fcp_cli.util import processes
from tests.patience import wait_until
from tests.ports import unused_port
from tests.training.small_runs import write_manifest, write_small_plan

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found through /proc"),
]

# Starts a rank with one variable more, notes it, and waits.
LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
variable, *command = sys.argv[1:][: sys.argv[1:].index("END")]
name, value = variable.split("=")
rank = subprocess.Popen(command, env={**os.environ, name: value}, start_new_session=True)
Path("rank").write_text(f"{rank.pid}\\n")
rank.wait()
"""
RANK = """
import time
from pathlib import Path
from fcp_cli.runtime.launcher import end_with_launcher
end_with_launcher()
Path("up").touch()
time.sleep(600)
"""
SCRIPT = "import time; from pathlib import Path; Path('up').touch(); time.sleep(600)"
TORCHRUN = "TORCHELASTIC_RUN_ID=none"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[int, int]]]:
    """Start a launcher with a rank; return both processes once the rank is up."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "script.py").write_text(SCRIPT)
    launchers: list[subprocess.Popen[bytes]] = []

    def start_both(
        variable: str, *command: str, up: Callable[[int], bool] | None = None, options: tuple[str, ...] = ()
    ) -> tuple[int, int]:
        environment = {**os.environ, "FCP_PLAN": str(tmp_path / "plan.parquet")}
        words = [sys.executable, "-c", LAUNCHER, variable, *command, "END", *options]
        launchers.append(subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL))
        note = tmp_path / "rank"
        wait_until(lambda: note.is_file() and note.read_text().endswith("\n"))
        rank = int(note.read_text())
        wait_until(lambda: up(rank) if up is not None else (tmp_path / "up").exists())
        return launchers[-1].pid, rank

    yield start_both
    for launcher in launchers:
        launcher.kill()
        launcher.wait()
    if (tmp_path / "rank").is_file():
        processes.kill_tree(int((tmp_path / "rank").read_text()))


def is_running(pid: int) -> bool:
    return processes.started_ticks(pid) is not None


@pytest.mark.parametrize(
    "command",
    [
        pytest.param((sys.executable, "rank.py"), id="rank"),
        pytest.param(("sh", "-c", f"{sys.executable} rank.py; exit $?"), id="rank behind a shell"),
        pytest.param((sys.executable, "-m", "fcp_cli.runtime", "--", "script.py"), id="followed script"),
    ],
)
def test_a_rank_ends_when_its_torchrun_is_killed(
    start: Callable[..., tuple[int, int]], command: tuple[str, ...]
) -> None:
    launcher, rank = start(TORCHRUN, *command)
    if command[0] == "sh":
        (rank,) = processes.children(rank)
    os.kill(launcher, signal.SIGKILL)
    wait_until(lambda: not is_running(rank))


@pytest.mark.torch
def test_a_rank_of_the_bundled_trainer_ends_when_its_torchrun_is_killed(
    tmp_path: Path, start: Callable[..., tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=1, num_ranks=2)
    # It waits for another rank, which nobody starts.
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(unused_port()))
    words = ("-m", "fcp_cli.training.train", "--plan", str(plan), "--model", "qwen3-tiny", "--run-dir", "run")
    launcher, rank = start(
        TORCHRUN, sys.executable, *words, up=lambda rank: "libtorch" in (Path("/proc") / f"{rank}" / "maps").read_text()
    )
    os.kill(launcher, signal.SIGKILL)
    wait_until(lambda: not is_running(rank))


@pytest.mark.parametrize(("options", "is_watched"), [((), False), (("--join=True",), True), (("--join", "0"), False)])
def test_ranks_outlive_an_msrun_that_does_not_wait_for_them(
    start: Callable[..., tuple[int, int]], options: tuple[str, ...], is_watched: bool
) -> None:
    launcher, rank = start("MS_ROLE=MS_WORKER", sys.executable, "rank.py", options=options)
    threads = len(list((Path("/proc") / str(rank) / "task").iterdir()))
    assert (threads == 2) == is_watched
    os.kill(launcher, signal.SIGKILL)
    if is_watched:
        wait_until(lambda: not is_running(rank))
    else:
        wait_until(lambda: processes.parent(rank) != launcher)
        assert is_running(rank)


def test_a_process_that_no_launcher_started_watches_nobody(start: Callable[..., tuple[int, int]]) -> None:
    _, rank = start("RANK=0", sys.executable, "rank.py")
    assert len(list((Path("/proc") / str(rank) / "task").iterdir())) == 1
