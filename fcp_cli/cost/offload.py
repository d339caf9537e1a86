"""Cost of offloading activations to the host's memory: copies that a layer's work hides, or does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fcp_cli.cost.profile import CostProfile

PCIE_BYTES_PER_SECOND: Final = 25e9
"""Bandwidth of one direction of a PCIe 4.0 x16 link with page-locked memory; 5.0 has twice that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadCost:
    """The copies of one micro-batch of one rank.

    Attributes:
        moved_bytes: the bytes moved in both directions.
        copy_seconds: the seconds of copies in both directions.
        visible_seconds: how much longer the micro-batch takes.
    """

    moved_bytes: float
    copy_seconds: float
    visible_seconds: float

    @property
    def hidden_seconds(self) -> float:
        """Return the seconds of copying that cost nothing, because layers compute meanwhile."""
        return self.copy_seconds - self.visible_seconds


def offload_cost(
    *,
    input_bytes: float,
    layers: int,
    forward_seconds: float,
    backward_seconds: float,
    bytes_per_second: float = PCIE_BYTES_PER_SECOND,
) -> OffloadCost:
    """Return the cost of offloading the inputs of a micro-batch's recomputed layers.

    In forward the input of a layer leaves while the layer computes, and in backward that of the layer below comes back,
    each by a stream of its own; that of the last layer leaves, too, but also stays. Offloading costs no time where a
    layer computes longer than its input is under way.

    Args:
        input_bytes: the size of one layer's input: tokens of the rank x width x bytes of a number.
        layers: recomputed ones.
        backward_seconds: the backward seconds of one layer, its recomputation included.
        bytes_per_second: one direction of the link between device and host, of this rank's share of it.
    """
    returning = max(layers - 1, 0)
    copy = input_bytes / bytes_per_second
    waits = layers * max(copy - forward_seconds, 0.0) + returning * max(copy - backward_seconds, 0.0)
    copies = layers + returning
    return OffloadCost(moved_bytes=copies * input_bytes, copy_seconds=copies * copy, visible_seconds=waits)


def profiled_offload_cost(
    profile: CostProfile,
    *,
    tokens: int,
    layers: int,
    input_bytes_per_token: float,
    bytes_per_second: float = PCIE_BYTES_PER_SECOND,
) -> OffloadCost:
    """Return `offload_cost` of a micro-batch, with the times of layers from a cost profile.

    Of a recomputed layer's time a fourth is its forward, since backward runs it again and computes two products for
    each of its own. Attention is ignored: it only makes layers longer, and copies better hidden.

    Args:
        profile: the profile whose `linear_seconds_per_token` is of all layers, forward and backward.
        tokens: the tokens of the rank in the micro-batch.
        layers: the layers of the model.
        input_bytes_per_token: the bytes of one token in a layer's input.
        bytes_per_second: see `offload_cost`.
    """
    layer_seconds = profile.coefficients.linear_seconds_per_token * tokens / layers
    return offload_cost(
        input_bytes=tokens * input_bytes_per_token,
        layers=layers,
        forward_seconds=layer_seconds / 4,
        backward_seconds=layer_seconds * 3 / 4,
        bytes_per_second=bytes_per_second,
    )
