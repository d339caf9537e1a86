from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fcp_cli.errors import ProfileError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.metadata import OverlongReport, Sync
from tests.messages import raises
from tests.plan.plans import Columns, rewritten, small_plan
from tests.planning.examples import PROFILE, long_tail, table_of


def findings(plan: Path, manifest: LengthTable | None = None) -> list[str]:
    return [str(finding) for finding in check_plan(plan, manifest=manifest)]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return small_plan(tmp_path / "plan.parquet")


@pytest.fixture
def waves(tmp_path: Path) -> Path:
    return small_plan(tmp_path / "waves.parquet", "microbatch")


def set_value(column: str, row: int, value: Any) -> Callable[[Columns], None]:
    def edit(columns: Columns) -> None:
        columns[column][row] = value

    return edit


def widest(columns: Columns) -> int:
    """The row of step 0 with the most ranks."""
    rows = [row for row, step in enumerate(columns["step"]) if step == 0]
    return max(rows, key=lambda row: len(columns["ranks"][row]))


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_a_plan_just_made_is_sound(tmp_path: Path, sync: Sync) -> None:
    plan = small_plan(tmp_path / "plan.parquet", sync)
    assert findings(plan, long_tail(60)) == []
    assert findings(rewritten(plan, row_group_size=3), long_tail(60)) == []


@settings(max_examples=25)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 5000), st.integers(1, 200_000)), min_size=4, max_size=40),
    sync=st.sampled_from(["iteration", "microbatch"]),
    overlong=st.sampled_from(["drop", "truncate"]),
    last_batch=st.sampled_from(["keep", "drop"]),
    step_limit=st.sampled_from([None, 2]),
    shuffle=st.booleans(),
    full_mask=st.booleans(),
)
def test_whatever_is_planned_is_sound(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    sync: Sync,
    overlong: str,
    last_batch: str,
    step_limit: int | None,
    shuffle: bool,
    full_mask: bool,
) -> None:
    lengths = [1, 2, 3, 4, *lengths]
    eta = np.linspace(0, 1, len(lengths)) if full_mask else None
    table = LengthTable(name="lengths.parquet", length_tokens=np.array(lengths, dtype=np.int64), eta=eta)
    plan = small_plan(
        tmp_path_factory.mktemp("plans") / "plan.parquet",
        sync,
        table=table,
        global_batch_size=4,
        overlong=overlong,
        last_batch=last_batch,
        step_limit=step_limit,
        shuffle=shuffle,
    )
    assert findings(plan) == []
    assert findings(plan, table) == []


def test_an_edited_row_breaks_the_hash(plan: Path) -> None:
    edited = rewritten(plan, edit=set_value("start_seconds", 0, 1e-9), rehash=False)
    assert "does not have the hash" in findings(edited)[0]


def test_edited_metadata_breaks_the_hash(plan: Path) -> None:
    assert "does not have the hash" in findings(rewritten(plan, seed=7, rehash=False))[0]


def test_another_manifest_is_recognised(plan: Path) -> None:
    assert findings(plan, table_of([1] * 63)) == snapshot(
        ["lengths.parquet is not the manifest lengths.parquet that it was made from"]
    )


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("order", 1, 2, "rows out of order: step 0 order 2 after step 0 order 0"),
        ("step", 0, 1, "rows out of order: step 1 order 0"),
        ("wave", 1, 0, "step 0: order 1: wave 0 under sync iteration, not -1"),
        ("ranks", 1, [3, 2], "step 0: order 1: its ranks do not ascend: 2 follows 3"),
        ("start_seconds", 0, 0.5, "step 0: order 0: starts at 0.5 s, but its ranks are free at 0 s"),
        ("step_seconds", 1, 99.0, "step 0: order 1: step_seconds is not that of its step"),
        ("step_bound_seconds", 1, 0.1, "step 0: order 1: step_bound_seconds is not that of its step"),
    ],
)
def test_a_wrong_value_is_found_where_it_is(plan: Path, column: str, row: int, value: Any, message: str) -> None:
    assert any(message in finding for finding in findings(rewritten(plan, edit=set_value(column, row, value))))


def test_a_heads_degree_that_does_not_divide_is_found(plan: Path) -> None:
    def edit(columns: Columns) -> None:
        columns["heads_degree"] = [1] * len(columns["step"])
        columns["heads_degree"][1] = 3 if len(columns["ranks"][1]) % 3 else 5

    (found,) = findings(rewritten(plan, edit=edit, attention="2d"))
    assert "does not divide the degree" in found


