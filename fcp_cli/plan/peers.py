"""Peers of the ranks of a plan: the other ranks that each rank ever exchanges attention messages with.

NCCL and HCCL open a connection at the first message of a pair of ranks and keep its buffers on both devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.plan.ring_order import ring_pairs
from fcp_cli.plan.step import RingGroup, StepPlan

BYTES_PER_PEER: Final = 500_000_000
"""Device memory of a connection to one more rank: NVIDIA/nccl#1685 measured 1.06 GB before and 4.34 GB after the first
messages to 7 peers on H100, 0.47 GB each. HCCL connects at first contact, too; it is assumed to need as much."""


@dataclass(slots=True, kw_only=True)
class PeerCount:
    """Running count of the pairs of ranks that exchange messages in the steps passed to `add`.

    Ring neighbours follow `ring_order`. The count is a lower bound for frameworks with one communicator per group
    (Transformer Engine), which open a connection per group for the same pair.

    Attributes:
        num_ranks, ranks_per_node: of the plan.
        new_pairs: pairs first seen in each step, one entry per step added.
    """

    num_ranks: int
    ranks_per_node: int
    new_pairs: list[int] = field(default_factory=list)
    _pairs: set[tuple[int, int]] = field(default_factory=set)
    _groups: set[RingGroup] = field(default_factory=set)

    def add(self, step: StepPlan) -> None:
        """Add the pairs of a step."""
        before = len(self._pairs)
        self.add_groups(step.ring_groups())
        self.new_pairs.append(len(self._pairs) - before)

    def add_groups(self, groups: Iterable[RingGroup]) -> None:
        """Add the pairs of groups from `StepPlan.ring_groups` without attributing them to a step."""
        for group in groups:
            if group not in self._groups:
                self._groups.add(group)
                self._pairs.update(ring_pairs(group.ranks, self.ranks_per_node, group.heads_degree))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """All pairs so far, ascending, lower rank first in each."""
        return sorted(self._pairs)

    @property
    def per_rank(self) -> IntArray:
        """[num_ranks] number of peers of each rank."""
        return np.bincount(np.array(list(self._pairs), dtype=np.int64).ravel(), minlength=self.num_ranks)

    @property
    def mean(self) -> float:
        return 2.0 * len(self._pairs) / self.num_ranks

    @property
    def most(self) -> int:
        """Most peers of any rank."""
        return int(self.per_rank.max())

    @property
    def most_bytes(self) -> int:
        """Device memory of the peer connections of the rank with most peers, in bytes."""
        return self.most * BYTES_PER_PEER

    def means(self) -> list[float]:
        """Return [steps] the mean number of peers per rank after each step."""
        means: list[float] = (2.0 * np.cumsum(self.new_pairs) / self.num_ranks).tolist()
        return means

    def to_json(self) -> Mapping[str, Any]:
        """Return JSON values, with the mean after 1, 2, 4, ... and all steps to show whether peers still grow."""
        means = self.means()
        steps = sorted({min(1 << power, len(means)) for power in range(len(means).bit_length() + 1)} - {0})
        return {
            "peers_mean": self.mean,
            "peers_most": self.most,
            "peers_most_bytes": self.most_bytes,
            "peers_mean_after_steps": {str(step): means[step - 1] for step in steps},
        }
