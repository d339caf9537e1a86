"""Nodes of one job meet in a store that listens where they can reach it and nowhere else."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.registry import _register_out_of_tree_handlers

from fcp_cli.launching.rendezvous import BACKEND, NodeRendezvous
from fcp_cli.runtime.launcher import report_difference
from tests.patience import PATIENCE_SECONDS
from tests.ports import unused_port

pytestmark = pytest.mark.torch
LISTENING = "0A"


def listeners(port: int) -> set[str]:
    """Return the addresses, as the kernel writes them, on which this machine listens at a port."""
    rows = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]
    ]
    return {row[1].rpartition(":")[0] for row in rows if row[3] == LISTENING and row[1].endswith(f":{port:04X}")}


def node(
    number: int,
    port: int,
    *,
    job: str = "one",
    nodes: int = 2,
    seconds: float = PATIENCE_SECONDS,
    versions: dict[str, str] | None = None,
) -> NodeRendezvous:
    made = NodeRendezvous("127.0.0.1", port, node_rank=number, nodes=nodes, job=job, timeout_seconds=seconds)
    made.versions = versions or made.versions
    return made


def test_the_store_of_a_job_on_one_machine_listens_on_loopback_alone() -> None:
    found = node(0, 0, nodes=1).next_rendezvous()
    assert found.bootstrap_store_info is not None
    assert listeners(found.bootstrap_store_info.master_port) == {"0100007F"}
    assert (found.rank, found.world_size) == (0, 1)


def test_nodes_of_one_job_meet_in_the_store_of_node_0() -> None:
    port = unused_port()
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda number: node(number, port).next_rendezvous(), range(2))
    first.store.set("word", "heard")
    assert second.store.get("word") == b"heard"
    assert [one.bootstrap_store_info.master_port for one in (first, second) if one.bootstrap_store_info] == [port, port]


@pytest.mark.parametrize("name", ["fcp", "torch"])
def test_nodes_with_another_version_of_fcp_or_torch_are_refused_on_every_node(name: str) -> None:
    port, equal = unused_port(), {"fcp": "0.2.0", "torch": "2.13.0", "python": "3.11.2"}
    with ThreadPoolExecutor() as pool:
        nodes = [pool.submit(node(n, port, nodes=3, versions={**equal, name: found}).next_rendezvous)
                 for n, found in enumerate((equal[name], "0.1.0", equal[name]))]  # fmt: skip
        errors = [str(one.exception()) for one in nodes]
    assert errors == [f"node 1 has {name} 0.1.0, but node 0 {equal[name]}; install the same on all nodes"] * 3


def test_other_differences_are_told_by_rank_0_and_versions_of_all_nodes_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, equal = unused_port(), {"fcp": "0.2.0", "torch": "2.13.0"}
    (tmp_path / "versions.json").write_text('{"packages": {}}')
    monkeypatch.setenv("FCP_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("FCP_NODES_DIFFER", "")
    monkeypatch.setenv("RANK", "0")
    with ThreadPoolExecutor() as pool:
        own = ({**equal, "NCCL": "2.28.3"}, equal)
        list(pool.map(lambda n: node(n, port, versions=own[n]).next_rendezvous(), range(2)))
    assert json.loads((tmp_path / "versions.json").read_text()) == {"packages": {}, "nodes": [*own]}
    report_difference()
    assert capsys.readouterr().err == "fcp: warning: node 1 has NCCL not at all, but node 0 2.28.3\n"


def test_a_node_of_another_job_is_refused_and_counts_for_none() -> None:
    port = unused_port()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(node(0, port, seconds=5.0).next_rendezvous)
        with pytest.raises(RendezvousError, match=r"another job holds .* --master-port"):
            node(1, port, job="two").next_rendezvous()
        with pytest.raises(RendezvousTimeoutError, match="without 1;"):
            waiting.result()


def test_two_nodes_of_one_number_are_refused() -> None:
    port = unused_port()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(node(0, port, nodes=3, seconds=5.0).next_rendezvous)
        twins = [pool.submit(node(1, port, nodes=3, seconds=5.0).next_rendezvous) for _ in range(2)]
        errors = {type(one.exception()) for one in twins}
        assert errors == {RendezvousError, RendezvousTimeoutError}
        with pytest.raises(RendezvousTimeoutError, match="without 2;"):
            waiting.result()


def test_a_store_that_fcp_did_not_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcp_cli.launching.rendezvous._ANSWER_SECONDS", 1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RendezvousError, match="not node 0 of this job"):
        node(1, store.port).next_rendezvous()


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RendezvousConnectionError, match="in use by another process"):
            node(0, taken.getsockname()[1]).next_rendezvous()


def test_torchrun_finds_the_handler_by_its_entry_point() -> None:
    _register_out_of_tree_handlers()
    parameters = RendezvousParameters(BACKEND, "127.0.0.1:0", "one", 1, 1, None)
    assert rendezvous_handler_registry.create_handler(parameters).get_backend() == BACKEND
