"""What torchrun's command line has that `fcp launch --dry-run` and the files of launch targets do not show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fcp_cli.launching.commands import node_argv
from tests.launching.jobs import local_job


def test_nodes_that_wait_for_each_other_have_a_name_that_no_other_job_on_their_port_has() -> None:
    job = replace(local_job(), num_nodes=2, master_addr="10.0.0.1", join_timeout_seconds=30)
    job = replace(job, run_dir=Path("/shared/runs/a"), metadata=replace(job.metadata, plan_hash="f" * 64))
    for node in range(2):
        argv = node_argv(job, node_rank=node)
        assert argv[8:10] == ["--rdzv-conf=timeout=30", "--rdzv-id=a-ffffffffffff"]
    other = node_argv(replace(job, run_dir=Path("/shared/runs/b")))
    assert "--rdzv-id=b-ffffffffffff" in other
