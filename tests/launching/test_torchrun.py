"""Golden command lines."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from fcp_cli.launching.job.commands import node_argv, shell_command
from tests.launching.jobs import local_job

JOB = local_job()


def test_one_node_finds_its_own_port() -> None:
    assert node_argv(JOB) == [
        "/venv/bin/python",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=4",
        "--standalone",
        "-m",
        "fcp_cli.training.train",
        "--steps",
        "10",
    ]


def test_each_of_several_nodes_has_its_number_and_the_common_address() -> None:
    job = replace(JOB, num_nodes=2, master_addr="10.0.0.1", master_port=29501)
    assert node_argv(job, node_rank=1) == [
        "/venv/bin/python",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=4",
        "--nnodes=2",
        "--node-rank=1",
        "--master-addr=10.0.0.1",
        "--master-port=29501",
        "-m",
        "fcp_cli.training.train",
        "--steps",
        "10",
    ]


def test_a_script_with_awkward_arguments_stays_in_single_words() -> None:
    job = replace(JOB, program=("my script.py",), arguments=("--name", "two words; rm -rf /"))
    assert node_argv(job)[-3:] == ["my script.py", "--name", "two words; rm -rf /"]


def test_logs_of_all_ranks_go_to_files_where_a_folder_is_given() -> None:
    argv = node_argv(replace(JOB, log_dir=Path("/data/logs")))
    assert argv[4:7] == ["--standalone", "--log-dir=/data/logs", "--redirects=3"]


def test_the_shell_command_sets_the_environment_and_survives_a_shell() -> None:
    words = shlex.split(shell_command(JOB))
    assert words[:5] == [
        "env",
        "FCP_PLAN=/data/plan.parquet",
        "FCP_METRICS=/data/my run/metrics.jsonl",
        "FCP_RUN_DIR=/data/my run",
        "OMP_NUM_THREADS=1",
    ]
    assert words[5:] == node_argv(JOB)