def test_a_pack_over_budget_is_found(plan: Path) -> None:
    def edit(columns: Columns) -> None:
        row = widest(columns)
        columns["ranks"][row] = columns["ranks"][row][:1]

    assert any("where 8,192 fit" in finding for finding in findings(rewritten(plan, edit=edit)))


def test_a_rank_without_a_row_is_found(plan: Path) -> None:
    def edit(columns: Columns) -> None:
        for row, step in enumerate(columns["step"]):
            if step == 0:
                columns["ranks"][row] = [rank for rank in columns["ranks"][row] if rank != 15] or [0]

    assert any("step 0: rank 15 has no row (1 ranks have none)" in f for f in findings(rewritten(plan, edit=edit)))


def test_an_idle_row_for_a_rank_with_work_is_found(plan: Path) -> None:
    def edit(columns: Columns) -> None:
        last = columns["step"].count(0)
        row = {name: values[last - 1] for name, values in columns.items()}
        row |= {"order": last, "ranks": [0], "sequences": [], "lengths": [], "start_seconds": 0.0, "seconds": 0.0}
        for name, value in row.items():
            columns[name].insert(last, value)

    assert any("an idle row for rank 0, which has other rows" in f for f in findings(rewritten(plan, edit=edit)))


def test_a_wave_that_uses_a_rank_twice_is_found(waves: Path) -> None:
    def edit(columns: Columns) -> None:
        columns["ranks"][0] = sorted({*columns["ranks"][0], columns["ranks"][1][0]})

    assert any("wave 0 uses rank" in finding for finding in findings(rewritten(waves, edit=edit)))


def test_waves_that_skip_a_number_are_found(waves: Path) -> None:
    def edit(columns: Columns) -> None:
        columns["wave"] = [wave + 1 for wave in columns["wave"]]

    assert "step 0: waves do not count up from 0" in findings(rewritten(waves, edit=edit))


def test_a_sequence_that_appears_twice_is_found(plan: Path) -> None:
    def edit(columns: Columns) -> None:
        columns["sequences"][1][0] = columns["sequences"][0][0]

    assert any("appears again in its epoch" in finding for finding in findings(rewritten(plan, edit=edit)))


def test_a_sequence_outside_the_manifest_is_found(plan: Path) -> None:
    def edit(columns: Columns) -> None:
        columns["sequences"][0][0] = 63

    edited = rewritten(plan, edit=edit)
    for manifest in (None, long_tail(60)):
        assert "step 0: sequence 63 of a manifest of 63 rows" in findings(edited, manifest)


def test_a_missing_sequence_is_found(plan: Path) -> None:
    def edit(columns: Columns) -> None:
        row = next(row for row, lengths in enumerate(columns["lengths"]) if len(lengths) > 1)
        columns["sequences"][row].pop()
        columns["lengths"][row].pop()

    assert any("19 sequences instead of 20" in finding for finding in findings(rewritten(plan, edit=edit)))


def test_a_missing_epoch_is_found(plan: Path) -> None:
    assert "it has 8 steps, where its settings make 12" in findings(rewritten(plan, epochs=3))


def test_a_length_that_is_not_the_manifests_is_found(plan: Path) -> None:
    def edit(columns: Columns) -> None:
        columns["lengths"][0][0] -= 1

    found = findings(rewritten(plan, edit=edit), long_tail(60))
    assert any("tokens, not the manifest's" in finding for finding in found)


def test_seconds_must_follow_from_the_cost_profile(plan: Path) -> None:
    def edit(columns: Columns) -> None:
        columns["seconds"][0] *= 0.9

    assert any("but its cost profile gives" in finding for finding in findings(rewritten(plan, edit=edit)))


def test_more_seconds_than_lengths_account_for_are_found_with_the_manifest_alone(plan: Path) -> None:
    def edit(columns: Columns) -> None:
        columns["seconds"][0] *= 1.1

    def about_price(found: list[str]) -> bool:
        return any("but its cost profile gives" in finding for finding in found)

    edited = rewritten(plan, edit=edit)
    assert not about_price(findings(edited))
    assert about_price(findings(edited, long_tail(60)))


def test_a_bound_above_the_makespan_is_found(plan: Path) -> None:
    def edit(columns: Columns) -> None:
        columns["step_bound_seconds"] = [2 * seconds for seconds in columns["step_seconds"]]

    assert any("lower bound" in finding for finding in findings(rewritten(plan, edit=edit)))


def test_totals_that_do_not_agree_are_found(plan: Path) -> None:
    found = findings(rewritten(plan, steps=9, distinct_groups=1000))
    assert "it has 8 steps, its metadata states 9" in found
    assert any("distinct groups of degree > 1, its metadata states 1000" in finding for finding in found)


