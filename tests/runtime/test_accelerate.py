"""Plain loops around accelerate compute under a plan what they compute without."""

from __future__ import annotations

import pytest

from tests.runtime.trainer_outcomes import Outcomes, outcomes_of, require_equal, require_refused, require_repeatable

pytestmark = [pytest.mark.hf, pytest.mark.distributed]

outcomes = outcomes_of("accelerate_worker")

_REFUSALS = {
    "gathering loop": "the script calls accelerator.gather before a step's last backward, but under sync iteration ranks "
    "have different numbers of micro-batches and would wait for each other; call it where accelerator.sync_gradients, or "
    "plan with 'fcp plan --sync microbatch'",
    "loop that goes back twice": "the script calls accelerator.backward on a batch that is none of the plan's: one of a "
    "loader that",
    "weighted loop": "the loader of the training data draws its rows by WeightedRandomSampler, but under a plan every row",
    "second loop": "the training data has 20 rows, but the plan's manifest unplanned-new.lengths.parquet has 24; the plan "
    "was made of the data that training began with: data that changes between epochs cannot be planned, and a",
    "loop of growing rows": "row 23 of the training data has 7 tokens but 6 in the plan's manifest unplanned-growing.",
    "loop of other data": "row 13 of the training data has other tokens than in the epochs before; the plan was made of",
}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("loop", 3),
        ("accumulating loop", 3),
        ("resumed loop", 2),
        ("stopped loop", 2),
        ("unplanned loop", 6),
        ("repeated loop", 6),
        ("unplanned loop, its data made again", 6),
    ],
)
def test_losses_norms_learning_rates_and_weights_are_those_of_the_loop_without_a_plan(
    outcomes: Outcomes, name: str, steps: int
) -> None:
    require_equal(outcomes, name, steps=steps)
    plain, planned = (outcomes(phase, name)[0]["log"] for phase in ("plain", "planned"))
    assert [entry.get("lr") for entry in planned] == [entry.get("lr") for entry in plain]


@pytest.mark.parametrize("name", _REFUSALS)
def test_what_cannot_be_followed_is_refused_on_every_rank_in_one_line(outcomes: Outcomes, name: str) -> None:
    require_refused(outcomes, name, _REFUSALS[name], begins=True)


def test_a_loop_without_a_plan_follows_one_of_its_lengths_and_epochs_which_repeats_it(outcomes: Outcomes) -> None:
    require_repeatable("unplanned-loop.parquet", outcomes, "loop")


def test_one_line_says_that_a_micro_batchs_loss_is_a_share_and_where_the_mean_is(outcomes: Outcomes) -> None:
    said = [
        outcomes("planned", "loop")[rank]["said"].count("rank's share of the step's, exact for") for rank in range(2)
    ]
    assert said == [1, 0]
