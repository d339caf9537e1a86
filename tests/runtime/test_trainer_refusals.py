"""What a trainer is asked for that a plan would skip is refused in one line; each case changes one thing."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face import packing
from fcp_cli.integrations.hugging_face.checks import check_global_batch, check_schedule, check_trainer
from fcp_cli.integrations.hugging_face.packing import ReplacedPacking
from fcp_cli.plan.file import PlanReader
from fcp_cli.runtime import FollowsPlan
from tests.runtime.models import hugging_face
from tests.runtime.plans import Row, write_plan

pytestmark = pytest.mark.hf


# Name: an attribute of a trainer or of what it has, its value, and what is said of it.
CHANGES: dict[str, tuple[str, Any, str]] = {
    "mean of means": ("args.average_tokens_across_devices", False, "average_tokens_across_devices=False weighs"),
    "first tokens in the mean": (
        "_loss_shifts_labels",  # as for GPT-2
        False,
        "for Qwen3ForCausalLM, the Trainer also counts each row's first token, which is never predicted, in the mean of the loss",
    ),
    "rows of similar length": (
        "args.train_sampling_strategy",
        "group_by_length",
        "the script puts rows of similar length into a step (group_by_length), but a plan's steps have random rows, which is another "
        "training; remove the setting (a plan balances the ranks itself), or accept the plan's batches with 'fcp launch --accept-other-batches'",
    ),
    "balanced batches": (
        "args.train_sampling_strategy",
        "batch_rebalance",
        "the script draws its rows by batch_rebalance, but a plan balances the ranks itself; remove it",
    ),
    "found batch": ("args.auto_find_batch_size", True, "auto_find_batch_size changes the batch, which the plan"),
    "noise": ("neftune_noise_alpha", 5.0, "neftune_noise_alpha scales noise by a sequence's length"),
    "deepspeed": ("is_deepspeed_enabled", True, "deepspeed= cannot follow a plan through the Trainer; remove it"),
    "lomo": ("args.optim", "adalomo", "the optimizer adalomo steps inside each backward; a plan's step has"),
    "experts": (
        "model.config.output_router_logits",
        True,
        "the model adds an auxiliary loss of its experts (output_router_logits), which is made of one rank's tokens",
    ),
    "images of another family": (
        "model.config.vision_config",
        SimpleNamespace(),
        "the images of a qwen3 model cannot follow a plan, those of qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, qwen2_5_vl, internvl, gemma3",
    ),
    "tensor parallelism": (
        "accelerator",
        SimpleNamespace(parallelism_config=SimpleNamespace(tp_size=2, cp_size=1, sp_size=1)),
        "the script sets tp_size (parallelism_config); a plan makes the groups itself: remove it",
    ),
    "packing": ("args.packing", True, "the script sets packing=True; leave it off: the plan packs"),
    "offloading": ("args.activation_offloading", True, "activation_offloading=True counts on one forward and"),
    "reference before": ("args.precompute_ref_log_probs", True, "precompute_ref_log_probs=True puts the reference"),
}


class OwnKind(Trainer):
    """As a trainer of TRL or transformers whose loss there is no planned form of."""

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        return super().compute_loss(*given, **named)


OwnKind.__module__ = "trl.trainer.own_kind_trainer"


class OwnStep(Trainer):
    """A trainer with a step of its own."""

    def training_step(self, *given: Any, **named: Any) -> Any:
        return super().training_step(*given, **named)


class BehindThePlan(FollowsPlan, OwnStep):
    """Whose own step would never run."""


def trainer_of(kind: type[Trainer], folder: Path) -> Any:
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    return kind(model=hugging_face("qwen3", torch.float32), args=arguments)


def test_a_plain_trainer_is_followed(tmp_path: Path) -> None:
    check_trainer(trainer_of(Trainer, tmp_path))


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_plan_would_leave_out_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    trainer = trainer_of(Trainer, tmp_path)
    path, value, message = CHANGES[name]
    *parents, attribute = path.split(".")
    setattr(reduce(getattr, parents, trainer), attribute, value)
    with pytest.raises(RunError) as refused:
        check_trainer(trainer)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rows_grouped_by_length_are_followed_by_random_ones_if_that_was_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = trainer_of(Trainer, tmp_path)
    trainer.args.train_sampling_strategy = "group_by_length"
    monkeypatch.setenv("FCP_ACCEPT_OTHER_BATCHES", "1")
    check_trainer(trainer)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            OwnKind,
            "OwnKind computes a loss that has no planned form: a rank has only a part of each sequence; a plan follows Trainer, SFT",
        ),
        (BehindThePlan, "stands behind FollowsPlan, which runs steps in its place; derive FollowsPlan's class from"),
    ],
)
def test_methods_that_would_never_run_are_refused(kind: type[Trainer], message: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as refused:
        check_trainer(trainer_of(kind, tmp_path))
    assert message in str(refused.value)


def test_a_plan_of_forward_passes_is_none_to_train_by(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [[Row([0], [8])]], num_ranks=1)
    metadata = replace(PlanReader(plan).metadata, phase="forward")
    with pytest.raises(RunError, match=r"the plan is of forward passes .* made without --phase forward"):
        check_global_batch(metadata, metadata.global_batch_size, "batch size 1")


def schedule(batch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **environment: str) -> None:
    """Check a trainer whose packing of 8 sequences of 5 tokens to rows of 10 was replaced, under a plan of batches."""
    monkeypatch.setattr(packing, "_replaced", [ReplacedPacking("TRL's packing", 10)])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = PlanReader(write_plan(tmp_path / "plan.parquet", [[Row([0], [5] * 8)]], num_ranks=1, rows=8)).metadata
    metadata = replace(made, global_batch_size=batch, steps=8 // batch)
    args = SimpleNamespace(
        per_device_train_batch_size=2, gradient_accumulation_steps=1, world_size=1, max_steps=-1,
        num_train_epochs=1, dataloader_drop_last=False,
    )  # fmt: skip
    trainer = SimpleNamespace(args=args, accelerator=SimpleNamespace(split_batches=False))
    check_schedule(trainer, metadata, "plan.parquet", np.full(8, 5), in_order=False)


def test_a_plan_with_other_updates_than_the_packing_it_replaces_is_refused_with_the_batch_that_keeps_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RunError) as refused:
        schedule(2, monkeypatch, tmp_path)  # the script's own batch size
    assert str(refused.value) == (
        "TRL's packing makes 2 updates an epoch, of 4 sequences each; a plan packs itself, and its batches count "
        "sequences: 4 of 2, which is another training; turn packing off and give batches of 4 rows a rank for as many "
        "updates, or accept the plan's batches with 'fcp launch --accept-other-batches'"
    )


def test_a_plan_with_as_many_updates_or_an_accepted_one_is_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    schedule(4, monkeypatch, tmp_path)
    schedule(2, monkeypatch, tmp_path, FCP_ACCEPT_OTHER_BATCHES="1")
