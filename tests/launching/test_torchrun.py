"""Golden command lines."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from fcp_cli.launching.node_command import shell_command
from fcp_cli.launching.spec import TRAINER, LaunchSpec
from fcp_cli.launching.torchrun import torchrun_argv

SPEC = LaunchSpec(
    plan=Path("/data/plan.parquet"),
    run_dir=Path("/data/my run"),
    num_nodes=1,
    processes_per_node=4,
    program=TRAINER,
    arguments=("--steps", "10"),
    environment={"OMP_NUM_THREADS": "1"},
    python="/venv/bin/python",
)


def test_one_node_finds_its_own_port() -> None:
    assert torchrun_argv(SPEC) == [
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
    spec = replace(SPEC, num_nodes=2, master_addr="10.0.0.1", master_port=29501)
    assert torchrun_argv(spec, node_rank=1) == [
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
    spec = replace(SPEC, program=("my script.py",), arguments=("--name", "two words; rm -rf /"))
    assert torchrun_argv(spec)[-3:] == ["my script.py", "--name", "two words; rm -rf /"]


def test_logs_of_all_ranks_go_to_files_where_a_folder_is_given() -> None:
    argv = torchrun_argv(replace(SPEC, log_dir=Path("/data/logs")))
    assert argv[4:7] == ["--standalone", "--log-dir=/data/logs", "--redirects=3"]


def test_the_shell_command_sets_the_environment_and_survives_a_shell() -> None:
    words = shlex.split(shell_command(SPEC))
    assert words[:5] == [
        "env",
        "FCP_PLAN=/data/plan.parquet",
        "FCP_METRICS=/data/my run/metrics.jsonl",
        "FCP_RUN_DIR=/data/my run",
        "OMP_NUM_THREADS=1",
    ]
    assert words[5:] == torchrun_argv(SPEC)
