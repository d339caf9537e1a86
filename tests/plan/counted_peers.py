"""Peers of ranks over planned steps, counted at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.rings import PeerCount
from fcp_cli.plan.step import StepPlan


def count_peers(steps: Iterable[StepPlan], *, num_ranks: int, ranks_per_node: int) -> PeerCount:
    count = PeerCount(num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    for step in steps:
        count.add(step)
    return count


def plan_peers(path: Path) -> PeerCount:
    reader = PlanReader(path)
    metadata = reader.metadata
    return count_peers(reader.steps(), num_ranks=metadata.num_ranks, ranks_per_node=metadata.ranks_per_node)
