"""Lines of metrics that anybody may have written, through every reader of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.errors import RunError
from fcp_cli.report.watch import RunState, run_view
from fcp_cli.runs.metrics import drop_steps_from, parse_record
from fcp_cli.runs.metrics_reader import MetricsTail, open_run, read_metrics, summary_of

RUN = {"format": "fcp-metrics/1", "kind": "run", "num_ranks": 2, "ranks_per_node": 2, "steps": 9}
TIMING = {"order": 0, "degree": 1, "tokens": 9, "predicted_seconds": 1.0, "start_seconds": 0.0, "seconds": 1.0}
RANK = {"rank": 1, "idle_seconds": 0.5, "micro_batches": [TIMING]}
STEP = {"kind": "step", "step": 0, "loss": 1.0, "tokens": 9, "seconds": 1.5, "predicted_seconds": 1.0} | {
    "idle_fraction": 0.3,
    "ranks": [RANK],
}
EVAL = {"kind": "eval", "step": 0, "loss": 1.0, "tokens": 9, "seconds": 1.0, "buckets": []}


def without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


DAMAGED: list[Any] = [
    *(without(STEP, name) for name in STEP),
    *({**STEP, "ranks": [without(RANK, name)]} for name in RANK),
    *({**STEP, "ranks": [{**RANK, "micro_batches": [without(TIMING, name)]}]} for name in TIMING),
    *(without(EVAL, name) for name in EVAL),
    {**EVAL, "buckets": [{"tokens": 1}]},
    {**STEP, "step": -1},
    {**STEP, "step": 2**60},
    {**STEP, "tokens": True},
    {**STEP, "bad_rows": 5},
    {**STEP, "mfu": "much"},
    {**STEP, "warm_up": "no"},
    {**STEP, "peak_memory_bytes": [1]},
    {**STEP, "ranks": [{**RANK, "peak_memory_bytes": -1}]},
    {**RUN, "started": 5},
    {**RUN, "num_ranks": 2**40},
    {**RUN, "steps": 2**70},
    {**RUN, "plan_hash": 5},
    {**RUN, "device": ["cpu"]},
    {"kind": ["step"]},
    {},
    [STEP],
    5,
    None,
]


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_record_is_skipped_while_watching_and_refused_for_fits(tmp_path: Path, damaged: Any) -> None:
    path = written(tmp_path / "metrics.jsonl", RUN, damaged, STEP)
    tail, state = MetricsTail(path), RunState()
    for record in tail.poll():
        state.feed(record)
    run_view(state, None, ascii_only=True)
    is_start = isinstance(damaged, dict) and damaged.get("kind") == "run"  # what follows it belongs to no known start
    assert (state.last_step, tail.damaged, summary_of(path).steps) == (-1 if is_start else 0, 1, 1)
    run = open_run(path)
    assert [step.step for step in run.steps()] == [0]
    assert run.problems == [f"{path}: line 2 truncated or damaged; skipped"]
    for reads in (read_metrics, lambda path: drop_steps_from(path, 5)):
        with pytest.raises(RunError, match=r"metrics\.jsonl, line 2: the metrics are damaged \("):
            reads(path)


def test_records_of_kinds_that_later_versions_write_are_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", RUN, {"kind": "news"}, {**STEP, "news": [1]}, EVAL)
    assert [record["kind"] for record in read_metrics(path)] == ["run", "step", "eval"]
    drop_steps_from(path, 0)
    assert path.read_text().splitlines() == [json.dumps(RUN), json.dumps({"kind": "news"})]


@pytest.mark.parametrize(
    "first", [{"format": "fcp-metrics/1", **STEP}, {**RUN, "format": "fcp-metrics/9"}], ids=["a step", "a later format"]
)
def test_metrics_without_a_start_are_refused(tmp_path: Path, first: Any) -> None:
    path = written(tmp_path / "metrics.jsonl", first, STEP)
    for reads in (read_metrics, open_run):
        with pytest.raises(RunError, match=r"is not the metrics of a run: expected a first line with"):
            reads(path)


def test_an_evaluation_changes_no_mean_of_the_steps() -> None:
    state = RunState()
    for record in (RUN, STEP, EVAL):
        parsed = parse_record(json.dumps(record))
        assert parsed is not None
        state.feed(parsed)
    assert (len(state.window), state.mean("seconds")) == (1, 1.5)
    assert state.idle_of_ranks()[1] == pytest.approx(1 / 3)
