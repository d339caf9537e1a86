from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fcp_cli.util import pool
from fcp_cli.util.pool import beside


def _note_and_go_on(folder: Path) -> None:
    (folder / "began").touch()
    time.sleep(600)


@pytest.mark.processes
def test_work_beside_a_block_ends_with_it(tmp_path: Path) -> None:
    with beside(_note_and_go_on, tmp_path):
        (process,) = multiprocessing.active_children()
        for _ in range(600):
            if (tmp_path / "began").exists():
                break
            time.sleep(0.05)
        assert (tmp_path / "began").exists()
    process.join(10)
    assert process.exitcode == -15


@pytest.mark.processes
def test_work_beside_a_block_does_not_run_the_script_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nfrom pathlib import Path\nfrom fcp_cli.util.pool import beside\n"
        "print('the script runs', flush=True)\n"
        "with beside(Path('began').touch):\n"
        "    for _ in range(600):\n        time.sleep(0.05)\n        if Path('began').exists(): break\n"
        "print(Path('began').exists())\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "the script runs\nTrue\n" and done.stderr == ""


def test_on_one_core_nothing_runs_beside_a_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pool, "usable_cores", lambda: 1)
    with beside(_note_and_go_on, tmp_path):
        assert not multiprocessing.active_children()
