"""Rules of every training loop under a plan, in any framework."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata.job_facts import PLANNED_BY_ITSELF, has_no_plan
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.data.cursor import RankStep
from fcp_cli.runtime.layouts.ring_member import RingMember


def plan_path(given: str | Path | None) -> Path:
    """Return the plan given by the script, else FCP_PLAN, which `fcp launch` sets."""
    path = given or os.environ.get("FCP_PLAN")
    if not path:
        raise RunError(
            "no plan was given; pass plan=..., set FCP_PLAN, or start the script with 'fcp launch --plan PLAN'"
        )
    if not given and has_no_plan():
        raise RunError(
            f"the job was launched without a plan, which fcp makes by itself for {PLANNED_BY_ITSELF} alone; make one "
            "with 'fcp plan MANIFEST', and give it with 'fcp launch --plan PLAN'"
        )
    return Path(path)


def require_length(found_tokens: int, planned_tokens: int, *, row: int) -> None:
    """Raise RunError if row `row` of the data has fewer tokens than in the plan."""
    if found_tokens < planned_tokens:
        raise RunError(
            f"row {row} of the data has {found_tokens} tokens but {planned_tokens} in the plan: the plan was made from "
            "another manifest; build it again with 'fcp manifest build' and 'fcp plan'"
        )


class FollowedStep:
    """One optimizer step of one rank, to be iterated once, to its end.

    Attributes:
        index: optimizer step, from 0.
        predicted_seconds, bound_seconds: the plan's makespan and lower bound.
        record: metrics of the step (`RunningStep`), or None if it is not recorded.
    """

    record: Any = None

    def __init__(self, planned: RankStep) -> None:
        self.index = planned.step
        self.predicted_seconds = planned.makespan_seconds
        self.bound_seconds = planned.bound_seconds
        self._num_microbatches = len(planned.rows)
        self._is_begun = False
        self._num_run = 0
        self._is_finished = False

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches."""
        return self._num_microbatches

    def require_finished(self) -> None:
        """Raise RunError unless every micro-batch was run."""
        if not self._is_begun:
            raise RunError(
                f"step {self.index}: the next step was fetched before any of its {len(self)} micro-batches was run, as "
                "loaders do that fetch ahead (a DataLoader; Lightning's Trainer, unless the loader has a length: see "
                "fcp_cli.integrations.lightning.PlannedSteps); iterate each step to its end before the next"
            )
        if not self._is_finished:
            raise RunError(
                f"step {self.index}: {self._num_run} of {len(self)} micro-batches were run; "
                "iterate each step to its end"
            )

    def _begin(self) -> None:
        if self._is_begun:
            raise RunError(f"step {self.index} was iterated twice; each of its micro-batches runs once")
        self._is_begun = True

    def _require_attention(self, row: MicroBatch, ring: RingMember, remedy: str) -> None:
        """Raise RunError if a micro-batch that needs `attention` never called it.

        A model's own attention would attend across the sequences of a pack, and not across shards.
        """
        shares = row.degree > 1 or len(row.sequences) > 1
        if shares and not ring.attention_calls:
            raise RunError(
                f"step {self.index}, micro-batch {row.order}, degree {row.degree}, {len(row.sequences)} sequences: "
                f"{remedy}"
            )
