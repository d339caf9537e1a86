"""Unmodified scripts of TRL's SFTTrainer and DPOTrainer compute under a plan what they compute without."""

from __future__ import annotations

from dataclasses import make_dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.checks import COUNTED_BY_TRL, RELIED_ON_OF_TRL, check_trl
from tests.runtime.trainer_outcomes import Outcomes, outcomes_of, require_equal

pytestmark = [
    pytest.mark.loops,
    pytest.mark.hf,
    pytest.mark.distributed,
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed; make test-loops installs it"),
]

FIELDS = RELIED_ON_OF_TRL["FusedCausalLMOutput"]


outcomes = outcomes_of("trl_worker")


@pytest.mark.parametrize(
    "name",
    [
        "sft",
        "sft, accumulated",
        "sft dft waves",
        "sft, mean of batches",
        "dpo",
        "dpo waves ipo",
        "unplanned sft",
        "unplanned dpo",
    ],
)
def test_losses_norms_weights_and_what_trl_logs_are_those_of_the_script_without_a_plan(
    outcomes: Outcomes, name: str
) -> None:
    require_equal(outcomes, name)
    plain, planned = (outcomes(phase, name)[0]["log"][:-1] for phase in ("plain", "planned"))
    for one, other in zip(plain, planned, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"loss", "grad_norm"}:
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


def test_the_start_line_names_the_means_of_accumulated_pairs_that_are_not_trls(outcomes: Outcomes) -> None:
    plain, planned = (outcomes(phase, "dpo, accumulated")[0] for phase in ("plain", "planned"))
    require_equal(outcomes, "dpo, accumulated")
    named = {key for key in plain["log"][0] if key.startswith(("entropy", "logits/", "mean_token_accuracy"))}
    for one, other in zip(plain["log"][:-1], planned["log"][:-1], strict=True):
        for key in one.keys() - named - {"loss", "grad_norm"}:
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key
    assert "; entropy, logits and mean_token_accuracy are means over a step's answer tokens" in planned["said"]


def test_what_a_plan_would_change_in_silence_is_refused(outcomes: Outcomes) -> None:
    assert outcomes("planned", "sft packed")[0] == ("the script sets packing=True; leave it off: the plan packs")
    assert outcomes("planned", "dpo that compares pairs")[0] == (
        "the loss aot compares pairs of one micro-batch with each other, which the plan chooses; use another loss_type"
    )


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("add_fused_lm_head", None, r"trl [\d.]+ has no trl\.trainer\.utils\.add_fused_lm_head; versions known"),
        ("add_fused_lm_head", lambda model: None, r"utils\.add_fused_lm_head takes no outputs; versions known to work"),
        ("FusedCausalLMOutput", None, r"has no trl\.trainer\.utils\.FusedCausalLMOutput; versions known to work: 1"),
        *(
            (
                "FusedCausalLMOutput",
                make_dataclass("Output", set(FIELDS) - {field}),
                f"FusedCausalLMOutput takes no {field};",
            )
            for field in FIELDS
        ),
    ],
)
def test_without_the_fused_head_one_line_names_it_the_version_and_the_remedy(
    name: str, other: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trl.trainer.utils as utils

    with monkeypatch.context() as changed, pytest.raises(RunError, match=message):
        if other is None:
            changed.delattr(utils, name)
        else:
            changed.setattr(utils, name, other)
        check_trl(utils, SimpleNamespace(**dict.fromkeys(COUNTED_BY_TRL)))


@pytest.mark.parametrize("name", COUNTED_BY_TRL)
def test_a_trainer_that_keeps_what_it_logs_elsewhere_is_refused(name: str) -> None:
    import trl.trainer.utils as utils

    trainer = SimpleNamespace(**dict.fromkeys(set(COUNTED_BY_TRL) - {name}))
    with pytest.raises(
        RunError, match=rf"SimpleNamespace has no {name}, in which it kept what it logs; versions known"
    ):
        check_trl(utils, trainer)
