"""Plain loops around accelerate compute under a plan what they compute without."""

from __future__ import annotations

import pytest

from tests.runtime.launch import torchrun
from tests.runtime.trainer_outcomes import Outcomes, read_outcomes, require_equal
from tests.runtime.trainer_plans import write_plans

pytestmark = [pytest.mark.hf, pytest.mark.distributed]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("accelerate")
    write_plans(folder)
    torchrun("-m", "tests.runtime.workers.accelerate_worker", str(folder), num_ranks=2)
    return read_outcomes(folder)


@pytest.mark.parametrize(("name", "steps"), [("loop", 3), ("accumulating loop", 3), ("resumed loop", 2)])
def test_losses_norms_learning_rates_and_weights_are_those_of_the_loop_without_a_plan(
    outcomes: Outcomes, name: str, steps: int
) -> None:
    require_equal(outcomes, name, steps=steps)
    plain, planned = (outcomes(phase, name)[0]["log"] for phase in ("plain", "planned"))
    assert [entry.get("lr") for entry in planned] == [entry.get("lr") for entry in plain]


def test_ranks_with_other_numbers_of_micro_batches_are_not_left_waiting_for_each_other(outcomes: Outcomes) -> None:
    assert outcomes("planned", "gathering loop")[0] == (
        "the script calls accelerator.gather before a step's last backward, but under sync iteration ranks have different "
        "numbers of micro-batches and would wait for each other; call it where accelerator.sync_gradients, or plan with "
        "'fcp plan --sync microbatch'"
    )
