from __future__ import annotations

from pathlib import Path

import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import RunError
from fcp_cli.launching.job.nodes import check_ranks, place, planned_nodes
from fcp_cli.machine.devices import UNKNOWN_MACHINE, LocalDevices
from fcp_cli.plan.metadata.plan_metadata import ManifestReference, PlanMetadata
from tests.messages import raises

PLAN = Path("plan.parquet")
LAPTOP = LocalDevices(device="cpu", num_devices=0, num_cores=2)
GPU_NODE = LocalDevices(device="cuda", num_devices=8, num_cores=64)


def metadata(
    num_ranks: int,
    ranks_per_node: int = 8,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    cluster: str = "h100-8x8",
) -> PlanMetadata:
    return PlanMetadata(
        fcp_version="test",
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        sync="iteration",
        global_batch_size=8,
        tokens_per_rank=1024,
        seed=0,
        shuffle=False,
        solver="test",
        manifest=ManifestReference(name="lengths.parquet", rows=8, content_hash=""),
        cost_profile=f"cluster: {cluster}",
    )


def test_a_plan_that_fits_runs_here_even_if_it_was_made_for_two_nodes() -> None:
    placement = place(PLAN, metadata(4, ranks_per_node=2), LAPTOP, nodes=None, must_fit=True)
    assert placement == (1, 4)


def test_a_plan_too_large_for_the_cores_names_the_flags_that_spread_it() -> None:
    with pytest.raises(RunError) as error:
        place(PLAN, metadata(64), LAPTOP, nodes=None, must_fit=True)
    assert str(error.value) == snapshot(
        "plan.parquet needs 64 processes on this machine, which holds 8 (no accelerator, 2 CPU cores (gloo)); run --nodes 8 --master-addr HOST --node-rank K on each of 8 nodes (--nodes 8 --dry-run prints their commands), or plan for fewer ranks with: fcp plan lengths.parquet --ranks 8 --ranks-per-node 8 --tokens-per-rank 1024 --sync iteration --global-batch-size 8 --no-shuffle --solver test -o plan-8-ranks.parquet"
    )


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


def test_too_few_accelerators_suggests_the_cpu() -> None:
    single = LocalDevices(device="cuda", num_devices=1, num_cores=16)
    with pytest.raises(RunError) as error:
        place(PLAN, metadata(4), single, nodes=None, must_fit=True)
    assert str(error.value) == snapshot(
        "plan.parquet needs 4 processes on this machine, which holds 1 (1 cuda devices); train on the CPU with --device cpu, or plan for fewer ranks with: fcp plan lengths.parquet --ranks 1 --ranks-per-node 1 --tokens-per-rank 1024 --sync iteration --global-batch-size 8 --no-shuffle --solver test -o plan-1-ranks.parquet"
    )


def test_devices_that_a_variable_hides_are_told_with_it() -> None:
    hidden = LocalDevices(device="npu", num_devices=2, num_cores=16, visible="ASCEND_RT_VISIBLE_DEVICES=0,1")
    with raises(
        snapshot(
            "RunError: plan.parquet needs 4 processes on this machine, which holds 2 (2 npu devices with ASCEND_RT_VISIBLE_DEVICES=0,1); train on the CPU with --device cpu, or plan for fewer ranks with: fcp plan lengths.parquet --ranks 2 --ranks-per-node 2 --tokens-per-rank 1024 --sync iteration --global-batch-size 8 --no-shuffle --solver test -o plan-2-ranks.parquet"
        )
    ):
        place(PLAN, metadata(4), hidden, nodes=None, must_fit=True)


def test_nodes_must_divide_the_processes() -> None:
    with raises(snapshot("UsageError: --nodes is 3, which does not divide the 8 processes of plan.parquet")):
        place(PLAN, metadata(8), GPU_NODE, nodes=3, must_fit=False)


def test_another_number_of_ranks_names_both_and_the_plan_command() -> None:
    with pytest.raises(RunError) as error:
        check_ranks(PLAN, metadata(8), 4)
    assert str(error.value) == snapshot(
        "plan.parquet is for 8 ranks, but --ranks is 4; make a plan for 4 with: fcp plan lengths.parquet --ranks 4 --ranks-per-node 4 --tokens-per-rank 1024 --sync iteration --global-batch-size 8 --no-shuffle --solver test -o plan-4-ranks.parquet"
    )