def test_sequences_left_out_without_being_overlong_are_found(tmp_path: Path) -> None:
    plan = small_plan(tmp_path / "plan.parquet", overlong="drop", max_length=50_000)
    assert findings(plan, long_tail(60)) == []
    report = OverlongReport(policy="drop", max_length=90_000, sequences=2)
    found = findings(rewritten(plan, overlong=report), long_tail(60))
    assert found == snapshot(["its metadata counts 2 overlong sequences, its manifest has 1"])


def test_a_length_over_the_limit_is_found(tmp_path: Path) -> None:
    plan = small_plan(tmp_path / "plan.parquet", overlong="truncate", max_length=50_000)
    report = OverlongReport(policy="truncate", max_length=40_000, sequences=2)
    assert any("50000 tokens, over 40000" in finding for finding in findings(rewritten(plan, overlong=report)))


METADATA: dict[str, tuple[str, Any]] = {
    "no ranks": ("num_ranks", 0),
    "a batch size as text": ("global_batch_size", "512"),
    "a truth value of epochs": ("epochs", True),
    "an unknown sync": ("sync", "never"),
    "a multiple of nothing": ("padding_multiple", 0),
    "a limit of no steps": ("step_limit", 0),
    "no cost profile": ("cost_profile", None),
    "fewer sequences than none": ("overlong", OverlongReport(sequences=-1)),
}
METADATA_MESSAGES = snapshot(
    {
        "no ranks": "PlanError: FOLDER/edited-plan.parquet: the plan's metadata cannot be used: num_ranks is 0; it must be a whole number of at least 1; use the fcp that made the plan, or make it again with 'fcp plan'",
        "a batch size as text": "PlanError: FOLDER/edited-plan.parquet: the plan's metadata cannot be used: global_batch_size is '512'; it must be a whole number of at least 1; use the fcp that made the plan, or make it again with 'fcp plan'",
        "a truth value of epochs": "PlanError: FOLDER/edited-plan.parquet: the plan's metadata cannot be used: epochs is True; it must be a whole number of at least 1; use the fcp that made the plan, or make it again with 'fcp plan'",
        "an unknown sync": "PlanError: FOLDER/edited-plan.parquet: the plan's metadata cannot be used: sync is 'never'; it must be one of iteration, microbatch; use the fcp that made the plan, or make it again with 'fcp plan'",
        "a multiple of nothing": "PlanError: FOLDER/edited-plan.parquet: the plan's metadata cannot be used: padding_multiple is 0; it must be a whole number of at least 1 or absent; use the fcp that made the plan, or make it again with 'fcp plan'",
        "a limit of no steps": "PlanError: FOLDER/edited-plan.parquet: the plan's metadata cannot be used: step_limit is 0; it must be a whole number of at least 1 or absent; use the fcp that made the plan, or make it again with 'fcp plan'",
        "no cost profile": "PlanError: FOLDER/edited-plan.parquet: the plan's metadata cannot be used: cost_profile is None; it must be a text; use the fcp that made the plan, or make it again with 'fcp plan'",
        "fewer sequences than none": "PlanError: FOLDER/edited-plan.parquet: the plan's metadata cannot be used: overlong.sequences is -1; it must be a whole number of at least 0; use the fcp that made the plan, or make it again with 'fcp plan'",
    }
)


@pytest.mark.lengthy
@pytest.mark.parametrize("case", METADATA)
def test_metadata_that_nothing_could_work_with_is_refused(plan: Path, case: str) -> None:
    key, value = METADATA[case]
    edited = rewritten(plan, **{key: value})
    with raises(METADATA_MESSAGES[case]):
        findings(edited)


def test_a_damaged_cost_profile_is_refused(plan: Path) -> None:
    with pytest.raises(ProfileError, match="the plan's cost profile is not a cost profile"):
        findings(rewritten(plan, cost_profile="x: 1"))


def test_a_pipeline_needs_waves_and_the_times_of_its_own_devices(plan: Path, waves: Path) -> None:
    assert findings(rewritten(waves, tensor_parallel=2, pipeline_parallel=2)) == []
    assert findings(rewritten(plan, pipeline_parallel=2)) == snapshot(
        ["pipeline_parallel is 2, which without the key pipeline needs sync microbatch, but sync is iteration"]
    )
    profile = PROFILE + "\nmeasurement: {tensor_parallel: 4, pipeline_parallel: 1}\n"
    assert findings(rewritten(plan, tensor_parallel=2, cost_profile=profile)) == snapshot(
        ["tensor_parallel is 2, but its times are from a cost profile for 4"]
    )
