"""A stream is planned as `fcp plan` plans its manifest, and what was planned is a plan like any other."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli import Planner
from fcp_cli.manifest.read import read_manifest
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import PlanReader, read_message, steps_of, table_bytes, write_message
from fcp_cli.plan.metadata import OnlineSettings, PlanMetadata, Sync, cut_by_count, cut_by_tokens, manifest_of
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.journal import StreamJournal, length_columns
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.online import serve
from fcp_cli.planning.problem import problem_of
from fcp_cli.planning.settings import PlanInputs
from tests.cli.planning_folder import fcp
from tests.messages import raises
from tests.planning.examples import PROFILE, table_of


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stream") / "profile.yaml"
    path.write_text(PROFILE, encoding="utf-8")
    return path


def settings_for(profile: Path, sync: Sync = "iteration", **options: Any) -> OnlineSettings:
    planner = Planner(profile, ranks=8, ranks_per_node=4, tokens_per_rank=16384, sync=sync)
    return planner.online(**options)


def batches_of(lengths: Sequence[int], online: OnlineSettings) -> list[list[int]]:
    batching = online.metadata.batching
    if batching is not None and batching.tokens is not None:
        return list(cut_by_tokens(lengths, batching.tokens, int))
    return list(cut_by_count(lengths, online.metadata.global_batch_size))


def planned(
    plan: Path,
    online: OnlineSettings,
    batches: Sequence[Sequence[int]],
    *,
    first_step: int = 0,
    first_sequence: int = 0,
    end_step: int | None = None,
) -> Iterator[Any]:
    """Say to the planning process what a job says, and yield its answers."""
    said = io.BytesIO()
    facts = {"kind": "open", "settings": online.to_json(), "plan": str(plan), "first_step": first_step}
    write_message(said, facts)
    for place, batch in enumerate(batches):
        facts = {"kind": "batch", "step": first_step + place, "first_sequence": first_sequence}
        table = table_of(list(batch))
        write_message(said, facts, table_bytes(length_columns(table)))
        first_sequence += len(table)
    if end_step is not None:
        write_message(said, {"kind": "close", "end_step": end_step})
    answers = io.BytesIO()
    serve(io.BytesIO(said.getvalue()), answers)
    answers.seek(0)
    while (answer := read_message(answers)) is not None:
        yield answer


def steps_in(answers: Iterator[Any]) -> list[StepPlan]:
    found = []
    for answer in answers:
        assert answer.kind != "error", answer.facts["message"]
        found += steps_of(answer.table) if answer.kind == "steps" else []
    return found


def offline(plan: Path, metadata: PlanMetadata, **rule: Any) -> str:
    """Plan the manifest that a run left, as `fcp plan --no-shuffle` does, and return the plan hash."""
    manifest = read_manifest(manifest_of(plan))
    inputs = PlanInputs(
        table=manifest,
        problem=problem_of(metadata, name="test"),
        settings=BatchSettings(shuffle=False, **{"global_batch_size": 1, **rule}),
    )
    return make_plan(plan.with_name("offline.parquet"), inputs).metadata.plan_hash


@pytest.mark.lengthy
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=40),
    sync=st.sampled_from(["iteration", "microbatch"]),
    rule=st.sampled_from([{"global_batch_size": 7}, {"global_batch_tokens": 90_000}]),
)
def test_a_stream_becomes_the_plan_that_fcp_plan_makes_of_its_manifest(
    tmp_path_factory: pytest.TempPathFactory, profile: Path, lengths: list[int], sync: Sync, rule: dict[str, int]
) -> None:
    plan = tmp_path_factory.mktemp("online") / "plan.parquet"
    online = settings_for(profile, sync, **rule)
    batches = batches_of(lengths, online)
    *_, closed = planned(plan, online, batches, end_step=len(batches))
    metadata = PlanReader(plan).metadata
    by = {"batching": online.metadata.batching} if "global_batch_tokens" in rule else rule
    assert closed.facts["plan_hash"] == metadata.plan_hash == offline(plan, metadata, **by)
    assert list(check_plan(plan, manifest=read_manifest(manifest_of(plan)))) == []
    assert not StreamJournal(plan).exists


LENGTHS = np.random.default_rng(3).lognormal(8.0, 1.4, 64).astype(int).clip(16, 60_000).tolist()


def test_a_run_that_goes_on_from_a_step_of_its_own_ends_with_the_plan_of_one_that_did_not_stop(
    tmp_path: Path, profile: Path
) -> None:
    online = settings_for(profile, global_batch_size=8)
    batches = batches_of(LENGTHS, online)
    (tmp_path / "whole").mkdir()
    *_, whole = planned(tmp_path / "whole" / "plan.parquet", online, batches, end_step=8)
    plan = tmp_path / "plan.parquet"
    assert len(steps_in(planned(plan, online, batches[:6]))) == 6  # and then it is killed
    opened, *_rest, closed = planned(plan, online, batches[4:], first_step=4, first_sequence=32, end_step=4)
    assert opened.facts["first_sequence"] == 32 and closed.facts["plan_hash"] != whole.facts["plan_hash"]
    *_, closed = planned(plan, online, batches[4:], first_step=4, first_sequence=32, end_step=8)
    assert closed.facts["plan_hash"] == whole.facts["plan_hash"]
    assert list(check_plan(plan, manifest=read_manifest(manifest_of(plan)))) == []


def test_what_a_killed_run_left_can_be_finished_though_its_last_window_is_torn(tmp_path: Path, profile: Path) -> None:
    online = settings_for(profile, global_batch_size=8)
    plan = tmp_path / "plan.parquet"
    list(planned(plan, online, batches_of(LENGTHS, online)))
    (windows,) = StreamJournal(plan).folder.glob("*.windows")
    windows.write_bytes(windows.read_bytes()[:-700])
    finished = fcp("plan", "--resume", "-o", str(plan), cwd=tmp_path)
    assert finished.returncode == 0 and "of 7 steps, and" in finished.stderr
    assert PlanReader(plan).metadata.manifest.rows == 56
    assert list(check_plan(plan, manifest=read_manifest(manifest_of(plan)))) == []


@pytest.mark.parametrize(
    ("batches", "line"),
    [
        (
            [[5], [300_000]],
            "sequence 1 of the stream has 300000 tokens; 8 ranks of 16384 tokens hold at most 131072; drop it from "
            "the stream, truncate it, or plan with more tokens_per_rank or ranks",
        ),
        ([[5], []], "batch 1 of the stream is empty; a step needs a sequence"),
        (
            [[5], [0]],
            "the stream: row 0 of column 'length' is 0; lengths must be > 0 tokens (all rows); drop such rows "
            "or name another column with --length-column",
        ),
    ],
)
def test_a_batch_that_cannot_be_planned_is_one_line(
    tmp_path: Path, profile: Path, batches: list[list[int]], line: str
) -> None:
    *_, answer = planned(tmp_path / "plan.parquet", settings_for(profile), batches)
    assert (answer.kind, answer.facts["message"]) == ("error", line)


def test_a_run_cannot_go_on_with_steps_that_were_never_planned_or_for_something_else(
    tmp_path: Path, profile: Path
) -> None:
    online = settings_for(profile, global_batch_size=8)
    plan = tmp_path / "plan.parquet"
    list(planned(plan, online, batches_of(LENGTHS, online)[:2]))
    (answer,) = planned(plan, online, [], first_step=5)
    assert answer.facts["message"] == (
        f"{plan} has 2 of the 5 steps before the one that this run resumes with; resume in the folder of the run's own plan"
    )
    (answer,) = planned(plan, settings_for(profile, global_batch_size=4), [], first_step=1)
    assert answer.facts["message"] == (
        f"{plan} was begun for other ranks, another cost profile or other batches than this run's planner has; resume "
        "with the same ones, or name another plan file"
    )


def test_settings_that_contradict_each_other_are_one_line(profile: Path) -> None:
    with raises("UsageError: global_batch_size and global_batch_tokens both say what a step trains; give one of them"):
        settings_for(profile, global_batch_size=1, global_batch_tokens=1)
