"""Unmodified scripts of transformers' Trainer compute under a plan what they compute without."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from fcp_cli.plan.file.reader import PlanReader
from tests.runtime.trainer_outcomes import Outcomes, read_outcomes, require_equal, run_worker
from tests.runtime.trainer_plans import GLOBAL_BATCH, LENGTHS

pytestmark = [pytest.mark.hf, pytest.mark.distributed]

_UNPLANNED = ("unplanned, read by workers", "unplanned, cut by the collator")
_CASES = ("ddp", "resumed, evaluated", "lora", "stopped", "unplanned", "repeated", *_UNPLANNED)
_REFUSALS = {
    "other batch": "the script trains on 4 sequences a step (per_device_train_batch_size 2 x gradient_accumulation_steps 1 "
    "x 2 ranks), but the plan on 8; plan with 'fcp plan --global-batch-size 4', or give the script the plan's",
    "more epochs": "ends after 3; plan more with 'fcp plan --epochs 2', or set max_steps=3",
    "fewer rows": "the training data has 20 rows, but the plan's manifest lengths.parquet has 24; build the manifest from",
    "longer row": "row 20 of the training data has 3 tokens but 2 in the plan's manifest lengths.parquet; build the manifest",
    "other data on rank 1": "row 20 of the training data has 3 tokens on rank 1, but 2 on rank 0; give every rank the same",
    "second trainer": "the training data has 20 rows, but the plan's manifest unplanned.lengths.parquet has 24; the plan "
    "was made of the data that training began with: data that changes between epochs, and a second trainer with other",
    "changing rows": "row 23 of the training data has 7 tokens but 6 in the plan's manifest unplanned-growing.lengths.parquet; "
    "the plan was made of the data that training began with: data that changes between epochs",
    "grouped": "the script groups rows by group_by_length, but a plan balances the steps itself; remove it",
}
_REMAINING = (
    "accumulation",
    "ddp waves",
    "masked",
    "recomputed",
    "recomputed as needed",
    "lora, recomputed as needed",
    "smoothed",
    "bf16",
    "max_steps",
    "fsdp",
    "fsdp, resumed",
    "fsdp that keeps weights",
)
_BF16 = 1e-3  # two roundings of every activation, in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory, *_CASES, *_REFUSALS)


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    return read_outcomes(folder)


@pytest.fixture(scope="module")
def remaining(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return read_outcomes(run(tmp_path_factory, *_REMAINING, "fsdp that gathers weights again"))


@pytest.mark.full
def test_fsdp_that_gathers_weights_again_needs_waves(remaining: Outcomes) -> None:
    for rank in range(2):
        assert "--sync microbatch" in remaining("planned", "fsdp that gathers weights again")[rank]


def run(tmp_path_factory: pytest.TempPathFactory, *names: str) -> Path:
    return run_worker(tmp_path_factory.mktemp("trainer"), "trainer_worker", *names)


@pytest.mark.parametrize("name", _CASES)
def test_losses_norms_and_weights_are_those_of_the_script_without_a_plan(outcomes: Outcomes, name: str) -> None:
    require_equal(outcomes, name)


@pytest.mark.full
@pytest.mark.parametrize("name", _REMAINING)
def test_so_they_are_in_every_other_setting_that_is_followed(remaining: Outcomes, name: str) -> None:
    require_equal(remaining, name, most=_BF16 if name == "bf16" else 2e-6, steps=2 if name == "max_steps" else 3)


def test_evaluation_runs_on_the_models_own_attention(outcomes: Outcomes) -> None:
    plain, planned = (outcomes(phase, "resumed, evaluated") for phase in ("plain", "planned"))
    expected = [entry["eval_loss"] for entry in plain[0]["log"] if "eval_loss" in entry]
    assert expected
    for rank in range(2):
        assert [entry["eval_loss"] for entry in planned[rank]["log"] if "eval_loss" in entry] == pytest.approx(expected)


def test_what_cannot_be_followed_is_refused_on_every_rank_before_the_first_step(outcomes: Outcomes) -> None:
    for name, message in _REFUSALS.items():
        for rank in range(2):
            found = outcomes("planned", name)[rank]
            assert message in found, (name, rank)
            assert "\n" not in found


def test_a_job_without_a_plan_follows_one_of_the_lengths_that_are_trained(folder: Path) -> None:
    for name, lengths in (("unplanned", LENGTHS), ("made", tuple(min(length, 16) for length in LENGTHS))):
        assert pq.read_table(folder / f"{name}.lengths.parquet")["length"].to_pylist() == list(lengths)
        metadata = PlanReader(folder / f"{name}.parquet").metadata
        assert (metadata.global_batch_size, metadata.steps, metadata.shuffle) == (GLOBAL_BATCH, 3, False)


def test_the_plan_that_a_job_made_while_it_trained_repeats_its_run_bit_for_bit(outcomes: Outcomes) -> None:
    made, repeated = (outcomes("planned", name)[0] for name in ("unplanned", "repeated"))
    assert [entry["loss"] for entry in repeated["log"] if "loss" in entry] == [
        entry["loss"] for entry in made["log"] if "loss" in entry
    ]
    for weight, value in made["weights"].items():
        assert torch.equal(value, repeated["weights"][weight]), weight
