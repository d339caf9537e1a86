"""What torchrun's command line has that `fcp launch --dry-run` and the files of launch targets do not show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fcp_cli.launching.commands import node_argv
from tests.launching.jobs import local_job


def test_two_jobs_of_one_plan_and_one_name_never_take_each_other_for_the_same() -> None:
    job = replace(local_job(), num_nodes=2, master_addr="10.0.0.1", join_timeout_seconds=30)
    here, elsewhere = (replace(job, run_dir=Path(folder) / "run") for folder in ("/shared/sweepA", "/shared/sweepB"))
    nodes = [node_argv(here, node_rank=node) for node in range(2)]
    names = [{word for word in argv if word.startswith("--rdzv-id=")} for argv in (*nodes, node_argv(elsewhere))]
    assert names[0] == names[1] != names[2]
    assert [f"--rdzv-conf=rank={node},timeout=30" in argv for node, argv in enumerate(nodes)] == [True, True]


def test_a_job_on_one_machine_meets_on_loopback() -> None:
    assert {"--rdzv-backend=fcp", "--rdzv-endpoint=127.0.0.1:0"} <= set(node_argv(local_job()))
