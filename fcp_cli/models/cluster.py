"""A cluster as figures, read from its YAML in `profiles/clusters` or found on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from fcp_cli.errors import ProfileError
from fcp_cli.machine.accelerators import Accelerators
from fcp_cli.machine.host import cpu_name, host_memory_bytes, usable_cores
from fcp_cli.models.descriptions import find_shipped, read_description
from fcp_cli.validation import Count, NonEmptyText, NonNegative, Positive, validated

EXAMPLE_CLUSTER: Final = "example-8x8"
"""The cluster that stands in where nothing says which."""

# Part of a device's name as its driver tells it -> the shipped cluster of such devices.
_CLUSTERS_OF_DEVICES: Final = {
    "H200": "h200-8x8",
    "H100": "h100-8x8",
    "A100": "a100-8x8",
    "910B": "ascend910b-8x8",
    "910C": "ascend910c-4x16",
    "910_93": "ascend910c-4x16",
}
THIS_MACHINE: Final = "this-machine"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """Nodes of equal accelerators; figures are per device unless their name has another.

    Attributes:
        peak_flops: dense BF16 (or FP16) operations per second of the data sheet.
        linear_efficiency, attention_efficiency: share of the peak that matrices and attention reach.
        intra_node_bytes_per_second, inter_node_bytes_per_second: point to point, one way, inside one ring.
        message_seconds: fixed cost of one message between neighbours of a ring: of one layer, in one direction.
        microbatch_seconds: fixed cost of one forward and backward.
        links_per_node: network links that the devices of a node share, each as fast as `inter_node_bytes_per_second`;
            None: not known, and what passes them is not priced.
        memory_bytes_per_second: at which a device reads and writes its own memory; None: not known, not priced.
        sources: figure to where it was read; `assumed` where it was not measured.
    """

    name: NonEmptyText
    device: NonEmptyText
    nodes: Count
    devices_per_node: Count
    memory_bytes: Positive
    peak_flops: Positive
    linear_efficiency: Positive
    attention_efficiency: Positive
    intra_node_bytes_per_second: Positive
    inter_node_bytes_per_second: Positive
    message_seconds: NonNegative = 0.0
    microbatch_seconds: NonNegative = 0.0
    links_per_node: Count | None = None
    memory_bytes_per_second: Positive | None = None
    aliases: tuple[NonEmptyText, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def is_host(self) -> bool:
        """Return whether its devices are the cores of this machine, which share one memory."""
        return self.name == THIS_MACHINE


def load_cluster(name_or_path: str | Path) -> ClusterSpec:
    """Load a shipped cluster by name or alias, `this-machine`, or a description by path.

    Raises:
        ProfileError: unknown name (the nearest are listed), unreadable file, missing or impossible figures.
    """
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        path = find_shipped(str(name_or_path), kind="cluster")
    document = read_description(path, kind="cluster")
    if document.pop("detected", False):
        return this_machine()
    return validated(document, ClusterSpec, where=str(path), error=ProfileError)


def cluster_like(device_name: str) -> str:
    """Return the name of the shipped cluster of devices of that name, else the example's."""
    return known_cluster(device_name) or EXAMPLE_CLUSTER


def known_cluster(device_name: str) -> str | None:
    """Return the name of the shipped cluster of devices of that name; None where there is none."""
    known = (cluster for part, cluster in _CLUSTERS_OF_DEVICES.items() if part in device_name.upper())
    return next(known, None)


def cluster_of(found: Accelerators) -> ClusterSpec:
    """Describe the accelerators of this machine as one node of the shipped cluster that has such devices.

    Its figures are those of the cluster, but for the number of devices and their memory.
    """
    shipped = load_cluster(cluster_like(found.name))
    here = "found on this machine"
    return replace(
        shipped,
        nodes=1,
        devices_per_node=found.count,
        memory_bytes=found.memory_bytes or shipped.memory_bytes,
        sources={**shipped.sources, "nodes": here, "devices_per_node": here}
        | ({"memory_bytes": here} if found.memory_bytes else {}),
    )


def this_machine() -> ClusterSpec:
    """Describe this machine as a cluster of one node: cores as devices, round figures where one would have to measure.

    Never imports torch: accelerators are for `fcp profile` to find, where torch is at hand.
    """
    cores = usable_cores()
    assumed = "assumed for one CPU core; 'fcp profile' measures it"
    return ClusterSpec(
        name=THIS_MACHINE,
        device=cpu_name(),
        nodes=1,
        devices_per_node=cores,
        memory_bytes=host_memory_bytes() / cores,
        peak_flops=100e9,
        linear_efficiency=0.5,
        attention_efficiency=0.25,
        intra_node_bytes_per_second=2e9,
        inter_node_bytes_per_second=1e9,
        message_seconds=1e-4,
        microbatch_seconds=5e-3,
        sources={
            "devices_per_node": "cores this process may run on",
            "memory_bytes": "physical memory over the cores",
            "peak_flops": assumed,
            "linear_efficiency": assumed,
            "attention_efficiency": assumed,
            "intra_node_bytes_per_second": assumed,
            "inter_node_bytes_per_second": assumed,
            "message_seconds": assumed,
            "microbatch_seconds": assumed,
        },
    )
