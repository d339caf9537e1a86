from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fcp_cli.runs.metrics import MetricsWriter, drop_steps_from, parse_record, step_record
from fcp_cli.runs.metrics_reader import MetricsTail, read_metrics
from tests.plan.steps import Row, make_step

RUN: dict[str, Any] = {"format": "fcp-metrics/1", "kind": "run", "started": "2026-01-01T00:00:00+00:00"}
RUN |= {"num_ranks": 2, "ranks_per_node": 2}


def measured(step: int = 3, *, loss: float = 2.0) -> dict[str, Any]:
    """A step of two rings of both ranks, and a micro-batch of rank 0 alone."""
    rows = [Row([0, 1], 0.5, lengths=[10]), Row([0, 1], 0.5, lengths=[10]), Row([0], 0.5, lengths=[4])]
    plan = make_step(rows, step=step)
    timings = [[(0, 0.0, 0.5), (2, 0.0, 1.0)], [(1, 0.0, 0.5)]]
    return step_record(plan, timings, seconds=2.0, loss=loss, grad_norm=1.5, learning_rate=1e-3)


def write(path: Path, *records: dict[str, object]) -> None:
    writer = MetricsWriter(path)
    for record in records:
        writer.write(record)
    writer.close()


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path) if record["kind"] == "step"]


def test_a_step_record_has_what_the_format_promises() -> None:
    microbatch = {
        "order": 0,
        "degree": 2,
        "tokens": 10,
        "predicted_seconds": 0.5,
        "start_seconds": 0.0,
        "seconds": 0.5,
    }
    record = measured()
    assert record["ranks"][1] == {
        "rank": 1,
        "busy_seconds": 0.5,
        "idle_seconds": 1.5,
        "micro_batches": [{**microbatch, "order": 1}],
    }
    del record["ranks"]
    assert record == {
        "kind": "step",
        "step": 3,
        "loss": 2.0,
        "tokens": 24,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "seconds": 2.0,
        "predicted_seconds": 1.0,
        "tokens_per_second": 12.0,
        "mfu": None,
        "peak_memory_bytes": None,
        "idle_fraction": 0.5,
        "warm_up": False,
    }


def test_a_loss_that_ran_away_is_null_not_invalid_json() -> None:
    assert json.loads(json.dumps(measured(loss=math.nan), allow_nan=False))["loss"] is None


def test_resuming_drops_the_steps_that_will_be_made_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, RUN, *(measured(step) for step in range(8)))
    drop_steps_from(path, 5)
    write(path, RUN, measured(5))
    assert steps_in(path) == [0, 1, 2, 3, 4, 5]


def test_a_last_line_cut_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, RUN, measured(0))
    with path.open("a") as file:
        file.write('{"kind":"step","st')
    assert steps_in(path) == [0]
    drop_steps_from(path, 1)
    assert path.read_text().count("\n") == 2
    assert path.read_text().endswith("}\n")


def test_a_tail_gives_each_whole_record_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path, since=str(RUN["started"]))
    assert tail.poll() == []
    write(path, RUN, measured(0))
    assert [record["kind"] for record in tail.poll()] == ["run", "step"]
    with path.open("a") as file:
        whole = json.dumps(measured(1))
        file.write(whole[:20])
        file.flush()
        assert tail.poll() == []
        file.write(f"{whole[20:]}\n")
    assert tail.poll() == [parse_record(json.dumps(measured(1)))]
    assert tail.poll() == []


def test_a_tail_passes_over_what_an_earlier_start_wrote(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, RUN, measured(0), measured(1))
    tail = MetricsTail(path, since="2026-06-01T00:00:00+00:00")
    assert tail.poll() == []
    drop_steps_from(path, 1)
    write(path, {**RUN, "started": "2026-06-01T00:00:01+00:00"}, measured(1))
    assert [record.get("step") for record in tail.poll()] == [None, 1]
