"""Cost of offloading activations to host memory, with copies overlapped by the layers' computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fcp_cli.cost.profile import CostProfile

PCIE_BYTES_PER_SECOND: Final = 25e9
"""Bandwidth of one direction of a PCIe 4.0 x16 link with page-locked memory; 5.0 has twice that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadCost:
    """Offload cost of a micro-batch on one rank.

    Attributes:
        moved_bytes: bytes copied in both directions.
        copy_seconds: copy seconds in both directions.
        visible_seconds: extra seconds of the micro-batch.
    """

    moved_bytes: float
    copy_seconds: float
    visible_seconds: float

    @property
    def hidden_seconds(self) -> float:
        """Copy seconds that overlap with computation."""
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

    In forward a layer's input is copied out while the layer computes. In backward the input of the layer below is
    prefetched on a separate stream. The last layer's input is copied out, too, but also stays on the device. Copies are
    free if a layer computes longer than its input is copied.

    Args:
        input_bytes: bytes of one layer's input: tokens of the rank x hidden size x bytes per element.
        layers: number of recomputed layers.
        forward_seconds: forward seconds of one layer.
        backward_seconds: backward seconds of one layer, including its recomputation.
        bytes_per_second: this rank's share of the link to the host, in one direction.
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
    """Return `offload_cost` of a micro-batch with layer times from a cost profile.

    The forward is a fourth of a recomputed layer's time, since backward repeats it and computes two products for each
    of its own. Ignoring attention is conservative: it makes layers longer and hides copies better.

    Args:
        profile: cost profile of all layers with recomputation.
        tokens: tokens of the rank in the micro-batch.
        layers: number of layers of the model.
        input_bytes_per_token: bytes per token of a layer's input.
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
