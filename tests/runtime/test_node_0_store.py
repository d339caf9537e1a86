"""The ranks of a node wait for the store of node 0 as long as the nodes for each other."""

from __future__ import annotations

import socket
import time

import pytest

from fcp_cli.errors import RunError
from fcp_cli.runtime.launcher import await_store
from tests.patience import PATIENCE_SECONDS
from tests.ports import unused_port


def of_rank(port: int, seconds: str = "1", agent: str = "True") -> dict[str, str]:
    names = ("MASTER_ADDR", "MASTER_PORT", "FCP_JOIN_TIMEOUT", "TORCHELASTIC_USE_AGENT_STORE")
    return dict(zip(names, ("127.0.0.1", str(port), seconds, agent), strict=True))


def test_a_store_that_is_gone_is_named_after_the_time_to_join() -> None:
    port, began = unused_port(), time.monotonic()
    with pytest.raises(
        RunError, match=rf"^node 0 does not answer at 127.0.0.1:{port} any more, in 1 s \(--join-timeout"
    ):
        await_store(of_rank(port))
    assert 1 <= time.monotonic() - began < PATIENCE_SECONDS


def test_a_store_that_answers_is_not_waited_for() -> None:
    with socket.socket() as store:
        store.bind(("127.0.0.1", 0))
        store.listen(1)
        await_store(of_rank(store.getsockname()[1], seconds="100000"))


def test_ranks_that_host_the_store_themselves_or_have_no_limit_do_not_wait_here() -> None:
    await_store(of_rank(unused_port(), agent="False"))
    await_store(of_rank(unused_port(), seconds=""))
