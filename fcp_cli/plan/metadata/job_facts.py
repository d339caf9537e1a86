"""Facts of a training job that its ranks report to the planning process."""

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
    """Command-line options for the plan of a job that starts without one.

    Attributes:
        model: name of a shipped model or path of a description, overriding the loop's own model.
        profile: path of a cost profile.
    """

    model: str | None = None
    profile: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """Settings of a training loop that its plan depends on.

    Attributes:
        loop: class name of the loop, for messages.
        device: device type of the ranks.
        rows_per_pass: per-device batch size of the loop without a plan.
        global_batch_size: rows of an optimizer step, over all ranks.
        packs_to: pack length in tokens of the loop without a plan; 0 if it is the longest sequence, None if the loop
            pads instead of packing.
        epochs: passes over the data; None if only the loop knows when it ends.
        steps: optimizer steps to train; None: until the epochs end.
        recipe: settings of a `RecipeRequest`.
        config: contents of the model's config.json.
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
