"""How many files a stranger has to open between `fcp plan` and the compiled search."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fcp_cli.plan.metadata import Sync
from fcp_cli.planning import fcp_solver
from fcp_cli.planning.compiled import timelines, waves
from tests.cli.planning_folder import EIGHT_RANKS, fcp, write_dataset


@pytest.mark.parametrize(
    ("sync", "search", "name"), [("iteration", timelines, "schedule"), ("microbatch", waves, "planned")]
)
def test_a_plan_reaches_its_search_through_five_files_at_most(
    sync: Sync, search: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, chains = getattr(search, name), []

    def noting(*arguments: Any) -> Any:
        frames = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
        files = list(dict.fromkeys(Path(file).name for file in frames if "/fcp_cli/" in file))[::-1]
        chains.append([*files[files.index("plan.py") :], Path(search.__file__ or "").name])
        return compiled(*arguments)

    monkeypatch.setattr(search, name, noting)
    monkeypatch.setattr(fcp_solver, "is_compiled", lambda sync: True)  # it has no compiled form now
    planned = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--sync", sync, cwd=write_dataset(tmp_path))

    assert planned.returncode == 0, planned.stderr
    assert [
        "plan.py",
        "make_plan.py",
        "fcp_solver.py",
        "searches.py",
        f"{search.__name__.rpartition('.')[2]}.py",
    ] in chains
    assert max(map(len, chains)) <= 5, chains
