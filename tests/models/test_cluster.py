from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from fcp_cli.errors import ProfileError
from fcp_cli.models.cluster import ClusterSpec, load_cluster
from fcp_cli.models.descriptions import shipped_names


def test_the_papers_clusters_are_shipped() -> None:
    first, second = load_cluster("dhp-paper"), load_cluster("fcp-paper")
    assert (first.nodes, first.devices_per_node, first.memory_bytes) == (8, 8, 64e9)
    assert first.inter_node_bytes_per_second <= 12.5e9  # 100 Gb/s
    assert (second.nodes, second.devices_per_node, second.memory_bytes) == (4, 16, 64e9)


@pytest.mark.parametrize("name", shipped_names("cluster"))
def test_every_figure_of_a_cluster_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    known = {f.name for f in fields(ClusterSpec) if getattr(cluster, f.name) is not None}
    figures = known - {"name", "device", "aliases", "sources"}
    assert figures - {"nodes"} <= set(cluster.sources) <= figures


def test_this_machine_is_one_node_of_its_cores() -> None:
    cluster = load_cluster("this-machine")
    assert cluster.nodes == 1
    assert cluster.devices_per_node >= 1
    assert cluster.memory_bytes > 1e8


def test_an_unknown_cluster_lists_the_nearest() -> None:
    with pytest.raises(ProfileError, match=r"unknown cluster 'h300'; nearest: .*h100"):
        load_cluster("h300")


def test_an_impossible_figure_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("format: fcp-cluster/1\nname: x\ndevice: y\nnodes: 1\ndevices_per_node: 8\nmemory_bytes: -1\n")
    with pytest.raises(ProfileError, match=r"memory_bytes is -1; it must be a positive number"):
        load_cluster(path)
