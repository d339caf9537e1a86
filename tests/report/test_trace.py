from __future__ import annotations

import io
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.pricing.pipeline import Pipeline
from fcp_cli.planning.batching.batches import BatchSettings
from fcp_cli.planning.dataset.run import make_plan
from fcp_cli.planning.settings.settings import PlanInputs
from fcp_cli.report.trace import TraceBuilder, write_trace
from fcp_cli.runs.metrics.metrics_reader import run_step
from tests.planning.examples import example_problem, long_tail
from tests.report.browser import chromium
from tests.report.perfetto_reader import PerfettoReader
from tests.report.runs import busy_seconds, make_example_plan, measured

Event = dict[str, Any]

STEPS_PID = 1  # the process that holds whole steps


@pytest.fixture(scope="module", params=["iteration", "microbatch"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlanReader:
    path = tmp_path_factory.mktemp("plan") / "plan.parquet"
    make_example_plan(path, sync=request.param)
    return PlanReader(path)


@pytest.fixture(scope="module")
def document(reader: PlanReader) -> dict[str, Any]:
    """Planned and measured side by side, as a reader of the file sees them."""
    builder = TraceBuilder(num_ranks=8, ranks_per_node=4)
    made = [*builder.names(["planned", "measured"])]
    for step in reader.steps():
        made += builder.step(step, run_step(measured(step, 8)))
    file = io.StringIO()
    assert write_trace(file, made, source={"format": "fcp-trace/1"}) == len(made)
    return dict(json.loads(file.getvalue()))


@pytest.fixture(scope="module")
def events(document: dict[str, Any]) -> list[Event]:
    return list(document["traceEvents"])


def slices(events: list[Event], kind: str) -> list[Event]:
    """The micro-batches of one kind."""
    return [event for event in events if event["ph"] == "X" and event["cat"] == kind and event["pid"] != STEPS_PID]


def rank_of(event: Event) -> int:
    """Thread 0 is the idle task for Perfetto, so threads count from 1."""
    return int(event["tid"]) - 1


def test_every_event_keeps_the_trace_event_format(document: dict[str, Any]) -> None:
    schema = json.loads(Path(__file__).with_name("trace_events.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)


@pytest.mark.parametrize(
    "damage",
    [
        {"ph": "B"},
        {"ts": -1},
        {"dur": 0.5},
        {"tid": 0},
        {"cat": "guessed"},
    ],
)
def test_the_format_refuses_what_viewers_would_drop(document: dict[str, Any], damage: Event) -> None:
    schema = json.loads(Path(__file__).with_name("trace_events.schema.json").read_text())
    event = next(event for event in document["traceEvents"] if event["ph"] == "X")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "traceEvents": [{**event, **damage}]}, schema)


def test_every_track_has_a_name_and_a_node(events: list[Event]) -> None:
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for event in slices(events, "planned"):
        assert processes[event["pid"]] == f"node {rank_of(event) // 4} planned"
    for event in slices(events, "measured"):
        assert processes[event["pid"]] == f"node {rank_of(event) // 4} measured"
        assert threads[event["pid"], event["tid"]] == f"rank {rank_of(event)}"


def test_track_times_add_up_to_the_plan(events: list[Event], reader: PlanReader) -> None:
    busy = np.zeros(8)
    for event in slices(events, "planned"):
        busy[rank_of(event)] += event["dur"]
    planned = sum(step.busy_seconds(8) for step in reader.steps())
    assert busy / 1e6 == pytest.approx(planned, rel=1e-6)
    whole = sum(e["dur"] for e in events if e["ph"] == "X" and e["cat"] == "planned" and e["pid"] == STEPS_PID)
    assert whole / 1e6 == pytest.approx(sum(step.makespan_seconds for step in reader.steps()), rel=1e-6)


def test_measured_times_add_up_to_the_run(events: list[Event], reader: PlanReader) -> None:
    total = sum(event["dur"] for event in slices(events, "measured"))
    assert total / 1e6 == pytest.approx(sum(sum(busy_seconds(measured(step, 8))) for step in reader.steps()), rel=1e-6)


def test_microbatches_of_a_rank_do_not_overlap(events: list[Event]) -> None:
    ends: dict[tuple[int, int], float] = defaultdict(float)
    for event in sorted(slices(events, "planned"), key=lambda event: event["ts"]):
        track = event["pid"], event["tid"]
        assert event["ts"] >= ends[track]
        ends[track] = event["ts"] + event["dur"]


def test_each_stage_of_a_pipeline_has_a_track_with_every_forward_and_backward(tmp_path: Path) -> None:
    problem = replace(
        example_problem("microbatch", num_ranks=8),
        pipeline_parallel=2,
        pipeline=Pipeline(forward_share=1 / 3, virtual_stages=2),
    )
    inputs = PlanInputs(table=long_tail(40), problem=problem, settings=BatchSettings(global_batch_size=43))
    metadata = make_plan(tmp_path / "pipelines.parquet", inputs, solver_name="fcp").metadata
    builder = TraceBuilder(num_ranks=8, ranks_per_node=4, metadata=metadata)
    step = next(PlanReader(tmp_path / "pipelines.parquet").steps())
    events = [
        *builder.names(["planned", "measured"]),
        *builder.step(step, run_step(measured(step, 8))),
    ]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    planned = slices(events, "planned")
    tracks = {f"rank {rank} stage {stage}" for rank in range(8) for stage in range(2)}
    assert {threads[event["pid"], event["tid"]] for event in planned} == tracks
    assert {threads[e["pid"], e["tid"]] for e in slices(events, "measured")} == {f"rank {rank}" for rank in range(8)}
    assert len(planned) == 2 * 4 * step.degrees[~step.is_idle].sum()
    kinds = {event["name"].partition(" forward")[1] or event["name"].partition(" backward")[1] for event in planned}
    assert kinds == {" forward", " backward"}
    assert {event["name"][-9:] for event in planned} == {", block 0", ", block 1"}
    busy = sum(event["dur"] for event in planned) / 1e6
    assert busy / 2 == pytest.approx(step.busy_seconds(8).sum(), rel=1e-6)  # a replica's seconds are its devices' mean
    test_microbatches_of_a_rank_do_not_overlap(events)


def test_steps_start_together_in_plan_and_run(events: list[Event]) -> None:
    starts = {
        kind: [e["ts"] for e in events if e["pid"] == STEPS_PID and e.get("cat") == kind]
        for kind in ("planned", "measured")
    }
    assert starts["planned"] == starts["measured"]
    assert len(starts["planned"]) == 4


def test_flows_run_through_the_members_of_each_ring(events: list[Event], reader: PlanReader) -> None:
    flows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    planned = [flow for flow in flows.values() if flow[0]["cat"] == "planned"]
    rings = [row for step in reader.steps() for row in step.microbatches() if row.degree > 1]
    assert rings
    assert sorted(tuple(sorted(rank_of(e) for e in flow)) for flow in planned) == sorted(row.ranks for row in rings)
    begun = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    for flow in flows.values():
        assert [e["ph"] for e in flow] == ["s", *["t"] * (len(flow) - 2), "f"]
        assert [e["ts"] for e in flow] == sorted(e["ts"] for e in flow)
        assert all((e["pid"], e["tid"], e["ts"]) in begun for e in flow)


def test_arguments_name_the_sequences_and_both_times(events: list[Event], reader: PlanReader) -> None:
    row = next(row for step in reader.steps() for row in step.microbatches() if row.degree > 1)
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


@pytest.mark.browser
def test_perfetto_loads_it_whole(document: dict[str, Any], reader: PlanReader) -> None:
    """Every event arrives on its own track, nothing is dropped, and the times are the plan's."""
    with chromium() as browser:
        perfetto = PerfettoReader(browser, json.dumps(document).encode())
        complaints = perfetto.query("select name from stats where severity in ('error', 'data_loss') and value > 0")
        tracks = perfetto.query(
            "select process.name as process, thread.name as thread, count(*) as slices, sum(dur) as nanoseconds "
            "from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) "
            "join process using (upid) group by 1, 2"
        )
        arrows = perfetto.query("select count(*) as arrows from flow")
    assert complaints == []
    steps, planned, run = list(reader.steps()), np.zeros(8), np.zeros(8)
    for step in steps:
        planned += step.busy_seconds(8)
        run += busy_seconds(measured(step, 8))
    found = {(process, thread): nanoseconds / 1e9 for process, thread, _, nanoseconds in tracks}
    for rank in range(8):
        assert found.pop((f"node {rank // 4} planned", f"rank {rank}")) == pytest.approx(planned[rank], abs=1e-4)
        assert found.pop((f"node {rank // 4} measured", f"rank {rank}")) == pytest.approx(run[rank], abs=1e-4)
    assert found.pop(("steps", "planned")) == pytest.approx(sum(step.makespan_seconds for step in steps), abs=1e-5)
    assert [*found] == [("steps", "measured")]
    assert sum(slices for _, _, slices, _ in tracks) == sum(event["ph"] == "X" for event in document["traceEvents"])
    rings = [row for step in steps for row in step.microbatches() if row.degree > 1]
    assert arrows == [(2 * sum(row.degree - 1 for row in rings),)]
