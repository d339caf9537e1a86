from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fcp_cli.errors import RunError
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.cursor import PlanCursor
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.loader import begin_shard, fetches_labels, load_shard, load_steps
from tests.runtime.plans import Row, microbatch, write_plan

pytestmark = pytest.mark.torch


def on_ranks(lengths: Sequence[int], degree: int) -> MicroBatch:
    """Rows from 100 on, on ranks from 10 on."""
    return microbatch(lengths, range(10, 10 + degree), first_sequence=100)


def numbered(row: int) -> np.ndarray[Any, Any]:
    """Every token of the data set is another number."""
    return row * 1000 + np.arange(200)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 8))
def test_the_shards_of_a_ring_hold_every_token_once_with_its_position_and_next_token(
    lengths: list[int], degree: int
) -> None:
    row = on_ranks(lengths, degree)
    layout = shard_layout(row.lengths, degree)
    seen = []
    for member, rank in enumerate(row.ranks):
        shard = load_shard(row, numbered, rank=rank)
        if not layout.tokens(member):
            continue
        for token, position, label in zip(shard.input_ids[0], shard.position_ids[0], shard.labels[0], strict=True):
            sequence, at = divmod(int(token), 1000)
            is_end = at == lengths[sequence - 100] - 1
            assert (int(position), int(label)) == (at, IGNORED if is_end else int(token) + 1)
            seen.append((sequence, at))
    assert sorted(seen) == [(100 + i, at) for i, length in enumerate(lengths) for at in range(length)]


@pytest.mark.parametrize(("lengths", "degree", "rank"), [((), 1, 10), ((1,), 4, 12)], ids=["idle", "fewer than ranks"])
def test_a_rank_without_tokens_gets_one_that_counts_nothing(lengths: tuple[int, ...], degree: int, rank: int) -> None:
    shard = load_shard(on_ranks(lengths, degree), numbered, rank=rank)
    assert shard.input_ids.shape == (1, 1)
    assert shard.position_ids.tolist() == [[0]]
    assert shard.labels.tolist() == [[IGNORED]]


def test_sequences_longer_than_planned_are_cut() -> None:
    shard = load_shard(on_ranks([3], 1), numbered, rank=10)
    assert shard.input_ids.tolist() == [[100_000, 100_001, 100_002]]
    assert shard.labels.tolist() == [[100_001, 100_002, IGNORED]]


def test_a_sequence_shorter_than_planned_is_named() -> None:
    with pytest.raises(RunError, match="row 100 of the data has 200 tokens but 201 in the plan"):
        load_shard(on_ranks([201], 1), numbered, rank=10)


@pytest.mark.parametrize("values", [[7, 8, 9], (np.array([7, 8, 9], dtype=np.uint16), None), torch.tensor([7, 8, 9])])
def test_tokens_may_be_lists_arrays_or_tensors(values: Any) -> None:
    tokens = values[0] if isinstance(values, tuple) else values
    assert load_shard(on_ranks([3], 1), lambda row: tokens, rank=10).input_ids.tolist() == [[7, 8, 9]]


def test_given_labels_belong_to_their_tokens_and_are_shifted() -> None:
    shard = load_shard(on_ranks([4], 1), lambda row: ([1, 2, 3, 4, 5], [-100, -100, 3, 4, 5]), rank=10, labelled=True)
    assert shard.input_ids.tolist() == [[1, 2, 3, 4]]
    assert shard.labels.tolist() == [[-100, 3, 4, -100]]


def test_labels_of_another_length_are_refused() -> None:
    with pytest.raises(RunError, match="row 100 of the data has 4 tokens but 3 labels"):
        load_shard(on_ranks([4], 1), lambda row: ([1, 2, 3, 4], [1, 2, 3]), rank=10, labelled=True)


def test_labels_for_some_rows_only_are_refused() -> None:
    with pytest.raises(RunError, match="fetch returned labels for row 100 of the data, unlike for the first"):
        load_shard(on_ranks([2], 1), lambda row: ([1, 2], [1, 2]), rank=10)


def test_all_ranks_ask_the_first_sequence_whether_there_are_labels(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "p", [[Row([0], [3])], [Row([0], [3])]], num_ranks=1)
    asked = []

    def fetch(row: int) -> Any:
        asked.append(row)
        return ([1, 2, 3], [1, 2, 3]) if row == 1 else [1, 2, 3]

    assert fetches_labels(PlanReader(plan).steps(1), fetch)
    assert not fetches_labels(PlanReader(plan).steps(), fetch)
    assert asked == [1, 0]


def test_a_loaded_step_counts_the_labels_of_this_rank(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "p", [[Row([0], [5, 3]), Row([1], [9])]], num_ranks=2)
    begin = partial(begin_shard, fetch=numbered, rank=0)
    (step,) = load_steps(PlanCursor(plan, 0, ahead=0), begin, device=torch.device("cpu"))
    assert [shard.labelled_tokens for shard in step.shards] == [4 + 2]
