"""Rows of a script's data set come through its own collator, one by one, and must be the manifest's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fcp_cli.errors import RunError
from fcp_cli.plan.reader import PlanReader
from fcp_cli.runtime.integrations.hugging_face.rows import CollatedRows, one_pair, one_sequence
from tests.runtime.plans import Row, write_plan

pytestmark = pytest.mark.torch


def batch(**changes: Any) -> Mapping[str, Any]:
    given = {"input_ids": [[5, 6, 7, 0]], "labels": [[-100, 6, 7, -100]], "attention_mask": [[1, 1, 1, 0]]}
    return {name: torch.tensor(value) for name, value in {**given, **changes}.items() if value is not None}


def test_padding_on_either_side_is_taken_off_again() -> None:
    for changes in (
        {},
        {"input_ids": [[0, 5, 6, 7]], "labels": [[-100, -100, 6, 7]], "attention_mask": [[0, 1, 1, 1]]},
    ):
        tokens, labels = one_sequence(batch(**changes), 0)
        assert (tokens.tolist(), labels.tolist()) == ([5, 6, 7], [-100, 6, 7])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "gives no labels for row 3"),
        ({"pixel_values": [[1.0]]}, "gives pixel_values beside the tokens of row 3"),
        ({"attention_mask": [[1, 0, 1, 0]]}, "the attention mask of row 3 has gaps"),
        (
            {"attention_mask": [[1, 1, 1, 1]], "position_ids": [[0, 1, 0, 1]]},
            "row 3 of the training data holds several",
        ),
        ({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3, 4]]}, "a row must be one sequence"),
    ],
)
def test_what_a_row_must_not_have_is_refused(changes: Mapping[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        one_sequence(batch(**changes), 3)


def test_a_pair_becomes_two_sequences_that_do_not_see_each_other() -> None:
    pair = one_pair(
        {
            "input_ids": [[5, 6, 7, 8], [5, 9, 0, 0]],
            "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
            "completion_mask": [[0, 0, 1, 1], [0, 1, 0, 0]],
        },
        0,
    )
    assert (pair.tokens.tolist(), pair.lengths) == ([5, 6, 7, 8, 5, 9], (4, 2))
    assert pair.next_labels().tolist() == [-100, 7, 8, -100, 9, -100]


def test_a_row_of_another_length_or_number_than_the_manifests_is_named(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [[Row((0,), (3, 2))]], num_ranks=1, rows=2)
    metadata = PlanReader(plan).metadata

    def rows(*items: list[int]) -> CollatedRows:
        def collate(found: list[list[int]]) -> Mapping[str, Any]:
            return {"input_ids": torch.tensor(found), "labels": torch.tensor(found)}

        return CollatedRows(list(items), collate, plan, metadata)

    tokens, _ = rows([1, 2, 3], [4, 5])(0)  # type: ignore[misc]
    assert tokens.tolist() == [1, 2, 3]
    with pytest.raises(RunError, match="row 1 of the training data has 3 tokens but 2 in the plan's manifest"):
        rows([1, 2, 3], [4, 5, 6])(1)
    with pytest.raises(RunError, match="the training data has 1 rows, but the plan's manifest"):
        rows([1, 2, 3])
    with pytest.raises(RunError, match="is read in one go"):
        CollatedRows(iter(()), lambda found: found, plan, metadata)
