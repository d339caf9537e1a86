"""What a loop of MindSpore writes down of its steps; MindSpore, which is a large download, is a stand-in."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest

from fcp_cli.plan.file import PlanReader
from fcp_cli.runs.metrics import parse_record
from tests.runtime.plans import Row, write_plan

_PACKAGE = "fcp_cli.integrations.mindspore"
STEPS = ((Row([0, 1], [20, 5]), Row([0], [9]), Row([1], [6])), (Row([0, 1], [12]),))


class Pair:
    """Rank 0 of two that measure the same."""

    rank, size = 0, 2

    def gather(self, words: Any) -> Any:
        return np.stack([words, words])


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`measured`, imported with a MindSpore that does nothing."""
    mindspore = MagicMock(__version__="2.10.0", get_context=lambda name: "CPU")
    for name in ("mindspore", "mindspore.communication"):
        monkeypatch.setitem(sys.modules, name, mindspore)
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(_PACKAGE)}
    yield importlib.import_module(f"{_PACKAGE}.session")
    for name in [name for name in sys.modules if name.startswith(_PACKAGE)]:
        del sys.modules[name]
    sys.modules.update(held)


def run(module: ModuleType, plan: Path, *, first_step: int = 0, steps: int = len(STEPS)) -> None:
    """Measure steps of micro-batches that take no time."""
    measured = module.MeasuredSteps(plan, PlanReader(plan).metadata, Pair(), first_step)
    for planned in list(PlanReader(plan).steps(first_step))[:steps]:
        for order in range(2 if planned.step == 0 else 1):
            measured.enter()
            measured.leave(order)
        measured.loss = 2.5
        measured.end()
    measured.close()


def records(path: Path) -> list[dict[str, Any]]:
    """What `fcp watch` and `fcp profile fit` read."""
    return cast(list[dict[str, Any]], [parse_record(line) for line in path.read_text().splitlines()])


@pytest.fixture
def metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run" / "metrics.jsonl"
    monkeypatch.setenv("FCP_METRICS", str(path))
    return path


def test_every_step_is_written_with_the_micro_batches_of_every_rank(
    module: ModuleType, tmp_path: Path, metrics: Path
) -> None:
    plan = write_plan(tmp_path / "plan.parquet", STEPS, num_ranks=2)
    run(module, plan)
    begun, first, second = records(metrics)
    assert (begun["kind"], begun["device"], begun["mindspore"], begun["num_ranks"]) == ("run", "cpu", "2.10.0", 2)
    assert [timing["order"] for timing in first["ranks"][1]["micro_batches"]] == [0, 1]
    assert (first["tokens"], first["loss"], first["warm_up"]) == (40, 2.5, True)
    assert (second["tokens"], second["loss"], second["warm_up"]) == (12, 2.5, False)
    assert [timing["degree"] for timing in second["ranks"][0]["micro_batches"]] == [2]
    assert second["peak_memory_bytes"] > 1 << 20 and second["seconds"] > 0.0


def test_a_loop_that_begins_again_drops_the_steps_that_it_makes_again(
    module: ModuleType, tmp_path: Path, metrics: Path
) -> None:
    plan = write_plan(tmp_path / "plan.parquet", STEPS, num_ranks=2)
    run(module, plan)
    run(module, plan, first_step=1)
    assert [record["step"] for record in records(metrics) if record["kind"] == "step"] == [0, 1]


def test_without_a_file_nothing_is_measured(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FCP_METRICS", raising=False)
    run(module, write_plan(tmp_path / "plan.parquet", STEPS, num_ranks=2))
    assert not list(tmp_path.glob("**/*.jsonl"))
