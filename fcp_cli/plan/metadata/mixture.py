"""Mixtures of manifests: sequences per source in each step, and the source of each row.

The concatenated sources form one virtual manifest, whose row numbers a plan's column `sequences` holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.validation import NonNegativeCount

# The golden ratio as a 64-bit fraction: its multiples modulo 1 have the lowest discrepancy.
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_GRID: Final = 2.0**20  # shares are rounded to this grid, so that integer shares survive rounding errors


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSource:
    """A manifest of a mixture."""

    name: str
    rows: NonNegativeCount
    content_hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureStage:
    """Source weights from `first_step` until the next stage; they need not sum to 1."""

    first_step: NonNegativeCount
    weights: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Sources in virtual row order, and stages ascending by first step, beginning with step 0."""

    sources: tuple[MixtureSource, ...]
    stages: tuple[MixtureStage, ...]

    def fault(self, rows: int) -> str:
        """Return the reason why the mixture is invalid for a virtual manifest of `rows` rows, or ""."""
        begins = [stage.first_step for stage in self.stages]
        if not self.sources or sum(source.rows for source in self.sources) != rows:
            return f"its sources do not have {rows} rows together"
        names = [source.name for source in self.sources]
        if twice := next((name for name in names if names.count(name) > 1), None):
            return f"two of its sources are named {twice}"
        if begins[:1] != [0] or any(after <= before for before, after in pairwise(begins)):
            return "its stages do not ascend from step 0"
        for stage in self.stages:
            finite = all(0 <= weight < np.inf for weight in stage.weights)
            if len(stage.weights) != len(self.sources) or not finite or not 0 < sum(stage.weights) < np.inf:
                return f"the weights from step {stage.first_step} on are not one finite number of at least 0 per source"
        return ""

    @property
    def offsets(self) -> IntArray:
        """[sources + 1] first virtual row of each source, then the total number of rows."""
        return np.cumsum([0, *(source.rows for source in self.sources)], dtype=np.int64)

    def locate(self, row: int) -> tuple[int, int]:
        """Return (source, row in the source) of a virtual row."""
        offsets = self.offsets
        source = int(np.searchsorted(offsets, row, side="right")) - 1
        return source, row - int(offsets[source])

    def counts(self, first: int, end: int, batch_size: int) -> IntArray:
        """Return [end - first, sources] the number of sequences of each source in steps `first` to `end` - 1.

        Each count is the source's exact share of the batch, rounded down or up, and each row sums to `batch_size`.
        Systematic sampling at multiples of the golden ratio makes the mean count converge to the exact share.
        """
        steps = np.arange(first, end, dtype=np.uint64)
        turns = (steps * _GOLDEN >> np.uint64(11)).astype(np.float64) / 2.0**53
        found = np.empty((len(steps), len(self.sources)), dtype=np.int64)
        ends = [*(stage.first_step for stage in self.stages[1:]), max(end, 1)]
        for stage, stage_end in zip(self.stages, ends, strict=True):
            here = slice(max(stage.first_step - first, 0), max(stage_end - first, 0))
            bounds = np.cumsum([0.0, *stage.weights]) / sum(stage.weights) * batch_size
            bounds = np.rint(bounds * _GRID) / _GRID
            bounds[-1] = batch_size
            found[here] = np.diff(np.floor(bounds + turns[here, None]), axis=1)
        return found
