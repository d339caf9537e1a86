"""A node that waits for others says so once, after a while, with the address, the time and the flag."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fcp_cli.launching.supervise import NodeMeeting
from tests.launching.jobs import local_job
from tests.patience import PATIENCE_SECONDS
from tests.ports import own_address, unused_port
from tests.training.small_runs import fcp_command, write_manifest, write_small_plan


@pytest.fixture
def listening_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture
def silent_port() -> int:
    return unused_port()


def said(folder: Path, port: int, *, node_rank: int, seconds: float = 60.0, **changes: object) -> list[str]:
    """What a node of two says when it looks once a second for so long."""
    job = local_job(
        run_dir=folder,
        processes_per_node=1,
        program=("train.py",),
        arguments=(),
        master_addr="127.0.0.1",
        master_port=port,
        **{"num_nodes": 2, "join_timeout_seconds": 300, "log_dir": folder / "logs", **changes},
    )
    lines: list[str] = []
    now = 0.0
    meeting = NodeMeeting(
        job=job,
        node_rank=node_rank,
        announce=lambda line: lines.append(f"{now:.0f} s: {line}"),
        clock=lambda: now,
    )
    while now < seconds:
        now += 1.0
        meeting.check()
    return lines


def test_a_node_0_that_nobody_started_is_named_once(tmp_path: Path, silent_port: int) -> None:
    assert said(tmp_path, silent_port, node_rank=1) == [
        f"20 s: waiting for node 0: nothing listens at 127.0.0.1:{silent_port} yet; run 'fcp launch' there; gives up "
        "after 300 s (--join-timeout)"
    ]


def test_node_0_says_that_others_are_missing(tmp_path: Path, listening_port: int) -> None:
    assert said(tmp_path, listening_port, node_rank=0) == [
        f"20 s: waiting for the other nodes to come to 127.0.0.1:{listening_port}; run 'fcp launch' on each; gives up "
        "after 300 s (--join-timeout)"
    ]


def test_nodes_that_met_in_time_say_nothing(tmp_path: Path, listening_port: int) -> None:
    rank_0 = tmp_path / "logs" / "id_x" / "attempt_0" / "0"
    rank_0.mkdir(parents=True)
    (rank_0 / "stdout.log").write_text("")
    assert said(tmp_path, listening_port, node_rank=0) == []
    assert said(tmp_path, listening_port, node_rank=1) == []


def test_nobody_is_waited_for_on_one_node_or_where_a_launcher_waits_by_itself(tmp_path: Path, silent_port: int) -> None:
    assert said(tmp_path, silent_port, node_rank=0, num_nodes=1) == []
    assert said(tmp_path, silent_port, node_rank=1, join_timeout_seconds=None) == []


def test_a_short_time_is_not_waited_out_in_silence(tmp_path: Path, silent_port: int) -> None:
    (line,) = said(tmp_path, silent_port, node_rank=1, join_timeout_seconds=30)
    assert line.startswith("10 s: waiting for node 0")
    assert "gives up after 30 s" in line


@pytest.mark.distributed
@pytest.mark.torch
def test_node_1_ends_with_the_steps_that_it_trained_and_sends_to_node_0_for_the_rest(tmp_path: Path) -> None:
    write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=2, num_ranks=2, ranks_per_node=1)
    where = ("--nodes", "2", "--master-addr", own_address(), "--master-port", str(unused_port()), "--run-dir", "run")
    what = ("launch", "--plan", "plan.parquet", "--model", "qwen3-tiny", "--device", "cpu")
    nodes = [
        subprocess.Popen(
            fcp_command(*what, *where, "--node-rank", str(node)), cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        for node in range(2)
    ]
    said = [node.communicate(timeout=PATIENCE_SECONDS)[1].splitlines() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert said[0][-1].startswith("done: steps 1 to 2, loss ")
    assert said[1][-1] == "done on node 1 of 2: 2 steps; loss, times and metrics are on node 0"
