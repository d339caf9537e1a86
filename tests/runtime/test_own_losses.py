"""Trainers that override methods of transformers' Trainer: followed by their behaviour, or refused with figures."""

from __future__ import annotations

import re

import pytest

from tests.runtime.trainer_outcomes import Outcomes, outcomes_of, require_equal

pytestmark = [pytest.mark.hf, pytest.mark.distributed]

_FOLLOWED = ("Delegating", "PerToken", "PerTokenLogits", "WhileOthersMeet", "WithFunction", "PerToken of adapters")
_HERE = r"\(tests/runtime/workers/own_loss_worker.py:\d+\)"
_REFUSED = {
    "Scaling": rf"Scaling.compute_loss {_HERE} changes the loss of the Trainer's own compute_loss \([\d.]+ became [\d.]+\); remove",
    "Twice": rf"Twice.compute_loss {_HERE} calls the Trainer's own compute_loss twice",
    "TwoForwards": rf"TwoForwards.compute_loss {_HERE} calls the model 2 times for a micro-batch",
    "OtherTokens": rf"OtherTokens.compute_loss {_HERE} calls the model with other input_ids than the batch's",
    "Averaging": rf"Averaging.compute_loss {_HERE} is not a sum over tokens: [\d.]+ of a micro-batch, [\d.]+ of two halves of "
    r"its tokens \(relative difference 5.0e-01, at most 1e-06\)",
    "FirstTokens": rf"FirstTokens.compute_loss {_HERE} is not a sum over tokens: [\d.]+ of a micro-batch, [\d.]+ of two halves",
    "ByRows": rf"ByRows.compute_loss {_HERE} is not a sum over tokens: [\d.]+ of a micro-batch, [\d.]+ of one process \(step 0, "
    r"micro-batch 0\) \(relative difference 5.0e-01",
    "Meeting": rf"Meeting.compute_loss {_HERE} calls torch.distributed.all_reduce, which ranks with fewer micro-batches would",
    "OwnStep": rf"OwnStep.training_step {_HERE} cannot run a step of the plan, .* KeyError: 'input_ids'",
    "ScaledStep": rf"ScaledStep.training_step {_HERE} changes the result of the Trainer's own training_step",
    "Backwards": rf"Backwards._get_train_sampler {_HERE} visits the rows in the same order in every epoch, which is neither",
    "Repeating": rf"Repeating.get_train_dataloader {_HERE} visits 24 rows, 4 of them distinct, in batches of up to 4",
}


outcomes = outcomes_of("own_loss_worker")


@pytest.mark.parametrize("name", _FOLLOWED)
def test_methods_that_delegate_and_sums_over_tokens_are_followed(outcomes: Outcomes, name: str) -> None:
    require_equal(outcomes, name)


@pytest.mark.parametrize("name", _REFUSED)
def test_all_else_is_refused_on_every_rank_in_one_line_with_its_place(outcomes: Outcomes, name: str) -> None:
    for found in outcomes("planned", name):
        assert isinstance(found, str)
        assert re.match(_REFUSED[name], found), found
        assert "\n" not in found
