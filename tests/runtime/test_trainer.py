"""Unmodified scripts of transformers' Trainer compute under a plan what they compute without."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from fcp_cli.plan.file import PlanReader
from tests.runtime.trainer_outcomes import (
    BF16_LOSS,
    Outcomes,
    outcomes_of,
    require_equal,
    require_refused,
    require_repeated,
)
from tests.runtime.trainer_plans import GLOBAL_BATCH, LENGTHS
from tests.runtime.workers.trainer_worker import FAMILIES_TRAINED

pytestmark = [pytest.mark.hf, pytest.mark.distributed]

_UNPLANNED = ("unplanned, read by workers", "unplanned, cut by the collator")
_LOADED = ("unplanned, in an order of its own", "counted", "split batches", "split and dispatched batches")
_CASES = ("ddp", "resumed, evaluated", "lora", "stopped", "unplanned", "repeated", *_UNPLANNED, *_LOADED)
_REFUSALS = {
    "other batch": "the script trains on 4 sequences a step (per_device_train_batch_size 2 x gradient_accumulation_steps 1 "
    "x 2 ranks), but the plan on 8; plan with 'fcp plan --global-batch-size 4', or give the script the plan's",
    "more epochs": "ends after 3; plan more with 'fcp plan --epochs 2', or set max_steps=3",
    "fewer rows": "the training data has 20 rows, but the plan's manifest lengths.parquet has 24; build the manifest from",
    "longer row": "row 20 of the training data has 3 tokens but 2 in the plan's manifest lengths.parquet; build the manifest",
    "other data on rank 1": "row 20 of the training data has 3 tokens on rank 1, but 2 on rank 0; give every rank the same",
    "second trainer": "the training data has 20 rows, but the plan's manifest unplanned.lengths.parquet has 24; the plan "
    "was made of the data that training began with: data that changes between epochs cannot be planned, and a second trainer with",
    "second trainer, made before": "the script has a second trainer with other training data (20 rows, 24 in the first), and a job",
    "sequence classification": "Qwen3ForSequenceClassification is not a decoder language model, whose tokens a plan",
    "changing rows": "row 23 of the training data has 7 tokens but 6 in the plan's manifest unplanned-growing.lengths.parquet; "
    "the plan was made of the data that training began with: data that changes between epochs",
    "grouped": "the script puts rows of similar length into a step (group_by_length), but a plan's steps have random",
}
_REMAINING = (
    "stopped by SIGINT",
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
    "fsdp, bf16, for 12 steps",
    "aot_eager",
    "tied embeddings",
)
_FAMILIES = tuple(f"family {name}" for name in FAMILIES_TRAINED)
_BF16 = 1e-3  # two roundings of every activation, in another order


outcomes = outcomes_of("trainer_worker", *_CASES, *_REFUSALS)
remaining = outcomes_of("trainer_worker", *_REMAINING, "fsdp that gathers weights again")
families = outcomes_of("trainer_worker", *_FAMILIES)


@pytest.mark.full
def test_fsdp_that_gathers_weights_again_needs_waves(remaining: Outcomes) -> None:
    require_refused(remaining, "fsdp that gathers weights again", "--sync microbatch")


@pytest.mark.parametrize("name", _CASES)
def test_losses_norms_and_weights_are_those_of_the_script_without_a_plan(outcomes: Outcomes, name: str) -> None:
    require_equal(outcomes, name)


@pytest.mark.full
@pytest.mark.parametrize("name", _REMAINING)
def test_so_they_are_in_every_other_setting_that_is_followed(remaining: Outcomes, name: str) -> None:
    steps = {"max_steps": 2, "fsdp, bf16, for 12 steps": 12}.get(name, 3)
    most = {"bf16": _BF16, "fsdp, bf16, for 12 steps": BF16_LOSS}.get(name, 2e-6)
    require_equal(remaining, name, most=most, steps=steps)


@pytest.mark.full
@pytest.mark.parametrize("name", _FAMILIES)
def test_so_they_are_with_other_decoders(families: Outcomes, name: str) -> None:
    require_equal(families, name, most=5e-6)


def test_tokens_are_counted_as_the_trainer_counts_those_that_are_no_padding(outcomes: Outcomes) -> None:
    plain, planned = (outcomes(phase, "counted")[0]["log"] for phase in ("plain", "planned"))
    seen = [[entry.get("num_input_tokens_seen") for entry in log] for log in (plain, planned)]
    assert seen[0] == seen[1] and seen[0][-1] == sum(LENGTHS)


def test_evaluation_runs_on_the_models_own_attention(outcomes: Outcomes) -> None:
    plain, planned = (outcomes(phase, "resumed, evaluated") for phase in ("plain", "planned"))
    expected = [entry["eval_loss"] for entry in plain[0]["log"] if "eval_loss" in entry]
    assert expected
    for rank in range(2):
        assert [entry["eval_loss"] for entry in planned[rank]["log"] if "eval_loss" in entry] == pytest.approx(expected)


@pytest.mark.parametrize("name", _REFUSALS)
def test_what_cannot_be_followed_is_refused_on_every_rank_before_the_first_step(outcomes: Outcomes, name: str) -> None:
    require_refused(outcomes, name, _REFUSALS[name])


def test_a_job_without_a_plan_follows_one_of_the_lengths_that_are_trained(outcomes: Outcomes) -> None:
    for name, lengths in (("unplanned", LENGTHS), ("made", tuple(min(length, 16) for length in LENGTHS))):
        assert pq.read_table(outcomes.folder / f"{name}.lengths.parquet")["length"].to_pylist() == list(lengths)
        metadata = PlanReader(outcomes.folder / f"{name}.parquet").metadata
        assert (metadata.global_batch_size, metadata.steps, metadata.shuffle) == (GLOBAL_BATCH, 3, False)


def test_the_plan_that_a_job_made_while_it_trained_repeats_its_run_bit_for_bit(outcomes: Outcomes) -> None:
    require_repeated(outcomes, "")
