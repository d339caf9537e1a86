from __future__ import annotations

import json
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import RunError
from fcp_cli.plan.file import PlanReader
from fcp_cli.runs.metrics_reader import open_run
from tests.messages import raises
from tests.report.runs import busy_seconds, make_example_plan, measured, run_record, write_run

MICROBATCH = {"order": 0, "degree": 1, "tokens": 9, "predicted_seconds": 1.0, "start_seconds": 0.0, "seconds": 1.0}


def test_a_run_is_read_step_by_step(example_plan: Path, tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "metrics.jsonl", example_plan))
    steps = list(run.steps())
    assert [step.step for step in steps] == [0, 1, 2, 3]
    assert run.problems == []
    first = next(PlanReader(example_plan).steps())
    assert steps[0].busy_seconds.sum() == pytest.approx(sum(busy_seconds(measured(first, 8))))
    assert steps[0].warm_up and not steps[1].warm_up


def test_a_run_is_found_in_its_folder(example_plan: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl", example_plan)
    assert open_run(tmp_path).path == tmp_path / "metrics.jsonl"


def test_a_line_cut_short_is_left_out_and_said(example_plan: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path / "metrics.jsonl", example_plan)
    path.write_text(path.read_text()[:-100])
    run = open_run(path)
    assert len(list(run.steps())) == 3
    assert run.problems == [f"{path}: line 5 truncated or damaged; skipped"]


def test_damage_in_the_middle_leaves_the_rest(example_plan: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path / "metrics.jsonl", example_plan)
    lines = path.read_text().splitlines()
    lines[2], lines[3] = '{"kind":"step","step":1}', "garbage"
    path.write_text("\n".join(lines) + "\n")
    run = open_run(path)
    assert [step.step for step in run.steps()] == [0, 3]
    assert run.problems == [f"{path}: line 3 and 1 more truncated or damaged; skipped"]


def test_each_second_step_is_read_on_demand(example_plan: Path, tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "metrics.jsonl", example_plan))
    assert [step.step for step in run.steps(every=2)] == [0, 2]


def test_a_run_without_steps_says_so(example_plan: Path, tmp_path: Path) -> None:
    metadata = PlanReader(example_plan).metadata
    run = open_run(write_run(tmp_path / "metrics.jsonl", example_plan, records=[run_record(metadata, example_plan)]))
    assert list(run.steps()) == []
    assert run.problems == [f"{run.path} has no finished steps yet"]


def test_an_empty_file_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    with pytest.raises(RunError, match="is empty: the run has written no metrics yet"):
        open_run(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with raises(snapshot("RunError: FOLDER/gone.jsonl does not exist; name the folder that 'fcp launch' printed")):
        open_run(tmp_path / "gone.jsonl")
    with pytest.raises(RunError, match=r"has no metrics\.jsonl; name the folder"):
        open_run(tmp_path)
    (tmp_path / "launch.json").write_text("{}")
    with pytest.raises(RunError, match="has written no metrics yet"):
        open_run(tmp_path)


def test_the_metrics_of_another_plan_are_refused(example_plan: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path / "metrics.jsonl", example_plan)
    other = make_example_plan(tmp_path / "other.parquet", seed=1)
    with pytest.raises(
        RunError, match=rf"is of another plan: its hash is .*, but this plan's is {other.plan_hash[:12]}"
    ):
        open_run(path, plan=other)


@pytest.mark.parametrize(
    "damage",
    [
        {"step": -5},
        {"seconds": 0.0},
        {"seconds": float("nan")},
        {"predicted_seconds": 0.0},
        {"tokens": "many"},
        {"ranks": [{"rank": 99, "idle_seconds": 0.0, "micro_batches": [MICROBATCH]}]},
        {"ranks": [{"rank": 1, "idle_seconds": 0.0, "micro_batches": [{**MICROBATCH, "seconds": float("inf")}]}]},
        {"ranks": [{"rank": 1, "idle_seconds": 0.0, "micro_batches": [{**MICROBATCH, "start_seconds": -1.0}]}]},
    ],
)
def test_what_no_run_can_have_measured_counts_as_damage(
    example_plan: Path, tmp_path: Path, damage: dict[str, object]
) -> None:
    path = write_run(tmp_path / "metrics.jsonl", example_plan)
    lines = path.read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), **damage}, separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")
    run = open_run(path)
    assert [step.step for step in run.steps()] == [0, 2, 3]
    assert run.problems == [f"{path}: line 3 truncated or damaged; skipped"]


def test_a_step_that_is_not_in_the_plan_hides_no_other(example_plan: Path, tmp_path: Path) -> None:
    reader = PlanReader(example_plan)
    steps = [measured(step, 8) for step in reader.steps()]
    records = [run_record(reader.metadata, example_plan), steps[0], {**steps[1], "step": 77}, *steps[2:], steps[3]]
    run = open_run(write_run(tmp_path / "metrics.jsonl", example_plan, records=records), plan=reader.metadata)
    assert [step.step for step in run.steps()] == [0, 2, 3]
    assert run.problems == [
        f"{run.path}: skipped 1 step: not in the plan",
        f"{run.path}: skipped 1 step: repeated or out of order",
    ]


def test_steps_resumed_under_another_plan_are_left_out(example_plan: Path, tmp_path: Path) -> None:
    reader = PlanReader(example_plan)
    steps = [measured(step, 8) for step in reader.steps()]
    records = [
        run_record(reader.metadata, example_plan),
        *steps[:2],
        run_record(reader.metadata, example_plan, plan_hash="other"),
        *steps[2:],
    ]
    path = write_run(tmp_path / "metrics.jsonl", example_plan, records=records)
    run = open_run(path, plan=reader.metadata)
    assert [step.step for step in run.steps()] == [0, 1]
    assert run.problems == [f"{path}: skipped 2 steps: another plan's"]
