from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.models.cluster import ClusterSpec, load_cluster
from fcp_cli.models.model import load_model, shipped_names
from fcp_cli.profiling.computed import analytic_profile


def test_the_papers_clusters_are_shipped() -> None:
    first, second = load_cluster("dhp-paper"), load_cluster("fcp-paper")
    assert (first.nodes, first.devices_per_node, first.memory_bytes) == (8, 8, 64e9)
    assert first.inter_node_bytes_per_second <= 12.5e9  # 100 Gb/s
    assert (second.nodes, second.devices_per_node, second.memory_bytes) == (4, 16, 64e9)


@pytest.mark.parametrize("name", shipped_names("cluster"))
def test_every_figure_of_a_cluster_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    known = {f.name for f in fields(ClusterSpec) if getattr(cluster, f.name) not in (None, {})}
    figures = known - {"name", "device", "aliases", "sources"} | {f"attention.{kernel}" for kernel in cluster.attention}
    assert figures - {"nodes"} <= set(cluster.sources) <= figures


def test_this_machine_is_one_node_of_its_cores() -> None:
    cluster = load_cluster("this-machine")
    assert cluster.nodes == 1
    assert cluster.devices_per_node >= 1
    assert cluster.memory_bytes > 1e8


@pytest.mark.parametrize(
    ("typed", "name", "nodes", "devices"),
    [
        ("h100-8", "h100-1x8", 1, 8),
        ("h100-16x8", "h100-16x8", 16, 8),
        ("h200-1x4", "h200-1x4", 1, 4),
        ("ascend910b-2x8", "ascend910b-2x8", 2, 8),
        ("rtx-pro-6000-4", "rtx-pro-6000-1x4", 1, 4),
        ("h100", "h100-8x8", 8, 8),
        ("a100-40", "a100-40gb-8x8", 8, 8),
        ("gb200", "gb200-2x72", 2, 72),
    ],
)
def test_the_size_of_a_cluster_is_read_from_its_name(typed: str, name: str, nodes: int, devices: int) -> None:
    cluster = load_cluster(typed)
    assert (cluster.name, cluster.nodes, cluster.devices_per_node) == (name, nodes, devices)
    assert load_cluster(name) == cluster


def test_a_cluster_is_priced_for_the_kernel_that_is_asked_for() -> None:
    h100 = load_cluster("h100")
    assert h100.running("auto") == h100 and h100.attention_kernel == "cudnn"
    assert h100.running("fa2").attention_rate == h100.attention["fa2"]
    with pytest.raises(
        UsageError, match=r"--attention-kernel fa4: h100-8x8 has no rate for it; known there: cudnn, fa3"
    ):
        h100.running("fa4")
    with pytest.raises(
        UsageError, match=r"--attention-kernel fa2: example-8x8 has no rate for it; its rate covers all"
    ):
        load_cluster("example").running("fa2")


def test_narrow_matrices_of_a_cpu_core_run_at_the_rate_that_was_measured_for_their_width() -> None:
    core = load_cluster("this-machine")
    assert core.matrix_rate(128) == pytest.approx(32e9, rel=0.02)
    assert core.matrix_rate(1024) == pytest.approx(50e9, rel=0.02)
    spec = load_model("qwen3-tiny")
    wide = replace(core, linear_width=None)
    narrow_seconds, wide_seconds = (
        analytic_profile(
            spec, cluster, recipe=Recipe(precision="fp32"), sync="iteration", ranks=2
        ).coefficients.linear_seconds_per_token
        for cluster in (core, wide)
    )
    matrices = 6 * spec.matrix_parameters * (1 / core.matrix_rate(128) - 1 / wide.matrix_rate(128))
    assert narrow_seconds - wide_seconds == pytest.approx(matrices)


def test_a_cluster_without_devices_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"cluster 'h100-0x8' has no devices"):
        load_cluster("h100-0x8")


@pytest.mark.parametrize("given", ["", "attention_efficiency: 0.5\nattention: {fa2: {forward: 0.5, backward: 0.4}}\n"])
def test_a_cluster_has_rates_by_kernel_or_one_efficiency(tmp_path: Path, given: str) -> None:
    path = tmp_path / "cluster.yaml"
    figures = "nodes: 1\ndevices_per_node: 8\nmemory_bytes: 1e9\npeak_flops: 1e12\nlinear_efficiency: 0.5\n"
    links = "intra_node_bytes_per_second: 1e9\ninter_node_bytes_per_second: 1e9\n"
    path.write_text(f"format: fcp-cluster/1\nname: x\ndevice: y\n{figures}{links}{given}")
    with pytest.raises(ProfileError, match=r"give either attention, rates by kernel, or attention_efficiency"):
        load_cluster(path)


def test_an_unknown_cluster_lists_the_nearest() -> None:
    with pytest.raises(ProfileError, match=r"unknown cluster 'h300'; nearest: .*h100"):
        load_cluster("h300")


def test_an_impossible_figure_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("format: fcp-cluster/1\nname: x\ndevice: y\nnodes: 1\ndevices_per_node: 8\nmemory_bytes: -1\n")
    with pytest.raises(ProfileError, match=r"memory_bytes is -1; it must be a positive number"):
        load_cluster(path)
