from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.manifest import table
from fcp_cli.planning import batches as batches_module
from fcp_cli.planning.batches import BatchSettings, GlobalBatches, OverlongPolicy, permuted
from tests.planning.examples import example_problem, table_of


@settings(max_examples=80)
@given(rows=st.integers(1, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 5))
def test_every_key_is_a_permutation_and_any_position_is_made_alone(rows: int, seed: int, epoch: int) -> None:
    whole = permuted(np.arange(rows), rows, (seed, epoch))
    assert sorted(whole.tolist()) == list(range(rows))
    some = np.arange(rows)[rows // 2 :: 3]
    assert permuted(some, rows, (seed, epoch)).tolist() == whole[some].tolist()


def test_keys_differ_and_neighbours_are_parted() -> None:
    one, other = (permuted(np.arange(10_000), 10_000, (0, epoch)) for epoch in (0, 1))
    assert (one == other).mean() < 0.01
    assert abs(np.corrcoef(np.arange(10_000), one)[0, 1]) < 0.05
    assert (np.abs(np.diff(one)) == 1).mean() < 0.01


def test_the_permutation_is_the_same_on_every_machine_and_in_every_release() -> None:
    assert permuted(np.arange(12), 12, (7, 3)).tolist() == [9, 0, 3, 6, 7, 5, 4, 8, 1, 2, 11, 10]


@pytest.fixture
def tiny_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat manifests of more than 50 rows as large, in windows of 24 sequences and pieces of 16 rows."""
    monkeypatch.setattr(table, "ROWS_IN_MEMORY", 50)
    monkeypatch.setattr(table, "_CHUNK_ROWS", 16)
    monkeypatch.setattr(batches_module, "ROWS_IN_MEMORY", 50)
    monkeypatch.setattr(batches_module, "_WINDOW_SEQUENCES", 24)


@pytest.mark.usefixtures("tiny_memory")
@pytest.mark.parametrize("policy", ["drop", "truncate"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_large_manifest_holds_every_sequence_once_an_epoch_with_its_length(
    policy: OverlongPolicy, shuffle: bool
) -> None:
    lengths = [(37 * row) % 211 + 1 for row in range(203)]
    settings = BatchSettings(global_batch_size=10, epochs=2, max_length=150, overlong=policy, shuffle=shuffle)
    batches = GlobalBatches(table_of(lengths), example_problem(), settings)
    due = [row for row in range(203) if policy == "truncate" or lengths[row] <= 150]
    assert batches.rows.tolist() == due and batches.longest_tokens == 150
    per_epoch = len(batches) // 2
    for epoch in range(2):
        made = [batches.batch(step) for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
        rows = [row for batch in made for row in batch.rows.tolist()]
        assert sorted(rows) == due
        assert (rows == due) is not shuffle
        assert [n for batch in made for n in batch.lengths.tolist()] == [min(lengths[row], 150) for row in rows]


@pytest.mark.usefixtures("tiny_memory")
def test_a_step_of_a_large_manifest_is_the_same_whatever_was_made_before_it() -> None:
    settings = BatchSettings(global_batch_size=7, epochs=2)
    table = table_of(range(1, 160))
    in_order = [batch.rows.tolist() for batch in GlobalBatches(table, example_problem(), settings)]
    batches = GlobalBatches(table, example_problem(), settings)
    assert batches.shuffle_kind == "index-free"
    for step in np.random.default_rng(0).permutation(len(batches)).tolist():
        assert batches.batch(step).rows.tolist() == in_order[step]


@pytest.mark.usefixtures("tiny_memory")
def test_a_large_column_stands_in_a_file_and_hashes_as_one_in_memory() -> None:
    column = table.new_column(120, np.int64)
    assert isinstance(column, np.memmap)
    column[:] = np.arange(1, 121)
    assert table_of(column).content_hash() == table_of(range(1, 121)).content_hash()  # type: ignore[arg-type]
    assert not isinstance(table.new_column(50, np.int64), np.memmap)


def test_a_manifest_that_fits_keeps_the_permutation_of_its_seed() -> None:
    batches = GlobalBatches(table_of(range(1, 21)), example_problem(), BatchSettings(global_batch_size=20))
    assert batches.shuffle_kind is None
    expected = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 0]))).permutation(np.arange(20))
    assert batches.batch(0).rows.tolist() == expected.tolist()
