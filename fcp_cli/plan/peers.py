"""The peers of every rank of a plan: the other ranks that it ever exchanges ring messages with.

NCCL and HCCL set up a connection for each pair of ranks at its first message and keep it: buffers on both devices.
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
    """A running count of the pairs of ranks that exchange messages in the steps given to `add`.

    Ranks are neighbours as `ring_order` places them. A framework with a communicator of its own per group (Transformer
    Engine) opens one connection per group for the same pair.

    Attributes:
        num_ranks, ranks_per_node: of the plan.
        new_pairs: for each step added, how many pairs of ranks talked in it for the first time.
    """

    num_ranks: int
    ranks_per_node: int
    new_pairs: list[int] = field(default_factory=list)
    _pairs: set[tuple[int, int]] = field(default_factory=set)
    _groups: set[RingGroup] = field(default_factory=set)

    def add(self, step: StepPlan) -> None:
        """Count one more step."""
        before = len(self._pairs)
        self.add_groups(step.ring_groups())
        self.new_pairs.append(len(self._pairs) - before)

    def add_groups(self, groups: Iterable[RingGroup]) -> None:
        """Count groups, as `StepPlan.ring_groups` gives them, of no step in particular."""
        for group in groups:
            if group not in self._groups:
                self._groups.add(group)
                self._pairs.update(ring_pairs(group.ranks, self.ranks_per_node, group.heads_degree))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """All pairs so far (lower rank first), ascending."""
        return sorted(self._pairs)

    @property
    def per_rank(self) -> IntArray:
        """[num_ranks] peers of each rank."""
        return np.bincount(np.array(list(self._pairs), dtype=np.int64).ravel(), minlength=self.num_ranks)

    @property
    def mean(self) -> float:
        return 2.0 * len(self._pairs) / self.num_ranks

    @property
    def most(self) -> int:
        """Peers of the rank that has most."""
        return int(self.per_rank.max())

    @property
    def most_bytes(self) -> int:
        """Device memory of the connections of the rank that has most peers."""
        return self.most * BYTES_PER_PEER

    def means(self) -> list[float]:
        """Return the mean peers of a rank after each step."""
        means: list[float] = (2.0 * np.cumsum(self.new_pairs) / self.num_ranks).tolist()
        return means

    def to_json(self) -> Mapping[str, Any]:
        """Return JSON values: after 1, 2, 4, ... steps and after all the mean, which shows whether peers still grow."""
        means = self.means()
        steps = sorted({min(1 << power, len(means)) for power in range(len(means).bit_length() + 1)} - {0})
        return {
            "peers_mean": self.mean,
            "peers_most": self.most,
            "peers_most_bytes": self.most_bytes,
            "peers_mean_after_steps": {str(step): means[step - 1] for step in steps},
        }
