"""Cluster descriptions, read from YAML in `profiles/clusters` or detected on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from fcp_cli.cost.profile import CostProfile, load_cost_profile
from fcp_cli.cost.recipe import KernelChoice, KernelName
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.models.model import find_shipped, is_shipped, load_model, read_description
from fcp_cli.util.files import shipped
from fcp_cli.util.machine import Accelerators, cpu_name, host_memory_bytes, usable_cores
from fcp_cli.util.validation import NonEmptyText, NonNegative, Positive, RankCount, validated

EXAMPLE_CLUSTER: Final = "example-8x8"
"""Default cluster if none is specified."""

# Part of a driver's device name -> shipped cluster with such devices.
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
# h100-8 is one node with 8 devices of the shipped cluster h100; h100-16x8 is 16 such nodes.
_SIZED: Final = re.compile(r"(?P<like>.+)-(?:(?P<nodes>\d{1,6})x)?(?P<devices>\d{1,4})")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRate:
    """Speed of an attention kernel: the work of a causal sequence of L tokens is L^2 + token_pairs L.

    Attributes:
        forward, backward: fraction of peak reached on long sequences.
        token_pairs: extra work per token (partial tiles, loads and stores), in units of token pairs. It makes short
            sequences and ring chunks cost more than their squares.
    """

    forward: Positive
    backward: Positive
    token_pairs: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """Nodes of equal accelerators; values are per device unless the name says otherwise.

    Attributes:
        peak_flops: dense BF16 (or FP16) FLOP/s from the data sheet.
        linear_efficiency: fraction of peak reached by wide matrix products.
        linear_width: a layer `width` wide reaches the share width / (width + linear_width) of that; None: all of it.
        attention: rates by kernel; computed profiles use the first. Empty if `attention_efficiency` is given.
        attention_efficiency: fraction of peak reached by any kernel, instead of `attention`.
        attention_token_pairs: extra work per token of that kernel, as in `AttentionRate`.
        intra_node_bytes_per_second, inter_node_bytes_per_second: unidirectional point-to-point bandwidth in a ring.
        message_seconds: fixed cost of a message between ring neighbours, per layer and direction.
        host_message_seconds: host time to issue such a message and what a hop adds to a layer; then hosts have a clock
            of their own. None: `message_seconds` contains it, and `operation_seconds` are added to the device's.
        microbatch_seconds: fixed cost of a forward and backward pass of any model; None: use `operation_seconds`.
        operation_seconds: host time to launch an operation; `profiling.computed.host` counts operations.
        links_per_node: network links shared by a node's devices, each with `inter_node_bytes_per_second`; None:
            unknown, so contention is not priced.
        memory_bytes_per_second: device memory bandwidth; None: unknown and not priced.
        sources: origin of each value; `assumed` if not measured.
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
    host_message_seconds: NonNegative | None = None
    microbatch_seconds: NonNegative | None = None
    operation_seconds: NonNegative | None = None
    links_per_node: RankCount | None = None
    memory_bytes_per_second: Positive | None = None
    linear_width: NonNegative | None = None
    attention: Mapping[KernelName, AttentionRate] = field(default_factory=dict, hash=False)
    attention_efficiency: Positive | None = None
    attention_token_pairs: NonNegative | None = None
    aliases: tuple[NonEmptyText, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    def matrix_rate(self, width: int) -> float:
        """Return a device's FLOP/s in matrix products of a layer `width` wide."""
        return self.peak_flops * self.linear_efficiency * width / (width + (self.linear_width or 0.0))

    @property
    def attention_kernel(self) -> KernelName | None:
        """Attention kernel assumed by computed profiles; None if `attention_efficiency` covers all kernels."""
        return next(iter(self.attention), None)

    def running(self, kernel: KernelChoice) -> ClusterSpec:
        """Return the cluster with another attention kernel for computed profiles; `auto` changes nothing."""
        if kernel == "auto":
            return self
        if kernel not in self.attention:
            known = f"known there: {', '.join(self.attention)}" if self.attention else "its rate covers all kernels"
            raise UsageError(f"--attention-kernel {kernel}: {self.name} has no rate for it; {known}")
        # Keep only this rate: reordered mappings compare equal, and computed profiles are cached by cluster.
        return replace(self, attention={kernel: self.attention[kernel]})

    @property
    def attention_rate(self) -> AttentionRate:
        """Rate of `attention_kernel`, or of all kernels."""
        if self.attention_kernel is not None:
            return self.attention[self.attention_kernel]
        assert self.attention_efficiency is not None, "a cluster was read with one of both"
        share = self.attention_efficiency
        return AttentionRate(forward=share, backward=share, token_pairs=self.attention_token_pairs or 0.0)

    @property
    def is_host(self) -> bool:
        """Whether its devices are this machine's CPU cores, which share memory."""
        return self.name == THIS_MACHINE


def load_cluster(name_or_path: str | Path) -> ClusterSpec:
    """Load a shipped cluster by name or alias, resized with `NAME-NODESxDEVICES`, or a description by path.

    Raises:
        ProfileError: the name is unknown (the message lists similar ones), or the file is unreadable or invalid.
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
    """Return the shipped cluster with such devices, else the example cluster."""
    return known_cluster(device_name) or EXAMPLE_CLUSTER


def known_cluster(device_name: str) -> str | None:
    """Return the shipped cluster with such devices, or None."""
    known = (cluster for part, cluster in _CLUSTERS_OF_DEVICES.items() if part in device_name.upper())
    return next(known, None)


def cluster_of(found: Accelerators) -> ClusterSpec:
    """Describe this machine's accelerators as one node of the shipped cluster with such devices.

    All values but the number of devices and their memory are the shipped cluster's.
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
    """Describe this machine as a one-node cluster of CPU cores, with rates measured on another machine's core.

    Never imports torch; `fcp profile`, which needs torch, finds accelerators. `benchmarks.cpu_ranks` measures the rates
    on every core at once: 31 to 37 GFLOP/s in matrices 128 wide and 44 to 73 in wide ones, 14 to 24 in attention on
    256 tokens and 24 to 34 on 1,024, and 12 GB/s in products of tensors larger than the cache.
    """
    cores = usable_cores()
    assumed = "assumed for one CPU core; 'fcp profile' measures it"
    measured = "of one core of an AMD EPYC, with all cores busy; 'fcp profile' measures yours"
    return ClusterSpec(
        name=THIS_MACHINE,
        device=cpu_name(),
        nodes=1,
        devices_per_node=cores,
        memory_bytes=host_memory_bytes() / cores,
        peak_flops=100e9,
        linear_efficiency=0.55,
        linear_width=90.0,
        attention_efficiency=0.33,
        attention_token_pairs=200.0,
        memory_bytes_per_second=15e9,
        intra_node_bytes_per_second=2e9,
        inter_node_bytes_per_second=1e9,
        message_seconds=1e-4,
        microbatch_seconds=5e-3,
        sources={
            "devices_per_node": "cores this process may run on",
            "memory_bytes": "physical memory over the cores",
            "peak_flops": assumed,
            "linear_efficiency": measured,
            "linear_width": measured,
            "attention_efficiency": measured,
            "attention_token_pairs": measured,
            "memory_bytes_per_second": measured,
            "intra_node_bytes_per_second": assumed,
            "inter_node_bytes_per_second": assumed,
            "message_seconds": assumed,
            "microbatch_seconds": assumed,
        },
    )


# Example cost profiles shipped with fcp, for each model that fits the example cluster.
#
# Each is made with: fcp profile --analytic --model MODEL --cluster example-8x8 -o profiles/cost/MODEL-
# example-8x8.yaml

DEFAULT_MODEL: Final = "qwen3-vl-8b"
"""Default model of plans and profiles for accelerators."""


def shipped_profile_path(model: str) -> Path:
    """Return the path of a shipped model's profile on the example cluster."""
    return shipped("profiles") / "cost" / f"{load_model(model).name}-{EXAMPLE_CLUSTER}.yaml"


def shipped_profile(model: str) -> CostProfile:
    """Load a shipped model's analytic profile on the example cluster."""
    return load_cost_profile(shipped_profile_path(model))
