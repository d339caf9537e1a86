from __future__ import annotations

import io
import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from fcp_cli.plan.reader import PlanReader
from fcp_cli.report.run_file import run_step
from fcp_cli.report.trace import TraceBuilder, write_trace
from tests.report.runs import make_example_plan, measured

Event = dict[str, Any]


@pytest.fixture(scope="module", params=["iteration", "microbatch"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlanReader:
    path = tmp_path_factory.mktemp("plan") / "plan.parquet"
    make_example_plan(path, sync=request.param)
    return PlanReader(path)


@pytest.fixture(scope="module")
def events(reader: PlanReader) -> list[Event]:
    """Planned and measured side by side, as a reader of the file sees them."""
    builder = TraceBuilder(num_ranks=8, ranks_per_node=4)
    made = [*builder.names(["planned", "measured"])]
    for step in reader.steps():
        made += builder.step(step, run_step(measured(step, 8).record()))
    file = io.StringIO()
    assert write_trace(file, made, source={"format": "fcp-trace/1"}) == len(made)
    document = json.loads(file.getvalue())
    assert document["displayTimeUnit"] == "ms"
    return list(document["traceEvents"])


def slices(events: list[Event], kind: str) -> list[Event]:
    """The micro-batches of one kind; process 0 holds whole steps."""
    return [event for event in events if event["ph"] == "X" and event["cat"] == kind and event["pid"]]


def test_every_event_keeps_the_trace_event_format(events: list[Event]) -> None:
    wanted = {"X": {"ts", "dur", "args"}, "M": {"args"}, "s": {"ts", "id"}, "t": {"ts", "id"}, "f": {"ts", "id", "bp"}}
    for event in events:
        assert wanted[event["ph"]] | {"name", "pid", "tid"} <= event.keys()
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event.get("ts", 0.0) >= 0 and event.get("dur", 0.0) >= 0
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def test_every_track_has_a_name_and_a_node(events: list[Event]) -> None:
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for event in slices(events, "planned"):
        assert processes[event["pid"]] == f"node {event['tid'] // 4} planned"
    for event in slices(events, "measured"):
        assert processes[event["pid"]] == f"node {event['tid'] // 4} measured"
        assert threads[event["pid"], event["tid"]] == f"rank {event['tid']}"


def test_track_times_add_up_to_the_plan(events: list[Event], reader: PlanReader) -> None:
    busy = np.zeros(8)
    for event in slices(events, "planned"):
        busy[event["tid"]] += event["dur"]
    planned = sum(step.busy_seconds(8) for step in reader.steps())
    assert busy / 1e6 == pytest.approx(planned, rel=1e-8)
    whole = sum(e["dur"] for e in events if e["ph"] == "X" and e["cat"] == "planned" and e["pid"] == 0)
    assert whole / 1e6 == pytest.approx(sum(step.makespan_seconds for step in reader.steps()), rel=1e-8)


def test_measured_times_add_up_to_the_run(events: list[Event], reader: PlanReader) -> None:
    total = sum(event["dur"] for event in slices(events, "measured"))
    assert total / 1e6 == pytest.approx(sum(sum(measured(step, 8).busy_seconds()) for step in reader.steps()), rel=1e-8)


def test_micro_batches_of_a_rank_do_not_overlap(events: list[Event]) -> None:
    ends: dict[tuple[int, int], float] = defaultdict(float)
    for event in sorted(slices(events, "planned"), key=lambda event: event["ts"]):
        track = event["pid"], event["tid"]
        assert event["ts"] >= ends[track] - 0.01
        ends[track] = event["ts"] + event["dur"]


def test_steps_start_together_in_plan_and_run(events: list[Event]) -> None:
    starts = {
        kind: [e["ts"] for e in events if e["pid"] == 0 and e.get("cat") == kind] for kind in ("planned", "measured")
    }
    assert starts["planned"] == starts["measured"]
    assert len(starts["planned"]) == 4


def test_flows_run_through_the_members_of_each_ring(events: list[Event], reader: PlanReader) -> None:
    flows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    planned = [flow for flow in flows.values() if flow[0]["cat"] == "planned"]
    rings = [row for step in reader.steps() for row in step.micro_batches() if row.degree > 1]
    assert rings
    assert sorted(tuple(sorted(e["tid"] for e in flow)) for flow in planned) == sorted(row.ranks for row in rings)
    begun = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    for flow in flows.values():
        assert [e["ph"] for e in flow] == ["s", *["t"] * (len(flow) - 2), "f"]
        assert [e["ts"] for e in flow] == sorted(e["ts"] for e in flow)
        assert all((e["pid"], e["tid"], e["ts"]) in begun for e in flow)


def test_arguments_name_the_sequences_and_both_times(events: list[Event], reader: PlanReader) -> None:
    row = next(row for step in reader.steps() for row in step.micro_batches() if row.degree > 1)
    found = [
        e["args"]
        for e in slices(events, "measured")
        if (e["args"]["step"], e["args"]["order"]) == (row.step, row.order)
    ]
    assert len(found) == row.degree
    for args in found:
        assert tuple(args["sequences"]) == row.sequences
        assert (args["tokens"], args["degree"]) == (row.tokens, row.degree)
        assert args["predicted_seconds"] == row.seconds
        assert args["measured_seconds"] > 0
