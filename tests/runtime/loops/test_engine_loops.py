"""Unmodified loops around DeepSpeed's engines compute under a plan what they compute without."""

from __future__ import annotations

import pytest

from tests.runtime.trainer_outcomes import Outcomes, outcomes_of, require_equal, require_refused, require_repeatable

pytestmark = pytest.mark.loops
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

outcomes = outcomes_of("engine_worker")

_CASES = {
    "engine": 3,
    "engine in waves": 3,
    "unplanned engine": 6,
    "repeated engine": 6,
    "resumed engine": 3,
    "unplanned engine, zero 3": 6,
    "unplanned engine, its own loader": 2,
    "unplanned engine, its data made again": 6,
}
_REFUSALS = {
    "engine that goes back twice": "the script calls engine.backward on a batch that is none of the plan's: one of a",
    "engine of other data": "row 13 of the training data has other tokens than in the epochs before; the plan was made of",
    "engine of fewer rows": "the training data has 20 rows, but the plan's manifest lengths.parquet has 24; build the",
}


@pytest.mark.parametrize("name", _CASES)
def test_losses_norms_and_weights_are_those_of_the_loop_without_a_plan(outcomes: Outcomes, name: str) -> None:
    require_equal(outcomes, name, steps=_CASES[name])


def test_a_loop_without_a_plan_follows_one_of_its_lengths_and_epochs_which_repeats_it(outcomes: Outcomes) -> None:
    require_repeatable("unplanned-engine.parquet", outcomes, "engine")


@pytest.mark.parametrize("name", _REFUSALS)
def test_what_cannot_be_followed_is_refused_on_every_rank_in_one_line(outcomes: Outcomes, name: str) -> None:
    require_refused(outcomes, name, _REFUSALS[name], begins=True)
