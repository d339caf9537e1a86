"""Computes the time of a step outside its micro-batches from model and cluster descriptions.

Traffic between nodes shares `links_per_node` links per node, each as fast as a ring's. Gathered data enters a node once
per device of a rank; inside a node, each device receives all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fcp_cli.cost.profile import StepTerms
from fcp_cli.memory.state import State
from fcp_cli.models.cluster import ClusterSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCollectives:
    """Timing of sharded collectives.

    Attributes:
        shards: number of ranks per replica.
        copies: number of replicas (HSDP).
        ranks_per_node, devices_per_rank: placement of ranks on nodes.
        intra, node: bandwidth between devices in a node, and of all links of a node together.
    """

    shards: int
    copies: int
    ranks_per_node: int
    devices_per_rank: int
    intra: float
    node: float

    def gather_seconds(self, size: float) -> float:
        """Return the seconds of an all-gather (or reduce-scatter) of `size` bytes per device."""
        received = size * (self.shards - 1) / self.shards
        crosses = self.shards > self.ranks_per_node
        return max(received / self.intra, received * self.devices_per_rank / self.node if crosses else 0.0)

    def copies_seconds(self, size: float) -> float:
        """Return the seconds to all-reduce shards of `size` bytes over replicas on different nodes."""
        if self.copies == 1:
            return 0.0
        devices = min(self.shards, self.ranks_per_node) * self.devices_per_rank
        return 2.0 * size / self.shards * devices * (self.copies - 1) / self.copies / self.node


def analytic_step_terms(state: State, cluster: ClusterSpec, *, ranks: int) -> StepTerms:
    """Compute the wave floor, tail and update; all 0 if the cluster does not specify node links.

    Args:
        state: model state of a rank under the recipe.
        cluster: provides bandwidths, node links and memory bandwidth.
        ranks: number of ranks.
    """
    if cluster.links_per_node is None:
        return StepTerms()
    precision, recipe = state.precision, state.recipe
    devices = state.cut.devices
    shares = recipe.zero_stage > 0
    shards = state.shards if shares else ranks
    exchange = StepCollectives(
        shards=shards,
        copies=max(1, ranks // shards),
        ranks_per_node=max(1, cluster.devices_per_node // devices),
        devices_per_rank=devices,
        intra=cluster.intra_node_bytes_per_second,
        node=cluster.inter_node_bytes_per_second * cluster.links_per_node,
    )
    gradients = precision.gradient * state.trained
    summed = exchange.gather_seconds(gradients) + exchange.copies_seconds(gradients)
    gathered = exchange.gather_seconds(state.computed_weight * state.parameters)
    update = 0.0
    if cluster.memory_bytes_per_second is not None:
        numbers = 2 * (precision.moments + precision.master) + precision.gradient + precision.weight
        update = numbers * state.trained / (shards if shares else 1) / cluster.memory_bytes_per_second
    if recipe.zero_stage < 3:
        # Weights return the way gradients went; a replica's are part of the all-reduce.
        back = exchange.gather_seconds(state.computed_weight * state.trained if shares else gradients)
        return StepTerms(tail_seconds=summed + back, update_seconds=update)
    scatters = recipe.reduce == "wave"
    return StepTerms(
        # Forward and backward gather each layer's weights.
        wave_floor_seconds=2.0 * gathered + (summed if scatters else 0.0),
        tail_seconds=summed + gathered,
        update_seconds=update + (0.0 if scatters else summed),
        lockstep=state.spec.vision is not None,
    )
