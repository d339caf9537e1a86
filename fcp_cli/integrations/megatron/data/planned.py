"""Prefetches a plan's steps from a Megatron script's data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from fcp_cli.errors import RunError
from fcp_cli.integrations.megatron.data.batches import share, shares_data
from fcp_cli.integrations.megatron.data.samples import LocalShard, LocalStep, Samples, find_samples
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.data.cursor import PlanCursor
from fcp_cli.runtime.data.followed_plans import note_follower
from fcp_cli.runtime.data.prefetch import Prefetched
from fcp_cli.runtime.data.steps import load_steps

_STEPS_AHEAD = 2


class PlannedData:
    """Planned steps of this process. Every process of a replica uses it, even if its script reads no data.

    Args:
        plan, metadata: plan file and its metadata.
        load: `load_shard`, bound to this rank.
        rank: rank of the plan.
        device: device of this process.
        ascending: whether to keep the ranks of groups in ascending order.
    """

    def __init__(
        self,
        plan: Path,
        metadata: PlanMetadata,
        load: Callable[[MicroBatch, Samples], LocalShard],
        *,
        rank: int,
        device: torch.device,
        ascending: bool,
    ) -> None:
        self._plan, self._metadata, self._load = plan, metadata, load
        self._rank, self._device, self._ascending = rank, device, ascending
        self._replica = parallel_state.get_model_parallel_group()
        self._shares_data: bool | None = None
        self._iterator: Any = None
        self._steps: Prefetched[LocalStep] | None = None
        self._current: LocalStep | None = None
        self._next_step = 0

    def next_step(self, data_iterator: Any) -> LocalStep:
        """Return the next step, read here, or broadcast by the process of this replica that reads data."""
        if self._shares_data is None:
            self._shares_data = shares_data(data_iterator, self._replica, self._device)
        read = partial(self._read, data_iterator)
        if not self._shares_data:
            return read()
        note_follower(self._plan)  # processes that receive the step never read the plan file
        step = share(read, self._replica)
        return step.pinned() if self._device.type == "cuda" else step

    def _read(self, data_iterator: Any) -> LocalStep:
        if data_iterator is not self._iterator or self._steps is None:
            self._open(data_iterator)
        assert self._steps is not None
        # Megatron's rerun state machine repeats a step to detect hardware faults.
        if getattr(data_iterator, "replaying", False) and self._current is not None:
            return self._current
        step = next(self._steps, None)
        if step is None:
            raise RunError(
                f"the plan {self._plan} ends after {self._metadata.steps} steps, but the script trains on; plan more "
                "with 'fcp plan --epochs'"
            )
        self._current, self._next_step = step, step.plan.step + 1
        return step

    def _open(self, data_iterator: Any) -> None:
        """Start reading at the step after the samples that the script's sampler has consumed."""
        planned, manifest = self._metadata.masks, self._metadata.manifest
        masks = None if planned is None else planned.of_rows(manifest.rows)
        samples = replace(find_samples(data_iterator), masks=masks, manifest=manifest.name)
        step = self._first_step(samples)
        if len(samples.dataset) < manifest.rows:
            raise RunError(
                f"the script's data set has {len(samples.dataset)} samples, but the plan's manifest "
                f"{manifest.name} has {manifest.rows} rows; build the manifest from this data set"
            )
        if self._steps is not None:
            self._steps.close()
        # ahead=0: the loader thread below prefetches.
        cursor = PlanCursor(self._plan, self._rank, first_step=step, ahead=0, ascending=self._ascending)

        def begin(row: MicroBatch, _: Sequence[MicroBatch]) -> Callable[[], LocalShard]:
            return partial(self._load, row, samples)

        loaded = load_steps(cursor, begin, device=self._device)
        self._steps = Prefetched(loaded, depth=_STEPS_AHEAD, name="fcp-loader")
        self._iterator, self._next_step = data_iterator, step

    def _first_step(self, samples: Samples) -> int:
        """Return the step of the plan after the consumed samples; raise RunError if they are not whole steps."""
        size = self._metadata.global_batch_size
        step, rest = divmod(samples.consumed, size)
        if rest:
            raise RunError(
                f"{samples.consumed} samples were consumed, not a multiple of the plan's global batch of {size}; "
                "resume from a checkpoint that was trained under this plan"
            )
        if self._iterator is not None and step != self._next_step:
            raise RunError(
                f"the script's new data loader starts at sample {samples.consumed} (step {step} of the plan), but step "
                f"{self._next_step} comes next; a plan's epochs are one sequence of steps, so keep counting samples"
            )
        return step
