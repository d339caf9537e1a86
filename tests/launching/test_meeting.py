"""A node that waits for others says so once, after a while, with the address, the time and the flag."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fcp_cli.launching.supervise import NodeMeeting
from tests.launching.jobs import local_job
from tests.ports import unused_port


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
