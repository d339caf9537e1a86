"""What a cluster's figures are: the YAML in `profiles/clusters`, or the machine at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fcp_cli.machine.host import cpu_name, host_memory_bytes, usable_cores
from fcp_cli.models.descriptions import Figures, find_shipped, read_yaml_mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """Nodes of equal accelerators; figures per device unless they say otherwise.

    Attributes:
        peak_flops: dense BF16 (or FP16) operations per second of the data sheet.
        linear_efficiency, attention_efficiency: share of the peak that matrices and attention reach.
        intra_node_bytes_per_second, inter_node_bytes_per_second: point to point, one way, inside one ring.
        message_seconds: fixed cost of one message between neighbours of a ring: of one layer, in one direction.
        microbatch_seconds: fixed cost of one forward and backward.
        sources: figure to where it was read; `assumed` where nobody measured it.
    """

    name: str
    device: str
    nodes: int
    devices_per_node: int
    memory_bytes: float
    peak_flops: float
    linear_efficiency: float
    attention_efficiency: float
    intra_node_bytes_per_second: float
    inter_node_bytes_per_second: float
    message_seconds: float
    microbatch_seconds: float
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node


def load_cluster(name_or_path: str | Path) -> ClusterSpec:
    """A shipped cluster by name or alias, `this-machine`, or a description by path.

    Raises:
        ProfileError: unknown name (the nearest are listed), unreadable file, missing or impossible figures.
    """
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        path = find_shipped(str(name_or_path), kind="cluster")
    document = read_yaml_mapping(path, kind="cluster")
    if document.get("detected"):
        return this_machine()
    return _parse(document, where=str(path))


def _parse(document: dict[str, Any], *, where: str) -> ClusterSpec:
    figures = Figures(document, where=where)
    figures.reject_unknown({f.name for f in fields(ClusterSpec)} | {"format", "detected"})
    return ClusterSpec(
        name=figures.text("name"),
        device=figures.text("device"),
        nodes=figures.count("nodes"),
        devices_per_node=figures.count("devices_per_node"),
        memory_bytes=figures.number("memory_bytes"),
        peak_flops=figures.number("peak_flops"),
        linear_efficiency=figures.number("linear_efficiency"),
        attention_efficiency=figures.number("attention_efficiency"),
        intra_node_bytes_per_second=figures.number("intra_node_bytes_per_second"),
        inter_node_bytes_per_second=figures.number("inter_node_bytes_per_second"),
        message_seconds=figures.number("message_seconds", default=0.0, positive=False),
        microbatch_seconds=figures.number("microbatch_seconds", default=0.0, positive=False),
        aliases=tuple(str(alias) for alias in document.get("aliases") or ()),
        sources={str(key): str(value) for key, value in (document.get("sources") or {}).items()},
    )


def this_machine() -> ClusterSpec:
    """This machine as a cluster of one node: its cores as devices, round figures for what only a measurement tells.

    Never imports torch: accelerators are for `fcp profile` to find, where torch is at hand.
    """
    cores = usable_cores()
    assumed = "assumed for one CPU core; 'fcp profile' measures it"
    return ClusterSpec(
        name="this-machine",
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
