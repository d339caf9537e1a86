"""`kill -9` of fcp, or of torchrun: nobody is left to end the job, and yet nothing of it stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from fcp_cli.util import processes
from tests.patience import wait_until
from tests.training.small_runs import fcp_command, ranks_in, write_manifest, write_small_plan

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found through /proc"),
]

SCRIPT = """
import os, signal, sys, time
from pathlib import Path

def stop(number, frame):
    Path(f"stopped-{os.environ['RANK']}").touch()
    end = time.monotonic() + 400  # torchrun ends the other as soon as one has
    while len(list(Path().glob("stopped-*"))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    sys.exit(130)

if sys.argv[1] == "stops":
    signal.signal(signal.SIGINT, stop)
else:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
Path(f"up-{os.environ['RANK']}").touch()
time.sleep(3600)
"""


@pytest.mark.parametrize(("how", "grace"), [("stops", "500"), ("ignores", "1")])
def test_when_fcp_is_killed_its_ranks_are_asked_to_stop_and_then_ended(tmp_path: Path, how: str, grace: str) -> None:
    write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=1, num_ranks=2)
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ("launch", "--inject", "none", "--grace", grace, "--", "script.py", how)
    fcp = subprocess.Popen(fcp_command(*words), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2 or fcp.poll() is not None)
    assert len(ranks_in(tmp_path)) == 3  # torchrun and two ranks
    fcp.kill()
    fcp.wait()
    wait_until(lambda: ranks_in(tmp_path) == [])
    assert len(list(tmp_path.glob("stopped-*"))) == (2 if how == "stops" else 0)


@pytest.mark.parametrize("also_fcp", [False, True])
def test_when_torchrun_is_killed_its_ranks_are_ended(tmp_path: Path, also_fcp: bool) -> None:
    write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=1, num_ranks=2)
    (tmp_path / "script.py").write_text(SCRIPT)
    # Ranks without a watch of their own.
    command = fcp_command("launch", "--inject", "none", "--run-dir", "run", "--", "script.py", "ignores")
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as fcp:
        wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2 or fcp.poll() is not None)
        (torchrun,) = (pid for pid in processes.children(fcp.pid) if pid in ranks_in(tmp_path))
        if also_fcp:
            fcp.kill()
        os.kill(torchrun, signal.SIGKILL)
        assert fcp.stderr is not None
        last = fcp.stderr.read().splitlines()[-1]
    wait_until(lambda: ranks_in(tmp_path) == [])
    if not also_fcp:
        assert fcp.returncode == 1
        assert last == (
            f"error: torchrun on {socket.gethostname()} was ended by signal 9 (out of memory?), and its ranks with it; "
            f"see {tmp_path}/run/logs/start-001/torchrun.log"
        )
