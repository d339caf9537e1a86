"""What the lines of a plan's summary say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fcp_cli.models.cluster import THIS_MACHINE
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.rings import PeerCount
from fcp_cli.plan.summary import PlanSummary
from fcp_cli.report.plan_tables import open_plan, peers_text, print_plan
from tests.report.runs import make_example_plan


def test_connections_take_memory_of_devices_and_none_where_ranks_are_cores(tmp_path: Path) -> None:
    make_example_plan(tmp_path / "plan.parquet")
    file = open_plan(tmp_path / "plan.parquet")
    summary = PlanSummary.of(file.metadata)
    for step in file.steps():
        summary.add(step)
    on_devices = _peers_line(file.metadata, summary)
    assert on_devices.endswith(" GB of its device")
    cluster = f"cluster: {THIS_MACHINE}"
    profile = "\n".join(
        cluster if line.startswith("cluster:") else line for line in file.metadata.cost_profile.splitlines()
    )
    on_hosts = _peers_line(replace(file.metadata, cost_profile=profile), summary)
    assert on_hosts == on_devices.rpartition(", about")[0]


def test_a_plan_without_rings_has_no_peers_instead_of_zero_gigabytes_of_them() -> None:
    assert peers_text(PeerCount(num_ranks=8, ranks_per_node=4), on_hosts=False) == "none"


def _peers_line(metadata: PlanMetadata, summary: PlanSummary) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        print_plan(console, metadata, summary)
    return next(line for line in capture.get().splitlines() if line.startswith("peers")).strip()
