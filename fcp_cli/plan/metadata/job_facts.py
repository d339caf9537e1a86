"""The facts of a training job that its plan is made from, as its ranks tell them to the process that plans."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from fcp_cli.plan.metadata.plan_metadata import LastBatch, Sync
from fcp_cli.validation import Count, NonNegativeCount

PLANNING_VARIABLE: Final = "FCP_PLANNING"
"""Names the file of a `PlanningWish` in a job without a plan, which its training loop has made at FCP_PLAN."""
PLANNED_BY_ITSELF: Final = (
    "transformers' Trainer, TRL's SFTTrainer and DPOTrainer, Lightning's Trainer, and loops around accelerate and "
    "DeepSpeed's engines"
)
"""Loops whose data and settings fcp reads when training begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningWish:
    """Options typed for the plan of a job that starts without one.

    Attributes:
        model: shipped name or description in place of the loop's own model.
        profile: cost profile.
    """

    model: str | None = None
    profile: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """A training loop as its plan sees it.

    Attributes:
        loop: its class, for messages.
        device: kind of device that the ranks run on.
        rows_per_pass: rows of a rank's forward in the loop without a plan, which pads them to the longest.
        global_batch_size: rows of an optimizer step, over all ranks.
        packs_to: tokens of the rows that the loop without a plan packs its sequences into, 0 if only its longest
            sequence tells; None: it pads.
        epochs: passes over the data; None: only the loop knows, and is planned for until it ends.
        steps: the steps where training stops; None: after the epochs.
        recipe: settings of a `RecipeRequest`.
        config: the configuration of the model, as its config.json has it.
    """

    loop: str
    device: Literal["cpu", "cuda", "npu"]
    ranks: Count
    ranks_per_node: Count
    rows_per_pass: Count
    global_batch_size: Count
    epochs: Count | None
    steps: Count | None
    seed: NonNegativeCount
    shuffle: bool
    last_batch: LastBatch
    sync: Sync
    recipe: Mapping[str, Any]
    config: Mapping[str, Any]
    packs_to: NonNegativeCount | None = None


def is_launched_without_plan() -> bool:
    """Return whether this process belongs to a job that was launched without a plan."""
    return PLANNING_VARIABLE in os.environ and bool(os.environ.get("FCP_PLAN"))


def has_no_plan() -> bool:
    """Return whether this process belongs to a job that was launched without a plan and has not made one yet."""
    return is_launched_without_plan() and not Path(os.environ["FCP_PLAN"]).exists()
