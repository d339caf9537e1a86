"""The plan file: what is written is read back, whoever wrote it, and nothing else passes for a plan."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fcp_cli.errors import FcpError, PlanError
from fcp_cli.plan.file import SCHEMA, PlanReader, plan_writer, steps_bytes, steps_of, steps_to_arrow
from fcp_cli.plan.metadata import ManifestReference, PlanMetadata, PlannedMasks, planned_masks
from fcp_cli.plan.step import StepPlan
from fcp_cli.util.masks import MaskRows, full
from tests.messages import raises
from tests.plan.plans import rewritten, small_plan
from tests.planning.examples import PROFILE

METADATA = PlanMetadata(
    fcp_version="0",
    num_ranks=8,
    ranks_per_node=4,
    sync="iteration",
    global_batch_size=4,
    tokens_per_rank=100,
    seed=0,
    shuffle=False,
    solver="static",
    solver_options={"degree": 2},
    manifest=ManifestReference(name="lengths.parquet", rows=10, content_hash="0" * 64),
    cost_profile=PROFILE,
)
ARRAYS = ("wave", "rank_offsets", "ranks", "sequence_offsets", "sequences", "lengths", "start_seconds", "seconds")


@st.composite
def steps(draw: st.DrawFn) -> list[StepPlan]:
    """Any steps that a reader takes: it proves no budget, no coverage and no times."""
    return [_step(draw, number) for number in range(draw(st.integers(1, 5)))]


def _step(draw: st.DrawFn, number: int) -> StepPlan:
    rows = draw(st.integers(1, 6))
    degrees = [draw(st.integers(1, 4)) for _ in range(rows)]
    sizes = [draw(st.integers(0, 3)) for _ in range(rows)]
    seconds = st.floats(0, 1e6)

    def integers(count: int, least: int, most: int, kind: Any) -> Any:
        return np.array([draw(st.integers(least, most)) for _ in range(count)], dtype=kind)

    groups = [sorted(draw(st.sets(st.integers(0, 7), min_size=degree, max_size=degree))) for degree in degrees]
    return StepPlan(
        step=number,
        wave=integers(rows, -1, rows - 1, np.int32),
        rank_offsets=np.concatenate(([0], np.cumsum(degrees))),
        ranks=np.array([rank for group in groups for rank in group], dtype=np.int32),
        sequence_offsets=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        sequences=integers(sum(sizes), 0, 9, np.int64),
        lengths=integers(sum(sizes), 1, 2**31 - 1, np.int32),
        start_seconds=np.array([draw(seconds) for _ in range(rows)]),
        seconds=np.array([draw(seconds) for _ in range(rows)]),
        makespan_seconds=draw(seconds),
        bound_seconds=draw(seconds),
    )


def written(path: Path, content: list[StepPlan], metadata: PlanMetadata = METADATA) -> Path:
    with plan_writer(path, metadata) as writer:
        for step in content:
            writer.append(step)
    return path


def with_split_heads(step: StepPlan) -> StepPlan:
    """Return the same step with groups that split heads alone."""
    return replace(step, heads_degree=step.degrees.astype(np.int32))


def assert_same(found: list[StepPlan], wanted: list[StepPlan]) -> None:
    assert [step.step for step in found] == [step.step for step in wanted]
    for one, other in zip(found, wanted, strict=True):
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
        assert (one.makespan_seconds, one.bound_seconds) == (other.makespan_seconds, other.bound_seconds)
        assert (one.heads_degree is None) == (other.heads_degree is None)
        if one.heads_degree is not None:
            np.testing.assert_array_equal(one.heads_degree, other.heads_degree)


def test_the_hash_of_a_plan_is_of_its_content_whatever_the_bytes_of_the_file(tmp_path: Path) -> None:
    step = StepPlan(
        step=0,
        wave=np.array([-1, -1], np.int32),
        rank_offsets=np.array([0, 2, 3]),
        ranks=np.array([0, 1, 5], np.int32),
        sequence_offsets=np.array([0, 1, 3]),
        sequences=np.array([3, 7, 9]),
        lengths=np.array([150, 20, 1], np.int32),
        start_seconds=np.zeros(2),
        seconds=np.array([0.5, 0.25]),
        makespan_seconds=0.5,
        bound_seconds=0.4,
    )
    reader = PlanReader(written(tmp_path / "plan.parquet", [step, replace(step, step=1)]))
    # Found before the file had checksums.
    assert reader.metadata.plan_hash == snapshot("10c00864bf801b3cb191e3eab57e24d6039514d0cbc47738be9248c5711e4f4c")


@settings(max_examples=40)
@given(content=steps(), first=st.integers(0, 5))
def test_what_is_written_is_read_back_from_any_step_on(
    tmp_path_factory: pytest.TempPathFactory, content: list[StepPlan], first: int
) -> None:
    reader = PlanReader(written(tmp_path_factory.mktemp("plan") / "plan.parquet", content))
    assert_same(list(reader.steps()), content)
    assert_same(list(reader.steps(first)), content[first:])
    assert reader.metadata.steps == len(content)
    assert reader.content_hash() == reader.metadata.plan_hash
    unfinished = {"steps": 0, "distinct_groups": 0, "plan_hash": "", "created": ""}
    assert replace(reader.metadata, **unfinished) == METADATA  # type: ignore[arg-type]


def test_plans_that_split_heads_have_a_column_for_it(tmp_path: Path) -> None:
    content = [replace(with_split_heads(_any_step()), step=number) for number in range(2)]
    reader = PlanReader(written(tmp_path / "plan.parquet", content, replace(METADATA, attention="2d")))
    assert_same(list(reader.steps()), content)
    assert reader.content_hash() == reader.metadata.plan_hash
    for column, count in ((content, 1), ([replace(step, heads_degree=None) for step in content], 0)):
        assert_same(steps_of(steps_bytes(column)), column)
        assert steps_to_arrow(column).schema.names.count("heads_degree") == count


def test_heads_degrees_count_in_the_hash(tmp_path: Path) -> None:
    def edit(columns: dict[str, list[Any]]) -> None:
        columns["heads_degree"] = [7]

    plan = written(tmp_path / "plan.parquet", [with_split_heads(_any_step())], replace(METADATA, attention="2d"))
    edited = PlanReader(rewritten(plan, edit=edit, rehash=False))
    assert edited.content_hash() != edited.metadata.plan_hash


@settings(max_examples=25)
@given(content=steps(), row_group_size=st.integers(1, 8), first=st.integers(0, 4))
def test_row_groups_and_writer_do_not_matter(
    tmp_path_factory: pytest.TempPathFactory, content: list[StepPlan], row_group_size: int, first: int
) -> None:
    plan = written(tmp_path_factory.mktemp("plan") / "plan.parquet", content)
    foreign = PlanReader(rewritten(plan, row_group_size=row_group_size))
    assert foreign.content_hash() == PlanReader(plan).metadata.plan_hash
    assert_same(list(foreign.steps(first)), content[first:])


@settings(max_examples=25)
@given(content=steps(), data=st.data())
def test_any_other_content_has_another_hash(
    tmp_path_factory: pytest.TempPathFactory, content: list[StepPlan], data: st.DataObject
) -> None:
    plan = written(tmp_path_factory.mktemp("plan") / "plan.parquet", content)
    column = data.draw(st.sampled_from(["order", "wave", "seconds", "step_bound_seconds"]))

    def edit(columns: dict[str, list[Any]]) -> None:
        row = data.draw(st.integers(0, len(columns[column]) - 1))
        columns[column][row] += 1 if column != "seconds" else 1.0 + columns[column][row]

    edited = PlanReader(rewritten(plan, edit=edit, rehash=False))
    assert edited.content_hash() != edited.metadata.plan_hash


def test_a_value_that_moves_to_the_next_list_changes_the_hash(tmp_path: Path) -> None:
    plan = small_plan(tmp_path / "plan.parquet")

    def edit(columns: dict[str, list[Any]]) -> None:
        columns["ranks"][1].insert(0, columns["ranks"][0].pop())

    edited = PlanReader(rewritten(plan, edit=edit, rehash=False))
    assert edited.content_hash() != edited.metadata.plan_hash


def test_metadata_counts_in_the_hash_but_the_date_does_not(tmp_path: Path) -> None:
    plan = small_plan(tmp_path / "plan.parquet")
    dated = PlanReader(rewritten(plan, rehash=False, created="1970-01-01"))
    reseeded = PlanReader(rewritten(plan, rehash=False, seed=1))
    assert dated.content_hash() == dated.metadata.plan_hash
    assert reseeded.content_hash() != reseeded.metadata.plan_hash


def test_the_columns_are_those_of_the_contract(tmp_path: Path) -> None:
    schema = pq.read_schema(small_plan(tmp_path / "plan.parquet"))
    assert schema.names == SCHEMA.names
    assert [str(schema.field(name).type.value_type) for name in ("ranks", "sequences", "lengths")] == [
        "int32",
        "int64",
        "int32",
    ]
    assert b"fcp" in schema.metadata


@pytest.mark.parametrize("content", [b"", b"PAR1", b"\0\1\2", b"PAR1" * 1000])
def test_a_file_that_is_not_parquet_is_no_plan(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.parquet"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="truncated, damaged or not a plan; make one with 'fcp plan"):
        PlanReader(path)


@pytest.mark.parametrize("kept", [0.05, 0.5, 0.99])
def test_a_truncated_plan_is_recognised(tmp_path: Path, kept: float) -> None:
    plan = small_plan(tmp_path / "plan.parquet")
    content = plan.read_bytes()
    plan.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(PlanError, match="cannot be read as Parquet") as error:
        PlanReader(plan)
    assert "\n" not in str(error.value)


def test_damage_inside_a_plan_is_recognised(tmp_path: Path) -> None:
    plan = small_plan(tmp_path / "plan.parquet")
    content = bytearray(plan.read_bytes())
    content[4:400] = bytes(396)
    plan.write_bytes(content)
    with pytest.raises(PlanError, match="is damaged") as error:
        list(PlanReader(plan).steps())
    assert "\n" not in str(error.value)


def with_metadata(plan: Path, old: bytes, new: bytes) -> Path:
    """Replace a part of a plan's metadata."""
    table = pq.read_table(plan)
    raw = table.schema.metadata[b"fcp"]
    assert old in raw
    pq.write_table(table.replace_schema_metadata({b"fcp": raw.replace(old, new)}), plan)
    return plan


