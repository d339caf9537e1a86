"""Masks that reach a plan through a script's own collator, or through the plan alone, as models of transformers take them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.data import CollatedRows
from fcp_cli.integrations.transformers import prepare
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Sync, planned_masks
from fcp_cli.runtime.loader import with_planned_masks
from fcp_cli.util.masks import MaskedSequence, full, of_matrix, segments, token_types
from fcp_cli.verification.emulation import Meeting, Replayed, gradients_on_rank, run_ranks, thread_session
from tests.runtime.launch import run_worker
from tests.runtime.plans import Row, write_plan

pytestmark = pytest.mark.hf

pytest.importorskip("transformers")

from tests.runtime.gemma3_models import (  # noqa: E402
    LENGTHS,
    MASKS,
    ROWS,
    TYPES,
    collate,
    expected,
    gemma3,
    kept,
    masks_of_transformers,
    norms_in_fp64,
    tokens_of,
)
from tests.runtime.workers.decoder_worker import CASES, ITERATION, WAVES  # noqa: E402

_building = threading.Lock()  # weights are drawn from one random state
PLANNED: dict[str, Any] = {"rows": 3, "masked_sequences": 2, "masks": planned_masks(kept())}


@pytest.mark.parametrize("how", ["matrix", "matrix of each kind of layers", "token types", "the plan alone"])
def test_gemma_3_with_images_and_windows_has_the_gradient_of_one_process(how: str, tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [ROWS], num_ranks=3, **PLANNED)

    def run(meeting: Meeting, rank: int) -> Replayed:
        with _building:
            model, config = gemma3(), gemma3().config
            config._attn_implementation = "sdpa"
            loader = SimpleNamespace(dataset=[0, 1, 2], collate_fn=lambda rows: collate(how, config, *rows))
            rows = CollatedRows(loader, plan, PlanReader(plan).metadata)
            prepare(model)
        session = thread_session(plan, rows, meeting, rank)
        return gradients_on_rank(
            session, model, lambda mb: mb.loss(model(input_ids=mb.input_ids, position_ids=mb.position_ids).logits)
        )

    with norms_in_fp64():
        gradient, loss = expected()
        ranks = run_ranks(3, run)
    for replayed in ranks:
        assert np.abs(replayed.gradients[0] - gradient).max() <= 1e-12
        assert abs(replayed.losses[0] - loss) <= 1e-12


@pytest.mark.distributed
def test_processes_train_gemma_3_with_images_and_windows_as_one(tmp_path: Path) -> None:
    plans: dict[str, tuple[Sync, list[Row]]] = {
        ITERATION: ("iteration", [Row([0, 1, 2, 3], LENGTHS[:2]), Row([1, 3], LENGTHS[2:])]),
        WAVES: ("microbatch", [Row([0, 1, 3], LENGTHS[:2], 0), Row([2], LENGTHS[2:], 0)]),
    }
    for name, (sync, rows) in plans.items():
        write_plan(tmp_path / name, [rows], num_ranks=4, sync=sync, **PLANNED)
    left = run_worker("decoder_worker", tmp_path, "gemma3", num_ranks=4)
    assert {name: len(ranks) for name, ranks in left.items()} == dict.fromkeys(CASES["gemma3"], 4)
    with norms_in_fp64():
        gradient, loss = expected()
    for name, ranks in left.items():
        for found in ranks:
            assert np.abs(found.gradients[0] - gradient).max() <= 1e-12, name
            assert abs(found.losses[0] - loss) <= 1e-12, name


def rows_of(folder: Path, batch: Mapping[str, Any], **planned: Any) -> CollatedRows:
    plan = write_plan(folder / "plan.parquet", [[Row([0], [4])]], num_ranks=1, rows=1, **planned)
    loader = SimpleNamespace(dataset=[0], collate_fn=lambda rows: batch)
    return CollatedRows(loader, plan, PlanReader(plan).metadata)


IDS = torch.tensor([[5, 6, 7, 8]])
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.mark.parametrize(
    ("changes", "planned", "message"),
    [
        (
            {"attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)},
            {},
            "gives row 0 of the training data a mask (spans 0 to 4), but the plan's manifest lengths.parquet has causal",
        ),
        ({}, {"masked_sequences": 1}, "but says not which, and the data collator gives row 0 none; build the manifest"),
        ({"token_type_ids": torch.tensor([[0, 1, 1, 0]])}, {}, "gives token_type_ids besides the tokens of row 0"),
        (
            {"attention_mask": torch.ones(1, 1, 3, 3)},
            {},
            "of row 0 has the shape (1, 1, 3, 3); a mask of 4 tokens has (1, 1, 4, 4)",
        ),
        (
            {"attention_mask": torch.eye(4, dtype=torch.bool)[None, None]},
            {},
            "row 0 cannot be followed: token 1 does not attend to all tokens before the last one that it attends to; give spans",
        ),
        (
            {"attention_mask": {"sliding_attention": IDS}},
            {},
            "of row 0 is for layers of sliding_attention, and none of",
        ),
    ],
)
def test_masks_that_the_plan_does_not_know_or_no_ring_follows_are_named(
    changes: dict[str, Any], planned: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError) as refused:
        rows_of(tmp_path, {**BATCH, **changes}, **planned)(0)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_mask_of_numbers_to_add_is_read_as_one_of_truths(tmp_path: Path) -> None:
    added = torch.zeros(1, 1, 4, 4).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), torch.finfo().min)
    found = rows_of(tmp_path, {**BATCH, "attention_mask": added})(0)
    assert isinstance(found, MaskedSequence) and found.mask.is_causal


@pytest.mark.parametrize(
    ("seen_by", "message"),
    [
        ([[1, 0, 0], [1, 1, 1], [1, 1, 1]], None),
        ([[1, 1, 0], [1, 1, 1], [1, 1, 1]], "token 0 sees up to token 1, which does not attend to it"),
        (
            [[1, 0, 0], [1, 1, 0], [0, 1, 1]],
            "token 2 does not attend to all tokens before the last one that it attends to",
        ),
    ],
)
def test_a_matrix_is_spans_that_see_themselves_both_ways_or_refused(
    seen_by: list[list[int]], message: str | None
) -> None:
    matrix = np.array(seen_by, dtype=np.bool_)
    if message is None:
        assert of_matrix(matrix) == segments([(1, 3)])
        return
    with pytest.raises(Exception, match=message):
        of_matrix(matrix)


def test_token_types_are_the_spans_of_gemma_3() -> None:
    model = gemma3()
    model.set_attn_implementation("sdpa")
    for row, types in enumerate(TYPES):
        assert token_types(types) == MASKS[row]
        made = masks_of_transformers(model.config, row)["full_attention"]
        if made is not None:
            assert of_matrix(made[0, 0].numpy()) == MASKS[row]


def test_data_that_comes_with_another_mask_than_the_plan_s_is_named(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "p", [ROWS], num_ranks=3, **PLANNED)
    metadata = PlanReader(plan).metadata
    for mask, message in (
        (
            segments([(3, 20)]),
            r"row 0 .* another mask \(spans 3 to 20\) than .* \(spans 3 to 20, 21 to 30\); build the",
        ),
        (full(), r"\(spans 0 to the end\)"),
        (segments([]), r"\(causal\)"),
    ):
        fetch = with_planned_masks({0: MaskedSequence(tokens=tokens_of(0), mask=mask)}.__getitem__, metadata)
        with pytest.raises(RunError, match=message):
            fetch(0)
    same = with_planned_masks(lambda row: MaskedSequence(tokens=tokens_of(row), mask=MASKS[row]), metadata)
    assert [same(row).mask for row in range(3)] == MASKS
    plain = with_planned_masks(tokens_of, metadata)
    assert plain(0).mask == MASKS[0]
    assert isinstance(plain(1), Tensor), "what is causal stays as it is"
