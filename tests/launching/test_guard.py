"""`kill -9` of fcp: nobody is left to end the job, and yet nothing of it stays."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

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
