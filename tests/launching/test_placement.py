from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.launching.job import place, planned_nodes
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.util.machine import UNKNOWN_MACHINE, LocalDevices
from tests.launching.jobs import plan_metadata
from tests.messages import raises

PLAN = Path("plan.parquet")
LAPTOP = LocalDevices(device="cpu", num_devices=0, num_cores=2)
GPU_NODE = LocalDevices(device="cuda", num_devices=8, num_cores=64)


def metadata(num_ranks: int, cluster: str = "h100-8x8", **changed: Any) -> PlanMetadata:
    return plan_metadata(num_ranks=num_ranks, cost_profile=f"cluster: {cluster}", **changed)


def test_a_plan_that_fits_runs_here_even_if_it_was_made_for_two_nodes() -> None:
    placement = place(PLAN, metadata(4, ranks_per_node=2), LAPTOP, nodes=None, must_fit=True)
    assert placement == (1, 4)


def test_a_plan_too_large_for_the_cores_names_the_flags_that_spread_it() -> None:
    with raises(
        snapshot(
            "RunError: plan.parquet needs 64 processes on this machine, which holds 8 (no accelerator, 2 CPU cores (gloo)); run --nodes 8 --master-addr HOST --node-rank K on each of 8 nodes (--nodes 8 --dry-run prints their commands), or plan for fewer ranks with: fcp plan lengths.parquet --ranks 8 --ranks-per-node 8 --tokens-per-rank 4000 --sync iteration --global-batch-size 8 --no-shuffle --solver test -o plan-8-ranks.parquet"
        )
    ):
        place(PLAN, metadata(64), LAPTOP, nodes=None, must_fit=True)


def test_a_dry_run_of_a_large_plan_takes_the_nodes_that_it_was_made_for() -> None:
    wanted = (8, 8)
    assert place(PLAN, metadata(64), LAPTOP, nodes=None, must_fit=False) == wanted
    assert place(PLAN, metadata(64), UNKNOWN_MACHINE, nodes=None, must_fit=False) == wanted


def test_a_rank_of_two_devices_counts_twice() -> None:
    placement = place(PLAN, metadata(8, ranks_per_node=4, tensor_parallel=2), GPU_NODE, nodes=2, must_fit=True)
    assert placement == (2, 8)


@pytest.mark.parametrize(
    ("plan", "nodes"),
    [
        (metadata(8, ranks_per_node=4, tensor_parallel=2), 2),
        (metadata(8, ranks_per_node=4, tensor_parallel=2, pipeline_parallel=2), 4),
        (metadata(8, ranks_per_node=8, pipeline_parallel=8), 8),  # a stage fills a node
        (metadata(2, ranks_per_node=2, tensor_parallel=2, pipeline_parallel=2), 1),  # two stages share a node
        (metadata(2, ranks_per_node=2, tensor_parallel=2, pipeline_parallel=4), 2),
        (metadata(2, ranks_per_node=2, tensor_parallel=2, pipeline_parallel=2, cluster="mine"), 1),
        (metadata(2, ranks_per_node=2, tensor_parallel=2, pipeline_parallel=2, cluster="this-machine"), 1),
    ],
)
def test_a_plan_of_replicas_was_made_for_the_nodes_that_hold_all_their_devices(plan: PlanMetadata, nodes: int) -> None:
    assert planned_nodes(plan) == nodes


def test_devices_that_a_variable_hides_are_told_with_it() -> None:
    hidden = LocalDevices(device="npu", num_devices=2, num_cores=16, visible="ASCEND_RT_VISIBLE_DEVICES=0,1")
    with raises(
        snapshot(
            "RunError: plan.parquet needs 4 processes on this machine, which holds 2 (2 npu devices with ASCEND_RT_VISIBLE_DEVICES=0,1); train on the CPU with --device cpu, or plan for fewer ranks with: fcp plan lengths.parquet --ranks 2 --ranks-per-node 2 --tokens-per-rank 4000 --sync iteration --global-batch-size 8 --no-shuffle --solver test -o plan-2-ranks.parquet"
        )
    ):
        place(PLAN, metadata(4), hidden, nodes=None, must_fit=True)


def test_nodes_must_divide_the_processes() -> None:
    with raises(snapshot("UsageError: --nodes is 3, which does not divide the 8 processes of plan.parquet")):
        place(PLAN, metadata(8), GPU_NODE, nodes=3, must_fit=False)
