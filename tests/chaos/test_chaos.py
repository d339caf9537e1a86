"""A few runs of `make chaos`, and what its checker must not overlook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checker import problems_of, read_reference
from tests.chaos.faults import KINDS
from tests.patience import PATIENCE_SECONDS

STEPS = 4
LAYOUTS = [{"0": [[0, 2, 100 + step]], "1": [[0, 2, 100 + step]]} for step in range(STEPS)]


def record_of(step: int) -> dict[str, Any]:
    """The record of a step on two ranks."""
    ran = [{"order": 0, "degree": 2, "tokens": 100 + step, "seconds": 0.1}]
    return {
        "kind": "step",
        "step": step,
        "loss": 5.5 - step,
        "tokens": 100 + step,
        "grad_norm": 1.25,
        "learning_rate": 0.003,
        "ranks": [{"rank": rank, "micro_batches": ran} for rank in range(2)],
    }


def write_run(folder: Path, records: list[dict[str, Any]], *, saved: tuple[int, ...] = (2, STEPS)) -> Path:
    """A run folder with these records of steps, and checkpoints after these many steps."""
    folder.mkdir()
    lines = [{"kind": "run"}, *records]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))
    for step in saved:
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "checkpoint.json").write_text("{}")
        (checkpoint / "state.safetensors").write_bytes(bytes([step]) * 64)
    return folder


@pytest.fixture
def problems(tmp_path: Path) -> Callable[..., list[str]]:
    """What the checker says of records, beside those of an undisturbed run."""
    reference = read_reference(write_run(tmp_path / "undisturbed", [record_of(step) for step in range(STEPS)]), LAYOUTS)

    def check(
        records: list[dict[str, Any]], *, saved: tuple[int, ...] = (2, STEPS), finished: bool = True, **how: Any
    ) -> list[str]:
        return problems_of(write_run(tmp_path / "run", records, saved=saved), reference, finished=finished, **how)

    return check


def records() -> list[dict[str, Any]]:
    return [record_of(step) for step in range(STEPS)]


def test_a_whole_record_has_no_problems(problems: Callable[..., list[str]]) -> None:
    assert problems(records()) == []


def test_a_missing_step_is_seen(problems: Callable[..., list[str]]) -> None:
    assert problems([record_of(step) for step in (0, 2, 3)]) == [
        "steps [1] are recorded nowhere, although the run is past them"
    ]


def test_missing_last_steps_are_seen(problems: Callable[..., list[str]]) -> None:
    assert problems(records()[:-1]) == ["steps [3] are recorded nowhere, although the run is past them"]


def test_a_step_that_is_recorded_twice_is_seen(problems: Callable[..., list[str]]) -> None:
    assert problems([*records()[:3], *records()[2:]]) == ["steps [2] are recorded twice"]


def test_steps_out_of_order_are_seen(problems: Callable[..., list[str]]) -> None:
    assert problems([record_of(step) for step in (0, 2, 1, 3)]) == ["steps are out of order: [0, 2, 1, 3]"]


def test_a_loss_that_differs_in_its_last_bit_is_seen(problems: Callable[..., list[str]]) -> None:
    other = [*records()[:3], {**record_of(3), "loss": 2.5000000000000004}]
    assert problems(other) == ["step 3: loss is 2.5000000000000004, the undisturbed run has 2.5"]


def test_other_sequences_than_the_plan_has_are_seen(problems: Callable[..., list[str]]) -> None:
    other = records()
    other[1]["ranks"] = other[2]["ranks"]
    (problem,) = problems(other)
    assert problem.startswith("step 1: ranks ran {'0': [[0, 2, 102]], '1': [[0, 2, 102]]}, the plan has")


def test_weights_that_differ_in_a_bit_are_seen(problems: Callable[..., list[str]], tmp_path: Path) -> None:
    assert problems(records()) == []
    state = tmp_path / "run" / "checkpoints" / "step-00000004" / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[9] ^= 1
    state.write_bytes(content)
    undisturbed = read_reference(tmp_path / "undisturbed", LAYOUTS)
    assert problems_of(tmp_path / "run", undisturbed, finished=True) == [
        "step-00000004 is not the undisturbed run's, bit for bit"
    ]


def test_a_checkpoint_that_the_metrics_have_not_come_to_is_seen(problems: Callable[..., list[str]]) -> None:
    assert problems(records()[:1], saved=(2,), finished=False) == [
        "steps [1] are recorded nowhere, although the run is past them"
    ]


def test_a_stopped_run_may_have_steps_beyond_its_checkpoint(problems: Callable[..., list[str]]) -> None:
    assert problems(records()[:3], saved=(2,), finished=False) == []


def test_a_run_that_finished_without_its_last_checkpoint_is_seen(problems: Callable[..., list[str]]) -> None:
    assert problems(records(), saved=(2,)) == ["the newest checkpoint is of step 2, not 4"]


def test_a_damaged_line_of_the_metrics_is_seen(problems: Callable[..., list[str]], tmp_path: Path) -> None:
    assert problems(records()) == []
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"kind":"run"}', '"kind":"ru', 1))
    undisturbed = read_reference(tmp_path / "undisturbed", LAYOUTS)
    (problem,) = problems_of(tmp_path / "run", undisturbed, finished=True)
    assert problem == 'metrics.jsonl line 1 is not JSON: \'{"kind":"ru\''


def test_on_other_ranks_rounding_is_allowed_after_the_last_exact_step_alone(
    problems: Callable[..., list[str]],
) -> None:
    other = [{**record, "loss": record["loss"] * (1 + 1e-9)} for record in records()]
    found = problems(other, saved=(2, STEPS), exact_steps=2, rounding=1e-6)
    assert [problem.partition(":")[0] for problem in found] == ["step 0", "step 1"]


@pytest.mark.distributed
@pytest.mark.hf
def test_jobs_that_are_struck_end_and_resume_to_what_an_undisturbed_one_makes() -> None:
    kinds = ("kill-fcp", "clock")  # tests/training/test_resume.py kills ranks
    assert set(kinds) <= KINDS.keys()
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "2", "0", *kinds],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | 2 | 2 | 2 | 0 |" in done.stdout
