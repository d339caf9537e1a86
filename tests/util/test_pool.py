from __future__ import annotations

import multiprocessing
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


def test_on_one_core_nothing_runs_beside_a_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pool, "usable_cores", lambda: 1)
    with beside(_note_and_go_on, tmp_path):
        assert not multiprocessing.active_children()
