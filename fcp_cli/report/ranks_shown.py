"""Selects the ranks to display, node by node, and their axis ticks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import IntArray
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata

_MOST_RANKS = 512  # more rows would not be visible and would bloat the page
_MOST_NODE_LINES = 33


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksShown:
    """All ranks of a small job, or the ranks of each `every`-th node of a large one, in adjacent rows."""

    num_ranks: int
    ranks_per_node: int
    every: int = 1

    @classmethod
    def of(cls, num_ranks: int, ranks_per_node: int) -> RanksShown:
        """Select evenly spaced nodes with about 512 ranks in total."""
        nodes = -(-num_ranks // ranks_per_node)
        every = max(1, -(-nodes // max(1, _MOST_RANKS // ranks_per_node)))
        return cls(num_ranks=num_ranks, ranks_per_node=ranks_per_node, every=every)

    @classmethod
    def all_of(cls, metadata: PlanMetadata) -> RanksShown:
        """Select all ranks of a plan."""
        return cls(num_ranks=metadata.num_ranks, ranks_per_node=metadata.ranks_per_node)

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self.are_shown(np.arange(self.num_ranks)).sum())

    def are_shown(self, ranks: IntArray) -> npt.NDArray[np.bool_]:
        """Return whether each of these ranks has a row."""
        return np.asarray(ranks // self.ranks_per_node % self.every == 0)

    def rows(self, ranks: IntArray) -> IntArray:
        """Return the row of each displayed rank."""
        node = ranks // self.ranks_per_node // self.every
        return np.asarray(node * self.ranks_per_node + ranks % self.ranks_per_node, dtype=np.int64)

    def node_lines(self) -> list[int]:
        """Return the first row of each further node; [] if there are too many."""
        lines = list(range(self.ranks_per_node, self.count, self.ranks_per_node))
        return lines if len(lines) < _MOST_NODE_LINES else []

    def axis(self, most: int) -> dict[str, Any]:
        """Return an axis with at most `most` ticks, each at the middle of a displayed rank's row."""
        per_node = self.ranks_per_node
        strides = [s for s in (1, 2, 4, 8, 16, 32) if s < per_node and per_node % s == 0]
        strides += [per_node * 2**k for k in range(20)]
        stride = next(s for s in strides if self.count <= most * s)
        rank = f"floor(datum.value / {per_node}) * {per_node * self.every} + floor(datum.value) % {per_node}"
        return {
            "values": [row + 0.5 for row in range(0, self.count, stride)],
            "labelExpr": f"format({rank}, ',')",
            "labelOverlap": False,
            "grid": False,
            "ticks": False,
        }

    def in_words(self) -> str:
        """Describe omitted ranks for a caption; "" if all are shown."""
        if self.every == 1:
            return ""
        return f" {self.count:,} of {self.num_ranks:,} ranks are drawn: one node in {self.every}."
