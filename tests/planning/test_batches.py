from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.errors import ManifestError, OverlongError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.planning.batches import BatchSettings, GlobalBatches, LastBatch, OverlongPolicy
from fcp_cli.planning.problem import Problem
from fcp_cli.util.arrays import IntArray
from tests.planning.examples import example_problem, table_of

FOUR_RANKS = example_problem(num_ranks=4, tokens_per_rank=100)


def batches_of(table: LengthTable, problem: Problem | None = None, **settings: Any) -> GlobalBatches:
    return GlobalBatches(table, problem or example_problem(), BatchSettings(**settings))


def rows_per_step(batches: GlobalBatches) -> list[list[int]]:
    return [batch.rows.tolist() for batch in batches]


@settings(max_examples=60)
@given(
    sequences=st.integers(1, 60),
    size=st.integers(1, 20),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
)
def test_every_epoch_holds_every_sequence_once(
    sequences: int, size: int, epochs: int, seed: int, shuffle: bool
) -> None:
    table = table_of(range(1, sequences + 1))
    batches = batches_of(table, global_batch_size=size, epochs=epochs, seed=seed, shuffle=shuffle)
    steps = rows_per_step(batches)
    per_epoch = len(steps) // epochs
    for epoch in range(epochs):
        rows = list(chain.from_iterable(steps[epoch * per_epoch : (epoch + 1) * per_epoch]))
        assert sorted(rows) == list(range(sequences))
        assert shuffle or rows == list(range(sequences))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    table = table_of(range(1, 101))
    one = batches_of(table, global_batch_size=10, epochs=2, seed=3)
    same = GlobalBatches(table, example_problem(num_ranks=64), BatchSettings(global_batch_size=10, epochs=2, seed=3))
    other = batches_of(table, global_batch_size=10, epochs=2, seed=4)
    assert rows_per_step(one) == rows_per_step(same)
    assert rows_per_step(one) != rows_per_step(other)
    assert rows_per_step(one)[:10] != rows_per_step(one)[10:]


def test_any_step_can_be_made_on_its_own() -> None:
    batches = batches_of(table_of(range(1, 101)), global_batch_size=7, epochs=3, seed=1)
    straight = list(batches)
    for step in (40, 3, 17):
        assert batches.batch(step).rows.tolist() == straight[step].rows.tolist()
        assert batches.batch(step).seed == straight[step].seed
    assert len({batch.seed for batch in straight}) == len(straight)


@pytest.mark.parametrize(("last_batch", "sizes"), [("keep", [4, 4, 2]), ("drop", [4, 4])])
def test_a_last_partial_batch_is_kept_or_dropped(last_batch: LastBatch, sizes: list[int]) -> None:
    batches = batches_of(table_of(range(1, 11)), global_batch_size=4, last_batch=last_batch)
    assert [len(rows) for rows in rows_per_step(batches)] == sizes


def test_a_step_limit_keeps_the_first_steps() -> None:
    table = table_of(range(1, 31))
    whole = batches_of(table, global_batch_size=4)
    limited = batches_of(table, global_batch_size=4, step_limit=3)
    assert rows_per_step(limited) == rows_per_step(whole)[:3]


def test_overlong_sequences_are_named_with_what_fits_and_the_options_that_mend_it() -> None:
    table = table_of([5, 900, 901, 902, 903, 904, 905, 906])
    with pytest.raises(OverlongError) as error:
        batches_of(table, FOUR_RANKS, global_batch_size=2)
    message = str(error.value)
    assert "row 1 (900 tokens)" in message
    assert "row 5 (904 tokens) and 2 more" in message
    assert "row 6" not in message
    assert "4 ranks of 100 tokens hold at most 400" in message
    assert "7 of 8 sequences cannot be planned" in message
    assert "the longest of the others has 5" in message
    assert message.endswith("add --overlong drop to skip them (truncate cuts them), or --ranks 12 to hold them")


def test_a_length_limit_below_what_fits_is_an_error_too() -> None:
    with pytest.raises(
        OverlongError, match=r"row 1 \(31 tokens\); .* --max-length allows 30.* --max-length 31 to hold them$"
    ):
        batches_of(table_of([30, 31]), global_batch_size=2, max_length=30)


def test_a_step_in_the_order_of_the_manifest_looks_up_its_own_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = batches_of(
        table_of([5, 900, *range(1, 99)]),
        FOUR_RANKS,
        global_batch_size=4,
        overlong="drop",
        shuffle=False,
    )
    looked_up: list[int] = []
    kept = GlobalBatches._kept

    def counted(self: GlobalBatches, places: IntArray) -> IntArray:
        looked_up.append(len(places))
        return kept(self, places)

    monkeypatch.setattr(GlobalBatches, "_kept", counted)
    assert [batches.batch(step).rows.tolist() for step in (0, 5)] == [[0, 2, 3, 4], [21, 22, 23, 24]]
    assert looked_up == [4, 4]


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_the_longest_sequence_is_the_longest_that_takes_part(overlong: OverlongPolicy) -> None:
    for lengths in ([5, 900, 400, 301], [5, 6], [400, 399]):
        batches = batches_of(table_of(lengths), FOUR_RANKS, global_batch_size=1, overlong=overlong)
        assert batches.longest_tokens == batches.table.length_tokens[batches.rows].max()


def test_overlong_sequences_are_dropped() -> None:
    batches = batches_of(table_of([5, 900, 400, 401]), FOUR_RANKS, global_batch_size=2, overlong="drop", shuffle=False)
    assert rows_per_step(batches) == [[0, 2]]
    assert (batches.overlong.sequences, batches.overlong.max_length) == (2, 400)


def test_overlong_sequences_are_truncated() -> None:
    batches = batches_of(
        table_of([5, 900, 400, 301]),
        FOUR_RANKS,
        global_batch_size=4,
        overlong="truncate",
        max_length=300,
        shuffle=False,
    )
    batch = batches.batch(0)
    assert batch.lengths.tolist() == [5, 300, 300, 300]
    assert np.array_equal(batch.work.tokens, batch.lengths)
    assert batches.overlong.sequences == 3


def test_dropping_every_sequence_is_an_error() -> None:
    with pytest.raises(ManifestError, match="all 2 sequences are longer than 3 tokens"):
        batches_of(table_of([5, 6]), global_batch_size=2, overlong="drop", max_length=3)


def test_dropping_the_only_batch_is_an_error() -> None:
    with pytest.raises(ManifestError, match="2 sequences cannot fill one global batch of 3; lower --global-batch-size"):
        batches_of(table_of([5, 6]), global_batch_size=3, last_batch="drop")
