"""A sampler gives torch's DataLoader the rows of a rank in the order in which its micro-batches need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fcp_cli.errors import RunError
from fcp_cli.runtime import PlanSampler
from fcp_cli.verification.emulation import (
    Meeting,
    replay_alone,
    run_ranks,
    synthetic_tokens,
    take_gradient,
    thread_session,
)
from fcp_cli.verification.tiny_model import TinyConfig, TinyLanguageModel, ring_attend
from tests.runtime.models import VOCAB_SIZE
from tests.runtime.plans import Row, write_plan

pytestmark = pytest.mark.torch

STEPS = (
    (Row((0, 1), (20, 5)), Row((0,), (9,)), Row((1,), (6,))),
    (Row((1,), (7,)), Row((0, 1), (12,)), Row((0,), (3,))),
)
ROWS = 7


class Texts:
    """A data set that notes who reads what."""

    def __init__(self, plan: Path, rows: int = ROWS) -> None:
        self.tokens, self.rows = synthetic_tokens(plan, VOCAB_SIZE), rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Tensor:
        self.read.append(row)
        return torch.as_tensor(self.tokens(row))


def as_dictionary(items: list[Tensor]) -> dict[str, Tensor]:
    return {"input_ids": torch.stack(items), "labels": torch.stack(items)}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write_plan(tmp_path / "plan.parquet", STEPS, num_ranks=2, rows=ROWS)


def run(plan: Path, *, first_step: int = 0, sampled: int = 0, **settings: Any) -> list[Any]:
    """What each of two ranks has read, and its gradients."""

    def on_rank(meeting: Meeting, rank: int) -> Any:
        session = thread_session(plan, None, meeting, rank)
        texts = Texts(plan)
        sampler = PlanSampler(session, first_step=sampled)
        loader: DataLoader[Tensor] = DataLoader(texts, sampler=sampler, **settings)  # type: ignore[arg-type]
        session.fetch = sampler.fetch_from(loader)
        model = TinyLanguageModel(TinyConfig(), ring_attend)
        gradients = []
        for step in session.steps(model, first_step=first_step):
            for batch in step:
                torch.autograd.backward(batch.loss(model(batch.input_ids, batch.position_ids, batch.ring)))
            gradients.append(take_gradient(model))
        return texts.read, gradients

    return run_ranks(2, on_rank)


@pytest.mark.parametrize("settings", [{"batch_size": None}, {"collate_fn": as_dictionary}])
def test_ranks_read_their_rows_in_the_plans_order_and_train_as_one_process(settings: Any, plan: Path) -> None:
    alone = replay_alone(plan, TinyConfig()).gradients
    for rank, (read, gradients) in enumerate(run(plan, **settings)):
        looked_for_labels, *trained = read
        assert looked_for_labels == 0
        assert trained == [[0, 1, 2, 5, 6], [0, 1, 3, 4, 5]][rank]
        for found, expected in zip(gradients, alone, strict=True):
            torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=1e-12)


def test_a_resumed_run_reads_from_its_first_step_on(plan: Path) -> None:
    (first, _), (second, _) = run(plan, first_step=1, sampled=1, batch_size=None)
    assert (first, second) == ([4, 5, 6], [4, 4, 5])


def test_a_sampler_that_begins_with_another_step_than_the_session_is_named(plan: Path) -> None:
    with pytest.raises(
        RunError, match=r"needs row 0 of the data where the sampler has row \d; make a PlanSampler .* same"
    ):
        run(plan, first_step=0, sampled=1, batch_size=None)


def test_a_loader_that_cannot_follow_the_plan_is_refused(plan: Path) -> None:
    def refusals(meeting: Meeting, rank: int) -> list[str]:
        sampler = PlanSampler(thread_session(plan, None, meeting, rank))
        loaders: list[DataLoader[Any]] = [
            DataLoader(Texts(plan), shuffle=True),  # type: ignore[arg-type]
            DataLoader(Texts(plan), sampler=sampler, batch_size=4),  # type: ignore[arg-type]
            DataLoader(Texts(plan, rows=6), sampler=sampler),  # type: ignore[arg-type]
        ]
        found = []
        for loader in loaders:
            with pytest.raises(RunError) as refused:
                sampler.fetch_from(loader)
            found.append(str(refused.value))
        return found

    other, large, short = run_ranks(2, refusals)[0]
    assert other == "the loader has another sampler; give it this one: DataLoader(dataset, sampler=sampler)"
    assert large.startswith("the loader has batch_size 4, but the plan determines the rows of a micro-batch; remove it")
    assert short == (
        "the data set has 6 rows, but the plan's manifest lengths.parquet has 7; build the manifest from this data set with "
        "'fcp manifest build', and plan again with 'fcp plan'"
    )
