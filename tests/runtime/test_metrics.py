"""What ranks measure reaches rank 0's file, whatever the loop around the session is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from fcp_cli.plan.file import PlanReader
from fcp_cli.runs.metrics import MetricsWriter
from fcp_cli.runs.metrics_reader import open_run
from fcp_cli.runtime import metrics as recording
from fcp_cli.runtime.metrics import Clock, MessageLostError, MetricsMailbox, Recorder
from fcp_cli.runtime.metrics_message import RankMeasurement, mean_loss, measured_record
from tests.runs.records import read_metrics
from tests.training.small_runs import write_manifest, write_small_plan

pytestmark = pytest.mark.torch


def measured(step: int = 0, **changes: Any) -> RankMeasurement:
    given = {"seconds": 0.75, "loss_sum": 6.0, "denominator": 4.0, "peak_bytes": (1 << 36) + 1}
    return RankMeasurement(step=step, timings=[(0, 0.0, 0.5), (2, 0.5, 0.25)], **{**given, **changes})


def test_a_message_holds_exactly_what_was_measured() -> None:
    assert RankMeasurement.decode(measured(3).encode()) == measured(3)


def test_timings_stand_beside_what_was_planned(tmp_path: Path) -> None:
    plan = next(PlanReader(write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=1)).steps())
    second = measured_record(plan, [measured()], loss=1.5, is_first=True)["ranks"][0]["micro_batches"][1]
    assert (second["order"], second["degree"], second["tokens"]) == (2, 2, int(plan.tokens[2]))
    assert (second["predicted_seconds"], second["start_seconds"], second["seconds"]) == (plan.seconds[2], 0.5, 0.25)


def test_the_loss_is_the_sum_over_ranks_by_what_they_count_together() -> None:
    assert mean_loss({0: measured(), 1: measured(loss_sum=2.0, denominator=0.0)}) == 2.0  # a session: rank 0 has it all
    assert mean_loss({0: measured(), 1: measured(loss_sum=2.0, denominator=12.0)}) == 0.5  # Megatron: each rank its own
    assert math.isnan(mean_loss({0: measured(denominator=0.0)}))


def test_a_step_is_there_once_all_ranks_have_left_it() -> None:
    box = MetricsMailbox(HashStore(), 2)
    assert box.collect(0) is None
    box.leave(1, measured(0))
    assert box.collect(0) is None
    box.leave(0, measured(0, seconds=2.0))
    found = box.collect(0)
    assert found is not None and [found[rank].seconds for rank in (0, 1)] == [2.0, 0.75]


def test_a_message_of_an_earlier_step_in_the_same_place_is_not_taken_for_a_later_one() -> None:
    box = MetricsMailbox(HashStore(), 2)
    for rank in range(2):
        box.leave(rank, measured(0))
    assert box.collect(0) is not None
    box.leave(0, measured(8))
    assert box.collect(8) is None
    box.leave(1, measured(8))
    assert box.collect(8) is not None


def test_a_message_that_was_overwritten_costs_its_step_and_no_other() -> None:
    box = MetricsMailbox(HashStore(), 2)
    for step in (0, 8):  # in the same place
        box.leave(1, measured(step))
    box.leave(0, measured(0))
    with pytest.raises(MessageLostError):
        box.collect(0)
    box.leave(0, measured(8))
    assert box.collect(8) is not None


def test_a_message_of_an_earlier_loop_is_not_taken_for_the_same_step_of_a_later_one() -> None:
    store = HashStore()
    MetricsMailbox(store, 2, loop=1).leave(1, measured(0))
    later = MetricsMailbox(store, 2, loop=2)
    later.leave(0, measured(0))
    assert later.collect(0) is None


class LateClock(Clock):
    """A device that has passed what was marked only once somebody says so, and that nobody may wait for."""

    def __init__(self) -> None:
        self.now, self.passed, self.may_wait = 0.0, -1.0, False

    def mark(self) -> float:
        self.now += 1.0
        return self.now

    def seconds(self, earlier: float, later: float) -> float:
        assert self.may_wait or later <= self.passed, "the host waited for the device"
        return later - earlier

    def has_passed(self, mark: float) -> bool:
        return mark <= self.passed


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=4, num_ranks=1)


def alone(plan: Path, clock: LateClock | None = None) -> Recorder:
    made = Recorder(
        plan.with_name("metrics.jsonl"),
        plan=plan,
        metadata=PlanReader(plan).metadata,
        rank=0,
        device=torch.device("cpu"),
        store=HashStore(),
    )
    if clock is not None:
        made._clock = clock
    return made


def run_step(recorder: Recorder, step: int) -> None:
    record = recorder.begin(step, 1.0)
    record.microbatches = [(0, recorder._clock.mark(), recorder._clock.mark())]
    record.note_loss([torch.tensor(6.0)], 4)
    record.is_whole = True
    recorder.note_update(1e-3)


def test_a_step_is_written_when_the_device_has_passed_it_and_nobody_waits_for_that(plan: Path) -> None:
    clock = LateClock()
    recorder = alone(plan, clock)
    recorder.open(0)
    run_step(recorder, 0)
    recorder.end()
    run_step(recorder, 1)
    assert len(read_metrics(recorder.path)) == 1
    clock.passed = 5.0
    recorder._looked = 0.0
    recorder.enter()
    step = read_metrics(recorder.path)[1]
    assert (step["step"], step["loss"], step["learning_rate"], step["grad_norm"]) == (0, 1.5, 1e-3, None)
    assert step["seconds"] == 3.0  # begin, two marks, and the optimizer's
    assert step["ranks"][0]["micro_batches"][0]["seconds"] == 1.0
    clock.may_wait = True
    recorder.close()
    assert [one["step"] for one in read_metrics(recorder.path)[1:]] == [0, 1]
    assert [one.step for one in open_run(recorder.path).steps()] == [0, 1]


def test_a_step_that_was_left_in_its_midst_is_not_written(plan: Path) -> None:
    recorder = alone(plan)
    recorder.open(0)
    run_step(recorder, 0)
    recorder.begin(1, 1.0)
    recorder.close()
    assert [one["step"] for one in read_metrics(recorder.path)[1:]] == [0]


def test_a_resumed_loop_drops_what_it_will_make_again(plan: Path) -> None:
    for first_step in (0, 1):
        recorder = alone(plan)
        recorder.open(first_step)
        for step in range(first_step, 3):
            run_step(recorder, step)
        recorder.close()
    records = read_metrics(recorder.path)
    assert [(one["kind"], one.get("step", one.get("first_step"))) for one in records] == [
        ("run", 0),
        ("step", 0),
        ("run", 1),
        ("step", 1),
        ("step", 2),
    ]


def test_a_checkpoint_of_another_run_is_said_to_leave_its_steps_out_of_the_metrics(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = alone(plan)
    recorder.open(2)
    recorder.close()
    said = f"fcp: training continues at step 3; steps 1 to 2 are not in {recorder.path}: of another run, or lost\n"
    assert capsys.readouterr().err == said


def test_a_full_disk_ends_the_metrics_and_not_the_training(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = alone(plan)
    recorder.open(0)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricsWriter, "write", fail)
    for step in range(3):
        run_step(recorder, step)
    recorder.close()
    assert capsys.readouterr().err == f"fcp: the metrics {recorder.path} end here: [Errno 28] No space left on device\n"


def test_a_rank_that_says_nothing_costs_the_steps_it_kept_for_itself_and_is_named(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "_LAST_SECONDS", 0.05)
    recorder = alone(plan)
    recorder.open(0)
    box = MetricsMailbox(recorder._store, 2, loop=1)
    recorder._mailbox = box
    run_step(recorder, 0)
    recorder.end()
    recorder.flush()
    said = capsys.readouterr().err
    assert said == f"fcp: the metrics {recorder.path} lack step 0: no word of it from rank 1 in 0.05 s\n"
    box.leave(1, replace(measured(1), timings=[]))
    run_step(recorder, 1)
    recorder.close()
    assert [one["step"] for one in read_metrics(recorder.path) if one["kind"] == "step"] == [1]


def test_the_run_names_the_plan_and_its_model(plan: Path) -> None:
    recorder = alone(plan)
    seen: list[dict[str, Any]] = []
    recorder.listeners.append(seen.append)
    recorder.open(0, parameters=7)
    recorder.close()
    run = json.loads(recorder.path.read_text())
    assert seen == [run]
    assert (run["plan_hash"], run["steps"], run["parameters"]) == (PlanReader(plan).metadata.plan_hash, 4, 7)
