"""Unmodified scripts of TRL's SFTTrainer and DPOTrainer compute under a plan what they compute without."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.runtime.launch import torchrun
from tests.runtime.trainer_outcomes import Outcomes, read_outcomes, require_equal
from tests.runtime.trainer_plans import write_plans

pytestmark = [
    pytest.mark.loops,
    pytest.mark.hf,
    pytest.mark.distributed,
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed; make test-loops installs it"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("trl")
    write_plans(folder)
    torchrun("-m", "tests.runtime.workers.trl_worker", str(folder), num_ranks=2)
    return read_outcomes(folder)


@pytest.mark.parametrize("name", ["sft", "sft dft waves", "dpo", "dpo waves ipo"])
def test_losses_norms_weights_and_what_trl_logs_are_those_of_the_script_without_a_plan(
    outcomes: Outcomes, name: str
) -> None:
    require_equal(outcomes, name)
    plain, planned = (outcomes(phase, name)[0]["log"][:-1] for phase in ("plain", "planned"))
    for one, other in zip(plain, planned, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"loss", "grad_norm"}:
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


def test_what_a_plan_would_change_in_silence_is_refused(outcomes: Outcomes) -> None:
    assert outcomes("planned", "sft packed")[0] == ("the script sets packing=True; leave it off: the plan packs")
    assert outcomes("planned", "dpo that compares pairs")[0] == (
        "the loss aot compares pairs of one micro-batch with each other, which the plan chooses; use another loss_type"
    )
