"""Rows of a script's data set come through its own collator, one by one, and must be the manifest's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.data import CollatedRows, one_pair, one_sequence
from fcp_cli.integrations.hugging_face.job_facts import start_session
from fcp_cli.plan.file import PlanReader
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
        found = one_sequence(batch(**changes), 0)
        assert isinstance(found, tuple)
        tokens, labels = found
        assert (tokens.tolist(), labels.tolist()) == ([5, 6, 7], [-100, 6, 7])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "gives no labels for row 3"),
        ({"pixel_values": [[1.0]]}, "gives pixel_values besides the tokens of row 3"),
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


NAMED = (
    "row 1 of the training data has 3 tokens but 2 in the plan's manifest lengths.parquet; build the manifest from the data "
    "that the trainer trains on: trainer.train_dataset.save_to_disk('prepared'), then 'fcp manifest build prepared --kind "
    "arrow --column input_ids' and 'fcp plan'"
)


def collate(items: list[Any]) -> Mapping[str, Any]:
    ids = torch.tensor([item["input_ids"] if isinstance(item, dict) else item for item in items])
    return {"input_ids": ids, "labels": ids}


def planned_rows(folder: Path, dataset: Any, *, lengths: tuple[int, ...] = (3, 2), **settings: Any) -> CollatedRows:
    """The rows of a data set under a plan of one rank, whose manifest has rows of these lengths."""
    plan = write_plan(folder / "plan.parquet", [[Row((0,), lengths)]], num_ranks=1, rows=len(lengths))
    metadata = PlanReader(plan).metadata
    loader = SimpleNamespace(dataset=dataset, collate_fn=settings.pop("collate", collate), num_workers=0)
    return CollatedRows(loader, plan, metadata, **settings)


def test_rows_of_the_planned_lengths_are_read(tmp_path: Path) -> None:
    tokens, _ = planned_rows(tmp_path, [[1, 2, 3], [4, 5]])(0)  # type: ignore[misc]
    assert tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("as_arrow", [False, True])
def test_a_row_of_another_length_than_the_manifests_is_named_before_anything_is_trained(
    as_arrow: bool, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(RunError) as refused:
        planned_rows(tmp_path, datasets.Dataset.from_dict({"input_ids": rows}) if as_arrow else rows)
    assert str(refused.value) == NAMED


def test_every_row_of_an_arrow_file_is_compared_without_being_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    lengths = tuple(2 + row % 7 for row in range(1000))
    rows = [[1] * length for length in lengths]
    rows[737].append(1)
    read: list[Any] = []

    def noted(items: list[Any]) -> Mapping[str, Any]:
        read.extend(items)
        return collate(items)

    dataset = datasets.Dataset.from_dict({"input_ids": rows})
    with pytest.raises(RunError, match="row 737 of the training data has 5 tokens but 4 in the plan's manifest"):
        planned_rows(tmp_path, dataset, lengths=lengths, collate=noted)
    assert len(read) == 1
    order = sorted(range(1000), key=lambda row: row * 7 % 1000)
    chosen = tuple(len(rows[row]) for row in order)
    planned_rows(tmp_path, dataset.select(order), lengths=chosen, collate=noted)
    assert len(read) == 1


def test_a_collator_that_cuts_rows_to_the_planned_length_is_followed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def cut(items: list[Any]) -> Mapping[str, Any]:
        return collate([{"input_ids": item["input_ids"][:3]} for item in items])

    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3, 4], [5, 6, 7]]})
    planned_rows(tmp_path, dataset, lengths=(3, 3), collate=cut)


def test_the_tokens_of_pairs_are_compared_with_those_of_both_answers(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"prompt_ids": [[1], [1, 2]], "chosen_ids": [[5], [6]], "rejected_ids": [[7, 8], [9]]}
    dataset = datasets.Dataset.from_dict(columns)

    def collate_pair(items: list[Any]) -> Mapping[str, Any]:
        (item,) = items
        answers = [item["prompt_ids"] + item[name] for name in ("chosen_ids", "rejected_ids")]
        longest = max(map(len, answers))
        padded = torch.tensor([answer + [0] * (longest - len(answer)) for answer in answers])
        return {"input_ids": padded, "attention_mask": (padded != 0).long(), "completion_mask": padded != 0}

    planned_rows(tmp_path, dataset, lengths=(5, 6), pairs=True, collate=collate_pair)
    with pytest.raises(RunError, match=r"row 1 .* has 6 tokens but 7 in .* column of lengths .* --column length'"):
        planned_rows(tmp_path, dataset, lengths=(5, 7), pairs=True, collate=collate_pair)


def test_a_data_set_of_another_number_of_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the training data has 1 rows, but the plan's manifest lengths\.parquet has 2"):
        planned_rows(tmp_path, [[1, 2, 3]])


class Sharded(IterableDataset[Any]):
    """As accelerate wraps a streamed data set: torch gives it a `__getitem__` that raises."""

    def __iter__(self) -> Iterator[Any]:
        yield from ()

    def __len__(self) -> int:
        raise TypeError("object of type 'IterableDataset' has no len()")


@pytest.mark.parametrize("data", [iter(()), Sharded()])
@pytest.mark.parametrize("plan", [None, Path("plan.parquet")])
def test_streamed_data_is_refused_with_and_without_a_plan(
    data: Any, plan: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FCP_PLANNING", "planning.json")  # as if launched without a plan
    with pytest.raises(RunError, match="is read in one go; a plan needs its rows by number: use a data set with"):
        start_session(SimpleNamespace(dataset=data), dict, device=torch.device("cpu"), plan=plan)  # type: ignore[arg-type]
