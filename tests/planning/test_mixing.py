from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.errors import FcpError, ManifestError
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Mixture, MixtureSource, MixtureStage
from fcp_cli.planning.batches import BatchSettings, GlobalBatches, read_mixture
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.runtime.cursor import mixed_fetch
from tests.planning.examples import example_problem


def mixture(*weights: float, rows: int = 50) -> Mixture:
    sources = tuple(MixtureSource(name=str(i), rows=rows, content_hash=str(i)) for i in range(len(weights)))
    return Mixture(sources=sources, stages=(MixtureStage(first_step=0, weights=weights),))


@settings(max_examples=60)
@given(
    weights=st.lists(st.floats(0, 100), min_size=1, max_size=6).filter(lambda given: sum(given) > 1e-3),
    size=st.integers(1, 500),
)
def test_every_step_has_each_source_within_one_sequence_of_its_share(weights: list[float], size: int) -> None:
    counts = mixture(*weights).counts(0, 400, size)
    share = np.array(weights) / sum(weights) * size
    assert (counts.sum(axis=1) == size).all()
    assert (np.abs(counts - share) <= 1 + 1e-3).all()
    assert (np.abs(counts.mean(axis=0) - share) < 0.05).all()


def test_whole_shares_are_the_same_in_every_step() -> None:
    assert np.unique(mixture(0.7, 0.3).counts(0, 1000, 10), axis=0).tolist() == [[7, 3]]


def write(path: Path, lengths: list[int], **columns: list[int]) -> Path:
    pq.write_table(pa.table({"length": lengths, **columns}), path)
    return path


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path / "a.parquet", list(range(100, 160))), write(tmp_path / "b.parquet", list(range(1000, 1007)))


def inputs_of(words: list[str], **changes: object) -> PlanInputs:
    table, mixed = read_mixture(words, length_column="length")
    given = {"global_batch_size": 8, "epochs": 5, "step_limit": 30, **changes}
    return PlanInputs(
        table=table,
        problem=example_problem(),
        settings=BatchSettings(mixture=mixed, **given),  # type: ignore[arg-type]
        request=PlanRequest(solver="static"),
    )


def test_a_small_source_is_repeated_in_whole_epochs_without_copies(two: tuple[Path, Path]) -> None:
    batches = inputs_of([f"{two[0]}:0.5", f"{two[1]}:0.5"]).batches()
    small = [row for step in range(len(batches)) for row in batches.batch(step).rows.tolist() if row >= 60]
    assert len(batches.table) == 67
    assert len(small) == 4 * 30
    for epoch in range(len(small) // 7):
        assert sorted(small[7 * epoch : 7 * (epoch + 1)]) == list(range(60, 67))
    assert small[:7] != small[7:14]


def test_weights_change_from_their_step_on_and_earlier_steps_stay(two: tuple[Path, Path]) -> None:
    before = inputs_of([f"{two[0]}:3", f"{two[1]}:1"]).batches()
    after = inputs_of([f"{two[0]}:3", f"{two[1]}:1", f"{two[0]}:0@10"]).batches()
    for step in range(10):
        assert after.batch(step).rows.tolist() == before.batch(step).rows.tolist()
    assert (after.batch(10).rows >= 60).all()


def test_a_mixture_is_planned_soundly_and_rows_name_their_source(tmp_path: Path, two: tuple[Path, Path]) -> None:
    inputs = inputs_of([f"{two[0]}:3", f"{two[1]}:1"])
    plans = [make_plan(tmp_path / f"{i}.parquet", inputs).metadata for i in range(2)]
    assert plans[0].plan_hash == plans[1].plan_hash
    assert not list(check_plan(tmp_path / "0.parquet", manifest=inputs.table))
    fetch = mixed_fetch(tmp_path / "0.parquet", lambda source, row: (source, row))
    step = next(PlanReader(tmp_path / "0.parquet").steps())
    for row, length in zip(step.sequences.tolist(), step.lengths.tolist(), strict=True):
        source, at = fetch(row)
        assert length == {"a.parquet": 100, "b.parquet": 1000}[source] + at


def test_the_check_finds_a_step_with_other_shares(tmp_path: Path, two: tuple[Path, Path]) -> None:
    inputs = inputs_of([f"{two[0]}:3", f"{two[1]}:1"])
    honest = GlobalBatches._sequences

    def swapped(self: GlobalBatches, step: int) -> object:
        rows, _ = honest(self, step)
        rows[0] = 63 if rows[0] < 60 else 0
        return rows, self.table.take(rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlobalBatches, "_sequences", swapped)
        make_plan(tmp_path / "plan.parquet", inputs)
    assert "where their weights make [6, 2]" in str(next(check_plan(tmp_path / "plan.parquet")))


def test_manifests_of_one_file_name_are_named_by_their_folders(tmp_path: Path) -> None:
    names = []
    for number, place in enumerate(("x/en/l.parquet", "y/en/l.parquet", "web.parquet")):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        names.append(f"{write(tmp_path / place, [5 + number, 6])}:1")
    first = read_mixture(names[:1], length_column="length")[1]
    table, mixed = read_mixture(names, length_column="length")
    assert [source.name for source in mixed.sources] == ["x/en/l.parquet", "y/en/l.parquet", "web.parquet"]
    assert table.name == "x/en/l.parquet+y/en/l.parquet+web.parquet"
    # A loop that was trained on one of them still finds it under its name.
    later = read_mixture(names, length_column="length", before=first, first_step=3)[1]
    assert [source.name for source in later.sources] == ["l.parquet", "y/en/l.parquet", "web.parquet"]
    assert "two of its sources are named 0" in Mixture(sources=2 * mixture(1).sources, stages=()).fault(100)


def test_mixtures_that_cannot_be_are_one_line(tmp_path: Path, two: tuple[Path, Path]) -> None:
    a, b = two
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(a.read_bytes())
    pq.write_table(pa.table({"tokens": [1, 2]}), other := tmp_path / "other.parquet")
    for words, message in (
        ([f"{a}:0", f"{b}:0"], "the weights of --mix from step 0 on sum to 0"),
        ([f"{a}:1", f"{a}:2"], "twice from step 0 on"),
        ([f"{a}:1", f"{copy}:2"], "which has the lengths of"),
        ([f"{a}:1", f"{other}:1"], "has its lengths in the column 'tokens'"),
        ([f"{a}:-1", f"{b}:2"], "must be FILE:WEIGHT"),
        ([f"{a}:nan"], "must be FILE:WEIGHT"),
        ([str(a)], "must be FILE:WEIGHT"),
        ([f"{a}:1@5"], "no weight for steps 0 to 4"),
        ([f"{tmp_path}/none.parquet:1"], "none.parquet"),
    ):
        with pytest.raises(FcpError, match=message) as error:
            read_mixture(words, length_column="length")
        assert "\n" not in str(error.value)
    with pytest.raises(ManifestError, match=r"b\.parquet: all its sequences are overlong"):
        inputs_of([f"{a}:1", f"{b}:1"], max_length=500, overlong="drop").batches()
