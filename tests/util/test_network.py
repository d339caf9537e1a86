"""What this machine sees of another one."""

from __future__ import annotations

import socket

from fcp_cli.util.network import way_problem


def test_a_machine_that_is_there_is_reached_whether_it_listens_yet_or_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert way_problem("127.0.0.1", port, seconds=30) == ""
    assert way_problem("127.0.0.1", port, seconds=30) == ""


def test_a_machine_that_is_not_there_is_told_with_the_reason() -> None:
    assert way_problem("nowhere.invalid", 29500, seconds=30) != ""