def with_column(plan: Path, name: str, change: Callable[[pa.ChunkedArray], Any]) -> None:
    table = pq.read_table(plan)
    at = table.schema.get_field_index(name)
    pq.write_table(table.set_column(at, name, change(table[name])).replace_schema_metadata(table.schema.metadata), plan)


def null_in_a_list(ranks: pa.ChunkedArray) -> pa.Array:
    return pa.array([*ranks.to_pylist()[:2], [None], *ranks.to_pylist()[3:]], type=pa.list_(pa.int32()))


def folder_in_its_place(plan: Path) -> None:
    plan.unlink()
    plan.mkdir()


# What is done to a plan's file -> the whole message.
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (
        Path.unlink,
        snapshot(
            "PlanError: there is no plan FOLDER/plan.parquet; make one with 'fcp plan MANIFEST -o FOLDER/plan.parquet'"
        ),
    ),
    "a folder": (
        folder_in_its_place,
        snapshot("PlanError: FOLDER/plan.parquet is a folder, not a plan; name the plan file in it"),
    ),
    "a foreign file": (
        lambda plan: pq.write_table(pa.table({"length": [1, 2]}), plan),
        snapshot(
            "PlanError: FOLDER/plan.parquet is a Parquet file but not a plan; make one with 'fcp plan FOLDER/plan.parquet -o plan.parquet'"
        ),
    ),
    "another format": (
        lambda plan: with_metadata(plan, b"fcp-plan/1", b"fcp-plan/3"),
        snapshot(
            "PlanError: FOLDER/plan.parquet has format 'fcp-plan/3'; this fcp reads fcp-plan/1; make it again with 'fcp plan'"
        ),
    ),
    "an unknown key": (
        lambda plan: with_metadata(plan, b'"seed"', b'"spare_ranks": 1, "seed"'),
        snapshot(
            "PlanError: FOLDER/plan.parquet: the plan's metadata cannot be used: unknown key spare_ranks; did you mean num_ranks? use the fcp that made the plan, or make it again with 'fcp plan'"
        ),
    ),
    "a column of another type": (
        lambda plan: with_column(plan, "order", lambda it: it.cast(pa.int64())),
        snapshot("PlanError: FOLDER/plan.parquet: the column order is int64, not int32"),
    ),
    "nulls": (
        lambda plan: with_column(plan, "ranks", null_in_a_list),
        snapshot("PlanError: FOLDER/plan.parquet is damaged: the column ranks has nulls"),
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_plan_is_refused_with_its_reason(
    tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    plan = small_plan(tmp_path / "plan.parquet")
    change(plan)
    with raises(message):
        list(PlanReader(plan).steps())


def test_a_full_disk_leaves_the_old_plan_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan(tmp_path / "plan.parquet")
    before = plan.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(FcpError, match=r"cannot write .*/plan.parquet: No space left on device \("):
        small_plan(plan, seed=1)
    assert plan.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["plan.parquet"]


def test_an_exception_while_planning_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step 1 appended where step 0 is due"):
        written(tmp_path / "plan.parquet", [replace(_any_step(), step=1)])
    assert list(tmp_path.iterdir()) == []


def _any_step() -> StepPlan:
    one = np.array([0], dtype=np.int32)
    return StepPlan(
        step=0,
        wave=one,
        rank_offsets=np.array([0, 1]),
        ranks=one,
        sequence_offsets=np.array([0, 1]),
        sequences=np.array([0]),
        lengths=one + 1,
        start_seconds=np.zeros(1),
        seconds=np.ones(1),
        makespan_seconds=1.0,
        bound_seconds=1.0,
    )


def masked(numbers: list[list[int]]) -> MaskRows:
    return MaskRows("segments", np.cumsum([0, *map(len, numbers)]), np.array([one for row in numbers for one in row]))


def test_masks_come_back_as_they_were_packed() -> None:
    numbers = [[3, 9, 12, 40], [], [0, 5]]
    packed = planned_masks(masked(numbers))
    assert packed is not None
    found = packed.of_rows(3)
    assert [list(found.mask(row).numbers) for row in range(3)] == numbers
    assert PlannedMasks(kind="full").of_rows(1 << 60).mask(7) == full()
    assert planned_masks(None) is None


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({}, 4, "36 bytes for 4 rows with 6 numbers"),
        ({"count": 5}, 3, "bytes for 3 rows with 5 numbers"),
        ({"packed": "?"}, 3, "base64"),
        ({"count": 1 << 40}, 3, "3 rows with 1099511627776 numbers"),
    ],
)
def test_masks_that_are_damaged_are_refused(changes: dict[str, Any], rows: int, message: str) -> None:
    packed = planned_masks(masked([[3, 9, 12, 40], [], [0, 5]]))
    assert packed is not None
    with pytest.raises(ValueError, match=message):
        replace(packed, **changes).of_rows(rows)
