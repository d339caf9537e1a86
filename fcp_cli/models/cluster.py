"""A cluster as figures, read from its YAML in `profiles/clusters` or found on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from fcp_cli.cost.kernel_names import KernelChoice, KernelName
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.machine.accelerators import Accelerators
from fcp_cli.machine.host import cpu_name, host_memory_bytes, usable_cores
from fcp_cli.models.descriptions import find_shipped, is_shipped, read_description
from fcp_cli.validation import NonEmptyText, NonNegative, Positive, RankCount, validated

EXAMPLE_CLUSTER: Final = "example-8x8"
"""The cluster that stands in where nothing says which."""

# Part of a device's name as its driver tells it -> the shipped cluster of such devices.
_CLUSTERS_OF_DEVICES: Final = {
    "GB200": "gb200-2x72",
    "B200": "b200-8x8",
    "H200": "h200-8x8",
    "H100": "h100-8x8",
    "H20": "h20-8x8",
    "A100-SXM4-40GB": "a100-40gb-8x8",
    "A100": "a100-8x8",
    "RTX PRO 6000": "rtx-pro-6000-1x8",
    "MI300X": "mi300x-8x8",
    "910B": "ascend910b-8x8",
    "910C": "ascend910c-4x16",
    "910_93": "ascend910c-4x16",
}
THIS_MACHINE: Final = "this-machine"
# h100-8 is one node of 8 devices of the shipped cluster h100, h100-16x8 sixteen such nodes.
_SIZED: Final = re.compile(r"(?P<like>.+)-(?:(?P<nodes>\d{1,6})x)?(?P<devices>\d{1,4})")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRate:
    """Speed of an attention kernel: a causal sequence of L tokens takes L^2 + token_pairs L, at a share of the peak.

    Attributes:
        forward, backward: share of the peak on long sequences.
        token_pairs: work per token beyond its pairs, in the units of L^2: partly filled tiles, loads and stores. It
            makes short sequences, and the chunks of rings, dearer than their squares.
    """

    forward: Positive
    backward: Positive
    token_pairs: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """Nodes of equal accelerators; figures are per device unless their name has another.

    Attributes:
        peak_flops: dense BF16 (or FP16) operations per second of the data sheet.
        linear_efficiency: share of the peak that matrices reach.
        attention: rates by kernel; profiles are computed for the first. Empty if `attention_efficiency` is given.
        attention_efficiency: share of the peak that any kernel reaches, in place of `attention`.
        intra_node_bytes_per_second, inter_node_bytes_per_second: point to point, one way, inside one ring.
        message_seconds: fixed cost of one message between neighbours of a ring: of one layer, in one direction.
        microbatch_seconds: fixed cost of one forward and backward, whatever the model; None: see the next.
        operation_seconds: the time of the host to issue one operation; `profiling.computed.host` counts those of a
            micro-batch.
        links_per_node: network links that the devices of a node share, each as fast as `inter_node_bytes_per_second`;
            None: unknown, and traffic over them is not priced.
        memory_bytes_per_second: the rate at which a device reads and writes its own memory; None: not known, not
            priced.
        sources: figure to where it was read; `assumed` where it was not measured.
    """

    name: NonEmptyText
    device: NonEmptyText
    nodes: RankCount
    devices_per_node: RankCount
    memory_bytes: Positive
    peak_flops: Positive
    linear_efficiency: Positive
    intra_node_bytes_per_second: Positive
    inter_node_bytes_per_second: Positive
    message_seconds: NonNegative = 0.0
    microbatch_seconds: NonNegative | None = None
    operation_seconds: NonNegative | None = None
    links_per_node: RankCount | None = None
    memory_bytes_per_second: Positive | None = None
    attention: Mapping[KernelName, AttentionRate] = field(default_factory=dict, hash=False)
    attention_efficiency: Positive | None = None
    aliases: tuple[NonEmptyText, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def attention_kernel(self) -> KernelName | None:
        """The attention kernel that computed profiles assume; None if `attention_efficiency` stands for any kernel."""
        return next(iter(self.attention), None)

    def running(self, kernel: KernelChoice) -> ClusterSpec:
        """Return the cluster with profiles computed for another kernel; `auto` changes nothing."""
        if kernel == "auto":
            return self
        if kernel not in self.attention:
            known = f"known there: {', '.join(self.attention)}" if self.attention else "its rate is of any kernel"
            raise UsageError(f"--attention-kernel {kernel}: {self.name} has no rate of it; {known}")
        # Only this one: in another order the rates would compare equal, and computed profiles are cached by cluster.
        return replace(self, attention={kernel: self.attention[kernel]})

    @property
    def attention_rate(self) -> AttentionRate:
        """The rate of `attention_kernel`, or of any kernel."""
        if self.attention_kernel is not None:
            return self.attention[self.attention_kernel]
        assert self.attention_efficiency is not None, "a cluster was read with one of both"
        return AttentionRate(forward=self.attention_efficiency, backward=self.attention_efficiency)

    @property
    def is_host(self) -> bool:
        """Return whether its devices are the cores of this machine, which share one memory."""
        return self.name == THIS_MACHINE


def load_cluster(name_or_path: str | Path) -> ClusterSpec:
    """Load a shipped cluster by name or alias, in another size by `NAME-NODESxDEVICES`, or a description by path.

    Raises:
        ProfileError: unknown name (the nearest are listed), unreadable file, missing or impossible figures.
    """
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml"}:
        return _read_cluster(path)
    name = str(name_or_path)
    sized = None if is_shipped(name, kind="cluster") else _SIZED.fullmatch(name)
    if sized is None or not is_shipped(sized["like"], kind="cluster"):
        return _read_cluster(find_shipped(name, kind="cluster"))
    like = _read_cluster(find_shipped(sized["like"], kind="cluster"))
    nodes, devices = int(sized["nodes"] or 1), int(sized["devices"])
    if not nodes or not devices:
        raise ProfileError(f"cluster {name!r} has no devices; give at least one node of one device")
    sources = {**like.sources, **dict.fromkeys(("nodes", "devices_per_node"), "the cluster's name")}
    name = f"{like.name.rsplit('-', 1)[0]}-{nodes}x{devices}"
    return replace(like, name=name, nodes=nodes, devices_per_node=devices, sources=sources)


def _read_cluster(path: Path) -> ClusterSpec:
    document = read_description(path, kind="cluster")
    if document.pop("detected", False):
        return this_machine()
    cluster = validated(document, ClusterSpec, where=str(path), error=ProfileError)
    if bool(cluster.attention) == (cluster.attention_efficiency is not None):
        raise ProfileError(f"{path}: give either attention, rates by kernel, or attention_efficiency")
    return cluster


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
